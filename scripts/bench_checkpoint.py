"""Measures what checkpoints cost: a save, its checksums, the stall of an asynchronous one, a verified load.

    python scripts/bench_checkpoint.py [--parameters 200e6] [--saves 3] [--folder DIR] [--json]

One process, float32 weights and both moments of AdamW: 12 bytes a parameter, for two of which the folder and the memory
need room. While an asynchronous save is written, the process multiplies matrices, as training would. "Cold" is after
the system was asked to forget the files, "warm" right after a save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.manager import CheckpointManager
from titanlite.config.schema import CheckpointConfig, CommConfig, ParallelismConfig, RunConfig
from titanlite.parallel import runtime

TENSOR_ELEMENTS = 16 << 20
PARTS: dict[str, Any] = {"train_state": {}, "layout": {}, "config": {}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200e6)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def make_tensors(parameters: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for start in range(0, parameters, TENSOR_ELEMENTS):
        for name in ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"):
            size = min(TENSOR_ELEMENTS, parameters - start)
            tensors[name.format(start // TENSOR_ELEMENTS)] = torch.rand(size)
    return tensors


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drop_from_memory(folder: Path) -> None:
    """Ask the system to forget a checkpoint's files."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def save_all(
    manager: CheckpointManager, tensors: dict[str, torch.Tensor], steps: range, rate: Callable[[], float]
) -> list[dict[str, float]]:
    """The figures of each save. rate: a piece of training, at so many a second."""
    found = []
    for step in steps:
        manager.save(step, tensors, PARTS)
        while manager._pending is not None and not manager._pending.done():
            rate()
        manager.finish()
        found.append(manager.metrics())
    return found


def measure(folder: Path, parameters: int, saves: int) -> dict[str, Any]:
    ranks = runtime.start(CommConfig(), RunConfig(device="cpu"), ParallelismConfig())
    tensors = make_tensors(parameters)
    size = sum(tensor.nbytes for tensor in tensors.values())
    a, b, out = (torch.rand(1024, 1024) for _ in range(3))

    def rate() -> float:
        return 1 / seconds(lambda: torch.mm(a, b, out=out))

    def manager(mode: Any) -> CheckpointManager:
        return CheckpointManager(CheckpointConfig(async_mode=mode, keep_latest_k=1), folder, ranks)

    synchronous = save_all(manager("disabled"), tensors, range(1, 1 + saves), rate)
    asynchronous = save_all(manager("async"), tensors, range(1 + saves, 1 + 2 * saves), rate)
    newest = folder / f"step-{2 * saves:08d}"
    loads = {
        "warm": measure_load(manager("disabled"), tensors),
        "cold": measure_load(manager("disabled"), tensors, forget=newest),
        "cold, load only": measure_load(manager("disabled"), tensors, forget=newest, verify=False),
    }
    whole = statistics.median(row["checkpoint_stall_seconds"] for row in synchronous)
    # The first save makes the buffers that later ones use again.
    stall = statistics.median(row["checkpoint_stall_seconds"] for row in asynchronous[1:] or asynchronous)
    return {
        "gigabytes": size / 1e9,
        "threads": torch.get_num_threads(),
        "synchronous": synchronous,
        "asynchronous": asynchronous,
        "synchronous_seconds": whole,
        "checksum_share": statistics.median(row["checkpoint_checksum_share"] for row in synchronous),
        "stall_seconds": stall,
        "stall_share": stall / whole,
        "loads": loads,
    }


def measure_load(
    manager: CheckpointManager, tensors: dict[str, torch.Tensor], *, forget: Path | None = None, verify: bool = True
) -> dict[str, float]:
    path = manager.latest()
    assert path is not None
    if forget is not None:
        drop_from_memory(forget)
    verified = seconds(lambda: manager._verify(path)) if verify else 0.0
    manager._verified = path
    return {"verify": verified, "load": seconds(lambda: manager.load(path, tensors))}


def table(found: dict[str, Any]) -> str:
    lines = [
        "| what | seconds |",
        "|---|---|",
        f"| a save, synchronous, {found['gigabytes']:.2f} GB | {found['synchronous_seconds']:.2f} |",
        f"| of it checksums | {found['checksum_share']:.1%} |",
        f"| stall of an asynchronous save, the first | {found['asynchronous'][0]['checkpoint_stall_seconds']:.2f} |",
        f"| the later ones | {found['stall_seconds']:.2f}, {found['stall_share']:.1%} of the synchronous save |",
        f"| until an asynchronous one is committed | {found['asynchronous'][-1]['checkpoint_seconds']:.2f} |",
    ]
    for state, load in found["loads"].items():
        lines.append(f"| resume, {state}: verify, then load | {load['verify']:.2f}, {load['load']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-checkpoint-") as folder:
        found = measure(Path(folder) / "checkpoints", int(args.parameters), args.saves)
    print(json.dumps(found, indent=2) if args.json else table(found))
    runtime.stop()


if __name__ == "__main__":
    main()
