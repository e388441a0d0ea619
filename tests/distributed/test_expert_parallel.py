"""The exchange of rows between the ranks that hold a layer's experts; checkpoints of divided experts.

That a whole run is the same as in one process is tests/parity/test_moe_parity.py's.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.test_resume import assert_same_curve, curve, rows, train
from tests.harness.distributed import run_distributed
from tests.parity.harness import make_text
from tests.parity.layouts import ONE_PROCESS
from tests.parity.moe_layouts import DEEPSEEK, MOE_LAYOUTS
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
    offs = torch.tensor([sum(counts[expert] for counts in counts_of_ranks) for expert in mine]).cumsum(0)
    assert exchange.offs.dtype == torch.int32 and exchange.offs.tolist() == offs.tolist()

    # Each expert multiplies by a number of its own, and each rank weighs what comes back by another.
    sizes = exchange.offs.diff(prepend=exchange.offs.new_zeros(1))
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


# ---- checkpoints


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("experts") / "text")


@pytest.mark.parametrize("name", ["deepseek: ep 2 of cp 2 x fsdp 2", "softmax, odd: fsdp 6, accumulation 2"])
def test_a_resumed_run_is_bitwise_the_unbroken_one(name: str, text: Path, tmp_path: Path) -> None:
    layout, sections = MOE_LAYOUTS[name]
    unbroken = train(layout, text, tmp_path / "unbroken", 5, sections)
    for steps in (2, 5):
        resumed = train(layout, text, tmp_path / "broken", steps, sections)
    assert curve(tmp_path / "broken") == curve(tmp_path / "unbroken")
    assert resumed == unbroken


def test_runs_go_on_under_other_layouts(text: Path, tmp_path: Path) -> None:
    """One process and any ep: the same names and whole tensors, and the biases that choose experts."""
    train(ONE_PROCESS, text, tmp_path / "one", 6, DEEPSEEK)
    for name, steps in (
        ("deepseek: ep 2 of tp 2", 2),
        ("deepseek: pp 2 x ep 2, ZBVZeroBubble", 3),
        ("", 4),
        ("deepseek: ep 4", 6),
    ):
        layout = MOE_LAYOUTS[name][0] if name else ONE_PROCESS
        train(layout, text, tmp_path / "many", steps, DEEPSEEK)
    assert_same_curve(tmp_path / "many", tmp_path / "one")
    mine, other = rows(tmp_path / "many"), rows(tmp_path / "one")
    loads = ("expert_load_max", "expert_load_min", "expert_assignments")
    assert all(a[key] == b[key] for a, b in zip(mine, other, strict=True) for key in loads), "no choice flipped"
    names = [saved_names(tmp_path / run / "run/checkpoints/step-00000006") for run in ("many", "one")]
    assert names[0] == names[1]
    assert names[0].issuperset(f"model.layers.{n}.mlp.router.expert_bias" for n in (1, 2, 3))


def saved_names(checkpoint: Path) -> set[str]:
    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
