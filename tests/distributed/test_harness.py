"""The tools themselves: failures are reported with rank and cause, nothing hangs, nothing is left running."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.distributed import WorkerFailed, run_distributed
from tests.harness.processes import is_running


def rank_and_sum(factor):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item() * factor


def fail_in_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("the words of rank 1")
    dist.all_reduce(torch.zeros(1))  # fails, too, when rank 1 has left


def abort_in_rank_1():
    if dist.get_rank() == 1:
        os.abort()
    dist.all_reduce(torch.zeros(1))


def killed_in_rank_0():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang_in_rank_1():
    if dist.get_rank() == 1:
        a_function_that_never_returns()


def a_function_that_never_returns():
    time.sleep(60)


def hang_and_leave_children(folder: Path):
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (folder / str(child.pid)).touch()
    (folder / str(os.getpid())).touch()
    dist.all_reduce(torch.zeros(1))  # all are this far
    if dist.get_rank() == 1:
        time.sleep(60)


def exit_with_3():
    sys.exit(3)


def threads():
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def origin():
    """(the process this one was forked from, seconds of CPU time that this one has used)."""
    return os.getppid(), time.process_time()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank(world_size):
    expected = sum(range(world_size)) * 10.0
    assert run_distributed(rank_and_sum, world_size, 10) == [(rank, expected) for rank in range(world_size)]


def test_a_world_is_cheap():
    """Workers are forks of one server, with no import of torch to pay for: that is seconds of CPU time, on any load."""
    workers = run_distributed(origin, 4) + run_distributed(origin, 2)
    assert len({server for server, _ in workers}) == 1 and workers[0][0] != os.getpid()
    assert max(seconds for _, seconds in workers) < 0.5, workers


def test_the_first_failure_is_raised_with_its_traceback():
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="the words of rank 1") as caught:
        run_distributed(fail_in_rank_1, 3)
    assert caught.value.rank == 1
    assert str(caught.value).startswith("rank 1 raised:")
    assert "fail_in_rank_1" in str(caught.value), "the traceback is there"
    assert time.monotonic() - start < 20


def test_a_worker_that_aborts_is_survived_and_named():
    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGABRT") as caught:
        run_distributed(abort_in_rank_1, 2)
    assert "abort_in_rank_1" in str(caught.value), "where it was, from faulthandler"


def test_a_killed_worker_is_named():
    with pytest.raises(WorkerFailed, match="rank 0 was killed by SIGKILL"):
        run_distributed(killed_in_rank_0, 2)


def test_a_hang_ends_at_the_timeout_and_says_where():
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rank 1 was still running after 1 s") as caught:
        run_distributed(hang_in_rank_1, 2, timeout=1)
    assert time.monotonic() - start < 10
    assert "a_function_that_never_returns" in str(caught.value)


def test_an_exit_is_a_failure():
    with pytest.raises(WorkerFailed, match="SystemExit: 3"):
        run_distributed(exit_with_3, 1)


def test_results_that_cannot_be_pickled_are_a_failure():
    with pytest.raises(WorkerFailed, match="pickle"):
        run_distributed(unpicklable, 1)


def unpicklable():
    return lambda: None


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_nothing_is_left_running(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 was still running"):
        run_distributed(hang_and_leave_children, 2, tmp_path, timeout=5)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 6, "two workers and two children of each"
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_workers_have_one_thread_and_the_tests_keep_their_environment():
    before = dict(os.environ)
    assert run_distributed(threads, 2) == [(1, "1")] * 2
    assert dict(os.environ) == before
