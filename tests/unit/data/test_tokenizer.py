"""The tokenizer gives text back exactly, counts its bytes exactly, and refuses files that are none."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from tests.unit.data.hard_text import HARD
from titanlite.config.problems import InputError
from titanlite.config.schema import EMBEDDED_VOCAB_SIZE
from titanlite.data import sentencepiece_model
from titanlite.data import tokenizer as tokenizer_module
from titanlite.data.prepare import PreparedData
from titanlite.data.sentencepiece_model import SentencePieceTokenizer
from titanlite.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(embedded: PreparedData) -> Tokenizer:
    return embedded.tokenizer


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
    plain = sentencepiece.SentencePieceProcessor(model_proto=embedded.tokenizer.path.read_bytes())
    whole = np.array(plain.encode(text))
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 10_000)
    monkeypatch.setattr(sentencepiece_model, "_GROUP", 3)
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


def test_a_model_with_a_dummy_prefix_comes_back_too(monkeypatch: pytest.MonkeyPatch):
    """The shape of Llama 2's: a space before the text, byte fallback, no normalisation."""
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    tokenizer = SentencePieceTokenizer(other_model(model_type="bpe", vocab_size=300, **options))
    assert tokenizer.exact
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 5)
    for text in [*HARD, "the cat\n sat\non the mat\n" * 3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_model_that_normalises_says_that_it_is_not_exact(monkeypatch: pytest.MonkeyPatch):
    tokenizer = SentencePieceTokenizer(other_model(model_type="unigram", vocab_size=60))
    assert not tokenizer.exact
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 8)
    assert (
        tokenizer.decode(tokenizer.encode("the cat\nsat on\nthe mat")) == "the cat sat on the mat"
    )  # no word is glued


def test_a_missing_id_is_minus_one():
    tokenizer = SentencePieceTokenizer(other_model(model_type="bpe", vocab_size=60, bos_id=-1, eos_id=-1))
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


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        load_tokenizer(tmp_path / "absent.model")
    with pytest.raises(InputError, match="File name too long"):
        load_tokenizer("x" * 5000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"a folder without tokenizer.json or tokenizer.model \(it has config.json\)"):
        load_tokenizer(tmp_path)


def test_a_folder_with_a_model_and_any_name_of_one_are_taken(tmp_path: Path, small_model: Path):
    (tmp_path / "tokenizer.model").write_bytes(small_model.read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.kind, tokenizer.path) == ("sentencepiece", tmp_path / "tokenizer.model")
    assert tokenizer.fingerprint == hashlib.sha256(small_model.read_bytes()).hexdigest()
    (tmp_path / "tokenizer.model.v3").write_bytes(small_model.read_bytes())
    assert load_tokenizer(tmp_path / "tokenizer.model.v3").vocab_size == 512


TIKTOKEN = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


@pytest.mark.parametrize(
    ("name", "contents", "said", "fix"),
    [
        ("tokenizer.model", TIKTOKEN, "a tiktoken vocabulary", "tokenizer.json of the model's Hugging Face repository"),
        ("small.vocab", "<unk>\t0\n<s>\t0\n▁a\t-1.5\n", "a sentencepiece .vocab file", "small.model'"),
        ("other.vocab", "<unk>\t0\n▁a\t-1.5e-05\n", "a sentencepiece .vocab file", "the .model file that was made"),
        (
            "tokenizer.model",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 499723\n",
            "a pointer that git-lfs left",
            "git lfs pull",
        ),
    ],
)
def test_what_is_often_mistaken_for_a_model_is_named(
    tmp_path: Path, small_model: Path, name: str, contents: str, said: str, fix: str
):
    (tmp_path / "small.model").write_bytes(small_model.read_bytes())
    (tmp_path / name).write_text(contents)
    with pytest.raises(InputError) as caught:
        load_tokenizer(tmp_path / name, "some.key")
    (problem,) = caught.value.problems
    assert problem.key == "some.key" and said in problem.got and fix in problem.fix


# --- marks ---


def test_marks_can_be_chosen(tmp_path: Path):
    path = tmp_path / "x.model"
    path.write_bytes(other_model(model_type="bpe", vocab_size=70, control_symbols=["<doc>", "</doc>"]))
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_pieces == ("<s>", "</s>", "<doc>", "</doc>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 0)
    chosen = load_tokenizer(path, bos_token="<doc>", eos_token="</doc>")
    assert (chosen.bos_id, chosen.eos_id) == (3, 4)
    assert chosen.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        ("</dok>", r"tokenizer.eos_token: got '</dok>', which .*x.model' does not have; .*'<doc>'(.|\n)*mean '</doc>'"),
        ("zzzz", r"does not have(.|\n)*choose one of them"),
        ("<mask>", r"'<mask>', which .* also writes where a text says so(.|\n)*add_eos=false"),
        ("t", "also writes where a text says so"),
    ],
)
def test_a_mark_that_is_none_is_refused(tmp_path: Path, piece: str, said: str):
    path = tmp_path / "x.model"
    symbols = {"control_symbols": ["<doc>", "</doc>"], "user_defined_symbols": ["<mask>"]}
    path.write_bytes(other_model(model_type="bpe", vocab_size=70, **symbols))
    with pytest.raises(InputError, match=said):
        load_tokenizer(path, eos_token=piece)


# --- later parts ---


def test_a_text_that_goes_on_gets_no_space_before_it(tokenizer: Tokenizer):
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    with_prefix = SentencePieceTokenizer(other_model(model_type="bpe", vocab_size=300, **options))
    text = "the cat\nsat on ▁ the mat\n"
    for one in (tokenizer, with_prefix):
        for cut in (text.index("\n") + 1, text.index("\u2581"), text.index("\u2581") + 1):
            parts = one.encode_parts([text[:cut], text[cut:]], [True, False])
            assert np.array_equal(np.concatenate(parts), one.encode(text))
    assert len(with_prefix.encode_parts([""], [False])[0]) == 0


# --- models that others released ---


def test_mistrals_models():
    found = importlib.util.find_spec("mistral_common")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mistral_common is not installed")
    folder = Path(next(iter(found.submodule_search_locations))) / "data"
    models = sorted(path for path in folder.iterdir() if ".model." in path.name)
    assert models
    for path in models:
        tokenizer = load_tokenizer(path)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 0)
        assert tokenizer.vocab_size == (32000 if path.name.endswith(".v1") else 32768)
        assert tokenizer.exact and tokenizer.special_pieces[:2] == ("<s>", "</s>")
        ids = tokenizer.encode_batch(HARD)
        assert [tokenizer.decode(one) for one in ids] == HARD
        specials = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes[i] == 0]
        assert not np.isin(np.concatenate(tokenizer.encode_batch([*tokenizer.special_pieces])), specials).any()
    for path in folder.glob("tekken*.json"):
        with pytest.raises(InputError, match=r"a tekken\.json"):
            load_tokenizer(path)
