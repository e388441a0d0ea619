"""How a worker hands its error to the launcher."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.problems import InputError, Problem
from titanlite.train import record


def test_an_error_is_recorded_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    seen: list[bool] = []
    dump = json.dump

    def watched(*args: Any, **more: Any) -> None:
        seen.append(path.exists())
        dump(*args, **more)

    monkeypatch.setattr(json, "dump", watched)
    try:
        raise InputError(Problem("", "key", "a", "b"))
    except InputError as error:
        record(error)
    message = json.loads(path.read_text())["message"]
    assert message["message"].startswith("InputError: key: got a")
    assert seen and not any(seen), "the file has its name only once it is written"
    assert [file.name for file in tmp_path.iterdir()] == ["error.json"]


def test_an_error_that_cannot_be_recorded_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def full_disk(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full_disk)
    record(RuntimeError("what went wrong"))
    assert "RuntimeError: what went wrong" in capsys.readouterr().err
