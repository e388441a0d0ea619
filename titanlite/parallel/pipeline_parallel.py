"""Pipeline parallelism: this rank's stages and the schedule of torch.distributed.pipelining that runs them.

A stage is a part of the model that was laid out like a whole one (tensor parallel, FSDP, ...). A schedule run takes a
batch in microbatches through all stages, forward and backward, nothing scaled; gradients wait unsharded for the step's
last run and are reduced once. The loss is known to all ranks.

Private in torch, and so wrapped here (seen working on 2.13.0, CPU): `PipelineStage.perform_reduce_grad`, and that
`forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk` do all of a stage's computing; of FSDP2, in
`_widen_gradients`, `_get_fsdp_state`, `_fsdp_param_groups`, `accumulate_unsharded_grad_if_needed` and
`to_accumulated_grad_if_needed`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from titanlite.config.layout import SINGLE_STAGE, PipelinePlan
from titanlite.parallel.mesh import Meshes

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
TIED = "embedding.weight"  # the one tensor that two stages may hold

Inputs = Mapping[str, Tensor]  # the model's arguments


@dataclass(frozen=True)
class StagePart:
    """What a stage has of the model: arguments of Transformer."""

    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class StageModel:
    """A stage that is laid out: what is called, its parameters by FQN, and what frees what evaluation gathered."""

    index: int
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    release: Callable[[], None]


def stage_parts(plan: PipelinePlan, rank: int) -> dict[int, StagePart]:
    """The stages of one rank of the pp axis, by index."""
    last = len(plan.layers) - 1
    return {stage: StagePart(plan.layers[stage], stage == 0, stage == last) for stage in plan.stages_of(rank)}


def forward_ticks(plan: PipelinePlan, microbatches: int) -> Iterator[list[tuple[int, int]]]:
    """Forward of all microbatches through all stages, in ticks: of each, (stage, microbatch) of the ranks that compute.

    A rank runs its stages in order, each with all microbatches. What a tick computes can be used in the next.
    """
    waiting = [
        deque((stage, number) for stage in plan.stages_of(rank) for number in range(microbatches))
        for rank in range(plan.pp)
    ]
    done = {(-1, number) for number in range(microbatches)}  # as if by a stage before the first
    while any(waiting):
        ready = [queue for queue in waiting if queue and (queue[0][0] - 1, queue[0][1]) in done]
        tick = [queue.popleft() for queue in ready]
        done.update(tick)
        yield tick


class Clock:
    """Adds up how long something runs: host seconds on a CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take(self) -> Callable[[], float]:
        """The seconds since the last take, to be read later: on a GPU the host then waits for the work."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []

        def read() -> float:
            if events:
                events[-1][1].synchronize()
            return seconds + sum(begin.elapsed_time(end) for begin, end in events) / 1000

        return read


class Stage(PipelineStage):
    """torch's stage, with three things of ours: inputs by the microbatch's number, one reduction a step, a clock.

    Every rank has the batch, so a stage takes what it needs of tokens, labels, documents and positions from its own
    copy; only hidden states travel.
    """

    def __init__(
        self,
        model: StageModel,
        n_stages: int,
        tokens: Tensor,
        hidden: Tensor,
        device: torch.device,
        group: dist.ProcessGroup,
        clock: Clock,
    ) -> None:
        """tokens, hidden: meta tensors like what the first stage gets and what stages send on.

        With them nothing is found out by running the module.
        """
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        super().__init__(
            model.module,
            model.index,
            n_stages,
            device,
            input_args=tokens if model.index == 0 else hidden,
            output_args=loss if model.index == n_stages - 1 else hidden,
            group=group,
        )
        self.microbatches: list[dict[str, Tensor]] = []
        self.last_run = True
        self._clock = clock

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        inputs = self.microbatches[fwd_chunk_id]
        first = (inputs["tokens_or_h"],) if self.is_first else ()
        with self._clock.running():
            return super().forward_one_chunk(fwd_chunk_id, first, stage_arguments(inputs, self.is_last), False)

    def backward_one_chunk(self, *args: Any, **keywords: Any) -> None:
        with self._clock.running():
            super().backward_one_chunk(*args, **keywords)

    def backward_weight_one_chunk(self, *args: Any, **keywords: Any) -> None:
        with self._clock.running():
            super().backward_weight_one_chunk(*args, **keywords)
            _widen_gradients(self.submod)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by the schedule after a run's last backward. Reduces after the step's last run only."""
        assert grad_scale_factor == 1, "gradients are those of the sum of token losses"
        if self.last_run:
            super().perform_reduce_grad(grad_scale_factor)


def stage_arguments(inputs: Inputs, last: bool) -> dict[str, Tensor]:
    """What a stage's module takes besides tokens or hidden states."""
    return {name: value for name, value in inputs.items() if name != "tokens_or_h" and (name != "labels" or last)}


def _widen_gradients(module: nn.Module) -> None:
    """Let FSDP add gradients of weights to the float32 ones. It does so when a block's backward ends, but a schedule
    that splits backward makes them later, and the next microbatch's would be added in the narrow dtype of the weights.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


class Pipeline:
    """This rank's stages, run together with those of the other ranks of its pp axis.

    parameters: of all stages here, by FQN; of a tensor that two stages of this rank hold, the first stage's.
    counted:    those that this rank counts in the gradient norm, so that over the pp axis each is counted once.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        microbatches: int,
        stages: Sequence[StageModel],
        meshes: Meshes,
        device: torch.device,
        *,
        tied: bool,
        tokens: Tensor,
        hidden: Tensor,
    ) -> None:
        """Collective.

        microbatches: of a schedule run.
        tied:         the first and the last stage hold one table.
        tokens:       meta tensor like a microbatch's tokens in training, [B, S].
        hidden:       meta tensor like what stages send on of it, [B, S or a part of it, dim].
        """
        self.plan = plan
        self.group = meshes.pp.get_group()
        self.parameters: dict[str, nn.Parameter] = {}
        self._microbatches = microbatches
        self._models = list(stages)
        self._device = device
        self._hidden = hidden
        self._computing, self._step = Clock(device), Clock(device)
        self._measured: Callable[[], dict[str, float]] = dict

        self._second_copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for model in self._models:
            for name, parameter in model.parameters.items():
                if name in self.parameters:
                    assert tied and name == TIED, f"two stages hold {name}"
                    self._second_copies.append((self.parameters[name], parameter))
                else:
                    self.parameters[name] = parameter
        first, last = plan.rank_of(0), plan.rank_of(len(plan.layers) - 1)
        # The two ranks of a tied table that lies apart. Each updates its copy by the sum of both gradients.
        self._tied_group = meshes.pp_ends() if tied and first != last else None
        twice = self._tied_group is not None and meshes.pp.get_local_rank() == last
        self.counted = [p for name, p in self.parameters.items() if not (twice and name == TIED)]
        n_stages = len(plan.layers)
        self._stages = [
            Stage(model, n_stages, tokens, hidden, device, self.group, self._computing) for model in self._models
        ]
        self._schedule = SCHEDULES[plan.schedule](
            self._stages[0] if plan.schedule in SINGLE_STAGE else self._stages,
            microbatches,
            loss_fn=lambda output, target: output.sum(),
            scale_grads=False,
        )
        # A group's first collective must be one of all its ranks (NCCL); a batch of sends and receives is of some.
        dist.all_reduce(torch.zeros((), device=device), group=self.group)

    # ---- training

    def forward_backward(self, runs: Sequence[Inputs]) -> Tensor:
        """Forward and backward of all of a step's schedule runs. Collective.

        runs: the arguments of Transformer for each run, on the device, all of one shape.
        Returns the sum of the token cross-entropies, float64 scalar, the same on all ranks of the pp axis.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        with self._step.running():
            self._renew_second_copies()
            for index, inputs in enumerate(runs):
                losses = self._run(inputs, last=index == len(runs) - 1)
                if losses:
                    total += torch.stack(losses).sum(dtype=torch.float64)
            self._sum_tied_gradients()
            dist.all_reduce(total, group=self.group)
        self._measured = partial(self._bubble, self._computing.take(), self._step.take())
        return total

    def _run(self, inputs: Inputs, last: bool) -> list[Tensor]:
        """One run of the schedule; the microbatches' losses where the last stage is."""
        microbatches = split(inputs, self._microbatches)
        for stage in self._stages:
            stage.microbatches = microbatches
            stage.last_run = last
        losses: list[Tensor] = []
        # The loss is what the last stage returns; a target is asked for all the same.
        self._schedule.step(target=torch.zeros(self._microbatches), losses=losses, return_outputs=False)
        for stage in self._stages:
            stage.microbatches = []
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def _renew_second_copies(self) -> None:
        """A table that two stages of one rank hold is updated, saved and loaded in the first's; the last's follows."""
        for first, second in self._second_copies:
            _local(second).copy_(_local(first))

    @torch.no_grad()
    def _sum_tied_gradients(self) -> None:
        for first, second in self._second_copies:
            assert first.grad is not None and second.grad is not None, "a tied table has no gradient"
            _local(first.grad).add_(_local(second.grad))
            second.grad = None
        if self._tied_group is not None:
            gradient = self.parameters[TIED].grad
            assert gradient is not None, "a tied table has no gradient"
            dist.all_reduce(_local(gradient), group=self._tied_group)

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self, inputs: Inputs) -> Tensor:
        """Sum of the token cross-entropies of one batch, float64 scalar, the same on all ranks of the pp axis.
        Collective.

        A forward-only loop of its own: torch's schedules cannot all do it, and those that can take gradients away.
        """
        self._renew_second_copies()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        microbatches = split(inputs, min(self._microbatches, inputs["tokens_or_h"].shape[0]))
        models = {model.index: model for model in self._models}
        last = len(self.plan.layers) - 1

        def transfer(op: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
            return dist.P2POp(op, tensor, group=self.group, group_peer=self.plan.rank_of(stage))

        hidden = {(0, number): microbatch["tokens_or_h"] for number, microbatch in enumerate(microbatches)}
        for tick in forward_ticks(self.plan, len(microbatches)):
            transfers: list[dist.P2POp] = []
            for stage, number in tick:
                after = stage + 1
                if stage in models:
                    arguments = stage_arguments(microbatches[number], stage == last)
                    out = models[stage].module(hidden.pop((stage, number)), **arguments)
                    if stage == last:
                        total += out
                    elif after in models:
                        hidden[after, number] = out
                    else:
                        transfers.append(transfer(dist.isend, out.contiguous(), after))
                    if number == len(microbatches) - 1:
                        models[stage].release()
                elif after in models:
                    shape = (microbatches[number]["tokens_or_h"].shape[0], *self._hidden.shape[1:])
                    hidden[after, number] = torch.empty(shape, dtype=self._hidden.dtype, device=self._device)
                    transfers.append(transfer(dist.irecv, hidden[after, number], stage))
            # Both directions at once, and the same ticks on all ranks. One by one, the sends and receives of two ranks
            # share a queue under NCCL: with several stages a rank a send would wait behind a receive that waits for it.
            for work in dist.batch_isend_irecv(transfers) if transfers else ():
                work.wait()
        dist.all_reduce(total, group=self.group)
        return total

    # ---- metrics

    def bubble(self) -> Callable[[], dict[str, float]]:
        """Reads, also when another step runs by then, of the step just launched: the share of its forward and backward
        in which a rank's stages do not compute, on average and on the worst rank, what the schedule promises, and
        (K - 1) / (M + K - 1) for K ranks. Reading is collective over the pp axis."""
        return self._measured

    def _bubble(self, computing: Callable[[], float], whole: Callable[[], float]) -> dict[str, float]:
        step = whole()
        idle = 1.0 - computing() / step if step else 0.0
        shares: list[Any] = [None] * self.plan.pp
        dist.all_gather_object(shares, idle, group=self.group)
        m, k = self._microbatches, self.plan.pp
        return {
            "bubble_fraction": sum(shares) / len(shares),
            "bubble_fraction_worst": max(shares),
            "bubble_fraction_schedule": self.plan.ideal_bubble(m),
            "bubble_fraction_1f1b": (k - 1) / (m + k - 1),
        }


def split(inputs: Inputs, count: int) -> list[dict[str, Tensor]]:
    """A batch as `count` microbatches, by rows; what has no rows (positions [S]) is the same in each."""
    rows = inputs["tokens_or_h"].shape[0]
    chunks: dict[str, Sequence[Tensor]] = {
        name: value.tensor_split(count) if value.ndim > 1 and value.shape[0] == rows else [value] * count
        for name, value in inputs.items()
    }
    return [{name: parts[number] for name, parts in chunks.items()} for number in range(count)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
