"""Worker entry: `python -m titanlite.train CONFIG.toml`, one process a rank, started by the launcher or by torchrun.

Exit codes: 0 done, or stopped and saved; 2 the input is wrong, 1 anything else. Errors are handed to the launcher,
which prints the first one only.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, EXIT_WRONG_INPUT, InputError
from titanlite.lifeline import END_UNKNOWN, has_launcher, job_end, watch_launcher_and_signals


def main(argv: Sequence[str] | None = None) -> int:
    name, *overrides = sys.argv[1:] if argv is None else argv
    stop = watch_launcher_and_signals()
    try:
        # Only now: these take seconds to load, and start threads.
        from titanlite.config.check import static_problems
        from titanlite.config.load import load
        from titanlite.parallel import runtime
        from titanlite.trainer import Trainer

        loaded = load(name, overrides)
        config = loaded.config
        ranks = runtime.start(config.comm, config.run, config.parallelism)
        if problems := static_problems(loaded, ranks.world_size):  # the launcher's rules hold without it, too
            raise InputError(problems)
        if ranks.is_main and config.checkpoint.enable and config.checkpoint.before_walltime:  # one clock for all
            end = job_end(os.environ, config.checkpoint.walltime)
            stop.deadline = None if end is None else end - config.checkpoint.before_walltime
            if end is None and not has_launcher():  # which has said so
                print(f"warning: {END_UNKNOWN}", file=sys.stderr, flush=True)
        with ranks.watched(give_up):
            trainer = Trainer(config, ranks, stop)
            trainer.train()
        if trainer.stopped:
            stop.tell_saved()
    except Exception as error:
        wrong_input = isinstance(error, InputError)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            record(error)
        elif wrong_input:
            print(error, file=sys.stderr, flush=True)
        else:
            raise
        return EXIT_WRONG_INPUT if wrong_input else EXIT_ERROR
    runtime.stop()
    return EXIT_DONE


def record(error: Exception) -> None:
    """Hands the error to the launcher, which shows the first rank's, once; torchrun shows the file's path.

    Whole or not at all: a rank that is ended in the middle of torch's own writing would leave a file that makes the
    launcher's agent fail in its turn.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{path}.new"
    try:
        get_error_handler().record_exception(error)
        os.replace(f"{path}.new", path)
    except OSError:  # a full disk, of all things
        traceback.print_exception(error)


def give_up(error: Exception) -> None:
    """Hands the error over and ends the process, for a thread: the main one waits for what never comes."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        record(error)
    else:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    _exit(EXIT_ERROR)


def _exit(code: int) -> None:
    # Everything is saved and closed. A stuck communicator or a failed rank's collectives must not hold the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
