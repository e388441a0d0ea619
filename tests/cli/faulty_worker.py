"""The training worker with one fault: FAULT="RANK:WHEN:WHAT" happens to that rank.

WHEN: step (the fifth), validation (the second), save (the second, in the thread that writes it).
WHAT: stop, loop, oom.
Run as the launcher: `python -m tests.cli.faulty_worker --config …`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fail(what: str) -> None:
    import torch

    match what:
        case "stop":  # until another rank has said so: the agent's SIGTERM then ends it, instead of a SIGKILL in 30 s
            record = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name("rank-0.error.json")
            until = f"for i in $(seq 200); do sleep 0.3; [ -e '{record}' ] && break; done; sleep 1"
            wake = ["sh", "-c", f"{until}; kill -CONT {os.getpid()}"]
            subprocess.Popen(wake, start_new_session=True)  # the agent's SIGTERM goes to the group
            os.kill(os.getpid(), signal.SIGSTOP)
        case "loop":
            while True:
                pass
        case "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def main() -> int:
    from titanlite import train
    from titanlite.checkpoint import dcp
    from titanlite.trainer import Trainer

    rank, when, what = os.environ["FAULT"].split(":")
    owner, name = {
        "step": (Trainer, "train_step"),
        "validation": (Trainer, "validate"),
        "save": (dcp, "write_tensors"),
    }[when]
    whole: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def faulty(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (5 if when == "step" else 2):
            fail(what)
        return whole(*args)

    if rank == os.environ["RANK"]:
        setattr(owner, name, faulty)
    return train.main()


if __name__ == "__main__":
    if "RANK" in os.environ:
        from titanlite.train import _exit

        _exit(main())
    from titanlite.launch import launch

    sys.exit(launch(sys.argv[1:], worker="tests.cli.faulty_worker"))
