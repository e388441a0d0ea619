"""What counts as the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanlite.config.problems import InputError
from titanlite.config.schema import Config
from titanlite.identity import check_ranks_agree, check_same_run

SECTIONS: dict[str, Any] = {
    "model": {"vocab_size": 64, "dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 16},
    "training": {"seq_len": 8, "global_batch_size": 4, "steps": 10},
    "lr_scheduler": {"total_steps": 10},
}


def config(**changes: dict[str, Any]) -> Config:
    return Config.model_validate({name: SECTIONS.get(name, {}) | changes.get(name, {}) for name in SECTIONS | changes})


def manifest(saved: Config, data: str = "d1") -> dict[str, Any]:
    return {"config": saved.model_dump(mode="json"), "train_state": {"data_fingerprint": data}}


def test_what_may_change_is_told() -> None:
    now = config(training={"steps": 20}, optimizer={"lr": 1e-3})
    told = check_same_run(manifest(config()), Path("c"), config=now, data="d1")
    assert told == ["optimizer.lr was 0.0003, is now 0.001", "training.steps was 10, is now 20"]


@pytest.mark.parametrize(
    ("changes", "data", "key"),
    [
        ({"model": {"dim": 16}}, "d1", "model.dim"),
        ({"run": {"seed": 1}}, "d2", "run.seed"),
        ({"training": {"seq_len": 4}}, "d2", "training.seq_len"),
        ({}, "d2", "data"),
    ],
)
def test_another_run_is_refused(changes: dict[str, Any], data: str, key: str) -> None:
    with pytest.raises(InputError) as caught:
        check_same_run(manifest(config()), Path("c"), config=config(**changes), data=data)
    (problem,) = caught.value.problems
    assert problem.key == key and "as in the checkpoint" in problem.allowed and problem.where == "c"


def test_a_key_that_has_come_since_had_its_default() -> None:
    old = manifest(config())
    del old["config"]["model"]["qk_norm"]
    assert check_same_run(old, Path("c"), config=config(), data="d1") == []
    with pytest.raises(InputError, match=r"model\.qk_norm"):
        check_same_run(old, Path("c"), config=config(model={"qk_norm": True}), data="d1")


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
    assert not {"run.output_dir", "data.cache_dir", "data.sources", "tokenizer.path"} & ranks.seen.keys()
