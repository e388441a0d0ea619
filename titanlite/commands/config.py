"""`titanlite config`: prints, checks and lists runs. Torch only to look at weights that a run is to start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlite.command_line import Parser, no_name, say, split_name
from titanlite.config import check
from titanlite.config.layout import fixed_world_size, parameter_counts, plan_batch, plan_pipeline, resolve_layout
from titanlite.config.load import Loaded, available_configs, display, dump, load
from titanlite.config.problems import EXIT_DONE, EXIT_WRONG_INPUT, InputError, Problem
from titanlite.config.validate import COMMAND_LINE
from titanlite.launch import check_weights

USAGE = "titanlite config NAME [--section.key VALUE ...] [--check [--world-size N]] [--json] | --list"


def make_parser() -> Parser:
    parser = Parser(
        prog="titanlite config",
        usage=USAGE,
        description="Prints the run that NAME and the overrides declare, with every key, as TOML that loads again.",
    )
    parser.add_argument(
        "--check", action="store_true", help="say what is wrong with it instead, or ok; exit code 2 or 0"
    )
    parser.add_argument("--world-size", metavar="N", help="processes to check it for (default: what the layout fixes)")
    parser.add_argument("--list", action="store_true", help="list the runs in train_configs/")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises InputError."""
    name, rest = split_name(argv)
    options, overrides = make_parser().parse_known_args(rest)
    if options.list:
        return print_list(options.json)
    if not name:
        raise no_name(USAGE)
    if options.check:
        return print_check(name, overrides, read_world_size(options.world_size), options.json)
    if options.world_size is not None:
        raise InputError(Problem(COMMAND_LINE, "--world-size", options.world_size, "only with --check", "add --check"))
    loaded = load(name, overrides)
    if options.json:
        print_json(
            {"path": display(loaded.path), "config": loaded.config.model_dump(), "origins": dict(loaded.origins)}
        )
    else:
        print(dump(loaded.config), end="")
    return EXIT_DONE


def read_world_size(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise InputError(Problem(COMMAND_LINE, "--world-size", f'"{text}"', "an integer > 0", "as in --world-size 64"))
    return int(text)


# --- check ---


def print_check(name: str, overrides: Sequence[str], world_size: int | None, as_json: bool) -> int:
    """Says all that is wrong with the run, on stderr, or how it would be laid out."""
    problems: tuple[Problem, ...] = ()
    warnings: list[str] = []
    plan: dict[str, Any] = {}
    try:
        loaded = load(name, overrides)
        found = check.static_problems(loaded, world_size) + check.file_problems(loaded)
        warnings = check.warnings(loaded, world_size)
        if found:
            raise InputError(found)
        check_weights(loaded)
        plan = layout_plan(loaded, world_size)
    except InputError as error:
        problems = error.problems
        if not as_json:
            raise
    if as_json:
        print_json({"ok": not problems, "problems": [asdict(p) for p in problems], "warnings": warnings, **plan})
    else:
        for warning in warnings:
            say(f"warning: {warning}")
        print(plan_text(plan))
    return EXIT_WRONG_INPUT if problems else EXIT_DONE


def layout_plan(loaded: Loaded, world_size: int | None) -> dict[str, Any]:
    """Degrees and batch of each rank; {} when the world is not known."""
    parallelism = loaded.config.parallelism
    world = world_size or fixed_world_size(parallelism)
    if not world:
        return {}
    layout = resolve_layout(parallelism, world)
    pipeline = plan_pipeline(loaded.config.model, parallelism)
    stages = {} if pipeline is None else {"stage_layers": [len(layers) for layers in pipeline.layers]}
    return {
        "parameters": parameter_counts(loaded.config.model).total,
        "layout": asdict(layout),
        "batch": asdict(plan_batch(loaded.config.training, layout, pipeline)),
        **stages,
    }


def plan_text(plan: dict[str, Any]) -> str:
    if not plan:
        return "ok (for any world that divides evenly: --world-size N checks one)"
    layout, batch = dict(plan["layout"]), plan["batch"]
    world = layout.pop("world_size")
    degrees = " ".join(f"{name}={degree}" for name, degree in layout.items())
    stages = f"\nlayers of the stages: {plan['stage_layers']}" if "stage_layers" in plan else ""
    return (
        f"ok\n{plan['parameters']:,} parameters\nworld size {world}: {degrees}\n"
        f"each rank and step: {batch['rank_samples']} samples, as {batch['accumulation_steps']} forward "
        f"pass{'es' if batch['accumulation_steps'] > 1 else ''} of {batch['local_batch_size']}"
        + (f" in {batch['microbatches']} microbatches" if stages else "")
        + stages
    )


# --- list ---


def first_comment(path: Path) -> str:
    """What a config says of itself: its first line, if that is a comment."""
    with path.open(encoding="utf-8") as file:
        line = file.readline().strip()
    return line.lstrip("#").strip() if line.startswith("#") else ""


def print_list(as_json: bool) -> int:
    configs = [{"name": p.stem, "path": display(p), "description": first_comment(p)} for p in available_configs()]
    if as_json:
        print_json({"configs": configs})
    else:
        width = max((len(entry["name"]) for entry in configs), default=0)
        for entry in configs:
            print(f"{entry['name']:{width}}  {entry['description']}".rstrip())
    return EXIT_DONE


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))
