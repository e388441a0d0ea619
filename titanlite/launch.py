"""The parent of a run: reads and checks everything there is to check, then starts the workers of this node.

No torch until all other checks have passed; then to look at the weights that the run starts from, if it does from any.
Exit codes: 0 done, 1 a worker failed, 2 wrong input, 75 stopped and saved.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite import __version__
from titanlite.checkpoint.lock import LAUNCHER_LOCK, WORKER_LOCK, FolderLock, lock_folder, probe_folder
from titanlite.command_line import Parser, print_problems, say
from titanlite.config import check
from titanlite.config.layout import (
    fewest_processes,
    fixed_world_size,
    parameter_counts,
    plan_batch,
    plan_pipeline,
    resolve_layout,
)
from titanlite.config.load import Loaded, dump, load
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, EXIT_WRONG_INPUT, InputError, Problem
from titanlite.config.validate import COMMAND_LINE
from titanlite.files import write_atomically
from titanlite.lifeline import END_UNKNOWN, JOB_END_TIME, START_TIME, job_end
from titanlite.machine import ENVIRONMENT, Nodes, cores, gpu_count, raise_open_file_limit, read_integer, read_nodes
from titanlite.supervise import Job, run_workers

if TYPE_CHECKING:
    from titanlite.data.prepare import PreparedData

DEFAULT_CONFIG = "llama_debug.toml"
CPU_PROCESSES = (2, 8)  # fewest and most on a CPU when nobody says how many
WORKER = "titanlite.train"
MOST_PROCESSES = 4096
MOST_RESTARTS = 1000
LARGE_FOR_A_CPU = 200_000_000  # parameters
ORPHANS_SECONDS = 5.0  # in which workers end once their launcher was killed; lifeline.py looks twice a second

USAGE = "run_train.sh [--config NAME] [--nproc N] [--max-restarts N] [--section.key VALUE | --section.key=VALUE ...]"
EPILOG = """environment:
  NPROC                    as --nproc
  NNODES, NODE_RANK        number of machines, and which one this is (from 0); run the same command on each
  MASTER_ADDR, MASTER_PORT where the machines meet: a host they all reach, and a free port of it (default 29500)
  RDZV_ID                  a name of the run, the same on all nodes; with it NODE_RANK may be left out
  LOG_RANK                 ranks whose output is shown: 0 (default), a list such as 0,3, or all
  OMP_NUM_THREADS          threads of each process (default: cores / processes)
  CUDA_VISIBLE_DEVICES     the GPUs to use

signals: TERM, INT (Ctrl-C) or USR1, here or to a rank: the step is finished and saved; a second one ends all at once

exit code: 0 done, 1 a worker failed, 2 wrong input, 75 stopped by a signal (or the clock) and saved: try again
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for, and returns the exit code."""
    try:
        return launch(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        print_problems(error.problems, "nothing was started")
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_ERROR


def launch(argv: Sequence[str], worker: str = WORKER) -> int:
    """worker: the module to run in each process, as `python -m worker CONFIG_TOML`. Raises InputError."""
    options, overrides = make_parser().parse_known_args(list(argv))
    if options.setup_only:
        print(sys.executable)  # there is a Python that runs this
        return EXIT_DONE
    started = {START_TIME: str(time.time())}
    plan = make_plan(options, overrides, {**os.environ, **started})
    for warning in plan.warnings:
        say(f"warning: {warning}")
    check_weights(plan.loaded)
    run_folder = check.run_folder(plan.loaded)
    with lock_run(run_folder, plan.nodes):
        prepare_data(plan.loaded)
        log_folder = make_log_folder(run_folder, plan.nodes)
        config_path = write_config(plan, log_folder)
        say(describe(plan, run_folder, log_folder))
        config = plan.loaded.config
        job = Job(
            plan.nodes,
            plan.nproc,
            plan.shown,
            log_folder,
            start_timeout_seconds=config.comm.init_timeout_seconds,
            saves=config.checkpoint.enable,
            grace_seconds=config.checkpoint.grace_seconds,
            max_restarts=plan.max_restarts,
        )
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // plan.nproc))
        # DDP warns in C++ on every rank that no parameter was unused.
        quiet = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        raise_open_file_limit()
        environment = {"OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": quiet, **started}
        return run_workers(job, worker, [str(config_path)], environment)


# --- what is asked for ---


def make_parser() -> Parser:
    parser = Parser("run_train.sh", USAGE, "Trains what a TOML file declares.", EPILOG)
    parser.add_argument(
        "--config",
        metavar="NAME",
        default=DEFAULT_CONFIG,
        help=f"a TOML file, or the name of one in train_configs/ (default: {DEFAULT_CONFIG})",
    )
    parser.add_argument(
        "--nproc",
        metavar="N",
        default="",
        help="processes on this machine (default: what the layout fixes, else one per GPU, else on the CPU what it "
        "needs, {} to {})".format(*CPU_PROCESSES),
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        default="",
        help="how often the processes are started again after a crash, from the last checkpoint (default: 0). Wrong "
        "input and a loss that is not finite end the run all the same",
    )
    parser.add_argument("--setup-only", action="store_true", help="stop once the Python environment is ready")
    parser.add_argument("--version", action="version", version=f"titanlite {__version__}")
    return parser


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check: what to start on this node."""

    loaded: Loaded
    nodes: Nodes
    nproc: int
    gpus: int
    shown: frozenset[int] | None
    max_restarts: int
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.nodes.count * self.nproc


def make_plan(options: argparse.Namespace, overrides: list[str], environ: Mapping[str, str]) -> Plan:
    """Reads the environment and the config. Raises InputError with all that is wrong.

    options, overrides: what make_parser() knows of the command line, and the rest.
    """
    problems: list[Problem] = []
    if overrides and not overrides[0].startswith("-"):
        fix = f"did you mean --config {overrides[0]}?" if len(overrides) == 1 else "write --section.key VALUE"
        problems.append(Problem(COMMAND_LINE, "argument", f'"{overrides[0]}"', USAGE, fix))
        overrides = []
    nodes = read_nodes(environ, problems)
    asked = read_process_count(options.nproc, environ, problems)
    restarts = read_option(options.max_restarts, "--max-restarts", 0, MOST_RESTARTS, problems, "starts after a crash")
    try:
        loaded = load(options.config, overrides)
    except InputError as error:
        raise InputError([*problems, *error.problems]) from None

    try:
        gpus = 0 if loaded.config.run.device == "cpu" else gpu_count(environ)
    except InputError as error:
        raise InputError([*problems, *error.problems]) from None
    nproc = asked or process_count(loaded, nodes, gpus, problems)
    # With a problem above, the world is not known to be what was meant.
    world = nodes.count * nproc if nproc and not problems else None
    problems += check.static_problems(loaded, world)
    problems += check.machine_problems(loaded, gpus, nproc)
    walltime_warnings = check_walltime(loaded, environ, problems)
    shown = read_shown_ranks(environ, world, problems)
    if problems:
        raise InputError(problems)
    assert nproc and world
    warnings = [*check.warnings(loaded, world), *large_for_a_cpu(loaded, world, gpus), *walltime_warnings]
    return Plan(loaded, nodes, nproc, gpus, shown, restarts or 0, tuple(warnings))


def large_for_a_cpu(loaded: Loaded, world: int, gpus: int) -> list[str]:
    """A model that was meant for GPUs would fill the memory of the machine before its first step."""
    parameters = parameter_counts(loaded.config.model).total
    if gpus or parameters < LARGE_FOR_A_CPU:
        return []
    copies = resolve_layout(loaded.config.parallelism, world).dp_replicate
    return [
        f"NO GPU WAS FOUND, and this model has {parameters:,} parameters: on the CPU that is at least "
        f"{16 * parameters * copies / 1e9:,.0f} GB of memory for weights, gradients and moments, over all processes."
    ]


def check_walltime(loaded: Loaded, environ: Mapping[str, str], problems: list[Problem]) -> list[str]:
    """Warnings. A problem is a job too short for checkpoint.before_walltime: it would end before its first step, and
    again when it is retried."""
    checkpoint, key = loaded.config.checkpoint, "checkpoint.before_walltime"
    if not (checkpoint.enable and checkpoint.before_walltime):
        return []
    end = job_end(environ, checkpoint.walltime)
    if end is None:
        return [f"{END_UNKNOWN}."]
    left = end - time.time()
    if left <= checkpoint.before_walltime:
        allowed = f"less than the {max(left, 0):,.0f} s that are left of the job"
        fix = "lower it, or ask for a longer job (checkpoint.walltime without Slurm)"
        problems.append(Problem(loaded.origin(key), key, str(checkpoint.before_walltime), allowed, fix))
    if checkpoint.walltime and end == job_end(environ, walltime=0):
        return [f"checkpoint.walltime: ignored, since {JOB_END_TIME} is set."]
    return []


def read_process_count(option: str, environ: Mapping[str, str], problems: list[Problem]) -> int | None:
    """--nproc, else NPROC; None when neither is given or it is wrong."""
    if not option:
        return read_integer(environ, "NPROC", 1, MOST_PROCESSES, problems, "processes on this machine")
    return read_option(option, "--nproc", 1, MOST_PROCESSES, problems, "processes on this machine")


def read_option(text: str, name: str, lowest: int, highest: int, problems: list[Problem], meaning: str) -> int | None:
    """As read_integer, of an option of the command line."""
    found: list[Problem] = []
    number = read_integer({name: text}, name, lowest, highest, found, meaning)
    problems += [replace(problem, where=COMMAND_LINE, fix=f"give a number, or leave {name} out") for problem in found]
    return number


def process_count(loaded: Loaded, nodes: Nodes, gpus: int, problems: list[Problem]) -> int | None:
    """Processes of this node when nobody says: what the layout fixes, else one a GPU, else the fewest that fit it, of 2
    to 8 (what a cluster's config asks for is not started on a laptop)."""
    world = fixed_world_size(loaded.config.parallelism)
    if not world:
        fewest, most = CPU_PROCESSES
        needed = fewest_processes(loaded.config.parallelism)
        step = needed // gcd(needed, nodes.count)
        return gpus or min(-(-fewest // step) * step, most)
    if world % nodes.count:
        allowed = f"a divisor of the layout's {world} processes"
        fix = "change NNODES, or the degrees in [parallelism]"
        problems.append(Problem(ENVIRONMENT, "NNODES", str(nodes.count), allowed, fix))
        return None
    if world > MOST_PROCESSES * nodes.count:
        allowed = (
            f"at most {MOST_PROCESSES} on a machine, and there {'is' if nodes.count == 1 else 'are'} {nodes.count}"
        )
        fix = "set NNODES, or lower a degree in [parallelism]"
        problems.append(Problem(loaded.origin("parallelism"), "parallelism", f"{world} processes", allowed, fix))
        return None
    return world // nodes.count


def read_shown_ranks(environ: Mapping[str, str], world: int | None, problems: list[Problem]) -> frozenset[int] | None:
    """LOG_RANK as ranks; None for all of them."""
    text = environ.get("LOG_RANK", "") or "0"
    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if all(part.isascii() and part.isdigit() and (world is None or int(part) < world) for part in parts):
        return frozenset(int(part) for part in parts)
    most = f"0 to {world - 1}" if world else "from 0"
    allowed = f"all, or ranks {most} separated by commas"
    problems.append(
        Problem(ENVIRONMENT, "LOG_RANK", f'"{text}"', allowed, "as in LOG_RANK=0,1; or unset it to see rank 0")
    )
    return None


# --- what is made before the workers start ---


def lock_run(run_folder: Path, nodes: Nodes) -> FolderLock:
    """One job per run folder. The other nodes of a job may share its folder, so each locks a file of its own."""
    lock = lock_folder(run_folder, LAUNCHER_LOCK if nodes.is_main else f"{nodes.label}-{LAUNCHER_LOCK}")
    if nodes.is_main:
        # Workers that outlived their launcher: they are about to notice it, and end.
        probe_folder(run_folder, WORKER_LOCK, wait_seconds=ORPHANS_SECONDS)
    return lock


def check_weights(loaded: Loaded) -> None:
    """Raises InputError if the weights that the run is to start from are not its model's. Imports torch, if there are
    such; reads no tensor. The config must have passed all other checks."""
    if check.starts_from_weights(loaded):
        from titanlite.checkpoint.initial import open_weights

        checkpoint, model = loaded.config.checkpoint, loaded.config.model
        try:
            open_weights(Path(checkpoint.init_from), model, allow_rope_change=checkpoint.allow_rope_change)
        except InputError as error:
            placed = (replace(p, where=p.where or loaded.origin(p.key)) for p in error.problems)
            raise InputError(placed) from None


def prepare_data(loaded: Loaded) -> PreparedData:
    """Tokenises what is not in the cache yet, here, where its progress is seen once."""
    from titanlite.data.prepare import prepare

    config = loaded.config
    return prepare(
        config.data,
        config.tokenizer,
        config.model.vocab_size,
        config.training.seq_len,
        report=say,
        validation=config.validation.enable,
    )


def make_log_folder(run_folder: Path, nodes: Nodes) -> Path:
    """A new folder for the workers' output, so that a restart keeps what the run before it said."""
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    if nodes.count > 1:
        name += f"-{nodes.label}"
    folder = run_folder / "logs" / name
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        try:
            (unique := folder.with_name(folder.name + suffix)).mkdir(parents=True)
            return unique
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot_write(folder, error) from error
    raise AssertionError(f"a hundred runs in one second in {folder}")


def write_config(plan: Plan, folder: Path) -> Path:
    """Writes the resolved config, the one file that all workers of this node read.

    The device is resolved, too: a worker that cannot use the GPU that was seen here must fail, not use the CPU.
    """
    run = plan.loaded.config.run.model_copy(update={"device": "cuda" if plan.gpus else "cpu"})
    config = plan.loaded.config.model_copy(update={"run": run})
    path = folder / "config.toml"
    try:
        write_atomically(path, dump(config).encode())
    except OSError as error:
        raise cannot_write(path, error) from error
    return path.resolve()


def cannot_write(path: Path, error: OSError) -> InputError:
    fix = "choose another folder with --run.output_dir, or make room in this one"
    return InputError(Problem("", str(path), error.strerror or str(error), "a path that can be written", fix))


# --- what the user sees ---


def describe(plan: Plan, run_folder: Path, log_folder: Path) -> str:
    config = plan.loaded.config
    layout = resolve_layout(config.parallelism, plan.world_size)
    pipeline = plan_pipeline(config.model, config.parallelism)
    batch = plan_batch(config.training, layout, pipeline)
    device = "GPU" if plan.gpus else "CPU"
    where = f"{plan.world_size} {device} process{'es' if plan.world_size > 1 else ''}"
    if plan.nodes.count > 1:
        where += f" on {plan.nodes.count} nodes"
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    degrees = ", ".join(f"{name} {getattr(layout, name)}" for name in axes if getattr(layout, name) > 1)
    lines = [
        f"{config.run.name}: {where}{f' ({degrees})' if degrees else ''}; "
        f"{batch.rank_samples} samples a rank and step, as {batch.accumulation_steps} x {batch.local_batch_size}"
        + (f" in {batch.microbatches} microbatches" if pipeline else ""),
        f"run folder {run_folder} (config.toml: the run with every key)",
    ]
    if pipeline is not None:
        stages = " ".join(str(len(layers)) for layers in pipeline.layers)
        lines.append(f"{pipeline.schedule} over {len(pipeline.layers)} stages, of {stages} layers")
    if plan.shown is not None and len(plan.shown) < plan.world_size:
        lines.append(f"output of the ranks not shown (LOG_RANK): {log_folder}")
    return "\n  ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
