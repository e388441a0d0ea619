"""Which files a corpus is made of, in which order, and what identifies it; every wrong path named."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.config.problems import InputError
from titanlite.data import text as text_module
from titanlite.data.records import File, Reading
from titanlite.data.text import EMBEDDED_FINGERPRINT, Text, embedded_text, text_at, text_of_inputs

NOWHERE = Path("/nonexistent")  # a cache that cannot be written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of every format at three depths, and what is none."""
    folder = tmp_path / "text"
    for name in ("b.txt", "a.TXT", "a/x.jsonl", "a/deep/y.ndjson.gz", "z.txt.zst", "a.b/w.txt.gz", "p.parquet"):
        write(folder / name)
    for name in ("notes.md", "a/data.csv.gz", "README", ".hidden.txt", ".git/c.txt", "a/.ipynb/d.txt"):
        write(folder / name)
    return folder


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(text: Text) -> list[str]:
    return [file.name for file in text.files]


def contents(text: Text) -> list[str]:
    return [document.text for document in text.documents()]


ALL = ["a.TXT", "a.b/w.txt.gz", "a/deep/y.ndjson.gz", "a/x.jsonl", "b.txt", "p.parquet", "z.txt.zst"]


def test_a_folder_is_its_files_in_order(folder: Path):
    text = text_at(folder, "data.path")
    assert names(text) == ALL
    assert [file.path for file in text.files] == [folder / name for name in ALL]
    suffixes = [".txt", ".txt.gz", ".jsonl.gz", ".jsonl", ".txt", ".parquet", ".txt.zst"]
    assert [file.suffix for file in text.files] == suffixes
    assert text.ignored == (".csv.gz", ".md", "files without a suffix")
    assert text.warnings() == [f"{folder}: not read: .csv.gz, .md, files without a suffix"]
    assert text_at(f"{folder}/", "data.path").fingerprint(NOWHERE) == text.fingerprint(NOWHERE)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["b.txt"]),
        ("**/*.txt*", ["a.b/w.txt.gz", "b.txt", "z.txt.zst"]),
        ("**/*.[tT][xX][tT]", ["a.TXT", "b.txt"]),
        ("**", ALL),
        ("*", ALL),
        ("**/**/*", ALL),
        ("a/**", ["deep/y.ndjson.gz", "x.jsonl"]),
        ("a/**/*.gz", ["deep/y.ndjson.gz"]),
        ("*/x.*", ["a/x.jsonl"]),
        ("a*/deep/y*", ["a/deep/y.ndjson.gz"]),
        ("?.parquet", ["p.parquet"]),
        (".*", [".git/c.txt", ".hidden.txt"]),
        (".git/*", ["c.txt"]),
    ],
)
def test_globs(folder: Path, pattern: str, expected: list[str]):
    assert names(text_at(str(folder / pattern), "data.path")) == expected


def test_a_relative_glob(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    assert names(text_at("b*", "data.path")) == ["b.txt"]
    assert names(text_at("../*/b.txt", "data.path")) == ["text/b.txt"]
    assert names(text_at(".", "data.path")) == ALL


def test_a_path_that_exists_is_no_pattern(tmp_path: Path):
    write(tmp_path / "data[1]" / "a*.txt", "the one")
    write(tmp_path / "data1" / "ab.txt", "another")
    assert contents(text_at(tmp_path / "data[1]", "data.path")) == ["the one"]
    assert contents(text_at(tmp_path / "data[1]" / "a*.txt", "data.path")) == ["the one"]


def test_links(folder: Path, tmp_path: Path):
    other = write(tmp_path / "other" / "o.txt", "linked").parent
    (folder / "link.txt").symlink_to(other / "o.txt")
    (folder / "linked folder").symlink_to(other)
    (folder / "loop").symlink_to(folder)
    (tmp_path / "named").symlink_to(folder)
    for path in (folder, tmp_path / "named", folder / "**"):
        text = text_at(path, "data.path")
        assert names(text) == sorted([*ALL, "link.txt"]) and "links to folders" in text.ignored
    assert names(text_at(folder / "linked folder" / "*.txt", "data.path")) == ["o.txt"]
    (folder / "nothing.md").symlink_to(tmp_path / "nothing")
    text_at(folder, "data.path")
    (folder / "nothing.txt").symlink_to(tmp_path / "nothing")
    for path in (folder, folder / "*.txt"):
        with pytest.raises(InputError, match=r"(?s)nothing.txt: got a file that cannot be read.*fix: restore it"):
            text_at(path, "data.path")
    with pytest.raises(InputError, match=r"data.path: got '.*nothing.txt', a link to what does not exist"):
        text_at(folder / "nothing.txt", "data.path")


@pytest.mark.parametrize("make", ["fifo", "socket"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    tmp_path: Path, make: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    if make == "fifo":
        os.mkfifo("a.txt")
    else:
        socket.socket(socket.AF_UNIX).bind("a.txt")
    with pytest.raises(InputError, match=r"data.path: got 'a.txt', which is no regular file; allowed: .*\n    fix: "):
        text_at("a.txt", "data.path")
    for path in (".", "*.txt"):
        with pytest.raises(InputError, match=r"a.txt: got what is no regular file"):
            text_at(path, "data.path")
    with pytest.raises(InputError, match="no regular file"):
        text_at("/dev/null", "data.path")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.txt", "absent.txt', which does not exist; allowed: a file, a folder or a glob of .txt, .jsonl"),
        ("absent/*.txt", r"absent/\*.txt', which matches nothing"),
        ("a.txt/b.txt", r"a.txt/b.txt', \(Not a directory\)"),
        ("x" * 300 + ".txt", r"\(File name too long\)"),
        ("a.json", "a.json'; allowed: .*\n    fix: convert it .* to one JSON object a line and name it .jsonl"),
        ("a.txt.bz2", "a.txt.bz2'; allowed"),
        ("empty", "empty', a folder without text files; allowed"),
        ("folder", r"folder', a folder without text files \(it has .json, .md\); allowed: .*\n    fix: name"),
        ("*.json", r"\*.json', a pattern without text files \(it has .json\)"),
        ("a\0.txt", r"a\\x00.txt', which has a NUL character"),
    ],
)
def test_wrong_paths_are_named(tmp_path: Path, path: str, message: str):
    for name in ("a.txt", "a.json", "a.txt.bz2", "folder/a.md", "folder/deep/b.json"):
        write(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=f"(?s)^data.path: got '.*{message}"):
        text_at(f"{tmp_path}/{path}", "data.path")


def test_an_empty_path():
    with pytest.raises(InputError, match=r"data.path: got an empty path"):
        text_at("", "data.path")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folders_and_files_without_permission(folder: Path):
    (folder / "b.txt").chmod(0)
    with pytest.raises(InputError, match=r"b.txt: got a file that cannot be read \(Permission denied\)"):
        text_at(folder, "data.path").fingerprint(NOWHERE)
    (folder / "a").chmod(0)
    with pytest.raises(InputError, match=r"text/a: got a file that cannot be read \(Permission denied\)"):
        text_at(folder, "data.path")
    (folder / "a").chmod(0o700)


def test_settings_that_mean_nothing_are_said(tmp_path: Path):
    write(tmp_path / "a.jsonl", '{"body": "x"}')
    text = text_at(tmp_path, "data.path", Reading("body", "---"))
    assert text.warnings() == [f"{tmp_path}: the separator '---' is for .txt files, and there are none"]
    write(tmp_path / "b.txt", "x")
    assert text_at(tmp_path, "data.path", Reading("body", "---")).warnings() == []
    text = text_at(tmp_path / "b.txt", "data.path", Reading("body"))
    assert text.warnings() == [f"{tmp_path / 'b.txt'}: text_key 'body' means nothing in .txt files"]


# --- several inputs ---


def test_inputs_come_in_their_order(tmp_path: Path):
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "c.jsonl"):
        write(tmp_path / name, f'{{"text": "{name}"}}' if name == "c.jsonl" else name)
    write(tmp_path / "a" / "x.md")
    write(tmp_path / "b" / "x.csv")
    text = text_of_inputs([tmp_path / "c.jsonl", tmp_path / "b", str(tmp_path / "a")], Reading())
    assert contents(text) == ["c.jsonl", "b/1.txt", "a/1.txt", "a/2.txt"]
    assert (text.name, text.ignored) == ("3 inputs", (".csv", ".md"))
    assert text_of_inputs([tmp_path / "a"]) == text_at(tmp_path / "a", "input")
    assert text_of_inputs(["-", tmp_path / "a"], Reading(), "jsonl").files[0] == File(None, "-", ".jsonl")


def test_wrong_inputs_are_all_named(tmp_path: Path):
    path = write(tmp_path / "a.txt", "x")
    (tmp_path / "link.txt").symlink_to(path)
    for again in (path, tmp_path, tmp_path / "link.txt", tmp_path / "*.txt", f"{tmp_path}/../{tmp_path.name}/a.txt"):
        with pytest.raises(InputError, match=r"input: got .*a.txt twice; allowed: every file once"):
            text_of_inputs([path, again])
    with pytest.raises(InputError) as caught:
        text_of_inputs(["-", tmp_path / "absent", "-", tmp_path / "absent too"], Reading())
    found = [str(problem).split("; allowed")[0] for problem in caught.value.problems]
    assert found[0] == "--format: got nothing"
    assert "absent'" in found[1] and "absent too'" in found[2]
    assert found[3] == "input: got standard input twice"
    with pytest.raises(InputError, match="--format: got 'txt' without standard input"):
        text_of_inputs([path], Reading(), "txt")
    with pytest.raises(InputError, match="--format: got 'parquet'; allowed: txt or jsonl"):
        text_of_inputs(["-"], Reading(), "parquet")
    with pytest.raises(InputError, match="input: got nothing"):
        text_of_inputs([])


# --- what identifies a corpus ---


def test_the_fingerprint_is_names_and_bytes(tmp_path: Path):
    write(tmp_path / "deep" / "a.txt", "one")
    write(tmp_path / "b.txt", "two!")
    expected = hashlib.sha256(b"5 4\nb.txttwo!" + b"10 3\ndeep/a.txtone").hexdigest()
    assert text_at(tmp_path, "data.path").fingerprint(NOWHERE) == expected
    alone = hashlib.sha256(b"0 4\ntwo!").hexdigest()
    for name in ("b.txt", "c.TXT"):
        write(tmp_path / name, "two!")
        assert text_at(tmp_path / name, "data.path").fingerprint(NOWHERE) == alone


def test_whatever_changes_the_documents_changes_the_fingerprint(tmp_path: Path):
    line = '{"text": "a"}'
    found = []
    for name in ("a.txt", "a.jsonl"):
        path = write(tmp_path / name, line)
        for reading in (Reading(), Reading("b"), Reading(separator="b")):
            text = text_at(path, "data.path", reading)
            found += [text.fingerprint(NOWHERE), text.state()]
    write(tmp_path / "a.txt", line + "\n")
    text = text_at(tmp_path / "a.txt", "data.path")
    found += [text.fingerprint(NOWHERE), text.state(), text_at(tmp_path, "data.path").fingerprint(NOWHERE)]
    assert len(set(found)) == 15
    assert text_at(tmp_path / "a.txt", "data.path").state() == text.state()
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert text.state() != found[-2]


def test_a_fingerprint_is_remembered_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "text" / "a.txt", "x")
    wait_for_the_clock(monkeypatch)
    text = text_at(path, "data.path")
    first = text.fingerprint(tmp_path / "cache")
    of_folder = text_at(path.parent, "data.path").fingerprint(tmp_path / "cache")
    with_separator = text_at(path, "data.path", Reading(separator="b")).fingerprint(tmp_path / "cache")
    assert len({first, of_folder, with_separator}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(text_module, "_hash", lambda *args: pytest.fail("read again"))
        assert text.fingerprint(tmp_path / "cache") == first
        assert text_at(path.parent, "data.path").fingerprint(tmp_path / "cache") == of_folder
    path.write_text("y")
    assert text.fingerprint(tmp_path / "cache") != first


def wait_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written are not remembered: let them be old."""
    clock: Callable[[], int] = text_module.Memo.put.__globals__["time"].time_ns
    monkeypatch.setattr("titanlite.data.cache.time.time_ns", lambda: clock() + 10**10)


def test_files_that_go_away_or_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.txt", "x")
    text = text_at(path, "data.path")
    status = text_module._status
    longer = os.stat_result((*status(text.files[0])[:6], 5, *status(text.files[0])[7:]))
    with monkeypatch.context() as patch:
        patch.setattr(text_module, "_status", lambda file: longer)
        with pytest.raises(InputError, match=r"a.txt: got a file that changed while it was read"):
            text.fingerprint(NOWHERE)
    path.unlink()
    for call in (text.state, text.size, lambda: text.fingerprint(NOWHERE), lambda: list(text.documents())):
        with pytest.raises(InputError, match=r"(?s)a.txt: got a file that cannot be read \(No such.*fix: restore it"):
            call()


def test_standard_input_has_a_state_and_no_fingerprint(tmp_path: Path):
    text = text_of_inputs(["-"], Reading(), "txt")
    assert text.size() == 0
    assert text.state() == text_of_inputs(["-"], Reading(), "txt").state()
    assert text.state() != text_of_inputs(["-"], Reading(), "jsonl").state()
    with pytest.raises(InputError, match="standard input, which can be read only once"):
        text.fingerprint(NOWHERE)


def test_names_that_are_no_utf8(tmp_path: Path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff.txt")
    with open(path, "w") as file:
        file.write("text")
    text = text_at(tmp_path, "data.path")
    assert contents(text) == ["text"]
    assert text.fingerprint(NOWHERE) == hashlib.sha256(b"5 4\n\xff.txttext").hexdigest()
    assert text.state()


def test_the_embedded_text_is_the_released_one():
    text, version = embedded_text()
    documents = list(text.documents())
    assert version == "1.14.0"
    assert (len(text.files), text.size(), len(documents)) == (854, 16_612_271, 839)  # 15 files are empty
    assert sum(document.size for document in documents) == 16_612_271
    assert all(document.first and document.last for document in documents)
    assert names(text) == sorted(names(text))
    assert text.fingerprint(NOWHERE) == EMBEDDED_FINGERPRINT and text.warnings() == []
