"""All-reduce by hand, as a ring of sends and receives, against the library's; the worlds are made by runtime.spawn."""

import pytest
import torch
import torch.distributed as dist

from tests.harness.distributed import WorkerFailed, run_distributed, run_spawned
from titanlite.config.schema import RunConfig


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Sum a contiguous tensor over the world in place; returns the bytes this rank sent.

    The tensor is cut into n chunks. In n - 1 hops each rank passes a partial sum to its right neighbour and adds what
    it gets from the left (reduce-scatter), after which rank r holds the whole sum of chunk r + 1; in n - 1 more hops
    the finished chunks go once around (all-gather). Every rank sends 2 (n - 1) / n of the tensor, however many there
    are (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    chunks = flat.tensor_split(n)
    received = torch.empty(chunks[0].numel(), dtype=flat.dtype)  # the first chunk is never the smaller one
    sent = 0
    for hop in range(2 * (n - 1)):
        reducing = hop < n - 1
        outgoing = chunks[(rank - hop) % n] if reducing else chunks[(rank + 1 - (hop - (n - 1))) % n]
        incoming = chunks[(rank - hop - 1) % n] if reducing else chunks[(rank - (hop - (n - 1))) % n]
        buffer = received[: incoming.numel()] if reducing else incoming
        # Posted together: two blocking sends that face each other would wait for ever.
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
                dist.P2POp(dist.irecv, buffer, (rank - 1) % n),
            ]
        )
        for transfer in work:
            transfer.wait()
        if reducing:
            incoming += buffer
        sent += outgoing.numel() * outgoing.element_size()
    return sent


def both_ways(elements: int):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    expected = tensor.clone()
    dist.all_reduce(expected)
    sent = ring_all_reduce(tensor)
    return torch.allclose(tensor, expected, rtol=1e-12, atol=1e-12), sent, tensor


def place_in_the_world():
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def fail_in_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("the words of rank 1")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, 7, 1200])
def test_ring_all_reduce_equals_the_library(world_size, elements):
    results = run_distributed(both_ways, world_size, elements)
    for equal, _, tensor in results:
        assert equal
        assert torch.equal(tensor, results[0][2]), "all ranks hold the same bits"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ring_all_reduce_sends_what_the_theory_says(world_size):
    for _, sent, _ in run_distributed(both_ways, world_size, 1200):
        assert sent == 8 * 1200 * 2 * (world_size - 1) // world_size


def test_spawn_bootstraps_a_world_through_a_tcp_store():
    results = run_spawned(both_ways, 2, 1200, run=RunConfig(device="cpu"))
    assert all(equal for equal, _, _ in results)
    assert torch.equal(results[0][2], results[1][2])


def test_spawn_raises_what_a_rank_raised():
    with pytest.raises(WorkerFailed, match="the words of rank 1") as caught:
        run_spawned(fail_in_rank_1, 2, run=RunConfig(device="cpu"))
    assert caught.value.rank == 1
