"""The parity comparison must notice every planted fault, and say what is wrong; that it finds nothing in clean runs is
test_parity's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.conftest import OneProcess
from tests.parity.harness import run
from tests.parity.moe_layouts import ALL_LAYOUTS
from tests.parity.sabotage import FAULTS
from titanlite.verify.record import deviations


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, text: Path, one_process: OneProcess) -> None:
    fault = FAULTS[name]
    layout, sections = ALL_LAYOUTS[fault.layout]
    found = deviations(run(layout, text, sections=sections, fault=name), one_process(sections))
    print(name, found[:2])
    assert found, f"{name} went unnoticed"
    first = {deviation.what for deviation in found if deviation.step == found[0].step}
    assert fault.cause in first, f"{name} was noticed for another reason: {found}"
