"""Token files of other stacks, read where they lie: nanoGPT, llm.c (and modded-nanogpt), Megatron. Torch-free.

nanoGPT:   x.bin is raw uint16, no header.
llm.c:     x.bin is 256 int32 (magic, version, number of tokens, the rest unused), then uint16 or uint32 ids.
Megatron:  x.bin is raw ids; x.idx is b"MMIDIDX\\0\\0", uint64 version 1, uint8 code of the dtype, uint64 number of
           sequences, uint64 number of document indices, then int32 length of each sequence in tokens, int64 offset of
           each in x.bin in bytes, int64 document indices: the first sequence of every document, and the end.
All are little-endian. None says which tokenizer made it, or what its marks are, and none has a checksum. nanoGPT and
Megatron write the mark after a document, llm.c before it.
Sources: karpathy/nanoGPT data/*/prepare.py, karpathy/llm.c dev/data/data_common.py, NVIDIA/Megatron-LM
megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.data.shards import TokenArray
from titanlite.files import expand

_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic: version, dtype
_LLM_C_HEADER = 256 * 4
_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_READ_DTYPES = ("uint16", "int32")  # what Megatron writes ids in
_BLOCK = 1 << 22  # tokens read at once
_INDEX_BLOCK = 1 << 18  # sequences checked at once


class ForeignTokens(TokenArray):
    """One .bin of another stack, or several of one kind and dtype that a glob names, in the order of their paths.

    kind: "nanoGPT", "llm.c" or "Megatron"
    Raises InputError, with every fault found, for headers and sizes; verify() also reads Megatron's index.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        headers: list[_Header] = []
        problems: list[Problem] = []
        for file in bin_files(path):
            try:
                headers.append(_read_header(file))
            except InputError as error:
                problems += error.problems
            except OSError as error:
                got = f"a file that cannot be read ({error.strerror})"
                problems.append(Problem("", str(file), got, "a readable .bin", "change its permissions"))
        if problems:
            raise InputError(problems)
        if not headers:
            raise InputError(Problem("", str(path), "no such file", ".bin files", "correct the path"))
        first = headers[0]
        for header in headers:
            if (header.kind, header.dtype) != (first.kind, first.dtype):
                got = f"{first.dtype} of {first.kind} ({first.file.name}) and {header.dtype} of {header.kind} "
                got += f"({header.file.name})"
                fix = "make each kind a source of its own"
                raise InputError(Problem("", str(path), got, "files of one kind and dtype", fix))
        self.kind = first.kind
        counts = [header.tokens for header in headers]
        super().__init__(path, first.dtype, [header.file for header in headers], counts, first.offset)
        if self.kind == "Megatron":
            self.documents = sum(header.documents for header in headers)

    def verify(self) -> None:
        """Check that Megatron's sequences lie one after the other. The formats have no checksums."""
        problems: list[Problem] = []
        if self.kind == "Megatron":
            for file in self.files:
                problems += _index_problems(file, self._dtype.itemsize)
        if problems:
            raise InputError(problems)

    def depends_on(self) -> list[Path]:
        index = [file.with_suffix(".idx") for file in self.files] if self.kind == "Megatron" else []
        return [*self.files, *index]


def scan(tokens: TokenArray) -> dict[str, str | int]:
    """Read all that opening leaves out, once; JSON-able, to be remembered as long as tokens.depends_on() stay the same.

    sha256: of the token bytes without headers; max_id and min_id, and max_at and min_at: where they are first found in
    the whole array. Without tokens the ids are -1. Raises what verify() raises.
    """
    tokens.verify()
    digest = hashlib.sha256()
    largest, smallest, largest_at, smallest_at, start = -1, -1, 0, 0, 0
    for block in tokens.blocks(_BLOCK):
        digest.update(block.data)
        high, low = int(block.max()), int(block.min())
        if start == 0 or high > largest:
            largest, largest_at = high, start + int(block.argmax())
        if start == 0 or low < smallest:
            smallest, smallest_at = low, start + int(block.argmin())
        start += len(block)
    return {
        "sha256": digest.hexdigest(), "max_id": largest, "max_at": largest_at, "min_id": smallest, "min_at": smallest_at
    }  # fmt: skip


def fingerprint(tokens: TokenArray, scanned: dict[str, str | int]) -> str:
    """sha256 of the content of files that have none of their own: ids and dtype; how files are cut is of no matter."""
    return hashlib.sha256(json.dumps([tokens.dtype, scanned["sha256"]]).encode()).hexdigest()


def check_ids(tokens: TokenArray, scanned: dict[str, str | int], vocab_size: int) -> None:
    """Raises InputError that names a file and a token of it when an id is not one of the tokenizer's."""
    problems = []
    allowed = f"ids from 0 to {vocab_size - 1}, which tokenizer.path has"
    for name, fix in (
        ("max", "name the tokenizer that made the file"),
        ("min", "make the file again: no tokenizer has negative ids"),
    ):
        wrong = int(scanned[f"{name}_id"])
        if tokens.n_tokens and not 0 <= wrong < vocab_size:
            file, at = tokens.locate(int(scanned[f"{name}_at"]))
            problems.append(Problem("", str(file), f"the id {wrong} at token {at}", allowed, fix))
    if problems:
        raise InputError(problems)


# --- the files of a path ---


def matches(path: str) -> list[Path]:
    """A path that exists is itself, whatever characters it has; so is a .bin of which only the .idx is there."""
    if Path(path).exists() or (path.endswith(".bin") and Path(path).with_suffix(".idx").exists()):
        return [Path(path)]
    return sorted({match for match in expand(path)[1] if match.is_file()})


def bin_files(path: Path) -> list[Path]:
    """The .bin files that a path or a glob means. An .idx stands for its .bin, so that a glob may match both."""
    files = [file for file in matches(str(path)) if file.suffix in (".bin", ".idx")]
    return sorted({file.with_suffix(".bin") for file in files})


# --- headers ---


@dataclass(frozen=True)
class _Header:
    file: Path
    kind: str
    dtype: str
    tokens: int
    offset: int = 0
    documents: int = 0


def _read_header(file: Path) -> _Header:
    index = file.with_suffix(".idx")
    if index.exists():
        return _read_megatron(file, index)
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = opened.read(_LLM_C_HEADER)
    magic, version, tokens = np.frombuffer(header[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    # llm.c's magics are dates. As nanoGPT's ids these would be any id, then 308 or 309, then one below 100, then 0.
    if magic in _LLM_C or (20240101 <= magic <= 20291231 and 0 < version < 100):
        return _read_llm_c(file, size, len(header), magic, version, tokens)
    if file.stem.endswith("_document"):
        got = "the name of a Megatron .bin, and no .idx beside it"
        fix = f"bring {index.name}; if it is raw uint16 of something else, rename it"
        raise InputError(Problem("", str(file), got, f"{file.name} and {index.name}", fix))
    if size % 2:
        raise InputError(_damaged(file, f"{size} bytes, an odd number", "raw uint16 ids (nanoGPT): 2 bytes each"))
    return _Header(file, "nanoGPT", "uint16", size // 2)


def _read_llm_c(file: Path, size: int, header_size: int, magic: int, version: int, tokens: int) -> _Header:
    if header_size < _LLM_C_HEADER:
        raise InputError(_damaged(file, f"a header of {header_size} bytes", f"llm.c's header of {_LLM_C_HEADER} bytes"))
    if magic not in _LLM_C or version != _LLM_C[magic][0]:
        known = " or ".join(f"{m} version {v} ({dtype})" for m, (v, dtype) in _LLM_C.items())
        fix = "give llm.c's token files (not its models or evaluations), written by a version that is known here"
        raise InputError(Problem("", str(file), f"llm.c's magic {magic} version {version}", known, fix))
    if tokens < 0:
        raise InputError(_damaged(file, f"a header that says {tokens} tokens", "0 or more"))
    dtype = _LLM_C[magic][1]
    expected = _LLM_C_HEADER + tokens * np.dtype(dtype).itemsize
    if size != expected:
        allowed = f"{expected}: a header and {tokens} tokens of {dtype}, as the header says"
        raise InputError(_damaged(file, f"{size} bytes", allowed))
    return _Header(file, "llm.c", dtype, tokens, _LLM_C_HEADER)


def _read_megatron(file: Path, index: Path) -> _Header:
    if not file.exists():
        raise InputError(_damaged(file, f"no such file, but {index.name}", f"both {file.name} and {index.name}"))
    with index.open("rb") as opened:
        header = opened.read(_MEGATRON_HEADER.size)
    if len(header) < _MEGATRON_HEADER.size:
        raise InputError(_damaged(index, f"{len(header)} bytes", f"a header of {_MEGATRON_HEADER.size} bytes"))
    magic, version, code, sequences, documents = _MEGATRON_HEADER.unpack(header)
    if magic != _MAGIC:
        fix = "name the .bin alone if it is not Megatron's, and move the .idx away"
        raise InputError(Problem("", str(index), f"a file that starts with {magic!r}", repr(_MAGIC), fix))
    if version != 1:
        raise InputError(_damaged(index, f"version {version}", "version 1"))
    dtype = _MEGATRON_DTYPES.get(code, "none")
    if dtype not in _READ_DTYPES:
        fix = "write the tokens again as uint16 or int32"
        raise InputError(Problem("", str(index), f"dtype code {code} ({dtype})", "4 (int32) or 8 (uint16)", fix))
    size, expected = index.stat().st_size, _MEGATRON_HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        allowed = f"{expected}: {sequences} sequences and {documents} document indices, as its header says"
        raise InputError(_damaged(index, f"{size} bytes", allowed))
    size, itemsize = file.stat().st_size, np.dtype(dtype).itemsize
    if size % itemsize:
        raise InputError(_damaged(file, f"{size} bytes", f"whole tokens of {dtype}, {itemsize} bytes each"))
    end = 0
    if sequences:  # the last sequence alone, since a start of a run should not read gigabytes of index
        length = int(np.fromfile(index, "<i4", 1, offset=_MEGATRON_HEADER.size + 4 * (sequences - 1))[0])
        pointer = int(np.fromfile(index, "<i8", 1, offset=_MEGATRON_HEADER.size + 12 * sequences - 8)[0])
        end = pointer + length * itemsize
    if end != size:
        raise InputError(_damaged(file, f"{size} bytes", f"{end}, where the last sequence of {index.name} ends"))
    return _Header(file, "Megatron", dtype, size // itemsize, documents=max(documents - 1, 0))


def _index_problems(file: Path, itemsize: int) -> Iterator[Problem]:
    """Read a Megatron index. That its last sequence ends with the .bin is known from opening it."""
    index = file.with_suffix(".idx")
    with index.open("rb") as opened:
        sequences = _MEGATRON_HEADER.unpack(opened.read(_MEGATRON_HEADER.size))[3]
    end = 0  # of the last sequence, in bytes
    for start in range(0, sequences, _INDEX_BLOCK):
        count = min(_INDEX_BLOCK, sequences - start)
        at = _MEGATRON_HEADER.size
        lengths = np.fromfile(index, "<i4", count, offset=at + 4 * start).astype(np.int64)
        pointers = np.fromfile(index, "<i8", count, offset=at + 4 * sequences + 8 * start)
        if lengths.min() < 0:
            yield _damaged(index, f"the length {lengths.min()}", "sequences of 0 tokens or more")
            return
        ends = end + np.cumsum(lengths) * itemsize
        wrong = np.flatnonzero(pointers != np.concatenate([[end], ends[:-1]]))
        if wrong.size:
            got = f"sequence {start + wrong[0]} at byte {pointers[wrong[0]]}"
            fix = "write the tokens again, sequences one after the other"
            yield Problem("", str(index), got, "each sequence where the one before it ends", fix)
            return
        end = int(ends[-1])


def _damaged(file: Path, got: str, allowed: str) -> Problem:
    return Problem("", str(file), got, allowed, "the file is cut or written by something else: copy or make it again")
