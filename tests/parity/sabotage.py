"""Faults that the parity comparison must notice: each is one line gone wrong, planted in the workers of one layout.

A later parallelism adds its own. A fault names the layout it is planted in and what must be found, so that one that
breaks something else, or breaks down, does not count as noticed; the reference run stays clean.
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
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from titanlite import trainer
from titanlite.data import loader
from titanlite.data.order import SampleOrder
from titanlite.data.prepare import PreparedData
from titanlite.model import attention, expert_balance, moe, transformer
from titanlite.optim import optimizer
from titanlite.parallel import (
    activation_checkpoint,
    collectives,
    context_parallel,
    data_parallel,
    expert_parallel,
    gradients,
    mesh,
    parallelize,
    pipeline_parallel,
    runtime,
    tensor_parallel,
)


@dataclass(frozen=True)
class Fault:
    """cause: one of promise.CAUSES, what is wrong in the first step that is not as it should be."""

    layout: str
    cause: str
    plant: Callable[[], None]


FAULTS: dict[str, Fault] = {}


def fault(layout: str, cause: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(plant: Callable[[], None]) -> Callable[[], None]:
        FAULTS[plant.__name__] = Fault(layout, cause, plant)
        return plant

    return add


def _set(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: the fault would be planted nowhere"
    setattr(owner, name, value)


# ---- gradients over ranks


@fault("ddp 2", "norm")
def ddp_averages_gradients() -> None:
    right = data_parallel._sum_bucket

    def mean(dtype, bucket):
        bucket.buffer().div_(dist.get_world_size())
        return right(dtype, bucket)

    _set(data_parallel, "_sum_bucket", mean)


@fault("ddp 3", "gradient")
def ddp_does_not_reduce() -> None:
    def local(dtype, bucket):
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    _set(data_parallel, "_sum_bucket", local)


@fault("ddp 2, accumulation 4", "gradient")
def ddp_reduces_every_microbatch() -> None:
    _set(data_parallel.Replicated, "microbatch", lambda self, last: nullcontext())


@fault("fsdp 2", "norm")
def fsdp_averages_gradients() -> None:
    _set(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    _set(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, enable: None)


@fault("hsdp 2x2", "gradient")
def hsdp_replicas_are_not_reduced() -> None:
    _set(mesh.Meshes, "hsdp", property(lambda self: self.fsdp))


@fault("fsdp 2, accumulation 4", "loss")
def first_microbatch_is_dropped() -> None:
    right = parallelize.ParallelModel.forward_backward

    def without(self: Any, batches: Sequence[Any]) -> Tensor:
        return right(self, batches[1:])

    _set(parallelize.ParallelModel, "forward_backward", without)


@fault("fsdp 2, zero 1, accumulation 4", "gradient")
def only_the_last_microbatch_is_reduced() -> None:
    right = parallelize.ParallelModel.forward_backward

    def forgetting(self: Any, batches: Sequence[Any]) -> Tensor:
        with torch.no_grad():
            early = sum((self.evaluate(batch) for batch in batches[:-1]), torch.zeros(()))
        return right(self, batches[-1:]) + early  # the loss is right, the gradient is the last microbatch's

    _set(parallelize.ParallelModel, "forward_backward", forgetting)


# ---- norm, token count, scale


@fault("fsdp 2", "norm")
def norm_of_the_own_shard() -> None:
    _set(gradients, "dist", SimpleNamespace(all_reduce=lambda *args, **keywords: None))


@fault("hsdp 2x2", "norm")
def norm_counts_replicas_twice() -> None:
    right = gradients.global_norm
    _set(gradients, "global_norm", lambda *args: right(*args) * 2**0.5)


@fault("fsdp 3", "loss")
def tokens_and_loss_of_the_own_rank() -> None:
    right = runtime.Ranks.sum_over_data
    # [loss, targets] of a step; validation's three sums are left right.
    _set(runtime.Ranks, "sum_over_data", lambda self, t: t if t.numel() == 2 else right(self, t))


@fault("fsdp 2", "gradient")
def gradients_are_scaled_by_a_thousandth_too_much() -> None:
    right = gradients.finish

    def scaled(*args: Any, **keywords: Any) -> gradients.GradientStats:
        stats = right(*args, **keywords)
        return gradients.GradientStats(stats.norm, stats.grad_scale * 1.001, stats.found_inf)

    _set(gradients, "finish", scaled)


@fault("ddp 2", "gradient")
def clip_before_the_token_scale() -> None:
    right = gradients.finish

    def unscaled(parameters: Any, tokens: Tensor, max_norm: float) -> gradients.GradientStats:
        stats = right(parameters, tokens, 0.0)
        clip = (max_norm / (stats.norm * tokens + 1e-6)).clamp(max=1.0)
        return gradients.GradientStats(stats.norm, (tokens / clip).float(), stats.found_inf)

    _set(gradients, "finish", unscaled)


# ---- data


@fault("ddp 2", "samples")
def every_rank_takes_the_same_samples() -> None:
    right = trainer.build_train_loader
    _set(trainer, "build_train_loader", lambda *a, **k: right(*a, **(k | {"data_rank": 0})))


@fault("fsdp 3", "samples")
def sample_order_depends_on_the_world() -> None:
    right = trainer.build_train_loader

    def of_another_seed(prepared: PreparedData, order: SampleOrder, **keys: Any) -> Any:
        seed = order.seed + keys["data_size"]
        other = SampleOrder(order.windows, order.quotas, seed, order.epochs, order.phase)
        return right(prepared, other, **keys)

    _set(trainer, "build_train_loader", of_another_seed)


@fault("fsdp 2", "samples")
def two_samples_are_swapped() -> None:
    right = loader._Samples.__getitems__

    def swapped(self: Any, numbers: list[int]) -> Any:
        return right(self, [*numbers[:-2], numbers[-1], numbers[-2]])

    _set(loader._Samples, "__getitems__", swapped)


@fault("fsdp 4", "validation")
def validation_counts_its_padding() -> None:
    right = loader.ValidationData.batches

    def unpadded(self: Any, *args: Any) -> Any:
        for batch in right(self, *args):
            batch["labels"][batch["labels"] == loader.IGNORED] = 0
            yield batch

    _set(loader.ValidationData, "batches", unpadded)


@fault("ddp 2, accumulation 4, masked", "loss")
def one_rank_has_no_documents() -> None:
    right = parallelize.ParallelModel._inputs

    def forgetful(self: Any, batch: Any) -> Any:
        inputs = right(self, batch)
        if dist.get_rank() == 1:
            del inputs["documents"]
        return inputs

    _set(parallelize.ParallelModel, "_inputs", forgetful)


@fault("fsdp 2, accumulation 2, full recomputation, masked", "validation")
def validation_has_no_documents() -> None:
    right = loader.ValidationData.batches

    def forgetful(self: Any, *args: Any) -> Any:
        return ({key: batch[key] for key in batch if key != "documents"} for batch in right(self, *args))

    _set(loader.ValidationData, "batches", forgetful)


# ---- weights and updates


@fault("fsdp 2", "initial weights")
def initial_weights_ignore_the_offset() -> None:
    right = parallelize.local_block

    def at_zero(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        local, offsets = right(parameter)
        return local, (0,) * len(offsets)

    _set(parallelize, "local_block", at_zero)


@fault("ddp 4", "lr")
def lr_grows_with_the_world() -> None:
    right = trainer.lr_at
    _set(trainer, "lr_at", lambda *args: right(*args) * dist.get_world_size())


@fault("fsdp 3", "loss")
def norms_decay_too() -> None:
    right = optimizer.AdamW.__init__

    def decaying(self: Any, *args: Any) -> None:
        right(self, *args)
        for group in self._groups:
            group.weight_decay = self._config.weight_decay

    _set(optimizer.AdamW, "__init__", decaying)


@fault("fsdp 2", "gradient")
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


@fault("accumulation 2", "loss")
def last_token_of_a_microbatch_has_no_loss() -> None:
    right = transformer.cross_entropy_sum
    _set(transformer, "cross_entropy_sum", lambda h, w, labels, **k: right(h[:-1], w, labels[:-1], **k))


@fault("fsdp 2", "loss")
def padding_rows_count_as_words() -> None:
    right = transformer.cross_entropy_sum
    _set(transformer, "cross_entropy_sum", lambda h, w, y, **k: right(h, w, y, **(k | {"vocab_size": w.shape[0]})))


@fault("ddp 2", "loss")
def kv_heads_are_swapped() -> None:
    right = attention.causal_attention
    _set(attention, "causal_attention", lambda q, k, v, mask: right(q, k.roll(1, 1), v.roll(1, 1), mask))


@fault("fsdp 2", "loss")
def rotary_halves_are_swapped() -> None:
    right = attention.apply_rope
    _set(attention, "apply_rope", lambda x, cos, sin: right(x, cos, -sin) if x.shape[2] == 6 else right(x, cos, sin))


@fault("fsdp 2, accumulation 2, full recomputation", "gradient")
def recomputation_sees_other_rotary_angles() -> None:
    right = attention.apply_rope
    calls = [0]

    def drifting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # 3 blocks rotate q and k: 6 calls in the forward pass of a microbatch, then 6 in its recomputation.
        recomputing = calls[0] % 12 >= 6
        calls[0] += 1
        return right(x, cos, sin * 1.001) if recomputing else right(x, cos, sin)

    _set(attention, "apply_rope", drifting)


@fault("fsdp 2, accumulation 2, full recomputation, masked", "loss")
def documents_start_one_token_late() -> None:
    right = transformer.document_mask

    def late(documents: Tensor, dtype: torch.dtype) -> Tensor:
        return right(torch.cat((documents[:, :1], documents[:, :-1]), dim=1), dtype)

    _set(transformer, "document_mask", late)


@fault("fsdp 2, accumulation 2, full recomputation, masked", "gradient")
def recomputation_has_the_causal_mask_only() -> None:
    right = attention.Attention.forward
    calls = [0]

    def forgetful(self: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        # 3 blocks: 3 calls in the forward pass of a microbatch, then 3 in its recomputation.
        recomputing = calls[0] % 6 >= 3
        calls[0] += 1
        return right(self, x, cos, sin, torch.full_like(mask, -torch.inf).triu(1) if recomputing else mask)

    _set(attention.Attention, "forward", forgetful)


# ---- tensor parallelism


def _whole_weights_keep_their_own_gradient(those: Callable[[Any], bool]) -> None:
    """Some weights that all tp ranks hold are used without saying that their gradient is a summand."""
    right = tensor_parallel.local_part
    _set(tensor_parallel, "local_part", lambda weight: weight.to_local() if those(weight) else right(weight))


@fault("tp 2", "gradient")
def norm_gradients_are_not_summed_over_tp() -> None:
    _whole_weights_keep_their_own_gradient(lambda weight: weight.ndim == 1)


@fault("tp 2, tied", "gradient")
def qk_norm_gradients_are_not_summed_over_tp() -> None:
    _whole_weights_keep_their_own_gradient(lambda weight: weight.shape == (10,))


@fault("tp 4 over 2 kv heads", "gradient")
def shared_kv_gradients_are_not_summed_over_tp() -> None:
    _whole_weights_keep_their_own_gradient(lambda weight: weight.ndim == 2 and weight.placements == (Replicate(),))


@fault("tp 4 over 2 kv heads", "loss")
def a_tp_rank_takes_the_wrong_kv_head() -> None:
    def turned(config: Any, tp: Any) -> slice:
        head = tp.get_local_rank() % config.n_kv_heads
        return slice(head * config.resolved_head_dim, (head + 1) * config.resolved_head_dim)

    _set(tensor_parallel, "_kv_rows", turned)


@fault("tp 2, tied", "gradient")
def the_head_forgets_that_the_table_is_tied() -> None:
    right = tensor_parallel._head_of_sequence_parts
    _set(
        tensor_parallel,
        "_head_of_sequence_parts",
        lambda head, group, x, weight, labels: right(head, group, x, weight.detach(), labels),
    )


@fault("tp 2", "loss")
def softmax_is_over_the_own_rows() -> None:
    _set(tensor_parallel.VocabularyGroup, "sum", lambda self, t: t)


@fault("tp 4", "loss")
def largest_logit_is_of_the_own_rows() -> None:
    _set(tensor_parallel.VocabularyGroup, "max", lambda self, t: t)


@fault("tp 2", "loss")
def embedding_rows_are_off_by_one_rank() -> None:
    right = tensor_parallel._embed_own_rows

    def shifted(embedding: Any, start: int, group: Any, tokens: Tensor) -> Tensor:
        rows = embedding.weight.to_local().shape[0]
        return right(embedding, rows if start == 0 else 0, group, tokens)

    _set(tensor_parallel, "_embed_own_rows", shifted)


@fault("tp 4", "loss")
def output_rows_are_off_by_one() -> None:
    right = tensor_parallel._first_row
    calls = [0]

    def shifted(weight: Tensor) -> int:
        calls[0] += 1  # first the embedding's, then the output's
        return right(weight) + (calls[0] == 2 and right(weight) > 0)

    _set(tensor_parallel, "_first_row", shifted)


@fault("tp 2", "gradient")
def hidden_gradients_are_not_summed_over_tp() -> None:
    def own(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].contiguous(), None

    _set(tensor_parallel._Gather, "backward", staticmethod(own))


@fault("tp 4", "loss")
def sequence_parts_come_back_in_another_order() -> None:
    right = collectives.gather_sequence

    def turned(x: Tensor, group: Any) -> Tensor:
        return right(x, group).roll(x.shape[1], dims=1)

    _set(collectives, "gather_sequence", turned)


@fault("tp 2", "norm")
def targets_are_counted_by_every_tp_rank() -> None:
    def over_the_world(self: Any, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    _set(runtime.Ranks, "sum_over_data", over_the_world)


def _norm_with(placement: Any, replicated: bool) -> None:
    """While the norm is computed, one kind of placement is taken for what it is not."""
    right = gradients.global_norm

    def mistaken(*args: Any) -> Tensor:
        placement.is_replicate = lambda self: replicated
        norm = right(*args)
        del placement.is_replicate  # uncovers the C++ class's
        return norm

    _set(gradients, "global_norm", mistaken)


@fault("tp 2 x fsdp 2", "norm")
def norm_takes_strided_shards_for_copies() -> None:
    _norm_with(_StridedShard, True)


@fault("tp 2", "norm")
def norm_counts_what_all_tp_ranks_hold_twice() -> None:
    _norm_with(Replicate, False)


# ---- context parallelism


@fault("cp 2", "loss")
def targets_are_counted_once_per_cp_rank() -> None:
    right = runtime.Ranks.sum_over_data

    def counted_before_the_cut(self: Any, t: Tensor) -> Tensor:
        return right(self, t * t.new_tensor([1.0, 2.0]) if t.numel() == 2 else t)  # [loss, targets] of a step

    _set(runtime.Ranks, "sum_over_data", counted_before_the_cut)


@fault("cp 2", "loss")
def loss_is_not_summed_over_cp() -> None:
    _set(mesh.Meshes, "_loss", lambda self: self.batch)


@fault("cp 2 x fsdp 2", "gradient")
def gradients_are_not_summed_over_cp() -> None:
    _set(mesh.Meshes, "hsdp", property(lambda self: self.batch))


@fault("cp 4", "loss")
def two_chunks_are_swapped() -> None:
    # Ranks 0 and 1 have each other's second chunk: all tokens are there, and every rank thinks that it is right.
    right = context_parallel.zigzag_chunks

    def swapped(rank: int, size: int) -> tuple[int, int]:
        return right(rank, size)[0], right({0: 1, 1: 0}.get(rank, rank), size)[1]

    _set(context_parallel, "zigzag_chunks", swapped)


@fault("cp 2", "loss")
def chunks_are_not_in_zigzag_order() -> None:
    _set(context_parallel, "zigzag_chunks", lambda rank, size: (2 * rank, 2 * rank + 1))


@fault("cp 2", "loss")
def positions_start_at_zero_on_every_rank() -> None:
    right = context_parallel.shard_sequence

    def unsharded(*args: Any) -> Any:
        batch = right(*args)
        return batch | {"positions": torch.arange(len(batch["positions"]))}

    _set(parallelize, "shard_sequence", unsharded)


@fault("cp 2", "loss")
def labels_are_shifted_after_the_cut() -> None:
    right = context_parallel.shard_sequence

    def shifted(*args: Any) -> Any:
        batch = right(*args)
        labels = batch["tokens"].roll(-1, dims=1)
        labels[:, -1] = batch["labels"][:, -1]
        return batch | {"labels": torch.where(batch["labels"] == loader.IGNORED, batch["labels"], labels)}

    _set(parallelize, "shard_sequence", shifted)


@fault("cp 4", "gradient")
def key_gradients_stop_one_hop_before_home() -> None:
    right = context_parallel.ring_backward

    def abroad(*args: Any) -> tuple[Tensor, Tensor]:
        dq, dkv = right(*args)
        for _ in range(dist.get_world_size(args[-1]) - 1):  # and one more hop would be home again
            dkv = context_parallel.Exchange(dkv, args[-1]).wait()
        return dq, dkv

    _set(context_parallel, "ring_backward", abroad)


@fault("cp 2", "gradient")
def merging_keeps_the_old_logsumexp() -> None:
    right = context_parallel.merge
    _set(context_parallel, "merge", lambda out, lse, block, block_lse: right(out, lse.clone(), block, block_lse))


@fault("cp 2", "loss")
def merging_weighs_blocks_equally() -> None:
    def mean(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
        out.lerp_(block, 0.5)
        lse.copy_(torch.logaddexp(lse, block_lse))

    _set(context_parallel, "merge", mean)


@fault("cp 2, accumulation 2, full recomputation", "gradient")
def recomputation_attends_to_the_own_keys_only() -> None:
    right = context_parallel.ring_forward
    calls = [0]

    def lazy(q: Tensor, k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        # 3 blocks: 3 calls in the forward pass of a microbatch, then 3 in its recomputation.
        recomputing = calls[0] % 6 >= 3
        calls[0] += 1
        return context_parallel.kernel_for(q).forward(q, k, v, True) if recomputing else right(q, k, v, group)

    _set(context_parallel, "ring_forward", lazy)


@fault("cp 2 gathered", "gradient")
def gathered_gradients_are_not_reduced() -> None:
    def own(x: Tensor, group: Any) -> Tensor:
        return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].clone()

    _set(context_parallel, "scatter_sum", own)


@fault("cp 2 gathered, masked", "loss")
def documents_are_not_gathered() -> None:
    right = context_parallel.gather_sequence

    def own(x: Tensor, group: Any) -> Tensor:
        return right(x, group) if x.is_floating_point() else x.repeat(1, dist.get_world_size(group))

    _set(context_parallel, "gather_sequence", own)


@fault("cp 2 gathered", "loss")
def gathered_keys_are_masked_by_row_order() -> None:
    right = context_parallel.AllGather.mask

    def by_row(self: Any, documents: Any, positions: Tensor, dtype: torch.dtype) -> Tensor:
        mask = right(self, documents, positions, dtype)
        return torch.full_like(mask, -torch.inf).triu(1)

    _set(context_parallel.AllGather, "mask", by_row)


# ---- selective recomputation


@fault("fsdp 2, accumulation 2, selective recomputation", "gradient")
def recomputed_keys_are_one_position_late() -> None:
    right = attention.apply_rope
    calls = [0]

    def late(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # 3 blocks rotate q and k: 6 calls in the forward pass of a microbatch, then 6 in its recomputation. Queries and
        # keys moved together would change nothing: positions are relative.
        recomputing, keys = calls[0] % 12 >= 6, calls[0] % 2 == 1
        calls[0] += 1
        positions = int(recomputing and keys)  # rolled by none in forward: other operators would be noticed by torch
        return right(x, cos.roll(positions, -3), sin.roll(positions, -3))

    _set(attention, "apply_rope", late)


@fault("tp 2, accumulation 4, selective recomputation", "gradient")
def recomputation_gathers_tokens_out_of_order() -> None:
    right = tensor_parallel.gather_sequence
    calls = [0]

    def shifted(x: Tensor, group: Any) -> Tensor:
        # 3 blocks and the head: 7 calls in the forward pass of a microbatch, then 6 in its recomputation.
        recomputing = calls[0] % 13 >= 7
        calls[0] += 1
        return right(x.roll(int(recomputing), 1), group)

    _set(tensor_parallel, "gather_sequence", shifted)


@fault("cp 2, accumulation 2, selective recomputation", "gradient")
def what_was_kept_is_rounded() -> None:
    right = activation_checkpoint.create_selective_checkpoint_contexts

    def rounded(policy: Any) -> Any:
        forward, recomputation = right(policy)
        dispatch = type(recomputation).__torch_dispatch__

        class Rounded(type(recomputation)):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = dispatch(self, func, types, args, kwargs)
                return out.bfloat16().float() if func == activation_checkpoint.PRODUCT else out

        recomputation.__class__ = Rounded
        return forward, recomputation

    _set(activation_checkpoint, "create_selective_checkpoint_contexts", rounded)


# ---- pipelines


@fault("pp 2", "norm")
def a_stage_is_left_out_of_the_norm() -> None:
    right = gradients.global_norm

    def without(parameters: Any, stages: Any = None) -> Tensor:
        norm = right(parameters).square()  # of this rank's stages
        dist.broadcast(norm, src=0)
        return norm.sqrt()

    _set(gradients, "global_norm", without)


@fault("pp 3", "norm")
def every_stage_has_its_own_norm() -> None:
    right = gradients.global_norm
    _set(gradients, "global_norm", lambda parameters, stages=None: right(parameters))


@fault("pp 2", "norm")
def gradients_are_divided_by_microbatches() -> None:
    right = pipeline_parallel.PipelineStage.perform_reduce_grad
    _set(pipeline_parallel.Stage, "perform_reduce_grad", lambda self, factor: right(self, self.chunks))


@fault("pp 2, accumulation 3", "gradient")
def every_run_of_a_schedule_drops_the_ones_before() -> None:
    right = pipeline_parallel.Pipeline._run

    def forgetful(self: Any, inputs: Any, last: bool) -> Any:
        for parameter in self.parameters.values():
            parameter.grad = None
        return right(self, inputs, True)

    _set(pipeline_parallel.Pipeline, "_run", forgetful)


@fault("pp 2, GPipe, three microbatches", "loss")
def labels_come_in_another_order_than_tokens() -> None:
    right = pipeline_parallel.split

    def mixed(inputs: Any, count: int) -> Any:
        parts = right(inputs, count)
        if not torch.is_grad_enabled():
            return parts  # validation's microbatches are not of one size
        labels = [part["labels"] for part in parts]
        return [part | {"labels": other} for part, other in zip(parts, [*labels[1:], labels[0]], strict=True)]

    _set(pipeline_parallel, "split", mixed)


@fault("pp 2", "loss")
def the_first_stage_does_not_know_the_loss() -> None:
    right = pipeline_parallel.Pipeline.forward_backward

    def ignorant(self: Any, runs: Any) -> Tensor:
        return right(self, runs) * (dist.get_rank() == 1)

    _set(pipeline_parallel.Pipeline, "forward_backward", ignorant)


@fault("pp 2", "validation")
def validation_loses_a_microbatch() -> None:
    right = pipeline_parallel.Pipeline.evaluate

    def losing(self: Any, inputs: Any) -> Tensor:
        return right(self, {name: value[1:] for name, value in inputs.items()})

    _set(pipeline_parallel.Pipeline, "evaluate", losing)


@fault("pp 2, masked", "loss")
def later_stages_have_the_first_microbatchs_documents() -> None:
    right = pipeline_parallel.Stage.forward_one_chunk

    def first(self: Any, *args: Any, **keywords: Any) -> Any:
        if not self.is_first:
            for microbatch in self.microbatches[1:]:
                microbatch["documents"] = self.microbatches[0]["documents"]
        return right(self, *args, **keywords)

    _set(pipeline_parallel.Stage, "forward_one_chunk", first)


@fault("pp 3, tied", "gradient")
def copies_of_a_tied_table_are_not_summed() -> None:
    _set(pipeline_parallel.Pipeline, "_sum_tied_gradients", lambda self: None)


@fault("pp 3, tied", "norm")
def a_tied_table_counts_twice_in_the_norm() -> None:
    right = pipeline_parallel.Pipeline.__init__

    def counting(self: Any, *args: Any, **keywords: Any) -> None:
        right(self, *args, **keywords)
        self.counted = list(self.parameters.values())

    _set(pipeline_parallel.Pipeline, "__init__", counting)


@fault("pp 2, ZBVZeroBubble, tied", "loss")
def the_last_stage_keeps_its_first_copy_of_a_tied_table() -> None:
    right = pipeline_parallel.Pipeline._renew_second_copies
    calls = [0]

    def once(self: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            right(self)

    _set(pipeline_parallel.Pipeline, "_renew_second_copies", once)


@fault("pp 2, DualPipeV", "loss")
def two_stages_have_each_others_layers() -> None:
    right = parallelize.stage_parts

    def swapped(plan: Any, rank: int) -> Any:
        first, second, third, last = plan.layers
        return right(replace(plan, layers=(first, third, second, last)), rank)

    _set(parallelize, "stage_parts", swapped)


# ---- experts


@fault("softmax: tp 2", "gradient")
def router_gradient_is_not_summed_over_tp() -> None:
    right = tensor_parallel._split_moe

    def unreduced(layer: Any, *args: Any) -> None:
        right(layer, *args)
        router = layer.router
        router.forward = lambda x: router.route(x, router.weight.to_local(grad_placements=[Replicate()]))

    _set(tensor_parallel, "_split_moe", unreduced)


@fault("deepseek: ddp 3, full recomputation", "expert choices")
def recomputed_tokens_count_again() -> None:
    _set(activation_checkpoint, "uncounted", nullcontext)


@fault("deepseek: accumulation 2, selective recomputation", "expert choices")
def selectively_recomputed_tokens_count_again() -> None:
    _set(activation_checkpoint, "_UncountedToo", lambda recomputation: recomputation)


@fault("softmax: cp 2, accumulation 2", "gradient")
def balancing_loss_is_a_mean_over_microbatches() -> None:
    right = moe.add_objective
    _set(moe, "add_objective", lambda x, objective: right(x, objective / 2))


@fault("softmax: ep 2", "gradient")
def expert_gradients_are_divided_by_ep() -> None:
    right = expert_parallel.local_part

    def divided(weight: Tensor) -> Tensor:
        local = right(weight)
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / 2)
        return local

    _set(expert_parallel, "local_part", divided)


@fault("softmax: ep 2 of cp 2", "gradient")
def part_of_a_sequence_balances_itself() -> None:
    _set(expert_parallel, "_sum", lambda counts, group: counts)


@fault("softmax: ep 2", "loss")
def rows_come_back_in_another_order() -> None:
    right = expert_parallel.from_experts
    _set(expert_parallel, "from_experts", lambda rows, exchange: right(rows, exchange).roll(1, 0))


@fault("softmax: ep 2", "loss")
def rows_stay_sorted_by_rank() -> None:
    right = expert_parallel.plan_exchange

    def as_they_come(counts: Tensor, group: Any) -> Any:
        exchange = right(counts, group)
        return exchange._replace(permutation=torch.arange(len(exchange.permutation)))

    _set(expert_parallel, "plan_exchange", as_they_come)


@fault("deepseek: ep 4", "expert choices")
def biases_follow_the_loads_of_the_own_rank() -> None:
    right = expert_balance.ExpertBalance.take

    def remembering(self: Any) -> tuple[Tensor, Tensor]:
        loads, sums = right(self)
        self.own_loads = loads.clone()
        return loads, sums

    update = expert_balance.ExpertBalance.update_biases
    _set(expert_balance.ExpertBalance, "take", remembering)
    _set(
        expert_balance.ExpertBalance,
        "update_biases",
        lambda self, loads, found_inf: update(self, self.own_loads, found_inf),
    )


@fault("deepseek: ep 2 x replicas 2", "gradient")
def replicas_of_experts_are_not_reduced() -> None:
    _set(mesh.Meshes, "expert_hsdp", property(lambda self: self.efsdp))


@fault("softmax: ep 2", "expert choices")
def router_chooses_among_its_own_ranks_experts() -> None:
    right = expert_parallel.ExpertDispatcher.dispatch

    def near(self: Any, x: Tensor, experts: Tensor) -> Any:
        return right(self, x, experts % 4 + 4 * dist.get_rank())

    _set(expert_parallel.ExpertDispatcher, "dispatch", near)
