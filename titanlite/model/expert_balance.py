"""What becomes of a step's counts of tokens per expert: biases that even them out, and metrics. Plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from titanlite.config.schema import ModelConfig
from titanlite.model.moe import MoE


class ExpertBalance:
    """The layers with experts that are here, by their index in the model that `config` describes."""

    def __init__(self, config: ModelConfig, layers: Mapping[int, MoE], device: torch.device) -> None:
        self._config = config
        self._layers = dict(layers)
        self._device = device

    def with_layers_of(self, others: Iterable[ExpertBalance]) -> ExpertBalance:
        """Of the layers of several parts of one model."""
        layers = {index: layer for other in others for index, layer in other._layers.items()}
        return ExpertBalance(self._config, layers, self._device)

    def take(self) -> tuple[Tensor, Tensor]:
        """The counts of all layers since the last call, zero for those without experts or not here; starts anew.

        Returns MoE.load and MoE.sums, stacked: int64 [n_layers, E] and fp64 [n_layers, 4], to be summed over the ranks
        that hold other tokens or layers.
        """
        n_layers = self._config.n_layers
        loads = torch.zeros(n_layers, self._config.moe.n_experts, dtype=torch.int64, device=self._device)
        sums = torch.zeros(n_layers, 4, dtype=torch.float64, device=self._device)
        for index, layer in self._layers.items():
            loads[index] = layer.load
            sums[index] = layer.sums
            layer.load.zero_()
            layer.sums.zero_()
        return loads, sums

    @torch.no_grad()
    def update_biases(self, loads: Tensor, found_inf: Tensor) -> None:
        """bias += bias_update_rate * sign(mean load - load) (DeepSeek-V3, section 2.1.2), unless found_inf is 1.

        loads: int64 [n_layers, E] of the whole step.
        """
        rate = self._config.moe.bias_update_rate * (1.0 - found_inf)
        for index, layer in self._layers.items():
            if layer.router.expert_bias is not None:
                load = loads[index]
                layer.router.expert_bias += rate * (load.sum() - load.numel() * load).sign()  # exact, in integers

    def metrics(self, loads: Tensor, sums: Tensor) -> dict[str, Tensor]:
        """Scalars on the device, from the whole step's loads [n_layers, E] and sums [n_layers, 4].

        expert_load_max, _min: the largest and smallest load of an expert in any layer, over the mean load
        expert_assignments:    mean over MoE layers; tokens x top_k
        router_entropy:        of the scores, nats, mean over tokens and layers; ln E if they are all equal
        aux_loss, z_loss:      what they add to the objective, summed over layers, per token
        """
        index = [n for n in range(self._config.n_layers) if self._config.is_moe_layer(n)]
        loads, sums = loads[index[0] :].double(), sums[index[0] :].sum(dim=0)
        relative = loads / loads.mean(dim=1, keepdim=True)
        tokens = sums[0]  # counted in every layer
        return {
            "expert_load_max": relative.max(),
            "expert_load_min": relative.min(),
            "expert_assignments": loads.sum() / len(index),
            "router_entropy": sums[1] / tokens,
            "aux_loss": sums[2] / tokens * len(index),
            "z_loss": sums[3] / tokens * len(index),
        }
