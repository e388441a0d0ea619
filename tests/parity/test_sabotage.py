"""The parity comparison must notice every planted fault; that it finds nothing in clean runs is test_parity's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.harness import LAYOUTS, MASKED, TP_LAYOUTS, Record, Sections, deviations, run
from tests.parity.sabotage import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, text: Path, one_process: Callable[[Sections], Record]) -> None:
    fault = FAULTS[name]
    if fault.layout in TP_LAYOUTS:
        layout, sections = TP_LAYOUTS[fault.layout]
    else:
        layout, sections = LAYOUTS[fault.layout], MASKED if fault.masked else {}
    found = deviations(run(layout, text, sections=sections, fault=name), one_process(sections))
    print(name, found[:2])
    assert found, f"{name} went unnoticed"
