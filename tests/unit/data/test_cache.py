"""The cache: built once over processes, whole or absent whatever kills the builder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.problems import InputError
from titanlite.data.cache import Memo, get_or_build


def is_whole(folder: Path) -> bool:
    return (folder / "data").is_file()


def get(place: Path, started: Any = None, seconds: float = 0.0) -> list[str]:
    """One process's get_or_build; it leaves a line in `builds` when it is the builder, and gives what was reported."""
    messages: list[str] = []

    def build(folder: Path) -> None:
        with (place.parent / "builds").open("a") as file:
            file.write("built\n")
        (folder / "half").write_text("x")
        if started:
            started.set()
        time.sleep(seconds)
        (folder / "data").write_text("x")

    get_or_build(place, is_whole, build, what="the entry", report=messages.append)
    return messages


def get_in_process(place: Path, started: Any, seconds: float, answers: Any) -> None:
    answers.put(get(place, started, seconds))


def test_several_processes_build_once_and_the_others_say_that_they_wait(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    started, answers = context.Event(), context.Queue()
    place = tmp_path / "entry"
    builder = context.Process(target=get_in_process, args=(place, started, 1.5, answers))
    builder.start()
    assert started.wait(30)
    assert not is_whole(place)
    assert get(place) == ["waiting: another process prepares the entry"]
    assert answers.get(timeout=30) == []
    builder.join()
    assert get(place) == []
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_killed_build_does_not_count_and_its_rest_is_cleared(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    started, answers = context.Event(), context.Queue()
    place = tmp_path / "entry"
    builder = context.Process(target=get_in_process, args=(place, started, 60.0, answers))
    builder.start()
    assert started.wait(30)
    assert builder.pid
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    assert not place.exists()
    assert len(list(tmp_path.glob("entry.*.tmp"))) == 1
    assert get(place) == []  # neither waits for the dead, nor finds anything of his
    assert sorted(path.name for path in place.iterdir()) == ["data", "half"]
    assert not list(tmp_path.glob("entry.*.tmp"))


def test_an_entry_comes_into_its_place_by_one_rename(tmp_path: Path):
    built_in = []

    def build(folder: Path) -> None:
        built_in.append(folder.stat().st_ino)
        (folder / "data").write_text("x")

    get_or_build(tmp_path / "entry", is_whole, build, what="the entry", report=print)
    assert built_in == [(tmp_path / "entry").stat().st_ino]


def test_a_failed_build_leaves_nothing(tmp_path: Path):
    def build(folder: Path) -> None:
        (folder / "data").write_text("x")
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        get_or_build(tmp_path / "entry", is_whole, build, what="the entry", report=print)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_a_resumable_build_gets_what_the_last_one_left(tmp_path: Path):
    place = tmp_path / "entry"
    found = []

    def build(folder: Path) -> None:
        found.append(sorted(path.name for path in folder.iterdir()))
        (folder / f"half {len(found)}").touch()
        if len(found) < 3:
            raise KeyboardInterrupt
        (folder / "data").touch()

    def get() -> None:
        get_or_build(place, is_whole, build, what="the entry", report=print, resumable=True)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            get()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["entry.lock", "entry.partial"]
    get()
    get()
    assert found == [[], ["half 1"], ["half 1", "half 2"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry", "entry.lock"]
    assert is_whole(place)


def test_a_damaged_entry_is_made_again_with_a_message(tmp_path: Path):
    place = tmp_path / "entry"
    get(place)
    (place / "data").unlink()
    assert get(place) == [f"warning: the cached the entry in {place} is damaged and is made again"]
    assert is_whole(place)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"data.cache_dir: got .*file .*allowed: a folder that can be written"):
        get_or_build(tmp_path / "file" / "entry", is_whole, lambda folder: None, what="the entry", report=print)


def test_a_whole_entry_in_a_read_only_cache_is_used(tmp_path: Path):
    place = tmp_path / "entry"
    get(place)
    (tmp_path / "entry.lock").unlink()
    get(place)
    assert not (tmp_path / "entry.lock").exists()  # nothing was written


def age(path: Path, seconds: float = 100) -> None:
    past = time.time() - seconds
    os.utime(path, (past, past))


def test_memo_forgets_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("one")
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10 * 10**9)
    Memo(tmp_path, "kind", [file]).put("answer")
    assert Memo(tmp_path, "kind", [file]).get() == "answer"
    assert Memo(tmp_path, "other", [file]).get() is None
    age(file)
    assert Memo(tmp_path, "kind", [file]).get() is None


def test_memo_does_not_trust_a_file_just_written(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("one")
    Memo(tmp_path, "kind", [file]).put("answer")
    assert Memo(tmp_path, "kind", [file]).get() is None
    Memo(tmp_path, "kind", [file]).put("answer", settled=True)
    assert Memo(tmp_path, "kind", [file]).get() == "answer"


def test_memo_without_a_writable_cache_only_forgets(tmp_path: Path):
    (tmp_path / "file").touch()
    memo = Memo(tmp_path / "file", "kind", [tmp_path / "file"])
    memo.put("answer", settled=True)
    assert memo.get() is None


def test_data_preparation_imports_no_torch():
    code = "import sys, titanlite.commands.prepare, titanlite.data.phase, titanlite.data.huggingface; "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
