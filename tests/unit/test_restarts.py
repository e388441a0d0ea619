"""Which failures are followed by another attempt, and what keeps that apart from the one before it."""

from __future__ import annotations

import signal
from pathlib import Path

from titanlite.machine import Nodes
from titanlite.supervise import Failure, Job, is_final
from titanlite.trainer import NonFiniteError, NotSavedError

LOST = "RuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:4242"


def test_what_a_restart_would_repeat() -> None:
    lost, killed = Failure(0, 1, 10, 1.0, LOST), Failure(1, -signal.SIGKILL, 11, 1.0)
    assert not is_final([lost, killed])
    for error in (NonFiniteError("step 3: loss nan"), NotSavedError("stopped at step 3")):
        assert is_final([lost, Failure(1, 1, 11, 2.0, f"{type(error).__name__}: {error}")])
    assert is_final([lost, Failure(1, 2, 11, 2.0)])


def test_attempts_are_kept_apart() -> None:
    first = Job(Nodes(2, 0, "127.0.0.1", 29500), 2, frozenset({0}), Path("logs/now"), 10, max_restarts=2)
    jobs = [first, first.again(), first.again().again()]
    assert [str(job.log_folder) for job in jobs] == ["logs/now", "logs/now/restart-1", "logs/now/restart-2"]
    assert len({job.nodes.run_id for job in jobs}) == 3
    assert [job.attempt for job in jobs] == [0, 1, 2]
