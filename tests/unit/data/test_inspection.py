"""Counts are exact wherever tokens are cut; a window is shown as training sees it, and cannot harm a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tests.unit.data.helpers import BOS, BYTES, CONTROL, EOS, UNK, Bytes, megatron, nanogpt
from titanlite.config.problems import InputError
from titanlite.data import inspection
from titanlite.data.documents import document_starts
from titanlite.data.inspection import show, show_sample, stats
from titanlite.data.order import SampleOrder
from titanlite.data.prepare import PreparedData, PreparedSource
from titanlite.data.shards import META, ShardWriter, TokenArray
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import open_tokens


class OneMark(Bytes):
    bos_id = EOS


def write(
    folder: Path, tokens: list[int] | np.ndarray, documents: int, *, bos_id: int | None, eos_id: int | None
) -> TokenArray:
    """Shards of 7 tokens; None: meta.json does not say."""
    writer = ShardWriter(folder, dtype="uint16", tokenizer="t" * 64, shard_tokens=7)
    writer.write(np.asarray(tokens, dtype=np.int32), documents=documents, text_bytes=2 * len(tokens))
    writer.close()
    meta = json.loads((folder / META).read_text())
    for name, value in (("bos_id", bos_id), ("eos_id", eos_id)):
        meta.pop(name, None)
        if value is not None:
            meta[name] = value
    (folder / META).write_text(json.dumps(meta))
    return open_tokens(folder)


def corpus(lengths: list[int], *, before: int = -1, after: int = -1) -> np.ndarray:
    """Documents of so many ids of text, below 50, with their marks."""
    rng = np.random.default_rng(0)
    marked = [[*[before] * (before >= 0), *rng.integers(0, 50, length), *[after] * (after >= 0)] for length in lengths]
    return np.concatenate([np.array(document) for document in marked])


LENGTHS = [5, 1, 30, 2, 2, 11]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 1 << 20])
@pytest.mark.parametrize(
    ("before", "after", "marks"),
    [(BOS, EOS, 2), (BOS, -1, 1), (-1, EOS, 1), (EOS, EOS, 2), (EOS, -1, 1)],
)
def test_documents_are_counted_across_blocks_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, before: int, after: int, marks: int
):
    monkeypatch.setattr(inspection, "_BLOCK", block)
    tokens = corpus(LENGTHS, before=before, after=after)
    write(tmp_path, tokens, 6, bos_id=before, eos_id=after)
    found = stats(tmp_path, None).train
    whole = [length + marks for length in LENGTHS]
    assert (found.documents, found.recorded_documents, found.tokens) == (6, 6, len(tokens))
    assert found.longest_document == 30 + marks
    assert found.mean_document == pytest.approx(np.mean(whole))
    assert found.median_document == np.median(whole)
    assert (found.bos_id, found.eos_id, found.marks) == (before, after, "meta.json")
    assert found.distinct_ids == len(np.unique(tokens))
    assert found.bytes == 2 * len(tokens) and found.tokens_per_byte == 0.5
    assert (found.dtype, found.shards) == ("uint16", -(-len(tokens) // 7))
    assert (found.unknown_share, found.vocab_size, found.vocabulary_used) == (None, None, None)


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(("before", "after"), [(EOS, EOS), (EOS, -1), (-1, EOS)])
def test_one_id_for_both_marks_counts_documents_however_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, before: int, after: int
):
    monkeypatch.setattr(inspection, "_BLOCK", block)
    write(tmp_path, corpus(LENGTHS, before=before, after=after), 6, bos_id=None, eos_id=None)
    found = stats(tmp_path, cast(Tokenizer, OneMark())).train
    assert (found.documents, found.marks) == (6, "tokenizer")


@pytest.mark.parametrize(("bos_id", "eos_id"), [(BOS, EOS), (BOS, -1), (-1, EOS), (EOS, EOS)])
def test_any_tokens_are_counted_as_if_they_were_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bos_id: int, eos_id: int
):
    rng = np.random.default_rng(0)
    for i in range(40):
        tokens = rng.choice([1, 2, BOS, EOS], rng.integers(1, 20))
        monkeypatch.setattr(inspection, "_BLOCK", int(rng.integers(1, 9)))
        write(tmp_path / str(i), tokens, 1, bos_id=bos_id, eos_id=eos_id)
        starts = np.flatnonzero(document_starts(tokens, bos_id, eos_id))
        lengths = np.diff(starts, append=len(tokens))
        found = stats(tmp_path / str(i), None).train
        assert (found.documents, found.longest_document) == (len(starts), lengths.max())
        assert found.median_document == np.median(lengths)


def test_lengths_longer_than_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspection, "_TABLED", 3)
    monkeypatch.setattr(inspection, "_BLOCK", 4)
    for n in range(1, len(LENGTHS) + 1):
        write(tmp_path / str(n), corpus(LENGTHS[:n], after=EOS), n, bos_id=-1, eos_id=EOS)
        assert stats(tmp_path / str(n), None).train.median_document == np.median(np.array(LENGTHS[:n]) + 1)


def test_with_a_tokenizer_ids_are_judged(tmp_path: Path):
    write(tmp_path, [1, 1, UNK, 2, EOS, 300, 301, 300, UNK, EOS], 2, bos_id=-1, eos_id=EOS)
    found = stats(tmp_path, BYTES).train
    assert found.unknown_share == 0.2
    assert (found.distinct_ids, found.vocab_size, found.outside_vocabulary) == (4, 260, 3)
    assert found.vocabulary_used == 4 / 260
    assert stats(tmp_path, None).train.distinct_ids == 6


def test_negative_ids_are_outside(tmp_path: Path):
    file = megatron(tmp_path / "x.bin", [1, -1, 2, EOS], [4], code=4)
    found = stats(file, BYTES).train
    assert (found.outside_vocabulary, found.distinct_ids, found.documents, found.recorded_documents) == (1, 3, 1, 1)
    assert not stats(file, None).verified  # there is nothing to compare with
    assert stats(file, None).train.distinct_ids is None  # as uint32 the id is over the limit of the table


def test_without_marks_documents_are_not_counted(tmp_path: Path):
    write(tmp_path, corpus(LENGTHS), 6, bos_id=-1, eos_id=-1)
    found = stats(tmp_path, BYTES).train
    assert (found.documents, found.recorded_documents, found.longest_document, found.marks) == (
        None, 6, None, "meta.json"
    )  # fmt: skip
    assert "6 (not by marks)" in str(stats(tmp_path, BYTES))


def test_no_tokens_at_all(tmp_path: Path):
    write(tmp_path / "train", [1, EOS], 1, bos_id=-1, eos_id=EOS)
    write(tmp_path / "validation", [], 0, bos_id=-1, eos_id=EOS)
    found = stats(tmp_path, BYTES)
    assert found.validation is not None
    assert (found.validation.documents, found.validation.tokens, found.validation.median_document) == (0, 0, None)
    assert (found.validation.longest_document, found.validation.unknown_share) == (0, None)
    json.dumps(found.as_dict())


def test_table_and_json(tmp_path: Path):
    write(tmp_path / "train", corpus([500, 800, 700], after=EOS), 4, bos_id=-1, eos_id=EOS)
    write(tmp_path / "validation", [1, 2, UNK, EOS], 1, bos_id=-1, eos_id=EOS)
    found = stats(tmp_path, BYTES)
    assert str(found) == "\n".join(
        [
            f"{tmp_path} (checksums are right)",
            "                                       train       validation",
            "tokens                                 2,003                4",
            "documents         4 recorded, but by marks 3                1",
            "text bytes                             4,006                8",
            "tokens per byte                       0.5000           0.5000",
            "longest document                         801                4",
            "mean document                          667.7              4.0",
            "median document                        701.0              4.0",
            "unknown tokens                       0.0000%         25.0000%",
            "distinct ids               51 of 260 (19.6%)  4 of 260 (1.5%)",
            "dtype                                 uint16           uint16",
            "files                                    287                1",
            "BOS, EOS                           none, 257        none, 257",
        ]
    )
    assert json.loads(json.dumps(found.as_dict()))["validation"]["unknown_share"] == 0.25


def test_damage_is_found_unless_told_not_to_look(tmp_path: Path):
    tokens = write(tmp_path, corpus(LENGTHS, after=EOS), 6, bos_id=-1, eos_id=EOS)
    data = bytearray(tokens.files[2].read_bytes())
    data[4] ^= 1
    tokens.files[2].write_bytes(data)
    with pytest.raises(InputError, match=r"00002\.bin: got contents with sha256"):
        stats(tmp_path, None)
    found = stats(tmp_path, None, verify=False)
    assert not found.verified and "(no checksums compared)" in str(found)


def test_stats_of_what_is_no_tokens(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"--stats: got .*; allowed: a folder of token shards, or a \.bin"):
            stats(path, None)


# --- show ---


def text(string: str) -> list[int]:
    return list(string.encode())


def test_show_is_what_training_sees(tmp_path: Path):
    ids = [*text("abc\n"), EOS, *text("dé\x1b[31m\tf"), UNK, CONTROL, EOS, *text("gh"), EOS, *text("next")]
    tokens = write(tmp_path, ids, 4, bos_id=-1, eos_id=EOS)
    assert show(tokens, BYTES, 0, 19).split("\n") == [
        "window 0 of 1: tokens 0 to 18 of 25, labels one further, 3 documents",
        "--- document ---",
        "abc",
        "⟨eos⟩",
        "--- document ---",
        "dé⟨U+001B⟩[31m\tf⟨unk⟩⟨id 259⟩⟨eos⟩",
        "--- document ---",
        "g",
        "--- label only ---",
        "h",
    ]


def test_show_a_window_from_the_middle_of_a_document(tmp_path: Path):
    tokens = write(tmp_path, [BOS, *text("abcdef"), EOS, BOS, *text("gh"), EOS], 2, bos_id=BOS, eos_id=EOS)
    assert show(tokens, BYTES, 1, 4).split("\n")[1:] == [
        "--- document, from its middle ---", "def⟨eos⟩", "--- label only ---", "⟨bos⟩",
    ]  # fmt: skip
    # Window 2 starts with a document.
    tokens = write(tmp_path / "b", [*text("abc"), EOS, *text("gh")], 2, bos_id=-1, eos_id=EOS)
    assert show(tokens, BYTES, 1, 2).split("\n")[1:] == [
        "--- document, from its middle ---", "c⟨eos⟩", "--- label only ---", "g",
    ]  # fmt: skip
    assert show(tokens, BYTES, 0, 4).count("--- document ---") == 1
    tokens = write(tmp_path / "c", [*text("abc"), EOS, *text("ghi")], 2, bos_id=-1, eos_id=EOS)
    assert show(tokens, BYTES, 2, 2).split("\n")[1] == "--- document ---"


def test_show_one_id_for_both_marks(tmp_path: Path):
    tokens = write(tmp_path, [EOS, *text("ab"), EOS, EOS, *text("cdef"), EOS], 2, bos_id=EOS, eos_id=EOS)
    assert show(tokens, BYTES, 0, 6).split("\n")[1:] == [
        "--- document ---", "⟨bos/eos⟩ab⟨bos/eos⟩", "--- document ---", "⟨bos/eos⟩c", "--- label only ---", "d",
    ]  # fmt: skip
    # A window that ends between the two: the label says that the last token is no start. And one that ends after them.
    assert show(tokens, BYTES, 0, 4).split("\n")[0].endswith("1 document")
    assert show(tokens, BYTES, 0, 5).split("\n")[0].endswith("2 documents")
    # The next window starts with the second of the two, or with the first.
    assert show(tokens, BYTES, 1, 4).split("\n")[1] == "--- document ---"
    assert show(tokens, BYTES, 1, 3).split("\n")[1:4] == [
        "--- document, from its middle ---", "⟨bos/eos⟩", "--- document ---",
    ]  # fmt: skip


def test_show_without_a_tokenizer_or_marks(tmp_path: Path):
    tokens = write(tmp_path, [1, 2, EOS, 300, 4], 2, bos_id=None, eos_id=None)
    assert show(tokens, None, 0, 4).split("\n") == [
        "window 0 of 1: tokens 0 to 3 of 5, labels one further, documents not told apart: no marks are known",
        "1 2 257 300",
        "--- label only ---",
        "4",
    ]
    assert "⟨eos⟩\n--- document ---\n⟨id 300, outside the vocabulary⟩" in show(tokens, BYTES, 0, 4)
    marked = write(tmp_path / "marked", [1, 2, EOS, 300, 4], 2, bos_id=-1, eos_id=EOS)
    assert "1 2 ⟨eos⟩\n--- document ---\n300" in show(marked, None, 0, 4)


def test_nothing_that_acts_on_a_terminal_comes_through(tmp_path: Path):
    bad = "".join(map(chr, [*range(32), 127, *range(128, 160), 0x200B, 0x202E, 0x2028, 0xFEFF, 0xE000]))
    shown = show(write(tmp_path, text(f"a{bad}b"), 1, bos_id=-1, eos_id=EOS), BYTES, 0, len(bad.encode()) + 1)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert "⟨U+0000⟩" in shown and "⟨U+202E⟩" in shown and "⟨U+000D⟩" in shown


@pytest.mark.parametrize("window", [3, -1])
def test_show_a_window_that_is_not_there(tmp_path: Path, window: int):
    tokens = write(tmp_path, text("abcdefg"), 1, bos_id=-1, eos_id=EOS)
    with pytest.raises(InputError, match=f"got window {window} of 2 tokens; allowed: 0 to 2"):
        show(tokens, BYTES, window, 2)
    with pytest.raises(InputError, match="none is whole"):
        show(tokens, BYTES, 0, 7)


def test_show_a_sample_of_a_run(tmp_path: Path):
    sources = []
    for i in range(2):
        write(tmp_path / str(i), text("abcdefghi"[i:] * 3), 1, bos_id=-1, eos_id=EOS)
        sources.append(PreparedSource(f"path {i}", tmp_path / str(i), None, 1.0, ""))
    prepared = PreparedData(BYTES, tuple(sources), (-1, EOS))
    windows = [open_tokens(source.train).windows(4) for source in sources]
    order = SampleOrder(windows, [1.0, 1.0], seed=1, epochs=2)
    for k in range(8):
        source, epoch, window = order.locate(k)
        head, rest = show_sample(prepared, order, k, 4).split("\n", 1)
        assert head == f"sample {k}: source {source} (path {source}), epoch {epoch}, window {window}"
        assert rest == show(open_tokens(tmp_path / str(source)), BYTES, window, 4)
    assert order.length is not None
    with pytest.raises(InputError, match=f"got sample {order.length}; allowed: 0 to {order.length - 1}, as data.epo"):
        show_sample(prepared, order, order.length, 4)


@pytest.mark.parametrize(("marks", "documents"), [((BOS, -1), 2), ((-1, EOS), 3), ((BOS, EOS), 4)])
def test_a_sample_of_a_file_that_names_no_marks_is_shown_with_those_of_the_run(
    tmp_path: Path, marks: tuple[int, int], documents: int
):
    file = nanogpt(tmp_path / "x.bin", [*text("ab"), EOS, *text("c"), EOS, *text("d"), BOS, *text("ef")])
    prepared = PreparedData(BYTES, (PreparedSource("x.bin", file, None, 1.0, ""),), marks)
    shown = show_sample(prepared, SampleOrder([1], [1.0], seed=1), 0, 8)
    assert f"labels one further, {documents} documents" in shown
    assert shown.count("--- document ---") == documents
