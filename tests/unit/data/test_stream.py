"""The promise of the sample stream, through the real loader: no gap and no repeat over any stops and world sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.helpers import BYTES
from titanlite.data.loader import TrainLoader, build_train_loader
from titanlite.data.order import BLOCK
from titanlite.data.phase import RunData, first_phase, resume
from titanlite.data.prepare import PreparedData, PreparedSource
from titanlite.data.shards import ShardWriter, TokenShards

SEQ_LEN = 4
SEED = 11
MIX = {"a": 0.5, "b": 0.3, "c": 0.2}
WINDOWS = {"a": 1500, "b": 700, "c": 420, "d": 333}
BATCH = 24  # whole at every world size

Samples = list[tuple[int, str, int]]
"""(sample id, source, window) as read off the batches"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of each source, consecutive ids: the first token of a sample tells its source and window."""
    folder = tmp_path_factory.mktemp("stream")
    for i, (name, windows) in enumerate(WINDOWS.items()):
        writer = ShardWriter(folder / name, dtype="uint16", tokenizer="t" * 64, shard_tokens=999)
        writer.write(np.arange(windows * SEQ_LEN + 2) + 10_000 * i, documents=1, text_bytes=1)
        writer.close()
    return folder


class Run:
    """A run that is stopped and resumed: each `go` is another world of processes, that has only the checkpoint."""

    def __init__(self, folder: Path, num_workers: int = 0) -> None:
        self.folder, self.num_workers = folder, num_workers
        self.samples: Samples = []
        self.world_sizes: set[int] = set()
        self.data: RunData | None = None

    def go(self, weights: dict[str, float], steps: int, batch: int, world_size: int, *, epochs: int = 0) -> None:
        """Up to `steps` more steps; what the ranks got, put together, goes to self.samples."""
        sources = [
            PreparedSource(name, self.folder / name, None, weight, TokenShards(self.folder / name).fingerprint)
            for name, weight in weights.items()
        ]
        prepared = PreparedData(BYTES, tuple(sources), (-1, -1))
        start = len(self.samples)
        data = first_phase(prepared, seq_len=SEQ_LEN, seed=SEED)
        if self.data is not None:
            state = {"samples": start, "data_fingerprint": self.data.fingerprint, "data": self.data.record()}
            data, _ = resume(state, data)
        self.data = data
        self.world_sizes.add(world_size)
        share = batch // world_size
        loaders = [
            build_train_loader(
                prepared,
                data.order(epochs),
                seq_len=SEQ_LEN,
                global_batch_size=batch,
                data_rank=rank,
                data_size=world_size,
                local_batch_size=next(n for n in (3, 2, 1) if share % n == 0),
                start_sample=start,
                num_workers=self.num_workers,
                pin_memory=False,
            )
            for rank in range(world_size)
        ]
        ranks = [list(read(loader, steps)) for loader in loaders]
        for parts in zip(*ranks, strict=True):  # all ranks do as many steps
            self.samples += itertools.chain.from_iterable(parts)

    def check(self) -> None:
        """The ids are 0..N-1 in order, and every source was read epoch by epoch with each window once in each."""
        assert [sample[0] for sample in self.samples] == list(range(len(self.samples)))
        for name, windows in WINDOWS.items():
            mine = np.array([window for _, source, window in self.samples if source == name], dtype=int)
            for start in range(0, len(mine), windows):
                epoch = mine[start : start + windows]
                assert len(np.unique(epoch)) == len(epoch) <= windows


def read(loader: TrainLoader, steps: int) -> Iterator[Samples]:
    for _, batches in zip(range(steps), loader, strict=False):
        read: Samples = []
        for batch in batches:
            assert batch["tokens"].shape == (len(batch["sample_ids"]), SEQ_LEN)
            for number, first in zip(batch["sample_ids"].tolist(), batch["tokens"][:, 0].tolist(), strict=True):
                source, place = divmod(first, 10_000)
                assert place % SEQ_LEN == 0
                read.append((number, list(WINDOWS)[source], place // SEQ_LEN))
        yield read
    loader.close()


def go_to(run: Run, weights: dict[str, float], stops: Sequence[int]) -> None:
    """To each of the stops exactly: with BATCH or half of it at the next world size, then the rest in one step."""
    for i, stop in enumerate(stops):
        world_size = 1 + i % 4
        batch = BATCH if i % 3 else BATCH // 2
        steps, rest = divmod(stop - len(run.samples), batch)
        if steps:
            run.go(weights, steps, batch, world_size)
        if rest:
            run.go(weights, 1, rest, next(n for n in (4, 3, 2, 1) if rest % n == 0))
        assert len(run.samples) == stop


def boundaries(data: RunData, until: int) -> list[int]:
    """Stops of every kind: at, right before and right after the ends of blocks, epochs and the limits of epochs."""
    sources, epochs, _ = data.order().locate_many(np.arange(until))
    stops = {1, 100, BLOCK // 2, *range(BLOCK, until, BLOCK)}
    for i, source in enumerate(data.sources):
        for epoch in range(int(epochs[sources == i].max())):
            last = int(np.flatnonzero((sources == i) & (epochs == epoch))[-1])
            stops |= {last + 1, last + 1 + source.windows // 2}  # an epoch's end, and inside of one
    for limit in (1, 2):
        length = data.order(limit).length
        assert length is not None
        stops |= {length - 1, length, length + 1}
    stops |= {stop + 1 for stop in range(BLOCK, until, 2 * BLOCK)} | {stop - 1 for stop in range(BLOCK, until, BLOCK)}
    return [*sorted(stop for stop in stops if 0 < stop < until), until]


def test_stops_at_every_kind_of_boundary(folder: Path):
    run = Run(folder)
    run.go(MIX, 0, BATCH, 1)
    assert run.data is not None
    order = run.data.order()
    until = next(k for k in itertools.count(0, BATCH) if min(np.array(order.counts(k)) / order.windows) >= 2.5)
    stops = boundaries(run.data, until)
    assert len(stops) > 30
    go_to(run, MIX, stops)
    assert run.world_sizes == {1, 2, 3, 4}
    run.check()
    counts = [sum(source == name for _, source, _ in run.samples) for name in "abc"]
    assert all(n >= 2.5 * WINDOWS[name] for name, n in zip("abc", counts, strict=True))
    for start in range(0, until - BLOCK, BLOCK):
        block = [source for _, source, _ in run.samples[start : start + BLOCK]]
        assert all(abs(block.count(name) - BLOCK * weight) < 1 for name, weight in MIX.items())
    # and it is the order that one process without a stop has
    whole = Run(folder)
    whole.go(MIX, until // BATCH, BATCH, 1)
    assert run.samples == whole.samples


def test_the_end_of_the_epochs_and_on_with_more(folder: Path):
    """The limit ends all ranks alike, with less than a step left; raised, the run goes on with the next sample."""
    run = Run(folder)
    for epochs, batch, world_size in [(1, 24, 4), (1, 24, 2), (1, 1, 1), (2, 20, 2), (3, 9, 3), (3, 24, 4)]:
        run.go(MIX, 10_000, batch, world_size, epochs=epochs)
        assert run.data is not None
        length = run.data.order(epochs).length
        assert length is not None and length - batch < len(run.samples) <= length
        if batch == 1:
            assert len(run.samples) == length
    run.go(MIX, 10, 12, 1)
    run.check()


def test_kept_sources_are_exact_across_changes(folder: Path):
    run = Run(folder)
    go_to(run, MIX, [1, 700, BLOCK, 1500, 2 * BLOCK + 77])
    go_to(run, {"b": 0.5, "d": 0.2, "a": 0.3}, [2500, 2 * BLOCK + 77 + BLOCK, 3333])
    assert run.data is not None and [source.stream for source in run.data.sources] == [1, 3, 0]
    go_to(run, {"c": 0.4, "b": 0.6}, [3334, 5000, 7000])  # c comes back
    assert [source.stream for source in run.data.sources] == [2, 1]
    run.check()
    counts = {name: sum(source == name for _, source, _ in run.samples) for name in WINDOWS}
    assert counts["b"] > 2.5 * WINDOWS["b"] and counts["c"] > 2.5 * WINDOWS["c"]
    # The limit counts what all phases read.
    limit = counts["b"] // WINDOWS["b"] + 1
    run.go({"b": 1.0}, 10_000, 1, 1, epochs=limit)
    assert sum(source == "b" for _, source, _ in run.samples) == limit * WINDOWS["b"]
    run.check()


def test_with_loader_processes(folder: Path):
    run, plain = Run(folder, num_workers=2), Run(folder)
    for one in (run, plain):
        one.go(MIX, 40, 24, 2)
        one.go({"b": 0.5, "d": 0.5}, 30, 12, 1)
    assert run.samples == plain.samples
    run.check()


def test_a_run_that_forgets_where_it_was_is_found(folder: Path):
    run = Run(folder)
    run.go(MIX, 80, 12, 1)
    run.data = None  # as if the checkpoint had no record
    run.go({"c": 0.5, "b": 0.5}, 30, 12, 1)
    with pytest.raises(AssertionError):
        run.check()
