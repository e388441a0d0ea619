"""Worker processes that do one function's work, and never outlive the process that started them. Torch-free.

Each worker has a pipe and, here, a thread that waits for its answers. Nothing but the standard library is imported
before a worker watches its parent: whatever kills the parent, its workers are gone at once.
"""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from titanlite.config.problems import InputError, Problem
from titanlite.lifeline import die_with_parent, no_interrupts_inherited


class Pool:
    """n processes; each calls make(*arguments) once and then what that returned, for every item submitted.

    They are spawned, not forked: the caller may have threads. InputErrors of a worker arrive as such, as does the end
    of one; other errors as a RuntimeError with the worker's traceback. A context manager, which kills the workers.
    """

    def __init__(self, n: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        # Pickled apart, so that a worker watches its parent before it imports what `make` needs.
        job = pickle.dumps((make, arguments))
        context = multiprocessing.get_context("spawn")
        self._idle: queue.SimpleQueue[tuple[Any, Connection]] = queue.SimpleQueue()
        self._processes: list[Any] = []
        self._threads = ThreadPoolExecutor(n, thread_name_prefix="pool")
        try:
            with no_interrupts_inherited():
                for _ in range(n):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_work, args=(theirs, job), daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._idle.put((process, ours))
        except OSError as error:
            self.close()
            got = f"{n}, of which {len(self._processes)} could be started ({error.strerror or error})"
            raise InputError(Problem("", "worker processes", got, "what this machine allows", "use fewer")) from error

    def submit(self, item: Any) -> Future[Any]:
        """The future result for an item. As many items as there are processes are worked on at once."""
        return self._threads.submit(self._ask, item)

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, item: Any) -> Any:
        process, connection = self._idle.get()
        try:
            connection.send(item)
            kind, answer = connection.recv()
        except (EOFError, OSError):  # also in the middle of a message
            process.join(5)
            raise InputError(_end_of_a_worker(process.exitcode)) from None
        finally:
            self._idle.put((process, connection))  # a dead one too: the next to ask it learns the same
        if kind == "wrong input":
            raise InputError(answer)
        if kind == "error":
            raise RuntimeError(f"in a worker process:\n{answer}")
        return answer


def _end_of_a_worker(exitcode: int | None) -> Problem:
    how = f"one that ended with exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        how = f"one that was ended by signal {-exitcode}"
    if exitcode == -signal.SIGKILL:
        how += ", as systems do when memory runs out"
    fix = "fewer workers, which need less memory; the same command goes on where this one stopped"
    return Problem("", "worker processes", how, "processes that live until the work is done", fix)


def _work(connection: Connection, job: bytes) -> None:
    die_with_parent()
    work = None
    while True:
        answer: tuple[str, Any]
        try:
            item = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            if work is None:  # here, so that an error arrives as an answer
                make, arguments = pickle.loads(job)
                work = make(*arguments)
            answer = "done", work(item)
        except InputError as error:
            answer = "wrong input", error.problems
        except Exception:
            answer = "error", traceback.format_exc()
        try:
            connection.send(answer)
        except OSError:
            return
