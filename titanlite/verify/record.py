"""What a run of the trainer did, and how far it is from another one that should have done the same.

Promise 1: initial weights, samples, losses, norms and gradients are those of one process, whatever the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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
    expert_loads:       of a model with experts, step by step: int64 [n_layers, n_experts].
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
    expert_loads: list[Tensor] = dataclasses.field(default_factory=list)


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
        if self.config.model.moe.n_experts:
            self.record.expert_loads.append(self.model.expert_loads.cpu())

    def validate(self) -> dict[str, float]:
        result = super().validate()
        self.record.validation.append(result)
        return result

    def _report(self, done: PendingStep, validate: Any = None) -> None:
        loss, norm, *_ = done.scalars.get()
        self.record.losses.append(loss)
        self.record.norms.append(norm)
        super()._report(done, validate)


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
        found += _flips(rank, record, reference)
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


def _flips(rank: int, record: Record, reference: Record) -> list[str]:
    """The first step in which tokens went to other experts: one that stood between two is enough to change a run."""
    if len(record.expert_loads) != len(reference.expert_loads):
        return [f"rank {rank}: expert loads of {len(record.expert_loads)} steps, not {len(reference.expert_loads)}"]
    for step, (mine, other) in enumerate(zip(record.expert_loads, reference.expert_loads, strict=True), start=1):
        moved = (mine - other).abs().sum(dim=1)
        if moved.any():
            where = {layer: int(n) for layer, n in enumerate(moved.tolist()) if n}
            return [f"rank {rank}, step {step}: loads of experts differ, by layer: {where} (a flipped choice makes 2)"]
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


def full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole plain tensors on the CPU, gathered from all ranks, those of other pipeline stages too. Collective.

    Of what this rank has a copy of its own (tied embeddings in two stages), it is that copy.
    """
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        for name, tensor in named.items()
    }
    if not dist.is_initialized():
        return whole
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(whole))
    if all(other == names[0] for other in names):
        return whole
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, whole)
    for part in parts:
        whole = part | whole
    return whole


def largest_error(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest difference of any gradient, relative to its parameter's largest, and whose it is."""
    assert grads.keys() == reference.keys(), f"other parameters: {grads.keys() ^ reference.keys()}"
    errors = {}
    for name, expected in reference.items():
        assert grads[name].shape == expected.shape, f"{name}: {grads[name].shape}, expected {expected.shape}"
        largest = expected.abs().max().item()
        assert largest > 0, f"{name} has no gradient to compare"
        difference = (grads[name] - expected).abs().max().item()
        errors[name] = difference / largest if difference == difference else float("inf")
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
