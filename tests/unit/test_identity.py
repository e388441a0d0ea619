"""What counts as the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.config.problems import InputError
from titanlite.config.schema import Config
from titanlite.data.phase import RunData, SourceState
from titanlite.identity import check_ranks_agree, check_same_run, check_train_state

SECTIONS: dict[str, Any] = {
    "model": {"vocab_size": 64, "dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 16},
    "training": {"seq_len": 8, "global_batch_size": 4, "steps": 10},
    "lr_scheduler": {"total_steps": 10},
}


def config(**changes: dict[str, Any]) -> Config:
    return Config.model_validate({name: SECTIONS.get(name, {}) | changes.get(name, {}) for name in SECTIONS | changes})


def data(source: str = "d1", *, tokenizer: str = "t1") -> RunData:
    return RunData(0, (SourceState("text", source, 100, 1024, 0, 0),), (), tokenizer, 8, 0)


def manifest(saved: Config, of: RunData | None = None) -> dict[str, Any]:
    of = of or data()
    state = {"data_fingerprint": of.fingerprint, "data": of.record()}
    versions = {"torch": str(torch.__version__)}
    return {"config": saved.model_dump(mode="json"), "train_state": state, "versions": versions}


def older(saved: Config) -> dict[str, Any]:
    """Of a titanlite whose runs could not change their data."""
    old = manifest(saved)
    del old["train_state"]["data"]
    return old


ALLOWED: dict[str, Any] = {"data": {"allow_change": True}}


def with_data(changes: dict[str, Any], **keys: Any) -> Config:
    return config(**{**changes, "data": {**changes.get("data", {}), **keys}})


def test_what_may_change_is_told() -> None:
    now = config(training={"steps": 20}, optimizer={"lr": 1e-3})
    told = check_same_run(manifest(config()), Path("c"), config=now, data=data())
    assert told == ["optimizer.lr was 0.0003, is now 0.001", "training.steps was 10, is now 20"]
    padded = config(model={"vocab_pad_multiple": 7})
    told = check_same_run(manifest(config()), Path("c"), config=padded, data=data())
    assert told == ["model.vocab_pad_multiple was 128, is now 7"]
    older_torch = {**manifest(config()), "versions": {"torch": "2.10.0"}}
    (line,) = check_same_run(older_torch, Path("c"), config=config(), data=data())
    assert line.startswith(f"torch was 2.10.0, is now {torch.__version__}")


@pytest.mark.parametrize("allow_change", [False, True])
@pytest.mark.parametrize(
    ("changes", "now", "key", "got", "allowed"),
    [
        ({"model": {"dim": 16}}, data(), "model.dim", "16", "8"),
        ({"run": {"seed": 1}}, data("d2"), "run.seed", "1", "42"),
        ({"training": {"seq_len": 4}}, data("d2"), "training.seq_len", "4", "8"),
        ({"tokenizer": {"path": "x"}}, data("d2", tokenizer="t2"), "tokenizer.path", "'x' (sha256 t2…)",
         "'embedded' (sha256 t1…)"),
    ],
)  # fmt: skip
def test_another_run_is_refused(
    changes: dict[str, Any], now: RunData, key: str, got: str, allowed: str, allow_change: bool
) -> None:
    with pytest.raises(InputError) as caught:
        changed = with_data(changes, allow_change=allow_change)
        check_same_run(manifest(config()), Path("c"), config=changed, data=now)
    (problem,) = caught.value.problems
    assert problem.key == key and problem.got == got and problem.where == "c"
    assert problem.allowed == f"{allowed}, as in the checkpoint"


@pytest.mark.parametrize(
    ("changes", "now", "key"),
    [
        ({}, data("d2"), "data"),
        ({"data": {"sources": [{"path": "b"}], "num_workers": 2, "epochs": 1}}, data("d2"), "data.sources"),
        ({"data": {"document_mask": True}}, data(), "data.document_mask"),
        ({"tokenizer": {"add_bos": True}}, data(), "tokenizer.add_bos"),
        ({"tokenizer": {"add_eos": False}}, data("d2"), "tokenizer.add_eos"),
        ({"tokenizer": {"eos_token": "</s>"}}, data(), "tokenizer.eos_token"),
    ],
)
def test_other_data_is_refused_unless_allowed(changes: dict[str, Any], now: RunData, key: str) -> None:
    with pytest.raises(InputError) as caught:
        check_same_run(manifest(config()), Path("c"), config=config(**changes), data=now)
    (problem,) = caught.value.problems
    assert problem.key == key and "as in the checkpoint" in problem.allowed
    assert "set it back" in problem.fix and "--data.allow_change true" in problem.fix
    allowed = with_data(changes, allow_change=True)
    told = check_same_run(manifest(config()), Path("c"), config=allowed, data=now)
    assert not [line for line in told if line.startswith(("data.allow_change", "data.sources"))], "told by phase.py"
    if key not in ("data", "data.sources"):
        assert any(line.startswith(f"{key} was ") for line in told)


def test_another_batch_is_refused_unless_allowed() -> None:
    for also in ({}, ALLOWED):
        with pytest.raises(InputError) as caught:
            check_same_run(
                manifest(config()), Path("c"), config=config(training={"global_batch_size": 6}, **also), data=data()
            )
        (problem,) = caught.value.problems
        assert problem.key == "training.global_batch_size" and problem.got == "6"
        assert problem.allowed == "4, as in the checkpoint" and "--training.allow_batch_change true" in problem.fix
    allowed = config(training={"global_batch_size": 6, "allow_batch_change": True})
    told = check_same_run(manifest(config()), Path("c"), config=allowed, data=data())
    assert told == ["training.global_batch_size was 4, is now 6"]


def test_the_same_data_under_allow_change_says_nothing_and_a_moved_path_is_told() -> None:
    assert check_same_run(manifest(config()), Path("c"), config=config(**ALLOWED), data=data()) == []
    moved = with_data(ALLOWED, sources=[{"path": "moved"}])
    (told,) = check_same_run(manifest(config()), Path("c"), config=moved, data=data())
    assert told.startswith("data.sources was ") and "moved" in told


def test_an_older_checkpoint_goes_on_with_the_same_data_only() -> None:
    for changes in ({}, ALLOWED):
        assert check_same_run(older(config()), Path("c"), config=config(**changes), data=data()) == []
        with pytest.raises(InputError) as caught:
            check_same_run(older(config()), Path("c"), config=config(**changes), data=data("d2"))
        (problem,) = caught.value.problems
        assert ("how far each source was read" in problem.allowed) is bool(changes)
        assert ("allow_change" in problem.fix) is False


def test_a_key_that_has_come_since_had_its_default() -> None:
    old = manifest(config())
    del old["config"]["model"]["qk_norm"]
    assert check_same_run(old, Path("c"), config=config(), data=data()) == []
    with pytest.raises(InputError, match=r"model\.qk_norm"):
        check_same_run(old, Path("c"), config=config(model={"qk_norm": True}), data=data())


class World:
    """Ranks whose gather returns what the test says the others hold."""

    def __init__(self, change: dict[str, Any]) -> None:
        self.change = change

    def all_gather_object(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        self.seen = mine
        return [mine, mine | self.change]


@pytest.mark.parametrize(
    "change", [{"optimizer.lr": 1.0}, {"data fingerprint": "d2"}, {"torch": "9"}, {"model.new_key": 1}]
)
def test_ranks_that_differ_are_refused(change: dict[str, Any]) -> None:
    ranks: Any = World(change)
    with pytest.raises(InputError) as caught:
        check_ranks_agree(config(), "d1", ranks)
    (problem,) = caught.value.problems
    assert problem.key in change and "rank 1" in problem.got and "rank 0" in problem.allowed


def test_places_are_not_compared() -> None:
    ranks: Any = World({})
    check_ranks_agree(config(), "d1", ranks)
    assert "optimizer.lr" in ranks.seen and "run.name" in ranks.seen
    places = {"run.output_dir", "data.cache_dir", "data.sources", "tokenizer.path", "checkpoint.init_from"}
    assert not places & ranks.seen.keys()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"samples": "24"}, "train_state.samples: got '24'"),
        ({"tokens": -1}, "train_state.tokens: got -1"),
        ({"step": 2}, "train_state.step: got 2"),
        ({"data_fingerprint": None}, "train_state.data_fingerprint: got None"),
        ({"data": {"start": 0}}, "train_state.data: got"),
        ({"init_from": 1}, "train_state.init_from: got 1"),
        ({"max_position_embeddings": "8"}, "train_state.max_position_embeddings: got '8'"),
        ({"weights_only": True}, "checkpoint.resume: got c, weights only"),
    ],
)
def test_a_train_state_that_makes_no_sense_is_one_problem(change: Any, named: str) -> None:
    """With checksums damage is found before; this is for a manifest that has none, or that was made by hand."""
    state: dict[str, Any] = {"step": 1, "samples": 24, "tokens": 9, "resumed_from": "", "data_fingerprint": "f"}
    check_train_state({"step": 1, "train_state": state}, Path("c"))  # before runs had several phases
    state["data"] = data().record()
    check_train_state({"step": 1, "train_state": state}, Path("c"))
    with pytest.raises(InputError) as error:
        check_train_state({"step": 1, "train_state": state | change}, Path("c"))
    assert named in str(error.value) and len(error.value.problems) == 1
