"""Everything a user can get wrong on the command line: exit 2, one message, in no time, nothing started."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import LAUNCH, TINY, assert_refused, environment, run, write_config
from titanlite import cli
from titanlite.checkpoint import storage
from titanlite.checkpoint.checksum import FileRecord

ARGUMENTS = {
    "key": (["--training.step", "5"], ["training.step", "--training.steps"]),
    "section": (["--trainin.steps", "5"], ["trainin.steps", "--training.steps"]),
    "text for an integer": (["--training.steps", '"8"'], ["training.steps", '"8"']),
    "float for an integer": (["--training.steps=2.5"], ["training.steps", "2.5"]),
    "boolean for an integer": (["--training.steps", "true"], ["training.steps", "true"]),
    "no value": (["--training.steps"], ["training.steps", "no value"]),
    "launcher option without value": (["--config"], ["--config"]),
    "abbreviated option": (["--npro", "2"], ["npro"]),
    "config as a plain word": (["llama_8b"], ["did you mean --config llama_8b?"]),
    "unknown config": (["--config", "llama_debu"], ["llama_debug", "smollm_135m"]),
    "--nproc 0": (["--nproc", "0"], ["--nproc", "an integer from 1"]),
    "--nproc text": (["--nproc", "two"], ["--nproc", '"two"']),
    "world that is not the layout's": (["--nproc", "3", "--parallelism.dp_shard", "2"], ["parallelism", "3 processes"]),
    "a layout of more processes than a machine can start": (
        ["--parallelism.dp_shard", "6000", "--training.global_batch_size", "6000"],
        ["command line: parallelism", "6000 processes", "at most 4096 on a machine", "NNODES"],
    ),
    "batch that does not divide": (["--nproc", "5"], ["training.global_batch_size"]),
    "missing data": (["--data.sources", '[{path = "nowhere"}]'], ["data.sources", "nowhere"]),
    "missing tokenizer": (["--tokenizer.path", "nowhere.model"], ["tokenizer.path", "nowhere.model"]),
    "no GPU": (["--run.device", "cuda"], ["run.device"]),
    "output under a file": (["--run.output_dir", "README_FILE/x"], ["run.output_dir"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str, tmp_path: Path) -> None:
    arguments, words = ARGUMENTS[case]
    (tmp_path / "README_FILE").touch()
    done = run(LAUNCH, *arguments, cwd=tmp_path)
    assert_refused(done, *words, "fix: ")
    assert not (tmp_path / "outputs").exists()


ENVIRONMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "NPROC": ({"NPROC": "-1"}, ["environment: NPROC", '"-1"']),
    "NNODES": ({"NNODES": "two"}, ["environment: NNODES", '"two"']),
    "NODE_RANK too high": (
        {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "127.0.0.1"},
        ["environment: NODE_RANK", "from 0 to 1"],
    ),
    "NODE_RANK missing": ({"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}, ["environment: NODE_RANK", "RDZV_ID"]),
    "MASTER_ADDR missing": ({"NNODES": "2", "NODE_RANK": "1"}, ["environment: MASTER_ADDR"]),
    "MASTER_ADDR unresolved": (
        {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "no-such-host.invalid"},
        ["environment: MASTER_ADDR", "no-such-host.invalid"],
    ),
    "MASTER_PORT": ({"MASTER_PORT": "65536"}, ["environment: MASTER_PORT", "65535"]),
    "LOG_RANK text": ({"LOG_RANK": "first"}, ["environment: LOG_RANK", '"first"']),
    "LOG_RANK too high": ({"LOG_RANK": "0,2"}, ["environment: LOG_RANK", "0 to 1"]),
    "nodes that do not divide the layout": (
        {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
        ["environment: NNODES", "4 processes"],
    ),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_environment(case: str, tmp_path: Path) -> None:
    env, words = ENVIRONMENTS[case]
    layout = ["--parallelism.dp_shard", "4"] if "layout" in case else []
    assert_refused(run(LAUNCH, *layout, cwd=tmp_path, **env), *words, "fix: ")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_port_in_use(tmp_path: Path, host: str) -> None:
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(LAUNCH, cwd=tmp_path, MASTER_PORT=str(port))
        assert_refused(done, "environment: MASTER_PORT", str(port), "in use")
        env: dict[str, Any] = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        assert_refused(run(LAUNCH, cwd=tmp_path, **env), "environment: MASTER_PORT", "in use")


def test_all_problems_at_once(tmp_path: Path) -> None:
    arguments = ["--nproc", "0", "--training.stepz", "1", "--optimizer.lr", "true"]
    done = run(LAUNCH, *arguments, cwd=tmp_path, MASTER_PORT="x", NNODES="0")
    assert_refused(done, "5 problems", "--nproc", "training.stepz", "optimizer.lr", "MASTER_PORT", "NNODES")


def test_more_processes_than_gpus(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-aa)'\necho 'GPU 1: H200 (UUID: GPU-bb)'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{environment()['PATH']}"
    done = run(LAUNCH, "--nproc", "4", cwd=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="0,1")
    assert_refused(done, "processes", "2")


def test_a_broken_driver_is_no_machine_without_gpus(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{environment()['PATH']}"
    done = subprocess.run(
        LAUNCH,
        cwd=tmp_path,
        env={name: value for name, value in environment(PATH=path).items() if name != "CUDA_VISIBLE_DEVICES"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_refused(done, "nvidia-smi -L", "exit status 18", "--run.device cpu")


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    config = write_config(tmp_path)
    done = run(LAUNCH, "--config", str(config), "--data.sources", '[{path = "empty.txt"}]', cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data.sources" in done.stderr


def test_refusal_takes_no_torch_and_under_a_second(tmp_path: Path) -> None:
    code = (
        "import sys; from titanlite import launch; code = launch.main(['--nproc', '5', '--training.stepz', '1']); "
        "print(code, 'torch' in sys.modules)"
    )
    times = []
    for _ in range(3):  # the best of three, since a test machine may be busy
        started = time.monotonic()
        done = run((sys.executable, "-c", code), cwd=tmp_path)
        times.append(time.monotonic() - started)
        assert done.stdout == "2 False\n", done.stderr
    assert min(times) < 1.0


def test_a_good_plan_takes_no_torch(tmp_path: Path) -> None:
    code = (
        "import os, sys; from titanlite import launch; "
        "plan = launch.make_plan(*launch.make_parser().parse_known_args([]), os.environ); "
        "import titanlite.data.prepare; print(plan.nproc, 'torch' in sys.modules)"
    )
    done = run((sys.executable, "-c", code), cwd=tmp_path)
    assert done.stdout == "2 False\n", done.stderr


def test_weights_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher looks at whose they are, and so does a check."""
    parts = {
        "layout": {},
        "versions": {},
        "train_state": {"step": 3},
        "config": {"model": {**tomllib.loads(TINY)["model"], "dim": 64}},
    }
    step = tmp_path / "old/checkpoints/step-00000003"
    step.mkdir(parents=True)
    storage.commit(step, storage.make_manifest(3, {".metadata": FileRecord(0, None)}, parts))
    arguments = ("--config", str(write_config(tmp_path)), "--checkpoint.init_from", str(tmp_path / "old"))
    done = run(LAUNCH, *arguments, cwd=tmp_path)
    assert_refused(
        done, "nothing was started", "tiny.toml: model.dim: got 32; allowed: 64, as ", f"{step}/manifest.json says"
    )
    assert not (tmp_path / "outputs").exists()
    assert cli.main(["config", *arguments[1:], "--check"]) == 2
    assert "tiny.toml: model.dim: got 32; allowed: 64, as " in capsys.readouterr().err
