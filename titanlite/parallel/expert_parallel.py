"""Expert parallelism: of a layer's experts every ep rank holds E / ep whole ones, and tokens travel to them and back.

    router -> rows sorted by expert -> all-to-all -> rows sorted by own expert -> SwiGLU of each -> the same way back

Nothing is dropped and nothing is padded: ranks first tell each other how many rows come (the host waits for that, once
a layer and forward), then send just these. Backward runs the same exchanges the other way round, with the counts known.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from titanlite.model.moe import Dispatcher, Experts, grouped_swiglu
from titanlite.model.transformer import Transformer, moe_layers
from titanlite.parallel.mesh import Meshes
from titanlite.parallel.modules import local_part, replace_forward, shard_parameter


def apply_expert_parallel(model: Transformer, meshes: Meshes) -> None:
    """Let the layers with experts work as one over the ranks, in place. Names of parameters stay.

    Experts are divided over meshes.ep, where that is more than one rank (config/check.py lets only degrees through that
    divide their number); the parts of a sequence are counted together. For a meta model, or the stage of one, before
    activation checkpointing and FSDP, which shards each expert over meshes.expert_hsdp. Collective over the world, also
    where a stage has no such layer.
    """
    ep, sequence = meshes.ep, meshes.sequence
    for moe in moe_layers(model).values():
        if sequence.size() > 1:
            moe.sum_over_sequence = partial(_sum, group=sequence.get_group())
        if ep.size() > 1:
            n_experts = moe.experts.gate.shape[0]
            assert n_experts % ep.size() == 0, f"check.py lets no ep of {ep.size()} through for {n_experts} experts"
            for name in ("gate", "up", "down"):
                shard_parameter(moe.experts, name, ep, Shard(0))
            replace_forward(moe.experts, _own_experts)
            moe.dispatcher = ExpertDispatcher(moe.dispatcher, ep.get_group())


def _sum(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = counts.clone()  # the layer still needs its own
    dist.all_reduce(total, group=group)
    return total


def _own_experts(experts: Experts, rows: Tensor, offs: Tensor) -> Tensor:
    return grouped_swiglu(rows, offs, *(local_part(weight) for weight in (experts.gate, experts.up, experts.down)))


class ExpertDispatcher:
    """`MoE.dispatcher` of experts that are divided over a group: the local one's rows, exchanged."""

    def __init__(self, local: Dispatcher, group: dist.ProcessGroup) -> None:
        """local: sorts a rank's tokens by all E experts, E a multiple of the group's size. Its forward and backward are
        collective over the group."""
        self._local = local
        self._group = group

    def dispatch(self, x: Tensor, experts: Tensor) -> tuple[Tensor, ExchangeState]:
        """x [T, dim], experts int64 [T, k] -> (rows [R, dim] of all ranks, sorted by the experts here; state)."""
        rows, local = self._local.dispatch(x, experts)
        counts = local.offs.diff(prepend=local.offs.new_zeros(1)).long()
        exchange = plan_exchange(counts, self._group)
        return to_experts(rows, exchange), ExchangeState(exchange.offs, exchange, local)

    def combine(self, rows: Tensor, weights: Tensor, state: ExchangeState) -> Tensor:
        """rows [R, dim], weights fp32 [T, k] -> [T, dim] of this rank's tokens, in rows' dtype."""
        return self._local.combine(from_experts(rows, state.exchange), weights, state.local)


class ExchangeState(NamedTuple):
    """What the dispatcher remembers between the two ways: offs int32 [E / ep], the exchange, the local one's state."""

    offs: Tensor
    exchange: Exchange
    local: Any


class Exchange(NamedTuple):
    """How the rows of one forward pass travel between the ranks of a group.

    input_splits, output_splits: rows to and from each rank, as all_to_all_single calls them
    permutation: int64 [R], where each row that arrives goes, so that they are in the order of this rank's experts
    offs:        int32 [E / ep], where the rows of each of them end
    """

    group: dist.ProcessGroup
    input_splits: list[int]
    output_splits: list[int]
    permutation: Tensor
    offs: Tensor


def plan_exchange(counts: Tensor, group: dist.ProcessGroup) -> Exchange:
    """counts: int64 [E], rows that this rank has for every expert; E a multiple of the group's size. Collective; the
    host waits for the device."""
    size = dist.get_world_size(group)
    outgoing = counts.view(size, -1)  # [ep, E / ep]
    incoming = torch.empty_like(outgoing)  # from each rank, for each expert here
    dist.all_to_all_single(incoming, outgoing, group=group)
    input_splits, output_splits = torch.stack((outgoing.sum(1), incoming.sum(1))).tolist()
    shift = _starts(incoming.t()).t() - _starts(incoming)
    rows = sum(output_splits)
    permutation = torch.arange(rows, device=counts.device)
    permutation += torch.repeat_interleave(shift.flatten(), incoming.flatten(), output_size=rows)
    return Exchange(group, input_splits, output_splits, permutation, incoming.sum(0).cumsum(0).to(torch.int32))


def _starts(counts: Tensor) -> Tensor:
    """Where each run of rows begins when they lie one after the other in row-major order of counts."""
    return (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)


def to_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """[sum(input_splits), dim], sorted by expert -> [R, dim] from all ranks, sorted by this rank's experts."""
    arrived: Tensor = _AllToAll.apply(rows, exchange.permutation, exchange, True)
    return arrived


def from_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """The way back, [R, dim] -> [sum(input_splits), dim]: every row to where it came from, and into its place there."""
    returned: Tensor = _AllToAll.apply(rows, exchange.permutation, exchange, False)
    return returned


class _AllToAll(torch.autograd.Function):
    """Rows go out or come back; gradients travel against them. Pure: split backward schedules run backward twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Tensor, exchange: Exchange, outward: bool) -> Tensor:
        ctx.save_for_backward(permutation)
        ctx.splits = exchange.group, exchange.input_splits, exchange.output_splits
        ctx.outward = outward
        return _all_to_all(rows, permutation, outward, *ctx.splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (permutation,) = ctx.saved_tensors
        return _all_to_all(grads[0], permutation, not ctx.outward, *ctx.splits), None, None, None


def _all_to_all(
    rows: Tensor,
    permutation: Tensor,
    outward: bool,
    group: dist.ProcessGroup,
    input_splits: list[int],
    output_splits: list[int],
) -> Tensor:
    if outward:
        arrived = rows.new_empty((len(permutation), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), output_splits, input_splits, group=group)
        return torch.empty_like(arrived).index_copy_(0, permutation, arrived)
    returned = rows.new_empty((sum(input_splits), *rows.shape[1:]))
    dist.all_to_all_single(returned, rows.index_select(0, permutation), input_splits, output_splits, group=group)
    return returned
