"""On CUDA, in fresh processes: the run of one GPU, and of all of them, against the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness.distributed import run_spawned
from tests.harness.training import merge
from tests.parity.harness import (
    BASE,
    MASKED,
    ONE_PROCESS,
    STEPS,
    Record,
    Sections,
    _record,
    data_section,
    make_text,
    run,
    worst,
)
from tests.unit.model.helpers import difference
from tests.unit.model.test_document_mask import attended, heads, numbers
from titanlite.config.schema import RunConfig
from titanlite.model.attention import document_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("gpu") / "text")


@pytest.fixture(scope="module")
def reference(text: Path) -> Record:
    return run(ONE_PROCESS, text)[0]


def on_cuda(text: Path, world_size: int, more: Sections | None = None, **training: object) -> list[Record]:
    data = {"tokenizer": {"path": str(text / "tokenizer.model")}, "data": data_section(text)}
    sections = merge(BASE, data, {"run": {"device": "cuda"}, "training": training}, more or {})
    return run_spawned(_record, world_size, sections, "", run=RunConfig(device="cuda"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_float32_on_cuda_follows_the_cpu(world_size: int, text: Path, reference: Record) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    records = on_cuda(text, world_size)
    assert len(records[0].losses) == STEPS
    found = worst(records, reference)
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4, found


def test_document_masks_on_cuda_follow_the_cpu(text: Path) -> None:
    found = worst(on_cuda(text, 1, MASKED), run(ONE_PROCESS, text, sections=MASKED)[0])
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4, found


@pytest.mark.parametrize("length", [640, 641])  # SDPA pads a mask whose rows are not a multiple of 16
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_a_fused_cuda_kernel_takes_the_document_mask(length: int, dtype: torch.dtype, tolerance: float) -> None:
    documents = numbers((length,), (600, length - 600))
    tensors = heads(2, length, 6, 2, dtype)
    wanted = attended(tensors, document_mask(documents, dtype))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):  # anything else raises
        got = attended([x.cuda() for x in tensors], document_mask(documents.cuda(), dtype))
    assert max(difference(a.cpu(), b) for a, b in zip(got, wanted, strict=True)) < tolerance


def test_bfloat16_on_cuda_learns(text: Path, reference: Record) -> None:
    record = on_cuda(text, 1, mixed_precision_param="bfloat16")[0]
    assert record.losses[0] == pytest.approx(reference.losses[0], rel=1e-2)
    assert record.losses[-1] == pytest.approx(reference.losses[-1], rel=5e-2)
