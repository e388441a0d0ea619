"""Text and reference runs, made once for all parity tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity import harness
from tests.parity.layouts import MASKED, ONE_PROCESS, Sections
from titanlite.verify.record import Record

OneProcess = Callable[[Sections], Record]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.make_text(tmp_path_factory.mktemp("parity") / "text")


@pytest.fixture(scope="session")
def one_process(text: Path) -> OneProcess:
    """The one-process run with these sections over BASE, made when first asked for."""
    made: dict[str, Record] = {}

    def run(sections: Sections) -> Record:
        key = repr(sections)
        if key not in made:
            made[key] = harness.run(ONE_PROCESS, text, sections=sections)[0]
        return made[key]

    return run


@pytest.fixture(scope="session")
def reference(one_process: OneProcess) -> Record:
    return one_process({})


@pytest.fixture(scope="session")
def masked_reference(one_process: OneProcess) -> Record:
    return one_process(MASKED)
