"""Trained tokenizers lose nothing, are the same every time, and come from a sample of bounded size."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import sentencepiece

from tests.unit.data.hard_text import HARD
from titanlite.config.problems import InputError
from titanlite.data import train_tokenizer as training
from titanlite.data.records import Reading
from titanlite.data.text import EMBEDDED_VERSION, Text, embedded_text, text_at
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.train_tokenizer import train_embedded_tokenizer, train_from_text, train_tokenizer

ModelType = Literal["bpe", "unigram"]
EMBEDDED_SHA256 = "ade4b99abf36746047fe3302a8c19ac5c1fabf5d703739baf0f6fead57566330"  # with sentencepiece 0.2.3


@pytest.fixture
def corpus(tmp_path: Path, embedded_documents: list[str]) -> Text:
    """60 documents of a .jsonl file."""
    path = tmp_path / "corpus.jsonl"
    documents = [text for text in embedded_documents if text][:60]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return text_at(str(path), "input", Reading())


def text_of(folder: Path, contents: str) -> Text:
    folder.mkdir(exist_ok=True)
    (folder / "x.txt").write_text(contents, encoding="utf-8", newline="")
    return text_at(str(folder / "x.txt"), "input", Reading())


def quiet(message: str) -> None: ...


def test_training_is_deterministic_and_independent_of_threads(
    embedded_documents: list[str], small_model: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = [line for document in embedded_documents[:40] for line in document.split("\n") if line]
    assert train_tokenizer(lines, 512) == small_model.read_bytes()
    monkeypatch.setitem(training._TRAINING, "num_threads", 1)
    one = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer(lines, 512))
    two = sentencepiece.SentencePieceProcessor(model_proto=small_model.read_bytes())
    assert [one.id_to_piece(i) for i in range(512)] == [two.id_to_piece(i) for i in range(512)]
    assert [one.get_score(i) for i in range(512)] == [two.get_score(i) for i in range(512)]


def test_the_embedded_tokenizer_is_the_one_it_always_was(tmp_path: Path):
    if (embedded_text()[1], sentencepiece.__version__) != (EMBEDDED_VERSION, "0.2.3"):
        pytest.skip("the bytes are those of other versions")
    messages: list[str] = []
    path = train_embedded_tokenizer(tmp_path, messages.append)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == EMBEDDED_SHA256
    assert EMBEDDED_SHA256 in messages[-1]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_what_is_trained_loses_nothing_and_is_the_same_again(tmp_path: Path, corpus: Text, model_type: ModelType):
    out = tmp_path / "new" / "my.model"
    train_from_text(corpus, out, vocab_size=800, report=quiet, model_type=model_type)
    tokenizer = load_tokenizer(out)
    assert tokenizer.exact and tokenizer.vocab_size == 800
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    ids = tokenizer.encode_batch(HARD)
    assert [tokenizer.decode(one) for one in ids] == HARD
    assert [tokenizer.token_bytes[one].sum() for one in ids] == [len(text.encode()) for text in HARD]
    assert len(tokenizer.encode("\n")) == 1
    messages: list[str] = []
    train_from_text(corpus, out, vocab_size=800, report=messages.append, model_type=model_type)
    assert any("is there already" in message for message in messages)
    assert [path.name for path in out.parent.iterdir()] == ["my.model"]


def test_another_file_is_not_overwritten(tmp_path: Path, corpus: Text):
    out = tmp_path / "my.model"
    out.write_text("precious")
    with pytest.raises(InputError, match=r"my.model: got a file that is there already and is another one"):
        train_from_text(corpus, out, vocab_size=400, report=quiet)
    assert out.read_text() == "precious"
    with pytest.raises(InputError, match="got a folder"):
        train_from_text(corpus, tmp_path, vocab_size=400, report=quiet)
    with pytest.raises(InputError, match="allowed: a file that can be written"):
        train_from_text(corpus, out / "x.model", vocab_size=400, report=quiet)


@pytest.mark.parametrize(
    ("contents", "vocab_size", "said"),
    [
        ("the cat sat on the mat\n" * 9, 260, r"--vocab-size: got 260; allowed: more than 260"),
        (
            "the cat sat on the mat\n" * 9,
            264,
            r"--vocab-size: got 264; allowed: more than 2\d\d: the marks, the bytes and",
        ),
        ("the cat sat on the mat\n" * 9, 9000, r"--vocab-size: got 9000; allowed: at most 2\d\d, for so many pieces"),
        ("", 400, "got no text"),
        ("\n\n\n", 400, "got no text|cannot learn from|at most"),
        (" \n", 400, "got no text|cannot learn from|at most"),
    ],
)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_text_and_vocabulary_that_do_not_go_together(
    tmp_path: Path, contents: str, vocab_size: int, said: str, model_type: ModelType
):
    text = text_of(tmp_path / "text", contents)
    with pytest.raises(InputError, match=said):
        train_from_text(text, tmp_path / "my.model", vocab_size=vocab_size, report=quiet, model_type=model_type)
    assert not (tmp_path / "my.model").exists()


def test_the_most_that_is_said_can_be_had(tmp_path: Path):
    text = text_of(tmp_path / "text", "the cat sat on the mat\n" * 9)
    with pytest.raises(InputError) as caught:
        train_from_text(text, tmp_path / "my.model", vocab_size=9000, report=quiet)
    most = int(caught.value.problems[0].allowed.split(",")[0].removeprefix("at most "))
    train_from_text(text, tmp_path / "my.model", vocab_size=most, report=quiet)
    assert load_tokenizer(tmp_path / "my.model").vocab_size == most


def test_hard_text_to_learn_from(tmp_path: Path):
    """Control characters, the space mark, a line of a megabyte without a space."""
    contents = "\0\x01\x7f\r\n▁ déjà\ufeff\n" * 50 + "x" * 1_300_000 + "\n" + "中文" * 40_000
    out = train_from_text(text_of(tmp_path / "text", contents), tmp_path / "my.model", vocab_size=275, report=quiet)
    assert load_tokenizer(out).decode(load_tokenizer(out).encode(contents)) == contents


def test_a_line_is_never_too_long(tmp_path: Path):
    """sentencepiece leaves out what is longer than its limit, and there would be nothing left."""
    text = text_of(tmp_path / "text", "the cat and " * 100_000)
    train_from_text(text, tmp_path / "my.model", vocab_size=275, report=quiet)


def test_a_record_that_cannot_be_read(tmp_path: Path, corpus: Text):
    path = tmp_path / "bad.jsonl"
    assert corpus.files[0].path
    path.write_text(corpus.files[0].path.read_text() + "{\n")
    text = text_at(str(path), "input", Reading())
    with pytest.raises(InputError, match=r"bad\.jsonl:61"):
        train_from_text(text, tmp_path / "my.model", vocab_size=400, report=quiet)
    messages: list[str] = []
    train_from_text(text, tmp_path / "my.model", vocab_size=400, report=messages.append, on_error="skip")
    assert any("1 records" in message for message in messages)


# --- the sample ---


def pieces_of(text: Text, sample_bytes: int, seed: int = 0) -> list[str]:
    return [piece.decode() for piece in training._sample(text, sample_bytes, seed, "stop", quiet)]


def test_a_text_that_fits_is_taken_whole(corpus: Text):
    assert "".join(pieces_of(corpus, 1 << 30)) == "".join(document.text for document in corpus.documents())


@pytest.mark.parametrize("oversampling", [1, 8, 1000])  # many chunks are left out, some, none
def test_a_sample_is_bounded_spread_in_order_and_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oversampling: int
):
    monkeypatch.setattr(training, "_PIECE_CHARS", 1000)
    monkeypatch.setattr(training, "_OVERSAMPLING", oversampling)
    lines = [f"{i:07d} {'x' * 91}\n" for i in range(200_000)]  # 20 MB
    text = text_of(tmp_path / "text", "".join(lines))
    pieces = pieces_of(text, 1 << 20)
    assert (1 << 20) - (1 << 18 if oversampling == 1 else 1000) < sum(map(len, pieces)) <= 1 << 20
    numbers = [int(piece[:7]) for piece in pieces]
    assert numbers == sorted(numbers)
    tenths = [sum(i * 20_000 <= n < (i + 1) * 20_000 for n in numbers) for i in range(10)]
    if oversampling > 1:
        assert min(tenths) > 25  # of 105
    assert pieces_of(text, 1 << 20) == pieces
    assert pieces_of(text, 1 << 20, seed=1) != pieces


def test_a_smaller_sample_is_within_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So a sample does not depend on the order of what it leaves out."""
    monkeypatch.setattr(training, "_PIECE_CHARS", 1000)
    monkeypatch.setattr(training, "_OVERSAMPLING", 1000)
    text = text_of(tmp_path / "text", "".join(f"{i:07d} {'x' * 91}\n" for i in range(20_000)))
    small, large = (set(pieces_of(text, size)) for size in (100_000, 300_000))
    assert small < large and len(small) > 90


def test_what_is_kept_has_the_smallest_hashes(tmp_path: Path):
    generator = np.random.default_rng(0)
    documents = [f"{i} " + "x" * int(generator.integers(1, 3000)) for i in range(400)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    text = text_at(str(path), "input", Reading())
    assert len(list(text.chunks())) == 1
    for sample_bytes in range(50_000, 150_000, 10_000):
        kept = set(pieces_of(text, sample_bytes))
        hashes = {text: training._hash(0, 0, i) for i, text in enumerate(documents)}
        assert max(hashes[text] for text in kept) < min(hashes[text] for text in documents if text not in kept)
        assert sample_bytes - 3010 < sum(map(len, kept)) <= sample_bytes


def test_a_sample_is_said_to_be_one(tmp_path: Path, corpus: Text):
    messages: list[str] = []
    train_from_text(corpus, tmp_path / "a.model", vocab_size=400, report=messages.append, sample_bytes=200_000)
    assert any("a sample of 0.2 MB, spread over all of it" in message for message in messages)
