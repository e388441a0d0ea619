"""`titanlite` and `titanlite config` as a user calls them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tomli

from tests.cli.processes import LAUNCH, ROOT, TITANLITE, assert_refused, run, write_config
from titanlite.config.keys import KEYS
from titanlite.config.load import load


def test_usage_and_version() -> None:
    done = run(TITANLITE, "--help")
    assert done.returncode == 0 and "config" in done.stdout and "train" in done.stdout
    assert run(TITANLITE, "--version").stdout.startswith("titanlite ")


@pytest.mark.parametrize(("words", "hint"), [(["confg"], "did you mean config?"), ([], "no command given")])
def test_unknown_command(words: list[str], hint: str) -> None:
    assert_refused(run(TITANLITE, *words), hint, "train, prepare, verify, config, checkpoint")


def test_round_trip(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    overrides = ["--optimizer.lr", "1e-3", "--checkpoint.enable=false", "--compile.enable"]
    done = run(TITANLITE, "config", str(path), *overrides)
    assert done.returncode == 0, done.stderr
    assert tomli.loads(done.stdout)["compile"] == {"enable": True}
    copy = tmp_path / "copy.toml"
    copy.write_text(done.stdout)
    again = run(TITANLITE, "config", str(copy))
    assert again.stdout == done.stdout
    assert load(str(copy)).config == load(str(path), overrides).config


def test_wrong_key() -> None:
    assert_refused(run(TITANLITE, "config", "llama_debug", "--model.dims", "8"), "model.dims", "--model.dim")


def test_name_is_needed_and_comes_first() -> None:
    assert_refused(run(TITANLITE, "config"), "NAME", "llama_debug")
    assert_refused(run(TITANLITE, "config", "--training.steps", "5"), "NAME")


def test_list_has_every_config() -> None:
    done = run(TITANLITE, "config", "--list")
    names = {path.stem for path in (ROOT / "train_configs").glob("*.toml")}
    assert {line.split()[0] for line in done.stdout.splitlines()} >= names
    assert all(len(line.split()) > 3 for line in done.stdout.splitlines()), "each says what it is"
    listed = json.loads(run(TITANLITE, "config", "--list", "--json").stdout)["configs"]
    assert {entry["name"] for entry in listed} >= names


def test_check() -> None:
    done = run(TITANLITE, "config", "llama_debug", "--check", "--world-size", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok\n4,999,424 parameters\nworld size 4: dp_replicate=1 dp_shard=4")
    assert "6 samples, as 1 forward pass of 6" in done.stdout
    assert_refused(
        run(TITANLITE, "config", "llama_debug", "--check", "--world-size", "5"), "training.global_batch_size"
    )
    assert_refused(run(TITANLITE, "config", "llama_debug", "--check", "--world-size", "0"), "--world-size", "fix: ")
    assert_refused(run(TITANLITE, "config", "llama_debug", "--world-size", "4"), "only with --check", "fix: ")


def test_check_names_what_is_not_on_this_machine(tmp_path: Path) -> None:
    missing = ["--tokenizer.path", "nowhere.model", "--data.sources", '[{path="nope"}]']
    done = run(TITANLITE, "config", "llama_debug", "--check", *missing)
    assert_refused(done, "tokenizer.path", "nowhere.model", "data.sources.0.path", "nope")
    assert_refused(run(TITANLITE, "config", "llama_debug", "--check", "--checkpoint.resume", "nope"), "nope")
    (tmp_path / "file").touch()
    done = run(TITANLITE, "config", "llama_debug", "--check", "--json", "--run.output_dir", str(tmp_path / "file"))
    assert done.returncode == 2
    assert [problem["key"] for problem in json.loads(done.stdout)["problems"]] == ["run.output_dir"]
    done = run(TITANLITE, "config", "llama_debug", "--check", "--run.device", "cuda")  # it may run elsewhere
    assert done.returncode == 0, done.stderr


def test_check_as_json() -> None:
    done = run(TITANLITE, "config", "llama_debug", "--check", "--world-size", "5", "--json", "--model.n_heads", "7")
    assert done.returncode == 2 and done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    assert {"training.global_batch_size", "model.dim"} <= {problem["key"] for problem in answer["problems"]}
    done = run(TITANLITE, "config", "llama_8b", "--check", "--world-size", "8", "--json")
    answer = json.loads(done.stdout)
    assert answer["ok"] is True and answer["layout"]["dp_shard"] == 8 and answer["warnings"]


def test_json_is_the_config(tmp_path: Path) -> None:
    done = run(TITANLITE, "config", str(write_config(tmp_path)), "--json", "--training.steps", "3")
    answer = json.loads(done.stdout)
    assert answer["config"]["training"]["steps"] == 3
    assert answer["origins"]["training.steps"] == "command line"


@pytest.mark.parametrize("command", [(*TITANLITE, "config"), (*TITANLITE, "train"), LAUNCH])
def test_help_has_every_key(command: tuple[str, ...]) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    for key in KEYS.values():
        if key.kind != "section" and not key.in_list:
            assert f"--{key.dotted}  " in done.stdout
            assert key.required or "default: " in done.stdout.partition(f"--{key.dotted}  ")[2].splitlines()[0]
    assert "data.sources[].weight" in done.stdout
    if "config" not in command:
        assert all(name in done.stdout for name in ("NPROC", "NNODES", "MASTER_ADDR", "LOG_RANK", "--nproc"))
        assert "2 wrong input, 75 stopped by a signal (or the clock) and saved: try again\n" in done.stdout


def test_commands_import_no_torch() -> None:
    code = (
        "import sys; from titanlite import cli; cli.main(['config', 'llama_8b', '--check']); "
        "cli.main(['trian']); print('torch' in sys.modules)"
    )
    assert run((sys.executable, "-c", code)).stdout.splitlines()[-1] == "False"


def test_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m titanlite.cli config llama_debug | head -n 1"
    done = run(("bash", "-c", script))
    assert done.stdout.count("\n") == 1 and done.stderr == ""
