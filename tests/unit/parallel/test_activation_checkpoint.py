"""What each mode keeps, to the byte, what it computes twice, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.memory import Watch
from tests.unit.model.helpers import batch, gradients, small_config, small_model
from titanlite.config.schema import ActivationCheckpointConfig
from titanlite.model.transformer import Transformer
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint

LAYERS = 4
MODES = {
    "none": ActivationCheckpointConfig(mode="none"),
    "every second": ActivationCheckpointConfig(mode="selective", selective_ac_option="2"),
    "selective": ActivationCheckpointConfig(mode="selective"),
    "full": ActivationCheckpointConfig(mode="full"),
}
aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def model_with(mode: str, **changes: Any) -> tuple[Transformer, dict[str, Tensor]]:
    dtype = changes.pop("dtype", torch.float32)
    config = small_config(n_layers=LAYERS, **changes)
    tokens, labels = batch(config)
    model = small_model(config, compute_dtype=dtype, loss_chunk_tokens=16)
    apply_activation_checkpoint(model.layers, MODES[mode])
    return model, {"tokens_or_h": tokens, "labels": labels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_mode_is_exact(dtype: torch.dtype, masked: bool, qk_norm: bool) -> None:
    results = {}
    for mode in MODES:
        model, inputs = model_with(mode, dtype=dtype, qk_norm=qk_norm)
        if masked:
            inputs["documents"] = (torch.arange(inputs["labels"].shape[1]) // 5).expand_as(inputs["labels"])
        loss = model(**inputs)
        loss.backward()
        results[mode] = loss.detach(), gradients(model)
    loss, expected = results["none"]
    for mode, (other, got) in results.items():
        assert torch.equal(other, loss), mode
        for name, gradient in expected.items():
            assert torch.equal(got[name], gradient), (mode, name)


def kept_by(mode: str) -> int:
    """Bytes that a forward pass leaves behind for backward."""
    model, inputs = model_with(mode)
    with Watch() as watch:
        loss = model(**inputs)
        kept = watch.held_bytes()
        loss.backward()
        del loss
    left = sum(gradient.nbytes for gradient in gradients(model).values())
    assert watch.held_bytes() <= left + 4096, "backward frees all but the gradients"
    return kept


def test_kept_memory_falls_from_mode_to_mode() -> None:
    config = small_config(n_layers=LAYERS)
    tokens, width = batch(config)[0].numel(), 4  # float32
    heads, head_dim = config.n_heads, config.resolved_head_dim
    q, kv, dim = heads * head_dim, config.n_kv_heads * head_dim, config.dim
    kept = {mode: kept_by(mode) for mode in MODES}
    # Beside a block's input, which is the previous one's output: q, k, v, attention's output and its logarithm of the
    # softmax's denominator, and what is added to the residual stream.
    attention = tokens * width * (q + 2 * kv + q + heads + dim)
    assert kept["selective"] - kept["full"] == LAYERS * attention
    # And without recomputation: x, its norm and 1/rms twice, q, k, v, attention's output and logarithm, and of the MLP
    # gate, silu(gate), up and their product.
    block = tokens * width * (2 * (2 * dim + 1) + 2 * q + 2 * kv + heads + 4 * config.ffn_dim)
    assert kept["none"] - kept["full"] == LAYERS * (block - tokens * width * dim)
    assert kept["none"] - kept["every second"] == kept["every second"] - kept["full"]
    assert kept["none"] > kept["every second"] > kept["selective"] > kept["full"]


def operators_of_a_step(mode: str) -> Counter[Any]:
    model, inputs = model_with(mode)
    with Watch() as watch:
        model(**inputs).backward()
    return watch.ran


def test_what_is_computed_twice() -> None:
    ran = {mode: operators_of_a_step(mode) for mode in MODES}
    attention = {mode: counts[ATTENTION] / LAYERS for mode, counts in ran.items()}
    assert attention == {"none": 1, "every second": 1.5, "selective": 1, "full": 2}
    products = {mode: (counts[aten.mm.default] - ran["none"][aten.mm.default]) / LAYERS for mode, counts in ran.items()}
    # The MLP's last product is in no one's way: nobody needs it in backward.
    assert products == {"none": 0, "every second": 3, "selective": 2, "full": 6}


def test_evaluation_keeps_nothing() -> None:
    model, inputs = model_with("selective")
    expected = model(**inputs)
    with torch.no_grad(), Watch() as watch:
        loss = model(**inputs)
        assert watch.held_bytes() == loss.nbytes
    assert torch.equal(loss, expected)
