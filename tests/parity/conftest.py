"""Text and reference runs, made once for all parity tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity import harness


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.make_text(tmp_path_factory.mktemp("parity") / "text")


@pytest.fixture(scope="session")
def reference(text: Path) -> harness.Record:
    return harness.run(harness.ONE_PROCESS, text)[0]


@pytest.fixture(scope="session")
def tied_reference(text: Path) -> harness.Record:
    return harness.run(harness.ONE_PROCESS, text, sections=harness.TIED)[0]


@pytest.fixture(scope="session")
def deep_reference(text: Path) -> harness.Record:
    return harness.run(harness.ONE_PROCESS, text, sections=harness.DEEP)[0]


@pytest.fixture(scope="session")
def deep_tied_reference(text: Path) -> harness.Record:
    return harness.run(harness.ONE_PROCESS, text, sections=harness.merge(harness.DEEP, harness.TIED))[0]


@pytest.fixture(scope="session")
def masked_reference(text: Path) -> harness.Record:
    return harness.run(harness.ONE_PROCESS, text, sections=harness.MASKED)[0]


@pytest.fixture(scope="session")
def one_process(text: Path) -> Callable[[harness.Sections], harness.Record]:
    """The one-process run with these sections over BASE, made when first asked for."""
    made: dict[str, harness.Record] = {}

    def run(sections: harness.Sections) -> harness.Record:
        key = repr(sections)
        if key not in made:
            made[key] = harness.run(harness.ONE_PROCESS, text, sections=sections)[0]
        return made[key]

    return run
