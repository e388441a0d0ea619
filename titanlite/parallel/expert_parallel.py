"""Expert parallelism: of a layer's experts every ep rank holds E / ep whole ones, and tokens travel to them and back.

    router -> rows sorted by expert -> all-to-all -> rows sorted by own expert -> SwiGLU of each -> the same way back

Nothing is dropped and nothing is padded: ranks first tell each other how many rows come (the host waits for that, once
a layer and forward), then send just these. Backward runs the same exchanges the other way round, with the counts known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


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
        ctx.way, ctx.outward = exchange[:3], outward
        return _travel(rows, place, *ctx.way, outward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return _travel(grads[0], place, *ctx.way, not ctx.outward), None, None, None


def _travel(
    rows: Tensor, place: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int], outward: bool
) -> Tensor:
    if outward:
        arrived = rows.new_empty((len(place), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return torch.empty_like(arrived).index_copy_(0, place, arrived)
    returned = rows.new_empty((sum(sent), *rows.shape[1:]))
    dist.all_to_all_single(returned, rows.index_select(0, place), sent, received, group=group)
    return returned
