"""Small runs under layouts against one process: they agree, and each planted fault is named for what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite import trainer
from titanlite.commands.verify import UPDATE, conclusion
from titanlite.optim import optimizer
from titanlite.parallel import parallelize, runtime
from titanlite.verify.layouts import read_layouts
from titanlite.verify.processes import WorkerFailed
from titanlite.verify.run import Result, verify
from titanlite.verify.shrink import shrink

OVERRIDES = ("--model.n_kv_heads=2", "--validation.enable=true", "--training.local_batch_size=2")
BROKEN = "layers.1.mlp.down.weight"


def results(folder: Path, *layouts: str, steps: int = 2, plant: Callable[[], None] | None = None) -> list[Result]:
    _, asked = read_layouts("llama_debug", OVERRIDES, layouts)
    return verify(shrink([one.case for one in asked], steps=steps, folder=folder), plant=plant)


def test_layouts_agree(tmp_path: Path) -> None:
    found = results(tmp_path, "tp=2,dp_shard=2", "pp=2,cp=2", "dp_replicate=2,activation_checkpoint.mode=full", steps=3)
    assert [result.verdict for result in found] == ["agrees"] * 3
    assert [result.world_size for result in found] == [4, 4, 2]
    for result in found:
        assert result.same_initial_weights and result.same_samples and not result.deviations and not result.flips
        assert 0 < result.gradient < 1e-5 and result.loss < 1e-6 and result.norm < 1e-5
        assert result.weights_of and 0 <= result.weights < 3


# --- faults, each planted in both workers of a layout ---


def replaced(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: the fault would be planted nowhere"
    setattr(owner, name, value)


def other_initial_weights() -> None:
    right = parallelize.init_
    replaced(
        parallelize, "init_", lambda local, name, config, seed, **place: right(local, name, config, seed + 1, **place)
    )


def same_samples_everywhere() -> None:
    right = runtime.Ranks.__init__

    def init(self, *args):
        right(self, *args)
        self.data_rank = 0

    replaced(runtime.Ranks, "__init__", init)


def other_loss() -> None:
    right = parallelize.ParallelModel.forward_backward
    replaced(parallelize.ParallelModel, "forward_backward", lambda self, batches: right(self, batches) * 1.00001)


def loss_of_nan() -> None:
    right = parallelize.ParallelModel.forward_backward
    replaced(parallelize.ParallelModel, "forward_backward", lambda self, batches: right(self, batches) * float("nan"))


def one_gradient_wrong() -> None:
    right = parallelize.ParallelModel.finish_gradients

    def finish(self, *args):
        self.parameters[BROKEN].grad.mul_(1.0001)
        return right(self, *args)

    replaced(parallelize.ParallelModel, "finish_gradients", finish)


def other_norm() -> None:
    right = parallelize.ParallelModel.finish_gradients

    def finish(self, *args):
        stats = right(self, *args)
        return replace(stats, norm=stats.norm * 1.0001)

    replaced(parallelize.ParallelModel, "finish_gradients", finish)


def other_learning_rate() -> None:
    right = trainer.lr_at
    replaced(trainer, "lr_at", lambda *args: right(*args) * 1.0000001)


def other_update() -> None:
    right = optimizer.AdamW.step

    def step(self, lr, *rest):
        right(self, 1.1 * lr, *rest)

    replaced(optimizer.AdamW, "step", step)


def other_validation() -> None:
    right = parallelize.ParallelModel.evaluate
    replaced(parallelize.ParallelModel, "evaluate", lambda self, batch: right(self, batch) * 1.00001)


FAULTS = {
    other_initial_weights: ("initial weights", 0, ["start from other weights"]),
    same_samples_everywhere: ("samples", 0, ["other samples"]),
    other_loss: ("loss", 1, ["forward pass"]),
    loss_of_nan: ("loss", 1, ["nan"]),
    one_gradient_wrong: ("gradient", 1, [BROKEN, "backward pass"]),
    other_norm: ("norm", 1, ["counted twice"]),
    other_learning_rate: ("lr", 1, ["learning rate"]),
    other_update: ("loss", 2, [UPDATE]),
    other_validation: ("validation", 2, ["validation pass"]),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_is_named(plant: Callable[[], None], tmp_path: Path) -> None:
    (result,) = results(tmp_path, "dp_shard=2", plant=plant)
    what, step, words = FAULTS[plant]
    assert result.verdict == "deviates"
    first = result.deviations[0]
    assert (first.what, first.step) == (what, step), result.deviations
    assert all(word in conclusion(result) for word in words), conclusion(result)
    assert result.same_initial_weights == (plant is not other_initial_weights)
    assert result.same_samples == (plant is not same_samples_everywhere)
    if plant is one_gradient_wrong:
        assert result.gradient_of == BROKEN and result.gradient == pytest.approx(1e-4, rel=0.1)


def break_down() -> None:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("the words of rank 1")


def test_a_layout_that_cannot_be_trained_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="the words of rank 1") as caught:
        results(tmp_path, "dp_shard=2", plant=break_down)
    assert caught.value.first.startswith("rank 1 raised")
