"""Promise 1 in numbers: how far a run may be from that of one process, whatever its layout. Torch-free.

In float32, over so many steps: later rounding adds to rounding, and with it any difference grows.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_STEPS = 10
LOSS_TOLERANCE = 1e-6  # relative, every step
NORM_TOLERANCE = 1e-5  # relative, every step
GRADIENT_TOLERANCE = 1e-5  # of each parameter's largest, step 1

# What may deviate, in the order in which one thing leads to the next within a step.
CAUSES = ("initial weights", "samples", "expert choices", "loss", "gradient", "norm", "lr", "validation")


@dataclass(frozen=True)
class Deviation:
    """Something that differs by more than the promise allows.

    what: one of CAUSES; step: from 1, 0 for what is there before the first; text: what was found, and on which rank
    """

    what: str
    step: int
    text: str

    def __str__(self) -> str:
        return self.text
