"""Every dotted key of the schema: its kind, what it accepts in words, and the nearest to a mistyped one. Torch-free."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from titanlite.config.schema import Config, Section

Kind = Literal["section", "list", "integers", "choice", "text", "boolean", "integer", "number"]

# What other trainers call our keys, where no spelling distance would find it.
OTHER_NAMES = {
    "data_parallel_replicate_degree": "parallelism.dp_replicate",
    "data_parallel_shard_degree": "parallelism.dp_shard",
    "tensor_parallel_degree": "parallelism.tp",
    "pipeline_parallel_degree": "parallelism.pp",
    "context_parallel_degree": "parallelism.cp",
    "expert_parallel_degree": "parallelism.ep",
    "context_parallel_rotate_method": "parallelism.cp_method",
    "learning_rate": "optimizer.lr",
    "batch_size": "training.global_batch_size",
    "max_steps": "training.steps",
    "grad_clip": "training.max_norm",
    "dump_folder": "run.output_dir",
    "tokenizer_path": "tokenizer.path",
    "hf_assets_path": "tokenizer.path",
    "dataset": "data.sources",
    "dataset_path": "data.sources",
}


@dataclass(frozen=True)
class Key:
    """A key or a section. The keys of a list's tables have the list's name as their section and in_list set."""

    dotted: str
    kind: Kind
    field: FieldInfo
    model: type[Section] | None  # of a section, or of the tables in a list
    in_list: bool

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def fields(self) -> list[str]:
        """Names inside a section, or inside the tables of a list."""
        return list(self.model.model_fields) if self.model is not None else []

    @property
    def words(self) -> str:
        """What the key accepts, for people: "an integer > 0"."""
        if self.kind == "section":
            return f"a section with the keys {', '.join(self.fields)}"
        if self.kind == "list":
            return f"a list of one or more tables with the keys {', '.join(self.fields)}"
        if self.kind == "integers":
            return "a list of integers > 0"
        if self.kind == "choice":
            return "one of " + ", ".join(shown(choice) for choice in self.choices)
        if self.kind == "boolean":
            return "true or false"
        if self.kind == "text":
            return "text"
        bounds = [f"{sign} {shown(bound)}" for sign, bound in _bounds(self.field)]
        return ("an integer " if self.kind == "integer" else "a number ") + " and ".join(bounds)

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.field.annotation) if self.kind == "choice" else ()


def _bounds(field: FieldInfo) -> Iterator[tuple[str, float]]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    for constraint in field.metadata:
        for name, sign in signs.items():
            bound = getattr(constraint, name, None)
            if bound is not None:
                yield sign, int(bound) if bound == int(bound) else bound


def _describe(annotation: Any) -> tuple[Kind, type[Section] | None]:
    if get_origin(annotation) is Literal:
        return "choice", None
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        return ("list", inner) if isinstance(inner, type) and issubclass(inner, Section) else ("integers", None)
    if issubclass(annotation, Section):
        return "section", annotation
    kinds: dict[type, Kind] = {str: "text", bool: "boolean", int: "integer", float: "number"}
    return kinds[annotation], None


def _walk(model: type[Section], prefix: str = "", in_list: bool = False) -> Iterator[Key]:
    fields = [(name, field, *_describe(field.annotation)) for name, field in model.model_fields.items()]
    for name, field, kind, inner in sorted(fields, key=lambda item: bool(prefix) and item[2] == "section"):
        yield Key(prefix + name, kind, field, inner, in_list)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.", in_list or kind == "list")


KEYS: dict[str, Key] = {key.dotted: key for key in _walk(Config)}


def dotted(parts: Iterable[object]) -> str:
    """TOML's dotted form of a path; a part that is not a bare key is quoted."""
    return ".".join(str(p) if re.fullmatch(r"[A-Za-z0-9_-]+", str(p)) else shown(str(p)) for p in parts)


def find_key(parts: Sequence[object]) -> Key | None:
    """The key at a path; indices into a list are passed over."""
    return KEYS.get(dotted(part for part in parts if not isinstance(part, int)))


def shown(value: object) -> str:
    """A value as TOML writes it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = '"' + repr(value)[1:-1].replace('"', '\\"').replace("\\'", "'") + '"'
    elif isinstance(value, tuple):
        text = str(list(value))
    else:
        try:
            text = str(value)
        except ValueError:  # Python does not print integers of more than 4300 digits
            text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a value too long to show"
    return text if len(text) <= 90 else f"{text[:60]}… ({len(text)} characters)"


def type_words(value: object) -> str:
    names = {bool: "boolean", str: "text", int: "integer", float: "number", list: "list", tuple: "list", dict: "table"}
    return names.get(type(value), type(value).__name__)


def with_type(value: object) -> str:
    return f"{shown(value)} ({type_words(value)})"


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def nearest_key(unknown: str) -> str | None:
    """The dotted key or section most likely meant: a near one of the same section, the same name elsewhere, a near one
    anywhere."""
    if unknown.strip('"') in KEYS:  # "training.steps" as one quoted key
        return unknown.strip('"')
    section, _, leaf = unknown.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in KEYS if name.rpartition(".")[0] == section}
    close = nearest(leaf, siblings, cutoff=0.75)
    if close:
        return siblings[close]
    same = [name for name in KEYS if name.rpartition(".")[2] == leaf]
    if same:
        return max(same, key=lambda name: difflib.SequenceMatcher(None, unknown, name).ratio())
    if leaf in OTHER_NAMES:
        return OTHER_NAMES[leaf]
    close = nearest(leaf, siblings)
    if close:
        return siblings[close]
    leaves = {name.rpartition(".")[2]: name for name in KEYS}
    close = nearest(leaf, leaves, cutoff=0.75)
    return nearest(unknown, KEYS, cutoff=0.75) or (leaves[close] if close else nearest(unknown, KEYS))


def siblings_words(parts: Sequence[object]) -> str:
    """What a section (or the top level, for an empty path) has."""
    key = find_key(parts)
    if key is None:
        return "the sections " + ", ".join(Config.model_fields)
    return f"the keys {', '.join(key.fields)}" if key.model is not None else key.words
