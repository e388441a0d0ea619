from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import titanlite.model.init as init_module
from tests.unit.model.helpers import init_model_, small_config
from titanlite.model.init import init_, init_std, tensors_hash
from titanlite.model.transformer import Transformer

CONFIG = small_config(vocab_size=1000, init_std=0.02)
FINAL_VALUES = [
    "-0x1.4f15c40000000p-7",
    "0x1.5dde840000000p-7",
    "-0x1.0fab6e0000000p-12",
    "-0x1.d5afde0000000p-9",
    "0x1.a8f95e0000000p-6",
    "0x1.e65e2c0000000p-6",
]


def full(fqn: str, shape: tuple[int, ...], seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    init_(tensor, fqn, CONFIG, seed, global_shape=shape, offsets=(0,) * len(shape))
    return tensor


def test_values_are_final() -> None:
    """Every run and checkpoint so far rests on these bits."""
    values = full("layers.0.attention.wq.weight", (2, 3), seed=42)
    wanted = [float.fromhex(x) for x in FINAL_VALUES]
    assert values.flatten().tolist() == wanted


def test_hash_is_splitmix64_and_the_map_is_the_inverse_cdf() -> None:
    """Against Python's unbounded integers and a bisection of math.erf."""
    mask = 2**64 - 1
    state = int.from_bytes(hashlib.sha256(b"5:layers.1.mlp.up.weight").digest()[:8], "little")
    values = full("layers.1.mlp.up.weight", (50, 10), seed=5, dtype=torch.float64).flatten()
    for index in range(500):
        z = (state + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        k = z >> 12
        v = (2 * (k - 2**52 if k >= 2**51 else k) + 1) / 2**52
        low, high = -3.0, 3.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if math.erf(middle / 2**0.5) < v * math.erf(3 / 2**0.5) else (low, middle)
        assert values[index].item() == pytest.approx(0.02 * low, rel=1e-6)


def blocks_of(shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]) -> list[tuple[slice, ...]]:
    edges = [sorted({0, size, *(c for c in cut if c < size)}) for size, cut in zip(shape, cuts, strict=True)]
    return [
        tuple(slice(a, b) for a, b in corner)
        for corner in itertools.product(*(list(itertools.pairwise(edge)) for edge in edges))
    ]


@pytest.mark.parametrize("chunk", [2**15, 1000, 7])
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((131, 257), ((1, 2, 5, 68), (1, 9, 100, 255))),
        ((131, 257), ((), (3, 128))),
        ((131, 257), ((66,), ())),
        ((3, 40000), ((1,), (1, 32767, 32769))),
        ((40000, 3), ((7, 32771), (1,))),
        ((5, 17, 33), ((1, 3), (4, 5), (2, 31))),
        ((1000,), ((1, 3, 500),)),
    ],
)
def test_any_block_has_the_bits_of_the_whole(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fqn = "layers.0.mlp.down.weight"
    whole = full(fqn, shape)
    if chunk < 2**15 and whole.numel() > 50000:
        chunk *= 31
    monkeypatch.setattr(init_module, "CHUNK_ELEMENTS", chunk)
    assert torch.equal(full(fqn, shape), whole), "chunking changes nothing"
    for block in blocks_of(shape, cuts):
        local = torch.empty_like(whole[block]).contiguous()
        init_(local, fqn, CONFIG, 1, global_shape=shape, offsets=tuple(part.start for part in block))
        assert torch.equal(local, whole[block]), block


def test_every_odd_length_has_the_same_bits() -> None:
    """Vectorised kernels finish a row with scalar code: it must round the same."""
    whole = full("layers.0.attention.wo.weight", (1, 200))
    for start, length in itertools.product(range(0, 17), range(1, 70)):
        local = torch.empty(1, length)
        init_(local, "layers.0.attention.wo.weight", CONFIG, 1, global_shape=(1, 200), offsets=(0, start))
        assert torch.equal(local, whole[:, start : start + length])


def test_a_view_is_filled_in_place_and_empty_blocks_are_fine() -> None:
    whole = full("embedding.weight", (1024, 48))
    outer = torch.full((30, 48), 7.0)
    init_(outer[10:20], "embedding.weight", CONFIG, 1, global_shape=(1024, 48), offsets=(100, 0))
    assert torch.equal(outer[10:20], whole[100:110])
    assert (outer[:10] == 7).all() and (outer[20:] == 7).all()
    for shape in ((0, 48), (3, 0)):
        init_(torch.empty(shape), "embedding.weight", CONFIG, 1, global_shape=(1024, 48), offsets=(1024, 0))
    with pytest.raises(AssertionError, match="outside"):
        init_(torch.empty(2, 48), "embedding.weight", CONFIG, 1, global_shape=(1024, 48), offsets=(1023, 0))


@pytest.mark.parametrize("fqn", ["embedding.weight", "output.weight"])
def test_padding_rows_are_zero_and_padding_changes_nothing_else(fqn: str) -> None:
    few, many = full(fqn, (1024, 64)), full(fqn, (1280, 64))
    assert few[1000:].count_nonzero() == 0 and many[1000:].count_nonzero() == 0
    assert torch.equal(few[:1000], many[:1000])
    assert (few[:1000] != 0).all()
    local = torch.empty(100, 64)
    init_(local, fqn, CONFIG, 1, global_shape=(1024, 64), offsets=(924, 0))
    assert torch.equal(local, few[924:])
    beyond = torch.ones(10, 64)
    init_(beyond, fqn, CONFIG, 1, global_shape=(1024, 64), offsets=(1010, 0))
    assert beyond.count_nonzero() == 0


def test_statistics() -> None:
    values = full("layers.0.attention.wq.weight", (1500, 1000), dtype=torch.float64) / 0.02
    n = values.numel()
    # Moments of a normal truncated at 3: variance 1 - 6 phi(3) / (2 Phi(3) - 1).
    density, inside = math.exp(-4.5) / math.sqrt(2 * math.pi), math.erf(3 / math.sqrt(2))
    std = math.sqrt(1 - 6 * density / inside)
    assert abs(values.mean().item()) < 4 * std / math.sqrt(n)
    assert abs(values.std().item() / std - 1) < 4 / math.sqrt(2 * n)
    assert 2.999 < values.max().item() < 3.000001 and -3.000001 < values.min().item() < -2.999
    for bound in (-2.5, -1.0, 0.0, 0.5, 2.0, 2.9):
        probability = (math.erf(bound / math.sqrt(2)) / inside + 1) / 2
        share = (values < bound).double().mean().item()
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / n), bound
    assert values.unique().numel() == n


def test_parameters_seeds_and_neighbours_are_uncorrelated() -> None:
    shape = (400, 500)
    samples = [
        full("layers.0.attention.wq.weight", shape),
        full("layers.1.attention.wq.weight", shape),
        full("layers.0.mlp.gate.weight", shape),
        full("layers.0.attention.wq.weight", shape, seed=2),
        full("layers.0.attention.wq.weight", shape).flatten().roll(1),
        full("layers.0.attention.wq.weight", shape).flatten().roll(500),
    ]
    correlations = np.corrcoef(torch.stack([x.flatten() for x in samples]).double().numpy())
    off_diagonal = correlations[~np.eye(len(samples), dtype=bool)]
    assert np.abs(off_diagonal).max() < 4.5 / math.sqrt(400 * 500)


def test_stds() -> None:
    config = small_config(n_layers=8, init_std=0.02, qk_norm=True)
    residual = 0.02 / math.sqrt(16)
    wanted = {"wo": residual, "down": residual}
    model = Transformer(config)
    for fqn, _ in model.named_parameters():
        leaf = fqn.split(".")[-2]
        assert init_std(config, fqn) == (None if "norm" in leaf else wanted.get(leaf, 0.02)), fqn
    init_model_(model, config, 3)
    assert abs(model.get_parameter("layers.3.mlp.down.weight").std().item() / residual - 0.9866) < 0.03
    assert abs(model.get_parameter("layers.3.mlp.up.weight").std().item() / 0.02 - 0.9866) < 0.03
    assert (model.get_parameter("layers.3.attention.q_norm.weight") == 1).all()
    for name in ("layers.0.mlp.bias", "layers.0.mlp.gat.weight", "rope"):
        with pytest.raises(ValueError, match=f"no rule to initialise parameter '{name}'"):
            init_std(config, name)


def test_bf16_is_the_rounded_fp32() -> None:
    shape = (100, 77)
    assert torch.equal(full("output.weight", shape, dtype=torch.bfloat16), full("output.weight", shape).bfloat16())


def test_torch_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    model = Transformer(CONFIG)
    init_model_(model, CONFIG, 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_tensors_hash() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(3, dtype=torch.bfloat16)
    first = tensors_hash([("a", a), ("b", b)])
    assert first == tensors_hash(iter([("b", b.clone()), ("a", a.t().contiguous().t())]))
    different = [
        [("a", a)],
        [("a", a.view(3, 2)), ("b", b)],
        [("a", a.double()), ("b", b)],
        [("c", a), ("b", b)],
        [("a", a + 1e-6 * (a == 5)), ("b", b)],
        [("b", a), ("a", b)],
    ]
    assert len({first, *(tensors_hash(named) for named in different)}) == 7
    assert tensors_hash([("scalar", torch.tensor(1.0))]) != tensors_hash([("scalar", torch.tensor(2.0))])
