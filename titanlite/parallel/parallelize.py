"""From a config to a model that is laid out over the ranks, with its weights: the one place where the order is fixed.

Pipeline split -> build on meta -> tensor parallelism -> expert parallelism -> context parallelism -> activation
checkpointing -> compile per block -> FSDP -> materialise -> initial weights. Under tensor parallelism and with experts
compile comes before checkpointing. DDP cannot wrap meta tensors: there it comes after materialising.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# Private in torch (seen working on 2.11.0 and 2.13.0, CPU). The public way to a shard's place is to shard an arange.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.config.layout import PipelinePlan, plan_batch, plan_pipeline, resolve_zero_stage
from titanlite.config.schema import (
    ActivationCheckpointConfig,
    CompileConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titanlite.model.expert_balance import ExpertBalance
from titanlite.model.init import init_
from titanlite.model.transformer import Transformer, moe_layers
from titanlite.parallel import gradients
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallel.context_parallel import apply_context_parallel, shard_sequence
from titanlite.parallel.data_parallel import Replicated, Sharded, Single
from titanlite.parallel.expert_parallel import apply_expert_parallel
from titanlite.parallel.gradients import GradientStats
from titanlite.parallel.mesh import Meshes
from titanlite.parallel.pipeline_parallel import Pipeline, StageModel, StagePart, stage_parts
from titanlite.parallel.runtime import Ranks
from titanlite.parallel.tensor_parallel import apply_tensor_parallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Batch = Mapping[str, torch.Tensor]


class ParallelModel:
    """This rank's part of the model, and what a trainer does with it.

    parameters:   canonical FQN, the same everywhere -> float32 parameter at rest, a DTensor when sharded, else plain.
    buffers:      FQN -> buffer that belongs to the model's state, plain, equal on all ranks that have it.
    expert_loads: int64 [n_layers, n_experts], assignments of the last step to each expert; zero for dense layers.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Single | Replicated | Sharded,
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, torch.Tensor],
        balance: ExpertBalance,
        device: torch.device,
        meshes: Meshes,
    ) -> None:
        self.module = model
        self._strategy = strategy
        self.parameters = parameters
        self.buffers = buffers
        self.balance = balance
        self.expert_loads = balance.no_loads()
        self._device = device
        self._meshes = meshes

    def shard(self, batch: Batch) -> Batch:
        """This rank's part of each sequence: what forward_backward and evaluate take. Targets are counted after it."""
        return shard_sequence(batch, self._meshes.cp) if self._meshes.cp.size() > 1 else batch

    def release(self) -> None:
        """Free what a forward pass without backward left gathered."""
        self._strategy.release()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Forward and backward of this rank's microbatches of one step. Collective.

        batches: "tokens" and "labels", int64 [B, S], -100 = ignored, and "documents", int [B, S], where attention stays
        within documents, each through shard; every rank has the same number of them.
        Returns the sum of their token cross-entropies, a float64 scalar on the device. Afterwards every parameter's
        gradient is that of the sum over all ranks' microbatches, scaled by nothing, added to what was there before.
        """
        assert batches, "a step has at least one microbatch"
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(batches):
            with self._strategy.microbatch(last=index == len(batches) - 1):
                loss = self._strategy.module(**self._inputs(batch))
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Sum of the token cross-entropies of one batch, scalar on the device: float32, float64 under a pipeline.
        Collective under FSDP and under a pipeline."""
        loss = self.module(**self._inputs(batch))
        self._strategy.release()
        return loss

    def finish_gradients(self, tokens: torch.Tensor, max_norm: float) -> GradientStats:
        """gradients.finish of the whole model. Collective."""
        return gradients.finish(self.parameters.values(), tokens, max_norm)

    def finish_step(self, found_inf: torch.Tensor) -> dict[str, torch.Tensor]:
        """After the optimizer: update what balances the experts, unless found_inf is 1, and start to count anew.

        found_inf: 0 or 1, a float32 scalar on the device, the same on all ranks, as GradientStats has it.
        Returns ExpertBalance.metrics of the step, device scalars, the same on all ranks; nothing without experts.
        Collective.
        """
        if self.balance.empty:
            return {}
        loads, sums = self.balance.take()
        if self._meshes.layout.world_size > 1:  # each rank has counted other tokens, or other layers
            dist.all_reduce(loads)
            dist.all_reduce(sums)
        self.balance.update_biases(loads, found_inf)
        self.expert_loads = loads
        return self.balance.metrics(loads, sums)

    def metrics(self) -> Callable[[], dict[str, float]]:
        """What this form of parallelism adds to the row of the step just launched, to be read later, also when another
        step runs. Reading it is collective, and the host may wait for the device."""
        return dict

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The model's arguments, on the device."""
        keys = {"tokens_or_h": "tokens", "labels": "labels", "documents": "documents", "positions": "positions"}
        return {name: batch[key].to(self._device, non_blocking=True) for name, key in keys.items() if key in batch}


class PipelinedModel(ParallelModel):
    """This rank's stages. A batch of forward_backward is one run of the schedule."""

    def __init__(
        self, pipeline: Pipeline, stages: Sequence[ParallelModel], device: torch.device, meshes: Meshes
    ) -> None:
        module = nn.ModuleList(stage.module for stage in stages)
        buffers = {fqn: buffer for stage in stages for fqn, buffer in stage.buffers.items()}
        balance = stages[0].balance.with_layers_of(stage.balance for stage in stages)
        # Single does nothing: each stage has a strategy of its own.
        super().__init__(module, Single(module), pipeline.parameters, buffers, balance, device, meshes)
        self._pipeline = pipeline
        self._stages = list(stages)

    def release(self) -> None:
        for stage in self._stages:
            stage.release()

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """As without a pipeline. The loss is the same on all ranks of the pp axis, each of which has the batches."""
        assert batches, "a step has at least one schedule run"
        return self._pipeline.forward_backward([self._inputs(batch) for batch in batches])

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """As without a pipeline; the same on all ranks of the pp axis."""
        return self._pipeline.evaluate(self._inputs(batch))

    def finish_gradients(self, tokens: torch.Tensor, max_norm: float) -> GradientStats:
        return gradients.finish(self._pipeline.counted, tokens, max_norm, self._pipeline.group)

    def metrics(self) -> Callable[[], dict[str, float]]:
        return self._pipeline.bubble()


def parallelize(
    model_config: ModelConfig,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile_config: CompileConfig,
    *,
    seed: int,
    ranks: Ranks,
    part: StagePart | None = None,
) -> ParallelModel:
    """Build the model of this rank, laid out as the parallelism section says, with its initial weights. Collective.

    part: build this part of the model, a pipeline stage, instead.
    """
    plan = plan_pipeline(model_config, parallelism)
    if plan is not None and part is None:
        sections = (model_config, training, parallelism, activation_checkpoint, compile_config)
        lay_out = partial(parallelize, *sections, seed=seed, ranks=ranks)
        return _pipeline(plan, lay_out, model_config, training, ranks)
    param_dtype = DTYPES[training.mixed_precision_param]
    reduce_dtype = DTYPES[training.mixed_precision_reduce]
    with torch.device("meta"):
        model = Transformer(
            model_config,
            compute_dtype=param_dtype,
            loss_chunk_tokens=training.loss_chunk_tokens,
            **({} if part is None else vars(part)),
        )
    if ranks.layout.tp > 1:
        apply_tensor_parallel(model, ranks.meshes, model_config)
    if model_config.moe.n_experts:
        apply_expert_parallel(model, ranks.meshes)
    blocks = list(model.layers.values())
    if ranks.layout.cp > 1:
        apply_context_parallel(model, ranks.meshes.cp, parallelism.cp_method)
    compile_first = ranks.layout.tp > 1 or model_config.moe.n_experts > 0
    if compile_config.enable and compile_first:
        # Checkpointing inside of compiled code, torch 2.13 saves the mesh of a DTensor among the tensors and fails; and
        # what a compiled block leaves out, as it does experts, must not be where it recomputes.
        _compile(blocks, forward_only=True)
    apply_activation_checkpoint(model.layers, activation_checkpoint, ranks.layout.tp > 1)
    if compile_config.enable and not compile_first:
        _compile(blocks, forward_only=False)

    strategy: Single | Replicated | Sharded
    if ranks.world_size == 1 or ranks.layout.uses_ddp:
        parameters = materialise(model, model_config, seed, ranks.device)
        # fully_shard at size 1 is exact but costs up to 17 % of a step.
        strategy = Single(model) if ranks.world_size == 1 else Replicated(model, ranks.device, reduce_dtype)
    else:
        zero_stage = resolve_zero_stage(parallelism, ranks.layout)
        pipeline = part is not None
        strategy = Sharded(model, blocks, ranks.meshes, zero_stage, param_dtype, reduce_dtype, pipeline)
        parameters = materialise(model, model_config, seed, ranks.device)
    balance = ExpertBalance(model_config, moe_layers(model), ranks.device)
    buffers = persistent_buffers(model)
    return ParallelModel(model, strategy, parameters, buffers, balance, ranks.device, ranks.meshes)


def _pipeline(
    plan: PipelinePlan,
    lay_out: Callable[..., ParallelModel],
    model_config: ModelConfig,
    training: TrainingConfig,
    ranks: Ranks,
) -> PipelinedModel:
    """This rank's stages, each laid out by lay_out(part=...), and the pipeline that runs them. Collective."""
    parts = stage_parts(plan, ranks.meshes.pp.get_local_rank())
    stages = {index: lay_out(part=part) for index, part in parts.items()}
    batch, layout = plan_batch(training, ranks.layout, plan), ranks.layout
    rows, length = batch.local_batch_size // batch.microbatches, training.seq_len // layout.cp
    shape = rows, length // layout.tp, model_config.dim
    dtype = DTYPES[training.mixed_precision_param]
    pipeline = Pipeline(
        plan,
        batch.microbatches,
        [StageModel(index, stage.module, stage.parameters, stage.release) for index, stage in stages.items()],
        ranks.meshes,
        ranks.device,
        tied=model_config.tie_word_embeddings,
        tokens=torch.empty(rows, length, dtype=torch.int64, device="meta"),
        hidden=torch.empty(shape, dtype=dtype, device="meta", requires_grad=True),
    )
    return PipelinedModel(pipeline, list(stages.values()), ranks.device, ranks.meshes)


def _compile(blocks: Sequence[nn.Module], forward_only: bool) -> None:
    """torch.compile each block: one small graph that all blocks share, and FSDP's and DDP's hooks stay between them.

    forward_only: the forward as it is now; what is put around it later, such as checkpointing, stays outside.
    """
    # DDP's own graph splitter would cut blocks at bucket borders, and cannot handle checkpointed ones. The switch is
    # private in torch (seen working on 2.11.0 and 2.13.0, CPU).
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        if forward_only:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()


def materialise(model: Transformer, config: ModelConfig, seed: int, device: torch.device) -> dict[str, nn.Parameter]:
    """Allocate a meta model on the device and fill it: every rank computes only the elements it holds.

    Returns the parameters by FQN. They are collected here, where all are at rest: while FSDP has a block gathered, the
    module shows the gathered ones instead.
    """
    model.to_empty(device=device)
    model.init_buffers(device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            local, offsets = local_block(parameter)
            init_(local, name, config, seed, global_shape=tuple(parameter.shape), offsets=offsets)
    return parameters


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are saved, by FQN."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def local_block(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter (possibly nothing), and where that starts in each dim of the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.ndim
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        local = parameter.to_local()
    assert tuple(local.shape) == tuple(shape), "torch shards a parameter as it says it does"
    return local, tuple(offsets)
