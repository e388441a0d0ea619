"""What the launcher says before it starts anything."""

import time

import pytest

from titanlite.config.load import load
from titanlite.config.problems import Problem
from titanlite.launch import check_walltime, large_for_a_cpu, process_count
from titanlite.lifeline import JOB_END_TIME, START_TIME, job_end
from titanlite.machine import Nodes


def test_processes_on_a_cpu_are_as_many_as_the_degrees_need() -> None:
    one = Nodes()
    for degrees, count in (([], 2), (["pp=2", "ep=2"], 4), (["tp=3"], 3), (["tp=4", "pp=4"], 8), (["dp_shard=3"], 3)):
        loaded = load("llama_debug_moe", [f"--parallelism.{degree}" for degree in degrees])
        assert process_count(loaded, one, 0, []) == count
    assert process_count(load("llama_debug_moe", ["--parallelism.pp=2"]), one, 3, []) == 3


def test_a_large_model_on_a_cpu_is_warned_about() -> None:
    (warning,) = large_for_a_cpu(load("llama_1b"), 2, gpus=0)
    assert "NO GPU WAS FOUND" in warning and "at least 20 GB" in warning
    replicated = load("llama_1b", ["--parallelism.dp_replicate", "2", "--parallelism.dp_shard", "1"])
    assert "at least 40 GB" in large_for_a_cpu(replicated, 2, gpus=0)[0]
    assert large_for_a_cpu(load("llama_1b"), 2, gpus=2) == []
    assert large_for_a_cpu(load("llama_debug"), 2, gpus=0) == []


@pytest.mark.parametrize(
    ("options", "gpus", "nodes", "processes"),
    [
        ([], 0, 1, 2),
        ([], 3, 1, 3),
        (["--parallelism.tp", "2", "--parallelism.pp", "2"], 0, 1, 4),
        (["--parallelism.tp", "2", "--parallelism.pp", "2"], 0, 2, 2),
        (["--parallelism.cp", "3"], 0, 1, 3),
        (["--parallelism.cp", "3"], 0, 2, 3),
        (["--parallelism.dp_replicate", "2"], 0, 4, 2),
        (["--parallelism.tp", "2", "--parallelism.pp", "2"], 8, 1, 8),
        (["--parallelism.cp", "2", "--parallelism.dp_shard", "2"], 0, 1, 4),
    ],
)
def test_processes_when_nobody_says_how_many(options: list[str], gpus: int, nodes: int, processes: int) -> None:
    found = process_count(load("llama_debug", options), Nodes(count=nodes), gpus, [])
    assert found == processes


def test_the_end_of_the_job() -> None:
    slurm, started = {JOB_END_TIME: "1700000000"}, {START_TIME: "1600000000.5"}
    assert job_end(slurm | started, 60) == 1700000000
    assert job_end({JOB_END_TIME: "0"} | started, 60) == job_end({JOB_END_TIME: "soon"} | started, 60) == 1600000060.5
    assert job_end({}, 60) == pytest.approx(time.time() + 60, abs=5)
    assert job_end(started, 0) is None


@pytest.mark.parametrize(
    ("options", "ends_in", "warned", "refused"),
    [
        (["--checkpoint.before_walltime", "300"], 500, False, False),
        (["--checkpoint.before_walltime", "300"], 200, False, True),
        (["--checkpoint.before_walltime", "300"], None, True, False),
        (["--checkpoint.before_walltime", "300", "--checkpoint.walltime", "400"], None, False, False),
        (["--checkpoint.before_walltime", "300", "--checkpoint.walltime", "300"], None, False, True),
        (["--checkpoint.before_walltime", "300", "--checkpoint.walltime", "400"], 500, True, False),
        (["--checkpoint.before_walltime", "300", "--checkpoint.enable=false"], 200, False, False),
        ([], 200, False, False),
    ],
)
def test_saving_before_the_end_of_the_job(options: list[str], ends_in: int | None, warned: bool, refused: bool) -> None:
    environ = {START_TIME: str(time.time())} | ({JOB_END_TIME: str(int(time.time()) + ends_in)} if ends_in else {})
    problems: list[Problem] = []
    warnings = check_walltime(load("llama_debug", options), environ, problems)
    assert [("walltime" in text) for text in warnings] == [True] * warned
    assert [(problem.key, problem.got) for problem in problems] == [("checkpoint.before_walltime", "300")] * refused
