"""Ties a process's life to that of the one it works for: even after SIGKILL to that, no worker lives on. Torch-free."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

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


def die_with_parent() -> None:
    """Call first in a process of multiprocessing. Watches from a thread that the one it was asked for by is there."""
    threading.Thread(target=_join_parent, name="lifeline", daemon=True).start()


@contextmanager
def no_interrupts_inherited() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal. Those started here hold it back for good: their parent ends them."""
    resource_tracker.ensure_running()  # the first process's start would start it, which changes the signal mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    _end()


def _join_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end()


def _end() -> None:
    if os.getpgrp() == os.getpid():  # a session of its own: take what it has started along
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
