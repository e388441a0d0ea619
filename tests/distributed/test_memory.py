"""What a rank holds: parameters, gradients and optimizer state to the byte, and what no rank may ever hold whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness.distributed import run_distributed
from tests.harness.memory import Watch
from tests.harness.training import Sections, build, merge, rank_batches, train_step
from titanlite.model import transformer
from titanlite.model.layers import Embedding
from titanlite.model.transformer import Transformer
from titanlite.optim.optimizer import AdamW
from titanlite.parallel import context_parallel, tensor_parallel

# Every size that matters is another number, so that a shape says what it is of: batch 3, seq_len 48, dim 64,
# vocabulary 1030 (padded to 1056), MLP 112, heads of 10.
VOCAB, DIM, FFN, S, B, HEADS, KV, HEAD_DIM, LAYERS = 1056, 64, 112, 48, 3, 8, 4, 10, 4
BASE: Sections = {
    "model": {
        "vocab_size": 1030,
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV,
        "head_dim": HEAD_DIM,
        "ffn_dim": FFN,
        "qk_norm": True,
        "vocab_pad_multiple": 96,
    },
    "training": {"seq_len": S, "global_batch_size": 12, "local_batch_size": B, "loss_chunk_tokens": 40},
}
KV_2: Sections = {"model": {"n_kv_heads": 2}}
TIED: Sections = {"model": {"tie_word_embeddings": True}}
PP: Sections = {"parallelism": {"pp_layers_per_stage": [2, 2]}, "training": {"local_batch_size": 6}}


def degrees(**parallelism: Any) -> Sections:
    return {"parallelism": {"dp_shard": 1, **parallelism}}


LAYOUTS: dict[str, tuple[int, Sections]] = {
    "fsdp 2": (2, degrees(dp_shard=2)),
    "fsdp 4": (4, degrees(dp_shard=4)),
    "hsdp 2x2": (4, degrees(dp_replicate=2, dp_shard=2)),
    "tp 2": (2, degrees(tp=2)),
    "tp 4 over 2 kv heads": (4, merge(degrees(tp=4), KV_2)),
    "cp 2": (2, degrees(cp=2)),
    "tp 2 x fsdp 2": (4, degrees(tp=2, dp_shard=2)),
    "pp 2": (2, merge(degrees(pp=2), PP)),
    "pp 2 x fsdp 2": (4, merge(degrees(pp=2, dp_shard=2), PP)),
    "tp 2 x pp 2 x fsdp 2": (8, merge(degrees(tp=2, pp=2, dp_shard=2), PP)),
    "tp 2 x cp 2 x pp 2": (8, merge(degrees(tp=2, cp=2, pp=2), PP)),
    "fsdp 2, tied": (2, merge(degrees(dp_shard=2), TIED)),
    "pp 2, tied": (2, merge(degrees(pp=2), PP, TIED)),
    "tp 2 x fsdp 2, tied": (4, merge(degrees(tp=2, dp_shard=2), TIED)),
}


# ---- at rest


def expected(sections: Sections, pp_rank: int, fsdp_rank: int) -> dict[str, int]:
    """Elements of what a rank holds, from shapes and degrees alone.

    A weight of a stage is cut over tp along the dim that Megatron cuts, or whole (norms; wk and wv with fewer heads
    than ranks); all of these divide here. Its rows are cut over fsdp = dp_shard x cp, and where they do not divide
    (head norms: 10 over 4) FSDP gives every rank the memory of the largest part; moments have no padding.
    """
    model, parallel = merge(BASE, sections)["model"], sections["parallelism"]
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    fsdp, kv = parallel["dp_shard"] * parallel.get("cp", 1), model["n_kv_heads"]
    q_rows, kv_rows = HEADS * HEAD_DIM // tp, kv * HEAD_DIM // (tp if kv % tp == 0 else 1)
    block = [(q_rows, DIM), *[(kv_rows, DIM)] * 2, (DIM, q_rows)]  # wq, wk, wv, wo
    block += [(FFN // tp, DIM), (FFN // tp, DIM), (DIM, FFN // tp)]  # gate, up, down
    block += [(DIM, 1), (DIM, 1), (HEAD_DIM, 1), (HEAD_DIM, 1)]  # norms
    first, last = pp_rank == 0, pp_rank == pp - 1
    tables = 1 if model.get("tie_word_embeddings") and pp == 1 else first + last
    weights = block * (LAYERS // pp) + [(VOCAB // tp, DIM)] * tables + [(DIM, 1)] * last
    padded = sum(-(-rows // fsdp) * columns for rows, columns in weights)
    own = sum(max(0, min(-(-rows // fsdp), rows - fsdp_rank * -(-rows // fsdp))) * columns for rows, columns in weights)
    return {"parameters": padded, "gradients": padded, "optimizer": 2 * own}


def at_rest(sections: Sections, fault: Callable[[], None] | None = None) -> dict[str, int]:
    if fault is not None:
        fault()
    config, ranks, model, optimizer = build(merge(BASE, sections))
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 1), config, 1)
    parameters = list(model.parameters.values())
    return {
        "pp_rank": ranks.meshes.pp.get_local_rank() if ranks.layout.pp > 1 else 0,
        "fsdp_rank": ranks.meshes.fsdp.get_local_rank() if ranks.layout.fsdp > 1 else 0,
        "parameters": elements_of(parameters),
        "gradients": elements_of([parameter.grad for parameter in parameters if parameter.grad is not None]),
        "optimizer": elements_of(list(optimizer.state_tensors().values())),
    }


def elements_of(tensors: Sequence[Tensor]) -> int:
    """Float32 elements of the memory behind these tensors, each piece of it counted once."""
    assert all(tensor.dtype == torch.float32 for tensor in tensors)
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.detach().untyped_storage() for tensor in locals_]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values()) // 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_holds_its_part(name: str) -> None:
    world_size, sections = LAYOUTS[name]
    for rank in run_distributed(at_rest, world_size, sections):
        assert rank == expected(sections, rank.pop("pp_rank"), rank.pop("fsdp_rank"))


# ---- during a step


def a_step(sections: Sections, fault: Callable[[], None] | None = None) -> list[str]:
    """What a rank holds whole in the forward and backward of a batch and should not."""
    if fault is not None:
        fault()
    config, ranks, model, _ = build(merge(BASE, sections))
    batch = model.shard(rank_batches(config, ranks, 1)[0])
    kept: list[tuple[int, ...]] = []  # where the first forward pass of a stage ends
    watch = Watch()

    def forward_has_ended(*_: Any) -> None:
        if not kept:
            kept.extend(made.shape for made in watch.held())

    (stage,) = (module for module in model.module.modules() if isinstance(module, Transformer))
    stage.register_forward_hook(forward_has_ended)
    with watch:
        model.forward_backward([batch])

    layout, found = ranks.layout, []
    samples = 1 if layout.pp > 1 else B
    logits = {shape for shape in watch.shapes if len(shape) == 2 and shape[1] in (VOCAB, 1030) and shape[0] != DIM}
    if layout.tp > 1 and logits:
        found.append(f"logits of the whole vocabulary: {logits}")
    if any(rows > 40 for rows, _ in logits):
        found.append(f"more logits than a chunk's: {logits}")
    if layout.cp > 1 and (whole := {shape for shape in watch.shapes if len(shape) > 2 and S in shape}):
        found.append(f"a whole sequence: {whole}")
    if layout.tp > 1:
        # Whole in a rank's sequence: the gathered inputs of attention and MLP, and the gradient that the loss has made.
        hidden = samples * S // layout.cp * DIM
        count, wanted = kept_of(hidden, kept), 2 * len(stage.layers) + stage.has_head
        if count != wanted:
            found.append(f"{count} hidden states of all tokens are kept for backward, not {wanted}")
        assert kept_of(hidden // layout.tp, kept) >= 2 * len(stage.layers), "the stream is kept in parts"
    assert kept and watch.shapes, "something was seen"
    return found


def kept_of(elements: int, kept: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) == elements for shape in kept)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nobody_holds_what_is_shared(name: str) -> None:
    world_size, sections = LAYOUTS[name]
    assert run_distributed(a_step, world_size, sections) == [[]] * world_size


# ---- and that the tests above would notice


def all_tokens_in_one_chunk() -> None:
    right = transformer.cross_entropy_sum
    transformer.cross_entropy_sum = lambda *args, **keys: right(*args, **{**keys, "chunk_tokens": 1000})


def the_whole_vocabulary_of_a_token() -> None:
    right = transformer.cross_entropy_sum

    def gathering(h: Tensor, weight: Tensor, *args: Any, **keys: Any) -> Tensor:
        torch.mm(h[:1].detach(), weight.detach().repeat(2, 1).t())
        return right(h, weight, *args, **keys)

    transformer.cross_entropy_sum = gathering


def keys_are_gathered() -> None:
    right = context_parallel.ring_forward

    def gathering(q: Tensor, k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        context_parallel.gather_sequence(k.transpose(1, 2), group)
        return right(q, k, v, group)

    context_parallel.ring_forward = gathering


def the_stream_is_gathered() -> None:
    right = tensor_parallel._Scatter.forward

    def keeping(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x.clone())
        return right(ctx, x, group)

    tensor_parallel._Scatter.forward = staticmethod(keeping)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("fsdp 2", all_tokens_in_one_chunk, "more logits than a chunk's"),
        ("tp 2", the_whole_vocabulary_of_a_token, "logits of the whole vocabulary"),
        ("tp 2 x fsdp 2, tied", the_whole_vocabulary_of_a_token, "logits of the whole vocabulary"),
        ("cp 2", keys_are_gathered, "a whole sequence"),
        ("tp 2 x cp 2 x pp 2", keys_are_gathered, "a whole sequence"),
        ("tp 2", the_stream_is_gathered, "hidden states of all tokens"),
        ("tp 2 x pp 2 x fsdp 2", the_stream_is_gathered, "hidden states of all tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_held_whole_is_noticed(name: str, fault: Callable[[], None], words: str) -> None:
    world_size, sections = LAYOUTS[name]
    found = [problem for rank in run_distributed(a_step, world_size, sections, fault) for problem in rank]
    assert found and all(words in problem for problem in found), found


def a_table_is_whole() -> None:
    right, whole = tensor_parallel._split, tensor_parallel.WHOLE
    tensor_parallel._split = lambda module, mesh, placement: right(
        module, mesh, whole if isinstance(module, Embedding) else placement
    )


def moments_are_kept_twice() -> None:
    right = AdamW.state_tensors
    AdamW.state_tensors = lambda self: {  # type: ignore[method-assign]
        f"{name}{copy}": state.clone() for name, state in right(self).items() for copy in range(2)
    }


@pytest.mark.parametrize(("name", "fault"), [("tp 2", a_table_is_whole), ("fsdp 2", moments_are_kept_twice)])
def test_what_is_not_shared_is_noticed(name: str, fault: Callable[[], None]) -> None:
    world_size, sections = LAYOUTS[name]
    for rank in run_distributed(at_rest, world_size, sections, fault):
        assert rank != expected(sections, rank.pop("pp_rank"), rank.pop("fsdp_rank"))
