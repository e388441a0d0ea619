"""A run that trains in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE
from titanlite.config.load import dump
from titanlite.config.schema import Config


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("training") / "text")


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Path:
    """A file that trains in seconds, into tmp_path/out."""
    here = {
        "run": {"output_dir": str(tmp_path / "out")},
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": data_section(text),
        "training": {"local_batch_size": 12},
        "checkpoint": {"enable": True, "interval": 4},
        "metrics": {"enable_tensorboard": True},
    }
    path = tmp_path / "tiny.toml"
    path.write_text(dump(Config.model_validate(merge(BASE, here))))
    return path
