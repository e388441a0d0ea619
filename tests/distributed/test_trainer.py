"""What the loop does between the steps: rows, garbage, the end of a run."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE, ONE_PROCESS
from titanlite.config.schema import Config
from titanlite.data.documents import document_numbers
from titanlite.data.loader import Batch
from titanlite.parallel import runtime
from titanlite.trainer import DeferredScalars, Trainer

Sections = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("trainer") / "text")


class Watched(Trainer):
    """Notes before each step whether Python collects garbage by itself, and which collections were asked for."""

    def __init__(self, config: Config, ranks: runtime.Ranks) -> None:
        super().__init__(config, ranks)
        self.collecting: list[bool] = []

    def train_step(self, microbatches: Sequence[Batch]) -> None:
        self.collecting.append(gc.isenabled())
        super().train_step(microbatches)


def _train(sections: Sections) -> dict[str, Any]:
    asked: list[tuple[int, ...]] = []
    collect = gc.collect
    gc.collect = lambda *generation: asked.append(generation) or collect(*generation)  # type: ignore[func-returns-value]
    config = Config.model_validate(sections)
    trainer = Watched(config, runtime.start(config.comm, config.run, config.parallelism))
    asked.clear()  # those of building
    trainer.train()
    rows = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    return {
        "rows": [json.loads(row) for row in rows],
        "collecting": trainer.collecting,
        "collected": [generation for generation in asked if generation],
        "after": gc.isenabled(),
    }


def _validate(sections: Sections) -> tuple[float, float, int]:
    """Validation's loss; that of every document alone, at its place in the row; and how many there are."""
    config = Config.model_validate(sections)
    trainer = Trainer(config, runtime.start(config.comm, config.run, config.parallelism))
    nats, targets, n = 0.0, 0, 0
    assert trainer.validation is not None
    for batch in trainer.validation.batches(0, 1, 1):
        (tokens,), (labels,) = batch["tokens"].numpy(), batch["labels"]
        numbers = torch.from_numpy(document_numbers(tokens, -1, 2))  # the text's tokenizer has 2 as EOS
        for number in range(int(numbers[-1]) + 1):
            positions = (numbers == number).nonzero()[:, 0]
            with torch.no_grad():
                nats += trainer.model.module(batch["tokens"][:, positions], labels[None, positions], positions).item()
            targets, n = targets + len(positions), n + 1
    return trainer.validate()["validation_loss"], nats / targets, n


def _validation_rows(sections: Sections) -> set[int]:
    """Rows of the batches that are validated on."""
    config = Config.model_validate(sections)
    trainer = Trainer(config, runtime.start(config.comm, config.run, config.parallelism))
    rows: set[int] = set()
    evaluate = trainer.model.evaluate

    def noted(batch: Batch) -> torch.Tensor:
        rows.add(batch["tokens"].shape[0])
        return evaluate(batch)

    trainer.model.evaluate = noted  # type: ignore[method-assign, assignment]
    trainer.validate()
    return rows


def train(text: Path, folder: Path, sections: Sections, worker: Any = _train) -> Any:
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": data_section(text),
        "run": {"output_dir": str(folder), "name": "run"},
        "validation": {"enable": False},
    }
    return run_distributed(worker, 1, merge(BASE, ONE_PROCESS.sections, here, sections), timeout=120)[0]


def test_rows_come_at_the_first_every_nth_and_the_last_step(text: Path, tmp_path: Path) -> None:
    seldom = train(text, tmp_path / "a", {"metrics": {"log_freq": 3}})["rows"]
    every = train(text, tmp_path / "b", {"metrics": {"log_freq": 1}})["rows"]
    assert [row["step"] for row in seldom] == [1, 3, 6, 9, 10]
    same = ("step", "loss", "grad_norm", "lr", "samples", "tokens")
    assert [[row[key] for key in same] for row in seldom] == [
        [row[key] for key in same] for row in every if row["step"] in (1, 3, 6, 9, 10)
    ]
    for row in seldom:
        assert row["tokens_per_second"] == pytest.approx(24 * 32 / row["step_seconds"])


def test_the_step_that_ends_the_data_has_a_row(text: Path, tmp_path: Path) -> None:
    rows = train(text, tmp_path, {"metrics": {"log_freq": 3}, "data": {"epochs": 1}, "training": {"steps": 50}})["rows"]
    assert [row["step"] for row in rows] == [1, 3, 4], "107 samples are four steps"


@pytest.mark.parametrize(("gc_freq", "collected"), [(0, 0), (4, 2), (100, 0)])
def test_garbage_is_collected_at_the_same_steps_on_all_ranks(
    gc_freq: int, collected: int, text: Path, tmp_path: Path
) -> None:
    seen = train(text, tmp_path, {"training": {"gc_freq": gc_freq}})
    assert seen["collecting"] == [gc_freq == 0] * 10
    assert len(seen["collected"]) == collected
    assert seen["after"]


def test_validation_takes_no_larger_batches_than_training(text: Path, tmp_path: Path) -> None:
    """local_batch_size is a maximum. What fits into memory is the divisor of a rank's 24 samples that training uses."""
    sections: Sections = {"validation": {"enable": True, "samples": 0}, "training": {"local_batch_size": 11}}
    assert train(text, tmp_path, sections, _validation_rows) == {8}


def test_validation_stays_within_documents_when_they_are_masked(text: Path, tmp_path: Path) -> None:
    sections: Sections = {"validation": {"enable": True, "samples": 0}}
    plain, alone, _ = train(text, tmp_path / "a", sections, _validate)
    masked, same, documents = train(text, tmp_path / "b", merge(sections, {"data": {"document_mask": True}}), _validate)
    assert documents > 46, "some of the 46 samples have two"
    assert masked == pytest.approx(alone, rel=1e-6) and alone == same
    assert abs(plain / alone - 1) > 1e-5


def test_deferred_scalars_are_exact() -> None:
    values = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(0.1), torch.tensor(1)]
    assert DeferredScalars(values).get() == [1 / 3, float(torch.tensor(0.1)), 1.0]
