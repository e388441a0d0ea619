"""The whole of it, as a user runs it: launcher, workers, run folder, kill, resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.draw_layouts import descendants
from tests.cli.processes import LAUNCH, ROOT, TITANLITE, assert_refused, environment, run


def train(config: Path, *options: str, **env: Any) -> subprocess.CompletedProcess[str]:
    return run(LAUNCH, "--config", str(config), *options, **env)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["samples"]) for row in rows(folder)]


def test_a_run_its_folder_a_no_op_and_going_on(config: Path, tmp_path: Path) -> None:
    done = train(config)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out/tiny"
    assert "step 10/10" in done.stdout and "finished at step 10" in done.stdout
    assert [row["step"] for row in rows(folder)] == list(range(1, 11))
    assert {"validation_loss", "validation_bits_per_byte"} <= rows(folder)[-1].keys()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
        "step-00000010",
    ]
    assert list((folder / "tensorboard").iterdir())
    manifest = json.loads((folder / "checkpoints/step-00000010/manifest.json").read_text())
    assert manifest["train_state"]["samples"] == 240 and manifest["layout"]["dp_shard"] == 2
    resolved = run((*TITANLITE, "config"), str(folder / "config.toml"))
    assert resolved.returncode == 0 and 'name = "tiny"' in resolved.stdout

    before = (folder / "metrics.jsonl").read_bytes()
    again = train(config)
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout and "--training.steps" in again.stdout
    assert (folder / "metrics.jsonl").read_bytes() == before

    more = train(config, "--training.steps", "12")
    assert more.returncode == 0, more.stderr
    assert [(row["step"], row["samples"]) for row in rows(folder)][-2:] == [(11, 264), (12, 288)]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Runs to be ended with all their processes, whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def start(config: Path, started: list[subprocess.Popen[str]], *options: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*LAUNCH, "--config", str(config), *options],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(rows_so_far(folder)) < step:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "no such step in time"
        time.sleep(0.05)


def rows_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


LONG = ("--training.steps", "300", "--validation.enable", "false", "--checkpoint.interval", "7")


def test_sigkill_to_all_and_resume_is_bitwise(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """Under DDP; test_fault_campaign.py does it under FSDP."""
    layout = ("--parallelism.dp_replicate", "2")
    ended = ("--training.steps", "60", *LONG[2:], *layout)
    folder = tmp_path / "out/killed"
    for reached in (12, 30):  # twice in a row
        process = start(config, started, *LONG, *layout, "--run.name", "killed")
        wait_for_step(folder, reached, process)
        kill_all(process)
    resumed = train(config, *ended, "--run.name", "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    unbroken = train(config, *ended, "--run.name", "unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    assert curve(folder) == curve(tmp_path / "out/unbroken")
    assert [row["step"] for row in rows(folder)] == list(range(1, 61))


def test_a_second_job_in_the_folder_is_refused(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    first = start(config, started, *LONG)
    wait_for_step(tmp_path / "out/tiny", 2, first)
    assert_refused(train(config), "a second job for this run folder", "--run.name")
    assert first.poll() is None, "the first job goes on"


def test_epochs_end_the_run_with_a_checkpoint(config: Path, tmp_path: Path) -> None:
    options = ("--data.epochs", "1", "--training.steps", "50", "--checkpoint.interval", "100")
    done = train(config, *options)
    assert done.returncode == 0, done.stderr
    assert "raise data.epochs" in done.stdout
    last = rows(tmp_path / "out/tiny")[-1]
    assert 1 < last["step"] < 50 and "validation_loss" in last
    assert (tmp_path / f"out/tiny/checkpoints/step-{last['step']:08d}/manifest.json").exists()
    again = train(config, *options)
    assert again.returncode == 0 and "raise data.epochs" in again.stdout, again.stderr
    assert rows(tmp_path / "out/tiny")[-1] == last


def test_a_step_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(config: Path, tmp_path: Path) -> None:
    assert train(config, "--training.steps", "3").returncode == 0
    options = ("--optimizer.lr", "1e30", "--training.max_norm", "0", "--checkpoint.interval", "1")
    done = train(config, *options)
    assert done.returncode == 1
    assert "NonFiniteError: step" in done.stderr and done.stderr.count("Traceback") == 1
    steps = [int(path.name[5:]) for path in (tmp_path / "out/tiny/checkpoints").iterdir()]
    failed = int(done.stderr.split("NonFiniteError: step ")[1].split(":")[0])
    assert max(steps) < failed, "what is not finite is never saved"
    good = train(config, "--checkpoint.resume", str(tmp_path / "out/tiny/checkpoints/step-00000003"))
    assert good.returncode == 0, good.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--checkpoint.resume", "never"), ("checkpoint.resume", '"never"', "--run.name")),
        (("--run.seed", "4", "--training.steps", "11"), ("run.seed", "as in the checkpoint")),
        (("--model.ffn_dim", "72", "--training.steps", "11"), ("model.ffn_dim", "as in the checkpoint")),
    ],
)
def test_a_wrong_resume_is_refused(options: Sequence[str], words: Sequence[str], config: Path, tmp_path: Path) -> None:
    assert train(config, "--training.steps", "2", "--validation.enable", "false").returncode == 0
    done = train(config, *options)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--training.seq_len", "100000"), ("data.sources.0.path", "training.seq_len")),
        (("--model.vocab_size", "299"), ("model.vocab_size", "tokenizer", "300")),
        (("--tokenizer.path", "{text}/a/000.txt"), ("tokenizer", "000.txt")),
        (("--data.sources", '[{{path = "{text}/nothing"}}]'), ("data.sources.0.path", "nothing")),
    ],
)
def test_wrong_data_is_refused(options: Sequence[str], words: Sequence[str], config: Path, text: Path) -> None:
    done = train(config, *(option.format(text=text) for option in options))
    assert_refused(done, *words)


def test_bfloat16_on_this_cpu_says_so_if_it_is_slower(config: Path) -> None:
    done = train(config, "--training.mixed_precision_param", "bfloat16", "--training.steps", "1", "--nproc", "1")
    assert done.returncode == 0, done.stderr
    import torch

    from titanlite.metrics.throughput import matmul_rate

    class Alone:
        def barrier(self) -> None: ...

    alone: Any = Alone()
    slower = matmul_rate(torch.device("cpu"), torch.float32, alone) / matmul_rate(
        torch.device("cpu"), torch.bfloat16, alone
    )
    if slower > 1.3:
        assert "bfloat16 matmuls are" in done.stdout
    elif slower < 0.7:
        assert "bfloat16 matmuls are" not in done.stdout


def test_experts_over_a_pipeline_learn_and_spread(text: Path, tmp_path: Path) -> None:
    """The shipped run, smaller, on this repository's documents; four processes because the degrees need them."""
    (tmp_path / "texts").mkdir()
    for document in (ROOT / "docs").glob("*.md"):
        (tmp_path / "texts" / f"{document.stem}.txt").write_bytes(document.read_bytes())
    small = {
        "run.output_dir": tmp_path / "out",
        "data.cache_dir": tmp_path / "cache",
        "data.sources": f"[{{path = '{tmp_path / 'texts'}'}}]",
        "tokenizer.path": text / "tokenizer.model",
        "model.vocab_size": 300,
        "model.dim": 48,
        "model.n_heads": 2,
        "model.n_kv_heads": 1,
        "model.ffn_dim": 96,
        "model.moe.expert_dim": 32,
        "model.moe.bias_update_rate": 0.002,  # balancing for a run of 30 steps
        "model.moe.aux_loss_coeff": 0.1,
        "training.seq_len": 64,
        "training.global_batch_size": 8,
        "training.local_batch_size": 4,
        "training.steps": 30,
        "optimizer.lr": 5e-3,
        "lr_scheduler.warmup_steps": 2,
        "checkpoint.enable": "false",
        "validation.enable": "false",
        "metrics.log_freq": 1,
        "metrics.peak_tflops": 1,
    }
    options = [f"--{key}={value}" for key, value in small.items()]
    done = train(Path("llama_debug_moe.toml"), "--parallelism.ep", "2", "--parallelism.pp", "2", *options)
    assert done.returncode == 0, done.stderr
    assert "4 CPU processes (dp_shard 2, pp 2, ep 2)" in done.stdout + done.stderr
    run = rows(tmp_path / "out/llama_debug_moe")
    assert len(run) == 30 and {row["expert_assignments"] for row in run} == {8 * 64 * 2}
    assert run[-1]["loss"] < run[0]["loss"] - 2
    early, late = (sum(row["expert_load_max"] for row in run[start : start + 6]) / 6 for start in (5, 24))
    assert late < early - 1, "a router first prefers a few experts (8 / top_k = 4 is the worst), then spreads"


def test_gpu_check_in_its_dry_mode(tmp_path: Path) -> None:
    command = ("bash", str(ROOT / "scripts/gpu_check.sh"), "--cpu", str(tmp_path / "check"))
    done = run(command, timeout=600, VIRTUAL_ENV=sys.prefix)  # it uses the active environment, and makes none
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "gpu_check: good" in done.stdout
    shutil.rmtree(tmp_path / "check")
