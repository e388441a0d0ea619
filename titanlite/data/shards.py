"""Shards of token ids on disk: their format, the writer, and the memory-mapped reader. Torch-free.

A folder of shards holds files of little-endian uint16 or uint32 ids and `meta.json`, which is written last:
    {"format": "titanlite-tokens-1", "dtype": "uint16", "tokens": n, "documents": n, "bytes": bytes of text,
     "tokenizer": sha256 of the tokenizer, "shards": [{"file": name, "tokens": n, "sha256": digest}, ...]}
The shards in this order are one long array of tokens; where it is cut does not matter to what is read.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.files import fsync_file, write_atomically

FORMAT = "titanlite-tokens-1"
META = "meta.json"
SHARD_TOKENS = 1 << 27  # of one file: 256 or 512 MiB
_MAX_OPEN = 256  # a map holds a file open, and systems allow about 1000


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype on disk that holds all ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes token ids into the shards of an empty folder; the folder counts as whole once close() has returned.

    Memory is flat: every call goes straight to the file.
    """

    def __init__(self, folder: Path, *, dtype: str, tokenizer: str, shard_tokens: int = SHARD_TOKENS) -> None:
        assert dtype in ("uint16", "uint32") and shard_tokens > 0
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._dtype, self._tokenizer, self._shard_tokens = folder, dtype, tokenizer, shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._file_tokens = 0
        self.tokens = self.documents = self.bytes = 0

    def write(self, tokens: np.ndarray, *, documents: int, text_bytes: int) -> None:
        """Append ids [n] that stand for so many documents and bytes of text."""
        limit = np.iinfo(self._dtype).max
        assert not tokens.size or (tokens.min() >= 0 and tokens.max() <= limit), f"ids do not fit {self._dtype}"
        tokens = tokens.astype(np.dtype(self._dtype).newbyteorder("<"))
        self.tokens += len(tokens)
        self.documents += documents
        self.bytes += text_bytes
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / f"{len(self._shards):05d}.bin").open("wb")
                self._hash, self._file_tokens = hashlib.sha256(), 0
            part, tokens = np.split(tokens, [self._shard_tokens - self._file_tokens])
            data = part.tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._file_tokens += len(part)
            if self._file_tokens == self._shard_tokens:
                self._finish_file()

    def close(self) -> None:
        self._finish_file()
        meta = {
            "format": FORMAT,
            "dtype": self._dtype,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "tokenizer": self._tokenizer,
            "shards": self._shards,
        }
        write_atomically(self._folder / META, json.dumps(meta, indent=1).encode())

    def _finish_file(self) -> None:
        if self._file is None:
            return
        fsync_file(self._file)
        self._file.close()
        name = Path(self._file.name).name
        self._shards.append({"file": name, "tokens": self._file_tokens, "sha256": self._hash.hexdigest()})
        self._file = None


class TokenShards:
    """A folder of token shards, memory-mapped; pickles as its path.

    Raises InputError, with every fault found, when meta.json is missing or malformed or a file's size differs from it.
    Contents are checked by verify().
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        meta = _read_meta(self.path)
        self.meta = meta
        self.n_tokens: int = meta["tokens"]
        self.tokenizer: str = meta["tokenizer"]
        self._dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        self._files = [self.path / shard["file"] for shard in meta["shards"]]
        counts = [shard["tokens"] for shard in meta["shards"]]
        problems = [p for file, n in zip(self._files, counts, strict=True) if (p := self._size_problem(file, n))]
        if sum(counts) != self.n_tokens:
            problems.append(_fault(self.path / META, f"{self.n_tokens} tokens", f"the shards' sum, {sum(counts)}"))
        if problems:
            raise InputError(problems)
        self._starts = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self._maps: dict[int, np.ndarray] = {}
        # Of the content alone: where the folder lies and how its files are named is of no matter.
        content = [meta["dtype"], meta["tokenizer"], [[s["tokens"], s["sha256"]] for s in meta["shards"]]]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[TokenShards], tuple[Path]]:
        return TokenShards, (self.path,)

    def windows(self, seq_len: int) -> int:
        """Whole samples: windows of seq_len tokens that have a next token."""
        return max(self.n_tokens - 1, 0) // seq_len

    def window(self, w: int, seq_len: int) -> np.ndarray:
        """Tokens [w * seq_len, w * seq_len + seq_len] of the whole array: [seq_len + 1] in the dtype on disk."""
        if not 0 <= w < self.windows(seq_len):
            raise IndexError(f"window {w} of {self.windows(seq_len)}")
        start, stop = w * seq_len, w * seq_len + seq_len + 1
        shard = bisect_right(self._starts, start) - 1
        parts = []
        while start < stop:
            first, end = self._starts[shard], min(self._starts[shard + 1], stop)
            if end > start:
                parts.append(self._map(shard)[start - first : end - first])
                start = end
            shard += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def verify(self) -> None:
        """Read everything and compare checksums; InputError names every shard that differs."""
        problems = []
        for file, shard in zip(self._files, self.meta["shards"], strict=True):
            with file.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != shard["sha256"]:
                problems.append(
                    _fault(file, f"contents with sha256 {found[:12]}…", f"{shard['sha256'][:12]}… as in {META}")
                )
        if problems:
            raise InputError(problems)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            if len(self._maps) >= _MAX_OPEN:
                del self._maps[next(iter(self._maps))]
            # A plain array over the map: slicing a np.memmap costs more than the copy of a sample.
            self._maps[shard] = np.asarray(np.memmap(self._files[shard], dtype=self._dtype, mode="r"))
        return self._maps[shard]

    def _size_problem(self, file: Path, tokens: int) -> Problem | None:
        expected = tokens * self._dtype.itemsize
        if not file.is_file():
            return _fault(file, "no such file", f"the shard of {expected} bytes that {META} lists")
        size = file.stat().st_size
        if size == expected:
            return None
        return _fault(file, f"{size} bytes", f"{expected}: {tokens} tokens of {self.meta['dtype']}, as {META} says")


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
