"""Files, `extends`, precedence, overrides, and the round trip through dump."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from titanlite.config.keys import KEYS, Key
from titanlite.config.load import REPOSITORY, available_configs, dump, find_config, load
from titanlite.config.problems import InputError
from titanlite.config.schema import Config

from .conftest import MINIMAL, Refused, Write

# --- values ---


def test_precedence_is_command_line_then_file_then_base_then_default(write: Write) -> None:
    write("[optimizer]\nlr = 1\nbeta1 = 0.1\nbeta2 = 0.2\neps = 0.3\n", "base.toml")
    write('extends = "base.toml"\n[optimizer]\nbeta1 = 0.4\nbeta2 = 0.5\n', "child.toml", minimal=False)
    loaded = load("child.toml", ["--optimizer.beta2", "0.6"])
    optimizer = loaded.config.optimizer
    assert (optimizer.beta2, optimizer.beta1, optimizer.eps, optimizer.weight_decay) == (0.6, 0.4, 0.3, 0.1)
    assert optimizer.lr == 1.0 and isinstance(optimizer.lr, float)
    origins = [loaded.origin(f"optimizer.{key}") for key in ("beta2", "beta1", "eps", "weight_decay")]
    assert origins == ["command line", "child.toml", "base.toml", "default"]
    assert loaded.origin("optimizer") in ("base.toml", "child.toml", "command line")
    assert loaded.origin("metrics") == "default"


def test_extends_is_relative_to_its_file_and_chains(write: Write, tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    write(name="bases/root.toml")
    write('extends = "root.toml"\n[training]\nsteps = 7\n[run]\nseed = 3\n', "bases/middle.toml", minimal=False)
    write('extends = "bases/middle.toml"\n[training]\nmax_norm = 2\n', "leaf.toml", minimal=False)
    loaded = load("leaf.toml")
    training = loaded.config.training
    assert (training.seq_len, training.steps, training.max_norm) == (32, 7, 2.0)
    assert loaded.config.run.name == "leaf"
    assert loaded.origin("training.steps") == "bases/middle.toml"


def test_extends_replaces_lists_and_merges_tables(write: Write) -> None:
    write('[[data.sources]]\npath = "a"\n[[data.sources]]\npath = "b"\n[model.rope_scaling]\nfactor = 8\n', "base.toml")
    text = 'extends = "base.toml"\n[[data.sources]]\npath = "c"\n[model.rope_scaling]\nlow_freq_factor = 2\n'
    write(text, "child.toml", minimal=False)
    config = load("child.toml").config
    assert [source.path for source in config.data.sources] == ["c"]
    assert (config.model.rope_scaling.factor, config.model.rope_scaling.low_freq_factor) == (8.0, 2.0)


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (["--checkpoint.enable=false"], False),
        (["--checkpoint.enable", "false"], False),
        (["--checkpoint.enable=true"], True),
        (["--checkpoint.enable"], True),
        (["--checkpoint.enable", "--run.seed=1"], True),
        (["--checkpoint.enable=true", "--checkpoint.enable", "false"], False),
        (["--checkpoint.enable=false", "--checkpoint.enable"], True),
    ],
)
def test_boolean_overrides_in_every_form(write: Write, tokens: list[str], value: bool) -> None:
    file = f"[checkpoint]\nenable = {'false' if value else 'true'}\n"
    assert load(write(file), tokens).config.checkpoint.enable is value


def test_overrides_have_the_types_of_the_keys(write: Write) -> None:
    tokens = ["--run.name", "123", "--run.output_dir=true", "--parallelism.dp_shard", "-1", "--optimizer.lr", "1e-3"]
    tokens += ["--model.head_dim", "16", "--lr_scheduler.decay_type", "sqrt", "--model.rope_theta=500_000"]
    tokens += ["--data.sources", '[{path="a", weight=1}, {path="b = # c"}]', "--model.rope_scaling", "{factor = 2}"]
    config = load(write(), tokens).config
    assert (config.run.name, config.run.output_dir, config.parallelism.dp_shard) == ("123", "true", -1)
    assert (config.optimizer.lr, config.model.head_dim, config.lr_scheduler.decay_type) == (1e-3, 16, "sqrt")
    assert config.model.rope_theta == 500000.0
    assert [(source.path, source.weight) for source in config.data.sources] == [("a", 1.0), ("b = # c", 1.0)]
    assert (config.model.rope_scaling.factor, config.model.rope_scaling.high_freq_factor) == (2.0, 4.0)


@pytest.mark.parametrize("text", ["auto", '"auto"', "1", "2", "3"])
def test_zero_stage_takes_a_word_or_an_integer(write: Write, text: str) -> None:
    stage = load(write(), [f"--parallelism.zero_stage={text}"]).config.parallelism.zero_stage
    assert stage == ("auto" if "auto" in text else int(text)) and not isinstance(stage, (bool, float))


def test_every_key_reads_its_default_back_from_the_command_line(write: Write) -> None:
    """One parser for both: what dump writes in a file is also what the command line takes."""
    config = load(write()).config
    tokens = []
    for section, values in tomli.loads(dump(config)).items():
        for name, value in values.items():
            if KEYS[f"{section}.{name}"].model is None:
                text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
                tokens.append(f"--{section}.{name}={text}")
    assert len(tokens) > 50
    assert load(write(name="run.toml"), tokens).config == config


# --- round trip ---


def _random_value(key: Key, rng: random.Random) -> Any:
    if key.kind == "boolean":
        return rng.random() < 0.5
    if key.kind == "choice":
        return rng.choice(key.choices)
    if key.kind == "text":
        letters = "aé ß\"'\\=#[]{}.$\t\n\r\x01\x1f\x7f\u2028😀" if key.dotted != "run.name" else "ab é'\"=#[]{}$😀"
        return "x" + "".join(rng.choice(letters) for _ in range(rng.randrange(8))) + "y"
    bounds = {type(limit).__name__: limit for limit in key.field.metadata}
    low = next((getattr(limit, name.lower()) for name, limit in bounds.items() if name in ("Gt", "Ge")), 0)
    high = next((getattr(limit, name.lower()) for name, limit in bounds.items() if name in ("Lt", "Le")), None)
    if key.kind == "integer":
        most = 2**62 if high is None else high - low - 2
        return low + 1 + rng.choice([0, 1, 7, rng.randrange(min(most, 10**6)), min(most, 2**31), most])
    if high is not None:
        return rng.choice([rng.random() * 0.999, 5e-324, 0.1 + 0.2 - 0.3 + 1e-17])
    return low + rng.choice(
        [1, 3e22, 1e-5, 1 / 3, 5e-324 if low == 0 else 2.0, 1.7976931348623157e308, rng.random() + 1e-9]
    )


def _random_tree(prefix: str, rng: random.Random) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in KEYS.values():
        section, _, name = key.dotted.rpartition(".")
        if section != prefix:
            continue
        if key.kind == "section":
            tree[name] = _random_tree(key.dotted, rng)
        elif key.kind == "integers":
            tree[name] = [rng.randrange(1, 9) for _ in range(rng.randrange(4))]
        elif key.kind == "list":
            tree[name] = [_random_tree(key.dotted, rng) for _ in range(rng.randrange(1, 4))]
        elif key.required or rng.random() < 0.7:
            tree[name] = _random_value(key, rng)
    return tree


@pytest.mark.parametrize("seed", range(40))
def test_dump_loads_as_the_same_run(seed: int, tmp_path: Path) -> None:
    tree = _random_tree("", random.Random(seed))
    tree["run"].setdefault("name", "name")
    config = Config.model_validate(tree)
    (tmp_path / "random.toml").write_bytes(dump(config).encode())
    again = load(str(tmp_path / "random.toml"))
    assert again.config == config
    assert dump(again.config) == dump(config)


def test_dump_has_every_key_in_the_order_of_the_schema(write: Write) -> None:
    table = tomli.loads(dump(load(write()).config))
    dumped = [
        f"{section}.{name}"
        for section, values in table.items()
        for name in values
        if not isinstance(values[name], dict)
    ]
    top = [key.dotted for key in KEYS.values() if key.kind != "section" and key.dotted.count(".") == 1]
    assert dumped == top
    assert table["model"]["rope_scaling"]["factor"] == 1.0
    assert table["run"]["name"] == "run"


# --- files ---


def test_find_config_knows_paths_and_the_runs_of_the_repository(write: Write, tmp_path: Path) -> None:
    write(name="mine.toml")
    assert find_config("mine.toml") == find_config("mine") == Path("mine.toml")
    assert find_config(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"
    shipped = REPOSITORY / "train_configs" / "llama_8b.toml"
    names = ("llama_8b", "llama_8b.toml", "train_configs/llama_8b.toml")
    assert [find_config(name).resolve() for name in names] == [shipped] * 3
    (tmp_path / "llama_8b").mkdir()  # a folder of that name is not in the way
    assert find_config("llama_8b").resolve() == shipped
    assert shipped in [path.resolve() for path in available_configs()]


@pytest.mark.parametrize("name", ["lama_8b", "lama_8b.toml", "somewhere/lama_8b.toml"])
def test_find_config_names_the_nearest_and_lists_all(write: Write, name: str) -> None:
    write()
    with pytest.raises(InputError) as caught:
        find_config(name)
    (problem,) = caught.value.problems
    assert problem.fix == "did you mean llama_8b?" and name in problem.got
    assert "llama_debug" in problem.allowed and "llama_405b" in problem.allowed


@pytest.mark.parametrize("name", ["", "nothing like it", "folder", "a\0b", "x" * 5000])
def test_find_config_refuses_what_is_no_file(write: Write, tmp_path: Path, name: str) -> None:
    write()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="allowed: a TOML file"):
        find_config(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[training]\nsteps = \n", "at line 2, column 9"),
        ("[model]\nx = 1\nx = 2\n", "at line 3"),
        ("[run]\ndeterministic = True\n", "deterministic = True"),
        ("[run\n", "at line 1"),
        ('a = "open', "at end of document"),
        ("a = " + "9" * 5000, "digits"),
        ("a = " + "[" * 100000, ""),
    ],
)
def test_toml_that_cannot_be_read_is_one_problem_with_its_line(refused: Refused, text: str, found: str) -> None:
    (problem,) = refused(text, minimal=False)
    assert (problem.where, problem.key) == ("run.toml", "syntax")
    assert found in problem.got and len(problem.got) < 250 and problem.fix


def test_unreadable_file_still_has_the_command_line_checked(refused: Refused) -> None:
    problems = refused("[run", ("--training.step=1",), minimal=False)
    assert [problem.where for problem in problems] == ["run.toml", "command line"]


def test_bytes_that_are_no_utf8_are_located(write: Write, tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(MINIMAL.encode() + b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(InputError, match=r"latin.toml: file: got byte 0xe9 at line 16; allowed: UTF-8 text"):
        load("latin.toml")
    (tmp_path / "wide.toml").write_text(MINIMAL, encoding="utf-16")
    with pytest.raises(InputError, match="UTF-8"):
        load("wide.toml")


def test_byte_order_mark_and_windows_line_ends_are_accepted(write: Write, tmp_path: Path) -> None:
    write()
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load("windows.toml").config.model == load("run.toml").config.model


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(write: Write, tmp_path: Path) -> None:
    write()
    (tmp_path / "run.toml").chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        load("run.toml")


def test_empty_file_names_every_missing_key(refused: Refused) -> None:
    problems = refused("", minimal=False)
    required = {name for name, key in KEYS.items() if key.required and key.kind != "section"}
    assert {problem.key for problem in problems} == required
    assert all(problem.where == "run.toml" and problem.got.startswith("nothing") for problem in problems)
    assert len(required) == 10


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"run.toml": 'extends = "run.toml"'}, "run.toml -> run.toml"),
        ({"run.toml": 'extends = "a.toml"', "a.toml": 'extends = "./run.toml"'}, "run.toml -> a.toml -> run.toml"),
        ({"run.toml": 'extends = "bsae.toml"', "base.toml": ""}, "did you mean base.toml"),
        ({"run.toml": 'extends = "no/base.toml"'}, "there is no file no/base.toml"),
        ({"run.toml": "extends = 5"}, "got 5 (integer)"),
        ({"run.toml": 'extends = ["a.toml"]'}, "(list)"),
        ({"run.toml": 'extends = ""'}, 'got ""'),
        ({"run.toml": 'extends = "."'}, "Is a directory"),
        ({"run.toml": 'extends = "a.toml"', "a.toml": "x ="}, "a.toml: syntax"),
    ],
)
def test_extends_that_cannot_be_is_refused(write: Write, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        write(text + "\n", name, minimal=False)
    with pytest.raises(InputError) as caught:
        load("run.toml")
    assert len(caught.value.problems) == 1 and words in str(caught.value)
    assert caught.value.problems[0].fix


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/tmp", "a\\b", " a", "a\n", "x" * 201])
def test_run_name_is_one_folder(refused: Refused, name: str) -> None:
    (problem,) = refused(overrides=(f"--run.name={name}",))
    assert (problem.where, problem.key) == ("command line", "run.name") and "one folder name" in problem.allowed


def test_run_name_is_the_stem_when_empty(write: Write) -> None:
    assert load(write(name="my run.v2.toml"), ["--run.name="]).config.run.name == "my run.v2"
    with pytest.raises(InputError, match=r"run\.name"):
        load(write(name=" run.toml"))


def test_checking_imports_no_torch_and_is_fast() -> None:
    code = (
        "import sys, time; start = time.process_time()  # of this process: other ones may keep the machine busy\n"
        "from titanlite.config import load, check\n"
        "loaded = load.load('llama_debug'); check.static_problems(loaded, 2); check.machine_problems(loaded, 0)\n"
        "check.warnings(loaded, 2)\n"
        "assert not {'torch', 'numpy', 'titanlite.model'} & set(sys.modules)\n"
        "print(time.process_time() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.7
