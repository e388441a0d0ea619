"""Cross-entropy, chunked over tokens: the gradients are made in the forward pass, so that no logits are kept and
none are computed twice. The vocabulary may be split over ranks: what combines them is an argument.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # label of a target that does not count


class VocabularyReducer(Protocol):
    """Combines fp32 tensors over the ranks that hold parts of the vocabulary; in place or not, returns the result."""

    def max(self, t: Tensor) -> Tensor: ...

    def sum(self, t: Tensor) -> Tensor: ...


class _Identity:
    """The whole vocabulary is here."""

    def max(self, t: Tensor) -> Tensor:
        return t

    def sum(self, t: Tensor) -> Tensor:
        return t


IDENTITY: VocabularyReducer = _Identity()


def cross_entropy_sum(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    reducer: VocabularyReducer = IDENTITY,
    vocab_start: int = 0,
) -> Tensor:
    """Sum over the labels that are not -100 of -log softmax(h @ weight.T)[label]: a fp32 scalar (fp64 for fp64 h).

    h:            [N, D], activation dtype, in which the matmuls run; softmax and loss are fp32.
    weight:       [V, D], the rows vocab_start ... vocab_start + V - 1 of the output matrix, cast to h's dtype. Rows at
                  or past vocab_size are padding: they take no part and their gradient is exactly zero.
    labels:       [N] int64, below vocab_size or -100. Checking would make the host wait for the device, so a larger
                  label is not noticed here; whoever makes batches must.
    chunk_tokens: tokens whose logits exist at once. 0: the plain path by F.cross_entropy, which keeps all logits
                  (with a split vocabulary: one chunk of all tokens).
    reducer:      one max of [n] and one sum of [2, n] per chunk, if the vocabulary is split. Each rank gets the whole
                  loss, its own rows' gradient, and a gradient of h that is still to be summed over those ranks.
    """
    if chunk_tokens == 0 and reducer is IDENTITY:
        rows = max(0, min(weight.shape[0], vocab_size - vocab_start))
        logits = F.linear(h, weight.to(h.dtype))[:, :rows]
        wide = logits.to(torch.promote_types(h.dtype, torch.float32))
        losses = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
        return losses.sum(dtype=torch.float64).to(wide.dtype)
    grad_enabled = torch.is_grad_enabled()
    loss: Tensor = _ChunkedCrossEntropy.apply(
        h,
        weight,
        labels,
        vocab_size,
        chunk_tokens or max(1, h.shape[0]),
        reducer,
        vocab_start,
        grad_enabled and h.requires_grad,
        grad_enabled and weight.requires_grad,
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        reducer: VocabularyReducer,
        vocab_start: int,
        want_dh: bool,
        want_dweight: bool,
    ) -> Tensor:
        rows = weight.shape[0]
        valid_rows = max(0, min(rows, vocab_size - vocab_start))
        matrix = weight.to(h.dtype)
        wide = torch.promote_types(h.dtype, torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=h.device)
        dh = torch.empty_like(h) if want_dh else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=h.device) if want_dweight else None
        for start in range(0, h.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = torch.mm(h[part], matrix.t()).to(wide)
            # Not -inf: a shard that is all padding would make NaN of it.
            logits[:, valid_rows:] = torch.finfo(wide).min
            column = labels[part] - vocab_start
            here = (column >= 0) & (column < rows)
            column = torch.where(here, column, 0).unsqueeze(1)
            counted = labels[part] != IGNORED

            highest = logits.amax(dim=1)
            target = torch.where(here, logits.gather(1, column).squeeze(1) - highest, 0)
            probabilities = _softmax(logits)
            del logits  # it may have become the probabilities
            # The largest probability is 1 / sum(exp(logits - highest)): cheaper to read off than to sum again.
            log_normalizer = probabilities.amax(dim=1).log_().neg_()
            if reducer is not IDENTITY:
                log_normalizer, target = _combine_shards(reducer, highest, log_normalizer, target, here, probabilities)
            total += torch.where(counted, log_normalizer - target, 0).sum(dtype=torch.float64)

            if dh is None and dweight is None:
                continue
            # d loss / d logits = softmax - onehot. Ignored rows are zeroed on the narrow side of both products.
            probabilities.scatter_add_(1, column, here.to(wide).neg_().unsqueeze(1))
            slope, weighting = probabilities.to(h.dtype), counted.to(h.dtype).unsqueeze(1)
            if dh is not None:
                torch.mm(slope, matrix, out=dh[part]).mul_(weighting)
            if dweight is not None:
                _add_product(dweight, slope.t(), h[part] * weighting)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(dh, dweight)
        return total.to(wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors  # scaled out of place: zero-bubble schedules run this twice
        scale = grads[0]
        return (
            None if dh is None else (dh * scale).to(dh.dtype),
            None if dweight is None else (dweight * scale).to(ctx.weight_dtype),
            *(None,) * 7,
        )


def _softmax(logits: Tensor) -> Tensor:
    """softmax over the last dim; overwrites `logits` on the CPU, whose kernel writes an element after its last read."""
    return torch.softmax(logits, dim=1, out=logits) if logits.device.type == "cpu" else torch.softmax(logits, dim=1)


def _combine_shards(
    reducer: VocabularyReducer,
    highest: Tensor,
    log_normalizer: Tensor,
    target: Tensor,
    here: Tensor,
    probabilities: Tensor,
) -> tuple[Tensor, Tensor]:
    """From this shard's softmax to the whole vocabulary's; `probabilities` are rescaled in place.

    highest, log_normalizer: [n], of this shard: log(sum(exp(logits))) = highest + log_normalizer.
    target: [n], the label's logit - highest where `here`, else 0. Returns the global log_normalizer and target,
    relative to the global highest logit.
    """
    global_highest = reducer.max(highest.clone())
    shift = highest - global_highest
    share = (shift + log_normalizer).exp_()
    sums = reducer.sum(torch.stack((share, torch.where(here, target + shift, 0))))
    probabilities.mul_((share / sums[0]).unsqueeze(1))
    return sums[0].log(), sums[1]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total is fp32 and the factors may be bf16."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)  # addmm_, in a form that FLOP counters know
    elif total.device.type == "cuda":
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:  # the CPU's product can only be had rounded to bf16
        total.add_(torch.mm(left, right))
