"""Unknown keys with the nearest one, strict types, and all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.config.keys import KEYS, nearest_key, shown

from .conftest import MINIMAL, Refused


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("training.step", "training.steps"),
        ("training.globl_batch_size", "training.global_batch_size"),
        ("training.lr", "optimizer.lr"),
        ("optim.lr", "optimizer.lr"),
        ("trainig.steps", "training.steps"),
        ("trainig.stepz", "training.steps"),
        ("chekpoint.enable", "checkpoint.enable"),
        ("optimizer.warmup_steps", "lr_scheduler.warmup_steps"),
        ("model.factor", "model.rope_scaling.factor"),
        ("rope_scaling.factor", "model.rope_scaling.factor"),
        ("data.source", "data.sources"),
        ("data.sources.wieght", "data.sources.weight"),
        ("steps", "training.steps"),
        ("trainig", "training"),
        ("optim", "optimizer"),
        ("parallelism.data_parallel_shard_degree", "parallelism.dp_shard"),
        ("training.learning_rate", "optimizer.lr"),
        ("parallelism.zero-stage", "parallelism.zero_stage"),
        ("Training.Steps", "training.steps"),
        ("qqqqqq.zzzzzz", None),
    ],
)
def test_nearest_key(unknown: str, meant: str | None) -> None:
    assert nearest_key(unknown) == meant


def test_every_key_mistyped_by_one_letter_is_found_again() -> None:
    for name in KEYS:
        section, _, leaf = name.rpartition(".")
        if len(leaf) > 3:
            mistyped = f"{section}.{leaf[:-2]}{leaf[-1]}".lstrip(".")
            assert mistyped in KEYS or nearest_key(mistyped) == name


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("[optimizer]\nlearn_rate = 1", "optimizer.learn_rate", None),
        ("[optimizer]\nbeta_1 = 1", "optimizer.beta_1", "did you mean optimizer.beta1?"),
        ("[checkpont]\ninterval = 5", "checkpont", "did you mean checkpoint?"),
        ("[model.rope_scalng]\nfactor = 5", "model.rope_scalng", "did you mean model.rope_scaling?"),
        ("[model.rope_scaling]\nfactr = 5", "model.rope_scaling.factr", "did you mean model.rope_scaling.factor?"),
        ("[[data.sources]]\npth = 'a'", "data.sources.0.pth", "did you mean data.sources.path?"),
        ("[qqqqqq]\nzzzzzz = 1", "qqqqqq", "remove it"),
    ],
)
def test_unknown_key_in_a_file(refused: Refused, text: str, key: str, fix: str | None) -> None:
    (problem,) = refused(text)
    assert (problem.where, problem.key) == ("run.toml", key)
    assert fix is None or problem.fix == fix
    assert problem.got.startswith("an unknown ") and problem.allowed.startswith("the ")


def test_top_level_keys_are_unknown(refused: Refused) -> None:
    problems = refused('steps = 5\n"training.steps" = 5\n[model]\n[training]\n', minimal=False)
    fixes = {problem.key: problem.fix for problem in problems if problem.got.startswith("an unknown")}
    assert fixes == {"steps": "did you mean training.steps?", '"training.steps"': "did you mean training.steps?"}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("--training.step", "5"), "training.step", "did you mean --training.steps?"),
        (("--training.step=5",), "training.step", 'set to "5"'),
        (("--training.lr",), "training.lr", "did you mean --optimizer.lr?"),
        (
            ("--data.sources.0.weight=3",),
            "data.sources.0.weight",
            "give the whole list: --data.sources '[{path = ...}]'",
        ),
        (("--data.sources.weight=3",), "data.sources.weight", "give the whole list"),
        (("--training.steps.x=3",), "training.steps.x", "write --training.steps VALUE"),
        (("--training=5",), "training", "give one of its keys, as in --training.seq_len VALUE"),
        (("--model.rope_scaling", "8"), "model.rope_scaling", "--model.rope_scaling.factor VALUE"),
        (("--training", "{step = 5}"), "training.step", "did you mean --training.steps?"),
        (("--training.steps",), "training.steps", "write --training.steps=VALUE"),
        (("--run.name", "--run.seed=1"), "run.name", "write --run.name=VALUE"),
        (("-training.steps=5",), "argument", "did you mean --training.steps?"),
        (("training.steps=5",), "argument", "did you mean --training.steps?"),
        (("--run.seed=1", "stray"), "argument", '"stray"'),
        (("--",), "argument", "write --section.key value"),
        (("--no-checkpoint.enable",), "no-checkpoint.enable", "did you mean --checkpoint.enable?"),
        (("--extends=base.toml",), "extends", "an unknown key"),
        (("--=5",), '""', "an unknown key"),
    ],
)
def test_unknown_or_malformed_override(refused: Refused, overrides: tuple[str, ...], key: str, words: str) -> None:
    (problem,) = refused(overrides=overrides)
    assert (problem.where, problem.key) == ("command line", key)
    assert words in str(problem)


@pytest.mark.parametrize(
    ("key", "toml", "got", "allowed", "fix"),
    [
        ("training.steps", '"8"', '"8" (text)', "an integer > 0", "write 8"),
        ("training.steps", "2.5", "2.5 (number)", "an integer > 0", "give a whole number"),
        ("training.steps", "8.0", "8.0 (number)", "an integer > 0", "write 8"),
        ("training.steps", "true", "true (boolean)", "an integer > 0", "give a whole number"),
        ("training.steps", "0", "0 (integer)", "an integer > 0", "give one within these bounds"),
        ("training.steps", "-3", "-3 (integer)", "an integer > 0", "give one within these bounds"),
        ("training.steps", "nan", "nan (number)", "an integer > 0", "give a finite number"),
        ("training.steps", "[1]", "[1] (list)", "an integer > 0", "give a whole number"),
        ("training.steps", "{a = 1}", "{'a': 1} (table)", "an integer > 0", "give a whole number"),
        ("training.steps", "2024-01-01", "2024-01-01 (date)", "an integer > 0", "give a whole number"),
        ("training.steps", str(2**63), f"{2**63} (integer)", "below 2**63", "give a smaller one"),
        ("training.steps", "0x1" + "0" * 4000, "an integer of 16001 bits (integer)", "below 2**63", "TOML has 64 bits"),
        (
            "training.global_batch_size",
            str(2**31),
            "2147483648 (integer)",
            "> 0 and < 2147483648",
            "give one within these bounds",
        ),
        *(
            (key, str(2**31), "2147483648 (integer)", "and < 2147483648", "give one within these bounds")
            for key in (
                "checkpoint.grace_seconds",
                "checkpoint.before_walltime",
                "checkpoint.walltime",
                "comm.init_timeout_seconds",
                "comm.train_timeout_seconds",
            )
        ),
        ("model.head_dim", "-1", "-1 (integer)", "an integer >= 0", "give one within these bounds"),
        ("parallelism.dp_shard", "-2", "-2 (integer)", "an integer >= -1", "give one within these bounds"),
        ("optimizer.lr", "nan", "nan (number)", "a number > 0", "give a finite number"),
        ("optimizer.lr", "inf", "inf (number)", "a number > 0", "give a finite number"),
        ("optimizer.lr", "-inf", "-inf (number)", "a number > 0", "give a finite number"),
        ("optimizer.lr", '"1e-3"', '"1e-3" (text)', "a number > 0", "write 0.001"),
        ("optimizer.lr", "true", "true (boolean)", "a number > 0", "give a number"),
        ("optimizer.lr", "1" + "0" * 400, "(401 characters) (integer)", "a number > 0", "give one within these bounds"),
        ("optimizer.lr", "1e400", "inf (number)", "a number > 0", "give a finite number"),
        ("optimizer.lr", "0", "0 (integer)", "a number > 0", "give one within these bounds"),
        ("optimizer.beta2", "1", "1 (integer)", "a number >= 0 and < 1", "give one within these bounds"),
        ("lr_scheduler.decay_ratio", "1.5", "1.5 (number)", "a number >= 0 and <= 1", "give one within these bounds"),
        ("checkpoint.enable", '"false"', '"false" (text)', "true or false", "write true or false, without quotes"),
        ("checkpoint.enable", "0", "0 (integer)", "true or false", "write true or false, without quotes"),
        ("run.name", "123", "123 (integer)", "text", 'write "123", in quotes'),
        ("run.name", "true", "true (boolean)", "text", 'write "true", in quotes'),
        ("run.name", '["a"]', "(list)", "text", "write text, in quotes"),
        ("run.device", '"gpu"', '"gpu" (text)', 'one of "auto", "cpu", "cuda"', 'did you mean "cuda"?'),
        ("run.device", '"CUDA"', '"CUDA" (text)', 'one of "auto", "cpu", "cuda"', 'did you mean "cuda"?'),
        ("training.mixed_precision_param", '"bf16"', '"bf16" (text)', "one of", 'did you mean "bfloat16"?'),
        ("parallelism.zero_stage", "4", "4 (integer)", 'one of "auto", 1, 2, 3', "give one of these"),
        ("parallelism.zero_stage", "true", "true (boolean)", 'one of "auto", 1, 2, 3', "give one of these"),
        ("parallelism.zero_stage", "2.0", "2.0 (number)", 'one of "auto", 1, 2, 3', "give one of these"),
        ("parallelism.zero_stage", '"2"', '"2" (text)', 'one of "auto", 1, 2, 3', "did you mean 2?"),
        ("data.sources", '"a"', '"a" (text)', "a list of one or more tables", "write [[data.sources]]"),
        ("data.sources", "[]", "[] (list)", "a list of one or more tables", "write [[data.sources]]"),
        ("data.sources", "{path = 'a'}", "(table)", "a list of one or more tables", "with two brackets"),
    ],
)
def test_wrong_value_in_a_file(refused: Refused, key: str, toml: str, got: str, allowed: str, fix: str) -> None:
    Path("base.toml").write_text(MINIMAL)
    (problem,) = refused(f'extends = "base.toml"\n{key} = {toml}\n', minimal=False)
    assert (problem.where, problem.key) == ("run.toml", key)
    assert got in problem.got and allowed in problem.allowed
    assert fix and fix in problem.fix


@pytest.mark.parametrize(
    ("override", "got", "fix"),
    [
        ("--training.steps=abc", '"abc" (text)', "give a whole number"),
        ("--training.steps=", '"" (text)', "give a whole number"),
        ("--training.steps=2.5", "2.5 (number)", "give a whole number"),
        ("--training.steps=1e3", "1000.0 (number)", "write 1000"),
        ("--training.steps=true", "true (boolean)", "give a whole number"),
        ('--training.steps="8"', '"8" (text)', "write 8"),
        ("--training.steps=5 # many", '"5 # many" (text)', "give a whole number"),
        ("--training.steps=5\nb = 3", "(text)", "give a whole number"),
        ("--training.steps=007", '"007" (text)', "write 7"),
        ("--optimizer.lr=.5", '".5" (text)', "write 0.5"),
        ("--optimizer.lr=nan", "nan (number)", "give a finite number"),
        ("--checkpoint.enable=False", '"False" (text)', "write true or false"),
        ("--checkpoint.enable=1", "1 (integer)", "write true or false"),
        ("--checkpoint.enable=", '"" (text)', "write true or false"),
        ("--data.sources=a", '"a" (text)', "write '[{path = ...}]'"),
        ("--parallelism.zero_stage=true", "true (boolean)", "give one of these"),
        ("--run.output_dir=a\udcff", '"a\\udcff" (text)', "TOML holds no other bytes"),
    ],
)
def test_wrong_value_on_the_command_line(refused: Refused, override: str, got: str, fix: str) -> None:
    (problem,) = refused(overrides=(override,))
    assert (problem.where, problem.key) == ("command line", override[2:].partition("=")[0])
    assert got in problem.got and problem.fix == fix


def test_faults_inside_a_list_are_each_reported(refused: Refused) -> None:
    text = "[[data.sources]]\npath = 3\nwieght = 1\n[[data.sources]]\nweight = 0\n[[data.sources]]\npath = 'ok'\n"
    problems = {problem.key: problem for problem in refused(text)}
    assert list(problems) == ["data.sources.0.path", "data.sources.0.wieght", "data.sources.1.weight"]
    assert problems["data.sources.1.weight"].allowed == "a number > 0"
    (problem,) = refused(overrides=('--data.sources=["a"]',))
    assert (problem.key, problem.allowed) == (
        "data.sources.0",
        "a table with the keys path, weight, text_key, separator, validation_path",
    )


def test_section_that_is_no_table_is_not_hidden_by_an_override(refused: Refused) -> None:
    problems = refused("compile = 5\nmodel = 3\n[training]\nseq_len = 1\n", ("--compile.enable",), minimal=False)
    places = {problem.key: problem for problem in problems}
    assert places["compile"].got == "5 (integer)" and places["compile"].fix == "write [compile] and its keys below"
    assert places["model"].allowed.startswith("a section with the keys vocab_size")
    assert "model.dim" not in places and "training.steps" in places  # what a broken section lacks is not news


def test_all_problems_are_reported_at_once(refused: Refused) -> None:
    text = '[optimizer]\nlrr = 1\nbeta1 = "x"\n[trainig]\nseq_len = 3\n[data]\nepochs = 1.5\n'
    problems = refused(text, ("--training.step=1", "--training.steps=x", "--metrics.log_freq=0", "stray"))
    assert {(problem.where, problem.key) for problem in problems} == {
        ("run.toml", "optimizer.lrr"),
        ("run.toml", "optimizer.beta1"),
        ("run.toml", "trainig"),
        ("run.toml", "data.epochs"),
        ("command line", "training.step"),
        ("command line", "training.steps"),
        ("command line", "metrics.log_freq"),
        ("command line", "argument"),
    }


def test_problem_says_file_key_value_allowed_and_fix(refused: Refused) -> None:
    (problem,) = refused('[run]\nseed = "7"\n')
    assert str(problem) == 'run.toml: run.seed: got "7" (text); allowed: an integer >= 0\n    fix: write 7'


def test_shown_is_short_and_quotes_as_toml() -> None:
    assert shown('a"b\n') == '"a\\"b\\n"' and shown("it's") == '"it\'s"'
    assert shown(True) == "true" and shown(1e-5) == "1e-05"
    assert len(shown("x" * 1000)) < 100 and "1002 characters" in shown("x" * 1000)


def test_nul_characters_are_refused(refused: Refused) -> None:
    problems = refused('[data]\ncache_dir = "a\\u0000b"\nsources = [{ path = "\\u0000" }]\n')
    assert {problem.key for problem in problems} == {"data.cache_dir", "data.sources.0.path"}
    assert {problem.fix for problem in problems} == {"remove the NUL characters, which no path can have"}
