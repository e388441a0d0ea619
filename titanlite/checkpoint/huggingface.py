"""Weights of a Hugging Face model, read from safetensors a block at a time, as our parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlite.checkpoint.huggingface_model import (
    CONFIG,
    NAMES,
    is_stacked,
    model_section,
    parameter_shapes,
    read_config,
    read_json,
    their_names,
    their_shape,
)
from titanlite.config.keys import shown
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("F32", "BF16", "F16")  # which float32 holds exactly
_ONLY_FOR_TRAINING = {"model.init_std", "model.vocab_pad_multiple"} | {
    f"model.moe.{key}" for key in ("bias_update_rate", "aux_loss_coeff", "z_loss_coeff")
}
# Of older exports: made from the config there as here.
_NO_WEIGHT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_LM_HEAD = NAMES["output.weight"]


class HuggingFaceWeights:
    """The weights in a folder of safetensors as the parameters of `model`.

    shapes: our parameters, as Transformer.named_parameters has them (vocabulary padded, experts stacked)

    Raises InputError that names every key of [model] that the folder's config.json contradicts, and every tensor that
    is missing, unexpected, or of another shape than the model's. Nothing but safetensors is read.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self.folder = folder
        files = weight_files(folder)  # before all else: what is no safetensors is told as such
        problems = other_architecture(ModelConfig.model_validate(model_section(folder)), model, folder / CONFIG)
        if problems:
            raise InputError(problems)
        self._file_of: dict[str, Path] = {}
        found: dict[str, tuple[torch.Size, str]] = {}
        for file in files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                    described = tensors.get_slice(name)
                    found[name] = torch.Size(described.get_shape()), described.get_dtype()
                    self._file_of[name] = file
        self.shapes = parameter_shapes(model)
        kind = read_config(folder)["model_type"]
        self._names = {fqn: their_names(fqn, kind, model.moe.n_experts) for fqn in self.shapes}
        expected = {
            name: their_shape(fqn, shape, model) for fqn, shape in self.shapes.items() for name in self._names[fqn]
        }
        problems = _other_tensors(folder, found, expected)
        if problems:
            raise InputError(problems)
        self._their_shapes = expected
        if model.tie_word_embeddings and _LM_HEAD in found:
            self._check_tied(found[_LM_HEAD][0], expected[NAMES["embedding.weight"]])

    def read(self, fqn: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The block of a parameter that starts at `offsets`: float32 of shape `lengths`, on the CPU, zero in padding
        rows. Only the block is read. Raises SafetensorError, OSError."""
        block = torch.zeros(tuple(lengths))
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}  # and closed again: what is mapped counts as this process's memory

            def copy(name: str, starts: Sequence[int], out: Tensor) -> None:
                sizes = self._their_shapes[name]
                ends = [min(start + n, size) for start, n, size in zip(starts, out.shape, sizes, strict=True)]
                if any(end <= start for start, end in zip(starts, ends, strict=True)):
                    return
                file = self._file_of[name]
                if file not in opened:
                    opened[file] = stack.enter_context(_opened(file))
                part = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
                out[tuple(slice(0, p.stop - p.start) for p in part)] = opened[file].get_slice(name)[part]

            names = self._names[fqn]
            if is_stacked(fqn):
                for i, name in enumerate(names[offsets[0] : offsets[0] + lengths[0]]):
                    copy(name, offsets[1:], block[i])
            else:
                copy(names[0], offsets, block)
        return block

    def _check_tied(self, shape: torch.Size, wanted: torch.Size) -> None:
        """An output matrix beside a tied table is a copy of it, or else the config is wrong."""
        table, same = NAMES["embedding.weight"], shape == wanted
        with _opened(self._file_of[_LM_HEAD]) as one, _opened(self._file_of[table]) as other:
            head, embedding = one.get_slice(_LM_HEAD), other.get_slice(table)
            for row in range(0, shape[0] if same else 0, 4096):
                same &= torch.equal(head[row : row + 4096], embedding[row : row + 4096])
        if not same:
            got, allowed = f"another matrix than {table}", "the same, or none, since tie_word_embeddings is true"
            raise InputError(Problem(str(self.folder), _LM_HEAD, got, allowed, f"set it to false in {CONFIG} if it is"))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises InputError if there are none, or one is missing; it says why pickles are
    not read."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder, INDEX, "the index of a model").get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        bad = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        if bad or not names:
            got = f"{shown(bad[0])}, which is no safetensors file beside it" if bad else "no weight_map"
            raise InputError(Problem(str(folder), INDEX, got, "the index of a model", "copy the repository again"))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            problems = (Problem(str(folder), name, "no such file", f"what {INDEX} names") for name in missing)
            raise InputError(problems)
        return [folder / name for name in names]
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    pickles = [file.name for file in sorted(folder.glob("*")) if file.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    allowed = f"{ONE_FILE}, or {INDEX} and the files that it names"
    if pickles:
        got = f"only {pickles[0]}, a pickle: to read one can run any code that is in it"
        fix = "take the repository's safetensors, or let transformers write them: model.save_pretrained(FOLDER)"
        raise InputError(Problem(str(folder), "weights", got, allowed, fix))
    raise InputError(Problem(str(folder), "weights", "no such files", allowed, "name the folder of a model"))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        problem = Problem(str(file.parent), file.name, str(error), "a whole safetensors file", "copy it again")
        raise InputError(problem) from None


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


def other_architecture(theirs: ModelConfig, ours: ModelConfig, source: Path) -> list[Problem]:
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


def _other_tensors(
    folder: Path, found: Mapping[str, tuple[torch.Size, str]], expected: Mapping[str, torch.Size]
) -> list[Problem]:
    """Tensors that are missing, that the model has no place for, or of another shape or dtype than can be read."""
    names: dict[tuple[str, str], list[str]] = {}  # by (got, allowed)
    for name, shape in expected.items():
        if name not in found:
            names.setdefault(("no such tensor", "every tensor of the model"), []).append(name)
        elif found[name][0] != shape:
            wrong = f"shape {list(found[name][0])}", f"{list(shape)}, as [model] says"
            names.setdefault(wrong, []).append(name)
    for name, (_, dtype) in found.items():
        if _NO_WEIGHT.fullmatch(name):
            continue
        if name not in expected and name != _LM_HEAD:  # which may lie beside a tied table
            names.setdefault(("a tensor that the model has no place for", "only its tensors"), []).append(name)
        if dtype not in _DTYPES:
            wrong = f"elements of {dtype}", f"{', '.join(_DTYPES)}, which float32 holds exactly"
            names.setdefault(wrong, []).append(name)
    return [
        Problem(str(folder), _some(wrong), got, allowed, "take other weights")
        for (got, allowed), wrong in names.items()
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
