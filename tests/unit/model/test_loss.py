"""The chunked kernel against the plain path, against fp64 finite differences, and with a split vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.model.helpers import difference
from titanlite.model.loss import cross_entropy_sum


def inputs(
    n: int = 50, rows: int = 384, dim: int = 32, vocab_size: int = 257, spread: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    """h [n, dim], weight [rows, dim] with garbage in the padding rows, labels [n] with some ignored."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(n, dim, generator=generator)
    weight = torch.randn(rows, dim, generator=generator) * spread
    labels = torch.randint(vocab_size, (n,), generator=generator)
    labels[::7] = -100
    labels[1] = vocab_size - 1
    return h, weight, labels


def run(h: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, **arguments: int) -> tuple[Tensor, ...]:
    h, weight = h.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy_sum(h, weight, labels, **arguments)  # type: ignore[arg-type]
    (loss * scale).backward()
    assert h.grad is not None and weight.grad is not None
    return loss.detach(), h.grad, weight.grad


def reference(h: Tensor, weight: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """In fp64, by torch's own function."""
    h, weight = h.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy((h @ weight.t())[:, :vocab_size], labels, reduction="sum", ignore_index=-100)
    loss.backward()
    assert h.grad is not None and weight.grad is not None
    return loss.detach(), h.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [0, 1, 7, 25, 50, 1000])
@pytest.mark.parametrize("spread", [0.01, 0.3, 20.0])
def test_loss_and_gradients(chunk_tokens: int, spread: float) -> None:
    h, weight, labels = inputs(spread=spread)
    loss, dh, dweight = run(h, weight, labels, vocab_size=257, chunk_tokens=chunk_tokens)
    for got, wanted in zip((loss, dh, dweight), reference(h, weight, labels, 257), strict=True):
        assert got.dtype == torch.float32
        assert difference(got, wanted) < (1e-5 if spread > 1 else 2e-6)
    assert dweight[257:].count_nonzero() == 0
    assert dh[::7].count_nonzero() == 0, "ignored tokens have no gradient"


@pytest.mark.parametrize("chunk_tokens", [0, 3])
def test_numerical_gradient(chunk_tokens: int) -> None:
    h, weight, labels = inputs(n=8, rows=12, dim=3, vocab_size=10)
    function = partial(cross_entropy_sum, labels=labels, vocab_size=10, chunk_tokens=chunk_tokens)
    assert torch.autograd.gradcheck(function, (h.double().requires_grad_(), weight.double().requires_grad_()))


def test_chunk_size_does_not_change_the_loss() -> None:
    h, weight, labels = inputs(n=3000, rows=512, vocab_size=500)
    losses = [
        cross_entropy_sum(h, weight, labels, vocab_size=500, chunk_tokens=chunk).item()
        for chunk in (0, 1, 10, 64, 333, 1024, 3000)
    ]
    assert (max(losses) - min(losses)) / losses[0] < 1e-7


@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_all_labels_ignored(chunk_tokens: int) -> None:
    h, weight, labels = inputs()
    loss, dh, dweight = run(h, weight, torch.full_like(labels, -100), vocab_size=257, chunk_tokens=chunk_tokens)
    assert loss.item() == 0.0
    assert dh.count_nonzero() == 0 and dweight.count_nonzero() == 0
    assert dh.isfinite().all() and dweight.isfinite().all()


@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_no_tokens(chunk_tokens: int) -> None:
    h, weight, labels = inputs(n=2)
    loss, dh, dweight = run(h[:0], weight, labels[:0], vocab_size=257, chunk_tokens=chunk_tokens)
    assert loss.item() == 0.0 and dh.shape == (0, 32) and dweight.count_nonzero() == 0


@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_extreme_logits_stay_finite(chunk_tokens: int) -> None:
    h = torch.tensor([[1e4], [-1e4], [1e4]])
    weight = torch.tensor([[1.0], [0.5], [-1.0], [0.0]])
    loss, dh, dweight = run(h, weight, torch.tensor([0, 0, 2]), vocab_size=3, chunk_tokens=chunk_tokens)
    assert loss.item() == pytest.approx(4e4)
    assert dh.isfinite().all() and dweight.isfinite().all()


def test_backward_twice_and_scaled() -> None:
    """Zero-bubble schedules run backward once for the input and once for the weight."""
    h, weight, labels = inputs()
    _, dh, dweight = run(h, weight, labels, vocab_size=257, chunk_tokens=13)
    _, dh_scaled, dweight_scaled = run(h, weight, labels, scale=0.25, vocab_size=257, chunk_tokens=13)
    assert torch.equal(dh_scaled, dh * 0.25) and torch.equal(dweight_scaled, dweight * 0.25)
    h.requires_grad_(), weight.requires_grad_()
    loss = 3 * cross_entropy_sum(h, weight, labels, vocab_size=257, chunk_tokens=13)
    for _ in range(2):
        first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for x in (h, weight))
        assert torch.equal(first, dh * 3) and torch.equal(second, dweight * 3)
        first.zero_(), second.zero_()  # whoever gets a gradient may overwrite it


def test_only_wanted_gradients_are_made() -> None:
    h, weight, labels = inputs()
    wanted = run(h, weight, labels, vocab_size=257, chunk_tokens=13)
    h.requires_grad_()
    cross_entropy_sum(h, weight, labels, vocab_size=257, chunk_tokens=13).backward()
    assert h.grad is not None and torch.equal(h.grad, wanted[1]) and weight.grad is None
    with torch.no_grad():
        loss = cross_entropy_sum(h, weight.requires_grad_(), labels, vocab_size=257, chunk_tokens=13)
    assert torch.equal(loss, wanted[0]) and not loss.requires_grad


def test_logits_are_not_kept_for_backward() -> None:
    h, weight, labels = inputs()
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy_sum(h.requires_grad_(), weight.requires_grad_(), labels, vocab_size=257, chunk_tokens=5)
    assert sorted(saved) == [h.numel(), weight.numel()]


@pytest.mark.parametrize("chunk_tokens", [0, 13])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bf16(weight_dtype: torch.dtype, chunk_tokens: int) -> None:
    h, weight, labels = inputs()
    h, weight = h.bfloat16(), weight.bfloat16().to(weight_dtype)
    loss, dh, dweight = run(h, weight, labels, vocab_size=257, chunk_tokens=chunk_tokens)
    wanted = reference(h, weight, labels, 257)
    assert loss.dtype == torch.float32
    assert dh.dtype == torch.bfloat16 and dweight.dtype == weight_dtype
    assert abs(loss.item() / wanted[0].item() - 1) < 1e-3
    for got, right in ((dh, wanted[1]), (dweight, wanted[2])):
        assert (got.double() - right).norm() / right.norm() < 6e-3  # bf16 keeps 8 bits
    assert dweight[257:].count_nonzero() == 0


def test_bf16_weight_gradient_is_summed_over_chunks_in_fp32() -> None:
    """Equal contributions from very many chunks: a bf16 sum would stop growing at 256."""
    n = 1024
    h, weight = torch.ones(n, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    _, _, dweight = run(h, weight, torch.zeros(n, dtype=torch.int64), vocab_size=2, chunk_tokens=1)
    assert dweight.tolist() == [[-n / 2], [n / 2]]


class ThreadReducer:
    """All-reduce between threads, in place."""

    def __init__(self, rank: int, shelf: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.shelf, self.barrier = rank, shelf, barrier
        self.calls: list[str] = []

    def _reduce(self, t: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        self.shelf[self.rank] = t.clone()
        self.barrier.wait(timeout=20)
        result = combine(torch.stack([x for x in self.shelf if x is not None]))
        self.barrier.wait(timeout=20)
        return t.copy_(result)

    def max(self, t: Tensor) -> Tensor:
        self.calls.append("max")
        return self._reduce(t, lambda stacked: stacked.amax(0))

    def sum(self, t: Tensor) -> Tensor:
        self.calls.append("sum")
        return self._reduce(t, lambda stacked: stacked.sum(0))


@pytest.mark.parametrize("shards", [1, 2, 3, 4])  # of 3 and 4 the last is padding, wholly with 4
@pytest.mark.parametrize("chunk_tokens", [0, 13])
@pytest.mark.parametrize("spread", [0.3, 20.0])
def test_vocabulary_split_over_ranks(shards: int, chunk_tokens: int, spread: float) -> None:
    h, weight, labels = inputs(spread=spread)
    wanted = reference(h, weight, labels, 257)
    rows = weight.shape[0] // shards
    shelf: list[Tensor | None] = [None] * shards
    barrier = threading.Barrier(shards)
    reducers = [ThreadReducer(rank, shelf, barrier) for rank in range(shards)]
    results: dict[int, tuple[Tensor, ...]] = {}

    def work(rank: int) -> None:
        shard = weight[rank * rows : (rank + 1) * rows]
        results[rank] = run(
            h,
            shard,
            labels,
            vocab_size=257,
            chunk_tokens=chunk_tokens,
            reducer=reducers[rank],  # type: ignore[arg-type]
            vocab_start=rank * rows,
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == shards, "a shard failed"
    tolerance = 1e-5 if spread > 1 else 2e-6
    for loss, _, _ in results.values():
        assert difference(loss, wanted[0]) < tolerance
    assert difference(sum(results[rank][1] for rank in range(shards)), wanted[1]) < tolerance  # type: ignore[arg-type]
    dweight = torch.cat([results[rank][2] for rank in range(shards)])
    assert difference(dweight, wanted[2]) < tolerance
    assert dweight[257:].count_nonzero() == 0
    chunks = -(-50 // chunk_tokens) if chunk_tokens else 1
    assert all(reducer.calls == ["max", "sum"] * chunks for reducer in reducers)
