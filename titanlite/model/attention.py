"""Causal self-attention with grouped queries, rotary positions and document masks; `attend` is the seam for context
parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import ModelConfig
from titanlite.model.layers import Linear, RMSNorm, use_own_kernels


def rope_inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair: [head_dim / 2] fp32 on the CPU, radians.

    RoFormer (Su et al. 2021, section 3.4.2) with Llama 3.1's scaling: wavelengths above
    original / low_freq_factor turn `factor` times slower, those below original / high_freq_factor are left alone, and
    those between are interpolated. The order of the fp32 operations is Hugging Face transformers', since at position
    20000 one unit in the last place is already 1e-3 rad; always computed on the CPU, so every device has the same.
    """
    dim, scaling = config.resolved_head_dim, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if scaling.factor == 1.0:
        return frequencies
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, between, scaled)


def rope_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for apply_rope, fp32 [(B,) S, 1, head_dim], for positions [S] or [B, S].

    First cos(position * frequency), once for each half; second -sin for the first half and sin for the second.
    The angle is a fp32 product, as in transformers, made for the positions at hand: no table has an end to run over.
    """
    angles = (positions[..., None].float() * inverse_frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


class _RopeFunction(torch.autograd.Function):
    """The backward of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, sign=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    return (x * cos).addcmul_(_swap_halves(x), sin, value=sign).to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, S, H, D] by rope_tables' cos and sin, in fp32; returns x's dtype.

    Element i is paired with i + D/2: Hugging Face's half-split order, so no checkpoint ever needs a permutation.
    """
    if use_own_kernels(x):
        rotated: Tensor = _RopeFunction.apply(x, cos, sin)
        return rotated
    return (x * cos + _swap_halves(x) * sin).to(x.dtype)


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores so that a query sees the keys up to it of its own document: [B, 1, S, S], 0 or -inf.

    documents: [B, S] int, which document of its row each token is in. dtype: the queries', since that is the one in
    which SDPA takes a mask as it is: any other it converts in every layer, and keeps every layer's copy for backward.
    """
    seen = (documents[:, :, None] == documents[:, None, :]).tril_()
    return torch.full(seen.shape, -math.inf, dtype=dtype, device=seen.device).masked_fill_(seen, 0.0).unsqueeze(1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v; q [B, H, S, D], k, v [B, Hkv, S, D], mask as document_mask -> q's shape.

    mask None: over the keys up to each query.
    """
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if grouped and q.is_cuda:
        # Flash takes no mask there, and the efficient kernel groups only in the newest torch: what is left for fp32, or
        # where determinism is asked for, would be plain mathematics with all heads' S x S scores in memory.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class Attention(nn.Module):
    """wo(attend(rope(wq x), rope(wk x), wv x)); query head h reads key/value head h // (n_heads / n_kv_heads).

    `attend` may be replaced by any callable with causal_attention's shapes.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.resolved_head_dim
        self.wq = Linear(config.dim, config.n_heads * self.head_dim)
        self.wk = Linear(config.dim, config.n_kv_heads * self.head_dim)
        self.wv = Linear(config.dim, config.n_kv_heads * self.head_dim)
        self.wo = Linear(config.n_heads * self.head_dim, config.dim)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = causal_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, S, dim], cos and sin from rope_tables, mask from document_mask -> [B, S, dim]."""
        heads = (-1, self.head_dim)  # the number of heads is read off the weights: a tensor-parallel rank has fewer
        q = self.wq(x).unflatten(-1, heads)
        k = self.wk(x).unflatten(-1, heads)
        v = self.wv(x).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).flatten(-2))
