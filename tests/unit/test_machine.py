"""What the launcher reads off the machine, and which failure of several it reports."""

from __future__ import annotations

import signal

import pytest

from titanlite.machine import Nodes, is_local_address, read_nodes, resolve_fault, visible_gpus
from titanlite.supervise import Failure, Job, report, root_cause

LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-aa11)
GPU 1: NVIDIA H200 (UUID: GPU-bb22)
  MIG 1g.10gb     Device  0: (UUID: MIG-cc33)
"""


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0", 1),
        ("1,0", 2),
        ("0,-1,1", 1),
        ("0,2", 1),
        ("-1", 0),
        ("", 0),
        ("GPU-bb", 1),
        ("GPU-dd", 0),
        ("MIG-cc33", 1),
    ],
)
def test_visible_gpus(visible: str | None, count: int) -> None:
    assert visible_gpus(LISTING, visible) == count


def test_nodes() -> None:
    problems: list = []
    assert read_nodes({}, problems) == Nodes()
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "RDZV_ID": "run7"}
    nodes = read_nodes(variables, problems)
    assert nodes == Nodes(2, 1, "127.0.0.1", 29500, "run7") and not nodes.is_main
    without_rank = read_nodes(variables | {"NODE_RANK": "", "MASTER_PORT": "29876"}, problems)
    assert without_rank.rank is None and without_rank.is_main  # the meeting point is this machine
    assert not problems


def test_addresses() -> None:
    assert resolve_fault("127.0.0.1") == ""
    assert "resolve" in resolve_fault("no-such-host.invalid")
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")  # reserved for documentation


LOST = "RuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:4242"


def test_root_cause() -> None:
    boom = Failure(3, 1, 30, when=100.4, error="ValueError: boom")
    later = Failure(2, 1, 20, when=100.5, error="ValueError: later")
    lost = Failure(0, 1, 10, when=100.3, error=LOST)
    ended = Failure(1, -signal.SIGTERM, 11, when=1.0)
    killed = Failure(4, -signal.SIGKILL, 40, when=101.0)
    aborted = Failure(5, -signal.SIGABRT, 50, when=101.0)
    assert root_cause([ended, lost, later, boom]) is boom
    assert root_cause([lost, killed, ended]) is killed
    assert root_cause([aborted, boom]) is boom
    assert root_cause([ended, lost]) is lost
    assert root_cause([ended]) is ended
    ended_late = Failure(1, -signal.SIGTERM, 11, when=100.2, error="ValueError: first")  # it had just recorded it
    assert root_cause([lost, later, ended_late]) is ended_late


def test_report_of_a_lost_node(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    job = Job(Nodes(2, 0, "127.0.0.1", 29500), 2, frozenset({0}), tmp_path, 10)
    assert report(Failure(0, 1, 10, 1.0, LOST), job) == 1
    assert "messages of the other nodes" in capsys.readouterr().err


def test_exit_codes_of_workers(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    job = Job(Nodes(), 2, frozenset({0}), tmp_path, 10)
    assert report(Failure(0, 75, 10, 1.0), job) == 75
    assert report(Failure(0, 2, 10, 1.0), job) == 2
    assert capsys.readouterr().err == ""  # rank 0 is on the screen: it has said so
    (tmp_path / "rank-1.err").write_text("data.sources: nowhere\n")
    assert report(Failure(1, 2, 10, 1.0), job) == 2
    assert capsys.readouterr().err.count("nowhere") == 1
