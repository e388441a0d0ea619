"""Building shards: the same bytes for any number of workers and after any end, nothing lost, each refusal named."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.problems import InputError
from titanlite.data import build as build_module
from titanlite.data import records
from titanlite.data.build import Built, Recipe, build
from titanlite.data.shards import TokenShards
from titanlite.data.text import BadRecord, Chunk, Document, File, Position, Reading, Text, documents
from titanlite.data.tokenizer import load_tokenizer
from titanlite.files import write_atomically

from .test_pool import session

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat,",
    "über",
    "12",
    "dogs\n",
    "def",
    "self",
    "x\n\u2581",
    "(tree)",
    "🎄",
    "if",
]
ROOT = Path(__file__).parents[3]

Change = Callable[[Path], object]


def text_of(*paths: Path) -> Text:
    return Text(paths[0].parent.name, tuple(File(path, path.name, path.suffix) for path in paths))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small corpora are many chunks, and worth other processes. Only where files are read, not in workers."""
    monkeypatch.setattr(records, "CHUNK_BYTES", 1500)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A .jsonl of 60 documents and a .txt."""
    rng = random.Random(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(60):
            file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randrange(80)))}) + "\n")
    (folder / "b.txt").write_text(" ".join(rng.choices(WORDS, k=300)))
    return folder


@pytest.fixture
def bad_corpus(corpus: Path) -> Path:
    """The corpus with 12 records that are none."""
    lines = (corpus / "a.jsonl").read_bytes().splitlines(keepends=True)
    for i in range(3, 27, 2):
        lines[i] = b"{}\n" if i % 4 == 1 else b'{"text": "\xff"}\n'
    (corpus / "a.jsonl").write_bytes(b"".join(lines))
    return corpus


@pytest.fixture
def recipe(corpus: Path, small_model: Path, small_chunks: None) -> Recipe:
    text = text_of(corpus / "a.jsonl", corpus / "b.txt")
    return Recipe(text, small_model, bos_id=1, eos_id=2, validation_fraction=0.2, shard_tokens=1000)


def run(folder: Path, recipe: Recipe, *, workers: int = 1, **options: Any) -> tuple[Built, list[str]]:
    messages: list[str] = []
    options = {"journal_seconds": 0.0, **options}
    return build(folder, recipe, workers=workers, report=messages.append, **options), messages


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tokens_of(folder: Path) -> list[int]:
    return [int(i) for block in TokenShards(folder).blocks(1 << 20) for i in block]


def found_in(text: Text) -> Iterator[Document | BadRecord]:
    for chunk in text.chunks():
        yield from documents(chunk)


def in_child(function: Callable[[], object]) -> Any:
    """A forked process: it starts at once. Its parent, this one, has no threads that hold locks."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def killed_after(chunks: int, folder: Path, recipe: Recipe, **options: Any) -> None:
    """A build that is killed when it has saved so many chunks."""

    def child() -> None:
        save, count = build_module._Output.save, 0

        def counted(self: Any) -> None:
            nonlocal count
            save(self)
            if (count := count + 1) == chunks:
                os.kill(os.getpid(), signal.SIGKILL)

        build_module._Output.save = counted  # type: ignore[method-assign]
        run(folder, recipe, **options)

    process = in_child(child)
    process.join()
    assert process.exitcode == -signal.SIGKILL


# --- what is written ---


def test_every_document_with_its_marks_on_its_side(tmp_path: Path, recipe: Recipe):
    built, messages = run(tmp_path / "out", recipe)
    tokenizer = load_tokenizer(recipe.tokenizer)
    expected: dict[bool, list[int]] = {False: [], True: []}
    sizes = {False: [0, 0], True: [0, 0]}
    for document in found_in(recipe.text):
        assert isinstance(document, Document)
        held_out = int.from_bytes(document.digest[:8], "big") < 0.2 * 2**64
        expected[held_out] += [1, *tokenizer.encode(document.text).tolist(), 2]
        sizes[held_out][0] += 1
        sizes[held_out][1] += len(document.text.encode())
    assert built.validation is not None
    for held_out, folder in ((False, built.train), (True, built.validation)):
        assert tokens_of(folder) == expected[held_out]
        shards = TokenShards(folder)
        shards.verify()
        assert [shards.meta["documents"], shards.meta["bytes"]] == sizes[held_out]
        assert (shards.bos_id, shards.eos_id) == (1, 2)
        assert all(shard["tokens"] == 1000 for shard in shards.meta["shards"][:-1])
    assert (built.train_tokens, built.validation_tokens) == (len(expected[False]), len(expected[True]))
    assert (built.skipped, built.new, built.empty) == (0, True, False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["build.json", "train", "validation"]
    n = sizes[False][0] + sizes[True][0]
    assert f"{built.train_tokens:,} tokens to train on, {built.validation_tokens:,} held out, {n} doc" in messages[-1]


@pytest.mark.parametrize(("bos", "eos"), [(-1, -1), (-1, 2), (2, 2)])
def test_marks(tmp_path: Path, recipe: Recipe, bos: int, eos: int):
    built, _ = run(tmp_path / "out", replace(recipe, bos_id=bos, eos_id=eos, validation_fraction=0.0))
    tokenizer = load_tokenizer(recipe.tokenizer)
    before, after = ([i] if i >= 0 else [] for i in (bos, eos))
    texts = [document.text for document in found_in(recipe.text) if isinstance(document, Document)]
    assert tokens_of(built.train) == [i for text in texts for i in (*before, *tokenizer.encode(text).tolist(), *after)]
    assert built.validation is None
    shards = TokenShards(tmp_path / "out" / "validation")
    assert (shards.n_tokens, shards.bos_id, shards.eos_id) == (0, bos, eos)


def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path, recipe: Recipe, bad_corpus: Path):
    recipe = replace(recipe, on_error="skip")
    alone = run(tmp_path / "1", recipe)
    assert len(list(recipe.text.chunks())) > build_module._FEW_CHUNKS  # or no other process would be started
    for workers in (2, 3):
        built, messages = run(tmp_path / str(workers), recipe, workers=workers)
        assert contents(tmp_path / str(workers)) == contents(tmp_path / "1")
        assert [m for m in messages if "skipped" in m][:10] == [m for m in alone[1] if "skipped" in m][:10]
        assert built.skipped == 12
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("prefix", [False, True])
def test_long_documents_in_parts_are_the_whole(
    tmp_path: Path, corpus: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, prefix: bool
):
    model = tmp_path / "prefix.model"  # one that puts a space before a document: not before its later parts
    model.write_bytes(recipe.tokenizer.read_bytes() + b"\x1a\x02\x18\x01" * prefix)
    recipe = replace(recipe, text=text_of(corpus / "b.txt"), validation_fraction=0.0, tokenizer=model)
    whole, _ = run(tmp_path / "whole", recipe)
    monkeypatch.setattr(records, "LONG_BYTES", 500)
    monkeypatch.setattr(records, "CHUNK_BYTES", 100)
    assert sum(chunk.part is not None for chunk in recipe.text.chunks()) > 10
    for workers in (1, 2):
        parts, _ = run(tmp_path / str(workers), recipe, workers=workers)
        assert tokens_of(parts.train) == tokens_of(whole.train)
        assert TokenShards(parts.train).meta == TokenShards(whole.train).meta


def test_a_large_vocabulary_is_written_as_uint32(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    narrow, _ = run(tmp_path / "narrow", recipe)
    monkeypatch.setattr(build_module, "token_dtype", lambda vocab_size: "uint32")
    wide, _ = run(tmp_path / "wide", recipe)
    assert TokenShards(wide.train).dtype == "uint32"
    assert tokens_of(wide.train) == tokens_of(narrow.train)


def test_text_without_a_document(tmp_path: Path, recipe: Recipe, corpus: Path):
    (corpus / "b.txt").write_text("")
    built, _ = run(tmp_path / "out", replace(recipe, text=text_of(corpus / "b.txt")))
    assert built.empty and built.validation is None
    for side in ("train", "validation"):
        assert TokenShards(tmp_path / "out" / side).n_tokens == 0


def test_standard_input_is_read_once(tmp_path: Path, recipe: Recipe, corpus: Path, monkeypatch: pytest.MonkeyPatch):
    data = (corpus / "a.jsonl").read_bytes()
    recipe = replace(recipe, text=Text("standard input", (File(None, "-", ".jsonl"),)))
    for k in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        built, messages = run(tmp_path / str(k), recipe)
        assert built.train_tokens and "standard input: standard input" in messages[0]
    assert contents(tmp_path / "0" / "train") == contents(tmp_path / "1" / "train")
    with pytest.raises(InputError, match=r"tokens of other text \(standard input cannot be read a second time\)"):
        run(tmp_path / "0", recipe)


def test_memory_is_bounded(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    read = written = most = 0
    chunks, add = Text.chunks, build_module._Output.add

    def counted(self: Text, start: Position) -> Iterator[Chunk]:
        nonlocal read, most
        for chunk in chunks(self, start):
            read += 1
            most = max(most, read - written)
            yield chunk

    def added(self: Any, *args: Any) -> None:
        nonlocal written
        add(self, *args)
        written += 1

    monkeypatch.setattr(records, "CHUNK_BYTES", 200)
    monkeypatch.setattr(Text, "chunks", counted)
    monkeypatch.setattr(build_module._Output, "add", added)
    run(tmp_path / "out", recipe, workers=2)
    assert read == written > 20
    assert most <= 6


# --- ends and returns ---


STEPS = ("fsync", "replace", "rename", "unlink", "mkdir")


def step_by_step(kill_at: int, after: bool, folder: Path, recipe: Recipe, steps: Path) -> None:
    """A build that is killed before, or after, the kill_at-th change of the file system, and counts them."""
    count = 0

    def stepping(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return step

    for name in STEPS:
        setattr(os, name, stepping(getattr(os, name)))
    run(folder, recipe)
    steps.write_text(str(count))


def test_killed_at_any_step_it_gives_the_same_files_later(
    tmp_path: Path, recipe: Recipe, bad_corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "CHUNK_BYTES", 6000)
    recipe = replace(recipe, on_error="skip", shard_tokens=1500)
    run(tmp_path / "whole", recipe)
    expected = contents(tmp_path / "whole")
    steps = tmp_path / "steps"
    process = in_child(lambda: step_by_step(0, False, tmp_path / "steps of", recipe, steps))
    process.join()
    n = int(steps.read_text())
    assert n > 40
    rng = random.Random(0)
    for k in [*range(1, 9), *sorted(rng.sample(range(9, n - 12), 6)), *range(n - 12, n + 1)]:
        folder = tmp_path / "killed"
        after = rng.random() < 0.5
        process = in_child(lambda k=k, after=after, folder=folder: step_by_step(k, after, folder, recipe, steps))  # type: ignore[misc]
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if (folder / "build.json").exists():
            TokenShards(folder / "train").verify()
        run(folder, recipe)
        assert contents(folder) == expected, f"killed at step {k}"
        shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")
def test_killed_at_random_instants_with_workers(tmp_path: Path, recipe: Recipe, bad_corpus: Path):
    recipe = replace(recipe, on_error="skip")
    run(tmp_path / "whole", recipe)

    def child() -> None:
        os.setsid()
        run(tmp_path / "out", recipe, workers=2)

    started = time.monotonic()
    in_child(child).join()
    duration = time.monotonic() - started
    rng = random.Random(0)
    kills = 0
    for _ in range(6):
        if (tmp_path / "out" / "build.json").exists():
            assert contents(tmp_path / "out") == contents(tmp_path / "whole")
            shutil.rmtree(tmp_path / "out")
        process = in_child(child)
        process.join(rng.uniform(0.0, duration))
        process.kill()
        process.join()
        kills += process.exitcode != 0
        deadline = time.monotonic() + 5
        while session(process.pid):
            assert time.monotonic() < deadline, "a worker lives on"
            time.sleep(0.02)
    assert kills
    run(tmp_path / "out", recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_resumed_build_does_not_start_again(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    killed_after(5, tmp_path / "out", recipe)
    state = json.loads((tmp_path / "out" / "progress.json").read_text())["state"]
    starts = []
    chunks = Text.chunks

    def from_there(self: Text, start: Position) -> Iterator[Chunk]:
        starts.append(start)
        return chunks(self, start)

    monkeypatch.setattr(Text, "chunks", from_there)
    _, messages = run(tmp_path / "out", recipe)
    assert starts == [Position(**state["position"])] and starts[0] != Position()
    n = state["train"]["tokens"] + state["validation"]["tokens"]
    assert f"going on in {tmp_path / 'out'}, where {n:,} tokens are already" in messages
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_a_half_shard_does_not_count(tmp_path: Path, recipe: Recipe):
    killed_after(4, tmp_path / "out", recipe)
    assert list((tmp_path / "out" / "train").glob("*.bin.partial"))
    assert not (tmp_path / "out" / "train" / "meta.json").exists()


def test_a_killed_worker(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path / "whole", recipe)
    add = build_module._Output.add

    def killing(self: Any, *args: Any) -> None:
        add(self, *args)
        for process in multiprocessing.active_children():
            process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(build_module._Output, "add", killing)
        with pytest.raises(InputError, match="worker processes: got one that was ended by signal 9, as systems do"):
            run(tmp_path / "out", recipe, workers=2)
    assert not multiprocessing.active_children()
    run(tmp_path / "out", recipe, workers=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


INTERRUPTED = """
import sys
from pathlib import Path
from titanlite.data import build, records
from titanlite.data.text import File, Text

if __name__ == "__main__":
    out, model, *paths = map(Path, sys.argv[1:])
    records.CHUNK_BYTES = 1500
    add = build._Output.add

    def slowly(self, chunk, result):
        add(self, chunk, result)
        print("added", flush=True)
        sys.stdin.readline()

    build._Output.add = slowly
    text = Text("corpus", tuple(File(path, path.name, path.suffix) for path in paths))
    recipe = build.Recipe(text, model, 1, 2, 0.2, shard_tokens=1000)
    try:
        build.build(out, recipe, workers=2, report=lambda message: print(message, file=sys.stderr), journal_seconds=0)
    except KeyboardInterrupt:
        sys.exit(7)
"""


def test_an_interrupt_ends_it_in_order(tmp_path: Path, recipe: Recipe, corpus: Path):
    run(tmp_path / "whole", recipe)
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "out", recipe.tokenizer, corpus / "a.jsonl", corpus / "b.txt"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin and process.stdout
    for _ in range(4):
        assert process.stdout.readline() == b"added\n"
        process.stdin.write(b"\n")
        process.stdin.flush()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 7
    assert b"Traceback" not in errors and b"interrupted: the same command goes on" in errors
    _, messages = run(tmp_path / "out", recipe)
    assert any("going on" in message for message in messages)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_one_builds_and_the_others_wait(tmp_path: Path, recipe: Recipe):
    holds = multiprocessing.get_context("fork").Event()

    def child() -> None:
        finish = build_module._Output.finish

        def slowly(self: Any) -> None:
            holds.set()
            time.sleep(1)
            finish(self)

        build_module._Output.finish = slowly  # type: ignore[method-assign]
        run(tmp_path / "out", recipe)

    process = in_child(child)
    assert holds.wait(30)
    built, messages = run(tmp_path / "out", recipe)
    process.join()
    assert process.exitcode == 0
    assert messages == [f"waiting: another process writes to {tmp_path / 'out'}"]
    assert not built.new
    assert not (tmp_path / "out" / "build.lock").exists()


def test_the_second_time_nothing_is_done(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    first, _ = run(tmp_path / "out", recipe)
    (tmp_path / "out" / "tokenizer.model").touch()  # more may be put there
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr(build_module, "_run", lambda *args: pytest.fail("built again"))
    assert run(tmp_path / "out", recipe) == (replace(first, new=False), [])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


# --- what is refused ---

OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"bos_id": -1}, "bos_id: 1, now -1"),
    ({"eos_id": -1}, "eos_id: 2, now -1"),
    ({"validation_fraction": 0.3}, "validation_fraction: 0.2, now 0.3"),
    ({"shard_tokens": 999}, "shard_tokens: 1000, now 999"),
]


@pytest.mark.parametrize("finished", [False, True])
def test_another_recipe_is_refused(tmp_path: Path, recipe: Recipe, corpus: Path, finished: bool):
    out = tmp_path / "out"
    if finished:
        run(out, recipe)
    else:
        killed_after(3, out, recipe)
    before = contents(out)
    name = recipe.text.name
    changes = [
        *OTHERS,
        ({"text": replace(recipe.text, reading=Reading("body"))}, "text_key: 'text', now 'body'"),
        ({"text": replace(recipe.text, reading=Reading(separator="x"))}, "separator: '', now 'x'"),
        ({"text": replace(recipe.text, name="other")}, f"the text: '{name}', now 'other'"),
        ({"text": text_of(corpus / "a.jsonl")}, "the text: its files have changed since"),
    ]
    for change, message in changes:
        with pytest.raises(InputError) as caught:
            run(out, replace(recipe, **change))
        (problem,) = caught.value.problems
        assert message in str(problem), change
        assert ("tokens with other" if finished else "unfinished try with other") in problem.got
        assert problem.fix == "remove the folder, or give another"
    assert contents(out) == before


def test_another_tokenizer_is_refused(tmp_path: Path, recipe: Recipe):
    run(tmp_path / "out", recipe)
    model = tmp_path / "other.model"
    model.write_bytes(recipe.tokenizer.read_bytes() + b"\x1a\x02\x18\x00")
    with pytest.raises(InputError, match=r"tokenizer: '[0-9a-f]{64}', now '[0-9a-f]{64}'"):
        run(tmp_path / "out", replace(recipe, tokenizer=model))


def test_text_that_changed_since_is_refused_or_started_over(tmp_path: Path, recipe: Recipe, corpus: Path):
    killed_after(5, tmp_path / "out", recipe)
    with (corpus / "b.txt").open("a") as file:
        file.write("more")
    with pytest.raises(InputError, match="the text: its files have changed since"):
        run(tmp_path / "out", recipe)
    _, messages = run(tmp_path / "out", recipe, start_over=True)
    assert messages[0].startswith("warning: what an earlier try left is deleted, and started over")
    run(tmp_path / "fresh", recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_text_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, recipe: Recipe, corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    add = build_module._Output.add

    def changing(self: Any, *args: Any) -> None:
        os.utime(corpus / "a.jsonl", (1, 1))
        add(self, *args)

    monkeypatch.setattr(build_module._Output, "add", changing)
    with pytest.raises(InputError, match="files that changed while they were read"):
        run(tmp_path / "out", recipe)
    assert not list((tmp_path / "out").rglob("meta.json"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


DAMAGES: list[tuple[str, Change, str]] = [
    ("train/*.bin.partial", flip, "bytes with sha256"),
    ("train/*.bin.partial", shorten, "bytes with sha256"),
    ("train/*.bin.partial", Path.unlink, "no such file"),
    ("train/00000.bin", shorten, "1998 bytes; allowed: the 2000 that were written"),
    ("train/00000.bin", Path.unlink, "0 bytes; allowed: the 2000 that were written"),
    ("progress.json", flip, "a damaged progress.json"),
    ("progress.json", lambda path: path.write_text("[]"), "a damaged progress.json"),
    ("progress.json", lambda path: path.write_text("{"), "a damaged progress.json"),
    ("skipped.jsonl", shorten, "that were written"),
    ("skipped.jsonl", Path.unlink, "0 bytes; allowed"),
]


@pytest.mark.parametrize(("pattern", "damage", "message"), DAMAGES)
def test_damage_is_noticed(
    tmp_path: Path, recipe: Recipe, bad_corpus: Path, pattern: str, damage: Change, message: str
):
    recipe = replace(recipe, on_error="skip")
    out = tmp_path / "out"
    killed_after(7, out, recipe)
    (path,) = out.glob(pattern)
    damage(path)
    with pytest.raises(InputError, match=message) as caught:
        run(out, recipe)
    assert caught.value.problems[0].fix == "remove the folder, or give another"
    run(out, recipe, start_over=True)
    run(tmp_path / "fresh", recipe)
    assert contents(out) == contents(tmp_path / "fresh")


def test_what_came_after_the_journal_is_cut_off(tmp_path: Path, recipe: Recipe):
    out = tmp_path / "out"
    killed_after(4, out, recipe)
    (partial,) = (out / "train").glob("*.partial")
    with partial.open("ab") as file:
        file.write(b"more")
    (out / "train" / "00009.bin").write_bytes(b"more")
    (out / "validation" / f"meta.json.{'0' * 32}.tmp").touch()
    (out / f"progress.json.{'0' * 32}.tmp").touch()
    run(out, recipe)
    run(tmp_path / "fresh", recipe)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path, recipe: Recipe):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"mine: got a folder that holds other files \(thesis.tex\); allowed: a new"):
        run(tmp_path / "mine", recipe)
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    with pytest.raises(InputError, match="an error while writing there"):
        run(tmp_path / "mine" / "thesis.tex", recipe)


def test_a_damaged_finished_folder_is_refused(tmp_path: Path, recipe: Recipe):
    run(tmp_path / "out", recipe)
    shorten(tmp_path / "out" / "train" / "00000.bin")
    with pytest.raises(InputError, match=r"00000\.bin: got 1998 bytes"):
        run(tmp_path / "out", recipe)


# --- bad records ---


def test_the_first_bad_record_stops_it(tmp_path: Path, recipe: Recipe, bad_corpus: Path):
    for workers in (1, 2):
        with pytest.raises(InputError, match=r"a\.jsonl:4: got byte 0xff at offset 10, which is no UTF-8") as caught:
            run(tmp_path / str(workers), recipe, workers=workers)
        assert len(caught.value.problems) == 1


@pytest.mark.parametrize("chunk_bytes", [1500, 6000])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_reader_comes_after_those_before_it(
    tmp_path: Path, recipe: Recipe, corpus: Path, monkeypatch: pytest.MonkeyPatch, workers: int, chunk_bytes: int
):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    with (corpus / "a.jsonl").open("a") as file:
        file.write("bad\n")
    (corpus / "b.txt").unlink()
    monkeypatch.setattr(Text, "state", lambda self: "")
    monkeypatch.setattr(Text, "size", lambda self: 1)
    with pytest.raises(InputError, match=r"a\.jsonl:61: got a line that is no JSON"):
        run(tmp_path / "stop", recipe, workers=workers)
    with pytest.raises(InputError, match=r"b\.txt: got a file that cannot be read"):
        run(tmp_path / "skip", replace(recipe, on_error="skip"), workers=workers)


def test_skipped_records_are_counted_listed_and_reported(tmp_path: Path, recipe: Recipe, bad_corpus: Path):
    built, messages = run(tmp_path / "out", replace(recipe, on_error="skip"))
    assert built.skipped == 12
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(4, 28, 2))
    assert {line["file"] for line in lines} == {str(bad_corpus / "a.jsonl")}
    assert "which is no UTF-8" in lines[0]["reason"] and "no key 'text'" in lines[1]["reason"]
    skipped = [message for message in messages if message.startswith("warning: skipped")]
    assert len(skipped) == 10
    assert skipped[1] == f"warning: skipped {bad_corpus / 'a.jsonl'}:6: {lines[1]['reason']}"
    assert "of further ones only skipped.jsonl tells" in skipped[-1]
    assert f"12 records skipped (listed in {tmp_path / 'out' / 'skipped.jsonl'})" in messages[-1]
    numbers = [n for n in range(1, 61) if n not in range(4, 28, 2)]
    good = (bad_corpus / "a.jsonl").read_bytes().splitlines(keepends=True)
    (bad_corpus / "a.jsonl").write_bytes(b"".join(good[n - 1] for n in numbers))
    run(tmp_path / "good", recipe)
    for side in ("train", "validation"):
        assert contents(tmp_path / "out" / side) == contents(tmp_path / "good" / side)


def test_after_a_stop_it_goes_on_with_skipping_but_not_the_other_way(tmp_path: Path, recipe: Recipe, bad_corpus: Path):
    lines = (bad_corpus / "a.jsonl").read_bytes().splitlines(keepends=True)
    (bad_corpus / "a.jsonl").write_bytes(b"".join(lines[30:] + lines[:30]))
    with pytest.raises(InputError, match=r"a\.jsonl:34: got"):
        run(tmp_path / "out", recipe)
    _, messages = run(tmp_path / "out", replace(recipe, on_error="skip"))
    assert any("going on" in message for message in messages)
    run(tmp_path / "fresh", replace(recipe, on_error="skip"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    with pytest.raises(InputError, match="on_error: 12 records were skipped, now 'stop'"):
        run(tmp_path / "out", recipe)


# --- machines ---


def test_no_space_is_said_and_gone_on_with_later(tmp_path: Path, recipe: Recipe):
    recipe = replace(recipe, shard_tokens=1 << 20)
    run(tmp_path / "whole", recipe)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(InputError, match=r"an error while writing there \(File too large\)(?s:.*)make room"):
            run(tmp_path / "out", recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "out" / "train" / "00000.bin.partial").stat().st_size == 4000  # some of a write came through
    _, messages = run(tmp_path / "out", recipe)
    assert any("going on" in message for message in messages)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_tokenizer_that_changes_under_way_is_refused(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    model = tmp_path / "mine.model"
    shutil.copy(recipe.tokenizer, model)
    pool = build_module.Pool

    def changing(*args: Any) -> Any:
        write_atomically(model, recipe.tokenizer.read_bytes() + b"\x1a\x02\x18\x00")
        return pool(*args)

    monkeypatch.setattr(build_module, "Pool", changing)
    with pytest.raises(InputError, match=r"mine\.model: got another tokenizer than a moment ago"):
        run(tmp_path / "out", replace(recipe, tokenizer=model), workers=2)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(
    tmp_path: Path,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr(build_module.time, "monotonic", lambda: next(clock))
    _, messages = run(tmp_path / "out", recipe)
    drawn = capsys.readouterr().err
    lines = messages[1:-1]
    if terminal:
        assert "tokenising" in drawn and "100%" in drawn and "tokens/s" in drawn
        assert lines == []
    else:
        assert drawn == ""
        assert len(lines) > 2
        share, *_ = lines[0].removeprefix(f"tokenising {recipe.text.name}: ").split(", ")
        assert 0 < int(share.rstrip("%")) < 100
        assert "tokens/s" in lines[0] and lines[0].endswith("s left")


def test_the_ids_on_the_way_are_as_small_as_on_the_disk(recipe: Recipe):
    tokenise = build_module.Tokenise(recipe)
    result = tokenise(next(recipe.text.chunks()))
    assert result.train.ids.dtype == np.dtype("<u2")
