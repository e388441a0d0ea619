"""Degrees -> shapes, shares of a step, parameter counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from titanlite.config.layout import (
    BatchPlan,
    Layout,
    PipelinePlan,
    balanced_layers,
    divisors,
    fewest_processes,
    fixed_world_size,
    parameter_counts,
    plan_batch,
    plan_pipeline,
    resolve_layout,
    resolve_zero_stage,
    shards_are_found,
)
from titanlite.config.load import Loaded, load
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig, MoEConfig, ParallelismConfig, TrainingConfig

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def _layout(world: int, **degrees: Any) -> Layout:
    return resolve_layout(ParallelismConfig(**degrees), world)


def _refusal(call: Callable[..., object], *args: Any, **named: Any) -> Problem:
    with pytest.raises(InputError) as caught:
        call(*args, **named)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("degrees", "data", "dense", "sparse"),
    [
        # (dp_replicate, dp_shard, tp, pp, cp, ep), then (pp, batch, cp, tp), (pp, replicate, fsdp, tp), (…, efsdp, ep)
        ((1, 8, 1, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 8, 1)),
        ((8, 1, 1, 1, 1, 1), (1, 8, 1, 1), (1, 8, 1, 1), (1, 8, 1, 1)),
        ((2, 4, 1, 1, 1, 1), (1, 8, 1, 1), (1, 2, 4, 1), (1, 2, 4, 1)),
        ((1, 2, 2, 2, 1, 1), (2, 2, 1, 2), (2, 1, 2, 2), (2, 1, 4, 1)),
        ((1, 2, 2, 1, 2, 1), (1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 8, 1)),
        ((1, 2, 2, 1, 2, 8), (1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 1, 8)),
        ((1, 8, 1, 1, 1, 4), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 2, 4)),
        ((2, 2, 2, 1, 1, 2), (1, 4, 1, 2), (1, 2, 2, 2), (1, 2, 2, 2)),
        ((1, 1, 2, 2, 2, 4), (2, 1, 2, 2), (2, 1, 2, 2), (2, 1, 1, 4)),
        ((2, 1, 1, 2, 2, 2), (2, 2, 2, 1), (2, 2, 2, 1), (2, 2, 1, 2)),
    ],
)
def test_shapes_of_eight_ranks(
    degrees: tuple[int, ...], data: tuple[int, ...], dense: tuple[int, ...], sparse: tuple[int, ...]
) -> None:
    layout = _layout(8, **dict(zip(DEGREES, degrees, strict=True)))
    assert layout.data_shape == dict(zip(("pp", "batch", "cp", "tp"), data, strict=True))
    assert layout.dense_shape == dict(zip(("pp", "dp_replicate", "fsdp", "tp"), dense, strict=True))
    assert layout.sparse_shape == dict(zip(("pp", "dp_replicate", "efsdp", "ep"), sparse, strict=True))
    assert list(layout.data_shape) == ["pp", "batch", "cp", "tp"]  # outermost first
    assert list(layout.dense_shape) == ["pp", "dp_replicate", "fsdp", "tp"]
    assert list(layout.sparse_shape) == ["pp", "dp_replicate", "efsdp", "ep"]


def test_every_view_of_every_layout_covers_the_world() -> None:
    seen = 0
    for world in (1, 2, 6, 8, 12):
        for replicate in divisors(world):
            for tp in divisors(world // replicate):
                for pp in divisors(world // replicate // tp):
                    for cp in divisors(world // replicate // tp // pp):
                        expert_ranks = world // replicate // pp
                        for ep in range(1, expert_ranks + 2):
                            degrees = {"dp_replicate": replicate, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
                            if expert_ranks % ep:
                                assert _refusal(_layout, world, **degrees).key == "parallelism.ep"
                                continue
                            layout = _layout(world, **degrees)
                            assert layout.dp_shard == world // (replicate * tp * pp * cp)
                            for shape in (layout.data_shape, layout.dense_shape, layout.sparse_shape):
                                assert math.prod(shape.values()) == world
                            assert layout.efsdp * layout.ep == layout.dp_shard * layout.cp * layout.tp
                            assert layout == _layout(world, **degrees, dp_shard=layout.dp_shard)
                            seen += 1
    assert seen > 200


def test_dp_shard_takes_what_is_left() -> None:
    assert _layout(12, dp_replicate=2, tp=3).dp_shard == 2
    assert _layout(1).dp_shard == 1
    assert fixed_world_size(ParallelismConfig(dp_replicate=2, tp=3)) is None
    assert fixed_world_size(ParallelismConfig(dp_replicate=2, dp_shard=4, tp=3, pp=5, cp=7, ep=2)) == 840


def test_fewest_processes_is_the_smallest_world_that_fits() -> None:
    choices = itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3, 4, 6, 8))
    for choice in choices:
        degrees = dict(zip(("dp_replicate", "tp", "pp", "cp", "ep"), choice, strict=True))
        fewest = fewest_processes(ParallelismConfig.model_validate(degrees))
        assert _layout(fewest, **degrees).world_size == fewest
        for fewer in range(1, fewest):
            with pytest.raises(InputError):
                _layout(fewer, **degrees)


@pytest.mark.parametrize(
    ("world", "degrees", "key", "words"),
    [
        (4, {"dp_shard": 0}, "parallelism.dp_shard", ("-1, or an integer > 0",)),
        (8, {"dp_replicate": 3}, "parallelism", ("= 3 does not divide", "run 6 or 9 processes")),
        (2, {"dp_replicate": 4}, "parallelism", ("run 4 processes",)),
        (4, {"dp_shard": 2}, "parallelism", ("4 processes for", "= 2;", "run 2 processes", "dp_shard = -1")),
        (1, {"dp_shard": 2, "dp_replicate": 2}, "parallelism", ("run 4 processes",)),
        (2**22, {"tp": 2**11, "dp_shard": 2**11}, "parallelism", ("4194304 processes", "at most 131072")),
        (8, {"ep": 3}, "parallelism.ep", ("a divisor of dp_shard x cp x tp = 8", "a multiple of 3")),
        (8, {"dp_replicate": 8, "dp_shard": 1, "ep": 2}, "parallelism.ep", ("= 1", "a multiple of 2")),
    ],
)
def test_degrees_that_do_not_fit_the_world(
    world: int, degrees: dict[str, int], key: str, words: tuple[str, ...]
) -> None:
    problem = _refusal(_layout, world, **degrees)
    assert problem.key == key
    assert all(word in str(problem) for word in words), str(problem)


@pytest.mark.parametrize(
    ("world", "degrees", "ddp"),
    [
        (1, {}, False),
        (2, {"dp_replicate": 2, "dp_shard": 1}, True),
        (2, {"dp_replicate": 2}, True),
        (4, {"dp_replicate": 2}, False),
        (2, {}, False),
        (4, {"dp_replicate": 2, "dp_shard": 1, "cp": 2}, False),
        (4, {"dp_replicate": 2, "dp_shard": 1, "pp": 2}, False),
    ],
)
def test_ddp_is_for_replicas_and_nothing_else(world: int, degrees: dict[str, int], ddp: bool) -> None:
    assert _layout(world, **degrees).uses_ddp is ddp


def test_zero_stage_auto() -> None:
    assert [resolve_zero_stage(ParallelismConfig(zero_stage=stage), _layout(2)) for stage in ("auto", 1, 2, 3)] == [
        *(3, 1, 2, 3)
    ]
    assert resolve_zero_stage(ParallelismConfig(), _layout(2, pp=2)) == 1


@pytest.mark.parametrize(
    ("total", "world", "most", "plan"),
    [
        (24, 1, 12, (24, 12, 2)),
        (24, 2, 8, (12, 6, 2)),
        (24, 4, 8, (6, 6, 1)),
        (7, 1, 4, (7, 1, 7)),
        (7, 7, 4, (1, 1, 1)),
        (2**31 - 1, 1, 2**62, (2**31 - 1, 2**31 - 1, 1)),
    ],
)
def test_batch_plan_takes_the_largest_divisor(total: int, world: int, most: int, plan: tuple[int, ...]) -> None:
    training = TrainingConfig(seq_len=8, global_batch_size=total, local_batch_size=most, steps=1)
    assert plan_batch(training, _layout(world)) == BatchPlan(*plan)


def _model(n_layers: int, **keys: Any) -> ModelConfig:
    base: dict[str, Any] = {"vocab_size": 128, "dim": 64, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 64}
    return ModelConfig(n_layers=n_layers, **(base | keys))


def _pipeline(schedule: str, pp: int, n_layers: int, **keys: Any) -> PipelinePlan:
    parallelism = ParallelismConfig(pp=pp, pp_schedule=schedule, **keys)  # type: ignore[arg-type]
    plan = plan_pipeline(_model(n_layers), parallelism)
    assert plan is not None
    return plan


def test_no_pipeline_has_no_plan() -> None:
    assert plan_pipeline(_model(3), ParallelismConfig(pp_layers_per_stage=(7,))) is None


@pytest.mark.parametrize("n_stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("vocab", [128, 1024, 4096])
def test_the_balanced_split_is_the_best_there_is(n_stages: int, vocab: int) -> None:
    """The most expensive stage costs no more than in any other split (a layer: 4 * 64 * 64 + 3 * 64 * 64)."""
    model = _model(8, vocab_size=vocab)
    layer, output = 7 * 64 * 64, vocab * 64

    def dearest(counts: tuple[int, ...]) -> int:
        costs = [count * layer for count in counts]
        costs[0] += 64
        costs[-1] += output
        return max(costs)

    splits = [s for s in itertools.product(range(1, 9), repeat=n_stages) if sum(s) == 8]
    found = balanced_layers(model, n_stages)
    assert found in splits
    assert dearest(found) == min(dearest(s) for s in splits)


def test_a_large_output_leaves_layers_to_the_other_stages() -> None:
    assert balanced_layers(_model(8, vocab_size=128), 2) == (4, 4)
    assert balanced_layers(_model(8, vocab_size=2048), 2) == (6, 2)  # 4.6 layers' worth
    assert balanced_layers(_model(3, vocab_size=128), 2) == (2, 1)
    assert balanced_layers(load("llama_8b").config.model, 4) == (8, 9, 9, 6)  # 2.4 layers' worth


def test_stages_and_their_ranks() -> None:
    plan = _pipeline("1F1B", 3, 7)
    assert [list(layers) for layers in plan.layers] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [plan.stages_of(rank) for rank in range(3)] == [(0,), (1,), (2,)]
    plan = _pipeline("Interleaved1F1B", 2, 9)
    assert [plan.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert len(_pipeline("LoopedBFS", 2, 3).layers) == 2, "too few layers for two stages a rank"
    plan = _pipeline("ZBVZeroBubble", 3, 6)
    assert [plan.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [plan.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    plan = _pipeline("LoopedBFS", 2, 6, pp_layers_per_stage=(1, 1, 1, 1, 1, 1))
    assert [plan.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert _pipeline("GPipe", 2, 5, pp_layers_per_stage=(1, 4)).layers == (range(1), range(1, 5))


def test_bubble_of_1f1b() -> None:
    """Of the others it is compared with torch's order of actions: tests/unit/parallel/test_pipeline_schedules.py."""
    assert _pipeline("1F1B", 4, 8).ideal_bubble(8) == 3 / 11


@pytest.mark.parametrize(
    ("schedule", "pp", "most", "microbatches", "plan"),
    [
        ("1F1B", 2, 24, 0, (24, 24, 1, 24)),
        ("1F1B", 2, 10, 0, (24, 8, 3, 8)),
        ("1F1B", 2, 10, 4, (24, 8, 3, 4)),
        ("1F1B", 2, 24, 3, (24, 24, 1, 3)),
        ("GPipe", 4, 1, 0, (24, 1, 24, 1)),
        ("1F1B", 4, 5, 0, (24, 4, 6, 4)),
        ("Interleaved1F1B", 4, 7, 0, (24, 6, 4, 6)),
        ("InterleavedZeroBubble", 4, 24, 8, (24, 24, 1, 8)),
        ("Interleaved1F1B", 2, 24, 3, (24, 24, 1, 3)),
    ],
)
def test_batch_plan_of_a_pipeline(schedule: str, pp: int, most: int, microbatches: int, plan: tuple[int, ...]) -> None:
    training = TrainingConfig(seq_len=8, global_batch_size=24, local_batch_size=most, steps=1)
    pipeline = _pipeline(schedule, pp, 8, pp_microbatches=microbatches)
    assert plan_batch(training, _layout(pp, pp=pp), pipeline) == BatchPlan(*plan)


def test_a_run_of_a_schedule_is_the_most_samples_that_it_accepts() -> None:
    """9 samples are more than Interleaved1F1B can do at pp 2 (9 // 2 = 4 rounds), 3 are not."""
    training = TrainingConfig(seq_len=8, global_batch_size=9, local_batch_size=9, steps=1)
    assert plan_batch(training, _layout(2, pp=2), _pipeline("Interleaved1F1B", 2, 8)) == BatchPlan(9, 3, 3, 3)


def test_batch_is_split_over_data_parallel_ranks_only() -> None:
    training = TrainingConfig(seq_len=8, global_batch_size=6, steps=1)
    assert plan_batch(training, _layout(8, dp_replicate=2, dp_shard=1, tp=2, cp=2)).rank_samples == 3


def test_uneven_share_is_refused_with_the_nearest_values() -> None:
    training = TrainingConfig(seq_len=8, global_batch_size=10, steps=1)
    problem = _refusal(plan_batch, training, _layout(4))
    assert (problem.key, problem.got) == ("training.global_batch_size", "10")
    assert "a multiple of dp_replicate x dp_shard = 4" in problem.allowed
    assert problem.fix == "set it to 8 or 12, or change dp_replicate x dp_shard to 2 or 5"
    training = TrainingConfig(seq_len=8, global_batch_size=2, steps=1)
    assert "set it to 4, or" in _refusal(plan_batch, training, _layout(4)).fix


def test_divisors() -> None:
    for n in range(1, 200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("smollm_135m", 134_515_008),
        ("llama_1b", 1_235_814_400),
        ("llama_8b", 8_030_261_248),
        ("llama_70b", 70_553_706_496),
        ("llama_405b", 405_853_388_800),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, total: int) -> None:
    assert parameter_counts(load(name).config.model).total == total


@pytest.mark.parametrize(
    ("name", "billions", "idle"),
    [
        ("llama_8b", 8.03, 0),
        ("mixtral_8x7b", 12.9, 32 * (8 - 2) * 3 * 4096 * 14336),
        ("qwen3_30b_a3b", 3.35, 48 * (128 - 8) * 3 * 2048 * 768),
    ],
)
def test_active_parameters_are_those_of_one_token(name: str, billions: float, idle: int) -> None:
    counts = parameter_counts(load(name).config.model)
    assert counts.active == counts.total - idle
    assert counts.active / 1e9 == pytest.approx(billions, abs=0.03)
    # Each active parameter multiplies the token, but for norms and the embedding's lookup.
    assert counts.matmul == counts.active - counts.norms - counts.embedding


def test_parameter_counts_of_experts_by_hand() -> None:
    moe = MoEConfig(n_experts=5, top_k=2, expert_dim=7, n_shared_experts=3, first_k_dense=1)
    counts = parameter_counts(_model(3, ffn_dim=100, moe=moe))
    dense, plain = (parameter_counts(_model(layers, ffn_dim=100)) for layers in (3, 1))
    attention = 4 * 64 * 64
    layer, expert = attention + 5 * 64, 3 * 64 * 7
    assert counts.total == dense.total + 2 * (layer + 8 * expert - (attention + 3 * 64 * 100))
    assert counts.active == dense.total + 2 * (layer + 5 * expert - (attention + 3 * 64 * 100))
    assert (counts.embedding, counts.norms) == (dense.embedding, dense.norms)
    assert counts.matmul == plain.matmul + 2 * (layer + 5 * expert)


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("ffn_dim", "expert_dim"), [(512, 8), (8, 256), (64, 32)])
def test_dense_and_moe_layers_are_balanced_by_what_they_cost(n_stages: int, ffn_dim: int, expert_dim: int) -> None:
    moe = MoEConfig(n_experts=8, top_k=2, expert_dim=expert_dim, n_shared_experts=1, first_k_dense=3)
    model = _model(7, vocab_size=512, ffn_dim=ffn_dim, moe=moe)
    attention = 4 * 64 * 64
    layers = [attention + 3 * 64 * ffn_dim] * 3 + [attention + 64 * 8 + 3 * 64 * expert_dim * 3] * 4

    def costs(counts: tuple[int, ...]) -> list[int]:
        ends = list(itertools.accumulate(counts))
        found = [sum(layers[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        found[0] += 64
        found[-1] += 512 * 64
        return sorted(found, reverse=True)

    splits = [s for s in itertools.product(range(1, 8), repeat=n_stages) if sum(s) == 7]
    found = balanced_layers(model, n_stages)
    assert found in splits and costs(found) == min(costs(s) for s in splits)
    assert found == min(s for s in splits if costs(s) == costs(found)), "fewer layers first"


def test_parameter_counts_by_hand() -> None:
    dims: dict[str, Any] = {
        "vocab_size": 10,
        "dim": 6,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "ffn_dim": 5,
        "head_dim": 4,
    }
    layer = 6 * 8 + 2 * 6 * 4 + 8 * 6 + 3 * 6 * 5  # q, k and v, o, MLP
    counts = parameter_counts(ModelConfig(**dims))
    assert (counts.embedding, counts.output, counts.norms) == (60, 60, 2 * 2 * 6 + 6)
    assert (counts.matmul, counts.total) == (2 * layer + 60, 2 * layer + 120 + 30)
    tied = parameter_counts(ModelConfig(**dims, tie_word_embeddings=True, qk_norm=True))
    assert (tied.output, tied.matmul) == (0, counts.matmul)  # the tied output multiplies all the same
    assert tied.total == counts.total - 60 + 2 * 2 * 4  # and each head's norms, of width head_dim


def test_padded_vocabulary_and_head_dim(make: Callable[..., Loaded]) -> None:
    model = make("--model.vocab_size=4097").config.model
    assert (model.padded_vocab_size, model.resolved_head_dim) == (4224, 16)
    model = make("--model.vocab_pad_multiple=1", "--model.head_dim=32").config.model
    assert (model.padded_vocab_size, model.resolved_head_dim) == (4096, 32)


def test_shards_are_found_when_tp_divides() -> None:
    for tp in range(1, 9):
        for fsdp in range(1, 9):
            assert all(shards_are_found(size, tp, fsdp) for size in range(tp, 20 * tp, tp))
    assert all(shards_are_found(size, tp, 1) for size in range(1, 40) for tp in range(1, 9)), "or fsdp is 1"
    assert not shards_are_found(7, 2, 3)  # parts 4, 3; pieces 2, 2, 0 and 1, 1, 1: torch gives the last 1 to part 0
