"""Collectives that more than one form of parallelism needs: gathering a sequence that is spread over ranks, and the sum
over ranks of a whole one of which each keeps its part. On plain tensors, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13; the old names warn there.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, ...] of every rank -> [B, n * L, ...], contiguous, in the order of the ranks. Collective."""
    everyone = x.new_empty((dist.get_world_size(group), *x.shape))
    all_gather(everyone.flatten(0, 1), x.contiguous(), group=group)
    return everyone.transpose(0, 1).flatten(1, 2).contiguous()


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of [B, n * L, ...], in x's dtype, of which each keeps its own [B, L, ...]. Collective."""
    size = dist.get_world_size(group)
    parts = x.unflatten(1, (size, x.shape[1] // size)).transpose(0, 1).contiguous()
    mine = parts.new_empty(parts.shape[1:])
    reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name, which is what an operator can take. Private in torch (seen working on 2.13.0)."""
    resolve: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[assignment]
    return resolve(name)
