"""A look at prepared tokens: counts over all of them, and one window decoded as training will see it. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.data.documents import document_starts
from titanlite.data.order import SampleOrder
from titanlite.data.prepare import PreparedData
from titanlite.data.shards import TokenArray, TokenShards
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import find_tokens, open_tokens

_BLOCK = 1 << 20  # tokens counted at once: they and what is computed from them stay in the processor's cache
_TABLED = 1 << 20  # documents up to this length, in tokens, are counted in a table
_MAX_VOCABULARY = 1 << 24  # of ids, where no tokenizer says how many there are


@dataclass(frozen=True)
class PartStats:
    """The tokens of one part, training or validation. None: not known.

    documents:          by the marks; recorded_documents: what the writer noted
    longest_, mean_, median_document: in tokens, marks included
    unknown_share:      of tokens that are the tokenizer's unknown id
    distinct_ids:       of the vocabulary; outside_vocabulary: tokens that are not in it
    marks:              who says what bos_id and eos_id are: "meta.json" (-1: not written) or "tokenizer"
    """

    tokens: int
    documents: int | None
    recorded_documents: int | None
    bytes: int | None
    tokens_per_byte: float | None
    longest_document: int | None
    mean_document: float | None
    median_document: float | None
    unknown_share: float | None
    distinct_ids: int | None
    vocab_size: int | None
    vocabulary_used: float | None
    outside_vocabulary: int
    dtype: str
    shards: int
    bos_id: int | None
    eos_id: int | None
    marks: str | None


@dataclass(frozen=True)
class Stats:
    """What lies at a path. verified: its checksums were compared; other stacks' files have none. str() is a table."""

    path: str
    verified: bool
    train: PartStats
    validation: PartStats | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        parts = {"train": self.train} | ({"validation": self.validation} if self.validation else {})
        rows = [("", *parts), *zip(_ROWS, *map(_cells, parts.values()), strict=True)]
        rows = [row for row in rows if any(row[1:])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        checked = "checksums are right" if self.verified else "no checksums compared"
        return "\n".join([f"{_visible(self.path)} ({checked})", *lines])


def stats(path: Path | str, tokenizer: Tokenizer | None, *, verify: bool = True) -> Stats:
    """Count all tokens at a path that find_tokens knows, in flat memory; verify: compare checksums first.

    Raises InputError for anything else and for damaged files.
    """
    found = find_tokens(str(path), "--stats")
    if found is None:
        allowed = "a folder of token shards, or a .bin of nanoGPT, llm.c or Megatron"
        what = repr(str(path)) if Path(path).exists() else f"{str(path)!r}, which does not exist"
        raise InputError(Problem("", "--stats", what, allowed, "titanlite prepare makes tokens of text"))
    opened = [open_tokens(part) for part in (found.train, found.validation) if part]
    if verify:
        for tokens in opened:
            tokens.verify()
    for tokens in opened:
        _check_tokenizer(tokens, tokenizer)
    parts = [_count(tokens, tokenizer) for tokens in opened]
    verified = verify and all(isinstance(tokens, TokenShards) for tokens in opened)
    return Stats(str(path), verified, parts[0], parts[1] if len(parts) > 1 else None)


def show(
    tokens: TokenArray,
    tokenizer: Tokenizer | None,
    window: int,
    seq_len: int,
    marks: tuple[int, int] | None = None,
) -> str:
    """A window decoded: its documents parted, marks and other special ids as ⟨…⟩, and the last label by itself.

    marks: the ids of BOS and EOS, -1: not written; None: as the tokens say, or else the tokenizer.
    Without a tokenizer ids are shown. Characters that would act on a terminal are written as ⟨U+001B⟩.
    Raises InputError when there is no such window.
    """
    windows = tokens.windows(seq_len)
    if not 0 <= window < windows:
        got, fix = f"window {window} of {seq_len} tokens", "ask for an earlier one, or for a smaller seq_len"
        raise InputError(Problem("", str(tokens.path), got, f"0 to {windows - 1}" if windows else "none is whole", fix))
    _check_tokenizer(tokens, tokenizer)
    ids = tokens.window(window, seq_len).astype(np.int64)
    bos_id, eos_id = marks or _marks(tokens, tokenizer)[:2]
    starts = np.flatnonzero(document_starts(ids, bos_id, eos_id)[:-1]).tolist()
    # What comes before says whether the first document began earlier.
    before = tokens.read(max(window * seq_len - 1, 0), window * seq_len + 2).astype(np.int64)
    begins = window == 0 or bool(document_starts(before, bos_id, eos_id)[1])
    told_apart = max(bos_id, eos_id) >= 0
    documents = f"{len(starts)} {'document' if len(starts) == 1 else 'documents'}"
    first = window * seq_len
    lines = [
        f"window {window} of {windows}: tokens {first} to {first + seq_len - 1} of {tokens.n_tokens}, labels one "
        f"further, {documents if told_apart else 'documents not told apart: no marks are known'}"
    ]
    for start, stop in zip(starts, [*starts[1:], seq_len], strict=True):
        if told_apart:
            lines.append("--- document ---" if start or begins else "--- document, from its middle ---")
        lines.append(_decoded(ids[start:stop], tokenizer, bos_id, eos_id))
    lines += ["--- label only ---", _decoded(ids[seq_len:], tokenizer, bos_id, eos_id)]
    return "\n".join(lines)


def show_sample(prepared: PreparedData, order: SampleOrder, k: int, seq_len: int) -> str:
    """Sample k of a run: which source, epoch and window it is, and the window as show() gives it.

    Raises InputError when the run ends before it.
    """
    if order.length is not None and k >= order.length:
        got, fix = f"sample {k}", "ask for an earlier one, or raise data.epochs"
        raise InputError(Problem("", "--show", got, f"0 to {order.length - 1}, as data.epochs says", fix))
    source, epoch, window = order.locate(k)
    found = prepared.sources[source]
    head = f"sample {k}: source {source} ({_visible(found.path)}), epoch {epoch}, window {window}"
    return f"{head}\n{show(open_tokens(found.train), prepared.tokenizer, window, seq_len, prepared.marks)}"


def _check_tokenizer(tokens: TokenArray, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokens.tokenizer not in (None, tokenizer.fingerprint):
        got = f"{str(tokenizer.path)!r}, but another tokenizer made {str(tokens.path)!r}"
        raise InputError(Problem("", "--tokenizer", got, "the one that made them", "leave it out for theirs"))


def _marks(tokens: TokenArray, tokenizer: Tokenizer | None) -> tuple[int, int, str | None]:
    """BOS, EOS (-1: not used), and who says so."""
    if tokens.bos_id is not None and tokens.eos_id is not None:
        return tokens.bos_id, tokens.eos_id, "meta.json"
    if tokenizer is not None:
        return tokenizer.bos_id, tokenizer.eos_id, "tokenizer"
    return -1, -1, None


# --- counts ---


def _count(tokens: TokenArray, tokenizer: Tokenizer | None) -> PartStats:
    bos_id, eos_id, marks = _marks(tokens, tokenizer)
    countable = max(bos_id, eos_id) >= 0
    unk_id = -1 if tokenizer is None else tokenizer.unk_id
    ids, documents, unknown = _Ids(None if tokenizer is None else tokenizer.vocab_size), _Documents(bos_id, eos_id), 0
    for block in tokens.blocks(_BLOCK):
        ids.add(block)
        if countable:
            documents.add(block)
        if unk_id >= 0:
            unknown += int(np.count_nonzero(block == unk_id))
    lengths = documents.finish()
    n, size, distinct = tokens.n_tokens, tokens.text_bytes, ids.distinct()
    return PartStats(
        tokens=n,
        documents=lengths.n if countable else None,
        recorded_documents=tokens.documents,
        bytes=size,
        tokens_per_byte=n / size if size else None,
        longest_document=lengths.longest if countable else None,
        mean_document=n / lengths.n if lengths.n else None,
        median_document=lengths.median() if lengths.n else None,
        unknown_share=unknown / n if n and unk_id >= 0 else None,
        distinct_ids=distinct,
        vocab_size=ids.vocab_size,
        vocabulary_used=distinct / ids.vocab_size if ids.vocab_size and distinct is not None else None,
        outside_vocabulary=ids.outside,
        dtype=tokens.dtype,
        shards=len(tokens.files),
        bos_id=bos_id if marks else None,
        eos_id=eos_id if marks else None,
        marks=marks,
    )


class _Ids:
    """Which ids occur. Without a vocabulary the table grows to the largest id, up to a limit."""

    def __init__(self, vocab_size: int | None) -> None:
        self.vocab_size = vocab_size
        self.outside = 0
        self._seen = np.zeros(vocab_size or 0, dtype=np.bool_)
        self._too_many = False

    def add(self, block: np.ndarray) -> None:
        if block.dtype.kind == "i":
            block = block.view(np.uint32)  # a negative id becomes one that no vocabulary has
        largest = int(block.max())
        if self.vocab_size is None and len(self._seen) <= largest < _MAX_VOCABULARY:
            self._seen = np.append(self._seen, np.zeros(largest + 1 - len(self._seen), dtype=np.bool_))
        if largest >= len(self._seen):
            inside = block[block < len(self._seen)]
            if self.vocab_size is None:
                self._too_many = True
            else:
                self.outside += len(block) - len(inside)
            block = inside
        self._seen[block] = True

    def distinct(self) -> int | None:
        return None if self._too_many else int(np.count_nonzero(self._seen))


class _Documents:
    """Lengths of documents from blocks of tokens, wherever these are cut."""

    def __init__(self, bos_id: int, eos_id: int) -> None:
        self._bos_id, self._eos_id = bos_id, eos_id
        self._lengths = _Lengths()
        self._tail = np.empty(0, dtype=np.int64)  # the last two tokens: what follows decides about the last
        self._seen = 0  # tokens
        self._start = 0  # of the document that has not ended

    def add(self, block: np.ndarray) -> None:
        tokens = np.concatenate([self._tail.astype(block.dtype), block])
        first = self._seen - len(self._tail)
        starts = first + np.flatnonzero(document_starts(tokens, self._bos_id, self._eos_id)[:-1])
        self._end_at(starts[starts > max(first, 0)])
        self._seen += len(block)
        self._tail = tokens[-2:]

    def finish(self) -> _Lengths:
        if self._seen:
            if document_starts(self._tail, self._bos_id, self._eos_id)[-1] and self._seen > 1:
                self._end_at(np.array([self._seen - 1]))
            self._end_at(np.array([self._seen]))
        return self._lengths

    def _end_at(self, ends: np.ndarray) -> None:
        """Documents end, and others start, at these positions, all behind the last start."""
        if len(ends):
            self._lengths.add(np.diff(ends, prepend=self._start))
            self._start = int(ends[-1])


class _Lengths:
    """An exact median of any number of lengths: a table of the common ones, a list of the few that are very long."""

    def __init__(self) -> None:
        self.n = self.longest = 0
        self._table = np.zeros(0, dtype=np.int64)
        self._long: list[np.ndarray] = []

    def add(self, lengths: np.ndarray) -> None:
        self.n += len(lengths)
        self.longest = max(self.longest, int(lengths.max()))
        found = np.bincount(lengths[lengths <= _TABLED], minlength=len(self._table))
        found[: len(self._table)] += self._table
        self._table = found
        if len(long := lengths[lengths > _TABLED]):
            self._long.append(long)

    def median(self) -> float:
        ends = np.cumsum(self._table)
        long = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *self._long]))
        tabled = self.n - len(long)
        middle = [
            int(np.searchsorted(ends, i, side="right")) if i < tabled else int(long[i - tabled])
            for i in ((self.n - 1) // 2, self.n // 2)
        ]
        return sum(middle) / 2


_ROWS = (
    "tokens",
    "documents",
    "text bytes",
    "tokens per byte",
    "longest document",
    "mean document",
    "median document",
    "unknown tokens",
    "distinct ids",
    "outside the vocabulary",
    "dtype",
    "files",
    "BOS, EOS",
)


def _cells(part: PartStats) -> tuple[str, ...]:
    """The column of a part, as _ROWS names them; a row without any cell is left out."""
    if part.documents is None:
        documents = "?" if part.recorded_documents is None else f"{part.recorded_documents:,} (not by marks)"
    else:
        documents = f"{part.documents:,}"
        if part.recorded_documents not in (None, part.documents):
            documents = f"{part.recorded_documents:,} recorded, but by marks {documents}"
    distinct = "" if part.distinct_ids is None else f"{part.distinct_ids:,}"
    if part.vocabulary_used is not None:
        distinct += f" of {part.vocab_size:,} ({part.vocabulary_used:.1%})"
    if part.marks is None:
        marks = ""
    else:
        marks = ", ".join("none" if i is None or i < 0 else str(i) for i in (part.bos_id, part.eos_id))
        marks += " (the tokenizer's)" if part.marks == "tokenizer" else ""
    return (
        f"{part.tokens:,}",
        documents,
        "" if part.bytes is None else f"{part.bytes:,}",
        "" if part.tokens_per_byte is None else f"{part.tokens_per_byte:.4f}",
        "" if part.longest_document is None else f"{part.longest_document:,}",
        "" if part.mean_document is None else f"{part.mean_document:,.1f}",
        "" if part.median_document is None else f"{part.median_document:,.1f}",
        "" if part.unknown_share is None else f"{part.unknown_share:.4%}",
        distinct,
        f"{part.outside_vocabulary:,}" if part.outside_vocabulary else "",
        part.dtype,
        f"{part.shards:,}",
        marks,
    )


# --- one window ---


def _decoded(ids: np.ndarray, tokenizer: Tokenizer | None, bos_id: int, eos_id: int) -> str:
    """Ids [n] of one document as text that is safe to print."""
    special = {bos_id: "bos", eos_id: "eos"}
    if bos_id == eos_id:
        special[bos_id] = "bos/eos"
    if tokenizer is None:
        return " ".join(f"⟨{special[i]}⟩" if i >= 0 and i in special else str(i) for i in ids.tolist())
    special = {tokenizer.unk_id: "unk", **special}
    parts: list[str] = []
    run: list[int] = []  # decoded at once, since a character may be several tokens
    for i in ids.tolist():
        name = special.get(i) if i >= 0 else None
        if name is None and 0 <= i < tokenizer.vocab_size and tokenizer.token_bytes[i]:
            run.append(i)
            continue
        if run:
            parts.append(_visible(tokenizer.decode(run)))
            run = []
        inside = 0 <= i < tokenizer.vocab_size
        parts.append(f"⟨{name or (f'id {i}' if inside else f'id {i}, outside the vocabulary')}⟩")
    if run:
        parts.append(_visible(tokenizer.decode(run)))
    return "".join(parts)


def _visible(text: str) -> str:
    """Newlines and tabs stay; other characters that print nothing, or move or colour what is printed, are named."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"⟨U+{ord(c):04X}⟩" for c in text)
