"""The building blocks that are not attention: Linear, Embedding, RMSNorm, SwiGLU MLP.

Parameters are fp32 (or the dtype that FSDP's mixed precision all-gathers them in); every module casts its weight to
the dtype of the activations where it is used, so one process, DDP and FSDP compute the same. What a module computes is
a function of its input and weight (linear, embed, rms_norm), which a tensor-parallel rank calls with its part.
The autograd functions here exist for CPU eager mode, where torch has no fused kernel for them: they keep fewer
tensors and make fewer passes over memory. Compiled code and CUDA use torch's own operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def use_own_kernels(x: Tensor) -> bool:
    """Whether the CPU autograd functions below are the faster choice for `x`."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class Linear(nn.Linear):
    """x [..., in] @ weight.T [in, out], without bias; the weight is cast to x's dtype. A nn.Linear by type."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: init.py fills weights, and torch's generator is left alone."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in], of any float dtype, in x's dtype: [..., out]."""
    return F.linear(x, weight.to(x.dtype))


class _EmbeddingFunction(torch.autograd.Function):
    """F.embedding whose weight gradient is summed in fp32 and rounded to the weight's dtype once."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(grads[0].float(), tokens, ctx.rows, -1, False)
        return None, grad.to(ctx.dtype)


class Embedding(nn.Embedding):
    """tokens [B, S] int64 -> [B, S, dim] in `dtype`. Rows past the vocabulary are padding that no token reads."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype) -> None:
        self.output_dtype = dtype
        super().__init__(rows, dim)

    def reset_parameters(self) -> None:
        """Nothing: init.py fills weights, and torch's generator is left alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weight, self.output_dtype)


def embed(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of weight [V, dim] by tokens, int64 [...] below V, in the given dtype: [..., dim]. Gradients of a row are
    added up in float32 on CPU."""
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        return _EmbeddingFunction.apply(tokens, weight).to(dtype)  # CPU would sum in bf16
    return F.embedding(tokens, weight).to(dtype)


class _RMSNormFunction(torch.autograd.Function):
    """Keeps x and 1/rms; statistics in fp32 (fp64 for fp64 input)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dim = x.shape[-1]
        wide = x.float() if x.dtype == torch.bfloat16 else x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(dim).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dim = x.shape[-1]
        wide, wide_weight = x.to(rstd.dtype).reshape(-1, dim), weight.to(rstd.dtype)
        grad, scale = grads[0].to(rstd.dtype).reshape(-1, dim), rstd.reshape(-1, 1)
        # y_i = x_i r w_i with r = (mean(x^2) + eps)^-1/2, so dx_i = r g_i w_i - x_i r^3 / dim * sum_j(g_j w_j x_j).
        product = grad * wide
        dot = torch.mv(product, wide_weight).unsqueeze_(1)
        dweight = torch.mv(product.t(), scale.squeeze(1))
        dx = torch.mul(grad, wide_weight, out=product).mul_(scale)
        dx.addcmul_(wide, dot.mul_(scale.pow(3)), value=-1.0 / dim)
        return dx.view(x.shape).to(x.dtype), dweight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, statistics in fp32 (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., dim] over its root mean square, times weight [dim], in x's dtype; bfloat16's mean is one of float32."""
    weight = weight.to(x.dtype)
    if use_own_kernels(x):
        return _RMSNormFunction.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim)
        self.up = Linear(dim, ffn_dim)
        self.down = Linear(ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
