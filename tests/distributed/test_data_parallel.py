"""What each strategy communicates, and the state it leaves: names, sharding at rest, evaluation, optimizer state."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.distributed import run_distributed
from tests.harness.training import TINY, build, merge, rank_batches, train_step
from titanlite.config.schema import Config
from titanlite.model.transformer import Block
from titanlite.parallel import runtime
from titanlite.parallel.gradients import finish, global_norm
from titanlite.verify.record import full_tensors

FSDP2 = {"parallelism": {"dp_shard": 2}}
FSDP3 = {"parallelism": {"dp_shard": 3}}
DDP2 = {"parallelism": {"dp_replicate": 2}}
HSDP = {"parallelism": {"dp_replicate": 2, "dp_shard": 2}}
UNITS = 3  # two blocks and the root


class CountCollectives(TorchDispatchMode):
    """Calls of the process groups' operations, by kind."""

    def __init__(self):
        super().__init__()
        self.counts = {"allgather": 0, "reduce_scatter": 0, "allreduce": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            (kind,) = (kind for kind in self.counts if kind in func.name())
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(sections):
    config, ranks, model, _ = build(sections)
    batches = rank_batches(config, ranks, 1)
    model.forward_backward(batches)  # the first one also builds groups and buffers
    model.zero_grad()
    counts = []
    for _ in range(2):
        with CountCollectives() as mode:
            model.forward_backward(batches)
        counts.append(mode.counts)
    return len(batches), counts


def state_after_a_step(sections):
    """Per parameter: (is sharded, local elements, elements), at build, after a step, and after evaluating."""
    config, ranks, model, optimizer = build(sections)
    seen = []

    def look():
        parameters = dict(model.module.named_parameters())
        assert list(parameters) == list(model.parameters)
        assert all(parameters[name] is kept for name, kept in model.parameters.items())
        seen.append(
            {
                name: (isinstance(p, DTensor), (p.to_local() if isinstance(p, DTensor) else p).numel(), p.numel())
                for name, p in parameters.items()
            }
        )

    look()
    batches = rank_batches(config, ranks, 1)
    train_step(model, optimizer, ranks, batches, config, 1)
    look()
    model.evaluate(batches[0])
    look()
    assert all(p.dtype == torch.float32 for p in model.parameters.values())
    return seen


def evaluate_between_steps(sections, evaluate):
    """Losses and evaluations of a run that is evaluated on other data before every step, or not."""
    config, ranks, model, optimizer = build(sections)
    losses, evaluations = [], []
    for step in (1, 2, 3):
        if evaluate:
            sums = [model.evaluate(batch).double() for batch in rank_batches(config, ranks, 50)]
            assert not any(loss.requires_grad for loss in sums)
            evaluations.append(ranks.sum_over_data(torch.stack(sums).sum()).item())
        losses.append(train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)[0])
    return losses, evaluations


def uneven_evaluation(sections):
    """DDP must not communicate in evaluation: here only rank 0 evaluates."""
    config, ranks, model, _ = build(sections)
    return model.evaluate(rank_batches(config, ranks, 1)[0]).item() if ranks.is_main else None


def optimizer_state(sections):
    config, ranks, model, optimizer = build(sections)
    for step in (1, 2):
        train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)
    parameters, state = model.parameters, optimizer.state_tensors()
    for name, tensor in state.items():
        parameter: Any = parameters[name.rsplit(".", 1)[0]]
        assert tensor.shape == parameter.shape
        assert isinstance(tensor, DTensor) == isinstance(parameter, DTensor)
        if isinstance(tensor, DTensor):
            assert tensor.device_mesh == parameter.device_mesh
            assert tensor.placements == parameter.placements
            assert tensor.stride() == parameter.stride()
    before = full_tensors(state)
    with torch.no_grad():
        for tensor in state.values():
            tensor.mul_(2.0)
    again = full_tensors(optimizer.state_tensors())
    assert all(again[name].equal(2.0 * before[name]) for name in before), "they share storage with the moments"
    return before


def loaded_before_the_first_step(sections):
    """Losses when the weights are written in place between building and the first forward."""
    config, ranks, model, optimizer = build(sections)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.mul_(0.5)
    return [
        train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)[0] for step in (1, 2, 3)
    ]


def mixed_norm():
    """DTensors on two meshes (one sharded, one sharded and replicated) and a plain tensor, in one norm."""
    ranks = runtime.start(Config.model_validate(TINY).comm, Config.model_validate(TINY).run, four_ranks())
    whole = torch.arange(1.0, 12.0)
    sharded = torch.distributed.tensor.distribute_tensor(whole, ranks.meshes.loss, [SHARD])
    hybrid = torch.distributed.tensor.distribute_tensor(2 * whole, ranks.meshes.hsdp, [REPLICATE, SHARD])
    parameters = []
    for gradient in (sharded, hybrid, torch.tensor([5.0])):
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    partial = torch.nn.Parameter(torch.zeros_like(sharded))
    partial.grad = DTensor.from_local(torch.ones(11), ranks.meshes.loss, [torch.distributed.tensor.Partial()])
    with pytest.raises(AssertionError, match="not reduced"):
        global_norm([partial])
    return global_norm(parameters).item()


SHARD, REPLICATE = torch.distributed.tensor.Shard(0), torch.distributed.tensor.Replicate()


def four_ranks():
    return Config.model_validate(merge(TINY, HSDP)).parallelism


def one_rank_is_not_finite(sections):
    """A NaN in one rank's own gradient shard or data: every rank must skip the same step."""
    config, ranks, model, optimizer = build(sections)
    model.zero_grad()
    model.forward_backward(rank_batches(config, ranks, 1))
    parameters = model.parameters
    if ranks.rank == 1:
        gradient = parameters["layers.0.mlp.up.weight"].grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[0, 0] = float("nan")
    stats = finish(parameters.values(), torch.tensor(100.0), 1.0)
    before = full_tensors(parameters)
    optimizer.step(0.1, stats.grad_scale, stats.found_inf)
    after = full_tensors(parameters)
    return stats.found_inf.item(), all(after[name].equal(before[name]) for name in before), optimizer.n_updates


def block_forwards_of_a_step(sections):
    """Calls of the blocks' own forward in one step, and in one evaluation."""
    calls = []
    forward = Block.forward

    def counting(block, *args):
        calls.append(block)
        return forward(block, *args)

    Block.forward = counting  # type: ignore[method-assign]
    config, ranks, model, _ = build(sections)
    batches = rank_batches(config, ranks, 1)
    model.forward_backward(batches)
    step = len(calls)
    model.evaluate(batches[0])
    return step, len(calls) - step


def compiled_graphs(sections):
    config, ranks, model, optimizer = build(sections)
    losses = [
        train_step(model, optimizer, ranks, rank_batches(config, ranks, step), config, step)[0] for step in (1, 2)
    ]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return losses, graphs, list(model.parameters)


@pytest.mark.parametrize(
    "world_size, sections, gathers, scatters, reduces",
    [
        # of three microbatches; the root stays gathered from forward to backward
        (2, merge(FSDP2, {"parallelism": {"zero_stage": 3}}), 3 * (2 * UNITS - 1), 3 * UNITS, 0),
        (2, merge(FSDP2, {"parallelism": {"zero_stage": 2}}), UNITS, 3 * UNITS, 0),
        (2, merge(FSDP2, {"parallelism": {"zero_stage": 1}}), UNITS, UNITS, 0),
        (4, HSDP, 3 * (2 * UNITS - 1), 3 * UNITS, UNITS),
        (4, merge(HSDP, {"parallelism": {"zero_stage": 1}}), UNITS, UNITS, UNITS),
        # in bf16 a partial sum over replicas may not wait for the next microbatch
        (4, merge(HSDP, {"training": {"mixed_precision_reduce": "bfloat16"}}), 15, 9, 3 * UNITS),
    ],
    ids=["stage3", "stage2", "stage1", "hsdp", "hsdp stage1", "hsdp bf16"],
)
def test_collectives_of_a_step(world_size, sections, gathers, scatters, reduces):
    three = {"training": {"local_batch_size": 24 // world_size // 3}}
    microbatches, counts = run_distributed(collectives_of_a_step, world_size, merge(sections, three))[0]
    assert microbatches == 3
    assert counts[0] == counts[1] == {"allgather": gathers, "reduce_scatter": scatters, "allreduce": reduces}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_sharded_at_rest_in_every_stage(stage):
    sections = merge(FSDP3, {"parallelism": {"zero_stage": stage}, "training": {"local_batch_size": 4}})
    per_rank = run_distributed(state_after_a_step, 3, sections)
    for moment in range(3):
        for name, (sharded, _, elements) in per_rank[0][moment].items():
            assert sharded, name
            assert sum(seen[moment][name][1] for seen in per_rank) == elements


def test_names_are_the_same_in_every_layout():
    everything = {"activation_checkpoint": {"mode": "full"}}
    names = [
        list(run_distributed(state_after_a_step, world_size, merge(sections, everything))[0][0])
        for world_size, sections in ((1, {}), (2, FSDP2), (2, DDP2))
    ]
    assert names[0] == names[1] == names[2]
    assert "layers.1.attention.q_norm.weight" in names[0]


@pytest.mark.parametrize(
    "world_size, sections",
    [(1, {}), (2, DDP2), *[(3, merge(FSDP3, {"parallelism": {"zero_stage": stage}})) for stage in (1, 2, 3)]],
    ids=str,
)
def test_evaluation_leaves_training_alone(world_size, sections):
    sections = merge(sections, {"training": {"local_batch_size": 4}})
    plain, _ = run_distributed(evaluate_between_steps, world_size, sections, False)[0]
    evaluated, evaluations = run_distributed(evaluate_between_steps, world_size, sections, True)[0]
    assert evaluated == plain
    _, one = run_distributed(evaluate_between_steps, 1, {}, True)[0]
    assert evaluations == pytest.approx(one, rel=1e-6)
    assert len(set(evaluations)) == 3, "it sees the updated weights"


def test_ddp_evaluates_without_its_peers():
    assert run_distributed(uneven_evaluation, 2, DDP2)[0] > 0


@pytest.mark.parametrize("world_size, sections", [(3, FSDP3), (4, HSDP), (2, DDP2)], ids=["fsdp3", "hsdp", "ddp2"])
def test_optimizer_state_in_any_layout(world_size, sections):
    one = run_distributed(optimizer_state, 1, {})[0]
    many = run_distributed(optimizer_state, world_size, sections)[0]
    assert many.keys() == one.keys()
    for name, expected in one.items():
        torch.testing.assert_close(many[name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("world_size, sections", [(3, FSDP3), (2, DDP2)], ids=["fsdp3", "ddp2"])
def test_weights_loaded_after_building_are_used(world_size, sections):
    expected = run_distributed(loaded_before_the_first_step, 1, {})[0]
    losses = run_distributed(loaded_before_the_first_step, world_size, sections)[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[0] != pytest.approx(run_distributed(evaluate_between_steps, 1, {}, False)[0][0][0], rel=1e-3)


def test_norm_over_mixed_meshes():
    squares = sum(x * x for x in range(1, 12))
    assert run_distributed(mixed_norm, 4) == pytest.approx([(squares + 4 * squares + 25) ** 0.5] * 4)


def test_a_value_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    assert run_distributed(one_rank_is_not_finite, 3, FSDP3) == [(1.0, True, 0)] * 3


@pytest.mark.parametrize("world_size, sections", [(1, {}), (2, FSDP2), (2, DDP2)], ids=["one", "fsdp2", "ddp2"])
def test_full_checkpointing_runs_every_block_twice(world_size, sections):
    full = merge(sections, {"activation_checkpoint": {"mode": "full"}})
    assert run_distributed(block_forwards_of_a_step, world_size, sections)[0] == (2, 2)
    assert run_distributed(block_forwards_of_a_step, world_size, full)[0] == (4, 2)


def test_compiled_blocks_under_fsdp_and_checkpointing():
    sections = merge(FSDP2, {"activation_checkpoint": {"mode": "full"}})
    compiled = merge(sections, {"compile": {"enable": True}})
    eager_losses, no_graphs, names = run_distributed(compiled_graphs, 2, sections)[0]
    losses, graphs, compiled_names = run_distributed(compiled_graphs, 2, compiled, timeout=300)[0]
    assert no_graphs == 0
    assert graphs == 1, "both blocks share one whole graph"
    assert losses == pytest.approx(eager_losses, rel=1e-6)
    assert compiled_names == names
