"""Checksums of a checkpoint's files: made while a file is written, or by reading it. Torch-free.

XXH3-128 of the xxhash library: it is not meant against forgery, but no accident goes unseen, and at several GB/s it is
much faster than disks. What a manifest says is `xxh3_128:` and 32 hexadecimal digits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from titanlite.files import fsync_file

_PREFIX = "xxh3_128:"
_READ_BYTES = 4 << 20


class FileRecord(NamedTuple):
    """What a file must be: bytes, its size; checksum: of its content, None if it was written without."""

    bytes: int
    checksum: str | None


def of_bytes(data: bytes) -> str:
    return _PREFIX + xxhash.xxh3_128_hexdigest(data)


def of_file(path: Path) -> FileRecord:
    """Size and checksum of what the file holds now. Raises OSError."""
    digest = xxhash.xxh3_128()
    size = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, _PREFIX + digest.hexdigest())


class HashedFile:
    """A new file that is only appended to, hashed on the way, and on the disk once it is closed.

    record:  size and checksum of what was written
    seconds: what the checksum has cost
    error:   the first OSError, with the file's name; a library between may turn what is raised into something else
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self.seconds = 0.0
        self.error: OSError | None = None

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, _PREFIX + self._digest.hexdigest())

    def write(self, data: bytes | memoryview) -> int:
        start = time.perf_counter()
        self._digest.update(data)
        self.seconds += time.perf_counter() - start
        with self._noting_errors():
            self._file.write(data)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        with self._noting_errors():
            self._file.flush()

    def close(self) -> None:
        """Sync and close; once there was an error, only close."""
        if self._file.closed:
            return
        try:
            if self.error is None:
                with self._noting_errors():
                    fsync_file(self._file)
        finally:
            with suppress(OSError):  # what is still in its buffer has failed already
                self._file.close()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.error is None:
                self.error = OSError(error.errno, error.strerror, str(self._file.name))
            raise self.error from None
