"""Attention kernels with their log-sum-exp and their backward as separate calls: what ring attention is made of.

A kernel computes one block, some queries against some keys. Blocks of the same queries are merged by log-sum-exp, and a
block's backward takes the merged out and lse, so that its probabilities are those of the whole softmax.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class AttentionKernel(Protocol):
    """softmax(q k^T / sqrt(D)) v of one block. q [B, H, Lq, D], k and v [B, Hkv, Lk, D]; H is a multiple of Hkv.

    causal: query i sees the keys up to i (Lq = Lk); else every query sees every key.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """out as q, and lse [B, H, Lq]: the natural logarithm of the softmax's denominator, float32."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv as q, k, v. grad: of out; out and lse: of these queries over all of their keys, lse contiguous."""


class CpuFlash:
    """float32, float64 and half precision on the CPU. Grouped queries are native."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)


class CudaFlash:
    """Half precision on CUDA, heads of at most 256. Grouped queries are native.

    NOT RUN YET: written from torch 2.13's signatures and source, tested on meta tensors only. tests/gpu/test_cuda.py
    compares it with SDPA.
    """

    MAX_HEAD_DIM = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        padded = _padded(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*padded, 0.0, causal, False, scale=_scale(q))
        return out[..., : q.shape[-1]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # No cumulative lengths (None): not a packed batch. The generator's state is not read without dropout.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            *_padded(grad, q, k, v, out),
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            seed,
            offset,
            scale=_scale(q),
        )
        dq, dk, dv = (x[..., : q.shape[-1]] for x in grads)
        return dq, dk, dv


class CudaEfficient:
    """What flash does not take on CUDA: float32, and heads above 256. k and v are repeated for grouped queries.

    NOT RUN YET: written from torch 2.13's signatures and source, tested on meta tensors only. tests/gpu/test_cuda.py
    compares it with SDPA.
    """

    LSE_ROWS = 32  # the kernel's lse has rows of a multiple of this; those past the last query hold infinity

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = _padded(q, *_repeated(q, k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_, k_, v_, None, True, 0.0, causal, scale=_scale(q)
        )
        return out[..., : q.shape[-1]], lse[..., : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = F.pad(lse, (0, -lse.shape[-1] % self.LSE_ROWS), value=math.inf)
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the generator's state, for dropout
        k_, v_ = _repeated(q, k, v)
        grad_, q_, k_, v_, out_ = _padded(grad, q, k_, v_, out)
        # As the kernel's forward leaves it, dense in [B, L, H, D]: a block's out may be a slice of a longer one.
        grad_, out_ = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_, out_))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_,
            q_,
            k_,
            v_,
            None,
            out_,
            lse,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
            scale=_scale(q),
        )
        dq, dk, dv = (x[..., : q.shape[-1]] for x in (dq, dk, dv))
        return dq, _summed(dk, k), _summed(dv, v)


def kernel_for(q: Tensor) -> AttentionKernel:
    """The fastest kernel for queries of this device, dtype and head width."""
    if not q.is_cuda:
        return CpuFlash()
    half = q.dtype in (torch.bfloat16, torch.float16)
    return CudaFlash() if half and q.shape[-1] <= CudaFlash.MAX_HEAD_DIM else CudaEfficient()


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5  # of the true width: zeros may be added to it


def _padded(*tensors: Tensor) -> list[Tensor]:
    """With heads of a multiple of 8, which the CUDA kernels need: zeros change no score and no output."""
    missing = -tensors[0].shape[-1] % 8
    return [F.pad(x, (0, missing)) if missing else x for x in tensors]


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of its repeated heads."""
    groups = grad.shape[1] // x.shape[1]
    return grad if groups == 1 else grad.unflatten(1, (x.shape[1], groups)).sum(2, dtype=torch.float32).to(x.dtype)
