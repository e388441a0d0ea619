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
from titanlite.model import expert_balance, moe
from titanlite.optim import optimizer
from titanlite.parallel import expert_parallel, parallelize, runtime
from titanlite.verify.layouts import read_layouts
from titanlite.verify.processes import WorkerFailed
from titanlite.verify.run import Result, verify
from titanlite.verify.shrink import shrink

OVERRIDES = ("--model.n_kv_heads=2", "--validation.enable=true", "--training.local_batch_size=2")
BROKEN = "layers.1.mlp.down.weight"
WITH_EXPERTS = "llama_debug_moe"
EXPERTS = ("--training.local_batch_size=24", "--model.moe.z_loss_coeff=0.01")


def results(
    folder: Path,
    *layouts: str,
    steps: int = 2,
    plant: Callable[[], None] | None = None,
    name: str = "llama_debug",
    overrides: tuple[str, ...] = OVERRIDES,
) -> list[Result]:
    _, asked = read_layouts(name, overrides, layouts)
    return verify(shrink([one.case for one in asked], steps=steps, folder=folder), plant=plant)


def test_layouts_agree(tmp_path: Path) -> None:
    found = results(tmp_path, "tp=2,dp_shard=2", "pp=2,cp=2", "dp_replicate=2,activation_checkpoint.mode=full", steps=3)
    assert [result.verdict for result in found] == ["agrees"] * 3
    assert [result.world_size for result in found] == [4, 4, 2]
    for result in found:
        assert result.same_initial_weights and result.same_samples and not result.deviations and not result.flips
        assert 0 < result.gradient < 1e-5 and result.loss < 1e-6 and result.norm < 1e-5
        assert result.weights_of and 0 <= result.weights < 3


def test_layouts_of_experts_agree(tmp_path: Path) -> None:
    found = results(tmp_path, "ep=2", "ep=4,cp=2,activation_checkpoint.mode=full", name=WITH_EXPERTS, overrides=EXPERTS)
    assert [(result.verdict, result.world_size) for result in found] == [("agrees", 2), ("agrees", 4)]
    assert all(0 < result.gradient < 1e-5 and not result.flips for result in found)


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


def expert_gradient_wrong() -> None:
    right = expert_parallel.grouped_swiglu

    def swiglu(rows, ends, gate, up, down):
        up = up * 1.0
        if up.requires_grad:
            up.register_hook(lambda gradient: gradient * 1.001)
        return right(rows, ends, gate, up, down)

    replaced(expert_parallel, "grouped_swiglu", swiglu)


def router_gradient_wrong() -> None:
    right = moe.Router.route

    def route(self, x, weight):
        weight = weight * 1.0
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient * 1.001)
        return right(self, x, weight)

    replaced(moe.Router, "route", route)


def other_experts() -> None:
    right = moe.Router.route

    def route(self, x, weight):
        routing = right(self, x, weight)
        return routing._replace(experts=(routing.experts + 1) % len(weight))

    replaced(moe.Router, "route", route)


def router_reports_otherwise() -> None:
    right = expert_balance.ExpertBalance.metrics

    def metrics(self, *args):
        found = right(self, *args)
        return found | {"z_loss": found["z_loss"] * 1.0001}

    replaced(expert_balance.ExpertBalance, "metrics", metrics)


def biases_turn_the_other_way() -> None:
    right = expert_balance.ExpertBalance.update_biases
    replaced(expert_balance.ExpertBalance, "update_biases", lambda self, loads, inf: right(self, -loads, inf))


def ranks_count_otherwise() -> None:
    right = parallelize.ParallelModel.finish_step

    def finish(self, *args):
        found = right(self, *args)
        if torch.distributed.get_rank() == 1:
            self.expert_loads = self.expert_loads.roll(1, 1)
        return found

    replaced(parallelize.ParallelModel, "finish_step", finish)


EXPERT_FAULTS = {
    expert_gradient_wrong: ("gradient", [".mlp.experts.up"]),
    router_gradient_wrong: ("gradient", [".mlp.router.weight"]),
    other_experts: ("expert choices", ["rounding"]),
    router_reports_otherwise: ("router", ["z_loss of step 1"]),
    biases_turn_the_other_way: ("expert biases", ["router.expert_bias"]),
    ranks_count_otherwise: ("expert counts", ["rank 1"]),
    loss_of_nan: ("loss", ["nan"]),
}


@pytest.mark.parametrize("plant", EXPERT_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_experts_is_named(plant: Callable[[], None], tmp_path: Path) -> None:
    (result,) = results(tmp_path, "ep=2", steps=1, plant=plant, name=WITH_EXPERTS, overrides=EXPERTS)
    what, words = EXPERT_FAULTS[plant]
    assert result.verdict == "deviates"
    assert (result.deviations[0].what, result.deviations[0].step) == (what, 1), result.deviations
    assert all(word in conclusion(result) for word in words), conclusion(result)


def break_down() -> None:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("the words of rank 1")


def test_a_layout_that_cannot_be_trained_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="the words of rank 1") as caught:
        results(tmp_path, "dp_shard=2", plant=break_down)
    assert caught.value.first.startswith("rank 1 raised")
