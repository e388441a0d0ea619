"""Is it the same run? On every rank of it, and in the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from titanlite import __version__
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import Config

if TYPE_CHECKING:
    from titanlite.parallel.runtime import Ranks

# Keys that say where things are on a machine: nodes may differ in them.
_PLACES = {"run.output_dir", "data.cache_dir", "data.sources", "tokenizer.path"}


def check_ranks_agree(config: Config, data: str, ranks: Ranks) -> None:
    """Raises InputError, on all ranks, when they were given different runs. Collective.

    Another config, text or version on one node would train on silently, a part of the model each. data: fingerprint.
    """
    mine = {key: value for key, value in flatten(config.model_dump(mode="json")).items() if key not in _PLACES}
    mine |= {"titanlite": __version__, "torch": str(torch.__version__), "data fingerprint": data}
    everyone = ranks.all_gather_object(mine)
    problems = []
    for key in sorted(set().union(*everyone)):
        values = [theirs.get(key) for theirs in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            got = f"{values[other]!r} on rank {other}"
            fix = "run the same command, code and data on every node"
            problems.append(Problem("", key, got, f"{values[0]!r}, as on rank 0", fix))
    if problems:
        raise InputError(problems)


def check_same_run(manifest: Mapping[str, Any], path: Path, *, config: Config, data: str) -> list[str]:
    """What else differs from the checkpoint's run, in words. Raises InputError if it is another model, seed or data.

    manifest: of the checkpoint at `path`. data: this run's fingerprint.
    """
    saved = manifest["config"]
    with suppress(ValidationError):  # a key that has come since had its default then
        saved = Config.model_validate(saved).model_dump(mode="json")
    old, new = flatten(saved), flatten(config.model_dump(mode="json"))
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    fix = "set it back to resume, or start anew under another run.name"
    refused = [
        Problem(str(path), key, repr(new.get(key)), f"{old.get(key)!r}, as in the checkpoint", fix)
        for key in differing
        if key.startswith("model.") or key == "run.seed"
    ]
    fingerprint = manifest["train_state"]["data_fingerprint"]
    if not refused and fingerprint != data:
        keys = [key for key in differing if key.startswith(("data.", "tokenizer.", "training.seq_len"))]
        allowed = f"{fingerprint[:16]}, as in the checkpoint: the same text, tokenizer, weights and seq_len"
        refused = [Problem(str(path), ", ".join(keys) or "data", f"data fingerprint {data[:16]}", allowed, fix)]
    if refused:
        raise InputError(refused)
    return [f"{key} was {old.get(key)!r}, is now {new.get(key)!r}" for key in differing]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
