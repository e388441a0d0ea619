"""Breaks checkpoints and runs in every way it knows of, and counts what is lost.

    python -m scripts.fault_campaign [--short] [--seed 0] [--write] [--without-checksums]

checkpoint_faults.py damages files, fills disks and makes them read-only under saves and loads of two forked processes;
run_faults.py breaks runs by way of their launcher, at random instants. The full form takes ten to fifteen minutes.

Needs Linux, and the permission to mount a tmpfs in a namespace of its own (root, or user namespaces); without it, what
needs a disk of its own is not tried, and this is said. --write puts the table into docs/checkpoints.md.
--without-checksums shows that the campaign can fail: damage is not noticed then. The exit code is 1 if anything was
lost, loaded wrongly, or not as expected.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.verify.processes import start_server

if TYPE_CHECKING:
    from scripts.checkpoint_faults import Outcome

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- fault_campaign: written by scripts/fault_campaign.py -->", "<!-- fault_campaign: end -->"
HEAD = "| fault | times | wrong loads | lost checkpoints | resumed bitwise |\n|---|---|---|---|---|"
IN_NAMESPACE = "TITANLITE_FAULT_CAMPAIGN_MOUNTS"  # set in the process that may mount


@dataclass
class Row:
    fault: str
    times: int = 0
    wrong: int = 0
    lost: int = 0
    resumed: int = 0

    def count(self, outcome: Outcome) -> None:
        self.times += 1
        self.wrong += outcome.wrong
        self.lost += outcome.lost
        self.resumed += outcome.resumed
        if not outcome.resumed:
            print(f"{self.fault}: {outcome}", flush=True)

    @property
    def good(self) -> bool:
        return not self.wrong and not self.lost and self.resumed == self.times

    def __str__(self) -> str:
        return f"| {self.fault} | {self.times} | {self.wrong} | {self.lost} | {self.resumed} |"


Found = tuple[str, "Sequence[Outcome]"]  # a fault, and what came of each time that it was tried


def campaign(work: Path, short: bool, chance: random.Random, checksums: bool) -> Iterator[Found]:
    start_server(["tests.harness.preload"])  # it imports torch while this process does
    from scripts.checkpoint_faults import of_checkpoints, of_disks
    from scripts.run_faults import of_runs

    yield from of_checkpoints(work, short, chance, checksums)
    if not checksums:
        return
    with tmpfs(work / "small", "2m") as small, tmpfs(work / "large", "32m") as large:
        if small is None:
            print("NOT TRIED, since no file system can be mounted here: full and read-only disks", flush=True)
        else:
            yield from of_disks(small, short, chance)
        yield from of_runs(work, short, chance, large)


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path | None]:
    """A file system of its own; None if there cannot be one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = IN_NAMESPACE in os.environ and subprocess.run(command, check=False).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def enter_namespace() -> None:
    """Start this program anew where it may mount, and where its mounts end with it; returns if that cannot be."""
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if IN_NAMESPACE in os.environ or not shutil.which("unshare"):
        return
    with tempfile.TemporaryDirectory() as folder:
        attempt = [*alone, "mount", "-t", "tmpfs", "tmpfs", folder]
        if subprocess.run(attempt, capture_output=True, check=False).returncode:
            return
    command = [*alone, sys.executable, "-m", "scripts.fault_campaign", *sys.argv[1:]]
    os.execvpe(alone[0], command, {**os.environ, IN_NAMESPACE: "1"})


def write_table(table: str) -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text("\n".join([before + BEGIN, "", table, "", END]) + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few of each, as in CI")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"the table into {DOCUMENT.name}")
    parser.add_argument("--without-checksums", action="store_true")
    args = parser.parse_args()
    enter_namespace()
    started, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="fault-campaign-") as folder:
        for fault, outcomes in campaign(Path(folder), args.short, random.Random(args.seed), not args.without_checksums):
            row = Row(fault)
            for outcome in outcomes:
                row.count(outcome)
            rows.append(row)
            print(f"{row} {time.monotonic() - started:.0f} s", flush=True)
    table = "\n".join([HEAD, *map(str, rows)])
    print(f"{table}\n{time.monotonic() - started:.0f} s, seed {args.seed}")
    if args.write:
        write_table(table)
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
