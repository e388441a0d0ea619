"""How tensor and expert parallelism lay out a module in place, its class and its parameters' names unchanged: a weight
becomes a DTensor, forward a function that works on this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter of the module itself a DTensor over a mesh of one dim. Every rank must have the same whole one,
    or a meta one."""
    # src_data_rank None: every rank cuts what it has, nothing is sent.
    weight = distribute_tensor(module.get_parameter(name), mesh, [placement], src_data_rank=None)
    setattr(module, name, nn.Parameter(weight))


def replace_forward(module: nn.Module, function: Callable[..., Tensor], *first: Any) -> None:
    """Let module(x, ...) be function(module, *first, x, ...)."""
    module.forward = partial(function, module, *first)


def local_part(weight: Tensor) -> Tensor:
    """This rank's part of a weight that shard_parameter made, plain, for autograd. A whole one's gradient is one rank's
    summand: it is still to be summed over the mesh."""
    assert isinstance(weight, DTensor)
    (placement,) = weight.placements
    return weight.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])
