"""Reads a run: a TOML file, what it extends, and overrides from the command line, all through the same strict types.

Precedence: command line > file > the file it extends > default. Tables are merged key by key, lists are replaced.
Everything wrong with keys and types is reported at once, as one InputError. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from titanlite.config.keys import KEYS, Key, dotted, nearest, nearest_key, shown, with_type
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import Config
from titanlite.config.validate import COMMAND_LINE, origin_of, unknown_key, validate, wrong_name

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = "train_configs"
Table = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A run as it was given, and where each value came from."""

    config: Config
    path: Path
    origins: Mapping[str, str]  # dotted key -> the file as the user knows it, or "command line"

    def origin(self, key: str) -> str:
        """Where the value of a key, section or list item was set; "default" when nowhere."""
        return origin_of(self.origins, key)


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """The run that `name` (see find_config) and the overrides declare.

    overrides: command line tokens, `--section.key value`, `--section.key=value`, or `--section.key` alone for true.
    Raises InputError with all unknown keys, missing keys and values of a wrong type or range.
    """
    path = find_config(name)
    problems: list[Problem] = []
    tree: Table = {}
    origins: dict[str, str] = {}
    files = _read_chain(path, problems)
    readable = not problems
    for where, table in files:
        _merge(tree, _without_scalar_sections(table, where, problems), origins, where)
    for part in _parse_overrides(overrides, problems):
        _merge(tree, part, origins, COMMAND_LINE)
    if not readable:  # what is missing cannot be known then
        raise InputError(problems)

    problems += wrong_name(tree, path.stem, origins, display(path))
    config = validate(tree, origins, display(path), problems)
    if not config.run.name:
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": path.stem})})
    return Loaded(config, path, origins)


def dump(config: Config) -> str:
    """The whole run as TOML, in the schema's order; loading it gives an equal Config."""
    return tomli_w.dumps(config.model_dump())


# --- files ---


def available_configs() -> list[Path]:
    """The runs in train_configs/: of the working directory, else of the repository."""
    folders = dict.fromkeys((Path(CONFIG_FOLDER).resolve(), REPOSITORY / CONFIG_FOLDER))
    return [path for folder in folders for path in sorted(folder.glob("*.toml"))]


def find_config(name: str) -> Path:
    """The file that `name` means: a path, else a file of train_configs/, with or without .toml.

    Raises InputError that names the nearest one and lists all.
    """
    folders = ("", CONFIG_FOLDER, REPOSITORY / CONFIG_FOLDER, REPOSITORY)
    for folder in folders:
        for candidate in (name, name + ".toml"):
            path = os.path.join(folder, candidate)
            if name and os.path.exists(path) and not os.path.isdir(path):
                return Path(path)
    names = [path.stem for path in available_configs()]
    close = nearest(Path(name).stem, names)
    what = shown(name) + (" (a folder)" if name and os.path.isdir(name) else "")
    fix = f"did you mean {close}?" if close else "give the path of a TOML file, or one of these names"
    raise InputError(Problem("", "config", what, f"a TOML file, or one of {', '.join(names)}", fix))


def display(path: Path) -> str:
    """A path as the user would recognise it: relative to the working directory when inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def _read_chain(path: Path, problems: list[Problem]) -> list[tuple[str, Table]]:
    """The file and all it extends, the farthest base first, each with the name it is shown by."""
    files: list[tuple[str, Table]] = []
    seen: dict[str, str] = {}
    while True:
        where = display(path)
        seen[os.path.realpath(path)] = where
        table = _read(path, where, problems)
        if table is None:
            break
        files.insert(0, (where, table))
        if "extends" not in table:
            break
        base = table.pop("extends")
        allowed = "the path of another TOML file, relative to this one"
        if not isinstance(base, str) or not base:
            problems.append(Problem(where, "extends", with_type(base), allowed, 'write extends = "base.toml"'))
            break
        path = path.parent / base
        if os.path.realpath(path) in seen:
            chain = " -> ".join([*seen.values(), display(path)])
            problems.append(Problem(where, "extends", shown(base), "files that do not extend each other", chain))
            break
        if not os.path.exists(path):
            names = [other.name for other in path.parent.glob("*.toml")] if path.parent.is_dir() else []
            close = nearest(path.name, names)
            fix = f"did you mean {close}?" if close else f"there is no file {display(path)}"
            problems.append(Problem(where, "extends", shown(base), allowed, fix))
            break
    return files


def _read(path: Path, where: str, problems: list[Problem]) -> Table | None:
    try:
        raw = path.read_bytes()
    except OSError as error:
        fix = "give the path of a file, and see that you may read it"
        problems.append(Problem(where, "file", error.strerror or str(error), "a TOML file that can be read", fix))
        return None
    try:
        text = raw.decode("utf-8-sig")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        found = f"byte 0x{raw[error.start]:02x} at line {line}"
        problems.append(Problem(where, "file", found, "UTF-8 text", "save the file as UTF-8"))
        return None
    try:
        return tomli.loads(text)
    except RecursionError:
        fix = "no key of a run is more than three deep"
        problems.append(Problem(where, "syntax", "tables or lists nested too deeply", "TOML", fix))
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python reads
        message = str(error)
        at = re.search(r"at line (\d+)", message)
        lines = text.splitlines()
        line_text = lines[int(at[1]) - 1].strip() if at and int(at[1]) <= len(lines) else ""
        found = message + (f": {shown(line_text)[1:-1]}" if line_text else "")
        problems.append(Problem(where, "syntax", found, "TOML", 'text is "quoted", booleans are true and false'))
    return None


def _without_scalar_sections(table: Table, where: str, problems: list[Problem], prefix: str = "") -> Table:
    """A copy in which every section is a table. A later file or override would else hide that one was not.

    A section that is no table stays as an empty one, marked by its Problem.
    """
    kept = {}
    for name, value in table.items():
        key = KEYS.get(prefix + name)
        if key is not None and key.kind == "section":
            if isinstance(value, dict):
                value = _without_scalar_sections(value, where, problems, f"{prefix}{name}.")
            else:
                fix = f"write [{key.dotted}] and its keys below"
                problems.append(Problem(where, key.dotted, with_type(value), key.words, fix))
                value = {}
        kept[name] = value
    return kept


def _merge(tree: Table, new: Table, origins: dict[str, str], where: str, prefix: tuple[str, ...] = ()) -> None:
    """Lays `new` over `tree` in place, and notes where each value came from."""
    for name, value in new.items():
        parts = (*prefix, name)
        key = dotted(parts)
        if isinstance(value, dict):
            if not isinstance(tree.get(name), dict):
                tree[name] = {}
                origins.pop(key, None)
            if not value:
                origins.setdefault(key, where)
            _merge(tree[name], value, origins, where, parts)
        else:
            for old in [old for old in origins if old == key or old.startswith(key + ".")]:
                del origins[old]
            tree[name] = value
            origins[key] = where


# --- command line ---


def _parse_overrides(tokens: Sequence[str], problems: list[Problem]) -> list[Table]:
    """The overrides as nested tables, in their order, so that the last one wins."""
    parsed = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            word = token.lstrip("-").partition("=")[0]
            close = nearest_key(word)
            fix = f"did you mean --{close}?" if close else "write --section.key value"
            problems.append(Problem(COMMAND_LINE, "argument", shown(token), "--section.key value", fix))
            continue
        name, equals, text = token[2:].partition("=")
        key = KEYS.get(name)
        value: str | None = text if equals else None
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if value is not None and not value.isascii() and re.search(r"[\ud800-\udfff]", value):
            problems.append(Problem(COMMAND_LINE, name, with_type(value), "UTF-8 text", "TOML holds no other bytes"))
        elif key is None or key.in_list:
            problems.append(unknown_key(COMMAND_LINE, name.split("."), value))
        elif value is None and key.kind != "boolean":
            fix = f"write --{name}=VALUE"
            problems.append(Problem(COMMAND_LINE, name, "no value", key.words, fix))
        else:
            content = True if value is None else parse_value(key, value)
            if key.kind == "section" and not isinstance(content, dict):
                first = next(iter(key.model.model_fields)) if key.model else ""
                fix = f"give one of its keys, as in --{name}.{first} VALUE"
                problems.append(Problem(COMMAND_LINE, name, with_type(content), key.words, fix))
                continue
            for part in reversed(name.split(".")):
                content = {part: content}
            assert isinstance(content, dict)
            parsed.append(_without_scalar_sections(content, COMMAND_LINE, problems))
    return parsed


def parse_value(key: Key, text: str) -> Any:
    """The value that a command line text means for a key: itself for text, else as in TOML.

    A text that TOML does not take is returned as it is, for the strict types to refuse (or for "auto" to be taken).
    """
    if key.kind == "text" or (key.kind == "choice" and all(isinstance(choice, str) for choice in key.choices)):
        return text
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table.get("value")
    # More than one value, or a comment after a plain one: not what a single value looks like.
    return text if len(table) != 1 or ("#" in text and not isinstance(value, (str, list, dict))) else value
