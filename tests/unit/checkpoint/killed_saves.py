"""Kill a process at random instants of its saves, and check what it leaves: python -m ... FOLDER KILLS SEED.

The parent imports torch and never computes, so each victim is a cheap fork.
"""

import os
import random
import select
import signal
import sys
from pathlib import Path
from typing import Any, cast

import torch

from tests.unit.checkpoint.conftest import OneRank
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.config.schema import CheckpointConfig


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"model.{i}": torch.full((64, 257), float(value)) for i in range(4)}


def manager(folder: Path, mode: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(async_mode=mode, keep_latest_k=2), folder, cast(Any, OneRank()))


def victim(folder: Path, mode: Any, pipe: int) -> None:
    """Resume, check that the checkpoint is whole, then save every step; says each committed step."""
    torch.set_num_threads(1)
    saver = manager(folder, mode)
    step = 0
    newest = saver.find_resume()
    if newest is not None:
        got = tensors(-1)
        step = saver.load(newest, got)["train_state"]["step"]
        assert all(bool((tensor == step).all()) for tensor in got.values()), f"step {step} holds another step's tensors"
    os.write(pipe, f"{step}\n".encode())
    while True:
        step += 1
        saver.save(step, tensors(step), {"train_state": {"step": step}, "layout": {}, "config": {}}, wait=True)
        os.write(pipe, f"{step}\n".encode())


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    said = 0
    for kill in range(kills):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                victim(folder, "async" if kill % 2 else "disabled", write)
            except BaseException as error:
                print(f"victim {kill}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os.close(write)
        lines = b""
        while lines.count(b"\n") < 2:  # it has resumed, and committed one more
            if not select.select([read], [], [], 60)[0] or not (got := os.read(read, 4096)):
                sys.exit(f"kill {kill}: the process could not go on after step {said}")
            lines += got
        resumed = int(lines.split()[0])
        assert resumed >= said, f"kill {kill}: step {said} was said to be saved, but step {resumed} is the newest"
        select.select([], [], [], chance.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while got := os.read(read, 4096):
            lines += got
        os.close(read)
        said = int(lines.split()[-1])
    print(f"{kills} kills, newest step {said}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
