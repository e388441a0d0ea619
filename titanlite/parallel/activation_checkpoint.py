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
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.schema import ActivationCheckpointConfig
from titanlite.parallel.context_parallel import RING_ATTENTION
from titanlite.parallel.tensor_parallel import SCATTER_SEQUENCE

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of forward, of its recomputation

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
                block.forward = partial(_forget, block.forward)
            case "op":
                block.forward = partial(_forget_selectively, block.forward, tensor_parallel)


# Functions of this module and not torch's checkpoint itself, which torch.compile would skip with all that it calls.
# Blocks draw no random numbers, so no generator state is kept.


def _forget(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def _forget_selectively(forward: Callable[..., Any], tensor_parallel: bool, *args: Any) -> Any:
    contexts = partial(
        _keep_attention, tensor_parallel
    )  # made here: torch.compile takes none that comes as an argument
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _keep_attention(tensor_parallel: bool) -> Contexts:
    """Contexts of a block's forward pass and of its recomputation; operators come in the same order in both."""
    made: Counter[Any] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        made[operator, context.is_recompute] += 1
        number = made[operator, context.is_recompute]
        if operator == PRODUCT:
            # wq, wk, wv, wo, and then the MLP's. A tensor parallel rank's product with wo is its summand of the whole
            # sequence: the sum, of which it has its own part, is kept instead.
            kept = number <= (3 if tensor_parallel else 4)
        else:
            kept = operator in ATTENTION or (operator == SCATTER_SEQUENCE and number == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return forward, recomputation
