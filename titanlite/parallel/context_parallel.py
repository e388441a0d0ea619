"""Context parallelism: every rank of a cp group holds a part of each sequence; attention is what brings them together.

Two methods with one layout. The sequence is cut into 2n chunks, and rank r of n holds chunks r and 2n-1-r (zigzag), so
that causal attention is as much work on every rank.

ring:      k and v travel around the ranks while each computes a block of its attention (Liu et al. 2023, "Ring
           Attention with Blockwise Transformers"); blocks are merged by log-sum-exp. No rank holds all keys.
allgather: k and v of all ranks are gathered, and each rank's queries attend to them under an explicit mask (as Llama 3
           was trained, Grattafiori et al. 2024, section 3.3.2): documents can be masked, memory grows with the
           sequence.

Both are custom operators, so that torch.compile keeps a block in one graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.model import attention
from titanlite.model.transformer import Transformer
from titanlite.parallel.attention_kernels import kernel_for
from titanlite.parallel.collectives import gather_sequence, group_named, scatter_sequence

Method = Literal["ring", "allgather"]


# ---- the layout of the sequence


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Which two of the sequence's 2 * size chunks a rank holds, in this order."""
    return rank, 2 * size - 1 - rank


def zigzag_positions(rank: int, size: int, length: int, device: torch.device | None = None) -> Tensor:
    """Where in the whole sequence each of a rank's `length` tokens is: int64 [length], ascending."""
    half = length // 2
    chunks = zigzag_chunks(rank, size)
    return torch.cat([torch.arange(chunk * half, (chunk + 1) * half, device=device) for chunk in chunks])


def shard_sequence(batch: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's part of a batch of whole sequences: tokens, labels and documents cut along S, the rest as it is.

    Adds "positions", int64 [S / cp]. mesh: the cp axis. Raises ValueError when 2 * cp does not divide S.
    """
    assert "positions" not in batch, "the batch is cut already"
    size, rank = mesh.size(), mesh.get_local_rank()
    length = batch["tokens"].shape[1]
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens cannot be cut into 2 * cp = {2 * size} chunks of equal length")
    positions = zigzag_positions(rank, size, length // size)
    cut = {key: batch[key][:, positions] for key in ("tokens", "labels", "documents") if key in batch}
    cut["positions"] = positions
    if batch["tokens"].is_pinned():
        cut = {key: value.pin_memory() for key, value in cut.items()}  # else its copy to the device would be waited for
    return {**batch, **cut}


# ---- the model


def apply_context_parallel(model: Transformer, mesh: DeviceMesh, method: Method) -> None:
    """Let the model's attention see the whole sequence while it is given this rank's part of it.

    mesh: the cp axis, of more than one rank. Inputs must be cut by shard_sequence, positions included.
    """
    attend: Ring | AllGather
    if method == "ring":
        attend = Ring(mesh.get_group())
    else:
        attend = AllGather(mesh.get_group())
        model.attention_mask = attend.mask
    for module in model.modules():
        if isinstance(module, attention.Attention):
            module.attend = attend


class Ring:
    """`Attention.attend` by ring attention: causal, over sequences that the group's ranks hold in zigzag order.

    q [B, H, L, D], k and v [B, Hkv, L, D] with L = S / n: this rank's part, and so is what is returned. Differentiable,
    collective. Attention and merging are exact up to the rounding of a float32 (lse, sums over blocks); in half
    precision each block's output is rounded once more than SDPA rounds.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = group.group_name

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None, "ring attention takes no mask: config/check.py refuses document masks with it"
        return _ring_op(q, k, v, self._name)[0]


class AllGather:
    """`Attention.attend` by gathered keys and values, and the model's one mask a forward pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = group.group_name
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: as self.mask makes it, [B or 1, 1, L, S] for L local queries, keys in the order of the ranks."""
        assert mask is not None, "the model's attention_mask is not this method's"
        k_all, v_all = (_gather_op(x.transpose(1, 2), self._name).transpose(1, 2) for x in (k, v))
        return attention.causal_attention(q, k_all, v_all, mask)

    def mask(self, documents: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of the local queries and all keys, 0 or -inf. See model.transformer."""
        length, device = positions.shape[-1], positions.device
        key_positions = [zigzag_positions(rank, self._size, length, device) for rank in range(self._size)]
        seen = (key_positions[self._rank][:, None] >= torch.cat(key_positions)).unsqueeze(0)  # [1, L, S]
        if documents is not None:
            everyone = gather_sequence(documents, group_named(self._name))
            seen = seen & (documents[:, :, None] == everyone[:, None, :])
        return torch.full(seen.shape, -math.inf, dtype=dtype, device=device).masked_fill_(seen, 0.0).unsqueeze(1)


# ---- ring


class Exchange:
    """A tensor on its way to the next rank of the ring, while the previous rank's comes in.

    Posted at once, both directions together: two blocking sends would wait for each other. It must be waited for.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._sent = tensor.contiguous()  # kept alive until it has left
        self._received = torch.empty_like(self._sent)
        self._requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._received, before, group),
            ]
        )

    def wait(self) -> Tensor:
        """The previous rank's tensor."""
        for request in self._requests:
            request.wait()
        return self._received


def block_of(step: int, rank: int, length: int) -> tuple[slice, slice, bool]:
    """Queries, keys and causality of the block that a rank computes `step` hops after its own keys left it.

    Its keys are then rank - step's. Those of an earlier rank: all queries see its first chunk and none its second.
    Those of a later one: only the second chunk of queries sees any, and sees all.
    """
    half = length // 2
    if step == 0:
        return slice(None), slice(None), True
    if step <= rank:
        return slice(None), slice(0, half), False
    return slice(half, None), slice(None), False


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's attention to out and lse [B, H, L(, D)], in place and in their dtype."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(block_out * (block_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """out as q and lse [B, H, L], float32 (float64 for float64)."""
    rank, size, kernel = dist.get_rank(group), dist.get_world_size(group), kernel_for(q)
    assert q.shape[2] % 2 == 0, "a rank holds two chunks of equal length"
    kv = _stacked(k, v)
    exchange: Exchange | None = None
    out, lse = _empty_like_heads(q, _accumulator(q)), q.new_empty(q.shape[:3], dtype=_accumulator(q))
    for step in range(size):
        if exchange is not None:
            kv = exchange.wait()
        exchange = Exchange(kv, group) if step < size - 1 else None
        queries, keys, causal = block_of(step, rank, q.shape[2])
        block_out, block_lse = kernel.forward(q[:, :, queries], *_unstacked(kv, keys), causal)
        if step == 0:
            out.copy_(block_out)
            lse.copy_(block_lse)
        else:
            merge(out[:, :, queries], lse[:, :, queries], block_out, block_lse)
    return out.to(q.dtype), lse


def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """dq as q, and dk and dv [2, B, L, Hkv, D] in float32 (float64 for float64).

    k and v make the tour again, and the gradients of each follow them, one hop behind: a rank adds its own share while
    the next keys are coming. After n hops they are home.
    """
    rank, size, kernel = dist.get_rank(group), dist.get_world_size(group), kernel_for(q)
    kv = _stacked(k, v)
    kv_exchange: Exchange | None = None  # the next keys and values
    dkv_exchange: Exchange | None = None
    dq = torch.zeros_like(q, dtype=_accumulator(q))
    dkv = torch.zeros_like(kv, dtype=_accumulator(q))
    for step in range(size):
        if kv_exchange is not None:
            kv = kv_exchange.wait()
        kv_exchange = Exchange(kv, group) if step < size - 1 else None
        queries, keys, causal = block_of(step, rank, q.shape[2])
        block_dq, block_dk, block_dv = kernel.backward(
            grad[:, :, queries],
            q[:, :, queries],
            *_unstacked(kv, keys),
            out[:, :, queries],
            lse[:, :, queries].contiguous(),
            causal,
        )
        dq[:, :, queries] += block_dq
        if dkv_exchange is not None:
            dkv = dkv_exchange.wait()
        for total, share in zip(_unstacked(dkv, keys), (block_dk, block_dv), strict=True):
            total += share
        dkv_exchange = Exchange(dkv, group) if size > 1 else None
    return dq.to(q.dtype), dkv if dkv_exchange is None else dkv_exchange.wait()


def _stacked(k: Tensor, v: Tensor) -> Tensor:
    """One message: [2, B, L, Hkv, D], contiguous, in the order in which the projections made them."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


def _unstacked(kv: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Views [B, Hkv, L of keys, D] of the two."""
    k, v = kv[:, :, keys].transpose(2, 3).unbind()
    return k, v


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_like_heads(q: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, L, D], dense in [B, L, H, D]: what the output projection reads is then a view."""
    batch, heads, length, dim = q.shape
    return q.new_empty((batch, length, heads, dim), dtype=dtype).transpose(1, 2)


# ---- gathering


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """scatter_sequence with the sum in float32. Collective."""
    return scatter_sequence(x.to(_accumulator(x)), group).to(x.dtype)


# ---- as operators: one node each in torch.compile's graph, with a backward that may run twice


@torch.library.custom_op("titanlite::ring_attention", mutates_args=())
def _ring_op(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return ring_forward(q, k, v, group_named(group_name))


@_ring_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return _empty_like_heads(q, q.dtype), q.new_empty(q.shape[:3], dtype=_accumulator(q))


@torch.library.custom_op("titanlite::ring_attention_backward", mutates_args=())
def _ring_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    return ring_backward(grad, q, k, v, out, lse, group_named(group_name))


@_ring_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _stacked(k, v).to(_accumulator(q))


def _save_ring(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward_of_ring(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, out, lse = ctx.saved_tensors
    dq, dkv = _ring_backward_op(grad, q, k, v, out, lse, ctx.group_name)
    dk, dv = dkv.to(k.dtype).transpose(2, 3).unbind()
    return dq, dk, dv, None


_ring_op.register_autograd(_backward_of_ring, setup_context=_save_ring)
RING_ATTENTION = torch.ops.titanlite.ring_attention.default


@torch.library.custom_op("titanlite::gather_sequence", mutates_args=())
def _gather_op(x: Tensor, group_name: str) -> Tensor:
    return gather_sequence(x, group_named(group_name))


@_gather_op.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * group_named(group_name).size(), *x.shape[2:]))


@torch.library.custom_op("titanlite::scatter_sum", mutates_args=())
def _scatter_op(x: Tensor, group_name: str) -> Tensor:
    return scatter_sum(x, group_named(group_name))


@_scatter_op.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // group_named(group_name).size(), *x.shape[2:]))


def _save_gather(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _backward_of_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _scatter_op(grad, ctx.group_name), None


_gather_op.register_autograd(_backward_of_gather, setup_context=_save_gather)
