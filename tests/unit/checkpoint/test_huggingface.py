"""Hugging Face's folders against transformers: the same logits, the same bits there and back, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.processes import ROOT, environment
from tests.unit.checkpoint.conftest import OneRank
from tests.unit.checkpoint.conversion_memory import STATUS
from tests.unit.model.helpers import batch, difference, small_config, small_model
from titanlite import cli
from titanlite.checkpoint import convert, dcp, huggingface_model
from titanlite.checkpoint.huggingface import HuggingFaceWeights
from titanlite.checkpoint.huggingface_model import (
    context_length,
    make_config,
    model_section,
    parameter_shapes,
    their_names,
)
from titanlite.checkpoint.initial import architecture, load_weights, open_weights
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.storage import step_folder
from titanlite.config.load import load
from titanlite.config.problems import InputError
from titanlite.config.schema import CheckpointConfig, ModelConfig, MoEConfig, RopeScalingConfig
from titanlite.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

LLAMA_3_1 = RopeScalingConfig(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, scaled, one kv head": (
        "llama",
        {"tie_word_embeddings": True, "rope_scaling": LLAMA_3_1, "rope_theta": 5e5, "n_kv_heads": 1, "norm_eps": 1e-6},
    ),
    "qwen3": ("qwen3", {"qk_norm": True, "head_dim": 24, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"moe": MoEConfig(n_experts=12, top_k=2, expert_dim=40), "rope_theta": 1e6}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "qk_norm": True,
            "head_dim": 32,
            "n_layers": 3,
            "moe": MoEConfig(n_experts=12, top_k=3, expert_dim=40, first_k_dense=1, route_norm=False),
        },
    ),
}


def save(folder: Path, model: Transformer, *, moments: bool = True, seq_len: int = 8192) -> Path:
    """A run's checkpoint of it: the step folder."""
    ranks: Any = OneRank()
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    if moments:
        tensors |= {f"optimizer.{name[6:]}.exp_avg": torch.ones_like(tensor) for name, tensor in tensors.items()}
    parts = {
        "train_state": {"step": 3, "samples": 6},
        "layout": {},
        "config": {"model": model.config.model_dump(mode="json"), "training": {"seq_len": seq_len}},
    }
    CheckpointManager(CheckpointConfig(), folder, ranks).save(3, tensors, parts, wait=True)
    return step_folder(folder, 3)


def command(*words: object, code: int = 0) -> None:
    assert cli.main(["convert", *map(str, words)]) == code


def read_checkpoint(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    metadata = dcp.read_metadata(folder)
    assert set(dcp.saved_tensors(metadata)) == {f"model.{fqn}" for fqn in parameter_shapes(model)}
    tensors = {f"model.{fqn}": torch.full(shape, torch.nan) for fqn, shape in parameter_shapes(model).items()}
    dcp.read_into(folder, metadata, tensors)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


def load_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def logits(folder: Path, tokens: Tensor, attention: str = "eager") -> Tensor:
    arguments: dict[str, Any] = {"attn_implementation": attention}
    if "num_experts_per_tok" in json.loads((folder / "config.json").read_text()):
        arguments["experts_implementation"] = "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("name", list(MODELS))
def test_an_exported_model_gives_the_same_logits_and_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    model = small_model(small_config(**changes))
    out, back = tmp_path / "out", tmp_path / "back"
    command("to-hf", save(tmp_path / "run", model), out, "--shard-size", "50kB")
    assert json.loads((out / "config.json").read_text())["model_type"] == kind
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    assert [file.name for file in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {name: file.name for file in shards for name in load_file(file)}

    tokens, _ = batch(model.config)
    with torch.no_grad():
        assert difference(model(tokens), logits(out, tokens)) < 1e-5

    command("from-hf", out, back)
    ours = dict(model.named_parameters())
    read = read_checkpoint(back / "step-00000000", model.config)
    assert read.keys() == ours.keys()
    assert all(torch.equal(read[fqn], ours[fqn]) for fqn in ours)
    command("to-hf", back, tmp_path / "again", "--shard-size", "50kB")
    for file in (*shards, out / "model.safetensors.index.json", out / "generation_config.json"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "again")]
    assert configs[0] | {"initializer_range": 0.02} == configs[1]


def test_the_same_logits_over_8192_positions(tmp_path: Path) -> None:
    model = small_model(small_config(rope_scaling=LLAMA_3_1, rope_theta=5e5))
    command("to-hf", save(tmp_path / "run", model), tmp_path / "out")
    tokens, _ = batch(model.config, samples=1, seq_len=8192)
    with torch.no_grad():
        assert difference(model(tokens), logits(tmp_path / "out", tokens, "sdpa")) < 1e-5


@pytest.mark.parametrize("fault", ["rotary halves", "order of experts", "gate and up"])
def test_a_permuted_weight_would_be_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of logits is not blind to what exports get wrong most easily."""
    model = small_model(small_config(**MODELS["mixtral"][1]))
    get = convert._Source.get

    def wrong(self: Any, piece: convert.Piece) -> Tensor:
        tensor, changed = get(self, piece), fault == "rotary halves" and re.search(r"attention\.w[qk]", piece.fqn)
        if changed:  # as if pairs were neighbours
            heads = tensor.view(-1, 2, model.config.resolved_head_dim // 2, tensor.shape[1])
            return heads.transpose(1, 2).reshape(tensor.shape)
        return tensor

    monkeypatch.setattr(convert._Source, "get", wrong)
    names = dict(huggingface_model._EXPERT_NAMES["mixtral"])
    if fault == "gate and up":
        names["mlp.experts.gate"], names["mlp.experts.up"] = names["mlp.experts.up"], names["mlp.experts.gate"]
    monkeypatch.setitem(huggingface_model._EXPERT_NAMES, "mixtral", names)
    if fault == "order of experts":  # by name: 0, 1, 10, 11, 2
        monkeypatch.setattr(convert, "their_names", lambda *arguments: tuple(sorted(their_names(*arguments))))
    command("to-hf", save(tmp_path / "run", model), tmp_path / "out")
    tokens, _ = batch(model.config)
    with torch.no_grad():
        assert difference(model(tokens), logits(tmp_path / "out", tokens)) > 1e-3


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "train_configs").glob("*.toml")))
def test_shipped_models_are_transformers_with_as_many_parameters(name: str) -> None:
    model = load(str(ROOT / f"train_configs/{name}.toml")).config.model
    if name == "llama_debug_moe":
        with pytest.raises(InputError, match=r"model\.moe\.score_func"):
            make_config(model, max_position_embeddings=8192, dtype="bfloat16")
        return
    config = make_config(model, max_position_embeddings=8192, dtype="bfloat16")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    pieces = convert.pieces_of(model)
    assert sum(p.numel() for p in theirs.parameters()) == sum(piece.shape.numel() for piece in pieces)
    assert len({piece.name for piece in pieces}) == len(pieces)


# ---- from transformers

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA_3_1.model_dump()}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 12, "num_experts_per_tok": 3}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 12, "moe_intermediate_size": 40, "mlp_only_layers": [0]}),
}


def made_by_transformers(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    kind, arguments = MADE[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | arguments | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MADE))
def test_a_model_of_transformers_comes_in_and_out_again(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = made_by_transformers(tmp_path / "theirs", name, dtype)
    command("from-hf", tmp_path / "theirs", tmp_path / "ours")
    config = ModelConfig.model_validate(model_section(tmp_path / "theirs"))
    tensors = read_checkpoint(tmp_path / "ours/step-00000000", config)
    if dtype == torch.float32:
        model = Transformer(config)
        model.load_state_dict(tensors)
        tokens, _ = batch(config)
        with torch.no_grad():
            assert difference(model(tokens), theirs(tokens, use_cache=False).logits) < 1e-5
    assert tensors["embedding.weight"][config.vocab_size :].count_nonzero() == 0
    command("to-hf", tmp_path / "ours", tmp_path / "out", "--dtype", str(dtype).removeprefix("torch."))
    before, after = load_all(tmp_path / "theirs"), load_all(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(after[key].dtype == dtype and torch.equal(before[key], after[key]) for key in before)


def test_blocks_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    """Every block of every parameter, padding rows and stacked experts included, is that part of the whole."""
    made_by_transformers(tmp_path, "qwen3_moe", num_experts=5)
    config = ModelConfig.model_validate(model_section(tmp_path) | {"vocab_pad_multiple": 10})
    weights = HuggingFaceWeights(tmp_path, config)
    there = load_all(tmp_path)
    assert weights.shapes == {fqn: p.shape for fqn, p in Transformer(config).named_parameters()}
    for fqn, shape in weights.shapes.items():
        whole = weights.read(fqn, (0,) * len(shape), shape)
        names = their_names(fqn, "qwen3_moe", 5)
        wanted = torch.stack([there[name] for name in names]) if "experts" in fqn else there[names[0]]
        assert torch.equal(whole[: wanted.shape[0]], wanted), fqn
        assert whole[wanted.shape[0] :].count_nonzero() == 0
        offsets = tuple(size // 3 for size in shape)
        lengths = tuple(size - offset for size, offset in zip(shape, offsets, strict=True))
        part = weights.read(fqn, offsets, lengths)
        assert part.dtype == torch.float32
        assert torch.equal(part, whole[tuple(slice(offset, None) for offset in offsets)]), fqn
    assert weights.read("embedding.weight", (258, 0), (2, 64)).count_nonzero() == 0
    assert weights.read("embedding.weight", (3, 0), (0, 64)).shape == (0, 64)


@pytest.mark.parametrize("form", ["transformers 5", "transformers 4"])
@pytest.mark.parametrize("name", list(MADE))
def test_keys_that_are_missing_mean_what_they_mean_to_transformers(name: str, form: str, tmp_path: Path) -> None:
    made_by_transformers(tmp_path, name)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    if form == "transformers 4":
        rope = whole.pop("rope_parameters")
        whole |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope if rope["rope_type"] == "llama3" else None}
    required, checked = set(), 0
    for key in whole:
        path.write_text(json.dumps({other: value for other, value in whole.items() if other != key}))
        try:
            section = model_section(tmp_path)
        except InputError:
            required.add(key)
            continue
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        (tmp_path / "read").mkdir(exist_ok=True)
        theirs.save_pretrained(tmp_path / "read")
        wanted, got = (ModelConfig.model_validate(s) for s in (model_section(tmp_path / "read"), section))
        assert architecture(got) == architecture(wanted), key
        assert context_length(tmp_path) == context_length(tmp_path / "read"), key
        checked += 1
    assert required < {
        "model_type",
        "moe_intermediate_size",
        "num_experts",
        "num_local_experts",
        *SIZES,
        "num_experts_per_tok",
    }
    assert checked > 10


# ---- what is refused


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def change_tensors(alter: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        alter(tensors)
        save_file(tensors, folder / "model.safetensors")

    return fault


def lost_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')


def two_sets(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ONE}}))
    save_file({"a": torch.ones(1)}, folder / ONE)


def a_tensor_twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({Q_PROJ: tensors[Q_PROJ] + 1}, folder / "b.safetensors")
    names = dict.fromkeys(tensors, "a.safetensors") | {"another": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def leads_away(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])


ONE = "model-00001-of-00001.safetensors"
Q_PROJ, HEAD = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickles": (without_safetensors, "pytorch_model.bin, a pickle: to read one can run any code"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights: got no such files"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: got No such file"),
    "lost shard": (lost_shard, "model-00001-of-00001.safetensors: got no such file"),
    "a name that leads away": (leads_away, r'model.safetensors.index.json: got "../model.safetensors"'),
    "two sets of weights": (two_sets, r"got both model\.safetensors and model\.safetensors\.index\.json"),
    "a tensor twice": (a_tensor_twice, f"{Q_PROJ}: got one in a.safetensors and one in b.safetensors"),
    "cut file": (cut, "model.safetensors: got .*; allowed: a whole safetensors file"),
    "architecture": (lambda f: change(f, model_type="gpt_neox"), 'model_type: got "gpt_neox"; allowed: one of llama'),
    "activation": (lambda f: change(f, hidden_act="gelu"), 'hidden_act: got "gelu"'),
    "biases": (lambda f: change(f, attention_bias=True), "attention_bias: got true"),
    "quantised": (lambda f: change(f, quantization_config={"bits": 4}), "quantization_config"),
    "other scaling": (
        lambda f: change(f, rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_parameters: got .*yarn"
    ),
    "a word for a scaling": (
        lambda f: change(f, rope_parameters=None, rope_scaling="default"), 'rope_scaling: got "default"'
    ),
    "two scalings": (
        lambda f: change(f, rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_scaling: got .*linear"
    ),
    "no length": (lambda f: change(f, max_position_embeddings=None), "max_position_embeddings: got None"),
    "half a scaling": (lambda f: change(f, rope_parameters={"rope_type": "llama3", "factor": 4.0}), "rope_parameters"),
    "partial rotary": (
        lambda f: change(f, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "rope_parameters"
    ),
    "no size": (lambda f: change(f, hidden_size="64"), r"model\.dim: got \"64\""),
    "lost tensor": (change_tensors(lambda t: t.pop(Q_PROJ)), f"{Q_PROJ}: got no such tensor"),
    "other shape": (
        change_tensors(lambda t: t.update({Q_PROJ: torch.ones(64, 32)})),
        r"q_proj.weight: got shape \[64, 32\]; .*\[64, 64\]",
    ),
    "unknown tensor": (
        change_tensors(lambda t: t.update({Q_PROJ.replace("weight", "bias"): torch.ones(64)})),
        "q_proj.bias: got a tensor that the model has no place for",
    ),
    "other dtype": (
        change_tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)})), "got elements of F8_E4M3"
    ),
    "not tied": (change_tensors(lambda t: t.update({HEAD: torch.ones(257, 64)})), "lm_head.weight: got another matrix"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_what_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault, words = FAULTS[name]
    made_by_transformers(tmp_path / "theirs", "llama")
    fault(tmp_path / "theirs")
    command("from-hf", tmp_path / "theirs", tmp_path / "out", code=2)
    assert re.search(words, capsys.readouterr().err), words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mixtral", "sliding_window", 4096),
        ("qwen3", "use_sliding_window", True),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "mlp_only_layers", [1]),
        ("qwen3_moe", "mlp_only_layers", "0"),
    ],
)
def test_features_that_titanlite_does_not_have(name: str, key: str, value: object, tmp_path: Path) -> None:
    made_by_transformers(tmp_path, name)
    change(tmp_path, **{key: value})
    with pytest.raises(InputError) as caught:
        model_section(tmp_path)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_copy_of_a_tied_table_and_old_buffers_are_taken(tmp_path: Path) -> None:
    made_by_transformers(tmp_path / "theirs", "llama")
    tensors = load_file(tmp_path / "theirs/model.safetensors")
    tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "theirs/model.safetensors")
    command("from-hf", tmp_path / "theirs", tmp_path / "out")


def test_a_table_and_another_head_are_compared_once(tmp_path: Path) -> None:
    """Not where weights are only looked at: the launcher, and every rank."""
    made_by_transformers(tmp_path, "llama")
    change_tensors(lambda tensors: tensors.update({HEAD: torch.ones(257, 64)}))(tmp_path)
    model = ModelConfig.model_validate(model_section(tmp_path))
    open_weights(tmp_path, model)
    tensors = {fqn: torch.zeros(shape) for fqn, shape in parameter_shapes(model).items()}
    channel = OneRank().object_channel()
    with pytest.raises(InputError, match=r"lm_head\.weight: got another matrix"):
        load_weights(tmp_path, model, tensors, channel, report=lambda line: None)
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    made_by_transformers(tmp_path, "llama")
    weights = HuggingFaceWeights(tmp_path, ModelConfig.model_validate(model_section(tmp_path)))
    change_tensors(lambda tensors: tensors.pop(Q_PROJ))(tmp_path)
    with pytest.raises(InputError, match=r"model\.safetensors: got .*allowed: a whole safetensors file"):
        weights.read("layers.1.attention.wq.weight", (0, 0), (2, 2))


def test_another_model_than_the_weights_were_made_for_is_told_with_its_keys(tmp_path: Path) -> None:
    made_by_transformers(tmp_path, "llama")
    config = ModelConfig.model_validate(model_section(tmp_path))
    open_weights(tmp_path, config.model_copy(update={"init_std": 0.5, "vocab_pad_multiple": 3, "head_dim": 0}))
    other = config.model_copy(update={"rope_theta": 1e4, "norm_eps": 1e-5, "vocab_size": 300})
    with pytest.raises(InputError) as caught:
        open_weights(tmp_path, other)
    assert [problem.key for problem in caught.value.problems] == [
        "model.vocab_size",
        "model.norm_eps",
        "model.rope_theta",
    ]
    with pytest.raises(InputError, match=r"model\.rope_scaling\.factor: got 1\.0; allowed: 8\.0"):
        open_weights(tmp_path, config.model_copy(update={"rope_scaling": RopeScalingConfig()}))


UNKNOWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "as DeepSeek-V3": (
        {"score_func": "sigmoid", "bias_update_rate": 1e-3, "n_shared_experts": 1, "route_scale": 2.5},
        ["moe.score_func", "moe.bias_update_rate", "moe.n_shared_experts", "moe.route_scale"],
    ),
    "Mixtral as scored": ({"route_norm": False, "first_k_dense": 1}, ["moe.route_norm", "moe.first_k_dense"]),
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_a_model_that_transformers_does_not_have_is_refused_with_its_keys(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe, keys = UNKNOWN[name]
    config = small_config(moe=MoEConfig(n_experts=4, top_k=2, expert_dim=16, **moe))
    command("to-hf", save(tmp_path / "run", small_model(config)), tmp_path / "out", code=2)
    said = capsys.readouterr().err
    assert all(f"model.{key}: got" in said for key in keys)
    assert said.count(": got ") == len(keys)
    assert not (tmp_path / "out").exists()


# ---- how files are written


def test_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model(small_config(n_layers=1))
    parameters = dict(model.named_parameters())
    folder = save(tmp_path / "run", model)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        command("to-hf", folder, tmp_path / name, "--dtype", name)
        assert torch.equal(load_all(tmp_path / name)[HEAD], parameters["output.weight"][:257].detach().to(dtype))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == dtype
    for name, value in (("float16", 1e5), ("bfloat16", -3.4e38)):
        with torch.no_grad():
            parameters["layers.0.mlp.up.weight"][1, 2] = value
        command("to-hf", save(tmp_path / f"large {name}", model), tmp_path / "out", "--dtype", name, code=2)
        assert f"{name}, but model.layers.0.mlp.up_proj.weight has larger values" in capsys.readouterr().err


def test_large_tensors_are_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(small_config(**MODELS["mixtral"][1]))
    monkeypatch.setattr(convert, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(dcp, "STREAMED_PIECE_BYTES", 3000)
    monkeypatch.setattr(dcp, "STREAMED_FILE_BYTES", 20000)
    command("to-hf", save(tmp_path / "run", model), tmp_path / "out")
    command("from-hf", tmp_path / "out", tmp_path / "back")
    files = list((tmp_path / "back/step-00000000").glob("*.distcp"))
    assert len(files) > 5 and max(file.stat().st_size for file in files) < 40000
    read = read_checkpoint(tmp_path / "back/step-00000000", model.config)
    assert all(torch.equal(read[fqn], p) for fqn, p in model.named_parameters())
    assert cli.main(["checkpoint", "verify", str(tmp_path / "back")]) == 0
    command("to-hf", tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / ONE).read_bytes() == (tmp_path / "out" / ONE).read_bytes()
    with safe_open(next(tmp_path.glob("out/*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_config_json_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it transformers loads nothing: what a kill leaves does not look whole."""
    written: list[str] = []
    write = convert.write_atomically

    def noted(path: Path, data: bytes) -> None:
        written.append(path.name)
        write(path, data)

    monkeypatch.setattr(convert, "write_atomically", noted)
    out = tmp_path / "out"
    command("to-hf", save(tmp_path / "run", small_model(small_config())), out)
    assert written[-2:] == ["model.safetensors.index.json", "config.json"]
    times = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert times["config.json"] == max(times.values())
    (out / "config.json").unlink()
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells the peak of a program")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Of 102 MB in many files of 4 MB, a few are in memory at once, both ways."""
    command = [sys.executable, "-m", "tests.unit.checkpoint.conversion_memory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size > 100e6
    assert grown < 40e6, f"{grown / 1e6:.1f} MB"
