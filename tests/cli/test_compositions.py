"""The debug model on real text, as a user starts it: a composition of degrees trains as one process does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, run
from titanlite.data.train_tokenizer import train_tokenizer

SMALL = {
    "model.vocab_size": 512,
    "model.dim": 64,
    "model.ffn_dim": 172,
    "model.n_layers": 3,
    "training.seq_len": 64,
    "training.global_batch_size": 12,
    "training.steps": 6,
    "lr_scheduler.warmup_steps": 2,
    "validation.freq": 6,
    "validation.samples": 6,
    "checkpoint.enable": "false",
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "metrics.peak_tflops": 1.0,
}
Losses = list[dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the text, what docs/ says, a paragraph a document, and a tokenizer: embedded ones would take minutes."""
    folder = tmp_path_factory.mktemp("compositions")
    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    (folder / "docs.txt").write_text(text)
    (folder / "tokenizer.model").write_bytes(train_tokenizer(text.splitlines(), 512))
    return folder


def train(folder: Path, name: str, processes: int, **parallelism: int) -> Losses:
    """The rows of the run's metrics, after what it printed has been compared with them."""
    here = {"run.output_dir": folder, "run.name": name, "data.cache_dir": folder / "cache"}
    here |= {"data.sources": f'[{{path = "{folder}/docs.txt", separator = "\\n\\n"}}]', "data.validation_fraction": 0.2}
    here |= {"tokenizer.path": folder / "tokenizer.model"}
    options = SMALL | here | {f"parallelism.{degree}": size for degree, size in parallelism.items()}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = (str(ROOT / "run_train.sh"), "--config", "llama_debug.toml")
    # It takes the active environment, and makes none.
    done = run(command, *words, timeout=300, VIRTUAL_ENV=sys.prefix, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert f"{processes} x cpu" in done.stdout
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    printed = re.findall(r"^step +(\d+)/6  loss +(\S+) (?: val loss +(\S+) )?", done.stdout, re.MULTILINE)
    assert printed == [
        (str(row["step"]), f"{row['loss']:.5f}", f"{row['validation_loss']:.5f}" if "validation_loss" in row else "")
        for row in rows
    ]
    return rows


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Losses:
    return train(folder, "one", 1, dp_shard=1)


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"cp": 2, "dp_shard": 2}], ids=["tp x pp", "cp x dp_shard"])
def test_a_composition_learns_what_one_process_does(degrees: dict[str, int], one_process: Losses, folder: Path) -> None:
    rows = train(folder, "-".join(degrees), 4, **degrees)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3 and rows[-1]["validation_loss"] < rows[0]["loss"] - 0.3
    for mine, other in zip(rows, one_process, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert rows[-1]["validation_loss"] == pytest.approx(one_process[-1]["validation_loss"], rel=1e-6)
