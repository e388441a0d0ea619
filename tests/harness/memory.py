"""What a program holds in memory, seen from the operators it runs: deterministic, on any device."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Private in torch (seen working on 2.13.0): operators made by torch.library.custom_op.
from torch._library import custom_ops
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A piece of memory, as the operator that made it returned it."""

    shape: Shape
    dtype: torch.dtype
    storage: weakref.ref[torch.UntypedStorage]


class Watch(TorchDispatchMode):
    """While it is on: every operator that runs, every shape that one returns, and what of all that is still held.

    ran: operator -> how often. What selective checkpointing takes from its cache does not run.
    shapes: of all tensors that were returned, views too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[Any] = Counter()
        self.shapes: set[Shape] = set()
        self._made: dict[int, Made] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = custom_ops.OPDEFS.get(func._schema.name)
        if own is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:  # in an operator of ours, too
                out = own._init_fn(*args, **(kwargs or {}))
        self.ran[func] += 1
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            self.shapes.add(tuple(tensor.shape))
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # else it is a view, or was written to
                self._made[storage._cdata] = Made(tuple(tensor.shape), tensor.dtype, weakref.ref(storage))
        return out

    def held(self) -> list[Made]:
        """What was made since the start and is still in somebody's hands."""
        found = [(made, made.storage()) for made in self._made.values()]
        return [made for made, storage in found if storage is not None and storage.nbytes() > 0]

    def held_bytes(self) -> int:
        storages = [made.storage() for made in self.held()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _tensors(tree: Any) -> list[Tensor]:
    """The plain tensors of a tree; a DTensor's operators run again on its local parts."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
