"""The plan's torch-free knowledge of torch's schedules, against the schedules themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from titanlite.config.layout import LOOPED, SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, PipelinePlan
from titanlite.parallel.pipeline_parallel import SCHEDULES


def torchs_order(plan: PipelinePlan, microbatches: int, rank: int = 0) -> dict[int, list[Any]] | None:
    """torch's actions of every rank, or None when it refuses so many microbatches."""
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=len(plan.layers),
            group_size=plan.pp,
            group_rank=rank,
            is_last=index == len(plan.layers) - 1,
            submod=SimpleNamespace(modules=list),
        )
        for index in plan.stages_of(rank)
    ]
    try:
        schedule = SCHEDULES[plan.schedule](stages[0] if plan.schedule in SINGLE_STAGE else stages, microbatches)
    except ValueError:
        return None
    return schedule.pipeline_order or {}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_accepted_microbatches_and_places_of_stages_are_torchs(name: str, pp: int) -> None:
    n_stages = pp if name in SINGLE_STAGE else 2 * pp
    plan = PipelinePlan(name, pp, tuple(range(n, n + 1) for n in range(n_stages)), 0)
    for microbatches in range(1, 14):
        order = torchs_order(plan, microbatches)
        assert plan.accepts(microbatches) == (order is not None), microbatches
        for rank, actions in (order or {}).items():
            found = {a.stage_index for a in actions if a is not None and a.stage_index >= 0}
            assert found == set(plan.stages_of(rank))
    assert all(stage in plan.stages_of(plan.rank_of(stage)) for stage in range(n_stages))


FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward_input", "backward_weight"
PARTS = {
    Kind.FORWARD: (FORWARD,),
    Kind.BACKWARD_INPUT: (BACKWARD_INPUT,),
    Kind.BACKWARD_WEIGHT: (BACKWARD_WEIGHT,),
    Kind.FULL_BACKWARD: (BACKWARD_INPUT, BACKWARD_WEIGHT),
}


def idle_share(plan: PipelinePlan, microbatches: int) -> float:
    """Of torch's order of actions where forward and each part of backward take one unit of time, and sending none."""
    order = torchs_order(plan, microbatches)
    assert order
    todo: dict[int, list[Any]] = {}
    for rank, actions in order.items():
        flat = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
        todo[rank] = [action for action in flat if action.computation_type in PARTS]
    work = sum(len(PARTS[action.computation_type]) for actions in todo.values() for action in actions)
    clocks = dict.fromkeys(todo, 0)
    last = len(plan.layers) - 1
    finished = {(FORWARD, -1, m): 0 for m in range(microbatches)}  # the inputs
    finished |= {(BACKWARD_INPUT, last + 1, m): 0 for m in range(microbatches)}  # of the loss
    while any(todo.values()):
        before = dict(clocks)
        for rank, actions in todo.items():
            while actions:
                kind, stage, m = actions[0].computation_type, actions[0].stage_index, actions[0].microbatch_index
                needed = (FORWARD, stage - 1, m) if kind == Kind.FORWARD else (BACKWARD_INPUT, stage + 1, m)
                if needed not in finished:
                    break
                start = max(clocks[rank], finished[needed])
                clocks[rank] = start + len(PARTS[kind])
                # A full backward sends its input's gradient on when all of it is done.
                finished |= {(part, stage, m): clocks[rank] for part in PARTS[kind]}
                actions.pop(0)
        assert clocks != before, "torch's order is stuck"
    return 1 - work / (plan.pp * max(clocks.values()))


# Not 1F1B: torch 2.13 writes its order with other microbatches' numbers than it runs.
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1F1B"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_bubble_is_that_of_torchs_order(name: str, pp: int) -> None:
    for stages_a_rank in (1,) if name in SINGLE_STAGE else (2, 3) if name in LOOPED else (2,):
        plan = PipelinePlan(name, pp, tuple(range(n, n + 1) for n in range(stages_a_rank * pp)), 0)
        for m in (1, 2, 3, 4, 6, 8, 12):
            if not plan.accepts(m):
                continue
            found = idle_share(plan, m)
            if name in SPLIT_BACKWARD and m < pp * (2 if name in V_SHAPED else 1):
                assert found > plan.ideal_bubble(m) - 1e-9
            else:
                assert found == pytest.approx(plan.ideal_bubble(m)), (stages_a_rank, m)
