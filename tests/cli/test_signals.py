"""A job that is preempted, as a scheduler does it: saved, exit code 75, and the resumed run is the unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.draw_layouts import descendants
from tests.cli.processes import ROOT, environment
from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE
from titanlite import train
from titanlite.config.load import dump, load
from titanlite.config.schema import Config
from titanlite.lifeline import JOB_END_TIME
from titanlite.parallel import runtime
from titanlite.trainer import Trainer

SLOW_LAUNCH = "import sys; from titanlite.launch import launch; sys.exit(launch(sys.argv[1:], 'tests.cli.slow_worker'))"
SLOW_SAVE = 2.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = make_text(tmp_path / "text")
    here = {
        "run": {"output_dir": str(tmp_path / "out"), "name": "run"},
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": {**data_section(text), "num_workers": 1},
        "training": {"local_batch_size": 12, "steps": 2000},
        "checkpoint": {"enable": True, "interval": 7},
        "validation": {"enable": False},
    }
    path = tmp_path / "tiny.toml"
    path.write_text(dump(Config.model_validate(merge(BASE, here))))
    return path


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def job(config: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_LAUNCH, "--config", str(config)],
        cwd=ROOT,
        env=environment(SLOW_SAVE=SLOW_SAVE, OMP_NUM_THREADS=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_sigterm_to_every_process_during_a_save(job: subprocess.Popen[str], config: Path, tmp_path: Path) -> None:
    """As Slurm sends it: to the launcher, the ranks and their readers of data."""
    folder = tmp_path / "out/run"
    deadline = time.monotonic() + 60
    while not (folder / "checkpoints/step-00000007").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert not (folder / "checkpoints/step-00000007/manifest.json").exists(), "the save is under way"
    readers = [pid for pid in descendants(job.pid) if pid != job.pid]
    assert len(readers) >= 4
    for pid in descendants(job.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    stdout, stderr = job.communicate(timeout=60)
    assert job.returncode == 75, stdout + stderr
    assert "stopped and saved" in stderr and "Traceback" not in stderr
    stopped = rows(folder)[-1]["step"]
    assert f"stopped at step {stopped} by " in stdout
    assert (folder / f"checkpoints/step-{stopped:08d}/manifest.json").exists()

    steps = stopped + 3
    run_distributed(to_step, 2, config, ["--training.steps", str(steps)], timeout=60)
    run_distributed(to_step, 2, config, ["--training.steps", str(steps), "--run.name", "unbroken"], timeout=60)
    same = ("step", "loss", "grad_norm", "lr", "samples")
    resumed, unbroken = (
        [[row[key] for key in same] for row in rows(tmp_path / "out" / n)] for n in ("run", "unbroken")
    )
    assert resumed == unbroken and len(resumed) == steps


def to_step(path: Path, options: list[str]) -> None:
    config = load(str(path), options).config
    Trainer(config, runtime.start(config.comm, config.run, config.parallelism)).train()


@pytest.mark.parametrize(("left", "said"), [(50, "stopped at step 0 by checkpoint.before_walltime"), (500, "finished")])
def test_the_end_of_the_job(left: int, said: str, config: Path) -> None:
    (output,) = run_distributed(with_clock, 1, config, left, timeout=60)
    assert said in output


def with_clock(path: Path, left: int) -> str:
    os.environ[JOB_END_TIME] = str(int(time.time()) + left)
    said: list[str] = []
    Trainer._say = lambda self, message: said.append(message)  # type: ignore[method-assign]
    options = ["--checkpoint.before_walltime", "60", "--training.steps", "1", "--parallelism.dp_shard", "1"]
    assert train.main([str(path), *options]) == 0
    return "\n".join(said)
