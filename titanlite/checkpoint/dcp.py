"""Tensors to files and back through torch.distributed.checkpoint (DCP), with any layout on either side.

DCP plans, writes and reads; the collectives between are ours, over the checkpoint's own channel, so that a rank that
fails gives all ranks one plain error and so that only what a rank will write has to be staged.

Seen working on torch 2.11.0 and 2.13.0, on CPU. Public are the default planners, the storage reader and writer, and the
steps of both that are called here in the order in which dcp.save and dcp.load call them. Internal to DCP, and so what
another torch may change: a writer's `per_thread_copy_ahead` and `fs`, that it only ever appends to a file, the `prefix`
in a plan's storage_data, the names `__RANK_N.distcp`, and the pickle in `.metadata` with its private classes.
"""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.checksum import FileRecord, HashedFile
from titanlite.checkpoint.storage import METADATA, CheckpointError, DamagedError, is_tensor_file
from titanlite.config.problems import InputError
from titanlite.files import fsync_folder

if TYPE_CHECKING:
    from titanlite.parallel.runtime import ObjectChannel

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


def agree(channel: ObjectChannel, doing: str, work: Callable[[], T]) -> T:
    """Do `work` on every rank, and return its value. If it failed anywhere, all ranks raise the same.

    That is one CheckpointError; or, if nothing but input was found wrong, an InputError with the problems of all ranks
    (a DamagedError, if no rank raised another kind).
    """
    value: T | None = None
    failure: str | None = None
    wrong: InputError | None = None
    try:
        value = work()
    except InputError as error:
        wrong = error
    except Exception as error:
        failure = describe(error)
    everyone = channel.all_gather((failure, type(wrong), wrong.problems if wrong else ()))
    failures = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(everyone) if text]
    if failures:
        more = f" (and {len(failures) - 3} more ranks)" if len(failures) > 3 else ""
        raise CheckpointError(f"{doing} failed: {'; '.join(failures[:3])}{more}")
    problems = [problem for _, _, found in everyone for problem in found]
    if problems:
        damaged = all(kind is DamagedError for _, kind, found in everyone if found)
        raise (DamagedError if damaged else InputError)(problems)
    return cast(T, value)


def attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value of `work`, or what went wrong with it in one line."""
    try:
        return work(), None
    except Exception as error:
        return None, describe(error)


def describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" at {error.filename}" if error.filename else ""
        return f"the disk is full{place} ({error.strerror}): make room, or let run.output_dir be on another disk"
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


def plan_save(tensors: Tensors, channel: ObjectChannel, last: Plan | None) -> Plan:
    """Decide which rank writes what: replicated tensors once, spread over the ranks that hold them. Collective.

    `last` is used again if no rank's tensors have changed in name, shape, dtype or placement.
    """
    signature = [(key, _signature(tensor)) for key, tensor in tensors.items()]
    if all(channel.all_gather(last is not None and last.signature == signature)) and last is not None:
        return last
    planner = DefaultSavePlanner(flatten_state_dict=False)

    def local_plan() -> SavePlan:
        planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=channel.rank == 0)
        return planner.create_local_plan()

    plans = channel.gather(agree(channel, "planning the checkpoint", local_plan))
    metadata: Metadata | None = None

    def global_plan() -> list[SavePlan] | None:
        nonlocal metadata
        if plans is None:
            return None
        merged, metadata = planner.create_global_plan(plans)
        return FileSystemWriter("").prepare_global_plan(merged)

    merged = agree(channel, "planning the checkpoint", global_plan)
    return Plan(signature, planner.finish_plan(channel.scatter(merged)), metadata)


@dataclass(frozen=True)
class Written:
    """Files of this rank that are on the disk. seconds: what their checksums have cost."""

    files: dict[str, FileRecord]
    seconds: float
    results: list[WriteResult] = field(default_factory=list)  # DCP's records


def write_tensors(folder: Path, plan: Plan, tensors: Tensors, snapshot: Snapshot | None) -> Written:
    """Write this rank's part of `plan`, and sync it to the disk."""
    writer, files = _writer(folder)
    if snapshot is not None:
        writer.per_thread_copy_ahead = 0  # overlaps device copies with writes; a snapshot is on the CPU already
    with files.errors():
        writing = writer.write_data(plan.local, _Source(tensors, snapshot))
        writing.wait()
    fsync_folder(folder)
    return Written(files.records(), files.seconds, writing.value())


def write_metadata(folder: Path, plan: Plan, results: list[list[WriteResult]]) -> Written:
    """Rank 0: write DCP's description of all ranks' files."""
    assert plan.metadata is not None
    writer, files = _writer(folder)
    with files.errors():
        writer.finish(plan.metadata, results)
    (record,) = files.records().values()  # written under another name, then renamed
    return Written({METADATA: record}, files.seconds)


def _writer(folder: Path) -> tuple[FileSystemWriter, _HashingFileSystem]:
    writer, files = FileSystemWriter(folder, sync_files=False), _HashingFileSystem()
    writer.fs = files
    return writer, files


class _HashingFileSystem(filesystem.FileSystem):
    """Gives DCP files that are hashed while it writes them, and synced when it closes them. (DCP's own sync comes while
    the end of `.metadata` is still in a buffer of the process.)"""

    def __init__(self) -> None:
        self._written: list[tuple[str, HashedFile]] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with closing(HashedFile(Path(path))) as file:
            self._written.append((Path(path).name, file))
            yield cast(io.IOBase, file)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What the system says of a failed write, instead of what torch makes of it."""
        try:
            yield
        except Exception:
            error = next((file.error for _, file in self._written if file.error), None)
            if error is None:
                raise
            raise error from None

    def records(self) -> dict[str, FileRecord]:
        return {name: file.record for name, file in self._written}

    @property
    def seconds(self) -> float:
        return sum(file.seconds for _, file in self._written)


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
    """DCP's description of a checkpoint. The only place where its pickle is read; nothing in the file can run code.

    Raises CheckpointError if the file is no such description, asks for anything but the classes that describe tensors,
    or sends the reader anywhere but to plain tensors in files of this folder; OSError.
    """
    with open(folder / METADATA, "rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # pickle promises no kinds
            raise CheckpointError(
                f"{folder / METADATA}: not the metadata of a checkpoint ({describe(error)})"
            ) from error
    if not (
        isinstance(metadata, Metadata)
        and all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values())
        and isinstance(metadata.storage_data, dict)
        and all(isinstance(place, filesystem._StorageInfo) for place in metadata.storage_data.values())
    ):
        raise CheckpointError(f"{folder / METADATA}: not the metadata of a checkpoint")
    for place in metadata.storage_data.values():
        if not is_tensor_file(str(place.relative_path)) or place.transform_descriptors:
            got = f"{place.relative_path}{' (transformed)' if place.transform_descriptors else ''}"
            raise CheckpointError(f"{folder / METADATA} names {got}, which is no tensor file of a checkpoint")
    return metadata


def tensor_files(metadata: Metadata) -> set[str]:
    """Names of the files that hold the tensors."""
    return {str(place.relative_path) for place in metadata.storage_data.values()}


# Plain data, whose constructors do nothing. BytesStorageMetadata is missing on purpose: DCP unpickles such an entry's
# bytes without any restriction.
_METADATA_CLASSES: dict[str, tuple[Any, ...]] = {
    "pathlib": (pathlib.PosixPath,),
    "pathlib._local": (pathlib.PosixPath,),  # Python 3.13's name of it
    "torch": (torch.Size,),
    "torch.serialization": (torch.serialization._get_layout,),
    "torch.distributed.checkpoint.filesystem": (filesystem._StorageInfo,),
    "torch.distributed.checkpoint.metadata": (
        Metadata,
        MetadataIndex,
        dcp_metadata.StorageMeta,
        TensorStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata._MEM_FORMAT_ENCODING,
    ),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        for known in _METADATA_CLASSES.get(module, ()):
            if known.__name__ == name:
                return known
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"{METADATA} names {module}.{name}, which describes no tensor: refused, nothing was run")


def saved_tensors(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Key -> (shape, dtype) of what a checkpoint holds."""
    entries = cast(Mapping[str, TensorStorageMetadata], metadata.state_dict_metadata)  # as read_metadata has checked
    return {key: (tuple(entry.size), entry.properties.dtype) for key, entry in entries.items()}


def read_tensors(folder: Path, tensors: Tensors, channel: ObjectChannel) -> None:
    """Load into `tensors` in place, each rank what it holds. Collective. Raises CheckpointError.

    Not dcp.load, which has collectives of its own and reads the metadata with an unrestricted pickle.load.
    """

    def load() -> None:
        reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
        metadata = read_metadata(folder)
        planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()

    agree(channel, f"loading {folder}", load)
