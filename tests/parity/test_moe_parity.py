"""Promise 1 for models with experts: whatever the layout, every token goes to the same experts and all else follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.conftest import OneProcess
from tests.parity.harness import run
from tests.parity.layouts import STEPS
from tests.parity.moe_layouts import DEEPSEEK, MOE_LAYOUTS, SOFTMAX
from titanlite.verify.record import deviations, worst


@pytest.mark.parametrize("sections", [SOFTMAX, DEEPSEEK], ids=["softmax", "deepseek"])
def test_reference_routes(sections: dict, one_process: OneProcess) -> None:
    record = one_process(sections)
    moe = sections["model"]["moe"]
    loads = torch.stack(record.expert_loads)
    assert loads.shape == (STEPS, sections["model"]["n_layers"], 8)
    first = moe.get("first_k_dense", 0)
    assert not loads[:, :first].any() and (loads[:, first:].sum(dim=2) == 12 * 16 * 2).all(), "nothing is dropped"
    assert (loads[1:] != loads[:-1]).any(dim=2)[:, first:].all(), "choices change from step to step"


@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_layout_changes_nothing(name: str, text: Path, one_process: OneProcess) -> None:
    layout, sections = MOE_LAYOUTS[name]
    records, reference = run(layout, text, sections=sections), one_process(sections)
    print(name, worst(records, reference))
    assert not deviations(records, reference)
