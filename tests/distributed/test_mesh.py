"""Every rank's coordinate and every group of the three mesh views, against arithmetic on the rank number."""

import math

import pytest
import torch.distributed as dist

from tests.harness.distributed import run_distributed
from titanlite.config.layout import resolve_layout
from titanlite.config.schema import ParallelismConfig
from titanlite.parallel.mesh import Meshes

AXES = ("pp", "batch", "cp", "tp", "dp_replicate", "fsdp", "efsdp", "ep", "loss", "sequence")
LAZY = ("efsdp", "ep", "sequence")  # made when first asked for
LAYOUTS = [
    {"dp_shard": 8},
    {"dp_replicate": 8},
    {"dp_replicate": 2, "dp_shard": 4},
    {"dp_shard": 2, "tp": 2, "cp": 2},
    {"pp": 2, "dp_replicate": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    {"cp": 8},
    {"tp": 8, "ep": 8},
]


def coordinates_and_groups(layouts):
    """Per layout: ({axis: (coordinate, size, ranks of the group)}, (shape, coordinate) of hsdp), of this rank."""
    found = []
    for degrees in layouts:
        meshes = Meshes(resolve_layout(ParallelismConfig(**degrees), dist.get_world_size()), "cpu")
        before = meshes.groups()
        assert all(getattr(meshes, name).get_group() in before for name in AXES if name not in LAZY)
        axes = {}
        for name in AXES:
            mesh = getattr(meshes, name)
            assert mesh.ndim == 1
            axes[name] = (mesh.get_local_rank(), mesh.size(), dist.get_process_group_ranks(mesh.get_group()))
        assert all(getattr(meshes, name).get_group() in meshes.groups() for name in AXES)
        assert before < meshes.groups(), "the sparse view was made only now"
        found.append((axes, (meshes.hsdp.shape, meshes.hsdp.get_coordinate())))
    return found


def expected(degrees, rank):
    """Coordinates by name, from the order (pp, dp_replicate, dp_shard, cp, tp), tp varying fastest."""
    size = {name: degrees.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    if "dp_shard" not in degrees:
        size["dp_shard"] = 8 // math.prod(size[name] for name in ("pp", "dp_replicate", "cp", "tp"))
    at = {}
    rest = rank
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        rest, at[name] = divmod(rest, size[name])
    inner = (at["dp_shard"] * size["cp"] + at["cp"]) * size["tp"] + at["tp"]
    at["batch"] = at["dp_replicate"] * size["dp_shard"] + at["dp_shard"]
    at["fsdp"] = at["dp_shard"] * size["cp"] + at["cp"]
    at["loss"] = at["batch"] * size["cp"] + at["cp"]
    at["sequence"] = at["cp"] * size["tp"] + at["tp"]
    at["efsdp"], at["ep"] = divmod(inner, size["ep"])
    return at


# An axis's group: the ranks that agree on these.
REST = {
    "pp": ("batch", "cp", "tp"),
    "batch": ("pp", "cp", "tp"),
    "cp": ("pp", "batch", "tp"),
    "tp": ("pp", "batch", "cp"),
    "dp_replicate": ("pp", "fsdp", "tp"),
    "fsdp": ("pp", "dp_replicate", "tp"),
    "efsdp": ("pp", "dp_replicate", "ep"),
    "ep": ("pp", "dp_replicate", "efsdp"),
    "loss": ("pp", "tp"),
    "sequence": ("pp", "batch"),
}


@pytest.fixture(scope="module")
def found():
    return run_distributed(coordinates_and_groups, 8, LAYOUTS, timeout=120)


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_coordinates_sizes_and_groups(found, index):
    places = [expected(LAYOUTS[index], rank) for rank in range(8)]
    for rank, place in enumerate(places):
        axes, _ = found[rank][index]
        for name in AXES:
            coordinate, size, ranks = axes[name]
            group = [r for r, other in enumerate(places) if all(other[key] == place[key] for key in REST[name])]
            assert (coordinate, size, sorted(ranks)) == (place[name], len(group), group), f"{name} of rank {rank}"
            assert ranks[coordinate] == rank


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_hsdp_is_one_axis_for_one_replica_and_two_for_more(found, index):
    replicas = LAYOUTS[index].get("dp_replicate", 1)
    for rank in range(8):
        place = expected(LAYOUTS[index], rank)
        axes, (shape, coordinate) = found[rank][index]
        fsdp = axes["fsdp"][1]
        assert tuple(shape) == ((replicas, fsdp) if replicas > 1 else (fsdp,))
        assert tuple(coordinate) == ((place["dp_replicate"], place["fsdp"]) if replicas > 1 else (place["fsdp"],))
