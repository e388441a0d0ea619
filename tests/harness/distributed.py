"""Worlds of processes for tests: `run_distributed` (Gloo workers, forked, fast), `run_spawned` (fresh ones, for CUDA).

Both call an importable top-level fn(*args) in every rank of a new world and return the results by rank. The first
failure of a rank is raised here with its traceback; whatever happens, no process is left.

Workers of run_distributed are forked from a server process that has imported torch and never computed, so a world of
4 takes a fraction of a second, where fresh interpreters take many.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titanlite.config.schema import CommConfig, RunConfig
from titanlite.parallel import runtime

GRACE_SECONDS = 2.0  # after a first failure the other ranks may say what they saw, then they are killed
REPOSITORY = Path(__file__).parents[2]

_context = multiprocessing.get_context("forkserver")


class WorkerFailed(AssertionError):
    """A rank raised, died or never ended. The message holds every failed rank's report, the earliest first."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Failure:
    time_ns: int
    rank: int
    report: str


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Results of fn(*args) in each rank of a Gloo world on the CPU. fn and args are pickled; results too.

    Raises WorkerFailed with the traceback of the rank that failed first, with the signal of a rank that was killed by
    one, or after `timeout` seconds with the stacks of the ranks that were still running.
    """
    _start_server()
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        workers = [
            _context.Process(target=_worker, args=(Path(folder), rank, world_size, fn, args), name=f"rank {rank}")
            for rank in range(world_size)
        ]
        try:
            for worker in workers:
                worker.start()
            timed_out = _wait(workers, timeout)
            running = {rank for rank, worker in enumerate(workers) if worker.is_alive()}
            if timed_out:
                _dump_stacks(workers)
        finally:
            _kill(workers)
        return _collect(Path(folder), workers, running, timeout if timed_out else None)


def run_spawned(fn: Callable[..., Any], world_size: int, *args: Any, run: RunConfig | None = None) -> list[Any]:
    """Results of fn(*args) in each rank of a world made by runtime.spawn: fresh interpreters, so CUDA works in them."""
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        try:
            runtime.spawn(_spawned, world_size, (Path(folder), fn, args), run=run)
        except mp.ProcessRaisedException as error:
            raise WorkerFailed(str(error), error.error_index) from None
        except mp.ProcessExitedException as error:
            raise WorkerFailed(f"rank {error.error_index}: {error}", error.error_index) from None
        return [_read(Path(folder), rank) for rank in range(world_size)]


def _spawned(folder: Path, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    _write(folder, dist.get_rank(), fn(*args))


def _start_server() -> None:
    """Start the server that workers are forked from, unless it runs. Workers get its environment, not the test's."""
    _context.set_forkserver_preload(["tests.harness.preload"])
    before = dict(os.environ)
    os.environ.update(
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        OMP_NUM_THREADS="1",
        TORCH_CPP_LOG_LEVEL="ERROR",  # DDP warns once per process that find_unused_parameters found none
        TORCHINDUCTOR_COMPILE_THREADS="1",  # a pool of compilers would outlive its worker
        OBJC_DISABLE_INITIALIZE_FORK_SAFETY="YES",  # macOS: torch loads frameworks that nothing has used yet
    )
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _worker(folder: Path, rank: int, world_size: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    os.setsid()  # a group of its own, so that what it starts can be killed with it
    code = 1
    fault_file = (folder / f"{rank}.fault").open("w")
    faulthandler.enable(fault_file)
    faulthandler.register(signal.SIGUSR2, fault_file)
    try:
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="unused", MASTER_PORT="0"
        )
        store = dist.FileStore(str(folder / "store"), world_size)
        runtime.connect(CommConfig(), RunConfig(device="cpu"), store=store, rank=rank, world_size=world_size)
        dist.barrier()  # a rank that leaves while another is still connecting would fail that one
        _write(folder, rank, fn(*args))
        runtime.stop()
        code = 0
    except BaseException:
        moment = time.time_ns()
        (folder / f"{rank}.error").write_text(f"{moment}\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no destructors: those of a broken world may wait for dead peers


def _write(folder: Path, rank: int, result: Any) -> None:
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def _read(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"{rank}.result").read_bytes())


def _wait(workers: Sequence[BaseProcess], timeout: float) -> bool:
    """Wait until all have ended, or a grace period after the first failure. True: the timeout came first."""
    deadline = time.monotonic() + timeout
    failed = False
    running = {worker.sentinel: worker for worker in workers}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return not failed
        for sentinel in ended:
            worker = running.pop(cast(int, sentinel))
            worker.join()
            if worker.exitcode != 0 and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return False


def _dump_stacks(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive() and worker.pid:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR2)
    time.sleep(0.2)


def _kill(workers: Sequence[BaseProcess]) -> None:
    """End every worker and whatever it started (its process group outlives it)."""
    for worker in workers:
        if worker.pid is None:
            continue
        with suppress(ProcessLookupError, PermissionError):  # macOS: no permission for a group of zombies
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.is_alive():  # it had not made its group yet
            worker.kill()
        worker.join()


def _collect(folder: Path, workers: Sequence[BaseProcess], ended_here: set[int], timed_out: float | None) -> list[Any]:
    """Results by rank, or WorkerFailed. ended_here: ranks that ran until they were killed here."""
    failures = []
    for rank, worker in enumerate(workers):
        error, fault = folder / f"{rank}.error", folder / f"{rank}.fault"
        stacks = fault.read_text() if fault.exists() else ""
        code = worker.exitcode or 0
        if error.exists():
            moment, report = error.read_text().split("\n", 1)
            failures.append(Failure(int(moment), rank, f"rank {rank} raised:\n{report}"))
        elif rank in ended_here:
            if timed_out is not None:
                report = f"rank {rank} was still running after {timed_out:g} s:\n{stacks}"
                failures.append(Failure(time.time_ns(), rank, report))
        elif code < 0:
            moment_ns = fault.stat().st_mtime_ns if fault.exists() else time.time_ns()
            report = f"rank {rank} was killed by {signal.Signals(-code).name}:\n{stacks}"
            failures.append(Failure(moment_ns, rank, report))
        elif code > 0:
            failures.append(Failure(time.time_ns(), rank, f"rank {rank} exited with {code}"))
    if failures:
        failures.sort(key=lambda failure: failure.time_ns)
        raise WorkerFailed("\n".join(failure.report for failure in failures), failures[0].rank)
    return [_read(folder, rank) for rank in range(len(workers))]
