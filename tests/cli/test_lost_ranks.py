"""A rank that stops, hangs or fails ends the run with one message that names it, and the last checkpoint is whole."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.cli.processes import run

FAULTY_LAUNCH = (sys.executable, "-m", "tests.cli.faulty_worker")
LIMITS = ("--comm.init_timeout_seconds", "60", "--comm.train_timeout_seconds", "6")
NO_VALIDATION = ("--validation.enable", "false")


@pytest.mark.parametrize(
    ("fault", "options", "error"),
    [
        (
            "1:step:loop",
            NO_VALIDATION,
            "have not come to a collective, or wait in it still: rank 1 (.*) is alive, last seen in step 5",
        ),
        # The last save is waited for in a channel that is patient for an hour.
        ("1:save:stop", ("--training.steps", "4", *NO_VALIDATION), "rank 1 (.*) is gone: no sign of life for 5 s"),
        ("1:validation:oom", ("--validation.freq", "3"), "^titanlite: rank 1 (.*) failed: OutOfMemoryError: CUDA"),
    ],
    ids=["hangs", "stopped", "out of memory"],
)
def test_a_lost_rank(fault: str, options: tuple[str, ...], error: str, config: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    done = run(FAULTY_LAUNCH, "--config", str(config), "--checkpoint.interval", "2", *LIMITS, *options, FAULT=fault)
    assert done.returncode == 1, done.stderr
    assert re.search(error.replace("(.*)", r"\(.*\)"), done.stderr, re.MULTILINE), done.stderr
    assert done.stderr.count("failed:") == 1 and done.stderr.count("Traceback") <= 1, done.stderr
    assert "SIGKILL" not in done.stderr
    assert (tmp_path / "out/tiny/checkpoints/step-00000002/manifest.json").exists()
    assert time.monotonic() - start < 60
