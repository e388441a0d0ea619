"""Floating-point operations of training, by formula. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.layout import parameter_counts
from titanlite.config.schema import ModelConfig


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token's forward and backward pass; a multiply-add counts two.

    palm:   as PaLM counts (Chowdhery et al. 2022, appendix B): attention as if no key were masked, the convention
            in which MFU is usually quoted.
    causal: attention halved, as only keys up to the query are read.
    """

    palm: float
    causal: float


def flops_per_token(model: ModelConfig, seq_len: int) -> Flops:
    """6 * matmul parameters (of the experts, those that a token goes through) + 12 * n_layers * n_heads * head_dim *
    seq_len; norms, RoPE, softmax and recomputation are left out."""
    matmul = 6.0 * parameter_counts(model).matmul
    attention = 12.0 * model.n_layers * model.n_heads * model.resolved_head_dim * seq_len
    return Flops(palm=matmul + attention, causal=matmul + attention / 2)
