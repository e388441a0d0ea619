"""The loader: the samples that the order names, the same for every world size, worker count and point of resume."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.helpers import BYTES
from titanlite.config.problems import InputError
from titanlite.data.loader import (
    IGNORED,
    Batch,
    TrainLoader,
    ValidationData,
    build_train_loader,
)
from titanlite.data.order import SampleOrder
from titanlite.data.phase import first_phase
from titanlite.data.prepare import PreparedData, PreparedSource
from titanlite.data.shards import ShardWriter, TokenShards

SEQ_LEN = 8
WINDOWS = (70, 30, 13)
WEIGHTS = (0.5, 0.3, 0.2)


def write(folder: Path, first: int, windows: int) -> Path:
    """Consecutive tokens from `first` on, so that every window can be told by its first token."""
    writer = ShardWriter(folder, dtype="uint16", tokenizer="t" * 64, shard_tokens=101)
    writer.write(np.arange(first, first + windows * SEQ_LEN + 3), documents=1, text_bytes=1)
    writer.close()
    return folder


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedData:
    sources = []
    for i, (windows, weight) in enumerate(zip(WINDOWS, WEIGHTS, strict=True)):
        train = write(tmp_path / str(i) / "train", 10_000 * i, windows)
        validation = write(tmp_path / str(i) / "validation", 10_000 * i + 5000, i) if i else None
        sources.append(PreparedSource(str(i), train, validation, weight, TokenShards(train).fingerprint))
    return PreparedData(BYTES, tuple(sources), (-1, -1))


def build(
    prepared: PreparedData,
    *,
    batch: int = 12,
    rank: int = 0,
    world_size: int = 1,
    local: int = 0,
    start: int = 0,
    epochs: int = 0,
    num_workers: int = 0,
    seed: int = 1,
) -> TrainLoader:
    return build_train_loader(
        prepared,
        first_phase(prepared, seq_len=SEQ_LEN, seed=seed).order(epochs),
        seq_len=SEQ_LEN,
        global_batch_size=batch,
        data_rank=rank,
        data_size=world_size,
        local_batch_size=local or batch // world_size,
        start_sample=start,
        num_workers=num_workers,
        pin_memory=False,
    )


def take(loader: TrainLoader, steps: int) -> list[list[Batch]]:
    taken = [batches for batches, _ in zip(loader, range(steps), strict=False)]
    loader.close()
    return taken


def rows(steps: list[list[Batch]]) -> list[tuple[int, int]]:
    """(sample id, first token) of every sample."""
    return [
        (int(i), int(tokens[0]))
        for batches in steps
        for batch in batches
        for i, tokens in zip(batch["sample_ids"], batch["tokens"], strict=True)
    ]


def expected(start: int, n: int, seed: int = 1) -> list[tuple[int, int]]:
    order = SampleOrder(WINDOWS, WEIGHTS, seed)
    located = [order.locate(k) for k in range(start, start + n)]
    return [(k, 10_000 * source + SEQ_LEN * w) for k, (source, _, w) in enumerate(located, start)]


def test_a_batch_holds_what_the_order_names(prepared: PreparedData):
    (step,) = take(build(prepared, batch=6, local=2), 1)
    assert [set(batch) for batch in step] == [{"tokens", "labels", "sample_ids"}] * 3
    for batch in step:
        assert batch["tokens"].shape == batch["labels"].shape == (2, SEQ_LEN)
        assert all(value.dtype == torch.int64 and value.is_contiguous() for value in batch.values())
        assert torch.equal(batch["labels"], batch["tokens"] + 1)  # the tokens of these sources count up
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert rows([step]) == expected(0, 6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_the_samples_of_every_step(prepared: PreparedData, world_size: int):
    ranks = [take(build(prepared, rank=r, world_size=world_size, local=1), 30) for r in range(world_size)]
    for step in range(30):
        joined = [row for rank in ranks for row in rows([rank[step]])]
        assert joined == expected(12 * step, 12)


def test_resume_at_any_sample_with_another_batch_size(prepared: PreparedData):
    got, start = [], 0
    for steps, batch, world_size in [(3, 12, 2), (1, 8, 4), (100, 6, 3), (17, 12, 1), (2, 7, 1)]:
        ranks = [
            take(build(prepared, batch=batch, rank=r, world_size=world_size, start=start), steps)
            for r in range(world_size)
        ]
        got += [row for step in range(steps) for rank in ranks for row in rows([rank[step]])]
        start += steps * batch
    assert got == expected(0, start)
    assert start > 2.5 * sum(WINDOWS)


@pytest.mark.parametrize("epochs", [1, 2])
def test_running_out_of_epochs_ends_all_ranks_at_the_same_step(prepared: PreparedData, epochs: int):
    length = SampleOrder(WINDOWS, WEIGHTS, 1, epochs).length
    assert length is not None and length % 12
    for start in (0, 5):
        for world_size in (1, 2, 3, 4):
            loaders = [
                build(prepared, rank=r, world_size=world_size, start=start, epochs=epochs) for r in range(world_size)
            ]
            assert {loader.steps_left for loader in loaders} == {(length - start) // 12}
            steps = [take(loader, 10_000) for loader in loaders]
            assert {len(one) for one in steps} == {(length - start) // 12}
            assert {loader.steps_left for loader in loaders} == {0}
    assert build(prepared, start=length, epochs=epochs).steps_left == 0
    assert take(build(prepared, start=length + 100, epochs=epochs), 5) == []


def test_steps_left_counts_down_and_is_none_without_a_limit(prepared: PreparedData):
    loader = build(prepared, epochs=1)
    assert loader.steps_left
    before = loader.steps_left
    next(loader)
    assert loader.steps_left == before - 1
    loader.close()
    assert build(prepared).steps_left is None


def test_workers_give_the_same_stream(prepared: PreparedData):
    plain = take(build(prepared, local=4, epochs=1, start=3), 1000)
    workers = take(build(prepared, local=4, epochs=1, start=3, num_workers=2), 1000)
    assert len(plain) == len(workers) > 3
    for one, other in zip(plain, workers, strict=True):
        assert len(one) == len(other) == 3
        assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_close_ends_the_workers_at_any_time(prepared: PreparedData, steps: int):
    before = set(multiprocessing.active_children())
    loader = build(prepared, num_workers=2)
    for _ in range(steps):
        next(loader)
    assert len(set(multiprocessing.active_children()) - before) == (2 if steps else 0)
    started = time.monotonic()
    loader.close()
    loader.close()
    assert set(multiprocessing.active_children()) == before
    assert time.monotonic() - started < 5
    assert list(loader) == []


def test_readers_heed_only_their_parent(prepared: PreparedData):
    """A scheduler's signal goes to all processes of a job, and must not end those that read for its last step."""
    before = set(multiprocessing.active_children())
    loader = build(prepared, num_workers=2)
    next(loader)
    readers = list(set(multiprocessing.active_children()) - before)
    pids = [str(process.pid) for process in readers]
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["sh", "-c", f"kill -{name} {' '.join(pids)}"], check=True)  # not from here
    time.sleep(0.3)
    assert all(process.is_alive() for process in readers)
    next(loader)
    readers[0].terminate()
    readers[0].join(5)
    assert not readers[0].is_alive()
    loader.close()


def test_a_process_that_fails_without_close_still_ends(prepared: PreparedData):
    code = f"""
        import signal
        from titanlite.data.loader import TrainLoader
        from titanlite.data.order import SampleOrder
        from titanlite.data.tokens import open_tokens

        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, lambda *_: None)  # as a trainer that saves first
            shards = [open_tokens(path) for path in {[str(source.train) for source in prepared.sources]}]
            loader = TrainLoader(
                shards, SampleOrder({WINDOWS}, {WEIGHTS}, 1), seq_len={SEQ_LEN}, global_batch_size=12, data_rank=0,
                data_size=1, local_batch_size=12, start_sample=0, num_workers=2, pin_memory=False,
            )
            next(loader)
            raise RuntimeError("the run fails here")
    """
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the run fails here" in done.stderr


def test_the_loader_leaves_the_random_state_alone_and_does_not_warn(prepared: PreparedData):
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(build(prepared), 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("batch", "world_size", "local"), [(12, 5, 1), (12, 2, 4)])
def test_batches_that_do_not_divide_are_refused(prepared: PreparedData, batch: int, world_size: int, local: int):
    with pytest.raises(ValueError, match=f"global_batch_size 12 is not whole batches of {local} on {world_size} ranks"):
        build(prepared, batch=batch, world_size=world_size, local=local)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("local", [1, 2, 5, 10**12])
@pytest.mark.parametrize("samples", [0, 1, 2])
def test_validation_is_the_same_whatever_the_layout(prepared: PreparedData, world_size: int, local: int, samples: int):
    validation = ValidationData(prepared, SEQ_LEN, samples)
    assert validation.n_samples == (samples or 3)
    ranks = [list(validation.batches(r, world_size, local)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = {}
    for batch in (batch for batches in ranks for batch in batches):
        rows = min(local, -(-validation.n_samples // world_size))  # no more than somebody needs
        assert batch["tokens"].shape == batch["labels"].shape == (rows, SEQ_LEN)
        for i, tokens, labels in zip(*(batch[k] for k in ("sample_ids", "tokens", "labels")), strict=True):
            if i < 0:
                assert torch.all(labels == IGNORED) and torch.all(tokens == 0)
            else:
                assert int(i) not in seen and torch.equal(labels, tokens + 1)
                seen[int(i)] = int(tokens[0])
    firsts = [15_000, 25_000, 25_008]  # sources in order, windows in order
    assert seen == dict(enumerate(firsts[: validation.n_samples]))


def test_validation_without_a_whole_sample_is_refused(prepared: PreparedData):
    with pytest.raises(InputError, match="no whole held-out sample"):
        ValidationData(prepared, 100)
    none = replace(prepared, sources=prepared.sources[:1])
    with pytest.raises(InputError, match="no whole held-out sample"):
        ValidationData(none, SEQ_LEN)


def test_embedded_text_is_fed_fast_enough(embedded: PreparedData):
    """llama_debug eats about 10 000 tokens a second; ten times that must not be felt."""
    loader = build_train_loader(
        embedded,
        first_phase(embedded, seq_len=256, seed=1).order(),
        seq_len=256,
        global_batch_size=8,
        data_rank=0,
        data_size=1,
        local_batch_size=8,
        start_sample=0,
        num_workers=0,
        pin_memory=False,
    )
    next(loader)
    started = time.process_time()
    take(loader, 200)
    assert 200 * 8 * 256 / (time.process_time() - started) > 100_000


def test_embedded_samples_read_as_text(embedded: PreparedData, embedded_documents: list[str]):
    validation = ValidationData(embedded, 256, 4)
    assert validation.token_bytes.shape == (4096,) and validation.token_bytes.dtype == torch.int64
    (batch,) = validation.batches(0, 1, 4)
    labels = batch["labels"]
    text = embedded.tokenizer.decode(labels.flatten().numpy())
    assert int(validation.token_bytes[labels].sum()) == len(text.encode())
    assert any(text[:200] in document for document in embedded_documents)
