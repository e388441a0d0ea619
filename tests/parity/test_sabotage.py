"""The parity comparison must notice every planted fault; that it finds nothing in clean runs is test_parity's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.training import merge
from tests.parity.harness import DEEP, DEEP_LAYOUTS, LAYOUTS, MASKED, SECTIONED_LAYOUTS, TIED, Sections, run
from tests.parity.moe_layouts import MOE_LAYOUTS
from tests.parity.sabotage import FAULTS
from titanlite.verify.record import Record, deviations

SECTIONS = {"": {}, "masked": MASKED, "tied": TIED, "deep": DEEP, "deep tied": merge(DEEP, TIED)}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, text: Path, one_process: Callable[[Sections], Record]) -> None:
    fault = FAULTS[name]
    if fault.layout in SECTIONED_LAYOUTS | MOE_LAYOUTS:
        layout, sections = (SECTIONED_LAYOUTS | MOE_LAYOUTS)[fault.layout]
    else:
        layout = (DEEP_LAYOUTS if fault.kind.startswith("deep") else LAYOUTS)[fault.layout]
        sections = SECTIONS[fault.kind]
    found = deviations(run(layout, text, sections=sections, fault=name), one_process(sections))
    print(name, found[:2])
    assert found, f"{name} went unnoticed"
