"""The parity comparison must notice every planted fault; that it finds nothing in clean runs is test_parity's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.training import merge
from tests.parity.harness import DEEP, DEEP_LAYOUTS, LAYOUTS, MASKED, TIED, deviations, run
from tests.parity.sabotage import FAULTS

SECTIONS = {"": {}, "masked": MASKED, "tied": TIED, "deep": DEEP, "deep tied": merge(DEEP, TIED)}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, text: Path, request: pytest.FixtureRequest) -> None:
    fault = FAULTS[name]
    clean = request.getfixturevalue(f"{fault.kind} reference".strip().replace(" ", "_"))
    layout = (DEEP_LAYOUTS if fault.kind.startswith("deep") else LAYOUTS)[fault.layout]
    found = deviations(run(layout, text, sections=SECTIONS[fault.kind], fault=name), clean)
    print(name, found[:2])
    assert found, f"{name} went unnoticed"
