"""The text that a source is made of: the embedded text, or files, folders and globs of the user's. Torch-free.

Documents come in the order of their files' relative POSIX paths, so that a corpus is the same on every machine.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.problems import InputError, Problem
from titanlite.data import formats
from titanlite.data.cache import Memo, key_of
from titanlite.data.formats import ALLOWED, suffix_of
from titanlite.data.records import (
    DEFAULT_READING,
    START,
    BadRecord,
    Chunk,
    Document,
    File,
    Position,
    Reading,
    documents,
)
from titanlite.data.streams import reading_of
from titanlite.files import expand

EMBEDDED_VERSION = "1.14.0"
EMBEDDED_FINGERPRINT = (
    "885a79d51d128ea0ee2667114f93cd2fcc688aa3f10af0bfdde593a7afa2a408"  # of that version: 854 files, 16 612 271 bytes
)
STDIN = "-"


@dataclass(frozen=True)
class Text:
    """A corpus. files: in the order they are read in; ignored: what was found beside them and is not read, in words."""

    name: str
    files: tuple[File, ...]
    reading: Reading = DEFAULT_READING
    ignored: tuple[str, ...] = ()

    def size(self) -> int:
        """Bytes of all files on the disk; standard input counts as none. Raises InputError."""
        return sum(_status(file).st_size for file in self.files if file.path)

    @property
    def is_stdin(self) -> bool:
        """Whether standard input is in it, which can be read once only."""
        return any(file.path is None for file in self.files)

    def chunks(self, start: Position = START) -> Iterator[Chunk]:
        """The text from `start` on: see formats.chunks. Raises InputError."""
        return formats.chunks(self.files, self.reading, start)

    def documents(self) -> Iterator[Document]:
        """All documents, long ones in parts. Raises InputError at the first record that cannot be read."""
        for chunk in self.chunks():
            for document in documents(chunk):
                if isinstance(document, BadRecord):
                    raise InputError(document.problem())
                yield document

    def state(self) -> str:
        """Another one when a file, or how it is read, changes, without reading it: path, size, time of modification."""
        states: list[object] = []
        for file in self.files:
            states.append((file.name, file.suffix))
            if file.path:
                status = _status(file)
                states.append((os.path.abspath(file.path), status.st_size, status.st_mtime_ns))
        return key_of("text", states, self._read_as())

    def fingerprint(self, cache_dir: Path) -> str:
        """sha256 over relative paths, contents and a reading that is not the default.

        It is remembered in the cache as long as the files do not change. Raises InputError, also for standard input.
        """
        if self.is_stdin:
            fix = "write it into a file first"
            raise InputError(Problem("", "input", "standard input, which can be read only once", "files", fix))
        for file in self.files:
            _status(file)
        # The paths do not tell all: a file given by itself and the same one in its folder have other names.
        kind = key_of("text", [(file.name, file.suffix) for file in self.files], self._read_as())
        memo = Memo(cache_dir, kind, [file.path for file in self.files if file.path])
        if (known := memo.get()) is not None:
            return known
        digest = hashlib.sha256()
        for file in self.files:
            _hash(digest, file)
        if read_as := self._read_as():
            digest.update(json.dumps(read_as).encode())
        memo.put(digest.hexdigest())
        return digest.hexdigest()

    def warnings(self) -> list[str]:
        """What the user should be told: files that are not read, settings that mean nothing here."""
        found = []
        if self.ignored:
            found.append(f"{self.name}: not read: {', '.join(self.ignored)}")
        kinds = {file.suffix.split(".")[1] for file in self.files}
        if self.reading.separator and "txt" not in kinds:
            found.append(f"{self.name}: the separator {self.reading.separator!r} is for .txt files, and there are none")
        if self.reading.text_key != DEFAULT_READING.text_key and kinds == {"txt"}:
            found.append(f"{self.name}: text_key {self.reading.text_key!r} means nothing in .txt files")
        return found

    def _read_as(self) -> tuple[str, ...]:
        return () if self.reading == DEFAULT_READING else (self.reading.text_key, self.reading.separator)


def _status(file: File) -> os.stat_result:
    assert file.path
    with reading_of(file):
        return file.path.stat()


def _hash(digest: hashlib._Hash, file: File) -> None:
    """Adds a file's relative path and bytes, with their lengths so that no two corpora run together."""
    name, size = os.fsencode(file.name), _status(file).st_size
    digest.update(b"%d %d\n" % (len(name), size) + name)
    assert file.path
    with reading_of(file), file.path.open("rb", buffering=0) as raw:
        while block := raw.read(1 << 20):
            digest.update(block)
            size -= len(block)
    if size:
        got, fix = "a file that changed while it was read", "start again when nothing writes to it"
        raise InputError(Problem("", str(file), got, "a file that stays as it is", fix))


# --- the embedded text ---


def embedded_text() -> tuple[Text, str]:
    """The .py files of the installed sympy, folders named "tests" left out, and its version. Does not import it."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        got, fix = "no installed package sympy", f"pip install sympy=={EMBEDDED_VERSION}, or name your own data"
        raise InputError(Problem("", 'the "embedded" text', got, "the Python source of sympy", fix))
    root = Path(next(iter(spec.submodule_search_locations)))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name != "tests"]
        relative = Path(folder).relative_to(root)
        files += [(relative / name).as_posix() for name in names if name.lower().endswith(".py")]
    return Text("embedded text", tuple(File(root / f, f) for f in sorted(files))), importlib.metadata.version("sympy")


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


# --- the user's own ---


def text_at(path: str | Path, key: str, reading: Reading = DEFAULT_READING) -> Text:
    """The corpus of a file, a folder (at any depth) or a glob (with ** for folders at any depth).

    Names that begin with a dot are left out, unless the path itself names them; links to files are followed, links to
    folders only where the path names them. A folder that a glob matches is read whole. A path that exists is no glob.

    key names the setting that the path came from. Raises InputError for what cannot be read as text, for anything
    that is no regular file, and when an optional package or, in the first .parquet file, the column is missing.
    """
    path = str(path)
    shown = repr(path)
    if not path or "\0" in path:
        got = f"{shown}, which has a NUL character" if path else "an empty path"
        raise InputError(Problem("", key, got, _WHAT, "correct the path"))
    ignored: set[str] = set()
    try:
        status = os.stat(path)
    except OSError as error:
        if not glob.has_magic(path) or os.path.lexists(path):
            why = "which does not exist" if isinstance(error, FileNotFoundError) else f"({error.strerror})"
            if os.path.islink(path):
                why = "a link to what does not exist"
            raise InputError(Problem("", key, f"{shown}, {why}", _WHAT, "correct the path")) from None
        root, matching = expand(path, lambda: ignored.add("links to folders"))
        with reading_of(File(root, "")):
            matches = set(matching)
        if not matches:
            raise InputError(Problem("", key, f"{shown}, which matches nothing", _WHAT, "correct the path")) from None
        found = {p for match in matches for p in (_files_in(match, ignored) if match.is_dir() else [match])}
    else:
        root = Path(path)
        if not stat.S_ISDIR(status.st_mode):
            return _checked(Text(path, (_single(root, key, status),), reading), key)
        found = set(_files_in(root, ignored))
    files = tuple(sorted(_readable(found, root, ignored), key=lambda file: file.name))
    if not files:
        got = f"{shown}, {'a folder' if root == Path(path) else 'a pattern'} without text files"
        got += f" (it has {', '.join(sorted(ignored)[:8])})" if ignored else ""
        raise InputError(Problem("", key, got, _WHAT, "name the folder that has them, or convert them"))
    return _checked(Text(path, files, reading, tuple(sorted(ignored))), key)


def text_of_inputs(paths: Sequence[str | Path], reading: Reading = DEFAULT_READING, stdin_format: str = "") -> Text:
    """Several inputs as one corpus, in the order given; "-" is standard input, read as stdin_format, "txt" or "jsonl".

    Raises InputError, also for a file that is in two of the inputs.
    """
    problems: list[Problem] = []
    texts: list[Text] = []
    if stdin_format and STDIN not in paths:
        got, allowed = f"{stdin_format!r} without standard input", "an input -"
        problems.append(Problem("", "--format", got, allowed, "leave it out: files are read by their suffix"))
    if STDIN in paths and stdin_format not in ("txt", "jsonl"):
        got, fix = repr(stdin_format) if stdin_format else "nothing", "say what standard input is"
        problems.append(Problem("", "--format", got, "txt or jsonl", fix))
    for path in paths:
        try:
            if path == STDIN:
                texts.append(Text("standard input", (File(None, STDIN, f".{stdin_format}"),), reading))
            else:
                texts.append(text_at(path, "input", reading))
        except InputError as error:
            problems += error.problems
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        for place in dict.fromkeys(os.path.realpath(file.path) if file.path else STDIN for file in text.files):
            if first.setdefault(place, i) != i:
                got = f"{text.files[0] if place == STDIN else place} twice"
                problems.append(Problem("", "input", got, "every file once", "leave one of the inputs out"))
    if not paths:
        problems.append(Problem("", "input", "nothing", _WHAT, "name your text"))
    if problems:
        raise InputError(problems)
    name = texts[0].name if len(texts) == 1 else f"{len(texts)} inputs"
    ignored = sorted({what for text in texts for what in text.ignored})
    return Text(name, tuple(file for text in texts for file in text.files), reading, tuple(ignored))


_WHAT = f"a file, a folder or a glob of {ALLOWED}"


def _checked(text: Text, key: str) -> Text:
    formats.check_installed(text.files, key)
    first = next((file for file in text.files if file.suffix == ".parquet"), None)
    formats.check_columns([first] if first else [], text.reading.text_key)
    return text


def _single(path: Path, key: str, status: os.stat_result) -> File:
    suffix = suffix_of(path.name)
    if not stat.S_ISREG(status.st_mode):
        got, fix = f"{str(path)!r}, which is no regular file", "write it into a file first"
        raise InputError(Problem("", key, got, _WHAT, fix))
    if suffix is None:
        fix = "convert it to UTF-8 text and name it .txt, or to one JSON object a line and name it .jsonl"
        raise InputError(Problem("", key, repr(str(path)), _WHAT, fix))
    # What a file is called does not matter, what it is read as does.
    return File(path, "" if suffix == ".txt" else suffix, suffix)


def _readable(paths: Iterable[Path], root: Path, ignored: set[str]) -> Iterator[File]:
    """Raises InputError for one with the right name that is no regular file, or a link to nothing."""
    for path in paths:
        suffix = suffix_of(path.name)
        if suffix is None:
            ends = path.suffixes[-2:] if path.suffix.lower() in (".gz", ".zst") else path.suffixes[-1:]
            ignored.add("".join(ends).lower() or "files without a suffix")
            continue
        file = File(path, path.relative_to(root).as_posix(), suffix)
        if not stat.S_ISREG(_status(file).st_mode):
            got, fix = "what is no regular file", "move it out"
            raise InputError(Problem("", str(path), got, "readable files", fix))
        yield file


def _files_in(root: Path, ignored: set[str]) -> Iterator[Path]:
    """Everything in a folder that is no folder. Raises InputError for a subfolder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    with reading_of(File(root, "")):
        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            if any(os.path.islink(os.path.join(folder, name)) for name in subfolders):
                ignored.add("links to folders")
            yield from (Path(folder, name) for name in names if not name.startswith("."))
