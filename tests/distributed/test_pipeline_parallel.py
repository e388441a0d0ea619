"""Pipelines: what a rank holds, validation between steps, tied tables, checkpoints into other layouts, precision.

That losses, norms and gradients are those of one process, under every schedule, is tests/parity's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness.distributed import run_distributed
from tests.harness.training import build, global_batch, merge, rank_batches, run_training, train_step
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.config.layout import parameter_counts, plan_pipeline
from titanlite.config.schema import CheckpointConfig
from titanlite.model.init import tensors_hash
from titanlite.model.transformer import Transformer
from titanlite.parallel import pipeline_parallel
from titanlite.parallel.parallelize import ParallelModel, PipelinedModel
from titanlite.verify.record import full_tensors, largest_error

Sections = dict[str, dict[str, Any]]
SCHEDULES = tuple(pipeline_parallel.SCHEDULES)
DEEP: Sections = {"model": {"n_layers": 8}, "training": {"local_batch_size": 12}}
TIED: Sections = {"model": {"tie_word_embeddings": True}}


def pipeline(schedule: str, pp: int = 2, *more: Sections, **keys: Any) -> Sections:
    keys = {"pp_microbatches": 6, "dp_shard": 1, **keys}
    return merge(DEEP, *more, {"parallelism": {"pp": pp, "pp_schedule": schedule, **keys}})


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stages(model: ParallelModel) -> list[Transformer]:
    assert isinstance(model.module, nn.ModuleList)
    return [stage for stage in model.module if isinstance(stage, Transformer)]


# ---- what a rank holds


def _held(sections: Sections) -> dict[str, Any]:
    config, ranks, model, optimizer = build(sections)
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 1), config, 1)
    plan = plan_pipeline(config.model, config.parallelism)
    assert plan is not None
    mine = plan.stages_of(ranks.meshes.pp.get_local_rank())
    layers = [layer for stage in mine for layer in plan.layers[stage]]

    def elements(tensors: Any) -> int:
        return sum(local(tensor).numel() for tensor in tensors)

    return {
        "names": set(model.parameters),
        "layers": layers,
        "modules": elements(model.module.parameters()),
        "parameters": elements(model.parameters.values()),
        "gradients": elements(parameter.grad for parameter in model.parameters.values()),
        "moments": elements(optimizer.state_tensors().values()),
        "whole": parameter_counts(config.model).total,
        "pad": (config.model.padded_vocab_size - config.model.vocab_size) * config.model.dim,
    }


@pytest.mark.parametrize(
    ("schedule", "pp", "shard"), [("1F1B", 4, 1), ("Interleaved1F1B", 2, 2), ("ZBVZeroBubble", 2, 1)]
)
def test_a_rank_holds_its_stages_and_nothing_else(schedule: str, pp: int, shard: int) -> None:
    held = run_distributed(_held, pp * shard, pipeline(schedule, pp, dp_shard=shard))
    for rank in held:
        assert {int(name.split(".")[1]) for name in rank["names"] if name.startswith("layers.")} == set(rank["layers"])
        assert rank["modules"] == rank["parameters"] == rank["gradients"] == rank["moments"] / 2
        assert ("embedding.weight" in rank["names"]) == (0 in rank["layers"])
        assert ("output.weight" in rank["names"]) == ("norm.weight" in rank["names"]) == (7 in rank["layers"])
    # Every element is somewhere, once.
    assert sum(rank["parameters"] for rank in held) == held[0]["whole"] + 2 * held[0]["pad"]
    assert max(rank["parameters"] for rank in held) < 0.75 * (held[0]["whole"] + 2 * held[0]["pad"])


def _forward_calls(sections: Sections) -> list[int]:
    config, ranks, model, optimizer = build(sections)
    calls: Counter[int] = Counter()
    for number, stage in enumerate(stages(model)):
        stage.register_forward_hook(lambda *args, number=number: calls.update([number]))
    for step in (1, 2):
        train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)
    return [calls[number] for number in sorted(calls)]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_a_module_runs_once_for_each_microbatch(schedule: str) -> None:
    """torch can find out shapes by running the modules once more, which would count tokens twice."""
    for calls in run_distributed(_forward_calls, 2, pipeline(schedule)):
        assert set(calls) == {2 * 2 * 6}  # two steps of two schedule runs of six microbatches


# ---- the loss, and validation between steps


def validated(sections: Sections) -> list[Any]:
    """Validation before the first step, between a step and the next and after it; the step's losses."""
    config, ranks, model, optimizer = build(sections)
    batch = global_batch(config, 100)
    found: list[Any] = []
    for step in (1, 2):
        for rows in (12, 7, 1):
            part = {name: value[:rows] for name, value in batch.items()}
            found.append(model.evaluate(part).item())
        model.release()  # evaluate has done it; as with any model, once more does no harm
        loss, stats, _ = train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)
        found += [loss, stats.norm.item()]
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_validation_changes_nothing_and_is_right(schedule: str) -> None:
    """Of 12 rows, 7 and 1 with 6 microbatches: shapes that are not those of training."""
    reference = run_distributed(validated, 1, DEEP)[0]
    first, *others = run_distributed(validated, 4, pipeline(schedule, dp_shard=2, zero_stage="auto"))
    assert all(other == first for other in others), "ranks disagree"
    assert first == pytest.approx(reference, rel=1e-6)
    plain = run_training(pipeline(schedule, dp_shard=2), 4, steps=2)["losses"]
    assert [first[3], first[8]] == plain, "training is another after validation"


Call = Counter[tuple[str, int]]  # "send" to or "recv" from a rank, those of one call


def _calls_of_validation(sections: Sections) -> list[Call]:
    """This rank's sends and receives of one validation batch, in the order of the calls that ask for them."""
    config, _, model, _ = build(sections)
    calls: list[Call] = []
    inside = False  # recv calls irecv, and a batch both
    c10d: Any = dist.distributed_c10d

    def recorded(name: str, asked: Callable[..., Call]) -> Any:
        original = getattr(c10d, name)

        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal inside
            outermost, inside = not inside, True
            if outermost:
                calls.append(asked(*args, **keywords))
            try:
                return original(*args, **keywords)
            finally:
                inside = not outermost

        call.__name__ = name
        return call

    def one(what: str, peer_name: str) -> Callable[..., Call]:
        return lambda *args, **keywords: Counter([(what, keywords[peer_name])])

    def several(ops: list[Any]) -> Call:
        return Counter((op.op.__name__.lstrip("i"), op.peer) for op in ops)

    kinds = {"send": one("send", "dst"), "isend": one("send", "dst"), "recv": one("recv", "src")}
    for name, asked in {**kinds, "irecv": one("recv", "src"), "batch_isend_irecv": several}.items():
        wrapper = recorded(name, asked)
        setattr(c10d, name, wrapper)
        setattr(dist, name, wrapper)
    model.evaluate({name: value[:7] for name, value in global_batch(config, 100).items()})
    return calls


def _stuck(ranks: list[list[Call]]) -> list[list[Call]]:
    """What is left when each rank's calls are one queue, as under NCCL: a call ends when all that it asks for has
    met its counterpart in the first call of the other rank's queue."""
    queues = [[Counter(call) for call in calls] for calls in ranks]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            for (what, peer), count in list(queue[0].items()) if queue else []:
                counterpart = ("recv" if what == "send" else "send", rank)
                met = min(count, queues[peer][0][counterpart]) if queues[peer] else 0
                queue[0] -= Counter({(what, peer): met})
                if met:
                    queues[peer][0] -= Counter({counterpart: met})
                    moved = True
        for queue in queues:
            while queue and not queue[0]:
                queue.pop(0)
    return [queue for queue in queues if queue]


@pytest.mark.parametrize(
    ("schedule", "pp"), [("1F1B", 4), ("LoopedBFS", 2), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 2), ("DualPipeV", 4)]
)
def test_no_rank_waits_forever_where_sends_and_receives_share_a_queue(schedule: str, pp: int) -> None:
    """Gloo has no such queue, so the order is recorded and played back."""
    calls = run_distributed(_calls_of_validation, pp, pipeline(schedule, pp, pp_microbatches=0))
    assert all(calls), "something was sent"
    assert not _stuck(calls)


# ---- tied tables


def _copies(sections: Sections) -> dict[str, Any]:
    config, ranks, model, optimizer = build(sections)
    for step in (1, 2, 3):
        train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)
    model.forward_backward(rank_batches(config, ranks, 4))  # of two copies on one rank, the second follows before it
    return {
        "tables": [local(stage.embedding.weight) for stage in stages(model) if stage.embedding is not None],
        "moments": [local(value) for key, value in optimizer.state_tensors().items() if key.startswith("embedding")],
    }


@pytest.mark.parametrize(("schedule", "pp"), [("1F1B", 3), ("LoopedBFS", 2), ("ZBVZeroBubble", 2)])
def test_both_copies_of_a_tied_table_stay_the_same_bits(schedule: str, pp: int) -> None:
    ranks = run_distributed(_copies, pp, pipeline(schedule, pp, TIED))
    tables = [table for rank in ranks for table in rank["tables"]]
    assert len(tables) == 2 and torch.equal(*tables)
    moments = [rank["moments"] for rank in ranks if rank["moments"]]
    assert all(torch.equal(a, b) for other in moments for a, b in zip(other, moments[0], strict=True))
    assert len(moments) == (1 if schedule == "ZBVZeroBubble" else 2)


# ---- checkpoints


def _save(sections: Sections, folder: Path, load_step: int | None, save_step: int) -> tuple[str, float, float]:
    """Load a checkpoint (or start anew and train two steps), save it again, train a step. The hash of all that was
    saved; loss and norm of the step."""
    config, ranks, model, optimizer = build(sections)
    manager = CheckpointManager(CheckpointConfig(async_mode="disabled"), folder, ranks, report=lambda message: None)

    def tensors() -> dict[str, torch.Tensor]:
        moments = {f"optimizer.{key}": value for key, value in optimizer.state_tensors().items()}
        return {f"model.{key}": value.detach() for key, value in model.parameters.items()} | moments

    if load_step is None:
        for step in (1, 2):
            train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)
    else:
        manager.load(folder / f"step-{load_step:08}", tensors())
        optimizer.n_updates = 2
    saved = tensors_hash(full_tensors(tensors()).items())
    manager.save(save_step, tensors(), {"train_state": {}, "layout": {}, "config": {}}, wait=True)
    manager.finish()
    batches = rank_batches(config, ranks, 3)
    loss, stats, _ = train_step(model, optimizer, ranks, batches, config, 3)
    return saved, loss, stats.norm.item()


@pytest.mark.parametrize(
    ("tied", "there", "world"),
    [
        ({}, pipeline("1F1B"), 2),
        (TIED, pipeline("1F1B", 4), 4),
        (TIED, pipeline("ZBVZeroBubble", 2, dp_shard=2), 4),
        ({}, pipeline("LoopedBFS", 2, dp_replicate=2), 4),
    ],
)
def test_a_checkpoint_goes_from_a_pipeline_to_one_process_and_back(
    tied: Sections, there: Sections, world: int, tmp_path: Path
) -> None:
    there, alone = merge(there, tied), merge(DEEP, tied)
    first = run_distributed(_save, world, there, tmp_path, None, 2)
    one = run_distributed(_save, 1, alone, tmp_path, 2, 3)
    back = run_distributed(_save, world, there, tmp_path, 3, 4)
    saved, loss, norm = one[0]
    assert {result[0] for result in [*first, *back]} == {saved}, "weights or moments have changed on the way"
    for result in [*first, *back]:
        assert result[1] == pytest.approx(loss, rel=1e-6), "the next step is another one"
        assert result[2] == pytest.approx(norm, rel=1e-5), "the next step is another one"


# ---- precision


def _no_widening() -> None:
    pipeline_parallel._widen_gradients = lambda module: None


BF16: Sections = {"training": {"mixed_precision_param": "bfloat16"}}


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_split_backward_adds_microbatches_up_in_float32(schedule: str) -> None:
    whole = run_training(pipeline("Interleaved1F1B", 2, BF16), 2)["grads"]
    split = run_training(pipeline(schedule, 2, BF16), 2)["grads"]
    narrow = run_training(pipeline(schedule, 2, BF16), 2, before=_no_widening)["grads"]
    error, name = largest_error(split, whole)
    broken, _ = largest_error(narrow, whole)
    print(schedule, error, name, broken)
    assert error < 1e-5 < 1e-3 < broken


# ---- metrics


def _bubbles(sections: Sections, slow_rank: int | None) -> dict[str, float]:
    config, ranks, model, optimizer = build(sections)
    assert isinstance(model, PipelinedModel)
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 1), config, 1)
    naps = []
    if slow_rank is not None and ranks.rank == slow_rank:
        naps = [stage.register_forward_pre_hook(lambda *args: time.sleep(0.05)) for stage in stages(model)]
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 2), config, 2)
    measured = model.metrics()
    for nap in naps:
        nap.remove()
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 3), config, 3)  # another, before it is read
    return measured()


def test_the_measured_bubble_is_where_a_stage_waits() -> None:
    first, second = run_distributed(_bubbles, 2, pipeline("1F1B"), 1)
    assert first == second, "ranks disagree"
    assert first["bubble_fraction_schedule"] == first["bubble_fraction_1f1b"] == 1 / 7
    assert 0 < first["bubble_fraction"] < first["bubble_fraction_worst"] < 1
    # Twelve naps of 0.05 s on rank 1: rank 0 waits for most of them.
    assert first["bubble_fraction_worst"] > 0.5
