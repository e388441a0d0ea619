from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.model.helpers import batch, small_config, small_model
from titanlite.config.schema import ModelConfig, MoEConfig
from titanlite.model.expert_balance import ExpertBalance
from titanlite.model.transformer import moe_layers

FINITE, INFINITE = torch.tensor(0.0), torch.tensor(1.0)


def config(**moe: float) -> ModelConfig:
    keys: dict[str, Any] = {"n_experts": 4, "top_k": 2, "expert_dim": 16, "first_k_dense": 1, "bias_update_rate": 0.25}
    return small_config(dim=32, n_layers=3, moe=MoEConfig(**{**keys, **moe}))


def balance_of(model_config: ModelConfig) -> tuple[ExpertBalance, torch.nn.Module]:
    model = small_model(model_config)
    return ExpertBalance(model_config, moe_layers(model), torch.device("cpu")), model


def test_taking_gives_the_counts_since_the_last_time() -> None:
    balance, model = balance_of(config())
    tokens, labels = batch(config())
    for _ in range(2):
        model(tokens, labels)
    loads, sums = balance.take()
    assert loads.shape == (3, 4) and loads.sum(dim=1).tolist() == [0, 4 * tokens.numel(), 4 * tokens.numel()]
    assert sums[:, 0].tolist() == [0.0, 2.0 * tokens.numel(), 2.0 * tokens.numel()]
    loads, sums = balance.take()
    assert not loads.any() and not sums.any()


def test_a_bias_rises_for_the_expert_with_less_than_the_mean() -> None:
    balance, model = balance_of(config())
    loads = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 2], [2**40, 2**40 + 1, 2**40 - 1, 2**40]])
    balance.update_biases(loads, FINITE)
    assert model.get_buffer("layers.1.mlp.router.expert_bias").tolist() == [0.25, 0.0, -0.25, 0.0]
    assert model.get_buffer("layers.2.mlp.router.expert_bias").tolist() == [0.0, -0.25, 0.25, 0.0]
    balance.update_biases(loads, INFINITE)
    assert model.get_buffer("layers.1.mlp.router.expert_bias").tolist() == [0.25, 0.0, -0.25, 0.0]
    balance.update_biases(loads, FINITE)
    assert model.get_buffer("layers.1.mlp.router.expert_bias").tolist() == [0.5, 0.0, -0.5, 0.0]


def test_biases_even_the_load_out() -> None:
    """By selection alone: the weights do not change."""
    model_config = config(bias_update_rate=0.02)
    balance, model = balance_of(model_config)
    with torch.no_grad():
        for index in (1, 2):
            model.get_buffer(f"layers.{index}.mlp.router.expert_bias").copy_(torch.tensor([0.3, 0.0, 0.0, -0.3]))
    tokens, labels = batch(model_config, samples=8)
    spreads = []
    for _ in range(30):
        model(tokens, labels)
        loads, sums = balance.take()
        balance.update_biases(loads, FINITE)
        metrics = balance.metrics(loads, sums)
        spreads.append((metrics["expert_load_max"] - metrics["expert_load_min"]).item())
    assert spreads[0] > 1.0 and max(spreads[-5:]) < 0.5, spreads


def test_metrics() -> None:
    balance, _ = balance_of(config())
    loads = torch.tensor([[0, 0, 0, 0], [10, 10, 10, 10], [4, 20, 6, 10]])
    sums = torch.tensor([[0, 0, 0, 0], [20, 20 * 1.0, 3.0, 1.0], [20, 20 * 0.5, 5.0, 2.0]], dtype=torch.float64)
    metrics = {name: value.item() for name, value in balance.metrics(loads, sums).items()}
    assert metrics == {
        "expert_load_max": 2.0,
        "expert_load_min": 0.4,
        "expert_assignments": 40.0,
        "router_entropy": 0.75,
        "aux_loss": 8.0 / 20,
        "z_loss": 3.0 / 20,
    }


def test_a_router_that_knows_nothing_has_the_entropy_of_all_experts() -> None:
    balance, model = balance_of(config(aux_loss_coeff=0.5))
    with torch.no_grad():
        for layer in ("1", "2"):
            model.get_parameter(f"layers.{layer}.mlp.router.weight").zero_()
    model(*batch(config()))
    metrics = balance.metrics(*balance.take())
    assert metrics["router_entropy"].item() == pytest.approx(math.log(4), rel=1e-6)
    assert metrics["aux_loss"].item() == pytest.approx(2 * 0.5, rel=1e-6)  # two layers; flat scores weigh all alike


def test_parts_of_a_model_together() -> None:
    model_config = config()
    stages = [small_model(model_config, layers=layers) for layers in (range(2), range(2, 3))]
    parts = [ExpertBalance(model_config, moe_layers(stage), torch.device("cpu")) for stage in stages]
    whole = parts[0].with_layers_of(parts)
    for stage, index in zip(stages, ("1", "2"), strict=True):
        stage.get_buffer(f"layers.{index}.mlp.load").fill_(int(index))
    assert whole.take()[0].tolist() == [[0] * 4, [1] * 4, [2] * 4]
