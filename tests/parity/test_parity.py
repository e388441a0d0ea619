"""Promise 1: whatever the layout, initial weights, samples, losses, norms, gradients and validation are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from tests.harness.training import merge
from tests.parity.conftest import OneProcess
from tests.parity.harness import run
from tests.parity.layouts import LAYOUTS, STEPS
from tests.parity.moe_layouts import ALL_LAYOUTS
from titanlite.verify.record import Record, deviations, worst


def test_reference_is_a_real_run(reference: Record) -> None:
    assert len(reference.losses) == STEPS
    assert reference.losses[-1] < reference.losses[0] - 0.5, "it learns"
    assert min(reference.norms) > 0.1, "the norm is clipped in every step"
    ids = [number for step in reference.sample_ids for number in step]
    assert ids == list(range(STEPS * 24)), "samples are consumed in order, none twice"
    assert list(reference.validation) == [5, 10] and reference.validation[5] != reference.validation[10]


@pytest.mark.parametrize("name", ALL_LAYOUTS)
def test_layout_changes_nothing(name: str, text: Path, one_process: OneProcess) -> None:
    layout, sections = ALL_LAYOUTS[name]
    records, reference = run(layout, text, sections=sections), one_process(sections)
    print(name, worst(records, reference))
    assert not deviations(records, reference)


def test_document_masks_change_the_run(reference: Record, masked_reference: Record) -> None:
    """All else is the same, so that the comparison above is one of masks."""
    assert masked_reference.init_hash == reference.init_hash and masked_reference.sample_ids == reference.sample_ids
    assert all(a != b for a, b in zip(masked_reference.losses, reference.losses, strict=True))
    assert worst([masked_reference], reference)["gradient"] > 1e-3


def test_loader_processes_change_nothing(text: Path, reference: Record) -> None:
    records = run(LAYOUTS["fsdp 2, accumulation 2"][0], text, sections={"data": {"num_workers": 1}})
    assert not deviations(records, reference)


def test_the_vocabulary_padding_changes_nothing(text: Path, reference: Record) -> None:
    """Only the padding rows themselves differ, so gradients are compared on the real rows."""
    records = run(LAYOUTS["fsdp 2"][0], text, sections={"model": {"vocab_pad_multiple": 128}})
    assert records[0].gradients["output.weight"].shape[0] == 384
    assert reference.gradients["output.weight"].shape[0] == 301
    real = replace(reference, init_hash="", gradients=real_rows(reference.gradients))
    assert not deviations([replace(r, init_hash="", gradients=real_rows(r.gradients)) for r in records], real)


def real_rows(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    tables = ("embedding.weight", "output.weight")
    assert not any(gradients[name][300:].any() for name in tables), "padding rows have no gradient"
    return {name: gradient[:300] if name in tables else gradient for name, gradient in gradients.items()}


def test_bfloat16_layouts_agree_within_its_own_tolerance(text: Path) -> None:
    """Measured: losses within 2e-4, norms within 1e-2, gradients within 1.1e-2 of one process, over ten steps; the
    bounds are five times that."""
    bfloat16 = {"training": {"mixed_precision_param": "bfloat16"}}
    references: dict[str, Record] = {}
    for name in ("ddp 2", "fsdp 2, accumulation 4", "hsdp 2x2, zero 1, accumulation 2", "cp 2", "pp 2", "tp 2"):
        layout, other = LAYOUTS[name]
        sections = merge(other, bfloat16)
        key = repr(sections)
        if key not in references:
            references[key] = run(LAYOUTS["accumulation 2"][0], text, sections=sections)[0]
        records = run(layout, text, sections=sections)
        found = worst(records, references[key])
        print(name, found)
        assert {record.init_hash for record in records} == {references[key].init_hash}
        assert found["loss"] < 1e-3 and found["norm"] < 5e-2 and found["gradient"] < 5e-2, (name, found)
