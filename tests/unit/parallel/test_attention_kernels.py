"""The kernels of ring attention: the CPU's against SDPA, and what is put around CUDA's, which cannot run here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlite.model.attention import causal_attention
from titanlite.parallel import attention_kernels
from titanlite.parallel.attention_kernels import AttentionKernel, CpuFlash, CudaEfficient, CudaFlash, kernel_for
from titanlite.parallel.context_parallel import block_of, merge, zigzag_chunks, zigzag_positions


def heads(heads: int, kv_heads: int, length: int, dim: int = 10, keys: int = 0) -> list[Tensor]:
    """q, k, v and a gradient, as the model's views are."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, heads), (2, keys or length, kv_heads), (2, keys or length, kv_heads), (2, length, heads)]
    return [torch.randn((*shape, dim), generator=generator).transpose(1, 2) for shape in shapes]


def sdpa(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, grad = tensors
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    mask = None if causal else q.new_zeros(q.shape[2], k.shape[2])
    out = causal_attention(q, k, v, mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def by_kernel(kernel: AttentionKernel, tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, grad = tensors
    out, lse = kernel.forward(q, k, v, causal)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    return [out, *kernel.backward(grad, q, k, v, out, lse.contiguous(), causal)]


def worst(got: list[Tensor], wanted: list[Tensor]) -> float:
    assert all(g.shape == w.shape and g.dtype == w.dtype for g, w in zip(got, wanted, strict=True))
    return max(((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, wanted, strict=True))


CASES = [(4, 4, 24, 0, True), (6, 3, 24, 0, True), (6, 2, 8, 24, False), (4, 1, 1, 16, False), (4, 1, 16, 1, False)]


@pytest.mark.parametrize(("n_heads", "kv_heads", "length", "keys", "causal"), CASES)
def test_the_cpu_kernel_is_sdpa(n_heads: int, kv_heads: int, length: int, keys: int, causal: bool) -> None:
    tensors = heads(n_heads, kv_heads, length, keys=keys)
    if keys == 1:  # all weight is on one key: the scores have no gradient, and both find rounding errors
        tensors[0] = tensors[0] * 0
    got, wanted = by_kernel(CpuFlash(), tensors, causal), sdpa(tensors, causal)
    if keys == 1:
        assert got[1].abs().max() < 1e-5 and got[2].abs().max() < 1e-5
        got, wanted = [got[0], got[3]], [wanted[0], wanted[3]]
    assert worst(got, wanted) < 1e-6


def test_which_kernel() -> None:
    assert isinstance(kernel_for(torch.zeros(1, 1, 1, 8)), CpuFlash)
    assert isinstance(kernel_for(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)), CpuFlash)

    class OnCuda:
        is_cuda = True

        def __init__(self, dtype: torch.dtype, dim: int) -> None:
            self.dtype, self.shape = dtype, (1, 1, 1, dim)

    wanted: dict[Any, Any] = {
        (torch.bfloat16, 256): CudaFlash,
        (torch.float16, 10): CudaFlash,
        (torch.bfloat16, 264): CudaEfficient,
        (torch.float32, 64): CudaEfficient,
    }
    for (dtype, dim), kernel in wanted.items():
        assert isinstance(kernel_for(OnCuda(dtype, dim)), kernel)  # type: ignore[arg-type]


class StandIn:
    """The CUDA operators by plain mathematics, with what their sources demand of the arguments.

    flash: heads of a multiple of 8 and at most 256, half precision. efficient: as many key heads as query heads, lse in
    rows of a multiple of 32 with infinity past the last query, out and grad dense in [B, L, H, D].
    """

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> tuple[Any, ...]:
        assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and dropout == 0.0 and debug is False
        out, lse = self._attention(q, k, v, causal, scale)
        return out, lse, None, None, q.shape[2], k.shape[2], None, None, None

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, scale: float
    ) -> tuple[Tensor, ...]:
        cum_q, cum_k, max_q, max_k, dropout, causal, _seed, _offset = more
        assert cum_q is None and cum_k is None and (max_q, max_k) == (q.shape[2], k.shape[2]) and dropout == 0.0
        assert all(x.shape[-1] % 8 == 0 for x in (grad, q, k, v, out)) and lse.is_contiguous()
        return self._gradients(grad, q, k, v, out, lse, causal, scale)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool, *, scale: float
    ) -> tuple[Any, ...]:
        assert bias is None and with_lse and dropout == 0.0
        assert q.shape[1] == k.shape[1] == v.shape[1] and q.shape[-1] % 8 == 0
        out, lse = self._attention(q, k, v, causal, scale)
        return out, torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: None,
        out: Tensor,
        lse: Tensor,
        *more: Any,
        scale: float,
    ) -> tuple[Any, ...]:
        _seed, _offset, dropout, wanted, causal = more
        assert bias is None and dropout == 0.0 and wanted == [True, True, True, False]
        assert q.shape[1] == k.shape[1] == v.shape[1] and q.shape[-1] % 8 == 0
        assert lse.shape[-1] == -(-q.shape[2] // 32) * 32 and (lse[..., q.shape[2] :] == math.inf).all()
        assert out.transpose(1, 2).is_contiguous() and grad.transpose(1, 2).is_contiguous()
        return (*self._gradients(grad, q, k, v, out, lse[..., : q.shape[2]], causal, scale), None)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(groups, 1).mT * scale
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        return scores.softmax(-1) @ v.repeat_interleave(groups, 1), scores.logsumexp(-1)

    def _gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        groups = q.shape[1] // k.shape[1]
        all_k, all_v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = q @ all_k.mT * scale
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        p = (scores - lse.unsqueeze(-1)).exp()
        ds = p * (grad @ all_v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        dk, dv = ds.mT @ q, p.mT @ grad
        return ds @ all_k, *(x.unflatten(1, (k.shape[1], groups)).sum(2) for x in (dk, dv))


@pytest.mark.parametrize("kernel", [CudaFlash(), CudaEfficient()], ids=["flash", "efficient"])
@pytest.mark.parametrize(("n_heads", "kv_heads", "length", "keys", "causal"), CASES[:4])
def test_what_is_put_around_the_cuda_kernels(
    kernel: Any, n_heads: int, kv_heads: int, length: int, keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 10, which they do not take; a block's gradient with the lse of more keys than its own."""
    monkeypatch.setattr(attention_kernels, "aten", StandIn())
    tensors = heads(n_heads, kv_heads, length, keys=keys)
    assert worst(by_kernel(kernel, tensors, causal), sdpa(tensors, causal)) < 2e-6


@pytest.mark.parametrize("kernel", [CudaFlash(), CudaEfficient()], ids=["flash", "efficient"])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_takes_the_arguments_of_the_cuda_kernels(kernel: Any, causal: bool) -> None:
    dtype = torch.bfloat16 if isinstance(kernel, CudaFlash) else torch.float32
    q, k, v, grad = (x.to("meta", dtype) for x in heads(6, 3, 40, keys=40 if causal else 80))
    got = by_kernel(kernel, [q, k, v, grad], causal)
    if isinstance(kernel, CudaFlash):
        assert [x.shape for x in got] == [q.shape, q.shape, k.shape, v.shape]
    assert all(x.dtype == dtype for x in got)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_blocks_cover_every_pair_of_a_query_and_a_key_before_it_once(size: int) -> None:
    length = 6
    places = [zigzag_positions(rank, size, length) for rank in range(size)]
    assert sorted(torch.cat(places).tolist()) == list(range(size * length))
    assert sorted(chunk for rank in range(size) for chunk in zigzag_chunks(rank, size)) == list(range(2 * size))
    pairs: list[tuple[int, int]] = []
    work = []
    for rank in range(size):
        before = len(pairs)
        for step in range(size):
            queries, keys, causal = block_of(step, rank, length)
            for i, query in enumerate(places[rank][queries].tolist()):
                for j, key in enumerate(places[rank - step][keys].tolist()):
                    if j <= i or not causal:
                        pairs.append((query, key))
        work.append(len(pairs) - before)
    wanted = [(query, key) for query in range(size * length) for key in range(query + 1)]
    assert sorted(pairs) == wanted
    assert len(set(work)) == 1, "as much work on every rank"


def test_merging_is_softmax_over_both_blocks_in_any_size_of_scores() -> None:
    for shift, tolerance in (
        (0.0, 1e-6),
        (90.0, 2e-5),
        (-90.0, 2e-5),
    ):  # exp(90) is past float32; 90 is rounded by 4e-6
        q, k, v, _ = heads(4, 4, 8, keys=24)
        k[..., 0] = 1.0
        q[..., 0] = shift * q.shape[-1] ** 0.5  # so that every score is moved by shift
        kernel = CpuFlash()
        wanted, wanted_lse = kernel.forward(q, k, v, False)
        out, lse = kernel.forward(q, k[:, :, :5], v[:, :, :5], False)
        out, lse = out.clone(), lse.contiguous().clone()
        merge(out, lse, *kernel.forward(q, k[:, :, 5:], v[:, :, 5:], False))
        assert worst([out, lse], [wanted, wanted_lse]) < tolerance
