"""The table of layouts is complete, so that one that is taken out is missed: torch-free, nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import pytest

from tests.harness.training import merge
from tests.parity.layouts import BASE, LAYOUTS, SCHEDULES
from titanlite.config.layout import plan_batch, plan_pipeline, resolve_layout
from titanlite.config.schema import Config

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "ring", "allgather")  # the last two: cp, by its method


@dataclass(frozen=True)
class Case:
    """What a layout is, read from its configuration and not from its name."""

    config: Config
    degrees: dict[str, int]  # above 1
    accumulation: int
    stages: tuple[range, ...]  # the layers of each

    @property
    def tied(self) -> bool:
        return self.config.model.tie_word_embeddings

    @property
    def masked(self) -> bool:
        return self.config.data.document_mask

    @property
    def schedule(self) -> str:
        return self.config.parallelism.pp_schedule

    @property
    def recomputed(self) -> bool:
        return self.config.activation_checkpoint.mode != "none"


def case(name: str) -> Case:
    layout, sections = LAYOUTS[name]
    config = Config.model_validate(merge(BASE, sections, layout.sections))
    parallelism = config.parallelism
    found = resolve_layout(parallelism, layout.world_size)
    degrees = {axis: getattr(found, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
    degrees[parallelism.cp_method] = found.cp
    pipeline = plan_pipeline(config.model, parallelism)
    return Case(
        config,
        {axis: degree for axis, degree in degrees.items() if degree > 1},
        plan_batch(config.training, found, pipeline).accumulation_steps,
        pipeline.layers if pipeline else (),
    )


CASES = {name: case(name) for name in LAYOUTS}


def together(count: int) -> Iterator[frozenset[str]]:
    """Sets of so many axes that can be in one layout."""
    sets = (frozenset(axes) for axes in combinations(AXES, count))
    return (axes for axes in sets if not axes >= {"ring", "allgather"})


def of(axes: frozenset[str]) -> list[Case]:
    """All cases of exactly these axes, each at 2."""
    return [case for case in CASES.values() if case.degrees == dict.fromkeys(axes, 2)]


def named(axes: frozenset[str]) -> str:
    return " x ".join(axis for axis in AXES if axis in axes)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("axis", AXES)
def test_each_degree_alone(axis: str, degree: int) -> None:
    assert any(case.degrees == {axis: degree} for case in CASES.values())


@pytest.mark.parametrize("axes", [*together(2), *together(3)], ids=named)
def test_all_pairs_and_triples(axes: frozenset[str]) -> None:
    assert of(axes)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axes", [axes for axes in together(2) if "dp_shard" in axes], ids=named)
def test_each_zero_stage_and_accumulation_in_each_pair_with_shards(axes: frozenset[str], stage: int) -> None:
    there = any(case.config.parallelism.zero_stage == stage and case.accumulation == 2 for case in of(axes))
    assert there == (stage != 2 or "pp" not in axes), "2 is refused under a pipeline"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule(schedule: str) -> None:
    degrees = [case.degrees for case in CASES.values() if case.schedule == schedule]
    assert {"dp_replicate": 2, "pp": 2} in degrees
    assert {"pp": 4} in degrees


@pytest.mark.parametrize("axes", [axes for axes in together(3) if "allgather" in axes], ids=named)
def test_documents_are_masked_in_each_triple_that_can(axes: frozenset[str]) -> None:
    assert any(case.masked for case in of(axes))


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_with_what_a_run_can_have(axis: str) -> None:
    cases = [case for case in CASES.values() if axis in case.degrees]
    assert any(case.accumulation > 1 for case in cases)
    assert any(case.recomputed for case in cases)
    if axis == "allgather":
        return  # what its triples have are masks
    assert any(case.tied and len(case.degrees) == 3 for case in cases)


def test_stages_of_unequal_numbers_of_layers() -> None:
    uneven = {case.schedule for case in CASES.values() if len({len(layers) for layers in case.stages}) > 1}
    assert uneven == set(SCHEDULES)


def test_no_layout_is_there_twice() -> None:
    configs = [(case.config.model_dump_json(), str(case.degrees)) for case in CASES.values()]
    assert len(set(configs)) == len(configs) >= 40
