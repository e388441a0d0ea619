"""Parallel degrees -> mesh shapes, a rank's share of a step, parameter counts: the one source for check and meshes.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig, ParallelismConfig, TrainingConfig


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
        return self.dp_replicate > 1 and self.world_size == self.dp_replicate and self.ep == 1


def fixed_world_size(parallelism: ParallelismConfig) -> int | None:
    """The number of ranks that the degrees ask for, or None when dp_shard = -1 takes what is left of any world."""
    if parallelism.dp_shard == -1:
        return None
    return _fixed_degrees(parallelism) * parallelism.dp_shard


def resolve_layout(parallelism: ParallelismConfig, world_size: int) -> Layout:
    """The layout of these degrees in a world of so many ranks. Raises InputError when they do not fit it."""
    degrees = _fixed_degrees(parallelism)
    dp_shard = parallelism.dp_shard
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
        fix = f"the nearest are {_or_nearest(divisors(expert_ranks), parallelism.ep)}"
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


@dataclass(frozen=True)
class BatchPlan:
    """What one rank does of an optimizer step: accumulation_steps forward passes of local_batch_size samples."""

    rank_samples: int
    local_batch_size: int
    accumulation_steps: int


def plan_batch(training: TrainingConfig, layout: Layout) -> BatchPlan:
    """A rank's share, in passes of its largest divisor not above training.local_batch_size.

    Raises InputError when the samples of a step cannot be split evenly.
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
    local = max(n for n in divisors(share) if n <= training.local_batch_size)
    return BatchPlan(share, local, share // local)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model, without the padding of its vocabulary. A tied output counts in matmul only.

    matmul: parameters that a token is multiplied with (the output also when tied; no embedding lookup, no norms).
    """

    total: int
    embedding: int
    output: int
    matmul: int
    norms: int


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    head_dim = model.resolved_head_dim
    attention = model.dim * head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    mlp = 3 * model.dim * model.ffn_dim
    norms = model.n_layers * (2 * model.dim + (2 * head_dim if model.qk_norm else 0)) + model.dim
    embedding = model.vocab_size * model.dim
    output = 0 if model.tie_word_embeddings else embedding
    layers = model.n_layers * (attention + mlp)
    return ParameterCounts(layers + norms + embedding + output, embedding, output, layers + embedding, norms)


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
