"""Tensors to files and back through torch.distributed.checkpoint (DCP), with any layout on either side.

DCP plans, writes and reads; the collectives between are ours, over the checkpoint's own gloo group, so that a rank
that fails gives all ranks one plain error and so that only what a rank will write has to be staged.
The planner and storage classes used here are DCP's public ones, seen working on torch 2.13.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.storage import METADATA, CheckpointError, file_size, fsync_folder

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


class Objects:
    """Collectives of Python objects over a gloo group of all ranks; a world of one needs no group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T] | None:
        """All ranks' values on rank 0, None elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """Rank 0's list, one value to each rank."""
        if self.size == 1:
            return cast(list[T], values)[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, src=0, group=self.group)
        return received[0]

    def agree(self, doing: str, work: Callable[[], T]) -> T:
        """Do `work` on every rank, and return its value; if it failed anywhere, all ranks raise one CheckpointError."""
        value, failure = attempt(work)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.all_gather(failure)) if text]
        if failures:
            more = f" (and {len(failures) - 3} more ranks)" if len(failures) > 3 else ""
            raise CheckpointError(f"{doing} failed: {'; '.join(failures[:3])}{more}")
        return cast(T, value)


def attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value of `work`, or what went wrong with it in one line. Also of DCP's exception, which is no Exception."""
    try:
        return work(), None
    except CheckpointException as error:
        return None, describe(error)
    except Exception as error:
        return None, describe(error)


def describe(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {describe(wrapped[0])}" for rank, wrapped in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# ---- save


@dataclass(frozen=True)
class Plan:
    """What this rank writes. `metadata` describes all ranks' tensors and is on rank 0 only."""

    signature: list[tuple[Any, ...]]
    local: SavePlan
    metadata: Metadata | None


@dataclass
class Snapshot:
    """CPU copies of what this rank writes; the buffers are kept for the next snapshot."""

    buffers: dict[MetadataIndex, torch.Tensor] = field(default_factory=dict)

    def take(self, plan: Plan, tensors: Tensors) -> None:
        """Copy now; nothing that happens to `tensors` afterwards can reach the copies."""
        fresh: dict[MetadataIndex, torch.Tensor] = {}
        on_cuda = False
        for item in plan.local.items:
            source = _local(tensors[item.index.fqn])
            buffer = self.buffers.get(item.index)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=source.is_cuda)
            on_cuda |= source.is_cuda
            fresh[item.index] = buffer
        self.buffers = fresh
        if on_cuda:
            torch.cuda.synchronize()


def plan_save(tensors: Tensors, objects: Objects, last: Plan | None) -> Plan:
    """Decide which rank writes what: replicated tensors once, spread over the ranks that hold them. Collective.

    `last` is used again if no rank's tensors have changed in name, shape, dtype or placement.
    """
    signature = [(key, _signature(tensor)) for key, tensor in tensors.items()]
    if all(objects.all_gather(last is not None and last.signature == signature)) and last is not None:
        return last
    planner = DefaultSavePlanner(flatten_state_dict=False)

    def local_plan() -> SavePlan:
        planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=objects.rank == 0)
        return planner.create_local_plan()

    plans = objects.gather(objects.agree("planning the checkpoint", local_plan))
    metadata: Metadata | None = None

    def global_plan() -> list[SavePlan] | None:
        nonlocal metadata
        if plans is None:
            return None
        merged, metadata = planner.create_global_plan(plans)
        return FileSystemWriter("").prepare_global_plan(merged)

    merged = objects.agree("planning the checkpoint", global_plan)
    return Plan(signature, planner.finish_plan(objects.scatter(merged)), metadata)


def write_tensors(
    folder: Path, plan: Plan, tensors: Tensors, snapshot: Snapshot | None
) -> tuple[list[WriteResult], dict[str, int]]:
    """Write this rank's part of `plan` and sync it to the disk. Returns DCP's records and file name -> bytes."""
    writer = FileSystemWriter(folder, sync_files=True)
    if snapshot is not None:
        writer.per_thread_copy_ahead = 0  # overlaps device copies with writes; a snapshot is on the CPU already
    writing = writer.write_data(plan.local, _Source(tensors, snapshot))
    writing.wait()
    prefix = plan.local.storage_data.prefix
    sizes = {path.name: file_size(path) or 0 for path in folder.glob(f"{prefix}*.distcp")}
    fsync_folder(folder)
    return writing.value(), sizes


def write_metadata(folder: Path, plan: Plan, results: list[list[WriteResult]]) -> dict[str, int]:
    """Rank 0: write DCP's description of all ranks' files. Returns file name -> bytes."""
    assert plan.metadata is not None
    FileSystemWriter(folder, sync_files=True).finish(plan.metadata, results)
    return {METADATA: file_size(folder / METADATA) or 0}


class _Source(DefaultSavePlanner):
    """Hands the writer the snapshot's tensors, or the live ones if there is none."""

    def __init__(self, tensors: Tensors, snapshot: Snapshot | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._snapshot = snapshot

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        if self._snapshot is not None:
            return self._snapshot.buffers[write_item.index]
        return _local(self._tensors[write_item.index.fqn])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tuple(tensor.shape), tensor.dtype, *layout)


# ---- load


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of a checkpoint: the one place where its pickle is read."""
    with open(folder / METADATA, "rb") as file:
        metadata = pickle.load(file)
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / METADATA}: not the metadata of a checkpoint")
    return metadata


def saved_tensors(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Key -> (shape, dtype) of what a checkpoint holds; None for an entry that is no tensor."""
    return {
        key: (tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def read_tensors(folder: Path, tensors: Tensors, objects: Objects) -> None:
    """Load into `tensors` in place, each rank what it holds. Collective. Raises CheckpointError."""

    def load() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(
                dict(tensors),
                storage_reader=_Reader(folder),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=objects.group,
                no_dist=objects.size == 1,
            )

    _, failure = attempt(load)
    if failure:
        raise CheckpointError(f"loading {folder} failed: {failure}")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))
