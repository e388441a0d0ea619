"""Runs the workers of one node under torch's elastic agent, in this process, and names the one failure that matters.

Importing this module imports no torch; run_workers does.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from titanlite.command_line import say
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, EXIT_PREEMPTED, EXIT_WRONG_INPUT
from titanlite.lifeline import LAUNCHER_PID
from titanlite.machine import Nodes
from titanlite.parallel.heartbeat import NOTE, is_consequence

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Checked by the workers' runtime against the WORLD_SIZE they are given.
WORLD_SIZE = "TITANLITE_WORLD_SIZE"
SHUTDOWN_SECONDS = 10  # from SIGTERM to SIGKILL
TAIL_LINES = 20
STOPPED = "the workers have been ended. The same command goes on from the last saved checkpoint, if there is one"


@dataclass(frozen=True)
class Job:
    """The workers of this node.

    shown: global ranks whose output goes to the screen (None: all); the others' goes to files in log_folder, which are
    named rank-N.out, rank-N.err and, for the error that ended the rank, rank-N.error.json.
    """

    nodes: Nodes
    nproc: int
    shown: frozenset[int] | None
    log_folder: Path
    start_timeout_seconds: int

    def shows(self, rank: int) -> bool:
        return self.shown is None or rank in self.shown

    def error_file(self, rank: int) -> str:
        return str(self.log_folder / f"rank-{rank}.error.json")


# --- signals ---


class Stopped(BaseException):
    """A signal asked the launcher to end. A BaseException, so that nothing between here and main swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.name = signal.Signals(signum).name


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class StopSignals:
    """Before the workers start, a signal just ends this process. Once they run, the first one raises Stopped, and more
    of them are ignored while the workers are being ended: a second Ctrl-C must not leave workers behind."""

    def __init__(self) -> None:
        self._received = False
        # nohup asks for SIGHUP to be ignored
        self._signals = [s for s in STOP_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]

    @contextmanager
    def default_until_workers_start(self) -> Iterator[None]:
        before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in self._signals}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def workers_start(self) -> None:
        for signum in self._signals:
            signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self._received:
            return
        self._received = True
        raise Stopped(signum)


# --- failures ---


@dataclass(frozen=True)
class Failure:
    """How one rank ended. exit_code -N: by signal N. when: seconds, of the recorded error, else of its discovery."""

    rank: int
    exit_code: int
    pid: int
    when: float
    error: str = ""  # "ValueError: …"
    traceback: str = ""

    @property
    def signal_name(self) -> str:
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to report: the earliest that is not the consequence of another.

    A lost connection is a consequence, and so is an end by SIGTERM without a recorded error: the agent sends it to
    all others once it sees one that has failed, and SIGKILL some time later to those that are still there. A collective
    that has timed out before is the cause of that SIGKILL. What is given comes in the order of discovery, which decides
    between equals.
    """

    def key(failure: Failure) -> tuple[int, float]:
        if failure.exit_code == -signal.SIGTERM and not failure.error:
            return 2, 0.0
        return (1 if is_consequence(failure.error) else 0), failure.when

    return min(failures, key=key)


def read_failure(rank: int, process: ProcessFailure) -> Failure:
    """What torch knows of a failed worker, with the time of its recorded error to better than torch's whole seconds."""
    error = traceback = ""
    when = float(process.timestamp) + 1.0  # discovered within that second, so after any error recorded in it
    path = Path(process.error_file)
    if path.is_file():
        try:
            message: Any = json.loads(path.read_text())["message"]
            when = path.stat().st_mtime
            if isinstance(message, dict):
                error = str(message.get("message", ""))
                traceback = str(message.get("extraInfo", {}).get("py_callstack", "")).removeprefix("NoneType: None\n")
            else:
                error = str(message)
        except (OSError, ValueError, KeyError):
            pass  # killed while it was writing
    return Failure(rank, process.exitcode, process.pid, when, error, traceback)


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
        message = failure.error.removeprefix("InputError: ") or ("" if shown else tail(log))
        if message:
            say(f"wrong input, found by rank {failure.rank}:\n{message}")
        return EXIT_WRONG_INPUT
    if failure.exit_code == EXIT_PREEMPTED:
        return EXIT_PREEMPTED

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
                note = Path(f"{job.error_file(failure.rank)}{NOTE}").read_text()
                text += f" (as when NCCL gives up a collective): {note}"
        text += f". The end of its output:\n{output}" if output else ""
    if not shown:
        text += f"\nOutput of rank {failure.rank}: {log}"
    say(text)
    return EXIT_ERROR


# --- the agent ---


def end_stuck_workers(error_files: Collection[str]) -> None:
    """Waits until a worker has recorded an error, and SHUTDOWN_SECONDS later kills those of this node that are left.

    The agent waits 30 s for them after a failure, whatever shutdown_timeout says: that holds when the agent itself is
    asked to end only (seen on torch 2.11.0 and 2.13.0). A worker that is stopped sees the agent's SIGTERM once it is
    continued.
    """
    while not any(os.path.exists(path) for path in error_files):
        time.sleep(0.5)
    time.sleep(1.0)
    workers = _session_leaders_of(os.getpid())
    for pid in workers:
        _kill_group(pid, signal.SIGCONT)
    time.sleep(SHUTDOWN_SECONDS - 1.0)
    for pid in workers & _session_leaders_of(os.getpid()):
        _kill_group(pid, signal.SIGKILL)


def _kill_group(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signum)


def _session_leaders_of(parent: int) -> set[int]:
    """The children of a process that lead a session, as workers do; none where there is no /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, ppid, _, session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(ppid) == parent and session == stat.parent.name:
                found.add(int(session))
    return found


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
            errors = {local: job.error_file(rank) for local, rank in ranks.items()}
            for local, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = errors[local]
            threading.Thread(target=end_stuck_workers, args=(errors.values(),), daemon=True).start()
            outs = {local: "" if local in direct else files[local] + ".out" for local in files}
            errs = {local: "" if local in direct else files[local] + ".err" for local in files}
            return LogsDest(
                stdouts=outs,
                stderrs=errs,
                tee_stdouts={local: outs[local] for local in tee},
                tee_stderrs={local: errs[local] for local in tee},
                error_files=errors,
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
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet_agent()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the agent copies the output of several ranks through it
    job.log_folder.mkdir(parents=True, exist_ok=True)
    world = job.nodes.count * job.nproc
    os.environ.update({**environment, WORLD_SIZE: str(world), LAUNCHER_PID: str(os.getpid())})
    signals = StopSignals()
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
    try:
        with signals.default_until_workers_start():
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        return report(root_cause([read_failure(rank, process) for rank, process in error.failures.items()]), job)
    except Stopped as stop:
        say(f"stopped by {stop.name}; {STOPPED}")
        return EXIT_ERROR
    except SignalException as stop:
        say(f"stopped by {stop.sigval.name}; {STOPPED}")
        return EXIT_ERROR
    except Exception as error:
        say(_agent_error(error, job))
        return EXIT_ERROR
    return EXIT_DONE


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
