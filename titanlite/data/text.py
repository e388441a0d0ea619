"""The text that a source is made of: the embedded text, a .txt file, or a folder of them. Torch-free.

One file is one document. Documents come in the order of their relative POSIX paths, so that a corpus is the same on
every machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.problems import InputError, Problem
from titanlite.data.cache import Memo

EMBEDDED_VERSION = "1.14.0"
EMBEDDED_FINGERPRINT = (
    "885a79d51d128ea0ee2667114f93cd2fcc688aa3f10af0bfdde593a7afa2a408"  # of that version: 854 files, 16 612 271 bytes
)


@dataclass(frozen=True)
class Text:
    """A corpus: files under a root, as POSIX paths relative to it, sorted. ("",) is the root itself, one file."""

    name: str
    root: Path
    files: tuple[str, ...]

    def path(self, file: str) -> Path:
        return self.root / file if file else self.root

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """(relative path, contents) of every file. Raises InputError for one that cannot be read."""
        for file in self.files:
            with _reading():
                data = self.path(file).read_bytes()
            yield file, data

    def size(self) -> int:
        """Bytes of all documents."""
        with _reading():
            return sum(self.path(file).stat().st_size for file in self.files)

    def fingerprint(self, cache_dir: Path) -> str:
        """sha256 over relative paths and contents; remembered in the cache as long as the files do not change."""
        with _reading():
            memo = Memo(cache_dir, "text", [self.path(file) for file in self.files])
        if (known := memo.get()) is not None:
            return known
        digest = FingerprintOfText()
        for file, data in self.documents():
            digest.add(file, data)
        memo.put(digest.hexdigest())
        return digest.hexdigest()


class FingerprintOfText:
    """sha256 over each document's relative path and bytes, with their lengths so that no two corpora run together."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, file: str, data: bytes) -> None:
        name = os.fsencode(file)
        self._hash.update(b"%d %d\n" % (len(name), len(data)) + name)
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def embedded_text() -> tuple[Text, str]:
    """The .py files of the installed sympy, folders named "tests" left out, and its version. Does not import it."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        got, fix = "no installed package sympy", f"pip install sympy=={EMBEDDED_VERSION}, or name your own data"
        raise InputError(Problem("", 'the "embedded" text', got, "the Python source of sympy", fix))
    root = Path(next(iter(spec.submodule_search_locations)))
    files = _find(root, ".py", skip_folder="tests")
    return Text("embedded text", root, files), importlib.metadata.version("sympy")


def check_embedded(version: str, fingerprint: str, report: Callable[[str], None]) -> None:
    """Say which text this is, and warn when it is not the one that this version was tried with."""
    report(f"embedded text: Python source of sympy {version}, sha256 {fingerprint}")
    if version != EMBEDDED_VERSION:
        report(
            f"warning: the embedded text is meant to be sympy {EMBEDDED_VERSION}'s; with {version} training works the "
            "same, but the text, the tokenizer and every loss are others"
        )
    elif fingerprint != EMBEDDED_FINGERPRINT:
        report(
            f"warning: this sympy {version} differs from the released one (sha256 {EMBEDDED_FINGERPRINT}), so the "
            "tokenizer and every loss are others; pip install --force-reinstall brings the released one back"
        )


def text_at(path: Path, key: str) -> Text:
    """The corpus of a .txt file or a folder with .txt files at any depth (links to folders are not followed).

    key names the setting that the path came from. Raises InputError for anything else.
    """
    allowed = 'a folder of token shards, a .txt file, a folder with .txt files, or "embedded"'
    if path.is_dir():
        files = _find(path, ".txt")
        if not files:
            others = sorted({p.suffix for p in path.iterdir() if p.is_file()})[:5]
            got = f"{str(path)!r}, a folder without .txt files" + (f" (it has {', '.join(others)})" if others else "")
            raise InputError(Problem("", key, got, allowed, "name the folder that has them, or convert to .txt"))
        return Text(str(path), path, files)
    if not path.exists():
        raise InputError(Problem("", key, f"{str(path)!r}, which does not exist", allowed, "correct the path"))
    if path.suffix.lower() != ".txt":
        raise InputError(Problem("", key, repr(str(path)), allowed, "convert it to UTF-8 text and name it .txt"))
    return Text(str(path), path, ("",))


def decode(text: Text, file: str, data: bytes) -> str:
    """The document as str. Raises InputError that names the file and the offset of the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start}, which is no UTF-8 ({error.reason})"
        raise InputError(
            Problem("", str(text.path(file)), got, "UTF-8 text", "convert the file, for example with iconv -t utf-8")
        ) from None


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        got = f"a file that cannot be read ({error.strerror})"
        fix = "restore it or change its permissions, or move it out"
        raise InputError(Problem("", str(error.filename), got, "readable files", fix)) from error


def _find(root: Path, suffix: str, skip_folder: str | None = None) -> tuple[str, ...]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name != skip_folder]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if name.lower().endswith(suffix)]
    return tuple(sorted(found))
