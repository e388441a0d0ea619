from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.config.load import Loaded, load
from titanlite.config.problems import InputError, Problem

MINIMAL = """
[model]
vocab_size = 4096
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 128
[training]
seq_len = 32
global_batch_size = 12
steps = 10
[lr_scheduler]
total_steps = 10
"""

Write = Callable[..., str]
Refused = Callable[..., list[Problem]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a TOML file into an empty working directory: the minimal run and the given text; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = "", name: str = "run.toml", minimal: bool = True) -> str:
        (tmp_path / name).write_text((MINIMAL if minimal else "") + text)
        return name

    return write


@pytest.fixture
def make(write: Write) -> Callable[..., Loaded]:
    """The minimal run with overrides: make("--training.steps=5", ...)."""
    return lambda *overrides: load(write(), overrides)


@pytest.fixture
def refused(write: Write) -> Refused:
    """The problems of the minimal run with a text added to it, and overrides."""

    def refused(text: str = "", overrides: tuple[str, ...] = (), **options: bool) -> list[Problem]:
        with pytest.raises(InputError) as caught:
            load(write(text, **options), overrides)
        return list(caught.value.problems)

    return refused
