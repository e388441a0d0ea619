"""The order of samples: which window of which source is sample k of the run. Pure numpy, no state.

This is the definition that a run's reproducibility rests on; it is final (a golden test pins it).

1. The run is cut into blocks of BLOCK samples. In every block source i has the same number of places, its quota: the
   largest-remainder rounding of BLOCK * weight_i / sum(weights), ties to the lower index.
2. Inside block b the places are permuted by a Feistel permutation keyed by (seed, b). The j-th place of source i in
   block b, in the order in which the places come, is that source's sample n = b * quota_i + j.
3. Source i's sample n is in its epoch e = n // windows_i, at position n % windows_i, and the window there is given by a
   Feistel permutation of range(windows_i) keyed by (seed, i, e). So within an epoch no window repeats or is missing,
   every epoch has a new order, and nothing is ever shuffled in memory.
4. A run whose sources or weights are changed at a resume begins a new phase at that sample. Its blocks are counted from
   there. Source i's samples are counted from offset_i, those that earlier phases took of it, and its stream takes the
   place of i in its permutations' key: a number that stays its own in all phases. So a source that is kept goes on in
   its epoch where it was. In the first phase start and offsets are 0, and stream_i is i.

A Feistel network permutes a power of two; other sizes walk the cycle until they are back in range (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). The hash is SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from titanlite.config.schema import BLOCK

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_ROUNDS = 4  # each round changes both halves
_BLOCK_KEY, _WINDOW_KEY = 1, 2  # keep the two kinds of permutation apart

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


def block_quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Places of each source in every block: largest-remainder rounding, exact for any floats. Their sum is BLOCK.

    Every source has one or more, since config/check.py refuses weights under 1/BLOCK of their sum.
    """
    shares = [Fraction(weight) for weight in weights]
    assert shares and min(shares) > 0 and min(shares) * BLOCK >= sum(shares), f"not checked: weights {list(weights)}"
    exact = [BLOCK * share / sum(shares) for share in shares]
    quotas = [int(places) for places in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_remainder[: BLOCK - sum(quotas)]:
        quotas[i] += 1
    return tuple(quotas)


@dataclass(frozen=True)
class Phase:
    """A part of the run with the same sources and weights, see 4. above.

    start:   its first sample
    streams: the number of each source that keys its permutations, no two alike
    offsets: samples of each source that earlier phases took
    """

    start: int
    streams: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def first(cls, n_sources: int) -> Phase:
        return cls(0, tuple(range(n_sources)), (0,) * n_sources)


class SampleOrder:
    """Sample k of the run -> (source, epoch, window), a pure function of (seed, phase, k).

    windows: whole samples in each source, all above 0
    weights: share of each source in the samples, relative to the others
    seed:    any non-negative integer (64 bits of it are used)
    epochs:  `length` is the number of samples before any source would be read more often than this; 0: no limit
    phase:   the part of the run that this is the order of, from its start on; None: the first
    """

    def __init__(
        self,
        windows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        epochs: int = 0,
        phase: Phase | None = None,
    ) -> None:
        if len(windows) != len(weights):
            raise ValueError(f"{len(windows)} sources but {len(weights)} weights")
        if min(windows) < 1:
            raise ValueError(f"every source needs at least one whole sample, got {list(windows)}")
        self.windows = tuple(int(n) for n in windows)
        self.quotas = block_quotas(weights)
        self.seed = int(seed) & _MASK64
        self.epochs = int(epochs)
        self.phase = phase or Phase.first(len(windows))
        assert len(self.phase.streams) == len(self.phase.offsets) == len(set(self.phase.streams)) == len(windows)
        self._block_starts = np.cumsum(
            (0, *self.quotas)
        )  # places of source i before permuting: [starts[i], starts[i+1])

    def locate(self, k: int) -> tuple[int, int, int]:
        """(source, epoch, window) of sample k >= phase.start."""
        source, epoch, window = self.locate_many(np.array([k], dtype=np.int64))
        return int(source[0]), int(epoch[0]), int(window[0])

    def locate_many(self, samples: I64) -> tuple[I64, I64, I64]:
        """Sources, epochs and windows (int64 each) of sample numbers [n], in any order. Fast when they lie together."""
        samples = np.asarray(samples, dtype=np.int64)
        sources, numbers = self._source_and_number(samples)
        epochs = np.empty_like(samples)
        windows = np.empty_like(samples)
        for i, n_windows in enumerate(self.windows):
            mine = sources == i
            if mine.any():
                epochs[mine], positions = np.divmod(numbers[mine], n_windows)
                key = _key(_WINDOW_KEY, self.seed, self.phase.streams[i], epochs[mine].astype(np.uint64))
                windows[mine] = _permute(positions.astype(np.uint64), n_windows, key).astype(np.int64)
        return sources, epochs, windows

    @property
    def length(self) -> int | None:
        """Samples of the run, earlier phases included, before the first one that is over the limit of `epochs`.

        None without a limit.
        """
        if not self.epochs:
            return None
        limits = [self.epochs * n for n in self.windows]
        left = [max(limit - offset, 0) for limit, offset in zip(limits, self.phase.offsets, strict=True)]
        block = min(n // quota for n, quota in zip(left, self.quotas, strict=True))
        samples = self.phase.start + np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int64)
        sources, numbers = self._source_and_number(samples)
        over = numbers >= np.array(limits, dtype=np.int64)[sources]
        assert over.any(), "the first block that cannot be whole holds the first sample over the limit"
        return int(samples[np.argmax(over)])

    def counts(self, k: int) -> tuple[int, ...]:
        """Samples of each source before sample k >= phase.start, earlier phases included. Costs one block at any k."""
        blocks, rest = divmod(k - self.phase.start, BLOCK)
        sources, _ = self._source_and_number(np.arange(k - rest, k, dtype=np.int64))
        in_block = np.bincount(sources, minlength=len(self.windows)).tolist()
        parts = zip(self.phase.offsets, self.quotas, in_block, strict=True)
        return tuple(offset + blocks * quota + n for offset, quota, n in parts)

    def _source_and_number(self, samples: I64) -> tuple[I64, I64]:
        """The source of each sample, and the how-many-th sample of that source it is, of all phases."""
        if samples.size and samples.min() < self.phase.start:
            raise ValueError(f"sample numbers start at {self.phase.start}, got {samples.min()}")
        samples = samples - self.phase.start
        if len(self.windows) == 1:
            return np.zeros_like(samples), samples + self.phase.offsets[0]
        blocks, row = np.unique(samples // BLOCK, return_inverse=True)
        places = np.broadcast_to(np.arange(BLOCK, dtype=np.uint64), (len(blocks), BLOCK))
        key = _key(_BLOCK_KEY, self.seed, blocks.astype(np.uint64))[:, None]
        permuted = _permute(places.ravel(), BLOCK, np.broadcast_to(key, places.shape).ravel()).astype(np.int64)
        pattern = (np.searchsorted(self._block_starts, permuted, side="right") - 1).reshape(places.shape)
        # Numbers are counted along the permuted block, so that a source is read in the order of its own samples and a
        # limit on its epochs cuts the run at one place.
        numbers = np.empty_like(pattern)
        for i, (quota, offset) in enumerate(zip(self.quotas, self.phase.offsets, strict=True)):
            mine = pattern == i
            counts = np.cumsum(mine, axis=1) - 1 + blocks[:, None] * quota + offset
            numbers[mine] = counts[mine]
        at = (row, samples % BLOCK)
        return pattern[at], numbers[at]


def _mix(x: U64) -> U64:
    """SplitMix64's output function; x is an array, so that the products wrap without a warning."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def _key(*parts: int | U64) -> U64:
    """A 64-bit key from integers and arrays of them (broadcast)."""
    key: U64 = np.zeros(1, dtype=np.uint64)
    for part in parts:
        value = part if isinstance(part, np.ndarray) else np.uint64(part)
        key = _mix((key ^ value) + np.uint64(_GOLDEN))
    return key


def _permute(x: U64, size: int, key: U64) -> U64:
    """Element-wise image of x [n], each below size, under the permutation of range(size) that key [n] names."""
    if size == 1:
        return np.zeros_like(x)
    key = np.broadcast_to(key, x.shape)
    y = _feistel(x, (size - 1).bit_length(), key)
    while (outside := np.flatnonzero(y >= np.uint64(size))).size:
        y[outside] = _feistel(y[outside], (size - 1).bit_length(), key[outside])
    return y


def _feistel(x: U64, bits: int, key: U64) -> U64:
    """A permutation of the integers below 2**bits: its high and low half change each other in turn."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = x >> low_bits, x & low_mask
    for round_ in range(_ROUNDS):
        high = high ^ (_mix((low ^ key) + np.uint64((2 * round_ + 1) * _GOLDEN & _MASK64)) & high_mask)
        low = low ^ (_mix((high ^ key) + np.uint64((2 * round_ + 2) * _GOLDEN & _MASK64)) & low_mask)
    return (high << low_bits) | low
