"""A resumed run is the unbroken run: bitwise under the same layout, in the middle of an epoch and at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.distributed import WorkerFailed, run_distributed
from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE, HEADS_8, LAYOUTS, ONE_PROCESS, Layout
from titanlite.config.problems import InputError
from titanlite.config.schema import Config
from titanlite.model.init import tensors_hash
from titanlite.parallel import runtime
from titanlite.parallel.whole import full_tensors
from titanlite.trainer import Trainer

Sections = Mapping[str, Mapping[str, Any]]
STEPS = 9
SAVING: Sections = {
    "checkpoint": {"enable": True, "interval": 100, "keep_latest_k": 2},
    "metrics": {"enable_tensorboard": True},
    "validation": {"enable": False},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("resume") / "text")


def train(layout: Layout, text: Path, folder: Path, steps: int, sections: Sections | None = None) -> str:
    """Trains to `steps`, resuming from what is in `folder`; the hash of all weights and moments at the end."""
    return hashes(layout, text, folder, steps, sections)[1]


def hashes(layout: Layout, text: Path, folder: Path, steps: int, sections: Sections | None = None) -> tuple[str, str]:
    """As train(); the hashes of all weights and moments after resuming and at the end."""
    here: Sections = {
        "tokenizer": {"path": str(text / "tokenizer.model")},
        "data": data_section(text),
        "run": {"output_dir": str(folder), "name": "run"},
        "training": {"steps": steps},
    }
    merged = merge(BASE, SAVING, layout.sections, here, sections or {})
    found = run_distributed(_train, layout.world_size, merged, timeout=120)
    assert len(set(found)) == 1, "ranks disagree on the state"
    return found[0]


def _train(sections: Sections) -> tuple[str, str]:
    config = Config.model_validate(sections)
    trainer = Trainer(config, runtime.start(config.comm, config.run, config.parallelism))
    if trainer.finished:
        trainer.train()
        return "no-op", "no-op"
    first = state_hash(trainer)
    trainer.train()
    return first, state_hash(trainer)


def state_hash(trainer: Trainer) -> str:
    return tensors_hash(full_tensors(trainer._tensors()).items())


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What must be bitwise the same of every step."""
    return [tuple(row[key] for key in ("step", "loss", "grad_norm", "lr", "samples", "tokens")) for row in rows(folder)]


def event_steps(folder: Path, tag: str = "train/loss") -> list[int]:
    accumulator = EventAccumulator(str(folder / "run/tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars(tag)]


@pytest.mark.parametrize(
    "name",
    [
        "fsdp 2",
        "ddp 2",
        "ddp 3",
        "ddp 4",
        "hsdp 2x2, zero 2, accumulation 2",
        "cp 4",
        "cp 2 gathered x fsdp 2",
        "pp 3",
        "tp 2 x fsdp 2",
    ],
)
def test_two_resumes_in_a_row_are_bitwise(name: str, text: Path, tmp_path: Path) -> None:
    layout, sections = LAYOUTS[name]
    unbroken = train(layout, text, tmp_path / "unbroken", STEPS, sections)
    for steps in (2, 5, STEPS):
        resumed = train(layout, text, tmp_path / "broken", steps, sections)
    assert curve(tmp_path / "broken") == curve(tmp_path / "unbroken")
    assert resumed == unbroken
    assert [row["step"] for row in rows(tmp_path / "broken")] == list(range(1, STEPS + 1))
    assert event_steps(tmp_path / "broken") == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ["fsdp 2", "ddp 3"])
def test_resume_at_the_end_of_an_epoch_and_again_is_bitwise(name: str, text: Path, tmp_path: Path) -> None:
    layout, data = LAYOUTS[name][0], {"training": {"global_batch_size": 12, "local_batch_size": 12}}
    steps = 16
    unbroken = train(layout, text, tmp_path / "unbroken", steps, data)
    train(layout, text, tmp_path / "broken", steps, merge(data, {"data": {"epochs": 1}}))
    ended = len(rows(tmp_path / "broken"))
    assert 2 <= ended < steps - 2, "the run ends with the epoch's last whole step, and there is more to do"
    assert (tmp_path / f"broken/run/checkpoints/step-{ended:08d}/manifest.json").exists(), "with a checkpoint"
    train(layout, text, tmp_path / "broken", ended + 2, data)
    resumed = train(layout, text, tmp_path / "broken", steps, data)
    assert curve(tmp_path / "broken") == curve(tmp_path / "unbroken")
    assert resumed == unbroken


def test_a_run_that_lost_its_last_steps_repeats_them_bitwise(text: Path, tmp_path: Path) -> None:
    """As after a SIGKILL: metrics go further than the checkpoint."""
    layout, _ = LAYOUTS["fsdp 2"]
    train(layout, text, tmp_path / "a", 4)
    train(layout, text, tmp_path / "a", STEPS)
    expected = curve(tmp_path / "a")
    newest = tmp_path / f"a/run/checkpoints/step-{STEPS:08d}"
    (newest / "manifest.json").unlink()  # the save was not committed
    train(layout, text, tmp_path / "a", STEPS)
    assert curve(tmp_path / "a") == expected
    assert event_steps(tmp_path / "a") == list(range(1, STEPS + 1))
    assert (newest / "manifest.json").exists()


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_bitwise(
    text: Path, tmp_path: Path
) -> None:
    """What saves have cost is in the rows, too."""
    layout, saving = LAYOUTS["fsdp 2"][0], {"checkpoint": {"interval": 2}}
    unbroken = train(layout, text, tmp_path / "a", 6, saving)
    expected = curve(tmp_path / "a")
    costs = [{key for key in row if key.startswith("checkpoint_")} for row in rows(tmp_path / "a")]
    assert not costs[0] and not costs[1]
    assert "checkpoint_stall_seconds" in costs[2]
    assert {"checkpoint_seconds", "checkpoint_checksum_share"} <= set().union(*costs)
    checkpoints = tmp_path / "a/run/checkpoints"
    path = checkpoints / "step-00000006/__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert train(layout, text, tmp_path / "a", 6, saving) == unbroken
    assert curve(tmp_path / "a") == expected
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["step-00000004", "step-00000006", "step-00000006.damaged-1"]


def test_a_checkpoint_that_was_asked_for_and_is_damaged_is_refused(text: Path, tmp_path: Path) -> None:
    train(ONE_PROCESS, text, tmp_path, 1)
    step = tmp_path / "run/checkpoints/step-00000001"
    asked: Sections = {"checkpoint": {"resume": str(step)}, "run": {"name": "other"}}
    manifest = json.loads((step / "manifest.json").read_text())
    whole = (step / "__0_0.distcp").read_bytes()
    (step / "__0_0.distcp").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WorkerFailed, match=r"DamagedError: .*__0_0\.distcp: got other content"):
        train(ONE_PROCESS, text, tmp_path, 2, asked)
    (step / "__0_0.distcp").write_bytes(whole)
    del manifest["checksum"], manifest["train_state"]["samples"]
    manifest["files"] = {name: {"bytes": entry["bytes"]} for name, entry in manifest["files"].items()}
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(WorkerFailed, match=r"InputError: .*train_state\.samples: got None"):
        train(ONE_PROCESS, text, tmp_path, 2, asked)


def test_a_checkpoint_of_before_runs_started_from_weights_goes_on(text: Path, tmp_path: Path) -> None:
    train(ONE_PROCESS, text, tmp_path, 1)
    path = tmp_path / "run/checkpoints/step-00000001/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"], manifest["train_state"]["init_from"]
    manifest["files"] = {name: {"bytes": entry["bytes"]} for name, entry in manifest["files"].items()}
    path.write_text(json.dumps(manifest))
    train(ONE_PROCESS, text, tmp_path, 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_finished_run_is_a_no_op(text: Path, tmp_path: Path) -> None:
    first = train(ONE_PROCESS, text, tmp_path, 2)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert train(ONE_PROCESS, text, tmp_path, 2) == "no-op"
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert train(ONE_PROCESS, text, tmp_path, 3) != first


def test_another_layout_goes_on_within_the_promise(text: Path, tmp_path: Path) -> None:
    train(ONE_PROCESS, text, tmp_path / "one", STEPS)
    for name, steps in (("fsdp 2", 3), ("ddp 3", 6), ("accumulation 4", STEPS)):
        train(LAYOUTS[name][0], text, tmp_path / "many", steps)
    assert_same_curve(tmp_path / "many", tmp_path / "one")


def assert_same_curve(mine: Path, other: Path) -> None:
    for a, b in zip(curve(mine), curve(other), strict=True):
        assert a[0] == b[0] and a[3:] == b[3:]
        assert a[1] == pytest.approx(b[1], rel=1e-6)
        assert a[2] == pytest.approx(b[2], rel=1e-5)


def test_tensor_parallelism_goes_on_from_other_layouts_and_they_from_it(text: Path, tmp_path: Path) -> None:
    """The vocabulary is uneven over tp 2 and 4."""
    train(ONE_PROCESS, text, tmp_path / "one", STEPS, HEADS_8)
    layouts = [LAYOUTS["tp 2 x fsdp 2"][0], ONE_PROCESS, LAYOUTS["tp 4"][0], LAYOUTS["fsdp 3"][0]]
    for layout, steps in zip(layouts, (3, 5, 7, STEPS), strict=True):
        train(layout, text, tmp_path / "many", steps, HEADS_8)
    assert_same_curve(tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize(
    "name",
    [
        "cp 4 gathered",
        "cp 2 x fsdp 2",
        "cp 2 x hsdp 2x2",
        "pp 2 x tp 2",
        "pp 2 x tp 2, ZBVZeroBubble",
        "pp 2 x tp 2 x cp 2",
        "pp 2 x fsdp 2, zero 3, accumulation 2, tied",
    ],
)
def test_one_process_takes_over_from_a_composition_and_gives_back(name: str, text: Path, tmp_path: Path) -> None:
    """Every tensor and moment is the same after the change of layout; curves include the samples consumed."""
    layout, sections = LAYOUTS[name]
    train(ONE_PROCESS, text, tmp_path / "one", 5, sections)
    saved = train(layout, text, tmp_path / "many", 2, sections)
    for now, steps in ((ONE_PROCESS, 4), (layout, 5)):
        found, left = hashes(now, text, tmp_path / "many", steps, sections)
        assert found == saved
        saved = left
    assert_same_curve(tmp_path / "many", tmp_path / "one")


def test_a_run_told_to_start_from_a_checkpoint_goes_on_when_started_again(text: Path, tmp_path: Path) -> None:
    train(ONE_PROCESS, text, tmp_path / "old", 2)
    branch = {"checkpoint": {"resume": str(tmp_path / "old/run/checkpoints/step-00000002"), "interval": 2}}
    train(ONE_PROCESS, text, tmp_path / "new", 5, branch)
    assert [row["step"] for row in rows(tmp_path / "new")] == [3, 4, 5]
    kept = (tmp_path / "new/run/metrics.jsonl").read_text()
    train(ONE_PROCESS, text, tmp_path / "new", 7, branch)
    assert [row["step"] for row in rows(tmp_path / "new")] == [3, 4, 5, 6, 7]
    assert (tmp_path / "new/run/metrics.jsonl").read_text().startswith(kept), "steps 3 to 5 were not repeated"
    train(ONE_PROCESS, text, tmp_path / "new", 8)
    assert rows(tmp_path / "new")[-1]["step"] == 8
    train(ONE_PROCESS, text, tmp_path / "whole", 8)
    assert curve(tmp_path / "new") == curve(tmp_path / "whole")[2:]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"ffn_dim": 72}}, "model.ffn_dim"),
        ({"run": {"seed": 4}}, "run.seed"),
        ({"training": {"seq_len": 16}}, "training.seq_len"),
        ({"training": {"global_batch_size": 12}}, "training.global_batch_size"),
        ({"data": {"validation_fraction": 0.4}}, "data.validation_fraction"),
    ],
)
def test_another_run_is_refused(change: Sections, named: str, text: Path, tmp_path: Path) -> None:
    train(ONE_PROCESS, text, tmp_path, 1)
    with pytest.raises(WorkerFailed) as caught:
        train(ONE_PROCESS, text, tmp_path, 2, change)
    assert InputError.__name__ in str(caught.value)
    assert named in str(caught.value) and "as in the checkpoint" in str(caught.value)


def test_a_moved_folder_and_a_batch_that_may_change_are_not_refused(text: Path, tmp_path: Path) -> None:
    train(ONE_PROCESS, text, tmp_path, 1)
    (tmp_path / "text").symlink_to(text)
    sources = [
        source | {"path": source["path"].replace(str(text), str(tmp_path / "text"))} for source in sources_of(text)
    ]
    batch = {"global_batch_size": 12, "local_batch_size": 6, "allow_batch_change": True}
    change: Sections = {"data": {"sources": sources}, "training": batch}
    train(ONE_PROCESS, text, tmp_path, 3, change)
    assert [row["samples"] for row in rows(tmp_path)] == [24, 36, 48]


def sources_of(text: Path) -> list[dict[str, Any]]:
    return data_section(text)["sources"]
