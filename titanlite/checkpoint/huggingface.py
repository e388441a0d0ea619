"""Weights of a Hugging Face model, read from safetensors a block at a time, as our parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
# Of older exports: made from the config there as here.
_NO_WEIGHT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_LM_HEAD = NAMES["output.weight"]


class HuggingFaceWeights:
    """The weights in a folder of safetensors as the parameters of `model`.

    shapes: our parameters, as Transformer.named_parameters has them (vocabulary padded, experts stacked)
    files:  that hold them

    Raises InputError that names every tensor that is missing, unexpected, there twice, or of another shape than the
    model's. Nothing but safetensors is read, and of them no tensor.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self.folder = folder
        self.files = _weight_files(folder)
        self._file_of: dict[str, Path] = {}
        found: dict[str, tuple[torch.Size, str]] = {}
        twice: list[Problem] = []
        for file in self.files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                    if name in found:
                        got = f"one in {self._file_of[name].name} and one in {file.name}"
                        fix = "remove files that are of no model, or copy the repository again"
                        twice.append(Problem(str(folder), name, got, "one tensor of a name", fix))
                    described = tensors.get_slice(name)
                    found[name] = torch.Size(described.get_shape()), described.get_dtype()
                    self._file_of[name] = file
        if twice:
            raise InputError(twice)
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
        self._head = found[_LM_HEAD][0] if model.tie_word_embeddings and _LM_HEAD in found else None

    def read(self, fqn: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The block of a parameter that starts at `offsets`: float32 of shape `lengths`, on the CPU, zero in padding
        rows. Only the block is read. Raises InputError if a file is no longer whole."""
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
                try:
                    there = opened[file].get_slice(name)[part]
                except SafetensorError as error:
                    raise _not_whole(file, error) from None
                out[tuple(slice(0, p.stop - p.start) for p in part)] = there

            names = self._names[fqn]
            if is_stacked(fqn):
                for i, name in enumerate(names[offsets[0] : offsets[0] + lengths[0]]):
                    copy(name, offsets[1:], block[i])
            else:
                copy(names[0], offsets, block)
        return block

    def first_rows(self) -> Iterator[Tensor]:
        """The first row of each tensor, as it is there: seldom the same in two models of one architecture."""
        for file in self.files:
            with _opened(file) as tensors:
                for name in sorted(tensors.keys()):
                    yield tensors.get_slice(name)[:1]

    def check_tied(self) -> None:
        """An output matrix beside a tied table must be a copy of it, or else the config is wrong. Reads both. Raises
        InputError."""
        if self._head is None:
            return
        table = NAMES["embedding.weight"]
        same = self._head == self._their_shapes[table]
        with _opened(self._file_of[_LM_HEAD]) as one, _opened(self._file_of[table]) as other:
            head, embedding = one.get_slice(_LM_HEAD), other.get_slice(table)
            for row in range(0, self._head[0] if same else 0, 4096):
                same &= torch.equal(head[row : row + 4096], embedding[row : row + 4096])
        if not same:
            got, allowed = f"another matrix than {table}", "the same, or none, since tie_word_embeddings is true"
            raise InputError(Problem(str(self.folder), _LM_HEAD, got, allowed, f"set it to false in {CONFIG} if it is"))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises InputError if there are none, or one is missing, or two sets; it says
    why pickles are not read."""
    if (folder / INDEX).exists():
        if (folder / ONE_FILE).exists():  # which transformers reads, and not what the index names
            got, fix = f"both {ONE_FILE} and {INDEX}", "remove the one that is not of this model, with its files"
            raise InputError(Problem(str(folder), "weights", got, "one of them", fix))
        weight_map = read_json(folder, INDEX, "the index of a model").get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        bad = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        if bad or not names:
            got = f"{shown(bad[0])}, which is no safetensors file beside it" if bad else "no weight_map"
            raise InputError(Problem(str(folder), INDEX, got, "the index of a model", "copy the repository again"))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            fix = "copy the repository again"
            raise InputError(Problem(str(folder), name, "no such file", f"what {INDEX} names", fix) for name in missing)
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
        raise _not_whole(file, error) from None


def _not_whole(file: Path, error: Exception) -> InputError:
    return InputError(Problem(str(file.parent), file.name, str(error), "a whole safetensors file", "copy it again"))


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
