"""checkpoint.init_from of models that transformers has made: they start with its loss, train, and go back to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.elastic import DENSE, Done, assert_equal, init_from, make_text, reads, train
from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from tests.parity.layouts import BASE, ONE_PROCESS, Layout, Sections, _layout
from tests.unit.model.test_huggingface import reference_model
from tests.unit.model.test_huggingface_moe import reference_model as reference_model_of_experts
from titanlite.checkpoint import storage
from titanlite.checkpoint.convert import write_huggingface
from titanlite.checkpoint.initial import open_weights
from titanlite.config.schema import Config
from titanlite.data.shards import TokenShards
from titanlite.verify.promise import LOSS_TOLERANCE

transformers = pytest.importorskip("transformers")

_EXPERTS = {"n_experts": 12, "top_k": 2, "expert_dim": 32}
_SAME = {"dim": 20, "head_dim": 6, "qk_norm": False, "tie_word_embeddings": True}
THEIRS: dict[str, tuple[Sections, dict[str, Layout]]] = {
    "qwen3": (DENSE, {"fsdp 3": _layout(dp_shard=3), "tp 2 x pp 2": _layout(tp=2, pp=2, pp_microbatches=4)}),
    "mixtral": (  # with a bias that it has not
        merge(DENSE, {"model": {**_SAME, "n_layers": 2, "moe": _EXPERTS | {"bias_update_rate": 0.01}}}),
        {
            "cp 2 x ep 4": _layout(cp=2, dp_shard=2, ep=4),
            "tp 2 x ep 2 x pp 2": _layout(tp=2, ep=2, pp=2, pp_microbatches=4),
        },
    ),
}


def their_model(sections: Sections) -> Any:
    """transformers' random model of this [model], in bfloat16."""
    model = Config.model_validate(merge(BASE, sections)).model
    torch.manual_seed(3)
    made = reference_model(model) if not model.moe.n_experts else reference_model_of_experts(model, qwen=False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return made.to(torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("init") / "text")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("theirs")
    for name, (sections, _) in THEIRS.items():
        their_model(sections).save_pretrained(folder / name, max_shard_size="20KB")
        assert len(list((folder / name).glob("*.safetensors"))) > 2
    return {name: folder / name for name in THEIRS}


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_trains_in_any_layout_and_goes_back(
    name: str, theirs: Mapping[str, Path], text: Path, tmp_path: Path
) -> None:
    sections, layouts = THEIRS[name]
    start = merge(sections, init_from(theirs[name]))
    (one,) = train(start, ONE_PROCESS, text, tmp_path / "one", 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs[name], dtype=torch.float32)
    assert one.record.losses[0] == pytest.approx(their_loss(model, one, 0), rel=LOSS_TOLERANCE)
    assert not one.state["model.embedding.weight"][257:].any() and one.state["model.embedding.weight"].shape[0] == 259
    said = f"biases that choose experts are not in {theirs[name]}: they start at 0"
    assert (said in one.said) is (name == "mixtral")
    for layout_name, layout in layouts.items():
        for rank in train(start, layout, text, tmp_path / layout_name, 2):
            assert_equal(rank.state, one.state)
            assert rank.record.losses == pytest.approx(one.record.losses[:2], rel=LOSS_TOLERANCE), layout_name
    state = storage.read_manifest(tmp_path / layout_name / "run/checkpoints/step-00000002")["train_state"]
    assert state["max_position_embeddings"] == model.config.max_position_embeddings

    # What two steps under the last layout have made of it is transformers' model again, with the loss of the third.
    trained_in = tmp_path / layout_name
    if name == "mixtral":  # once more without biases, which transformers' has not
        sections = merge(sections, {"model": {"moe": _EXPERTS}})
        start, trained_in = merge(sections, init_from(theirs[name])), tmp_path / "without biases"
        (one,) = train(start, ONE_PROCESS, text, tmp_path / "one without biases", 3)
        train(start, layout, text, trained_in, 2)
    checkpoint = trained_in / "run/checkpoints/step-00000002"
    out = tmp_path / "out"
    out.mkdir()
    config = Config.model_validate(merge(BASE, sections)).model
    write_huggingface(
        open_weights(checkpoint, config),
        out,
        config,
        dtype="float32",
        shard_bytes=20_000,
        max_position_embeddings=32,
        token_ids={},
        others={},
        report=print,
    )
    trained = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert one.record.losses[2] == pytest.approx(their_loss(trained, one, 2), rel=LOSS_TOLERANCE)


def their_loss(model: Any, done: Done, step: int) -> float:
    """The mean loss of the samples of a step (from 0)."""
    ids = np.array(done.record.sample_ids[step])
    opened = [TokenShards(path) for path in done.shards]
    sources, _, windows = done.data.order().locate_many(ids)
    rows = [opened[s].window(w, done.data.seq_len) for s, w in zip(sources.tolist(), windows.tolist(), strict=True)]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("name", ["fsdp 3", "tp 2 x pp 2"])
def test_a_rank_reads_its_part_of_hugging_faces_weights(name: str, theirs: Mapping[str, Path]) -> None:
    sections, layouts = THEIRS["qwen3"]
    layout = layouts[name]
    ranks = run_distributed(reads, layout.world_size, merge(BASE, sections, layout.sections), theirs["qwen3"])
    for held, read, largest in ranks:
        assert sum(read.values()) == held, "every element that it holds once, and no other"
        assert largest <= 130 * 34, "the larger half of the table"
    assert len({frozenset(read) for _, read, _ in ranks}) == (2 if "pp" in name else 1), "a stage reads its own layers"
