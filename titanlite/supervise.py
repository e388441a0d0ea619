"""Runs the workers of one node under torch's elastic agent, in this process, and names the one failure that matters.

Importing this module imports no torch; run_workers does.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from titanlite.command_line import say
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, EXIT_PREEMPTED, EXIT_WRONG_INPUT
from titanlite.failures import NOTE, Failure, is_consequence, is_final, read_failure, root_cause
from titanlite.lifeline import LAUNCHER_PID, SAME_SIGNAL_SECONDS, STOP_FILE, StopFile, stop_signals
from titanlite.machine import Nodes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

# Checked by the workers' runtime against the WORLD_SIZE they are given.
WORLD_SIZE = "TITANLITE_WORLD_SIZE"
SHUTDOWN_SECONDS = 10  # from SIGTERM to SIGKILL; after a failure torch's agent takes 30 (seen on torch 2.13.0)
TAIL_LINES = 20


@dataclass(frozen=True)
class Job:
    """The workers of this node.

    shown: global ranks whose output goes to the screen (None: all); the others' goes to files in log_folder, which are
    named rank-N.out, rank-N.err and, for the error that ended the rank, rank-N.error.json.
    saves: whether the workers can save when they are asked to end. grace_seconds: how long they may then take.
    max_restarts: how often they are started again after a failure. attempt: how often they have been.
    """

    nodes: Nodes
    nproc: int
    shown: frozenset[int] | None
    log_folder: Path
    start_timeout_seconds: int
    saves: bool = True
    grace_seconds: int = 600
    max_restarts: int = 0
    attempt: int = 0

    def shows(self, rank: int) -> bool:
        return self.shown is None or rank in self.shown

    def again(self) -> Job:
        """The next attempt: nothing of the one before it, on the disk or in the nodes' store, is in its way."""
        attempt = self.attempt + 1
        nodes = replace(self.nodes, run_id=f"{self.nodes.run_id}-{attempt}")
        parent = self.log_folder.parent if self.attempt else self.log_folder
        return replace(self, nodes=nodes, log_folder=parent / f"restart-{attempt}", attempt=attempt)


# --- signals ---


class Stopped(BaseException):
    """The workers are to be ended at once. A BaseException, so that nothing between here and main swallows it."""


class StopSignals:
    """While no worker runs, a signal just ends this process. While they run, the first one asks them to save and end; a
    second one, or the end of the grace, raises Stopped, once: a third Ctrl-C must not leave workers behind.

    first: the name of the first signal, "" as long as there is none.
    """

    def __init__(self, job: Job, file: StopFile) -> None:
        self.first = ""
        self._job, self._file = job, file
        self._received = 0.0
        self._stopped = False
        self._signals = stop_signals()
        self._mask: set[int] | None = None  # this thread's, while it is not in force
        self._receiver = threading.Thread(target=threading.Event().wait, name="signals", daemon=True)

    @contextmanager
    def default_until_workers_start(self) -> Iterator[None]:
        """Around one attempt of the workers."""
        before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in (*self._signals, signal.SIGALRM)}
        try:
            yield
        finally:
            self._stopped = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            for signum, handler in before.items():
                # Once signalled, this process is about to end, with an exit code that no further signal may change.
                signal.signal(signum, signal.SIG_IGN if self.first else handler)
            if self._mask is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                self._mask = None

    def workers_start(self) -> None:
        """From here on this thread holds the signals back, and so do the workers from their first instruction on, as
        they inherit that. Another thread receives them; Python runs their handlers in this one all the same."""
        if self._mask is not None:
            return
        self._stopped = False
        for signum in self._signals:
            signal.signal(signum, self._receive)
        signal.signal(signal.SIGALRM, self._run_out)
        if not self._receiver.is_alive():
            self._receiver.start()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(signum).name, time.monotonic()
        if self.first:
            if now - self._received > SAME_SIGNAL_SECONDS:
                self._stop(f"stopped by a second signal, {name}")
            return
        self.first, self._received = name, now
        if not self._job.saves:
            self._stop(f"stopped by {name}; nothing is saved, as checkpoint.enable is false: turn it on")
            return
        try:
            StopFile.create(self._file.asked)
        except OSError as error:
            self._stop(f"stopped by {name}; the workers could not be asked to save: {error}")
            return
        grace = self._job.grace_seconds
        say(f"{name}: the workers save and end, within {grace} s; a second signal ends them at once")
        signal.setitimer(signal.ITIMER_REAL, grace)

    def _run_out(self, signum: int, frame: FrameType | None) -> None:
        grace = self._job.grace_seconds
        self._stop(f"{self.first}: the workers have not saved within {grace} s; raise checkpoint.grace_seconds")

    def _stop(self, why: str) -> None:
        if self._stopped:
            return
        self._stopped = True
        with suppress(OSError):
            StopFile.create(self._file.now)
        raise Stopped(why)


# --- what is said of a failure ---


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a worker's output, without blank ends; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def report(failure: Failure, job: Job) -> int:
    """Prints the one message about a failed job and returns the launcher's exit code."""
    shown = job.shows(failure.rank)
    log = job.log_folder / f"rank-{failure.rank}.err"
    if failure.exit_code == EXIT_WRONG_INPUT:
        # A worker that was given wrong input says so itself, on the screen or in its record.
        message = re.sub(r"^(InputError|DamagedError): ", "", failure.error) or ("" if shown else tail(log))
        if message:
            say(f"wrong input, found by rank {failure.rank}:\n{message}")
        return EXIT_WRONG_INPUT

    where = f"rank {failure.rank} (process {failure.pid})"
    output = "" if shown else tail(log)
    if failure.error:
        text = f"{where} failed: {failure.error}"
        if is_consequence(failure.error) and job.nodes.count > 1:
            text += "\nThis follows from the end of another rank: see the messages of the other nodes."
        text += f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    else:
        ended = f"was ended by {failure.signal_name}" if failure.exit_code < 0 else f"exited with {failure.exit_code}"
        text = f"{where} {ended} and recorded no error"
        if failure.exit_code == -signal.SIGKILL:
            text += " (often the system's answer to memory running out)"
        if failure.exit_code == -signal.SIGABRT:  # how NCCL ends a rank whose collective takes too long
            with suppress(OSError):
                note = (job.log_folder / f"rank-{failure.rank}.error.json{NOTE}").read_text()
                text += f" (as when NCCL gives up a collective): {note}"
        text += f". The end of its output:\n{output}" if output else ""
    if not shown:
        text += f"\nOutput of rank {failure.rank}: {log}"
    say(text)
    return EXIT_ERROR


# --- the agent ---


def make_logs_specs(job: Job, signals: StopSignals) -> LogsSpecs:
    """Who writes where: one shown rank has the terminal to itself, several are shown line by line with a prefix."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(job.log_folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            # The agent asks for this last thing before it starts the workers.
            signals.workers_start()
            ranks = {local: int(env["RANK"]) for local, env in envs.items()}
            visible = {local for local, rank in ranks.items() if job.shows(rank)}
            direct, tee = (visible, set()) if len(visible) == 1 else (set(), visible)
            files = {local: str(job.log_folder / f"rank-{rank}") for local, rank in ranks.items()}
            for local, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = files[local] + ".error.json"
                env["TORCHELASTIC_RESTART_COUNT"] = str(job.attempt)  # keeps the workers' keys in the store apart
            outs = {local: "" if local in direct else files[local] + ".out" for local in files}
            errs = {local: "" if local in direct else files[local] + ".err" for local in files}
            return LogsDest(
                stdouts=outs,
                stderrs=errs,
                tee_stdouts={local: outs[local] for local in tee},
                tee_stderrs={local: errs[local] for local in tee},
                error_files={local: files[local] + ".error.json" for local in files},
            )

    return RankLogs()


def quiet_agent() -> None:
    """The agent logs every process it ends; what matters of that, `report` says. LOGLEVEL=WARNING brings it back.

    Call it when torch.distributed.launcher.api is imported: that imports the agent, whose loggers must be there already
    (seen on torch 2.11.0 and 2.13.0).
    """
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic") or name.startswith("torch.distributed.launcher"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def run_workers(job: Job, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs `python -m module arguments` once per rank of this node, and returns the exit code once all have ended.

    environment: variables for the workers, besides this process's own.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the agent copies the output of several ranks through it
    world = job.nodes.count * job.nproc
    # Made when there is something to say: a launcher that is killed before leaves nothing behind.
    folder = Path(tempfile.gettempdir(), f"titanlite-{uuid.uuid4().hex}")
    try:
        file = StopFile(folder / "stop")
        own = {WORLD_SIZE: str(world), LAUNCHER_PID: str(os.getpid()), STOP_FILE: str(file.asked)}
        os.environ.update({**environment, **own})
        signals = StopSignals(job, file)
        meeting_point = hold_meeting_point(job)  # noqa: F841 - lives as long as this function
        while failures := run_agent(job, signals, module, arguments):
            if file.now.exists():
                raise Stopped(file.now.read_text() or "stopped")
            code = report(root_cause(failures), job)
            if job.attempt == job.max_restarts or file.asked.exists() or is_final(failures):
                return code
            job = job.again()
            file.saved.unlink(missing_ok=True)  # by a rank that had ended before another one failed
            say(f"restart {job.attempt} of {job.max_restarts}")
        if not file.saved.exists():
            return EXIT_DONE
        say("stopped and saved: the same command goes on from there")
        return EXIT_PREEMPTED
    except Stopped as stop:
        say(f"{stop}; the workers have been ended. The same command goes on from the last checkpoint, if there is one")
        return EXIT_ERROR
    except Exception as error:
        say(_agent_error(error, job))
        return EXIT_ERROR
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hold_meeting_point(job: Job) -> Any:
    """On the main node, what keeps the port where the nodes meet open between two attempts (the agent's own store goes
    with each): a node that is quicker to start again would find nothing there, or what is about to go. Else None."""
    if not (job.max_restarts and job.nodes.port and job.nodes.is_main):
        return None
    from torch.distributed import TCPStore

    with suppress(RuntimeError):  # the agent will meet the same trouble, and it is reported then
        return TCPStore("127.0.0.1", job.nodes.port, is_master=True, multi_tenant=True, wait_for_workers=False)
    return None


def run_agent(job: Job, signals: StopSignals, module: str, arguments: Sequence[str]) -> list[Failure]:
    """Runs the workers once; returns those that have failed, in the order of discovery. Raises Stopped."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet_agent()
    job.log_folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        **_rendezvous(job),
        "min_nodes": job.nodes.count,
        "max_nodes": job.nodes.count,
        "nproc_per_node": job.nproc,
        "run_id": job.nodes.run_id,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": make_logs_specs(job, signals),
        "log_line_prefix_template": "[rank ${rank}] ",
        # StopSignals handles the others: unlike the agent's handler it survives a second signal.
        "signals_to_handle": "SIGUSR2",
        "shutdown_timeout": SHUTDOWN_SECONDS,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # shutdown_timeout is younger than torch 2.11
    config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
    with signals.default_until_workers_start():
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
        except ChildFailedError as error:
            return [read_failure(rank, process) for rank, process in error.failures.items()]
    return []


def _rendezvous(job: Job) -> dict[str, Any]:
    """How the nodes find each other. A single one takes any free port of the loopback device, so that neither the
    machine's name nor another job can be in its way."""
    nodes, timeout = job.nodes, job.start_timeout_seconds
    if nodes.count == 1 and nodes.port == 0:
        return {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "rdzv_configs": {"timeout": timeout, "is_host": True},
            "local_addr": "127.0.0.1",
        }
    host = f"[{nodes.address}]" if ":" in nodes.address else nodes.address
    endpoint = f"{host}:{nodes.port}"
    if nodes.rank is None:
        configs = {"timeout": timeout, "join_timeout": timeout, "is_host": nodes.is_main}
        return {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint, "rdzv_configs": configs}
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"rank": nodes.rank, "timeout": timeout},
    }


def _agent_error(error: Exception, job: Job) -> str:
    nodes = job.nodes
    what = f"{type(error).__name__}: {error}".strip()
    if nodes.count > 1 and re.search(r"Rendezvous|DistNetwork|DistStore|timed? ?out", what, re.IGNORECASE):
        return (
            f"the {nodes.count} nodes did not all meet at {nodes.address}:{nodes.port} within "
            f"{job.start_timeout_seconds} s (comm.init_timeout_seconds). Check that every node runs with the same "
            f"NNODES, MASTER_ADDR, MASTER_PORT and RDZV_ID, each with its own NODE_RANK.\n{what}"
        )
    return f"the workers could not be run: {what}"
