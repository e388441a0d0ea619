"""`titanlite verify`: trains a small copy of a run in one process and under layouts, and says whether they agree."""

from __future__ import annotations

import json
import math
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from titanlite.command_line import Parser, no_name, say, split_name
from titanlite.config.keys import shown
from titanlite.config.layout import parameter_counts
from titanlite.config.load import Loaded, display
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, InputError, Problem
from titanlite.config.schema import Config
from titanlite.config.validate import COMMAND_LINE
from titanlite.verify.layouts import AUTO, Asked, read_layouts
from titanlite.verify.processes import WorkerFailed
from titanlite.verify.promise import GRADIENT_TOLERANCE, LOSS_TOLERANCE, MOST_STEPS, NORM_TOLERANCE, Deviation
from titanlite.verify.run import Result, verify
from titanlite.verify.shrink import shrink

USAGE = 'titanlite verify NAME [--layout "tp=2,pp=2" ...] [--steps N] [--json] [--section.key VALUE ...]'
DESCRIPTION = f"""Shrinks the run that NAME and the overrides declare, trains it on this machine's CPU in float32 with
one process and under each layout, on invented tokens, and compares initial weights, samples, losses, gradients and
norms. No GPU, text or tokenizer is needed.

A layout names keys of [parallelism], and may name those of [activation_checkpoint] and training.local_batch_size.
Degrees that it does not name are 1 (dp_shard: what ep needs), other keys are the run's. "{AUTO}", the default: the
run's own, in at most 8 processes."""
EPILOG = "exit code: 0 all layouts agree with one process, 1 one does not, or a process failed, 2 wrong input"

# By the first thing that differs: what is wrong, if step 1 (or what is before it) is; if a later step is.
DIAGNOSES = {
    "initial weights": "The ranks start from other weights: it is in how parameters are cut and filled.",
    "samples": "The ranks train on other samples: it is in how a step's samples are divided.",
    "expert counts": "Ranks disagree on how many tokens an expert got: it is in how their counts are added up.",
    "expert choices": "More tokens go to other experts than rounding sends there: it is in the forward pass, up to the "
    "router.",
    "router": "Tokens go to the right experts; the router's entropy, or a loss that balances the experts, is wrong.",
    "loss": "The forward pass computes something else.",
    "gradient": "The forward pass is right; the backward pass, or the sum of this gradient over ranks, is not.",
    "norm": "The gradients are right, their norm is not: something is counted twice, or not at all.",
    "lr": "The learning rate is another.",
    "expert biases": "Tokens go to the right experts; the biases do not follow their loads after a step.",
    "validation": "Training is right; the validation pass is not.",
}
UPDATE = "Step 1 is right up to its gradients: it is in what the optimizer does with them."


def make_parser() -> Parser:
    parser = Parser(prog="titanlite verify", usage=USAGE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--layout", metavar="LAYOUT", action="append", help='such as "tp=2,pp=2"; may be repeated')
    parser.add_argument("--steps", metavar="N", default=str(MOST_STEPS), help=f"1 to {MOST_STEPS} (the default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises InputError."""
    name, rest = split_name(argv)
    options, overrides = make_parser().parse_known_args(rest)
    if not name:
        raise no_name(USAGE)
    steps = read_steps(options.steps)
    loaded, asked = read_layouts(name, overrides, options.layout or [AUTO])
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="verify-") as folder:
        small = shrink([one.case for one in asked], steps=steps, folder=Path(folder))
        notes = [*describe(loaded, small.reference), *(note for one in asked for note in one.notes)]
        for note in notes:
            say(note)
        running = ""

        def report(number: int, processes: int) -> None:
            nonlocal running
            running = asked[number].name if number >= 0 else "one process"
            say(f"training: {running}" + (f" ({processes} processes)" if processes > 1 else ""))

        try:
            results = verify(small, report=report)
        except WorkerFailed as error:
            say(f"{running}: {error.first.rstrip()}\nall processes have been ended")
            return EXIT_ERROR
    if options.json:
        print_json(loaded, small.reference, asked, results, notes)
    else:
        print_results(loaded, asked, results)
    return EXIT_DONE if all_agree(results) else EXIT_ERROR


def read_steps(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MOST_STEPS):
        fix = "a fault shows in the first steps; later ones add rounding to rounding, and tell nothing apart"
        raise InputError(Problem(COMMAND_LINE, "--steps", shown(text), f"1 to {MOST_STEPS}", fix))
    return int(text)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does: workers and files are cleared away."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    for one in signals:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in signals:
            signal.signal(one, signal.SIG_DFL)


def describe(loaded: Loaded, small: Config) -> list[str]:
    """The small run in a line, and what of the run it leaves out."""
    model, training, counts = small.model, small.training, parameter_counts(small.model)
    moe = model.moe
    active = f" ({counts.active:,} active)" if moe.n_experts else ""
    experts = f", {moe.n_experts} experts of which a token takes {moe.top_k}" if moe.n_experts else ""
    lines = [
        f"{loaded.config.run.name}, shrunk: {counts.total:,} parameters{active}, {model.n_layers} layers, "
        f"width {model.dim}, {model.n_heads} heads over {model.n_kv_heads}{experts}; {training.steps} steps of "
        f"{training.global_batch_size} x {training.seq_len} tokens, in float32"
    ]
    if loaded.config.compile.enable:
        lines.append("compile.enable is left out: compiled blocks round otherwise, whatever the layout")
    return lines


# --- the outcome ---


def all_agree(results: Sequence[Result]) -> bool:
    return all(result.verdict == "agrees" for result in results)


def print_results(loaded: Loaded, asked: Sequence[Asked], results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, soft_wrap=True)
    experts = loaded.config.model.moe.n_experts > 0
    table = Table(
        Column("layout", overflow="fold"),
        "weights",
        "samples",
        "loss",
        "norm",
        "gradients",
        *["flips"] * experts,
        "verdict",
    )
    for one, result in zip(asked, results, strict=True):
        same = ["same" if equal else "OTHERS" for equal in (result.same_initial_weights, result.same_samples)]
        numbers = [f"{value:.0e}" for value in (result.loss, result.norm, result.gradient)]
        flips = [str(sum(count for _, count in result.flips))] * experts
        style = "green" if result.verdict == "agrees" else "bold red"
        table.add_row(one.name, *same, *numbers, *flips, result.verdict, style=style)
    tolerances = [f"{value:.0e}" for value in (LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE)]
    table.add_section()
    table.add_row("allowed", "same", "same", *tolerances, *[""] * experts, "", style="dim")
    console.print(table)
    for one, result in zip(asked, results, strict=True):
        console.print(
            f"{one.name}: worst gradient {result.gradient_of}; after the last step, {result.weights_of} is off by "
            f"{result.weights:.2g} learning rates",
            style="dim",
        )
    console.print()
    for one, result in zip(asked, results, strict=True):
        if result.verdict != "agrees":
            console.print(f"{one.name}: {conclusion(result)}", markup=False)
    if all_agree(results):
        console.print(agreement(loaded.config), markup=False)


def conclusion(result: Result) -> str:
    """What a layout's result means for a person who wonders about a difference."""
    if result.verdict == "deviates":
        first = result.deviations[0]
        return (
            f"NOT what one process computes. First, {first}. {diagnosis(first)} Rounding does not do this: it is a "
            "fault in the code of the layout, in torch, or of this machine. Please report it, with what --json prints."
        )
    flips = ", ".join(f"{count} in step {step}" for step, count in result.flips)
    if result.verdict == "undecided":
        return (
            f"tokens went to other experts in the first step ({flips}): so few that rounding may have decided between "
            "equal scores, and nothing is off by more than that explains, but it may hide what is. Another seed tells: "
            "--run.seed 1"
        )
    return f"what one process computes, up to the order of float32 sums{flips and f'; experts flipped: {flips}'}."


def diagnosis(first: Deviation) -> str:
    later = first.step > 1 and first.what in ("router", "loss", "norm")
    return UPDATE if later else DIAGNOSES[first.what]


def agreement(config: Config) -> str:
    """What to look at when all layouts agree and the runs do not."""
    text = (
        "Every layout computes what one process computes, up to the order of float32 sums. If two runs of "
        f"{config.run.name} differ by more, the layout is not the reason: compare the config.toml of their run folders "
        "([model], [tokenizer], [data], [training], [optimizer], [lr_scheduler], run.seed) and their data."
    )
    if config.training.mixed_precision_param == "bfloat16":
        text += (
            "\nThis run computes in bfloat16, where rounding is larger: losses of two layouts then differ by some 2e-4 "
            "of themselves in ten steps, gradient norms by 1e-2, and more later. --training.mixed_precision_param "
            "float32 shows whether a difference is only that."
        )
    return text


def print_json(
    loaded: Loaded, small: Config, asked: Sequence[Asked], results: Sequence[Result], notes: Sequence[str]
) -> None:
    layouts = [
        {"layout": one.name, "verdict": result.verdict, "conclusion": conclusion(result), **asdict(result)}
        for one, result in zip(asked, results, strict=True)
    ]
    value = {
        "ok": all_agree(results),
        "config": display(loaded.path),
        "notes": list(notes),
        "allowed": {"loss": LOSS_TOLERANCE, "norm": NORM_TOLERANCE, "gradient": GRADIENT_TOLERANCE},
        "layouts": layouts,
        "small": small.model_dump(),
    }
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
