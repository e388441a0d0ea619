"""Files to documents: every format read whole and in order, resumed anywhere, damage named, memory flat."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from titanlite.config.problems import InputError
from titanlite.data import formats, records, streams
from titanlite.data.records import BadRecord, Chunk, Document, File, Position, Reading, documents
from titanlite.data.text import Text, text_at, text_of_inputs

Small = Callable[..., None]
SEPARATOR = "<|endoftext|>"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Sets the sizes, so that boundaries lie everywhere."""

    def small(chunk: int = 100, long: int = 1 << 20, block: int = 7) -> None:
        monkeypatch.setattr(records, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(records, "LONG_BYTES", long)
        monkeypatch.setattr(streams, "BLOCK_BYTES", block)
        monkeypatch.setattr(formats, "BLOCK_BYTES", block)

    return small


def digest_of(text: str) -> bytes:
    return hashlib.sha256(b"titanlite\n" + text.encode()).digest()


def everything(chunks: Iterator[Chunk] | Sequence[Chunk]) -> list[Document | BadRecord]:
    return [found for chunk in chunks for found in documents(pickle.loads(pickle.dumps(chunk)))]


def contents(chunk: Chunk) -> tuple[object, ...]:
    return chunk.format, chunk.records, chunk.part, chunk.bad, chunk.next


def whole(found: Sequence[Document | BadRecord]) -> list[str | BadRecord]:
    """Parts joined; checks their marks, sizes and digests."""
    joined: list[str | BadRecord] = []
    parts: list[Document] = []
    for document in found:
        if isinstance(document, BadRecord):
            assert not parts, "half a document"
            joined.append(document)
            continue
        assert document.first == (not parts) and document.size == len(document.text.encode()) > 0
        parts.append(document)
        if document.last:
            text = "".join(part.text for part in parts)
            assert {part.digest for part in parts} == {digest_of(text)}
            joined.append(text)
            parts = []
    assert not parts
    return joined


def read(path: Path | str, **reading: str) -> list[str | BadRecord]:
    """All that is in a file or folder, also by going on at every chunk, which has to give the same."""
    return read_text(text_at(path, "input", Reading(**reading)))


def read_text(text: Text) -> list[str | BadRecord]:
    chunks = list(text.chunks())
    for i, chunk in enumerate(chunks):
        position = Position(**json.loads(json.dumps(asdict(chunk.next))))
        upto = None if i % (len(chunks) // 8 + 1) == 0 else i + 4  # all the rest now and then
        rest = itertools.islice(text.chunks(position), upto and upto - i - 1)
        assert list(map(contents, rest)) == list(map(contents, chunks[i + 1 : upto]))
    assert [chunk.done_bytes for chunk in chunks] == sorted(chunk.done_bytes for chunk in chunks)
    assert not chunks or 0 < chunks[-1].done_bytes <= text.size()
    return whole(everything(chunks))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def bad(path: Path, number: int, reason: str) -> BadRecord:
    return BadRecord(str(path), number, reason)


def texts(n: int, seed: int = 0, longest: int = 60) -> list[str]:
    rng = random.Random(seed)
    alphabet = 'ab \n\r\t"\\é€🙂<|>endoftext\u2028\0'
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, longest))) for _ in range(n)]


# --- whole files ---


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_text_file_is_one_document_as_it_is(tmp_path: Path, small: Small, end: str, block: int):
    small(chunk=20, block=block)
    contents = ["one\r\ntwo\r\n", "\n\n\n", "no newline", "é€🙂\n" * 9, "", " ", SEPARATOR]
    for i, text in enumerate(contents):
        (tmp_path / f"{i}.txt{end}").write_bytes(COMPRESS[end](text.encode()))
    assert read(tmp_path) == [text for text in contents if text]


def test_many_small_files_share_a_chunk(tmp_path: Path, small: Small):
    small(chunk=1000)
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}\n")
    chunks = list(text_at(tmp_path, "input").chunks())
    assert len(chunks) == 3
    assert read(tmp_path) == [f"document {i}\n" for i in range(30)]


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", COMPRESS)
def test_a_byte_order_mark_is_dropped(tmp_path: Path, small: Small, end: str, block: int):
    small(block=block)
    mark = b"\xef\xbb\xbf"
    for name, data in {"a.txt": mark + b"x", "b.txt": mark, "c.txt": b"x" + mark, "d.txt": mark + mark}.items():
        (tmp_path / (name + end)).write_bytes(COMPRESS[end](data))
    (tmp_path / f"e.jsonl{end}").write_bytes(COMPRESS[end](mark + b'{"text": "y"}\n'))
    assert read(tmp_path) == ["x", "x\ufeff", "\ufeff", "y"]


def test_chunks_do_not_mix_formats(tmp_path: Path, small: Small):
    small(chunk=1 << 20)
    for i, name in enumerate(["a.txt", "b.jsonl", "c.txt.gz", "d.ndjson", "e.parquet", "f.txt"]):
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": [str(i)]}), tmp_path / name)
        else:
            data = f'{{"text": "{i}"}}' if "json" in name else str(i)
            (tmp_path / name).write_bytes(COMPRESS[".gz" if name.endswith("gz") else ""](data.encode()))
    text = text_at(tmp_path, "input")
    assert [chunk.format for chunk in text.chunks()] == ["text", "jsonl", "text", "jsonl", "rows", "text"]
    assert read(tmp_path) == ["0", "1", "2", "3", "4", "5"]


# --- separators ---


def split_by_hand(text: str, separator: str) -> list[str]:
    return [part for part in (part.strip("\r\n") for part in text.split(separator)) if part]


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("block", [1, 5, 13, 64, 1000])
@pytest.mark.parametrize("separator", [SEPARATOR, "\n\n", "\n---\n", "a", "ab", "€"])
def test_documents_between_separators(tmp_path: Path, small: Small, separator: str, block: int, end: str):
    small(chunk=100, block=block)
    rng = random.Random(block)
    joined = [separator, "\n" + separator, separator + "\n", "\r\n" + separator + "\n\n", separator * 2, "\n\n\n\n"]
    for i in range(3):
        text = "".join(part + rng.choice(joined) for part in texts(30, seed=i))
        text = ["\n" + text, text + "the last", separator + text + "\n"][i]
        (tmp_path / f"{i}.txt{end}").write_bytes(COMPRESS[end](text.encode()))
    expected = []
    for i in range(3):
        data = (tmp_path / f"{i}.txt{end}").read_bytes()
        plain = gzip.decompress(data) if end == ".gz" else data
        plain = zstandard.ZstdDecompressor().decompress(data) if end == ".zst" else plain
        expected += split_by_hand(plain.decode(), separator)
    assert read(tmp_path, separator=separator) == expected


@pytest.mark.parametrize("text", ["", "\n", SEPARATOR, f"\n{SEPARATOR}\r\n{SEPARATOR}", SEPARATOR * 3])
def test_nothing_between_separators_is_no_document(tmp_path: Path, small: Small, text: str):
    small()
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path, separator=SEPARATOR) == []


def test_long_runs_of_newlines_do_not_gather_in_memory(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch):
    """More than _LONGEST_RUN newlines before a separator are text: the rule is stated, and the same when resumed."""
    small(chunk=64)
    monkeypatch.setattr(formats, "_LONGEST_RUN", 50)
    (tmp_path / "a.txt").write_text(f"a{SEPARATOR}b" + "\n" * 500 + f"{SEPARATOR}c" + "\n" * 30 + SEPARATOR)
    a, b, c = read(tmp_path, separator=SEPARATOR)
    assert isinstance(b, str)
    assert (a, b.strip(), c) == ("a", "b", "c") and 400 < len(b) <= 501


# --- long documents ---


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("separator", ["", SEPARATOR])
@pytest.mark.parametrize(("chunk", "long", "block"), [(4, 4, 1), (16, 50, 7), (50, 200, 64), (64, 64, 1000)])
def test_long_documents_come_in_parts(
    tmp_path: Path, small: Small, end: str, separator: str, chunk: int, long: int, block: int
):
    small(chunk, long, block)
    made = [t.strip("\r\n") or "x" for t in texts(8, seed=chunk, longest=400)]
    made += ["€" * 100, "🙂" * 60, "line\n" * 60 + "end", "s", "x" * long, "x" * (long + 1)]
    if separator:
        (tmp_path / f"a.txt{end}").write_bytes(COMPRESS[end](f"\n{separator}\r\n".join(made).encode()))
    else:
        for i, text in enumerate(made):
            (tmp_path / f"{i:02}.txt{end}").write_bytes(COMPRESS[end](text.encode()))
    assert read(tmp_path, separator=separator) == made
    for found in everything(text_at(tmp_path, "input", Reading(separator=separator)).chunks()):
        assert isinstance(found, Document) and (found.size <= chunk or (found.first and found.last))


def test_parts_end_after_newlines_or_between_characters(tmp_path: Path, small: Small):
    small(chunk=10, long=12)
    (tmp_path / "a.txt").write_bytes("ab\ncd\nefghijkl€€€€€m".encode())
    found = everything(text_at(tmp_path / "a.txt", "input").chunks())
    assert [part.text for part in found if isinstance(part, Document)] == ["ab\ncd\n", "efghijkl", "€€€", "€€m"]


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_long_records_come_in_parts_as_long_files_do(tmp_path: Path, small: Small, end: str):
    small(chunk=16, long=50)
    made = [*texts(8, longest=300), "🙂" * 60]
    if end == "jsonl":
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in made))
    else:
        pq.write_table(pa.table({"text": made}), tmp_path / "a.parquet")
    for i, text in enumerate(made):
        (tmp_path / f"{i:02}.txt").write_bytes(text.encode())
    assert read(tmp_path / f"a.{end}") == made
    of_files = [everything(text_at(p, "input").chunks()) for p in sorted(tmp_path.glob("*.txt"))]
    assert everything(text_at(tmp_path / f"a.{end}", "input").chunks()) == [d for found in of_files for d in found]


@pytest.mark.parametrize("end", COMPRESS)
def test_no_part_of_a_bad_long_document_is_given(tmp_path: Path, small: Small, end: str):
    small(chunk=16, long=50)
    long = b"good " * 30
    data = SEPARATOR.encode().join([b"a", long + b"\xff" + long, b"b", long + b"\xe2\x82", b"c", long])
    path = tmp_path / f"a.txt{end}"
    path.write_bytes(COMPRESS[end](data))
    assert read(path, separator=SEPARATOR) == [
        "a",
        bad(path, 2, "byte 0xff at offset 150, which is no UTF-8 (invalid start byte)"),
        "b",
        bad(path, 4, "byte 0xe2 at offset 150, which is no UTF-8 (unexpected end of data)"),
        "c",
        long.decode(),
    ]
    path.write_bytes(COMPRESS[end](long + b"\xff"))
    assert read(path) == [bad(path, 0, "byte 0xff at offset 150, which is no UTF-8 (invalid start byte)")]


# --- JSON lines ---


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (100, 7), (300, 1000), (1 << 20, 1 << 18)])
def test_json_lines(tmp_path: Path, small: Small, end: str, chunk: int, block: int):
    small(max(chunk, 4), block=block)
    made = texts(40)
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 > 0) for i, text in enumerate(made)]
    for i, name in enumerate(["a.jsonl", "b.NDJSON", "c.jsonl"]):
        data = ["\n".join(lines) + "\n", "\r\n".join(lines), "\n\n  \n\t\r\n" + "\n\n".join(lines)][i]
        (tmp_path / (name + end)).write_bytes(COMPRESS[end](data.encode()))
    (tmp_path / f"d.jsonl{end}").write_bytes(COMPRESS[end](b""))
    assert read(tmp_path) == made * 3


def test_the_key_of_the_text(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "content": "yes", "content": "the last one"}\n{"content": ""}')
    assert read(tmp_path, text_key="content") == ["the last one"]


BAD_LINES = {
    b'{"text": "\xff"}': "byte 0xff at offset 10, which is no UTF-8 (invalid start byte)",
    b'{"text": "a"': "a line that is no JSON (Expecting ',' delimiter at column 13)",
    b"text": "a line that is no JSON (Expecting value at column 1)",
    b'{"text": "a"} {"text": "b"}': "a line that is no JSON (Extra data at column 15)",
    b'["text"]': "JSON that is an array, not an object",
    b'"text"': "JSON that is a string, not an object",
    b"null": "JSON that is null, not an object",
    b"{}": "no key 'text' (the object is empty)",
    b'{"Text": 1}': "no key 'text' (there are 'Text')",
    b'{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}': "no key 'text' (there are 'a', 'b', 'c', 'd', 'e', …)",
    b'{"text": null}': "null in 'text', not a string",
    b'{"text": 5}': "a number in 'text', not a string",
    b'{"text": true}': "true in 'text', not a string",
    b'{"text": ["a"]}': "an array in 'text', not a string",
    b'{"text": "\\ud800 alone"}': "half a surrogate pair \\ud800 in 'text', which is no character",
    b'{"text": "a", "b": ' + b"[" * 100_000: "a line of JSON that is nested too deeply",
}


def test_bad_lines_are_named_and_the_others_read(tmp_path: Path, small: Small):
    small(chunk=200)
    path = tmp_path / "a.jsonl"
    lines = [line for wrong in BAD_LINES for line in (b'{"text": "good"}', b"", wrong)]
    path.write_bytes(b"\n".join(lines))
    expected = [e for i, why in enumerate(BAD_LINES.values()) for e in ("good", bad(path, 3 * i + 3, why))]
    assert read(path) == expected


def test_numbers_that_python_refuses_to_read(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "n": ' + "1" * 5000 + '}\n{"text": "b"}')
    first, second = read(path)
    assert isinstance(first, BadRecord) and "cannot be read" in first.reason and second == "b"


def test_surrogate_pairs_are_characters(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude42"}')
    assert read(tmp_path) == ["🙂"]


@pytest.mark.parametrize("end", COMPRESS)
def test_a_line_too_long_for_memory_is_a_bad_record(
    tmp_path: Path, small: Small, end: str, monkeypatch: pytest.MonkeyPatch
):
    small(chunk=1000, block=1000)
    monkeypatch.setattr(formats, "LONGEST_LINE", 1 << 16)
    path = tmp_path / f"a.jsonl{end}"
    lines = ['{"text": "a"}', json.dumps({"text": random.Random(0).randbytes(300_000).hex()}), '{"text": "b"}', "wrong"]
    path.write_bytes(COMPRESS[end]("\n".join(lines).encode()))
    found = read(path)
    assert [f for f in found if isinstance(f, str)] == ["a", "b"]
    faults = {f.number: f.reason for f in found if isinstance(f, BadRecord)}
    assert faults == {2: "a line of more than 65,536 bytes", 4: "a line that is no JSON (Expecting value at column 1)"}


# --- parquet ---


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("chunk", [4, 300, 1 << 20])
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "string_view"])
def test_parquet(tmp_path: Path, small: Small, kind: str, chunk: int, rows: int):
    small(chunk)
    made = texts(50)
    plain = pa.array(made, pa.large_string() if kind == "large_string" else pa.string())
    column = plain.dictionary_encode() if kind == "dictionary" else plain
    column = plain.cast(pa.string_view()) if kind == "string_view" else column
    for name in ("a.parquet", "b.PARQUET"):
        table = pa.table({"id": list(range(50)), "body": column, "other": made})
        pq.write_table(table, tmp_path / name, row_group_size=rows)
    assert pq.read_schema(tmp_path / "a.parquet").field("body").type == column.type
    assert read(tmp_path, text_key="body") == made * 2


def test_parquet_rows_without_text(tmp_path: Path, small: Small):
    small(chunk=100)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "", "b", None]}), path, row_group_size=2)
    found = read(path)
    null = "null in the column 'text'"
    assert [f for f in found if isinstance(f, str)] == ["a", "b"]
    assert [f for f in found if isinstance(f, BadRecord)] == [bad(path, 2, null), bad(path, 5, null)]
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert read(path) == []


def test_parquet_strings_that_are_no_utf8(tmp_path: Path):
    path = tmp_path / "a.parquet"
    array = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"a\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": array}), path)
    reason = "byte 0xff at offset 1, which is no UTF-8 (invalid start byte)"
    assert read(path) == ["ok", bad(path, 2, reason)]


def test_a_missing_column_is_refused_with_those_there_are(tmp_path: Path):
    table = pa.table({"id": [1], "content": ["a"], "meta": [{"text": "b"}]})
    pq.write_table(table, tmp_path / "b.parquet")
    message = r"b.parquet: got no column 'text'; allowed: one of its columns \('id', 'content', 'meta'\)"
    with pytest.raises(InputError, match=message):
        text_at(tmp_path, "input")
    with pytest.raises(InputError, match=r"'id' of type int64; allowed: a column of strings \('content'\)"):
        text_at(tmp_path, "input", Reading("id"))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "0.txt").write_text("text")
    text = text_at(tmp_path, "input")  # looks into the first .parquet only
    with pytest.raises(InputError, match=message):
        next(text.chunks())  # and reading looks into all before it gives anything


def test_damaged_parquet(tmp_path: Path):
    for name in "abc":
        pq.write_table(pa.table({"text": [name * 5000] * 9}), tmp_path / f"{name}.parquet", compression="none")
    whole = (tmp_path / "b.parquet").read_bytes()
    path = tmp_path / "b.parquet"
    for data in (b"", b"PAR1", whole[:-20], whole[:-2], b"x" * 1000, whole[:4] + b"\xff" * 400 + whole[404:]):
        path.write_bytes(data)
        found = read(tmp_path)
        faults = [f for f in found if isinstance(f, BadRecord)]
        assert [f for f in found if isinstance(f, str)] == ["a" * 5000] * 9 + ["c" * 5000] * 9
        assert [(f.file, f.number) for f in faults] == [(str(path), 0)]
        assert faults[0].reason.startswith("damaged parquet data (") and faults[0].reason.endswith("after row 0")


# --- damaged files ---


@pytest.mark.parametrize("end", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["b.jsonl", "b.txt"])
@pytest.mark.parametrize("cut", [1, 3, 20, 400])
def test_a_compressed_file_that_ends_in_the_middle(tmp_path: Path, small: Small, end: str, name: str, cut: int):
    small(chunk=300, block=64)
    lines = [json.dumps({"text": f"{i} {random.Random(i).random()}"}) for i in range(200)]
    for other in ("a.txt", "c.txt"):
        (tmp_path / other).write_text(other)
    path = tmp_path / (name + end)
    data = COMPRESS[end]("\n".join(lines).encode())
    path.write_bytes(data[:-cut])
    found = read(tmp_path)
    (fault,) = [f for f in found if isinstance(f, BadRecord)]
    good = [f for f in found if isinstance(f, str)]
    assert (fault.file, fault.number, good[0], good[-1]) == (str(path), 0, "a.txt", "c.txt")
    reason = f"{'gzip' if end == '.gz' else 'zstd'} data that end in the middle"
    if name == "b.txt":
        assert len(good) == 2 and fault.reason == reason  # no half document
    else:
        n = len(good) - 2
        assert good[1:-1] == [json.loads(line)["text"] for line in lines[:n]]
        assert fault.reason == f"{reason}, after line {n}"
        assert n > 100 or end == ".zst"  # which compresses so little text as one block


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_a_long_document_in_a_damaged_file_is_not_given(tmp_path: Path, small: Small, end: str):
    small(chunk=100, long=500, block=64)
    path = tmp_path / f"a.txt{end}"
    rng = random.Random(0)
    long = "".join(rng.choices("abcdefghij", k=5000))
    path.write_bytes(COMPRESS[end](f"one{SEPARATOR}{long}{SEPARATOR}{long}".encode())[:-9])
    faults = [f for f in read(path, separator=SEPARATOR) if isinstance(f, BadRecord)]
    assert [f.number for f in faults] == [0] and "in the middle, after document" in faults[0].reason


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_damage_inside_and_garbage_after_compressed_data(tmp_path: Path, small: Small, end: str):
    small(chunk=300, block=64)
    path = tmp_path / f"a.jsonl{end}"
    compressed = COMPRESS[end]("".join(f'{{"text": "{i}"}}\n' for i in range(50)).encode())
    made = [str(i) for i in range(50)]
    for data in (compressed + b"garbage", compressed + compressed[:7], b"garbage", b"\0\0\0\0" + compressed):
        path.write_bytes(data)
        found = read(path)
        assert isinstance(found[-1], BadRecord) and found[-1].number == 0 and len(found) in (1, 51)
        assert found[:-1] == made[: len(found) - 1]
    flipped = bytearray(compressed)
    flipped[len(flipped) // 2] ^= 0xFF
    path.write_bytes(bytes(flipped))
    assert isinstance(read(path)[-1], BadRecord) or end == ".zst"  # zstd has no checksum unless asked for


@pytest.mark.parametrize("end", [".gz", ".zst"])
@pytest.mark.parametrize("block", [1, 64, 1 << 18])
def test_several_members_and_frames(tmp_path: Path, small: Small, end: str, block: int):
    small(chunk=64, block=block)
    made = texts(30)
    members = [COMPRESS[end](f"{json.dumps({'text': text})}\n".encode()) for text in made]
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip" if end == ".zst" else b"\0" * 100
    (tmp_path / f"a.jsonl{end}").write_bytes(b"".join([*members[:9], COMPRESS[end](b""), *members[9:], skippable]))
    assert read(tmp_path) == made


def test_zstd_with_a_long_window_and_a_checksum(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_checksum=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(data.compress(b"text\n" * 1000) + data.flush())
    assert read(tmp_path) == ["text\n" * 1000]


def test_bad_utf8_in_a_short_document(tmp_path: Path, small: Small):
    small()
    (tmp_path / "a.txt").write_bytes(b"good \xc3\xa9 then \xff bad")
    (tmp_path / "b.txt").write_text("good")
    reason = "byte 0xff at offset 13, which is no UTF-8 (invalid start byte)"
    assert read(tmp_path) == [bad(tmp_path / "a.txt", 0, reason), "good"]
    with pytest.raises(InputError, match=r"a.txt: got byte 0xff at offset 13, which is no UTF-8"):
        list(text_at(tmp_path, "input").documents())


# --- standard input ---


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def stdin(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return stdin


def test_standard_input(small: Small, stdin: Callable[[bytes], None]):
    small(chunk=50)
    made = texts(20)
    data = "\n".join(json.dumps({"text": text}) for text in made).encode()
    text = text_of_inputs(["-"], Reading(), "jsonl")
    stdin(data)
    chunks = list(text.chunks())
    assert whole(everything(chunks)) == made
    for i, chunk in enumerate(chunks):  # given the same bytes again, it goes on
        stdin(data)
        assert everything(text.chunks(chunk.next)) == everything(chunks[i + 1 :])


@pytest.mark.parametrize("separator", ["", SEPARATOR])
def test_long_documents_on_standard_input_are_given_while_they_are_read(
    small: Small, stdin: Callable[[bytes], None], separator: str
):
    small(chunk=16, long=50)
    long = "€uro\n" * 100
    data = (f"a{SEPARATOR}{long}{SEPARATOR}b" if separator else long).encode()
    text = text_of_inputs(["-"], Reading(separator=separator), "txt")
    stdin(data)
    chunks = list(text.chunks())
    found = [d for d in everything(chunks) if isinstance(d, Document)]
    expected = long.rstrip("\n") if separator else long
    assert "".join(d.text for d in found) == (f"a{expected}b" if separator else expected)
    assert {d.digest for d in found if not (d.first and d.last)} == {
        hashlib.sha256(b"titanlite\n" + expected.encode()[:50]).digest()
    }
    for i, chunk in enumerate(chunks):
        stdin(data)
        assert everything(text.chunks(chunk.next)) == everything(chunks[i + 1 :])
    stdin(data + b"\xff" if not separator else data.replace(b"uro\n<", b"uro\n\xff<"))
    with pytest.raises(InputError, match=r"standard input(:2)?: got byte 0xff at offset 700"):
        list(text.chunks())


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match=r"standard input: got a file that cannot be read \(Bad file descriptor\)"):
        list(text_of_inputs(["-"], Reading(), "txt").chunks())


# --- missing packages, memory ---


@pytest.mark.parametrize(("name", "package"), [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str):
    for path in (tmp_path / name, tmp_path / f"b{name}"):
        path.touch()
    monkeypatch.setitem(sys.modules, package, None)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(InputError, match=rf"data.path: got .*{name}'.*package {package}") as caught:
            text_at(path, "data.path")
        assert [problem.fix for problem in caught.value.problems] == [f"pip install {package}"]


MEASURE = """
import resource, sys
from titanlite.data.records import Reading, documents
from titanlite.data.text import text_at
text = text_at(sys.argv[1], "input", Reading(separator=sys.argv[2]))
if sys.argv[1].endswith("parquet"):
    import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = 0
for chunk in text.chunks():
    size += sum(document.size for document in documents(chunk))
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""

LINE = ("the quick brown fox jumps over the lazy dog, again and again, " * 4 + "\n").encode()
MEGABYTES = 100


def write_json_lines(path: Path, compress: Any = open) -> int:
    line = json.dumps({"text": LINE.decode() * 10}).encode() + b"\n"
    with compress(path, "wb") as file:
        for _ in range(n := MEGABYTES * 1_000_000 // len(line)):
            file.write(line)
    return n * len(LINE) * 10


def write_text(path: Path, compress: Any = open, separator: bytes = b"") -> int:
    with compress(path, "wb") as file:
        for _ in range(n := MEGABYTES * 1_000_000 // len(LINE)):
            file.write(LINE)
        file.write(separator + b"\n" * 30_000_000 if separator else b"")
    return n * len(LINE) - (1 if separator else 0)


def write_rows(path: Path) -> int:
    rng = random.Random(0)
    schema = pa.schema({"id": pa.int64(), "text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        rows = [rng.randbytes(5000).hex() for _ in range(MEGABYTES * 100)]
        writer.write_table(pa.table({"id": list(range(len(rows))), "text": rows}, schema), row_group_size=len(rows))
    return sum(map(len, rows))


@pytest.mark.parametrize(
    ("name", "write", "separator"),
    [
        ("a.txt", write_text, ""),
        ("a.txt", lambda path: write_text(path, separator=SEPARATOR.encode()), SEPARATOR),
        ("a.txt.gz", lambda path: write_text(path, gzip.open), ""),
        ("a.txt.zst", lambda path: write_text(path, zstandard.open), ""),
        ("a.jsonl", write_json_lines, ""),
        ("a.jsonl.gz", lambda path: write_json_lines(path, gzip.open), ""),
        ("a.parquet", write_rows, ""),
    ],
    ids=["txt", "separated", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "parquet"],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in other units")
def test_memory_is_flat(tmp_path: Path, name: str, write: Callable[[Path], int], separator: str):
    """100 MB in one file: a child process reads it with less than 60 MB more than it started with."""
    size = write(tmp_path / name)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name), separator]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    read, grown = map(int, done.stdout.split())
    assert read == size
    assert grown < 60_000


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, small: Small):
    small(chunk=16, long=50)
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 1000)
    chunks = text_at(path, "input").chunks()
    next(chunks)
    path.write_text("line\n")
    with pytest.raises(InputError, match="became shorter while it was read"):
        list(chunks)
    path.write_text("line\n" * 1000)
    chunks = text_at(path, "input").chunks()
    path.unlink()
    with pytest.raises(InputError, match=r"a.txt: got a file that cannot be read \(No such file"):
        list(chunks)


def test_the_name_of_a_file_without_a_path():
    assert str(File(None, "-")) == "standard input"
