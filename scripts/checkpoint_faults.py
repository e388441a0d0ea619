"""Faults of checkpoints without a run: what scripts/fault_campaign.py does in worlds of two forked processes.

Tensors are known by their step. They are saved, their files are broken, and what is resumed from is compared with them.
of_checkpoints and of_disks say what is tried; a fault comes out with what came of each time.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.distributed import run_distributed
from titanlite.checkpoint import storage
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.storage import CheckpointError
from titanlite.config.load import load
from titanlite.config.problems import InputError
from titanlite.config.schema import CheckpointConfig, CommConfig, ParallelismConfig, RunConfig
from titanlite.model.init import tensors_hash
from titanlite.parallel import runtime
from titanlite.trainer import Trainer

WORLD = 2
SAVED = (1, 2, 3)  # steps of the checkpoints that are broken
FOREIGN_BYTES = b"not a checkpoint's\n"


@dataclass(frozen=True)
class Outcome:
    """What came of one fault.

    wrong:   other tensors were loaded than had been saved, or losses were not those of the unbroken run
    lost:    a committed checkpoint that the fault had not touched was gone, or could not be resumed from
    resumed: from the newest that was left, bitwise
    note:    what else was not as it should be, or why
    """

    wrong: bool = False
    lost: bool = False
    resumed: bool = False
    note: str = ""


@dataclass(frozen=True)
class Damage:
    """Of one file, named by its path in the folder of checkpoints. how: "flip" (bit `at`), "cut" (to `at` bytes; a
    longer one gets zeros), "delete"."""

    name: str
    how: str
    at: int = 0

    def apply(self, checkpoints: Path) -> None:
        path = checkpoints / self.name
        if self.how == "delete":
            path.unlink()
        elif self.how == "cut":
            os.truncate(path, self.at)
        else:
            data = bytearray(path.read_bytes())
            data[self.at // 8] ^= 1 << self.at % 8
            path.write_bytes(data)


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Every element of every step another number."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(61, 67, generator=generator),
        "model.b": torch.randn(33, 65, generator=generator).bfloat16(),
        "model.c": torch.randn(1, generator=generator),
        "optimizer.a.exp_avg": torch.randn(61, 67, generator=generator),
        "optimizer.a.exp_avg_sq": torch.randn(61, 67, generator=generator),
        "model.count": torch.randint(1 << 60, (7,), generator=generator),
    }


def make_manager(folder: Path, **keys: Any) -> CheckpointManager:
    ranks = runtime.start(CommConfig(), RunConfig(device="cpu"), ParallelismConfig())
    return CheckpointManager(CheckpointConfig(**{"keep_latest_k": 0, **keys}), folder, ranks)


def save(manager: CheckpointManager, step: int) -> None:
    parts = {"train_state": {"step": step}, "layout": {}, "config": {}}
    manager.save(step, tensors(step), parts, wait=True)


def resume(manager: CheckpointManager, newest: int) -> Outcome:
    """As a run does it, which must find the checkpoint of step `newest`, or a later one that took no harm."""
    got = {key: torch.zeros_like(tensor) for key, tensor in tensors(0).items()}
    try:
        path = manager.find_resume()
        if path is None:
            return Outcome(lost=True, note="began anew")
        step = manager.load(path, got)["train_state"]["step"]
    except (InputError, CheckpointError) as error:
        return Outcome(lost=True, note=f"refused: {error}")
    right = step == storage.step_of(path) and tensors_hash(got.items()) == tensors_hash(tensors(step).items())
    return Outcome(wrong=not right, lost=step < newest, resumed=right and step >= newest)


def is_intact(folder: Path) -> bool:
    """Whether a checkpoint is committed and every byte of it is what was written."""
    try:
        storage.check_files(folder, storage.records(storage.read_manifest(folder)))
    except (InputError, OSError):
        return False
    return True


def files_below(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


# ---- what is run in the worlds


def save_all(folder: Path) -> None:
    manager = make_manager(folder)
    for step in SAVED:
        save(manager, step)


def unbroken(config: Path, options: Sequence[str]) -> None:
    """The run that the others are compared with."""
    loaded = load(str(config), list(options)).config
    with redirect_stdout(io.StringIO()):
        Trainer(loaded, runtime.start(loaded.comm, loaded.run, loaded.parallelism)).train()


def try_damages(saved: Path, faults: Sequence[Sequence[Damage]], checksums: bool) -> list[Outcome]:
    """Each fault in a copy of `saved`. A fault that spares no checkpoint must be refused, and one that was brought back
    be resumed from."""
    if not checksums:
        look = storage.wrong_with

        def blind(folder: Path, name: str, expected: Any) -> Any:
            return look(folder, name, expected._replace(checksum=None))

        setattr(storage, "wrong_with", blind)  # noqa: B010
    return [_try_damage(saved, damages) for damages in faults]


def _try_damage(saved: Path, damages: Sequence[Damage]) -> Outcome:
    hit = {storage.step_of(Path(damage.name).parent) for damage in damages}
    spared = [step for step in SAVED if step not in hit]

    def prepare(copy: Path) -> None:
        shutil.copytree(saved, copy)
        for damage in damages:
            damage.apply(copy)

    copy = _fresh_copy(saved, prepare)
    files = files_below(copy)
    outcome = resume(make_manager(copy), max(spared, default=0))
    if not spared and not outcome.wrong and outcome.note.startswith("refused"):
        # Until then nothing may have been moved or thrown away.
        unmoved = all((copy / f"step-{step:08d}").is_dir() for step in SAVED)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(copy / "step-00000002")
            shutil.copytree(saved / "step-00000002", copy / "step-00000002")
        outcome = resume(make_manager(copy), 2)
        spared, files = [2], files if unmoved else files + 1
    kept = all(is_intact(storage.step_folder(copy, step)) for step in spared) and files_below(copy) >= files
    return outcome if kept else Outcome(outcome.wrong, True, False, outcome.note or "files are gone")


def _fresh_copy(saved: Path, prepare: Callable[[Path], None]) -> Path:
    """A folder beside `saved`, in the place of the one before, that the main rank makes."""
    copy = saved.with_name("copy")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(copy, ignore_errors=True)
        prepare(copy)
    dist.barrier()
    return copy


FOREIGN = (
    "notes.txt",
    ".step-00000003.swp",
    "lost+found/",
    "step-7/file",
    "step-00000099",
    "step-00000091/model.safetensors",
    "step-00000004/model.safetensors",
    "step-00000003/notes.txt",
    "step-00000003/__0_0.distcp.bak",
    "step-00000003/folder/__0_0.distcp",
    "step-00000001.bak/manifest.json",
    "step-00000001.damaged-1/manifest.json",
    "step-00000090 -> step-00000001.kept",
    # Where a save is going to be: renamed, since training is not to end for it.
    "step-00000005",
    "step-00000006 -> step-00000002.kept",
)


def try_foreign(saved: Path, faults: Sequence[Sequence[str]]) -> list[Outcome]:
    """Foreign files and folders beside and in checkpoints: a run resumes, saves three steps and keeps only one, and is
    resumed; they must all be left."""
    return [_try_foreign(saved, names) for names in faults]


def _try_foreign(saved: Path, names: Sequence[str]) -> Outcome:
    def prepare(copy: Path) -> None:
        shutil.copytree(saved, copy)
        for name in names:
            name, _, target = name.partition(" -> ")
            if target:
                shutil.copytree(saved / target.removesuffix(".kept"), copy / target)
                (copy / target / storage.MANIFEST).unlink()
                (copy / name).symlink_to(target)
            elif name.endswith("/"):
                (copy / name).mkdir()
            else:
                (copy / name).parent.mkdir(exist_ok=True)
                (copy / name).write_bytes(FOREIGN_BYTES)

    def is_left(name: str) -> bool:
        name, _, target = name.partition(" -> ")
        path = next(path for path in (copy / f"{name}.{storage.SUPERSEDED}-1", copy / name) if os.path.lexists(path))
        if target:
            same = saved / target.removesuffix(".kept")
            return path.is_symlink() and files_below(copy / target) == files_below(same) - 1
        return path.is_dir() if name.endswith("/") else path.read_bytes() == FOREIGN_BYTES

    copy = _fresh_copy(saved, prepare)
    manager = make_manager(copy, keep_latest_k=1)
    first = resume(manager, 3)
    for step in (4, 5, 6):
        save(manager, step)
    second = resume(make_manager(copy), 6)
    gone = [name for name in names if not is_left(name)]
    return Outcome(
        first.wrong or second.wrong,
        first.lost or second.lost,
        first.resumed and second.resumed and not gone,
        first.note or second.note or (f"gone: {', '.join(gone)}" if gone else ""),
    )


def fill(folder: Path, left: int) -> Path:
    """Take all room of the file system but `left` bytes, by a file that grows with each call; returns that file."""
    ballast = folder / "ballast"
    with ballast.open("ab") as file:
        state = os.statvfs(folder)
        more = state.f_bavail * state.f_frsize - left
        if more > 0:
            with suppress(OSError):  # another one was faster
                os.posix_fallocate(file.fileno(), file.tell(), more)
    return ballast


def try_full_disk(folder: Path, shares: Sequence[float]) -> list[Outcome]:
    """A save into a file system that has room for a share of it; then there is room again.

    folder: on a file system of its own.
    """
    checkpoints = folder / "checkpoints"
    main = dist.get_rank() == 0
    save(make_manager(checkpoints), newest := 1)
    size = sum(path.stat().st_size for path in storage.step_folder(checkpoints, 1).iterdir())
    outcomes = []
    for step, share in enumerate(shares, start=2):
        manager = make_manager(checkpoints, keep_latest_k=2, async_mode="async" if step % 2 else "disabled")
        if main:
            fill(folder, int(share * size))
        dist.barrier()
        said = _try_to_save(manager, step)
        newest = newest if said else step
        outcome = resume(manager, newest)  # there is no room yet
        dist.barrier()
        if main:
            (folder / "ballast").unlink()
        dist.barrier()
        again = resume(make_manager(checkpoints), newest)
        told = not said or "the disk is full" in said
        outcomes.append(
            Outcome(
                outcome.wrong or again.wrong,
                outcome.lost or again.lost,
                outcome.resumed and again.resumed and told,
                outcome.note or again.note or ("" if told else said),
            )
        )
    return outcomes


def _try_to_save(manager: CheckpointManager, step: int) -> str:
    """What went wrong; "" if it is committed."""
    try:
        save(manager, step)
    except CheckpointError as error:
        return str(error)
    return ""


def mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


def make_read_only(folder: Path, seconds: float = 20) -> None:
    """Of a mount. The system refuses it as long as a file is open for writing, so it is tried until it works."""
    deadline = time.monotonic() + seconds
    while not mount("-o", "remount,bind,ro", str(folder)):  # "bind": only the mount, which user namespaces may, too
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} could not be made read-only")


def try_read_only(folder: Path, delays: Sequence[float]) -> list[Outcome]:
    """A file system that becomes read-only some seconds after a save has begun, and is as before after the next."""
    checkpoints = folder / "checkpoints"
    main = dist.get_rank() == 0
    save(make_manager(checkpoints), newest := 1)
    outcomes = []
    for step, delay in zip(range(2, 2 + 3 * len(delays), 3), delays, strict=True):
        manager = make_manager(checkpoints, keep_latest_k=2)
        strike = threading.Timer(delay, make_read_only, (folder,))
        if main:
            strike.start()
        newest = newest if _try_to_save(manager, step) else step
        if main:
            strike.join()
        dist.barrier()
        said = _try_to_save(manager, step + 1)
        outcome = resume(manager, newest)
        if main:
            assert mount("-o", "remount,bind,rw", str(folder))
        dist.barrier()
        again = resume(make_manager(checkpoints), newest)
        save(manager, newest := step + 2)
        told = "Read-only file system" in said
        outcomes.append(
            Outcome(
                outcome.wrong or again.wrong,
                outcome.lost or again.lost,
                outcome.resumed and again.resumed and told,
                outcome.note or again.note or ("" if told else f"a save that must fail: {said}"),
            )
        )
    return outcomes


# ---- what is tried


def of_checkpoints(
    work: Path, short: bool, chance: random.Random, checksums: bool = True
) -> Iterator[tuple[str, list[Outcome]]]:
    """checksums: False switches them off, and flips of bits are all that is tried."""
    saved = work / "saved"
    run_distributed(save_all, WORLD, saved)
    newest = f"step-{SAVED[-1]:08d}"
    files = {path.name: path.stat().st_size for path in sorted((saved / newest).iterdir())}
    names = list(files)

    def flip(step: int, name: str) -> Damage:
        return Damage(f"step-{step:08d}/{name}", "flip", chance.randrange(8 * files[name]))

    flips = [[flip(SAVED[-1], names[number % len(names)])] for number in range(8 if short else 200)]
    yield "one bit of a file flipped", _in_world(try_damages, saved, flips, checksums)
    if not checksums:
        return
    ends = [(name, end) for name, size in files.items() for end in (0, size // 2, size - 1, size + 1)]
    cuts = [[Damage(f"{newest}/{name}", "cut", end)] for name, end in ends]
    yield "a file emptied, cut or made longer", _in_world(try_damages, saved, cuts[1::4] if short else cuts, True)
    deleted = [[Damage(f"{newest}/{name}", "delete")] for name in names]
    yield "a file deleted", _in_world(try_damages, saved, deleted, True)
    none = [[flip(step, chance.choice(names)) for step in SAVED] for _ in range(1 if short else 10)]
    yield "a bit of every checkpoint flipped: refused; one brought back", _in_world(try_damages, saved, none, True)
    foreign = [*([] if short else [[name] for name in FOREIGN]), FOREIGN]
    yield "foreign files and folders", _in_world(try_foreign, saved, foreign)


def of_disks(disk: Path, short: bool, chance: random.Random) -> Iterator[tuple[str, list[Outcome]]]:
    """disk: a small file system of its own."""
    shares = [chance.uniform(0, 1.2) for _ in range(4 if short else 40)]
    yield "the disk full in a save", _in_world(try_full_disk, disk, shares)
    shutil.rmtree(disk / "checkpoints")
    delays = [chance.uniform(0, 0.05) for _ in range(2 if short else 20)]
    yield "the disk read-only in a save", _in_world(try_read_only, disk, delays)


def _in_world(work: Callable[..., list[Outcome]], *args: Any) -> list[Outcome]:
    """What came of each fault, by all ranks."""
    by_rank = run_distributed(work, WORLD, *args, timeout=300)
    return [
        Outcome(
            any(outcome.wrong for outcome in one),
            any(outcome.lost for outcome in one),
            all(outcome.resumed for outcome in one),
            next((outcome.note for outcome in one if outcome.note), ""),
        )
        for one in zip(*by_rank, strict=True)
    ]
