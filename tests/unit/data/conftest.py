"""One preparation of the embedded text for the whole session, and small corpora with a small tokenizer."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.unit.data.helpers import text_of
from titanlite.config.schema import DataConfig, TokenizerConfig
from titanlite.data import records
from titanlite.data.prepare import PreparedData, prepare
from titanlite.data.text import Text, embedded_text
from titanlite.data.tokenise import Recipe
from titanlite.data.train_tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """A cache that outlives the session, so that the embedded text is prepared once."""
    repository = Path(__file__).parents[3]
    return Path(os.environ.get("TITANLITE_TEST_CACHE", repository / "outputs" / "cache"))


@pytest.fixture(scope="session")
def embedded(cache_dir: Path) -> PreparedData:
    config = DataConfig(cache_dir=str(cache_dir))
    return prepare(config, TokenizerConfig(), 4096, 256, report=print, validation=True)


@pytest.fixture(scope="session")
def embedded_documents() -> list[str]:
    return [document.text for document in embedded_text()[0].documents()]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, embedded_documents: list[str]) -> Path:
    """A tokenizer of 512 pieces, trained as the embedded one is, from 40 files."""
    lines = [line for document in embedded_documents[:40] for line in document.split("\n") if line]
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(train_tokenizer(lines, 512))
    return path


@pytest.fixture
def text_folder(tmp_path: Path, embedded_documents: list[str]) -> Path:
    """Twelve .txt files at two depths, one of them empty."""
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    for i, document in enumerate([d for d in embedded_documents if 200 < len(d) < 4000][:11]):
        (folder / ("deep" if i % 2 else ".") / f"{i:02d}.txt").write_text(document, encoding="utf-8", newline="")
    (folder / "empty.txt").touch()
    return folder


# --- a small build ---

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat,",
    "über",
    "12",
    "dogs\n",
    "def",
    "self",
    "x\n\u2581",
    "(tree)",
    "🎄",
    "if",
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small corpora are many chunks, and worth other processes. Only where files are read, not in workers."""
    monkeypatch.setattr(records, "CHUNK_BYTES", 1500)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A .jsonl of 60 documents and a .txt."""
    rng = random.Random(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(60):
            file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randrange(80)))}) + "\n")
    (folder / "b.txt").write_text(" ".join(rng.choices(WORDS, k=300)))
    return folder


@pytest.fixture
def bad_corpus(corpus: Path) -> Path:
    """The corpus with 12 records that are none."""
    lines = (corpus / "a.jsonl").read_bytes().splitlines(keepends=True)
    for i in range(3, 27, 2):
        lines[i] = b"{}\n" if i % 4 == 1 else b'{"text": "\xff"}\n'
    (corpus / "a.jsonl").write_bytes(b"".join(lines))
    return corpus


@pytest.fixture
def text(corpus: Path, small_chunks: None) -> Text:
    return text_of(corpus / "a.jsonl", corpus / "b.txt")


@pytest.fixture
def recipe(small_model: Path) -> Recipe:
    return Recipe(small_model, bos_id=1, eos_id=2, validation_fraction=0.2, shard_tokens=1000)
