"""Worlds of processes for tests: `run_distributed` (Gloo workers, forked, fast), `run_spawned` (fresh ones, for CUDA).

Both call an importable top-level fn(*args) in every rank of a new world and return the results by rank. The first
failure of a rank is raised here with its traceback; whatever happens, no process is left.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from titanlite.config.schema import RunConfig
from titanlite.parallel import runtime
from titanlite.verify.processes import WorkerFailed, read_result, run_world, start_server, write_result

__all__ = ["WorkerFailed", "run_distributed", "run_spawned"]


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """run_world, of workers that have imported all that tests need."""
    start_server(["tests.harness.preload"])
    return run_world(fn, world_size, *args, timeout=timeout)


def run_spawned(fn: Callable[..., Any], world_size: int, *args: Any, run: RunConfig | None = None) -> list[Any]:
    """Results of fn(*args) in each rank of a world made by runtime.spawn: fresh interpreters, so CUDA works in them."""
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        try:
            runtime.spawn(_spawned, world_size, (Path(folder), fn, args), run=run)
        except mp.ProcessRaisedException as error:
            raise WorkerFailed(str(error), error.error_index, str(error)) from None
        except mp.ProcessExitedException as error:
            message = f"rank {error.error_index}: {error}"
            raise WorkerFailed(message, error.error_index, message) from None
        return [read_result(Path(folder), rank) for rank in range(world_size)]


def _spawned(folder: Path, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    write_result(folder, dist.get_rank(), fn(*args))
