"""Promise 1 in numbers: how far a run may be from that of one process, whatever its layout. Torch-free.

In float32, over so many steps: later rounding adds to rounding, and with it any difference grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_STEPS = 10
LOSS_TOLERANCE = 1e-6  # relative, every step
NORM_TOLERANCE = 1e-5  # relative, every step
GRADIENT_TOLERANCE = 1e-5  # of each parameter's largest, step 1
# Relative, every step, of the router's entropy and the balancing losses: means over tokens in float32, as the loss is,
# and as close (seen: 1e-7 in ten steps).
ROUTER_TOLERANCE = 1e-6

# What may follow from a few choices of experts that rounding made otherwise. Seen where the closest choice of step 1
# was made otherwise, with 768 choices a step: loss, norm and router moved by at most 0.8 of the share of choices that
# had flipped so far, and by 7e-3 in ten steps; gradients by 0.13 of their largest; 17 choices of a later step followed.
FEW_FLIPS = 2  # at once, however few choices there are; else one in a thousand
FLIPPED_SHARE = 5.0  # of the share of choices that have flipped, what loss, norm and router may move by, relative ...
FLIPPED_MOST = 0.05  # ... and at most, however many have
FLIPPED_GRADIENT = 0.5  # of its largest, what a gradient may move by for each choice
FLIPPED_LATER = 0.1  # of a later step's choices, those that may follow

# What may deviate, in the order in which one thing leads to the next within a step.
CAUSES = (
    "initial weights",
    "samples",
    "expert counts",
    "expert choices",
    "router",
    "loss",
    "gradient",
    "norm",
    "lr",
    "expert biases",
    "validation",
)


@dataclass(frozen=True)
class Deviation:
    """Something that differs by more than the promise allows.

    what: one of CAUSES; step: from 1, 0 for what is there before the first; text: what was found, and on which rank
    error: relative, infinite where it has no size
    """

    what: str
    step: int
    text: str
    error: float = math.inf

    def __str__(self) -> str:
        return self.text
