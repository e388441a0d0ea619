"""A run that is stopped and goes on under another layout, again and again, is the unbroken run of one process.

At each change every weight, buffer and moment is bit for bit the one that was saved; losses, norms, learning rates,
samples, tokens and choices of experts are those of the one process, to the promise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.elastic import BATCH, DENSE, EXPERTS, Done, make_text, train
from tests.harness.training import merge
from tests.parity.layouts import BASE, ONE_PROCESS, Layout, Sections, _layout, _microbatches
from titanlite import trainer as trainer_module
from titanlite.checkpoint import dcp
from titanlite.data.shards import TokenShards
from titanlite.optim.optimizer import AdamW
from titanlite.optim.schedule import lr_at
from titanlite.trainer import Trainer
from titanlite.verify.promise import LOSS_TOLERANCE, NORM_TOLERANCE
from titanlite.verify.record import Record, largest_of_series

STEPS_EACH, STEPS = 2, 16
CHAINS: dict[str, tuple[Sections, dict[str, Layout]]] = {
    "dense": (
        DENSE,
        {
            "dp 4": _layout(dp_shard=4),
            "dp 3": _layout(dp_shard=3),
            "tp 2 x pp 2": _layout(tp=2, pp=2, pp_microbatches=4),
            "cp 2 x fsdp 2": _layout(cp=2, dp_shard=2),
            "one process": ONE_PROCESS,
            "dp_replicate 2": _layout(_microbatches(3), dp_replicate=2),
            "pp 2, ZBVZeroBubble": _layout(pp=2, pp_schedule="ZBVZeroBubble", pp_microbatches=4),
        },
    ),
    "experts": (
        EXPERTS,
        {
            "dp 4": _layout(dp_shard=4),
            "dp 3": _layout(dp_shard=3),
            "tp 2 x pp 2": _layout(tp=2, pp=2, pp_microbatches=4),
            "cp 2 x ep 4": _layout(cp=2, dp_shard=2, ep=4),
            "one process": ONE_PROCESS,
            "dp_replicate 2": _layout(_microbatches(3), dp_replicate=2),
            "hsdp 2x2 x ep 2, zero 2": _layout(_microbatches(1), dp_replicate=2, dp_shard=2, ep=2, zero_stage=2),
            "pp 2 x ep 2, InterleavedZeroBubble": _layout(
                pp=2, dp_shard=2, ep=2, pp_schedule="InterleavedZeroBubble", pp_microbatches=2
            ),
        },
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("elastic") / "text")


OneProcess = Callable[[Sections], Record]


@pytest.fixture(scope="module")
def one_process(text: Path, tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """The unbroken run, whose samples are those that the order names."""
    made: dict[str, Record] = {}

    def run(sections: Sections) -> Record:
        key = repr(sections)
        if key not in made:
            (done,) = train(sections, ONE_PROCESS, text, tmp_path_factory.mktemp("unbroken"), STEPS)
            ids = [number for step in done.record.sample_ids for number in step]
            assert ids == list(range(STEPS * BATCH)), "every sample once, in order"
            assert torch.cat(done.record.tokens).tolist() == in_order(done)
            made[key] = done.record
        return made[key]

    return run


def in_order(done: Done) -> list[list[int]]:
    """The tokens of all samples, by what the data's record says."""
    opened = [TokenShards(path) for path in done.shards]
    sources, epochs, windows = done.data.order().locate_many(np.arange(STEPS * BATCH))
    assert epochs.max() > 0, "a source is read more than once"
    length = done.data.seq_len
    return [opened[s].window(w, length)[:-1].tolist() for s, w in zip(sources.tolist(), windows.tolist(), strict=True)]


def differences(ranks: Sequence[Done], reference: Record, start: int, saved: str) -> set[str]:
    """In what the ranks, which went on after `start` steps from the state with the hash `saved`, left the one process's
    way."""
    found = set()
    share = BATCH // ranks[0].record.data_size
    for done in ranks:
        mine = done.record
        steps = slice(start, start + len(mine.losses))
        rows = slice(mine.data_rank * share, (mine.data_rank + 1) * share)
        same = {
            "state": done.found == saved and done.left == ranks[0].left,
            "loss": _close(mine.losses, reference.losses[steps], LOSS_TOLERANCE),
            "norm": _close(mine.norms, reference.norms[steps], NORM_TOLERANCE),
            "lr": mine.lrs == reference.lrs[steps],
            "samples": mine.sample_ids == [ids[rows] for ids in reference.sample_ids[steps]]
            and all(map(torch.equal, mine.tokens, [tokens[rows] for tokens in reference.tokens[steps]])),
            "experts": all(map(torch.equal, mine.expert_loads, reference.expert_loads[steps])),
        }
        found |= {what for what, is_same in same.items() if not is_same}
    if {done.record.data_rank for done in ranks} != set(range(ranks[0].record.data_size)):
        found.add("samples")
    return found


def _close(mine: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance * abs(b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_layouts_is_the_unbroken_run(name: str, text: Path, tmp_path: Path, one_process: OneProcess) -> None:
    sections, layouts = CHAINS[name]
    reference = one_process(sections)
    saved = ""
    for number, (layout_name, layout) in enumerate(layouts.items()):
        start = number * STEPS_EACH
        ranks = train(sections, layout, text, tmp_path, start + STEPS_EACH)
        assert len(ranks[0].record.losses) == STEPS_EACH
        mine, other = ranks[0].record, reference
        steps = slice(start, start + STEPS_EACH)
        print(
            f"{layout_name}: loss {largest_of_series(mine.losses, other.losses[steps]):.1e}, "
            f"norm {largest_of_series(mine.norms, other.norms[steps]):.1e}"
        )
        assert not differences(ranks, reference, start, saved or ranks[0].found), layout_name
        saved = ranks[0].left
    length = merge(BASE, sections)["training"]["seq_len"]
    done = len(layouts) * STEPS_EACH
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["samples"], row["tokens"]) for row in rows] == [
        (step, step * BATCH, step * BATCH * length) for step in range(1, done + 1)
    ]


def test_the_padding_of_the_vocabulary_may_change_with_the_layout(
    text: Path, tmp_path: Path, one_process: OneProcess
) -> None:
    """From 259 rows to 272 over two ranks, to 257, with their moments; all else as in a chain."""
    before: dict[str, torch.Tensor] = {}
    for number, (multiple, layout) in enumerate(((7, ONE_PROCESS), (16, _layout(tp=2)), (1, _layout(dp_shard=2)))):
        start = number * STEPS_EACH
        sections = merge(DENSE, {"model": {"vocab_pad_multiple": multiple}})
        ranks = train(sections, layout, text, tmp_path, start + STEPS_EACH)
        assert differences(ranks, one_process(DENSE), start, ranks[0].found) == set()
        for key, tensor in before.items():
            found = ranks[0].state[key]
            if "embedding" in key:
                assert tensor[:257].any() and not tensor[257:].any() and not found[257:].any()
                assert torch.equal(found[:257], tensor[:257]), key
            else:
                assert torch.equal(found, tensor), key
        if number < 2:
            copy = shutil.copytree(tmp_path / "run", tmp_path / f"{number}/run").parent
            (one,) = train(sections, ONE_PROCESS, text, copy, start + STEPS_EACH + 1)
            before = one.state
            assert any("exp_avg_sq" in key for key in before)


# ---- the comparison sees what is wrong


def _without(part: str) -> Callable[[], None]:
    """Tensors whose names have this in them keep their first values."""

    def plant() -> None:
        read = dcp.read_tensors
        dcp.read_tensors = lambda folder, tensors, *others: read(
            folder, {key: tensor for key, tensor in tensors.items() if part not in key}, *others
        )

    return plant


def _moved_samples(by: int) -> Callable[[], None]:
    def plant() -> None:
        read = Trainer._read_resume_point

        def then_move(self: Trainer) -> None:
            read(self)
            self.state.samples += by

        Trainer._read_resume_point = then_move  # type: ignore[method-assign]

    return plant


def _schedule_anew() -> None:
    trainer_module.lr_at = lambda step, *args: lr_at(step - STEPS_EACH, *args)


def _bias_correction_anew() -> None:
    AdamW.n_updates = property(lambda self: 0, lambda self, value: None)  # type: ignore


# name -> how to plant it, and what must be seen
FAULTS: dict[str, tuple[Callable[[], None], set[str]]] = {
    "no fault": (lambda: None, set()),
    "moments lost": (_without(".exp_avg"), {"state", "loss", "norm"}),
    "second moments lost": (_without(".exp_avg_sq"), {"state", "loss"}),
    "biases of the experts lost": (_without("expert_bias"), {"state"}),
    "samples anew": (_moved_samples(-STEPS_EACH * BATCH), {"samples", "loss"}),
    "a sample left out": (_moved_samples(1), {"samples", "loss"}),
    "schedule anew": (_schedule_anew, {"lr", "loss"}),
    "bias correction anew": (_bias_correction_anew, {"loss"}),
}


def _plant(name: str) -> None:
    FAULTS[name][0]()


@pytest.fixture(scope="module")
def started(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The first steps of the experts, by one process, and the hash of its state."""
    folder = tmp_path_factory.mktemp("started") / "run"
    (done,) = train(EXPERTS, ONE_PROCESS, text, folder, STEPS_EACH)
    return folder, done.left


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_going_on_is_seen(
    name: str, started: tuple[Path, str], text: Path, tmp_path: Path, one_process: OneProcess
) -> None:
    folder, saved = started
    shutil.copytree(folder, tmp_path / "run")
    ranks = train(EXPERTS, ONE_PROCESS, text, tmp_path / "run", 2 * STEPS_EACH, partial(_plant, name))
    found = differences(ranks, one_process(EXPERTS), STEPS_EACH, saved)
    wanted = FAULTS[name][1]
    assert found >= wanted and bool(found) is bool(wanted), found
