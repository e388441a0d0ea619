"""What a worker's processes inherit, and what passes between it and its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.lifeline import StopFile, StopRequest, no_interrupts_inherited

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """The output of a fresh process: signal masks and what is registered for forks are for good."""
    command = [sys.executable, "-c", f"from titanlite.lifeline import *; {code}"]
    return subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True, check=True).stdout


def test_a_pool_leaves_the_signal_mask_as_it_was() -> None:
    """The tracker of resources, which the first one starts, does not."""
    code = """
block = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, block)
with no_interrupts_inherited():
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) == block)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) == block)
"""
    assert python(code) == "True\nTrue\n"


def test_interrupts_are_held_back_while_a_pool_starts() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with no_interrupts_inherited():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | {signal.SIGINT}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_what_a_worker_forks_dies_of_a_signal() -> None:
    code = """
watch_launcher_and_signals()
if (pid := os.fork()) == 0:
    time.sleep(30)
    os._exit(0)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert python(code) == f"{-signal.SIGTERM}\n"


def test_what_a_rank_tells_its_launcher(tmp_path: Path) -> None:
    file = StopFile(tmp_path / "folder/stop")
    StopRequest(file).tell_agreed()
    assert file.asked.exists() and not file.now.exists() and not file.saved.exists()
    StopRequest(file).tell_saved()
    assert file.saved.exists()
    nowhere = StopRequest(StopFile(tmp_path / "no/such/stop"))
    nowhere.tell_agreed()  # to save matters more
    with pytest.raises(OSError, match="no/such"):
        nowhere.tell_saved()


def test_without_a_launcher_nobody_is_told() -> None:
    StopRequest().tell_agreed()
    StopRequest().tell_saved()
    assert "TITANLITE_STOP_FILE" not in os.environ
