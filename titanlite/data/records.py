"""What the reader hands to the worker processes, and how they make documents of it. Torch-free.

A chunk holds raw bytes: that keeps the one process which reads the files fast. Decoding, JSON and hashing are done by
documents(), in the workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.problems import Problem

CHUNK_BYTES = 1 << 20  # of text in a chunk, and of a part of a long document; at least 4
LONG_BYTES = 8 << 20  # a document of more comes in parts
SPLIT_SALT = b"titanlite\n"  # so that the split is independent of what others chose by a document's sha256


@dataclass(frozen=True)
class Reading:
    """How documents are found in files. text_key: of .jsonl and .parquet; separator: of .txt, "": a file is one."""

    text_key: str = "text"
    separator: str = ""


DEFAULT_READING = Reading()


@dataclass(frozen=True)
class File:
    """path: None is standard input; name: what fingerprints use, relative to the root; suffix: what it is read as."""

    path: Path | None
    name: str
    suffix: str = ".txt"

    def __str__(self) -> str:
        return "standard input" if self.path is None else str(self.path)


@dataclass(frozen=True)
class Position:
    """A place between two chunks. All are from 0.

    file: index; offset: byte of its decompressed contents (0 in .parquet); record: lines, rows or documents before it;
    document: offset of the long document that goes on here, else -1.
    """

    file: int = 0
    offset: int = 0
    record: int = 0
    document: int = -1


START = Position()


@dataclass(frozen=True)
class Part:
    """Which part of a long document a chunk is. digest: of the whole document."""

    first: bool
    last: bool
    digest: bytes


_NO_KEY = "no key "


@dataclass(frozen=True)
class BadRecord:
    """number: of the line, row or document in the file, from 1; 0: the file itself, or its one document."""

    file: str
    number: int
    reason: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}" if self.number else self.file

    def problem(self) -> Problem:
        fix = 'skip such records (--on-error skip, in a TOML data.on_error = "skip"), or correct it and start over'
        if self.reason.startswith(_NO_KEY):
            fix = f"name the text's key: --text-key, in a TOML a source's text_key; or {fix}"
        return Problem("", self.place, self.reason, "UTF-8 text, in .jsonl as one JSON object a line", fix)


@dataclass(frozen=True)
class Chunk:
    """About CHUNK_BYTES of text of one format.

    format: "text", "jsonl" or "rows"; records: (file, number as in BadRecord, bytes), in "jsonl" of many whole lines,
    numbered by the first; next: where to go on; done_bytes: read from the disk so far, all files together; bad: what
    the reader itself found. documents() gives bad too.
    """

    format: str
    reading: Reading
    records: list[tuple[str, int, bytes]]
    part: Part | None
    next: Position
    done_bytes: int
    bad: list[BadRecord]


@dataclass(frozen=True)
class Document:
    """A document, or a part of a long one: text, size in UTF-8 bytes, and the digest of the whole document."""

    text: str
    size: int
    first: bool
    last: bool
    digest: bytes


def documents(chunk: Chunk) -> Iterator[Document | BadRecord]:
    """The documents of a chunk in order, and what is no document. Empty ones and blank lines are left out.

    A document of more than LONG_BYTES comes as several, whatever its format. A BadRecord stands for a whole document:
    no part of it is given.
    """
    for file, number, data in chunk.records:
        if chunk.format == "jsonl":
            for i, line in enumerate(data.split(b"\n")):
                if line and not line.isspace():
                    yield from _of_line(line, chunk.reading.text_key, file, number + i)
            continue
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            yield BadRecord(file, number, not_utf8(data, error))
            continue
        if chunk.part is not None:
            yield Document(text, len(data), chunk.part.first, chunk.part.last, chunk.part.digest)
        else:
            yield from _of_text(text, data)
    yield from chunk.bad


def cut(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The parts of a long document, each with whether it is the last one.

    A part ends after the last newline in its CHUNK_BYTES, or without one where a character ends.
    """
    buffer = bytearray()
    for block in blocks:
        buffer += block
        while len(buffer) > CHUNK_BYTES:
            end = buffer.rfind(b"\n", 0, CHUNK_BYTES) + 1
            if not end:
                end = CHUNK_BYTES
                while end > CHUNK_BYTES - 3 and buffer[end] & 0xC0 == 0x80:
                    end -= 1
            yield bytes(buffer[:end]), False
            del buffer[:end]
    yield bytes(buffer), True


def not_utf8(data: bytes, error: UnicodeDecodeError, offset: int = 0) -> str:
    """offset: of data in the document."""
    return f"byte 0x{data[error.start]:02x} at offset {offset + error.start}, which is no UTF-8 ({error.reason})"


def _of_text(text: str, data: bytes) -> Iterator[Document]:
    """data: text in UTF-8."""
    if not data:
        return
    digest = hashlib.sha256(SPLIT_SALT + data).digest()
    if len(data) <= LONG_BYTES:
        yield Document(text, len(data), True, True, digest)
        return
    first = True
    for part, last in cut([data]):
        yield Document(part.decode(), len(part), first, last, digest)
        first = False


def _of_line(line: bytes, key: str, file: str, number: int) -> Iterator[Document | BadRecord]:
    try:
        text = _value(line, key)
        data = text.encode()
    except UnicodeEncodeError as error:
        reason = f"half a surrogate pair \\u{ord(error.object[error.start]):04x} in {key!r}, which is no character"
    except _Bad as error:
        reason = str(error)
    else:
        yield from _of_text(text, data)
        return
    yield BadRecord(file, number, reason)


class _Bad(Exception):
    """Its message is the reason of a BadRecord."""


def _value(line: bytes, key: str) -> str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _Bad(not_utf8(line, error)) from None
    except json.JSONDecodeError as error:
        raise _Bad(f"a line that is no JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise _Bad("a line of JSON that is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise _Bad(f"a line of JSON that cannot be read ({error})") from None
    if not isinstance(record, dict):
        raise _Bad(f"JSON that is {_kind(record)}, not an object")
    if key not in record:
        keys = ", ".join(repr(name[:40]) for name in list(record)[:5]) + (", …" if len(record) > 5 else "")
        raise _Bad(f"{_NO_KEY}{key!r} ({f'there are {keys}' if keys else 'the object is empty'})")
    if not isinstance(record[key], str):
        raise _Bad(f"{_kind(record[key])} in {key!r}, not a string")
    return record[key]


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "an array", str: "a string"}
    return kinds.get(type(value), "a number")
