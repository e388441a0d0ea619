"""Files that survive a kill and a power cut: whole or not there, and on the disk when a call returns. Torch-free."""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import glob
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


def fsync_file(file: IO[Any]) -> None:
    """Flush and fsync; on macOS the stronger form, without which the data may stay in the drive's cache."""
    file.flush()
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(file.fileno(), full)
            return
        except OSError:  # not on this filesystem
            pass
    os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # filesystems that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write or replace a file; several processes may write the same one. A kill leaves at most a `path.<hex>.tmp`."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            fsync_file(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def move_aside(path: Path, why: str) -> Path:
    """Rename `a.b` (a folder: `a`) to `a.<why>-k.b` with the first free k; returns the new path."""
    k = 1
    while (aside := path.with_name(f"{path.stem}.{why}-{k}{path.suffix}")).exists():
        k += 1
    path.rename(aside)
    fsync_folder(path.parent)
    return aside


_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


def try_lock(file: IO[Any], path: Path) -> bool:
    """Lock an open file against other processes, without waiting; False if one of them holds it.

    On a filesystem without locks a warning is given, and the answer is True.
    """
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        warnings.warn(
            f"{path}: this filesystem has no file locks ({error.strerror}); another process that uses it would not "
            "be noticed",
            stacklevel=3,
        )
    return True


def expand(pattern: str, on_link: Callable[[], None] = lambda: None) -> tuple[Path, Iterator[Path]]:
    """The folder that a glob begins with, and what matches, in the order of names (`**`: folders at any depth).

    Links to folders are passed over, with a call of on_link, so that it always ends; glob.glob follows them. Names
    that begin with a dot match only a part that does. Iterating raises OSError for what cannot be read.
    """
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Path(*parts[:fixed])
    return root, _matching(root, parts[fixed:], on_link)


def _matching(folder: Path, parts: tuple[str, ...], on_link: Callable[[], None]) -> Iterator[Path]:
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if not glob.has_magic(part):
        if os.path.lexists(folder / part):
            yield from _matching(folder / part, rest, on_link)
        return
    if not folder.is_dir():
        return
    if part == "**":
        yield from _matching(folder, rest, on_link)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        is_folder = os.path.isdir(entry.path)
        if is_folder and entry.is_symlink():
            on_link()
        elif part == "**":
            if is_folder:
                yield from _matching(folder / entry.name, parts, on_link)
        elif fnmatch.fnmatchcase(entry.name, part):
            yield from _matching(folder / entry.name, rest, on_link)
