"""The learning-rate schedule: its shape, its rule at the borders, and that it is finite for every setting."""

import itertools
import math
import subprocess
import sys

import pytest

from titanlite.config.schema import LRSchedulerConfig
from titanlite.optim.schedule import lr_at


def schedule(**keys):
    config = LRSchedulerConfig(**keys)
    return [lr_at(step, 2.0, config) for step in range(1, config.total_steps + 4)]


def test_warmup_is_linear_and_starts_above_zero():
    lrs = schedule(total_steps=10, warmup_steps=4, decay_ratio=0.0)
    assert lrs[:4] == [0.5, 1.0, 1.5, 2.0]
    assert lrs[4:10] == [2.0] * 6


def test_warmup_stable_decay():
    lrs = schedule(total_steps=10, warmup_steps=2, decay_ratio=0.4, decay_type="linear", min_lr_factor=0.0)
    assert lrs == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(("decay_type", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_decay_shapes(decay_type, halfway):
    lrs = schedule(total_steps=8, decay_type=decay_type, min_lr_factor=0.1)
    assert lrs[3] == pytest.approx(2.0 * (0.1 + 0.9 * halfway))
    assert lrs[7] == pytest.approx(0.2), "the last step of the schedule is at the minimum"
    assert lrs[8:] == pytest.approx([0.2] * 3), "and so is everything after it"
    assert all(later < earlier for earlier, later in itertools.pairwise(lrs[:8]))


def test_cosine_is_slow_at_both_ends():
    lrs = schedule(total_steps=100, min_lr_factor=0.0)
    drops = [earlier - later for earlier, later in itertools.pairwise(lrs[:100])]
    assert drops[0] < drops[50] / 10
    assert drops[-1] < drops[50] / 10


def test_decay_is_cut_to_what_warmup_leaves():
    lrs = schedule(total_steps=10, warmup_steps=6, decay_ratio=0.9, decay_type="linear", min_lr_factor=0.0)
    assert lrs[5] == 2.0
    assert lrs[6:10] == pytest.approx([1.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("ratio", [1e-12, 0.01, 0.05])
def test_a_decay_takes_at_least_one_step(ratio):
    lrs = schedule(total_steps=10, warmup_steps=2, decay_ratio=ratio, min_lr_factor=0.3)
    assert lrs == [1.0] + [2.0] * 8 + [0.6] * 4


def test_without_decay_the_peak_holds_for_ever():
    assert schedule(total_steps=5, warmup_steps=2, decay_ratio=0.0, min_lr_factor=0.3) == [1.0] + [2.0] * 7


def test_past_the_end_of_a_decay_is_the_minimum_whatever_came_before():
    assert schedule(total_steps=5, warmup_steps=9, min_lr_factor=0.3)[5:] == pytest.approx([0.6] * 3)


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
def test_finite_and_between_the_bounds_for_every_edge(decay_type):
    for total, warmup, ratio, lowest in itertools.product(
        (1, 2, 7), (0, 1, 2, 7, 20), (0.0, 0.01, 0.5, 1.0), (0.0, 0.1, 1.0)
    ):
        lrs = schedule(
            total_steps=total, warmup_steps=warmup, decay_ratio=ratio, decay_type=decay_type, min_lr_factor=lowest
        )
        assert all(math.isfinite(lr) and 0.0 <= lr <= 2.0 for lr in lrs), (total, warmup, ratio, lowest, lrs)
        if ratio > 0:
            assert lrs[total:] == pytest.approx([2.0 * lowest] * 3)


def test_needs_no_torch():
    code = "import sys, titanlite.optim.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
