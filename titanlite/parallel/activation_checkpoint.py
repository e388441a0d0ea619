"""Activation checkpointing: forget a block's activations after forward, compute them again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from titanlite.config.schema import ActivationCheckpointConfig
from titanlite.model.moe import uncounted


def apply_activation_checkpoint(blocks: Iterable[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Make every block recompute itself in backward, when config.mode is "full". Apply before compile and FSDP.

    Only the block's `forward` is replaced, so no parameter changes its name, and FSDP's hooks stay outside of what is
    recomputed.
    """
    if config.mode == "full":
        for block in blocks:
            block.forward = partial(_forward_and_forget, block.forward)


def _forward_and_forget(forward: Callable[..., Any], *args: Any) -> Any:
    """A block's forward, its activations not kept.

    A function of this module and not torch's checkpoint itself, which torch.compile would skip with all that it calls.
    Blocks draw no random numbers, so no generator state is kept.
    """
    # Compiled code takes no contexts, and needs none: experts, which count, are never recomputed inside of it.
    contexts = noop_context_fn if torch.compiler.is_compiling() else _contexts
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the forward pass, and around its recomputation."""
    return nullcontext(), uncounted()
