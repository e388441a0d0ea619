"""What checkpoint.init_from may name, and what is found out before a tensor is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlite.checkpoint.convert import write_checkpoint
from titanlite.checkpoint.huggingface import HuggingFaceWeights
from titanlite.checkpoint.initial import load_weights, open_weights
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.storage import DamagedError
from titanlite.config.layout import Layout
from titanlite.config.problems import InputError
from titanlite.config.schema import CheckpointConfig, ModelConfig, MoEConfig
from titanlite.model.transformer import Transformer

EXPERTS = MoEConfig(n_experts=4, top_k=2, expert_dim=8)
BIASED = EXPERTS.model_copy(update={"bias_update_rate": 0.1})


def model_config(**changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 21, "dim": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 12}
    return ModelConfig(**{**sizes, "vocab_pad_multiple": 4, **changes})


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    """Parameters and buffers, each element another number; padding rows zero."""
    made = Transformer(model).state_dict()
    for number, (fqn, tensor) in enumerate(made.items()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 64 + number)
        if fqn in ("embedding.weight", "output.weight"):
            tensor[model.vocab_size :] = 0
    return made


class Source:
    """Checkpoints of a run; moments are among their tensors."""

    def __init__(self, run: Path, ranks: Any) -> None:
        self.run, self._ranks = run, ranks

    def save(
        self,
        step: int,
        model: ModelConfig,
        dtype: torch.dtype = torch.float32,
        alter: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
        **state: Any,
    ) -> Path:
        manager = CheckpointManager(CheckpointConfig(keep_latest_k=0), self.run / "checkpoints", self._ranks)
        tensors = {f"model.{fqn}": tensor.to(dtype) for fqn, tensor in weights_of(model).items()}
        alter(tensors)
        tensors["optimizer.norm.weight.exp_avg"] = torch.ones(model.dim)
        parts = {"train_state": {"step": step, **state}, "layout": asdict(Layout(1, 1, 1, 1, 1, 1, 1))}
        manager.save(step, tensors, {**parts, "config": {"model": model.model_dump(mode="json")}}, wait=True)
        return self.run / f"checkpoints/step-{step:08d}"


@pytest.fixture
def source(tmp_path: Path, one_rank: Any) -> Source:
    return Source(tmp_path / "run", one_rank)


def read(path: Path, model: ModelConfig, **keys: Any) -> tuple[dict[str, Tensor], list[str]]:
    """What a model of zeros becomes, and what is said."""
    tensors = {fqn: torch.zeros_like(tensor) for fqn, tensor in Transformer(model).state_dict().items()}
    weights = open_weights(path, model, **keys)
    weights.fill(tensors)
    return tensors, weights.notes


def same(mine: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)


def refusal(path: Path, model: ModelConfig, **keys: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        open_weights(path, model, **keys)
    return [str(problem) for problem in caught.value.problems]


def test_a_step_a_run_and_its_checkpoints(source: Source, tmp_path: Path) -> None:
    model = model_config()
    source.save(1, model_config(dim=16))
    newest = source.save(2, model)
    (source.run / "checkpoints/step-00000003").mkdir()  # was not committed
    for path in (newest, source.run, source.run / "checkpoints"):
        assert open_weights(path, model).folder == newest
        assert same(read(path, model)[0], weights_of(model)) and not read(path, model)[1]
    shutil.move(newest, tmp_path / "mine")
    assert same(read(tmp_path / "mine", model)[0], weights_of(model)), "under any name"
    (said,) = refusal(tmp_path, model)
    assert said.startswith(f"checkpoint.init_from: got '{tmp_path}'; allowed: a step folder, a run folder with")


def test_other_padding_and_other_dtypes(source: Source) -> None:
    step = source.save(1, model_config(), torch.bfloat16)
    for multiple in (1, 4, 7):
        model = model_config(vocab_pad_multiple=multiple)
        rounded = {fqn: tensor.bfloat16().float() for fqn, tensor in weights_of(model_config()).items()}
        found, _ = read(step, model)
        assert found["output.weight"].shape[0] == -(-21 // multiple) * multiple
        assert all(tensor.dtype == torch.float32 for tensor in found.values())
        for table in ("embedding.weight", "output.weight"):
            assert torch.equal(found[table][:21], rounded[table][:21]) and not found[table][21:].any()
            del found[table], rounded[table]
        assert same(found, rounded)


def test_padding_rows_are_not_read(source: Source) -> None:
    step = source.save(1, model_config(), alter=lambda tensors: tensors["model.embedding.weight"][21:].fill_(7.0))
    assert not read(step, model_config())[0]["embedding.weight"][21:].any()


def shortened(tensors: dict[str, Tensor]) -> None:
    tensors["model.embedding.weight"] = tensors["model.embedding.weight"][:20].clone()


def test_a_table_that_lacks_a_token_is_refused(source: Source, one_rank: Any) -> None:
    """Its rows would keep their first values. In a resume as in a start."""
    model = model_config()
    step = source.save(1, model, alter=shortened)
    (said,) = refusal(step, model)
    assert "model.embedding.weight: got torch.float32 of shape [20, 8]; allowed: torch.float32 of shape [24, 8]" in said
    manager = CheckpointManager(CheckpointConfig(), source.run / "checkpoints", one_rank)
    tensors = {f"model.{fqn}": tensor for fqn, tensor in weights_of(model).items()}
    tensors["optimizer.norm.weight.exp_avg"] = torch.ones(model.dim)
    with pytest.raises(InputError, match=r"embedding\.weight: got torch\.float32 of shape \[20, 8\]"):
        manager.load(step, tensors, {f"model.{fqn}": rows for fqn, rows in model.padded_tables.items()})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ffn_dim": 16}, "model.ffn_dim: got 16; allowed: 12"),
        ({"n_heads": 4, "head_dim": 4}, "model.n_heads: got 4; allowed: 2"),
        ({"norm_eps": 1e-6}, "model.norm_eps: got 1e-06; allowed: 1e-05"),
        ({"rope_theta": 500000.0}, "model.rope_theta: got 500000.0; allowed: 10000.0"),
        ({"tie_word_embeddings": True}, "model.tie_word_embeddings: got true; allowed: false"),
        ({"vocab_size": 22}, "model.vocab_size: got 22; allowed: 21"),
        ({"moe": EXPERTS}, "model.moe.n_experts: got 4; allowed: 0"),
    ],
)
def test_another_model_is_refused_by_its_keys(source: Source, changes: dict[str, Any], said: str) -> None:
    step = source.save(1, model_config())
    found = refusal(step, model_config(**changes))
    (line,) = [line for line in found if line.startswith(f"{said}, as {step}/manifest.json says")]
    assert ("--checkpoint.allow_rope_change true" in line) is ("rope" in said)


def test_what_only_training_needs_may_be_another(source: Source) -> None:
    step = source.save(1, model_config(moe=EXPERTS))
    losses = EXPERTS.model_copy(update={"aux_loss_coeff": 0.1, "z_loss_coeff": 0.1})
    model = model_config(moe=losses, init_std=0.5, ffn_dim=99, head_dim=4)  # no layer is dense; dim / n_heads is 4
    assert same(read(step, model)[0], weights_of(model_config(moe=EXPERTS)))


def test_rotary_keys_change_if_asked_to(source: Source) -> None:
    step = source.save(1, model_config())
    model = model_config(rope_theta=500000.0)
    found, notes = read(step, model, allow_rope_change=True)
    assert same(found, weights_of(model_config()))
    assert notes == ["model.rope_theta was 10000.0 for the weights, is now 500000.0"]
    (said,) = refusal(step, model_config(rope_theta=500000.0, ffn_dim=16), allow_rope_change=True)
    assert said.startswith("model.ffn_dim")
    assert read(step, model_config(), allow_rope_change=True)[1] == []


def lose(keys: list[str], tensors: dict[str, Tensor]) -> None:
    for key in keys:
        del tensors[key]


def test_biases_of_experts(source: Source) -> None:
    biased, plain = model_config(moe=BIASED), model_config(moe=EXPERTS)
    with_them, without = source.save(1, biased), source.save(2, plain)
    found, notes = read(with_them, biased)
    assert same(found, weights_of(biased)) and not notes
    found, notes = read(without, biased)
    biases = [key for key in found if key.endswith("expert_bias")]
    assert len(biases) == 2 and not any(found[key].any() for key in biases)
    assert notes == [f"2 biases that choose experts are not in {without}: they start at 0"]
    for step, lost in enumerate((biases[:1], biases), 3):  # it was saved with them
        saved = source.save(step, biased, alter=partial(lose, [f"model.{key}" for key in lost]))
        (said,) = refusal(saved, biased)
        assert f"model.{biases[0]}" in said and "got not in the checkpoint" in said
    saved = source.save(5, plain, alter=lambda tensors: tensors.update({f"model.{biases[0]}": torch.zeros(4)}))
    (said,) = refusal(saved, biased)
    assert f"model.{biases[1]}" in said and f"model.{biases[0]}" not in said and "not in the checkpoint" in said
    (said,) = refusal(with_them, plain)
    assert said.startswith("model.moe.bias_update_rate: got 0; allowed: more than 0") and "0.1 is what" in said


def test_damage_is_seen_without_reading_tensors(source: Source) -> None:
    step = source.save(1, model_config())
    file = step / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=r"__0_0\.distcp: got \d+ bytes"):
        open_weights(step, model_config())
    file.unlink()
    with pytest.raises(DamagedError, match=r"__0_0\.distcp: got no such file"):
        open_weights(step, model_config())
    file.write_bytes(whole)
    data = bytearray((step / ".metadata").read_bytes())
    data[20] ^= 1
    (step / ".metadata").write_bytes(data)
    with pytest.raises(DamagedError, match=r"\.metadata: got other content"):
        open_weights(step, model_config())


def test_nothing_is_touched_before_every_byte_is_verified(source: Source, one_rank: Any) -> None:
    model = model_config()
    step = source.save(1, model)
    file = step / "__0_0.distcp"
    tensors = {fqn: torch.zeros_like(tensor) for fqn, tensor in weights_of(model).items()}
    said: list[str] = []

    def load() -> Any:
        return load_weights(step, model, tensors, one_rank.object_channel(), report=said.append)

    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedError, match=r"__0_0\.distcp: got other content"):
        load()
    assert not any(tensor.any() for tensor in tensors.values()) and not said
    file.write_bytes(whole)
    assert load().folder == step and same(tensors, weights_of(model))
    assert [line.split(" (")[0] for line in said] == ["verified step-00000001"]


def test_the_length_of_the_model_that_a_run_began_with(source: Source) -> None:
    model = model_config()
    assert open_weights(source.save(1, model, max_position_embeddings=131072), model).max_position_embeddings == 131072
    assert open_weights(source.save(2, model), model).max_position_embeddings == 0


def test_the_identity_tells_copies_apart(source: Source, tmp_path: Path) -> None:
    step, model = source.save(1, model_config()), model_config()
    copy = shutil.copytree(step, tmp_path / "copy")
    assert open_weights(copy, model).identity == open_weights(step, model).identity
    other = shutil.copytree(step, tmp_path / "old")
    assert open_weights(source.save(1, model_config()), model).identity != open_weights(other, model).identity


def test_a_manifest_that_names_no_model(source: Source) -> None:
    step = source.save(1, model_config())
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["files"] = {name: {"bytes": entry["bytes"]} for name, entry in manifest["files"].items()}
    for config in ({}, {"model": {"dim": 8, "key_of_tomorrow": 1}}):
        (step / "manifest.json").write_text(json.dumps(manifest | {"config": config}))
        (said,) = refusal(step, model_config())
        assert "a [model] that this titanlite does not know" in said


def test_a_model_of_hugging_face_and_what_is_converted_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_config(head_dim=4)
    sizes = {"vocab_size": 21, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    found, notes = read(tmp_path / "theirs", model)
    assert not notes and found["layers.1.attention.wq.weight"].any() and not found["output.weight"][21:].any()
    shutil.copytree(tmp_path / "theirs", tmp_path / "others")
    assert open_weights(tmp_path / "others", model).identity == open_weights(tmp_path / "theirs", model).identity
    others = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5))
    others.save_pretrained(tmp_path / "others")  # in float32
    assert open_weights(tmp_path / "others", model).identity != open_weights(tmp_path / "theirs", model).identity
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tuned")  # the same sizes
    assert open_weights(tmp_path / "tuned", model).identity != open_weights(tmp_path / "theirs", model).identity
    assert open_weights(tmp_path / "theirs", model).max_position_embeddings == 64
    (said,) = refusal(tmp_path / "theirs", model_config(rope_theta=20000.0))
    assert said.startswith("model.rope_theta: got 20000.0; allowed: 10000.0")
    _, notes = read(tmp_path / "theirs", model_config(rope_theta=20000.0), allow_rope_change=True)
    assert notes == ["model.rope_theta was 10000.0 for the weights, is now 20000.0"]

    weights = HuggingFaceWeights(tmp_path / "theirs", model)
    sections = {"model": model.model_dump(mode="json")}
    step = write_checkpoint(
        weights, tmp_path / "ours", config=sections, max_position_embeddings=64, report=lambda line: None
    )
    assert same(read(step, model_config(head_dim=4))[0], found)
    assert open_weights(tmp_path / "ours", model).folder == step
