"""Is it the same run? On every rank of it, and in the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from titanlite import __version__
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import Config
from titanlite.data.phase import RunData

if TYPE_CHECKING:
    from titanlite.parallel.runtime import Ranks

# Keys that say where things are on a machine: nodes may differ in them.
_PLACES = {"run.output_dir", "data.cache_dir", "data.sources", "tokenizer.path", "checkpoint.init_from"}

# What every train state has, besides "data", and what older ones have not.
_TRAIN_STATE = {"step": int, "samples": int, "tokens": int, "resumed_from": str, "data_fingerprint": str}
_LATER_TRAIN_STATE = {"init_from": str, "max_position_embeddings": int}

# Keys of [data] that no token depends on.
_NOT_CONTENT = {"data.epochs", "data.prepare_workers", "data.num_workers", "data.cache_dir", "data.allow_change"}
# What makes it another run unless a key of the config accepts it: which one.
_ACCEPTED_BY = {
    # They can change what is learned from the same tokens.
    **{f"tokenizer.{key}": "data.allow_change" for key in ("add_bos", "add_eos", "bos_token", "eos_token")},
    "data.document_mask": "data.allow_change",
    "training.global_batch_size": "training.allow_batch_change",
}


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


def check_train_state(manifest: Mapping[str, Any], path: Path) -> None:
    """Raises InputError if the train state in the manifest of the checkpoint at `path` cannot be gone on from."""
    state = manifest["train_state"]
    if state.get("weights_only"):
        fix = f"start a run with its weights: --checkpoint.init_from {path}"
        raise InputError(Problem("", "checkpoint.resume", f"{path}, weights only", "a checkpoint of a run", fix))
    wrong = [key for key, kind in _TRAIN_STATE.items() if type(state.get(key)) is not kind]
    wrong += [key for key in ("samples", "tokens") if key not in wrong and state[key] < 0]
    wrong += [key for key, kind in _LATER_TRAIN_STATE.items() if key in state and type(state[key]) is not kind]
    if state.get("step") != manifest["step"]:
        wrong.append("step")
    if "data" in state:
        try:
            RunData.of_record(state["data"])
        except (AttributeError, KeyError, TypeError, ValueError):
            wrong.append("data")
    if wrong:
        where, keys = f"{path}/manifest.json", ", ".join(sorted(f"train_state.{key}" for key in {*wrong}))
        got = ", ".join(f"{state.get(key)!r:.60}" for key in sorted({*wrong}))
        fix = "resume from another checkpoint: --checkpoint.resume PATH"
        raise InputError(Problem(where, keys, got, f"the train state of step {manifest['step']}", fix))


def check_same_run(manifest: Mapping[str, Any], path: Path, *, config: Config, data: RunData) -> list[str]:
    """What else differs from the checkpoint's run, in words. Raises InputError if it is another model, seed, data or
    batch.

    With data.allow_change other sources, weights and document marks are accepted, and what changes in the sources is
    left to data/phase.py to say; with training.allow_batch_change another batch. manifest: of the checkpoint at `path`.
    data: the first phase of what config names.
    """
    saved = manifest["config"]
    with suppress(ValidationError):  # a key that has come since had its default then
        saved = Config.model_validate(saved).model_dump(mode="json")
    old, new = flatten(saved), flatten(config.model_dump(mode="json"))
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    refused = _other_run(manifest["train_state"], str(path), old, new, differing, data)
    if refused:
        raise InputError(refused)
    same_data = manifest["train_state"]["data_fingerprint"] == data.fingerprint
    not_told = {*_ACCEPTED_BY.values()} | (set() if same_data else {"data.sources"})
    told = [f"{key} was {old.get(key)!r}, is now {new.get(key)!r}" for key in differing if key not in not_told]
    torch_before = manifest["versions"].get("torch")
    if torch_before != str(torch.__version__):  # its kernels may round otherwise
        told.append(f"torch was {torch_before}, is now {torch.__version__}: not bitwise the run that it was")
    return told


def _other_run(
    train_state: Mapping[str, Any],
    where: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    differing: Sequence[str],
    data: RunData,
) -> list[Problem]:
    """What makes it another run than the checkpoint's. old, new: the flat configs; differing: their keys."""
    fix = "set it back to resume, or start anew under another run.name"
    accept = f"{fix}, or accept it from here on with --{{}} true"
    record, fingerprint = train_state.get("data"), train_state["data_fingerprint"]
    allowed_to_change = new["data.allow_change"]

    problems = []
    for key in differing:
        # Rows of padding are zero and stay so: how many there are changes nothing.
        always = key.startswith("model.") and key != "model.vocab_pad_multiple"
        always |= key in ("run.seed", "training.seq_len")
        by = _ACCEPTED_BY.get(key)
        if always or (by and not new[by]):
            allowed = f"{old.get(key)!r}, as in the checkpoint"
            problems.append(Problem(where, key, repr(new.get(key)), allowed, accept.format(by) if by else fix))
    if record is not None and record["tokenizer"] != data.tokenizer:
        got = f"{new['tokenizer.path']!r} (sha256 {data.tokenizer[:12]}…)"
        allowed = f"{old.get('tokenizer.path')!r} (sha256 {record['tokenizer'][:12]}…), as in the checkpoint"
        problems.append(Problem(where, "tokenizer.path", got, allowed, fix))

    if problems or fingerprint == data.fingerprint or (allowed_to_change and record is not None):
        return problems
    keys = [key for key in differing if key.startswith(("data.", "tokenizer.")) and key not in _NOT_CONTENT]
    got = f"{data} (data fingerprint {data.fingerprint[:16]})"
    saved = f"{RunData.of_record(record)} (" if record else "("
    allowed = f"{saved}{fingerprint[:16]}), as in the checkpoint: the same text, tokenizer, weights and seq_len"
    if allowed_to_change:
        allowed += ", since this older checkpoint does not say how far each source was read"
    fix = fix if record is None else accept.format("data.allow_change")
    return [Problem(where, ", ".join(keys) or "data", got, allowed, fix)]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
