"""`titanlite verify` as a user calls it: what it refuses, prints and returns, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.processes import TITANLITE, assert_refused, environment, run, write_config
from tests.harness.processes import is_running

SMALL = ("--model.n_heads=4", "--model.n_kv_heads=2", "--training.global_batch_size=4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama_8b", "--layout", "tp=64"], ["parallelism.tp", "n_heads = 32", "--layout tp=64"]),
        (["llama_8b", "--layout", "tq=2", "--layout", "pp=40"], ["did you mean tp?", "parallelism.pp"]),
        (["llama_8b", "--steps", "11"], ["--steps", "1 to 10"]),
        (["llama_8b", "--model.dims", "8"], ["model.dims", "--model.dim"]),
        (["llama_8c", "--layout", "tp=2"], ["did you mean llama_8b?"]),
        (["--layout", "tp=2"], ["NAME", "llama_debug"]),
    ],
)
def test_wrong_input_is_refused_without_torch(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    assert_refused(run(TITANLITE, "verify", *arguments, PYTHONPATH=paths), *words)


def test_layouts_that_agree_are_said_to(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    layouts = ["--layout", "tp=2", "--layout", "dp_shard=2"]
    done = run(TITANLITE, "verify", str(config), *SMALL, *layouts, "--steps", "1", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 2 and "tp=2" in done.stdout and "allowed" in done.stdout
    assert "the layout is not the reason" in done.stdout and "bfloat16" in done.stdout
    assert "training: one process" in done.stderr and "training: tp=2 (2 processes)" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [config.name], "it leaves nothing behind"


def test_json_is_one_object_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path, "[parallelism]\ntp = 2\ndp_shard = 1\n")
    done = run(TITANLITE, "verify", str(config), *SMALL, "--json", "--steps=1", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    (layout,) = value["layouts"]
    assert value["ok"] and layout["verdict"] == "agrees" and layout["layout"] == "tp=2" and layout["world_size"] == 2
    assert layout["gradient"] < value["allowed"]["gradient"] and layout["gradient_of"].startswith("layers.")
    assert value["small"]["model"]["n_kv_heads"] == 2 and value["small"]["training"]["steps"] == 1
    assert any("degrees above 1" in note for note in value["notes"]), "auto says what it does"


@pytest.fixture
def started(tmp_path: Path) -> subprocess.Popen[str]:
    """The command, once its workers train; they have all that it makes in a folder of this test's."""
    config = write_config(tmp_path)
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [*TITANLITE, "verify", str(config), *SMALL, "--layout", "dp_shard=2"],
        env=environment(TMPDIR=str(tmp_path / "tmp")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a Ctrl-C can be sent to all of it
    )
    return process


def workers(folder: Path, seconds: float = 200) -> list[int]:
    """Processes of the world of two, once both write their records of faults, which is the first thing they do."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        faults = {file.parent for file in folder.glob("world-*/1.fault")}
        pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if faults and has_open(pid, faults)]
        if len(pids) == 2:
            return pids
        time.sleep(0.05)
    raise AssertionError("no worker has started")


def has_open(pid: int, folders: set[Path]) -> bool:
    try:
        names = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(name.endswith(".fault") and Path(name).parent in folders for name in names)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_of_it(signum: signal.Signals, started: subprocess.Popen[str], tmp_path: Path) -> None:
    pids = workers(tmp_path / "tmp")
    if signum == signal.SIGINT:
        os.killpg(started.pid, signum)  # as a terminal does
    else:
        started.send_signal(signum)
    out, err = started.communicate(timeout=60)
    assert_gone(pids)
    assert out == "" and "Traceback" not in err
    if signum != signal.SIGKILL:
        assert started.returncode == 1
        assert err.splitlines()[-1] == "titanlite: interrupted" and err.count("interrupted") == 1
        left = [path.name for path in (tmp_path / "tmp").iterdir()]
        assert not any(name.startswith(("verify-", "world-")) for name in left), left


@needs_proc
def test_a_worker_that_dies_ends_all_of_it(started: subprocess.Popen[str], tmp_path: Path) -> None:
    pids = workers(tmp_path / "tmp")
    os.kill(pids[0], signal.SIGKILL)
    out, err = started.communicate(timeout=60)
    assert_gone(pids)
    assert started.returncode == 1 and out == ""
    assert err.count("was killed by SIGKILL") == 1 and "all processes have been ended" in err
    assert "dp_shard=2: rank" in err
