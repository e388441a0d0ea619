"""What is of models with experts alone: that they route, and bfloat16. Their layouts are among test_parity's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.training import merge
from tests.parity.conftest import OneProcess
from tests.parity.harness import run
from tests.parity.layouts import ONE_PROCESS, STEPS
from tests.parity.moe_layouts import DEEPSEEK, MOE_LAYOUTS, SOFTMAX
from titanlite.verify.record import Record, largest_of_series, worst


@pytest.mark.parametrize("sections", [SOFTMAX, DEEPSEEK], ids=["softmax", "deepseek"])
def test_reference_routes(sections: dict, one_process: OneProcess) -> None:
    record = one_process(sections)
    moe = sections["model"]["moe"]
    loads = torch.stack(record.expert_loads)
    assert loads.shape == (STEPS, sections["model"]["n_layers"], 8)
    first = moe.get("first_k_dense", 0)
    assert not loads[:, :first].any() and (loads[:, first:].sum(dim=2) == 12 * 16 * 2).all(), "nothing is dropped"
    assert (loads[1:] != loads[:-1]).any(dim=2)[:, first:].all(), "choices change from step to step"


def test_bfloat16_layouts_agree_within_its_own_tolerance(text: Path) -> None:
    """Rounding sends some tokens to other experts, so choices are not compared, nor gradients, nor
    norms of later steps (within 0.16). Measured: losses of ten steps within 6.3e-4, the first norm within 1.9e-4; the
    bounds are five times that. With float32 gradients between ranks, and with bfloat16 ones."""
    references: dict[str, Record] = {}
    for reduce, name in (
        ("float32", "softmax: ep 2"),
        ("float32", "softmax: ep 2 of tp 2, accumulation 4"),
        ("bfloat16", "softmax: ep 2 of fsdp 6"),
        ("bfloat16", "softmax: ep 2 of fsdp 4, zero 1, accumulation 3"),
    ):
        layout, other = MOE_LAYOUTS[name]
        narrow = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": reduce}
        sections = merge(other, {"training": narrow})
        if reduce not in references:
            references[reduce] = run(ONE_PROCESS, text, sections=sections)[0]
        records = run(layout, text, sections=sections)
        reference = references[reduce]
        loss = max(largest_of_series(record.losses, reference.losses) for record in records)
        norm = max(largest_of_series(record.norms[:1], reference.norms[:1]) for record in records)
        found = {"loss": loss, "norm": norm, "later norms": worst(records, reference)["norm"]}
        print(name, reduce, found)
        assert {record.init_hash for record in records} == {reference.init_hash}
        assert loss < 3e-3 and norm < 1e-3, (name, found)
