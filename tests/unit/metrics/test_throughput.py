import resource
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titanlite.config.schema import MetricsConfig
from titanlite.metrics import throughput
from titanlite.metrics.throughput import Peak, Throughput, datasheet, matmul_rate, memory_gib, peak_flops

CPU = torch.device("cpu")


class FourRanks:
    """A world of four in one process: the others' figures are this rank's times a factor."""

    world_size = 4

    def __init__(self) -> None:
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * 4 if isinstance(value, bool) else [value, 3 * value, 5 * value, 100 * value]


@pytest.fixture
def ranks() -> Any:
    return FourRanks()


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4),
        # No guesses: near names are other devices, or a part of one.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("GRID A100-10C", None),
        ("NVIDIA H800", None),
        ("NVIDIA H20", None),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
    ],
)
def test_datasheet(name: str, bf16: float | None) -> None:
    found = datasheet(name)
    assert (found.bf16 if found else None) == bf16


def test_datasheet_is_of_the_matmuls_that_run(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, torch.bfloat16, MetricsConfig(), ranks).flops == 989.5e12
    for precision, tflops in (("high", 494.7), ("highest", 67.0)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        peak = peak_flops(cuda, torch.float32, MetricsConfig(), ranks)
        assert peak.flops == tflops * 1e12 and "datasheet of NVIDIA H200" in peak.how


def test_config_comes_first(ranks: Any) -> None:
    peak = peak_flops(CPU, torch.float32, MetricsConfig(peak_tflops=12.5), ranks)
    assert peak == Peak(12.5e12, "metrics.peak_tflops") and str(peak).startswith("12.5 TFLOP/s per device")
    assert ranks.barriers == 0


def test_measured_is_the_median_of_the_ranks(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rate(device: torch.device, dtype: torch.dtype, _: Any) -> float:
        asked.append(dtype)
        return 1e9

    monkeypatch.setattr(throughput, "matmul_rate", rate)
    peak = peak_flops(CPU, torch.bfloat16, MetricsConfig(), ranks)
    assert asked == [torch.bfloat16] and peak.flops == 4e9
    assert peak.how == "measured: 1024^3 bfloat16 matmul on all 4 ranks at once, median"


def test_matmul_rate_is_two_flops_per_multiply_add_of_the_fastest(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: 3 matmuls to warm up, then until 0.3 s have passed; the fastest of these takes 0.05 s."""
    now, seconds = [100.0], iter([0.001, 0.001, 0.001, 0.2, 0.05, 0.1, 0.16])

    def timed_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        assert a.shape == b.shape == out.shape == (64, 64) and a.dtype == b.dtype == out.dtype == torch.bfloat16
        now[0] += next(seconds)

    monkeypatch.setattr(throughput, "_matmul_dim", lambda device: 64)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", timed_mm)
    state = torch.get_rng_state()
    assert matmul_rate(CPU, torch.bfloat16, ranks) == pytest.approx(2 * 64**3 / 0.05)
    assert next(seconds, None) is None, "it took all of its time"
    assert ranks.barriers == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_slower_than_fp32_is_a_ratio(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 6e9, torch.bfloat16: 2e9}
    monkeypatch.setattr(throughput, "matmul_rate", lambda device, dtype, _: rates[dtype])
    ranks.all_gather_object = lambda value: [value]
    assert throughput.bf16_slower_than_fp32(CPU, ranks) == 3.0


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hog = torch.ones(64 * 2**20)  # 256 MiB, touched
    assert 0.25 < memory_gib(CPU) < 64
    del hog
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2**21))
    for platform, gib in (("linux", 2.0), ("darwin", 2.0 / 1024)):
        monkeypatch.setattr(sys, "platform", platform)
        assert memory_gib(CPU) == gib
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    assert memory_gib(torch.device("cuda", 0)) == 3.0


def test_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 4 devices, 6 FLOPs a token, a window of 3 steps and 10 s of which 4 were validation."""
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    speed = Throughput(
        flops_per_token=6e9, causal_flops_per_token=5e9, peak=Peak(1e12, "test"), world_size=4, device=CPU
    )
    for _ in range(3):
        now[0] += 2.0
        speed.step(1000, 0.5)
    with speed.pause():
        now[0] += 4.0
    row = speed.row()
    assert row.pop("peak_memory_gib") > 0
    assert row == pytest.approx(
        {
            "tokens_per_second": 500.0,
            "tokens_per_second_per_device": 125.0,
            "tflops_per_device": 0.75,
            "mfu": 0.75,
            "mfu_causal": 0.625,
            "step_seconds": 2.0,
            "data_wait_seconds": 0.5,
        }
    )
    now[0] += 1.0
    speed.step(1000, 0.0)
    assert speed.row()["tokens_per_second"] == 1000.0  # a window of its own
    with pytest.raises(AssertionError, match="no step"):
        speed.row()
