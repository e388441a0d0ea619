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
import re
import shutil
import time
import uuid
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titanlite.config.problems import InputError, Problem
from titanlite.data.cache import Report, key_of, locked
from titanlite.data.progress import progress
from titanlite.data.records import BadRecord, Chunk, Position
from titanlite.data.shards import FINISHED, PROGRESS, ShardWriter, TokenShards
from titanlite.data.text import Text
from titanlite.data.tokenise import Recipe, Tokenise, Tokenised, tokenise_all
from titanlite.files import fsync_file, fsync_folder, write_atomically

SKIPPED, LOCK = "skipped.jsonl", "build.lock"
JOURNAL_SECONDS = 5.0  # so much work is lost at most
_FORMAT = "titanlite-build-1"
VERSION = 2  # raise it when the same text would become other shards: it is in the cache's keys, too
_SHOWN = 10  # skipped records
_LEFTOVER = re.compile(r"progress\.json\.[0-9a-f]{32}\.tmp")  # of a kill while it was written


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
    text: Text,
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
    identity = _identity(text, tokenise)
    try:
        try:  # without the lock, so that no trace is left in a folder that is not ours or cannot be written
            if isinstance(found := _look(folder, text, recipe.on_error, identity), Built):
                with suppress(OSError):  # a kill may have left it, when all else was done
                    (folder / LOCK).unlink()
                return found
        except InputError:
            if not start_over:
                raise
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK, lambda: report(f"waiting: another process writes to {folder}")):
            opened = _open(folder, text, tokenise, identity, start_over, report)
            if isinstance(opened, Built):
                return opened
            with closing(opened):
                _run(opened, text, tokenise, workers, journal_seconds, report)
                opened.finish()
        return replace(_built(folder, opened.skipped), new=True)
    except BrokenPipeError:  # of report
        raise
    except OSError as error:
        got = f"an error while writing there ({error.strerror or error})"
        fix = "make room or name another folder; the same command goes on where this one stopped"
        allowed = "a folder that can be written, with enough space"
        raise InputError(Problem("", str(error.filename or folder), got, allowed, fix)) from error


def _run(output: _Output, text: Text, tokenise: Tokenise, workers: int, journal_seconds: float, report: Report) -> None:
    """Read, tokenise and write everything from where the output stands."""
    started = time.monotonic()
    saved, shards = started, output.shards
    results = tokenise_all(text.chunks(output.position), tokenise, workers)
    try:
        with progress(text, output.done, output.tokens, report) as advance, closing(results):
            for chunk, result in results:
                output.add(chunk, result)
                if time.monotonic() - saved >= journal_seconds or output.shards != shards:
                    output.save()
                    saved, shards = time.monotonic(), output.shards
                advance(output.done, output.tokens)
    except KeyboardInterrupt:
        if not text.is_stdin:
            report(f"the same command goes on with what is in {output.folder}")
        raise
    output.save()
    if not text.is_stdin and text.state() != output.identity["text"]:
        got, allowed = "files that changed while they were read", "text that stays as it is"
        fix = f"remove {output.folder} and start again when nothing writes to the files"
        raise InputError(Problem("", text.name, got, allowed, fix))
    train, validation = output.train, output.validation
    skipped = f", {output.skipped:,} records skipped (listed in {output.folder / SKIPPED})" if output.skipped else ""
    report(
        f"tokenised {text.name}: {train.tokens:,} tokens to train on, {validation.tokens:,} held out, "
        f"{train.documents + validation.documents:,} documents{skipped}, {time.monotonic() - started:.1f} s"
    )


# --- what is written, and how far it is ---


class _Output:
    """The files of a build, and the journal that lets a later one go on with them."""

    def __init__(
        self,
        folder: Path,
        text: Text,
        tokenise: Tokenise,
        identity: dict[str, Any],
        state: dict[str, Any] | None,
        report: Report,
    ) -> None:
        """state: what save() wrote; None: the folder is empty. Raises InputError when less is there than it says."""
        recipe = tokenise.recipe
        self.folder, self.identity = folder, identity
        self._name, self._on_error, self._report = text.name, recipe.on_error, report
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

    def add(self, chunk: Chunk, result: Tokenised) -> None:
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


def _identity(text: Text, tokenise: Tokenise) -> dict[str, Any]:
    """What must be the same to go on. on_error is not in it: as long as no record was skipped, both give the same."""
    recipe = tokenise.recipe
    return {
        "version": VERSION,
        "tokenizer": tokenise.fingerprint,
        "dtype": tokenise.dtype,
        "bos_id": recipe.bos_id,
        "eos_id": recipe.eos_id,
        "validation_fraction": recipe.validation_fraction,
        "shard_tokens": recipe.shard_tokens,
        **asdict(text.reading),
        "text": f"standard input {uuid.uuid4()}" if text.is_stdin else text.state(),
    }


_FIX = "remove the folder, or give another"


def _refusal(folder: Path, got: str) -> InputError:
    return InputError(
        Problem("", str(folder), got, "a new or empty folder, or one of the same text and settings", _FIX)
    )


def _look(folder: Path, text: Text, on_error: str, identity: dict[str, Any]) -> Built | dict[str, Any] | None:
    """What a folder holds: all, the state to go on from, or nothing. Changes nothing. Raises InputError."""
    if (state := _read(folder / PROGRESS, text, on_error, identity, "an unfinished try")) is not None:
        return state
    if (state := _read(folder / FINISHED, text, on_error, identity, "tokens")) is not None:
        return _built(folder, state["skipped"])
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    strangers = sorted(name for name in names if name != LOCK and not _LEFTOVER.fullmatch(name))
    if strangers:
        got = f"a folder that holds other files ({', '.join(strangers[:5])}{', …' if len(strangers) > 5 else ''})"
        raise _refusal(folder, got)
    return None


def _read(path: Path, text: Text, on_error: str, identity: dict[str, Any], what: str) -> dict[str, Any] | None:
    """The state in progress.json or build.json, if it is of this build; None if there is none. Raises InputError."""
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
    if text.is_stdin:
        raise _refusal(path.parent, f"{what} of other text (standard input cannot be read a second time)")
    different = [
        f"{name}: {found.get(name)!r}, now {identity[name]!r}"
        for name in identity
        if name != "text" and found.get(name) != identity[name]
    ]
    if found.get("text") != identity["text"] and record["name"] != text.name:
        different.append(f"the text: {record['name']!r}, now {text.name!r}")
    elif found.get("text") != identity["text"]:
        different.append("the text: its files have changed since (names, sizes or times)")
    if record["state"]["skipped"] and on_error == "stop":
        different.append(f"on_error: {record['state']['skipped']} records were skipped, now 'stop'")
    if different:
        raise _refusal(path.parent, f"{what} with other settings or text ({'; '.join(different)})")
    return dict(record["state"])


def _open(
    folder: Path, text: Text, tokenise: Tokenise, identity: dict[str, Any], start_over: bool, report: Report
) -> Built | _Output:
    """What a folder holds, ready to be gone on with."""
    try:
        state = _look(folder, text, tokenise.recipe.on_error, identity)
        if isinstance(state, Built):
            return state
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                path.unlink()
        output = _Output(folder, text, tokenise, identity, state, report)
    except InputError as error:
        if not start_over:
            raise InputError([replace(problem, fix=_FIX) for problem in error.problems]) from None
        report(f"warning: what an earlier try left is deleted, and started over: {error.problems[0]}")
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return _Output(folder, text, tokenise, identity, None, report)
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
