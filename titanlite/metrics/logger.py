"""What a person sees of a run: one call gives a console line, a row of metrics.jsonl and TensorBoard scalars.

A resumed run continues all three: JSONL rows after the step it resumed from are dropped, TensorBoard is told to forget
its events after that step.

A disk that is full does not end a run here, since its next save may find room: rows that cannot be written are kept and
written later, in order, and this is said; TensorBoard, which has no such memory, ends for this start, and this is said.
"""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from titanlite.config.schema import MetricsConfig
from titanlite.files import move_aside, write_atomically

JSONL = "metrics.jsonl"
TENSORBOARD = "tensorboard"

Row = Mapping[str, float | int]

# key -> (TensorBoard name). Keys that are not here are shown under "other/".
_SCALARS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "samples": "progress/samples",
    "tokens": "progress/tokens",
    "validation_loss": "validation/loss",
    "validation_bits_per_byte": "validation/bits_per_byte",
    "tokens_per_second": "speed/tokens_per_second",
    "tokens_per_second_per_device": "speed/tokens_per_second_per_device",
    "tflops_per_device": "speed/tflops_per_device",
    "mfu": "speed/mfu",
    "mfu_causal": "speed/mfu_causal",
    "step_seconds": "speed/step_seconds",
    "data_wait_seconds": "speed/data_wait_seconds",
    "peak_memory_gib": "memory/peak_gib",
    "expert_load_max": "experts/load_max",
    "expert_load_min": "experts/load_min",
    "expert_assignments": "experts/assignments",
    "router_entropy": "experts/router_entropy",
    "aux_loss": "experts/aux_loss",
    "z_loss": "experts/z_loss",
    "checkpoint_stall_seconds": "checkpoint/stall_seconds",
    "checkpoint_seconds": "checkpoint/seconds",
    "checkpoint_checksum_share": "checkpoint/checksum_share",
}


class MetricsLogger:
    """Rows of one run. On ranks that are not the main one every method does nothing.

    resumed_step: the step the run starts from, 0 for a fresh one. total_steps: where it will end, for the ETA.
    """

    def __init__(
        self,
        run_folder: Path,
        config: MetricsConfig,
        *,
        main: bool,
        resumed_step: int,
        total_steps: int,
        console: Console | None = None,
    ) -> None:
        self._main = main
        self._total_steps = total_steps
        self._last_step = resumed_step if resumed_step > 0 else -1
        self._eta_from = (resumed_step, time.perf_counter())
        self._jsonl: IO[bytes] | None = None
        self._unwritten = b""  # what could not be written yet, to the byte
        self._writer: Any = None
        if not main:
            return
        # Plain text and no wrapping unless a person watches: log files are read by line.
        self._console = console or Console(highlight=False, soft_wrap=True)
        run_folder = Path(run_folder)
        run_folder.mkdir(parents=True, exist_ok=True)
        aside = keep_rows(run_folder / JSONL, resumed_step)
        if aside is not None:
            self.message(f"this run starts anew: the metrics of an earlier one are now in {aside}")
        self._jsonl = open(run_folder / JSONL, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        if config.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            purge = resumed_step + 1 if resumed_step > 0 else 0
            self._writer = SummaryWriter(str(run_folder / TENSORBOARD), purge_step=purge)

    def log(self, row: Row) -> None:
        """Show and record the figures of one step: `step`, and any of the metrics' names, validation's included.

        Steps must rise from call to call, so that a step has one row. Values are Python numbers; a `time` (seconds
        since the epoch) is added if missing. NaN and infinities become null in JSONL, which has no word for them.
        """
        if not self._main:
            return
        step = int(row["step"])
        assert step > self._last_step, f"a row of step {step} after one of step {self._last_step}: merge them into one"
        self._last_step = step
        row = {"step": step, "time": time.time(), **row}
        self._write(json.dumps({key: _json_number(value) for key, value in row.items()}, allow_nan=False).encode())
        if self._writer is not None:
            try:
                self._write_events(row)
            except OSError as error:
                self._writer = None  # its thread has ended, and what was queued is gone
                self.message(f"warning: no more TensorBoard events until the next start: {error}")
        self._print(self._line(row))

    def message(self, text: str) -> None:
        """A line for people, on the main rank's console only."""
        if self._main:
            self._print(Text(text))

    def close(self) -> None:
        if self._jsonl is not None:
            if self._unwritten:
                self._write()
            if self._unwritten:
                self.message(f"warning: {JSONL} lacks the last rows, {self._unwritten.count(10)} of them")
            self._jsonl.close()
        if self._writer is not None:
            self._writer.close()
        self._jsonl = self._writer = None
        self._main = False

    def _write(self, line: bytes = b"") -> None:
        """A row to the JSONL file, after those that it had no room for."""
        assert self._jsonl is not None
        waiting = bool(self._unwritten)
        self._unwritten += line + b"\n" if line else b""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._jsonl.write(self._unwritten) :]
        except OSError as error:
            if not waiting:
                self.message(
                    f"warning: {self._jsonl.name} cannot be written: {error}. Its rows stay in memory until it can, "
                    "and are lost if the run ends before"
                )
        else:
            if waiting:
                self.message(f"{self._jsonl.name} can be written again: no row is missing")

    def _write_events(self, row: Row) -> None:
        for key, value in row.items():
            if key not in ("step", "time"):
                self._writer.add_scalar(_SCALARS.get(key, f"other/{key}"), value, row["step"], row["time"])
        self._writer.flush()  # a killed run keeps the events of the steps it has a checkpoint of

    def _print(self, text: Text) -> None:
        with self._console.capture() as shown:  # else rich would keep what it could not print, and try it all again
            self._console.print(text)
        try:
            self._console.file.write(shown.get())
            self._console.file.flush()
        except OSError as error:  # standard output may be a file on the same disk; the figures are in the JSONL file
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _line(self, row: Row) -> Text:
        width = len(str(self._total_steps))
        parts = [(f"step {row['step']:>{width}}/{self._total_steps}", "bold")]
        for key, style, show in _COLUMNS:
            if key in row:
                parts.append((show(row[key]), style))
        eta = self._eta(int(row["step"]))
        if "loss" in row and eta is not None:
            parts.append((f"ETA {timedelta(seconds=round(eta))}", "dim"))
        return Text("  ").join(Text(text, style) for text, style in parts)

    def _eta(self, step: int) -> float | None:
        """Seconds left at the pace so far, pauses for validation and checkpoints included; None before any step."""
        first_step, start = self._eta_from
        if step <= first_step:
            return None
        return max(self._total_steps - step, 0) * (time.perf_counter() - start) / (step - first_step)


_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("loss", "green", lambda x: f"loss {x:8.5f}"),
    ("validation_loss", "bold green", lambda x: f"val loss {x:8.5f}"),
    ("validation_bits_per_byte", "green", lambda x: f"val bits/byte {x:7.5f}"),
    ("grad_norm", "yellow", lambda x: f"norm {x:8.4f}"),
    ("lr", "", lambda x: f"lr {x:.2e}"),
    ("tokens_per_second", "cyan", lambda x: f"{x:>9,.0f} tok/s"),
    ("tflops_per_device", "cyan", lambda x: f"{x:7.3f} TFLOP/s"),
    ("mfu", "magenta", lambda x: f"MFU {x:6.1%}"),
    ("peak_memory_gib", "", lambda x: f"mem {x:6.2f} GiB"),
)


def keep_rows(path: Path, resumed_step: int) -> Path | None:
    """Drop the rows of metrics.jsonl that the resumed run will write again: those after `resumed_step`.

    What is no row is dropped too (the half-written last line of a killed run). Atomic; no change, no write. A run that
    starts anew (0) sets an earlier one's file aside, as metrics.superseded-k.jsonl, and its path is returned.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if resumed_step == 0:
        return move_aside(path, "superseded") if text else None
    kept: list[str] = []
    last = -1
    for line in text.split("\n"):
        step = _step_of(line)
        if step is not None and last < step <= resumed_step:
            kept.append(line + "\n")
            last = step
    if "".join(kept) != text:
        write_atomically(path, "".join(kept).encode())
    return None


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _json_number(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None
