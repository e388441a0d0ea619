"""Weights that a run starts from (checkpoint.init_from): a titanlite checkpoint's, or a Hugging Face model's.

Opening them finds out what is wrong as far as that can be seen without reading a tensor. Then each rank reads what it
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata

from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.checksum import FileRecord, of_bytes
from titanlite.checkpoint.huggingface import HuggingFaceWeights
from titanlite.checkpoint.huggingface_model import CONFIG, context_length, model_section
from titanlite.checkpoint.storage import CheckpointError, DamagedError
from titanlite.checkpoint.verify import verify
from titanlite.config.keys import shown
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig
from titanlite.model.transformer import Transformer

if TYPE_CHECKING:
    from titanlite.parallel.runtime import ObjectChannel

_KEY = "checkpoint.init_from"
_ONLY_FOR_TRAINING = {"model.init_std", "model.vocab_pad_multiple"} | {
    f"model.moe.{key}" for key in ("bias_update_rate", "aux_loss_coeff", "z_loss_coeff")
}


class InitialWeights(Protocol):
    """
    folder:  where they are
    files:   what is to be verified before they are read; none if nothing says what was written
    notes:   what there is to say of them
    max_position_embeddings: that the model came with from Hugging Face; 0 if it did not
    """

    folder: Path
    files: Mapping[str, FileRecord]
    notes: list[str]
    max_position_embeddings: int

    @property
    def identity(self) -> str:
        """The same for the same weights, as far as that can be seen without reading all of them."""

    def check_tensors(self) -> None:
        """Raises InputError for what only reading can show and no verifying of `files` does. On one rank."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what this rank holds of the model's parameters and persistent buffers, by FQN, in place."""


def load_weights(
    path: Path,
    model: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    channel: ObjectChannel,
    *,
    allow_rope_change: bool = False,
    report: Callable[[str], None],
) -> InitialWeights:
    """Fill `tensors` in place with the weights that `path` names, whatever layout they were saved under. Collective.

    path:    as checkpoint.init_from; ranks of other machines may have another one, to a copy
    tensors: parameters and persistent buffers of `model` by FQN; each rank reads what it holds
    report:  called with one line at a time, on every rank
    Returns the weights. Raises InputError (DamagedError, if a checkpoint is damaged) before any tensor is touched;
    CheckpointError if reading fails, or another rank does not see a checkpoint's files that the main one sees, or has
    other weights.
    """

    def opened(place: Path) -> InitialWeights:
        return open_weights(place, model, allow_rope_change=allow_rope_change)

    def look() -> tuple[Path, Mapping[str, FileRecord]]:
        found = opened(path)
        found.check_tensors()
        return found.folder.relative_to(path), found.files

    inside, files = dcp.on_main(channel, look)
    folder = path / inside
    if files:
        report(verify(folder, files, channel))

    def identified() -> tuple[InitialWeights, str]:
        found = opened(folder)
        return found, found.identity

    weights, identity = dcp.agree(channel, f"opening {folder}", identified)
    identities = channel.all_gather(identity)
    if other := [rank for rank, theirs in enumerate(identities) if theirs != identities[0]]:
        raise CheckpointError(f"{folder} holds other weights on the machine of rank {other[0]} than on rank 0's")
    dcp.agree(channel, f"loading {folder}", lambda: weights.fill(tensors))
    for note in weights.notes:
        report(note)
    return weights


def open_weights(path: Path, model: ModelConfig, *, allow_rope_change: bool = False) -> InitialWeights:
    """The weights that checkpoint.init_from = path names. Raises InputError if there are none, or not all of them, or
    they are another model's.

    allow_rope_change: as in [checkpoint]
    """
    folder = _find(path)
    of_titanlite = (folder / storage.MANIFEST).exists()
    if of_titanlite:
        manifest = storage.read_manifest(folder)
        theirs = storage.section_of(manifest, folder, "model", ModelConfig)
    else:
        theirs = ModelConfig.model_validate(model_section(folder))
    rope = {key: getattr(theirs, key) for key in ("rope_theta", "rope_scaling")}
    changed = [key for key in rope if rope[key] != getattr(model, key)] if allow_rope_change else []
    notes = [f"model.{key} was {rope[key]} for the weights, is now {getattr(model, key)}" for key in changed]
    model = model.model_copy(update={key: rope[key] for key in changed})  # no tensor depends on it
    problems = _other_architecture(theirs, model, folder / (storage.MANIFEST if of_titanlite else CONFIG))
    if theirs.moe.n_experts and theirs.moe.bias_update_rate and not model.moe.bias_update_rate:
        allowed = f"more than 0: the weights of {folder} choose experts with biases"
        fix = f"{theirs.moe.bias_update_rate} is what they were trained with"
        problems.append(Problem("", "model.moe.bias_update_rate", "0", allowed, fix))
    if problems:
        raise InputError(problems)
    if of_titanlite:
        return _OfTitanlite(folder, manifest, theirs, model, notes)
    return _OfHuggingFace(folder, model, notes)


def _find(path: Path) -> Path:
    """A step folder or a Hugging Face folder itself; of a run the newest committed checkpoint."""
    if found := storage.committed_at(path):
        return found[0]
    if (path / CONFIG).exists():
        return path
    allowed = "a step folder, a run folder with a checkpoint, or the folder of a Hugging Face model"
    got = f"no {storage.MANIFEST}, no {CONFIG} and no committed checkpoint there"
    raise InputError(Problem("", _KEY, f"{str(path)!r}", allowed, f"give another path: there is {got}"))


def architecture(model: ModelConfig) -> dict[str, Any]:
    """What weights are made for, by dotted key: without keys that only training needs, and those that are idle."""
    keys = {f"model.{key}": value for key, value in model.model_dump().items() if key not in ("rope_scaling", "moe")}
    keys["model.head_dim"] = model.resolved_head_dim
    scaling, moe = model.rope_scaling.model_dump(), model.moe.model_dump()
    keys |= {f"model.rope_scaling.{key}": scaling[key] for key in scaling if key == "factor" or scaling["factor"] != 1}
    keys |= {f"model.moe.{key}": moe[key] for key in moe if key == "n_experts" or moe["n_experts"] > 0}
    if model.is_moe_layer(0):
        del keys["model.ffn_dim"]
    return {key: value for key, value in keys.items() if key not in _ONLY_FOR_TRAINING}


def _other_architecture(theirs: ModelConfig, ours: ModelConfig, source: Path) -> list[Problem]:
    """Keys of our model that are not those of the model that weights were made for, which the file `source` says."""
    mine, saved = architecture(ours), architecture(theirs)
    fix = "set it so in [model], or take other weights"
    accept = "set it so in [model], or accept it with --checkpoint.allow_rope_change true"
    return [
        Problem(
            "",
            key,
            shown(mine.get(key)),
            f"{shown(saved.get(key))}, as {source} says",
            accept if key.startswith("model.rope_") else fix,
        )
        for key in dict.fromkeys([*mine, *saved])
        if mine.get(key) != saved.get(key)
    ]


class _OfTitanlite:
    """Of a step folder, saved in any layout and with any padding of the vocabulary."""

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], theirs: ModelConfig, model: ModelConfig, notes: list[str]
    ) -> None:
        self.folder, self.notes = folder, notes
        self.files: Mapping[str, FileRecord] = storage.records(manifest)
        self.max_position_embeddings = int(manifest["train_state"].get("max_position_embeddings", 0))
        tables = {f"model.{fqn}": rows for fqn, rows in model.padded_tables.items()}
        self._metadata = dcp.repad(_metadata(folder, manifest), tables)
        with torch.device("meta"):
            whole = Transformer(model)
        wanted = {f"model.{fqn}": (tuple(tensor.shape), torch.float32) for fqn, tensor in whole.state_dict().items()}
        saved = {
            # Into float32, from whatever they were saved in.
            key: (shape, torch.float32 if dtype.is_floating_point else dtype)
            for key, (shape, dtype) in dcp.saved_tensors(self._metadata).items()
            if key.startswith("model.")
        }
        biases = wanted.keys() & {f"model.{fqn}" for fqn, _ in whole.named_buffers()}
        self._new: set[str] = set()
        if biases and not theirs.moe.bias_update_rate and not biases & saved.keys():
            self._new = biases
            notes.append(f"{len(biases)} biases that choose experts are not in {folder}: they start at 0")
        problems = dcp.differences(folder, saved, {key: wanted[key] for key in wanted if key not in self._new})
        if problems:
            raise InputError(problems)

    @property
    def identity(self) -> str:
        return of_bytes((self.folder / storage.MANIFEST).read_bytes())

    def check_tensors(self) -> None:
        """There is nothing that verifying does not show."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        keys = {f"model.{fqn}": tensor for fqn, tensor in tensors.items()}
        dcp.read_into(
            self.folder, self._metadata, {key: tensor for key, tensor in keys.items() if key not in self._new}
        )


def _metadata(folder: Path, manifest: Mapping[str, Any]) -> Metadata:
    """Of a checkpoint's tensors, read from its pickle. Raises DamagedError if not all files are there in their sizes,
    or this one is not what was written or no metadata of these files."""
    storage.check_sizes(folder, manifest)
    wrong = storage.wrong_with(folder, storage.METADATA, storage.records(manifest)[storage.METADATA])
    if wrong:
        raise DamagedError(wrong)
    try:
        return dcp.read_metadata_of(folder, manifest)
    except CheckpointError as error:
        fix = "use another checkpoint"
        raise DamagedError(
            Problem(str(folder), storage.METADATA, str(error), "the metadata of a checkpoint", fix)
        ) from error


class _OfHuggingFace:
    """Of a folder of safetensors."""

    def __init__(self, folder: Path, model: ModelConfig, notes: list[str]) -> None:
        self.folder, self.notes = folder, notes
        self.files: Mapping[str, FileRecord] = {}
        self.max_position_embeddings = context_length(folder)
        self._weights = HuggingFaceWeights(folder, model)
        if model.moe.n_experts and model.moe.bias_update_rate:
            notes.append(f"biases that choose experts are not in {folder}: they start at 0")

    @property
    def identity(self) -> str:
        files = [f"{file.name} {file.stat().st_size}" for file in self._weights.files]
        rows = [of_bytes(row.contiguous().view(torch.uint8).numpy().tobytes()) for row in self._weights.first_rows()]
        return of_bytes((self.folder / CONFIG).read_bytes() + "\n".join([*files, *rows]).encode())

    def check_tensors(self) -> None:
        self._weights.check_tied()

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        known = {fqn: tensor for fqn, tensor in tensors.items() if fqn in self._weights.shapes}
        dcp.fill_local(known, self._weights.read)
