"""Real processes for the tests of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-m", "titanlite.launch")
TITANLITE = (sys.executable, "-m", "titanlite.cli")
STUB_LAUNCH = (sys.executable, "-m", "tests.cli.stub_launch")

# A run may be started from inside another one's environment.
_LAUNCH_VARIABLES = {
    *("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "LOG_RANK", "OMP_NUM_THREADS"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "TITANLITE_WORLD_SIZE", "TITANLITE_LAUNCHER_PID", "CUDA_VISIBLE_DEVICES"),
    *("TITANLITE_STOP_FILE", "TITANLITE_START_TIME", "SLURM_JOB_END_TIME"),
}


def environment(**changes: Any) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return env | {name: str(value) for name, value in changes.items()}


def run(
    command: Sequence[str], *arguments: str, cwd: Path = ROOT, timeout: float = 120, **env: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit 2 with one message on stderr that has the words, and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("titanlite: ")
    assert done.stderr.count("\ntitanlite: ") == 0, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert done.stdout == ""


TINY = """# A run that is never trained.
[model]
vocab_size = 4096
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[training]
seq_len = 16
global_batch_size = 8
local_batch_size = 2
steps = 1
[lr_scheduler]
total_steps = 1
[comm]
init_timeout_seconds = 20
"""


def write_config(folder: Path, more: str = "") -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY + more)
    return path
