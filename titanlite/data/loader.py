"""Batches of training and validation samples as tensors. Where a run stands is one number: samples taken so far."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.problems import InputError, Problem
from titanlite.data.documents import document_numbers
from titanlite.data.order import SampleOrder
from titanlite.data.prepare import PreparedData
from titanlite.data.shards import TokenArray
from titanlite.data.tokens import open_tokens
from titanlite.lifeline import heed_only_the_parent
from titanlite.model.loss import IGNORED

Batch = dict[str, Tensor]
"""tokens int64 [B, S], labels int64 [B, S] (the next token, or IGNORED), sample_ids int64 [B] (-1: a row of padding);
with document masks also documents int32 [B, S] (which document of its row each token is in, from 0)"""


class TrainLoader:
    """One rank's microbatches, a list for every optimizer step, from a given sample of the run on.

    Step t of this loader takes samples start_sample + t * global_batch_size onwards; the rank has the data_rank-th of
    data_size equal slices, in chunks of local_batch_size. It ends, on all ranks at the same step, when fewer than
    global_batch_size samples are left. It is iterated once. close() ends the loader processes, if any.
    document_marks: BOS and EOS id that tell documents apart (-1: not used); None: batches do not say "documents".
    """

    def __init__(
        self,
        shards: Sequence[TokenArray],
        order: SampleOrder,
        *,
        seq_len: int,
        global_batch_size: int,
        data_rank: int,
        data_size: int,
        local_batch_size: int,
        start_sample: int,
        num_workers: int,
        pin_memory: bool,
        document_marks: tuple[int, int] | None = None,
    ) -> None:
        if global_batch_size % data_size or global_batch_size // data_size % local_batch_size:
            raise ValueError(
                f"global_batch_size {global_batch_size} is not whole batches of {local_batch_size} on {data_size} ranks"
            )
        assert 0 <= data_rank < data_size and start_sample >= order.phase.start
        share = global_batch_size // data_size
        left = None if order.length is None else max(order.length - start_sample, 0)
        self.steps_left = None if left is None else left // global_batch_size
        """Steps that are still to come; None when there is no end."""
        steps = _Steps(start_sample + data_rank * share, share, global_batch_size, self.steps_left)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13
            self._loader: StatefulDataLoader | None = StatefulDataLoader(
                _Samples(shards, order, seq_len, document_marks),
                batch_sampler=steps,
                num_workers=num_workers,
                collate_fn=_Microbatches(local_batch_size),
                pin_memory=pin_memory,
                worker_init_fn=_heed_only_the_parent if num_workers else None,
                snapshot_every_n_steps=1 << 62,  # its state is not saved, so it need not travel either
                generator=torch.Generator(),  # it draws a seed: not from the generator of the run
            )
        self._iterator: Iterator[list[Batch]] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._loader is None:
            raise StopIteration
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            batches = next(self._iterator)
        except StopIteration:
            self.close()
            raise
        if self.steps_left is not None:
            self.steps_left -= 1
        return batches

    def close(self) -> None:
        """End the loader processes; nothing more comes after it. Can be called again."""
        # They end when the last reference to the iterator goes, and the loader holds one, too.
        self._iterator = self._loader = None


def build_train_loader(
    prepared: PreparedData,
    order: SampleOrder,
    *,
    seq_len: int,
    global_batch_size: int,
    data_rank: int,
    data_size: int,
    local_batch_size: int,
    start_sample: int,
    num_workers: int,
    pin_memory: bool,
) -> TrainLoader:
    """The run's loader. Raises ValueError when the batch sizes do not divide.

    order:      of the phase that start_sample lies in
    pin_memory: for copies to a GPU
    """
    return TrainLoader(
        [open_tokens(source.train) for source in prepared.sources],
        order,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        data_rank=data_rank,
        data_size=data_size,
        local_batch_size=local_batch_size,
        start_sample=start_sample,
        num_workers=num_workers,
        pin_memory=pin_memory,
        document_marks=prepared.document_marks,
    )


class ValidationData:
    """The first `samples` held-out samples (0: all), sources in order; always the same ones, whatever the layout.

    n_samples:   how many there are
    token_bytes: int64 [vocab], bytes of text of each id, for bits per byte
    Raises InputError when there is not one whole sample.
    """

    def __init__(self, prepared: PreparedData, seq_len: int, samples: int = 0) -> None:
        self._seq_len = seq_len
        self._document_marks = prepared.document_marks
        self._shards = [open_tokens(source.validation) for source in prepared.sources if source.validation]
        self._ends = np.cumsum([shards.windows(seq_len) for shards in self._shards], dtype=np.int64)
        total = int(self._ends[-1]) if len(self._ends) else 0
        if not total:
            got, fix = "no whole held-out sample", "raise data.validation_fraction, or leave validation off"
            raise InputError(Problem("", "validation.enable", got, f"more than {seq_len} held-out tokens", fix))
        self.n_samples = min(samples or total, total)
        self.token_bytes = torch.from_numpy(prepared.tokenizer.token_bytes)

    def batches(self, data_rank: int, data_size: int, local_batch_size: int) -> Iterator[Batch]:
        """This rank's part, in batches of local_batch_size rows, or as many as it has if these are fewer; of one shape
        and as many on every rank, padded with IGNORED labels."""
        local_batch_size = min(local_batch_size, -(-self.n_samples // data_size))
        rows = data_size * local_batch_size
        for start in range(data_rank * local_batch_size, -(-self.n_samples // rows) * rows, rows):
            numbers = range(start, min(start + local_batch_size, self.n_samples))
            windows = np.zeros((local_batch_size, self._seq_len + 1), dtype=np.int64)
            for row, number in enumerate(numbers):
                source = int(np.searchsorted(self._ends, number, side="right"))
                first = int(self._ends[source - 1]) if source else 0
                windows[row] = self._shards[source].window(number - first, self._seq_len)
            sample_ids = np.full(local_batch_size, -1, dtype=np.int64)
            sample_ids[: len(numbers)] = numbers
            batch = _batch(windows, sample_ids, self._document_marks)
            batch["labels"][len(numbers) :] = IGNORED
            yield batch


def _batch(windows: np.ndarray, sample_ids: np.ndarray, document_marks: tuple[int, int] | None) -> Batch:
    """windows int64 [B, S + 1] -> a batch whose labels are its tokens moved by one."""
    both = torch.from_numpy(windows)
    batch = {
        "tokens": both[:, :-1].contiguous(),
        "labels": both[:, 1:].clone(),  # contiguous() of one row would be a view, with some of the tokens' memory
        "sample_ids": torch.from_numpy(sample_ids),
    }
    if document_marks is not None:
        # Of the last label too: with one id for both marks it may say whether the last token starts a document.
        batch["documents"] = torch.from_numpy(document_numbers(windows, *document_marks))[:, :-1].contiguous()
    return batch


class _Steps(Sampler[list[int]]):
    """The sample numbers of one rank, a list for every step; endless when steps is None."""

    def __init__(self, first: int, share: int, stride: int, steps: int | None) -> None:
        self._first, self._share, self._stride, self._steps = first, share, stride, steps

    def __iter__(self) -> Iterator[list[int]]:
        step = 0
        while self._steps is None or step < self._steps:
            start = self._first + step * self._stride
            yield list(range(start, start + self._share))
            step += 1


class _Samples(Dataset[Batch]):
    """Reads samples by their numbers; a step's at once, since numpy locates many as fast as one."""

    def __init__(
        self,
        shards: Sequence[TokenArray],
        order: SampleOrder,
        seq_len: int,
        document_marks: tuple[int, int] | None,
    ) -> None:
        self._shards, self._order, self._seq_len, self._document_marks = shards, order, seq_len, document_marks

    def __getitems__(self, numbers: list[int]) -> Batch:
        sample_ids = np.array(numbers, dtype=np.int64)
        sources, _, windows = self._order.locate_many(sample_ids)
        rows = np.empty((len(numbers), self._seq_len + 1), dtype=np.int64)
        for row, (source, window) in enumerate(zip(sources.tolist(), windows.tolist(), strict=True)):
            rows[row] = self._shards[source].window(window, self._seq_len)
        return _batch(rows, sample_ids, self._document_marks)


class _Microbatches:
    """Cuts a rank's samples of one step into batches of local_batch_size."""

    def __init__(self, local_batch_size: int) -> None:
        self._size = local_batch_size

    def __call__(self, step: Batch) -> list[Batch]:
        chunks = {key: value.split(self._size) for key, value in step.items()}
        return [dict(zip(chunks, parts, strict=True)) for parts in zip(*chunks.values(), strict=True)]


def _heed_only_the_parent(worker: int) -> None:
    heed_only_the_parent()
