"""Tensors to files and back through torch.distributed.checkpoint (DCP), with any layout on either side.

DCP plans, writes and reads; the collectives between are ours, over the checkpoint's own channel, so that a rank that
fails gives all ranks one plain error and so that only what a rank will write has to be staged. What write_streamed and
fill_local exchange is no live tensor: they use the same planners, alone, with blocks that a function makes or takes.

Seen working on torch 2.11.0 and 2.13.0, on CPU. Public are the default planners, the storage reader and writer, and the
steps of both, which are called here in the order in which dcp.save and dcp.load call them. Internal to DCP, and so what
another torch may change: a writer's `per_thread_copy_ahead` and `fs`, that it only ever appends to a file, the `prefix`
in a plan's storage_data, the names `__RANK_N.distcp`, and the pickle in `.metadata` with its private classes.
"""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.checksum import FileRecord, HashedFile
from titanlite.checkpoint.storage import MANIFEST, METADATA, CheckpointError, DamagedError, is_tensor_file
from titanlite.config.problems import InputError, Problem
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


def on_main(channel: ObjectChannel, work: Callable[[], T]) -> T:
    """Do `work` on the main rank; its value, or its error, on all ranks. InputErrors are kept, others become one
    CheckpointError."""
    value: Any = None
    kind, problems = InputError, cast(tuple[Problem, ...], ())
    failure: str | None = None
    if channel.rank == 0:
        try:
            value = work()
        except InputError as error:
            kind, problems = type(error), error.problems
        except Exception as error:
            failure = describe(error)
    value, kind, problems, failure = channel.broadcast((value, kind, problems, failure))
    if problems:
        raise kind(problems)
    if failure:
        raise CheckpointError(failure)
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


def write_metadata(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> Written:
    """Rank 0: write DCP's description of all ranks' files."""
    writer, files = _writer(folder)
    with files.errors():
        writer.finish(metadata, results)
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


# ---- save without a run

STREAMED_FILE_BYTES = 1 << 30  # DCP keeps the tensors of a file in memory until it is written
STREAMED_PIECE_BYTES = 1 << 28


def write_streamed(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    read: Callable[[str, Sequence[int], Sequence[int]], torch.Tensor],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, FileRecord]:
    """Write float32 tensors of these shapes, which need not fit into memory; returns the files, on the disk.

    read(key, offsets, lengths): a block of a tensor, float32, at most STREAMED_PIECE_BYTES but for a single row.
    report: called with the bytes that are written and those of all. The files are as if each were another rank's.
    """
    plans: list[list[WriteItem]] = [[]]
    size = 0
    for key, shape in shapes.items():
        properties = TensorProperties(dtype=torch.float32)
        for chunk in _pieces(shape):
            item = WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, shape),
            )
            if plans[-1] and size + 4 * chunk.sizes.numel() > STREAMED_FILE_BYTES:
                plans.append([])
                size = 0
            plans[-1].append(item)
            size += 4 * chunk.sizes.numel()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    merged, metadata = planner.create_global_plan([SavePlan(items) for items in plans])
    source, total = _Streamed(read), 4 * sum(shape.numel() for shape in shapes.values())
    files: dict[str, FileRecord] = {}
    results = []
    done = 0
    for plan in FileSystemWriter("").prepare_global_plan(merged):
        writer, written = _writer(folder)
        writer.per_thread_copy_ahead = 0
        with written.errors():
            writing = writer.write_data(plan, source)
            writing.wait()
        files |= written.records()
        results.append(writing.value())
        done += sum(4 * item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data)
        report(done, total)
    return files | write_metadata(folder, metadata, results).files


def _pieces(shape: torch.Size) -> Iterator[ChunkStorageMetadata]:
    """Blocks of whole rows."""
    rows = max(1, STREAMED_PIECE_BYTES // (4 * max(1, shape[1:].numel())))
    for row in range(0, shape[0], rows):
        sizes = torch.Size((min(rows, shape[0] - row), *shape[1:]))
        yield ChunkStorageMetadata(torch.Size((row, *(0 for _ in shape[1:]))), sizes)


class _Streamed(DefaultSavePlanner):
    """Makes each block when the writer comes to it."""

    def __init__(self, read: Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return self._read(write_item.index.fqn, chunk.offsets, chunk.sizes)


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


def read_metadata_of(folder: Path, manifest: Mapping[str, Any]) -> Metadata:
    """The metadata of a checkpoint with this manifest. Raises DamagedError if they do not belong together; what
    read_metadata does."""
    metadata = read_metadata(folder)
    named = {str(place.relative_path) for place in metadata.storage_data.values()}
    if unknown := sorted(named - manifest["files"].keys()):
        fix = "use another checkpoint: what these files hold was never verified"
        raise DamagedError(
            Problem(str(folder), METADATA, f"names {', '.join(unknown[:5])}", f"files that {MANIFEST} names", fix)
        )
    return metadata


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
        ChunkStorageMetadata,
        TensorProperties,
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


def differences(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Problem]:
    """How a checkpoint's tensors differ from the model's: missing, unexpected, other shape or dtype.

    Both: key -> (shape, dtype), as saved_tensors.
    """

    def some(keys: list[str]) -> str:
        return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")

    fix = "use the [model] section it was saved with (in its manifest.json under config)"
    problems = []
    missing = sorted(wanted.keys() - saved.keys())
    if missing:
        problems.append(Problem(str(path), some(missing), "not in the checkpoint", "every tensor of the model", fix))
    unexpected = sorted(saved.keys() - wanted.keys())
    if unexpected:
        problems.append(Problem(str(path), some(unexpected), "not in the model", "only tensors of the model", fix))
    other = sorted(key for key in wanted.keys() & saved.keys() if wanted[key] != saved[key])
    if other:
        key = other[0]
        problems.append(Problem(str(path), some(other), _show(saved[key]), f"{_show(wanted[key])} for {key}", fix))
    return problems


def _show(tensor: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{tensor[1]} of shape {list(tensor[0])}"


NO_TABLES: Mapping[str, tuple[int, int]] = {}


def repad(metadata: Metadata, tables: Mapping[str, tuple[int, int]]) -> Metadata:
    """The metadata, in place, of a checkpoint whose tables have another padding: a load reads the rows that count, and
    leaves the others as they are.

    tables: key -> rows that a table is to have, and how many of them, the first ones, count. One that is saved with
    fewer rows than count stays as it is, for `differences` to tell.
    """
    for key in tables.keys() & metadata.state_dict_metadata.keys():
        entry = cast(TensorStorageMetadata, metadata.state_dict_metadata[key])
        rows, counted = tables[key]
        if entry.size[0] < counted:
            continue
        chunks = []
        for chunk in entry.chunks:
            left = min(chunk.sizes[0], counted - chunk.offsets[0])
            if left > 0:
                chunks.append(ChunkStorageMetadata(chunk.offsets, torch.Size((left, *chunk.sizes[1:]))))
        size = torch.Size((rows, *entry.size[1:]))
        metadata.state_dict_metadata[key] = replace(entry, size=size, chunks=chunks)
    return metadata


def read_tensors(
    folder: Path, tensors: Tensors, channel: ObjectChannel, tables: Mapping[str, tuple[int, int]] = NO_TABLES
) -> None:
    """Load into `tensors` in place, each rank what it holds. Collective. Raises CheckpointError.

    Not dcp.load, which has collectives of its own and reads the metadata with an unrestricted pickle.load.
    tables: as in repad
    """
    agree(channel, f"loading {folder}", lambda: read_into(folder, repad(read_metadata(folder), tables), tensors))


def read_into(folder: Path, metadata: Metadata, tensors: Tensors) -> None:
    """What read_tensors does on one rank. metadata: of that folder, as repad has left it."""
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def fill_local(tensors: Tensors, read: Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]) -> None:
    """Fill this rank's part of `tensors` in place from read(key, offsets, lengths), which returns that block of the
    whole tensor on the CPU, in any dtype. It is asked for what this rank holds, and nothing else."""
    whole = {
        key: TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            tensor.shape,
            [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)],
        )
        for key, tensor in tensors.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), Metadata(cast(Any, whole)), is_coordinator=True)
    for item in planner.finish_plan(planner.create_local_plan()).items:
        target = planner.resolve_tensor(item).detach()
        target.copy_(read(item.storage_index.fqn, item.storage_offsets, item.lengths))
