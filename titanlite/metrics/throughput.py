"""How fast a run is: tokens per second, model FLOP/s, their share of the device's peak (MFU), memory.

MFU (PaLM, appendix B) is model FLOP/s per device over the device's peak; recomputed work does not count. The peak is
the datasheet's for GPUs in the table below, otherwise measured on all ranks at once. It is never guessed.
"""

from __future__ import annotations

import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from titanlite.config.schema import MetricsConfig

if TYPE_CHECKING:
    from titanlite.parallel.runtime import Ranks


class Datasheet(NamedTuple):
    """Peak dense TFLOP/s of one device: bfloat16 and TF32 with fp32 accumulation, and plain float32."""

    words: str
    bf16: float
    tf32: float
    fp32: float


# NVIDIA and AMD product datasheets and architecture whitepapers, without sparsity. An entry applies to a device whose
# name has all of its words; the first that applies counts. Devices without bfloat16 matrix units are left to measuring.
DATASHEETS = (
    Datasheet("GB200", 2500.0, 1250.0, 80.0),
    Datasheet("B200", 2250.0, 1125.0, 75.0),
    Datasheet("GH200", 989.5, 494.7, 67.0),
    Datasheet("H200 NVL", 835.5, 417.5, 60.0),
    Datasheet("H200", 989.5, 494.7, 67.0),
    Datasheet("H100 NVL", 835.5, 417.5, 60.0),
    Datasheet("H100 PCIe", 756.5, 378.0, 51.0),
    Datasheet("H100", 989.5, 494.7, 67.0),
    Datasheet("A100", 312.0, 156.0, 19.5),
    Datasheet("A40", 149.7, 74.8, 37.4),
    Datasheet("A30", 165.0, 82.0, 10.3),
    Datasheet("A10G", 70.0, 35.0, 31.5),
    Datasheet("A10", 125.0, 62.5, 31.2),
    Datasheet("L40S", 362.0, 183.0, 91.6),
    Datasheet("L40", 181.0, 90.5, 90.5),
    Datasheet("L4", 121.0, 60.0, 30.3),
    Datasheet("RTX A6000", 154.8, 77.4, 38.7),
    Datasheet("RTX 6000 Ada", 364.2, 182.1, 91.1),
    Datasheet("RTX 5090", 209.5, 104.8, 104.8),
    Datasheet("RTX 4090", 165.2, 82.6, 82.6),
    Datasheet("RTX 3090", 71.0, 35.6, 35.6),
    Datasheet("MI300X", 1307.4, 653.7, 163.4),
)
# A name with one of these words is a smaller or larger relative of the device that the rest of it names.
_RELATIVES = {"grid", "laptop", "mobile", "max", "mig", "d", "ti", "super"}

_MATMUL_SECONDS = 0.3
_MATMUL_WARMUPS = 3


@dataclass(frozen=True)
class Peak:
    """Most FLOP/s one device can do in the compute dtype, and where the number comes from."""

    flops: float
    how: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s per device ({self.how})"


def peak_flops(device: torch.device, dtype: torch.dtype, config: MetricsConfig, ranks: Ranks) -> Peak:
    """The peak that MFU is taken of, for matmuls in `dtype`. Collective: it may measure (about 0.3 s)."""
    if config.peak_tflops > 0:
        return Peak(config.peak_tflops * 1e12, "metrics.peak_tflops")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = datasheet(name)
        # All ranks must take the same way, since the other one is collective.
        if all(ranks.all_gather_object(known is not None)) and known is not None:
            return _from_datasheet(name, known, dtype)
    rate = statistics.median(ranks.all_gather_object(matmul_rate(device, dtype, ranks)))
    what = f"{_matmul_dim(device)}^3 {str(dtype).removeprefix('torch.')} matmul"
    return Peak(rate, f"measured: {what} on all {ranks.world_size} ranks at once, median")


def datasheet(device_name: str) -> Datasheet | None:
    """The entry for a device by its name (torch.cuda.get_device_name); None if it is not one of the table's."""
    words = set(re.split(r"[^a-z0-9.]+", device_name.lower()))
    if words & _RELATIVES:
        return None
    return next((entry for entry in DATASHEETS if set(entry.words.lower().split()) <= words), None)


def _from_datasheet(name: str, entry: Datasheet, dtype: torch.dtype) -> Peak:
    if dtype == torch.bfloat16:
        return Peak(entry.bf16 * 1e12, f"datasheet of {name}, bfloat16")
    if torch.get_float32_matmul_precision() == "highest":
        return Peak(entry.fp32 * 1e12, f"datasheet of {name}, float32 without TF32")
    return Peak(entry.tf32 * 1e12, f"datasheet of {name}, TF32")


def matmul_rate(device: torch.device, dtype: torch.dtype, ranks: Ranks) -> float:
    """Best FLOP/s of this rank over square matmuls of about 0.3 s, while all other ranks do the same. Collective."""
    n = _matmul_dim(device)
    generator = torch.Generator(device).manual_seed(0)  # the global one is left alone
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)

    def seconds() -> float:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _synchronize(device)
        return time.perf_counter() - start

    with torch.no_grad():
        for _ in range(_MATMUL_WARMUPS):
            seconds()
        ranks.barrier()
        best, end = seconds(), time.perf_counter() + _MATMUL_SECONDS
        while time.perf_counter() < end:
            best = min(best, seconds())
    return 2.0 * n**3 / best


def bf16_slower_than_fp32(device: torch.device, ranks: Ranks) -> float:
    """How many times slower a bfloat16 matmul is than a float32 one, on all ranks at once. Collective, about 0.6 s.

    Above 1 on CPUs without bfloat16 instructions, where a bfloat16 run is better done in float32.
    """
    mine = matmul_rate(device, torch.float32, ranks) / matmul_rate(device, torch.bfloat16, ranks)
    return statistics.median(ranks.all_gather_object(mine))


def memory_gib(device: torch.device) -> float:
    """This process's largest memory so far, GiB: reserved by the allocator on CUDA, resident (RSS) on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return rss * (1 if sys.platform == "darwin" else 1024) / 2**30


class Throughput:
    """Speed over the window of steps since the last row.

    Time inside `pause()` (validation, what a checkpoint stalls) is not counted, so the figures are those of training;
    the wall time of the run is in the rows' `time`. Tokens are those of the global batch, whatever the layout.

    flops_per_token, causal_flops_per_token: forward and backward, as model/flops.py has them.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        causal_flops_per_token: float,
        peak: Peak,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._flops = flops_per_token
        self._causal_flops = causal_flops_per_token
        self._peak = peak
        self._world_size = world_size
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Start a new window now."""
        self._start = time.perf_counter()
        self._steps = 0
        self._tokens = 0
        self._data_wait = 0.0
        self._paused = 0.0

    def step(self, tokens: int, data_wait_seconds: float) -> None:
        """One optimizer step has been queued: `tokens` of it over all ranks, and how long this rank waited for data."""
        self._steps += 1
        self._tokens += tokens
        self._data_wait += data_wait_seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time inside out. Waits for the device at both ends, so that queued steps are still counted."""
        _synchronize(self._device)
        start = time.perf_counter()
        try:
            yield
        finally:
            _synchronize(self._device)
            self._paused += time.perf_counter() - start

    def row(self) -> dict[str, float]:
        """The window's figures under the metrics' names; starts a new one. Call it when the device has caught up
        (after the loss was read), with at least one step done since the last call."""
        assert self._steps > 0, "no step since the last row"
        seconds = max(time.perf_counter() - self._start - self._paused, 1e-9)
        rate = self._tokens / seconds
        per_device = rate / self._world_size
        row = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": per_device * self._flops / 1e12,
            "mfu": per_device * self._flops / self._peak.flops,
            "mfu_causal": per_device * self._causal_flops / self._peak.flops,
            "peak_memory_gib": memory_gib(self._device),
            "step_seconds": seconds / self._steps,
            "data_wait_seconds": self._data_wait / self._steps,
        }
        self.reset()
        return row


def _matmul_dim(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 1024  # large enough to fill the device, small enough for 0.3 s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
