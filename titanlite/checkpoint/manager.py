"""When a checkpoint is written and which one a run starts from. How it lies on the disk is storage.py's.

A save goes: agree on the folder, plan, (async: copy to CPU and return), every rank writes, hashes and syncs its files,
the main rank writes the manifest, retention. A failure on any rank raises the same CheckpointError on all of them, and
the folder stays uncommitted.

A load first reads every file once to compare its checksum, the ranks a share each; only then is a tensor touched. What
is loaded comes from the files again, mostly from memory, where the first reading has left it.
"""

from __future__ import annotations

import json
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import titanlite
from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.checksum import FileRecord
from titanlite.checkpoint.storage import CheckpointError, DamagedError
from titanlite.checkpoint.verify import verify
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import CheckpointConfig

if TYPE_CHECKING:
    from titanlite.parallel.runtime import Ranks

T = TypeVar("T")


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for its manifest."""
    return {
        "titanlite": titanlite.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Saved:
    """A committed save.

    seconds:          from the call of save() to the commit
    checksum_seconds: the part of them in which the slowest rank made checksums
    notes:            what else there is to say
    """

    step: int
    folder: Path
    bytes: int
    seconds: float
    checksum_seconds: float
    notes: tuple[str, ...]

    @property
    def checksum_share(self) -> float:
        return self.checksum_seconds / self.seconds


class CheckpointManager:
    """Saves to and resumes from `folder` (the run folder's `checkpoints`). All methods but `poll` are collective.

    ranks:  the world. An object channel is taken from it, so that a save in the background never meets the collectives
            of training.
    report: called on the main rank with one line when a save is committed or has failed, from the training thread.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        ranks: Ranks,
        *,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.config = config
        self.folder = Path(folder)
        self._ranks = ranks
        self._channel = ranks.object_channel()
        self._report = report if ranks.is_main else (lambda message: None)
        self._plan: dcp.Plan | None = None
        self._snapshot = dcp.Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None
        self._said = False
        self._step_on_disk: int | None = None
        self._failed = False  # the last save
        self._verified: Path | None = None  # the last checkpoint whose files have all been read and found right
        self._figures: dict[str, float] = {}
        if config.enable:  # else nothing is written
            self._check_shared()

    def _check_shared(self) -> None:
        """Raises, on all ranks, CheckpointError if they do not all see and write the same folder, and InputError if it
        cannot be written at all: better at the start than at the first save."""

        def make() -> str:
            token = self.folder / f".shared-{uuid.uuid4().hex}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in self.folder.glob(".shared-*"):  # of a start that was killed
                    old.unlink(missing_ok=True)
                token.touch()
            except OSError as error:
                fix = "choose one with --run.output_dir, or see to it that this one can be written"
                got = error.strerror or str(error)
                raise InputError(Problem("", str(self.folder), got, "a folder that can be written", fix)) from error
            return token.name

        token = self.folder / dcp.on_main(self._channel, make)
        try:
            dcp.agree(self._channel, "looking at the checkpoint folder", lambda: storage.check_shared(token))
        finally:
            if self._ranks.is_main:
                token.unlink(missing_ok=True)

    # ---- saving

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Save `tensors` (flat keys; plain, or DTensors of any mesh) as the checkpoint of `step`.

        manifest: "train_state", "layout", "config", all JSON; "versions" is filled in. With async_mode "async" and
        not `wait` this returns once the tensors are copied, and the commit follows in the background. An earlier save
        still in flight is waited for first. A step that is on disk already is not written again.
        One failed save is reported and survived, since the next may go well. Raises CheckpointError, on all ranks
        alike, when two in a row have failed, or when this one fails and is waited for.
        """
        with self._timed_stall():
            with self._surviving_one():
                self.finish()
            if step == self._step_on_disk:
                return
            with nullcontext() if wait else self._surviving_one():
                try:
                    self._start(step, tensors, manifest)
                except CheckpointError as error:
                    self._failed = True
                    self._report(f"CHECKPOINT NOT SAVED: {error}")
                    raise
                if wait or self.config.async_mode != "async":
                    self.finish()

    def metrics(self) -> dict[str, float]:
        """What saves have cost since the last call, for a row of metrics; empty if nothing happened. Not collective.

        checkpoint_stall_seconds:  in which training waited for them
        checkpoint_seconds:        of the last one that was committed, from its start to the commit
        checkpoint_checksum_share: the part of these in which checksums were made
        """
        figures, self._figures = self._figures, {}
        return figures

    @contextmanager
    def _timed_stall(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            key = "checkpoint_stall_seconds"
            self._figures[key] = self._figures.get(key, 0.0) + time.perf_counter() - start

    @contextmanager
    def _surviving_one(self) -> Iterator[None]:
        failed_before = self._failed
        try:
            yield
        except CheckpointError:
            if failed_before:
                raise

    def _start(self, step: int, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> None:
        """Everything up to the point where the tensors may change again; the rest is in self._pending."""
        started = time.perf_counter()
        parts = dcp.agree(
            self._channel, f"preparing the checkpoint of step {step}", lambda: self._prepare(step, manifest)
        )
        self._plan = dcp.plan_save(tensors, self._channel, self._plan)
        self._said = False
        plan = self._plan
        if self.config.async_mode == "async":
            dcp.agree(self._channel, "copying the checkpoint to CPU memory", lambda: self._snapshot.take(plan, tensors))
            self._pending = self._thread.submit(self._write, step, plan, {}, self._snapshot, parts, started)
        else:
            self._pending = _done(lambda: self._write(step, plan, tensors, None, parts, started))

    def poll(self) -> None:
        """Report a save in the background that has ended since. Costs nothing; not collective; never raises."""
        if self._pending is None or not self._pending.done() or self._said:
            return
        self._said = True
        error = self._pending.exception()
        if error is not None:
            self._report(f"CHECKPOINT NOT SAVED: {error}")
            return
        saved = self._pending.result()
        for note in saved.notes:
            self._report(note)
        self._figures |= {
            "checkpoint_seconds": saved.seconds,
            "checkpoint_checksum_share": saved.checksum_share,
        }
        self._report(
            f"saved checkpoint {saved.folder.name} ({saved.bytes / 1e6:,.1f} MB in {saved.seconds:.2f} s, "
            f"{saved.checksum_share:.1%} of it for checksums)"
        )

    def finish(self) -> None:
        """Wait until the save in flight, if any, is committed. Raises CheckpointError on all ranks if it failed."""
        if self._pending is None:
            return
        pending = self._pending
        try:
            self._step_on_disk = pending.result().step
            self._failed = False
        except CheckpointError:
            self._failed = True
            raise
        finally:
            self.poll()
            self._pending = None

    def _prepare(self, step: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Main rank: freeze the manifest's parts as they are now, and make the folder."""
        if not self._ranks.is_main:
            return {}
        # Through text: an exact copy, and what JSON cannot hold is refused before anything is written.
        parts = json.loads(json.dumps({"versions": versions(), **manifest}, allow_nan=False))
        note = storage.prepare_folder(self.folder, step)
        if note:
            self._report(note)
        return parts

    def _write(
        self,
        step: int,
        plan: dcp.Plan,
        tensors: Mapping[str, torch.Tensor],
        snapshot: dcp.Snapshot | None,
        parts: dict[str, Any],
        started: float,
    ) -> Saved:
        """Write, commit, tidy up. Runs in the background thread for an async save: touches nothing of the training."""
        folder = storage.step_folder(self.folder, step)
        doing = f"saving the checkpoint of step {step}"
        notes: list[str] = []
        try:
            written = dcp.agree(self._channel, doing, lambda: dcp.write_tensors(folder, plan, tensors, snapshot))
            everyone = self._channel.gather(written)
            size, hashing = dcp.agree(self._channel, doing, lambda: self._commit(step, folder, plan, everyone, parts))
        except CheckpointError:
            # Uncommitted; what was written would only fill the disk.
            if self._ranks.is_main:
                dcp.attempt(lambda: storage.remove(folder))
            raise
        if self._ranks.is_main:
            keep, keep_every = self.config.keep_latest_k, self.config.keep_every
            _, failure = dcp.attempt(
                lambda: storage.retain(self.folder, step, keep, notes.append, keep_every=keep_every)
            )
            if failure:
                notes.append(f"old checkpoints could not be removed: {failure}")
        # The others wait here, in a patient channel, and not in training's next collective.
        self._channel.gather(None)
        return Saved(step, folder, size, time.perf_counter() - started, hashing, tuple(notes))

    def _commit(
        self, step: int, folder: Path, plan: dcp.Plan, everyone: list[dcp.Written] | None, parts: dict[str, Any]
    ) -> tuple[int, float]:
        """Main rank: write what stands for all of it. Returns its bytes, and seconds that checksums have cost."""
        if everyone is None:
            return 0, 0.0
        assert plan.metadata is not None
        files = {name: record for written in everyone for name, record in written.files.items()}
        storage.wait_for_files(folder, {name: record.bytes for name, record in files.items()})
        metadata = dcp.write_metadata(folder, plan.metadata, [written.results for written in everyone])
        files |= metadata.files
        storage.commit(folder, storage.make_manifest(step, files, parts))
        slowest = max(written.seconds for written in everyone)
        return sum(record.bytes for record in files.values()), slowest + metadata.seconds

    # ---- which one

    def latest(self) -> Path | None:
        """The newest committed checkpoint of this run folder; None if there is none. Its tensors are not looked at."""
        return dcp.on_main(self._channel, self._latest)

    def _latest(self) -> Path | None:
        steps = storage.committed_steps(self.folder, self._report)
        return storage.step_folder(self.folder, steps[-1]) if steps else None

    def find_resume(self) -> Path | None:
        """The checkpoint to start from as `checkpoint.resume` says; None: start fresh. Raises InputError.

        "auto": the newest one of the run folder of which every byte is right. Newer ones are renamed aside, and what
        is wrong with them is reported; if there are only such, they stay where they are and InputError is raised.
        A path must be that of a step folder itself, under whatever name. A run that has gone on from it (the
        train_state of its own checkpoints says `resumed_from`) goes on with those.
        """
        candidates, given = dcp.on_main(self._channel, self._candidates)
        damaged: list[tuple[Path, Sequence[Problem]]] = []
        chosen, verified = given, ""
        for folder in candidates:
            try:
                verified = self._verify(folder)
            except DamagedError as error:
                damaged.append((folder, error.problems))
            else:
                chosen = folder
                break
        if damaged and chosen is None:
            raise InputError(_none_is_good(self.folder, damaged))
        if damaged:
            dcp.on_main(self._channel, lambda: self._set_aside(damaged))
        if verified:
            self._report(verified)
        if given is not None and chosen != given:
            self._report(f"{chosen} goes on from {given}: resuming that")
        return chosen

    def _candidates(self) -> tuple[list[Path], Path | None]:
        """Checkpoints to resume from, best first, and what to take if none of them is good."""
        resume = self.config.resume
        folders = storage.committed_folders(self.folder)
        if resume == "auto":
            return folders, None
        if resume != "never":
            storage.read_manifest(Path(resume))
            given = Path(resume).resolve()
            return [folder for folder in folders if _resumed_from(folder) == str(given)], given
        if folders:
            raise InputError(
                Problem(
                    "",
                    "checkpoint.resume",
                    f'"never", but {folders[0]} is there',
                    "a run folder without checkpoints",
                    "go on from it with --checkpoint.resume auto, or start another run folder with --run.name NAME",
                )
            )
        return [], None

    def _set_aside(self, damaged: Sequence[tuple[Path, Sequence[Problem]]]) -> None:
        for folder, problems in damaged:
            for problem in problems:
                self._report(f"DAMAGED CHECKPOINT: {replace(problem, fix='')}")
            self._report(storage.set_aside(folder, storage.DAMAGED))

    # ---- loading

    def read_manifest(self, path: Path) -> dict[str, Any]:
        """The manifest of a committed checkpoint, read once and given to all ranks. Raises InputError."""
        return dcp.on_main(self._channel, lambda: storage.read_manifest(Path(path)))

    def load(
        self, path: Path, tensors: Mapping[str, torch.Tensor], tables: Mapping[str, tuple[int, int]] = dcp.NO_TABLES
    ) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint at `path`, saved under whatever layout. Returns its manifest.

        tables: as in dcp.repad; these may have another padding in the checkpoint.
        The ranks' keys together must be exactly the checkpoint's, with its shapes and dtypes, and every byte must be
        what was written; this is found out before any tensor is touched. Raises InputError (DamagedError, if it is
        damaged); CheckpointError if reading fails.
        """
        self.finish()
        path = Path(path)
        mine = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        if path != self._verified:
            self._report(self._verify(path))
        self._verified = None  # it was true a moment ago
        wanted = self._channel.gather(mine)

        def check() -> dict[str, Any]:
            manifest = storage.read_manifest(path)
            saved = dcp.saved_tensors(dcp.repad(dcp.read_metadata_of(path, manifest), tables))
            model = {key: value for part in wanted or [] for key, value in part.items()}
            problems = dcp.differences(path, saved, model)
            if problems:
                raise InputError(problems)
            return manifest

        manifest = dcp.on_main(self._channel, check)
        dcp.read_tensors(path, tensors, self._channel, tables)
        if path.resolve().parent == self.folder.resolve():
            self._step_on_disk = manifest["step"]
        return manifest

    def _verify(self, folder: Path) -> str:
        """verify() of a committed checkpoint. Raises what it does, and InputError."""

        def look() -> dict[str, FileRecord]:
            manifest = storage.read_manifest(folder)
            storage.check_sizes(folder, manifest)
            return storage.records(manifest)

        said = verify(folder, dcp.on_main(self._channel, look), self._channel)
        self._verified = folder
        return said


def _done(work: Callable[[], T]) -> Future[T]:
    """Does the work now, in this thread: copies of live CUDA tensors need its current device."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def _resumed_from(folder: Path) -> str | None:
    """The checkpoint outside of the run's own that a checkpoint's run was told to start from, if it was."""
    try:
        return storage.read_manifest(folder)["train_state"].get("resumed_from")
    except InputError:
        return None


def _none_is_good(checkpoints: Path, damaged: Sequence[tuple[Path, Sequence[Problem]]]) -> list[Problem]:
    fix = "repair or move these folders away, or start another run folder with --run.name NAME"
    allowed = "a usable checkpoint, or none: starting anew would throw this run's progress away"
    first = Problem("", str(checkpoints), "only checkpoints that cannot be used", allowed, fix)
    return [first, *(replace(problem, fix="") for _, problems in damaged for problem in problems)]
