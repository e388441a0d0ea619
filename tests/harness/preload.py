"""Imported once by the process that test workers are forked from. It imports, and never computes.

A first matmul would start OpenMP's threads, which do not survive a fork: a child that then uses two of them hangs.
"""

import importlib
from contextlib import suppress

MODULES = (
    "pytest",  # what the parent runs is imported again by every worker as its main module
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "titanlite.parallel.parallelize",
    "titanlite.parallel.gradients",
    "titanlite.optim.optimizer",
    "titanlite.optim.schedule",
    "titanlite.data.loader",
    "titanlite.checkpoint.manager",
    "titanlite.trainer",
    "titanlite.verify.record",
)

for module in MODULES:
    with suppress(ImportError):  # what cannot be imported fails in the test that needs it, with its own message
        importlib.import_module(module)
