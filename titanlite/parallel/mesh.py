"""Three views of one world of ranks, by the name of what is divided: config/layout.py's shapes as device meshes.

    data    (pp, batch, cp, tp)              who holds which tokens
    dense   (pp, dp_replicate, fsdp, tp)     who holds which part of a dense parameter; fsdp = dp_shard x cp
    sparse  (pp, dp_replicate, efsdp, ep)    who holds which part of an expert; efsdp x ep = dp_shard x cp x tp

All are row-major over the global ranks, the last axis varying fastest, so that tp (or ep) neighbours are neighbours in
the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.layout import Layout


class Meshes:
    """The meshes of this world, with a named getter for every axis.

    loss: ranks that hold different tokens, batch x cp as one axis.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        """Collective: makes the process groups of the data and dense views."""
        assert dist.get_world_size() == layout.world_size, "the layout is resolved for this world"
        self.layout = layout
        self.device_type = device_type
        self.data = self._init(layout.data_shape)
        self.dense = self._init(layout.dense_shape)
        self.loss = self._loss()
        self._sparse: DeviceMesh | None = None

    def _init(self, shape: Mapping[str, int]) -> DeviceMesh:
        return init_device_mesh(self.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))

    def _loss(self) -> DeviceMesh:
        layout = self.layout
        if layout.cp == 1:
            return self.batch
        # Flattening a sub-mesh is private in torch. batch and cp are neighbours, so the same ranks are an axis of:
        return self._init({"pp": layout.pp, "loss": layout.batch * layout.cp, "tp": layout.tp})["loss"]

    @property
    def sparse(self) -> DeviceMesh:
        """Made when first asked for, by all ranks at once: only experts need its groups."""
        if self._sparse is None:
            self._sparse = self._init(self.layout.sparse_shape)
        return self._sparse

    @property
    def pp(self) -> DeviceMesh:
        return self.data["pp"]

    @cached_property
    def _pp_ends(self) -> dist.ProcessGroup | None:
        if self.layout.pp == 2:
            return self.pp.get_group()
        ranks = self.data.mesh.flatten(1)
        pairs = [[int(first), int(last)] for first, last in zip(ranks[0], ranks[-1], strict=True)]
        groups = [dist.new_group(pair) for pair in pairs]  # by all ranks, those of other pairs too
        return next((group for group, pair in zip(groups, pairs, strict=True) if dist.get_rank() in pair), None)

    def pp_ends(self) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's pp axis, a group of its own for every axis; None between them.

        Made when first asked for, by all ranks at once.
        """
        return self._pp_ends

    @property
    def batch(self) -> DeviceMesh:
        """Ranks that hold different samples: dp_replicate x dp_shard."""
        return self.data["batch"]

    @property
    def cp(self) -> DeviceMesh:
        return self.data["cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The tp axis of the dense view, so that it composes with fsdp in one parameter's placements."""
        return self.dense["tp"]

    @property
    def dp_replicate(self) -> DeviceMesh:
        return self.dense["dp_replicate"]

    @property
    def fsdp(self) -> DeviceMesh:
        return self.dense["fsdp"]

    @cached_property
    def hsdp(self) -> DeviceMesh:
        """What fully_shard takes: (dp_replicate, fsdp), or fsdp alone when there is one replica."""
        return self.dense["dp_replicate", "fsdp"] if self.layout.dp_replicate > 1 else self.fsdp

    @property
    def efsdp(self) -> DeviceMesh:
        return self.sparse["efsdp"]

    @cached_property
    def expert_hsdp(self) -> DeviceMesh:
        """As hsdp, for the ranks that hold the same experts: (dp_replicate, efsdp), or efsdp alone."""
        return self.sparse["dp_replicate", "efsdp"] if self.layout.dp_replicate > 1 else self.efsdp

    @property
    def ep(self) -> DeviceMesh:
        return self.sparse["ep"]

    def groups(self) -> Set[dist.ProcessGroup]:
        """Every process group of the views made so far."""
        views = [self.data, self.dense, self.loss]
        if self._sparse is not None:
            views.append(self._sparse)
        groups = {group for mesh in views for group in mesh.get_all_groups()}
        ends: dist.ProcessGroup | None = vars(self).get("_pp_ends")  # if it was asked for
        if ends is not None:
            groups.add(ends)
        return groups
