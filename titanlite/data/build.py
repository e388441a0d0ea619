"""Text to token shards by several processes: the same bytes for any number of them, and gone on with after any end.

A folder being built holds
    train/, validation/   shards; meta.json only when all is done
    progress.json         written every few seconds: which text with which settings, and how far it is on the disk
    skipped.jsonl         records that could not be read, when they are skipped: {"file", "number", "reason"}
    build.lock            held by the process that builds
and, when it is done, progress.json becomes build.json, and build.lock is gone. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.data.cache import Report, key_of, locked
from titanlite.data.pool import Pool
from titanlite.data.shards import PROGRESS, SHARD_TOKENS, ShardWriter, TokenShards, token_dtype
from titanlite.data.text import BadRecord, Chunk, Position, Text, documents
from titanlite.data.tokenizer import load_tokenizer
from titanlite.files import fsync_file, fsync_folder, write_atomically

FINISHED, SKIPPED, LOCK = "build.json", "skipped.jsonl", "build.lock"
JOURNAL_SECONDS = 5.0  # so much work is lost at most
_FORMAT = "titanlite-build-1"
_VERSION = 1  # raise it when the same text would become other shards
_FEW_CHUNKS = 4  # are done before other processes could have started
_SHOWN = 10  # skipped records
_LEFTOVER = re.compile(r"progress\.json\.[0-9a-f]{32}\.tmp")  # of a kill while it was written


@dataclass(frozen=True)
class Recipe:
    """All that decides about the bytes of the shards.

    bos_id, eos_id: what is put around documents; -1: nothing
    bos_token, eos_token: as load_tokenizer takes them
    on_error: "stop" or "skip", at a record that cannot be read
    """

    text: Text
    tokenizer: Path
    bos_id: int
    eos_id: int
    validation_fraction: float
    on_error: str = "stop"
    shard_tokens: int = SHARD_TOKENS
    bos_token: str = ""
    eos_token: str = ""


@dataclass(frozen=True)
class Built:
    """validation: None when nothing is held out. new: False when it had been built before."""

    train: Path
    validation: Path | None
    train_tokens: int
    validation_tokens: int
    skipped: int
    new: bool

    @property
    def empty(self) -> bool:
        return self.train_tokens + self.validation_tokens == 0


def build(
    folder: Path,
    recipe: Recipe,
    *,
    workers: int,
    report: Report,
    start_over: bool = False,
    journal_seconds: float = JOURNAL_SECONDS,
) -> Built:
    """Write folder/train and folder/validation, or go on with what an earlier call left; nothing when that was all.

    An earlier try with other settings, of text that has changed since or of standard input, or one whose files are
    damaged, is refused; with start_over, for folders that are ours alone, it is deleted. One process builds, others
    wait. Raises InputError, also for a full disk; what was written until then is gone on with, as after any kill.
    """
    tokenise = Tokenise(recipe)
    identity = _identity(recipe, tokenise)
    try:
        try:  # without the lock, so that no trace is left in a folder that is not ours or cannot be written
            if isinstance(found := _look(folder, recipe, identity), Built):
                with suppress(OSError):  # a kill may have left it, when all else was done
                    (folder / LOCK).unlink()
                return found
        except InputError:
            if not start_over:
                raise
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK, lambda: report(f"waiting: another process writes to {folder}")):
            opened = _open(folder, recipe, tokenise, identity, start_over, report)
            if isinstance(opened, Built):
                return opened
            with closing(opened):
                _run(opened, recipe, tokenise, workers, journal_seconds, report)
                opened.finish()
        return replace(_built(folder, opened.skipped), new=True)
    except BrokenPipeError:  # of report
        raise
    except OSError as error:
        got = f"an error while writing there ({error.strerror or error})"
        fix = "make room or name another folder; the same command goes on where this one stopped"
        allowed = "a folder that can be written, with enough space"
        raise InputError(Problem("", str(error.filename or folder), got, allowed, fix)) from error


def _run(
    output: _Output, recipe: Recipe, tokenise: Tokenise, workers: int, journal_seconds: float, report: Report
) -> None:
    """Read, tokenise and write everything from where the output stands."""
    text, started = recipe.text, time.monotonic()
    saved, shards = started, output.shards
    chunks = text.chunks(output.position)
    try:
        with _progress(text, output, report) as advance, closing(_results(chunks, tokenise, workers)) as results:
            for chunk, result in results:
                output.add(chunk, result)
                if time.monotonic() - saved >= journal_seconds or output.shards != shards:
                    output.save()
                    saved, shards = time.monotonic(), output.shards
                advance()
    except KeyboardInterrupt:
        if not _is_stdin(text):
            report(f"interrupted: the same command goes on with what is in {output.folder}")
        raise
    output.save()
    if not _is_stdin(text) and text.state() != output.identity["text"]:
        got, allowed = "files that changed while they were read", "text that stays as it is"
        fix = f"remove {output.folder} and start again when nothing writes to the files"
        raise InputError(Problem("", text.name, got, allowed, fix))
    train, validation = output.train, output.validation
    skipped = f", {output.skipped:,} records skipped (listed in {output.folder / SKIPPED})" if output.skipped else ""
    report(
        f"tokenised {text.name}: {train.tokens:,} tokens to train on, {validation.tokens:,} held out, "
        f"{train.documents + validation.documents:,} documents{skipped}, {time.monotonic() - started:.1f} s"
    )


# --- chunks of text to tokens, here or in other processes ---


@dataclass
class Tokens:
    """What a chunk gives to one side: ids [n] in the dtype on disk, how many documents, how many bytes of text."""

    ids: np.ndarray
    documents: int
    bytes: int


@dataclass
class Result:
    train: Tokens
    validation: Tokens
    bad: list[BadRecord]


class Tokenise:
    """Chunk -> Result. Loads the tokenizer when it is made, in the process that is to use it."""

    def __init__(self, recipe: Recipe, fingerprint: str = "") -> None:
        """fingerprint: what the tokenizer must have, if given. Raises InputError."""
        self._tokenizer = load_tokenizer(recipe.tokenizer, bos_token=recipe.bos_token, eos_token=recipe.eos_token)
        self.fingerprint = self._tokenizer.fingerprint
        if fingerprint and self.fingerprint != fingerprint:
            got, allowed = "another tokenizer than a moment ago", "files that stay as they are"
            raise InputError(Problem("", str(recipe.tokenizer), got, allowed, "start again"))
        self.dtype = token_dtype(self._tokenizer.vocab_size)
        self.recipe = replace(recipe, text=None)  # type: ignore[arg-type]  # not for the workers: it may be long
        self._held_out = recipe.validation_fraction * 2.0**64
        # Both marks are written when both are asked for, also where a tokenizer uses one id for the two.
        self._before, self._after = (
            np.array([i] if i >= 0 else [], dtype=np.int32) for i in (recipe.bos_id, recipe.eos_id)
        )

    def __call__(self, chunk: Chunk) -> Result:
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
        return Result(train, validation, bad)

    def _narrow(self, parts: list[np.ndarray]) -> np.ndarray:
        ids = np.concatenate([np.empty(0, dtype=np.int32), *parts])
        n = self._tokenizer.vocab_size
        assert not len(ids) or (ids.min() >= 0 and ids.max() < n), (
            f"the tokenizer gave an id that is not one of its {n}"
        )
        return ids.astype(np.dtype(self.dtype).newbyteorder("<"))


def _in_worker(recipe: Recipe, fingerprint: str) -> Tokenise:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Hugging Face's would take all cores, in every process
    return Tokenise(recipe, fingerprint)


def _results(chunks: Iterator[Chunk], tokenise: Tokenise, workers: int) -> Generator[tuple[Chunk, Result], None, None]:
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
        waiting: deque[tuple[Chunk, Future[Result]] | InputError] = deque()

        def next_one() -> tuple[Chunk, Result]:
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


# --- what is written, and how far it is ---


class _Output:
    """The files of a build, and the journal that lets a later one go on with them."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        tokenise: Tokenise,
        identity: dict[str, Any],
        state: dict[str, Any] | None,
        report: Report,
    ) -> None:
        """state: what save() wrote; None: the folder is empty. Raises InputError when less is there than it says."""
        self.folder, self.identity = folder, identity
        self._name, self._on_error, self._report = recipe.text.name, recipe.on_error, report
        if state is None:  # before all else, so that whatever a kill leaves is known as ours
            state = {"position": asdict(Position()), "done": 0, "skipped": 0, "skipped_bytes": 0}
            state |= {"train": None, "validation": None}
            self._write(state)
        self.position = Position(**state["position"])
        self.done: int = state["done"]  # bytes on disk of the text
        self.skipped: int = state["skipped"]
        self._skipped_bytes: int = state["skipped_bytes"]
        self._reopen_skipped()
        self.train, self.validation = (
            ShardWriter(
                folder / side,
                dtype=tokenise.dtype,
                tokenizer=tokenise.fingerprint,
                shard_tokens=recipe.shard_tokens,
                bos_id=recipe.bos_id,
                eos_id=recipe.eos_id,
                state=state[side],
            )
            for side in ("train", "validation")
        )

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.validation.tokens

    @property
    def shards(self) -> int:
        """Number of finished ones."""
        return self.train.shards + self.validation.shards

    def add(self, chunk: Chunk, result: Result) -> None:
        """Write a chunk's result. Raises InputError at its first bad record, unless they are skipped."""
        if result.bad:
            self._skip(result.bad)
        for writer, tokens in ((self.train, result.train), (self.validation, result.validation)):
            writer.write(tokens.ids, documents=tokens.documents, text_bytes=tokens.bytes)
        self.position, self.done = chunk.next, chunk.done_bytes

    def save(self) -> None:
        """Put all on the disk, then say so in the journal."""
        if (self.folder / SKIPPED).exists():
            with (self.folder / SKIPPED).open("ab") as file:
                fsync_file(file)
        state = {
            "position": asdict(self.position),
            "done": self.done,
            "skipped": self.skipped,
            "skipped_bytes": self._skipped_bytes,
            "train": self.train.sync(),
            "validation": self.validation.sync(),
        }
        self._write(state)

    def finish(self) -> None:
        """Make it whole. A kill in here leaves a folder that is finished by the next build."""
        self.validation.close()
        self.train.close()  # last: its meta.json is what makes the folder a source
        (self.folder / PROGRESS).rename(self.folder / FINISHED)
        (self.folder / LOCK).unlink(missing_ok=True)  # whoever waits for it, or makes a new one, finds all done
        fsync_folder(self.folder)

    def close(self) -> None:
        self.train.abandon()
        self.validation.abandon()

    def _skip(self, bad: list[BadRecord]) -> None:
        if self._on_error == "stop":
            raise InputError(bad[0].problem())
        with (self.folder / SKIPPED).open("ab") as file:
            for record in bad:
                line = {"file": record.file, "number": record.number, "reason": record.reason}
                self._skipped_bytes += file.write(json.dumps(line).encode() + b"\n")
                self.skipped += 1
                if self.skipped <= _SHOWN:
                    more = f" (of further ones only {SKIPPED} tells)" if self.skipped == _SHOWN else ""
                    self._report(f"warning: skipped {record.place}: {record.reason}{more}")

    def _reopen_skipped(self) -> None:
        path = self.folder / SKIPPED
        found = path.stat().st_size if path.exists() else 0
        if found < self._skipped_bytes:
            got, allowed = f"{found} bytes", f"the {self._skipped_bytes} that were written"
            raise InputError(Problem("", str(path), got, allowed))
        if found > self._skipped_bytes:
            with path.open("r+b") as file:
                file.truncate(self._skipped_bytes)
        if not self._skipped_bytes:
            path.unlink(missing_ok=True)

    def _write(self, state: dict[str, Any]) -> None:
        content = {"format": _FORMAT, "name": self._name, "recipe": self.identity, "state": state}
        content["key"] = key_of(content)
        write_atomically(self.folder / PROGRESS, json.dumps(content, indent=1).encode())


# --- what is there already ---


def _is_stdin(text: Text) -> bool:
    return any(file.path is None for file in text.files)


def _identity(recipe: Recipe, tokenise: Tokenise) -> dict[str, Any]:
    """What must be the same to go on. on_error is not in it: as long as no record was skipped, both give the same."""
    return {
        "version": _VERSION,
        "tokenizer": tokenise.fingerprint,
        "dtype": tokenise.dtype,
        "bos_id": recipe.bos_id,
        "eos_id": recipe.eos_id,
        "validation_fraction": recipe.validation_fraction,
        "shard_tokens": recipe.shard_tokens,
        **asdict(recipe.text.reading),
        "text": f"standard input {uuid.uuid4()}" if _is_stdin(recipe.text) else recipe.text.state(),
    }


_FIX = "remove the folder, or give another"


def _refusal(folder: Path, got: str) -> InputError:
    return InputError(
        Problem("", str(folder), got, "a new or empty folder, or one of the same text and settings", _FIX)
    )


def _look(folder: Path, recipe: Recipe, identity: dict[str, Any]) -> Built | dict[str, Any] | None:
    """What a folder holds: all, the state to go on from, or nothing. Changes nothing. Raises InputError."""
    if (state := _read(folder / PROGRESS, recipe, identity, "an unfinished try")) is not None:
        return state
    if (state := _read(folder / FINISHED, recipe, identity, "tokens")) is not None:
        return _built(folder, state["skipped"])
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    strangers = sorted(name for name in names if name != LOCK and not _LEFTOVER.fullmatch(name))
    if strangers:
        got = f"a folder that holds other files ({', '.join(strangers[:5])}{', …' if len(strangers) > 5 else ''})"
        raise _refusal(folder, got)
    return None


def _read(path: Path, recipe: Recipe, identity: dict[str, Any], what: str) -> dict[str, Any] | None:
    """The state in progress.json or build.json, if it is of this recipe; None if there is none. Raises InputError."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        record = json.loads(data)
        if record.pop("key") != key_of(record):
            raise ValueError
    except (ValueError, AttributeError, KeyError, TypeError):
        raise _refusal(path.parent, f"a damaged {path.name}, or one of another version") from None
    found = record["recipe"]
    if _is_stdin(recipe.text):
        raise _refusal(path.parent, f"{what} of other text (standard input cannot be read a second time)")
    different = [
        f"{name}: {found.get(name)!r}, now {identity[name]!r}"
        for name in identity
        if name != "text" and found.get(name) != identity[name]
    ]
    if record["name"] != recipe.text.name:
        different.append(f"the text: {record['name']!r}, now {recipe.text.name!r}")
    elif found.get("text") != identity["text"]:
        different.append("the text: its files have changed since (names, sizes or times)")
    if record["state"]["skipped"] and recipe.on_error == "stop":
        different.append(f"on_error: {record['state']['skipped']} records were skipped, now 'stop'")
    if different:
        raise _refusal(path.parent, f"{what} with other settings or text ({'; '.join(different)})")
    return dict(record["state"])


def _open(
    folder: Path, recipe: Recipe, tokenise: Tokenise, identity: dict[str, Any], start_over: bool, report: Report
) -> Built | _Output:
    """What a folder holds, ready to be gone on with."""
    try:
        state = _look(folder, recipe, identity)
        if isinstance(state, Built):
            return state
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                path.unlink()
        output = _Output(folder, recipe, tokenise, identity, state, report)
    except InputError as error:
        if not start_over:
            raise InputError([replace(problem, fix=_FIX) for problem in error.problems]) from None
        report(f"warning: what an earlier try left is deleted, and started over: {error.problems[0]}")
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return _Output(folder, recipe, tokenise, identity, None, report)
    if output.tokens:
        report(f"going on in {folder}, where {output.tokens:,} tokens are already")
    return output


def _built(folder: Path, skipped: int) -> Built:
    train, validation = TokenShards(folder / "train"), TokenShards(folder / "validation")
    held_out = validation.path if validation.n_tokens else None
    return Built(train.path, held_out, train.n_tokens, validation.n_tokens, skipped, new=False)


def records_skipped(folder: Path) -> int:
    """How many records a finished build left out."""
    return int(json.loads((folder / FINISHED).read_text())["state"]["skipped"])


# --- what the user sees ---


@contextmanager
def _progress(text: Text, output: _Output, report: Report) -> Iterator[Callable[[], None]]:
    """Gives advance(), which shows where the output stands: a bar on a terminal, else a line every ten seconds."""
    total = 0 if _is_stdin(text) else text.size()
    size = f"{total / 1e6:,.1f} MB in {len(text.files):,} files" if total else "standard input"
    report(f"tokenising {text.name}: {size}")
    started, done, tokens = time.monotonic(), output.done, output.tokens

    def rate() -> str:
        seconds = max(time.monotonic() - started, 1e-9)
        return f"{(output.tokens - tokens) / seconds:,.0f} tokens/s"

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("tokenising", total=total or None, completed=done, rate="")
            yield lambda: bar.update(task, completed=output.done, rate=rate())
        return
    last = started

    def advance() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 10:
            return
        last = now
        words = [f"{output.tokens:,} tokens", rate()]
        if total:
            left = (now - started) * (total - output.done) / max(output.done - done, 1)
            words = [f"{output.done / total:.0%}", *words, f"{left:,.0f} s left"]
        report(f"tokenising {text.name}: {', '.join(words)}")

    yield advance
