from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.model.helpers import batch, small_config, small_model
from titanlite.config.layout import parameter_counts
from titanlite.model.flops import flops_per_token

CASES: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 4, "n_layers": 3},
    {"n_kv_heads": 1, "head_dim": 24},
    {"tie_word_embeddings": True, "qk_norm": True},
]


@pytest.mark.parametrize("changes", CASES)
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
