"""What a process hears from outside: whether the one it works for still lives, and whether it is to save and end.

Even after SIGKILL to a launcher no worker lives on. Torch-free.

The launcher and its workers hold the signals of STOP_SIGNALS back ("blocked") in all their threads, and a thread of the
worker takes them: so one that comes while Python starts, or while the main thread computes, is neither lost nor does it
end anything. The launcher asks its workers through a file, which a worker also finds that starts after the signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

LAUNCHER_PID = "TITANLITE_LAUNCHER_PID"
STOP_FILE = "TITANLITE_STOP_FILE"
START_TIME = "TITANLITE_START_TIME"
JOB_END_TIME = "SLURM_JOB_END_TIME"
END_UNKNOWN = (
    "checkpoint.before_walltime: ignored, since the job's end is not known: set checkpoint.walltime, or " + JOB_END_TIME
)
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1})
# What comes within them is one signal: timeout(1) signals a process and then its group, schedulers its parent, too.
SAME_SIGNAL_SECONDS = 3.0
_POLL_SECONDS = 0.5

# StopRequest.reason besides the number of a signal: above any of these, and exact in float32, as ranks agree on a
# maximum of tensors. Of several ranks' reasons the largest counts.
NO_REASON, OUT_OF_TIME, TOLD_BY_LAUNCHER = 0, 1000, 1001


def stop_signals() -> frozenset[signal.Signals]:
    """Those of STOP_SIGNALS that this process heeds: nohup asks for SIGHUP to be ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return STOP_SIGNALS - {signal.SIGHUP} if ignored else STOP_SIGNALS


class StopFile:
    """Between a launcher and its workers: a file that is there means yes. It lies in a folder of this machine's own.

    asked: save and end; also made by workers that have agreed to. now: end at once, for good; holds the reason if it is
    a worker's. saved: the workers have ended, and nothing is lost.
    """

    def __init__(self, path: Path) -> None:
        self.asked = path
        self.now = path.with_name(f"{path.name}.now")
        self.saved = path.with_name(f"{path.name}.saved")

    @staticmethod
    def create(path: Path, text: str = "") -> None:
        """Raises OSError."""
        path.parent.mkdir(mode=0o700, exist_ok=True)  # what lies in /tmp for weeks may have been cleaned away
        path.write_text(text)


class StopRequest:
    """Whether this process has been asked to save and end: by its launcher, by a signal, or by the clock.

    deadline: unix seconds from which on the clock asks; None: never.
    """

    def __init__(self, file: StopFile | None = None) -> None:
        self._file = file
        self._noted = NO_REASON
        self.deadline: float | None = None

    def note(self, reason: int) -> None:
        self._noted = max(self._noted, reason)

    @property
    def reason(self) -> int:
        """NO_REASON, the number of a signal, OUT_OF_TIME or TOLD_BY_LAUNCHER."""
        if self._noted == NO_REASON and self.deadline is not None and time.time() >= self.deadline:
            self.note(OUT_OF_TIME)
        return self._noted

    def tell_agreed(self) -> None:
        """Tell the launcher, if there is one, that all ranks save and end now: whatever becomes of that, it is not to
        start them again."""
        if self._file is not None:
            with suppress(OSError):  # to save matters more
                StopFile.create(self._file.asked)

    def tell_saved(self) -> None:
        """Tell the launcher, if there is one, that this process ends early and has lost nothing. Raises OSError."""
        if self._file is not None:
            StopFile.create(self._file.saved)


def job_end(environ: Mapping[str, str], walltime: int) -> float | None:
    """When this job will be ended, in unix seconds: as Slurm says, else `walltime` seconds (0: not known) after the
    launcher's start (START_TIME; without a launcher after now). None if it is not known."""
    slurm = environ.get(JOB_END_TIME, "")
    if slurm.isdecimal() and int(slurm):
        return float(slurm)
    return float(environ.get(START_TIME) or time.time()) + walltime if walltime else None


def describe(reason: int) -> str:
    if reason == OUT_OF_TIME:
        return "checkpoint.before_walltime"
    return "the launcher" if reason == TOLD_BY_LAUNCHER else f"{signal.Signals(reason).name} to a rank"


def watch_launcher_and_signals() -> StopRequest:
    """Call first in a worker, before it has other threads. The request is kept up to date by a thread.

    The process ends at once when its launcher is gone, when that says so, and at a second signal. Without a launcher
    the signals are all there is.
    """
    signals = stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Forks only: a program that is started here (subprocess) inherits the mask, and these signals do not end it. It has
    # to end by itself, as at the end of its input.
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals))
    pid, path = os.environ.get(LAUNCHER_PID, ""), os.environ.get(STOP_FILE, "")
    launcher = int(pid) if pid.isdigit() else None
    file = StopFile(Path(path)) if launcher is not None and path else None
    request = StopRequest(file)
    threading.Thread(target=_watch, args=(request, signals, launcher, file), name="lifeline", daemon=True).start()
    return request


def heed_only_the_parent() -> None:
    """Call first in a process that a worker has forked, e.g. to read data. A signal that goes to all processes of a job
    does not end it: its parent does, by SIGTERM or by its own end."""
    signals = stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_watch_parent, args=(os.getppid(), signals), name="lifeline", daemon=True).start()


def has_launcher() -> bool:
    """Whether our launcher started this process (and not torchrun or a test)."""
    return LAUNCHER_PID in os.environ


def die_with_parent() -> None:
    """Call first in a process of multiprocessing. Watches from a thread that the one it was asked for by is there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS - {signal.SIGINT})  # a worker's children inherit its mask
    threading.Thread(target=_join_parent, name="lifeline", daemon=True).start()


@contextmanager
def no_interrupts_inherited() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal. Those started here hold it back for good: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # The first process's start would start it, and that unblocks INT and TERM (seen on Python 3.11).
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before | {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(
    request: StopRequest, signals: frozenset[signal.Signals], launcher: int | None, file: StopFile | None
) -> None:
    first: float | None = None
    while launcher is None or os.getppid() == launcher:
        received = _next_signal(signals)
        if file is not None:
            if file.now.exists():
                break
            if file.asked.exists():
                request.note(TOLD_BY_LAUNCHER)
        if received is None:
            continue
        signum, sender = received
        if sender is not None and sender == launcher:
            _die_of_sigterm()  # the launcher asks through the file; its signal is for the survivors of a failure
            continue
        first = time.monotonic() if first is None else first
        if time.monotonic() - first > SAME_SIGNAL_SECONDS:
            why = f"rank {os.environ.get('RANK', '0')} was ended by a second signal, {signal.Signals(signum).name}"
            print(why, file=sys.stderr, flush=True)
            if file is not None:
                with suppress(OSError):
                    StopFile.create(file.now, why)
            os._exit(1)
        request.note(signum)
    _end()


def _watch_parent(parent: int, signals: frozenset[signal.Signals]) -> None:
    while os.getppid() == parent:
        received = _next_signal(signals)
        if received is not None and received[1] in (parent, None) and received[0] == signal.SIGTERM:
            break
    os._exit(0)


def _next_signal(signals: frozenset[signal.Signals]) -> tuple[int, int | None] | None:
    """The next of these (blocked) signals and the process that sent it, None if that is not known; None if there is
    none for a while."""
    if sys.platform != "darwin":
        info = signal.sigtimedwait(signals, _POLL_SECONDS)
        return None if info is None else (info.si_signo, info.si_pid)
    time.sleep(_POLL_SECONDS)
    pending = signal.sigpending() & signals
    return (signal.sigwait(pending), None) if pending else None


def _join_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end()


def _die_of_sigterm() -> None:
    """As if it had not been held back, for those who look at how this process ended."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def _end() -> None:
    if os.getpgrp() == os.getpid():  # a session of its own: take what it has started along
        with suppress(OSError):
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
