"""Which processes of this machine still run."""

from __future__ import annotations

import subprocess


def is_running(pid: int) -> bool:
    """Whether the process is there; one that has ended and was not reaped yet does not count."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state = done.stdout.strip()
    return state != "" and not state.startswith("Z")
