"""What the user sees while text is tokenised. Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from titanlite.data.cache import Report
from titanlite.data.text import Text


@contextmanager
def progress(text: Text, done: int, tokens: int, report: Report) -> Iterator[Callable[[int, int], None]]:
    """Gives advance(done, tokens), which shows them: as a bar on a terminal, else as a line every ten seconds.

    done: bytes of the text on the disk that are read; tokens: made of them. Those given here are an earlier try's.
    """
    total = 0 if text.is_stdin else text.size()
    count = len(text.files)
    size = f"{total / 1e6:,.1f} MB in {count:,} file{'s' * (count > 1)}"
    size = "as it comes" if text.is_stdin else size
    report(f"tokenising {text.name}: {size}")
    started, done_before, tokens_before = time.monotonic(), done, tokens

    def rate(tokens: int) -> str:
        seconds = max(time.monotonic() - started, 1e-9)
        return f"{(tokens - tokens_before) / seconds:,.0f} tokens/s"

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("tokenising", total=total or None, completed=done, rate="")
            yield lambda done, tokens: bar.update(task, completed=done, rate=rate(tokens))
        return
    last = started

    def advance(done: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 10:
            return
        last = now
        words = [f"{tokens:,} tokens", rate(tokens)]
        if total:
            left = (now - started) * (total - done) / max(done - done_before, 1)
            words = [f"{done / total:.0%}", *words, f"{left:,.0f} s left"]
        report(f"tokenising {text.name}: {', '.join(words)}")

    yield advance
