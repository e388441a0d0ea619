"""The tokenizer gives text back exactly, counts its bytes exactly, and refuses files that are none."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from titanlite.config.problems import InputError
from titanlite.data import tokenizer as tokenizer_module
from titanlite.data.prepare import PreparedData
from titanlite.data.tokenizer import EMBEDDED_VOCAB_SIZE, Tokenizer, load_tokenizer, train_tokenizer

HARD = [
    "", " ", "  ", "\n", "\n\n\n", " \n ", "\t\tx\t", "a\x0cb", "a\r\nb\rc", "a\0b\0", "\x1b[0m\x7f", "x   ", "   x",
    "▁", "▁▁▁", "a▁b", " ▁ ▁", "▁ a", "▁a\n▁", "\n▁", "▅", "⁇", " ⁇ ", "<s>a</s><unk><pad>", "<0x0A><0xE2>", "\ufffd",
    "\ufeffbom", "ﬁ Ⅵ ｱ é e\u0301", "😀👩‍👩‍👧 中文 עברית", "\u2028\u2029\x85\xa0\u200b\u3000", "\U0010ffff",
    "def f(x):\n    return x**2\n",
]  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(embedded: PreparedData) -> Tokenizer:
    return load_tokenizer(embedded.tokenizer_path)


@pytest.fixture(scope="session")
def corpus_ids(tokenizer: Tokenizer, embedded_documents: list[str]) -> list[np.ndarray]:
    return tokenizer.encode_batch(embedded_documents, num_threads=2)


def other_model(**options: Any) -> bytes:
    """A model of another make, trained on a few lines."""
    lines = ["the cat sat on the mat", "a dog and a cat", "def f(x): return x + 1"] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, hard_vocab_limit=False, **options
    )
    return model.getvalue()


def test_the_whole_corpus_comes_back(tokenizer: Tokenizer, embedded_documents: list[str], corpus_ids: list[np.ndarray]):
    assert all(tokenizer.decode(ids) == text for ids, text in zip(corpus_ids, embedded_documents, strict=True))


def test_bytes_of_ids_add_up_over_the_corpus(
    tokenizer: Tokenizer, embedded_documents: list[str], corpus_ids: list[np.ndarray]
):
    for ids, text in zip(corpus_ids, embedded_documents, strict=True):
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())


@pytest.mark.parametrize("text", HARD)
def test_hard_text_comes_back(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_random_text_comes_back(tokenizer: Tokenizer):
    generator = np.random.default_rng(0)
    alphabet = [*"▁▁ \n\t\0ab<>▅⁇\ufffd\r", "<s>", "self", "    "]
    texts = ["".join(generator.choice(alphabet, generator.integers(1, 40))) for _ in range(3000)]
    points = generator.integers(0, 0x110000, 20_000)
    texts += ["".join(chr(p) for p in part if not 0xD800 <= p < 0xE000) for part in np.split(points, 200)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_marks_are_there_and_never_come_from_text(tokenizer: Tokenizer, corpus_ids: list[np.ndarray]):
    assert tokenizer.vocab_size == EMBEDDED_VOCAB_SIZE
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.exact
    assert tokenizer.token_bytes[:3].tolist() == [0, 0, 0]
    assert min(ids.min() for ids in corpus_ids if len(ids)) > 2
    assert tokenizer.encode("<s></s><unk>").min() > 2


def test_the_newline_is_one_id_and_indentation_is_short(tokenizer: Tokenizer):
    assert len(tokenizer.encode("\n")) == 1
    assert len(tokenizer.encode("        ")) == 1


def test_a_long_document_gives_the_ids_of_the_whole(
    tokenizer: Tokenizer, embedded_documents: list[str], embedded: PreparedData, monkeypatch: pytest.MonkeyPatch
):
    text = max(embedded_documents, key=len)[:100_000]
    plain = sentencepiece.SentencePieceProcessor(model_proto=embedded.tokenizer_path.read_bytes())
    whole = np.array(plain.encode(text))
    monkeypatch.setattr(tokenizer_module, "_PART_CHARS", 10_000)
    monkeypatch.setattr(tokenizer_module, "_GROUP", 3)
    assert len(list(tokenizer._parts(text))) >= 10
    assert np.array_equal(tokenizer.encode(text), whole)
    line = "ab ▁ " * 10_000  # no newline to cut after
    assert tokenizer.decode(tokenizer.encode(line)) == line


def test_a_batch_gives_what_single_texts_give(tokenizer: Tokenizer):
    for threads in (1, 2):
        batch = tokenizer.encode_batch(HARD, num_threads=threads)
        assert all(np.array_equal(ids, tokenizer.encode(text)) for ids, text in zip(batch, HARD, strict=True))
    assert tokenizer.encode_batch([]) == []


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("a\ud800")


def test_training_is_deterministic_and_independent_of_threads(
    embedded_documents: list[str], small_model: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = [line for document in embedded_documents[:40] for line in document.split("\n") if line]
    assert train_tokenizer(lines, 512) == small_model.read_bytes()
    monkeypatch.setitem(tokenizer_module._TRAINING, "num_threads", 1)
    one = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer(lines, 512))
    two = sentencepiece.SentencePieceProcessor(model_proto=small_model.read_bytes())
    assert [one.id_to_piece(i) for i in range(512)] == [two.id_to_piece(i) for i in range(512)]
    assert [one.get_score(i) for i in range(512)] == [two.get_score(i) for i in range(512)]


def test_a_model_with_a_dummy_prefix_comes_back_too(monkeypatch: pytest.MonkeyPatch):
    """The shape of Llama 2's: a space before the text, byte fallback, no normalisation."""
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    tokenizer = Tokenizer(other_model(model_type="bpe", vocab_size=300, **options))
    assert tokenizer.exact
    monkeypatch.setattr(tokenizer_module, "_PART_CHARS", 5)
    for text in [*HARD, "the cat\n sat\non the mat\n" * 3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_model_that_normalises_says_that_it_is_not_exact(monkeypatch: pytest.MonkeyPatch):
    tokenizer = Tokenizer(other_model(model_type="unigram", vocab_size=60))
    assert not tokenizer.exact
    monkeypatch.setattr(tokenizer_module, "_PART_CHARS", 8)
    assert (
        tokenizer.decode(tokenizer.encode("the cat\nsat on\nthe mat")) == "the cat sat on the mat"
    )  # no word is glued


def test_a_missing_id_is_minus_one():
    tokenizer = Tokenizer(other_model(model_type="bpe", vocab_size=60, bos_id=-1, eos_id=-1))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (-1, -1)


def first_fields(model: bytes, n: int) -> bytes:
    """The model cut between two of its pieces."""
    at = 0
    for _ in range(n):
        at += 2 + model[at + 1]  # a tag, a size below 128, a piece
    return model[:at]


@pytest.mark.parametrize(
    "kind", ["empty", "text", "random", "zeros", "half", "byte short", "between pieces", "silent", "longer"]
)
def test_a_file_that_is_no_whole_model_is_refused(tmp_path: Path, small_model: Path, kind: str):
    model = small_model.read_bytes()
    contents = {
        "empty": b"",
        "text": b"hello world\n" * 50,
        "random": np.random.default_rng(0).bytes(4096),
        "zeros": bytes(1000),
        "half": model[: len(model) // 2],
        "byte short": model[:-1],
        "between pieces": first_fields(model, 300),
        "silent": first_fields(other_model(model_type="bpe", vocab_size=60), 40),
        "longer": model + b"\x0a",
    }
    path = tmp_path / "x.model"
    path.write_bytes(contents[kind])
    with pytest.raises(InputError, match=r"tokenizer.path: got .*x\.model.*; allowed: a sentencepiece .model file"):
        load_tokenizer(path)


def test_the_silent_cut_is_one_that_sentencepiece_takes():
    cut = first_fields(other_model(model_type="bpe", vocab_size=60), 40)
    assert sentencepiece.SentencePieceProcessor(model_proto=cut).vocab_size() == 40


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        load_tokenizer(tmp_path / "absent.model")
    with pytest.raises(InputError, match="directory"):
        load_tokenizer(tmp_path)
