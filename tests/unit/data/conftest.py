"""One preparation of the embedded text for the whole session, and small corpora with a small tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titanlite.config.schema import DataConfig, TokenizerConfig
from titanlite.data.prepare import PreparedData, prepare
from titanlite.data.text import embedded_text
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
