"""Which rank is said to be gone, which one the others wait for, and which error is only another's consequence."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.failures import NOTE, is_consequence
from titanlite.parallel import heartbeat
from titanlite.parallel.heartbeat import Heartbeat, LostRankError, PeerFailedError

TIMEOUT = 2.0
GONE = 17  # ticks of a twentieth of it, until four fifths are over
LATE = "Timed out waiting 100000ms for recv operation to complete"


class Ticks(threading.Event):
    """A rank's beats are counted in ticks, which come when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.waiting = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.release()
        self.asked.acquire()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self.asked.release()

    def tick(self) -> None:
        """Returns when all that comes of it is done."""
        assert self.waiting.acquire(timeout=10)
        self.asked.release()
        assert self.waiting.acquire(timeout=10), "the thread has ended, or waits"
        self.waiting.release()


class Ring:
    """Ranks of one process, on one store; `ended` has the errors that a rank's thread has ended it with."""

    def __init__(self, world_size: int, store: Any = None) -> None:
        self.store: Any = store or dist.HashStore()
        self.ended: queue.Queue[Exception] = queue.Queue()
        self.ranks = [Heartbeat(self.store, rank, world_size, TIMEOUT, self.ended.put) for rank in range(world_size)]
        for rank in self.ranks:
            rank._over = Ticks()
            rank._beat()

    def tick(self, *ranks: int, times: int = 1) -> None:
        for _ in range(times):
            for rank in ranks:
                self.ranks[rank]._over.tick()  # type: ignore[attr-defined]

    def end(self) -> Exception | None:
        with suppress(queue.Empty):
            return self.ended.get_nowait()
        return None


class FaultyStore(dist.HashStore):
    lost = ""  # the method that fails

    def set(self, key: str, value: Any) -> None:
        self.fail("set")
        super().set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.fail("multi_get")
        return super().multi_get(keys)

    def append(self, key: str, value: str) -> None:
        if self.lost == "append":
            threading.Event().wait(60)  # as a client does whose server's machine is off
        super().append(key, value)  # type: ignore[misc]

    def fail(self, name: str) -> None:
        if name == self.lost:
            raise dist.DistNetworkError("Broken pipe")


def test_a_silent_rank_is_gone() -> None:
    ring = Ring(3)
    ring.ranks[1].doing("step 12")
    ring.ranks[1]._beat()
    with ring.ranks[0].running():
        ring.tick(0, times=GONE - 2)
        early = ring.end()
        ring.tick(0, times=3)
    error = ring.end()
    assert early is None and isinstance(error, LostRankError)
    assert str(error).startswith("rank 1 (")
    assert str(error).endswith(" is gone: no sign of life for 2 s, last seen in step 12")
    assert list(ring.ranks[2]._told().values()) == [f"LostRankError: {error}"]


def test_ranks_that_beat_are_left_alone_and_so_is_one_that_is_done() -> None:
    """Silence is counted in beats of the watcher: what suspends a machine or a job suspends these, too."""
    ring = Ring(2, FaultyStore())
    with ring.ranks[0].running():
        with ring.ranks[1].running():
            ring.tick(0, 1, times=2 * GONE)
        ring.tick(0, times=2 * GONE)
        ring.store.lost = "set"
        ring.tick(0, times=2 * GONE)
        ring.store.lost = ""
    assert ring.ended.empty(), "the store goes with rank 0"


def test_a_lost_store() -> None:
    ring = Ring(2, FaultyStore())
    with ring.ranks[1].running():
        ring.store.lost = "set"
        ring.tick(1, times=GONE)
        error = ring.end()
        ring.store.lost = ""
    assert "rank 0's node is gone: Broken pipe" in str(error)


def test_the_end_does_not_wait_for_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(3, FaultyStore())
    monkeypatch.setattr(heartbeat, "_ENOUGH", 0.1)
    with ring.ranks[0].running():
        ring.store.lost = "append"
        ring.tick(0, times=GONE + 1)
        error = ring.end()
        ring.store.lost = ""
    assert isinstance(error, LostRankError)


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / f"error.json{NOTE}"


def test_a_rank_that_waits_notes_who_is_behind(note: Path) -> None:
    """For NCCL's watchdog, which ends a process without a word of it."""
    ring = Ring(2)
    ring.ranks[0].doing("step 7")
    with ring.ranks[0].running(), ring.ranks[1].running():
        ring.tick(0, 1, times=GONE + 1)
        text = note.read_text()
        ring.ranks[0].doing("step 8")
        ring.tick(0, 1)
        gone = not note.exists()
        ring.ranks[1].doing("step 7")
        ring.ranks[1].doing("step 8")
        ring.tick(1, 0, times=2 * GONE)
        again = note.exists()
    assert text.startswith("step 7 has taken 2 s; behind it are rank 1 (")
    assert gone, "the step is over"
    assert not again, "nobody is behind: the step is long"


def test_the_disk_is_left_alone_and_its_errors_end_nothing(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose thread ends is silent, and healthy."""
    unlinked = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        unlinked.append(path)
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", unlink)
    ring = Ring(2)
    with ring.ranks[0].running(), ring.ranks[1].running():
        for step in range(3):
            ring.ranks[0].doing(f"step {step}")
            ring.tick(0, 1)
        untouched = not unlinked
        ring.tick(0, 1, times=GONE)
        ring.ranks[0].doing("step 4")
        ring.tick(0, 1, times=2)
    assert untouched and unlinked[0] == note


def test_a_store_that_fails_while_a_rank_notes_who_is_behind(note: Path) -> None:
    ring = Ring(2, FaultyStore())
    ring.ranks[0].doing("step 7")
    with ring.ranks[0].running(), ring.ranks[1].running():
        ring.tick(0, 1, times=GONE - 1)
        ring.store.lost = "multi_get"
        ring.tick(0, times=2)
        ring.store.lost = ""
        ring.tick(0, 1, times=2)
    assert not note.exists() and ring.ended.empty()


def test_a_rank_that_hears_nothing_of_a_failure_is_ended_with_its_cause() -> None:
    """NCCL waits for its timeout, and the next rank is silent because it has failed, not gone."""
    ring = Ring(3)
    with ring.ranks[0].running(), ring.ranks[2].running():
        ring.ranks[1].explain(KeyError("boom"))
        ring.tick(0, 2, times=GONE - 2)
        early = ring.end()
        ring.tick(0, times=3)
        error = ring.end()
        ring.tick(2, times=GONE)
        other = ring.end()
    assert early is None, "time for an error of the collective"
    for found in (error, other):
        assert isinstance(found, PeerFailedError)
        assert "rank 1 (" in str(found) and "failed: KeyError: 'boom'\nHere: its start" in str(found)


@pytest.mark.parametrize("missing", [set(), {0}, {4}, {1, 2, 6}, set(range(7))])
def test_who_has_beaten(missing: set[int]) -> None:
    ring = Ring(7)
    for rank in missing:
        ring.store.delete_key(f"beat/{rank}")
    assert [rank for rank, beat in enumerate(ring.ranks[0]._beats(list(range(7)))) if beat is None] == sorted(missing)


def test_who_did_not_come() -> None:
    """Rank 0 times out; rank 1 hangs in its Python, rank 2 is stopped, rank 3 times out as well, rank 4 later."""
    ring = Ring(5)
    for rank in ring.ranks:
        rank.doing("step 6")
        if rank not in ring.ranks[1:3]:
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
    assert first.startswith("2 of 5 ranks did not come to a collective: rank 1 (")
    one, two = first.split("; ")
    assert one.endswith("is alive, last seen in step 6")
    assert two.startswith("rank 2 (") and two.endswith("gives no sign of life for 2 s, last seen in step 6.")
    assert here == [f"Rank 0, in step 7: RuntimeError: {LATE}"]
    # Who looks later finds the named cause.
    assert isinstance(ring.ranks[3].explain(RuntimeError("Connection closed by peer")), PeerFailedError)


def test_ranks_that_are_as_far_are_not_said_to_be_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_PATIENCE", 0.0)
    ring = Ring(2)
    error = ring.ranks[0].explain(RuntimeError(LATE))
    assert str(error).startswith("1 of 2 ranks have not come to a collective, or wait in it still: rank 1 (")


def test_a_long_cause_is_cut() -> None:
    ring = Ring(2)
    ring.ranks[1].explain(ValueError("x" * 100_000))
    assert len(ring.ranks[0]._told()[1]) == 2000


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
    assert is_consequence("DistBackendError: NCCL communicator was aborted on rank 1.")
    assert is_consequence("DistNetworkError: failed to recv, got 0 bytes")
    assert not is_consequence("ConnectionResetError: [Errno 104] Connection reset by peer"), "of a file server, say"
    reader = "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal: Connection reset by peer"
    assert not is_consequence(reader)
    assert not is_consequence(f"RuntimeError: {LATE}")
    assert not is_consequence("LostRankError: rank 1 is gone\nRank 0: RuntimeError: Connection closed by peer")
