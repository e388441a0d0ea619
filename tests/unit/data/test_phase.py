"""Changes of sources and weights at resumes: what goes on where, what is said, no window lost or repeated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.helpers import BYTES
from titanlite.data.order import BLOCK, Phase, SampleOrder, block_quotas
from titanlite.data.phase import RunData, SourceState, first_phase, resume
from titanlite.data.prepare import PreparedData, PreparedSource
from titanlite.data.shards import ShardWriter, TokenShards

WINDOWS = {"a": 700, "b": 300, "c": 123, "d": 41}


def mix(seed: int = 3, **weights: float) -> RunData:
    """A run that starts with the named sources."""
    return of_sources([(name, WINDOWS[name]) for name in weights], list(weights.values()), seed)


def of_sources(sources: Sequence[tuple[str, int]], weights: Sequence[float], seed: int) -> RunData:
    quotas = block_quotas(weights)
    states = (
        SourceState(f"path/{name}", f"f-{name}", windows, quota, i, 0)
        for i, ((name, windows), quota) in enumerate(zip(sources, quotas, strict=True))
    )
    return RunData(0, tuple(states), (), "tokenizer", 8, seed)


def train_state(data: RunData, samples: int) -> dict[str, Any]:
    """As it comes out of a checkpoint's manifest."""
    state = {"samples": samples, "data_fingerprint": data.fingerprint, "data": data.record()}
    return json.loads(json.dumps(state))


def change(data: RunData, samples: int, to: RunData) -> tuple[RunData, list[str]]:
    return resume(train_state(data, samples), to)


def taken(data: RunData, start: int, stop: int) -> list[tuple[str, int, int]]:
    """(source's fingerprint, epoch, window) of the samples [start, stop)."""
    located = np.stack(data.order().locate_many(np.arange(start, stop)), axis=1).tolist()
    return [(data.sources[source].fingerprint, epoch, window) for source, epoch, window in located]


def check_epochs(samples: Sequence[tuple[str, int, int]], windows: dict[str, int]) -> None:
    """Every source's epochs come one after the other, each with every window once; the last may be unfinished."""
    for fingerprint in {sample[0] for sample in samples}:
        n = windows[fingerprint]
        mine = np.array([sample[1:] for sample in samples if sample[0] == fingerprint])
        assert np.array_equal(mine[:, 0], np.arange(len(mine)) // n)
        for start in range(0, len(mine), n):
            epoch = np.sort(mine[start : start + n, 1])
            assert len(np.unique(epoch)) == len(epoch)
            assert len(epoch) < n or np.array_equal(epoch, np.arange(n))


def test_the_first_phase_is_the_order_without_phases():
    data = mix(a=0.5, b=0.3, c=0.2)
    assert data.phase == Phase.first(3) == Phase(0, (0, 1, 2), (0, 0, 0))
    plain = SampleOrder([700, 300, 123], [0.5, 0.3, 0.2], 3)
    assert data.order().quotas == plain.quotas
    assert np.array_equal(data.order().locate_many(np.arange(3000)), plain.locate_many(np.arange(3000)))
    assert data.order(epochs=2).length == SampleOrder([700, 300, 123], [0.5, 0.3, 0.2], 3, 2).length


def test_first_phase_is_read_off_the_prepared_sources(tmp_path: Path):
    sources = []
    for name, tokens in (("a", 41), ("b", 16)):
        writer = ShardWriter(tmp_path / name, dtype="uint16", tokenizer="t" * 64)
        writer.write(np.arange(tokens), documents=1, text_bytes=1)
        writer.close()
        sources.append(
            PreparedSource(f"x/{name}", tmp_path / name, None, 0.5, TokenShards(tmp_path / name).fingerprint)
        )
    data = first_phase(PreparedData(BYTES, tuple(sources), (-1, -1)), seq_len=8, seed=4)
    a, b = (source.fingerprint for source in sources)
    states = (SourceState("x/a", a, 5, 512, 0, 0), SourceState("x/b", b, 1, 512, 1, 0))
    assert data == RunData(0, states, (), BYTES.fingerprint, 8, 4)


def test_a_record_survives_json():
    data, _ = change(mix(a=1, b=1), 1500, mix(b=0.2, d=0.8))
    assert data.former and data.start
    assert RunData.of_record(json.loads(json.dumps(data.record()))) == data


def test_the_fingerprint_of_today_and_of_every_phase():
    """It is compared with the checkpoints of older versions: its definition is final."""
    data = mix(a=0.5, b=0.3, c=0.2)
    assert data.fingerprint == "c73ffcfc26816dd77c846c5e73ed47c6847faf3532ba7b12d80f80ddaa4c4af4"
    later, _ = change(mix(d=1), 100, data)
    assert later.phase != data.phase and later.fingerprint == data.fingerprint


def test_the_fingerprint_names_all_that_the_samples_depend_on():
    data = mix(a=0.5, b=0.5)
    a, b = data.sources
    others = [
        replace(data, seq_len=9),
        replace(data, seed=9),
        replace(data, tokenizer="u"),
        replace(data, sources=(b, a)),
        replace(data, sources=(a, replace(b, fingerprint="x"))),
        mix(a=0.5, b=0.51),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 7
    assert replace(data, sources=(a, replace(b, path="moved"))).fingerprint == data.fingerprint


def test_the_same_data_goes_on_in_its_phase_and_nothing_is_said():
    first = mix(a=0.5, b=0.3, c=0.2)
    assert change(first, 1500, mix(a=0.5, b=0.3, c=0.2)) == (first, [])
    second, _ = change(first, 1500, mix(b=1, d=1))
    assert change(second, 4000, mix(b=1, d=1)) == (second, [])
    moved = replace(mix(b=1, d=1), sources=tuple(replace(s, path="moved") for s in mix(b=1, d=1).sources))
    went_on, said = change(second, 4000, moved)
    assert (went_on.phase, went_on.former, said) == (second.phase, second.former, [])
    assert [source.path for source in went_on.sources] == ["moved", "moved"]


def test_a_checkpoint_of_an_older_version_is_in_the_first_phase():
    data = mix(a=1, b=1)
    older = train_state(data, 1500)
    del older["data"]
    assert resume(older, data) == (data, [])


def test_kept_new_left_and_back_again_and_what_is_said():
    first = mix(a=0.5, b=0.3, c=0.2)
    at_1500 = np.bincount(first.order().locate_many(np.arange(1500))[0], minlength=3).tolist()
    second, said = change(first, 1500, mix(b=0.5, d=0.25, a=0.25))
    assert second.phase == Phase(1500, (1, 3, 0), (at_1500[1], 0, at_1500[0]))
    assert [(one.path, one.stream, one.offset, one.quota) for one in second.former] == [("path/c", 2, at_1500[2], 0)]
    assert said == [
        f"data: from sample 1500 on 0.5 path/b (goes on at its sample {at_1500[1]}), 0.25 path/d (new), "
        f"0.25 path/a (goes on at its sample {at_1500[0]})",
        f"data: path/c is left at its sample {at_1500[2]}",
    ]
    # b is left; c comes back where it was
    at_2000 = np.bincount(second.order().locate_many(np.arange(1500, 2000))[0], minlength=3).tolist()
    third, said = change(second, 2000, mix(c=0.5, a=0.5))
    assert third.phase == Phase(2000, (2, 0), (at_1500[2], at_1500[0] + at_2000[2]))
    assert [(one.path, one.stream, one.offset) for one in third.former] == [
        ("path/b", 1, at_1500[1] + at_2000[0]),
        ("path/d", 3, at_2000[1]),
    ]
    assert said == [
        f"data: from sample 2000 on 0.5 path/c (goes on at its sample {at_1500[2]}), "
        f"0.5 path/a (goes on at its sample {at_1500[0] + at_2000[2]})",
        f"data: path/b is left at its sample {at_1500[1] + at_2000[0]}",
        f"data: path/d is left at its sample {at_2000[1]}",
    ]
    # who left before the last phase is not spoken of again, and its stream is not given away
    fourth, said = change(third, 2500, of_sources([("a", 700), ("e", 5)], [1, 1], 3))
    assert fourth.phase.streams == (0, 4) and {one.stream for one in fourth.former} == {1, 2, 3}
    assert len(said) == 2 and "path/c is left" in said[1]


def test_only_other_weights():
    data, said = change(mix(a=0.5, b=0.5), 1024, mix(a=0.9, b=0.1))
    assert data.phase == Phase(1024, (0, 1), (512, 512)) and not data.former
    assert said == [
        "data: from sample 1024 on 0.9 path/a (goes on at its sample 512), 0.0996 path/b (goes on at its sample 512)"
    ]


def test_other_tokens_under_the_same_path_are_a_new_source():
    now = mix(a=1, b=1)
    a, b = now.sources
    data, said = change(mix(a=1, b=1), 1024, replace(now, sources=(a, replace(b, fingerprint="f-other"))))
    assert data.phase == Phase(1024, (0, 2), (512, 0))
    assert said == [
        "data: from sample 1024 on 0.5 path/a (goes on at its sample 512), 0.5 path/b (new: other tokens than it had)",
        "data: path/b is left at its sample 512",
    ]


def test_two_sources_of_the_same_contents_keep_a_stream_each():
    def copies(n: int, weights: Sequence[float]) -> RunData:
        return of_sources([("a", 700)] * n, weights, 3)

    data, _ = change(copies(2, [3, 1]), 1024, copies(3, [1, 1, 2]))
    assert data.phase == Phase(1024, (0, 1, 2), (768, 256, 0))


def test_resuming_from_before_the_change_begins_the_phase_there():
    first, now = mix(a=1, b=1), mix(b=1, c=1)
    assert change(first, 1024, now)[0].phase == Phase(1024, (1, 2), (512, 0))
    assert change(first, 3072, now)[0].phase == Phase(3072, (1, 2), (1536, 0))


def test_kept_sources_are_exact_across_changes_and_a_limit_counts_all_phases():
    first = mix(a=0.5, b=0.3, c=0.2)
    samples, at = taken(first, 0, 1333), 1333
    data = first
    for stop, to in [(2001, mix(b=0.1, a=0.9)), (3500, mix(c=0.5, d=0.1, b=0.4)), (6000, mix(a=0.6, b=0.2, d=0.2))]:
        data, _ = change(data, at, to)
        samples += taken(data, at, stop)
        at = stop
    check_epochs(samples, {f"f-{name}": n for name, n in WINDOWS.items()})
    assert max(epoch for _, epoch, _ in samples) > 2
    # where the limit is: the first sample whose epoch is over it
    more = taken(data, data.start, data.start + 20_000)
    for epochs in range(1 + max(epoch for _, epoch, _ in samples), 40):
        over = next(i for i, (_, epoch, _) in enumerate(more) if epoch >= epochs)
        assert data.order(epochs).length == data.start + over


def test_random_runs_are_exact():
    """Any sizes, weights, seeds, stops and changes: sources' epochs are whole, quotas are kept, counts are right."""
    rng = np.random.default_rng(2026)
    for case in range(300):
        pool = [(f"{i}", int(n)) for i, n in enumerate(np.exp(rng.uniform(0, np.log(1500), size=rng.integers(1, 6))))]
        seed = int(rng.integers(1 << 63)) * 2 + 1
        data: RunData | None = None
        samples: list[tuple[str, int, int]] = []
        for _ in range(rng.integers(1, 5)):
            chosen = rng.permutation(len(pool))[: rng.integers(1, len(pool) + 1)]
            weights = np.exp(rng.uniform(-2, 2, size=len(chosen))).tolist()
            configured = of_sources([pool[i] for i in chosen], weights, seed)
            start = len(samples)
            data = configured if data is None else change(data, start, configured)[0]
            stop = start + int(rng.choice([1, int(rng.integers(1, 1400)), BLOCK, 2 * BLOCK]))
            cuts = [start, *sorted(rng.integers(start, stop + 1, size=rng.integers(0, 3)).tolist()), stop]
            for cut, end in itertools.pairwise(cuts):  # stops without a change
                data, said = change(data, cut, configured)
                assert not said
                samples += taken(data, cut, end)
            names = [sample[0] for sample in samples]
            assert data.order().counts(stop) == tuple(names.count(source.fingerprint) for source in data.sources)
            for block in range(start, stop - BLOCK + 1, BLOCK):
                quotas = [names[block : block + BLOCK].count(source.fingerprint) for source in data.sources]
                exact = BLOCK * np.array(weights) / np.sum(weights)
                assert np.all(np.abs(quotas - exact) < 1), f"case {case}"
        check_epochs(samples, {f"f-{name}": n for name, n in pool})


@pytest.mark.parametrize("samples", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_change_at_any_place_of_a_block(samples: int):
    data, _ = change(mix(a=1, b=1), samples, mix(b=1, a=3))
    both = taken(mix(a=1, b=1), 0, samples) + taken(data, samples, samples + 2500)
    check_epochs(both, {"f-a": 700, "f-b": 300})
