"""The checkpoint folder on disk: names, manifest, commit, size checks, retention. Torch-free.

`checkpoints/step-00000050/` holds the tensor files and `manifest.json`. The folder counts from the moment the
manifest is renamed into place, when everything it names is already on the disk; without a manifest it is
uncommitted and is never read. Only names that this module writes are ever removed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.config.problems import InputError, Problem
from titanlite.files import fsync_folder, move_aside, write_atomically

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"

_STEP_NAME = re.compile(r"step-(\d{8,})")
_OUR_FILES = re.compile(r"manifest\.json(\.[0-9a-f]{32}\.tmp)?|\.metadata(\.tmp)?|__\d+_\d+\.distcp")
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
# How long a file that another node wrote may stay invisible here (attribute caches of network filesystems).
_VISIBLE_SECONDS = 15.0


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read for a reason that is no wrong input (a full disk, a lost rank)."""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name stands for; None for any name that `step_folder` would not give."""
    match = _STEP_NAME.fullmatch(folder.name)
    if match is None or step_folder(folder.parent, int(match[1])).name != folder.name:
        return None
    return int(match[1])


# ---- manifest


def make_manifest(step: int, files: Mapping[str, int], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a step. `files`: name -> bytes. `parts`: layout, versions, config and train_state."""
    return {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": size, "checksum": None} for name, size in sorted(files.items())},
        **{key: parts[key] for key in ("layout", "versions", "config", "train_state")},
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint. Raises InputError if there is none or if it is not a valid one."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _bad(folder, MANIFEST, "no manifest", "a committed checkpoint: its manifest is written last") from None
    except OSError as error:
        raise _bad(folder, MANIFEST, error.strerror or str(error), "a readable file") from error
    except ValueError as error:
        raise _bad(folder, MANIFEST, f"broken JSON ({error})", "a JSON object") from error
    if not isinstance(manifest, dict):
        raise _bad(folder, MANIFEST, type(manifest).__name__, "a JSON object")
    version = manifest.get("format")
    if version != FORMAT:
        raise _bad(folder, f"{MANIFEST}: format", repr(version), str(FORMAT), "use the titanlite that wrote it")
    for key, kind in _KEYS.items():
        if type(manifest.get(key)) is not kind:
            raise _bad(folder, f"{MANIFEST}: {key}", f"{manifest.get(key)!r:.60}", f"a value of type {kind.__name__}")
    for name, entry in manifest["files"].items():
        # Names stay inside the folder, whatever the manifest says.
        if not _OUR_FILES.fullmatch(name) or not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise _bad(folder, f"{MANIFEST}: files", f"{name!r:.60}: {entry!r:.60}", 'a file name with its "bytes"')
    if METADATA not in manifest["files"]:
        raise _bad(folder, f"{MANIFEST}: files", f"no {METADATA}", "every file of the checkpoint")
    named = step_of(folder)
    if named is not None and named != manifest["step"]:
        raise _bad(folder, f"{MANIFEST}: step", str(manifest["step"]), f"{named}, as the folder's name says")
    return manifest


def verify_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises InputError that names every file which is missing or has not the size the manifest states."""
    problems: list[Problem] = []
    for name, entry in manifest["files"].items():
        size = file_size(folder / name)
        if size != entry["bytes"]:
            got = "no such file" if size is None else f"{size} bytes"
            problems += _bad(folder, name, got, f"{entry['bytes']} bytes, as {MANIFEST} says").problems
    if problems:
        raise InputError(problems)


def _bad(folder: Path, key: str, got: str, allowed: str, fix: str = "") -> InputError:
    fix = fix or "resume from another checkpoint (--checkpoint.resume PATH), or move this folder away"
    return InputError(Problem(str(folder), key, got, allowed, fix))


# ---- writing


def prepare_folder(checkpoints: Path, step: int) -> str:
    """Make an empty step folder, and say what happened to an earlier one of its name ("" if there was none).

    Left-overs of an unfinished save are removed. A committed checkpoint of this step, which a run has come to again
    after it was resumed from an earlier one, is set aside and never deleted.
    """
    folder = step_folder(checkpoints, step)
    said = ""
    if (folder / MANIFEST).exists():
        try:
            read_manifest(folder)
            said = set_aside(folder, "superseded")
        except InputError:
            said = set_aside(folder, "damaged")
    elif folder.exists():
        remove(folder)
    checkpoints.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    fsync_folder(checkpoints)
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
    """Raises CheckpointError if this process does not see the files that all ranks say they wrote."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while wrong := [name for name, size in files.items() if file_size(folder / name) != size]:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{', '.join(sorted(wrong)[:5])} in {folder}: written by another rank, but not seen with the same size "
                "by the main one; the run folder must be on a disk that all nodes share"
            )
        time.sleep(0.2)
        os.listdir(folder)  # makes a network filesystem look again


def commit(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make the checkpoint count: the manifest goes to the disk, then to its name. All other files are there already."""
    fsync_folder(folder)  # their names, before the one that counts
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode())


# ---- which there are, and which stay


def committed_steps(checkpoints: Path, report: Callable[[str], None]) -> list[int]:
    """Steps of the committed checkpoints, ascending. A folder with a bad manifest does not count and is reported."""
    steps = []
    for folder in _step_folders(checkpoints):
        if not (folder / MANIFEST).exists():
            continue
        try:
            steps.append(read_manifest(folder)["step"])
        except InputError as error:
            report(f"not a usable checkpoint, ignored: {error.problems[0]}")
    return sorted(steps)


def retain(checkpoints: Path, step: int, keep: int, report: Callable[[str], None]) -> None:
    """After the commit of `step`: set aside what a resume has overtaken, remove what is not kept.

    keep: committed checkpoints that stay, newest first; 0: all. Left-overs of unfinished saves of earlier steps go
    too. Folders with a bad manifest, links, foreign names and foreign files are left alone.
    """
    committed = committed_steps(checkpoints, lambda _: None)
    # The run has just made `step`, so a later one is of the history that a resume from an earlier step has left.
    for later in [other for other in committed if other > step]:
        report(set_aside(step_folder(checkpoints, later), "superseded"))
        committed.remove(later)
    for old in committed[:-keep] if keep else []:
        remove(step_folder(checkpoints, old))
    for folder in _step_folders(checkpoints):
        number = step_of(folder)
        if number is not None and number < step and not (folder / MANIFEST).exists():
            remove(folder)


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


def _step_folders(checkpoints: Path) -> Iterable[Path]:
    return [
        path
        for path in (_listing(checkpoints) if checkpoints.is_dir() else [])
        if step_of(path) is not None and path.is_dir() and not path.is_symlink()
    ]


def _listing(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())
