"""One job per run folder: advisory locks on files inside it, which the kernel drops when their holder dies. Torch-free.

The launcher holds LAUNCHER_LOCK, the main worker holds WORKER_LOCK, so that a second job is refused also while
only orphaned workers of the first are left.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
import weakref
from pathlib import Path
from typing import IO

from titanlite.config.problems import InputError, Problem
from titanlite.files import try_lock

LAUNCHER_LOCK = "launcher.lock"
WORKER_LOCK = "worker.lock"

_POLL_SECONDS = 0.1


class FolderLock:
    """A held lock. It lasts until `release`, until the object is garbage collected, or until the process ends."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path = path
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Give the lock up. The file stays: to delete it would let two holders lock two files of one name."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock_folder(run_folder: str | Path, name: str, wait_seconds: float = 0.0) -> FolderLock:
    """Lock file `name` in `run_folder` (made if needed); waits up to `wait_seconds` for another holder to leave.

    Raises InputError, which names the holder's process and host, if it is still held then, or if the folder cannot
    be written. On a filesystem without locks a warning is given and the returned lock guards nothing.
    """
    path = Path(run_folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
    except OSError as error:
        raise InputError(
            Problem(
                "",
                str(path),
                error.strerror or str(error),
                "a run folder that can be written",
                "choose one with --run.output_dir",
            )
        ) from error
    deadline = time.monotonic() + wait_seconds
    while not try_lock(file, path):
        if time.monotonic() >= deadline:
            holder = file.read(500).strip() or "pid unknown"
            file.close()
            raise InputError(
                Problem(
                    "",
                    str(run_folder),
                    "a second job for this run folder",
                    f"one job at a time; another job is using it ({holder})",
                    "wait for that job or stop it, or give this run a name of its own: --run.name NAME",
                )
            )
        time.sleep(_POLL_SECONDS)
    try:
        file.seek(0)
        file.truncate()
        # Past the buffer, which would try once more, and fail, when the file is closed.
        os.write(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:  # a full disk: the lock itself holds, only its note is missing
        warnings.warn(f"{path}: the lock's holder could not be noted: {error}", stacklevel=2)
    return FolderLock(path, file)


def probe_folder(run_folder: str | Path, name: str, wait_seconds: float = 0.0) -> None:
    """Raise the InputError of `lock_folder` if somebody holds the lock; takes nothing, makes no folder."""
    if (Path(run_folder) / name).exists():
        lock_folder(run_folder, name, wait_seconds).release()


# A forked child shares its parent's open files, and so would keep a dead parent's lock alive (a loader process
# outliving a killed worker). Closing the child's copy leaves the parent's lock in place.
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
