"""What counts as a deviation, in which order, and what a flip of experts excuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from titanlite.verify.record import Record, deviations, errors, flips, largest
from titanlite.verify.run import compare

LOADS = torch.tensor([[0, 0, 0], [3000, 5000, 2000]])


def made(**changes: Any) -> Record:
    record = Record(
        init_hash="a" * 64,
        losses=[4.0, 3.0, 2.0],
        norms=[1.0, 1.0, 1.0],
        lrs=[0.1, 0.2, 0.3],
        validation={n: validated(2.0 / n) for n in (2, 3)},
        sample_ids=[[0, 1], [2, 3], [4, 5]],
        tokens=[torch.arange(6).view(2, 3)] * 3,
        routers=[{"router_entropy": 1.0}] * 3,
        biases={"bias": torch.tensor([0.1, -0.1])},
        gradients={"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.5]])},
        weights={"a": torch.zeros(2), "b": torch.ones(1)},
    )
    return replace(record, **changes)


def validated(loss: float) -> dict[str, float]:
    return {"validation_loss": loss, "validation_bits_per_byte": 1.0}


def moved(count: int) -> torch.Tensor:
    return LOADS + torch.tensor([[0, 0, 0], [count, -count, 0]])


@pytest.mark.parametrize(
    ("changes", "what", "step"),
    [
        ({"init_hash": "b" * 64}, "initial weights", 0),
        ({"sample_ids": [[0, 1], [3, 2], [4, 5]]}, "samples", 0),
        ({"tokens": [torch.arange(6).view(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)]}, "samples", 0),
        (
            {"data_rank": 1, "data_size": 2, "sample_ids": [[1], [3], [5]], "tokens": [torch.tensor([[3, 4, 5]])] * 3},
            "samples",
            0,
        ),
        ({"losses": [4.0, 3.0 * (1 + 2e-6), 2.0]}, "loss", 2),
        ({"losses": [4.0, 3.0, math.nan]}, "loss", 3),
        ({"losses": [4.0, 3.0]}, "loss", 3),
        ({"norms": [1 + 2e-5, 1.0, 1.0]}, "norm", 1),
        ({"lrs": [0.1, 0.2, 0.3 + 1e-16]}, "lr", 3),
        ({"validation": {2: validated(1.00001), 3: validated(2 / 3)}}, "validation", 2),
        ({"validation": {2: validated(1.0), 3: validated(0.66667)}}, "validation", 3),
        ({"routers": [{"router_entropy": 1.0}, {"router_entropy": 1.000002}, {"router_entropy": 1.0}]}, "router", 2),
        ({"biases": {"bias": torch.tensor([0.1, 0.0])}}, "expert biases", 3),
        ({"gradients": {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.50001]])}}, "gradient", 1),
        ({"gradients": {"a": torch.tensor([1.0, -2.0])}}, "gradient", 1),
        ({"gradients": {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}}, "gradient", 1),
        ({"gradients": {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([[0.5]])}}, "gradient", 1),
        ({"expert_loads": [LOADS, moved(1), LOADS]}, "expert choices", 2),
    ],
)
def test_one_deviation(changes: dict[str, Any], what: str, step: int) -> None:
    reference = made(expert_loads=[LOADS] * 3) if "expert_loads" in changes else made()
    (found,) = deviations([replace(reference, **changes)], reference)
    assert (found.what, found.step) == (what, step), found
    assert "rank 0" in str(found) or "nobody" in str(found)


def test_every_value_that_is_missing_is_one() -> None:
    found = deviations([made(losses=[4.0], validation={3: validated(2 / 3)})], made())
    assert [(one.what, one.step) for one in found] == [("loss", 2), ("validation", 2), ("validation", 2), ("loss", 3)]
    assert "loss of step 3: none, not 2.0" in found[3].text


def test_what_rounding_does_is_none() -> None:
    record = made(losses=[4.000001, 3.0, 2.0], norms=[1.000009, 1.0, 1.0])
    record.gradients = {"a": torch.tensor([1.00001, -2.0]), "b": torch.tensor([[0.500004]])}
    assert deviations([record], made()) == []


def test_causes_come_first() -> None:
    wrong = {"a": torch.tensor([1.0, -2.5]), "b": torch.tensor([[0.5]])}
    record = made(norms=[2.0, 1.0, 1.0], losses=[5.0, 3.0, 2.0], gradients=wrong, init_hash="b" * 64)
    late = made(lrs=[0.1, 0.5, 0.3], norms=[1.0, 3.0, 1.0])
    found = deviations([late, record], made())
    assert [one.what for one in found] == ["initial weights", "loss", "gradient", "norm", "norm", "lr"]
    assert "gradient of a off by 2.50e-01" in found[2].text and "rank 1" in found[2].text


def test_errors_are_by_each_tensors_largest() -> None:
    reference = {"a": torch.tensor([10.0, 0.0]), "zero": torch.zeros(2), "gone": torch.ones(1)}
    found = errors({"a": torch.tensor([10.0, 0.1]), "zero": torch.zeros(2), "new": torch.ones(1)}, reference)
    assert found == {"a": pytest.approx(0.01), "zero": 0.0, "gone": math.inf, "new": math.inf}
    assert largest(found) == (math.inf, "gone")
    assert errors({"zero": torch.tensor([0.0, 1e-9])}, {"zero": torch.zeros(2)}) == {"zero": math.inf}


# --- flips ---


def judged(loads: list[torch.Tensor], **changes: Any):
    reference = made(expert_loads=[LOADS] * 3)
    return compare([replace(reference, expert_loads=loads, **changes)], reference, lr=0.1)


def test_flips_are_counted_by_step() -> None:
    reference = made(expert_loads=[LOADS] * 3)
    record = made(expert_loads=[LOADS, moved(4), moved(-1)])
    assert flips(record, reference) == [(2, 4), (3, 1)] and flips(reference, reference) == []


def test_a_flip_excuses_what_follows_it_and_nothing_before() -> None:
    late = judged([LOADS, moved(5), moved(7)], losses=[4.0, 3.001, 2.01], norms=[1.0, 1.002, 1.005], biases={})
    assert late.verdict == "agrees" and late.flips == ((2, 5), (3, 7)) and late.deviations == ()
    early = judged([LOADS, moved(5), LOADS], losses=[4.1, 3.0, 2.0])
    assert early.verdict == "deviates" and [one.what for one in early.deviations] == ["loss"]
    others = judged([LOADS, moved(5), LOADS], init_hash="b" * 64)
    assert others.verdict == "deviates"


def test_a_flip_in_the_first_step_decides_nothing() -> None:
    assert judged([moved(1), LOADS, LOADS], losses=[4.001, 3.0, 2.0]).verdict == "undecided"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"losses": [4.01, 3.0, 2.0]}, "loss"),  # one choice of 10,000 is no 2.5e-3 of the loss
        ({"losses": [4.0, 3.0, math.nan]}, "loss"),
        ({"norms": [1.001, 1.0, 1.0]}, "norm"),
        ({"routers": [{"router_entropy": 1.001}] * 3}, "router"),
        ({"lrs": [0.1, 0.2, 0.30001]}, "lr"),
        ({"validation": {2: validated(1.001), 3: validated(2 / 3)}}, "validation"),
        ({"gradients": {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.8]])}}, "gradient"),
        ({"gradients": {"a": torch.tensor([1.0, -2.0])}}, "gradient"),
    ],
)
def test_one_flip_does_not_do_this(changes: dict[str, Any], what: str) -> None:
    result = judged([moved(1), LOADS, LOADS], **changes)
    assert result.verdict == "deviates" and {one.what for one in result.deviations} == {what}


def test_many_flips_excuse_only_so_much() -> None:
    assert judged([LOADS, moved(5), moved(900)], losses=[4.0, 3.0, 2.09]).verdict == "agrees"
    assert judged([LOADS, moved(5), moved(900)], losses=[4.0, 3.0, 2.11]).verdict == "deviates"
    assert judged([LOADS, moved(5), moved(1100)]).verdict == "deviates", "more than a tenth of a step's choices"


def test_more_flips_than_rounding_makes_are_a_deviation() -> None:
    assert judged([LOADS, moved(10), LOADS]).verdict == "agrees", "one in a thousand"
    result = judged([LOADS, moved(11), LOADS], losses=[4.0, 3.0001, 2.0])
    assert [(one.what, one.step) for one in result.deviations] == [("expert choices", 2), ("loss", 2)]


def test_ranks_must_count_the_same() -> None:
    reference = made(expert_loads=[LOADS] * 3)
    records = [reference, replace(reference, expert_loads=[LOADS, moved(1), LOADS])]
    result = compare(records, reference, lr=0.1)
    assert result.verdict == "deviates"
    assert [(one.what, one.step) for one in result.deviations] == [("expert counts", 2), ("expert choices", 2)]


def test_a_run_that_ended_early_is_judged() -> None:
    """As one with a NaN in step 2 is: its record has less of everything."""
    early = judged([moved(1), LOADS], losses=[4.0, math.nan], norms=[1.0, math.nan], validation={}, biases={})
    assert early.verdict == "deviates" and early.loss == math.inf and early.deviations[0].what == "loss"


def test_weights_are_measured_in_learning_rates() -> None:
    result = compare([made(weights={"a": torch.tensor([0.0, 0.05]), "b": torch.ones(1)})], made(), lr=0.1)
    assert (result.weights, result.weights_of, result.verdict) == (pytest.approx(0.5), "a", "agrees")
