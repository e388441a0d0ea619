"""scripts/setup.sh: finding or making the Python environment. A fake interpreter stands in for the downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import LAUNCH, ROOT, run

SCRIPTS = ["run_train.sh", "scripts/setup.sh", "scripts/test.sh", ".ci/run"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_syntax_and_mode(script: str) -> None:
    assert subprocess.run(["bash", "-n", script], cwd=ROOT, check=False).returncode == 0
    assert os.access(ROOT / script, os.X_OK)


def test_constraints_pin_every_requirement() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    assert not any("+" in version for version in pins.values())
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from check_env import release, requirements
    finally:
        sys.path.pop(0)
    names = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for name, lowest in requirements("") + requirements("test"):
        assert release(names[name.lower()]) >= release(lowest), name


class Checkout:
    """A copy of what set-up needs, and a PATH whose Python is fake."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repo"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("run_train.sh", "scripts/setup.sh", "scripts/check_env.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("python3.13", "python3.12", "python3.11", "python3", "python"):
            shutil.copy(ROOT / "tests/cli/fake_python.sh", self.bin / name)
            (self.bin / name).chmod(0o755)
        self.log_file = folder / "log"
        self.log_file.touch()
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "FAKE_LOG": str(self.log_file),
            "TITANLITE_LOCK_STALE": "3",
        }
        self.venv = self.root / ".venv"

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts/setup.sh"), *arguments],
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def setup(self, *arguments: str, code: int = 0, **env: Any) -> tuple[str, str]:
        process = self.start(*arguments, **env)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        return stdout, stderr

    def log(self) -> list[str]:
        return self.log_file.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_made_once(checkout: Checkout) -> None:
    python = f"{checkout.venv}/bin/python\n"
    assert checkout.setup()[0] == python
    log = checkout.log()
    assert log[0] == f"venv {checkout.venv}" and len(log) == 2
    assert f"-c {checkout.root}/constraints.txt --editable {checkout.root}" in log[1]
    started = time.monotonic()
    assert checkout.setup() == (python, "")
    assert time.monotonic() - started < 5
    assert checkout.log() == log, "nothing was installed again"
    assert not (checkout.root / ".setup-lock").exists()


def test_extras_are_added(checkout: Checkout) -> None:
    checkout.setup()
    checkout.setup("--test")
    assert checkout.log()[-1].endswith("[test]") and len(checkout.log()) == 3
    checkout.setup("--test")
    checkout.setup()
    assert len(checkout.log()) == 3


def test_new_pins_are_installed(checkout: Checkout) -> None:
    checkout.setup()
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    checkout.setup()
    assert [line.split()[0] for line in checkout.log()] == ["venv", "pip", "pip"]


def test_half_made_is_made_anew(checkout: Checkout) -> None:
    _, stderr = checkout.setup(code=1, FAKE_PIP_FAILS="1")
    assert "run this again" in stderr
    _, stderr = checkout.setup()
    assert "making it anew" in stderr
    assert [line.split()[0] for line in checkout.log()] == ["venv", "pip", "venv", "pip"]


def test_killed_in_the_middle(checkout: Checkout) -> None:
    first = checkout.start(FAKE_PIP_SECONDS="5")
    while len(checkout.log()) < 2:
        time.sleep(0.05)
    first.kill()
    _, stderr = checkout.setup()
    assert "died; taking over" in stderr and "making it anew" in stderr
    assert [line.split()[0] for line in checkout.log()] == ["venv", "pip", "venv", "pip"]
    first.wait()


def test_one_at_a_time(checkout: Checkout) -> None:
    several = [checkout.start(FAKE_PIP_SECONDS="2") for _ in range(4)]
    outputs = [process.communicate(timeout=60) for process in several]
    assert [process.returncode for process in several] == [0] * 4, outputs
    assert {stdout for stdout, _ in outputs} == {f"{checkout.venv}/bin/python\n"}
    assert len(checkout.log()) == 2
    assert sum("waiting" in stderr for _, stderr in outputs) == 3
    assert not list(checkout.root.glob(".setup-lock*"))


@pytest.mark.parametrize("owner", ["elsewhere 1", ""])
def test_lock_of_a_dead_node(checkout: Checkout, owner: str) -> None:
    lock = checkout.root / ".setup-lock"
    lock.mkdir()
    if owner:
        (lock / "owner").write_text(owner + "\n")
    _, stderr = checkout.setup()
    assert "died; taking over" in stderr
    assert len(checkout.log()) == 2


def test_lock_of_a_living_node_is_respected(checkout: Checkout) -> None:
    lock = checkout.root / ".setup-lock"
    lock.mkdir()
    (lock / "owner").write_text("elsewhere 1\n")
    waiting = checkout.start()
    for beat in range(7):
        (lock / "beat").write_text(str(beat))
        time.sleep(1)
    assert waiting.poll() is None and checkout.log() == []
    shutil.rmtree(lock)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and len(checkout.log()) == 2


def test_moved_checkout_is_made_anew(checkout: Checkout) -> None:
    checkout.setup()
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)
    checkout.root, checkout.venv = moved, moved / ".venv"
    assert checkout.setup()[0] == f"{checkout.venv}/bin/python\n"
    assert [line.split()[0] for line in checkout.log()] == ["venv", "pip", "venv", "pip"]


def test_a_persons_folder_is_not_deleted(checkout: Checkout, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").touch()
    _, stderr = checkout.setup(code=1, TITANLITE_VENV=str(folder))
    assert "not a virtual environment" in stderr
    assert (folder / "thesis.txt").exists()


def test_own_venv_variable(checkout: Checkout, tmp_path: Path) -> None:
    active: dict[str, Any] = {"VIRTUAL_ENV": sys.prefix, "TITANLITE_VENV": str(tmp_path / "own")}
    assert checkout.setup(**active)[0] == f"{tmp_path}/own/bin/python\n"
    assert not checkout.venv.exists()


def test_cpu_build_from_its_index(checkout: Checkout) -> None:
    checkout.setup(FAKE_NO_CPU_INDEX="0")
    _, torch, rest = checkout.log()
    assert torch.endswith("--index-url https://download.pytorch.org/whl/cpu --no-deps torch==2.13.0")
    assert "--index-url" not in rest


def test_a_gpu_replaces_the_cpu_build(checkout: Checkout) -> None:
    smi = checkout.bin / "nvidia-smi"
    checkout.setup()
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-aa)'\n")
    smi.chmod(0o755)
    checkout.setup(FAKE_TORCH="2.13.0+cu130", FAKE_NO_CPU_INDEX="0")
    assert [line.split()[0] for line in checkout.log()] == ["venv", "pip", "uninstall", "pip"]
    assert not any("--index-url" in line for line in checkout.log())
    checkout.setup()
    smi.unlink()
    checkout.setup()
    assert len(checkout.log()) == 4, "a CUDA build serves a node without a GPU too"


def test_no_python(checkout: Checkout) -> None:
    _, stderr = checkout.setup(code=1, FAKE_TOO_OLD="1", PATH=f"{checkout.bin}:{_without_python(checkout)}")
    assert "no Python 3.11 or newer" in stderr
    assert not checkout.venv.exists() and not (checkout.root / ".setup-lock").exists()


def test_no_venv_module(checkout: Checkout) -> None:
    _, stderr = checkout.setup(code=1, FAKE_NO_VENV="1", PATH=f"{checkout.bin}:{_without_python(checkout)}")
    assert "venv module is missing" in stderr and "python3-venv" in stderr


def _without_python(checkout: Checkout) -> Path:
    """A folder with the system's tools but no Python."""
    tools = checkout.bin.with_name("tools")
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for name in "bash sh cat cksum cp date dirname grep kill ls mkdir mv rm sed sleep touch uname".split():  # noqa: SIM905
            if (Path(folder) / name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(folder) / name)
    return tools


def test_setup_only(checkout: Checkout) -> None:
    done = subprocess.run(
        [checkout.root / "run_train.sh", "--setup-only"], env=checkout.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert checkout.log() and done.stdout == "launch: --setup-only\n", "the launcher stops there, see the next test"


def test_launcher_with_setup_only_does_nothing(tmp_path: Path) -> None:
    done = run(LAUNCH, "--setup-only", "--config", "nowhere.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{sys.executable}\n", "")


def test_find_makes_nothing(checkout: Checkout) -> None:
    stdout, stderr = checkout.setup("--find", code=1)
    assert stdout == "" and "no torch" in stderr and "--setup-only" in stderr
    assert checkout.log() == [] and not checkout.venv.exists()
    checkout.setup()
    assert checkout.setup("--find") == (f"{checkout.venv}/bin/python\n", "")
    assert len(checkout.log()) == 2
    (checkout.venv / ".titanlite-setup").unlink()
    assert "is not set up" in checkout.setup("--find", code=1)[1]
    assert len(checkout.log()) == 2 and checkout.venv.exists()


def test_gpu_check_downloads_nothing(checkout: Checkout) -> None:
    shutil.copy(ROOT / "scripts/gpu_check.sh", checkout.root / "scripts/gpu_check.sh")
    done = subprocess.run(
        ["bash", checkout.root / "scripts/gpu_check.sh", "--cpu"],
        env=checkout.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "no usable environment" in done.stderr and "no torch" in done.stderr
    assert done.stdout == "" and checkout.log() == []


# --- an active environment ---


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="not run from a virtual environment")
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX", "PATH"])
def test_usable_active_environment(checkout: Checkout, variable: str) -> None:
    value = sys.prefix if variable != "PATH" else f"{sys.prefix}/bin:/usr/bin:/bin"
    active: dict[str, Any] = {variable: value}
    for _ in range(2):  # the second call finds that torch was imported before
        stdout, stderr = checkout.setup("--test", **active)
        assert Path(stdout.strip()).parent == Path(sys.prefix, "bin"), stderr
    assert not checkout.venv.exists()
    assert checkout.log() == []


def test_unusable_active_environment(checkout: Checkout, tmp_path: Path) -> None:
    stdout, stderr = checkout.setup(VIRTUAL_ENV=str(tmp_path / "gone"))
    assert stdout == f"{checkout.venv}/bin/python\n"
    assert "no working Python 3.11+" in stderr
    (tmp_path / "poor/bin").mkdir(parents=True)
    shutil.copy(checkout.bin / "python", tmp_path / "poor/bin/python")
    _, stderr = checkout.setup(VIRTUAL_ENV=str(tmp_path / "poor"))
    assert "is not used (no torch)" in stderr
