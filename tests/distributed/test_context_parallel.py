"""Ring and gathered attention against SDPA on the whole sequence: outputs, gradients, what is sent and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.harness.distributed import WorkerFailed, run_distributed
from titanlite.config.layout import resolve_layout
from titanlite.config.schema import ParallelismConfig
from titanlite.model.attention import causal_attention, document_mask
from titanlite.parallel import attention_kernels, context_parallel
from titanlite.parallel.context_parallel import (
    AllGather,
    Ring,
    allgather_attention,
    ring_attention,
    shard_sequence,
    zigzag_positions,
)
from titanlite.parallel.mesh import Meshes


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    length: int
    batch: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32


MHA, GQA, MQA = (4, 4), (6, 3), (4, 1)


def whole(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, the same on every rank. [B, H, S, D] as the model's views are."""
    generator = torch.Generator().manual_seed(case.length)
    shapes = [(case.batch, case.length, heads, case.dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    tensors = [torch.randn(shape, generator=generator).to(case.dtype) for shape in (*shapes, shapes[0])]
    return [x.transpose(1, 2) for x in tensors]


def documents_of(case: Case) -> Tensor:
    """Documents of other lengths in each row, some longer than a rank's part, some of one token."""
    generator = torch.Generator().manual_seed(case.length + 1)
    starts = torch.rand((case.batch, case.length), generator=generator) < 0.15
    return starts.cumsum(1).to(torch.int32)


def with_gradients(attend: Callable[..., Tensor], tensors: list[Tensor], *more: Any) -> list[Tensor]:
    q, k, v, grad = tensors
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, *more)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def reference(case: Case, masked: bool) -> list[Tensor]:
    """SDPA's result on the whole sequence, in float32."""
    tensors = [x.float() for x in whole(case)]
    return with_gradients(causal_attention, tensors, document_mask(documents_of(case), torch.float32) if masked else None)


def part(x: Tensor, dim: int = 2) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return x.index_select(dim, zigzag_positions(rank, size, x.shape[dim] // size))


def attend_whole(case: Case, method: str, masked: bool) -> list[float]:
    """The largest differences of out, dq, dk, dv on this rank, relative to each one's largest."""
    group = dist.group.WORLD
    assert group is not None
    tensors = [part(x) for x in whole(case)]
    if method == "ring":
        got = with_gradients(ring_attention, tensors, group)
    else:
        documents = part(documents_of(case), 1) if masked else None
        positions = zigzag_positions(dist.get_rank(), dist.get_world_size(), tensors[0].shape[2])
        mask = AllGather(group).mask(documents, positions, case.dtype)
        got = with_gradients(allgather_attention, tensors, group, mask)
    assert all(x.dtype == case.dtype for x in got)
    wanted = reference(case, masked)
    return [((part(w) - g).abs().max() / w.abs().max()).item() for g, w in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_attention_is_that_of_the_whole_sequence(size: int) -> None:
    cases = [Case(*heads, length) for heads in (MHA, GQA, MQA) for length in (2 * size, 24 * size)]
    errors = run_distributed(_many, size, [(case, "ring", False) for case in cases])
    worst = [max(values) for values in zip(*(e for rank in errors for e in rank), strict=True)]
    print(size, "ring", worst)
    assert max(worst) < 1e-6


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_gathered_attention_is_that_of_the_whole_sequence(size: int, masked: bool) -> None:
    cases = [Case(*heads, length) for heads in (MHA, GQA, MQA) for length in (2 * size, 24 * size)]
    errors = run_distributed(_many, size, [(case, "allgather", masked) for case in cases])
    worst = [max(values) for values in zip(*(e for rank in errors for e in rank), strict=True)]
    print(size, "allgather", masked, worst)
    assert max(worst) < 1e-6


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_bfloat16(method: str) -> None:
    errors = run_distributed(_many, 4, [(Case(*GQA, 512, dtype=torch.bfloat16), method, False)])
    one = run_distributed(_many, 1, [(Case(*GQA, 512, dtype=torch.bfloat16), "ring", False)])
    print(method, [max(e) for e in zip(*(e for rank in errors for e in rank), strict=True)], one)


def _many(cases: list[tuple[Case, str, bool]]) -> list[list[float]]:
    return [attend_whole(*case) for case in cases]
