"""Chunks become tokens: the same in any number of processes, in order, in bounded memory, and with every error."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.helpers import contents, run_build, text_of, tokens_of
from titanlite.config.problems import InputError
from titanlite.data import build as build_module
from titanlite.data import records
from titanlite.data import tokenise as tokenise_module
from titanlite.data.records import Chunk, Position
from titanlite.data.shards import TokenShards
from titanlite.data.text import Text
from titanlite.data.tokenise import Recipe, Tokenise
from titanlite.files import write_atomically


def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path, text: Text, recipe: Recipe, bad_corpus: Path):
    recipe = replace(recipe, on_error="skip")
    alone = run_build(tmp_path / "1", text, recipe)
    assert len(list(text.chunks())) > tokenise_module._FEW_CHUNKS  # or no other process would be started
    for workers in (2, 3):
        built, messages = run_build(tmp_path / str(workers), text, recipe, workers=workers)
        assert contents(tmp_path / str(workers)) == contents(tmp_path / "1")
        assert [m for m in messages if "skipped" in m][:10] == [m for m in alone[1] if "skipped" in m][:10]
        assert built.skipped == 12
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("prefix", [False, True])
def test_long_documents_in_parts_are_the_whole(
    tmp_path: Path, corpus: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, prefix: bool
):
    model = tmp_path / "prefix.model"  # one that puts a space before a document: not before its later parts
    model.write_bytes(recipe.tokenizer.read_bytes() + b"\x1a\x02\x18\x01" * prefix)
    text, recipe = text_of(corpus / "b.txt"), replace(recipe, validation_fraction=0.0, tokenizer=model)
    whole, _ = run_build(tmp_path / "whole", text, recipe)
    monkeypatch.setattr(records, "LONG_BYTES", 500)
    monkeypatch.setattr(records, "CHUNK_BYTES", 100)
    assert sum(chunk.part is not None for chunk in text.chunks()) > 10
    for workers in (1, 2):
        parts, _ = run_build(tmp_path / str(workers), text, recipe, workers=workers)
        assert tokens_of(parts.train) == tokens_of(whole.train)
        assert TokenShards(parts.train).meta == TokenShards(whole.train).meta


def test_a_large_vocabulary_is_written_as_uint32(
    tmp_path: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    narrow, _ = run_build(tmp_path / "narrow", text, recipe)
    monkeypatch.setattr(tokenise_module, "token_dtype", lambda vocab_size: "uint32")
    wide, _ = run_build(tmp_path / "wide", text, recipe)
    assert TokenShards(wide.train).dtype == "uint32"
    assert tokens_of(wide.train) == tokens_of(narrow.train)


def test_memory_is_bounded(tmp_path: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
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
    run_build(tmp_path / "out", text, recipe, workers=2)
    assert read == written > 20
    assert most <= 6


def test_a_killed_worker(tmp_path: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    run_build(tmp_path / "whole", text, recipe)
    add = build_module._Output.add

    def killing(self: Any, *args: Any) -> None:
        add(self, *args)
        for process in multiprocessing.active_children():
            process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(build_module._Output, "add", killing)
        with pytest.raises(InputError, match="worker processes: got one that was ended by signal 9, as systems do"):
            run_build(tmp_path / "out", text, recipe, workers=2)
    assert not multiprocessing.active_children()
    run_build(tmp_path / "out", text, recipe, workers=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("chunk_bytes", [1500, 6000])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_reader_comes_after_those_before_it(
    tmp_path: Path,
    text: Text,
    recipe: Recipe,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    chunk_bytes: int,
):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    with (corpus / "a.jsonl").open("a") as file:
        file.write("bad\n")
    (corpus / "b.txt").unlink()
    monkeypatch.setattr(Text, "state", lambda self: "")
    monkeypatch.setattr(Text, "size", lambda self: 1)
    with pytest.raises(InputError, match=r"a\.jsonl:61: got a line that is no JSON"):
        run_build(tmp_path / "stop", text, recipe, workers=workers)
    with pytest.raises(InputError, match=r"b\.txt: got a file that cannot be read"):
        run_build(tmp_path / "skip", text, replace(recipe, on_error="skip"), workers=workers)


def test_a_tokenizer_that_changes_under_way_is_refused(
    tmp_path: Path, text: Text, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    model = tmp_path / "mine.model"
    shutil.copy(recipe.tokenizer, model)
    pool = tokenise_module.Pool

    def changing(*args: Any) -> Any:
        write_atomically(model, recipe.tokenizer.read_bytes() + b"\x1a\x02\x18\x00")
        return pool(*args)

    monkeypatch.setattr(tokenise_module, "Pool", changing)
    with pytest.raises(InputError, match=r"mine\.model: got another tokenizer than a moment ago"):
        run_build(tmp_path / "out", text, replace(recipe, tokenizer=model), workers=2)


def test_the_ids_on_the_way_are_as_small_as_on_the_disk(text: Text, recipe: Recipe):
    tokenise = Tokenise(recipe)
    result = tokenise(next(text.chunks()))
    assert result.train.ids.dtype == np.dtype("<u2")
