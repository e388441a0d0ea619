"""checkpoint.init_from: weights of titanlite's and Hugging Face's models in any layout, and nothing else of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.elastic import DENSE, EXPERTS, assert_equal, init_from, make_text, reads, train
from tests.harness.distributed import WorkerFailed, run_distributed
from tests.harness.training import merge
from tests.parity.layouts import BASE, ONE_PROCESS, Layout, Sections, _layout
from titanlite.checkpoint import initial
from titanlite.verify.promise import LOSS_TOLERANCE

MODELS = {"dense": DENSE, "experts": EXPERTS}
LAYOUTS: dict[str, dict[str, Layout]] = {
    "dense": {
        "ddp 2": _layout(dp_replicate=2),
        "tp 2 x pp 2": _layout(tp=2, pp=2, pp_microbatches=4),
    },
    "experts": {
        "tp 2 x ep 2 x pp 2": _layout(tp=2, ep=2, pp=2, pp_microbatches=4),
        "hsdp 2x2 x ep 2": _layout(dp_replicate=2, dp_shard=2, ep=2),
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("init") / "text")


@pytest.fixture(scope="module")
def sources(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of three steps, of which each rank wrote a part; the newest of two checkpoints is of the third."""
    folder = tmp_path_factory.mktemp("sources")
    layouts = {"dense": _layout(dp_shard=2), "experts": _layout(cp=2, dp_shard=2, ep=4)}
    for name, layout in layouts.items():
        train(merge(MODELS[name], {"checkpoint": {"interval": 2}}), layout, text, folder / name, 3)
    return {name: folder / name / "run" for name in layouts}


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_a_run_in_another_layout(name: str, sources: Mapping[str, Path], text: Path, tmp_path: Path) -> None:
    sections, source = MODELS[name], sources[name]
    (anew,) = train(sections, ONE_PROCESS, text, tmp_path / "anew", 1)
    (one,) = train(merge(sections, init_from(source)), ONE_PROCESS, text, tmp_path / "one", 3)
    (resumed,) = train(sections, ONE_PROCESS, text, shutil.copytree(source.parent, tmp_path / "copy"), 4)
    weights = {key: tensor for key, tensor in resumed.state.items() if key.startswith("model.")}
    assert_equal(one.state, weights)  # and the moments are zero
    assert any(key.endswith("expert_bias") and tensor.any() for key, tensor in weights.items()) is (name == "experts")
    assert abs(one.record.losses[0] - anew.record.losses[0]) > 0.01
    assert one.record.lrs[0] == anew.record.lrs[0] and one.record.sample_ids[0] == anew.record.sample_ids[0]
    step = source / "checkpoints/step-00000003"
    assert f"weights of {step}: all else starts anew" in one.said
    assert any(line.startswith("verified step-00000003") for line in one.said)

    for layout_name, layout in LAYOUTS[name].items():
        folder = tmp_path / layout_name
        for rank in train(merge(sections, init_from(source)), layout, text, folder, 2):
            assert_equal(rank.state, weights)
            assert rank.record.losses == pytest.approx(one.record.losses[:2], rel=LOSS_TOLERANCE), layout_name
        manifest = json.loads((folder / "run/checkpoints/step-00000002/manifest.json").read_text())
        state = manifest["train_state"]
        assert state["init_from"] == str(step) and state["step"] == 2 and state["samples"] == 24

    # Once there is a checkpoint it is gone on from, also when the weights are no longer there.
    (later,) = train(merge(sections, init_from(tmp_path / "gone")), ONE_PROCESS, text, folder, 3)
    assert later.record.losses == pytest.approx(one.record.losses[2:], rel=LOSS_TOLERANCE)
    assert any(line.startswith("checkpoint.init_from was not read") for line in later.said)
    manifest = json.loads((folder / "run/checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["train_state"]["init_from"] == str(step)


def test_another_padding_and_nothing_that_is_saved(sources: Mapping[str, Path], text: Path, tmp_path: Path) -> None:
    """The table has 259 rows there; here as many as said, over two ranks. With checkpoint.enable = false, too."""
    start = init_from(sources["dense"] / "checkpoints/step-00000003", enable=False)
    (one,) = train(merge(DENSE, start), ONE_PROCESS, text, tmp_path / "one", 1)
    for multiple, rows in ((16, 272), (1, 257)):
        padded = merge(DENSE, start, {"model": {"vocab_pad_multiple": multiple}})
        ranks = train(padded, _layout(tp=2), text, tmp_path / str(rows), 1)
        table = ranks[0].state["model.embedding.weight"]
        assert table.shape[0] == rows and not table[257:].any()
        assert torch.equal(table[:257], one.state["model.embedding.weight"][:257])
        assert ranks[0].record.losses == pytest.approx(one.record.losses, rel=LOSS_TOLERANCE)
    assert not (tmp_path / "one/run/checkpoints").exists()


def test_another_model_and_damage_are_refused(sources: Mapping[str, Path], text: Path, tmp_path: Path) -> None:
    source = sources["experts"]
    change: Sections = {"model": {"norm_eps": 1e-6, "ffn_dim": 72}}
    with pytest.raises(WorkerFailed) as caught:
        train(merge(EXPERTS, init_from(source), change), _layout(dp_shard=2), text, tmp_path / "a", 1)
    said = str(caught.value)
    assert "InputError" in said and f"as {source}/checkpoints/step-00000003/manifest.json says" in said
    assert "model.norm_eps: got 1e-06; allowed: 1e-05" in said and "model.ffn_dim: got 72; allowed: 40" in said

    copy = shutil.copytree(source / "checkpoints/step-00000003", tmp_path / "step-00000003")
    data = bytearray((copy / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "__1_0.distcp").write_bytes(data)
    with pytest.raises(WorkerFailed, match=r"DamagedError: .*__1_0\.distcp: got other content"):
        train(merge(EXPERTS, init_from(copy)), _layout(dp_shard=2), text, tmp_path / "b", 1)


def _in_a_folder_of_its_own(folders: tuple[Path, ...]) -> None:
    os.chdir(folders[dist.get_rank()])


def test_each_rank_reads_its_own_path(sources: Mapping[str, Path], text: Path, tmp_path: Path) -> None:
    """As on machines with a copy each, which one link leads to: damage in any of them is found."""
    folders = (tmp_path / "0", tmp_path / "1")
    for folder in folders:
        folder.mkdir()
        copy = shutil.copytree(sources["dense"], folder / f"copy {folder.name}")
        (folder / "weights").symlink_to(copy.name)
    start, go = merge(DENSE, init_from(Path("weights"))), partial(_in_a_folder_of_its_own, folders)
    (first, _) = train(start, _layout(dp_shard=2), text, tmp_path / "good", 1, go)
    assert f"weights of {tmp_path}/0/copy 0/checkpoints/step-00000003: all else starts anew" in first.said
    file = tmp_path / "1/copy 1/checkpoints/step-00000003/__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(WorkerFailed, match=r"DamagedError: .*__1_0\.distcp: got other content"):
        train(start, _layout(dp_shard=2), text, tmp_path / "bad", 1, go)


def _with_a_manifest_of_its_own() -> None:
    if dist.get_rank() == 1:
        initial.of_bytes = lambda data: "another"


def test_machines_with_other_weights_are_refused(sources: Mapping[str, Path], text: Path, tmp_path: Path) -> None:
    start = merge(DENSE, init_from(sources["dense"]))
    with pytest.raises(WorkerFailed, match=r"CheckpointError: .* other weights on the machine of rank 1 than"):
        train(start, _layout(dp_shard=2), text, tmp_path, 1, _with_a_manifest_of_its_own)


def test_rotary_keys_change_only_when_it_is_asked_for(sources: Mapping[str, Path], text: Path, tmp_path: Path) -> None:
    change = merge(DENSE, {"model": {"rope_theta": 50000.0}})
    with pytest.raises(WorkerFailed, match=r"model\.rope_theta: got 50000\.0; allowed: 10000\.0"):
        train(merge(change, init_from(sources["dense"])), ONE_PROCESS, text, tmp_path / "a", 1)
    allowed = merge(change, init_from(sources["dense"], allow_rope_change=True))
    (done,) = train(allowed, ONE_PROCESS, text, tmp_path / "a", 1)
    assert "model.rope_theta was 10000.0 for the weights, is now 50000.0" in done.said


def test_a_rank_reads_its_part_of_a_checkpoint(sources: Mapping[str, Path]) -> None:
    """Of what another layout saved it reads the whole pieces that it needs a part of, one after the other."""
    path, base = sources["dense"], merge(BASE, DENSE)
    for held, read, _ in run_distributed(reads, 2, merge(base, _layout(dp_shard=2).sections), path):
        assert sum(read.values()) == held, "the same layout"
    for held, read, largest in run_distributed(reads, 4, merge(base, _layout(tp=2, pp=2).sections), path):
        assert held < sum(read.values()) <= 2 * held + 1000 and largest <= -(-259 // 2) * 34
