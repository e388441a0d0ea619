"""With document masks on, batches say which document of its row each token is in."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.helpers import BYTES
from titanlite.data.loader import IGNORED, Batch, TrainLoader, ValidationData, build_train_loader
from titanlite.data.phase import first_phase
from titanlite.data.prepare import PreparedData, PreparedSource
from titanlite.data.shards import ShardWriter

SEQ_LEN = 8
BOS, EOS = 1, 2
DOCUMENTS = [[11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32], [41], [51, 52], [61, 62, 63, 64]]


def prepare(folder: Path, tokens: list[int], marks: tuple[int, int], document_mask: bool = True) -> PreparedData:
    for part in ("train", "validation"):
        writer = ShardWriter(folder / part, dtype="uint16", tokenizer="t" * 64)
        writer.write(np.array(tokens), documents=1, text_bytes=1)
        writer.close()
    source = PreparedSource("text", folder / "train", folder / "validation", 1.0, "f" * 64)
    return PreparedData(BYTES, (source,), marks, document_mask)


def build(prepared: PreparedData, num_workers: int = 0) -> TrainLoader:
    return build_train_loader(
        prepared,
        first_phase(prepared, seq_len=SEQ_LEN, seed=1).order(epochs=1),
        seq_len=SEQ_LEN,
        global_batch_size=3,
        data_rank=0,
        data_size=1,
        local_batch_size=1,
        start_sample=0,
        num_workers=num_workers,
        pin_memory=False,
    )


def by_tokens(batches: list[Batch]) -> dict[tuple[int, ...], list[int]]:
    """Tokens of every row -> its documents."""
    return {
        tuple(tokens.tolist()): documents.tolist()
        for batch in batches
        for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True)
    }


# Windows of 8: the second and third start in the middle of a document.
CASES = {
    "bos": (
        (BOS, -1),
        [[1, 11, 12, 13, 1, 21, 22, 23], [24, 25, 26, 27, 28, 29, 30, 31], [32, 1, 41, 1, 51, 52, 1, 61]],
        [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 2, 2, 2, 3, 3]],
    ),
    "eos": (
        (-1, EOS),
        [[11, 12, 13, 2, 21, 22, 23, 24], [25, 26, 27, 28, 29, 30, 31, 32], [2, 41, 2, 51, 52, 2, 61, 62]],
        [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 2, 2, 2, 3, 3]],
    ),
    "both": (
        (BOS, EOS),
        [[1, 11, 12, 13, 2, 1, 21, 22], [23, 24, 25, 26, 27, 28, 29, 30], [31, 32, 2, 1, 41, 2, 1, 51]],
        [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 2, 2]],
    ),
    # The last token of the first window starts a document, as its label says; that of the third does not.
    "one id for both": (
        (EOS, EOS),
        [[2, 11, 12, 13, 14, 15, 2, 2], [21, 22, 23, 24, 25, 2, 2, 41], [2, 2, 51, 52, 53, 54, 55, 2]],
        [[0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]],
    ),
}


def stream(case: str) -> list[int]:
    (bos, eos), rows, _ = CASES[case]
    if bos == eos:
        return [*chain.from_iterable(rows), 2, 61]
    before, after = [bos] * (bos >= 0), [eos] * (eos >= 0)
    return list(chain.from_iterable(before + document + after for document in DOCUMENTS))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_documents_of_training_batches(case: str, num_workers: int, tmp_path: Path):
    marks, rows, documents = CASES[case]
    loader = build(prepare(tmp_path, stream(case), marks), num_workers)
    steps = list(loader)
    found = by_tokens([batch for step in steps for batch in step])
    wanted = dict(zip(map(tuple, rows), documents, strict=True))
    assert len(steps[0]) == 3 and found == wanted
    for batch in (batch for step in steps for batch in step):
        assert batch["documents"].shape == batch["tokens"].shape == (1, SEQ_LEN)
        assert batch["documents"].dtype == torch.int32 and batch["documents"].is_contiguous()


@pytest.mark.parametrize("case", CASES)
def test_documents_of_validation_batches(case: str, tmp_path: Path):
    marks, rows, documents = CASES[case]
    validation = ValidationData(prepare(tmp_path, stream(case), marks), SEQ_LEN)
    batches = list(validation.batches(0, 1, 2))
    found = by_tokens(batches)
    assert [found[tuple(row)] for row in rows] == documents
    batch = batches[1]
    assert batch["documents"].shape == (2, SEQ_LEN) and batch["documents"].dtype == torch.int32
    assert torch.all(batch["labels"][1] == IGNORED), "a row of padding has documents like any other"


def test_labels_and_tokens_stay_as_they_are_and_no_mask_means_no_key(tmp_path: Path):
    prepared = prepare(tmp_path, stream("both"), (BOS, EOS), document_mask=False)
    plain, masked = list(build(prepared)), list(build(replace(prepared, document_mask=True)))
    for one, other in zip(plain, masked, strict=True):
        for a, b in zip(one, other, strict=True):
            assert set(a) == {"tokens", "labels", "sample_ids"} and set(b) == {*a, "documents"}
            assert all(torch.equal(a[key], b[key]) for key in a)
    (batch,) = ValidationData(prepared, SEQ_LEN).batches(0, 1, 4)
    assert "documents" not in batch
