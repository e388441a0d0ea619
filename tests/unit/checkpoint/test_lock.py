import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from titanlite.checkpoint.lock import LAUNCHER_LOCK, lock_folder, probe_folder
from titanlite.config.problems import InputError

HOLD = """
import os, sys, time
from titanlite.checkpoint.lock import lock_folder
lock = lock_folder(sys.argv[1], "launcher.lock")
if "fork" in sys.argv and os.fork():
    time.sleep(30)  # the child speaks, so that it is surely up
print("held", flush=True)
time.sleep(30)
"""


def hold(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A process that holds the launcher's lock, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_second_job_is_refused_by_name(tmp_path: Path) -> None:
    process = hold(tmp_path / "run")
    try:
        with pytest.raises(InputError) as error:
            lock_folder(tmp_path / "run", LAUNCHER_LOCK)
        assert f"another job is using it (pid {process.pid} on {socket.gethostname()})" in str(error.value)
        assert "--run.name" in str(error.value)
        with pytest.raises(InputError, match="another job"):
            probe_folder(tmp_path / "run", LAUNCHER_LOCK)
        lock_folder(tmp_path / "run", "worker.lock").release()  # another name is another lock
    finally:
        end(process)


def test_a_killed_owner_holds_nothing(tmp_path: Path) -> None:
    process = hold(tmp_path)
    end(process)
    lock_folder(tmp_path, LAUNCHER_LOCK).release()
    assert (tmp_path / LAUNCHER_LOCK).exists()  # deleting it would be a race


def test_a_forked_child_does_not_keep_a_dead_owners_lock(tmp_path: Path) -> None:
    process = hold(tmp_path, "fork")
    try:
        process.kill()  # the child lives on
        process.wait()
        lock_folder(tmp_path, LAUNCHER_LOCK).release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_lasts_as_long_as_the_object(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, "a.lock")
    with pytest.raises(InputError, match=f"pid {os.getpid()} "):
        lock_folder(tmp_path, "a.lock")
    del lock
    gc.collect()
    lock = lock_folder(tmp_path, "a.lock")
    lock.release()
    (tmp_path / "a.lock").write_text("a longer note than this process will write, " * 3)
    with lock_folder(tmp_path, "a.lock"):
        assert (tmp_path / "a.lock").read_text() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    lock_folder(tmp_path, "a.lock").release()


def test_waits_for_the_holder_to_leave(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, "a.lock")
    start = time.monotonic()
    with pytest.raises(InputError, match="another job"):
        lock_folder(tmp_path, "a.lock", wait_seconds=0.3)
    assert time.monotonic() - start >= 0.3
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    with lock_folder(tmp_path, "a.lock", wait_seconds=20), pytest.raises(InputError, match="another job"):
        lock_folder(tmp_path, "a.lock")
    timer.join()


def test_probe_makes_nothing(tmp_path: Path) -> None:
    probe_folder(tmp_path / "new", LAUNCHER_LOCK)
    assert not (tmp_path / "new").exists()


def test_probe_waits_for_the_holder_to_leave(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, "a.lock")
    with pytest.raises(InputError, match="another job"):
        probe_folder(tmp_path, "a.lock")
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    probe_folder(tmp_path, "a.lock", wait_seconds=20)
    timer.join()
    lock_folder(tmp_path, "a.lock").release()


def test_unusable_run_folder_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"can be written"):
        lock_folder(tmp_path / "file" / "run", LAUNCHER_LOCK)


def test_imports_no_torch() -> None:
    code = "import sys, titanlite.checkpoint.lock, titanlite.checkpoint.storage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
