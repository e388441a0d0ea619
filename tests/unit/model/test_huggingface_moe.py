"""Mixtures of experts against transformers' Mixtral and Qwen3-MoE: the same weights, logits and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.model.helpers import batch, difference, small_config, small_model
from tests.unit.model.test_huggingface import their_arguments
from titanlite.checkpoint.huggingface_model import is_stacked, their_names
from titanlite.config.schema import ModelConfig, MoEConfig

transformers = pytest.importorskip("transformers")


def reference_model(config: ModelConfig, qwen: bool) -> Any:
    moe = config.moe
    arguments = their_arguments(config) | {"num_experts_per_tok": moe.top_k, "experts_implementation": "eager"}
    if not qwen:
        arguments |= {"num_local_experts": moe.n_experts, "intermediate_size": moe.expert_dim}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**arguments))
    arguments |= {
        "num_experts": moe.n_experts,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.route_norm,
        "mlp_only_layers": list(range(moe.first_k_dense)),
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**arguments))


def in_their_layout(config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, or their gradients, as those of transformers' modules, with padding rows.

    These are named as Qwen3-MoE's files are, and stacked: gate on up, [E, 2 expert_dim, dim].
    """
    theirs: dict[str, Tensor] = {}
    for fqn, tensor in ours.items():
        first, *_ = their_names(fqn, "qwen3_moe", config.moe.n_experts)
        theirs[first.replace(".experts.0.", ".experts.").removesuffix(".weight" if is_stacked(fqn) else "")] = tensor
    for name in [name for name in theirs if name.endswith("experts.gate_proj")]:
        parts = theirs.pop(name), theirs.pop(name.replace("gate_proj", "up_proj"))
        theirs[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts, dim=1)
    return theirs


CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "mixtral, 8 experts, top 2": (False, {"n_experts": 8, "top_k": 2}, {}),
    "mixtral, 12 experts, top 4": (False, {"n_experts": 12, "top_k": 4}, {"n_layers": 3}),
    "mixtral, top 1": (False, {"n_experts": 4, "top_k": 1}, {}),
    "mixtral, all of 3": (False, {"n_experts": 3, "top_k": 3}, {"tie_word_embeddings": True}),
    "qwen, 12 experts, top 4": (True, {"n_experts": 12, "top_k": 4}, {"qk_norm": True}),
    "qwen, 16 experts, top 1, as scored": (
        True,
        {"n_experts": 16, "top_k": 1, "route_norm": False},
        {"qk_norm": True, "head_dim": 24},
    ),
    "qwen, top 2 as scored, first layer dense": (
        True,
        {"n_experts": 5, "top_k": 2, "route_norm": False, "first_k_dense": 1},
        {"qk_norm": True, "n_layers": 3},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_logits_and_every_gradient(case: str) -> None:
    qwen, moe, changes = CASES[case]
    config = small_config(moe=MoEConfig(expert_dim=40, **moe), **changes)
    model = small_model(config)
    reference = reference_model(config, qwen)
    ours = in_their_layout(config, dict(model.named_parameters()))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(ours[name][: parameter.shape[0]])
    tokens, labels = batch(config)

    wanted = reference(tokens, use_cache=False).logits
    loss = nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    got = model(tokens)
    got_loss = model(tokens, labels)
    got_loss.backward()

    assert difference(got, wanted) < 1e-5
    assert abs(got_loss.item() / loss.item() - 1) < 1e-6
    gradients = in_their_layout(config, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    compared = 0
    for name, parameter in reference.named_parameters():
        gradient = gradients[name][: parameter.shape[0]]
        assert parameter.grad is not None
        if moe["top_k"] == 1 and config.moe.route_norm and "mlp.gate." in name:
            assert gradient.abs().max() < 1e-5, "the weight of the one expert is always 1"
        else:
            assert difference(gradient, parameter.grad) < 1e-5, name
        compared += gradient.numel()
    padding = (config.padded_vocab_size - config.vocab_size) * config.dim
    tables = 1 if config.tie_word_embeddings else 2
    assert compared == sum(p.numel() for p in model.parameters()) - tables * padding, "every element was compared"
