"""Which failure of several the launcher reports, and what it says of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from titanlite.failures import NOTE, Failure, root_cause
from titanlite.machine import Nodes
from titanlite.supervise import Job, report

LOST = "RuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:4242"


def test_root_cause() -> None:
    boom = Failure(3, 1, 30, when=100.4, error="ValueError: boom")
    later = Failure(2, 1, 20, when=100.5, error="ValueError: later")
    lost = Failure(0, 1, 10, when=100.3, error=LOST)
    ended = Failure(1, -signal.SIGTERM, 11, when=1.0)
    killed = Failure(4, -signal.SIGKILL, 40, when=101.0)
    aborted = Failure(5, -signal.SIGABRT, 50, when=101.0)
    assert root_cause([ended, lost, later, boom]) is boom
    assert root_cause([lost, killed, ended]) is killed
    assert root_cause([aborted, boom]) is boom
    assert root_cause([ended, lost]) is lost
    assert root_cause([ended]) is ended
    ended_late = Failure(1, -signal.SIGTERM, 11, when=100.2, error="ValueError: first")  # it had just recorded it
    assert root_cause([lost, later, ended_late]) is ended_late


def test_root_cause_of_a_lost_rank() -> None:
    """A rank that is stopped is ended with SIGKILL by the agent, once the others have named it."""
    named = Failure(0, 1, 10, when=100.0, error="LostRankError: rank 1 (a, process 11) is gone\nRank 0: " + LOST)
    peer = Failure(2, 1, 12, when=99.0, error="PeerFailedError: rank 0 failed: LostRankError: rank 1")
    by_agent = Failure(1, -signal.SIGKILL, 11, when=111.0)
    assert root_cause([peer, named, by_agent]) is named
    timeout = Failure(0, 1, 10, when=100.0, error="RuntimeError: Timed out waiting 4000ms for send operation")
    assert root_cause([timeout, by_agent]) is timeout
    by_system = Failure(1, -signal.SIGKILL, 11, when=99.0)
    assert root_cause([peer, named, by_system]) is by_system


def test_whom_a_rank_that_nccl_has_ended_waited_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(Nodes(), 2, frozenset({0}), tmp_path, 10)
    aborted = Failure(0, -signal.SIGABRT, 10, when=100.0)
    assert report(aborted, job) == 1
    assert "was ended by SIGABRT and recorded no error\n" in capsys.readouterr().err
    (tmp_path / f"rank-0.error.json{NOTE}").write_text("step 7 has taken 80 s; behind it are rank 1")
    assert report(aborted, job) == 1
    assert (
        "SIGABRT and recorded no error (as when NCCL gives up a collective): step 7 has taken 80"
        in capsys.readouterr().err
    )


def test_report_of_a_lost_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(Nodes(2, 0, "127.0.0.1", 29500), 2, frozenset({0}), tmp_path, 10)
    assert report(Failure(0, 1, 10, 1.0, LOST), job) == 1
    assert "messages of the other nodes" in capsys.readouterr().err


def test_exit_codes_of_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(Nodes(), 2, frozenset({0}), tmp_path, 10)
    assert report(Failure(0, 2, 10, 1.0), job) == 2
    assert capsys.readouterr().err == ""  # rank 0 is on the screen: it has said so
    (tmp_path / "rank-1.err").write_text("data.sources: nowhere\n")
    assert report(Failure(1, 2, 10, 1.0), job) == 2
    assert capsys.readouterr().err.count("nowhere") == 1
