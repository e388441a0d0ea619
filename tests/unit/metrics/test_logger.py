import errno
import io
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from titanlite.config.schema import MetricsConfig
from titanlite.metrics.logger import MetricsLogger, keep_rows


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = io.StringIO()

    def logger(self, resumed_step: int = 0, *, main: bool = True, tensorboard: bool = False, tty: bool = False) -> Any:
        return MetricsLogger(
            self.folder,
            MetricsConfig(enable_tensorboard=tensorboard),
            main=main,
            resumed_step=resumed_step,
            total_steps=1000,
            console=Console(file=self.out, soft_wrap=True, highlight=False, force_terminal=tty, width=80),
        )

    def rows(self) -> list[dict[str, Any]]:
        return [
            json.loads(line, parse_constant=lambda name: pytest.fail(name))
            for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


ROW = {
    "step": 50,
    "time": 1234567890.25,
    "loss": 0.1 + 0.2,
    "grad_norm": 1.25,
    "lr": 3e-4,
    "samples": 800,
    "tokens": 2**60 + 1,
    "tokens_per_second": 12345.6,
    "tokens_per_second_per_device": 6172.8,
    "tflops_per_device": 0.5,
    "mfu": 0.412,
    "mfu_causal": 0.4,
    "peak_memory_gib": 1.5,
    "step_seconds": 0.1,
    "data_wait_seconds": 0.001,
}


def test_row_is_exact_and_there_at_once(run: Run) -> None:
    logger = run.logger()
    logger.log(ROW)
    assert run.rows() == [ROW]  # before close; floats and large integers to the last digit
    assert list(run.rows()[0])[:2] == ["step", "time"]
    logger.log({"step": 51, "loss": 1})
    assert run.rows()[1]["time"] > 1.7e9
    logger.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_null(run: Run, bad: float) -> None:
    run.logger(tensorboard=True).log({"step": 1, "loss": bad, "lr": 1.0})
    assert run.rows()[0]["loss"] is None and run.rows()[0]["lr"] == 1.0
    assert str(bad) in run.out.getvalue()


def test_steps_strictly_increase(run: Run) -> None:
    logger = run.logger()
    logger.log({"step": 0, "validation_loss": 8.0})
    logger.log({"step": 1, "loss": 1.0, "validation_loss": 2.0, "validation_bits_per_byte": 1.0})
    for again in (0, 1):
        with pytest.raises(AssertionError, match="merge"):
            logger.log({"step": again, "loss": 1.0})
    with pytest.raises(AssertionError, match="merge"):
        run.logger(7).log({"step": 7, "loss": 1.0})
    assert [row["step"] for row in run.rows()] == [0, 1]


def test_console_line(run: Run) -> None:
    logger = run.logger()
    logger.log(ROW)
    logger.log({**ROW, "step": 1000, "loss": 12.5, "validation_loss": 3.25})
    first, second = run.out.getvalue().splitlines()  # one line each, however narrow the terminal
    for text in (
        "step   50/1000",
        "0.30000",
        "1.2500",
        "3.00e-04",
        "12,346 tok/s",
        "0.500 TFLOP/s",
        "41.2%",
        "1.50 GiB",
        "ETA ",
    ):
        assert text in first, text
    assert "step 1000/1000" in second and "val loss  3.25000" in second and "ETA 0:00:00" in second
    assert first.index("norm") == second.index("norm") - len("  val loss  3.25000")
    assert "\x1b" not in first


def test_colour_for_a_terminal_only(run: Run) -> None:
    run.logger(tty=True).log(ROW)
    assert "\x1b[" in run.out.getvalue()


def test_eta_is_at_the_pace_since_the_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("titanlite.metrics.logger.time.perf_counter", lambda: now[0])
    logger = run.logger(resumed_step=500)
    now[0] += 50
    logger.log({"step": 600, "loss": 1.0})  # 100 steps in 50 s, 400 to go
    assert "ETA 0:03:20" in run.out.getvalue()


def test_messages_are_not_markup(run: Run) -> None:
    run.logger().message("[red]saved[/red] step-00000001")
    assert run.out.getvalue() == "[red]saved[/red] step-00000001\n"


def test_other_ranks_do_nothing(run: Run) -> None:
    logger = run.logger(main=False, tensorboard=True)
    logger.log(ROW)
    logger.log({"step": 0, "validation_loss": 1.0})
    logger.message("x")
    logger.close()
    assert run.out.getvalue() == "" and not run.folder.exists()


# ---- resume


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 1 / 3}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("text", "resumed", "left"),
    [
        (lines(10, 20, 30), 20, lines(10, 20)),
        (lines(10, 20, 30), 25, lines(10, 20)),
        (lines(0, 10), 10, lines(0, 10)),
        (lines(10, 20), 100, lines(10, 20)),
        (lines(10) + '{"step": 20, "lo', 20, lines(10)),
        (lines(10) + '{"step": 20}', 20, lines(10) + '{"step": 20}\n'),
        (lines(10) + "\x00\x00\x00", 20, lines(10)),
        (lines(10) + "[1]\n7\n" + '{"step": "20"}\n{"step": true}\n{}\n\n', 20, lines(10)),
        (lines(10, 20, 10, 20), 20, lines(10, 20)),
        ("", 20, ""),
    ],
)
def test_rows_that_will_come_again_are_dropped(tmp_path: Path, text: str, resumed: int, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    inode = path.stat().st_ino
    keep_rows(path, resumed)
    assert path.read_text() == left
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert (path.stat().st_ino == inode) == (left == text)  # a new file in its place, and none without need


def test_a_fresh_start_sets_the_old_rows_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for text in (lines(0, 10), lines(0, 20)):
        path.write_text(text)
        keep_rows(path, 0)
        assert not path.exists()
    keep_rows(path, 0)
    assert (tmp_path / "metrics.superseded-1.jsonl").read_text() == lines(0, 10)
    assert (tmp_path / "metrics.superseded-2.jsonl").read_text() == lines(0, 20)


def test_a_fresh_start_over_old_rows_says_so(run: Run) -> None:
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text(lines(0, 10))
    for _ in range(2):  # the second time there is nothing to set aside
        run.logger().close()
    aside = run.folder / "metrics.superseded-1.jsonl"
    assert run.out.getvalue() == f"this run starts anew: the metrics of an earlier one are now in {aside}\n"


def test_rewriting_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(10, 20))

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_rows(path, 10)
    assert path.read_text() == lines(10, 20)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: the events that no later start of the run has taken back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_resumed_twice_steps_still_increase(run: Run) -> None:
    for life, (resumed, last) in enumerate(((0, 50), (30, 60), (50, 70))):
        logger = run.logger(resumed, tensorboard=True)
        for step in range(resumed + 10, last + 1, 10):
            logger.log({"step": step, "loss": life + step / 1000, "lr": 1.0})
        # never closed: killed
    expected = [(10, 0), (20, 0), (30, 0), (40, 1), (50, 1), (60, 2), (70, 2)]
    assert [(row["step"], int(row["loss"])) for row in run.rows()] == expected
    seen = events(run.folder)
    assert set(seen) == {"train/loss", "train/lr"}
    assert [(step, int(value)) for step, value in seen["train/loss"]] == expected


class Disk:
    """A file whose disk has room for so many bytes more."""

    def __init__(self, path: Path, room: int) -> None:
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.name = path
        self.room = room
        self.close = self.file.close

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written


def test_rows_that_a_full_disk_has_no_room_for_are_written_later(run: Run) -> None:
    logger = run.logger()
    logger.log({"step": 1, "loss": 1.0})
    disk = logger._jsonl = Disk(run.folder / "metrics.jsonl", room=10)  # for a part of a row
    for step in (2, 3, 4):
        logger.log({"step": step, "loss": 1.0})
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()[1]) == 10
    assert run.out.getvalue().count("No space left on device") == 1, "said once"
    assert "lost if the run ends before" in run.out.getvalue()
    assert "step    4/1000" in run.out.getvalue()
    disk.room = 10_000
    logger.log({"step": 5, "loss": 1.0})
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4, 5]
    assert "no row is missing" in run.out.getvalue()
    disk.room = 0
    logger.log({"step": 6, "loss": 1.0})
    assert run.out.getvalue().count("No space left on device") == 2, "and again, the next time"
    logger.close()
    assert "lacks the last rows, 1 of them" in run.out.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_under_tensorboard_and_the_console_ends_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logger = run.logger(tensorboard=True)
    logger.log({"step": 1, "loss": 1.0})
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # of TensorBoard's thread
    monkeypatch.setattr(logger._writer.file_writer.event_writer._general_file_writer.fs, "append", is_full)
    logger.log({"step": 2, "loss": 1.0})
    logger.log({"step": 3, "loss": 1.0})
    assert run.out.getvalue().count("warning: no more TensorBoard events") == 1
    full = open("/dev/full", "w")  # noqa: SIM115
    logger._console.file = full
    logger.log({"step": 4, "loss": 1.0})
    logger._console.file = run.out
    with pytest.raises(OSError, match="No space left"):
        full.close()
    logger.close()
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]


def test_a_fresh_start_takes_all_back(run: Run) -> None:
    for life in range(2):
        logger = run.logger(tensorboard=True)
        logger.log({"step": 0, "validation_loss": life})
        logger.log({"step": 5 + life, "loss": life})
    assert [row["step"] for row in run.rows()] == [0, 6]
    assert events(run.folder) == {"validation/loss": [(0, 1.0)], "train/loss": [(6, 1.0)]}


def test_tensorboard_is_imported_only_if_wanted() -> None:
    code = """
import sys, tempfile, pathlib
from titanlite.metrics.logger import MetricsLogger
from titanlite.config.schema import MetricsConfig
folder = pathlib.Path(tempfile.mkdtemp())
log = MetricsLogger(folder, MetricsConfig(enable_tensorboard=False), main=True, resumed_step=0, total_steps=1)
log.log({"step": 1, "loss": 1.0})
assert not (folder / "tensorboard").exists()
sys.exit("tensorboard" in sys.modules or "torch.utils.tensorboard" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
