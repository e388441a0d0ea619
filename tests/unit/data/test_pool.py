"""Worker processes: answers and errors arrive, none outlives its parent, none heeds Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.unit.data.helpers import divider, session
from titanlite.config.problems import InputError
from titanlite.data import pool as pool_module
from titanlite.data.pool import Pool


def test_answers_are_those_of_their_items():
    with Pool(2, divider, 12) as pool:
        futures = [pool.submit(i) for i in (1, 2, 3, 4, 6)]
        assert [future.result() for future in futures] == [12, 6, 4, 3, 2]


def test_errors_arrive_and_the_worker_goes_on():
    with Pool(1, divider, 12) as pool:
        with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*ZeroDivisionError"):
            pool.submit(0).result()
        assert pool.submit(3).result() == 4
    with Pool(1, divider, -1) as pool, pytest.raises(InputError, match="here: base: got a negative one") as caught:
        pool.submit(1).result()
    assert len(caught.value.problems) == 1


def test_a_worker_that_ends_is_one_clear_error_for_all_that_ask_it():
    with Pool(1, divider, 12) as pool:
        futures = [pool.submit(item) for item in ("die", 1, 2)]
        for future in futures:
            with pytest.raises(InputError, match="worker processes: got one that ended with exit code 3"):
                future.result(timeout=30)
    with Pool(1, divider, 12) as pool:
        os.kill(pool.submit("pid").result(), signal.SIGKILL)
        with pytest.raises(InputError, match=r"signal 9, as systems do when memory runs out(?s:.*)fix: fewer workers"):
            pool.submit(1).result(timeout=30)


def half_a_message(connection: Connection, _: bytes = b"") -> None:
    os.write(connection.fileno(), struct.pack("!i", 100) + b"x" * 10)


def test_a_worker_that_ends_in_its_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_work", half_a_message)
    with Pool(1, divider, 12) as pool, pytest.raises(InputError, match="ended with exit code 0"):
        pool.submit(1).result(timeout=30)


def test_a_parent_that_ends_in_its_question(capfd: pytest.CaptureFixture[str]):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=pool_module._work, args=(theirs, b""))
    process.start()
    theirs.close()
    half_a_message(ours)
    ours.close()
    process.join(30)
    assert process.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_workers_do_not_heed_an_interrupt():
    with Pool(1, divider, 12) as pool:
        os.kill(pool.submit("pid").result(), signal.SIGINT)
        time.sleep(0.1)
        assert pool.submit(3).result() == 4
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_end_does_not_wait_for_work():
    started = time.monotonic()
    with Pool(1, divider, 12) as pool:
        pool.submit(1).result()
        pool.submit("sleep")
        time.sleep(0.1)
    assert time.monotonic() - started < 20
    assert not multiprocessing.active_children()


PARENT = """
import sys
from tests.unit.data.helpers import divider
from titanlite.data.pool import Pool

if __name__ == "__main__":
    pool = Pool(2, divider, 12)
    print(pool.submit("pid").result(), flush=True)
    if sys.argv[1] == "sleep":
        pool.submit("sleep"), pool.submit("sleep")
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("what", ["sleep", "wait"])
def test_no_worker_outlives_its_killed_parent(tmp_path: Path, what: str):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, script, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout and parent.stdout.readline()
    assert len(session(parent.pid)) >= 3
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while session(parent.pid):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.02)
    assert parent.stderr and b"Traceback" not in parent.stderr.read()
