"""Which failures are followed by another attempt, what keeps that apart from the one before it, and what signals do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from titanlite import supervise
from titanlite.failures import Failure, is_final
from titanlite.lifeline import STOP_FILE, StopFile
from titanlite.machine import Nodes
from titanlite.supervise import Job, Stopped, StopSignals, run_workers
from titanlite.trainer import NonFiniteError, NotSavedError

LOST = "RuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:4242"
BOOM = Failure(1, 1, 11, 1.0, "RuntimeError: boom")


def test_what_a_restart_would_repeat() -> None:
    lost, killed = Failure(0, 1, 10, 1.0, LOST), Failure(1, -signal.SIGKILL, 11, 1.0)
    assert not is_final([lost, killed])
    for error in (NonFiniteError("step 3: loss nan"), NotSavedError("stopped at step 3")):
        text = f"{type(error).__name__}: {error}"
        assert is_final([lost, Failure(1, 1, 11, 2.0, text)])
        peer = f"PeerFailedError: rank 4 (node1, process 7) failed: {text}\nHere: {LOST}"  # of another node
        assert is_final([Failure(0, 1, 10, 1.0, peer)])
    assert not is_final([Failure(0, 1, 10, 1.0, f"PeerFailedError: rank 4 failed: KeyError: 1\nHere: {LOST}")])
    assert is_final([lost, Failure(1, 2, 11, 2.0)])


def test_attempts_are_kept_apart() -> None:
    first = Job(Nodes(2, 0, "127.0.0.1", 29500), 2, frozenset({0}), Path("logs/now"), 10, max_restarts=2)
    jobs = [first, first.again(), first.again().again()]
    assert [str(job.log_folder) for job in jobs] == ["logs/now", "logs/now/restart-1", "logs/now/restart-2"]
    assert len({job.nodes.run_id for job in jobs}) == 3
    assert [job.attempt for job in jobs] == [0, 1, 2]


# --- with attempts that are played ---

Attempt = Callable[[StopFile], list[Failure]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Exit code of run_workers, and of what its attempts are: the failures of each, after what it does to the files."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def run(*attempts: Attempt, max_restarts: int = 1) -> int:
        left = iter(attempts)
        played: Any = lambda *_: next(left)(StopFile(Path(os.environ[STOP_FILE])))  # noqa: E731
        monkeypatch.setattr(supervise, "run_agent", played)
        code = run_workers(Job(Nodes(), 2, frozenset({0}), tmp_path, 10, max_restarts=max_restarts), "", [], {})
        assert next(left, None) is None, "not all attempts were made"
        return code

    return run


def fails(failure: Failure = BOOM, *made: str, text: str = "") -> Attempt:
    def attempt(file: StopFile) -> list[Failure]:
        for name in made:
            StopFile.create(getattr(file, name), text)
        return [failure]

    return attempt


def done(file: StopFile) -> list[Failure]:
    return []


def test_restarts_that_are_used_up(play: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert play(fails(), fails()) == 1
    said = capsys.readouterr().err
    assert said.count("boom") == 2 and said.count("restart 1 of 1") == 1 and "restart 2" not in said


@pytest.mark.parametrize(("exit_code", "error"), [(2, "InputError: stands here"), (1, "NotSavedError: no")])
def test_a_failure_that_a_restart_would_repeat(play: Callable[..., int], exit_code: int, error: str) -> None:
    assert play(fails(Failure(1, exit_code, 11, 1.0, error))) == exit_code


def test_a_run_that_has_been_asked_to_end_is_not_started_again(
    play: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """By a signal to a rank, say, of which the launcher itself knows nothing."""
    assert play(fails(BOOM, "asked")) == 1
    said = capsys.readouterr().err
    assert "boom" in said and "restart" not in said


def test_the_cause_is_the_second_signal_to_a_rank(play: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """And not the end of the ranks that heed it, which may be discovered first."""
    killed = Failure(0, -signal.SIGKILL, 10, 1.0)
    assert play(fails(killed, "now", text="rank 1 was ended by a second signal, SIGTERM")) == 1
    said = capsys.readouterr().err
    assert "rank 1 was ended by a second signal, SIGTERM; the workers have been ended" in said
    assert "SIGKILL" not in said


def test_what_an_attempt_has_saved_is_no_news_of_the_next(play: Callable[..., int]) -> None:
    assert play(fails(BOOM, "saved"), done) == 0


def test_stopped_and_saved(play: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def saves(file: StopFile) -> list[Failure]:
        StopFile.create(file.saved)
        return []

    assert play(fails(), saves) == 75
    assert "stopped and saved" in capsys.readouterr().err


# --- signals ---


@contextmanager
def signals_of(path: Path, **settings: Any) -> Iterator[StopSignals]:
    job = Job(Nodes(), 2, frozenset({0}), Path("logs"), 10, **settings)
    before = {signum: signal.getsignal(signum) for signum in signal.Signals if signum not in UNTOUCHABLE}
    yield StopSignals(job, StopFile(path))
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum, handler in before.items():
        signal.signal(signum, handler)


UNTOUCHABLE = {signal.SIGKILL, signal.SIGSTOP}


def blocked() -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_while_no_worker_runs_a_signal_ends_the_launcher(tmp_path: Path) -> None:
    """In the first attempt and in the next one: the nodes may wait for each other for long."""
    mask = blocked()
    with signals_of(tmp_path / "stop") as signals:
        for _ in range(2):
            with signals.default_until_workers_start():
                assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
                assert blocked() == mask
                signals.workers_start()
                assert signal.getsignal(signal.SIGTERM) == signals._receive
                assert {signal.SIGTERM, signal.SIGINT} <= blocked(), "workers inherit it"
            assert blocked() == mask


def test_a_second_signal_and_the_one_that_is_the_same(tmp_path: Path) -> None:
    with signals_of(tmp_path / "stop") as signals, signals.default_until_workers_start():
        signals.workers_start()
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while not signals.first and time.monotonic() < deadline:
            time.sleep(0.01)
        signals._receive(signal.SIGTERM, None)
        assert signals.first == "SIGUSR1" and (tmp_path / "stop").exists()
        signals._received -= supervise.SAME_SIGNAL_SECONDS
        with pytest.raises(Stopped, match="second signal, SIGTERM"):
            signals._receive(signal.SIGTERM, None)
        assert (tmp_path / "stop.now").exists()
        signals._receive(signal.SIGTERM, None)  # once


def test_workers_that_cannot_be_asked_are_ended(tmp_path: Path) -> None:
    with signals_of(tmp_path / "no/such/stop") as signals, signals.default_until_workers_start():
        signals.workers_start()
        with pytest.raises(Stopped, match=r"could not be asked to save: .*No such file"):
            signals._receive(signal.SIGTERM, None)


def test_a_run_that_cannot_save_ends_at_once(tmp_path: Path) -> None:
    with signals_of(tmp_path / "stop", saves=False) as signals, signals.default_until_workers_start():
        signals.workers_start()
        with pytest.raises(Stopped, match=r"nothing is saved, as checkpoint.enable is false"):
            signals._receive(signal.SIGTERM, None)


def test_the_grace_runs_out(tmp_path: Path) -> None:
    with signals_of(tmp_path / "stop", grace_seconds=1) as signals, signals.default_until_workers_start():
        signals.workers_start()
        with pytest.raises(Stopped, match=r"SIGTERM: .* not saved within 1 s; raise checkpoint.grace_seconds"):
            signals._receive(signal.SIGTERM, None)
            time.sleep(30)
