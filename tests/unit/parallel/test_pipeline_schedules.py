"""The plan's torch-free knowledge of torch's schedules, against the schedules themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.config.layout import SINGLE_STAGE, PipelinePlan
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
