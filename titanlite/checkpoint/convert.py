"""Checkpoints to Hugging Face's files and back, a tensor at a time: neither side is ever in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.huggingface import INDEX, HuggingFaceWeights
from titanlite.checkpoint.huggingface_model import (
    CONFIG,
    is_stacked,
    make_config,
    model_type,
    parameter_shapes,
    their_names,
    their_shape,
)
from titanlite.checkpoint.initial import InitialWeights
from titanlite.checkpoint.manager import versions
from titanlite.config.layout import Layout
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig
from titanlite.config.validate import COMMAND_LINE
from titanlite.files import fsync_file, write_atomically

DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16")}
GENERATION = "generation_config.json"
_BLOCK_BYTES = 64 << 20
Report = Callable[[str], None]


# ---- to Hugging Face


@dataclass(frozen=True)
class Piece:
    """One of their tensors: our parameter without padding rows, or one expert's part of it (expert None: it is
    whole)."""

    name: str
    shape: torch.Size
    fqn: str
    expert: int | None


def pieces_of(model: ModelConfig) -> list[Piece]:
    """All tensors of the model there, those of one of our parameters together."""
    kind = model_type(model)
    pieces = []
    for fqn, shape in parameter_shapes(model).items():
        theirs = their_shape(fqn, shape, model)
        for number, name in enumerate(their_names(fqn, kind, model.moe.n_experts)):
            pieces.append(Piece(name, theirs, fqn, number if is_stacked(fqn) else None))
    return pieces


def write_huggingface(
    weights: InitialWeights,
    out: Path,
    model: ModelConfig,
    *,
    dtype: str,
    shard_bytes: int,
    max_position_embeddings: int,
    token_ids: Mapping[str, int | None],
    others: Mapping[str, bytes],
    report: Report,
) -> None:
    """Write weights of a model, which must have been verified, as a folder that transformers loads.

    out: an empty folder. dtype: one of DTYPES. shard_bytes: a file has no more, unless one tensor does. token_ids:
    bos_token_id and eos_token_id. others: what else belongs into the folder, by name. Each file is on the disk before
    config.json, without which transformers loads nothing, gets its name. Raises InputError, CheckpointError, OSError.
    """
    shards = list(_shards(pieces_of(model), DTYPES[dtype][0].itemsize, shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    source = _Source(weights, parameter_shapes(model))
    for name, shard in zip(names, shards, strict=True):
        size = _write_shard(out / name, shard, source, dtype)
        report(f"wrote {name} ({len(shard)} tensors, {size / 1e6:,.1f} MB)")
    for name, data in others.items():
        write_atomically(out / name, data)
    write_atomically(out / GENERATION, _json(dict(token_ids)))
    elements = sum(piece.shape.numel() for shard in shards for piece in shard)
    index = {
        "metadata": {"total_parameters": elements, "total_size": elements * DTYPES[dtype][0].itemsize},
        "weight_map": {piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard},
    }
    write_atomically(out / INDEX, _json(index))
    config = make_config(model, max_position_embeddings=max_position_embeddings, dtype=dtype)
    write_atomically(out / CONFIG, _json({**config, **token_ids}))


class _Source:
    """Our parameters, one at a time."""

    def __init__(self, weights: InitialWeights, shapes: Mapping[str, torch.Size]) -> None:
        self._weights, self._shapes = weights, shapes
        self._fqn, self._tensor = "", torch.empty(0)

    def get(self, piece: Piece) -> Tensor:
        """Without padding rows, in float32. The last parameter is kept, since the next piece may be of it."""
        if piece.fqn != self._fqn:
            self._tensor = torch.empty(0)  # given back before the next one is read
            tensor = torch.empty(self._shapes[piece.fqn])
            self._weights.fill({piece.fqn: tensor})
            self._fqn, self._tensor = piece.fqn, tensor
        return self._tensor[: piece.shape[0]] if piece.expert is None else self._tensor[piece.expert]


def _shards(pieces: Sequence[Piece], itemsize: int, shard_bytes: int) -> Iterator[list[Piece]]:
    shard: list[Piece] = []
    size = 0
    for piece in pieces:
        more = piece.shape.numel() * itemsize
        if shard and size + more > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += more
    yield shard


def _write_shard(path: Path, shard: Sequence[Piece], source: _Source, dtype: str) -> int:
    """Returns its bytes. safetensors' own writer needs all tensors of a file at once."""
    target, code = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in shard:
        start, end = end, end + piece.shape.numel() * target.itemsize
        header[piece.name] = {"dtype": code, "shape": list(piece.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in shard:
            for block in _blocks(source.get(piece)):
                file.write(_as(block, target, piece).reshape(-1).view(torch.uint8).numpy().data)
        fsync_file(file)
        return file.tell()


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Whole rows, so that a large tensor is converted a part at a time."""
    return iter(tensor.split(max(1, _BLOCK_BYTES // (tensor[0].nbytes or 1))))


def _as(block: Tensor, dtype: torch.dtype, piece: Piece) -> Tensor:
    converted = block.to(dtype).contiguous()
    if not torch.equal(converted.isinf(), block.isinf()):
        got = f"{str(dtype).removeprefix('torch.')}, but {piece.name} has larger values"
        allowed = "one that holds them: float16 ends at 65504, bfloat16 at 3.39e38"
        raise InputError(Problem(COMMAND_LINE, "--dtype", got, allowed, "--dtype float32 holds them all"))
    return converted


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- from Hugging Face


def write_checkpoint(
    weights: HuggingFaceWeights,
    out: Path,
    *,
    config: Mapping[str, Any],
    max_position_embeddings: int,
    report: Report,
) -> Path:
    """Write the weights as a committed checkpoint of step 0 in `out`; returns its folder.

    config: the sections of a config that are known, for its manifest. It has no train state to go on from, and says so.
    """
    storage.prepare_folder(out, 0)
    folder = storage.step_folder(out, 0)

    def read(key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return weights.read(key.removeprefix("model."), offsets, lengths)

    def progress(done: int, total: int) -> None:
        report(f"wrote {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    shapes = {f"model.{fqn}": shape for fqn, shape in weights.shapes.items()}
    files = dcp.write_streamed(folder, shapes, read, progress)
    parts = {
        "layout": asdict(Layout(1, 1, 1, 1, 1, 1, 1)),
        "versions": versions(),
        "config": dict(config),
        "train_state": {
            "step": 0,
            "weights_only": True,
            "imported_from": str(weights.folder.resolve()),
            "max_position_embeddings": max_position_embeddings,
        },
    }
    storage.commit(folder, storage.make_manifest(0, files, parts))
    return folder
