"""Weights that a run starts from (checkpoint.init_from): a titanlite checkpoint's, or a Hugging Face model's.

Opening them finds out all that can be wrong, and reads no tensor. Then each rank reads what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.metadata import Metadata

from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.checksum import of_bytes
from titanlite.checkpoint.huggingface import (
    CONFIG,
    HuggingFaceWeights,
    model_section,
    other_architecture,
    weight_files,
)
from titanlite.checkpoint.storage import CheckpointError, DamagedError
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig
from titanlite.model.transformer import Transformer

_KEY = "checkpoint.init_from"


class InitialWeights(Protocol):
    """folder: where they are. of_titanlite: they are a checkpoint's, which can be verified. identity: the same for the
    same weights, as far as that can be seen without reading them. notes: what there is to say of them."""

    folder: Path
    of_titanlite: bool
    identity: str
    notes: list[str]

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what this rank holds of the model's parameters and persistent buffers, by FQN, in place."""


def open_weights(path: Path, model: ModelConfig, *, allow_rope_change: bool = False) -> InitialWeights:
    """The weights that checkpoint.init_from = path names. Raises InputError if there are none, or not all of them, or
    they are another model's.

    allow_rope_change: as in [checkpoint]
    """
    folder = _find(path).resolve()
    of_titanlite = (folder / storage.MANIFEST).exists()
    theirs = _saved_model(folder) if of_titanlite else ModelConfig.model_validate(model_section(folder))
    rope = {key: getattr(theirs, key) for key in ("rope_theta", "rope_scaling")}
    changed = [key for key in rope if rope[key] != getattr(model, key)] if allow_rope_change else []
    notes = [f"model.{key} was {rope[key]} for the weights, is now {getattr(model, key)}" for key in changed]
    model = model.model_copy(update={key: rope[key] for key in changed})  # no tensor depends on it
    if not of_titanlite:
        return _OfHuggingFace(folder, model, notes)
    problems = other_architecture(theirs, model, folder / storage.MANIFEST)
    if theirs.moe.n_experts and theirs.moe.bias_update_rate and not model.moe.bias_update_rate:
        allowed = f"more than 0: the weights of {folder} choose experts with biases"
        fix = f"{theirs.moe.bias_update_rate} is what they were trained with"
        problems.append(Problem("", "model.moe.bias_update_rate", "0", allowed, fix))
    if problems:
        raise InputError(problems)
    return _OfTitanlite(folder, model, notes)


def padded_tables(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Parameters with a row for each token id: how many they have, and how many of them are not padding."""
    return dict.fromkeys(("embedding.weight", "output.weight"), (model.padded_vocab_size, model.vocab_size))


def _saved_model(folder: Path) -> ModelConfig:
    try:
        return ModelConfig.model_validate(storage.read_manifest(folder)["config"].get("model"))
    except ValidationError as error:
        got = f"a [model] that this titanlite does not know ({error.errors()[0]['msg']})"
        problem = Problem(str(folder), storage.MANIFEST, got, "one that it does", "use the titanlite that wrote it")
        raise InputError(problem) from None


def _find(path: Path) -> Path:
    """A step folder or a Hugging Face folder itself; of a run the newest committed checkpoint."""
    if (path / storage.MANIFEST).exists() or (path / CONFIG).exists():
        return path
    for checkpoints in (path / "checkpoints", path):
        if committed := storage.committed_folders(checkpoints):
            return committed[0]
    allowed = "a step folder, a run folder with a checkpoint, or the folder of a Hugging Face model"
    got = f"no {storage.MANIFEST}, no {CONFIG} and no committed checkpoint there"
    raise InputError(Problem("", _KEY, f"{str(path)!r}", allowed, f"give another path: there is {got}"))


class _OfTitanlite:
    """Of a step folder, saved in any layout and with any padding of the vocabulary."""

    of_titanlite = True

    def __init__(self, folder: Path, model: ModelConfig, notes: list[str]) -> None:
        self.folder, self.notes = folder, notes
        self.identity = of_bytes((folder / storage.MANIFEST).read_bytes())
        tables = {f"model.{fqn}": rows for fqn, rows in padded_tables(model).items()}
        self._metadata = dcp.repad(_metadata(folder), tables)
        with torch.device("meta"):
            whole = Transformer(model)
        wanted = {f"model.{fqn}": tuple(tensor.shape) for fqn, tensor in whole.state_dict().items()}
        saved = {
            # Into float32, from whatever they were saved in.
            key: (shape, torch.float32 if dtype.is_floating_point else dtype)
            for key, (shape, dtype) in dcp.saved_tensors(self._metadata).items()
            if key.startswith("model.")
        }
        biases = [f"model.{fqn}" for fqn, _ in whole.named_buffers() if f"model.{fqn}" not in saved]
        if started := [key for key in biases if wanted.pop(key, None)]:
            self.notes.append(f"{len(started)} biases that choose experts are not in {folder}: they start at 0")
        problems = dcp.differences(folder, saved, {key: (shape, torch.float32) for key, shape in wanted.items()})
        if problems:
            raise InputError(problems)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = self._metadata.state_dict_metadata
        keys = {f"model.{fqn}": tensor for fqn, tensor in tensors.items()}
        dcp.read_into(self.folder, self._metadata, {key: tensor for key, tensor in keys.items() if key in saved})


def _metadata(folder: Path) -> Metadata:
    """Raises InputError if not all files are there, in their sizes and, of this one, with what was written."""
    manifest = storage.read_manifest(folder)
    storage.check_sizes(folder, manifest)
    wrong = storage.wrong_with(folder, storage.METADATA, storage.records(manifest)[storage.METADATA])
    if wrong:
        raise DamagedError(wrong)
    try:
        metadata = dcp.read_metadata(folder)
    except CheckpointError as error:
        problem = Problem(str(folder), storage.METADATA, str(error), "the metadata of a checkpoint")
        raise DamagedError(problem) from error
    if unknown := dcp.tensor_files(metadata) - manifest["files"].keys():
        got = f"names {', '.join(sorted(unknown)[:5])}"
        raise DamagedError(Problem(str(folder), storage.METADATA, got, f"files that {storage.MANIFEST} names"))
    return metadata


class _OfHuggingFace:
    """Of a folder of safetensors."""

    of_titanlite = False

    def __init__(self, folder: Path, model: ModelConfig, notes: list[str]) -> None:
        self.folder, self.notes = folder, notes
        self._weights = HuggingFaceWeights(folder, model)
        files = [f"{file.name} {file.stat().st_size}" for file in weight_files(folder)]
        self.identity = of_bytes((folder / CONFIG).read_bytes() + "\n".join(files).encode())
        if model.moe.n_experts and model.moe.bias_update_rate:
            self.notes.append(f"biases that choose experts are not in {folder}: they start at 0")

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        known = {fqn: tensor for fqn, tensor in tensors.items() if fqn in self._weights.shapes}
        dcp.fill_local(known, self._weights.read)
