"""Shards of token ids on disk: their format, the writer, and the memory-mapped reader. Torch-free.

A folder of shards holds files of little-endian uint16 or uint32 ids and `meta.json`, which is written last:
    {"format": "titanlite-tokens-1", "dtype": "uint16", "tokens": n, "documents": n, "bytes": bytes of text,
     "tokenizer": sha256 of the tokenizer, "bos_id": id, "eos_id": id (-1: not written; absent: not known),
     "shards": [{"file": name, "tokens": n, "sha256": digest}, ...]}
The shards in this order are one long array of tokens; where it is cut does not matter to what is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.files import fsync_file, fsync_folder, write_atomically

FORMAT = "titanlite-tokens-1"
META = "meta.json"
PROGRESS, FINISHED = "progress.json", "build.json"  # beside train and validation: while they are made, and after
SHARD_TOKENS = 1 << 27  # of one file: 256 or 512 MiB
_OURS = re.compile(r"\d{5,}\.bin(\.partial)?|meta\.json\.[0-9a-f]{32}\.tmp")  # what a writer may leave
_MAX_OPEN = 256  # a map holds a file open, and systems allow about 1000


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype on disk that holds all ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes token ids into the shards of a folder; the folder counts as whole once close() has returned.

    A shard is NNNNN.bin.partial until it is full or the last one. Memory is flat: every call goes straight to the file.
    What sync() returns, given to a new writer as `state`, goes on there: the same calls then give the same bytes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        tokenizer: str,
        shard_tokens: int = SHARD_TOKENS,
        bos_id: int | None = None,
        eos_id: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """bos_id, eos_id: the marks around documents (-1: not written; None: not known, and not in meta.json).

        What is in the folder beyond `state` (None: nothing is) is deleted. Raises InputError when less is there.
        """
        assert dtype in ("uint16", "uint32") and shard_tokens > 0
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._dtype, self._tokenizer, self._shard_tokens = folder, dtype, tokenizer, shard_tokens
        self._marks = {name: i for name, i in (("bos_id", bos_id), ("eos_id", eos_id)) if i is not None}
        self._shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._file_tokens = 0
        self._synced = True
        self.tokens = self.documents = self.bytes = 0
        self._restore(state)

    @property
    def shards(self) -> int:
        """Number of finished ones."""
        return len(self._shards)

    def write(self, tokens: np.ndarray, *, documents: int, text_bytes: int) -> None:
        """Append ids [n] that stand for so many documents and bytes of text."""
        limit = np.iinfo(self._dtype).max
        assert not tokens.size or (tokens.min() >= 0 and tokens.max() <= limit), f"ids do not fit {self._dtype}"
        tokens = tokens.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False)
        self.tokens += len(tokens)
        self.documents += documents
        self.bytes += text_bytes
        while len(tokens):
            if self._file is None:
                self._file = self._partial().open("wb", buffering=0)  # nothing is left to write when a disk is full
                self._hash, self._file_tokens = hashlib.sha256(), 0
            part, tokens = np.split(tokens, [self._shard_tokens - self._file_tokens])
            data = part.tobytes()
            self._hash.update(data)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file_tokens += len(part)
            self._synced = False
            if self._file_tokens == self._shard_tokens:
                self._finish_file()

    def sync(self) -> dict[str, Any]:
        """Put all that was written on the disk; returns where that is, as JSON."""
        opened = None
        if self._file is not None:
            if not self._synced:
                fsync_file(self._file)
            opened = {"tokens": self._file_tokens, "sha256": self._hash.hexdigest()}
        if not self._synced:
            fsync_folder(self._folder)
        self._synced = True
        counts = {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}
        return {**counts, "shards": list(self._shards), "open": opened}

    def close(self) -> None:
        self._finish_file()
        meta = {
            "format": FORMAT,
            "dtype": self._dtype,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "tokenizer": self._tokenizer,
            **self._marks,
            "shards": self._shards,
        }
        write_atomically(self._folder / META, json.dumps(meta, indent=1).encode())

    def abandon(self) -> None:
        """Close the file without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _name(self) -> str:
        return f"{len(self._shards):05d}.bin"

    def _partial(self) -> Path:
        return self._folder / f"{self._name()}.partial"

    def _finish_file(self) -> None:
        if self._file is None:
            return
        fsync_file(self._file)
        self._file.close()
        self._file = None
        name = self._name()
        self._partial().rename(self._folder / name)
        self._shards.append({"file": name, "tokens": self._file_tokens, "sha256": self._hash.hexdigest()})

    def _restore(self, state: dict[str, Any] | None) -> None:
        opened = None
        if state is not None:
            self.tokens, self.documents, self.bytes = state["tokens"], state["documents"], state["bytes"]
            self._shards, opened = list(state["shards"]), state["open"]
        (self._folder / META).unlink(missing_ok=True)  # while a shard may be open the folder is not whole
        finished = self._folder / self._name()
        if opened and finished.exists():  # it became full after the state was taken
            finished.rename(self._partial())
        keep = {shard["file"] for shard in self._shards} | ({self._partial().name} if opened else set())
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in keep:
                path.unlink()
        itemsize = np.dtype(self._dtype).itemsize
        sizes = [(self._folder / shard["file"], shard["tokens"] * itemsize) for shard in self._shards]
        for path, size in sizes:
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise InputError(_fault(path, f"{found} bytes", f"the {size} that were written"))
        if opened:
            self._reopen(opened["tokens"], opened["tokens"] * itemsize, opened["sha256"])

    def _reopen(self, tokens: int, size: int, sha256: str) -> None:
        path = self._partial()
        try:
            file = path.open("r+b", buffering=0)
        except FileNotFoundError:
            raise InputError(_fault(path, "no such file", f"the {size} bytes that were written")) from None
        if os.fstat(file.fileno()).st_size > size:  # what came after the state was taken
            file.truncate(size)
        digest = hashlib.file_digest(file, "sha256")
        if digest.hexdigest() != sha256:
            got = f"{file.tell()} bytes with sha256 {digest.hexdigest()[:12]}…"
            file.close()
            raise InputError(_fault(path, got, f"the {size} that were written, with sha256 {sha256[:12]}…"))
        self._file, self._hash, self._file_tokens = file, digest, tokens


class TokenArray:
    """Ids in files that are, in their order, one long array, memory-mapped; pickles as its path. The base of readers.

    path:            what opens it again
    n_tokens, dtype: how many, and the name of their dtype on disk
    documents, text_bytes, tokenizer (a sha256), bos_id, eos_id (-1: not written): None where the files do not say
    """

    documents: int | None = None
    text_bytes: int | None = None
    tokenizer: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None

    def __init__(self, path: Path, dtype: str, files: Sequence[Path], counts: Sequence[int], offset: int = 0) -> None:
        """counts: tokens of each file; offset: bytes before the first one."""
        self.path, self.dtype = path, dtype
        self.files = tuple(files)
        self._dtype, self._offset = np.dtype(dtype).newbyteorder("<"), offset
        self._starts: list[int] = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self.n_tokens: int = self._starts[-1]
        self._maps: dict[int, np.ndarray] = {}

    def __reduce__(self) -> tuple[type[TokenArray], tuple[Path]]:
        return type(self), (self.path,)

    def windows(self, seq_len: int) -> int:
        """Whole samples: windows of seq_len tokens that have a next token."""
        return max(self.n_tokens - 1, 0) // seq_len

    def window(self, w: int, seq_len: int) -> np.ndarray:
        """Tokens [w * seq_len, w * seq_len + seq_len] of the whole array: [seq_len + 1] in the dtype on disk."""
        if not 0 <= w < self.windows(seq_len):
            raise IndexError(f"window {w} of {self.windows(seq_len)}")
        return self.read(w * seq_len, w * seq_len + seq_len + 1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the whole array, in the dtype on disk: a view where they lie in one file."""
        assert 0 <= start <= stop <= self.n_tokens
        file = bisect_right(self._starts, start) - 1
        parts = []
        while start < stop:
            first, end = self._starts[file], min(self._starts[file + 1], stop)
            if end > start:
                parts.append(self._map(file)[start - first : end - first])
                start = end
            file += 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, dtype=self._dtype)])

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """All tokens in order, [at most size] at a time. They are read, not mapped, so that memory stays flat."""
        for file, first, end in zip(self.files, self._starts, self._starts[1:], strict=False):
            for start in range(0, end - first, size):
                count = min(size, end - first - start)
                at = self._offset + start * self._dtype.itemsize
                block = np.fromfile(file, dtype=self._dtype, count=count, offset=at)
                if len(block) < count:
                    raise InputError(_fault(file, "a file that became shorter while it was read", "one that stays"))
                yield block

    def locate(self, position: int) -> tuple[Path, int]:
        """The file that holds the token at this position of the whole array, and its position there."""
        file = bisect_right(self._starts, position) - 1
        return self.files[file], position - self._starts[file]

    def verify(self) -> None:
        """Check what opening does not. Raises InputError."""
        raise NotImplementedError

    def depends_on(self) -> list[Path]:
        """All files whose change could change what is read or verified."""
        raise NotImplementedError

    def _map(self, file: int) -> np.ndarray:
        if file not in self._maps:
            if len(self._maps) >= _MAX_OPEN:
                del self._maps[next(iter(self._maps))]
            count = self._starts[file + 1] - self._starts[file]
            mapped = np.memmap(self.files[file], dtype=self._dtype, mode="r", offset=self._offset, shape=(count,))
            # A plain array over the map: slicing a np.memmap costs more than the copy of a sample.
            self._maps[file] = np.asarray(mapped)
        return self._maps[file]


class TokenShards(TokenArray):
    """A folder of token shards.

    Raises InputError, with every fault found, when meta.json is missing or malformed or a file's size differs from it.
    Contents are checked by verify().
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        meta = _read_meta(path)
        counts = [shard["tokens"] for shard in meta["shards"]]
        super().__init__(path, meta["dtype"], [path / shard["file"] for shard in meta["shards"]], counts)
        problems = [p for file, n in zip(self.files, counts, strict=True) if (p := self._size_problem(file, n))]
        if sum(counts) != meta["tokens"]:
            problems.append(_fault(path / META, f"{meta['tokens']} tokens", f"the shards' sum, {sum(counts)}"))
        if problems:
            raise InputError(problems)
        self.meta = meta
        self.documents, self.text_bytes = meta["documents"], meta["bytes"]
        self.tokenizer: str = meta["tokenizer"]
        self.bos_id, self.eos_id = meta.get("bos_id"), meta.get("eos_id")
        # Of the content alone: where the folder lies and how its files are named is of no matter.
        content = [meta["dtype"], meta["tokenizer"], [[s["tokens"], s["sha256"]] for s in meta["shards"]]]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def depends_on(self) -> list[Path]:
        return [self.path / META, *self.files]

    def verify(self) -> None:
        """Read everything and compare checksums; InputError names every shard that differs."""
        problems = []
        for file, shard in zip(self.files, self.meta["shards"], strict=True):
            with file.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != shard["sha256"]:
                problems.append(
                    _fault(file, f"contents with sha256 {found[:12]}…", f"{shard['sha256'][:12]}… as in {META}")
                )
        if problems:
            raise InputError(problems)

    def _size_problem(self, file: Path, tokens: int) -> Problem | None:
        expected = tokens * self._dtype.itemsize
        if not file.is_file():
            return _fault(file, "no such file", f"the shard of {expected} bytes that {META} lists")
        size = file.stat().st_size
        if size == expected:
            return None
        return _fault(file, f"{size} bytes", f"{expected}: {tokens} tokens of {self.dtype}, as {META} says")


_FIX = "the folder is damaged, or written by something else: copy or prepare it again"


def _fault(what: Path, got: str, allowed: str) -> Problem:
    return Problem("", str(what), got, allowed, _FIX)


def _read_meta(folder: Path) -> dict[str, Any]:
    """meta.json with the type of every field checked, so that nothing later can trip over it."""
    path = folder / META
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(_fault(path, "no such file", "a folder of token shards")) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise InputError(_fault(path, f"no JSON ({error})", "the meta file of a folder of token shards")) from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = repr(meta.get("format")) if isinstance(meta, dict) else type(meta).__name__
        raise InputError(_fault(path, f"format {found}", repr(FORMAT)))
    problems = []
    if meta.get("dtype") not in ("uint16", "uint32"):
        problems.append(_fault(path, f"dtype {meta.get('dtype')!r}", '"uint16" or "uint32"'))
    for name in ("tokens", "documents", "bytes"):
        if not _is_count(meta.get(name)):
            problems.append(_fault(path, f"{name} {meta.get(name)!r}", "an integer >= 0"))
    if not isinstance(meta.get("tokenizer"), str):
        problems.append(_fault(path, f"tokenizer {meta.get('tokenizer')!r}", "a sha256 in hexadecimal"))
    for name in ("bos_id", "eos_id"):
        if name in meta and meta[name] != -1 and not _is_count(meta[name]):
            problems.append(_fault(path, f"{name} {meta[name]!r}", "an id, or -1"))
    shards = meta.get("shards")
    if not isinstance(shards, list) or not all(map(_is_shard, shards)):
        problems.append(_fault(path, "a malformed list of shards", "tables with file, tokens and sha256"))
    if problems:
        raise InputError(problems)
    return meta


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shard(shard: object) -> bool:
    return (
        isinstance(shard, dict)
        and isinstance(shard.get("file"), str)
        and Path(shard["file"]).name == shard["file"]  # inside the folder
        and _is_count(shard.get("tokens"))
        and shard["tokens"] > 0
        and isinstance(shard.get("sha256"), str)
    )
