"""The learning rate of every step: linear warmup, a stable part, a decay, and the minimum past the end. Torch-free."""

from __future__ import annotations

import math

from titanlite.config.schema import LRSchedulerConfig

# What is left of the distance from peak to minimum after the share p of the decay, 0 < p <= 1.
DECAY = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "sqrt": lambda p: 1.0 - math.sqrt(p),
}


def lr_at(step: int, lr: float, config: LRSchedulerConfig) -> float:
    """Learning rate of the update number `step`, counted from 1; lr is the peak.

    Steps 1 to warmup_steps rise linearly, the last of them at the peak. The decay is the last decay_ratio of
    total_steps, one step or more, or what warmup leaves if that is less, and is at min_lr_factor * lr in step
    total_steps (after it, where warmup leaves nothing). Later steps stay there; with decay_ratio 0 there is no decay,
    and the peak holds for ever. A function of its arguments alone, finite for all of them.
    """
    assert step >= 1, "steps count from 1"
    lowest = config.min_lr_factor
    if step > config.total_steps and config.decay_ratio > 0:
        return lr * lowest
    if step <= config.warmup_steps:
        return lr * step / config.warmup_steps
    decay_steps = min(config.decay_steps, config.total_steps - config.warmup_steps)
    decayed = step - (config.total_steps - decay_steps)
    if decayed <= 0 or config.decay_ratio == 0:
        return lr
    return lr * (lowest + (1.0 - lowest) * DECAY[config.decay_type](decayed / decay_steps))
