"""Loading a checkpoint runs no code from it, whatever its .metadata holds."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from titanlite.checkpoint import dcp
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.storage import CheckpointError
from titanlite.config.schema import CheckpointConfig
from titanlite.parallel.runtime import ObjectChannel

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensors() -> dict[str, torch.Tensor]:
    return {f"model.{dtype}": torch.ones(3, 2).to(dtype) for dtype in DTYPES}


@pytest.fixture
def step(tmp_path: Path, one_rank: Any) -> Path:
    manager = CheckpointManager(CheckpointConfig(), tmp_path, one_rank)
    manager.save(1, tensors(), {"train_state": {}, "layout": {}, "config": {}}, wait=True)
    return tmp_path / "step-00000001"


class Runs:
    """Touches a file when it is unpickled."""

    def __init__(self, sign: Path, function: Any = os.mkdir) -> None:
        self.call = (function, (str(sign),))

    def __reduce__(self) -> Any:
        return self.call


def refused(step: Path, metadata: Any) -> str:
    """The message, the same from both ways to the metadata: the check before a load and the load itself."""
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (step / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError) as first:
        dcp.read_metadata(step)
    with pytest.raises(CheckpointError) as second:
        dcp.read_tensors(step, tensors(), ObjectChannel(None))
    assert str(second.value) == f"loading {step} failed: rank 0: {first.value}"
    return str(first.value)


def test_all_that_a_save_writes_is_read(step: Path) -> None:
    metadata = dcp.read_metadata(step)
    assert dcp.saved_tensors(metadata) == {key: ((3, 2), tensor.dtype) for key, tensor in tensors().items()}
    with (step / ".metadata").open("rb") as file:
        assert metadata == pickle.load(file)


@pytest.mark.parametrize("where", ["alone", "state_dict_metadata", "planner_data", "storage_data", "storage_meta"])
def test_a_crafted_metadata_runs_nothing(step: Path, tmp_path: Path, where: str) -> None:
    good, sign = dcp.read_metadata(step), tmp_path / "was-run"
    if where == "alone":
        crafted: Any = Runs(sign)
    elif where == "state_dict_metadata":
        good.state_dict_metadata["model.x"] = Runs(sign)  # type: ignore[assignment]
        crafted = good
    else:
        setattr(good, where, Runs(sign))
        crafted = good
    message = refused(step, crafted)
    assert f"names {os.mkdir.__module__}.mkdir" in message
    assert not sign.exists()
    pickle.loads(pickle.dumps(crafted))
    assert sign.exists(), "what was refused would have run"


@pytest.mark.parametrize(
    "name",
    [
        ("torch", "load"),
        ("torch", "float32.__class__"),
        ("torch", "serialization.load"),
        ("builtins", "eval"),
        ("torch.serialization", "load"),
        ("pathlib", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
    ],
)
def test_no_other_name_of_an_allowed_module_is_given(step: Path, name: tuple[str, str]) -> None:
    """As protocol 4 names globals, dotted ones included."""
    text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in name)
    assert f"names {name[0]}.{name[1]}, which describes no tensor" in refused(step, b"\x80\x04" + text + b"\x93.")


def test_an_entry_of_bytes_is_refused(step: Path, tmp_path: Path) -> None:
    """DCP would unpickle those bytes without restriction: see that it does, and that here nothing comes of it."""
    sign = tmp_path / "was-run"
    save({"model.a": Runs(sign)}, storage_writer=filesystem.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    with pytest.raises(CheckpointError, match=r"names .*BytesStorageMetadata"):
        dcp.read_tensors(tmp_path / "theirs", {"model.a": torch.zeros(2)}, ObjectChannel(None))
    assert not sign.exists()
    message = refused(step, Metadata({"model.a": BytesStorageMetadata()}))
    assert "torch.distributed.checkpoint.metadata.BytesStorageMetadata" in message


def test_dcps_own_unpickling_is_never_reached(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*args: Any) -> None:
        raise AssertionError("an unrestricted pickle.load")

    monkeypatch.setattr(pickle, "load", reached)
    got = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    dcp.read_tensors(step, got, ObjectChannel(None))
    assert all(torch.equal(got[key], tensor) for key, tensor in tensors().items())


def test_what_is_no_metadata_is_refused(step: Path) -> None:
    for wrong in (torch.Size([2]), Metadata({"model.a": torch.Size([2])})):  # type: ignore[dict-item]
        assert "not the metadata of a checkpoint" in refused(step, wrong)
    buffer = io.BytesIO()
    torch.save({}, buffer)
    for data in (buffer.getvalue(), b"", b"\x80\x04.", b"garbage"):
        assert "not the metadata of a checkpoint (" in refused(step, data)


@pytest.mark.parametrize("path", ["../step-00000002/__0_0.distcp", "/etc/passwd", ".metadata", "", "__0_0.distcp/"])
def test_metadata_leads_nowhere_but_to_the_folders_tensor_files(step: Path, path: str) -> None:
    metadata = dcp.read_metadata(step)
    next(iter(metadata.storage_data.values())).relative_path = path
    assert "which is no tensor file of a checkpoint" in refused(step, metadata)


def test_transformed_tensors_and_other_places_are_refused(step: Path) -> None:
    metadata = dcp.read_metadata(step)
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]
    assert "(transformed), which is no tensor file" in refused(step, metadata)
    for wrong in (None, {"a": 1}):
        metadata.storage_data = wrong
        assert "not the metadata of a checkpoint" in refused(step, metadata)


def test_a_tensor_file_with_a_payload_runs_nothing(step: Path, tmp_path: Path) -> None:
    """torch.load of what is in the files is restricted, too."""
    sign = tmp_path / "was-run"
    metadata = dcp.read_metadata(step)
    place = next(iter(metadata.storage_data.values()))
    torch.save(Runs(sign), step / place.relative_path)
    place.offset, place.length = 0, (step / place.relative_path).stat().st_size
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"(?s)loading .*{os.mkdir.__module__}.mkdir"):
        dcp.read_tensors(step, tensors(), ObjectChannel(None))
    assert not sign.exists()
    torch.load(step / place.relative_path, weights_only=False)
    assert sign.exists(), "what was refused would have run"
