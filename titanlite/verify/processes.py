"""Gloo worlds of forked processes on this machine: a function called in every rank, its results or the first failure.

Workers are forked from a server process that has imported torch and never computed, so a world of 4 takes a fraction
of a second, where fresh interpreters take many. Whatever happens, no process is left: the caller ends all workers, and
each ends itself when the caller is gone.
"""

from __future__ import annotations

import faulthandler
import gc
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

from titanlite.config.schema import CommConfig, RunConfig
from titanlite.lifeline import die_with_parent, no_interrupts_inherited

GRACE_SECONDS = 2.0  # after a first failure the other ranks may say what they saw, then they are killed
REPOSITORY = Path(__file__).resolve().parents[2]

_context = multiprocessing.get_context("forkserver")


class WorkerFailed(RuntimeError):
    """A rank raised, died or never ended. The message holds every failed rank's report, the earliest first.

    first: the report of that rank alone
    """

    def __init__(self, message: str, rank: int, first: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.first = first


@dataclass(frozen=True)
class Failure:
    time_ns: int
    rank: int
    report: str


def start_server(preload: Sequence[str]) -> None:
    """Start the process that workers are forked from, unless it runs; returns before it has imported the modules.

    preload: what workers need. It must not compute: OpenMP's threads, started by a first matmul, do not survive a fork.
    """
    _context.set_forkserver_preload(list(preload))
    before = dict(os.environ)
    os.environ.update(
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        OMP_NUM_THREADS="1",
        TORCH_CPP_LOG_LEVEL="ERROR",  # DDP warns once per process that find_unused_parameters found none
        TORCHINDUCTOR_COMPILE_THREADS="1",  # a pool of compilers would outlive its worker
        OBJC_DISABLE_INITIALIZE_FORK_SAFETY="YES",  # macOS: torch loads frameworks that nothing has used yet
    )
    try:
        with no_interrupts_inherited():
            forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float,
    quiet: bool = False,
    comm: CommConfig | None = None,
) -> list[Any]:
    """Results of fn(*args) in each rank of a Gloo world on the CPU. fn and args are pickled; results too.

    timeout: seconds; quiet: what workers print is not shown. start_server comes first.
    Raises WorkerFailed with the traceback of the rank that failed first, with the signal of a rank that was killed by
    one, or after the timeout with the stacks of the ranks that were still running.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        world = _World(Path(folder), world_size, quiet, comm or CommConfig())
        workers = [
            _context.Process(target=_worker, args=(world, rank, fn, args), name=f"rank {rank}")
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
        return _collect(world.folder, workers, running, timeout if timed_out else None)


@dataclass(frozen=True)
class _World:
    folder: Path
    size: int
    quiet: bool
    comm: CommConfig


def _worker(world: _World, rank: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    os.setsid()  # a group of its own, so that what it starts can be killed with it
    die_with_parent()
    gc.freeze()  # what it was forked with is no garbage, and takes a quarter of a second to look through
    folder, code = world.folder, 1
    fault_file = (folder / f"{rank}.fault").open("w")
    faulthandler.enable(fault_file)
    faulthandler.register(signal.SIGUSR2, fault_file)
    if world.quiet:
        silence = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(silence, descriptor)
    try:
        import torch
        import torch.distributed as dist

        from titanlite.parallel import runtime

        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.size), MASTER_ADDR="unused", MASTER_PORT="0"
        )
        store = dist.FileStore(str(folder / "store"), world.size)
        runtime.connect(world.comm, RunConfig(device="cpu"), store=store, rank=rank, world_size=world.size)
        dist.barrier()  # a rank that leaves while another is still connecting would fail that one
        write_result(folder, rank, fn(*args))
        runtime.stop()
        code = 0
    except BaseException:
        moment = time.time_ns()
        (folder / f"{rank}.error").write_text(f"{moment}\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no destructors: those of a broken world may wait for dead peers


def write_result(folder: Path, rank: int, result: Any) -> None:
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def read_result(folder: Path, rank: int) -> Any:
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
        raise WorkerFailed("\n".join(failure.report for failure in failures), failures[0].rank, failures[0].report)
    return [read_result(folder, rank) for rank in range(len(workers))]
