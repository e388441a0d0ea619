"""Data parallelism: FSDP2 (with HSDP and the three ZeRO stages) and DDP, both made to *sum* gradients over ranks.

Three strategies with one interface: `module` is what is called with a microbatch, `microbatch(last)` is the context of
its forward and backward, `release` frees what an evaluation left gathered.
"""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from titanlite.model.moe import Experts
from titanlite.parallel.collectives import reduce_scatter
from titanlite.parallel.mesh import Meshes

# Buffers are the same on all ranks and never change. The keyword that says so is another one since torch 2.13.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class Single:
    """A world of one: the model as it is."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def release(self) -> None:
        pass


class Replicated:
    """DDP over the whole world. The model must be materialised and initialised, the same on all ranks."""

    def __init__(self, model: nn.Module, device: torch.device, reduce_dtype: torch.dtype) -> None:
        self.module = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            init_sync=False,  # every rank computed the same initial weights
            **_KEEP_BUFFERS,
            gradient_as_bucket_view=True,
            # Without this DDP rebuilds its buckets after the first backward of a process, which changes the order of
            # summation, and a resumed run would not be bitwise the same at 3 or more ranks.
            find_unused_parameters=True,
        )
        self.module.register_comm_hook(reduce_dtype, _sum_bucket)

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.module.no_sync()

    def release(self) -> None:
        pass


def _sum_bucket(reduce_dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the sum over ranks (DDP's own would be the mean), sent in reduce_dtype."""
    gradients = bucket.buffer()
    sent = gradients.to(reduce_dtype)  # the same tensor when the dtypes are equal
    future = dist.all_reduce(sent, async_op=True).get_future()

    def received(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        total = done.value()[0]
        return total if total.dtype == gradients.dtype else gradients.copy_(total)

    return future.then(received)


class Sharded:
    """fully_shard on every block and the root, over meshes.hsdp, and on the experts inside of them, over expert_hsdp.

    Stage 3 frees a block's parameters after forward. Stage 2 keeps them through the step's microbatches and
    reduce-scatters after each. Stage 1 also keeps whole gradients, in float32, and reduces once a step. At rest
    parameters, gradients and optimizer state are sharded in all three. Under a pipeline stages 1 and 3 both keep whole
    gradients, and the schedule says when to reduce.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        meshes: Meshes,
        zero_stage: int,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        pipeline: bool = False,
    ) -> None:
        self._zero_stage = zero_stage
        # FSDP accumulates unreduced gradients in reduce_dtype. To keep float32 there, only what is sent is rounded.
        narrow_comm = (zero_stage == 1 or pipeline) and reduce_dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=None if param_dtype == torch.float32 else param_dtype,
            reduce_dtype=torch.float32 if narrow_comm else reduce_dtype,
            cast_forward_inputs=False,  # the model's own casts are the same in every layout
        )
        mesh = meshes.hsdp
        shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=zero_stage == 3)
        for block in blocks:
            for experts in [module for module in block.modules() if isinstance(module, Experts)]:
                place = partial(_place_experts, size=meshes.efsdp.size())
                shard(experts, mesh=meshes.expert_hsdp, shard_placement_fn=place)
            shard(block, mesh=mesh)
        # The root holds the embedding and the head; the head is needed again as soon as backward starts.
        shard(model, mesh=mesh, reshard_after_forward=False)
        self.module = model
        self._units: Sequence[FSDPModule] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        # Partial sums over replicas wait in reduce_dtype, so only float32 ones may wait for the last microbatch.
        self._defer_all_reduce = mesh.ndim == 2 and reduce_dtype == torch.float32
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # else a factor means PREMUL_SUM, which Gloo does not have
            if narrow_comm:
                unit.set_custom_reduce_scatter(cast(Any, NarrowReduceScatter(reduce_dtype)))
        self._last = True

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        if last != self._last:
            self._last = last
            for unit in self._units:
                if self._zero_stage == 1:
                    unit.set_requires_gradient_sync(last, recurse=False)
                elif self._defer_all_reduce:
                    unit.set_requires_all_reduce(last, recurse=False)
                if self._zero_stage < 3:
                    unit.set_reshard_after_backward(last, recurse=False)
        return nullcontext()

    def release(self) -> None:
        for unit in self._units:
            unit.reshard()


def _place_experts(weight: nn.Parameter, size: int) -> Shard:
    """How `size` ranks share experts [E, out, in]: whole ones each, unless only rows of each can be shared evenly."""
    experts, rows = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[:2]
    return Shard(0 if experts % size == 0 or rows % size else 1)


class NarrowReduceScatter:
    """FSDP2's reduce-scatter interface, with float32 outside and a narrower dtype between the ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op, "FSDP2 is not seen to ask for it"
        received = torch.empty_like(output_tensor, dtype=self._dtype)
        reduce_scatter(received, input_tensor.to(self._dtype), op=op, group=group)
        output_tensor.copy_(received)
