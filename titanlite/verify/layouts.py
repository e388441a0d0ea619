"""The layouts that `titanlite verify` is asked for: read, checked against the run, scaled down. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from titanlite.config.check import static_problems
from titanlite.config.keys import KEYS, nearest, shown
from titanlite.config.layout import divisors, fewest_processes, fixed_world_size
from titanlite.config.load import Loaded, load
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import Config
from titanlite.config.validate import COMMAND_LINE
from titanlite.verify.shrink import Case

AUTO = "auto"
MOST_PROCESSES, MOST_AUTO_PROCESSES = 32, 8
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
# The first ones change what a rank computes; cp ranks also share parameters, as dp_shard's do.
PRIORITY = ("pp", "tp", "cp", "dp_shard", "dp_replicate")
# What promise 1 says has no influence. torch.compile has: it may round otherwise.
ALLOWED = [name for name in KEYS if name.startswith(("parallelism.", "activation_checkpoint."))]
ALLOWED.append("training.local_batch_size")
FLAG = "--layout"


@dataclass(frozen=True)
class Asked:
    """A layout as it is shown, and what is to be said of it before it is tried."""

    name: str
    case: Case
    notes: tuple[str, ...] = ()


def read_layouts(name: str, overrides: Sequence[str], texts: Sequence[str]) -> tuple[Loaded, list[Asked]]:
    """The run, and it under each layout: texts such as "tp=2,pp=2", or "auto". Raises InputError with all problems."""
    base = load(name, overrides)
    asked, problems = [], []
    for text in dict.fromkeys(texts):
        try:
            asked.append(_scaled_down(base) if text == AUTO else _as_given(name, overrides, base, text))
        except InputError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise InputError(problems)
    return base, asked


def _as_given(name: str, overrides: Sequence[str], base: Loaded, text: str) -> Asked:
    """A layout's keys are overrides. Degrees that it does not name are 1, dp_shard what ep asks for; other keys are the
    run's."""
    given = _split(text)
    values = {f"parallelism.{degree}": "1" for degree in DEGREES} | {"parallelism.dp_shard": "-1"} | given
    if values["parallelism.pp"] != str(base.config.parallelism.pp):
        values = {"parallelism.pp_layers_per_stage": "[]"} | values
    loaded = load(name, [*overrides, *(f"--{key}={value}" for key, value in values.items())])
    if "parallelism.dp_shard" not in given:
        loaded = replace(loaded, config=_with_least_dp_shard(loaded.config))
    parallelism = loaded.config.parallelism
    if parallelism.dp_shard < 1:
        allowed = "an integer > 0: a layout's degrees say how many processes it has"
        fix = f"name it, as in {FLAG} dp_shard=2, or leave it out"
        raise InputError(Problem(COMMAND_LINE, "parallelism.dp_shard", str(parallelism.dp_shard), allowed, fix))
    notes = _check(loaded, text)
    world = math.prod(getattr(parallelism, degree) for degree in PRIORITY)
    if world > MOST_PROCESSES:
        fix = "lower a degree: 2 shows what 64 would, in nearly all cases"
        raise InputError(
            Problem(COMMAND_LINE, FLAG, f"{text}, which is {world} processes", f"at most {MOST_PROCESSES}", fix)
        )
    return Asked(text, Case(loaded.config, {degree: getattr(parallelism, degree) for degree in DEGREES}), notes)


def _with_least_dp_shard(config: Config) -> Config:
    """The smallest world that the other degrees fit."""
    others = fixed_world_size(config.parallelism.model_copy(update={"dp_shard": 1})) or 1
    dp_shard = fewest_processes(config.parallelism) // others
    return config.model_copy(update={"parallelism": config.parallelism.model_copy(update={"dp_shard": dp_shard})})


def _split(text: str) -> dict[str, str]:
    """tp=2,pp_layers_per_stage=[1,2] -> the dotted keys and their values."""
    given, problems = {}, []
    for item in re.split(r",(?![^\[]*\])", text):
        word, equals, value = (part.strip() for part in item.partition("="))
        key = word if "." in word else f"parallelism.{word}"
        if not word or not equals or not value:
            fix = f"as in {FLAG} tp=2,pp=2, or {FLAG} {AUTO}"
            problems.append(Problem(COMMAND_LINE, FLAG, shown(item), "keys of [parallelism] and their values", fix))
        elif key not in ALLOWED:
            close = nearest(key, ALLOWED)
            fix = f"did you mean {close.removeprefix('parallelism.')}?" if close else "give it as an option of its own"
            names = ", ".join(name.removeprefix("parallelism.") for name in ALLOWED)
            problems.append(Problem(COMMAND_LINE, FLAG, shown(item), f"what may change no result: {names}", fix))
        elif key in given:
            problems.append(
                Problem(COMMAND_LINE, FLAG, shown(text), f"{word} once", f"another {FLAG} is another layout")
            )
        given[key] = value
    if problems:
        raise InputError(problems)
    return given


def _check(loaded: Loaded, text: str) -> tuple[str, ...]:
    """Raises InputError when a run could not have this layout, but for its local_batch_size: that is only noted."""
    problems = static_problems(loaded, fixed_world_size(loaded.config.parallelism))
    small = [problem for problem in problems if problem.key == "training.local_batch_size"]
    if len(small) < len(problems):
        raise InputError([replace(one, got=f"{one.got} ({FLAG} {text})") for one in problems if one not in small])
    return tuple(
        f"{text}: training.local_batch_size = {one.got} would be refused (allowed: {one.allowed}); more is taken here"
        for one in small
    )


def _scaled_down(base: Loaded) -> Asked:
    """The run's own layout, every degree that is above 1 at its smallest factor, in at most MOST_AUTO_PROCESSES."""
    config = _with_dp_shard(base.config)
    parallelism = config.parallelism
    _check(replace(base, config=config), AUTO)
    degrees = dict.fromkeys(DEGREES, 1)
    left_out = []
    for name in PRIORITY:
        own = getattr(parallelism, name)
        if own == 1:
            continue
        least = divisors(own)[1]
        if math.prod(degrees[axis] for axis in PRIORITY) * least <= MOST_AUTO_PROCESSES:
            degrees[name] = least
        else:
            left_out.append(f"{name} = {own}")
    if max(degrees.values()) == 1:
        fix = f"name a layout, as in {FLAG} tp=2,pp=2"
        raise InputError(Problem(COMMAND_LINE, FLAG, f"{AUTO}, and the run's layout is one process", "a layout", fix))
    expert_ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    degrees["ep"] = next((n for n in divisors(parallelism.ep)[1:] if expert_ranks % n == 0), 1)
    if parallelism.ep > degrees["ep"] == 1:
        left_out.append(f"ep = {parallelism.ep}")
    name = ",".join(f"{axis}={degrees[axis]}" for axis in (*PRIORITY, "ep") if degrees[axis] > 1)
    notes = [
        f"{name}: the degrees above 1, each at its smallest factor, as far as {MOST_AUTO_PROCESSES} processes go, in "
        f"this order: {', '.join(PRIORITY)}" + (f"; left out: {', '.join(left_out)}" if left_out else "")
    ]
    return Asked(name, Case(config, degrees), tuple(notes))


def _with_dp_shard(config: Config) -> Config:
    """dp_shard = -1, what is left of a world that is not known here, as the smallest number that could be."""
    parallelism, training = config.parallelism, config.training
    if parallelism.dp_shard != -1:
        return config
    others = parallelism.cp * parallelism.tp
    for n in divisors(max(1, training.global_batch_size // parallelism.dp_replicate))[1:]:
        if training.global_batch_size % (n * parallelism.dp_replicate) == 0 and n * others % parallelism.ep == 0:
            break
    else:
        n = 1
    return config.model_copy(update={"parallelism": parallelism.model_copy(update={"dp_shard": n})})
