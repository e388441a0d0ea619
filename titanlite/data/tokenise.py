"""Chunks of text to tokens, here or in other processes, in the order of the chunks. Torch-free."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.data.pool import Pool
from titanlite.data.records import BadRecord, Chunk, documents
from titanlite.data.shards import SHARD_TOKENS, token_dtype
from titanlite.data.tokenizer import load_tokenizer

_FEW_CHUNKS = 4  # are done before other processes could have started


@dataclass(frozen=True)
class Recipe:
    """All that decides, with the text, about the bytes of the shards.

    bos_id, eos_id: what is put around documents; -1: nothing
    bos_token, eos_token: as load_tokenizer takes them
    on_error: "stop" or "skip", at a record that cannot be read
    """

    tokenizer: Path
    bos_id: int
    eos_id: int
    validation_fraction: float
    on_error: str = "stop"
    shard_tokens: int = SHARD_TOKENS
    bos_token: str = ""
    eos_token: str = ""


@dataclass
class Tokens:
    """What a chunk gives to one side: ids [n] in the dtype on disk, how many documents, how many bytes of text."""

    ids: np.ndarray
    documents: int
    bytes: int


@dataclass
class Tokenised:
    """What a chunk gives to either side, and its records that cannot be read."""

    train: Tokens
    validation: Tokens
    bad: list[BadRecord]


class Tokenise:
    """Chunk -> Tokenised. Loads the tokenizer when it is made, in the process that is to use it."""

    def __init__(self, recipe: Recipe, fingerprint: str = "") -> None:
        """fingerprint: what the tokenizer must have, if given. Raises InputError."""
        self._tokenizer = load_tokenizer(recipe.tokenizer, bos_token=recipe.bos_token, eos_token=recipe.eos_token)
        self.fingerprint = self._tokenizer.fingerprint
        if fingerprint and self.fingerprint != fingerprint:
            got, allowed = "another tokenizer than a moment ago", "files that stay as they are"
            raise InputError(Problem("", str(recipe.tokenizer), got, allowed, "start again"))
        self.dtype = token_dtype(self._tokenizer.vocab_size)
        self.recipe = recipe
        self._held_out = recipe.validation_fraction * 2.0**64
        # Both marks are written when both are asked for, also where a tokenizer uses one id for the two.
        self._before, self._after = (
            np.array([i] if i >= 0 else [], dtype=np.int32) for i in (recipe.bos_id, recipe.eos_id)
        )

    def __call__(self, chunk: Chunk) -> Tokenised:
        found, bad = [], []
        for document in documents(chunk):
            if isinstance(document, BadRecord):
                bad.append(document)
            else:
                found.append(document)
        ids = self._tokenizer.encode_parts([one.text for one in found], [one.first for one in found])
        pieces: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        numbers, sizes = [0, 0], [0, 0]
        for document, part in zip(found, ids, strict=True):
            # A document's side depends on its contents alone, so that copies of it never lie on both sides.
            side = int(int.from_bytes(document.digest[:8], "big") < self._held_out)
            if document.first:
                pieces[side].append(self._before)
                numbers[side] += 1
            pieces[side].append(part)
            if document.last:
                pieces[side].append(self._after)
            sizes[side] += document.size
        train, validation = (
            Tokens(self._narrow(parts), n, size) for parts, n, size in zip(pieces, numbers, sizes, strict=True)
        )
        return Tokenised(train, validation, bad)

    def _narrow(self, parts: list[np.ndarray]) -> np.ndarray:
        ids = np.concatenate([np.empty(0, dtype=np.int32), *parts])
        n = self._tokenizer.vocab_size
        assert not len(ids) or (ids.min() >= 0 and ids.max() < n), (
            f"the tokenizer gave an id that is not one of its {n}"
        )
        return ids.astype(np.dtype(self.dtype).newbyteorder("<"))


# --- here, or in other processes ---


def tokenise_all(
    chunks: Iterator[Chunk], tokenise: Tokenise, workers: int
) -> Generator[tuple[Chunk, Tokenised], None, None]:
    """Every chunk with its result, in order. A bounded number is in memory."""
    items = _with_error(chunks)
    first = list(islice(items, _FEW_CHUNKS + 1))
    items = chain(first, items)
    if workers == 1 or len(first) <= _FEW_CHUNKS:
        for item in items:
            if isinstance(item, InputError):
                raise item
            yield item, tokenise(item)
        return
    with Pool(workers, _in_worker, tokenise.recipe, tokenise.fingerprint) as pool:
        waiting: deque[tuple[Chunk, Future[Tokenised]] | InputError] = deque()

        def next_one() -> tuple[Chunk, Tokenised]:
            one = waiting.popleft()
            if isinstance(one, InputError):
                raise one
            return one[0], one[1].result()

        for item in items:
            waiting.append(item if isinstance(item, InputError) else (item, pool.submit(item)))
            if len(waiting) > 2 * workers:
                yield next_one()
        while waiting:
            yield next_one()


def _with_error(chunks: Iterator[Chunk]) -> Iterator[Chunk | InputError]:
    """A reader that reads ahead must not stop for its own error before those of all that comes earlier are known."""
    try:
        yield from chunks
    except InputError as error:
        yield error


def _in_worker(recipe: Recipe, fingerprint: str) -> Tokenise:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Hugging Face's would take all cores, in every process
    return Tokenise(recipe, fingerprint)
