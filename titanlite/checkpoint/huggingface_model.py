"""Models as Hugging Face names and describes them: tensors and config.json of Llama, Qwen3, Mixtral and Qwen3-MoE.

Rotary halves are in the same order there, so no tensor is permuted: apart from the vocabulary's padding rows, which
have no place there, and experts, which are one tensor each, what differs is names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from titanlite.config.keys import shown
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import ModelConfig
from titanlite.model.transformer import Transformer

CONFIG = "config.json"

# ---- names

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_EXPERT_NAMES = {
    "mixtral": {
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    },
    "qwen3_moe": {
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.gate": "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.up": "mlp.experts.{}.up_proj.weight",
        "mlp.experts.down": "mlp.experts.{}.down_proj.weight",
    },
}


def is_stacked(fqn: str) -> bool:
    """Whether our parameter holds all experts, which are one tensor each there."""
    return ".mlp.experts." in fqn


def their_names(fqn: str, kind: str, n_experts: int) -> tuple[str, ...]:
    """The names that our parameter `fqn` has there: one, or of a stacked parameter one for each expert, by number.

    kind: theirs of the model, as model_type says.
    """
    if fqn in NAMES:
        return (NAMES[fqn],)
    layers, index, name = fqn.split(".", 2)
    assert layers == "layers", fqn
    theirs = f"model.layers.{index}.{(_LAYER_NAMES | _EXPERT_NAMES.get(kind, {}))[name]}"
    return tuple(theirs.format(expert) for expert in range(n_experts)) if is_stacked(fqn) else (theirs,)


def parameter_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Our parameters and their shapes, padding rows included."""
    with torch.device("meta"):
        return {fqn: parameter.shape for fqn, parameter in Transformer(model).named_parameters()}


def their_shape(fqn: str, shape: torch.Size, model: ModelConfig) -> torch.Size:
    """The shape of each of their tensors that make up our parameter of that shape."""
    if fqn in model.padded_tables:
        return torch.Size((model.vocab_size, *shape[1:]))
    return shape[1:] if is_stacked(fqn) else shape


# ---- config.json

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# What transformers takes for keys that are not there; those not named here must be.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "num_key_value_heads": None, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "head_dim": 128, "max_position_embeddings": 32768},
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131072,
    },
    "qwen3_moe": {"rms_norm_eps": 1e-6, "norm_topk_prob": False, "max_position_embeddings": 32768},
}
_COMMON_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": False, "rope_theta": 10000.0, "head_dim": None}
# Features that titanlite's models do not have, and the values that say they are off.
_OFF: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "decoder_sparse_step": (1,),
    "quantization_config": (None,),
}


def model_type(model: ModelConfig) -> str:
    """Which of theirs it is, as config.json's model_type. Raises InputError with each key that none of them has."""
    moe = model.moe
    problems: list[Problem] = []

    def refuse(key: str, got: object, allowed: str) -> None:
        fix = "Hugging Face has no such model under these names: only titanlite can run it"
        problems.append(Problem("", f"model.{key}", shown(got), allowed, fix))

    if moe.n_experts == 0:
        kind = "qwen3" if model.qk_norm else "llama"
        if kind == "llama" and model.dim % model.n_heads:
            refuse("n_heads", model.n_heads, f"a divisor of model.dim = {model.dim}, as Llama has")
    else:
        kind = "qwen3_moe" if model.qk_norm else "mixtral"
        if moe.score_func != "softmax":
            refuse("moe.score_func", moe.score_func, '"softmax"')
        if moe.bias_update_rate:
            refuse("moe.bias_update_rate", moe.bias_update_rate, "0: no bias chooses experts there")
        if moe.n_shared_experts:
            refuse("moe.n_shared_experts", moe.n_shared_experts, "0: no experts are shared there")
        if moe.route_scale != 1.0:
            refuse("moe.route_scale", moe.route_scale, "1.0")
        otherwise = "as Mixtral has (Qwen3-MoE, which has it, also has model.qk_norm)"
        if kind == "mixtral" and not moe.route_norm:
            refuse("moe.route_norm", moe.route_norm, f"true, {otherwise}")
        if kind == "mixtral" and moe.first_k_dense:
            refuse("moe.first_k_dense", moe.first_k_dense, f"0, {otherwise}")
    if problems:
        raise InputError(problems)
    return kind


def make_config(model: ModelConfig, *, max_position_embeddings: int, dtype: str) -> dict[str, Any]:
    """config.json's contents, without ids of tokens. dtype: of the tensors, such as "bfloat16".

    In the form of transformers 4, which 5 reads too. Raises InputError for a model that is none of theirs.
    """
    kind, moe, scaling = model_type(model), model.moe, model.rope_scaling
    config: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": moe.expert_dim if kind == "mixtral" else model.ffn_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.resolved_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling.factor == 1.0 else {"rope_type": "llama3", **scaling.model_dump()},
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "use_cache": True,
    }
    if kind == "llama":
        config["mlp_bias"] = False
    if kind == "mixtral":
        config |= {"num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "sliding_window": None}
    if kind == "qwen3_moe":
        config |= {
            "num_experts": moe.n_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.expert_dim,
            "norm_topk_prob": moe.route_norm,
            "mlp_only_layers": list(range(moe.first_k_dense)),
            "decoder_sparse_step": 1,
        }
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of one of their models. Raises InputError."""
    config = read_json(folder, CONFIG, "the config.json of a model")
    kind = config.get("model_type")
    if kind not in _CLASSES:
        allowed = f"one of {', '.join(_CLASSES)}: titanlite has no other architecture"
        raise InputError(Problem(str(folder / CONFIG), "model_type", shown(kind), allowed, "take another model"))
    return config


def context_length(folder: Path) -> int:
    """max_position_embeddings of their model: positions, or what transformers takes if there is no such key. Raises
    InputError."""
    key, config = "max_position_embeddings", read_config(folder)
    value = config.get(key, _DEFAULTS[config["model_type"]][key])
    if type(value) is not int or value < 1:
        fix = "copy the model's repository again"
        raise InputError(Problem(str(folder / CONFIG), key, shown(value), "a number of positions", fix))
    return value


def model_section(folder: Path) -> dict[str, Any]:
    """The [model] section that the config.json of a folder stands for: every key that its weights were made for.

    Keys that only training needs (init_std, vocab_pad_multiple, losses of experts) are not in it. Raises InputError
    that names what is missing there, and each feature that titanlite does not have.
    """
    config, path = read_config(folder), str(folder / CONFIG)
    kind = config["model_type"]
    problems = list(_foreign_features(config, path))
    defaults = _COMMON_DEFAULTS | _DEFAULTS[kind]

    def get(key: str, *names: str) -> Any:
        """The value of a key, which may have another name."""
        for name in (key, *names):
            if name in config:
                return config[name]
        if key not in defaults:
            problems.append(Problem(path, key, "nothing", "a number", "copy the file of the model's repository again"))
        return defaults.get(key, 1)

    rope, scaling = _rope(config, path, problems)
    section: dict[str, Any] = {
        "vocab_size": get("vocab_size"),
        "dim": get("hidden_size"),
        "n_layers": get("num_hidden_layers"),
        "n_heads": get("num_attention_heads"),
        "n_kv_heads": get("num_key_value_heads") or get("num_attention_heads"),
        "head_dim": get("head_dim") or 0,
        "ffn_dim": get("intermediate_size"),
        "norm_eps": get("rms_norm_eps"),
        "rope_theta": get("rope_theta") if rope is None else rope,
        **({"rope_scaling": scaling} if scaling else {}),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "tie_word_embeddings": get("tie_word_embeddings"),
    }
    if kind == "mixtral":
        section["moe"] = {
            "n_experts": get("num_local_experts", "num_experts"),
            "top_k": get("num_experts_per_tok"),
            "expert_dim": get("intermediate_size"),
        }
    if kind == "qwen3_moe":
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            allowed, fix = "the first layers: [0, 1, …], or []", "titanlite has no other order: take another model"
            problems.append(Problem(path, "mlp_only_layers", shown(dense), allowed, fix))
            dense = []
        section["moe"] = {
            "n_experts": get("num_experts", "num_local_experts"),
            "top_k": get("num_experts_per_tok"),
            "expert_dim": get("moe_intermediate_size"),
            "route_norm": get("norm_topk_prob"),
            "first_k_dense": len(dense),
        }
    if problems:
        raise InputError(problems)
    try:
        ModelConfig.model_validate(section)
    except ValidationError as error:
        wrong = [(".".join(map(str, e["loc"])), e["input"], e["msg"]) for e in error.errors()]
        raise InputError([Problem(path, f"model.{key}", shown(got), text) for key, got, text in wrong]) from None
    return section


def _foreign_features(config: Mapping[str, Any], path: str) -> Iterator[Problem]:
    off = _OFF | ({"sliding_window": (None,)} if config["model_type"] == "mixtral" else {})
    for key, values in off.items():
        value = config.get(key, values[0])
        if value not in values:
            fix = "titanlite has no such feature: take another model"
            yield Problem(path, key, f"{shown(value):.80}", f"{shown(values[0])}, or no such key", fix)


def _rope(config: Mapping[str, Any], path: str, problems: list[Problem]) -> tuple[Any, dict[str, Any]]:
    """(base or None, [model.rope_scaling]), from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if config.get("rope_scaling") not in (None, {}, given):
        got, allowed = f"{shown(config['rope_scaling']):.200}", "the same as rope_parameters, or no such key"
        problems.append(Problem(path, "rope_scaling", got, allowed, "remove the one that the model was not made with"))
    kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind == "default" and given.get("partial_rotary_factor", 1.0) == 1.0:
        return given.get("rope_theta"), {}
    if kind != "llama3" or any(name not in given for name in names):
        allowed = f'no scaling, or "llama3" with {", ".join(names)}'
        problems.append(Problem(path, key, f"{shown(given):.200}", allowed, "take another model"))
        return None, {}
    return given.get("rope_theta"), {name: given[name] for name in names}


def read_json(folder: Path, name: str, allowed: str) -> dict[str, Any]:
    """The object in a JSON file of the folder. Raises InputError; allowed: what the file is, as it says then."""
    try:
        value = json.loads((folder / name).read_bytes())
        if not isinstance(value, dict):
            raise ValueError("no object")
        return value
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        got = f"broken JSON ({error})"
    fix = "name the folder of a Hugging Face model" if not folder.is_dir() else "copy the model's repository again"
    raise InputError(Problem(str(folder), name, got, allowed, fix)) from None
