"""One rank is asked to save and end: all ranks do, after the same step, and the resumed run is the unbroken one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.distributed import WorkerFailed, run_distributed
from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE, LAYOUTS, ONE_PROCESS, Layout
from titanlite.config.schema import Config
from titanlite.lifeline import StopRequest
from titanlite.parallel import runtime
from titanlite.trainer import Trainer

Sections = Mapping[str, Mapping[str, Any]]
SIGNUM, STEPS = 15, 8
SAVING: Sections = {
    "training": {"steps": STEPS},
    "checkpoint": {"enable": True, "interval": 4},
    "validation": {"freq": 3},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("stop") / "text")


def train(layout: Layout, text: Path, folder: Path, ask: str = "", sections: Sections | None = None) -> list[Any]:
    """What every rank ends with, (step, stopped); `ask`: where the last one is asked to end."""
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": data_section(text),
        "run": {"output_dir": str(folder), "name": "run"},
    }
    merged = merge(BASE, layout.sections, SAVING, here, sections or {})
    return run_distributed(_train, layout.world_size, merged, ask, timeout=120)


def _train(sections: Sections, ask: str) -> tuple[int, bool]:
    config = Config.model_validate(sections)
    request = StopRequest()
    ranks = runtime.start(config.comm, config.run, config.parallelism)
    trainer = Trainer(config, ranks, request)

    def asking(method: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if when():
                request.note(SIGNUM)
            return method(*args, **more)

        return call

    if ranks.rank == ranks.world_size - 1:
        name, _, step = ask.partition(" ")
        if name == "start":
            request.note(SIGNUM)
        elif name == "clock":
            request.deadline = time.time()
        elif name:
            when = lambda: trainer.state.step == int(step)  # noqa: E731
            setattr(trainer, name, asking(getattr(trainer, name), when))
    trainer.train()
    return trainer.state.step, trainer.stopped


def curve(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [tuple(row[key] for key in ("step", "loss", "grad_norm", "lr", "samples", "tokens")) for row in rows]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("run/checkpoints/step-*/manifest.json"))


@pytest.mark.parametrize("name", ["fsdp 2", "pp 2"])
def test_a_request_at_any_time_and_the_resume_are_bitwise(name: str, text: Path, tmp_path: Path) -> None:
    layout, model = LAYOUTS[name]
    layout = Layout(layout.world_size, merge(layout.sections, model))
    asked = [("start", 0), ("train_step 1", 2), ("validate 3", 3), ("save 4", 4), ("train_step 4", 5), ("clock", 5)]
    if name == "pp 2":
        asked = [("start", 0), ("save 4", 4), ("train_step 4", 5)]
    for ask, step in asked:  # each goes on from where the one before it stopped
        found = train(layout, text, tmp_path / "stopped", ask)
        assert found == [(step, True)] * layout.world_size, ask
        assert saved(tmp_path / "stopped")[-1:] == ([step] if step else []), ask
    assert train(layout, text, tmp_path / "stopped") == [(STEPS, False)] * layout.world_size
    train(layout, text, tmp_path / "unbroken")
    assert curve(tmp_path / "stopped") == curve(tmp_path / "unbroken")


def test_a_request_in_the_last_step_comes_too_late(text: Path, tmp_path: Path) -> None:
    assert train(ONE_PROCESS, text, tmp_path, f"train_step {STEPS - 1}") == [(STEPS, False)]
    assert saved(tmp_path)[-1] == STEPS


def test_the_step_that_a_run_stops_after_has_a_row(text: Path, tmp_path: Path) -> None:
    seldom: Sections = {"metrics": {"log_freq": 50}, "validation": {"enable": False}}
    assert train(ONE_PROCESS, text, tmp_path, "train_step 2", seldom) == [(3, True)]
    assert [row[0] for row in curve(tmp_path)] == [1, 3]


def test_what_cannot_be_saved_is_said(text: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="stopped at step 2 by SIGTERM to a rank; nothing is saved"):
        train(ONE_PROCESS, text, tmp_path, "train_step 1", {"checkpoint": {"enable": False}})
