"""AdamW on each rank's own elements, with the gradient scale and the skip of a non-finite step inside one kernel.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, as torch's fused kernel computes it. It
works on the local tensors of sharded parameters: the update is elementwise, so a DTensor would only add dispatch time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

# The functional form, undocumented in torch (seen working on 2.11.0 and 2.13.0, CPU).
from torch.optim.adamw import adamw

from titanlite.config.schema import OptimizerConfig


@dataclass
class Group:
    """Parameters that share a weight decay. The lists are parallel; ranks without an element of one leave it out."""

    weight_decay: float
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    exp_avg: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sq: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)  # float32 scalars: the kernel wants one per parameter


class AdamW:
    """Moments are float32 like the parameters. Weight decay is for parameters with two or more (global) dims.

    Make it when the parameters have their final placements; their values may still be loaded afterwards.
    """

    def __init__(self, named_parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = dict(named_parameters)
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        decay, no_decay = Group(config.weight_decay), Group(0.0)
        device = torch.device("cpu")
        for name, parameter in self._parameters.items():
            local = _local(parameter)
            device = local.device
            moments = self._moments[name] = (torch.zeros_like(local), torch.zeros_like(local))
            if local.numel() > 0:
                group = decay if parameter.ndim >= 2 else no_decay
                group.parameters.append(parameter)
                group.exp_avg.append(moments[0])
                group.exp_avg_sq.append(moments[1])
                group.steps.append(torch.zeros((), device=device))
        self._groups = [group for group in (decay, no_decay) if group.parameters]
        self._n_updates = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Update all parameters in place from their gradients / grad_scale; nothing at all changes if found_inf is 1.

        grad_scale, found_inf: float32 scalars on the device. The gradients are scaled in place, too, by the kernel.
        """
        config = self._config
        for group in self._groups:
            # Looked up every step: FSDP may move a parameter's local tensor when it first runs.
            adamw(
                [_local(parameter) for parameter in group.parameters],
                [_local(_gradient(parameter)) for parameter in group.parameters],
                group.exp_avg,
                group.exp_avg_sq,
                [],
                group.steps,
                fused=True,
                grad_scale=grad_scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=group.weight_decay,
                eps=config.eps,
                maximize=False,
            )
        self._n_updates += 1.0 - found_inf

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """ "<fqn>.exp_avg" and "<fqn>.exp_avg_sq": the moments themselves, so that a load writes into them in place.

        Each has its parameter's global shape, mesh and placements.
        """
        state = {}
        for name, parameter in self._parameters.items():
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self._moments[name], strict=True):
                state[f"{name}.{kind}"] = _like(parameter, moment)
        return state

    @property
    def n_updates(self) -> int:
        """Updates done, skipped ones not counted: the exponent of the bias correction. Reading waits for the device."""
        return int(self._n_updates.item())

    @n_updates.setter
    def n_updates(self, value: int) -> None:
        for tensor in [self._n_updates, *(step for group in self._groups for step in group.steps)]:
            tensor.fill_(value)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "a parameter has no gradient"
    return parameter.grad


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The local tensor as part of a tensor laid out as the parameter is; it shares the storage."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
