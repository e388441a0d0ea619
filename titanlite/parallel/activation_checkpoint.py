"""Activation checkpointing: forget a block's activations after forward, compute them again in backward."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlite.config.schema import ActivationCheckpointConfig


def apply_activation_checkpoint(blocks: Iterable[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Make every block recompute itself in backward, when config.mode is "full". Apply before compile and FSDP.

    Only the block's `forward` is replaced, so no parameter changes its name, and FSDP's hooks stay outside of what is
    recomputed.
    """
    if config.mode == "full":
        for block in blocks:
            block.forward = MethodType(_forward_and_forget, block)


def _forward_and_forget(block: nn.Module, *args: Any) -> Any:
    """The forward of the block's class, its activations not kept.

    A function of this module and not torch's checkpoint itself, which torch.compile would skip with all that it calls.
    Blocks draw no random numbers, so no generator state is kept.
    """
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, preserve_rng_state=False)
