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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlite.model.moe import Dispatcher, Experts, grouped_swiglu
from titanlite.model.transformer import Transformer, moe_layers
from titanlite.parallel.mesh import Meshes


def apply_expert_parallel(model: Transformer, meshes: Meshes) -> None:
    """Let the layers with experts work as one over the ranks, in place. Names of parameters stay.

    Experts are divided over meshes.ep, where that is more than one rank; the parts of a sequence are counted together.
    For a meta model, or the stage of one, before activation checkpointing and FSDP, which shards each expert over
    meshes.expert_hsdp. Collective over the world, also where a stage has no such layer.
    """
    ep = meshes.sparse["ep"]
    sharing = [mesh.get_group() for mesh in (meshes.cp, meshes.tp) if mesh.size() > 1]
    for moe in moe_layers(model).values():
        moe.sum_over_sequence = partial(_sum, groups=sharing)
        if ep.size() > 1:
            _divide(moe.experts, ep)
            moe.dispatcher = ExpertDispatcher(moe.dispatcher, ep.get_group())


def _sum(counts: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    counts = counts.clone()
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def _divide(experts: Experts, mesh: DeviceMesh) -> None:
    for name, weight in list(experts.named_parameters()):
        # src_data_rank None: every rank cuts what it has, nothing is sent.
        setattr(experts, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)))
    module: nn.Module = experts
    module.forward = partial(_own_experts, experts)


def _own_experts(experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
    return grouped_swiglu(rows, ends, _local(experts.gate), _local(experts.up), _local(experts.down))


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Shard(0)])


class ExpertDispatcher:
    """`MoE.dispatcher` of experts that are divided over a group: the local one's rows, exchanged."""

    def __init__(self, local: Dispatcher, group: dist.ProcessGroup) -> None:
        self._local = local
        self._group = group

    def dispatch(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Exchanged]:
        rows, sent = self._local.dispatch(x, experts)
        counts = sent.ends.diff(prepend=sent.ends.new_zeros(1)).long()
        exchange = plan_exchange(counts, self._group)
        return to_experts(rows, exchange), Exchanged(exchange.ends, exchange, sent)

    def combine(self, rows: Tensor, weights: Tensor, sent: Exchanged) -> Tensor:
        return self._local.combine(from_experts(rows, sent.exchange), weights, sent.local)


class Exchanged(NamedTuple):
    """What the dispatcher remembers between the two ways: the exchange, and what the local one does."""

    ends: Tensor
    exchange: Exchange
    local: Any


class Exchange(NamedTuple):
    """How the rows of one forward pass travel between the ranks of a group.

    sent, received: rows to and from each rank
    place:          int64 [R], where each received row goes, so that they are in the order of this rank's experts
    ends:           int32 [E / ep], where the rows of each of them end
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    place: Tensor
    ends: Tensor


def plan_exchange(counts: Tensor, group: dist.ProcessGroup) -> Exchange:
    """counts: int64 [E], rows that this rank has for every expert. Collective; the host waits for the device."""
    size = dist.get_world_size(group)
    outgoing = counts.view(size, -1)  # [ep, E / ep]
    incoming = torch.empty_like(outgoing)  # from each rank, for each expert here
    dist.all_to_all_single(incoming, outgoing, group=group)
    sent, received = torch.stack((outgoing.sum(1), incoming.sum(1))).tolist()
    shift = _starts(incoming.t()).t() - _starts(incoming)
    rows = sum(received)
    place = torch.arange(rows, device=counts.device)
    place += torch.repeat_interleave(shift.flatten(), incoming.flatten(), output_size=rows)
    return Exchange(group, sent, received, place, incoming.sum(0).cumsum(0).to(torch.int32))


def _starts(counts: Tensor) -> Tensor:
    """Where each run of rows begins when they lie one after the other in row-major order of counts."""
    return (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)


def to_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """[sum(sent), dim], sorted by expert -> [sum(received), dim] from all ranks, sorted by this rank's experts."""
    arrived: Tensor = _Travel.apply(rows, exchange.place, exchange, True)
    return arrived


def from_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """The way back: every row to where it came from, and into its place there."""
    returned: Tensor = _Travel.apply(rows, exchange.place, exchange, False)
    return returned


class _Travel(torch.autograd.Function):
    """Rows go out or come back; gradients travel against them. Pure: split backward schedules run backward twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, exchange: Exchange, outward: bool) -> Tensor:
        ctx.save_for_backward(place)
        ctx.splits = exchange.group, exchange.sent, exchange.received
        ctx.outward = outward
        return _travel(rows, place, ctx.splits, outward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return _travel(grads[0], place, ctx.splits, not ctx.outward), None, None, None


def _travel(rows: Tensor, place: Tensor, splits: tuple[dist.ProcessGroup, list[int], list[int]], out: bool) -> Tensor:
    group, sent, received = splits
    if out:
        arrived = rows.new_empty((len(place), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return torch.empty_like(arrived).index_copy_(0, place, arrived)
    returned = rows.new_empty((sum(sent), *rows.shape[1:]))
    dist.all_to_all_single(returned, rows.index_select(0, place), sent, received, group=group)
    return returned
