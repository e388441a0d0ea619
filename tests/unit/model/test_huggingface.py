"""Against an independent implementation, transformers: the same weights give the same logits and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.model.helpers import batch, difference, small_config, small_model
from titanlite.checkpoint.huggingface_model import model_type, their_names
from titanlite.config.schema import ModelConfig, RopeScalingConfig
from titanlite.model.attention import rope_inverse_frequencies, rope_tables

transformers = pytest.importorskip("transformers")

LLAMA_3_1 = RopeScalingConfig(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def their_arguments(config: ModelConfig) -> dict[str, Any]:
    """Of a transformers config: what all kinds of models have."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling.factor != 1.0:
        rope |= {"rope_type": "llama3", **scaling.model_dump()}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.ffn_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "attn_implementation": "eager",
    }


def reference_model(config: ModelConfig) -> Any:
    arguments = their_arguments(config)
    if config.qk_norm:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**arguments))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**arguments))


def in_their_names(config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, or their gradients, as transformers' parameters of a dense model, with padding rows."""
    return {name: tensor for fqn, tensor in ours.items() for name in their_names(fqn, model_type(config), 0)}


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "multi-head": ({"n_kv_heads": 4}, 0),
    "grouped-query": ({}, 0),
    "multi-query": ({"n_kv_heads": 1, "n_layers": 3}, 0),
    "tied": ({"tie_word_embeddings": True}, 0),
    "own head_dim": ({"head_dim": 24, "n_heads": 8, "n_kv_heads": 2}, 0),
    "large eps": ({"norm_eps": 1e-2, "rope_theta": 500000.0}, 0),
    "unscaled, position 9000": ({}, 9000),
    "llama 3.1, position 0": ({"rope_scaling": LLAMA_3_1, "rope_theta": 500000.0, "head_dim": 64}, 0),
    "llama 3.1, position 9000": ({"rope_scaling": LLAMA_3_1, "rope_theta": 500000.0, "head_dim": 64}, 9000),
    "llama 3.1, position 20000": (
        {"rope_scaling": LLAMA_3_1, "rope_theta": 500000.0, "head_dim": 64, "tie_word_embeddings": True},
        20000,
    ),
    "llama 3.2, position 100000": (
        {"rope_scaling": LLAMA_3_1.model_copy(update={"factor": 32.0}), "rope_theta": 500000.0, "head_dim": 64},
        100000,
    ),
    "qk_norm": ({"qk_norm": True}, 0),
    "qk_norm, own head_dim, tied": ({"qk_norm": True, "head_dim": 32, "tie_word_embeddings": True}, 9000),
}


@pytest.mark.parametrize("chunk_tokens", [0, 19])
@pytest.mark.parametrize("case", list(CASES))
def test_logits_and_every_gradient(case: str, chunk_tokens: int) -> None:
    changes, offset = CASES[case]
    config = small_config(**changes)
    model = small_model(config, loss_chunk_tokens=chunk_tokens)
    reference = reference_model(config)
    ours = in_their_names(config, dict(model.named_parameters()))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(ours[name][: parameter.shape[0]])
    tokens, labels = batch(config)
    positions = torch.arange(offset, offset + tokens.shape[1])

    wanted = reference(tokens, position_ids=positions[None], use_cache=False).logits
    loss = nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    got = model(tokens, positions=positions)
    got_loss = model(tokens, labels, positions)
    got_loss.backward()

    assert got.shape == wanted.shape
    assert difference(got, wanted) < 1e-5
    assert abs(got_loss.item() / loss.item() - 1) < 1e-6
    seen = set()
    for name, parameter in reference.named_parameters():
        gradient = ours[name].grad
        assert gradient is not None and parameter.grad is not None
        assert difference(gradient[: parameter.shape[0]], parameter.grad) < 1e-5, name
        assert gradient[parameter.shape[0] :].count_nonzero() == 0, "padding rows must have no gradient"
        seen.add(name)
    assert seen == set(ours), "every parameter was compared"


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rotary_angles_are_bitwise_those_of_transformers(factor: float, head_dim: int) -> None:
    config = small_config(
        head_dim=head_dim, rope_theta=500000.0, rope_scaling=LLAMA_3_1.model_copy(update={"factor": factor})
    )
    rotary = reference_model(config).model.rotary_emb
    frequencies = rope_inverse_frequencies(config)
    assert torch.equal(frequencies, rotary.inv_freq)
    positions = torch.tensor([0, 1, 8191, 8192, 20000, 131071])
    cos, sin = rope_tables(positions, frequencies)
    wanted_cos, wanted_sin = rotary(torch.zeros(1), positions[None])
    assert torch.equal(cos[:, 0], wanted_cos[0])
    half = head_dim // 2
    assert torch.equal(sin[:, 0, half:], wanted_sin[0, :, half:])
    assert torch.equal(-sin[:, 0, :half], wanted_sin[0, :, :half])
