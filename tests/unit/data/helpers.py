"""What several tests of the data room share. Torch-free, since worker processes import it."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.data.build import Built, build
from titanlite.data.records import File
from titanlite.data.shards import ShardWriter, TokenShards
from titanlite.data.text import Text
from titanlite.data.tokenise import Recipe
from titanlite.data.tokenizer import Tokenizer

# --- processes ---


def session(number: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(of) == number and state != "Z":
                found.append(int(entry.name))
    return found


def divider(base: int) -> Callable[[Any], Any]:
    """What a Pool's processes may be made with: base by each item, or what the item says."""
    if base < 0:
        raise InputError(Problem("here", "base", "a negative one", "others"))

    def work(item: Any) -> Any:
        if item == "pid":
            return os.getpid()
        if item == "die":
            os._exit(3)
        if item == "sleep":
            time.sleep(60)
        return base / item

    return work


# --- a tokenizer ---

BOS, EOS, UNK, CONTROL = 256, 257, 258, 259


class Bytes:
    """A tokenizer of bytes, with marks: BOS 256, EOS 257, unknown 258, a control id 259."""

    vocab_size, bos_id, eos_id, unk_id = 260, BOS, EOS, UNK
    token_bytes = np.array([1] * 256 + [0] * 4, dtype=np.int64)
    fingerprint = "t" * 64

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


BYTES = cast(Tokenizer, Bytes())


# --- token files ---


def nanogpt(file: Path, ids: Sequence[int] | np.ndarray) -> Path:
    file.write_bytes(np.asarray(ids, dtype="<u2").tobytes())
    return file


def llm_c(
    file: Path, ids: Sequence[int] | np.ndarray, *, magic: int = 20240520, version: int = 1, tokens: int | None = None
) -> Path:
    header = struct.pack("<3i", magic, version, len(ids) if tokens is None else tokens).ljust(1024, b"\0")
    file.write_bytes(header + np.asarray(ids, dtype="<u4" if magic == 20240801 else "<u2").tobytes())
    return file


def megatron(
    file: Path,
    ids: Sequence[int] | np.ndarray,
    lengths: Sequence[int],
    *,
    code: int = 8,
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
    pointers: Sequence[int] | None = None,
) -> Path:
    dtype = np.dtype({8: "<u2", 4: "<i4"}.get(code, "<u1"))
    file.write_bytes(np.asarray(ids).astype(dtype).tobytes())
    if pointers is None:
        pointers = [0, *np.cumsum(lengths)[:-1] * dtype.itemsize][: len(lengths)]
    index = magic + struct.pack("<QBQQ", version, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    index += np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    file.with_suffix(".idx").write_bytes(index)
    return file


def ours(folder: Path, ids: np.ndarray) -> Path:
    writer = ShardWriter(folder, dtype="uint16", tokenizer="t" * 64, shard_tokens=40)
    writer.write(ids, documents=1, text_bytes=7)
    writer.close()
    return folder


IDS = np.random.default_rng(0).integers(0, 50_000, 97)
LENGTHS = [10, 0, 50, 37]


# --- builds ---


def text_of(*paths: Path) -> Text:
    return Text(paths[0].parent.name, tuple(File(path, path.name, path.suffix) for path in paths))


def run_build(folder: Path, text: Text, recipe: Recipe, *, workers: int = 1, **options: Any) -> tuple[Built, list[str]]:
    """build() that writes its journal after every chunk, and what it reported."""
    messages: list[str] = []
    options = {"journal_seconds": 0.0, **options}
    return build(folder, text, recipe, workers=workers, report=messages.append, **options), messages


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tokens_of(folder: Path) -> list[int]:
    return [int(i) for block in TokenShards(folder).blocks(1 << 20) for i in block]
