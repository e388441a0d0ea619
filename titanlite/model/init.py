"""Initial weights without a random number generator: element i of parameter `fqn` is a function of (seed, fqn, i).

Any rank computes just the elements of its own block, in any layout, on any device, and gets the same bits: the hash
is integer arithmetic, and the map to a normal deviate uses only additions, multiplications and one division in fp64,
which IEEE 754 rounds the same everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from titanlite.config.schema import ModelConfig

CHUNK_ELEMENTS = 2**15  # 256 KiB of int64 at a time: the passes below stay in a core's cache
TRUNCATION = 3.0  # standard deviations

# sqrt(2) * erfinv(v * erf(3 / sqrt(2))) / v as P(v^2) / Q(v^2) on [-1, 1]: the inverse CDF of a normal truncated at
# 3 std. A minimax-like fit by reweighted least squares in 40 digits; relative error below 2e-7 everywhere.
_NUMERATOR = (
    1.249930675737845,
    -5.4966259146514025,
    9.679913995882426,
    -8.603331678501483,
    3.9554057378725433,
    -0.8368046175356108,
    0.05151233934975982,
)
_DENOMINATOR = (
    1.0,
    -4.657921979784576,
    8.814707840408923,
    -8.61045933942878,
    4.525402141533692,
    -1.188603691092683,
    0.11687520774815117,
)


def init_std(config: ModelConfig, fqn: str) -> float | None:
    """Std of a parameter's initial values before truncation; None for norm weights, which start at one.

    Outputs into the residual stream get init_std / sqrt(2 n_layers) (GPT-2, Radford et al. 2019, section 2.3).
    Raises ValueError for a name that no parameter of the model has.
    """
    module, _, leaf = fqn.rpartition(".")
    last = module.rpartition(".")[2]
    if leaf == "weight":
        if last in ("norm", "attention_norm", "mlp_norm", "q_norm", "k_norm"):
            return None
        if last in ("wo", "down"):
            return config.init_std / math.sqrt(2 * config.n_layers)
        if last in ("embedding", "output", "wq", "wk", "wv", "gate", "up", "router"):
            return config.init_std
    if last == "experts" and leaf in ("gate", "up", "down"):
        return init_std(config, f"{leaf}.weight")
    raise ValueError(f"no rule to initialise parameter {fqn!r}")


def init_(
    local: Tensor,
    fqn: str,
    config: ModelConfig,
    seed: int,
    *,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """Fill `local`, the block of parameter `fqn` that starts at `offsets` in a tensor of `global_shape`, in place.

    local: any floating dtype, contiguous but for its first dim; empty is fine. The values do not depend on how the
    parameter is cut into blocks, nor, as only rows are padded, on the vocabulary padding; padding rows are zero.
    """
    global_shape, offsets = tuple(global_shape), tuple(offsets)
    assert len(global_shape) == len(offsets) == local.ndim, (fqn, global_shape, offsets, local.shape)
    if local.numel() == 0:
        return
    assert all(o + n <= g for o, n, g in zip(offsets, local.shape, global_shape, strict=True)), (
        f"block {tuple(local.shape)} at {offsets} lies outside of {fqn} {global_shape}"
    )
    std = init_std(config, fqn)
    with torch.no_grad():
        if std is None:
            local.fill_(1.0)
            return
        _fill_normal(local, _key(seed, fqn), std, global_shape, offsets)
        if fqn.removesuffix(".weight") in ("embedding", "output"):
            local[max(0, config.vocab_size - offsets[0]) :] = 0.0


def tensors_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over the names, dtypes, shapes and bytes of full tensors, in the order of their names.

    Tensors are hashed one by one, so `named` may be a generator that gathers them.
    """
    digests = {}
    for name, tensor in named:
        contents = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(contents.data)
        digests[name] = digest.digest()
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(digests[name])
    return total.hexdigest()


def _key(seed: int, fqn: str) -> int:
    """Start of the parameter's own splitmix64 sequence, as a signed 64-bit integer."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{fqn}".encode()).digest()[:8], "little", signed=True)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _fill_normal(local: Tensor, key: int, std: float, global_shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    columns = local.shape[-1]
    rows = local.view(-1, columns)
    starts = _row_starts(tuple(local.shape), global_shape, offsets).to(local.device)
    rows_per_chunk = max(1, CHUNK_ELEMENTS // columns)
    for row in range(0, rows.shape[0], rows_per_chunk):
        for column in range(0, columns, CHUNK_ELEMENTS):
            block = rows[row : row + rows_per_chunk, column : column + CHUNK_ELEMENTS]
            index = torch.arange(column, column + block.shape[1], dtype=torch.int64, device=local.device)
            block.copy_(_truncated_normal(starts[row : row + rows_per_chunk, None] + index, key).mul_(std))


def _row_starts(shape: tuple[int, ...], global_shape: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
    """Global flat index of the first element of every row (all dims but the last) of the block: int64."""
    starts = torch.zeros((), dtype=torch.int64)
    for size, global_size, offset in zip(shape[:-1], global_shape[:-1], offsets[:-1], strict=True):
        starts = starts.unsqueeze(-1) * global_size + torch.arange(offset, offset + size)
    return (starts * global_shape[-1] + offsets[-1]).reshape(-1)


def _truncated_normal(index: Tensor, key: int) -> Tensor:
    """Standard normal deviates truncated at 3, fp64, one for each int64 index; overwrites `index`.

    The hash is splitmix64 (Steele, Lea & Flood 2014): output index + 1 of the sequence that starts at `key`.
    Multiplication wraps around; torch's >> copies the sign bit, which the masks undo.
    """
    z = index.add_(1).mul_(_GAMMA).add_(key)
    z.bitwise_xor_((z >> 30).bitwise_and_(2**34 - 1)).mul_(_MIX_1)
    z.bitwise_xor_((z >> 27).bitwise_and_(2**37 - 1)).mul_(_MIX_2)
    z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))
    # The upper 52 bits, a signed k, become the odd integer 2k + 1: v is exact, symmetric and inside (-1, 1).
    z = z.bitwise_right_shift_(12).mul_(2).add_(1)
    v = z.to(torch.float64).mul_(2.0**-52)
    square = v.square()
    numerator, denominator = _horner(_NUMERATOR, square), _horner(_DENOMINATOR, square)
    return numerator.mul_(v).div_(denominator)


def _horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Polynomial with `coefficients` from the lowest power; separate products and sums, so that none is fused."""
    value = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])
