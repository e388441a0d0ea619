"""On CUDA, in fresh processes: the run of one GPU, and of all of them, against the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.distributed import run_spawned
from tests.harness.training import merge
from tests.parity.harness import BASE, ONE_PROCESS, STEPS, Record, _record, data_section, make_text, run, worst
from titanlite.config.schema import RunConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("gpu") / "text")


@pytest.fixture(scope="module")
def reference(text: Path) -> Record:
    return run(ONE_PROCESS, text)[0]


def on_cuda(text: Path, world_size: int, **training: object) -> list[Record]:
    data = {"tokenizer": {"path": str(text / "tokenizer.model")}, "data": data_section(text)}
    sections = merge(BASE, data, {"run": {"device": "cuda"}, "training": training})
    return run_spawned(_record, world_size, sections, "", run=RunConfig(device="cuda"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_float32_on_cuda_follows_the_cpu(world_size: int, text: Path, reference: Record) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    records = on_cuda(text, world_size)
    assert len(records[0].losses) == STEPS
    found = worst(records, reference)
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4, found


def test_bfloat16_on_cuda_learns(text: Path, reference: Record) -> None:
    record = on_cuda(text, 1, mixed_precision_param="bfloat16")[0]
    assert record.losses[0] == pytest.approx(reference.losses[0], rel=1e-2)
    assert record.losses[-1] == pytest.approx(reference.losses[-1], rel=5e-2)
