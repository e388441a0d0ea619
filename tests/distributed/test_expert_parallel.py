"""The exchange of rows between the ranks that hold a layer's experts, against one process that has them all."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.distributed import run_distributed
from titanlite.parallel.expert_parallel import from_experts, plan_exchange, to_experts

DIM = 3


def sorted_rows(counts: list[int], rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [N, DIM] that say where they come from, sorted by expert, and the expert of each."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    number = torch.arange(len(experts), dtype=dtype)
    return torch.stack((torch.full_like(number, rank), experts.to(dtype), number), dim=1), experts


def exchange_rows(counts_of_ranks: list[list[int]], dtype: torch.dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, experts = sorted_rows(counts_of_ranks[rank], rank, dtype)
    rows.requires_grad_()
    world = dist.group.WORLD
    assert world is not None
    exchange = plan_exchange(torch.tensor(counts_of_ranks[rank]), world)
    arrived = to_experts(rows, exchange)

    per_rank = len(counts_of_ranks[0]) // size
    mine = range(rank * per_rank, (rank + 1) * per_rank)
    everyone = [sorted_rows(counts, other, dtype) for other, counts in enumerate(counts_of_ranks)]
    expected = [theirs[of == expert] for expert in mine for theirs, of in everyone]
    assert torch.equal(arrived, torch.cat(expected)), "by expert, then by rank, then as they were sent"
    ends = torch.tensor([sum(counts[expert] for counts in counts_of_ranks) for expert in mine]).cumsum(0)
    assert exchange.ends.dtype == torch.int32 and exchange.ends.tolist() == ends.tolist()

    # Each expert multiplies by a number of its own, and each rank weighs what comes back by another.
    sizes = exchange.ends.diff(prepend=exchange.ends.new_zeros(1))
    factor = torch.repeat_interleave(torch.tensor([expert + 2.0 for expert in mine]), sizes).to(dtype).unsqueeze(1)
    returned = from_experts(arrived * factor, exchange)
    factors = (experts + 2.0).to(dtype).unsqueeze(1)
    assert torch.equal(returned, rows * factors), "each row is back in its place"
    weights = torch.arange(1, len(rows) + 1).to(dtype).unsqueeze(1) * (rank + 1)
    twice = [torch.autograd.grad((returned * weights).sum(), rows, retain_graph=True)[0] for _ in range(2)]
    assert all(torch.equal(grad, (weights * factors).expand_as(rows)) for grad in twice)
    assert returned.dtype == arrived.dtype == twice[0].dtype == dtype
    return len(arrived)


CASES = {
    "some experts get nothing": [[1, 0, 3, 2], [0, 0, 1, 5]],
    "all to one rank": [[0, 0, 4, 1], [0, 0, 2, 0]],
    "all to one expert": [[0, 5, 0, 0], [0, 6, 0, 0]],
    "a rank sends nothing": [[0, 0, 0, 0], [1, 2, 3, 4]],
    "nothing at all": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "one expert a rank": [[2, 1, 0, 3], [0, 0, 0, 0], [4, 0, 0, 0], [1, 1, 1, 1]],
    "four ranks": [[2, 1, 0, 3, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 5], [4, 0, 0, 0, 1, 0, 0, 0], [1] * 8],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rows_travel_to_their_experts_and_back(name: str, dtype: torch.dtype) -> None:
    counts = CASES[name]
    arrived = run_distributed(exchange_rows, len(counts), counts, dtype)
    assert sum(arrived) == sum(map(sum, counts)), "nothing is dropped, nothing is padded"
