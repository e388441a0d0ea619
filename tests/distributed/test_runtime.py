"""Start, collectives of Ranks, seeds, timeouts, teardown."""

import os
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness.distributed import WorkerFailed, run_distributed
from titanlite.config.schema import CommConfig, ParallelismConfig, RunConfig
from titanlite.parallel import runtime

CPU = RunConfig(device="cpu")


def begin(run=CPU, comm=None, **degrees):
    return runtime.start(comm or CommConfig(), run, ParallelismConfig(**degrees))


def collectives():
    ranks = begin(dp_replicate=3)
    rank = float(ranks.rank)
    summed = ranks.sum_over_data(torch.tensor(rank)).item()
    obj = ranks.broadcast_object({"from": ranks.rank}, src=2)
    gathered = ranks.all_gather_object(f"rank {ranks.rank}")
    ranks.barrier()
    place = (ranks.rank, ranks.world_size, ranks.data_rank, ranks.data_size, ranks.is_main)
    return place, summed, obj, gathered


def objects_of_a_channel():
    channel = begin(dp_replicate=3).object_channel()
    name = f"rank {channel.rank}"
    scattered = channel.scatter([10, 20, 30] if channel.rank == 0 else None)
    return channel.size, channel.all_gather(name), channel.gather(name), scattered


def a_slow_rank(seconds):
    """One rank comes late to a collective of a channel, both of comm's timeouts being 1 s."""
    ranks = begin(comm=CommConfig(init_timeout_seconds=1, train_timeout_seconds=1), dp_replicate=2)
    ranks.use_train_timeout()
    channel = ranks.object_channel()
    if ranks.rank == 1:
        time.sleep(seconds)
    return channel.all_gather(ranks.rank)


def data_sum_with_tensor_parallel():
    ranks = begin(dp_shard=2, tp=2)
    tokens = torch.tensor(10.0 ** (ranks.rank // 2))  # the two ranks of a tp group hold the same tokens
    return ranks.data_rank, ranks.data_size, ranks.sum_over_data(tokens).item()


def data_sum_with_context_parallel():
    ranks = begin(dp_shard=2, cp=2)
    return ranks.data_rank, ranks.data_size, ranks.sum_over_data(torch.tensor(10.0**ranks.rank)).item()


def draws(seed):
    begin(RunConfig(device="cpu", seed=seed))
    return random.random(), np.random.random(), torch.rand(1).item()


def world_that_was_not_expected():
    os.environ["TITANLITE_WORLD_SIZE"] = "4"
    begin()


def layout_that_does_not_fit():
    begin(dp_replicate=3, dp_shard=1)


def alone():
    """A world of one without any environment, in a process that was never connected."""
    runtime.stop()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ranks = begin()
    assert ranks.all_gather_object(5) == [5]
    assert ranks.broadcast_object("x") == "x"
    ranks.barrier()
    channel = ranks.object_channel()
    assert (channel.rank, channel.size) == (0, 1)
    assert channel.all_gather(5) == channel.gather(5) == [5] and channel.scatter([5]) == 5
    total = ranks.sum_over_data(torch.tensor(3.0)).item()
    runtime.stop()
    assert not dist.is_initialized()
    runtime.stop()
    return ranks.rank, ranks.world_size, total


def numerics(deterministic):
    begin(RunConfig(device="cpu", deterministic=deterministic))
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def late_to_a_collective(seconds):
    ranks = begin(comm=CommConfig(train_timeout_seconds=1), dp_replicate=2)
    ranks.use_train_timeout()
    if ranks.rank == 1:
        time.sleep(seconds)
    ranks.barrier()
    if seconds > 1:
        ranks.barrier()


def test_collectives_of_ranks():
    for rank, (place, summed, obj, gathered) in enumerate(run_distributed(collectives, 3)):
        assert place == (rank, 3, rank, 3, rank == 0)
        assert summed == 3.0
        assert obj == {"from": 2}
        assert gathered == ["rank 0", "rank 1", "rank 2"]


def test_object_channel():
    names = ["rank 0", "rank 1", "rank 2"]
    expected = [(3, names, names if rank == 0 else None, 10 * (rank + 1)) for rank in range(3)]
    assert run_distributed(objects_of_a_channel, 3) == expected


def test_a_channel_waits_for_a_slow_rank():
    """As long as a checkpoint may take to write; the timeouts of training do not count."""
    assert run_distributed(a_slow_rank, 2, 3) == [[0, 1]] * 2
    assert runtime.CHANNEL_TIMEOUT.total_seconds() >= 3600


def test_ranks_with_the_same_tokens_are_counted_once():
    results = run_distributed(data_sum_with_tensor_parallel, 4)
    assert results == [(0, 2, 11.0), (0, 2, 11.0), (1, 2, 11.0), (1, 2, 11.0)]


def test_ranks_with_parts_of_a_sequence_are_all_counted():
    results = run_distributed(data_sum_with_context_parallel, 4)
    assert results == [(0, 2, 1111.0), (0, 2, 1111.0), (1, 2, 1111.0), (1, 2, 1111.0)]


def test_seeds_are_the_same_on_all_ranks():
    first, second = run_distributed(draws, 2, 1)
    assert first == second
    assert run_distributed(draws, 1, 2)[0] != first
    assert all(0 <= draw < 1 for draw in run_distributed(draws, 1, 2**63 + 1)[0]), "any seed the config allows"


def test_deterministic():
    assert run_distributed(numerics, 1, True) == [(True, "highest", ":4096:8")]
    assert run_distributed(numerics, 1, False)[0][:2] == (False, "highest")


def test_a_world_of_one_without_an_environment():
    assert run_distributed(alone, 1) == [(0, 1, 3.0)]


def test_an_unexpected_world_is_refused():
    with pytest.raises(WorkerFailed, match=r"InputError.*got 2 processes met; allowed: 4"):
        run_distributed(world_that_was_not_expected, 2)


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(WorkerFailed, match="InputError"):
        run_distributed(layout_that_does_not_fit, 2)


def test_training_timeout_ends_a_collective():
    run_distributed(late_to_a_collective, 2, 0)
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rank 0 raised(.|\n)*[Tt]imed out"):
        run_distributed(late_to_a_collective, 2, 8)
    assert time.monotonic() - start < 7, "the timeout of 1 s, not the default of 300 s"
