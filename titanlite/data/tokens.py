"""Which tokens a path means, our shards or the files of other stacks, and the reader of them. Torch-free."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.problems import InputError, Problem
from titanlite.data.foreign import ForeignTokens, bin_files, matches
from titanlite.data.shards import FINISHED, META, PROGRESS, TokenArray, TokenShards


@dataclass(frozen=True)
class FoundTokens:
    """Token files, as paths that open_tokens takes; a path may be a glob."""

    train: Path
    validation: Path | None


def find_tokens(path: str, key: str) -> FoundTokens | None:
    """What a path names, if it is tokens; None if it is not, or nothing. Reads headers only.

    A folder of shards, or of train/ and validation/; a folder with train.bin and val.bin (nanoGPT), or with
    *_train_*.bin and *_val_*.bin (llm.c); a .bin or .idx; a glob of them. key names the setting that the path came
    from. Raises InputError when the tokens cannot be read.
    """
    try:
        found = _find(path, key)
    except OSError as error:
        got = f"{path!r} ({error.strerror})"
        raise InputError(Problem("", key, got, "a path that can be read", "change its permissions")) from None
    for part in (found.train, found.validation) if found else ():
        if part:
            open_tokens(part)
    return found


def open_tokens(path: Path | str) -> TokenArray:
    """The reader of token shards, of a .bin, or of several (a glob). Raises InputError."""
    path = Path(path)
    return TokenShards(path) if path.is_dir() else ForeignTokens(path)


# --- which files a path means ---


def _find(path: str, key: str) -> FoundTokens | None:
    place = Path(path)
    if (place / META).is_file():
        return FoundTokens(place, None)
    if (place / "train" / META).is_file():
        held_out = place / "validation"
        return FoundTokens(place / "train", held_out if (held_out / META).is_file() else None)
    if (place / PROGRESS).is_file():
        got, fix = f"{path!r}, which is unfinished", "give the same command of titanlite prepare again: it goes on"
        raise InputError(Problem("", key, got, "a folder of finished token shards", fix))
    if (place / FINISHED).is_file():
        got = f"{path!r}, which {FINISHED} calls finished, without train/{META}"
        raise InputError(Problem("", key, got, "a folder of token shards", "it is damaged: prepare it again"))
    if place.is_dir():
        return _find_in_folder(place, key)
    return FoundTokens(place, None) if _matches_tokens(path, key) else None


def _find_in_folder(folder: Path, key: str) -> FoundTokens | None:
    bins = [file for file in folder.iterdir() if file.suffix in (".bin", ".idx")]
    names = {part: folder / f"{part}.bin" for part in ("train", "val")}
    # Both x_train_000001.bin and x_train.bin, as llm.c names its small sets.
    globs = {part: Path(glob.escape(str(folder))) / f"*_{part}[._]*bin" for part in ("train", "val")}
    named = names["train"].is_file()
    globbed = bool(bin_files(globs["train"]))
    if named and globbed:
        got = f"{str(folder)!r}, which has train.bin and *_train_*.bin"
        raise InputError(Problem("", key, got, "one of them", "name the files by a glob"))
    if named:
        return FoundTokens(names["train"], names["val"] if names["val"].is_file() else None)
    if globbed:
        return FoundTokens(globs["train"], globs["val"] if bin_files(globs["val"]) else None)
    if bins and all(file in bins or file.is_dir() or file.name.startswith(".") for file in folder.iterdir()):
        got = f"{str(folder)!r}, with {bins[0].name} but neither train.bin nor *_train_*.bin"
        raise InputError(Problem("", key, got, "a folder that says what is for training", "name the files by a glob"))
    return None


def _matches_tokens(path: str, key: str) -> bool:
    """Whether the file or the glob is tokens."""
    files = matches(path)
    tokens = [file for file in files if file.suffix in (".bin", ".idx")]
    if tokens and len(tokens) < len(files):
        other = next(file for file in files if file not in tokens)
        got = f"{path!r}, which matches {tokens[0].name} and {other.name}"
        raise InputError(Problem("", key, got, "token files or text, not both", "narrow the pattern, as in *.bin"))
    for folder in {file.parent for file in tokens}:
        if (folder / META).is_file():  # it says which dtype they are of, and more
            got, fix = f"{path!r}, shards by their names", f"name their folder, {str(folder)!r}"
            raise InputError(Problem("", key, got, "a folder of token shards", fix))
    return bool(tokens)
