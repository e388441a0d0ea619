"""What the launcher reads off the machine."""

from __future__ import annotations

import os

import pytest

from titanlite.machine import Nodes, is_local_address, read_nodes, resolve_fault, visible_gpus

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


def test_a_node_without_a_number_is_called_by_its_host() -> None:
    assert [Nodes(2, rank).label for rank in (0, 1)] == ["node-0", "node-1"]
    assert Nodes(2, None).label == f"node-{os.uname().nodename}"
