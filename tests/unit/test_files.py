"""Files are there whole or not at all, and durable in the way each system needs."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanlite.files import expand, fsync_file, fsync_folder, write_atomically


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"older")
    with path.open("rb") as reader:
        write_atomically(path, b"old")
        assert reader.read() == b"older"  # replaced, not written over
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]  # what was begun is gone


def test_the_contents_are_durable_before_the_name_and_the_name_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "file")
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"data"
        calls.append("rename")
        replace(source, target)

    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_atomically(tmp_path / "file", b"data")
    assert calls == ["file", "rename", "folder"]


@pytest.mark.parametrize("works", [True, False])
def test_macos_is_asked_for_more_than_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    calls: list[Any] = []

    def control(descriptor: int, command: int) -> None:
        calls.append(command)
        if not works:
            raise OSError(errno.ENOTSUP, "not on this filesystem")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    with (tmp_path / "file").open("wb") as file:
        file.write(b"data")
        fsync_file(file)
        assert (tmp_path / "file").read_bytes() == b"data"  # flushed
    assert calls == ([51] if works else [51, "fsync"])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO])
def test_filesystems_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(code, "no")))
    if code == errno.EIO:
        with pytest.raises(OSError, match="no"):
            fsync_folder(tmp_path)
    else:
        fsync_folder(tmp_path)


def test_a_glob_ends_where_links_lead_back_and_finds_the_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a/d/e.txt", "a/d/f.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    links = [tmp_path / folder / f"back{i}" for folder in (".", "a", "a/d") for i in range(9)]
    for link in links:
        link.symlink_to(tmp_path)
    passed_over: list[None] = []
    root, matches = expand(f"{tmp_path}/**/*.txt", lambda: passed_over.append(None))
    found = list(matches)
    assert root == tmp_path and [path.name for path in found] == ["b.txt", "c.txt", "e.txt"]
    assert len(passed_over) >= len(links)
    assert list(expand(f"{tmp_path}/a/back0/b.t*")[1]) == [tmp_path / "a/back0/b.txt"]  # a link that is named


def test_needs_no_torch() -> None:
    code = "import sys, titanlite.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
