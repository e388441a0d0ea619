"""Runs the real trainer under a layout and records what must not depend on it; compares two such records."""

from __future__ import annotations

import dataclasses
import importlib
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor

from tests.harness.distributed import run_distributed
from tests.harness.training import full_tensors, largest_error, merge
from tests.parity.layouts import BASE, Layout, Sections
from titanlite.config.schema import Config
from titanlite.data.loader import Batch
from titanlite.model.init import tensors_hash
from titanlite.parallel import runtime
from titanlite.trainer import PendingStep, Trainer

LOSS_TOLERANCE = 1e-6  # relative, every step
NORM_TOLERANCE = 1e-5  # relative, every step
GRADIENT_TOLERANCE = 1e-5  # of each parameter's largest, step 1


@dataclass
class Record:
    """What a run of the trainer did, as whole tensors and Python floats.

    sample_ids, tokens: of this rank, step by step.
    """

    data_rank: int = 0  # which part of each step's samples this rank has ...
    data_size: int = 1  # ... of how many
    init_hash: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    lrs: list[float] = dataclasses.field(default_factory=list)
    validation: list[dict[str, float]] = dataclasses.field(default_factory=list)
    sample_ids: list[list[int]] = dataclasses.field(default_factory=list)
    tokens: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # step 1, as the optimizer applied them


class Recorder(Trainer):
    """The trainer, watched from outside: what it computes is not touched."""

    def __init__(self, config: Config, ranks: runtime.Ranks) -> None:
        super().__init__(config, ranks)
        init_hash = tensors_hash(full_tensors(self.parameters).items())
        self.record = Record(data_rank=ranks.data_rank, data_size=ranks.data_size, init_hash=init_hash)
        step, self.optimizer.step = self.optimizer.step, self._step  # type: ignore[method-assign]
        self._optimizer_step = step

    def _step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._optimizer_step(lr, grad_scale, found_inf)
        self.record.lrs.append(lr)
        if not self.record.gradients:
            found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.record.gradients = full_tensors(found)

    def train_step(self, microbatches: Sequence[Batch]) -> None:
        self.record.sample_ids.append(torch.cat([batch["sample_ids"] for batch in microbatches]).tolist())
        self.record.tokens.append(torch.cat([batch["tokens"] for batch in microbatches]))
        super().train_step(microbatches)

    def validate(self) -> dict[str, float]:
        result = super().validate()
        self.record.validation.append(result)
        return result

    def _report(self, done: PendingStep, validate: Any = None) -> None:
        loss, norm, _ = done.scalars.get()
        self.record.losses.append(loss)
        self.record.norms.append(norm)
        super()._report(done, validate)


def run(layout: Layout, text: Path, *, sections: Sections | None = None, fault: str = "") -> list[Record]:
    """Every rank's record of training BASE with `sections` laid over it under `layout`; `fault`: one of sabotage's."""
    data = {"tokenizer": {"path": str(text / "tokenizer.model")}, "data": data_section(text)}
    merged = merge(BASE, data, sections or {}, layout.sections)
    return run_distributed(_record, layout.world_size, merged, fault, timeout=120)


def _record(sections: Sections, fault: str) -> Record:
    if fault:
        importlib.import_module("tests.parity.sabotage").FAULTS[fault].plant()
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(merge(sections, {"run": {"output_dir": folder, "name": "parity"}}))
        recorder = Recorder(config, runtime.start(config.comm, config.run, config.parallelism))
        recorder.train()
        return recorder.record


def deviations(records: Sequence[Record], reference: Record) -> list[str]:
    """All that differs by more than the promise allows; empty when the layout changed nothing."""
    found = []
    for rank, record in enumerate(records):
        if record.init_hash != reference.init_hash:
            found.append(f"rank {rank}: initial weights {record.init_hash[:8]}, not {reference.init_hash[:8]}")
        found += _series(f"rank {rank}: loss", record.losses, reference.losses, LOSS_TOLERANCE)
        found += _series(f"rank {rank}: norm", record.norms, reference.norms, NORM_TOLERANCE)
        found += _series(f"rank {rank}: lr", record.lrs, reference.lrs, 0.0)
        for key in ("validation_loss", "validation_bits_per_byte"):
            mine, other = ([result[key] for result in r.validation] for r in (record, reference))
            found += _series(f"rank {rank}: {key}", mine, other, LOSS_TOLERANCE)
        error, name = largest_error(record.gradients, reference.gradients)
        if not error <= GRADIENT_TOLERANCE:
            found.append(f"rank {rank}: gradient of {name} off by {error:.2e}")
        found += _samples(rank, record, reference)
    if {record.data_rank for record in records} != set(range(records[0].data_size)):
        found.append("some part of the samples is nobody's")
    return found


def _samples(rank: int, record: Record, reference: Record) -> list[str]:
    """Whether a rank has its part of every step's samples; ranks of one data rank (tp, pp, cp) have the same."""
    for step, ids in enumerate(reference.sample_ids):
        share = len(ids) // record.data_size
        part = slice(record.data_rank * share, (record.data_rank + 1) * share)
        mine = record.sample_ids[step]
        if mine != ids[part] or not torch.equal(record.tokens[step], reference.tokens[step][part]):
            return [f"rank {rank}, step {step + 1}: samples {mine[:8]}…, not {ids[part][:8]}…, or other tokens in them"]
    return []


def worst(records: Sequence[Record], reference: Record) -> dict[str, float]:
    """The largest deviations, to be written down: relative loss and norm, gradients by their parameter's largest."""

    def relative(mine: Sequence[float], other: Sequence[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(mine, other, strict=True))

    return {
        "loss": max(relative(record.losses, reference.losses) for record in records),
        "norm": max(relative(record.norms, reference.norms) for record in records),
        "gradient": max(largest_error(record.gradients, reference.gradients)[0] for record in records),
    }


def _series(what: str, mine: Sequence[float], other: Sequence[float], tolerance: float) -> list[str]:
    if len(mine) != len(other):
        return [f"{what}: {len(mine)} values, not {len(other)}"]
    for step, (a, b) in enumerate(zip(mine, other, strict=True), start=1):
        if not abs(a - b) <= tolerance * abs(b):
            return [f"{what} {step}: {a!r}, not {b!r}"]
    return []


def data_section(text: Path) -> dict[str, Any]:
    """Two sources of unequal weight, small enough for more than one epoch in STEPS steps."""
    sources = [{"path": str(text / "a"), "weight": 0.7}, {"path": str(text / "b"), "weight": 0.3}]
    return {"sources": sources, "validation_fraction": 0.2, "cache_dir": str(text / "cache")}


def make_text(folder: Path) -> Path:
    """Two folders of documents of invented words, the same every time, and a tokenizer of 300 pieces."""
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 7))) for _ in range(150)]
    lines = []
    for name, documents in (("a", 14), ("b", 12)):
        (folder / name).mkdir(parents=True)
        for number in range(documents):
            text = " ".join(generator.choices(words, k=generator.randint(20, 80)))
            (folder / name / f"{number:03}.txt").write_text(text)
            lines += [text[start : start + 200] for start in range(0, len(text), 200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder
