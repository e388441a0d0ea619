"""A tree of values as a Config, or one problem for each key that is unknown, missing, or of a wrong type. Torch-free.

pydantic decides what is accepted; the words are from the schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from titanlite.config.keys import KEYS, Key, dotted, find_key, nearest, nearest_key, shown, siblings_words, with_type
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import Config

COMMAND_LINE = "command line"
DEFAULT = "default"
OTHER_VALUES = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32"}  # what spelling alone gets wrong
Table = dict[str, Any]
Place = Sequence[int | str]


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """Where a key was set. A section: where the first of its keys was. An item of a list: where the list was."""
    parents = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
    for parent in parents:
        if parent in origins:
            return origins[parent]
    return next((where for other, where in origins.items() if other.startswith(key + ".")), DEFAULT)


def validate(tree: Table, origins: Mapping[str, str], file: str, problems: list[Problem]) -> Config:
    """The tree as a Config. Raises InputError with the problems found before and all of its own."""
    not_tables = {problem.key for problem in problems if problem.key in KEYS and KEYS[problem.key].kind == "section"}
    required = [name for name, key in KEYS.items() if "." not in name and key.kind == "section" and key.required]
    empty: Table = {name: {} for name in required}
    complete = empty | tree  # so that each missing key is named, not only its section
    problems.extend(_too_large(complete, origins))
    config = None
    try:
        config = Config.model_validate(complete)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        places = {details["loc"] for details in errors}
        for details in errors:
            place, value = details["loc"], details["input"]
            name = dotted(place)
            if details["type"] == "missing":
                if dotted(place[:-1]) not in not_tables:
                    problems.append(_missing(place, origins, file))
            elif details["type"] == "extra_forbidden":
                problems.append(unknown_key(origin_of(origins, name), place, value))
            elif details["type"] == "too_short" and any(place == other[: len(place)] != other for other in places):
                continue  # pydantic counts only the good items, and the bad ones are reported themselves
            elif name not in {problem.key for problem in problems}:
                problems.append(_wrong(origin_of(origins, name), place, value))
    if problems:
        raise InputError(problems)
    assert config is not None
    return config


def wrong_name(tree: Table, stem: str, origins: Mapping[str, str], file: str) -> list[Problem]:
    """A run's name (the file's stem when it has none) is one folder name: it must not lead out of output_dir."""
    run = tree.get("run", {})
    name = run.get("name") or stem
    if not isinstance(name, str):
        return []  # the types say so
    bad = name in (".", "..") or name != name.strip() or len(name.encode(errors="replace")) > 200
    if not bad and not re.search(r"[/\\\x00-\x1f\x7f]", name):
        return []
    where = origin_of(origins, "run.name") if run.get("name") else file
    allowed = 'one folder name: no "/", "\\" or control characters, neither "." nor "..", at most 200 bytes'
    return [Problem(where, "run.name", shown(name), allowed, "the folder above it is run.output_dir")]


def _missing(place: Place, origins: Mapping[str, str], file: str) -> Problem:
    key = find_key(place)
    assert key is not None
    section = dotted(place[:-1])
    where = origin_of(origins, section) if key.in_list else file
    fix = f"set {place[-1]} in [{section}]"
    return Problem(where, dotted(place), "nothing (the key is required)", key.words, fix)


def unknown_key(where: str, place: Place, value: object) -> Problem:
    """The refusal of a key that the schema does not have, with the one most likely meant."""
    known = next((place[:n] for n in range(len(place) - 1, 0, -1) if find_key(place[:n])), ())
    key = find_key(known)
    close = nearest_key(dotted(part for part in place if not isinstance(part, int)))
    command_line = where == COMMAND_LINE
    if command_line and key is not None and key.kind == "list":
        fix = f"give the whole list: --{key.dotted} '[{{{key.fields[0]} = ...}}]'"
    elif command_line and key is not None and key.model is None:
        fix = f"write --{key.dotted} VALUE"
    else:
        fix = f"did you mean {'--' if command_line else ''}{close}?" if close else "remove it"
    what = "an unknown section" if isinstance(value, dict) else f"an unknown key, set to {shown(value)}"
    if value is None:
        what = "an unknown key"
    return Problem(where, dotted(place), what, siblings_words(known), fix)


def _wrong(where: str, place: Place, value: object) -> Problem:
    key = find_key(place)
    assert key is not None
    words = f"a table with the keys {', '.join(key.fields)}" if isinstance(place[-1], int) and key.fields else key.words
    return Problem(where, dotted(place), with_type(value), words, _fix(key, value, where))


def _fix(key: Key, value: object, where: str) -> str:
    """How to write what was probably meant, or what kind of value to give."""
    if key.kind == "list":
        example = f"{key.fields[0]} = ..."
        if isinstance(value, dict) and where != COMMAND_LINE:
            return f"write [[{key.dotted}]], with two brackets"
        return f"write '[{{{example}}}]'" if where == COMMAND_LINE else f"write [[{key.dotted}]] and its keys below"
    if key.kind == "integers":
        return "write [1, 2]: whole numbers in brackets"
    if key.kind == "choice":
        texts = {str(choice): choice for choice in key.choices}
        if isinstance(value, str) and OTHER_VALUES.get(value.lower()) in texts:
            return f"did you mean {shown(OTHER_VALUES[value.lower()])}?"
        close = texts.get(nearest(str(value).lower(), texts) or "") if isinstance(value, str) else None
        return f"did you mean {shown(close)}?" if close is not None else "give one of these"
    if key.kind == "text" and isinstance(value, str):
        return "remove the NUL characters, which no path can have"
    if key.kind == "text":
        return f'write "{shown(value)}", in quotes' if isinstance(value, (int, float)) else "write text, in quotes"
    if key.kind == "boolean":
        return "write true or false" + ("" if where == COMMAND_LINE else ", without quotes")
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    number = _as_number(value)
    if key.kind == "integer" and isinstance(number, float) and number.is_integer():
        number = int(number)
    if number is not None and (key.kind == "number" or isinstance(number, int)) and type(number) is not type(value):
        return f"write {number}"
    if type(value) is int or (type(value) is float and key.kind == "number"):
        return "give one within these bounds"
    return "give a whole number" if key.kind == "integer" else "give a number"


def _as_number(value: object) -> int | float | None:
    """The finite number that a value looks like, whatever its type; None when it looks like none."""
    if not isinstance(value, (str, float)):
        return None
    for read in (int, float):
        try:
            number = read(value) if isinstance(value, str) else value
        except ValueError:
            continue
        return number if abs(number) < 1e18 else None
    return None


def _too_large(tree: Table, origins: Mapping[str, str]) -> list[Problem]:
    """Integers that TOML, with its 64 bits, could not hold; pydantic would take them."""
    problems = []
    for key in KEYS.values():
        value: Any = tree
        for part in key.dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if key.kind == "integer" and isinstance(value, int) and abs(value) >= 2**63:
            where = origins.get(key.dotted, DEFAULT)
            words, fix = f"{key.words} and below 2**63", "give a smaller one: TOML has 64 bits"
            problems.append(Problem(where, key.dotted, with_type(value), words, fix))
    return problems
