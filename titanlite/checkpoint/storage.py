"""The checkpoint folder on disk: names, manifest, commit, what is damaged, retention. Torch-free.

`checkpoints/step-00000050/` holds the tensor files and `manifest.json`. The folder counts from the moment the
manifest is renamed into place, when everything it names is already on the disk; without a manifest it is
uncommitted and is never read. Only names that this module writes are ever removed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from titanlite.checkpoint.checksum import FileRecord, of_bytes, of_file
from titanlite.config.problems import InputError, Problem
from titanlite.files import fsync_folder, move_aside, write_atomically

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"
# Why a folder was set aside: a run came to its step again, or it is not what was written.
SUPERSEDED, DAMAGED = "superseded", "damaged"
_ASIDE_NAME = re.compile(rf"(step-\d{{8,}})\.((?:{SUPERSEDED}|{DAMAGED})-\d+)")

_STEP_NAME = re.compile(r"step-(\d{8,})")
_TENSOR_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_OUR_FILES = re.compile(rf"manifest\.json(\.[0-9a-f]{{32}}\.tmp)?|\.metadata(\.tmp)?|{_TENSOR_FILE.pattern}")
_KEYS: dict[str, type] = {
    "format": int,
    "step": int,
    "files": dict,
    "layout": dict,
    "versions": dict,
    "config": dict,
    "train_state": dict,
    "time": str,
}
# What the system says of a file that is lost or that a disk cannot give back. Other errors are no damage: a permission
# can be given, memory freed.
_LOST = {
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "EIO", "ENODATA", "EUCLEAN", "EBADMSG")
    if hasattr(errno, name)
}
Section = TypeVar("Section", bound=BaseModel)
# How long a file that another node wrote may stay invisible here (attribute caches of network filesystems).
_VISIBLE_SECONDS = 15.0


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read for a reason that is no wrong input (a full disk, a lost rank)."""


class DamagedError(InputError):
    """A committed checkpoint is not what was written: a file is missing, or has another size or content."""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name stands for; None for any name that `step_folder` would not give."""
    match = _STEP_NAME.fullmatch(folder.name)
    if match is None or step_folder(folder.parent, int(match[1])).name != folder.name:
        return None
    return int(match[1])


def step_and_state(folder: Path) -> tuple[int, str] | None:
    """(step, "" or why and as which it was set aside: "damaged-1") by the folder's name; None for foreign names."""
    match = _ASIDE_NAME.fullmatch(folder.name)
    step = step_of(folder.with_name(match[1]) if match else folder)
    return None if step is None else (step, match[2] if match else "")


# ---- manifest


def make_manifest(step: int, files: Mapping[str, FileRecord], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a step. `files`: by name. `parts`: layout, versions, config and train_state."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: record._asdict() for name, record in sorted(files.items())},
        **{key: parts[key] for key in ("layout", "versions", "config", "train_state")},
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    return {**manifest, "checksum": _checksum(manifest)}


def _checksum(manifest: Mapping[str, Any]) -> str:
    """Of a manifest without its own checksum, as canonical JSON: how it is laid out in its file does not matter."""
    return of_bytes(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises InputError if there is none, it may not be read, or it is of another format; DamagedError if it is not what
    was written.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        problem = _bad(folder, MANIFEST, "no manifest", "a committed checkpoint: its manifest is written last")
        raise InputError(problem) from None
    except OSError as error:
        problem = _bad(folder, MANIFEST, error.strerror or str(error), "a readable file")
        raise (DamagedError if error.errno in _LOST else InputError)(problem) from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(_bad(folder, MANIFEST, f"broken JSON ({error})", "a JSON object")) from error
    if not isinstance(manifest, dict):
        raise DamagedError(_bad(folder, MANIFEST, type(manifest).__name__, "a JSON object"))
    checksum = manifest.pop("checksum", None)
    if checksum is not None and checksum != _checksum(manifest):
        raise DamagedError(_bad(folder, MANIFEST, "other content than was written", "what its checksum says"))
    version = manifest.get("format")
    if version != FORMAT:
        raise InputError(
            _bad(folder, f"{MANIFEST}: format", repr(version), str(FORMAT), "use the titanlite that wrote it")
        )
    malformed = _malformed(folder, manifest, checksum is None)
    if malformed:
        raise DamagedError(malformed)
    return manifest


def section_of(manifest: Mapping[str, Any], folder: Path, name: str, kind: type[Section]) -> Section:
    """A section of the config in the manifest of a folder. Raises InputError if this titanlite does not know it."""
    try:
        return kind.model_validate(manifest["config"].get(name))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("config", name, *first["loc"])))
        got = f"a [{name}] that this titanlite does not know ({first['msg']})"
        fix = "use the titanlite that wrote it"
        raise InputError(Problem(f"{folder}/{MANIFEST}", key, got, "one that it does", fix)) from None


def _malformed(folder: Path, manifest: Mapping[str, Any], without_checksum: bool) -> Problem | None:
    for key, kind in _KEYS.items():
        if type(manifest.get(key)) is not kind:
            allowed = f"a value of type {kind.__name__}"
            return _bad(folder, f"{MANIFEST}: {key}", f"{manifest.get(key)!r:.60}", allowed)
    for name, entry in manifest["files"].items():
        # Names stay inside the folder, whatever the manifest says.
        if not (_OUR_FILES.fullmatch(name) and isinstance(entry, dict) and type(entry.get("bytes")) is int):
            return _bad(folder, f"{MANIFEST}: files", f"{name!r:.60}: {entry!r:.60}", 'a file name with its "bytes"')
        if without_checksum and entry.get("checksum") is not None:
            return _bad(folder, f"{MANIFEST}: checksum", "none", "one, since the files have some")
    if METADATA not in manifest["files"]:
        return _bad(folder, f"{MANIFEST}: files", f"no {METADATA}", "every file of the checkpoint")
    named = step_of(folder)
    if named is not None and named != manifest["step"]:
        return _bad(folder, f"{MANIFEST}: step", str(manifest["step"]), f"{named}, as the folder's name says")
    return None


def _bad(folder: Path, key: str, got: str, allowed: str, fix: str = "") -> Problem:
    fix = fix or "use another checkpoint (--checkpoint.resume PATH, or init_from), or move this folder away"
    return Problem(str(folder), key, got, allowed, fix)


# ---- verifying


def records(manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    """What the manifest says of each file."""
    return {name: FileRecord(entry["bytes"], entry.get("checksum")) for name, entry in manifest["files"].items()}


def share(names: Iterable[str], rank: int, size: int) -> list[str]:
    """The files that this rank of `size` reads to verify them: its own of a world of that size, since it will load what
    is in them, and so finds them in memory."""

    def reader(name: str) -> int:
        match = _TENSOR_FILE.fullmatch(name)
        return int(match[1]) % size if match else 0

    return [name for name in names if reader(name) == rank]


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """check_files, of all files of the manifest and without reading them."""
    check_files(folder, {name: record._replace(checksum=None) for name, record in records(manifest).items()})


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises DamagedError that names every file which is not what was written; InputError if some may not be read."""
    damaged: list[Problem] = []
    forbidden: list[Problem] = []
    for name, expected in files.items():
        try:
            problem = wrong_with(folder, name, expected)
        except PermissionError as error:
            got = error.strerror or str(error)
            forbidden.append(_bad(folder, name, got, "a readable file", "give its user the permission to read it"))
        else:
            damaged += [problem] if problem else []
    if forbidden:
        raise InputError(forbidden)  # no damage: nothing is to be renamed, and nothing older taken instead
    if damaged:
        raise DamagedError(damaged)


def wrong_with(folder: Path, name: str, expected: FileRecord) -> Problem | None:
    """How a file differs from what was written; None if it does not. It is read if `expected` has a checksum.

    Raises OSError if it cannot be looked at for a reason that is no damage.
    """
    path, allowed = folder / name, f"{expected.bytes} bytes"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            got = "no regular file"
        elif status.st_size != expected.bytes:
            got = f"{status.st_size} bytes"
        elif expected.checksum is None or (found := of_file(path)) == expected:
            return None
        else:
            got, allowed = f"other content ({found.checksum})", str(expected.checksum)
    except OSError as error:
        if error.errno not in _LOST:
            raise
        got = "no such file" if error.errno == errno.ENOENT else error.strerror or str(error)
    return _bad(folder, name, got, f"{allowed}, as {MANIFEST} says")


# ---- writing


def prepare_folder(checkpoints: Path, step: int) -> str:
    """Make an empty step folder, and say what happened to an earlier one of its name ("" if there was none).

    Left-overs of an unfinished save are removed. A committed checkpoint of this step, which a run has come to again
    after it was resumed from an earlier one, is set aside and never deleted; so is what is no folder, a link above all.
    """
    folder = step_folder(checkpoints, step)
    said = ""
    if folder.is_symlink() or folder.is_file():
        said = set_aside(folder, SUPERSEDED)
    elif (folder / MANIFEST).exists():
        try:
            read_manifest(folder)
            said = set_aside(folder, SUPERSEDED)
        except InputError:
            said = set_aside(folder, DAMAGED)
    elif folder.exists():
        remove(folder)
    checkpoints.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)  # on the disk with the commit: training waits for this
    return said


def check_shared(token: Path) -> None:
    """Raises CheckpointError unless this process sees a file that another has just made, and can write beside it."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not token.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{token.parent.absolute()} is not the same folder on every node: run.output_dir must be on a disk "
                "that all nodes share"
            )
        time.sleep(0.2)
        os.listdir(token.parent)
    if not os.access(token.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{token.parent.absolute()} cannot be written by every rank")


def wait_for_files(folder: Path, files: Mapping[str, int]) -> None:
    """Raises CheckpointError if this process does not see, in their sizes, files that another one wrote or sees."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while wrong := [name for name, size in files.items() if file_size(folder / name) != size]:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{', '.join(sorted(wrong)[:5])} in {folder}: written or seen by another rank, but not seen with the "
                "same size by this one; the run folder must be on a disk that all nodes share"
            )
        time.sleep(0.2)
        os.listdir(folder)  # makes a network filesystem look again


def commit(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make the checkpoint count: the manifest goes to the disk, then to its name. All other files are there already."""
    fsync_folder(folder.parent)
    fsync_folder(folder)  # their names, before the one that counts
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode())


# ---- which there are, and which stay


def all_folders(checkpoints: Path) -> list[Path]:
    """Step folders, and those that were set aside, by step."""
    folders = _listing(checkpoints) if checkpoints.is_dir() else []
    found = [(state, folder) for folder in folders if folder.is_dir() and (state := step_and_state(folder))]
    return [folder for _, folder in sorted(found)]


def committed_at(path: Path) -> list[Path]:
    """The checkpoints that a path means: the step folder that it is, under any name, or the committed ones of a run
    folder or its `checkpoints/`, the newest first."""
    if (path / MANIFEST).exists():
        return [path]
    return committed_folders(path) or committed_folders(path / "checkpoints")


def committed_folders(checkpoints: Path) -> list[Path]:
    """Step folders with a manifest, whatever is in it, the newest first."""
    return [folder for folder in reversed(_step_folders(checkpoints)) if (folder / MANIFEST).exists()]


def committed_steps(checkpoints: Path, report: Callable[[str], None]) -> list[int]:
    """Steps of the committed checkpoints, ascending. A folder with a bad manifest does not count and is reported."""
    steps = []
    for folder in reversed(committed_folders(checkpoints)):
        try:
            steps.append(read_manifest(folder)["step"])
        except InputError as error:
            report(f"not a usable checkpoint, ignored: {error.problems[0]}")
    return steps


def retain(checkpoints: Path, step: int, keep: int, report: Callable[[str], None], *, keep_every: int = 0) -> None:
    """After the commit of `step`: set aside what a resume has overtaken, remove what is not kept.

    keep: committed checkpoints that stay, newest first; 0: all. One that has lost a file does not count.
    keep_every: those of its multiples stay for good; 0: none do.
    Left-overs of unfinished saves of earlier steps go too. Folders with a bad manifest, links, foreign names and
    foreign files are left alone.
    """
    committed = committed_steps(checkpoints, lambda _: None)
    # The run has just made `step`, so a later one is of the history that a resume from an earlier step has left.
    for later in [other for other in committed if other > step]:
        report(set_aside(step_folder(checkpoints, later), SUPERSEDED))
        committed.remove(later)
    kept = 0
    for number in reversed(committed) if keep else ():
        folder = step_folder(checkpoints, number)
        if kept < keep:
            kept += is_complete(folder)
        elif keep_every == 0 or number % keep_every:
            remove(folder)
    for folder in _step_folders(checkpoints):
        old = step_of(folder)
        if old is not None and old < step and not (folder / MANIFEST).exists():
            remove(folder)


def is_complete(folder: Path) -> bool:
    """Whether it is committed, and all its files are there in their sizes. Raises OSError."""
    try:
        check_sizes(folder, read_manifest(folder))
    except InputError:
        return False
    return True


def is_tensor_file(name: str) -> bool:
    return _TENSOR_FILE.fullmatch(name) is not None


def set_aside(folder: Path, why: str) -> str:
    """Rename `step-N` to `step-N.<why>-k` with the first free k; returns a sentence that says so."""
    return f"{folder} was {why} and is now {move_aside(folder, why).name}"


def remove(folder: Path) -> None:
    """Remove our files from a step folder, the manifest first, and the folder if nothing else is in it."""
    (folder / MANIFEST).unlink(missing_ok=True)
    fsync_folder(folder)  # from here on it is uncommitted, also after a power cut
    for path in _listing(folder):
        if _OUR_FILES.fullmatch(path.name) and (path.is_symlink() or path.is_file()):  # a link goes, not its target
            path.unlink(missing_ok=True)
    if not _listing(folder):
        folder.rmdir()


def file_size(path: Path) -> int | None:
    """Bytes of a regular file; None if there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _step_folders(checkpoints: Path) -> list[Path]:
    """By step, ascending."""
    found = [
        (step, path)
        for path in (_listing(checkpoints) if checkpoints.is_dir() else [])
        if (step := step_of(path)) is not None and path.is_dir() and not path.is_symlink()
    ]
    return [path for _, path in sorted(found)]


def _listing(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())
