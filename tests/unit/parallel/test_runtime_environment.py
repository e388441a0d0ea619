"""What runtime reads from the environment, and what it says when that is wrong."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from titanlite.config.problems import InputError
from titanlite.config.schema import RunConfig
from titanlite.parallel import runtime

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}


@pytest.fixture
def environment(monkeypatch):
    def set_to(values):
        for name in (*GOOD, "TITANLITE_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_torchrun_environment(environment):
    environment(GOOD)
    assert runtime.read_environment() == (1, 2)


def test_none_is_a_world_of_one(environment):
    environment({})
    assert runtime.read_environment() is None


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_missing_variable_is_named(environment, name):
    environment({key: value for key, value in GOOD.items() if key != name})
    with pytest.raises(InputError, match=f"{name}: got nothing"):
        runtime.read_environment()


@pytest.mark.parametrize(("name", "value"), [("RANK", "-1"), ("WORLD_SIZE", "two"), ("MASTER_PORT", ""), ("RANK", "2")])
def test_a_wrong_variable_is_named(environment, name, value):
    environment({**GOOD, name: value})
    with pytest.raises(InputError, match=f"{name}: got '?{value}'?; allowed"):
        runtime.read_environment()


def test_all_problems_at_once(environment):
    environment({"RANK": "x"})
    with pytest.raises(InputError) as caught:
        runtime.read_environment()
    assert len(caught.value.problems) == 5


def test_a_restart_finds_nothing_of_the_attempt_before_it_in_the_same_store(environment, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment({**GOOD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)})
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = []
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        store = runtime.environment_store(timedelta(seconds=10))
        found.append(store.check(["address of rank 0"]))
        store.set("address of rank 0", "here")
        found.append(store.check(["address of rank 0"]))
    assert found == [False, True, False, True]


def test_expected_world(environment):
    environment({})
    runtime.check_world_size(2)
    environment({"TITANLITE_WORLD_SIZE": "2"})
    runtime.check_world_size(2)
    environment({"TITANLITE_WORLD_SIZE": "4"})
    with pytest.raises(InputError, match="got 2 processes met; allowed: 4"):
        runtime.check_world_size(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_wanted_gpu_that_is_not_there(environment):
    environment({})
    with pytest.raises(InputError, match=r"run\.device"):
        runtime.connect(None, RunConfig(device="cuda"))  # type: ignore[arg-type]


def test_stop_gives_up_on_a_teardown_that_hangs(monkeypatch):
    """As NCCL's does when a peer has died."""
    begun, forever = threading.Event(), threading.Event()

    def hang():
        begun.set()
        forever.wait(20)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", hang)
    start = time.monotonic()
    runtime.stop(timeout=0.2)
    forever.set()
    assert begun.is_set()
    assert time.monotonic() - start < 5


def test_stop_without_a_world():
    runtime.stop()
