"""Training on real bytes under any layout, resuming from or starting with what is there; what each rank then did."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor

from tests.harness.distributed import run_distributed
from tests.harness.training import Listener, build, merge
from tests.parity.layouts import BASE, TIED, Layout, Sections
from tests.parity.moe_layouts import DEEPSEEK
from titanlite.checkpoint.huggingface import HuggingFaceWeights
from titanlite.checkpoint.initial import open_weights
from titanlite.config.schema import Config
from titanlite.data.phase import RunData
from titanlite.model.init import tensors_hash
from titanlite.parallel import runtime
from titanlite.parallel.whole import full_tensors
from titanlite.verify.record import Record

sympy = pytest.importorskip("sympy")
tokenizers = pytest.importorskip("tokenizers")

Before = Callable[[], object]
BATCH = 12
# 257 ids and no dimension that divides by 3 or 4, but for the heads: shards are uneven, the table is padded to 259.
RUN: Sections = {
    "model": {"vocab_size": 257},
    "training": {"global_batch_size": BATCH, "local_batch_size": BATCH},
    "checkpoint": {"enable": True, "interval": 100},
    "validation": {"enable": False},
}
DENSE: Sections = merge(RUN, TIED, {"run": {"seed": 5}, "model": {"n_layers": 4, "n_heads": 4, "n_kv_heads": 2}})
EXPERTS: Sections = merge(
    DEEPSEEK, RUN, TIED, {"model": {"dim": 20, "head_dim": 6, "moe": DEEPSEEK["model"]["moe"] | {"expert_dim": 32}}}
)


@dataclass
class Done:
    """What a rank did from its start, perhaps a resume, to its end.

    found, left:    hashes of the whole state there
    state:          all of it, at the start, without the moments if these are zero
    """

    found: str
    left: str
    state: dict[str, Tensor]
    said: list[str]
    record: Record
    data: RunData
    shards: list[str]


def _train(sections: Sections, before: Before | None) -> Done:
    if before is not None:
        before()
    config = Config.model_validate(sections)
    trainer = Listener(config, runtime.start(config.comm, config.run, config.parallelism))
    state = full_tensors(trainer._tensors())
    found = tensors_hash(state.items())
    if not any(tensor.any() for key, tensor in state.items() if key.startswith("optimizer.")):
        state = {key: tensor for key, tensor in state.items() if not key.startswith("optimizer.")}
    trainer.train()
    left = tensors_hash(full_tensors(trainer._tensors()).items())
    shards = [str(source.train) for source in trainer.prepared.sources]
    return Done(found, left, state, trainer.said, trainer.record, trainer.data, shards)


def train(
    sections: Sections, layout: Layout, text: Path, folder: Path, steps: int, before: Before | None = None
) -> list[Done]:
    """Every rank's part of training to `steps`, resuming from what is in `folder`.

    before: importable function that each worker calls first, e.g. to break something on purpose.
    """
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.json"), "eos_token": "<|endoftext|>"},
        "data": {
            "sources": [{"path": str(text / "a"), "weight": 0.8}, {"path": str(text / "b"), "weight": 0.2}],
            "validation_fraction": 0.0,
            "cache_dir": str(text / "cache"),
        },
        "run": {"output_dir": str(folder), "name": "run"},
        "training": {"steps": steps},
    }
    merged = merge(BASE, sections, layout.sections, here)
    return run_distributed(_train, layout.world_size, merged, before, timeout=120)


def make_text(folder: Path) -> Path:
    """Two files of the embedded text, and a tokenizer of the 256 bytes and one mark."""
    for name, source in (("a", "core/_print_helpers.py"), ("b", "core/cache.py")):
        (folder / name).mkdir(parents=True)
        shutil.copy(Path(sympy.__file__).parent / source, folder / name / "text.txt")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    assert made.get_vocab_size() == 257
    made.save(str(folder / "tokenizer.json"))
    return folder


def init_from(path: Path, **more: Any) -> Sections:
    return {"checkpoint": {"init_from": str(path), **more}}


def assert_equal(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    for key, tensor in mine.items():
        assert torch.equal(tensor, other[key]), key


def reads(sections: Sections, path: Path) -> tuple[int, Counter[str], int]:
    """(elements that this rank holds of the parameters, elements read by tensor, elements of the largest read)."""
    config, _, model, _ = build(sections)
    read: Counter[str] = Counter()
    largest = 0
    theirs, load = HuggingFaceWeights.read, torch.load

    def count(key: str, tensor: Tensor) -> Tensor:
        nonlocal largest
        read[key] += tensor.numel()
        largest = max(largest, tensor.numel())
        return tensor

    HuggingFaceWeights.read = lambda self, fqn, *block: count(fqn, theirs(self, fqn, *block))  # type: ignore[method-assign]
    filesystem.torch.load = lambda *args, **kwargs: count("", load(*args, **kwargs))
    open_weights(path, config.model).fill(model.parameters | model.buffers)
    return sum(local_numel(p) for p in model.parameters.values()), read, largest


def local_numel(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
