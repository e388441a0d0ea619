"""Checkpoints of real worlds: any layout to any other, one rank that fails, one that dies, saves under training."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.harness.distributed import WorkerFailed, run_distributed
from tests.harness.training import build, rank_batches, train_step
from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.storage import CheckpointError
from titanlite.config.problems import InputError
from titanlite.config.schema import CheckpointConfig, CommConfig, ParallelismConfig, RunConfig
from titanlite.parallel import runtime
from titanlite.parallel.whole import full_tensors

PARTS: dict[str, Any] = {"train_state": {}, "layout": {}, "config": {}}

# Nothing divides by 2, 3 and 4 alike; some have fewer rows than there are ranks.
SHAPES = {"model.a": (7, 5), "model.b": (2, 6), "model.c": (1,), "optimizer.a.exp_avg": (5,), "model.d": (12, 9)}

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "one": ((1,), ()),
    "ddp 2": ((2,), ()),
    "fsdp 2": ((2,), (Shard(0),)),
    "fsdp 3": ((3,), (Shard(0),)),
    "hsdp 2x2": ((2, 2), (Replicate(), Shard(0))),
    "rows x columns": ((2, 2), (Shard(0), Shard(1))),
}


def world_size(layout: str) -> int:
    return int(torch.tensor(LAYOUTS[layout][0]).prod())


def whole(value: float) -> dict[str, torch.Tensor]:
    """Every element of every tensor another number."""
    tensors = {}
    for k, (key, shape) in enumerate(SHAPES.items()):
        count = int(torch.tensor(shape).prod())
        tensors[key] = torch.arange(count, dtype=torch.float32).reshape(shape) + 1000.0 * k + 100000.0 * value
    return tensors


def laid_out(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    shape, placements = LAYOUTS[layout]
    if not placements:
        return tensors
    mesh = init_device_mesh("cpu", shape)
    columns = [place if place != Shard(1) else Shard(0) for place in placements]
    return {
        key: distribute_tensor(tensor, mesh, placements if tensor.dim() > 1 else columns)
        for key, tensor in tensors.items()
    }


def make_manager(folder: Path, said: Callable[[str], None] = lambda message: None, **keys: Any) -> CheckpointManager:
    keys = {"keep_latest_k": 0, **keys}
    ranks = runtime.start(CommConfig(), RunConfig(device="cpu"), ParallelismConfig())
    return CheckpointManager(CheckpointConfig(**keys), folder, ranks, report=said)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, tensor in full_tensors(got).items():
        assert torch.equal(tensor, expected[key]), key


# ---- any layout to any other


def save_layout(folder: Path, layout: str, mode: str) -> None:
    manager = make_manager(folder, async_mode=mode)
    manager.save(1, laid_out(whole(1), layout), PARTS)
    manager.finish()


def load_layouts(folders: list[Path], layout: str) -> None:
    for folder in folders:
        manager = make_manager(folder)
        path = manager.find_resume()
        assert path is not None
        tensors = laid_out({key: torch.full_like(tensor, -1.0) for key, tensor in whole(1).items()}, layout)
        manager.load(path, tensors)
        assert_same(tensors, whole(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of the same tensors from every layout."""
    folders = []
    for number, layout in enumerate(LAYOUTS):
        folders.append(tmp_path_factory.mktemp("saved") / layout.replace(" ", "-"))
        run_distributed(save_layout, world_size(layout), folders[-1], layout, "async" if number % 2 else "disabled")
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_other(saved: list[Path], layout: str) -> None:
    run_distributed(load_layouts, world_size(layout), saved, layout)


def test_replicas_are_written_once_and_by_turns(saved: list[Path]) -> None:
    count = sum(tensor.nbytes for tensor in whole(1).values())
    for folder, layout in zip(saved, LAYOUTS, strict=True):
        sizes = [path.stat().st_size for path in (folder / "step-00000001").glob("*.distcp")]
        pieces = len(SHAPES) * world_size(layout)
        assert sum(sizes) < count + 2048 * pieces, layout
        assert len(sizes) == world_size(layout) and min(sizes) > 0, layout


# ---- a trained model


def train_and_save(sections: Any, folder: Path) -> dict[str, torch.Tensor]:
    tensors, manager, step = model_tensors(sections, folder)
    for number in (1, 2):
        step(number)
    manager.save(2, tensors, PARTS)
    expected = full_tensors(tensors)
    step(3)  # in place on what is being saved
    manager.finish()
    return expected


def load_trained(sections: Any, folder: Path) -> dict[str, torch.Tensor]:
    tensors, manager, _ = model_tensors(sections, folder)
    path = manager.find_resume()
    assert path is not None
    manager.load(path, tensors)
    return full_tensors(tensors)


def model_tensors(
    sections: Any, folder: Path
) -> tuple[dict[str, torch.Tensor], CheckpointManager, Callable[[int], Any]]:
    config, ranks, model, optimizer = build(sections)
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter for name, parameter in model.parameters.items()}
    tensors |= {f"optimizer.{name}": state for name, state in optimizer.state_tensors().items()}
    manager = CheckpointManager(config.checkpoint, folder, ranks)
    return tensors, manager, lambda n: train_step(model, optimizer, ranks, rank_batches(config, ranks, n), config, n)


def test_trained_model_to_other_layouts(tmp_path: Path) -> None:
    def sections(**parallelism: int) -> Any:
        return {"parallelism": parallelism, "checkpoint": {"async_mode": "async"}}

    expected = run_distributed(train_and_save, 2, sections(dp_shard=2), tmp_path)[0]
    assert any(key.endswith("exp_avg_sq") for key in expected)
    for size, parallelism in ((1, {}), (3, {"dp_shard": 3}), (2, {"dp_replicate": 2}), (4, {"dp_replicate": 2})):
        for got in run_distributed(load_trained, size, sections(**parallelism), tmp_path):
            assert_same(got, expected)


# ---- a save under training


def save_while_training(folder: Path) -> list[str]:
    """Slow writes, tensors overwritten at once, and collectives of the training all the while."""
    said: list[str] = []
    manager = make_manager(folder, said.append, async_mode="async")
    write = dcp.write_tensors

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return write(*args)

    setattr(dcp, "write_tensors", slow)  # noqa: B010
    tensors = laid_out(whole(0), "fsdp 2")
    for step in (1, 2):
        for key, tensor in laid_out(whole(step), "fsdp 2").items():
            tensors[key].copy_(tensor)
        manager.save(step, tensors, PARTS)
        assert manager._pending is not None and not manager._pending.done()
        for tensor in tensors.values():
            tensor.fill_(-7.0)
        while True:  # all ranks leave at once
            done = torch.tensor(float(manager._pending.done()))
            dist.all_reduce(done)
            manager.poll()
            if done == 2:
                break
    manager.finish()
    for step in (1, 2):
        manager.load(folder / f"step-{step:08d}", tensors)
        assert_same(tensors, whole(step))
    return said


def test_async_save_never_sees_later_steps(tmp_path: Path) -> None:
    said = run_distributed(save_while_training, 2, tmp_path)
    assert [line.split()[2] for line in said[0] if "saved" in line] == ["step-00000001", "step-00000002"]
    assert said[1] == []  # only the main rank speaks


# ---- one rank fails


def save_with_a_failure(folder: Path, mode: str) -> tuple[str, str | None]:
    manager = make_manager(folder, async_mode=mode)
    tensors = laid_out(whole(1), "fsdp 2")
    manager.save(1, tensors, PARTS, wait=True)
    if dist.get_rank() == 0:
        (folder / "step-00000002" / "__1_0.distcp").mkdir(parents=True)  # rank 1 cannot write its file
    try:
        manager.save(2, tensors, PARTS, wait=True)
    except CheckpointError as error:
        newest = manager.find_resume()
        manager.save(3, tensors, PARTS, wait=True)  # life goes on
        return str(error), newest.name if newest else None
    raise AssertionError("the save did not fail")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_one_rank_that_cannot_write_fails_all_alike(tmp_path: Path, mode: str) -> None:
    results = run_distributed(save_with_a_failure, 2, tmp_path, mode)
    assert results[0] == results[1]
    message, newest = results[0]
    assert message.startswith("saving the checkpoint of step 2 failed: rank 1: IsADirectoryError")
    assert newest == "step-00000001"
    assert not (tmp_path / "step-00000002" / "manifest.json").exists()
    assert (tmp_path / "step-00000003" / "manifest.json").exists()


def save_and_die(folder: Path, stage: str) -> None:
    manager = make_manager(folder, async_mode="async")
    tensors = laid_out(whole(1), "fsdp 2")
    manager.save(1, tensors, PARTS, wait=True)
    work = getattr(dcp, stage)

    def dies(*args: Any) -> Any:
        if dist.get_rank() == (1 if stage == "write_tensors" else 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args)

    setattr(dcp, stage, dies)
    manager.save(2, laid_out(whole(2), "fsdp 2"), PARTS)
    manager.finish()


def resume_after_death(folder: Path) -> str:
    manager = make_manager(folder)
    path = manager.find_resume()
    assert path is not None
    tensors = laid_out(whole(-1), "fsdp 2")
    manager.load(path, tensors)
    assert_same(tensors, whole(1))
    manager.save(2, laid_out(whole(2), "fsdp 2"), PARTS, wait=True)  # over what the dead ones left
    manager.load(folder / "step-00000002", tensors)
    assert_same(tensors, whole(2))
    return path.name


@pytest.mark.parametrize("stage", ["write_tensors", "write_metadata"])
def test_a_rank_that_dies_in_a_save_loses_only_that_save(tmp_path: Path, stage: str) -> None:
    with pytest.raises(WorkerFailed):
        run_distributed(save_and_die, 2, tmp_path, stage)
    assert (tmp_path / "step-00000002").exists()
    assert run_distributed(resume_after_death, 2, tmp_path) == ["step-00000001"] * 2


# ---- ranks with tensors of their own, as pipeline stages have


def save_stages(folder: Path) -> list[str]:
    manager = make_manager(folder)
    rank = dist.get_rank()
    tensors = {f"model.stage{rank}.a": torch.full((3,), float(rank))}
    manager.save(1, tensors, PARTS)
    if rank == 1:
        tensors["model.stage1.b"] = torch.full((4,), 5.0)  # changes on one rank only: all have to plan anew
    manager.save(2, tensors, PARTS, wait=True)
    got = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    manager.load(folder / "step-00000002", got)
    for key in got:
        assert torch.equal(got[key], tensors[key]), key
    messages = []
    for wrong in ({}, {"model.other": torch.zeros(2)}, {"model.stage1.a": torch.zeros(2)}):
        try:
            manager.load(folder / "step-00000002", {**tensors, **wrong} if wrong or rank == 0 else {})
        except InputError as error:
            messages.append(str(error))
    return messages


def test_stages_and_what_they_lack(tmp_path: Path) -> None:
    results = run_distributed(save_stages, 2, tmp_path)
    assert results[0] == results[1]
    unexpected, missing, shape = results[0]
    assert "model.stage1.a, model.stage1.b: got not in the model" in unexpected
    assert "model.other: got not in the checkpoint" in missing
    assert "model.stage1.a: got torch.float32 of shape [3]; allowed: torch.float32 of shape [2]" in shape


def load_damaged(folder: Path) -> str:
    manager = make_manager(folder)
    tensors = laid_out(whole(-1), "fsdp 2")
    with pytest.raises(InputError) as error:
        manager.load(folder / "step-00000001", tensors)
    assert_same(tensors, whole(-1))
    return str(error.value)


def test_truncated_file_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_distributed(save_layout, 2, tmp_path, "fsdp 2", "disabled")
    path = tmp_path / "step-00000001" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    results = run_distributed(load_damaged, 2, tmp_path)
    assert results[0] == results[1] and "__1_0.distcp" in results[0]


# ---- damage that only one rank reads


def save_twice(folder: Path) -> None:
    manager = make_manager(folder)
    for step in (1, 2):
        manager.save(step, laid_out(whole(step), "fsdp 2"), PARTS, wait=True)


def fall_back(folder: Path) -> tuple[str, str, list[str], list[str]]:
    """What an explicit load says, what is resumed, what was said, and which files this rank has read."""
    read: list[str] = []
    of_file = storage.of_file

    def recorded(path: Path) -> Any:
        read.append(f"{path.parent.name}/{path.name}")
        return of_file(path)

    setattr(storage, "of_file", recorded)  # noqa: B010
    said: list[str] = []
    manager = make_manager(folder, said.append)
    tensors = laid_out(whole(-1), "fsdp 2")
    with pytest.raises(InputError) as error:
        manager.load(folder / "step-00000002", tensors)
    assert_same(tensors, whole(-1))
    read.clear()
    path = manager.find_resume()
    assert path is not None
    manager.load(path, tensors)
    assert_same(tensors, whole(1))
    return str(error.value), path.name, said, read


def test_damage_seen_by_one_rank_makes_all_fall_back(tmp_path: Path) -> None:
    run_distributed(save_twice, 2, tmp_path)
    path = tmp_path / "step-00000002/__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    (message, *resumed, said, read), (other, *other_resumed, silent, other_read) = run_distributed(
        fall_back, 2, tmp_path
    )
    assert message == other and f"{path.parent}: __1_0.distcp: got other content" in message
    assert resumed == other_resumed == ["step-00000001"]
    assert sorted(read) == [f"step-0000000{step}/{name}" for step in (1, 2) for name in (".metadata", "__0_0.distcp")]
    assert sorted(other_read) == [f"step-0000000{step}/__1_0.distcp" for step in (1, 2)]
    assert any("DAMAGED" in line and "__1_0.distcp" in line for line in said) and not silent
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002.damaged-1"]


def find_what_may_not_be_read(folder: Path) -> str:
    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    manager = make_manager(folder)
    if dist.get_rank() == 1:
        setattr(storage, "of_file", denied)  # noqa: B010
    with pytest.raises(InputError) as error:
        manager.find_resume()
    assert not isinstance(error.value, storage.DamagedError)
    return str(error.value)


def test_what_one_rank_may_not_read_stops_all_and_is_no_damage(tmp_path: Path) -> None:
    run_distributed(save_twice, 2, tmp_path)
    path = tmp_path / "step-00000002/__0_0.distcp"  # beside it one that is damaged
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    messages = run_distributed(find_what_may_not_be_read, 2, tmp_path)
    assert messages[0] == messages[1] and "__1_0.distcp: got Permission denied" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
