from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from tests.unit.model.helpers import batch, small_config, small_model
from titanlite.config.layout import parameter_counts
from titanlite.config.schema import MoEConfig
from titanlite.model.flops import flops_per_token

CASES: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 4, "n_layers": 3},
    {"n_kv_heads": 1, "head_dim": 24},
    {"tie_word_embeddings": True, "qk_norm": True},
]


MOE: list[dict[str, Any]] = [
    {"moe": MoEConfig(n_experts=6, top_k=2, expert_dim=24, first_k_dense=1)},
    {"moe": MoEConfig(n_experts=12, top_k=3, expert_dim=8, n_shared_experts=2), "tie_word_embeddings": True},
]


@register_flop_formula(torch.ops.aten._grouped_mm)
def grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """[R, K] by [E, K, N], each row by one of the matrices, or [N, R] by [R, K]: torch counts neither."""
    return int(2 * left[0] * left[1] * right[-1])


@pytest.mark.parametrize("changes", CASES + MOE)
@pytest.mark.parametrize("chunk_tokens", [0, 16])
def test_formula_is_the_count_of_the_matmuls_that_run(changes: dict[str, Any], chunk_tokens: int) -> None:
    config = small_config(vocab_pad_multiple=1, **changes)
    model = small_model(config, loss_chunk_tokens=chunk_tokens)
    tokens, labels = batch(config, samples=2, seq_len=32)
    # The math backend: its matmuls are visible, and masked keys are multiplied too, as PaLM counts.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels).backward()
    # A first layer's input (the embedding) needs its gradient as well, so nothing is missing from 3 x forward.
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(config, 32).palm


def test_causal_halves_attention_only() -> None:
    config = small_config()
    short, long = flops_per_token(config, 128), flops_per_token(config, 256)
    assert long.palm - short.palm == 2 * (long.causal - short.causal) == 12 * 2 * 4 * 16 * 128
    assert short.palm - 2 * (short.palm - short.causal) == 6 * parameter_counts(config).matmul


@pytest.mark.parametrize("changes", CASES)
def test_matmul_parameters_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    model = small_model(config)
    layers = sum(p.numel() for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2)
    assert parameter_counts(config).matmul == layers + config.vocab_size * config.dim


def test_is_torch_free() -> None:
    code = "import sys, titanlite.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
