"""Annealing with the real trainer: other sources at a resume, under another layout and batch, exact in its samples."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.distributed import WorkerFailed, run_distributed
from tests.harness.training import Listener, merge
from tests.parity.harness import make_text
from tests.parity.layouts import BASE, LAYOUTS, ONE_PROCESS, Layout
from titanlite.config.schema import Config
from titanlite.data.phase import RunData
from titanlite.data.shards import TokenShards
from titanlite.model.init import tensors_hash
from titanlite.parallel import runtime
from titanlite.parallel.whole import full_tensors

Sections = Mapping[str, Mapping[str, Any]]
SAVING: Sections = {
    "checkpoint": {"enable": True, "interval": 100, "keep_latest_k": 9},
    "validation": {"enable": False},
}
ALLOWED: Sections = {"data": {"allow_change": True}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_text(tmp_path_factory.mktemp("change") / "text")
    (folder / "c").mkdir()
    for file in (folder / "a").iterdir():  # other text
        (folder / "c" / file.name).write_text(file.read_text()[::-1])
    return folder


@dataclass
class Done:
    """What one process of a run did."""

    losses: list[float]
    sample_ids: list[list[int]]  # step by step
    firsts: list[list[list[int]]]  # the tokens of each sample, step by step
    said: list[str]
    shards: list[str]
    hash: str


def _train(sections: Sections) -> Done:
    config = Config.model_validate(sections)
    trainer = Listener(config, runtime.start(config.comm, config.run, config.parallelism))
    trainer.train()
    record = trainer.record
    tokens = [step.tolist() for step in record.tokens]
    shards = [str(source.train) for source in trainer.prepared.sources]
    final = tensors_hash(full_tensors(trainer._tensors()).items())
    return Done(record.losses, record.sample_ids, tokens, trainer.said, shards, final)


def train(layout: Layout, text: Path, folder: Path, steps: int, *changes: Sections, **weights: float) -> list[Done]:
    """Every rank's part of training to `steps` on the named sources, resuming from what is in `folder`."""
    sources = [{"path": str(text / name), "weight": weight} for name, weight in weights.items()]
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": {"sources": sources, "validation_fraction": 0.2, "cache_dir": str(text / "cache")},
        "run": {"output_dir": str(folder), "name": "run"},
        "training": {"steps": steps},
    }
    sections = merge(BASE, SAVING, layout.sections, here, *changes)
    return run_distributed(_train, layout.world_size, sections, timeout=120)


def refusal(text: Path, folder: Path, *changes: Sections, **weights: float) -> str:
    with pytest.raises(WorkerFailed) as caught:
        train(ONE_PROCESS, text, folder, 9, *changes, **weights)
    assert "InputError" in str(caught.value)
    return str(caught.value)


def ids(ranks: list[Done]) -> list[int]:
    steps = zip(*(rank.sample_ids for rank in ranks), strict=True)
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))


def samples(ranks: list[Done]) -> list[list[int]]:
    steps = zip(*(rank.firsts for rank in ranks), strict=True)
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))


def record(folder: Path, step: int) -> RunData:
    manifest = json.loads((folder / f"run/checkpoints/step-{step:08d}/manifest.json").read_text())
    return RunData.of_record(manifest["train_state"]["data"])


def batch(size: int, local: int | None = None) -> Sections:
    return {"training": {"global_batch_size": size, "local_batch_size": local or size, "allow_batch_change": True}}


def expected(data: RunData, shards: list[str], start: int, stop: int) -> list[list[int]]:
    """The tokens that the record names."""
    opened = [TokenShards(path) for path in shards]
    sources, _, windows = data.order().locate_many(np.arange(start, stop))
    return [
        opened[source].window(window, data.seq_len)[:-1].tolist()
        for source, window in zip(sources.tolist(), windows.tolist(), strict=True)
    ]


@pytest.fixture(scope="module")
def start(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 24 samples under FSDP 2."""
    folder = tmp_path_factory.mktemp("start") / "start"
    done = train(LAYOUTS["fsdp 2"][0], text, folder, 2, a=0.7, b=0.3)
    assert ids(done) == list(range(48))
    assert samples(done) == expected(record(folder, 2), done[0].shards, 0, 48)
    return folder


def copied(start: Path, to: Path) -> Path:
    return Path(shutil.copytree(start, to))


def test_another_mix_is_refused_unless_it_is_asked_for(text: Path, start: Path, tmp_path: Path) -> None:
    run = copied(start, tmp_path / "run")
    said = refusal(text, run, b=0.5, c=0.5)
    assert "(data fingerprint" in said and "data.sources: got " in said and "--data.allow_change true" in said
    said = refusal(text, run, a=0.6, b=0.4)
    assert "(data fingerprint" in said and "data.sources: got " in said and "--data.allow_change true" in said


def test_another_tokenizer_and_seq_len_are_always_refused(text: Path, start: Path, tmp_path: Path) -> None:
    run, tokenizer = copied(start, tmp_path / "run"), make_text(tmp_path / "other") / "tokenizer.model"
    assert tokenizer.read_bytes() != (text / "tokenizer.model").read_bytes(), "it names its folder"
    said = refusal(text, run, ALLOWED, {"tokenizer": {"path": str(tokenizer)}}, b=0.5, c=0.5)
    assert f"tokenizer.path: got '{tokenizer}' (sha256 " in said
    assert f"allowed: '{text}/tokenizer.model' (sha256 " in said and "--data.allow_change" not in said
    said = refusal(text, run, ALLOWED, {"training": {"seq_len": 16}}, b=0.5, c=0.5)
    assert "training.seq_len: got 16; allowed: 32, as in the checkpoint" in said and "--data.allow_change" not in said


def test_another_batch_is_refused_unless_it_is_asked_for(text: Path, start: Path, tmp_path: Path) -> None:
    run = copied(start, tmp_path / "run")
    said = refusal(text, run, {"training": {"global_batch_size": 12}}, a=0.7, b=0.3)
    assert "training.global_batch_size: got 12; allowed: 24, as in the checkpoint" in said
    assert "--training.allow_batch_change true" in said


def test_another_batch_goes_on_with_the_next_sample(text: Path, start: Path, tmp_path: Path) -> None:
    run = copied(start, tmp_path / "run")
    done = train(LAYOUTS["ddp 3"][0], text, run, 4, batch(30, 5), a=0.7, b=0.3)
    assert ids(done) == list(range(48, 108))
    assert samples(done) == expected(record(start, 2), done[0].shards, 48, 108)
    assert "resume: training.global_batch_size was 24, is now 30" in done[0].said
    assert not any(line.startswith("data: ") for line in done[0].said)
    done = train(ONE_PROCESS, text, run, 5, batch(7), a=0.7, b=0.3)
    assert ids(done) == list(range(108, 115))
    assert samples(done) == expected(record(start, 2), done[0].shards, 108, 115)


def test_another_mix_from_the_next_sample_on(text: Path, start: Path, tmp_path: Path) -> None:
    """From FSDP 2 to one process with another batch, and on."""
    one, many = copied(start, tmp_path / "one"), copied(start, tmp_path / "many")
    before = record(start, 2).order().counts(48)
    annealed = train(ONE_PROCESS, text, one, 6, ALLOWED, batch(12), b=0.5, c=0.5)
    assert ids(annealed) == list(range(48, 96)) and all(map(math.isfinite, annealed[0].losses))
    data = record(one, 6)
    assert data.start == 48 and [(s.stream, s.offset) for s in data.sources] == [(1, before[1]), (2, 0)]
    assert samples(annealed) == expected(data, annealed[0].shards, 48, 96)
    told = [line for line in annealed[0].said if line.startswith(("data: ", "resume: "))]
    assert told[-2:] == [
        f"data: from sample 48 on 0.5 {text}/b (goes on at its sample {before[1]}), 0.5 {text}/c (new)",
        f"data: {text}/a is left at its sample {before[0]}",
    ]
    assert "resume: training.global_batch_size was 24, is now 12" in told
    assert not any("data.sources" in line or "allow_change" in line for line in told)

    # The same with a stop: the same command goes on in the phase, says nothing of it, and ends bitwise the same.
    train(ONE_PROCESS, text, many, 4, ALLOWED, batch(12), b=0.5, c=0.5)
    resumed = train(ONE_PROCESS, text, many, 6, ALLOWED, batch(12), b=0.5, c=0.5)
    assert ids(resumed) == list(range(72, 96)) and record(many, 6) == data
    assert not any(line.startswith("data: ") for line in resumed[0].said)
    assert resumed[0].hash == annealed[0].hash

    # On two processes again, and without the key, since nothing changes.
    last = train(LAYOUTS["fsdp 2"][0], text, one, 7, batch(8, 4), b=0.5, c=0.5)
    assert ids(last) == list(range(96, 104))
    assert samples(last) == expected(data, last[0].shards, 96, 104)


def test_a_limit_of_epochs_counts_all_phases(text: Path, start: Path, tmp_path: Path) -> None:
    run = copied(start, tmp_path / "run")
    limit: Sections = {"data": {"allow_change": True, "epochs": 1}}
    done = train(ONE_PROCESS, text, run, 99, limit, batch(1), b=1.0)
    data = record(run, 2 + len(done[0].sample_ids))
    (b,) = data.sources
    assert b.offset > 0 and len(ids(done)) == b.windows - b.offset
