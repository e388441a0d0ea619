"""The parity comparison must notice every planted fault; that it finds nothing in clean runs is test_parity's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.conftest import OneProcess
from tests.parity.harness import run
from tests.parity.layouts import LAYOUTS
from tests.parity.moe_layouts import MOE_LAYOUTS
from tests.parity.sabotage import FAULTS
from titanlite.verify.record import deviations


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, text: Path, one_process: OneProcess) -> None:
    layout, sections = (LAYOUTS | MOE_LAYOUTS)[FAULTS[name].layout]
    found = deviations(run(layout, text, sections=sections, fault=name), one_process(sections))
    print(name, found[:2])
    assert found, f"{name} went unnoticed"
