"""Bootstrap and teardown of the world of processes, and `Ranks`: all that the other rooms know of it.

A process connects in one of three ways, which end in the same state: torchrun's environment variables, a store made by
`spawn` (torch.multiprocessing + TCPStore, everything torchrun does spelled out), or, with neither, alone as a world of
one. On CUDA the process groups carry both NCCL (device tensors) and Gloo (host tensors); on CPU Gloo.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titanlite.config.layout import Layout, resolve_layout
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import CommConfig, ParallelismConfig, RunConfig
from titanlite.parallel.heartbeat import Heartbeat
from titanlite.parallel.mesh import Meshes

LOCALHOST = "127.0.0.1"
# Longest wait of an ObjectChannel for the slowest rank. Neither of comm's timeouts: a large checkpoint on a busy disk
# may take one rank minutes longer than another, and that is no failure. Past an hour it is. A rank that is gone
# is not waited for: its heartbeat has stopped (see heartbeat.py).
CHANNEL_TIMEOUT = timedelta(hours=1)

T = TypeVar("T")


class ObjectChannel:
    """Collectives of Python objects over all ranks, apart from those of training: a thread may use it meanwhile.

    All ranks call the same methods in the same order. They wait for each other for up to CHANNEL_TIMEOUT.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: a Gloo group of the world that nothing else uses; None: a world of one."""
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on rank 0, None elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value; that of the other ranks is ignored."""
        box = [value]
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, values: list[T] | None) -> T:
        """Rank 0's list, one value to each rank; the other ranks pass None."""
        if self._group is None:
            return cast(list[T], values)[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, src=0, group=self._group)
        return received[0]


class Ranks:
    """This process's place in the world, and the collectives that rooms outside parallel/ may use.

    Every method that communicates must be called by all ranks, in the same order. Tensors are reduced on the device
    they live on. In a world of one nothing is communicated.
    """

    def __init__(self, device: torch.device, layout: Layout, meshes: Meshes, comm: CommConfig) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.layout = layout
        self.meshes = meshes
        self.data_rank = meshes.batch.get_local_rank()  # which slice of each step's samples is this rank's ...
        self.data_size = meshes.batch.size()  # ... of how many
        self._comm = comm
        self._heartbeat: Heartbeat | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in place, over the ranks that hold different tokens; returns the tensor.

        Ranks that hold the same tokens (tp, pp) are not counted twice.
        """
        if self.meshes.loss.size() > 1:
            dist.all_reduce(tensor, group=self.meshes.loss.get_group())
        return tensor

    def max_over_world(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum, in place, over all ranks; returns the tensor."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank src's object, pickled; the argument of the other ranks is ignored."""
        if self.world_size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, by rank."""
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, obj)
        return box

    def barrier(self) -> None:
        """Wait until every rank's Python is here. Work queued on a GPU is not waited for."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))

    def object_channel(self) -> ObjectChannel:
        """A new channel of the world for Python objects, with a group of its own. Collective."""
        alone = self.world_size == 1
        return ObjectChannel(None if alone else dist.new_group(backend="gloo", timeout=CHANNEL_TIMEOUT))

    def use_train_timeout(self) -> None:
        """Let collectives take comm.train_timeout_seconds from now on. Call after the first step, which may compile."""
        timeout = timedelta(seconds=self._comm.train_timeout_seconds)
        world = dist.group.WORLD
        assert world is not None
        for group in {world, *self.meshes.groups()}:
            _set_timeout(group, timeout)
        if self._heartbeat is not None:
            self._heartbeat.timeout = timeout.total_seconds()

    @contextmanager
    def watched(self, end: Callable[[Exception], None]) -> Iterator[None]:
        """While the body runs, find ranks that are gone, and name those that a failed collective has waited for.

        end is called from another thread, see `Heartbeat`. Needs the environment of torchrun, whose store the ranks
        meet in; without one, and in a world of one, nothing is watched.
        """
        if self.world_size == 1 or read_environment() is None:
            yield
            return
        timeout = self._comm.init_timeout_seconds
        # A connection of its own: a get that waits for its key holds up the others of the same one.
        store = dist.PrefixStore("heartbeat", environment_store(timedelta(seconds=timeout)))
        self._heartbeat = Heartbeat(store, self.rank, self.world_size, timeout, end)
        with self._heartbeat.running():
            yield

    def doing(self, what: str) -> None:
        """What this rank does from now on, for the message of those that wait for it: "step 12"."""
        if self._heartbeat is not None:
            self._heartbeat.doing(what)


def start(comm: CommConfig, run: RunConfig, parallelism: ParallelismConfig) -> Ranks:
    """Connect (unless already connected), seed, set precision rules, and build the meshes.

    Raises InputError when the environment is incomplete, the world is not the expected one (TITANLITE_WORLD_SIZE, set
    by the launcher), the layout does not fit it, or the wanted device is missing.
    """
    if not dist.is_initialized():
        connect(comm, run)
    check_world_size(dist.get_world_size())
    layout = resolve_layout(parallelism, dist.get_world_size())
    device = _device(run)
    set_numerics(run, device)
    return Ranks(device, layout, Meshes(layout, device.type), comm)


def connect(
    comm: CommConfig,
    run: RunConfig,
    *,
    store: dist.Store | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Join the world: through the given store as this rank, else as torchrun's environment says, else alone."""
    device, timeout = _device(run), timedelta(seconds=comm.init_timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None:
        world = read_environment()
        if world is None:
            store = dist.HashStore()
        else:
            rank, world_size = world
            store = environment_store(timeout)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=world_size,
    )


def environment_store(timeout: timedelta) -> dist.Store:
    """Where the ranks meet, as torchrun's environment says.

    Its restarts share one store (seen on torch 2.13.0), where a rank would find the addresses of the dead.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def stop(timeout: float = 10.0) -> None:
    """Leave the world. Never hangs: a teardown that outlasts the timeout (seconds) is abandoned to the process's end.

    Safe to call twice, without a world, and after an error on this or another rank.
    """
    if not dist.is_initialized():
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def destroy() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # the current device belongs to a thread
        dist.destroy_process_group()

    # NCCL waits in its destructor for collectives that a dead peer will never join.
    thread = threading.Thread(target=destroy, name="destroy_process_group", daemon=True)
    thread.start()
    thread.join(timeout)


def spawn(
    fn: Callable[..., object], world_size: int, args: Sequence[Any] = (), *, run: RunConfig | None = None
) -> None:
    """Run fn(*args) in world_size new processes of this machine that form a world; returns when all are done.

    What torchrun does, in the open: torch.multiprocessing starts the processes, a TCPStore in this process is where
    they meet (its port given by the operating system, so two runs never collide). fn must be importable, as the
    processes start with a fresh interpreter. An error in one of them ends the others and is raised here with its
    traceback (torch.multiprocessing.ProcessRaisedException).
    """
    store = dist.TCPStore(LOCALHOST, 0, world_size=None, is_master=True, wait_for_workers=False)
    mp.spawn(_spawned, args=(fn, world_size, store.port, run or RunConfig(), tuple(args)), nprocs=world_size, join=True)


def _spawned(
    rank: int, fn: Callable[..., object], world_size: int, port: int, run: RunConfig, args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=LOCALHOST, MASTER_PORT=str(port)
    )
    store = dist.TCPStore(LOCALHOST, port, world_size=None, is_master=False, wait_for_workers=False)
    connect(CommConfig(), run, store=store, rank=rank, world_size=world_size)
    try:
        fn(*args)
    finally:
        stop()


def read_environment() -> tuple[int, int] | None:
    """(rank, world size) as torchrun sets them; None when there is no such environment. Raises InputError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    fix = "start the processes with ./run_train.sh or torchrun, or unset RANK and WORLD_SIZE for a single process"
    problems = []
    for name in names:
        value = os.environ.get(name)
        if value is None:
            problems.append(Problem("environment", name, "nothing", "a value, since RANK or WORLD_SIZE is set", fix))
        elif name != "MASTER_ADDR" and not value.isdecimal():
            problems.append(Problem("environment", name, repr(value), "a whole number, 0 or more", fix))
    if problems:
        raise InputError(problems)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise InputError(Problem("environment", "RANK", str(rank), f"0 to WORLD_SIZE - 1 = {world_size - 1}", fix))
    return rank, world_size


def check_world_size(world_size: int) -> None:
    """Raise InputError when the launcher expected another number of processes than met.

    A node that cannot resolve the master's name can end up as a world of its own; without this check it would train.
    """
    expected = os.environ.get("TITANLITE_WORLD_SIZE")
    if expected is None or expected == str(world_size):
        return
    raise InputError(
        Problem(
            "environment",
            "WORLD_SIZE",
            f"{world_size} processes met",
            f"{expected}, nodes x processes per node (TITANLITE_WORLD_SIZE)",
            "check that every node has the same NNODES, NPROC and RDZV_ID and reaches MASTER_ADDR",
        )
    )


def _device(run: RunConfig) -> torch.device:
    """The device this process computes on: its local rank's GPU, or the CPU. Raises InputError if it is not there."""
    available = torch.cuda.is_available()
    if run.device == "cpu" or (run.device == "auto" and not available):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if available else 0
    if local_rank >= gpus:
        fix = 'start at most one process per GPU, or set run.device = "cpu"'
        allowed = f"local rank below the number of visible GPUs, {gpus}"
        raise InputError(Problem("", "run.device", f"{run.device!r} at local rank {local_rank}", allowed, fix))
    return torch.device("cuda", local_rank)


def set_numerics(run: RunConfig, device: torch.device) -> None:
    """Seed every generator the same on all ranks, and set what a float32 matmul may be and whether kernels may race.

    No weight and no sample depends on these generators; the same seed everywhere makes what else may use them repeat.
    """
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)
    torch.manual_seed(run.seed % 2**63)
    torch.use_deterministic_algorithms(run.deterministic)
    # Uninitialised memory is never read here, and filling it with NaN would cost a write per allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its first handle
    # "high": TF32 for float32 matmuls on CUDA. On CPU the name could mean lower-precision kernels, so never there.
    allow_tf32 = device.type == "cuda" and not run.deterministic
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")


def _set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change a group's timeout. Private in torch (seen working on 2.11.0 and 2.13.0, Gloo); no public call does it."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
