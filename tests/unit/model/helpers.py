"""Small models and batches for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import ModelConfig
from titanlite.model.init import init_
from titanlite.model.transformer import Transformer


def small_config(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "vocab_size": 257,
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 96,
        "init_std": 0.1,
    }
    return ModelConfig(**{**base, **changes})


def init_model_(model: torch.nn.Module, config: ModelConfig, seed: int) -> None:
    """init_ for every parameter of an unsharded model."""
    for fqn, parameter in model.named_parameters():
        init_(parameter.data, fqn, config, seed, global_shape=parameter.shape, offsets=(0,) * parameter.ndim)


def small_model(config: ModelConfig, seed: int = 1, **arguments: Any) -> Transformer:
    """An initialised model whose norm weights differ from one, so that a misplaced norm shows."""
    model = Transformer(config, **arguments)
    init_model_(model, config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def batch(config: ModelConfig, samples: int = 3, seq_len: int = 24, ignored: int = 5) -> tuple[Tensor, Tensor]:
    """tokens and labels [samples, seq_len]; the first `ignored` labels of sample 0 are -100."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size, (samples, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :ignored] = -100
    return tokens[:, :-1].contiguous(), labels


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest wanted element."""
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
