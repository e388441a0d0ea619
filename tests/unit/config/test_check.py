"""Rules over several keys, over this machine, and warnings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.config.check import machine_problems, static_problems, warnings
from titanlite.config.load import Loaded, dump, load
from titanlite.config.problems import Problem

from .conftest import Write

Make = Callable[..., Loaded]


def test_the_minimal_run_has_nothing_wrong(make: Make) -> None:
    for world in (None, 1, 2, 3, 4):
        assert static_problems(make(), world) == []
        assert warnings(make(), world) == []
    assert machine_problems(make(), 0) == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["--parallelism.ep=2"], "parallelism.ep", "got 2; allowed: 1 while model.moe.n_experts is 0"),
        (
            ["--parallelism.tp=3", "--training.seq_len=33"],
            "parallelism.tp",
            "got 3; allowed: one of [1, 2, 4]: it divides n_heads = 4",
        ),
        (
            ["--parallelism.tp=4", "--model.n_heads=12", "--model.n_kv_heads=6", "--model.head_dim=8"],
            "parallelism.tp",
            "got 4; allowed: one of [1, 2, 3, 6, 12]: it divides n_heads = 12, and divides or is divided by n_kv_",
        ),
        (
            ["--parallelism.tp=4", "--training.seq_len=18"],
            "training.seq_len",
            "got 18; allowed: a multiple of tp = 4, the parts of a sequence",
        ),
        (
            ["--parallelism.tp=4", "--model.ffn_dim=9"],
            "model.ffn_dim",
            "got 9, which is cut into 3 parts of at most 3; allowed: enough for 4 tensor parallel ranks",
        ),
        (
            [
                "--parallelism.tp=4",
                "--model.vocab_size=9",
                "--model.vocab_pad_multiple=1",
                "--tokenizer.path=small.model",
            ],
            "model.vocab_size",
            "fix: set model.vocab_pad_multiple to a multiple of 4",
        ),
        (["--parallelism.dp_shard=0"], "parallelism.dp_shard", "-1, or an integer > 0"),
        (["--parallelism.pp=3"], "parallelism.pp", "got 3; allowed: at most 2, as every stage has a layer"),
        (
            ["--parallelism.pp=2", "--parallelism.pp_schedule=ZBVZeroBubble"],
            "parallelism.pp",
            "at most 1, as every stage has a layer (ZBVZeroBubble has two stages a rank)",
        ),
        (
            ["--parallelism.pp=2", "--parallelism.pp_layers_per_stage=[1,1,1]"],
            "parallelism.pp_layers_per_stage",
            "got 3 numbers; allowed: 2 numbers, the stages of 1F1B at pp = 2",
        ),
        (
            ["--parallelism.pp=2", "--parallelism.pp_layers_per_stage=[1, 2]"],
            "parallelism.pp_layers_per_stage",
            "got [1, 2]; allowed: numbers whose sum is model.n_layers = 2 (got 3)",
        ),
        (
            ["--parallelism.pp=2", "--parallelism.pp_schedule=LoopedBFS", "--parallelism.pp_layers_per_stage=[1,1,1]"],
            "parallelism.pp_layers_per_stage",
            "allowed: a multiple of pp = 2 numbers",
        ),
        (["--parallelism.pp=2", "--parallelism.zero_stage=2"], "parallelism.zero_stage", '"auto", 1 or 3 with'),
        (
            ["--parallelism.pp=2", "--parallelism.pp_schedule=InterleavedZeroBubble", "--parallelism.zero_stage=3"],
            "parallelism.zero_stage",
            '"auto" or 1 with InterleavedZeroBubble, which needs the weights after backward',
        ),
        (
            ["--parallelism.pp=2", "--parallelism.pp_schedule=InterleavedZeroBubble", "--compile.enable"],
            "compile.enable",
            "false with InterleavedZeroBubble, which runs backward in two parts",
        ),
        (["--data.document_mask=true", "--tokenizer.add_eos=false"], "data.document_mask", "tokenizer.add_eos = true"),
        (["--data.sources=[{path='a', validation_path='a'}]"], "data.sources.0.validation_path", "another path than"),
        (["--data.sources=[{path='a', text_key=''}]"], "data.sources.0.text_key", "text that is not empty"),
        (["--model.dim=66"], "model.dim", "a multiple of model.n_heads = 4, or model.head_dim set"),
        (["--model.dim=60"], "model.dim", "got 60, which makes heads of 15; allowed: an even head width"),
        (["--model.head_dim=7"], "model.head_dim", "got 7; allowed: an even head width"),
        (["--model.n_kv_heads=3"], "model.n_kv_heads", "got 3; allowed: a divisor of model.n_heads = 4"),
        (["--model.n_kv_heads=8"], "model.n_kv_heads", "a divisor of model.n_heads = 4"),
        (
            ["--model.rope_scaling.factor=8", "--model.rope_scaling.high_freq_factor=1"],
            "model.rope_scaling.high_freq_factor",
            "more than low_freq_factor = 1.0",
        ),
        (["--lr_scheduler.warmup_steps=11"], "lr_scheduler.warmup_steps", "at most lr_scheduler.total_steps = 10"),
        (["--model.vocab_size=4095"], "model.vocab_size", "at least 4096, the size of the embedded tokenizer"),
        (
            ["--validation.enable", "--data.validation_fraction=0"],
            "data.validation_fraction",
            "more than 0 while validation.enable is true",
        ),
        (["--data.cache_dir=outputs/run"], "data.cache_dir", "another folder than the run's, outputs/run"),
        (["--run.name=cache"], "data.cache_dir", "another folder than the run's, outputs/cache"),
        (["--tokenizer.path="], "tokenizer.path", "text that is not empty"),
        (["--data.sources=[{path=''}]"], "data.sources.0.path", "text that is not empty"),
        (["--data.sources=[{path='a'}, {path='./a/'}]"], "data.sources.1.path", "data.sources.0 is the same"),
        (["--data.sources=[{}, {}]"], "data.sources.1.path", "data.sources.0 is the same"),
        (
            ["--data.sources=[{weight=2000}, {path='a', weight=1}]"],
            "data.sources.1.weight",
            "fix: raise it to 1.95505 or more",
        ),
        (["--data.sources=[{weight=1e308}, {path='a', weight=1e308}]"], "data.sources", "weights with a finite sum"),
    ],
)
def test_rule(make: Make, overrides: list[str], key: str, words: str) -> None:
    loaded = make(*overrides)
    (problem,) = static_problems(loaded, None)
    assert problem.key == key and words in str(problem)
    assert problem.where in ("command line", "default", "run.toml")


def test_legal_edges(make: Make) -> None:
    for overrides in (
        ["--lr_scheduler.warmup_steps=10"],
        ["--data.sources=[{weight=1023}, {path='a', weight=1}]"],
        ["--data.sources=[{weight=0.1}, {path='a', weight=0.1}, {path='b', weight=0.1}]"],
        ["--data.validation_fraction=0"],
        ["--model.dim=66", "--model.head_dim=16"],
        ["--model.rope_scaling.high_freq_factor=1"],
        ["--model.vocab_size=300", "--tokenizer.path=small.model"],
        ["--parallelism.tp=2", "--model.ffn_dim=7", "--model.vocab_pad_multiple=1", "--model.vocab_size=4097"],
        ["--parallelism.tp=2", "--model.n_kv_heads=1"],
    ):
        assert static_problems(make(*overrides), 2) == []


@pytest.mark.parametrize("others", ["{weight=2000}", "{weight=7}, {path='b', weight=1e-5}", "{weight=1e300}"])
def test_the_weight_that_is_proposed_is_accepted(make: Make, others: str) -> None:
    (*_, problem) = static_problems(make(f"--data.sources=[{others}, {{path='a', weight=1e-6}}]"), 2)
    weight = problem.fix.split()[3]
    problems = static_problems(make(f"--data.sources=[{others}, {{path='a', weight={weight}}}]"), 2)
    assert problem.key not in [other.key for other in problems]


MOE = ("--model.moe.n_experts=8", "--model.moe.top_k=2", "--model.moe.expert_dim=16")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["--model.moe.top_k=9"], "model.moe.top_k", "got 9; allowed: 1 to model.moe.n_experts = 8"),
        (["--model.moe.top_k=0"], "model.moe.top_k", "fix: set it: Mixtral has 2 of 8"),
        (["--model.moe.expert_dim=0"], "model.moe.expert_dim", "got 0; allowed: a multiple of 8"),
        (["--model.moe.expert_dim=20"], "model.moe.expert_dim", "fix: set it to 16 or 24"),
        (["--model.dim=60", "--model.head_dim=16"], "model.dim", "got 60; allowed: a multiple of 8 while"),
        (["--model.moe.first_k_dense=2"], "model.moe.first_k_dense", "got 2; allowed: less than model.n_layers = 2"),
    ],
)
def test_rules_of_experts(make: Make, overrides: list[str], key: str, words: str) -> None:
    (problem,) = static_problems(make(*MOE, *overrides), 1)
    assert problem.key == key and problem.where == "command line"
    assert words in str(problem)


def test_legal_experts(make: Make) -> None:
    for overrides in (
        [],
        ["--model.moe.top_k=8"],
        ["--model.moe.first_k_dense=1", "--model.moe.n_shared_experts=2"],
        ["--model.moe.score_func=sigmoid", "--model.moe.bias_update_rate=1e-3", "--model.moe.aux_loss_coeff=1e-4"],
        ["--model.moe.bias_update_rate=1e-3", "--model.moe.route_norm=false"],
        ["--model.moe.n_experts=1", "--model.moe.top_k=1", "--model.moe.route_norm=false"],
    ):
        assert static_problems(make(*MOE, *overrides), 1) == [] and warnings(make(*MOE, *overrides), 1) == []


SIX = ("--model.moe.n_experts=6", "--model.moe.top_k=2", "--model.moe.expert_dim=8")


def test_expert_parallelism(make: Make) -> None:
    for ep in (1, 2, 3, 6):
        assert static_problems(make(*SIX, f"--parallelism.ep={ep}"), 6) == []
    (problem,) = static_problems(make(*SIX, "--parallelism.ep=4"), 4)
    assert (problem.key, problem.where, problem.got) == ("parallelism.ep", "command line", "4")
    assert "a divisor of model.moe.n_experts = 6" in problem.allowed and "one of [1, 2, 3, 6]" in problem.fix
    (problem,) = static_problems(make(*SIX, "--parallelism.ep=3"), 4)
    assert problem.key == "parallelism.ep" and "a divisor of dp_shard x cp x tp = 4" in problem.allowed
    for degrees in (
        ("tp=2",),
        ("tp=2", "ep=2"),
        ("cp=2", "ep=2"),
        ("pp=2", "ep=2", "pp_schedule=GPipe"),
        ("dp_replicate=2", "ep=2"),
    ):
        assert static_problems(make(*SIX, *(f"--parallelism.{degree}" for degree in degrees)), 4) == []


def test_sharded_experts_are_not_recomputed_in_part(make: Make) -> None:
    selective = (*SIX, "--activation_checkpoint.mode=selective")
    (problem,) = static_problems(make(*selective), 2)
    assert problem.key == "activation_checkpoint.mode" and "where experts are sharded over ranks" in problem.allowed
    for more, world in (
        ([], 1),
        (["--parallelism.dp_replicate=2"], 2),
        (["--activation_checkpoint.selective_ac_option=2"], 2),
    ):
        assert static_problems(make(*selective, *more), world) == []


def test_sizes_of_a_model_with_experts_under_tensor_parallelism(make: Make) -> None:
    """The dense MLP counts where a layer has one; the shared expert is cut like one; routed experts are not cut."""
    heads = ("--model.n_heads=16", "--model.n_kv_heads=16", "--model.dim=256", "--parallelism.tp=16")
    narrow = (*SIX, *heads, "--model.ffn_dim=15")
    assert static_problems(make(*narrow), 16) == []
    (problem,) = static_problems(make(*narrow, "--model.moe.first_k_dense=1"), 16)
    assert problem.key == "model.ffn_dim" and "got 15, which is cut into" in str(problem)
    (problem,) = static_problems(make(*narrow, "--model.moe.n_shared_experts=1"), 16)
    assert problem.key == "model.moe.expert_dim" and "a shared expert of 8, which is cut into 8 parts" in problem.got


def test_context_parallelism(make: Make) -> None:
    def problems(*overrides: str) -> list[tuple[str, str]]:
        return [(problem.key, problem.fix) for problem in static_problems(make(*overrides), None)]

    cp2 = "--parallelism.cp=2"
    assert problems(cp2, "--training.seq_len=60") == []
    assert problems("--training.seq_len=61", "--data.document_mask=true") == [], "nothing is cut"
    fix = "set it to 60 or 64, or change parallelism.cp"
    assert problems(cp2, "--training.seq_len=61") == [("training.seq_len", fix)]
    assert problems(cp2, "--training.seq_len=62") == [("training.seq_len", fix)], "two chunks a rank"
    assert problems(cp2, "--training.seq_len=3") == [("training.seq_len", "set it to 4, or change parallelism.cp")]
    assert problems("--parallelism.cp=3", "--training.seq_len=61") == [("training.seq_len", fix.replace("64", "66"))]
    masked = (cp2, "--data.document_mask=true", "--training.seq_len=64")
    assert problems(*masked) == [("parallelism.cp_method", "--parallelism.cp_method allgather")]
    assert problems(*masked, "--parallelism.cp_method=ring") == problems(*masked)
    assert problems(*masked, "--parallelism.cp_method=allgather") == []
    keys = [key for key, _ in problems(*masked, "--training.seq_len=61")]
    assert keys == ["training.seq_len", "parallelism.cp_method"]


PP = ("--parallelism.pp=2", "--training.local_batch_size=12")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (
            ["--training.local_batch_size=1"],
            "training.local_batch_size",
            "got 1; allowed: 2 or more: samples of what 1F1B",
        ),
        (
            ["--parallelism.pp_microbatches=1"],
            "parallelism.pp_microbatches",
            "at least as many microbatches as stages, 2",
        ),
        (
            ["--parallelism.pp_microbatches=5"],
            "parallelism.pp_microbatches",
            "a divisor of a rank's 12 samples of a step",
        ),
        (
            ["--parallelism.pp_microbatches=6", "--training.local_batch_size=5"],
            "training.local_batch_size",
            "got 5; allowed: 6 or more: samples of a schedule run of 6 microbatches",
        ),
        (["--training.global_batch_size=1"], "training.global_batch_size", "a rank has 1 samples of a step"),
        (
            ["--parallelism.pp_schedule=Interleaved1F1B", "--parallelism.pp_microbatches=3", "--model.n_layers=4"],
            "",
            "",
        ),
        (
            [
                "--parallelism.pp_schedule=Interleaved1F1B",
                "--parallelism.pp_microbatches=5",
                "--model.n_layers=4",
                "--training.global_batch_size=10",
            ],
            "parallelism.pp_microbatches",
            "for Interleaved1F1B a number of microbatches that microbatches // pp (pp = 2) divides",
        ),
        (["--parallelism.zero_stage=3"], "", ""),
        (["--parallelism.zero_stage=1", "--parallelism.pp_schedule=GPipe", "--compile.enable"], "", ""),
        (["--parallelism.pp_layers_per_stage=[1,1]"], "", ""),
        (["--parallelism.pp_schedule=GPipe", "--training.local_batch_size=1"], "", ""),
    ],
)
def test_rules_of_a_pipeline_in_its_world(make: Make, overrides: list[str], key: str, words: str) -> None:
    problems = static_problems(make(*PP, *overrides), 2)
    assert [problem.key for problem in problems] == ([key] if key else [])
    assert all(words in str(problem) and problem.where == "command line" for problem in problems), problems


def test_recomputation_with_a_split_backward_and_shared_blocks_is_refused(make: Make) -> None:
    """Seen to deadlock with torch 2.13: ZBVZeroBubble at pp 2 x tp 2 x cp 2."""
    full = "--activation_checkpoint.mode=full"
    zero_bubble = "--parallelism.pp_schedule=InterleavedZeroBubble"
    deep, tp = ("--model.n_layers=4", *PP), "--parallelism.tp=2"
    (problem,) = static_problems(make(*deep, zero_bubble, full, tp), 4)
    assert problem.key == "activation_checkpoint.mode" and "InterleavedZeroBubble and tp" in problem.allowed
    (problem,) = static_problems(make(*deep, *SIX, zero_bubble, full, "--parallelism.ep=2"), 4)
    assert problem.key == "activation_checkpoint.mode" and "InterleavedZeroBubble and ep" in problem.allowed
    second = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2")
    (problem,) = static_problems(make(*deep, zero_bubble, *second, tp), 4)
    assert problem.key == "activation_checkpoint.mode" and "wait for each other forever" in problem.allowed
    for overrides in ((zero_bubble, full), (zero_bubble, tp), (full, tp), (zero_bubble, *second), (*second, tp)):
        assert static_problems(make(*deep, *overrides), 2 ** (1 + (tp in overrides))) == [], overrides


def test_selective_recomputation_is_refused_where_operators_cannot_be_chosen(make: Make) -> None:
    """Seen with torch 2.13: "Trying to backward an extra time" under all three schedules, with tp and cp of 1."""
    selective, deep = "--activation_checkpoint.mode=selective", "--model.n_layers=4"
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        (problem,) = static_problems(make(deep, *PP, f"--parallelism.pp_schedule={name}", selective), 2)
        assert problem.key == "activation_checkpoint.mode" and f"with {name}: its backward" in problem.allowed
    assert static_problems(make(deep, *PP, "--parallelism.pp_schedule=Interleaved1F1B", selective), 2) == []
    tp, compiled = "--parallelism.tp=2", "--compile.enable"
    (problem,) = static_problems(make(selective, tp, compiled), 2)
    assert problem.key == "activation_checkpoint.mode" and "compiled code" in problem.allowed
    second = "--activation_checkpoint.selective_ac_option=2"
    for overrides in ((selective, tp), (selective, compiled), (selective, second, tp, compiled)):
        assert static_problems(make("--model.n_layers=2", *overrides), 2) == []


def test_which_blocks_selective_recomputation_takes(make: Make) -> None:
    option = "--activation_checkpoint.selective_ac_option"
    for value in ("x", "0", "02", "-1", "5", "1.5", "99999999999999999999999", "²"):
        (problem,) = static_problems(make("--model.n_layers=4", f"{option}={value}"), 1)
        assert problem.key == option[2:] and '"op", or a number from "1" to "4"' in problem.allowed
    second = make("--model.n_layers=4", f"{option}=2", "--activation_checkpoint.mode=selective")
    assert static_problems(second, 1) == [] and warnings(second, 1) == []
    assert [second.config.activation_checkpoint.of_layer(i) for i in range(4)] == ["none", "full", "none", "full"]
    (warning,) = warnings(make("--model.n_layers=4", f"{option}=2"), 1)
    assert warning == f'{option[2:]}: ignored while activation_checkpoint.mode is not "selective".'


def test_a_list_of_layers_is_one_of_integers(refused: Callable[..., list[Problem]]) -> None:
    for value in ("[1.5]", "[true]", "[0]", "3", "['1']", "{}"):
        (problem,) = refused(overrides=(f"--parallelism.pp_layers_per_stage={value}",))
        assert problem.key.startswith("parallelism.pp_layers_per_stage") and "a list of integers > 0" in problem.allowed


def test_pipeline_warnings(make: Make) -> None:
    (warning,) = warnings(make("--parallelism.pp_microbatches=2", "--parallelism.pp_schedule=GPipe"), 1)
    assert warning == "parallelism.pp_microbatches, parallelism.pp_schedule: ignored while parallelism.pp is 1."
    wide = ("--model.vocab_size=400000", "--tokenizer.path=a", "--data.sources=[{path='a'}]", "--model.dim=128")
    (warning,) = warnings(make(*PP, *wide, "--parallelism.pp_schedule=GPipe"), 2)
    assert "gradient of each of 12 microbatches: 2.3 GiB on the last stage" in warning
    assert warnings(make(*PP, *wide), 2) == []


def test_rules_of_the_world(make: Make) -> None:
    (problem,) = static_problems(make("--training.global_batch_size=10"), 4)
    assert (problem.where, problem.key) == ("command line", "training.global_batch_size")
    assert "set it to 8 or 12" in problem.fix
    (problem,) = static_problems(make("--parallelism.dp_shard=3"), 4)
    assert (problem.where, problem.key) == ("command line", "parallelism")
    (problem,) = static_problems(make("--parallelism.dp_shard=0"), 4)
    assert problem.where == "command line"
    assert static_problems(make("--training.global_batch_size=10"), None) == []
    (problem,) = static_problems(make("--training.global_batch_size=10", "--parallelism.dp_shard=4"), None)
    assert problem.key == "training.global_batch_size"  # the degrees tell the world


def test_sizes_that_tp_and_fsdp_cannot_cut_together(make: Make) -> None:
    odd = ("--parallelism.tp=2", "--model.ffn_dim=37", "--model.vocab_size=4099", "--model.vocab_pad_multiple=1")
    assert static_problems(make(*odd), 2) == []
    assert static_problems(make(*odd), 4) == []
    problems = static_problems(make(*odd), 6)
    assert [problem.key for problem in problems] == ["model.ffn_dim", "model.vocab_size"]
    assert "got 37; allowed: a size that torch can cut over tp = 2 and then dp_shard x cp = 3" in str(problems[0])
    assert (
        "got 4099 (padded)" in str(problems[1]) and "set model.vocab_pad_multiple to a multiple of 2" in problems[1].fix
    )


def test_all_rules_report_at_once(make: Make) -> None:
    loaded = make("--parallelism.ep=2", "--model.n_kv_heads=3", "--lr_scheduler.warmup_steps=11", "--model.head_dim=3")
    problems = static_problems(loaded, 1)
    keys = ["parallelism.ep", "model.head_dim", "model.n_kv_heads", "lr_scheduler.warmup_steps", "parallelism.ep"]
    assert [problem.key for problem in problems] == keys


# --- machine ---


def test_device(make: Make) -> None:
    (problem,) = machine_problems(make("--run.device=cuda"), 0)
    assert problem.key == "run.device" and "shows no CUDA GPU" in problem.allowed
    assert machine_problems(make("--run.device=cuda"), 1, nproc=1) == []
    for device in ("auto", "cuda"):
        (problem,) = machine_problems(make(f"--run.device={device}"), 1, nproc=2)
        assert (problem.key, problem.got) == ("processes", "2") and "shows 1" in problem.allowed
    assert machine_problems(make("--run.device=cpu"), 1, nproc=2) == []
    assert machine_problems(make(), 0, nproc=2) == []


def test_source_files(make: Make, write: Write, tmp_path: Path) -> None:
    write("text", "texts.txt", minimal=False)
    (tmp_path / "folder").mkdir()

    def found(path: str, key: str = "path") -> str:
        paths = {"path": "texts.txt", key: path}
        sources = ", ".join(f"{name} = '{value}'" for name, value in paths.items())
        problems = machine_problems(make(f"--data.sources=[{{{sources}}}]"), 0)
        assert [problem.key for problem in problems] in ([], [f"data.sources.0.{key}"])
        return "\n".join(map(str, problems))

    good = ("texts.txt", "folder", "t*.txt", "**/*.txt", "f?lder")
    assert [found(path) for path in good] == [""] * 5
    assert "did you mean texts.txt?" in found("text.txt")
    assert "there is no folder" in found("nowhere/text.txt")
    assert "nothing matches this pattern" in found("*.jsonl")
    assert "did you mean texts.txt?" in found("text.txt", "validation_path")
    both = make("--data.sources=[{path='no'}, {path='neither'}]", "--tokenizer.path=nor")
    keys = [problem.key for problem in machine_problems(both, 0)]
    assert keys == ["data.sources.0.path", "data.sources.1.path", "tokenizer.path"]


def test_files_that_cannot_be_read(make: Make, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("text", "texts.txt", minimal=False)
    monkeypatch.setattr(os, "access", lambda path, mode: "texts" not in str(path))
    (problem,) = machine_problems(make("--data.sources=[{path='texts.txt'}]"), 0)
    assert problem.fix == "change its permissions: this file cannot be read"


def test_tokenizer_file(make: Make, write: Write, tmp_path: Path) -> None:
    write("x", "my.model", minimal=False)
    (tmp_path / "folder").mkdir()
    assert machine_problems(make("--tokenizer.path=my.model"), 0) == []
    assert machine_problems(make("--tokenizer.path=folder"), 0) == []  # of a Hugging Face tokenizer
    for path, words in (("mi.model", "did you mean my.model?"), ("qq/x", "no folder")):
        (problem,) = machine_problems(make(f"--tokenizer.path={path}"), 0)
        assert problem.key == "tokenizer.path" and words in problem.fix


def test_folders_that_cannot_be_made(make: Make, write: Write, tmp_path: Path) -> None:
    write("x", "file", minimal=False)
    (tmp_path / "link").symlink_to("nowhere")
    for value, words in (("file/deeper/out", f"{tmp_path}/file is a file"), ("link", "is a link to nowhere")):
        (problem,) = machine_problems(make(f"--run.output_dir={value}"), 0)
        assert problem.key == "run.output_dir" and words in problem.fix
        (problem,) = machine_problems(make(f"--data.cache_dir={value}"), 0)
        assert problem.key == "data.cache_dir" and words in problem.fix
    (tmp_path / "outputs").mkdir()
    write("x", "outputs/run", minimal=False)  # a file where the run folder would be
    (problem,) = machine_problems(make(), 0)
    assert problem.key == "run.output_dir" and "outputs/run is a file" in problem.fix
    assert machine_problems(make("--run.output_dir=new/deep", "--data.cache_dir=."), 0) == []
    assert not (tmp_path / "new").exists()  # checking makes nothing


def test_folder_without_permission(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make("--run.output_dir=locked")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problems = machine_problems(loaded, 0)
    assert [problem.key for problem in problems] == ["run.output_dir", "data.cache_dir"]
    assert all("cannot be written" in problem.fix for problem in problems)


def test_resume_path(make: Make, write: Write, tmp_path: Path) -> None:
    good = tmp_path / "outputs/old/checkpoints/step-00000010"
    good.mkdir(parents=True)
    step = "outputs/old/checkpoints/step-00000010"
    (problem,) = machine_problems(make(f"--checkpoint.resume={step}"), 0)
    assert "a committed checkpoint" in problem.allowed and "checkpoints/step-N" in problem.fix
    (good / "manifest.json").write_text("{}")
    assert machine_problems(make(f"--checkpoint.resume={step}"), 0) == []
    (problem,) = machine_problems(make("--checkpoint.resume=outputs/old"), 0)
    assert problem.fix == f"did you mean {step}?"
    (problem,) = machine_problems(make(f"--checkpoint.resume={step[:-1]}"), 0)
    assert problem.fix == f"did you mean {step}?"
    (problem,) = machine_problems(make("--checkpoint.resume=run.toml"), 0)
    assert problem.fix == "run.toml is a file"
    (problem,) = machine_problems(make("--checkpoint.resume=atuo"), 0)
    assert '"auto", "never" or the path' in problem.allowed
    assert machine_problems(make("--checkpoint.resume=nowhere", "--checkpoint.enable=false"), 0) == []


def test_weights_to_start_from(make: Make, write: Write, tmp_path: Path) -> None:
    step = tmp_path / "outputs/old/checkpoints/step-00000010"
    step.mkdir(parents=True)
    (tmp_path / "llama").mkdir()
    for path, words in (
        ("outputs/old", "no checkpoints/step-N with a manifest.json"),
        ("outputs/od", "did you mean outputs/old?"),
        ("run.toml", "run.toml is a file: give its folder"),
        ("llama", "no config.json"),
    ):
        (problem,) = machine_problems(make(f"--checkpoint.init_from={path}"), 0)
        assert problem.key == "checkpoint.init_from" and words in problem.fix
        assert problem.allowed.startswith("a step folder, a run folder with a checkpoint, or the folder of a Hugging")
    (step / "manifest.json").write_text("{}")
    (tmp_path / "llama/config.json").write_text("{}")
    for path in (str(step), "outputs/old", "outputs/old/checkpoints", "llama"):
        assert machine_problems(make(f"--checkpoint.init_from={path}"), 0) == []

    # What will not be read need not be there.
    missing = "--checkpoint.init_from=nowhere"
    assert machine_problems(make(missing, f"--checkpoint.resume={step}"), 0) == []
    assert machine_problems(make(missing, "--checkpoint.enable=false"), 0)
    own = tmp_path / "outputs/run/checkpoints/step-00000001"
    own.mkdir(parents=True)
    assert machine_problems(make(missing), 0), "not committed"
    aside = own.with_name("step-00000002.superseded-1")
    aside.mkdir()
    (aside / "manifest.json").write_text("{}")
    assert machine_problems(make(missing), 0), "not one to go on from"
    (own / "manifest.json").write_text("{}")
    assert machine_problems(make(missing), 0) == []
    assert machine_problems(make(missing, "--checkpoint.enable=false"), 0), "nothing is resumed"


# --- warnings ---


@pytest.mark.parametrize(
    ("overrides", "world", "words"),
    [
        (["--parallelism.zero_stage=2"], 1, "zero_stage = 2: ignored, one process shards nothing"),
        (
            ["--checkpoint.init_from=a", "--checkpoint.resume=b"],
            1,
            "checkpoint.init_from: ignored while checkpoint.resume is the path",
        ),
        (["--checkpoint.allow_rope_change=true"], 1, "checkpoint.allow_rope_change: ignored without checkpoint.init_"),
        (["--parallelism.zero_stage=2", "--parallelism.dp_replicate=2"], 2, "ignored, whole replicas"),
        (["--training.local_batch_size=5"], 1, "local_batch_size = 5: 4 is used"),
        (["--training.mixed_precision_reduce=bfloat16"], 1, "mixed_precision_reduce: ignored"),
        (["--training.steps=11"], 1, "training.steps = 11 goes past lr_scheduler.total_steps = 10"),
        (["--lr_scheduler.decay_ratio=0.9", "--lr_scheduler.warmup_steps=2"], 1, "asks for 9 steps of decay, but"),
        (["--lr_scheduler.decay_ratio=1e-9", "--lr_scheduler.warmup_steps=10"], 1, "asks for 1 steps of decay, but"),
        (["--lr_scheduler.decay_ratio=0", "--lr_scheduler.decay_type=sqrt"], 1, "lr_scheduler.decay_type: ignored"),
        (
            ["--lr_scheduler.decay_ratio=0", "--lr_scheduler.min_lr_factor=0.2"],
            1,
            "lr_scheduler.min_lr_factor: ignored",
        ),
        (["--model.rope_scaling.low_freq_factor=2"], 1, "model.rope_scaling.low_freq_factor: ignored while"),
        (["--model.moe.top_k=2"], 1, "model.moe.top_k: ignored while model.moe.n_experts is 0"),
        (
            [
                "--model.moe.n_experts=2",
                "--model.moe.top_k=2",
                "--model.moe.expert_dim=8",
                "--model.moe.aux_loss_coeff=1",
            ],
            1,
            "model.moe.aux_loss_coeff: changes nothing, every token goes through all 2 experts",
        ),
        (
            ["--model.moe.n_experts=2", "--model.moe.top_k=1", "--model.moe.expert_dim=8"],
            1,
            "model.moe.route_norm with model.moe.top_k = 1: the weight of the one expert is always 1",
        ),
        (["--checkpoint.enable=false", "--checkpoint.interval=5"], 1, "checkpoint.interval: ignored while"),
        (["--checkpoint.walltime=5"], 1, "checkpoint.walltime: ignored while checkpoint.before_walltime is 0"),
        (["--checkpoint.keep_latest_k=0", "--checkpoint.keep_every=500"], 1, "checkpoint.keep_every: ignored while"),
        (["--checkpoint.keep_every=700"], 1, "only every 3500th step is both saved and kept"),
        (["--validation.freq=5"], 1, "validation.freq: ignored while validation.enable is false"),
        (["--data.document_mask=true", "--training.seq_len=24"], 1, "which 16 does not divide"),
        (["--parallelism.cp_method=allgather"], 2, "cp_method: ignored while parallelism.cp is 1"),
    ],
)
def test_warning(make: Make, overrides: list[str], world: int, words: str) -> None:
    (warning,) = warnings(make(*overrides), world)
    assert words in warning


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["--parallelism.zero_stage=2"], 2),
        (["--parallelism.zero_stage=auto"], 1),
        (["--training.local_batch_size=50"], 1),  # a maximum above the share is no surprise
        (["--training.mixed_precision_reduce=bfloat16"], 2),
        (["--lr_scheduler.warmup_steps=2"], 1),  # decay_ratio 1 means what warmup leaves
        (["--lr_scheduler.decay_ratio=0.8", "--lr_scheduler.warmup_steps=2"], 1),
        (["--lr_scheduler.decay_ratio=0", "--training.steps=11"], 1),  # the peak holds for ever
        (["--lr_scheduler.decay_ratio=0.5", "--lr_scheduler.min_lr_factor=0.2"], 1),
        (["--checkpoint.enable=false"], 1),
        (["--parallelism.cp_method=allgather", "--parallelism.cp=2"], 2),
        (["--parallelism.cp_method=ring"], 1),
        (["--parallelism.dp_shard=3"], 4),  # refused; not the warnings' concern
    ],
)
def test_no_warning(make: Make, overrides: list[str], world: int) -> None:
    assert warnings(make(*overrides), world) == []


def test_a_resolved_config_warns_of_what_its_run_did(make: Make, write: Write) -> None:
    """It gives every key, so that being given says nothing."""
    write(dump(make("--lr_scheduler.decay_ratio=0").config), "resolved.toml", minimal=False)
    assert warnings(load("resolved.toml"), 1) == []


def test_section_switched_off_on_the_command_line_is_no_mistake(write: Write) -> None:
    write("[validation]\nenable = true\nfreq = 5\n")
    assert warnings(load("run.toml", ["--validation.enable=false"]), 1) == []
    write("[validation]\nenable = false\nfreq = 5\n")
    assert "validation.freq: ignored" in warnings(load("run.toml"), 1)[0]


def test_embedded_text_in_a_large_model_is_said_loudly() -> None:
    (warning,) = warnings(load("llama_8b"), 8)
    assert warning.startswith("THIS RUN DOES NOT TRAIN ON REAL DATA")
    assert "tokenizer.path = " in warning and "data.sources = " in warning
    tokenizer, source = "--tokenizer.path=a.model", "--data.sources=[{path='texts'}]"
    (warning,) = warnings(load("llama_8b", [tokenizer]), 8)
    assert "data.sources = " in warning and "tokenizer.path = " not in warning
    (warning,) = warnings(load("llama_8b", [source]), 8)
    assert "tokenizer.path = " in warning and "data.sources = " not in warning and "REAL DATA" not in warning
    assert warnings(load("llama_8b", [tokenizer, source]), 8) == []
    assert warnings(load("llama_debug"), 2) == []
