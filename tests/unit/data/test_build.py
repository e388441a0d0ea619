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

import pytest

from tests.unit.data.helpers import contents, run_build, session, text_of, tokens_of
from titanlite.config.problems import InputError
from titanlite.data import build as build_module
from titanlite.data import records
from titanlite.data.records import BadRecord, Chunk, Document, File, Position, Reading, documents
from titanlite.data.shards import TokenShards
from titanlite.data.text import Text
from titanlite.data.tokenise import Recipe
from titanlite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]

Change = Callable[[Path], object]


def found_in(text: Text) -> Iterator[Document | BadRecord]:
    for chunk in text.chunks():
        yield from documents(chunk)


def in_child(function: Callable[[], object]) -> Any:
    """A forked process: it starts at once. Its parent, this one, has no threads that hold locks."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def killed_after(chunks: int, folder: Path, text: Text, recipe: Recipe, **options: Any) -> None:
    """A build that is killed when it has saved so many chunks."""

    def child() -> None:
        save, count = build_module._Output.save, 0

        def counted(self: Any) -> None:
            nonlocal count
            save(self)
            if (count := count + 1) == chunks:
                os.kill(os.getpid(), signal.SIGKILL)

        build_module._Output.save = counted  # type: ignore[method-assign]
        run_build(folder, text, recipe, **options)

    process = in_child(child)
    process.join()
    assert process.exitcode == -signal.SIGKILL


# --- what is written ---


def test_every_document_with_its_marks_on_its_side(tmp_path: Path, text: Text, recipe: Recipe):
    built, messages = run_build(tmp_path / "out", text, recipe)
    tokenizer = load_tokenizer(recipe.tokenizer)
    expected: dict[bool, list[int]] = {False: [], True: []}
    sizes = {False: [0, 0], True: [0, 0]}
    for document in found_in(text):
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
def test_marks(tmp_path: Path, text: Text, recipe: Recipe, bos: int, eos: int):
    built, _ = run_build(tmp_path / "out", text, replace(recipe, bos_id=bos, eos_id=eos, validation_fraction=0.0))
    tokenizer = load_tokenizer(recipe.tokenizer)
    before, after = ([i] if i >= 0 else [] for i in (bos, eos))
    texts = [document.text for document in found_in(text) if isinstance(document, Document)]
    assert tokens_of(built.train) == [i for text in texts for i in (*before, *tokenizer.encode(text).tolist(), *after)]
    assert built.validation is None
    shards = TokenShards(tmp_path / "out" / "validation")
    assert (shards.n_tokens, shards.bos_id, shards.eos_id) == (0, bos, eos)


def test_text_without_a_document(tmp_path: Path, recipe: Recipe, corpus: Path):
    (corpus / "b.txt").write_text("")
    built, _ = run_build(tmp_path / "out", text_of(corpus / "b.txt"), recipe)
    assert built.empty and built.validation is None
    for side in ("train", "validation"):
        assert TokenShards(tmp_path / "out" / side).n_tokens == 0


def test_standard_input_is_read_once(tmp_path: Path, recipe: Recipe, corpus: Path, monkeypatch: pytest.MonkeyPatch):
    data = (corpus / "a.jsonl").read_bytes()
    text = Text("standard input", (File(None, "-", ".jsonl"),))
    for k in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        built, messages = run_build(tmp_path / str(k), text, recipe)
        assert built.train_tokens and "standard input: as it comes" in messages[0]
    assert contents(tmp_path / "0" / "train") == contents(tmp_path / "1" / "train")
    with pytest.raises(InputError, match=r"tokens of other text \(standard input cannot be read a second time\)"):
        run_build(tmp_path / "0", text, recipe)


# --- ends and returns ---


STEPS = ("fsync", "replace", "rename", "unlink", "mkdir")


def step_by_step(kill_at: int, after: bool, folder: Path, text: Text, recipe: Recipe, steps: Path) -> None:
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
    run_build(folder, text, recipe)
    steps.write_text(str(count))


def test_killed_at_any_step_it_gives_the_same_files_later(
    tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "CHUNK_BYTES", 6000)
    recipe = replace(recipe, on_error="skip", shard_tokens=1500)
    run_build(tmp_path / "whole", text, recipe)
    expected = contents(tmp_path / "whole")
    steps = tmp_path / "steps"
    process = in_child(lambda: step_by_step(0, False, tmp_path / "steps of", text, recipe, steps))
    process.join()
    n = int(steps.read_text())
    assert n > 40
    rng = random.Random(0)
    for k in [*range(1, 9), *sorted(rng.sample(range(9, n - 12), 6)), *range(n - 12, n + 1)]:
        folder = tmp_path / "killed"
        after = rng.random() < 0.5
        process = in_child(lambda k=k, after=after, folder=folder: step_by_step(k, after, folder, text, recipe, steps))  # type: ignore[misc]
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if (folder / "build.json").exists():
            TokenShards(folder / "train").verify()
        run_build(folder, text, recipe)
        assert contents(folder) == expected, f"killed at step {k}"
        shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")
def test_killed_at_random_instants_with_workers(tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path):
    recipe = replace(recipe, on_error="skip")
    run_build(tmp_path / "whole", text, recipe)

    def child() -> None:
        os.setsid()
        run_build(tmp_path / "out", text, recipe, workers=2)

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
    run_build(tmp_path / "out", text, recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_resumed_build_does_not_start_again(
    tmp_path: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    killed_after(5, tmp_path / "out", text, recipe)
    state = json.loads((tmp_path / "out" / "progress.json").read_text())["state"]
    starts = []
    chunks = Text.chunks

    def from_there(self: Text, start: Position) -> Iterator[Chunk]:
        starts.append(start)
        return chunks(self, start)

    monkeypatch.setattr(Text, "chunks", from_there)
    _, messages = run_build(tmp_path / "out", text, recipe)
    assert starts == [Position(**state["position"])] and starts[0] != Position()
    n = state["train"]["tokens"] + state["validation"]["tokens"]
    assert f"going on in {tmp_path / 'out'}, where {n:,} tokens are already" in messages
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_a_half_shard_does_not_count(tmp_path: Path, text: Text, recipe: Recipe):
    killed_after(4, tmp_path / "out", text, recipe)
    assert list((tmp_path / "out" / "train").glob("*.bin.partial"))
    assert not (tmp_path / "out" / "train" / "meta.json").exists()


INTERRUPTED = """
import sys
from pathlib import Path
from titanlite.data import build, records
from titanlite.data.records import File
from titanlite.data.text import Text
from titanlite.data.tokenise import Recipe

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
    recipe = Recipe(model, 1, 2, 0.2, shard_tokens=1000)
    try:
        report = lambda message: print(message, file=sys.stderr)
        build.build(out, text, recipe, workers=2, report=report, journal_seconds=0)
    except KeyboardInterrupt:
        sys.exit(7)
"""


def test_an_interrupt_ends_it_in_order(tmp_path: Path, text: Text, recipe: Recipe, corpus: Path):
    run_build(tmp_path / "whole", text, recipe)
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
    assert b"Traceback" not in errors and b"the same command goes on" in errors
    _, messages = run_build(tmp_path / "out", text, recipe)
    assert any("going on" in message for message in messages)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_one_builds_and_the_others_wait(tmp_path: Path, text: Text, recipe: Recipe):
    holds = multiprocessing.get_context("fork").Event()

    def child() -> None:
        finish = build_module._Output.finish

        def slowly(self: Any) -> None:
            holds.set()
            time.sleep(1)
            finish(self)

        build_module._Output.finish = slowly  # type: ignore[method-assign]
        run_build(tmp_path / "out", text, recipe)

    process = in_child(child)
    assert holds.wait(30)
    built, messages = run_build(tmp_path / "out", text, recipe)
    process.join()
    assert process.exitcode == 0
    assert messages == [f"waiting: another process writes to {tmp_path / 'out'}"]
    assert not built.new
    assert not (tmp_path / "out" / "build.lock").exists()


def test_the_second_time_nothing_is_done(tmp_path: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    first, _ = run_build(tmp_path / "out", text, recipe)
    (tmp_path / "out" / "tokenizer.model").touch()  # more may be put there
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr(build_module, "_run", lambda *args: pytest.fail("built again"))
    assert run_build(tmp_path / "out", text, recipe) == (replace(first, new=False), [])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


# --- what is refused ---

OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"bos_id": -1}, "bos_id: 1, now -1"),
    ({"eos_id": -1}, "eos_id: 2, now -1"),
    ({"validation_fraction": 0.3}, "validation_fraction: 0.2, now 0.3"),
    ({"shard_tokens": 999}, "shard_tokens: 1000, now 999"),
]


@pytest.mark.parametrize("finished", [False, True])
def test_another_recipe_or_text_is_refused(tmp_path: Path, text: Text, recipe: Recipe, corpus: Path, finished: bool):
    out = tmp_path / "out"
    if finished:
        run_build(out, text, recipe)
    else:
        killed_after(3, out, text, recipe)
    before = contents(out)
    others = [
        *((text, replace(recipe, **change), message) for change, message in OTHERS),
        (replace(text, reading=Reading("body")), recipe, "text_key: 'text', now 'body'"),
        (replace(text, reading=Reading(separator="x")), recipe, "separator: '', now 'x'"),
        (replace(text, files=text.files[:1], name="other"), recipe, f"the text: '{text.name}', now 'other'"),
        (replace(text, files=text.files[:1]), recipe, "the text: its files have changed since"),
    ]
    for other_text, other_recipe, message in others:
        with pytest.raises(InputError) as caught:
            run_build(out, other_text, other_recipe)
        (problem,) = caught.value.problems
        assert message in str(problem)
        assert ("tokens with other" if finished else "unfinished try with other") in problem.got
        assert problem.fix == "remove the folder, or give another"
    assert contents(out) == before


def test_another_tokenizer_is_refused(tmp_path: Path, text: Text, recipe: Recipe):
    run_build(tmp_path / "out", text, recipe)
    model = tmp_path / "other.model"
    model.write_bytes(recipe.tokenizer.read_bytes() + b"\x1a\x02\x18\x00")
    with pytest.raises(InputError, match=r"tokenizer: '[0-9a-f]{64}', now '[0-9a-f]{64}'"):
        run_build(tmp_path / "out", text, replace(recipe, tokenizer=model))


def test_text_that_changed_since_is_refused_or_started_over(tmp_path: Path, text: Text, recipe: Recipe, corpus: Path):
    killed_after(5, tmp_path / "out", text, recipe)
    with (corpus / "b.txt").open("a") as file:
        file.write("more")
    with pytest.raises(InputError, match="the text: its files have changed since"):
        run_build(tmp_path / "out", text, recipe)
    _, messages = run_build(tmp_path / "out", text, recipe, start_over=True)
    assert messages[0].startswith("warning: what an earlier try left is deleted, and started over")
    run_build(tmp_path / "fresh", text, recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_text_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, text: Text, recipe: Recipe, corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    add = build_module._Output.add

    def changing(self: Any, *args: Any) -> None:
        os.utime(corpus / "a.jsonl", (1, 1))
        add(self, *args)

    monkeypatch.setattr(build_module._Output, "add", changing)
    with pytest.raises(InputError, match="files that changed while they were read"):
        run_build(tmp_path / "out", text, recipe)
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
    tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path, pattern: str, damage: Change, message: str
):
    recipe = replace(recipe, on_error="skip")
    out = tmp_path / "out"
    killed_after(7, out, text, recipe)
    (path,) = out.glob(pattern)
    damage(path)
    with pytest.raises(InputError, match=message) as caught:
        run_build(out, text, recipe)
    assert caught.value.problems[0].fix == "remove the folder, or give another"
    run_build(out, text, recipe, start_over=True)
    run_build(tmp_path / "fresh", text, recipe)
    assert contents(out) == contents(tmp_path / "fresh")


def test_what_came_after_the_journal_is_cut_off(tmp_path: Path, text: Text, recipe: Recipe):
    out = tmp_path / "out"
    killed_after(4, out, text, recipe)
    (partial,) = (out / "train").glob("*.partial")
    with partial.open("ab") as file:
        file.write(b"more")
    (out / "train" / "00009.bin").write_bytes(b"more")
    (out / "validation" / f"meta.json.{'0' * 32}.tmp").touch()
    (out / f"progress.json.{'0' * 32}.tmp").touch()
    run_build(out, text, recipe)
    run_build(tmp_path / "fresh", text, recipe)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path, text: Text, recipe: Recipe):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"mine: got a folder that holds other files \(thesis.tex\); allowed: a new"):
        run_build(tmp_path / "mine", text, recipe)
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    with pytest.raises(InputError, match="an error while writing there"):
        run_build(tmp_path / "mine" / "thesis.tex", text, recipe)


def test_a_damaged_finished_folder_is_refused(tmp_path: Path, text: Text, recipe: Recipe):
    run_build(tmp_path / "out", text, recipe)
    shorten(tmp_path / "out" / "train" / "00000.bin")
    with pytest.raises(InputError, match=r"00000\.bin: got 1998 bytes"):
        run_build(tmp_path / "out", text, recipe)


# --- bad records ---


def test_the_first_bad_record_stops_it(tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path):
    for workers in (1, 2):
        with pytest.raises(InputError, match=r"a\.jsonl:4: got byte 0xff at offset 10, which is no UTF-8") as caught:
            run_build(tmp_path / str(workers), text, recipe, workers=workers)
        assert len(caught.value.problems) == 1


def test_skipped_records_are_counted_listed_and_reported(tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path):
    built, messages = run_build(tmp_path / "out", text, replace(recipe, on_error="skip"))
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
    run_build(tmp_path / "good", text, recipe)
    for side in ("train", "validation"):
        assert contents(tmp_path / "out" / side) == contents(tmp_path / "good" / side)


def test_after_a_stop_it_goes_on_with_skipping_but_not_the_other_way(
    tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path
):
    lines = (bad_corpus / "a.jsonl").read_bytes().splitlines(keepends=True)
    (bad_corpus / "a.jsonl").write_bytes(b"".join(lines[30:] + lines[:30]))
    with pytest.raises(InputError, match=r"a\.jsonl:34: got"):
        run_build(tmp_path / "out", text, recipe)
    _, messages = run_build(tmp_path / "out", text, replace(recipe, on_error="skip"))
    assert any("going on" in message for message in messages)
    run_build(tmp_path / "fresh", text, replace(recipe, on_error="skip"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    with pytest.raises(InputError, match="on_error: 12 records were skipped, now 'stop'"):
        run_build(tmp_path / "out", text, recipe)


# --- machines ---


def test_no_space_is_said_and_gone_on_with_later(tmp_path: Path, text: Text, recipe: Recipe):
    recipe = replace(recipe, shard_tokens=1 << 20)
    run_build(tmp_path / "whole", text, recipe)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(InputError, match=r"an error while writing there \(File too large\)(?s:.*)make room"):
            run_build(tmp_path / "out", text, recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "out" / "train" / "00000.bin.partial").stat().st_size == 4000  # some of a write came through
    _, messages = run_build(tmp_path / "out", text, recipe)
    assert any("going on" in message for message in messages)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
