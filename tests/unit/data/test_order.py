"""The order of samples: its frozen definition, and that it is exact."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from titanlite.data.order import BLOCK, Phase, SampleOrder, block_quotas

# Reference: the definition in the docstring of order.py, in Python integers, one sample at a time.
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def key_of(*parts: int) -> int:
    key = 0
    for part in parts:
        key = mix(((key ^ part) + 0x9E3779B97F4A7C15) & MASK)
    return key


def permute(x: int, size: int, key: int) -> int:
    bits = (size - 1).bit_length()
    low_bits = bits // 2
    while True:
        high, low = x >> low_bits, x & ((1 << low_bits) - 1)
        for i in range(4):
            high ^= mix(((low ^ key) + (2 * i + 1) * 0x9E3779B97F4A7C15) & MASK) & ((1 << (bits - low_bits)) - 1)
            low ^= mix(((high ^ key) + (2 * i + 2) * 0x9E3779B97F4A7C15) & MASK) & ((1 << low_bits) - 1)
        x = high << low_bits | low
        if x < size:
            return x


def reference(
    windows: list[int], weights: list[float], seed: int, k: int, phase: Phase | None = None
) -> tuple[int, int, int]:
    phase = phase or Phase(0, tuple(range(len(windows))), (0,) * len(windows))
    quotas = block_quotas(weights)
    starts = list(itertools.accumulate(quotas, initial=0))
    block, row = divmod(k - phase.start, BLOCK)
    key = key_of(1, seed, block)
    pattern = []
    for place in range(row + 1):
        permuted = permute(place, BLOCK, key)
        pattern.append(next(i for i in range(len(quotas)) if permuted < starts[i + 1]))
    source = pattern[row]
    number = phase.offsets[source] + block * quotas[source] + pattern[:row].count(source)
    epoch, position = divmod(number, windows[source])
    return source, epoch, permute(position, windows[source], key_of(2, seed, phase.streams[source], epoch))


# The sample definition is final: a run's data must never change under it. Do not edit these numbers.
GOLDEN_ONE = [
    (0, 0, 767),
    (0, 0, 624),
    (0, 0, 245),
    (0, 0, 465),
    (0, 1, 272),
    (0, 1, 882),
    (0, 1, 653),
    (0, 5, 192),
    (0, 123, 744),
    (0, 1000000, 962),
    (0, 1000000000, 63),
]
GOLDEN_THREE = [
    (2, 0, 2787966571),
    (1, 0, 1),
    (1, 0, 4),
    (1, 8, 6),
    (2, 0, 8684077269),
    (0, 0, 636),
    (0, 0, 766),
    (1, 40, 29),
    (0, 61, 628),
    (0, 499999, 579),
    (0, 500000000, 353),
]
GOLDEN_PHASE = [
    (2, 54, 18970739463),
    (1, 0, 11),
    (1, 0, 17),
    (1, 8, 30),
    (2, 54, 18788168633),
    (0, 3, 136),
    (0, 3, 958),
    (1, 40, 29),
    (0, 64, 688),
    (0, 500002, 503),
    (0, 500000002, 973),
]
GOLDEN_SAMPLES = [0, 1, 2, 999, 1000, 1023, 1024, 5000, 123_456, 10**9, 10**12]


def test_golden_one_source():
    order = SampleOrder([1000], [1.0], seed=42)
    assert [order.locate(k) for k in GOLDEN_SAMPLES] == GOLDEN_ONE


def test_golden_three_sources():
    order = SampleOrder([1000, 37, 20_000_000_000], [0.5, 0.3, 0.2], seed=7)
    assert [order.locate(k) for k in GOLDEN_SAMPLES] == GOLDEN_THREE


@pytest.mark.parametrize(
    ("windows", "weights", "seed"),
    [
        ([1], [1.0], 0),
        ([2], [1.0], 3),
        ([5], [2.0], 3),
        ([1000], [1.0], 42),
        ([(1 << 40) + 17], [1.0], (1 << 64) - 1),
        ([3, 1, 700], [0.5, 0.3, 0.2], 7),
    ],
)
def test_equals_the_definition(windows: list[int], weights: list[float], seed: int):
    order = SampleOrder(windows, weights, seed)
    samples = [*range(40), 1023, 1024, 2047, 2500, 10**7 + 3]
    assert [order.locate(k) for k in samples] == [reference(windows, weights, seed, k) for k in samples]


@pytest.mark.parametrize(
    ("windows", "weights", "phase"),
    [
        ([5], [1.0], Phase(0, (0,), (0,))),
        ([5], [1.0], Phase(3, (1,), (7,))),
        ([3, 1, 700], [0.5, 0.3, 0.2], Phase(1500, (2, 9, 0), (0, 10**12, 699))),
    ],
)
def test_a_phase_equals_the_definition(windows: list[int], weights: list[float], phase: Phase):
    order = SampleOrder(windows, weights, 7, phase=phase)
    samples = [phase.start + k for k in (*range(40), 1023, 1024, 2047, 2500, 10**7 + 3)]
    assert [order.locate(k) for k in samples] == [reference(windows, weights, 7, k, phase) for k in samples]
    with pytest.raises(ValueError, match=f"start at {phase.start}"):
        order.locate(phase.start - 1)


def test_golden_phase():
    phase = Phase(5000, (0, 2, 4), (2500, 0, 1 << 40))
    order = SampleOrder([1000, 37, 20_000_000_000], [0.5, 0.3, 0.2], seed=7, phase=phase)
    assert [order.locate(5000 + k) for k in GOLDEN_SAMPLES] == GOLDEN_PHASE


@pytest.mark.parametrize("phase", [None, Phase(1234, (3, 0, 1), (50, 0, 77))])
def test_counts_are_the_samples_of_each_source_before(phase: Phase | None):
    order = SampleOrder([70, 30, 13], [0.5, 0.3, 0.2], 9, phase=phase)
    start, offsets = order.phase.start, np.array(order.phase.offsets)
    sources, _, _ = order.locate_many(np.arange(start, start + 3 * BLOCK))
    for k in [*range(20), 1000, 1023, 1024, 1025, 2048, 3000, 3 * BLOCK]:
        assert order.counts(start + k) == tuple(offsets + np.bincount(sources[:k], minlength=3))
    assert order.counts(start + BLOCK) == tuple(offsets + order.quotas)
    one = SampleOrder([70], [1.0], 9, phase=Phase(5, (1,), (3,)))
    assert one.counts(5) == (3,) and one.counts(2000) == (1998,)


def test_counts_far_away_cost_one_block():
    order = SampleOrder([10**11, 10**10], [3, 1], seed=1)
    assert order.counts(10**15 * BLOCK) == (768 * 10**15, 256 * 10**15)


@pytest.mark.parametrize("k", [0, 1, 699, 1023, 1024, 1700, 5000])
def test_a_phase_with_the_same_sources_goes_on_in_their_permutations(k: int):
    """Whatever the mix: a source's windows come in the order in which they would have come."""
    first = SampleOrder([700, 300], [3, 1], seed=4)
    second = SampleOrder([300, 700], [1, 1], seed=4, phase=Phase(k, (1, 0), first.counts(k)[::-1]))
    one = np.stack(first.locate_many(np.arange(12_000)), axis=1)
    both = np.concatenate([one[:k], np.stack(second.locate_many(np.arange(k, 12_000)), axis=1)])
    both[k:, 0] = 1 - both[k:, 0]
    for source in (0, 1):
        plain, changed = one[one[:, 0] == source], both[both[:, 0] == source]
        n = min(len(plain), len(changed))
        assert n > 2000 and np.array_equal(plain[:n], changed[:n])


def test_locate_many_is_locate_in_any_order_and_any_cut():
    order = SampleOrder([100, 333], [1.0, 3.0], seed=5)
    samples = np.random.default_rng(0).permutation(6000)
    many = np.stack(order.locate_many(samples), axis=1)
    assert [tuple(row) for row in many[:200].tolist()] == [order.locate(int(k)) for k in samples[:200]]
    cut = np.concatenate([np.stack(order.locate_many(part), axis=1) for part in np.split(samples, [7, 1000, 1001])])
    assert np.array_equal(many, cut)
    assert all(column.size == 0 for column in order.locate_many(np.array([], dtype=np.int64)))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 1023, 1024, 1025, 70_001])
def test_every_epoch_of_one_source_is_a_permutation(n: int):
    order = SampleOrder([n], [1.0], seed=11)
    _, epochs, windows = order.locate_many(np.arange(3 * n))
    assert np.array_equal(epochs, np.repeat([0, 1, 2], n))
    for epoch in range(3):
        assert np.array_equal(np.sort(windows[epochs == epoch]), np.arange(n))


def test_every_epoch_seed_and_source_has_its_own_order():
    def windows_of(seed: int, epoch: int, source: int) -> tuple[int, ...]:
        sources, epochs, windows = SampleOrder([500, 500], [1, 1], seed).locate_many(np.arange(5 * BLOCK))
        return tuple(windows[(sources == source) & (epochs == epoch)].tolist())

    orders = {windows_of(seed, epoch, source) for seed in (0, 1, 1 << 40) for epoch in (0, 1, 2) for source in (0, 1)}
    assert len(orders) == 3 * 3 * 2


def test_the_order_looks_random():
    """Neither the first position's window nor the distance of neighbours leans anywhere: chi-square of 16 bins."""
    n = 1600
    firsts, steps = [], []
    for seed in range(200):
        _, _, windows = SampleOrder([n], [1.0], seed).locate_many(np.arange(n))
        firsts.append(windows[:8])
        steps.append(np.diff(windows[:9]) % n)
        assert abs(np.corrcoef(windows, np.arange(n))[0, 1]) < 5 / math.sqrt(n)
    for values in (np.concatenate(firsts), np.concatenate(steps)):
        counts = np.bincount(values // (n // 16), minlength=16)
        chi_square = float(((counts - 100) ** 2 / 100).sum())
        assert chi_square < 44.3  # 15 degrees of freedom, p = 1e-4; the values are fixed, so this cannot flicker


def test_small_permutations_are_all_reached_evenly():
    seen = Counter(tuple(SampleOrder([4], [1.0], seed).locate_many(np.arange(4))[2].tolist()) for seed in range(2400))
    assert len(seen) == 24
    assert min(seen.values()) > 50 and max(seen.values()) < 150


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1, 1, 1], [1, 2, 1000], [0.1] * 7, [3], [1e-300, 1e-300]])
def test_quotas_are_within_one_of_the_weights(weights: list[float]):
    quotas = block_quotas(weights)
    total = sum(map(Fraction, weights))
    assert sum(quotas) == BLOCK
    assert all(abs(q - BLOCK * Fraction(w) / total) < 1 for q, w in zip(quotas, weights, strict=True))


def test_a_source_has_a_place_down_to_the_least_weight_that_is_accepted():
    assert block_quotas([1023, 1]) == (1023, 1)
    assert block_quotas([1] * 1024) == (1,) * 1024
    for weights in ([1023, 0.999], [1, 0], []):  # config/check.py refuses the first, the types the others
        with pytest.raises(AssertionError, match="not checked"):
            block_quotas(weights)


def test_quota_ties_go_to_the_lower_index():
    assert block_quotas([1, 1, 1]) == (342, 341, 341)
    assert block_quotas([2, 2, 2]) == (342, 341, 341)


def test_the_counts_of_the_issue():
    """0.5/0.3/0.2 in every block of 2.5 epochs of the smallest source, and of the largest."""
    windows, weights = [40_000, 9_000, 3_000], np.array([0.5, 0.3, 0.2])
    order = SampleOrder(windows, weights.tolist(), seed=12)
    quotas = np.array(order.quotas)
    n_blocks = int(2.5 * windows[0] / quotas[0]) + 1
    sources, epochs, _ = order.locate_many(np.arange(n_blocks * BLOCK))
    running = np.zeros(3, dtype=int)
    for number, block in enumerate(sources.reshape(n_blocks, BLOCK), start=1):
        counts = np.bincount(block, minlength=3)
        assert np.all(np.abs(counts - BLOCK * weights) < 1)
        running += counts
        assert np.array_equal(running, number * quotas), "exact over whole blocks"
    assert [int(epochs[sources == i].max()) for i in range(3)] == [2, 6, 13]


def test_weights_are_realised_in_every_block():
    order = SampleOrder([400, 90, 5000], [0.5, 0.3, 0.2], seed=3)
    sources, _, _ = order.locate_many(np.arange(50 * BLOCK))
    for block in sources.reshape(50, BLOCK):
        counts = np.bincount(block, minlength=3)
        assert np.all(np.abs(counts - BLOCK * np.array([0.5, 0.3, 0.2])) < 1)
    assert len({tuple(block) for block in sources.reshape(50, BLOCK).tolist()}) == 50  # each mixed in its own way


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_two_and_a_half_epochs_with_stops_have_no_gap_and_no_repeat(world_size: int):
    """The union over ranks and stops, with another batch size after each stop, is the plain sequence."""
    windows, weights = [700, 300, 123], [0.5, 0.3, 0.2]
    order = SampleOrder(windows, weights, seed=9)
    n_samples = int(2.5 * 1123) // 24 * 24
    seen, start = [], 0
    for stop, batch in [(24, 12), (BLOCK // 12 * 12, 12), (1500, 12), (n_samples, 24)]:
        stop = start + (stop - start) // batch * batch
        for step in range(start, stop, batch):
            share = batch // world_size
            for rank in range(world_size):
                numbers = np.arange(step + rank * share, step + (rank + 1) * share)
                seen += [tuple(row) for row in np.stack(order.locate_many(numbers), axis=1).tolist()]
        start = stop
    sequence = np.stack(order.locate_many(np.arange(start)), axis=1)
    assert seen == [tuple(row) for row in sequence.tolist()]
    assert len(set(seen)) == len(seen) == start
    for source, size in enumerate(windows):
        mine = sequence[sequence[:, 0] == source]
        for epoch in range(int(mine[:, 1].max())):  # every epoch but the last is whole
            assert np.array_equal(np.sort(mine[mine[:, 1] == epoch, 2]), np.arange(size))
        last = mine[mine[:, 1] == mine[:, 1].max(), 2]
        assert len(set(last.tolist())) == len(last)


@pytest.mark.parametrize(
    ("windows", "weights", "epochs"),
    [([100], [1], 1), ([100], [1], 3), ([1024], [1], 2), ([700, 300], [1, 1], 1), ([50, 90, 4000], [5, 3, 2], 2),
     ([512, 512], [1, 1], 4), ([1, 1], [1000, 1], 1)],
)  # fmt: skip
def test_length_ends_just_before_a_source_is_over_the_limit(windows: list[int], weights: list[float], epochs: int):
    order = SampleOrder(windows, weights, seed=2, epochs=epochs)
    assert order.length is not None
    _, seen, _ = order.locate_many(np.arange(order.length + 1))
    assert seen[:-1].max(initial=0) < epochs
    assert seen[-1] == epochs


@pytest.mark.parametrize(
    ("windows", "weights", "offsets", "epochs", "length"),
    [
        ([100], [1], (30,), 1, 70),
        ([100], [1], (30,), 3, 270),
        ([100], [1], (130,), 1, 0),
        ([700, 300], [1, 1], (650, 0), 1, None),
        ([700, 300], [1, 1], (0, 300), 1, None),
        ([700, 300], [1, 1], (100, 1000), 2, None),
        ([50, 90, 4000], [5, 3, 2], (0, 7, 3999), 2, None),
    ],
)
def test_length_counts_what_earlier_phases_read(
    windows: list[int], weights: list[float], offsets: tuple[int, ...], epochs: int, length: int | None
):
    start = 12_345
    phase = Phase(start, tuple(range(len(windows))), offsets)
    order = SampleOrder(windows, weights, seed=2, epochs=epochs, phase=phase)
    assert order.length is not None and order.length >= start
    assert length is None or order.length == start + length
    _, seen, _ = order.locate_many(np.arange(start, order.length + 1))
    assert seen[:-1].max(initial=0) < epochs
    assert seen[-1] >= epochs


def test_length_of_one_source_is_all_of_it_and_none_without_a_limit():
    assert SampleOrder([100], [1.0], seed=0, epochs=3).length == 300
    assert SampleOrder([100], [1.0], seed=0).length is None


@pytest.mark.parametrize(
    ("windows", "weights", "message"),
    [
        ([10, 0], [1, 1], "at least one whole sample"),
        ([10], [1, 1], "1 sources but 2 weights"),
    ],
)
def test_wrong_input_is_refused(windows: list[int], weights: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        SampleOrder(windows, weights, seed=0)


def test_negative_sample_is_refused():
    with pytest.raises(ValueError, match="start at 0"):
        SampleOrder([10], [1.0], seed=0).locate(-1)


def test_a_sample_far_away_costs_no_more_than_the_first():
    order = SampleOrder([10**11, 10**10], [3, 1], seed=1)
    started = time.perf_counter()
    assert order.locate(10**15)[1] > 0
    assert time.perf_counter() - started < 1.0  # anything that walks there takes years
