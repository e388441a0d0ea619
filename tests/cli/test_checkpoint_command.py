"""`titanlite checkpoint list|verify|show`: what it says of good and damaged checkpoints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch

from tests.cli.processes import ROOT, environment
from tests.unit.checkpoint.conftest import OneRank
from titanlite import cli
from titanlite.checkpoint import storage
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.config.schema import CheckpointConfig

PARTS: dict[str, Any] = {
    "train_state": {"step": 20, "samples": 480},
    "layout": {"world_size": 4, "dp_replicate": 1, "dp_shard": 2, "tp": 2, "pp": 1, "cp": 1, "ep": 1},
    "config": {"run": {"name": "a"}, "training": {"steps": 30}},
}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Steps 10 and 20, a save of step 30 that never ended, and step 15 of another history."""
    ranks: Any = OneRank()
    manager = CheckpointManager(CheckpointConfig(keep_latest_k=0), tmp_path / "run/checkpoints", ranks)
    tensors = {"model.a": torch.zeros(3, 5), "optimizer.a.exp_avg": torch.zeros(3, 5, dtype=torch.bfloat16)}
    for step in (10, 15, 20):
        manager.save(step, tensors, PARTS, wait=True)
    storage.set_aside(tmp_path / "run/checkpoints/step-00000015", storage.SUPERSEDED)
    storage.prepare_folder(tmp_path / "run/checkpoints", 30)
    rows = [{"step": 10, "loss": 3.5}, {"step": 20, "loss": 2.25}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "lo'
    (tmp_path / "run/metrics.jsonl").write_text(text)
    return tmp_path / "run"


def step(run_folder: Path, number: int) -> Path:
    return run_folder / f"checkpoints/step-{number:08d}"


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.err = ""

    def __call__(self, *words: str | Path, code: int = 0) -> str:
        """What it prints, and in self.err what it says."""
        assert cli.main(["checkpoint", *map(str, words)]) == code
        out, self.err = self.capsys.readouterr()
        return out

    def json(self, *words: str | Path, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_list(run_folder: Path, command: Command) -> None:
    table = command("list", run_folder)
    head, ten, fifteen, twenty, thirty = [line.split() for line in table.splitlines()]
    assert head == ["step", "date", "size", "layout", "loss", "state"]
    assert (ten[0], ten[-2:]) == ("10", ["3.50000", "committed"])
    assert " ".join(ten[5:9]) == "dp_shard 2, tp 2"
    assert fifteen[0] == "15" and " ".join(fifteen[-5:]) == "committed, set aside as superseded-1"
    assert (twenty[0], twenty[-2:]) == ("20", ["2.25000", "committed"])
    assert (thirty[0], thirty[-1]) == ("30", "uncommitted")
    assert command("list", run_folder / "checkpoints") == table
    assert command("list", step(run_folder, 20)).splitlines()[1].split() == twenty

    found = command.json("list", run_folder)
    assert [(e["step"], e["state"], e["aside"], e["loss"]) for e in found["checkpoints"]] == [
        (10, "committed", "", 3.5),
        (15, "committed", "superseded-1", None),
        (20, "committed", "", 2.25),
        (30, "uncommitted", "", None),
    ]
    assert found["checkpoints"][0]["layout"] == PARTS["layout"] and found["checkpoints"][0]["bytes"] > 100


def test_list_says_what_is_damaged_without_reading_it(run_folder: Path, command: Command) -> None:
    os.truncate(step(run_folder, 10) / "__0_0.distcp", 7)
    (step(run_folder, 20) / "manifest.json").write_text("{")
    lines = command("list", run_folder, code=1).splitlines()
    assert command.json("list", run_folder, code=1)["checkpoints"][0]["state"] == "damaged"
    assert lines[1].endswith("damaged: __0_0.distcp: got 7 bytes".replace("got ", ""))
    assert "damaged: manifest.json: broken JSON" in lines[3]


def test_verify(run_folder: Path, command: Command) -> None:
    (step(run_folder, 20) / "notes.txt").write_text("mine")
    said = command("verify", run_folder)
    assert [line.split(": ")[1].split()[0] for line in said.splitlines() if "step-" in line] == ["good", "good"]
    assert "never read: notes.txt" in said
    found = command.json("verify", run_folder)
    assert found["ok"] and [c["foreign"] for c in found["checkpoints"]] == [[], ["notes.txt"]]

    for name in (".metadata", "__0_0.distcp"):
        data = bytearray((step(run_folder, 20) / name).read_bytes())
        data[len(data) // 2] ^= 16
        (step(run_folder, 20) / name).write_bytes(data)
    said = command("verify", run_folder, code=1)
    assert f"{step(run_folder, 10)}: good" in said and f"{step(run_folder, 20)}: DAMAGED" in said
    assert ".metadata: got other content" in said and "__0_0.distcp: got other content" in said
    assert command("verify", step(run_folder, 10)).count("\n") == 1
    found = command.json("verify", step(run_folder, 20), code=1)
    assert not found["ok"]
    assert [problem["key"] for problem in found["checkpoints"][0]["problems"]] == [".metadata", "__0_0.distcp"]
    (step(run_folder, 10) / "manifest.json").write_text("[]")
    assert f"{step(run_folder, 10)}: DAMAGED" in command("verify", run_folder, code=1)


def test_verify_says_which_files_have_no_checksum(run_folder: Path, command: Command) -> None:
    path = step(run_folder, 10) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    for entry in manifest["files"].values():
        entry["checksum"] = None
    path.write_text(json.dumps(manifest))
    assert "2 files were written without checksums" in command("verify", step(run_folder, 10))
    assert command.json("verify", run_folder)["checkpoints"][0]["without_checksum"] == [".metadata", "__0_0.distcp"]


def test_what_a_run_removes_meanwhile_is_not_called_damaged(
    run_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = storage.wrong_with

    def removes(folder: Path, name: str, expected: Any) -> Any:
        if folder.exists() and folder == step(run_folder, 10):
            storage.remove(folder)
        return look(folder, name, expected)

    monkeypatch.setattr("titanlite.commands.checkpoint.VERIFY_THREADS", 1)
    monkeypatch.setattr(storage, "wrong_with", removes)
    assert command("verify", run_folder).count("\n") == 1


def test_show(run_folder: Path, command: Command) -> None:
    text = command("show", run_folder)
    assert f"# {step(run_folder, 20)}\n# step 20, written 20" in text
    assert "#   model.a              float32 [3, 5]" in text and "optimizer.a.exp_avg  bfloat16 [3, 5]" in text
    assert tomli.loads(text) == {key: PARTS[key] for key in ("train_state", "layout", "config")}
    found = command.json("show", step(run_folder, 10))
    assert found["step"] == 10 and found["config"] == PARTS["config"]
    assert found["tensors"]["model.a"] == {"dtype": "float32", "shape": [3, 5]}

    data = bytearray((step(run_folder, 20) / ".metadata").read_bytes())
    data[20] ^= 1
    (step(run_folder, 20) / ".metadata").write_bytes(data)
    assert command("show", run_folder, code=1) == ""
    assert ".metadata: got other content" in command.err and "checkpoint verify" in command.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("list", "nowhere"), "nowhere, which is not there"),
        (("verify", "file"), "file, which is a file"),
        (("show", "."), "., in which there is no checkpoint"),
        (("verify", "run/checkpoints/step-00000030"), "step-00000030, in which no checkpoint is committed"),
        (("list",), "PATH"),
        (("lst", "run"), "list"),
        (("list", "run", "--jsno"), "--jsno"),
        ((), "list|verify|show"),
    ],
)
def test_wrong_input(
    run_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(run_folder.parent)
    Path("file").touch()
    assert command(*words, code=2) == ""
    assert says in command.err and command.err.startswith("titanlite: 1 problem")


def test_a_file_that_may_not_be_read_is_no_damage(
    run_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(storage, "of_file", denied)
    assert command("verify", run_folder, code=2) == ""
    assert "Permission denied" in command.err


def test_list_and_verify_import_no_torch(run_folder: Path) -> None:
    code = """
import sys
from titanlite.cli import main
codes = [main(["checkpoint", action, sys.argv[1]]) for action in ("list", "verify")]
sys.exit("torch" in sys.modules or any(codes))
"""
    command = [sys.executable, "-c", code, str(run_folder)]
    assert subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL).returncode == 0
