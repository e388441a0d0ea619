"""Mixtures of experts in the trainer: what a step counts, whatever way it is done; biases in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE, LAYOUTS, ONE_PROCESS, Layout
from titanlite.config.schema import Config
from titanlite.model.init import tensors_hash
from titanlite.model.transformer import Transformer, moe_layers
from titanlite.parallel import runtime
from titanlite.parallel.whole import full_tensors
from titanlite.trainer import NonFiniteError
from titanlite.verify.record import Recorder, flips, largest_error

Sections = Mapping[str, Mapping[str, Any]]
STEPS = 6
TOKENS, TOP_K = 24 * 32, 2
EXPERTS: dict[str, Any] = {
    "n_experts": 6,
    "top_k": TOP_K,
    "expert_dim": 24,
    "n_shared_experts": 1,
    "first_k_dense": 1,
    "score_func": "sigmoid",
    "bias_update_rate": 0.01,
    "aux_loss_coeff": 0.05,
    "z_loss_coeff": 0.01,
}
MOE: Sections = {
    "model": {"dim": 32, "moe": EXPERTS},
    "validation": {"enable": True, "freq": 1, "samples": 7},
}
FULL_RECOMPUTATION: Sections = {"activation_checkpoint": {"mode": "full"}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("experts") / "text")


def _train(sections: Sections) -> dict[str, Any]:
    config = Config.model_validate(sections)
    trainer = Recorder(config, runtime.start(config.comm, config.run, config.parallelism))
    trainer.train()
    return {
        "record": trainer.record,
        "hash": tensors_hash(full_tensors(trainer._tensors()).items()),
        "rows": [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()],
    }


def _break_a_step(sections: Sections) -> dict[str, Any]:
    """In the third step one rank has an infinite gradient."""
    config = Config.model_validate(sections)
    ranks = runtime.start(config.comm, config.run, config.parallelism)
    trainer = Recorder(config, ranks)
    right, biases = trainer.model.forward_backward, []

    def overflowing(batches: Sequence[Any]) -> Tensor:
        loss = right(batches)
        biases.append({name: buffer.clone() for name, buffer in trainer.model.buffers.items()})
        if len(biases) == 3 and ranks.rank == ranks.world_size - 1:
            gradient = trainer.parameters["layers.1.mlp.router.weight"].grad
            assert gradient is not None
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local[0, 0] = torch.inf
        return loss

    trainer.model.forward_backward = overflowing  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer.train()
    model = trainer.model.module
    assert isinstance(model, Transformer)
    moe = moe_layers(model)
    return {
        "loads": torch.stack(trainer.record.expert_loads),
        "biases": [*biases, {name: buffer.clone() for name, buffer in trainer.model.buffers.items()}],
        "counters": [(layer.load, layer.sums) for layer in moe.values()],
    }


@pytest.mark.parametrize("name", ["one process", "fsdp 2"])
def test_a_step_with_an_infinite_gradient_counts_but_moves_no_bias(name: str, text: Path, tmp_path: Path) -> None:
    layout = ONE_PROCESS if name == "one process" else LAYOUTS[name][0]
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": data_section(text),
        "run": {"output_dir": str(tmp_path), "name": "run"},
    }
    for record in run_distributed(_break_a_step, layout.world_size, merge(BASE, MOE, layout.sections, here)):
        assert (record["loads"][:, 1:].sum(dim=2) == TOKENS * TOP_K).all(), "of a step each, the broken one too"
        zero, one, two, after = record["biases"]
        assert after.keys() == two.keys() == {f"layers.{n}.mlp.router.expert_bias" for n in (1, 2)}
        for bias in after:
            assert not zero[bias].any() and one[bias].any() and not torch.equal(two[bias], one[bias])
            assert torch.equal(after[bias], two[bias])
        assert len(record["counters"]) == 2
        assert not any(counter.any() for counters in record["counters"] for counter in counters)


def train(layout: Layout, text: Path, folder: Path, steps: int = STEPS, *sections: Sections) -> dict[str, Any]:
    """Of rank 0. Ranks agree on loads."""
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": data_section(text),
        "run": {"output_dir": str(folder), "name": "run"},
        "training": {"steps": steps},
    }
    records = run_distributed(
        _train, layout.world_size, merge(BASE, MOE, layout.sections, here, *sections), timeout=500
    )
    assert not any(flips(other["record"], records[0]["record"]) for other in records[1:])
    return records[0]


@pytest.fixture(scope="module")
def one_process(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(ONE_PROCESS, text, tmp_path_factory.mktemp("one"))


def test_rows_say_how_the_experts_do(one_process: dict[str, Any]) -> None:
    """Validation after every step, which must not count."""
    loads = torch.stack(one_process["record"].expert_loads)
    assert loads.shape == (STEPS, 3, 6) and loads.dtype == torch.int64
    assert (loads.sum(dim=2) == torch.tensor([0, TOKENS * TOP_K, TOKENS * TOP_K])).all()
    for row, load in zip(one_process["rows"], loads[:, 1:], strict=True):
        assert row["expert_assignments"] == TOKENS * TOP_K
        assert row["expert_load_max"] == load.max() / (TOKENS * TOP_K / 6)
        assert row["expert_load_min"] == load.min() / (TOKENS * TOP_K / 6)
        assert 0 < row["router_entropy"] <= 1.7918 and row["aux_loss"] > 0.09 and row["z_loss"] > 0
        assert "validation_loss" in row


def test_biases_follow_the_loads(one_process: dict[str, Any]) -> None:
    record = one_process["record"]
    assert set(record.biases) == {f"layers.{n}.mlp.router.expert_bias" for n in (1, 2)}
    for index in (1, 2):
        load = torch.stack(record.expert_loads)[:, index]
        wanted = (0.01 * (TOKENS * TOP_K - 6 * load).sign().float()).sum(dim=0)
        bias = record.biases[f"layers.{index}.mlp.router.expert_bias"]
        assert bias.any() and torch.allclose(bias, wanted, atol=1e-7)


@pytest.mark.parametrize("name", ["one process", "fsdp 2"])
def test_a_resumed_run_is_the_unbroken_run(name: str, text: Path, tmp_path: Path) -> None:
    layout = ONE_PROCESS if name == "one process" else LAYOUTS[name][0]
    saving: Sections = {"checkpoint": {"enable": True}, "metrics": {"enable_tensorboard": True}}
    unbroken = train(layout, text, tmp_path / "unbroken", STEPS, saving)
    train(layout, text, tmp_path / "resumed", 3, saving)
    resumed = train(layout, text, tmp_path / "resumed", STEPS, saving)
    assert torch.equal(*(torch.stack(run["record"].expert_loads[-3:]) for run in (resumed, unbroken)))
    assert resumed["hash"] == unbroken["hash"]
    keys = ("step", "loss", "grad_norm", "expert_load_max", "expert_load_min", "router_entropy", "aux_loss", "z_loss")
    rows = [[row[key] for key in keys] for record in (resumed, unbroken) for row in record["rows"]]
    assert rows[:STEPS] == rows[STEPS:]
    events = EventAccumulator(str(tmp_path / "unbroken/run/tensorboard"))
    events.Reload()
    assert {f"experts/{name}" for name in ("load_max", "load_min", "assignments", "router_entropy")} <= set(
        events.Tags()["scalars"]
    )


def test_compiled(one_process: dict[str, Any], text: Path, tmp_path: Path) -> None:
    record = train(ONE_PROCESS, text, tmp_path, 2, FULL_RECOMPUTATION, {"compile": {"enable": True}})["record"]
    assert len(record.expert_loads) == 2 and not flips(record, one_process["record"])
    error, name = largest_error(record.gradients, one_process["record"].gradients)
    assert error < 1e-5, name
