"""Which rank is said to be gone, which one the others wait for, and which error is only another's consequence."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.parallel.heartbeat import NOTE, Heartbeat, LostRankError, PeerFailedError, is_consequence

TIMEOUT = 0.5
LATE = "Timed out waiting 100000ms for recv operation to complete"


class Ring:
    """Ranks of one process, on one store; `ended` has the errors that a rank's thread has ended it with."""

    def __init__(self, world_size: int, store: Any = None) -> None:
        store = store or dist.HashStore()
        self.ended: queue.Queue[Exception] = queue.Queue()
        self.ranks = [Heartbeat(store, rank, world_size, TIMEOUT, self.ended.put) for rank in range(world_size)]
        for rank in self.ranks:
            rank._beat()

    def wait_for_an_end(self) -> Exception | None:
        """Asserts belong after the ring's end: a rank that has ended waits forever for its process's end."""
        with suppress(queue.Empty):
            return self.ended.get(timeout=10 * TIMEOUT)
        return None


def test_a_silent_rank_is_gone() -> None:
    ring = Ring(3)
    ring.ranks[1].doing("step 12")
    ring.ranks[1]._beat()
    with ring.ranks[0].running():
        error = ring.wait_for_an_end()
    assert isinstance(error, LostRankError)
    assert str(error).startswith("rank 1 (") and str(error).endswith(
        " is gone: no sign of life for 0 s, last seen in step 12"
    )


def test_ranks_that_beat_are_left_alone_and_so_is_one_that_is_done() -> None:
    ring = Ring(2)
    with ring.ranks[0].running():
        with ring.ranks[1].running():
            time.sleep(2 * TIMEOUT)
        time.sleep(2 * TIMEOUT)
    assert ring.ended.empty()


class FaultyStore(dist.HashStore):
    lost = False

    def set(self, key: str, value: Any) -> None:
        if self.lost:
            raise dist.DistNetworkError("Broken pipe")
        super().set(key, value)


class Suspended(threading.Event):
    """As in a job that is suspended again and again, for longer than the timeout."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(TIMEOUT)
        return self.is_set()


def test_silence_is_counted_in_beats_of_the_watcher() -> None:
    ring = Ring(2)
    ring.ranks[0]._over = Suspended()
    with ring.ranks[0].running():
        time.sleep(3 * TIMEOUT)
    assert ring.ended.empty()


def test_a_lost_store() -> None:
    store = FaultyStore()
    ring = Ring(2, store)
    with ring.ranks[1].running():
        store.lost = True
        error = ring.wait_for_an_end()
    assert "rank 0's node is gone: Broken pipe" in str(error)


def test_a_rank_that_waits_notes_who_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For NCCL's watchdog, which ends a process without a word of it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    note = tmp_path / f"error.json{NOTE}"
    ring = Ring(2)
    ring.ranks[0].doing("step 7")
    with ring.ranks[0].running(), ring.ranks[1].running():
        until(note.exists)
        text = note.read_text() if note.exists() else ""
        ring.ranks[0].doing("step 8")
        until(lambda: not note.exists())
        gone = not note.exists()
        ring.ranks[1].doing("step 7")
        ring.ranks[1].doing("step 8")
        time.sleep(2 * TIMEOUT)
        again = note.exists()
    assert text.startswith("step 7 has taken 0 s; behind it are rank 1 (")
    assert gone, "the step is over"
    assert not again, "nobody is behind: the step is long"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10 * TIMEOUT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_who_did_not_come() -> None:
    """Rank 0 times out; rank 1 hangs in its Python, rank 2 is stopped, rank 3 times out as well."""
    ring = Ring(4)
    for rank in ring.ranks:
        rank.doing("step 7")
        rank._beat()
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(0.05):
            ring.ranks[1]._beat()

    thread = threading.Thread(target=beat)
    thread.start()
    ring.ranks[3]._tell("")
    error = ring.ranks[0].explain(RuntimeError(LATE))
    stopped.set()
    thread.join()
    assert isinstance(error, LostRankError)
    first, *here = str(error).splitlines()
    assert first.startswith("2 of 4 ranks did not come to a collective: rank 1 (")
    one, two = first.split("; ")
    assert one.endswith("is alive, last seen in step 7")
    assert two.startswith("rank 2 (") and two.endswith("gives no sign of life for 2 s, last seen in step 7.")
    assert here == [f"Rank 0, in step 7: RuntimeError: {LATE}"]
    # Who looks later finds the named cause.
    assert isinstance(ring.ranks[3].explain(RuntimeError("Connection closed by peer")), PeerFailedError)


def test_an_error_of_its_own_is_told_and_stays_what_it_is() -> None:
    ring = Ring(2)
    own = ValueError("request timed out")
    start = time.monotonic()
    assert ring.ranks[1].explain(own) is own
    peer = ring.ranks[0].explain(RuntimeError("Connection closed by peer [::1]:4"))
    assert time.monotonic() - start < 2, "none of them waits"
    assert isinstance(peer, PeerFailedError)
    assert "rank 1 (" in str(peer) and "failed: ValueError: request timed out" in str(peer)
    assert is_consequence(f"PeerFailedError: {peer}")


def test_the_raised_error_has_one_traceback_of_where_it_waited() -> None:
    ring = Ring(2)
    ring.ranks[1].explain(ValueError("boom"))
    with pytest.raises(PeerFailedError, match="boom") as raised, ring.ranks[0].running():
        raise RuntimeError(LATE)
    assert raised.value.__suppress_context__ and raised.value.__cause__ is None
    assert raised.traceback[-1].name == "test_the_raised_error_has_one_traceback_of_where_it_waited"


def test_consequences() -> None:
    assert is_consequence("RuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:4242")
    assert is_consequence("DistNetworkError: failed to recv, got 0 bytes")
    assert not is_consequence("ConnectionResetError: [Errno 104] Connection reset by peer"), "of a file server, say"
    assert not is_consequence(f"RuntimeError: {LATE}")
    assert not is_consequence("LostRankError: rank 1 is gone\nRank 0: RuntimeError: Connection closed by peer")
