"""A worker that does what STUB says, rank by rank: "0:done 1:raise", attempt by attempt: "1:raise / 1:done". Starts in
a tenth of a second, without torch."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from titanlite.lifeline import StopRequest, describe, watch_launcher_and_signals

RANK = int(os.environ["RANK"])


def record(error: Exception) -> None:
    """As train.record does."""
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"message": message}))
    new.replace(path)


def fail(error: Exception, code: int = 1) -> int:
    try:
        raise error
    except Exception as raised:
        record(raised)
    return code


def act(what: str, request: StopRequest) -> int:
    match what:
        case "done":
            print(f"rank {RANK} says hello")
            print(f"rank {RANK} complains", file=sys.stderr)
        case "environment":
            print(json.dumps(dict(os.environ)))
        case "raise":
            return fail(RuntimeError(f"boom on {RANK}"))
        case "lost":  # what peers of a dead rank report, a moment later
            signs = [sign_of_end(1), sign_of_end(1).with_suffix(".json")]
            while not any(sign.exists() for sign in signs):
                time.sleep(0.01)
            time.sleep(0.05)
            return fail(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
        case "torch":  # torch's own error handler
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise KeyError("no such thing")
            except KeyError as error:
                get_error_handler().record_exception(error)
            return 1
        case "input":
            return fail(ValueError("InputError stands here"), 2)
        case "quiet":
            print("the last words", file=sys.stderr)
            return 3
        case "kill":
            sign_of_end(RANK).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "stubborn":  # its main thread runs no Python
            say_where()
            ctypes.CDLL(None).sleep(300)
        case "hang":
            wait()
        case "save":  # what a request is answered by, after a moment
            wait(until=request)
            time.sleep(0.5)
            print(f"rank {RANK} was asked by {describe(request.reason)}")
            request.tell_saved()
        case "finish":  # the run's end comes before the request is seen
            wait(until=request)
        case _:
            raise AssertionError(what)
    return 0


def sign_of_end(rank: int) -> Path:
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(f"rank-{rank}.error.gone")


def say_where() -> None:
    Path(os.environ["STUB_FOLDER"], f"pid-{RANK}").write_text(str(os.getpid()))


def wait(until: StopRequest | None = None) -> None:
    say_where()
    end = time.monotonic() + 300
    while time.monotonic() < end and not (until and until.reason):
        time.sleep(0.05)


if __name__ == "__main__":
    request = watch_launcher_and_signals()
    attempts = os.environ["STUB"].split("/")
    acts = dict(part.split(":") for part in attempts[int(os.environ["TORCHELASTIC_RESTART_COUNT"])].split())
    sys.exit(act(acts.get(str(RANK), "done"), request))
