"""Faults of runs: what scripts/fault_campaign.py does to a launcher and its workers.

A run trains until a random instant, something is done to it, and it is started again, until all has been done. Its
losses, bitwise, must be those of a run that nothing has happened to.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts import checkpoint_faults
from scripts.checkpoint_faults import WORLD, Damage, Outcome, is_intact, mount
from scripts.draw_layouts import descendants
from tests.cli.processes import LAUNCH, ROOT, environment
from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from tests.parity.harness import data_section, make_text
from tests.parity.layouts import BASE
from titanlite.checkpoint import storage
from titanlite.config.load import dump
from titanlite.config.problems import EXIT_PREEMPTED
from titanlite.config.schema import Config

INTERVAL = 3  # steps between saves: a save takes as long as one or two of them
MOST_STEPS = 10  # that a start does before it is broken
SECONDS = 240.0  # for anything to happen that must
CURVE = ("step", "loss", "grad_norm", "lr", "samples", "tokens")


def write_config(work: Path) -> Path:
    text = work / "text"
    if not text.exists():
        make_text(text)
    sections = merge(
        BASE,
        {
            "tokenizer": {"path": str(text / "tokenizer.model")},
            "data": data_section(text),
            "training": {"local_batch_size": 12},
            "lr_scheduler": {"total_steps": 500},
            "checkpoint": {"enable": True, "interval": INTERVAL},
            "validation": {"enable": False},
        },
    )
    path = work / "campaign.toml"
    path.write_text(dump(Config.model_validate(sections)))
    return path


class Run:
    """A run folder, and the launcher that works in it now."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.checkpoints = folder / "checkpoints"
        self.options = ("--run.output_dir", str(folder.parent), "--run.name", folder.name)
        self.log = Path()
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def popen(self, output: IO[bytes], steps: int | None = None, *options: str) -> subprocess.Popen[bytes]:
        steps = steps or 99_999
        return subprocess.Popen(
            [*LAUNCH, "--config", str(self.config), *self.options, "--training.steps", str(steps), *options],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def start(self, steps: int | None = None, *options: str) -> None:
        self.started = time.time()
        # Not the log before: orphans of a killed launcher may still be writing into that.
        self.log = self.config.with_name(f"{self.folder.name}-{self.started:.6f}.log")
        with self.log.open("wb") as output:
            self.process = self.popen(output, steps, *options)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def curve(self) -> list[tuple[Any, ...]]:
        rows = []
        with suppress(FileNotFoundError):
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):  # half a line, of a process that was killed
                    row = json.loads(line)
                    rows.append(tuple(row[key] for key in CURVE))
        return rows

    @property
    def step(self) -> int:
        """Of the last row; only the end of the file is read, since others want the processor."""
        with suppress(FileNotFoundError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            found = re.findall(rb'^{"step": (\d+), .*}$', file.read(), re.MULTILINE)
            return int(found[-1]) if found else 0
        return 0

    def committed(self) -> set[int]:
        """Steps of the checkpoints that are on the disk, or were said to be."""
        folders = storage.committed_folders(self.checkpoints) if self.checkpoints.is_dir() else []
        found = {storage.step_of(folder) or 0 for folder in folders}
        return found | {int(step) for step in re.findall(r"saved checkpoint step-(\d+)", self.said())}

    def is_saving(self) -> bool:
        """Whether the newest checkpoint was begun since this start, and is not committed."""
        found = [path for path in self.checkpoints.glob("step-*") if storage.step_of(path) is not None]
        with suppress(FileNotFoundError):
            return bool(found) and max(found).stat().st_mtime > self.started and not is_committed(max(found))
        return False

    def wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        assert self.process is not None
        deadline = time.monotonic() + SECONDS
        while not is_so():
            if self.process.poll() is not None and not is_so():
                raise RuntimeError(f"the run has ended before {what}:\n{self.said()[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen: {what}:\n{self.said()[-3000:]}")
            time.sleep(0.005)

    def resumed_step(self) -> int:
        """Waits for this start's first step; the step that it has resumed from, 0 for none."""
        self.wait_until("its first step", lambda: re.search(r"^step +\d+/", self.said(), re.MULTILINE) is not None)
        found = re.search(r"resumed from \S+: step (\d+)", self.said())
        return int(found[1]) if found else 0

    def rank(self, number: int) -> int:
        """The process of a rank."""
        assert self.process is not None
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"titanlite.train" in command and f"RANK={number}".encode() in _environment(pid):
                    return pid
        raise RuntimeError(f"rank {number} is not running:\n{self.said()[-3000:]}")

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """End the launcher at once; the ranks are about to end themselves."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for pid in descendants(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def is_committed(folder: Path) -> bool:
    return (folder / storage.MANIFEST).exists()


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


# ---- what is done to them


@dataclass
class Strike:
    """What happens to a run at some instant, and how it then ends. `spared`: steps of committed checkpoints that a
    resume may still choose from (it must take the newest)."""

    fault: str
    random: random.Random

    def hit(self, run: Run) -> set[int]:
        """Break the run and wait for its end; the spared steps. Raises AssertionError if it does not end as it must."""
        raise NotImplementedError

    def heal(self, run: Run) -> None:
        """Before it is started again."""

    def check(self, run: Run) -> None:
        """Once it has gone on for a while. Raises AssertionError."""


@dataclass
class Signal(Strike):
    """To "launcher", or to the rank of that number: SIGKILL, or one that asks to save and to end."""

    victim: str = "launcher"
    signum: signal.Signals = signal.SIGKILL

    def hit(self, run: Run) -> set[int]:
        assert run.process is not None
        launcher, kill = self.victim == "launcher", self.signum == signal.SIGKILL
        os.kill(run.process.pid if launcher else run.rank(int(self.victim)), self.signum)
        before = run.committed()  # orphans may commit one more
        code = run.wait()
        expected = EXIT_PREEMPTED if not kill else -self.signum if launcher else 1
        assert code == expected, f"the launcher exited with {code} after {self.signum.name} to {self.victim}"
        assert (kill and launcher) or self.signum.name in run.said(), f"{self.signum.name} was not said"
        assert run.said().count("Traceback") <= 1, run.said()
        return before if kill else {run.step}  # of the last row: it must have been saved


@dataclass
class FullDisk(Strike):
    """No room but for a part of a checkpoint, on the disk that the whole run folder is on. The run survives the first
    save that fails. One that was nearly done may be committed before; the room that its commit makes is taken, too."""

    disk: Path = Path()

    def hit(self, run: Run) -> set[int]:
        newest = storage.committed_folders(run.checkpoints)
        size = sum(path.stat().st_size for path in newest[0].iterdir()) if newest else 1 << 20
        left = max(0, int(self.random.uniform(-0.5, 1) * size))  # none in one of three
        assert run.process is not None
        deadline = time.monotonic() + SECONDS
        while run.process.poll() is None and time.monotonic() < deadline:
            checkpoint_faults.fill(self.disk, left)
            time.sleep(0.05)
        code = run.process.poll()
        assert code == 1, f"the launcher exited with {code}:\n{run.said()[-3000:]}"
        said = re.search(r"^CHECKPOINT NOT SAVED: .*the disk is full", run.said(), re.MULTILINE)
        assert said, f"ended, but not for want of two saves:\n{run.said()[-3000:]}"
        return run.committed()

    def heal(self, run: Run) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)


@dataclass
class ReadOnly(Strike):
    """The folder of checkpoints can only be read from now on."""

    def hit(self, run: Run) -> set[int]:
        assert mount("--bind", str(run.checkpoints), str(run.checkpoints))
        checkpoint_faults.make_read_only(run.checkpoints)
        code = run.wait()
        assert code == 1, f"the launcher exited with {code}"
        assert "Read-only file system" in run.said(), "the reason was not said"
        spared = run.committed()
        run.start()
        code = run.wait()
        refused = code == 2 and re.search("can(not)? be written", run.said())
        assert refused, f"a start there exited with {code}:\n{run.said()[-1000:]}"
        return spared

    def heal(self, run: Run) -> None:
        subprocess.run(["umount", str(run.checkpoints)], check=False)  # a start that finds it read-only will say so


@dataclass
class Damaged(Strike):
    """The run is killed, and then a file of the newest checkpoint is damaged. ask: a run that is told to start from
    that checkpoint must refuse, and leave it as it is."""

    name: str = ""
    how: str = "flip"
    ask: bool = False

    def hit(self, run: Run) -> set[int]:
        run.wait_until("a second checkpoint", lambda: len(storage.committed_folders(run.checkpoints)) > 1)
        pids = descendants(run.process.pid) if run.process else []
        run.kill()
        while any(_is_running(pid) for pid in pids):  # so that none of them commits what would be the newest
            time.sleep(0.05)
        newest, *others = storage.committed_folders(run.checkpoints)
        size = (newest / self.name).stat().st_size
        at = {"flip": self.random.randrange(8 * size), "cut": size // 2, "delete": 0}[self.how]
        Damage(f"{newest.name}/{self.name}", self.how, at).apply(run.checkpoints)
        if self.ask:
            other = Run(run.config, run.folder.with_name(f"other-than-{run.folder.name}"))
            other.start(None, "--checkpoint.resume", str(newest))
            code = other.wait()
            refused = code == 2 and f"{newest}: {self.name}: got" in other.said() and "Traceback" not in other.said()
            assert refused and newest.is_dir(), f"a run that was to start from it exited with {code}:\n{other.said()}"
        return {storage.step_of(folder) or 0 for folder in others}


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Foreign(Strike):
    """Foreign files in the folder of checkpoints, which outlive the saves that follow."""

    names = ("notes.txt", "step-00000000/file", "step-1", "step-00000001.bak/manifest.json", ".step-00000003.swp")

    def hit(self, run: Run) -> set[int]:
        for name in self.names:
            (run.checkpoints / name).parent.mkdir(exist_ok=True)
            (run.checkpoints / name).write_bytes(checkpoint_faults.FOREIGN_BYTES)
        spared = run.committed()
        run.kill()
        return spared

    def check(self, run: Run) -> None:
        for name in self.names:
            assert (run.checkpoints / name).read_bytes() == checkpoint_faults.FOREIGN_BYTES, f"{name} was changed"


@dataclass
class SecondJob(Strike):
    """A second job in the folder: its launcher, a worker alone, or two launchers started at once after a kill."""

    which: str = "launcher"

    def hit(self, run: Run) -> set[int]:
        with tempfile.TemporaryFile() as output:
            if self.which == "at once":
                spared = run.committed()
                run.kill()
                run.start()
                self._must_be_refused(run, run.popen(output), output)
            else:
                second = run.popen(output) if self.which == "launcher" else self._worker(run, output)
                self._must_be_refused(run, second, output)
                step = run.step
                run.wait_until("more steps of the first job", lambda: run.step > step + 1)
                spared = run.committed()
        run.kill()
        return spared

    def _worker(self, run: Run, output: IO[bytes]) -> subprocess.Popen[bytes]:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        command = [sys.executable, "-m", "titanlite.train", str(run.config), *run.options, "--training.steps", "999"]
        return subprocess.Popen(command, cwd=ROOT, env=environment(**alone), stdout=output, stderr=subprocess.STDOUT)

    def _must_be_refused(self, run: Run, second: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        assert run.process is not None
        deadline = time.monotonic() + SECONDS
        while second.poll() is None and run.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if run.process.poll() is not None:  # started at once, the other one was first
            assert self.which == "at once" and run.process.returncode == 2, run.said()
            run.process = second
            return
        output.seek(0)
        text = output.read().decode()
        assert second.poll() == 2 and "a second job" in text, f"it ended with {second.poll()}:\n{text}"


@dataclass
class Trial:
    """A strike, what came of it, and the run's curve until the next one."""

    strike: Strike
    outcome: Outcome
    curve: list[tuple[Any, ...]] = field(default_factory=list)


def break_and_resume(run: Run, strikes: Sequence[Strike]) -> list[Trial]:
    """Each strike at a random instant of one start of the run, which the next start resumes; the last ends the run."""
    trials: list[Trial] = []
    saves = 0
    try:
        _go_on(run, strikes[0])
        for strike, following in zip(strikes, (*strikes[1:], None), strict=True):
            spared, note = _hit(run, strike)
            print(f"{len(trials) + 1} of {len(strikes)}, at step {run.step}: {strike.fault}. {note}", flush=True)
            saves += run.is_saving()
            strike.heal(run)
            try:
                resumed = _go_on(run, following)
            except (AssertionError, RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
                trials.append(
                    Trial(strike, Outcome(lost=True, note=f"{note} it could not go on: {error}"), run.curve())
                )
                break
            newest = max(spared, default=0)
            lost = resumed < newest
            note = note or _failed(strike.check, run) or (f"resumed from step {resumed}, not {newest}" if lost else "")
            trials.append(Trial(strike, Outcome(lost=lost, resumed=not note, note=note), run.curve()))
    finally:
        run.end()
    for folder in storage.committed_folders(run.checkpoints):
        if not is_intact(folder):
            trials[-1].outcome = Outcome(lost=True, note=f"{trials[-1].outcome.note} {folder} is not what was written")
    print(f"{saves} of {len(trials)} struck while a save was written; {run.step} steps", flush=True)
    return trials + [Trial(strike, Outcome(note="not tried")) for strike in strikes[len(trials) :]]


def _go_on(run: Run, strike: Strike | None) -> int:
    """Start the run, and wait for the instant of the strike, or without one for its end; what it has resumed from."""
    run.start(None if strike else run.step + 2 * INTERVAL)
    resumed = run.resumed_step()
    if strike is None:
        assert run.wait() == 0, run.said()
        return resumed
    until = resumed + strike.random.randint(1, MOST_STEPS)
    run.wait_until(f"step {until}", lambda: run.step >= until)
    if strike.random.random() < 0.5:
        run.wait_until("a save", run.is_saving)
    time.sleep(strike.random.uniform(0, 0.1))
    return resumed


def _hit(run: Run, strike: Strike) -> tuple[set[int], str]:
    """The steps that the strike has spared; what was not as it must be."""
    spared = run.committed()
    try:
        return strike.hit(run), ""
    except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        run.end()
        return spared, f"{type(error).__name__}: {error}"


def _failed(work: Callable[[Run], object], run: Run) -> str:
    try:
        work(run)
    except AssertionError as error:
        return str(error)
    return ""


def compared(trial: Trial, expected: Sequence[tuple[Any, ...]]) -> Outcome:
    """With the curve of the unbroken run."""
    outcome, curve = trial.outcome, trial.curve
    wrong = curve != expected[: len(curve)]
    return Outcome(wrong, outcome.lost, outcome.resumed and not wrong, outcome.note)


# ---- what is tried


def of_runs(work: Path, short: bool, chance: random.Random, disk: Path | None) -> list[tuple[str, list[Outcome]]]:
    """disk: a file system of its own, which one of the runs is put on. The runs are broken side by side."""
    config = write_config(work)
    chains = [(Run(config, work / "runs" / "short"), make_strikes(True, chance))]
    if not short:
        strikes = make_strikes(False, chance)
        chains = [(Run(config, work / "runs" / f"run-{part}"), strikes[part::2]) for part in range(2)]
        if disk is not None:
            chains.append((Run(config, disk / "runs" / "run-on-a-disk"), make_strikes_of_disks(disk, chance)))
    with ThreadPoolExecutor(len(chains)) as threads:
        trials = [trial for found in threads.map(lambda chain: break_and_resume(*chain), chains) for trial in found]

    unbroken = Run(config, work / "runs" / "unbroken")
    steps = max(run.step for run, _ in chains)
    options = [*unbroken.options, "--training.steps", str(steps)]
    run_distributed(checkpoint_faults.unbroken, WORLD, config, options, timeout=SECONDS + steps)
    expected = unbroken.curve()
    assert len(expected) == steps
    outcomes: dict[str, list[Outcome]] = {}
    for trial in trials:
        outcomes.setdefault(f"a run: {trial.strike.fault}", []).append(compared(trial, expected))
    return sorted(outcomes.items())


def make_strikes(short: bool, chance: random.Random) -> list[Strike]:
    everyone = ("launcher", "0", "1")
    victims = ["1"] if short else [everyone[-number % 3] for number in range(50)]
    asking = [(victim, signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) for victim in everyone]
    asking = [] if short else [*asking, *asking[::3]]  # the launcher twice; in the tests, test_signals.py does it
    damages = [("__1_0.distcp", "flip")]
    if not short:
        damages += [("__0_0.distcp", "flip"), (".metadata", "flip"), ("manifest.json", "flip")]
        damages += [("__0_0.distcp", "cut"), (".metadata", "cut"), ("manifest.json", "cut")]
        damages += [("__1_0.distcp", "delete"), (".metadata", "delete")]
    seconds = () if short else ("launcher", "worker", "at once")

    def own() -> random.Random:
        return random.Random(chance.random())

    strikes: list[Strike] = [
        *(
            Signal(f"SIGKILL of {'a rank' if victim.isdigit() else 'the launcher'}", own(), victim)
            for victim in victims
        ),
        *(Signal("SIGTERM, SIGINT or SIGUSR1: saved, exit code 75", own(), *one) for one in asking),
        *(
            Damaged("SIGKILL, and the newest checkpoint damaged", own(), name, how, ask=not short and how == "cut")
            for name, how in damages
        ),
        *(Foreign("SIGKILL, and foreign files", own()) for _ in range(0 if short else 2)),
        *(SecondJob("a second job in the run folder: refused", own(), which) for which in seconds),
    ]
    chance.shuffle(strikes)
    return strikes


def _a(victim: str) -> str:
    return "a rank" if victim.isdigit() else "the launcher"


def make_strikes_of_disks(disk: Path, chance: random.Random) -> list[Strike]:
    strikes: list[Strike] = [
        *(FullDisk("the disk of the run folder full", random.Random(chance.random()), disk) for _ in range(5)),
        *(ReadOnly("the folder of checkpoints read-only", random.Random(chance.random())) for _ in range(4)),
    ]
    chance.shuffle(strikes)
    return strikes
