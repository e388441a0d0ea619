"""The short form of scripts/fault_campaign.py; docs/checkpoints.md has the table of the full one."""

import random
import sys
from pathlib import Path

import pytest

from scripts.checkpoint_faults import Outcome, of_checkpoints
from scripts.fault_campaign import Row
from tests.cli.processes import run

CAMPAIGN = (sys.executable, "-m", "scripts.fault_campaign")
FAULTS = {
    "one bit of a file flipped": 8,
    "a file emptied, cut or made longer": 4,
    "a file deleted": 4,
    "a bit of every checkpoint flipped: refused; one brought back": 1,
    "foreign files and folders": 1,
    "a run: SIGKILL of a rank": 1,
    "a run: SIGKILL, and the newest checkpoint damaged": 1,
}
OF_DISKS = {"the disk full in a save": 4, "the disk read-only in a save": 2}


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc, mounts file systems")
def test_nothing_is_lost_and_nothing_loaded_wrongly() -> None:
    done = run(CAMPAIGN, "--short", timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.rindex("| fault |") :].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    expected = FAULTS | (OF_DISKS if "NOT TRIED" not in done.stdout else {})
    assert {row[0]: [int(cell) for cell in row[1:]] for row in rows} == {
        fault: [times, 0, 0, times] for fault, times in expected.items()
    }


def test_without_checksums_the_campaign_finds_wrong_loads(tmp_path: Path) -> None:
    ((fault, outcomes),) = of_checkpoints(tmp_path, True, random.Random(0), checksums=False)
    row = Row(fault)
    for outcome in outcomes:
        row.count(outcome)
    assert row.times == 8 and row.wrong > 0 and not row.good


@pytest.mark.parametrize("outcome", [Outcome(wrong=True, resumed=True), Outcome(lost=True, resumed=True), Outcome()])
def test_a_row_is_good_only_if_all_is_well(outcome: Outcome) -> None:
    row = Row("fault")
    row.count(Outcome(resumed=True))
    assert row.good
    row.count(outcome)
    assert not row.good
