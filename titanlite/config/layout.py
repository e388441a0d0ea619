"""Parallel degrees -> mesh shapes, pipeline stages, a rank's share of a step, parameter counts: the one source for
check and meshes.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig, ParallelismConfig, TrainingConfig

MOST_RANKS = 2**17  # checks go through all ranks' pieces of a dimension


@dataclass(frozen=True)
class Layout:
    """How the ranks of one world are arranged. All six degrees are positive, and their product is the world.

    (ep is no factor of its own: experts are spread over the ranks of dp_shard, cp and tp.)
    """

    world_size: int
    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int
    cp: int
    ep: int

    def __post_init__(self) -> None:
        assert self.world_size == self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp
        assert (self.dp_shard * self.cp * self.tp) % self.ep == 0

    @property
    def batch(self) -> int:
        """Parts into which a step's samples are split."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which a dense parameter is sharded."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which an expert's parameters are sharded."""
        return self.fsdp * self.tp // self.ep

    @property
    def data_shape(self) -> dict[str, int]:
        """Who has which samples and which part of their sequence; outermost axis first, as in all three views."""
        return {"pp": self.pp, "batch": self.batch, "cp": self.cp, "tp": self.tp}

    @property
    def dense_shape(self) -> dict[str, int]:
        """Who holds which part of the dense parameters."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "fsdp": self.fsdp, "tp": self.tp}

    @property
    def sparse_shape(self) -> dict[str, int]:
        """Who holds which part of the experts."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "efsdp": self.efsdp, "ep": self.ep}

    @property
    def uses_ddp(self) -> bool:
        """Whole replicas and nothing else."""
        return self.dp_replicate > 1 and self.world_size == self.dp_replicate


def fixed_world_size(parallelism: ParallelismConfig) -> int | None:
    """The number of ranks that the degrees ask for, or None when dp_shard = -1 takes what is left of any world."""
    if parallelism.dp_shard == -1:
        return None
    return _fixed_degrees(parallelism) * parallelism.dp_shard


def fewest_processes(parallelism: ParallelismConfig) -> int:
    """The smallest world that dp_shard = -1 fits, as it fits every multiple: the other degrees, and ranks for ep."""
    sharing = parallelism.cp * parallelism.tp
    return _fixed_degrees(parallelism) * (parallelism.ep // gcd(parallelism.ep, sharing))


def resolve_layout(parallelism: ParallelismConfig, world_size: int) -> Layout:
    """The layout of these degrees in a world of so many ranks. Raises InputError when they do not fit it."""
    degrees = _fixed_degrees(parallelism)
    dp_shard = parallelism.dp_shard
    if world_size > MOST_RANKS:
        raise InputError(
            Problem("", "parallelism", f"{world_size} processes", f"at most {MOST_RANKS}", "lower a degree")
        )
    if dp_shard == 0:
        fix = "-1 takes what the other degrees leave of the world"
        raise InputError(Problem("", "parallelism.dp_shard", "0", "-1, or an integer > 0", fix))
    if dp_shard == -1:
        if world_size % degrees:
            fix = f"run {_nearest_multiples(world_size, degrees)} processes, or change a degree"
            what = f"{world_size} processes, which dp_replicate x tp x pp x cp = {degrees} does not divide"
            raise InputError(Problem("", "parallelism", what, f"a multiple of {degrees} processes", fix))
        dp_shard = world_size // degrees
    elif degrees * dp_shard != world_size:
        product = degrees * dp_shard
        what = f"{world_size} processes for dp_replicate x dp_shard x tp x pp x cp = {product}"
        fix = f"run {product} processes, or set parallelism.dp_shard = -1"
        raise InputError(Problem("", "parallelism", what, f"{product} processes", fix))
    expert_ranks = dp_shard * parallelism.cp * parallelism.tp
    if expert_ranks % parallelism.ep:
        allowed = f"a divisor of dp_shard x cp x tp = {expert_ranks}"
        fix = f"make that a multiple of {parallelism.ep}, as with more processes, or lower ep"
        raise InputError(Problem("", "parallelism.ep", str(parallelism.ep), allowed, fix))
    return Layout(
        world_size,
        dp_replicate=parallelism.dp_replicate,
        dp_shard=dp_shard,
        tp=parallelism.tp,
        pp=parallelism.pp,
        cp=parallelism.cp,
        ep=parallelism.ep,
    )


def resolve_zero_stage(parallelism: ParallelismConfig, layout: Layout) -> int:
    """The ZeRO stage in force: "auto" is 3, or 1 under a pipeline, which reduces once a step anyway."""
    if parallelism.zero_stage != "auto":
        return parallelism.zero_stage
    return 3 if layout.pp == 1 else 1


# Schedules by what they ask for. Looped: stage s is on rank s % pp. V: rank r has the stages r and 2 pp - 1 - r.
SINGLE_STAGE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Backward in two parts, for inputs and for weights. FSDP must keep parameters gathered between them (zero_stage 1), and
# torch.compile cannot cut a graph there.
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of a pipeline: the global layers of each, in order, and how they are spread over pp ranks.

    microbatches: of one schedule run; 0: as many as a run has samples.
    """

    schedule: str
    pp: int
    layers: tuple[range, ...]
    microbatches: int

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on one rank of the pp axis, ascending."""
        if self.schedule in V_SHAPED:
            return (rank, 2 * self.pp - 1 - rank)
        return tuple(range(rank, len(self.layers), self.pp))

    def rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self.pp) if stage in self.stages_of(rank))

    def accepts(self, microbatches: int) -> bool:
        """Whether torch's schedule can run so many microbatches."""
        if self.schedule in ("1F1B", "DualPipeV"):
            return microbatches >= len(self.layers)
        if self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
            return microbatches % max(1, microbatches // self.pp) == 0
        return True

    @property
    def limit(self) -> str:
        """`accepts` in words."""
        if self.schedule in ("1F1B", "DualPipeV"):
            return f"at least as many microbatches as stages, {len(self.layers)}, for {self.schedule}"
        return f"for {self.schedule} a number of microbatches that microbatches // pp (pp = {self.pp}) divides"

    def ideal_bubble(self, microbatches: int) -> float:
        """Share of a run in which a rank idles if all stages cost the same and sending costs nothing.

        With v stages a rank and M >= K: (K - 1) / (v M + K - 1), Narayanan et al. 2021; with fewer microbatches a rank
        also waits for the first to come around, before each of its stages but the first. A backward in two parts fills
        idle time with the gradients of weights: (K - 1) / (3 v M + K - 1) where these cost as much as forward, from
        M >= K microbatches on (Qi et al. 2023, ZB-H1), in a V from 2 K on; with fewer a rank idles longer than that.
        """
        K, M = self.pp, microbatches
        v = len(self.layers) // K
        if self.schedule in SPLIT_BACKWARD:
            return (K - 1) / (3 * v * M + K - 1)
        span = M + K - 1 + (v - 1) * max(M, K)
        return (span - v * M) / span


def plan_pipeline(model: ModelConfig, parallelism: ParallelismConfig) -> PipelinePlan | None:
    """The stages that these sections ask for; None without a pipeline. Raises InputError when they cannot be."""
    pp, schedule, counts = parallelism.pp, parallelism.pp_schedule, parallelism.pp_layers_per_stage
    if pp == 1:
        return None
    least = 2 if schedule in V_SHAPED else 1
    if counts:
        _check_layers_per_stage(model, schedule, pp, counts)
    elif model.n_layers < least * pp:
        per_rank = f" ({schedule} has two stages a rank)" if least == 2 else ""
        allowed = f"at most {model.n_layers // least}, as every stage has a layer{per_rank}"
        fix = f"model.n_layers = {model.n_layers}: lower pp, raise n_layers" + (
            ", or use a schedule of one stage a rank" if least == 2 and model.n_layers >= pp else ""
        )
        raise InputError(Problem("", "parallelism.pp", str(pp), allowed, fix))
    else:
        # Virtual stages make the bubble smaller: two a rank where the layers suffice.
        n_stages = pp if schedule in SINGLE_STAGE or model.n_layers < 2 * pp else 2 * pp
        counts = balanced_layers(model, n_stages)
    starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    layers = tuple(range(a, b) for a, b in pairwise(starts))
    return PipelinePlan(schedule, pp, layers, parallelism.pp_microbatches)


def _check_layers_per_stage(model: ModelConfig, schedule: str, pp: int, counts: tuple[int, ...]) -> None:
    key, got = "parallelism.pp_layers_per_stage", str(list(counts))
    if schedule in LOOPED:
        fits, wanted = len(counts) % pp == 0, f"a multiple of pp = {pp} numbers"
    else:
        n_stages = 2 * pp if schedule in V_SHAPED else pp
        fits, wanted = len(counts) == n_stages, f"{n_stages} numbers, the stages of {schedule} at pp = {pp}"
    if not fits:
        fix = "give one number for every stage, or remove the key for a balanced split"
        raise InputError(Problem("", key, f"{len(counts)} numbers", wanted, fix))
    if sum(counts) != model.n_layers:
        allowed = f"numbers whose sum is model.n_layers = {model.n_layers} (got {sum(counts)})"
        raise InputError(Problem("", key, got, allowed, "remove the key for a balanced split"))


@cache
def balanced_layers(model: ModelConfig, n_stages: int) -> tuple[int, ...]:
    """Layers of each stage, at least one, so that the most expensive stage costs as little as can be; then the second.

    A cost is the numbers a token is multiplied with: a layer's matrices (of its experts, those that a token uses), the
    output's on the last stage, and the row of the embedding that is read on the first. Of equal splits the one with
    fewer layers in earlier stages is taken: these keep more microbatches.
    """
    spent = [0]  # by the layers up to each
    for index in range(model.n_layers):
        spent.append(spent[-1] + _layer_matmul(model, index))
    output = model.padded_vocab_size * model.dim
    # best[n]: the first n layers in the stages so far, as (costs, highest first; layers of each stage)
    best: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {0: ((), ())}
    for stage in range(n_stages):
        last = stage == n_stages - 1
        extra = (model.dim if stage == 0 else 0) + (output if last else 0)
        ends = [model.n_layers] if last else range(stage + 1, model.n_layers - (n_stages - 1 - stage) + 1)
        best = {
            end: min(
                (tuple(sorted((*costs, spent[end] - spent[start] + extra), reverse=True)), (*counts, end - start))
                for start, (costs, counts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[model.n_layers][1]


@dataclass(frozen=True)
class BatchPlan:
    """What one rank does of an optimizer step: accumulation_steps forward passes of local_batch_size samples.

    Under a pipeline a pass is a run of the schedule, in so many microbatches.
    """

    rank_samples: int
    local_batch_size: int
    accumulation_steps: int
    microbatches: int = 1


def plan_batch(training: TrainingConfig, layout: Layout, pipeline: PipelinePlan | None = None) -> BatchPlan:
    """A rank's share, in passes of its largest divisor not above training.local_batch_size (that the pipeline can do).

    Raises InputError when the samples of a step cannot be split evenly, or not into microbatches of the pipeline.
    """
    total = training.global_batch_size
    if total % layout.batch:
        parts = [n for n in divisors(total) if n != layout.batch]
        fix = (
            f"set it to {_nearest_multiples(total, layout.batch)}, "
            f"or change dp_replicate x dp_shard to {_or_nearest(parts, layout.batch)}"
        )
        allowed = f"a multiple of dp_replicate x dp_shard = {layout.batch}, so that every rank has a whole share"
        raise InputError(Problem("", "training.global_batch_size", str(total), allowed, fix))
    share = total // layout.batch
    if pipeline is None:
        local, microbatches = max(n for n in divisors(share) if n <= training.local_batch_size), 1
    else:
        local, microbatches = _schedule_run(training, pipeline, share)
    return BatchPlan(share, local, share // local, microbatches)


def _schedule_run(training: TrainingConfig, pipeline: PipelinePlan, share: int) -> tuple[int, int]:
    """Samples and microbatches of one schedule run: the most samples that fit. Raises InputError when none do."""
    count, most = pipeline.microbatches, training.local_batch_size
    key = "parallelism.pp_microbatches"
    if count and not pipeline.accepts(count):
        fix = "change it, or remove it: microbatches are then single samples"
        raise InputError(Problem("", key, str(count), pipeline.limit, fix))
    if count and share % count:
        possible = _or_nearest([n for n in divisors(share) if pipeline.accepts(n)], count)
        fix = f"set it to {possible}, or change" if possible else "change it or"
        fix += " training.global_batch_size"
        raise InputError(Problem("", key, str(count), f"a divisor of a rank's {share} samples of a step", fix))
    fitting = [n for n in divisors(share) if (n % count == 0 if count else pipeline.accepts(n))]
    if not fitting:
        got = str(training.global_batch_size)
        allowed = f"{pipeline.limit}; a rank has {share} samples of a step"
        fix = "raise it, lower dp_replicate x dp_shard or pp, or use pp_schedule GPipe, which takes any number"
        raise InputError(Problem("", "training.global_batch_size", got, allowed, fix))
    local = max((n for n in fitting if n <= most), default=0)
    if not local:
        what = f"a schedule run of {count} microbatches" if count else f"what {pipeline.schedule} needs"
        allowed = f"{fitting[0]} or more: samples of {what}"
        if not count:
            allowed += f" ({pipeline.limit})"
        fix = f"set it to {fitting[0]} or more" + (", or use pp_schedule GPipe" if not count else "")
        raise InputError(Problem("", "training.local_batch_size", str(most), allowed, fix))
    return local, count or local


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model, without the padding of its vocabulary. A tied output counts in matmul only.

    active: those that take part for one token: all but the experts that it does not go through.
    matmul: active ones that a token is multiplied with (the output also when tied; no embedding lookup, no norms).
    """

    total: int
    active: int
    embedding: int
    output: int
    matmul: int
    norms: int


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    head_dim, moe = model.resolved_head_dim, model.moe
    norms = model.n_layers * (2 * model.dim + (2 * head_dim if model.qk_norm else 0)) + model.dim
    embedding = model.vocab_size * model.dim
    output = 0 if model.tie_word_embeddings else embedding
    layers = sum(_layer_matmul(model, index) for index in range(model.n_layers))
    moe_layers = sum(model.is_moe_layer(index) for index in range(model.n_layers))
    idle = moe_layers * (moe.n_experts - moe.top_k) * 3 * model.dim * moe.expert_dim
    active = layers + norms + embedding + output
    return ParameterCounts(active + idle, active, embedding, output, layers + embedding, norms)


def _layer_matmul(model: ModelConfig, index: int) -> int:
    """Parameters of a layer that a token is multiplied with."""
    moe = model.moe
    attention = 2 * model.dim * model.resolved_head_dim * (model.n_heads + model.n_kv_heads)
    if not model.is_moe_layer(index):
        return attention + 3 * model.dim * model.ffn_dim
    experts = 3 * model.dim * moe.expert_dim * (moe.top_k + moe.n_shared_experts)
    return attention + model.dim * moe.n_experts + experts


def shards_are_found(size: int, tp: int, fsdp: int) -> bool:
    """Whether torch (2.13) knows where the pieces of a dimension are that is cut over tp and each part over fsdp.

    For the place of a piece, in initial weights and checkpoints, it adds up the pieces that one fsdp coordinate has of
    all tp parts and cuts that sum over tp again. That can come out otherwise when a tp part is shorter than the others.
    """
    pieces = [_cut(part, fsdp) for part in _cut(size, tp)]
    return all(list(mine) == _cut(sum(mine), tp) for mine in zip(*pieces, strict=True))


def _cut(size: int, parts: int) -> list[int]:
    """Sizes of the parts as torch.chunk makes them, those it leaves out as 0."""
    most = -(-size // parts)
    return [max(0, min(most, size - i * most)) for i in range(parts)]


def divisors(n: int) -> list[int]:
    """All divisors of n > 0, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _fixed_degrees(parallelism: ParallelismConfig) -> int:
    return parallelism.dp_replicate * parallelism.tp * parallelism.pp * parallelism.cp


def _nearest_multiples(n: int, step: int) -> str:
    below, above = n // step * step, -(-n // step) * step
    return f"{below} or {above}" if below else str(above)


def _or_nearest(values: list[int], n: int) -> str:
    """The values next to n on both sides, as "a or b"."""
    below = [value for value in values if value < n][-1:]
    above = [value for value in values if value > n][:1]
    return " or ".join(str(value) for value in below + above)
