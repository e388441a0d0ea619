"""What is shown while text is tokenised: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.unit.data.helpers import run_build
from titanlite.data.text import Text
from titanlite.data.tokenise import Recipe


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(
    tmp_path: Path,
    text: Text,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    _, messages = run_build(tmp_path / "out", text, recipe)
    drawn = capsys.readouterr().err
    lines = messages[1:-1]
    if terminal:
        assert "tokenising" in drawn and "100%" in drawn and "tokens/s" in drawn
        assert lines == []
    else:
        assert drawn == ""
        assert len(lines) > 2
        share, *_ = lines[0].removeprefix(f"tokenising {text.name}: ").split(", ")
        assert 0 < int(share.rstrip("%")) < 100
        assert "tokens/s" in lines[0] and lines[0].endswith("s left")
