"""A run made small enough to train on a CPU in seconds, that still does all that the run does. Torch-free.

Sizes become the smallest for which what depends on them stays as it is: which ranks have a part, whether parts are
equal, whether key/value heads are split or copied, whether stages have several layers, whether a step is accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from titanlite.config.check import static_problems
from titanlite.config.layout import (
    BatchPlan,
    Layout,
    PipelinePlan,
    divisors,
    fixed_world_size,
    plan_batch,
    plan_pipeline,
    resolve_layout,
    shards_are_found,
)
from titanlite.config.load import Loaded
from titanlite.config.problems import InputError
from titanlite.config.schema import Config, ModelConfig, ParallelismConfig, TrainingConfig

# Large enough for every kind of part to be there, small enough for all of it to take seconds.
DIM, FFN_DIM, EXPERT_DIM, HEAD_DIM, VOCAB_SIZE, VOCAB_PAD, SEQ_LEN, SAMPLES = 32, 48, 16, 8, 192, 8, 32, 6
CHUNK_TOKENS = 12  # of the loss: several chunks even on a rank that has a part of a short sequence
MAX_NORM = 0.1  # clips every step
ONE_PROCESS = ParallelismConfig(dp_shard=1)

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A layout to be verified.

    config:  the run under it; all its degrees are positive
    degrees: those of the small run, by their keys in [parallelism]; the same as the config's, or scaled down
    """

    config: Config
    degrees: Mapping[str, int]

    @property
    def layout(self) -> Layout:
        return _layout(self.config.parallelism)

    @property
    def small_layout(self) -> Layout:
        return _layout(self.parallelism())

    def parallelism(self, **changes: Any) -> ParallelismConfig:
        """The section of the small run; stages that were spelt out must still be made to fit (pp_layers_per_stage)."""
        return self.config.parallelism.model_copy(update={**self.degrees, "pp_layers_per_stage": (), **changes})


@dataclass(frozen=True)
class SmallRuns:
    """What is trained: the same run in one process, without accumulation or recomputation, and under each layout."""

    reference: Config
    layouts: tuple[Config, ...]


def shrink(cases: Sequence[Case], *, steps: int, folder: Path) -> SmallRuns:
    """Small runs of so many steps. The cases differ only in what promise 1 says has no influence.

    folder: where tokens will be (verify/tokens.py), and run folders.
    """
    config = cases[0].config
    model = _shrink_model(config.model, cases)
    parallelism = [_small_parallelism(model, case) for case in cases]
    seq_len = _seq_len(config.training.seq_len, cases)
    global_batch_size, batches = _batches(model, cases, parallelism)
    scale = model.init_std / config.model.init_std
    original_length = config.model.rope_scaling.original_max_position_embeddings
    shared: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu", "deterministic": True, "seed": config.run.seed},
        "model": {
            **model.model_dump(),
            "rope_scaling": {
                **config.model.rope_scaling.model_dump(),
                "original_max_position_embeddings": max(1, round(original_length * seq_len / config.training.seq_len)),
            },
        },
        "tokenizer": {
            "path": str(folder / "tokenizer.model"),
            "add_bos": config.tokenizer.add_bos,
            "add_eos": config.tokenizer.add_eos,
        },
        "data": {
            "document_mask": config.data.document_mask,
            "cache_dir": str(folder / "cache"),
            "sources": [
                {
                    "path": str(folder / f"source-{number}"),
                    "weight": source.weight,
                    "validation_path": str(folder / f"held-out-{number}") if config.validation.enable else "",
                }
                for number, source in enumerate(config.data.sources)
            ],
        },
        "training": {
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "local_batch_size": global_batch_size,
            "steps": steps,
            "max_norm": min(config.training.max_norm, MAX_NORM),
            "mixed_precision_param": "float32",
            "mixed_precision_reduce": "float32",
            "loss_chunk_tokens": min(config.training.loss_chunk_tokens, CHUNK_TOKENS),
        },
        # A weight moves by about the learning rate: as a share of its size, by as much as in the large run.
        "optimizer": {**config.optimizer.model_dump(), "lr": config.optimizer.lr * scale},
        "lr_scheduler": {
            **config.lr_scheduler.model_dump(),
            "total_steps": steps,
            "warmup_steps": max(1, steps // 4) if config.lr_scheduler.warmup_steps else 0,
        },
        "checkpoint": {"enable": False},
        "validation": {"enable": config.validation.enable, "freq": steps, "samples": 7},
        "metrics": {"log_freq": 2**31, "enable_tensorboard": False, "peak_tflops": 1.0},
        "comm": {"init_timeout_seconds": 120, "train_timeout_seconds": 120},
    }

    def made(name: str, sections: Mapping[str, Mapping[str, Any]]) -> Config:
        merged = {key: {**shared.get(key, {}), **sections.get(key, {})} for key in {**shared, **sections}}
        merged["run"] |= {"name": name, "output_dir": str(folder / "runs")}
        small = Config.model_validate(merged)
        problems = static_problems(Loaded(small, folder / "verify.toml", {}), fixed_world_size(small.parallelism))
        assert not problems, f"a run is shrunk to one that is refused: {problems[0]}"
        return small

    reference = made("one-process", {"parallelism": ONE_PROCESS.model_dump()})
    layouts = [
        made(
            f"layout-{number}",
            {
                "parallelism": {**section.model_dump(), "pp_microbatches": batch.pp_microbatches},
                "training": {"local_batch_size": batch.local_batch_size},
                "activation_checkpoint": case.config.activation_checkpoint.model_dump(),
            },
        )
        for number, (case, section, batch) in enumerate(zip(cases, parallelism, batches, strict=True))
    ]
    return SmallRuns(reference, tuple(layouts))


def _first(candidates: Iterable[T], *wishes: Callable[[T], bool]) -> T:
    """The first candidate that is all that is wished for; if there is none, the last wishes are given up, in turn."""
    choices = list(candidates)
    for n in range(len(wishes), 0, -1):
        for choice in choices:
            if all(wish(choice) for wish in wishes[:n]):
                return choice
    raise AssertionError("no size fits")


def _layout(parallelism: ParallelismConfig) -> Layout:
    world = fixed_world_size(parallelism)
    assert world, "all degrees are known"
    return resolve_layout(parallelism, world)


# --- the model ---


def _shrink_model(model: ModelConfig, cases: Sequence[Case]) -> ModelConfig:
    kv_heads = _kv_heads(model, cases)
    moe = _shrink_experts(model, cases)
    first_k_dense = moe["first_k_dense"] if moe else 0
    pad = _first(divisors(model.vocab_pad_multiple), lambda n: n >= min(VOCAB_PAD, model.vocab_pad_multiple))
    padded = _narrow(model.padded_vocab_size, max(VOCAB_SIZE, pad), cases, step=pad)
    rows_of_padding = model.padded_vocab_size - model.vocab_size
    dim = _narrow(model.dim, DIM, cases)
    small: dict[str, Any] = {
        "vocab_size": padded - min(rows_of_padding, max(1, pad // 2)) if rows_of_padding else padded,
        "vocab_pad_multiple": pad,
        "dim": dim,
        "n_kv_heads": kv_heads,
        "n_heads": kv_heads * (model.n_heads // model.n_kv_heads),
        "head_dim": min(HEAD_DIM, model.resolved_head_dim),
        "ffn_dim": _narrow(model.ffn_dim, FFN_DIM, cases),
        "n_layers": _n_layers(model, first_k_dense, cases),
        # So that what a matrix makes of its input is as large as in the wide model.
        "init_std": model.init_std * math.sqrt(model.dim / dim),
    }
    if moe:
        small["moe"] = moe
    return ModelConfig.model_validate({**model.model_dump(), **small})


def _kv_heads(model: ModelConfig, cases: Sequence[Case]) -> int:
    group = model.n_heads // model.n_kv_heads

    def legal(n: int) -> bool:
        tps = [case.small_layout.tp for case in cases]
        return all(n * group % tp == 0 and (n % tp == 0 or tp % n == 0) for tp in tps)

    def same_share(n: int) -> bool:
        """Several heads a rank, one, or one that several ranks have."""

        def sign(heads: int, tp: int) -> int:
            return (heads > tp) - (heads < tp)

        return all(sign(n, case.small_layout.tp) == sign(model.n_kv_heads, case.layout.tp) for case in cases)

    return _first(range(1, model.n_kv_heads + 1), legal, same_share, lambda n: (n == 1) == (model.n_kv_heads == 1))


def _narrow(size: int, least: int, cases: Sequence[Case], *, step: int = 1) -> int:
    """A smaller size, a multiple of step, whose parts over tp and fsdp are equal where those of `size` are."""

    def legal(n: int) -> bool:
        return all(_has_parts(n, layout.tp, layout.fsdp) for layout in (case.small_layout for case in cases))

    def cuts(layout: Layout) -> tuple[int, ...]:
        return layout.tp, layout.fsdp, layout.tp * layout.fsdp, layout.efsdp

    pairs = {pair for case in cases for pair in zip(cuts(case.layout), cuts(case.small_layout), strict=True)}
    pairs.add((8, 8))  # what kernels like, and grouped matmuls need

    def as_even(n: int) -> bool:
        return all((n % small == 0) == (size % large == 0) for large, small in pairs)

    def no_less_even(n: int) -> bool:
        return all(n % small == 0 for large, small in pairs if size % large == 0)

    start = -(-min(least, size) // step) * step
    return _first(range(start, size + 1, step), legal, no_less_even, as_even)


def _has_parts(size: int, tp: int, fsdp: int) -> bool:
    return (tp - 1) * -(-size // tp) < size and shards_are_found(size, tp, fsdp)


def _shrink_experts(model: ModelConfig, cases: Sequence[Case]) -> dict[str, Any]:
    """[model.moe] of the small run; {} for a model without experts."""
    moe = getattr(model, "moe", None)
    if moe is None or moe.n_experts == 0:
        return {}
    top_k = min(moe.top_k, 2)
    layouts = [(case.layout, case.small_layout) for case in cases]

    def cut(n: int, layout: Layout) -> tuple[bool, bool]:
        """Whether every rank has whole experts, and as many, when they are also sharded over efsdp."""
        local = n // layout.ep
        return n % layout.ep == 0, local % layout.efsdp == 0

    def legal(n: int) -> bool:
        return n >= top_k and all(n % small.ep == 0 for _, small in layouts)

    def as_many_chosen(n: int) -> bool:
        return (n == top_k) == (moe.n_experts == moe.top_k)

    def same_cut(n: int) -> bool:
        return all(cut(n, small) == cut(moe.n_experts, large) for large, small in layouts)

    return {
        **moe.model_dump(),
        "n_experts": _first(
            range(min(4, moe.n_experts), moe.n_experts + 1),
            legal,
            as_many_chosen,
            same_cut,
        ),
        "top_k": top_k,
        "expert_dim": _narrow(moe.expert_dim, EXPERT_DIM, cases),
        "n_shared_experts": min(moe.n_shared_experts, 2),
        "first_k_dense": min(moe.first_k_dense, 1),
    }


def _n_layers(model: ModelConfig, first_k_dense: int, cases: Sequence[Case]) -> int:
    """Layers with as many stages a rank as the model has, of several layers if they are, and of both kinds."""
    moe = getattr(model, "moe", None)
    wanted = min(model.n_layers, 2 + first_k_dense)

    def plan(n: int, case: Case, parallelism: ParallelismConfig) -> PipelinePlan | None:
        small = {"n_layers": n, **({"moe": moe.model_copy(update={"first_k_dense": first_k_dense})} if moe else {})}
        return plan_pipeline(model.model_copy(update=small), parallelism)

    def legal(n: int) -> bool:
        try:
            for case in cases:
                plan(n, case, case.parallelism())
        except InputError:
            return False
        return n > first_k_dense and all(n >= len(_stage_shape(case)) for case in cases)

    def same_stages(n: int) -> bool:
        for case in cases:
            large, small = plan_pipeline(model, case.config.parallelism), plan(n, case, case.parallelism())
            if large is None or small is None:
                continue
            n_stages = len(_stage_shape(case)) or len(small.layers)
            if len(large.layers) * small.pp != n_stages * large.pp:
                return False
            if (n > n_stages) != (model.n_layers > len(large.layers)):
                return False
        return n >= wanted

    return _first(range(1, model.n_layers + 1), legal, same_stages)


# --- the layout ---


def _stage_shape(case: Case) -> tuple[int, ...]:
    """pp_layers_per_stage of the config, for as many stages a rank over the ranks of the small run; () if it has none.

    Their sum is still the large model's.
    """
    counts, pp = case.config.parallelism.pp_layers_per_stage, case.config.parallelism.pp
    small_pp = case.degrees["pp"]
    if not counts or small_pp == 1:
        return ()
    n_stages = len(counts) // pp * small_pp
    return tuple(counts[index * len(counts) // n_stages] for index in range(n_stages))


def _small_parallelism(model: ModelConfig, case: Case) -> ParallelismConfig:
    shape = _stage_shape(case)
    if not shape:
        return case.parallelism()
    # Every stage has one layer; the others go where the large model has most for each that is there.
    counts = [1] * len(shape)
    for _ in range(model.n_layers - len(shape)):
        counts[max(range(len(shape)), key=lambda stage: (shape[stage] / counts[stage], stage))] += 1
    return case.parallelism(pp_layers_per_stage=tuple(counts))


# --- the batch ---


@dataclass(frozen=True)
class Batch:
    """What a layout says of a step's samples."""

    local_batch_size: int
    pp_microbatches: int


def _seq_len(seq_len: int, cases: Sequence[Case]) -> int:
    """A multiple of what every layout cuts a sequence into."""
    layouts = [case.small_layout for case in cases]
    step = math.lcm(*((2 * layout.cp if layout.cp > 1 else 1) * layout.tp for layout in layouts))
    return -(-min(SEQ_LEN, seq_len) // step) * step


def _batches(
    model: ModelConfig, cases: Sequence[Case], parallelism: Sequence[ParallelismConfig]
) -> tuple[int, list[Batch]]:
    """Samples of a step for all layouts, and how each takes its share."""
    training = cases[0].config.training
    step = math.lcm(*(case.small_layout.batch for case in cases))

    def fits(total: int, *, alike: bool) -> list[Batch]:
        """A batch of each layout; shorter when there is none for one of them."""
        found = []
        for case, section in zip(cases, parallelism, strict=True):
            batch = _batch(total, model, case, section, alike=alike)
            if batch is None:
                break
            found.append(batch)
        return found

    most = max(training.global_batch_size, SAMPLES)
    for alike in (True, False):
        for total in range(-(-min(SAMPLES, most) // step) * step, most + step, step):
            found = fits(total, alike=alike)
            if len(found) == len(cases):
                return total, found
    raise AssertionError("no number of samples fits")


def _batch(total: int, model: ModelConfig, case: Case, section: ParallelismConfig, *, alike: bool) -> Batch | None:
    """How a layout takes its share of a small step. alike: accumulated, and cut into microbatches, as the large one."""
    large_pipeline = plan_pipeline(case.config.model, case.config.parallelism)
    large = _kind(large_batch(case.config.training, case.layout, large_pipeline), large_pipeline)
    pipeline, layout = plan_pipeline(model, section), case.small_layout
    share = total // layout.batch
    for local in divisors(share):
        for count in divisors(local) if section.pp_microbatches and pipeline else [0]:
            training = case.config.training.model_copy(update={"global_batch_size": total, "local_batch_size": local})
            pipeline = plan_pipeline(model, section.model_copy(update={"pp_microbatches": count}))
            try:
                plan = plan_batch(training, layout, pipeline)
            except InputError:
                continue
            if plan.local_batch_size == local and (not alike or _kind(plan, pipeline) == large):
                return Batch(local, count)
    return None


def large_batch(training: TrainingConfig, layout: Layout, pipeline: PipelinePlan | None) -> BatchPlan:
    """plan_batch; with the whole share in a run of the schedule when local_batch_size is too small for one."""
    try:
        return plan_batch(training, layout, pipeline)
    except InputError:
        return plan_batch(training.model_copy(update={"local_batch_size": 2**31}), layout, pipeline)


def _kind(plan: BatchPlan, pipeline: PipelinePlan | None) -> tuple[bool, ...]:
    """What of a step's division may be done wrong: accumulation, microbatches, the steady state of a pipeline, rows."""
    stages = len(pipeline.layers) if pipeline else 1
    return (
        plan.accumulation_steps > 1,
        plan.microbatches > 1,
        plan.microbatches > stages,
        plan.local_batch_size > plan.microbatches,
    )
