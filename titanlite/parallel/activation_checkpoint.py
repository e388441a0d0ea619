"""Activation checkpointing: forget a block's activations after forward, compute them again in backward.

full       a block keeps its input only.
selective  "op": a block also keeps what its attention made: the products q, k and v, attention's output with its
           log-sum-exp, and what attention adds to the residual stream. Computed again are norms, rotations and the MLP
           up to its last product. A product of n columns from rows of d numbers costs n numbers of memory a token and
           saves 2 n d operations, so all are worth the same, and the line is drawn where the wide ones begin: in
           docs/parallelism.md there are numbers.
           "n": every n-th block is recomputed in full, the others not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.schema import ActivationCheckpointConfig
from titanlite.model.moe import uncounted
from titanlite.parallel.context_parallel import RING_ATTENTION
from titanlite.parallel.tensor_parallel import SCATTER_SEQUENCE

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of forward, of its recomputation
Keep = Callable[[], Contexts]

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    RING_ATTENTION,
}
PRODUCT = aten.mm.default


def apply_activation_checkpoint(
    blocks: nn.ModuleDict, config: ActivationCheckpointConfig, tensor_parallel: bool = False
) -> None:
    """Make blocks recompute themselves in backward, as config says. Apply before compile and FSDP.

    blocks: by their number in the whole model, as text. tensor_parallel: they are split over tp ranks.
    Only the block's `forward` is replaced, so no parameter changes its name, and FSDP's hooks stay outside of what is
    recomputed.
    """
    for number, block in blocks.items():
        match config.of_layer(int(number)):
            case "full":
                block.forward = partial(_forget, block.forward, keep_nothing)
            case "op":
                block.forward = partial(_forget, block.forward, keep_summed if tensor_parallel else keep_attention)


def _forget(forward: Callable[..., Any], keep: Keep, *args: Any) -> Any:
    """A block's forward, of whose activations that is kept which `keep` says.

    A function of this module and not torch's checkpoint itself, which torch.compile would skip with all that it calls.
    Blocks draw no random numbers, so no generator state is kept.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and keep is keep_nothing:  # it knows selective contexts only
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(_contexts, keep, compiling)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts(keep: Keep, compiling: bool) -> Contexts:
    """Of a forward pass and of its recomputation. What experts count, they have counted in the first; what is compiled
    inside of checkpointing has none, and must have the selective contexts themselves."""
    forward, recomputation = keep()
    return forward, (recomputation if compiling else _UncountedToo(recomputation))


class _UncountedToo(AbstractContextManager[None]):
    """May be entered again: schedules with a backward in two parts recompute a block twice."""

    def __init__(self, recomputation: AbstractContextManager[Any]) -> None:
        self._recomputation = recomputation
        self._both = ExitStack()

    def __enter__(self) -> None:
        self._both.enter_context(uncounted())
        self._both.enter_context(self._recomputation)

    def __exit__(self, *error: Any) -> None:
        self._both.close()


def keep_nothing() -> Contexts:
    return nullcontext(), nullcontext()


def keep_attention() -> Contexts:
    return _keep(products=4)  # wq, wk, wv and wo come before the MLP's


def keep_summed() -> Contexts:
    """A tensor parallel rank's product with wo is its summand of the whole sequence: the sum, of which it has its own
    part, is kept instead."""
    return _keep(products=3)


def _keep(products: int) -> Contexts:
    """Attention, so many of a block's products, and the first sum over tp. Operators come in a fixed order."""
    made: Counter[Any] = Counter()
    first = {PRODUCT: products, SCATTER_SEQUENCE: 1}

    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        made[operator, context.is_recompute] += 1
        kept = operator in ATTENTION or made[operator, context.is_recompute] <= first.get(operator, 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return forward, recomputation
