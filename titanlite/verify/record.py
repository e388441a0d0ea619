"""What a run of the trainer did, and how far it is from another one that should have done the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.data.loader import Batch
from titanlite.model.init import tensors_hash
from titanlite.parallel import runtime
from titanlite.parallel.whole import full_tensors
from titanlite.trainer import PendingStep, Trainer
from titanlite.verify.promise import (
    CAUSES,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    ROUTER_TOLERANCE,
    Deviation,
)


@dataclass
class Record:
    """What a run of the trainer did, as whole tensors and Python floats."""

    data_rank: int = 0  # which part of each step's samples this rank has ...
    data_size: int = 1  # ... of how many
    init_hash: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    lrs: list[float] = dataclasses.field(default_factory=list)
    routers: list[dict[str, float]] = dataclasses.field(default_factory=list)  # what a row says of experts, by step
    validation: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)  # by the step it came after
    sample_ids: list[list[int]] = dataclasses.field(default_factory=list)  # of this rank, step by step
    tokens: list[Tensor] = dataclasses.field(default_factory=list)  # the same
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # step 1, as the optimizer applied them
    expert_loads: list[Tensor] = dataclasses.field(default_factory=list)  # int64 [n_layers, E]; none without experts
    biases: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # of the experts, after the last step
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # after the last step, where they are kept


class Recorder(Trainer):
    """The trainer, watched from outside: what it computes is not touched.

    whole: initial weights and gradients are gathered, to be compared
    """

    whole = True

    def __init__(self, config: Config, ranks: runtime.Ranks) -> None:
        super().__init__(config, ranks)
        init_hash = tensors_hash(full_tensors(self.parameters).items()) if self.whole else ""
        self.record = Record(data_rank=ranks.data_rank, data_size=ranks.data_size, init_hash=init_hash)
        step, self.optimizer.step = self.optimizer.step, self._step  # type: ignore[method-assign]
        self._optimizer_step = step

    def _step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._optimizer_step(lr, grad_scale, found_inf)
        self.record.lrs.append(lr)
        if self.whole and not self.record.gradients:
            found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.record.gradients = full_tensors(found)

    def train_step(self, microbatches: Sequence[Batch]) -> None:
        self.record.sample_ids.append(torch.cat([batch["sample_ids"] for batch in microbatches]).tolist())
        self.record.tokens.append(torch.cat([batch["tokens"] for batch in microbatches]))
        super().train_step(microbatches)
        if self.config.model.moe.n_experts:
            self.record.expert_loads.append(self.model.expert_loads.cpu().clone())

    def validate(self) -> dict[str, float]:
        result = super().validate()
        self.record.validation[self.state.step] = result
        return result

    def _report(self, done: PendingStep, validate: Any = None) -> None:
        loss, norm, _, _, *others = done.scalars.get()
        self.record.losses.append(loss)
        self.record.norms.append(norm)
        self.record.routers.append(dict(zip(done.others, others, strict=True)))
        super()._report(done, validate)

    def _end(self) -> None:
        super()._end()
        self.record.biases = full_tensors(self.model.buffers)


def deviations(records: Sequence[Record], reference: Record) -> list[Deviation]:
    """All that differs by more than the promise allows, causes first; empty when the layout changed nothing."""
    found = []

    def add(what: str, step: int, text: str, error: float = math.inf) -> None:
        found.append(Deviation(what, step, text, error))

    def series(what: str, name: str, mine: Sequence[float], other: Sequence[float], tolerance: float) -> None:
        by_step(what, name, dict(enumerate(mine, start=1)), dict(enumerate(other, start=1)), tolerance)

    def by_step(what: str, name: str, mine: Mapping[int, float], other: Mapping[int, float], tolerance: float) -> None:
        for step in sorted(mine.keys() | other.keys()):
            a, b = mine.get(step, math.nan), other.get(step, math.nan)
            if not abs(a - b) <= tolerance * abs(b):
                said = [repr(values[step]) if step in values else "none" for values in (mine, other)]
                add(what, step, f"{name} of step {step}: {said[0]}, not {said[1]}", relative(abs(a - b), abs(b)))

    for rank, record in enumerate(records):
        if record.init_hash != reference.init_hash:
            text = f"rank {rank}: initial weights {record.init_hash[:8]}, not {reference.init_hash[:8]}"
            add("initial weights", 0, text)
        for text in _samples(rank, record, reference):
            add("samples", 0, text)
        series("loss", f"rank {rank}: loss", record.losses, reference.losses, LOSS_TOLERANCE)
        series("norm", f"rank {rank}: norm", record.norms, reference.norms, NORM_TOLERANCE)
        series("lr", f"rank {rank}: lr", record.lrs, reference.lrs, 0.0)
        for key in reference.routers[0] if reference.routers else ():
            mine, other = ([row.get(key, math.nan) for row in r.routers] for r in (record, reference))
            series("router", f"rank {rank}: {key}", mine, other, ROUTER_TOLERANCE)
        for key in ("validation_loss", "validation_bits_per_byte"):
            results, wanted = ({step: row[key] for step, row in r.validation.items()} for r in (record, reference))
            by_step("validation", f"rank {rank}: {key}", results, wanted, LOSS_TOLERANCE)
        error, name = largest(errors(record.gradients, reference.gradients))
        if not error <= GRADIENT_TOLERANCE:
            add("gradient", 1, f"rank {rank}: gradient of {name} off by {error:.2e}", error)
        for step, moved in flips(record, reference):
            text = f"rank {rank}: {moved} of step {step}'s choices of experts differ"
            add("expert choices", step, text, moved / int(reference.expert_loads[step - 1].sum()))
        for step, moved in flips(record, records[0])[:1]:
            add("expert counts", step, f"rank {rank}: {moved} of step {step}'s choices are counted otherwise on rank 0")
        wrong = [name for name, error in sorted(errors(record.biases, reference.biases).items()) if error]
        if wrong:  # each step moves a bias by the same rate, up or down: there is nothing to round
            add("expert biases", len(reference.losses), f"rank {rank}: after the last step, {wrong[0]} is another")
    if {record.data_rank for record in records} != set(range(records[0].data_size)):
        add("samples", 0, "some part of the samples is nobody's")
    return sorted(found, key=lambda deviation: (deviation.step, CAUSES.index(deviation.what)))


def flips(record: Record, reference: Record) -> list[tuple[int, int]]:
    """The steps, from 1, in which tokens went to other experts, and at least how many times they did."""
    pairs = zip(record.expert_loads, reference.expert_loads, strict=False)  # a run that ended early has fewer
    moved = {step: int((mine - other).abs().sum()) for step, (mine, other) in enumerate(pairs, start=1)}
    return [(step, -(-count // 2)) for step, count in moved.items() if count]


def worst(records: Sequence[Record], reference: Record) -> dict[str, float]:
    """The largest deviations, to be written down: relative loss and norm, gradients by their parameter's largest."""
    return {
        "loss": max(largest_of_series(record.losses, reference.losses) for record in records),
        "norm": max(largest_of_series(record.norms, reference.norms) for record in records),
        "gradient": max(largest_error(record.gradients, reference.gradients)[0] for record in records),
    }


def largest_of_series(mine: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two series' values; infinite when one is longer."""
    if len(mine) != len(other):
        return math.inf
    return max(relative(abs(a - b), abs(b)) for a, b in zip(mine, other, strict=True))


def _samples(rank: int, record: Record, reference: Record) -> list[str]:
    """Whether a rank has its part of every step's samples; ranks of one data rank (tp, pp, cp) have the same."""
    for step, ids in enumerate(reference.sample_ids[: len(record.sample_ids)]):
        share = len(ids) // record.data_size
        part = slice(record.data_rank * share, (record.data_rank + 1) * share)
        mine = record.sample_ids[step]
        if mine != ids[part] or not torch.equal(record.tokens[step], reference.tokens[step][part]):
            return [f"rank {rank}, step {step + 1}: samples {mine[:8]}…, not {ids[part][:8]}…, or other tokens in them"]
    return []


def errors(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, relative to the reference's largest; infinite where there is none to compare.

    A reference of zeros must be zeros.
    """
    found = dict.fromkeys(tensors.keys() | reference.keys(), math.inf)
    for name in tensors.keys() & reference.keys():
        mine, other = tensors[name], reference[name]
        if mine.shape == other.shape:
            difference, size = (mine - other).abs().max().item(), other.abs().max().item()
            found[name] = relative(difference, size)
    return found


def relative(difference: float, size: float) -> float:
    """difference / size, neither below 0: 0 when there is no difference, infinite when it is NaN or the size is 0."""
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference / size) else math.inf


def largest(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error, and whose it is: the first by name of equal ones."""
    name = max(sorted(errors), key=lambda name: errors[name])
    return errors[name], name


def largest_error(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """largest(errors(...)), of gradients that must all be there and not zero."""
    assert grads.keys() == reference.keys(), f"other parameters: {grads.keys() ^ reference.keys()}"
    for name, expected in reference.items():
        assert grads[name].shape == expected.shape, f"{name}: {grads[name].shape}, expected {expected.shape}"
        assert expected.any(), f"{name} has no gradient to compare"
    return largest(errors(grads, reference))
