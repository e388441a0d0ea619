"""What is known of a rank that has failed, which of several failures is the cause, and which a restart would repeat.

Torch-free.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.problems import EXIT_WRONG_INPUT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# How an error begins that a collective or the store raises when another rank has ended ("TypeName: message") ...
_LOST_CONNECTION = re.compile(
    r"(DistNetworkError|DistStoreError):|(RuntimeError|DistBackendError): (?!Caught \w+ in DataLoader).*(connection "
    r"(was )?(closed|reset|refused|aborted)|broken pipe|recvValue failed|sendBytes failed|remote process exited"
    r"|ncclRemoteError|communicator was aborted)",
    re.IGNORECASE | re.DOTALL,
)
# ... and when one has not come.
_TIMED_OUT = re.compile(
    r"(RuntimeError|DistBackendError): .*(timed out waiting|timeout caused pair closure|operation timeout)",
    re.IGNORECASE | re.DOTALL,
)
# Appended to the name of a rank's error record: whom it waits for, of use if it is ended without a word of its own.
NOTE = ".waits"


def is_consequence(error: str) -> bool:
    """Whether an error, "TypeName: message", only says that another rank has ended."""
    return error.startswith("PeerFailedError:") or bool(_LOST_CONNECTION.match(error))


def is_timeout(error: str) -> bool:
    """Whether an error, "TypeName: message", says that another rank has not come to a collective."""
    return bool(_TIMED_OUT.match(error))


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


# A restart would end in the same way, or was not asked for. On a node that has no such rank another's end follows.
_FINAL = re.compile(r"(PeerFailedError: .*? failed: )?(InputError|NonFiniteError|NotSavedError):")


def is_final(failures: Sequence[Failure]) -> bool:
    return any(failure.exit_code == EXIT_WRONG_INPUT or _FINAL.match(failure.error) for failure in failures)


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
                traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
            else:
                error = str(message)
        except (OSError, ValueError, KeyError):
            pass  # killed while it was writing
    return Failure(rank, process.exitcode, process.pid, when, error, traceback)
