"""The runs that come with the project, and the written documentation of all keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli

from titanlite.config.check import machine_problems, static_problems, warnings
from titanlite.config.docs import DOCUMENT, describe_keys, render
from titanlite.config.keys import KEYS
from titanlite.config.layout import parameter_counts, plan_batch, resolve_layout
from titanlite.config.load import REPOSITORY, dump, load
from titanlite.config.problems import InputError

SHIPPED = sorted((REPOSITORY / "train_configs").glob("*.toml"))
WORLDS = {"llama_debug": 2, "smollm_135m": 1, "llama_1b": 1, "llama_8b": 8, "llama_70b": 64, "llama_405b": 512}
WORLDS |= {"llama_debug_moe": 2, "mixtral_8x7b": 64, "qwen3_30b_a3b": 32}


def test_all_are_there() -> None:
    assert {path.stem for path in SHIPPED} == set(WORLDS)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_is_a_complete_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load(path.stem)
    world = WORLDS[path.stem]
    assert static_problems(loaded, world) == [] and machine_problems(loaded, 0) == []
    assert all("REAL DATA" in warning for warning in warnings(loaded, world))
    config = loaded.config
    assert config.run.name == path.stem
    assert config.training.steps == config.lr_scheduler.total_steps
    assert config.lr_scheduler.warmup_steps < config.lr_scheduler.total_steps // 3
    (tmp_path / "resolved.toml").write_text(dump(config))
    assert load("resolved.toml").config == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_begins_with_one_line_that_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    first, blank = text.splitlines()[:2]
    assert first.startswith("# ") and first.endswith(".") and blank == ""
    gpus = re.search(r"for (\d+) GPUs", first)
    assert gpus is None or int(gpus[1]) == WORLDS[path.stem]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_value_is_written_twice(path: Path) -> None:
    """A file says what differs from the defaults, and mixed_precision_param and dp_shard, which people look for."""
    defaults = {key.dotted: key.field.default for key in KEYS.values() if not key.required}
    for section, values in tomli.loads(path.read_text()).items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in ("training.mixed_precision_param", "parallelism.dp_shard", "training.local_batch_size"):
                allowed = key in ("model.norm_eps", "optimizer.lr", "lr_scheduler.decay_type", "checkpoint.interval")
                assert allowed or defaults.get(key) != value, key


def test_parameter_counts_in_comments_are_right() -> None:
    for path in SHIPPED:
        counts = parameter_counts(load(path.stem).config.model)
        for pattern, count in ((r"# ([\d,]+) parameters", counts.total), (r", ([\d,]+) of them active", counts.active)):
            written = re.search(pattern, path.read_text())
            assert written is None or int(written[1].replace(",", "")) == count
    for name in ("llama_debug", "llama_debug_moe"):
        assert 3e6 <= parameter_counts(load(name).config.model).total <= 6e6


@pytest.mark.parametrize(
    ("name", "dims", "rope"),
    [
        ("llama_1b", (2048, 16, 32, 8, 8192), 32.0),
        ("llama_8b", (4096, 32, 32, 8, 14336), 8.0),
        ("llama_70b", (8192, 80, 64, 8, 28672), 8.0),
        ("llama_405b", (16384, 126, 128, 8, 53248), 8.0),
    ],
)
def test_llama_dimensions_are_the_published_ones(name: str, dims: tuple[int, ...], rope: float) -> None:
    model = load(name).config.model
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim) == dims
    assert (model.vocab_size, model.rope_theta, model.norm_eps) == (128256, 500000.0, 1e-5)
    scaling = model.rope_scaling
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (rope, 1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192
    assert model.tie_word_embeddings is (name == "llama_1b")
    assert load(name).config.training.mixed_precision_param == "bfloat16"


def test_experts_dimensions_are_the_published_ones() -> None:
    mixtral, qwen = (load(name).config.model for name in ("mixtral_8x7b", "qwen3_30b_a3b"))
    assert (mixtral.dim, mixtral.n_layers, mixtral.n_heads, mixtral.n_kv_heads) == (4096, 32, 32, 8)
    assert (mixtral.vocab_size, mixtral.rope_theta, mixtral.norm_eps, mixtral.qk_norm) == (32000, 1e6, 1e-5, False)
    assert (mixtral.moe.n_experts, mixtral.moe.top_k, mixtral.moe.expert_dim) == (8, 2, 14336)
    assert (qwen.dim, qwen.n_layers, qwen.n_heads, qwen.n_kv_heads, qwen.head_dim) == (2048, 48, 32, 4, 128)
    assert (qwen.vocab_size, qwen.rope_theta, qwen.norm_eps, qwen.qk_norm) == (151936, 1e6, 1e-6, True)
    assert (qwen.moe.n_experts, qwen.moe.top_k, qwen.moe.expert_dim) == (128, 8, 768)
    for model in (mixtral, qwen):
        assert model.moe.score_func == "softmax" and model.moe.route_norm
        assert model.moe.first_k_dense == model.moe.n_shared_experts == 0 and not model.tie_word_embeddings


@pytest.mark.parametrize("name", ["llama_debug", "llama_debug_moe"])
def test_debug_run_is_shared_by_any_small_world(name: str) -> None:
    config = load(name).config
    assert config.training.mixed_precision_param == "float32" and config.run.deterministic
    for world in (1, 2, 3, 4, 6, 8):
        plan_batch(config.training, resolve_layout(config.parallelism, world))
    with pytest.raises(InputError):
        plan_batch(config.training, resolve_layout(config.parallelism, 5))


def test_document_is_up_to_date() -> None:
    message = "run python -m titanlite.config.docs"
    assert DOCUMENT.read_text(encoding="utf-8") == render(), message


def test_every_key_is_described() -> None:
    described = {name: rest for name, *rest in describe_keys()}
    assert set(described) == {
        "data.sources[]." + key.dotted.rpartition(".")[2] if key.in_list else key.dotted
        for key in KEYS.values()
        if key.kind != "section"
    }
    assert all(len(description) > 10 for _, _, description in described.values())
    assert described["training.steps"] == ["an integer > 0", "required", KEYS["training.steps"].field.description]
    assert described["data.sources"][1].startswith('[{ path = "embedded", weight = 1.0, ')
