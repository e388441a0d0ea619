"""A shrunk run is a run that is not refused, and has what the large one has."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

import pytest

from titanlite.config.layout import (
    V_SHAPED,
    fixed_world_size,
    parameter_counts,
    plan_batch,
    plan_pipeline,
    resolve_layout,
)
from titanlite.config.load import REPOSITORY, load
from titanlite.config.problems import InputError
from titanlite.config.schema import Config
from titanlite.verify.layouts import AUTO, MOST_AUTO_PROCESSES, Asked, read_layouts
from titanlite.verify.shrink import SmallRuns, shrink

SHIPPED = sorted(path.stem for path in (REPOSITORY / "train_configs").glob("*.toml"))
FOLDER = Path("/nowhere")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

LAYOUTS = [
    *(f"dp_replicate={r},dp_shard={s},tp={t},pp={p},cp={c}" for r, s, t, p, c in itertools.product((1, 2), repeat=5)),
    *(f"pp={pp},pp_schedule={schedule},dp_shard={s}" for schedule in SCHEDULES for pp in (2, 3, 4) for s in (1, 2)),
    *(f"tp={tp},{axis}=2" for tp in (2, 3, 4, 8, 9, 16) for axis in ("dp_shard", "cp", "pp")),
    *(f"dp_shard={n}" for n in (3, 4, 5, 8, 32)),
    *(f"dp_shard={s},tp={t},cp={c},ep={e}" for s, t, c, e in itertools.product((1, 2), (1, 2), (1, 2), (2, 4))),
    *("tp=32", "cp=8", "pp=8", "pp=5,tp=3", "dp_replicate=3,dp_shard=3", "cp=3,dp_shard=3", "tp=4,dp_shard=3"),
    *("pp=2,pp_schedule=1F1B,training.local_batch_size=4", "pp=2,pp_schedule=1F1B,training.local_batch_size=64"),
    *("pp=2,pp_microbatches=2,training.local_batch_size=8", "dp_shard=2,zero_stage=2,training.local_batch_size=4"),
    *("pp=2,tp=2,activation_checkpoint.mode=full", "dp_shard=2,activation_checkpoint.mode=none"),
]


def small(name: str, *layouts: str, steps: int = 10, overrides: tuple[str, ...] = ()) -> SmallRuns:
    _, asked = read_layouts(name, overrides, layouts)
    return shrink([one.case for one in asked], steps=steps, folder=FOLDER)


def possible(name: str, layouts: list[str], overrides: tuple[str, ...] = ()) -> list[Asked]:
    """Those that a run could have. The others are refused with a message, which is check.py's."""
    found = []
    for layout in layouts:
        with suppress(InputError):
            found += read_layouts(name, overrides, [layout])[1]
    return found


VARIANTS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "masked, tied, QK norm, padded": (
        *("--data.document_mask", "--parallelism.cp_method=allgather", "--model.tie_word_embeddings=true"),
        *("--model.qk_norm", "--model.vocab_size=50257", "--validation.enable"),
        *("--training.global_batch_size=120", "--training.local_batch_size=6"),
    ),
    "odd": (
        *("--model.vocab_size=50257", "--model.vocab_pad_multiple=7", "--model.dim=1234", "--model.head_dim=34"),
        *("--model.ffn_dim=3001", "--model.n_heads=12", "--model.n_kv_heads=6", "--model.n_layers=13"),
        *("--training.seq_len=720", "--training.global_batch_size=60", "--training.local_batch_size=5"),
        *("--training.max_norm=0", "--lr_scheduler.decay_ratio=0", "--training.loss_chunk_tokens=0"),
    ),
    "small already": (
        *("--model.vocab_size=4096", "--model.dim=16", "--model.n_heads=8", "--model.n_kv_heads=1"),
        *("--model.ffn_dim=24", "--model.n_layers=4", "--training.seq_len=16", "--training.global_batch_size=4"),
    ),
}

# Instead of odd sizes that experts refuse: grouped matmuls need multiples of 8.
WITH_EXPERTS = ("--model.dim=1240", "--model.moe.expert_dim=1000", "--model.moe.n_experts=12", "--model.moe.top_k=2")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_run_may_be_its_small_run_may_be(name: str, variant: str) -> None:
    """shrink refuses to make a run that check.py refuses; here it also must stay small."""
    overrides = VARIANTS[variant]
    if variant == "odd" and load(name).config.model.moe.n_experts:
        overrides += WITH_EXPERTS
    layouts = possible(name, LAYOUTS, overrides)
    assert len(layouts) > 25, "most of them say something"
    for asked in layouts:
        layout, runs = asked.name, shrink([asked.case], steps=10, folder=FOLDER)
        (config,) = runs.layouts
        assert parameter_counts(config.model).total < 2_000_000, layout
        world = fixed_world_size(config.parallelism)
        assert world
        assert config.training.seq_len <= 192 and config.training.global_batch_size <= 8 * max(8, world), layout
        assert_same_run(runs.reference, config)
        large, model = asked.case.config.model, config.model
        assert (model.padded_vocab_size > model.vocab_size) == (large.padded_vocab_size > large.vocab_size), layout
        assert model.n_layers > 1, layout


def assert_same_run(reference: Config, config: Config) -> None:
    """Only what promise 1 says has no influence may differ."""
    one, other = reference.model_dump(), config.model_dump()
    for run in (one, other):
        del run["parallelism"], run["activation_checkpoint"], run["training"]["local_batch_size"], run["run"]["name"]
    assert one == other
    assert reference.activation_checkpoint.mode == "none"
    assert reference.training.local_batch_size == reference.training.global_batch_size
    assert fixed_world_size(reference.parallelism) == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_many_layouts_share_one_small_run(name: str) -> None:
    layouts = possible(
        name, ["dp_shard=2", "tp=4", "cp=2,tp=2", "pp=2,pp_schedule=ZBVZeroBubble", "tp=3", "dp_shard=8"]
    )
    runs = shrink([asked.case for asked in layouts], steps=10, folder=FOLDER)
    assert len(runs.layouts) == len(layouts) >= 3
    for config in runs.layouts:
        assert_same_run(runs.reference, config)


def test_structure_is_kept() -> None:
    config = small("llama_8b", "tp=2,pp=2,cp=2", overrides=("--model.qk_norm", "--model.vocab_size=128250")).layouts[0]
    model = config.model
    assert model.n_heads == 4 * model.n_kv_heads and model.n_kv_heads > 2, "several heads a rank, as 8 over tp = 2"
    assert model.qk_norm and not model.tie_word_embeddings and model.rope_theta == 500000.0
    assert model.rope_scaling.factor == 8.0
    assert model.rope_scaling.original_max_position_embeddings == config.training.seq_len, "as 8192 of 8192"
    assert model.vocab_size < model.padded_vocab_size
    assert model.init_std * model.dim**0.5 == pytest.approx(0.02 * 64)
    assert config.optimizer.lr / model.init_std == pytest.approx(3e-4 / 0.02)
    assert config.activation_checkpoint.mode == "full" and config.lr_scheduler.decay_type == "cosine"
    assert config.lr_scheduler.warmup_steps > 0 and config.lr_scheduler.total_steps == config.training.steps
    assert config.training.mixed_precision_param == "float32" and config.run.device == "cpu"
    assert not config.compile.enable and config.validation.enable


@pytest.mark.parametrize(
    ("kv_heads", "tp", "sign"), [(8, 2, 1), (8, 8, 0), (8, 16, -1), (1, 4, -1), (4, 8, -1), (32, 4, 1), (2, 4, -1)]
)
def test_key_value_heads_are_split_or_copied_as_in_the_large_run(kv_heads: int, tp: int, sign: int) -> None:
    model = small("llama_8b", f"tp={tp}", overrides=(f"--model.n_kv_heads={kv_heads}",)).layouts[0].model
    assert (model.n_kv_heads > tp) - (model.n_kv_heads < tp) == sign
    assert model.n_heads * kv_heads == 32 * model.n_kv_heads
    assert (model.n_kv_heads == 1) == (kv_heads == 1), "copies of one head, or of one of several"


@pytest.mark.parametrize(
    ("layout", "n_large", "shards"),
    [
        ("ep=4,tp=2", 128, 1),
        ("dp_shard=2", 128, 2),
        ("dp_shard=8,ep=2", 128, 4),
        ("ep=8", 8, 1),  # one expert a rank
        ("dp_shard=8,ep=4", 8, 2),  # two experts, of which each shard is one
        ("dp_shard=16,ep=4", 8, 4),  # two experts for four shards, which are parts of experts
    ],
)
def test_a_rank_has_several_experts_where_it_has_in_the_large_run(layout: str, n_large: int, shards: int) -> None:
    overrides = (f"--model.moe.n_experts={n_large}", "--model.moe.top_k=2")
    config = small("qwen3_30b_a3b", layout, overrides=overrides).layouts[0]
    n, ep = config.model.moe.n_experts, config.parallelism.ep
    world = fixed_world_size(config.parallelism)
    assert world and resolve_layout(config.parallelism, world).efsdp == shards
    assert (n // ep > 1) == (n_large // ep > 1) and (n // ep > shards) == (n_large // ep > shards)
    assert n <= 16


def test_an_ep_that_is_named_alone_has_the_ranks_it_needs() -> None:
    _, asked = read_layouts("qwen3_30b_a3b", (), ["ep=4,tp=2", "ep=4", "ep=2,tp=2", "ep=8,cp=2,pp=2", "tp=2"])
    assert [one.case.degrees["dp_shard"] for one in asked] == [2, 4, 1, 4, 1]
    with pytest.raises(InputError, match="a divisor of dp_shard x cp x tp = 6"):
        read_layouts("qwen3_30b_a3b", (), ["ep=4,dp_shard=6"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_are_as_many_and_of_unequal_layers(schedule: str) -> None:
    config = small("llama_8b", f"pp=4,pp_schedule={schedule}").layouts[0]
    plan = plan_pipeline(config.model, config.parallelism)
    assert plan is not None
    per_rank = 1 if schedule in ("GPipe", "1F1B") else 2
    assert len(plan.layers) == 4 * per_rank
    assert max(map(len, plan.layers)) > 1 and len(plan.stages_of(0)) == per_rank


def test_stages_that_are_spelt_out_keep_their_shape() -> None:
    layers = "pp=2,pp_layers_per_stage=[10,22]"
    config = small("llama_8b", layers, "pp=4,pp_layers_per_stage=[1,1,29,1]").layouts
    assert config[0].parallelism.pp_layers_per_stage[0] < config[0].parallelism.pp_layers_per_stage[1]
    assert config[1].parallelism.pp_layers_per_stage[2] == max(config[1].parallelism.pp_layers_per_stage) > 1
    inherited = small("llama_8b", "pp=2", overrides=("--parallelism.pp=2", "--parallelism.pp_layers_per_stage=[9,23]"))
    assert len(inherited.layouts[0].parallelism.pp_layers_per_stage) == 2
    other = small("llama_8b", "pp=4", overrides=("--parallelism.pp=2", "--parallelism.pp_layers_per_stage=[9,23]"))
    assert other.layouts[0].parallelism.pp_layers_per_stage == ()


@pytest.mark.parametrize(
    ("layout", "accumulates", "microbatches", "rows"),
    [
        ("dp_shard=2,training.local_batch_size=64", False, 1, 2),
        ("dp_shard=2,training.local_batch_size=8", True, 1, 2),
        ("dp_shard=2,training.local_batch_size=1", True, 1, 1),
        ("pp=2,training.local_batch_size=2", True, 2, 1),
        ("pp=2,training.local_batch_size=8", True, 3, 1),
        ("pp=2,training.local_batch_size=128", False, 3, 1),
        ("pp=2,pp_microbatches=4,training.local_batch_size=16", True, 3, 2),
    ],
)
def test_a_step_is_divided_as_in_the_large_run(layout: str, accumulates: bool, microbatches: int, rows: int) -> None:
    """microbatches and rows: at least so many, where there is more than one."""
    config = small("llama_8b", layout).layouts[0]
    world = fixed_world_size(config.parallelism)
    assert world
    pipeline = plan_pipeline(config.model, config.parallelism)
    plan = plan_batch(config.training, resolve_layout(config.parallelism, world), pipeline)
    assert plan.local_batch_size == config.training.local_batch_size
    assert (plan.accumulation_steps > 1) == accumulates
    assert plan.microbatches >= microbatches and (microbatches > 2 or plan.microbatches == microbatches)
    assert (plan.local_batch_size // plan.microbatches > 1) == (rows > 1)


def test_a_local_batch_that_no_pipeline_could_take_is_noted() -> None:
    _, (asked,) = read_layouts("llama_8b", (), ["pp=2"])
    assert "training.local_batch_size = 1 would be refused" in asked.notes[0]
    assert small("llama_8b", "pp=2").layouts[0].training.local_batch_size > 2


@pytest.mark.parametrize("option", ["op", "1", "2", "16", "32"])
@pytest.mark.parametrize("mode", ["selective", "none"])
def test_every_nth_block_is_recomputed_in_fewer_layers_too(mode: str, option: str) -> None:
    overrides = (f"--activation_checkpoint.mode={mode}", f"--activation_checkpoint.selective_ac_option={option}")
    config = small("llama_8b", "pp=2", overrides=overrides).layouts[0]
    n_layers, section = config.model.n_layers, config.activation_checkpoint
    recomputed = [section.of_layer(index) for index in range(n_layers)]
    if mode == "none" or option == "op":
        assert recomputed == [option if mode == "selective" else "none"] * n_layers
    else:
        assert "full" in recomputed and ("none" in recomputed) == (option != "1")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"dp_shard": 2}),
        (("tp=8", "pp=4", "cp=2", "dp_replicate=2"), {"pp": 2, "tp": 2, "cp": 2}),
        (("tp=8", "dp_replicate=4", "dp_shard=4"), {"tp": 2, "dp_shard": 2, "dp_replicate": 2}),
        (("dp_replicate=4", "dp_shard=1"), {"dp_replicate": 2}),
    ],
)
def test_auto_scales_the_own_layout_down(overrides: tuple[str, ...], expected: dict[str, int]) -> None:
    _, (asked,) = read_layouts(
        "llama_8b", [f"--parallelism.{text}" for text in overrides] + ["--training.local_batch_size=8"], [AUTO]
    )
    assert {name: degree for name, degree in asked.case.degrees.items() if degree > 1} == expected
    config = shrink([asked.case], steps=1, folder=FOLDER).layouts[0]
    world = fixed_world_size(config.parallelism)
    assert world and world <= MOST_AUTO_PROCESSES
    assert all(getattr(config.parallelism, name) == expected.get(name, 1) for name in asked.case.degrees)
    dropped = [text for text in overrides if text.split("=")[0] not in expected and not text.endswith("=1")]
    assert all(f"{name} = {value}" in asked.notes[0] for name, value in (text.split("=") for text in dropped))


def test_auto_keeps_copied_key_value_heads_copied() -> None:
    overrides = ("--parallelism.tp=16", "--parallelism.dp_shard=2")
    config = small("llama_8b", AUTO, overrides=overrides).layouts[0]
    assert config.parallelism.tp == 2 and config.model.n_kv_heads == 1


def test_auto_divides_experts_where_the_run_does() -> None:
    config = small("qwen3_30b_a3b", AUTO).layouts[0]
    assert config.parallelism.ep == config.parallelism.dp_shard == 2 and config.model.moe.n_experts // 2 > 1


@pytest.mark.parametrize("name", SHIPPED)
def test_auto_fits_every_run(name: str) -> None:
    assert small(name, AUTO).layouts


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp", ["--layout", '"tp"', "tp=2,pp=2"]),
        ("tp=", ["--layout", '"tp="']),
        ("tp=two", ["parallelism.tp", "two"]),
        ("tq=2", ["did you mean tp?"]),
        ("tp=2,tp=4", ['"tp=2,tp=4"', "tp once"]),
        ("tp=2,parallelism.tp=2", ["parallelism.tp once"]),
        ("model.dim=8", ["what may change no result"]),
        ("dp_shard=-1", ["parallelism.dp_shard", "an integer > 0", "dp_shard=2"]),
        ("tp=64", ["n_heads = 32", "--layout tp=64"]),
        ("dp_shard=64", ["64 processes", "at most 32"]),
        ("dp_shard=3", ["global_batch_size"]),
        ("pp=33", ["parallelism.pp"]),
        ("cp=2,data.document_mask=true", ["what may change no result"]),
    ],
)
def test_what_no_run_could_be_is_refused(layout: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        read_layouts("llama_8b", (), ["dp_shard=2", layout])
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_layouts_problems_come_at_once() -> None:
    with pytest.raises(InputError) as caught:
        read_layouts("llama_8b", (), ["tp=64", "pp=64", "tq=1"])
    assert len({problem.key for problem in caught.value.problems}) >= 3


def test_one_process_has_no_layout_of_its_own() -> None:
    with pytest.raises(InputError, match="one process"):
        read_layouts("llama_8b", ["--parallelism.dp_shard=1"], [AUTO])


def test_v_schedules_are_where_they_are_said_to_be() -> None:
    assert set(V_SHAPED) < set(SCHEDULES)
