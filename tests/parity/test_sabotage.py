"""The parity comparison must notice every planted fault; that it finds nothing in clean runs is test_parity's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.harness import LAYOUTS, MASKED, Record, deviations, run
from tests.parity.sabotage import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, text: Path, reference: Record, masked_reference: Record) -> None:
    fault = FAULTS[name]
    clean, sections = (masked_reference, MASKED) if fault.masked else (reference, {})
    found = deviations(run(LAYOUTS[fault.layout], text, sections=sections, fault=name), clean)
    print(name, found[:2])
    assert found, f"{name} went unnoticed"
