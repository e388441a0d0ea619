import errno
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.storage import CheckpointError, DamagedError
from titanlite.config.problems import InputError
from titanlite.config.schema import CheckpointConfig

MODES = ("disabled", "async")


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        "model.embedding.weight": torch.full((10, 3), float(value)),
        "model.norm.weight": torch.full((3,), value + 0.5),
        "optimizer.norm.weight.exp_avg": torch.full((3,), value + 0.25),
    }


def parts(step: int = 1) -> dict[str, Any]:
    return {"train_state": {"step": step}, "layout": {"dp_shard": 1}, "config": {"run": {"name": "a"}}}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Setup:
    def __init__(self, folder: Path, ranks: Any) -> None:
        self.folder = folder / "run" / "checkpoints"
        self.ranks = ranks
        self.said: list[str] = []

    def manager(self, **keys: Any) -> CheckpointManager:
        return CheckpointManager(CheckpointConfig(**keys), self.folder, self.ranks, report=self.said.append)

    def saved(self, *steps: int, **keys: Any) -> CheckpointManager:
        manager = self.manager(keep_latest_k=0, **keys)
        for step in steps:
            manager.save(step, tensors(step), parts(step))
        manager.finish()
        return manager

    def step(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


@pytest.fixture
def run(tmp_path: Path, one_rank: Any) -> Setup:
    return Setup(tmp_path, one_rank)


@pytest.mark.parametrize("mode", MODES)
def test_round_trip_in_place(run: Setup, mode: str) -> None:
    manager = run.saved(5, 7, async_mode=mode)
    assert manager.find_resume() == run.step(7)
    got = tensors(-1)
    addresses = [tensor.data_ptr() for tensor in got.values()]
    manifest = manager.load(run.step(5), got)
    assert same(got, tensors(5))
    assert [tensor.data_ptr() for tensor in got.values()] == addresses
    assert manifest == manager.read_manifest(run.step(5))
    assert {key: manifest[key] for key in parts()} == parts(5)
    assert set(manifest["versions"]) == {"titanlite", "torch", "python"}
    on_disk = {path.name: path.stat().st_size for path in run.step(5).iterdir() if path.name != "manifest.json"}
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == on_disk


def test_the_snapshot_is_of_its_step(run: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and manifest that change before the first byte is written, also in the buffers' second use."""
    may_write = threading.Event()
    write = dcp.write_tensors
    monkeypatch.setattr(dcp, "write_tensors", lambda *args: (may_write.wait(20), write(*args))[1])
    manager = run.manager(async_mode="async")
    live = tensors()
    for step in (1, 2):
        may_write.clear()
        for key, tensor in tensors(step).items():
            live[key].copy_(tensor)
        state = parts(step)
        manager.save(step, live, state)
        assert not any(f"step-{step:08d}" in line for line in run.said)
        for tensor in live.values():
            tensor.fill_(99)
        state["train_state"]["step"] = 99
        assert not (run.step(step) / "manifest.json").exists()
        manager.poll()
        assert len(run.said) == step - 1  # "saved" is said at the commit, not before
        may_write.set()
        manager.finish()
        assert f"saved checkpoint step-{step:08d}" in run.said[-1]
    for step in (1, 2):
        got = tensors(-1)
        assert manager.load(run.step(step), got)["train_state"] == {"step": step}
        assert same(got, tensors(step))


def test_staging_buffers_are_used_again(run: Setup) -> None:
    manager = run.saved(1, async_mode="async")
    before = {index: buffer.data_ptr() for index, buffer in manager._snapshot.buffers.items()}
    assert len(before) == 3
    manager.save(2, tensors(2), parts(2), wait=True)
    assert {index: buffer.data_ptr() for index, buffer in manager._snapshot.buffers.items()} == before


def test_poll_reports_once(run: Setup) -> None:
    manager = run.manager(async_mode="async")
    manager.poll()
    manager.save(1, tensors(), parts())
    assert manager._pending is not None
    manager._pending.exception(timeout=20)
    manager.poll()
    manager.poll()
    manager.finish()
    manager.finish()
    assert len(run.said) == 1


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", ["write_tensors", "write_metadata"])
def test_failed_save_is_loud_survived_once_and_never_committed(
    run: Setup, monkeypatch: pytest.MonkeyPatch, mode: str, stage: str
) -> None:
    manager = run.saved(1, async_mode=mode)
    said = "saving the checkpoint of step {} failed: rank 0: the disk is full .No space left"
    with monkeypatch.context() as patch:
        patch.setattr(dcp, stage, full_disk)
        manager.save(2, tensors(2), parts(2))
        with pytest.raises(CheckpointError, match=said.format(3)):
            manager.save(3, tensors(3), parts(3), wait=True)
    assert sum("CHECKPOINT NOT SAVED" in line for line in run.said) == 2
    assert manager.find_resume() == run.step(1)
    assert [path.name for path in run.folder.iterdir()] == ["step-00000001"]  # nothing half-written fills the disk
    manager.save(4, tensors(4), parts(4), wait=True)
    assert manager.find_resume() == run.step(4)
    got = tensors(-1)
    manager.load(run.step(4), got)
    assert same(got, tensors(4))

    monkeypatch.setattr(dcp, stage, full_disk)
    with pytest.raises(CheckpointError, match="No space left"):  # two in a row, none of them waited for
        for step in (5, 6, 7):
            manager.save(step, tensors(step), parts(step))


@pytest.mark.parametrize("mode", MODES)
def test_the_state_in_memory_is_saved_although_the_last_save_failed(
    run: Setup, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    manager = run.saved(1, async_mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "write_tensors", full_disk)
        manager.save(2, tensors(2), parts(2))
        if manager._pending is not None:
            manager._pending.exception(timeout=20)
    manager.save(3, tensors(3), parts(3))
    manager.finish()
    assert manager.find_resume() == run.step(3)


@pytest.mark.parametrize("stage", ["missing", "read only"])
def test_a_folder_that_is_not_shared_is_refused_at_the_start(
    run: Setup, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(storage, "_VISIBLE_SECONDS", 0.3)
    if stage == "missing":
        monkeypatch.setattr(Path, "touch", lambda self: None)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="all nodes share" if stage == "missing" else "cannot be written"):
        run.manager()
    assert not list(run.folder.iterdir())


def test_a_folder_that_cannot_be_written_is_wrong_input_at_the_start(
    run: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(InputError, match="got Read-only file system; allowed: a folder that can be written"):
        run.manager()


def test_only_unusable_checkpoints_are_no_fresh_start(run: Setup) -> None:
    run.saved(1, 2)
    for step in (1, 2):
        (run.step(step) / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="only checkpoints that cannot be used"):
        run.manager().find_resume()


def test_unexpected_error_in_the_background_surfaces(run: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = run.manager(async_mode="async")

    def broken(*args: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(manager, "_write", broken)
    manager.save(1, tensors(), parts())
    with pytest.raises(AssertionError, match="a bug"):
        manager.finish()
    manager.finish()


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"a": {1, 2}}])
def test_train_state_must_be_json(run: Setup, state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"preparing the checkpoint of step 1 failed.*JSON"):
        run.manager().save(1, tensors(), {**parts(), "train_state": state}, wait=True)
    assert not list(run.folder.iterdir())


def test_a_step_on_disk_is_not_written_again(run: Setup) -> None:
    manager = run.saved(1)
    manager.save(1, tensors(9), parts(), wait=True)
    resumed = run.manager()
    got = tensors(-1)
    resumed.load(run.step(1), got)
    resumed.save(1, tensors(9), parts(), wait=True)
    resumed.load(run.step(1), got)
    assert same(got, tensors(1))
    assert sum("saved" in line for line in run.said) == 1


def test_resume_from_an_earlier_step_sets_the_abandoned_ones_aside(run: Setup) -> None:
    run.saved(10, 20, 30)
    manager = run.manager(keep_latest_k=2, resume=str(run.step(10)))
    path = manager.find_resume()
    assert path == run.step(10)
    manager.load(path, tensors())
    assert run.manager().find_resume() == run.step(30)  # nothing is lost before something new is there
    manager.save(20, tensors(21), parts(20), wait=True)
    assert run.manager().find_resume() == run.step(20)
    got = tensors()
    manager.load(run.step(20), got)
    assert same(got, tensors(21))
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "step-00000010",
        "step-00000020",
        "step-00000020.superseded-1",
        "step-00000030.superseded-1",
    ]
    assert any("step-00000030.superseded-1" in line for line in run.said)


def test_retention(run: Setup) -> None:
    manager = run.manager(keep_latest_k=2, keep_every=2)
    for step in range(1, 6):
        manager.save(step, tensors(step), parts(step))
    manager.finish()
    assert sorted(path.name for path in run.folder.iterdir()) == [f"step-0000000{step}" for step in (2, 4, 5)]


# ---- which one


def test_find_resume_auto_and_never(run: Setup) -> None:
    for resume in ("auto", "never"):
        assert run.manager(resume=resume).find_resume() is None
    run.saved(1, 2)
    assert run.manager(resume="auto").find_resume() == run.step(2)
    with pytest.raises(InputError) as error:
        run.manager(resume="never").find_resume()
    assert "checkpoint.resume" in str(error.value) and "step-00000002" in str(error.value)
    (run.step(2) / "manifest.json").write_text('{"format": 1, "st')
    run.said.clear()
    assert run.manager(resume="auto").find_resume() == run.step(1)
    damaged, renamed, verified = run.said
    assert damaged.startswith("DAMAGED CHECKPOINT: ") and "step-00000002: manifest.json: got broken JSON" in damaged
    assert "is now step-00000002.damaged-1" in renamed and verified.startswith("verified step-00000001 (")
    (run.step(1) / "manifest.json").unlink()
    assert run.manager(resume="never").find_resume() is None


def test_find_resume_path(run: Setup, tmp_path: Path) -> None:
    run.saved(1, 2)
    copy = tmp_path / "copied"
    run.step(1).rename(copy)  # a step folder under any other name
    for given in (run.step(2), copy):
        assert run.manager(resume=str(given)).find_resume() == given.resolve()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (run.folder / "step-00000003").mkdir()
    wrong = [tmp_path / name for name in ("none", "file", "empty")]
    for given in (*wrong, run.folder, run.folder.parent, run.step(3)):  # the folder around a step folder is none
        with pytest.raises(InputError) as error:
            run.manager(resume=str(given)).find_resume()
        assert f"{given}: manifest.json: got " in str(error.value) and "--checkpoint.resume" in str(error.value)


# ---- loading what is wrong


def refused(manager: CheckpointManager, path: Path, wanted: dict[str, torch.Tensor]) -> str:
    """The message; and nothing was applied."""
    before = {key: tensor.clone() for key, tensor in wanted.items()}
    with pytest.raises(InputError) as error:
        manager.load(path, wanted)
    assert same(wanted, before)
    return str(error.value)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("size", [None, 0, -1, 1])
def test_wrong_file_is_refused(run: Setup, name: str, size: int | None) -> None:
    manager = run.saved(1)
    path = run.step(1) / name
    whole = path.stat().st_size
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size if size == 0 else whole + size)
    message = refused(manager, run.step(1), tensors(-1))
    assert name in message and f"{whole} bytes" in message


def test_other_tensors_are_refused_all_at_once(run: Setup) -> None:
    manager = run.saved(1)
    wanted = tensors(-1)
    del wanted["model.norm.weight"]
    wanted["model.layers.0.weight"] = torch.zeros(2)
    wanted["model.embedding.weight"] = torch.zeros(9, 3)
    wanted["optimizer.norm.weight.exp_avg"] = torch.zeros(3, dtype=torch.bfloat16)
    message = refused(manager, run.step(1), wanted)
    assert "model.layers.0.weight: got not in the checkpoint" in message
    assert "model.norm.weight: got not in the model" in message
    assert "model.embedding.weight, optimizer.norm.weight.exp_avg: got torch.float32 of shape [10, 3]" in message
    assert "[9, 3]" in message


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_no_flipped_bit_is_loaded(run: Setup, name: str) -> None:
    manager = run.saved(1)
    path = run.step(1) / name
    whole = path.read_bytes()
    chance = random.Random(name)
    for bit in [0, 8 * len(whole) - 1, *(chance.randrange(8 * len(whole)) for _ in range(20))]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        message = refused(manager, run.step(1), tensors(-1))
        assert f"{name}: got other content" in message and message.count("fix:") == 1
    path.write_bytes(whole)
    manager.load(run.step(1), tensors(-1))


def test_a_checkpoint_without_checksums_loads_with_a_warning(run: Setup) -> None:
    """As earlier versions wrote them. Damage that breaks the files' structure must be one plain error then."""
    manager = run.saved(1)
    manifest = json.loads((run.step(1) / "manifest.json").read_text())
    del manifest["checksum"]
    for entry in manifest["files"].values():
        entry["checksum"] = None
    (run.step(1) / "manifest.json").write_text(json.dumps(manifest))
    run.said.clear()
    got = tensors(-1)
    manager.load(run.step(1), got)
    assert same(got, tensors(1))
    assert any(line.startswith("warning") and "no checksums of 2 files" in line for line in run.said)
    path = run.step(1) / "__0_0.distcp"
    path.write_bytes(b"\x00" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"loading .*step-00000001 failed: rank 0: \w+"):
        manager.load(run.step(1), tensors())
    path = run.step(1) / ".metadata"
    path.write_bytes(b"\x00" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        manager.load(run.step(1), tensors())


# ---- falling back


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda step: flip(step / "__0_0.distcp"), "__0_0.distcp: got other content"),
    "garbage": (lambda step: garbage(step / ".metadata"), ".metadata: got other content"),
    "truncated": (lambda step: os.truncate(step / "__0_0.distcp", 100), "__0_0.distcp: got 100 bytes"),
    "missing": (lambda step: (step / ".metadata").unlink(), ".metadata: got no such file"),
    "train state": (lambda step: change_manifest(step), "manifest.json: got other content"),
    "manifest": (lambda step: os.truncate(step / "manifest.json", 100), "manifest.json: got broken JSON"),
}


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def change_manifest(step: Path) -> None:
    text = (step / "manifest.json").read_text()
    changed = text.replace(f'"step": {int(step.name[5:])}\n }}', '"step": 99\n }')  # in train_state
    assert changed != text
    (step / "manifest.json").write_text(changed)


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_good_one_is_resumed_and_the_bad_ones_named(run: Setup, kind: str) -> None:
    run.saved(10, 20, 30, 40)
    damage, named = DAMAGE[kind]
    for step in (30, 40):
        damage(run.step(step))
    run.said.clear()
    manager = run.manager(keep_latest_k=2)
    assert manager.find_resume() == run.step(20)
    for step in (30, 40):
        assert any(f"DAMAGED CHECKPOINT: {run.step(step)}: {named}" in line for line in run.said), run.said
        assert any(f"is now step-{step:08d}.damaged-1" in line for line in run.said)
    got = tensors(-1)
    assert manager.load(run.step(20), got)["train_state"] == {"step": 20}
    assert same(got, tensors(20))
    manager.save(30, tensors(31), parts(30), wait=True)
    again = run.manager()
    assert again.find_resume() == run.step(30)
    again.load(run.step(30), got)
    assert same(got, tensors(31))
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "step-00000020",
        "step-00000030",
        "step-00000030.damaged-1",
        "step-00000040.damaged-1",
    ]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_that_was_asked_for_is_refused_without_fallback(run: Setup, kind: str) -> None:
    run.saved(1, 2)
    damage, named = DAMAGE[kind]
    damage(run.step(2))
    run.said.clear()
    manager = run.manager(resume=str(run.step(2)))
    with pytest.raises(InputError) as error:
        path = manager.find_resume()
        assert path == run.step(2)
        manager.load(path, tensors())
    assert f"{run.step(2)}: {named}" in str(error.value)
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_if_none_is_good_nothing_is_renamed_and_all_are_named(run: Setup) -> None:
    """Else the second start would find an empty folder, and begin anew."""
    run.saved(1, 2)
    flip(run.step(1) / "__0_0.distcp")
    (run.step(2) / ".metadata").unlink()
    for _ in range(2):
        with pytest.raises(InputError) as error:
            run.manager().find_resume()
        message = str(error.value)
        assert "only checkpoints that cannot be used" in message and message.count("fix:") == 1
        assert f"{run.step(1)}: __0_0.distcp" in message and f"{run.step(2)}: .metadata" in message


def test_another_format_or_a_missing_permission_is_no_damage(run: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    run.saved(1, 2)
    manifest = storage.read_manifest(run.step(2)) | {"format": 2}
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FORMAT", 2)
        storage.commit(run.step(2), manifest | {"checksum": storage._checksum(manifest)})
    with pytest.raises(InputError, match="the titanlite that wrote it"):
        run.manager().find_resume()

    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(storage, "of_file", denied)
    (run.step(2) / "manifest.json").unlink()
    with pytest.raises(
        InputError, match=r"step-00000001: \S+: got Permission denied.*(.|\n)*permission to read"
    ) as error:
        run.manager().find_resume()
    assert not isinstance(error.value, DamagedError)
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_run_goes_on_from_its_own_good_ones_rather_than_from_the_given(run: Setup, tmp_path: Path) -> None:
    other = Setup(tmp_path / "other", run.ranks)
    other.saved(5)
    given = other.step(5)
    run.saved(7)  # of an earlier history
    manager = run.manager(resume=str(given), keep_latest_k=0)
    assert manager.find_resume() == given
    for step in (8, 9):
        manager.save(step, tensors(step), {**parts(step), "train_state": {"resumed_from": str(given)}}, wait=True)
    assert run.manager(resume=str(given)).find_resume() == run.step(9)
    flip(run.step(9) / "__0_0.distcp")
    assert run.manager(resume=str(given)).find_resume() == run.step(8)
    flip(run.step(8) / "__0_0.distcp")
    assert run.manager(resume=str(given)).find_resume() == given
    assert (run.folder / "step-00000008.damaged-1").exists()


def test_each_byte_is_hashed_once_for_a_resume(run: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    run.saved(1, 2)
    read: list[str] = []
    of_file = storage.of_file

    def recorded(path: Path) -> Any:
        read.append(str(path))
        return of_file(path)

    monkeypatch.setattr(storage, "of_file", recorded)
    manager = run.manager()
    path = manager.find_resume()
    assert path is not None
    manager.load(path, tensors())
    assert sorted(read) == [str(run.step(2) / name) for name in (".metadata", "__0_0.distcp")]
    manager.load(path, tensors())  # later it may be another
    assert len(read) == 4


def test_what_a_load_reads_is_what_was_verified(run: Setup) -> None:
    """Metadata that leads to a file which the manifest does not know."""
    manager = run.saved(1)
    (run.step(1) / "__0_0.distcp").rename(run.step(1) / "__5_0.distcp")
    metadata = dcp.read_metadata(run.step(1))
    manifest = storage.read_manifest(run.step(1))
    for place in metadata.storage_data.values():
        place.relative_path = "__5_0.distcp"
    (run.step(1) / ".metadata").write_bytes(pickle.dumps(metadata))
    files = {".metadata": storage.of_file(run.step(1) / ".metadata")}
    storage.commit(run.step(1), storage.make_manifest(1, files, manifest))
    with pytest.raises(DamagedError, match=r"\.metadata: got names __5_0\.distcp; allowed: files that manifest\.json"):
        manager.load(run.step(1), tensors())


def test_foreign_files_in_a_step_folder_change_nothing(run: Setup) -> None:
    manager = run.saved(1, 2)
    (run.step(2) / "notes.txt").write_text("mine")
    (run.step(2) / "__9_0.distcp").write_bytes(b"not ours")
    (run.step(2) / "deeper").mkdir()
    assert run.manager().find_resume() == run.step(2)
    got = tensors(-1)
    manager.load(run.step(2), got)
    assert same(got, tensors(2))


# ---- what it costs, and what goes wrong, in words


def test_figures_for_a_row_of_metrics(run: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = dcp.write_tensors
    monkeypatch.setattr(dcp, "write_tensors", lambda *args: (may_write.wait(20), write(*args))[1])
    manager = run.manager(async_mode="async")
    assert manager.metrics() == {}
    manager.save(1, tensors(), parts())
    (stall,) = manager.metrics().items()
    assert stall[0] == "checkpoint_stall_seconds" and 0 < stall[1] < 10
    assert manager.metrics() == {}
    time.sleep(0.2)
    may_write.set()
    manager.finish()
    figures = manager.metrics()
    assert set(figures) == {"checkpoint_seconds", "checkpoint_checksum_share"}
    assert 0.2 < figures["checkpoint_seconds"] < 30
    assert 0 < figures["checkpoint_checksum_share"] < 1
    assert f"{figures['checkpoint_checksum_share']:.1%} of it for checksums" in run.said[-1]
    for step in (2, 3):
        manager.save(step, tensors(), parts())
    manager.finish()
    assert set(manager.metrics()) == {"checkpoint_stall_seconds", "checkpoint_seconds", "checkpoint_checksum_share"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp"])
def test_a_full_disk_is_told_in_plain_words(run: Setup, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch says "inline_container.cc … unexpected pos" of a failed write."""
    manager = run.saved(1)
    prepare = storage.prepare_folder

    def into_a_full_device(checkpoints: Path, step: int) -> str:
        said = prepare(checkpoints, step)
        (run.step(step) / name).symlink_to("/dev/full")
        return said

    monkeypatch.setattr(storage, "prepare_folder", into_a_full_device)
    with pytest.raises(CheckpointError) as error:
        manager.save(2, {"model.a": torch.zeros(100_000)}, parts(2), wait=True)
    assert str(error.value) == (
        f"saving the checkpoint of step 2 failed: rank 0: the disk is full at {run.step(2) / name} (No space left on "
        "device): make room, or let run.output_dir be on another disk"
    )
    assert "CHECKPOINT NOT SAVED" in run.said[-1]
    assert [path.name for path in run.folder.iterdir()] == ["step-00000001"]


def test_manifest_is_json_for_everyone(run: Setup) -> None:
    run.saved(1)
    json.loads((run.step(1) / "manifest.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_killed_at_random_instants(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.checkpoint.killed_saves", str(tmp_path / "c"), "24", "1"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "24 kills" in done.stdout
