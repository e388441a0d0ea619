import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from titanlite import files
from titanlite.checkpoint import checksum, storage
from titanlite.checkpoint.checksum import FileRecord
from titanlite.config.problems import InputError

PARTS: dict[str, Any] = {
    "layout": {"dp_shard": 2},
    "versions": {"torch": "2"},
    "config": {"run": {}},
    "train_state": {"step": 1},
}


def make(checkpoints: Path, step: int) -> Path:
    """A committed checkpoint whose one tensor file says its step."""
    storage.prepare_folder(checkpoints, step)
    folder = storage.step_folder(checkpoints, step)
    (folder / "__0_0.distcp").write_text(f"tensors of {step}")
    (folder / ".metadata").write_text("m")
    files = {name: checksum.of_file(folder / name) for name in ("__0_0.distcp", ".metadata")}
    storage.commit(folder, storage.make_manifest(step, files, PARTS))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def silent(message: str) -> None:
    pass


def test_manifest_format(tmp_path: Path) -> None:
    """The format is final: scripts and later versions read it."""
    manifest = json.loads((make(tmp_path, 50) / "manifest.json").read_text())
    keys = ["format", "step", "files", "layout", "versions", "config", "train_state", "time", "checksum"]
    assert list(manifest) == keys
    own = manifest.pop("checksum")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert own == f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"
    time = manifest.pop("time")
    assert len(time) == len("2026-01-01T00:00:00+00:00") and time[10] == "T"
    assert manifest == {
        "format": 1,
        "step": 50,
        "files": {
            ".metadata": {"bytes": 1, "checksum": f"xxh3_128:{xxhash.xxh3_128_hexdigest(b'm')}"},
            "__0_0.distcp": {"bytes": 13, "checksum": f"xxh3_128:{xxhash.xxh3_128_hexdigest(b'tensors of 50')}"},
        },
        **PARTS,
    }
    assert storage.read_manifest(tmp_path / "step-00000050")["step"] == 50


def test_names() -> None:
    assert storage.step_folder(Path("c"), 50) == Path("c/step-00000050")
    assert storage.step_folder(Path("c"), 123456789).name == "step-123456789"
    for step in (0, 50, 123456789):
        assert storage.step_of(storage.step_folder(Path("c"), step)) == step
    for name in (
        "step-50",
        "step-000000050",
        "step-00000050.damaged-1",
        "Step-00000050",
        "step-0000005x",
        "step--0000050",
    ):
        assert storage.step_of(Path(name)) is None, name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.pop("train_state"), "train_state"),
        (lambda m: m.update(format=2), "format: got 2"),
        (lambda m: m.update(step=True), "step"),
        (lambda m: m.update(step=7), "as the folder's name says"),
        (lambda m: m.update(config=[]), "config"),
        (lambda m: m["files"].pop(".metadata"), "no .metadata"),
        (lambda m: m["files"].update({"../__0_0.distcp": {"bytes": 1}}), "a file name"),
        (lambda m: m["files"].update({"__0_0.distcp": {"bytes": "13"}}), "a file name"),
    ],
)
def test_bad_manifest_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    """One without checksums, as an earlier version wrote it: what it says must still make sense."""
    path = make(tmp_path, 50) / "manifest.json"
    manifest = without_checksums(path)
    assert storage.read_manifest(path.parent) == manifest
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError) as error:
        storage.read_manifest(path.parent)
    assert says in str(error.value)
    # Another format is no damage: whoever wrote it can read it.
    assert isinstance(error.value, storage.DamagedError) == (says != "format: got 2")


def without_checksums(path: Path) -> Any:
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    for entry in manifest["files"].values():
        entry["checksum"] = None
    path.write_text(json.dumps(manifest))
    return manifest


def test_no_flipped_bit_of_a_manifest_changes_what_it_says(tmp_path: Path) -> None:
    """Every third of all, in every place of a byte: each is refused, or is where it means nothing."""
    path = make(tmp_path, 50) / "manifest.json"
    good, whole = storage.read_manifest(path.parent), path.read_bytes()
    refused = 0
    for bit in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert storage.read_manifest(path.parent) == good, f"bit {bit}"
        except storage.DamagedError:
            refused += 1
    assert refused > 2 * len(whole)


def test_a_manifest_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, 50)
    for code, damaged in ((errno.EACCES, False), (errno.EIO, True)):

        def fails(path: Path, code: int = code) -> bytes:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch, pytest.raises(InputError, match=os.strerror(code)) as error:
            patch.setattr(Path, "read_bytes", fails)
            storage.read_manifest(folder)
        assert isinstance(error.value, storage.DamagedError) == damaged


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1', "\x00\xff"])
def test_broken_json_is_uncommitted_and_named(tmp_path: Path, text: str) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / "manifest.json").write_text(text)
    said: list[str] = []
    assert storage.committed_steps(tmp_path, said.append) == [1]
    assert len(said) == 1 and "step-00000002" in said[0]


def test_missing_and_wrong_files_are_all_named(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    manifest = storage.read_manifest(folder)
    storage.check_sizes(folder, manifest)
    assert storage.is_complete(folder)
    with open(folder / "__0_0.distcp", "r+b") as file:
        file.truncate(5)
    (folder / ".metadata").unlink()
    with pytest.raises(storage.DamagedError) as error:
        storage.check_sizes(folder, manifest)
    assert "__0_0.distcp: got 5 bytes; allowed: 12 bytes" in str(error.value)
    assert ".metadata: got no such file; allowed: 1 bytes" in str(error.value)
    assert not storage.is_complete(folder)


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    name, path = "__0_0.distcp", folder / "__0_0.distcp"
    expected = storage.records(storage.read_manifest(folder))[name]
    assert storage.wrong_with(folder, name, expected) is None
    path.write_text("tensors of 2")
    problem = storage.wrong_with(folder, name, expected)
    assert problem is not None
    found = f"xxh3_128:{xxhash.xxh3_128_hexdigest(b'tensors of 2')}"
    assert str(problem).startswith(
        f"{folder}: {name}: got other content ({found}); allowed: {expected.checksum}, as manifest.json says"
    )
    assert storage.wrong_with(folder, name, expected._replace(checksum=None)) is None  # written without: the size only
    path.unlink()
    path.mkdir()
    assert "got no regular file" in str(storage.wrong_with(folder, name, expected))


@pytest.mark.parametrize(("code", "damaged"), [(errno.EIO, True), (errno.EACCES, False), (errno.ENOMEM, False)])
def test_only_what_is_lost_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, damaged: bool) -> None:
    folder = make(tmp_path, 1)
    expected = storage.records(storage.read_manifest(folder))[".metadata"]

    def fails(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(storage, "of_file", fails)
    if damaged:
        assert os.strerror(code) in str(storage.wrong_with(folder, ".metadata", expected))
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            storage.wrong_with(folder, ".metadata", expected)


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_every_file_is_read_by_one_rank_its_own_first(size: int) -> None:
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    shares = [storage.share(names, rank, size) for rank in range(size)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    if size >= 4:
        assert all(f"__{rank}_0.distcp" in shares[rank] for rank in range(4))


def test_commit_is_the_last_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest and the names around it are durable before it gets its name, and the name after."""
    calls: list[str] = []
    replace = os.replace
    monkeypatch.setattr(files, "fsync_file", lambda file: calls.append("fsync file"))
    for module in (storage, files):
        monkeypatch.setattr(module, "fsync_folder", lambda folder: calls.append(f"fsync {folder.name}"))

    def recorded(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    (tmp_path / "c" / "s").mkdir(parents=True)
    storage.commit(tmp_path / "c" / "s", storage.make_manifest(1, {".metadata": FileRecord(0, None)}, PARTS))
    assert calls == ["fsync c", "fsync s", "fsync file", "rename", "fsync s"]
    assert names(tmp_path / "c" / "s") == ["manifest.json"]


def test_leftovers_of_the_same_step_are_replaced_and_committed_ones_kept(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    (folder / "manifest.json").unlink()
    (folder / "__7_0.distcp").write_text("of a larger world")
    (folder / f"manifest.json.{'0f' * 16}.tmp").write_text("{")  # of a commit that was killed
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "precious").write_text("mine")
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to(tmp_path / "precious")  # the next save must not write through it
    assert storage.prepare_folder(tmp_path, 1) == ""
    assert names(folder) == ["notes.txt"]
    assert (tmp_path / "precious").read_text() == "mine"

    make(tmp_path, 2)
    assert "step-00000002.superseded-1" in storage.prepare_folder(tmp_path, 2)
    make(tmp_path, 2)
    assert "step-00000002.superseded-2" in storage.prepare_folder(tmp_path, 2)
    (make(tmp_path, 3) / "manifest.json").write_text("{")
    assert "step-00000003.damaged-1" in storage.prepare_folder(tmp_path, 3)
    assert (tmp_path / "step-00000002.superseded-1" / "__0_0.distcp").read_text() == "tensors of 2"
    assert storage.committed_steps(tmp_path, silent) == []


def test_a_file_or_a_link_in_the_place_of_a_new_checkpoint_is_renamed(tmp_path: Path) -> None:
    """What the link points to is another run's save, which is not committed yet."""
    other = make(tmp_path / "other", 1)
    (other / "manifest.json").unlink()
    here = tmp_path / "here"
    here.mkdir()
    (here / "step-00000001").symlink_to(other)
    (here / "step-00000002").symlink_to("nowhere")
    (here / "step-00000003").write_text("mine")
    for step in (1, 2, 3):
        assert f"step-0000000{step}.superseded-1" in storage.prepare_folder(here, step)
        assert (here / f"step-0000000{step}").is_dir() and not (here / f"step-0000000{step}").is_symlink()
    assert names(other) == [".metadata", "__0_0.distcp"]
    assert (here / "step-00000001.superseded-1").readlink() == other
    assert (here / "step-00000003.superseded-1").read_text() == "mine"


def test_retention_counts_committed_ones_and_leaves_the_rest(tmp_path: Path) -> None:
    for step in (1, 2, 4, 5):
        make(tmp_path, step)
    (make(tmp_path, 3) / "manifest.json").unlink()  # a save that was killed
    (make(tmp_path, 6) / "manifest.json").write_text("{")  # damaged: evidence
    foreign = ["step-00000001.bak", "step-1", "notes", "step-00000004x"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    make(tmp_path / "elsewhere", 0)
    (tmp_path / "step-00000000").symlink_to(tmp_path / "elsewhere" / "step-00000000", target_is_directory=True)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000007").write_text("a file")
    make(tmp_path, 8)

    storage.retain(tmp_path, 8, 3, silent)

    kept = {"step-00000004", "step-00000005", "step-00000006", "step-00000007", "step-00000008", "step-00000000"}
    assert set(names(tmp_path)) == kept | {*foreign, "elsewhere", "step-00000001"}
    assert names(tmp_path / "step-00000001") == ["notes.txt"]  # ours are gone, theirs is not
    assert storage.committed_steps(tmp_path, silent) == [4, 5, 8]
    assert len(names(tmp_path / "elsewhere" / "step-00000000")) == 3
    for name in foreign:
        assert names(tmp_path / name) == ["manifest.json"]


def test_retention_keeps_every_nth_for_good(tmp_path: Path) -> None:
    for step in range(2, 14):
        make(tmp_path, step)
        storage.retain(tmp_path, step, 2, silent, keep_every=4)
    assert storage.committed_steps(tmp_path, silent) == [4, 8, 12, 13]
    make(tmp_path, 14)
    storage.retain(tmp_path, 14, 1, silent, keep_every=4)
    assert storage.committed_steps(tmp_path, silent) == [4, 8, 12, 14]


def test_retention_does_not_count_what_has_lost_a_file(tmp_path: Path) -> None:
    """Else it would delete the last good one."""
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    (tmp_path / "step-00000003" / "__0_0.distcp").unlink()
    os.truncate(tmp_path / "step-00000004" / "__0_0.distcp", 3)
    storage.retain(tmp_path, 4, 1, silent)
    assert storage.committed_steps(tmp_path, silent) == [2, 3, 4]


def test_retention_zero_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    storage.retain(tmp_path, 3, 0, silent)
    assert storage.committed_steps(tmp_path, silent) == [1, 2, 3]


def test_later_ones_of_an_abandoned_history_do_not_push_out_the_new_one(tmp_path: Path) -> None:
    for step in (10, 20, 30, 11):
        make(tmp_path, step)
    said: list[str] = []
    storage.retain(tmp_path, 11, 1, said.append)
    assert storage.committed_steps(tmp_path, silent) == [11]
    assert [line.split()[-1] for line in said] == ["step-00000020.superseded-1", "step-00000030.superseded-1"]
    assert (tmp_path / "step-00000030.superseded-1" / "__0_0.distcp").read_text() == "tensors of 30"


def test_files_another_rank_wrote_must_be_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_VISIBLE_SECONDS", 0.0)
    (tmp_path / "__0_0.distcp").write_text("12345")
    storage.wait_for_files(tmp_path, {"__0_0.distcp": 5})
    with pytest.raises(storage.CheckpointError, match=r"__1_0.distcp.*a disk that all nodes share"):
        storage.wait_for_files(tmp_path, {"__0_0.distcp": 5, "__1_0.distcp": 5})
