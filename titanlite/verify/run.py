"""Trains small runs in worlds of processes on this machine, and measures how far each layout is from one process.

Importing this module imports no torch; verify does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titanlite.config.layout import fixed_world_size
from titanlite.config.schema import Config
from titanlite.verify.processes import run_world, start_server
from titanlite.verify.promise import Deviation
from titanlite.verify.shrink import SmallRuns
from titanlite.verify.tokens import write_data

if TYPE_CHECKING:
    from torch import Tensor

    from titanlite.verify.record import Record

Verdict = Literal["agrees", "deviates", "undecided"]

TIMEOUT = 600.0  # seconds, of a layout; a collective that waits for a rank that never comes ends sooner
FEW = 2  # choices that rounding may flip in any step, however few there are; else one in a thousand
PRELOAD = ["titanlite.verify.record", "torch.distributed.checkpoint", "torch.nn.parallel"]


@dataclass(frozen=True)
class Result:
    """How far a layout is from one process, on the worst of its ranks.

    loss, norm:     largest relative difference of any step
    gradient:       of step 1, of the parameter that is worst by its own largest
    weights:        largest difference after the last step, in units of the learning rate: rounding alone can move one
                    by a few of them, where a gradient is so small that its sign is rounding
    flips:          (step, how many) expert choices of that step differ
    deviations:     what is outside promise 1, causes first; what follows from a flip of experts is not in it
    """

    world_size: int
    same_initial_weights: bool
    same_samples: bool
    loss: float
    norm: float
    gradient: float
    gradient_of: str
    weights: float
    weights_of: str
    flips: tuple[tuple[int, int], ...]
    deviations: tuple[Deviation, ...]

    @property
    def verdict(self) -> Verdict:
        if self.deviations:
            return "deviates"
        # What a step computes with other experts is judged by nothing.
        return "undecided" if self.flips and self.flips[0][0] == 1 else "agrees"


def verify(
    runs: SmallRuns,
    *,
    plant: Callable[[], object] | None = None,
    report: Callable[[int, int], object] = lambda *_: None,
) -> list[Result]:
    """Train the reference and every layout, one after the other; the results of the layouts.

    plant:  importable function that every worker of a layout calls first, such as one that breaks something on purpose
    report: called before each run with the number of its layout, from 0 (-1: the reference), and of its processes
    Raises WorkerFailed.
    """
    start_server(PRELOAD)
    write_data(runs.reference)  # while the server imports torch
    report(-1, 1)
    (reference,) = _run(runs.reference, None)
    results = []
    for number, config in enumerate(runs.layouts):
        report(number, fixed_world_size(config.parallelism) or 1)
        results.append(compare(_run(config, plant), reference, config.optimizer.lr))
    return results


def _run(config: Config, plant: Callable[[], object] | None) -> list[Record]:
    world = fixed_world_size(config.parallelism)
    assert world
    return run_world(train, world, config, plant, timeout=TIMEOUT, quiet=True, comm=config.comm)


def train(config: Config, plant: Callable[[], object] | None) -> Record:
    """In a worker: this rank's record of the run, with the whole weights after it."""
    from titanlite.parallel import runtime
    from titanlite.trainer import NonFiniteError
    from titanlite.verify.record import Recorder, full_tensors

    if plant is not None:
        plant()
    recorder = Recorder(config, runtime.start(config.comm, config.run, config.parallelism))
    with suppress(NonFiniteError):  # the record says so
        recorder.train()
    recorder.record.weights = full_tensors(recorder.parameters)
    return recorder.record


def compare(records: Sequence[Record], reference: Record, lr: float) -> Result:
    """lr: the peak."""
    from titanlite.verify.record import deviations, errors, flips, largest, largest_of_series

    found = deviations(records, reference)
    kinds = {deviation.what for deviation in found}
    flipped = max((tuple(flips(record, reference)) for record in records), key=len)
    if flipped:
        step, moved = flipped[0]
        choices = int(reference.expert_loads[step - 1].sum())
        follows = [one for one in found if one.step >= step and (one.step, one.what) != (step, "expert choices")]
        if moved <= max(FEW, choices // 1000):
            follows += [one for one in found if one.what == "expert choices"]
        found = [one for one in found if one not in follows]
    gradient, gradient_of = max(largest(errors(record.gradients, reference.gradients)) for record in records)
    weights, weights_of = max(largest(_off_by(record.weights, reference.weights, lr)) for record in records)
    return Result(
        world_size=len(records),
        same_initial_weights="initial weights" not in kinds,
        same_samples="samples" not in kinds,
        loss=max(largest_of_series(record.losses, reference.losses) for record in records),
        norm=max(largest_of_series(record.norms, reference.norms) for record in records),
        gradient=gradient,
        gradient_of=gradient_of,
        weights=weights,
        weights_of=weights_of,
        flips=flipped,
        deviations=tuple(found),
    )


def _off_by(weights: Mapping[str, Tensor], reference: Mapping[str, Tensor], unit: float) -> dict[str, float]:
    """Largest difference of each parameter, in this unit."""
    return {name: float((mine - reference[name]).abs().max()) / unit for name, mine in weights.items()}
