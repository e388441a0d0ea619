"""`titanlite convert`: a run's checkpoint with its tokenizer to a folder that transformers loads; what it refuses."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.unit.checkpoint.test_huggingface import save
from tests.unit.model.helpers import small_config, small_model
from titanlite import cli
from titanlite.checkpoint import convert, storage
from titanlite.config.schema import ModelConfig
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.train_tokenizer import train_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "words.model"
    path.write_bytes(train_tokenizer([f"the cat number {i} sat on {i * i} mats" for i in range(200)], 300))
    return path


@pytest.fixture
def run_folder(tmp_path: Path, tokenizer_file: Path) -> Path:
    """A run folder with a checkpoint of step 3."""
    folder = save(tmp_path / "run/checkpoints", small_model(small_config(vocab_size=301)), seq_len=64)
    manifest = storage.read_manifest(folder)
    manifest["config"]["tokenizer"] = {"path": str(tokenizer_file), "add_bos": True}
    manifest["train_state"]["data"] = {"tokenizer": load_tokenizer(tokenizer_file).fingerprint}
    storage.commit(folder, storage.make_manifest(3, storage.records(manifest), manifest))
    return tmp_path / "run"


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str | Path, code: int = 0) -> str:
        """What it says: its last line on stdout, and all of stderr."""
        assert cli.main(["convert", *map(str, words)]) == code
        out, err = self.capsys.readouterr()
        return out + err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_model_and_its_tokenizer(run_folder: Path, tokenizer_file: Path, tmp_path: Path, command: Command) -> None:
    before = contents(run_folder)
    assert "llama, float32, step 3 of" in command("to-hf", run_folder, tmp_path / "out")
    assert contents(run_folder) == before
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(tokenizer_file)
    text = "the cat number 17\nsat  on\n\n a mat\u2581."
    assert tokenizer(text)["input_ids"] == [ours.bos_id, *ours.encode(text).tolist()]
    assert (model.config.bos_token_id, model.config.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 64
    ids = tokenizer(text, return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] > ids["input_ids"].shape[1]

    command("from-hf", tmp_path / "out", tmp_path / "back")
    sections = tomli.loads((tmp_path / "back/model.toml").read_text())
    assert ModelConfig.model_validate(sections["model"]) == small_config(vocab_size=301, head_dim=16, init_std=0.02)
    assert sections["tokenizer"] == {"path": str(tmp_path / "back/tokenizer.json"), "add_bos": True}
    assert load_tokenizer(sections["tokenizer"]["path"]).encode(text).tolist() == ours.encode(text).tolist()
    manifest = storage.read_manifest(tmp_path / "back/step-00000000")
    assert manifest["train_state"]["weights_only"] is True and manifest["step"] == 0
    assert cli.main(["checkpoint", "verify", str(tmp_path / "back")]) == 0
    command("to-hf", tmp_path / "back/step-00000000", tmp_path / "again")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        one, other = (json.loads((tmp_path / folder / name).read_text()) for folder in ("out", "again"))
        assert one | {"initializer_range": 0, "unk_token": 0} == other | {"initializer_range": 0, "unk_token": 0}, name


def test_another_tokenizer_than_the_runs(
    run_folder: Path, tokenizer_file: Path, tmp_path: Path, command: Command
) -> None:
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer([f"{i} dogs" for i in range(200)], 275))
    kept = tokenizer_file.read_bytes()
    try:
        tokenizer_file.write_bytes(other.read_bytes())
        said = command("to-hf", run_folder, tmp_path / "out", code=2)
        assert "tokenizer.path" in said and "that the run was trained with" in said and "--tokenizer none" in said
        tokenizer_file.unlink()
        assert "--tokenizer PATH" in command("to-hf", run_folder, tmp_path / "out", code=2)
    finally:
        tokenizer_file.write_bytes(kept)
    assert not (tmp_path / "out").exists()
    assert "warning" in command("to-hf", run_folder, tmp_path / "other", "--tokenizer", other)
    assert "no tokenizer is written" in command("to-hf", run_folder, tmp_path / "none", "--tokenizer", "none")
    assert not (tmp_path / "none/tokenizer.json").exists()
    assert json.loads((tmp_path / "none/config.json").read_text())["eos_token_id"] is None


def test_nothing_is_overwritten(run_folder: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command("to-hf", run_folder, out)  # an empty folder is no obstacle
    before = contents(out)
    for words in (("to-hf", run_folder, out), ("from-hf", out, out), ("to-hf", run_folder, out / "config.json")):
        assert "nothing is overwritten" in command(*words, code=2)
    assert contents(out) == before


def test_a_damaged_checkpoint_is_not_converted(run_folder: Path, tmp_path: Path, command: Command) -> None:
    file = next(run_folder.rglob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said = command("to-hf", run_folder, tmp_path / "out", code=1)
    assert f"{file.name}: got other content" in said and "nothing was converted" in said
    assert not (tmp_path / "out").exists()
    next(run_folder.rglob("manifest.json")).unlink()
    assert "no checkpoint is committed" in command("to-hf", run_folder, tmp_path / "out", code=2)


def change_manifest(folder: Path, alter: Callable[[dict[str, Any]], Any]) -> None:
    step = next(folder.rglob("manifest.json")).parent
    manifest = storage.read_manifest(step)
    alter(manifest)
    storage.commit(step, storage.make_manifest(3, storage.records(manifest), manifest))


def test_a_config_that_is_not_of_the_tensors_or_of_another_version(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    model = storage.read_manifest(run_folder / "checkpoints/step-00000003")["config"]["model"]
    change_manifest(run_folder, lambda manifest: manifest["config"]["model"].update(ffn_dim=model["ffn_dim"] + 8))
    said = command("to-hf", run_folder, tmp_path / "out", code=2)
    assert "model.layers.0.mlp.down.weight" in said and "use the [model] section" in said
    change_manifest(run_folder, lambda manifest: manifest["config"]["tokenizer"].update(key_of_tomorrow=1))
    said = command("to-hf", run_folder, tmp_path / "out", code=2)
    assert "config.tokenizer.key_of_tomorrow: got a [tokenizer] that this titanlite does not know" in said


def test_the_length_that_a_model_came_with_goes_out_again(run_folder: Path, tmp_path: Path, command: Command) -> None:
    """Llama 3.1's is 131072, though its scaling was made for 8 x 8192; longer training counts."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    change_manifest(run_folder, lambda manifest: manifest["config"]["model"].update(rope_scaling=scaling))
    for imported, seq_len, length in ((None, 64, 512), (1024, 64, 1024), (256, 64, 256), (1024, 2048, 2048)):

        def alter(manifest: dict[str, Any], imported: int | None = imported, seq_len: int = seq_len) -> None:
            manifest["train_state"]["max_position_embeddings"] = imported or 0
            manifest["config"]["training"]["seq_len"] = seq_len

        change_manifest(run_folder, alter)
        out = tmp_path / f"{imported} {seq_len}"
        command("to-hf", run_folder, out)
        assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == length
        assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == length


def test_folders_that_were_made_for_it_go_and_what_another_wrote_stays(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    other = tmp_path / "a/b/c/of another"

    def meanwhile(file: Any) -> None:
        assert list((tmp_path / "a/b").iterdir()) == [Path(file.name).parent], "nothing is written into OUT"
        if other.name in wanted:
            other.parent.mkdir()
            other.write_text("x")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(convert, "fsync_file", meanwhile)
    wanted: list[str] = []
    command("to-hf", run_folder, tmp_path / "a/b/c", code=1)
    assert sorted(tmp_path.iterdir()) == before
    wanted.append(other.name)
    command("to-hf", run_folder, tmp_path / "a/b/c", code=1)
    assert [file for file in (tmp_path / "a").rglob("*") if file.is_file()] == [other]


def test_two_conversions_into_one_folder(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to end has it; the other leaves nothing."""
    fsync = convert.fsync_file
    inside: list[Any] = []

    def meanwhile(file: Any) -> None:
        if not inside:
            inside.append(file)
            command("to-hf", run_folder, tmp_path / "out", "--dtype", "bfloat16")
        fsync(file)

    monkeypatch.setattr(convert, "fsync_file", meanwhile)
    assert "OUT: got" in command("to-hf", run_folder, tmp_path / "out", code=2)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_a_full_disk_leaves_nothing(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def full(file: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file.name)

    monkeypatch.setattr(convert, "fsync_file", full)
    said = command("to-hf", run_folder, tmp_path / "out", "--shard-size", "100kB", code=1)
    assert "the disk is full" in said and str(tmp_path / "out") in said
    assert len(written) == 2 and not (tmp_path / "out").exists()


def test_a_file_that_may_not_be_written(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", file.name)

    monkeypatch.setattr(convert, "fsync_file", refused)
    said = command("to-hf", run_folder, tmp_path / "out", code=2)
    assert ".safetensors: Permission denied; allowed: files that may be read and written" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage|required"),
        (("to-hf", "nowhere", "out"), "PATH: got nowhere, which is not there"),
        (("from-hf", "nowhere", "out"), "nowhere: config.json: got No such file"),
        (("to-pt", "a", "b"), "invalid choice: 'to-pt'"),
        (("to-hf", "a", "b", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("from-hf", "a", "b", "--shard-size", "1GB"), "--shard-size: got from-hf; allowed: only with to-hf"),
        (("from-hf", "a", "b", "--tokenizer", "none", "--dtype", "float16"), "leave --dtype, --tokenizer out"),
        (("to-hf", "a", "b", "--shard-size", "big"), "--shard-size: got big; allowed: a size such as 5GB"),
        (("to-hf", "a", "b", "--shard-size", "0"), "--shard-size: got 0"),
    ],
)
def test_wrong_words(words: tuple[str, ...], said: str, tmp_path: Path, command: Command, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = command(*words, code=2)
    assert any(part in text for part in said.split("|")), text
    assert not any(tmp_path.iterdir())
