"""What happens to the gradients between backward and the optimizer: token scale, norm, clip, finite check.

Backward leaves the gradients of the *sum* of token cross-entropies, summed over ranks. Nothing is written to them here:
the division by the step's token count and the clipping are one number, `grad_scale`, that the fused optimizer divides
by as it reads them. Everything stays on the device; the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

# Elements whose squares torch's CPU kernel may add up in float32: it adds one after the other, and is off by 1e-5 at
# 2**20 elements and by 7e-4 at 2**24, another error for every sharding.
ROW = 2**14


@dataclass(frozen=True)
class GradientStats:
    """Scalars on the device, float32, the same on all ranks.

    norm:       2-norm of the gradient of the mean loss per token, before clipping
    grad_scale: the gradients divided by this are the clipped gradient of the mean
    found_inf:  1.0 when the norm is not finite (the update must be skipped), else 0.0
    """

    norm: torch.Tensor
    grad_scale: torch.Tensor
    found_inf: torch.Tensor


@torch.no_grad()
def finish(
    parameters: Iterable[torch.nn.Parameter],
    n_targets: torch.Tensor,
    max_norm: float,
    pp_group: dist.ProcessGroup | None = None,
) -> GradientStats:
    """Measure the gradients and say how the optimizer must scale them. Collective.

    parameters: all of the model (that this stage counts), DTensors of any meshes and plain tensors mixed, each with its
                summed gradient
    n_targets:  scalar on the device, the number of valid targets of the step over all ranks
    max_norm:   the norm of the mean's gradient is clipped to this; 0: no clipping
    pp_group:   the ranks that hold the model's other stages
    """
    n_targets = n_targets.float()
    norm = global_norm(parameters, pp_group).float() / n_targets
    grad_scale = n_targets
    if max_norm > 0:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that curves can be compared with other code.
        grad_scale = n_targets / (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return GradientStats(norm=norm, grad_scale=grad_scale, found_inf=(~torch.isfinite(norm)).float())


@torch.no_grad()
def global_norm(parameters: Iterable[torch.nn.Parameter], pp_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """2-norm over all gradients, each element of the model counted once whatever holds it. float64 scalar. Collective.

    Gradients are grouped by mesh and placements (get_total_norm refuses mixed ones). A group's local squares are
    summed over the axes that shard it; a replicated axis holds copies, which are not counted again. Pipeline stages
    add up.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "a parameter has no gradient"
        if isinstance(gradient, DTensor):
            assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not reduced"
            groups.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient.to_local())
        else:
            groups.setdefault(None, []).append(gradient)
    squares = []
    for key, local_gradients in groups.items():
        square = _sum_of_squares(local_gradients)
        if isinstance(key, tuple):
            mesh, placements = key
            for axis, placement in enumerate(placements):
                if not placement.is_replicate():  # Shard, or FSDP's _StridedShard, which is no Shard
                    dist.all_reduce(square, group=mesh.get_group(axis))
        squares.append(square)
    total = torch.stack(squares).sum()
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.sqrt()


def _sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """float64 scalar. As fast as torch's norm, and right to 1e-7 for any number of elements."""
    if tensors[0].device.type != "cpu":
        return get_total_norm(tensors).double().square()  # one fused kernel, whose sums are trees
    norms = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % ROW
        norms.append(torch.linalg.vector_norm(flat[:whole].view(whole // ROW, ROW), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
    return torch.cat(norms).double().square().sum()
