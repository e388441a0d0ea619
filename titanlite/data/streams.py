"""Files as bytes: plain, .gz or .zst, from any offset on, and the rows of .parquet. Torch-free."""

from __future__ import annotations

import codecs
import errno
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from titanlite.config.problems import InputError, Problem
from titanlite.data import records
from titanlite.data.records import File

BLOCK_BYTES = 256 << 10  # read at once


@contextmanager
def reading_of(file: File) -> Iterator[None]:
    """An OSError becomes an InputError that names the file."""
    try:
        yield
    except OSError as error:
        got = f"a file that cannot be read ({error.strerror or error})"
        fix = "restore it or change its permissions, or move it out"
        raise InputError(Problem("", str(error.filename or file), got, "readable files", fix)) from error


class Damaged(Exception):
    """The rest of a file cannot be read. Its message says why."""


class Stream:
    """A file's decompressed bytes from an offset on. Blocks end at the same places wherever it starts."""

    def __init__(self, file: File, offset: int) -> None:
        """Raises OSError."""
        self.done = 0  # bytes on the disk read so far
        self.offset = offset
        self._compression = next((end for end in (".gz", ".zst") if file.suffix.endswith(end)), "")
        if not file.path and sys.stdin is None:  # closed by who started this process
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._raw: IO[bytes] = file.path.open("rb") if file.path else sys.stdin.buffer
        self._seekable = bool(file.path) and not self._compression
        self._is_ours = bool(file.path)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._raw.close()

    def blocks(self) -> Iterator[bytes]:
        """Raises Damaged after what can be decompressed."""
        skip = self.offset
        if self._seekable:
            self._raw.seek(skip)
            self.done = skip
            yield from self._read(BLOCK_BYTES)
            return
        for block in {"": self._plain, ".gz": self._gzip, ".zst": self._zstd}[self._compression]():
            if skip < len(block):
                yield block[skip:] if skip else block
            skip = max(skip - len(block), 0)

    def _read(self, size: int) -> Iterator[bytes]:
        while data := self._raw.read(size - self.done % size):
            self.done += len(data)
            yield data

    def _plain(self) -> Iterator[bytes]:
        return self._read(BLOCK_BYTES)

    def _gzip(self) -> Iterator[bytes]:
        """Members one after the other; zeros may follow, as with gzip itself."""
        member = zlib.decompressobj(wbits=31)
        begun = False
        for data in self._read(64 << 10):
            while data:
                if member.eof:
                    member, begun = zlib.decompressobj(wbits=31), False
                if not begun and self.done > len(data) and not (data := data.lstrip(b"\0")):
                    break
                begun = True
                try:
                    block = member.decompress(data, BLOCK_BYTES)
                except zlib.error as error:
                    raise Damaged(f"damaged gzip data ({error})") from None
                if block:
                    yield block
                data = member.unused_data if member.eof else member.unconsumed_tail
        if begun and not member.eof:
            raise Damaged("gzip data that end in the middle")

    def _zstd(self) -> Iterator[bytes]:
        """Frames one after the other. Little is given to the library at once, as all that comes of it is in memory."""
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        frame: Any = None
        block = bytearray()
        for data in self._read(2 << 10):
            while data:
                frame = frame or decompressor.decompressobj()
                try:
                    block += frame.decompress(data)
                except zstandard.ZstdError as error:
                    yield bytes(block)
                    raise Damaged(f"damaged zstd data ({error})") from None
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
            if len(block) >= BLOCK_BYTES:
                yield bytes(block)
                block.clear()
        yield bytes(block)
        if frame:
            raise Damaged("zstd data that end in the middle")


def without_bom(blocks: Iterator[bytes], offset: int) -> tuple[Iterator[bytes], int]:
    """The blocks without the byte order mark that a file (offset 0) may begin with, and their offset."""
    if offset:
        return blocks, offset

    def all_but(head: bytes, damage: Damaged | None) -> Iterator[bytes]:
        yield head
        if damage:
            raise damage
        yield from blocks

    head, damage = b"", None
    try:
        while len(head) < 3 and (block := next(blocks, None)) is not None:
            head += block
    except Damaged as error:
        damage = error
    offset = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    return all_but(head[offset:], damage), offset


class Ranges:
    """Ranges of a file's bytes, each after the one before; what lies between is passed over."""

    def __init__(self, file: File, ahead: Stream) -> None:
        """ahead: what reads the same file, and all that is read of standard input."""
        self._file, self._ahead = file, ahead
        self._stream: Stream | None = None
        self._blocks: Iterator[bytes] = iter(())
        self._at, self._block = 0, b""

    def __enter__(self) -> Ranges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream:
            self._stream.__exit__()

    @property
    def done(self) -> int:
        """Bytes on the disk read so far."""
        if self._file.path is None:
            return self._ahead.done
        return self._stream.done if self._stream else 0

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        if self._stream is None:
            self._stream, self._at = Stream(self._file, begin), begin
            self._blocks = self._stream.blocks()
        while self._at < end:
            block = self._block or next(self._blocks, b"")
            if not block:
                got, fix = "a file that became shorter while it was read", "start again when nothing writes to it"
                raise InputError(Problem("", str(self._file), got, "a file that stays as it is", fix))
            if piece := block[max(begin - self._at, 0) : end - self._at]:
                yield piece
            self._block = block[end - self._at :]
            self._at += len(block) - len(self._block)


class Rows:
    """The column of strings of a .parquet file, read piece by piece. Raises InputError when it has none."""

    def __init__(self, file: File, column: str) -> None:
        """Raises Damaged, and OSError when the file cannot be opened."""
        import pyarrow
        import pyarrow.parquet

        assert file.path
        with file.path.open("rb") as raw:
            self.size = raw.seek(0, 2)
        self._column = column
        self._errors = (pyarrow.ArrowException, OSError)
        self._binary = pyarrow.large_binary()
        with self._damage():
            # A buffer, or all that a row group has of the column is in memory at once.
            self._file = pyarrow.parquet.ParquetFile(file.path, buffer_size=BLOCK_BYTES, pre_buffer=False)
            schema = self._file.schema_arrow
        self.n_rows = self._file.metadata.num_rows
        if column not in schema.names:
            allowed = f"one of its columns ({', '.join(map(repr, schema.names))})"
            raise InputError(Problem("", str(file), f"no column {column!r}", allowed, "name it with text_key"))
        if schema.names.count(column) > 1:
            fix = "rename one of them"
            raise InputError(Problem("", str(file), f"two columns {column!r}", "columns with different names", fix))
        kind = schema.field(column).type
        self._is_dictionary = pyarrow.types.is_dictionary(kind)
        of = str(kind.value_type if self._is_dictionary else kind)
        if of not in ("string", "large_string", "string_view"):
            columns = [field.name for field in schema if str(field.type) in ("string", "large_string")]
            allowed = "a column of strings" + (f" ({', '.join(map(repr, columns))})" if columns else "")
            got = f"the column {column!r} of type {kind}"
            raise InputError(Problem("", str(file), got, allowed, "name one with text_key"))

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise Damaged(f"damaged parquet data ({str(error).splitlines()[0]})") from None

    def batches(self, skip: int) -> Iterator[list[bytes | None]]:
        """The values after the first `skip` rows."""
        metadata = self._file.metadata
        for group in range(metadata.num_row_groups):
            about = metadata.row_group(group)
            if skip >= about.num_rows:
                skip -= about.num_rows
                continue
            columns = [about.column(i) for i in range(about.num_columns)]
            size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == self._column)
            rows = min(max(records.CHUNK_BYTES * about.num_rows // max(size, 1), 1), 1024)
            batches = self._file.iter_batches(rows, row_groups=[group], columns=[self._column], use_threads=False)
            while True:
                with self._damage():
                    if (batch := next(batches, None)) is None:
                        break
                    values = batch.column(0).slice(skip)
                    skip = max(skip - batch.num_rows, 0)
                    if self._is_dictionary:
                        values = values.dictionary_decode()
                    found = values.cast(self._binary).to_pylist()
                yield found
