"""Which rank is gone, and which one the others wait for: what the ranks tell each other beside their collectives.

A thread of every rank writes a beat into the store every second, with what the rank does, and watches the beats of the
next rank: one that is stopped, or whose node is off, is found wherever the others wait for it. A rank that hangs in its
Python still beats, as the thread does; it is found when a collective times out, by those that come to tell of it.

Torch-free: a store is anything with torch.distributed.Store's methods.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.failures import NOTE, is_consequence, is_timeout

if TYPE_CHECKING:
    import torch.distributed as dist

# A rank is gone after this share of the timeout: before NCCL, at the whole of it, ends the ranks that wait.
_SHARE_OF_TIMEOUT = 0.8
_PATIENCE = 2.0  # seconds, and two beats, for what other ranks have to tell
_ENOUGH = 5.0  # seconds for a few requests, of which some may be on the way
_NAMED = 8  # ranks in a message
_LONGEST_CAUSE = 2000  # characters of an error that is told to all ranks


class LostRankError(RuntimeError):
    """Other ranks are gone, or have not come to a collective in time. Names them."""


class PeerFailedError(RuntimeError):
    """A collective failed because another rank has failed, with an error of its own. Names both."""


class Heartbeat:
    """This rank's sign of life, and its eye on the next one. Its threads talk to the store, and to nothing else."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: float,
        end: Callable[[Exception], None],
    ) -> None:
        """
        store:   a client of its own: one that is shared waits while another thread waits for a key.
        timeout: that of a collective, in seconds. The next rank is gone when it was silent for most of it, counted in
                 this rank's own beats: a job that was suspended as a whole, or a machine that was, was not silent.
        end:     told a LostRankError or PeerFailedError, from the thread: hands it over and ends the process. The main
                 thread may be in a collective that nothing interrupts.
        """
        self._doing: str | None = "its start"  # None: done, and silent from now on
        self._moves = 0
        record = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self._note = Path(record + NOTE) if record else None
        self._noted = False
        self.timeout = timeout
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._end = end
        self._place = f"{socket.gethostname()}, process {os.getpid()}"
        self._count = 0
        self._over = threading.Event()
        # Taken for good by the thread that ends the process. The other one waits for that end: an error of its own that
        # it recorded meanwhile would be a second cause.
        self._ending = threading.Lock()

    @property
    def _interval(self) -> float:
        """Seconds between beats."""
        return min(1.0, self.timeout / 20)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beat and watch while the body runs. An error that another rank is to blame for is replaced; see `explain`."""
        self._beat()
        self._store.append("told", "")  # type: ignore[attr-defined]  # get waits for a key that is not there
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            told = self.explain(error)
            if told is error:
                raise
            raise told.with_traceback(error.__traceback__) from None  # one traceback, of where it waited
        self._over.set()
        thread.join(_ENOUGH)
        _within(_ENOUGH, self._say_done)

    def doing(self, what: str) -> None:
        """What this rank does from now on: "step 12". All ranks say the same, in the same order."""
        self._doing = what
        self._moves += 1

    # ---- the ring

    def _run(self) -> None:
        """A store that does not answer at all blocks this thread: nothing is known then, and nothing is done."""
        peer = (self._rank + 1) % self._world_size
        last: dict[str, Any] | None = None
        moves, silent, still, failed = -1, 0.0, 0.0, 0.0
        while not self._over.wait(self._interval):
            limit = _SHARE_OF_TIMEOUT * self.timeout
            still = 0.0 if self._moves != moves else still + self._interval
            moves = self._moves
            seen, problem, cause = last, "", None
            try:
                self._beat()
                seen = self._beats([peer])[0]
                cause = self._cause_elsewhere(self._told())
                if still > limit >= still - self._interval:
                    self._note_who_is_behind(still)
            except RuntimeError as error:
                problem = str(error)
            if still == 0.0 and self._noted:
                self._forget_who_is_behind()
            silent = 0.0 if seen != last else silent + self._interval
            failed = failed + self._interval if cause else 0.0
            last = seen
            if cause and (failed > self._patience or silent > limit):
                # By now Gloo would have raised an error in the main thread. NCCL has none: it waits for its timeout.
                self._end_with(PeerFailedError(f"{cause}\nHere: {self._doing}"))
            elif silent > limit and not (last and last["doing"] is None):
                text = f"{_name(peer, last)} is gone: no sign of life for {silent:.0f} s{_last_seen(last)}"
                if problem:
                    text = f"the ranks' store has not answered for {silent:.0f} s, so rank 0's node is gone: {problem}"
                self._end_with(LostRankError(text))

    def _end_with(self, error: Exception) -> None:
        if not self._ending.acquire(blocking=False):
            return
        if isinstance(error, LostRankError):
            _within(_ENOUGH, lambda: self._tell(f"LostRankError: {error}"))
        try:
            raise error  # torchrun shows tracebacks only
        except Exception as raised:
            self._end(raised)

    def _note_who_is_behind(self, seconds: float) -> None:
        """Before NCCL ends this process, in which no Python runs then."""
        others = enumerate(self._beats(list(range(self._world_size))))
        behind = [
            f"{_name(rank, beat)}{_last_seen(beat)}" for rank, beat in others if beat and beat["moves"] < self._moves
        ]
        if self._note is not None and behind:
            what = f"{self._doing} has taken {seconds:.0f} s; behind it are {_some(behind)}"
            with suppress(OSError):
                self._note.write_text(what)
                self._noted = True

    def _forget_who_is_behind(self) -> None:
        assert self._note is not None
        with suppress(OSError):
            self._note.unlink(missing_ok=True)
            self._noted = False

    def _beat(self) -> None:
        self._count += 1
        beat = {"count": self._count, "place": self._place, "doing": self._doing, "moves": self._moves}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _say_done(self) -> None:
        self._doing = None
        self._beat()

    def _beats(self, ranks: list[int]) -> list[dict[str, Any] | None]:
        """The last beat of each; None where there was none yet."""
        there = self._that_have_beaten(ranks)
        values = self._store.multi_get([f"beat/{rank}" for rank in there]) if there else []
        beats = {rank: json.loads(value) for rank, value in zip(there, values, strict=True)}
        return [beats.get(rank) for rank in ranks]

    def _that_have_beaten(self, ranks: list[int]) -> list[int]:
        """Mostly all of them, which one request tells, and the few that have not are found by halves."""
        if self._store.check([f"beat/{rank}" for rank in ranks]):
            return ranks
        half = len(ranks) // 2
        return self._that_have_beaten(ranks[:half]) + self._that_have_beaten(ranks[half:]) if half else []

    # ---- the end

    def explain(self, error: Exception) -> Exception:
        """The error to report in place of `error`, which ends this rank; all other ranks are told of it.

        One of this rank's own is returned as it is. For a lost connection or a timeout it waits a few seconds for what
        the other ranks have to tell: PeerFailedError if one of them has an error of its own, else LostRankError with
        the ranks that have nothing to tell, as these did not come.
        """
        self._ending.acquire()
        return _within(self._patience + 10.0, lambda: self._explain(error)) or error

    @property
    def _patience(self) -> float:
        return _PATIENCE + 2 * self._interval

    def _explain(self, error: Exception) -> Exception:
        text = f"{type(error).__name__}: {error}"
        if not (is_consequence(text) or is_timeout(text)):
            self._tell(text)
            return error
        self._tell("")
        ranks = list(range(self._world_size))
        before = self._beats(ranks)
        deadline = time.monotonic() + self._patience
        told: dict[int, str] = {}
        while time.monotonic() < deadline and len(told) < self._world_size:
            told = self._told()
            if cause := self._cause_elsewhere(told):
                return PeerFailedError(f"{cause}\nHere: {text}")
            time.sleep(min(0.5, self._interval))
        missing = [rank for rank in ranks if rank not in told]
        if not missing:
            return error
        after = self._beats(ranks)
        # Of ranks that are as far as this one some may have come later, and will time out later.
        behind = [rank for rank in missing if (after[rank] or {}).get("moves", -1) < self._moves]
        what = "did not come to a collective" if behind else "have not come to a collective, or wait in it still"
        lines = []
        for rank in behind or missing:
            alive = before[rank] != after[rank]
            state = "is alive" if alive else f"gives no sign of life for {self._patience:.0f} s"
            lines.append(f"{_name(rank, after[rank])} {state}{_last_seen(after[rank])}")
        what = f"{len(lines)} of {self._world_size} ranks {what}: {_some(lines)}"
        self._tell(f"LostRankError: {what}")
        return LostRankError(f"{what}.\nRank {self._rank}, in {self._doing}: {text}")

    def _cause_elsewhere(self, told: dict[int, str]) -> str | None:
        """Another rank and its error, if one has told of an error of its own."""
        for rank, cause in told.items():
            if cause and rank != self._rank:
                return f"{_name(rank, self._beats([rank])[0])} failed: {cause}"
        return None

    def _tell(self, cause: str) -> None:
        """All ranks that look: this one ends, with this error of its own, or "" if another rank is to blame."""
        self._store.append("told", json.dumps([self._rank, cause[:_LONGEST_CAUSE]]) + "\n")  # type: ignore[attr-defined]

    def _told(self) -> dict[int, str]:
        return dict(json.loads(line) for line in self._store.get("told").decode().splitlines())


def _name(rank: int, beat: dict[str, Any] | None) -> str:
    return f"rank {rank} ({beat['place']})" if beat else f"rank {rank}"


def _last_seen(beat: dict[str, Any] | None) -> str:
    return f", last seen in {beat['doing']}" if beat else ", never seen"


def _some(texts: list[str]) -> str:
    more = [f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return "; ".join(texts[:_NAMED] + more)


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The value of `work`, or None if it fails or takes longer: the store may be gone, or a part of what is."""
    values: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):
            values.append(work())

    thread = threading.Thread(target=run, name="heartbeat-end", daemon=True)
    thread.start()
    thread.join(seconds)
    return values[0] if values else None
