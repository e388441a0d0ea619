"""Ties a worker's life to its launcher's: even after SIGKILL to the launcher no worker lives on. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
import time

LAUNCHER_PID = "TITANLITE_LAUNCHER_PID"
_POLL_SECONDS = 0.5


def die_with_launcher() -> None:
    """Call first in a worker. Watches from a thread that the launcher is still the parent; without one does nothing."""
    launcher = os.environ.get(LAUNCHER_PID, "")
    if launcher.isdigit():
        threading.Thread(target=_watch, args=(int(launcher),), name="lifeline", daemon=True).start()


def has_launcher() -> bool:
    """Whether our launcher started this process (and not torchrun or a test)."""
    return LAUNCHER_PID in os.environ


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    if os.getpgrp() == os.getpid():  # the launcher gave this worker a session of its own: take loader processes along
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
