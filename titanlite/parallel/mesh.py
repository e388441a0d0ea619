"""Three views of one world of ranks, by the name of what is divided. The only file that knows axis names.

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
    """Named getters for every axis. Each view is made at its first use, by all ranks at once."""

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self.device_type = device_type

    @classmethod
    def build(cls, layout: Layout, device_type: str) -> Meshes:
        """The meshes of this world; data and dense are made at once. Collective."""
        assert dist.get_world_size() == layout.world_size, "the layout is resolved for this world"
        meshes = cls(layout, device_type)
        _ = meshes.data, meshes.dense, meshes.loss
        return meshes

    def _init(self, shape: Mapping[str, int]) -> DeviceMesh:
        return init_device_mesh(self.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))

    @cached_property
    def data(self) -> DeviceMesh:
        return self._init(self.layout.data_shape)

    @cached_property
    def dense(self) -> DeviceMesh:
        return self._init(self.layout.dense_shape)

    @cached_property
    def sparse(self) -> DeviceMesh:
        return self._init(self.layout.sparse_shape)

    @cached_property
    def loss(self) -> DeviceMesh:
        """Ranks that hold different tokens: batch x cp, one axis."""
        if self.layout.cp == 1:
            return self.batch
        # Flattening a sub-mesh is private in torch. batch and cp are neighbours, so the same ranks are an axis of:
        shape = {"pp": self.layout.pp, "loss": self.layout.batch * self.layout.cp, "tp": self.layout.tp}
        return self._init(shape)["loss"]

    @property
    def pp(self) -> DeviceMesh:
        return self.data["pp"]

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

    @property
    def ep(self) -> DeviceMesh:
        return self.sparse["ep"]

    def groups(self) -> Set[dist.ProcessGroup]:
        """Every process group of the views made so far."""
        made = [self.__dict__[name] for name in ("data", "dense", "sparse", "loss") if name in self.__dict__]
        return {group for mesh in made for group in mesh.get_all_groups()}
