"""The launcher and real worker processes: who is shown, what is said of a failure, and that no worker lives on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import ROOT, STUB_LAUNCH, assert_refused, environment, run, write_config
from tests.harness.processes import is_running
from titanlite.checkpoint.lock import LAUNCHER_LOCK, WORKER_LOCK, lock_folder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return ["--config", str(write_config(tmp_path)), "--run.output_dir", str(tmp_path / "outputs")]


def stub(arguments: list[str], acts: str, *more: str, **env: Any) -> subprocess.CompletedProcess[str]:
    return run(STUB_LAUNCH, *arguments, *more, STUB=acts, **env)


def one_file(folder: Path, name: str) -> str:
    (path,) = folder.glob(f"outputs/tiny/logs/*/{name}")
    return path.read_text()


def test_done(arguments: list[str], tmp_path: Path) -> None:
    done = stub(arguments, "")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 says hello\n"
    assert "rank 0 complains" in done.stderr
    assert "rank 1" not in done.stderr.replace("rank 1 says", "")
    assert one_file(tmp_path, "rank-1.out") == "rank 1 says hello\n"
    assert one_file(tmp_path, "rank-1.err") == "rank 1 complains\n"
    from titanlite.config.load import load

    given = load(arguments[1], arguments[2:]).config
    (resolved,) = tmp_path.glob("outputs/tiny/logs/*/config.toml")
    assert load(str(resolved), ["--run.name", "tiny", "--run.device", "auto"]).config == given
    assert load(str(resolved)).config.run.device == "cpu", "workers must not choose for themselves"


def test_log_rank_all(arguments: list[str]) -> None:
    done = stub(arguments, "", "--nproc", "4", LOG_RANK="all")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] rank {rank} says hello" for rank in range(4)]


def test_log_rank_one(arguments: list[str]) -> None:
    done = stub(arguments, "", LOG_RANK="1")
    assert done.stdout == "rank 1 says hello\n"


@pytest.mark.parametrize(("given", "threads"), [({}, None), ({"OMP_NUM_THREADS": "7"}, "7")])
def test_worker_environment(arguments: list[str], given: dict[str, str], threads: str | None) -> None:
    done = stub(arguments, "0:environment", **given)
    env = json.loads(done.stdout)
    from titanlite.machine import cores

    assert env["OMP_NUM_THREADS"] == (threads or str(max(1, cores() // 2)))
    assert env["TITANLITE_WORLD_SIZE"] == env["WORLD_SIZE"] == "2"


def test_failure_is_told_once(arguments: list[str]) -> None:
    done = stub(arguments, "0:lost 1:raise 2:lost 3:lost", "--nproc", "4")
    assert done.returncode == 1
    assert "rank 1 (process " in done.stderr
    assert "failed: RuntimeError: boom on 1" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "Connection closed" not in done.stderr
    assert "rank-1.err" in done.stderr
    assert not any(noise in done.stderr for noise in ("====", "ChildFailedError", "torch/distributed/elastic"))


def test_error_of_torchs_handler(arguments: list[str]) -> None:
    done = stub(arguments, "0:torch 1:torch")
    assert done.returncode == 1
    assert "KeyError: 'no such thing'" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_killed_worker(arguments: list[str]) -> None:
    done = stub(arguments, "0:lost 1:kill")
    assert done.returncode == 1
    assert "rank 1 (process " in done.stderr
    assert "SIGKILL" in done.stderr and "rank-1.err" in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_without_a_record(arguments: list[str]) -> None:
    done = stub(arguments, "1:quiet")
    assert done.returncode == 1
    assert "exited with 3" in done.stderr and "the last words" in done.stderr


def test_wrong_input_in_a_worker(arguments: list[str]) -> None:
    done = stub(arguments, "0:input 1:input")
    assert done.returncode == 2
    assert done.stderr.count("InputError stands here") == 1
    assert "Traceback" not in done.stderr


def test_second_job_in_one_folder(arguments: list[str], tmp_path: Path) -> None:
    for name in (LAUNCHER_LOCK, WORKER_LOCK):
        with lock_folder(tmp_path / "outputs/tiny", name):
            assert_refused(stub(arguments, ""), "outputs/tiny", "one job at a time")
    assert stub(arguments, "").returncode == 0


# --- restarts ---


def test_restarts(arguments: list[str], tmp_path: Path) -> None:
    """Each is told with its cause, writes its own logs, and finds nothing of the one before it."""
    acts = "0:done 1:raise / 0:done 1:kill / 0:done 1:environment / 1:raise"
    done = stub(arguments, acts, "--max-restarts", "3")
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.index("restart 1 of 3"), done.stderr.index("restart 2 of 3")
    assert done.stderr.index("failed: RuntimeError: boom on 1") < first < done.stderr.index("SIGKILL") < second
    assert "restart 3" not in done.stderr
    (folder,) = tmp_path.glob("outputs/tiny/logs/*")
    assert "boom on 1" in (folder / "rank-1.error.json").read_text()
    assert not list(folder.glob("restart-1/rank-1.error.json")), "what is killed leaves no record"
    assert json.loads((folder / "restart-2/rank-1.out").read_text())["TORCHELASTIC_RESTART_COUNT"] == "2"


# --- no worker lives on ---


class Running:
    """A launcher whose workers hang, and their process ids."""

    def __init__(self, arguments: list[str], folder: Path, acts: str, *options: str) -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", 'trap "" HUP; exec "$@"', "nohup", *STUB_LAUNCH, *arguments, *options],
            cwd=ROOT,
            env=environment(STUB=acts, STUB_FOLDER=str(folder)),
            stderr=subprocess.PIPE,
            text=True,
        )
        files = [folder / f"pid-{rank}" for rank in range(2)]
        deadline = time.monotonic() + 60
        while not all(path.exists() and path.read_text() for path in files):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)
        self.workers = [int(path.read_text()) for path in files]

    def signal_until_the_end(self, pid: int, signum: signal.Signals) -> None:
        """As long as it takes until one counts as a second one."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
            time.sleep(0.5)

    def end(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr

    def close(self) -> None:
        for pid in (self.process.pid, *self.workers):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def running(arguments: list[str], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    given = getattr(request, "param", "0:hang 1:hang")
    job = Running(arguments, tmp_path, *([given] if isinstance(given, str) else given))
    yield job
    job.close()


@pytest.mark.parametrize("running", ["0:save 1:finish"], indirect=True)
def test_signal_lets_the_workers_save(running: Running) -> None:
    running.process.terminate()
    time.sleep(0.2)
    running.process.terminate()  # as timeout(1) does
    code, stderr = running.end()
    assert code == 75, stderr
    assert "SIGTERM: the workers save" in stderr and "stopped and saved" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("running", ["0:stubborn 1:hang"], indirect=True)
def test_second_signal_leaves_no_worker(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert all(is_running(pid) for pid in running.workers)
    running.signal_until_the_end(running.process.pid, signal.SIGINT)
    code, stderr = running.end()
    assert code == 1 and "Traceback" not in stderr
    assert "stopped by a second signal, SIGINT" in stderr
    assert not any(is_running(pid) for pid in running.workers)


@pytest.mark.parametrize("running", [("0:hang 1:hang", "--max-restarts", "1")], indirect=True)
def test_a_second_signal_to_a_rank_ends_all(running: Running) -> None:
    os.kill(running.workers[1], signal.SIGTERM)
    time.sleep(1)
    assert all(is_running(pid) for pid in running.workers)
    running.signal_until_the_end(running.workers[1], signal.SIGTERM)
    code, stderr = running.end()
    assert code == 1 and "rank 1 was ended by a second signal, SIGTERM; the workers have been ended" in stderr, stderr
    assert "restart 1 of" not in stderr and "SIGKILL" not in stderr


def test_the_survivor_of_a_failure_ends_at_once(running: Running) -> None:
    """The agent's SIGTERM is no request to save: there is nobody to save with."""
    started = time.monotonic()
    os.kill(running.workers[1], signal.SIGKILL)
    code, stderr = running.end()
    assert code == 1 and "rank 1" in stderr and "SIGKILL" in stderr, stderr
    assert time.monotonic() - started < 15, "and not after the 30 s that the agent gives it"
    assert not any(is_running(pid) for pid in running.workers)


def test_a_signal_in_the_first_moment_of_a_worker_is_kept(arguments: list[str], tmp_path: Path) -> None:
    """Before its first instruction of Python."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif 'TORCHELASTIC_RUN_ID' in os.environ:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = stub(arguments, "0:save 1:save", PYTHONPATH=path, STUB_FOLDER=tmp_path)
    assert done.returncode == 75, done.stderr
    assert "rank 0 was asked by SIGTERM to a rank" in done.stdout


@pytest.mark.parametrize("running", ["0:stubborn 1:stubborn"], indirect=True)
def test_workers_die_with_a_killed_launcher(running: Running) -> None:
    """And not with a terminal that they do not need, under nohup."""
    running.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert running.process.poll() is None and all(is_running(pid) for pid in running.workers)
    running.process.kill()
    running.process.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in running.workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in running.workers)


# --- several nodes, on this machine ---


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_node(arguments: list[str], rank: int, port: int, *more: str, **env: str) -> subprocess.Popen[str]:
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | env
    return subprocess.Popen(
        [*STUB_LAUNCH, *arguments, *more],
        cwd=ROOT,
        env=environment(LOG_RANK="all", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_nodes_and_their_restart(arguments: list[str]) -> None:
    port, acts = free_port(), "0:raise 2:raise / 1:environment 3:environment"
    nodes = [start_node(arguments, rank, port, "--max-restarts", "1", STUB=acts) for rank in range(2)]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    for rank, (stdout, stderr) in zip((1, 3), outputs, strict=True):
        assert f"boom on {rank - 1}" in stderr and "restart 1 of 1" in stderr
        (line,) = [line for line in stdout.splitlines() if "{" in line]
        env = json.loads(line.removeprefix(f"[rank {rank}] "))
        assert (env["RANK"], env["WORLD_SIZE"], env["TITANLITE_WORLD_SIZE"]) == (str(rank), "4", "4")


def test_a_missing_node_is_waited_for_and_told(arguments: list[str]) -> None:
    node = start_node(arguments, 0, free_port(), "--comm.init_timeout_seconds", "3", STUB="")
    _, stderr = node.communicate(timeout=120)
    assert node.returncode == 1
    assert "2 nodes did not all meet" in stderr and "Traceback" not in stderr
