"""Trains under every layout of the parity tests and writes how far each is from one process into docs/parallelism.md.

    python -m scripts.parity_table [--only WORD ...]

Ten steps of the real trainer each, on CPU processes, in float32: layouts.py and moe_layouts.py of tests/parity say of
what. Loss and norm are the largest relative differences of any step on any rank; gradients, of step 1, are measured by
each parameter's largest. With --only, layouts whose names have all the words are run and printed, and nothing is
written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.parity.harness import make_text, run
from tests.parity.layouts import ONE_PROCESS
from tests.parity.moe_layouts import ALL_LAYOUTS
from titanlite.verify.record import Record, worst

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- parity_table: written by scripts/parity_table.py -->", "<!-- parity_table: end -->"
HEAD = ["| layout | processes | loss | norm | gradients |", "|---|---|---|---|---|"]


def rows(only: list[str]) -> Iterator[str]:
    references: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = make_text(Path(folder) / "text")
        for name, (layout, sections) in ALL_LAYOUTS.items():
            if not all(word in name for word in only):
                continue
            if (key := repr(sections)) not in references:
                references[key] = run(ONE_PROCESS, text, sections=sections)[0]
            found = worst(run(layout, text, sections=sections), references[key])
            numbers = (f"{found[what]:.0e}" for what in ("loss", "norm", "gradient"))
            yield f"| {name} | {layout.world_size} | {' | '.join(numbers)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    only = parser.parse_args().only
    started, table = time.monotonic(), []
    for row in rows(only):
        print(row, flush=True)
        table.append(row)
    print(f"{len(table)} layouts, {time.monotonic() - started:.0f} s")
    if only:
        return
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text("\n".join([before + BEGIN, "", *HEAD, *table, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
