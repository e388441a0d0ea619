"""Faults that the parity comparison must notice: each is one line gone wrong, planted in the workers of one layout.

A later parallelism adds its own. A fault names the layout it is planted in; the reference run stays clean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite import trainer
from titanlite.data import loader
from titanlite.model import attention, transformer
from titanlite.optim import optimizer
from titanlite.parallel import data_parallel, gradients, mesh, parallelize, pipeline_parallel, runtime


@dataclass(frozen=True)
class Fault:
    layout: str
    plant: Callable[[], None]
    kind: str = ""  # of the run it is planted in: "", "masked", "tied", "deep" or "deep tied"


FAULTS: dict[str, Fault] = {}


def fault(layout: str, kind: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(plant: Callable[[], None]) -> Callable[[], None]:
        FAULTS[plant.__name__] = Fault(layout, plant, kind)
        return plant

    return add


def _set(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: the fault would be planted nowhere"
    setattr(owner, name, value)


# ---- gradients over ranks


@fault("ddp 2")
def ddp_averages_gradients() -> None:
    right = data_parallel._sum_bucket

    def mean(dtype, bucket):
        bucket.buffer().div_(dist.get_world_size())
        return right(dtype, bucket)

    _set(data_parallel, "_sum_bucket", mean)


@fault("ddp 3")
def ddp_does_not_reduce() -> None:
    def local(dtype, bucket):
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    _set(data_parallel, "_sum_bucket", local)


@fault("ddp 2, accumulation 4")
def ddp_reduces_every_microbatch() -> None:
    _set(data_parallel.Replicated, "microbatch", lambda self, last: nullcontext())


@fault("fsdp 2")
def fsdp_averages_gradients() -> None:
    _set(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    _set(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, enable: None)


@fault("hsdp 2x2")
def hsdp_replicas_are_not_reduced() -> None:
    _set(mesh.Meshes, "hsdp", property(lambda self: self.fsdp))


@fault("fsdp 2, accumulation 4")
def first_microbatch_is_dropped() -> None:
    right = parallelize.ParallelModel.forward_backward

    def without(self: Any, batches: Sequence[Any]) -> Tensor:
        return right(self, batches[1:])

    _set(parallelize.ParallelModel, "forward_backward", without)


@fault("fsdp 2, zero 1, accumulation 4")
def only_the_last_microbatch_is_reduced() -> None:
    right = parallelize.ParallelModel.forward_backward

    def forgetting(self: Any, batches: Sequence[Any]) -> Tensor:
        with torch.no_grad():
            early = sum((self.evaluate(batch) for batch in batches[:-1]), torch.zeros(()))
        return right(self, batches[-1:]) + early  # the loss is right, the gradient is the last microbatch's

    _set(parallelize.ParallelModel, "forward_backward", forgetting)


# ---- norm, token count, scale


@fault("fsdp 2")
def norm_of_the_own_shard() -> None:
    _set(gradients, "dist", SimpleNamespace(all_reduce=lambda *args, **keywords: None))


@fault("hsdp 2x2")
def norm_counts_replicas_twice() -> None:
    right = gradients.global_norm
    _set(gradients, "global_norm", lambda *args: right(*args) * 2**0.5)


@fault("fsdp 3")
def tokens_and_loss_of_the_own_rank() -> None:
    right = runtime.Ranks.sum_over_data
    # [loss, targets] of a step; validation's three sums are left right.
    _set(runtime.Ranks, "sum_over_data", lambda self, t: t if t.numel() == 2 else right(self, t))


@fault("fsdp 2")
def gradients_are_scaled_by_a_thousandth_too_much() -> None:
    right = gradients.finish

    def scaled(*args: Any, **keywords: Any) -> gradients.GradientStats:
        stats = right(*args, **keywords)
        return gradients.GradientStats(stats.norm, stats.grad_scale * 1.001, stats.found_inf)

    _set(gradients, "finish", scaled)


@fault("ddp 2")
def clip_before_the_token_scale() -> None:
    right = gradients.finish

    def unscaled(parameters: Any, tokens: Tensor, max_norm: float) -> gradients.GradientStats:
        stats = right(parameters, tokens, 0.0)
        clip = (max_norm / (stats.norm * tokens + 1e-6)).clamp(max=1.0)
        return gradients.GradientStats(stats.norm, (tokens / clip).float(), stats.found_inf)

    _set(gradients, "finish", unscaled)


# ---- data


@fault("ddp 2")
def every_rank_takes_the_same_samples() -> None:
    right = trainer.build_train_loader
    _set(trainer, "build_train_loader", lambda *a, **k: right(*a, **(k | {"data_rank": 0})))


@fault("fsdp 3")
def sample_order_depends_on_the_world() -> None:
    right = trainer.build_train_loader
    _set(trainer, "build_train_loader", lambda *a, **k: right(*a, **(k | {"seed": k["seed"] + k["data_size"]})))


@fault("fsdp 2")
def two_samples_are_swapped() -> None:
    right = loader._Samples.__getitems__

    def swapped(self: Any, numbers: list[int]) -> Any:
        return right(self, [*numbers[:-2], numbers[-1], numbers[-2]])

    _set(loader._Samples, "__getitems__", swapped)


@fault("fsdp 4")
def validation_counts_its_padding() -> None:
    right = loader.ValidationData.batches

    def unpadded(self: Any, *args: Any) -> Any:
        for batch in right(self, *args):
            batch["labels"][batch["labels"] == loader.IGNORED] = 0
            yield batch

    _set(loader.ValidationData, "batches", unpadded)


@fault("ddp 2, accumulation 4", kind="masked")
def one_rank_has_no_documents() -> None:
    right = parallelize.ParallelModel._inputs

    def forgetful(self: Any, batch: Any) -> Any:
        inputs = right(self, batch)
        if dist.get_rank() == 1:
            del inputs["documents"]
        return inputs

    _set(parallelize.ParallelModel, "_inputs", forgetful)


@fault("fsdp 2", kind="masked")
def validation_has_no_documents() -> None:
    right = loader.ValidationData.batches

    def forgetful(self: Any, *args: Any) -> Any:
        return ({key: batch[key] for key in batch if key != "documents"} for batch in right(self, *args))

    _set(loader.ValidationData, "batches", forgetful)


# ---- weights and updates


@fault("fsdp 2")
def initial_weights_ignore_the_offset() -> None:
    right = parallelize.local_block

    def at_zero(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        local, offsets = right(parameter)
        return local, (0,) * len(offsets)

    _set(parallelize, "local_block", at_zero)


@fault("ddp 4")
def lr_grows_with_the_world() -> None:
    right = trainer.lr_at
    _set(trainer, "lr_at", lambda *args: right(*args) * dist.get_world_size())


@fault("fsdp 3")
def norms_decay_too() -> None:
    right = optimizer.AdamW.__init__

    def decaying(self: Any, *args: Any) -> None:
        right(self, *args)
        for group in self._groups:
            group.weight_decay = self._config.weight_decay

    _set(optimizer.AdamW, "__init__", decaying)


@fault("fsdp 2")
def a_parameter_is_not_updated() -> None:
    right = optimizer.AdamW.step

    def skipping(self: Any, *args: Any) -> None:
        for group in self._groups:
            for values in (group.parameters, group.exp_avg, group.exp_avg_sq, group.steps):
                if self.n_updates == 0:
                    values.pop()
        right(self, *args)

    _set(optimizer.AdamW, "step", skipping)


# ---- model


@fault("accumulation 2")
def last_token_of_a_microbatch_has_no_loss() -> None:
    right = transformer.cross_entropy_sum
    _set(transformer, "cross_entropy_sum", lambda h, w, labels, **k: right(h[:-1], w, labels[:-1], **k))


@fault("fsdp 2")
def padding_rows_count_as_words() -> None:
    right = transformer.cross_entropy_sum
    _set(transformer, "cross_entropy_sum", lambda h, w, y, **k: right(h, w, y, **(k | {"vocab_size": w.shape[0]})))


@fault("ddp 2")
def kv_heads_are_swapped() -> None:
    right = attention.causal_attention
    _set(attention, "causal_attention", lambda q, k, v, mask: right(q, k.roll(1, 1), v.roll(1, 1), mask))


@fault("fsdp 2")
def rotary_halves_are_swapped() -> None:
    right = attention.apply_rope
    _set(attention, "apply_rope", lambda x, cos, sin: right(x, cos, -sin) if x.shape[2] == 6 else right(x, cos, sin))


@fault("fsdp 2, accumulation 2, full recomputation")
def recomputation_sees_other_rotary_angles() -> None:
    right = attention.apply_rope
    calls = [0]

    def drifting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # 3 blocks rotate q and k: 6 calls in the forward pass of a microbatch, then 6 in its recomputation.
        recomputing = calls[0] % 12 >= 6
        calls[0] += 1
        return right(x, cos, sin * 1.001) if recomputing else right(x, cos, sin)

    _set(attention, "apply_rope", drifting)


@fault("fsdp 2", kind="masked")
def documents_start_one_token_late() -> None:
    right = transformer.document_mask

    def late(documents: Tensor, dtype: torch.dtype) -> Tensor:
        return right(torch.cat((documents[:, :1], documents[:, :-1]), dim=1), dtype)

    _set(transformer, "document_mask", late)


@fault("fsdp 2, accumulation 2, full recomputation", kind="masked")
def recomputation_has_the_causal_mask_only() -> None:
    right = attention.Attention.forward
    calls = [0]

    def forgetful(self: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        # 3 blocks: 3 calls in the forward pass of a microbatch, then 3 in its recomputation.
        recomputing = calls[0] % 6 >= 3
        calls[0] += 1
        return right(self, x, cos, sin, torch.full_like(mask, -torch.inf).triu(1) if recomputing else mask)

    _set(attention.Attention, "forward", forgetful)


# ---- pipelines


@fault("pp 2")
def a_stage_is_left_out_of_the_norm() -> None:
    right = gradients.global_norm

    def without(parameters: Any, stages: Any = None) -> Tensor:
        norm = right(parameters).square()  # of this rank's stages
        dist.broadcast(norm, src=0)
        return norm.sqrt()

    _set(gradients, "global_norm", without)


@fault("pp 3")
def every_stage_has_its_own_norm() -> None:
    right = gradients.global_norm
    _set(gradients, "global_norm", lambda parameters, stages=None: right(parameters))


@fault("pp 2")
def gradients_are_divided_by_microbatches() -> None:
    right = pipeline_parallel.PipelineStage.perform_reduce_grad
    _set(pipeline_parallel.Stage, "perform_reduce_grad", lambda self, factor: right(self, self.chunks))


@fault("pp 2, accumulation 3")
def every_run_of_a_schedule_drops_the_ones_before() -> None:
    right = pipeline_parallel.Pipeline._run

    def forgetful(self: Any, inputs: Any, last: bool) -> Any:
        for parameter in self.parameters.values():
            parameter.grad = None
        return right(self, inputs, True)

    _set(pipeline_parallel.Pipeline, "_run", forgetful)


@fault("pp 2, GPipe")
def labels_come_in_another_order_than_tokens() -> None:
    right = pipeline_parallel.split

    def mixed(inputs: Any, count: int) -> Any:
        parts = right(inputs, count)
        labels = [part["labels"] for part in parts]
        return [part | {"labels": other} for part, other in zip(parts, [*labels[1:], labels[0]], strict=True)]

    _set(pipeline_parallel, "split", mixed)


@fault("pp 2")
def the_first_stage_does_not_know_the_loss() -> None:
    right = pipeline_parallel.Pipeline.forward_backward

    def ignorant(self: Any, runs: Any) -> Tensor:
        return right(self, runs) * (dist.get_rank() == 1)

    _set(pipeline_parallel.Pipeline, "forward_backward", ignorant)


@fault("pp 2")
def validation_loses_a_microbatch() -> None:
    right = pipeline_parallel.Pipeline.evaluate

    def losing(self: Any, inputs: Any) -> Tensor:
        return right(self, {name: value[1:] for name, value in inputs.items()})

    _set(pipeline_parallel.Pipeline, "evaluate", losing)


@fault("pp 2", kind="masked")
def later_stages_have_the_first_microbatchs_documents() -> None:
    right = pipeline_parallel.Stage.forward_one_chunk

    def first(self: Any, *args: Any, **keywords: Any) -> Any:
        if not self.is_first:
            for microbatch in self.microbatches[1:]:
                microbatch["documents"] = self.microbatches[0]["documents"]
        return right(self, *args, **keywords)

    _set(pipeline_parallel.Stage, "forward_one_chunk", first)


@fault("pp 3", kind="tied")
def copies_of_a_tied_table_are_not_summed() -> None:
    _set(pipeline_parallel.Pipeline, "_sum_tied_gradients", lambda self: None)


@fault("pp 3", kind="tied")
def a_tied_table_counts_twice_in_the_norm() -> None:
    right = pipeline_parallel.Pipeline.__init__

    def counting(self: Any, *args: Any, **keywords: Any) -> None:
        right(self, *args, **keywords)
        self.counted = list(self.parameters.values())

    _set(pipeline_parallel.Pipeline, "__init__", counting)


@fault("pp 2, ZBVZeroBubble", kind="deep tied")
def the_last_stage_keeps_its_first_copy_of_a_tied_table() -> None:
    right = pipeline_parallel.Pipeline._renew_second_copies
    calls = [0]

    def once(self: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            right(self)

    _set(pipeline_parallel.Pipeline, "_renew_second_copies", once)


@fault("pp 2, DualPipeV", kind="deep")
def two_stages_have_each_others_layers() -> None:
    right = parallelize.stage_parts

    def swapped(plan: Any, rank: int) -> Any:
        first, second, third, last = plan.layers
        return right(replace(plan, layers=(first, third, second, last)), rank)

    _set(parallelize, "stage_parts", swapped)
