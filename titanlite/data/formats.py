"""From files to chunks of raw text: .txt and .jsonl, plain, .gz or .zst, and .parquet. Torch-free.

chunks() gives the same sequence each time and goes on at any chunk's `next` as if it had not stopped. Nothing is held
but the chunk that is being filled, however long a file or a document is.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence

from titanlite.config.problems import InputError, Problem
from titanlite.data import records
from titanlite.data.records import BadRecord, Chunk, File, Part, Position, Reading, cut, not_utf8
from titanlite.data.streams import BLOCK_BYTES, Damaged, Ranges, Rows, Stream, reading_of, without_bom

FORMATS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "rows"}
SUFFIXES = (*(name + end for name in (".txt", ".jsonl", ".ndjson") for end in ("", ".gz", ".zst")), ".parquet")
ALLOWED = ".txt, .jsonl or .ndjson (also .gz and .zst of these), or .parquet"

LONGEST_LINE = 256 << 20  # of .jsonl: it has to be in memory whole
_NEWLINES = b"\r\n"
_LONGEST_RUN = 1 << 20  # newlines between a text and a separator: more are taken for text
_RECORD_BYTES = 64  # what a record costs beside its text
_OPTIONAL = {".zst": "zstandard", ".parquet": "pyarrow"}  # packages


def suffix_of(name: str) -> str | None:
    """What a file of this name is read as, with .jsonl for .ndjson; None if it is not read."""
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return suffix.replace(".ndjson", ".jsonl")
    return None


def check_installed(files: Iterable[File], key: str) -> None:
    """Raises InputError, naming `key`, for files that need a package which is not there."""
    problems = {}
    for file in files:
        for suffix, package in _OPTIONAL.items():
            if file.suffix.endswith(suffix) and suffix not in problems and not importlib.util.find_spec(package):
                got = f"{str(file)!r}, which needs the package {package}"
                allowed = f"files without {suffix}, or the package"
                problems[suffix] = Problem("", key, got, allowed, f"pip install {package}")
    if problems:
        raise InputError(problems.values())


def check_columns(files: Iterable[File], column: str) -> None:
    """Raises InputError for .parquet files without a column of strings of this name, one problem each.

    Files that cannot be read as .parquet pass: chunks() gives them as a BadRecord.
    """
    problems: list[Problem] = []
    for file in files:
        if file.suffix == ".parquet":
            try:
                with reading_of(file), Rows(file, column):
                    pass
            except Damaged:
                continue
            except InputError as error:
                problems += error.problems
    if problems:
        raise InputError(problems)


def chunks(files: Sequence[File], reading: Reading, start: Position) -> Iterator[Chunk]:
    """The chunks from `start` on. Raises InputError for what no skipping of records can help.

    A document that cannot be read (no UTF-8; a .gz that ends in it) is a BadRecord as a whole, and reading goes on
    after it or, where the file is damaged, with the next file. Only a document of more than LONG_BYTES on standard
    input is given while it is read: its digest is that of its first LONG_BYTES, and bad UTF-8 in it an InputError.
    """
    check_columns(files[start.file :], reading.text_key)
    pending = _Pending(reading)
    for file in files[: start.file]:
        pending.leave(file)
    for index in range(start.file, len(files)):
        file = files[index]
        format = FORMATS["." + file.suffix.split(".")[1]]
        if pending.format != format and not pending.empty:
            yield pending.take(Position(index), 0)
        pending.format = format
        read = {"text": _text, "jsonl": _jsonl, "rows": _rows}[format]
        with reading_of(file):
            yield from read(file, start if index == start.file else Position(index), pending)
        pending.leave(file)
    if not pending.empty:
        yield pending.take(Position(len(files)), 0)


class _Pending:
    """The chunk that is being filled."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.format = ""
        self._done_before = 0  # bytes on the disk of the files before this one
        self._done = 0
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self.records: list[tuple[str, int, bytes]] = []
        self.bad: list[BadRecord] = []

    @property
    def room(self) -> int:
        """Bytes that are wanted still; 0 or less: it is full."""
        return records.CHUNK_BYTES - self.size

    @property
    def empty(self) -> bool:
        return not self.records and not self.bad

    def add(self, file: File, number: int, data: bytes) -> None:
        self.records.append((str(file), number, data))
        self.size += len(data) + _RECORD_BYTES

    def add_bad(self, file: File, number: int, reason: str) -> None:
        self.bad.append(BadRecord(str(file), number, reason))
        self.size += _RECORD_BYTES

    def leave(self, file: File) -> None:
        """All of a file was read."""
        if file.path:
            with reading_of(file):
                self._done_before += file.path.stat().st_size

    def take(self, next: Position, done: int, part: Part | None = None) -> Chunk:
        """done: bytes on the disk read of this file."""
        self._done = max(self._done, self._done_before + done)
        chunk = Chunk(self.format, self.reading, self.records, part, next, self._done, self.bad)
        self._clear()
        return chunk


# --- .txt ---

_Piece = tuple[int, bytes, int]  # where it begins, its bytes, where the next document begins (-1: this one goes on)


def _text(file: File, start: Position, pending: _Pending) -> Iterator[Chunk]:
    separator = pending.reading.separator.encode("utf-8", "surrogateescape")
    number = start.record
    resumed = start.offset if start.document >= 0 else -1
    with Stream(file, start.offset if resumed < 0 else start.document) as stream, Ranges(file, stream) as ranges:
        pieces = _split(*without_bom(stream.blocks(), stream.offset), separator)
        try:
            while (document := _Document.next_of(pieces)) is not None:
                shown = number + 1 if separator else 0
                if document.is_long:
                    here = Position(start.file, document.begin, number)
                    yield from _long(document, file, here, shown, resumed, ranges, pending)
                elif document.head:
                    pending.add(file, shown, bytes(document.head))
                number += bool(document.head)
                if pending.room <= 0:
                    yield pending.take(Position(start.file, document.after, number), stream.done)
        except Damaged as error:
            pending.add_bad(file, 0, f"{error}, after document {number}" if separator else str(error))


def _split(blocks: Iterator[bytes], offset: int, separator: bytes) -> Iterator[_Piece]:
    """Parts bytes into documents. Without a separator they are one.

    With one, newlines (\\n and \\r) at both ends of a document are no part of it. (Of more than _LONGEST_RUN newlines
    between a text and the separator after it, some are taken for text.)
    """
    if not separator:
        for block in blocks:
            yield offset, block, -1
            offset += len(block)
        yield offset, b"", offset
        return
    data = b""  # what begins at offset and was not given
    inside = False  # a document of which a piece was given
    for block in blocks:
        searched = max(len(data) - len(separator) + 1, 0)
        data += block
        at = 0
        while (found := data.find(separator, searched)) >= 0:
            text, skipped = _stripped(data[at:found], left=not inside)
            searched = found + len(separator)
            yield offset + at + skipped, text, offset + searched
            at, inside = searched, False
        end = max(len(data) - len(separator) + 1, at)  # no separator begins before it
        text, skipped = _stripped(data[at:end], left=not inside)
        at += skipped
        if end - at - len(text) > _LONGEST_RUN:
            text = data[at:end]
        if text:
            yield offset + at, text, -1
            at, inside = at + len(text), True
        data = data[at:]
        offset += at
    text, skipped = _stripped(data, left=not inside)
    yield offset + skipped, text, offset + len(data)


def _stripped(data: bytes, left: bool) -> tuple[bytes, int]:
    """Without the newlines on the right, with `left` also on the left, and how many those on the left were."""
    rest = data.lstrip(_NEWLINES) if left else data
    return rest.rstrip(_NEWLINES), len(data) - len(rest)


class _Document:
    """A document of a text, of which so much was read that it is known to be short or long."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.head = bytearray()
        self.after = -1  # where the next one begins, when that is known
        self._pieces: Iterator[_Piece] = iter(())

    @classmethod
    def next_of(cls, pieces: Iterator[_Piece]) -> _Document | None:
        """The next document, which may be empty; None at the end."""
        document = None
        for begin, data, after in pieces:
            document = document or cls(begin)
            document.head += data
            document.after, document._pieces = after, pieces
            if after >= 0 or document.is_long:
                break
        return document

    @property
    def is_long(self) -> bool:
        return len(self.head) > records.LONG_BYTES

    def blocks(self) -> Iterator[bytes]:
        """All of it, once."""
        yield from (bytes(self.head[at : at + BLOCK_BYTES]) for at in range(0, len(self.head), BLOCK_BYTES))
        while self.after < 0:
            _, data, self.after = next(self._pieces)
            yield data


def _long(
    document: _Document, file: File, here: Position, shown: int, resumed: int, ranges: Ranges, pending: _Pending
) -> Iterator[Chunk]:
    """The parts of a document, from the offset `resumed` on (-1: all), once all of it was read and found good."""
    check = _Check()
    if file.path is None:
        digest = hashlib.sha256(records.SPLIT_SALT + document.head[: records.LONG_BYTES]).digest()
        at, parts = document.begin, cut(check.passing(document.blocks(), file, shown))
    else:
        for block in document.blocks():
            check.add(block)
        check.end()
        if check.reason:
            pending.add_bad(file, shown, check.reason)
            return
        digest = check.hash.digest()
        at = max(document.begin, resumed)
        parts = cut(ranges.read(at, document.begin + check.size))
    if not pending.empty:
        yield pending.take(here, ranges.done)
    for data, last in parts:
        part = Part(at == document.begin, last, digest)
        at += len(data)
        if at > resumed:
            pending.add(file, shown, data)
            on = Position(here.file, at, here.record, document.begin)
            yield pending.take(Position(here.file, document.after, here.record + 1) if last else on, ranges.done, part)


class _Check:
    """The digest of a long document, and whether it is UTF-8."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256(records.SPLIT_SALT)
        self.size = 0
        self.reason = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def add(self, data: bytes, final: bool = False) -> None:
        self.hash.update(data)
        if not self.reason:
            held = len(self._decoder.getstate()[0])
            try:
                self._decoder.decode(data, final)
            except UnicodeDecodeError as error:
                self.reason = not_utf8(error.object, error, self.size - held)
        self.size += len(data)

    def end(self) -> None:
        self.add(b"", final=True)

    def passing(self, blocks: Iterator[bytes], file: File, number: int) -> Iterator[bytes]:
        """The blocks, checked as they are given. Raises InputError."""
        for block in blocks:
            self.add(block)
            self._refuse(file, number)
            yield block
        self.end()
        self._refuse(file, number)

    def _refuse(self, file: File, number: int) -> None:
        if self.reason:
            raise InputError(BadRecord(str(file), number, self.reason).problem())


# --- .jsonl ---


def _jsonl(file: File, start: Position, pending: _Pending) -> Iterator[Chunk]:
    """Runs of whole lines: they are parted in the workers."""
    line = start.record
    with Stream(file, start.offset) as stream:
        blocks, offset = without_bom(stream.blocks(), stream.offset)
        buffer, searched = bytearray(), 0  # buffer: from offset on; no newline between a full chunk's end and searched

        def add(end: int) -> None:
            nonlocal line, offset
            if end:
                data = bytes(buffer[:end])
                pending.add(file, line + 1, data)
                line += data.count(b"\n") + (not data.endswith(b"\n"))
                del buffer[:end]
                offset += end

        try:
            while True:
                while end := buffer.find(b"\n", max(pending.room - 1, searched)) + 1:
                    add(end)
                    searched = 0
                    yield pending.take(Position(start.file, offset, line), stream.done)
                searched = len(buffer)
                if len(buffer) > LONGEST_LINE:
                    add(buffer.rfind(b"\n") + 1)
                    offset, searched = offset + _drop_line(buffer, blocks), 0
                    line += 1
                    pending.add_bad(file, line, f"a line of more than {LONGEST_LINE:,} bytes")
                if (block := next(blocks, None)) is None:
                    break
                buffer += block
            add(len(buffer))
        except Damaged as error:
            add(buffer.rfind(b"\n") + 1)
            pending.add_bad(file, 0, f"{error}, after line {line}")
        if pending.room <= 0:
            yield pending.take(Position(start.file + 1), stream.done)


def _drop_line(buffer: bytearray, blocks: Iterator[bytes]) -> int:
    """Take a line that begins in the buffer, and does not end there, away; gives its length."""
    size = len(buffer)
    buffer.clear()
    for block in blocks:
        if end := block.find(b"\n") + 1:
            buffer += block[end:]
            return size + end
        size += len(block)
    return size


# --- .parquet ---


def _rows(file: File, start: Position, pending: _Pending) -> Iterator[Chunk]:
    number = start.record
    try:
        with Rows(file, pending.reading.text_key) as rows:
            for values in rows.batches(number):
                for value in values:
                    number += 1
                    if value:
                        pending.add(file, number, value)
                    elif value is None:
                        pending.add_bad(file, number, f"null in the column {pending.reading.text_key!r}")
                    if pending.room <= 0:
                        done = rows.size * number // max(rows.n_rows, 1)
                        yield pending.take(Position(start.file, 0, number), done)
    except Damaged as error:
        pending.add_bad(file, 0, f"{error}, after row {number}")
