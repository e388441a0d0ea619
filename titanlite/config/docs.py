"""What every key means, for --help and for docs/config.md, which `python -m titanlite.config.docs` writes."""

from __future__ import annotations

import textwrap
from pathlib import Path

from titanlite.config.keys import KEYS, Key, shown
from titanlite.config.load import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "config.md"

INTRODUCTION = """# What a run may say

<!-- Written by `python -m titanlite.config.docs` from titanlite/config/schema.py: edit that. -->

A run is one TOML file. Keys without a default are required. `extends = "base.toml"` at the top of a file takes what it
does not set from another one (a path relative to the file; tables are merged key by key, lists are replaced). Every
key can also be given on the command line, with the same types: `--training.steps 100`, `--training.steps=100`,
`--checkpoint.enable=false`, `--compile.enable` (true), `--data.sources '[{path = "texts", weight = 2}]'`. The last
one given wins. Command line > file > the file it extends > default.

Anything unknown, missing, of a wrong type or out of range is refused before the run starts, all of it at once.
Relative paths in values are relative to the working directory. `titanlite config NAME` prints a run with every key.
"""


def describe_keys() -> list[tuple[str, str, str, str]]:
    """(dotted key, what it accepts, default as TOML or "required", description) of every key, in schema order.

    Keys of the tables in a list are named as in data.sources[].path.
    """
    return [
        (_name(key), key.words, _default(key), key.field.description or "")
        for key in KEYS.values()
        if key.kind != "section"
    ]


def _name(key: Key) -> str:
    section, _, leaf = key.dotted.rpartition(".")
    return f"{section}[].{leaf}" if key.in_list else key.dotted


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if key.kind == "list":
        tables = [item.model_dump() for item in key.field.default]
        pairs = [", ".join(f"{name} = {shown(value)}" for name, value in table.items()) for table in tables]
        return "[" + ", ".join(f"{{ {text} }}" for text in pairs) + "]"
    return shown(key.field.default)


def keys_help() -> str:
    """Every key of the config as an option: what it accepts, its default, its meaning."""
    lines: list[str] = []
    for name, words, default, description in describe_keys():
        item = "[]" in name
        default = default if default == "required" else f"default: {default}"
        lines.append(f"  {'in each table: ' + name if item else '--' + name}  {words}; {default}")
        lines.append(textwrap.fill(description, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def render() -> str:
    """docs/config.md."""
    parts = [INTRODUCTION]
    section = None
    for name, words, default, description in describe_keys():
        if (here := name.rpartition(".")[0]) != section and not name.startswith("data.sources[]"):
            section = here
            model = KEYS[section].model
            doc = model.__doc__ if model is not None and "__doc__" in vars(model) else None
            parts.append(f"\n## [{section}]\n" + (f"\n{doc.strip()}\n" if doc else ""))
            parts.append("\n| key | accepts | default | meaning |\n|---|---|---|---|\n")
        leaf = name if name.startswith("data.sources[]") else name.rpartition(".")[2]
        cells = [f"`{leaf}`", words, default if default == "required" else f"`{default}`", description]
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def main(path: Path = DOCUMENT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
