"""Tensor parallelism with sequence parallelism (Korthikanti et al. 2022): a matrix is split over the tp ranks, the
hidden states between attention and MLP along their sequence.

    embedding   each rank looks up its rows of the table    -> reduce-scatter
    attention   norm on S / tp -> all-gather -> its heads: rows of wq, wk, wv, columns of wo -> reduce-scatter
    MLP         norm on S / tp -> all-gather -> rows of gate and up, columns of down         -> reduce-scatter
    head        norm on S / tp -> all-gather -> loss over its rows of the output, combined by two small all-reduces

Backward is the same from the other side: an all-gather for each reduce-scatter, and the other way round. Parameters
are DTensors on the tp mesh, which fully_shard then also shards; modules work on their local parts. A weight that all
ranks hold whole (norms; wk and wv with fewer heads than ranks) sees one rank's tokens or heads only, so its gradient
is a summand: it is marked Partial, and FSDP sums it over tp before it reduces over its own ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from titanlite.config.schema import ModelConfig
from titanlite.model.attention import Attention
from titanlite.model.layers import MLP, Embedding, Linear, RMSNorm, embed, linear, rms_norm
from titanlite.model.moe import MoE, Router
from titanlite.model.transformer import Block, Head, Transformer
from titanlite.parallel import collectives
from titanlite.parallel.mesh import Meshes

# Of a weight [out, in]: its rows make Megatron's column-parallel layer, its columns the row-parallel one.
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()


def apply_tensor_parallel(model: Transformer, meshes: Meshes, config: ModelConfig) -> None:
    """Split a meta model, or the stage of one, over meshes.tp, in place. Names of parameters stay.

    Before activation checkpointing, compile and FSDP. FSDP is needed also at size 1: it sums the Partial gradients.
    The degree must be one that config/check.py accepts for this model and sequence length.
    """
    mesh = meshes.tp
    group = mesh.get_group()
    model.sequence_parts = mesh.size()
    for block in model.layers.values():
        assert isinstance(block, Block)
        _split_norm(block.attention_norm, mesh)
        _split_attention(block.attention, mesh, config)
        _compute(block.attention, _between_sequence_parts, group)
        _split_norm(block.mlp_norm, mesh)
        if isinstance(block.mlp, MoE):
            _split_moe(block.mlp, mesh, group)
        else:
            _split_mlp(block.mlp, mesh, group)
    if model.norm is not None:
        _split_norm(model.norm, mesh)
    if model.embedding is not None:
        _split(model.embedding, mesh, ROWS)
        _compute(model.embedding, _embed_own_rows, _first_row(model.embedding.weight), group)
    if model.output is not None:
        _split(model.output, mesh, ROWS)
    if model.head is not None:
        table = model.embedding if model.output is None else model.output
        assert table is not None
        model.head.reducer = VocabularyGroup(group)
        model.head.vocab_start = _first_row(table.weight)
        _compute(model.head, _head_of_sequence_parts, group)


# ---- modules


def _compute(module: nn.Module, function: Callable[..., Tensor], *first: Any) -> None:
    """Let module(x, ...) be function(module, *first, x, ...)."""
    module.forward = partial(function, module, *first)


def _split(module: Linear | Embedding | RMSNorm | Router, mesh: DeviceMesh, placement: Placement) -> None:
    # src_data_rank None: every rank cuts what it has, nothing is sent.
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [placement], src_data_rank=None))


def _local(module: Linear | Embedding | RMSNorm | Router) -> Tensor:
    """This rank's part of the weight. A whole one gets a gradient that is still to be summed over tp."""
    weight = module.weight
    assert isinstance(weight, DTensor)
    (placement,) = weight.placements
    return weight.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])


def _first_row(weight: Tensor) -> int:
    """Where this rank's rows start in a weight that is split by rows: the first ranks may have one more row each."""
    assert isinstance(weight, DTensor)
    rows_per_rank = -(-weight.shape[0] // weight.device_mesh.size())
    return min(weight.shape[0], weight.device_mesh.get_local_rank() * rows_per_rank)


def _split_norm(norm: RMSNorm, mesh: DeviceMesh) -> None:
    _split(norm, mesh, WHOLE)
    _compute(norm, lambda norm, x: rms_norm(x, _local(norm), norm.eps))


def _split_linear(module: Linear, mesh: DeviceMesh, placement: Placement) -> None:
    _split(module, mesh, placement)
    _compute(module, lambda module, x: linear(x, _local(module)))


def _split_attention(attention: Attention, mesh: DeviceMesh, config: ModelConfig) -> None:
    _split_linear(attention.wq, mesh, ROWS)
    _split_linear(attention.wo, mesh, COLUMNS)
    for projection in (attention.wk, attention.wv):
        if config.n_kv_heads % mesh.size() == 0:
            _split_linear(projection, mesh, ROWS)
        else:
            _split(projection, mesh, WHOLE)
            _compute(projection, lambda module, rows, x: linear(x, _local(module)[rows]), _kv_rows(config, mesh))
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            _split_norm(norm, mesh)


def _kv_rows(config: ModelConfig, mesh: DeviceMesh) -> slice:
    """Rows of wk and wv that make the one key/value head which all of this rank's query heads read."""
    assert mesh.size() % config.n_kv_heads == 0, "check.py lets no other degree through"
    head = mesh.get_local_rank() * config.n_kv_heads // mesh.size()
    return slice(head * config.resolved_head_dim, (head + 1) * config.resolved_head_dim)


def _split_mlp(mlp: MLP, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    _split_linear(mlp.gate, mesh, ROWS)
    _split_linear(mlp.up, mesh, ROWS)
    _split_linear(mlp.down, mesh, COLUMNS)
    _compute(mlp, _between_sequence_parts, group)


def _split_moe(moe: MoE, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Tokens are routed where they are, in this rank's part of the sequence; experts are not split over tp."""
    _split(moe.router, mesh, WHOLE)
    _compute(moe.router, lambda router, x: router.route(x, _local(router)))
    if moe.shared is not None:
        _split_mlp(moe.shared, mesh, group)


def _between_sequence_parts(module: nn.Module, group: dist.ProcessGroup, x: Tensor, *args: Any) -> Tensor:
    """The class's forward takes the whole sequence and returns this rank's summand of its output."""
    return scatter_sequence(type(module).forward(module, gather_sequence(x, group), *args), group)


def _embed_own_rows(embedding: Embedding, start: int, group: dist.ProcessGroup, tokens: Tensor) -> Tensor:
    weight = _local(embedding)
    rows = tokens - start
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    h = embed(rows.masked_fill(elsewhere, 0), weight, embedding.output_dtype)
    return scatter_sequence(h.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)


def _head_of_sequence_parts(
    head: Head, group: dist.ProcessGroup, x: Tensor, weight: Tensor, labels: Tensor | None
) -> Tensor:
    """Without labels: the logits of this rank's rows."""
    assert isinstance(weight, DTensor)
    return Head.forward(head, gather_sequence(x, group), weight.to_local(), labels)


class VocabularyGroup:
    """The loss's VocabularyReducer over the ranks of a group; in place."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def max(self, t: Tensor) -> Tensor:
        dist.all_reduce(t, dist.ReduceOp.MAX, group=self._group)
        return t

    def sum(self, t: Tensor) -> Tensor:
        dist.all_reduce(t, group=self._group)
        return t


# ---- communication


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S / tp, D] of every rank -> [B, S, D]. What comes back in backward is summed over the ranks."""
    gathered: Tensor = _Gather.apply(x, group)
    return gathered


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of [B, S, D], of which each keeps its [B, S / tp, D], in x's dtype."""
    scattered: Tensor = _Scatter.apply(x, group)
    return scattered


@torch.library.custom_op("titanlite::scatter_sequence", mutates_args=())
def _scatter_op(x: Tensor, group_name: str) -> Tensor:
    """An operator, so that selective recomputation can keep what it returns."""
    return collectives.scatter_sequence(x, collectives.group_named(group_name))


@_scatter_op.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    size = collectives.group_named(group_name).size()
    return x.new_empty((x.shape[0], x.shape[1] // size, *x.shape[2:]))


SCATTER_SEQUENCE = torch.ops.titanlite.scatter_sequence.default


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return collectives.gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return collectives.scatter_sequence(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_op(x, group.group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return collectives.gather_sequence(grads[0], ctx.group), None
