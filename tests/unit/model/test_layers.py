from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.model.helpers import difference
from titanlite.model.attention import apply_rope, rope_tables
from titanlite.model.layers import Embedding, Linear, RMSNorm, _EmbeddingFunction, _RMSNormFunction


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 8), (2, 3, 2, 4)])
def test_rms_norm_numerical_gradient(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: _RMSNormFunction.apply(x, w, 1e-3), (x, weight))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_is_torchs(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = RMSNorm(48, 1e-5)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    x = (torch.randn(5, 7, 48, generator=generator) * scale).requires_grad_()
    upstream = torch.randn(5, 7, 48, generator=generator)
    got = norm(x)
    dx, dweight = torch.autograd.grad(got, (x, norm.weight), upstream)
    wide_x, wide_weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    wanted = F.rms_norm(wide_x, (48,), wide_weight, 1e-5)
    for a, b in zip(
        (got, dx, dweight), (wanted, *torch.autograd.grad(wanted, (wide_x, wide_weight), upstream)), strict=True
    ):
        assert a.dtype == torch.float32
        assert difference(a, b) < 1e-6


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_in_bf16_rounds_once(weight_dtype: torch.dtype) -> None:
    """Statistics and product in fp32; a bf16 weight (FSDP mixed precision) gives the same as an fp32 one."""
    generator = torch.Generator().manual_seed(2)
    norm = RMSNorm(512, 1e-5)
    weight = torch.randn(512, generator=generator).bfloat16()
    norm.weight = torch.nn.Parameter(weight.to(weight_dtype))
    x = torch.randn(9, 512, generator=generator).bfloat16().requires_grad_()
    upstream = torch.randn(9, 512, generator=generator).bfloat16()
    got = norm(x)
    dx, dweight = torch.autograd.grad(got, (x, norm.weight), upstream)
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    wanted = F.rms_norm(wide_x, (512,), wide_weight, 1e-5)
    wanted_dx, wanted_dweight = torch.autograd.grad(wanted, (wide_x, wide_weight), upstream.double())
    assert got.dtype == dx.dtype == torch.bfloat16 and dweight.dtype == weight_dtype
    for a, b in ((got, wanted), (dx, wanted_dx), (dweight, wanted_dweight)):
        assert ((a.double() - b).abs() <= b.abs() * 2**-8 + 1e-6 * b.abs().max()).all()


def test_rms_norm_of_a_zero_row_is_finite() -> None:
    norm = RMSNorm(8, 1e-5)
    torch.nn.init.ones_(norm.weight)
    x = torch.zeros(2, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def rope_reference(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """As complex numbers, fp64."""
    first, second = x.double().chunk(2, dim=-1)
    angles = (positions[..., None].double() * frequencies.double()).unsqueeze(-2)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope(dtype: torch.dtype, batched: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 3, 8, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, 3, 8, generator=generator).to(dtype)
    positions = torch.tensor([[0, 3, 1, 9, 2], [4, 4, 0, 1, 7]]) if batched else torch.tensor([5, 0, 2, 2, 9])
    frequencies = torch.tensor([1.0, 0.5, 0.25, 0.1])
    tables = rope_tables(positions, frequencies)
    got = apply_rope(x, *tables)
    (dx,) = torch.autograd.grad(got, x, upstream)
    wide = x.detach().double().requires_grad_()
    wanted = rope_reference(wide, positions, frequencies)
    (wanted_dx,) = torch.autograd.grad(wanted, wide, upstream.double())
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert got.dtype == dx.dtype == dtype
    assert difference(got, wanted) < tolerance and difference(dx, wanted_dx) < tolerance


def test_rope_turns_by_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator).double()
    frequencies = torch.tensor([1.0, 0.5, 0.25, 0.125])
    scores = [
        (
            apply_rope(q, *rope_tables(torch.tensor([a]), frequencies))
            * apply_rope(k, *rope_tables(torch.tensor([b]), frequencies))
        ).sum()
        for a, b in ((3, 1), (40, 38), (1000, 998))
    ]
    assert torch.allclose(scores[0], scores[1], atol=1e-4) and torch.allclose(scores[0], scores[2], atol=1e-3)


def test_linear_casts_its_weight_and_keeps_an_fp32_gradient() -> None:
    linear = Linear(16, 8)
    torch.nn.init.normal_(linear.weight)
    out = linear(torch.randn(3, 16).bfloat16())
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32 and linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_embedding_sums_a_bf16_gradient_in_fp32() -> None:
    """1024 occurrences of one token: a bf16 sum of ones would stop at 256."""
    embedding = Embedding(4, 2, torch.bfloat16)
    embedding.weight = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    embedding(torch.ones(2, 512, dtype=torch.int64)).sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.dtype == torch.bfloat16
    assert embedding.weight.grad.tolist() == [[0, 0], [1024, 1024], [0, 0], [0, 0]]


def test_embedding_function_is_torchs() -> None:
    tokens = torch.tensor([[1, 3, 1], [0, 2, 2]])
    weight = torch.randn(4, 5, dtype=torch.float32, requires_grad=True)
    upstream = torch.randn(2, 3, 5)
    wanted = F.embedding(tokens, weight)
    got = _EmbeddingFunction.apply(tokens, weight)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(got, weight, upstream)[0], torch.autograd.grad(wanted, weight, upstream)[0])
