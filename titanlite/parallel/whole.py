"""Whole tensors of what is spread over ranks: for comparing runs, not for training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole plain tensors on the CPU, gathered from all ranks, those of other pipeline stages too. Collective.

    Of what this rank has a copy of its own (tied embeddings in two stages), it is that copy.
    """
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        for name, tensor in named.items()
    }
    if not dist.is_initialized():
        return whole
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(whole))
    if all(other == names[0] for other in names):
        return whole
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, whole)
    for part in parts:
        whole = part | whole
    return whole
