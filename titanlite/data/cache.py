"""The cache of prepared data: entries that are whole or absent, one builder at a time. Torch-free.

An entry is a folder named by its content key. It is built beside its place, flushed to disk and renamed there, so a
killed or failed build leaves nothing that counts, though what it leaves may be gone on with; locks are advisory
`flock`s, which end with their process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.config.problems import InputError, Problem
from titanlite.files import fsync_folder, try_lock, write_atomically

Report = Callable[[str], None]


def key_of(*parts: object) -> str:
    """A content key: 32 hexadecimal digits of the sha256 of the parts as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at path, which is never removed; on_wait is called if another process holds it."""
    with path.open("ab") as file:
        if not try_lock(file, path):
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def get_or_build(
    place: Path,
    is_whole: Callable[[Path], bool],
    build: Callable[[Path], None],
    *,
    what: str,
    report: Report,
    resumable: bool = False,
) -> None:
    """Make sure that the entry at `place` is there, building it at most once over all processes.

    is_whole(folder) says whether an existing folder may be used; one that may not is built again. build(folder) fills
    an empty folder; with `resumable` it gets what an earlier build left when it was killed or failed, and judges by
    itself whether it can go on with that. Raises InputError when the cache cannot be written; what build raises passes
    through.
    """
    if is_whole(place):
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.with_name(f"{place.name}.lock")
        with locked(lock, lambda: report(f"waiting: another process prepares {what}")):
            if is_whole(place):
                return
            if place.exists():
                report(f"warning: the cached {what} in {place} is damaged and is made again")
                # Renamed first: other jobs keep the files they have mapped, and a kill here leaves no half entry.
                os.rename(place, place.with_name(f"{place.name}.{os.getpid()}.tmp"))
            for leftover in place.parent.glob(f"{place.name}.*.tmp"):
                shutil.rmtree(leftover)
            temporary = place.with_name(f"{place.name}.partial" if resumable else f"{place.name}.{os.getpid()}.tmp")
            temporary.mkdir(exist_ok=resumable)
            try:
                build(temporary)
                for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
                    fsync_folder(folder)
                os.rename(temporary, place)
            finally:
                if not resumable:
                    shutil.rmtree(temporary, ignore_errors=True)
            fsync_folder(place.parent)
    except OSError as error:
        got = f"{place.parent} ({error.strerror or error})"
        raise InputError(
            Problem("", "data.cache_dir", got, "a folder that can be written, with enough space", "choose another")
        ) from error


class Memo:
    """Remembers what was read out of files, as long as their sizes and times of change are the same.

    Hashing a large corpus again at every start, on every rank, would take longer than the start.
    """

    def __init__(self, cache_dir: Path, kind: str, files: list[Path]) -> None:
        """kind: what is remembered; files: all that it depends on."""
        states = [(str(file.absolute()), (s := file.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for file in files]
        self._newest = max((max(state[2:]) for state in states), default=0)
        self._file = cache_dir / "seen" / key_of(kind, states)

    def get(self) -> str | None:
        try:
            return self._file.read_text()
        except OSError:
            return None

    def put(self, value: str, *, settled: bool = False) -> None:
        """settled: the caller knows that nobody is still writing the files."""
        # A write within the clock tick of the last one would go unseen, so files just written are not remembered.
        if not settled and time.time_ns() - self._newest < 2 * 10**9:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, value.encode())
        except OSError:  # a cache that cannot be written costs time only: the next start reads the files again
            return
