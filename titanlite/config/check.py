"""Rules that need more than one key, and what this machine must have for a run: lists of problems. Torch-free.

load() has already refused unknown keys and wrong types. Nothing here raises: the caller adds the lists up and reports
all of it at once.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from titanlite.checkpoint import storage
from titanlite.config.keys import KEYS, nearest, shown
from titanlite.config.layout import (
    SPLIT_BACKWARD,
    Layout,
    divisors,
    fixed_world_size,
    plan_batch,
    plan_pipeline,
    resolve_layout,
    resolve_zero_stage,
    shards_are_found,
)
from titanlite.config.load import Loaded
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import BLOCK, EMBEDDED, EMBEDDED_VOCAB_SIZE
from titanlite.config.validate import COMMAND_LINE
from titanlite.files import expand

Rule = Callable[[Loaded], list[Problem]]


def static_problems(loaded: Loaded, world_size: int | None) -> list[Problem]:
    """What is wrong with the run itself. world_size None: not known, and only rules that need none are applied."""
    problems = [problem for rule in RULES for problem in rule(loaded)]
    parallelism = loaded.config.parallelism
    world = world_size if world_size is not None else fixed_world_size(parallelism)
    if parallelism.dp_shard == 0:
        world = world or 1  # any: the layout refuses it
    if world is None:
        return problems
    try:
        layout = resolve_layout(parallelism, world)
        problems += _lost_shards(loaded, layout) + _sharded_experts(loaded, layout)
        if not _stages(loaded):
            plan_batch(loaded.config.training, layout, plan_pipeline(loaded.config.model, parallelism))
    except InputError as error:
        problems += _placed(loaded, error)
    return problems


def _placed(loaded: Loaded, error: InputError) -> list[Problem]:
    return [replace(problem, where=loaded.origin(problem.key)) for problem in error.problems]


def _problem(loaded: Loaded, key: str, allowed: str, fix: str, got: str | None = None) -> Problem:
    return Problem(loaded.origin(key), key, shown(_value(loaded, key)) if got is None else got, allowed, fix)


def _value(loaded: Loaded, key: str) -> Any:
    value: Any = loaded.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


# --- static rules ---


def _expert_parallel(loaded: Loaded) -> list[Problem]:
    key, ep, n_experts = "parallelism.ep", loaded.config.parallelism.ep, loaded.config.model.moe.n_experts
    if ep == 1:
        return []
    if n_experts == 0:
        allowed = "1 while model.moe.n_experts is 0: a dense model has no experts to divide"
        return [_problem(loaded, key, allowed, "remove the key; parallelism.dp_shard divides any model")]
    if n_experts % ep:
        allowed = f"a divisor of model.moe.n_experts = {n_experts}: every rank holds as many experts"
        return [_problem(loaded, key, allowed, f"set it to one of {divisors(n_experts)}, or change n_experts")]
    return []


def _stages(loaded: Loaded) -> list[Problem]:
    try:
        plan_pipeline(loaded.config.model, loaded.config.parallelism)
    except InputError as error:
        return _placed(loaded, error)
    return []


def _pipeline_schedule(loaded: Loaded) -> list[Problem]:
    parallelism = loaded.config.parallelism
    if parallelism.pp == 1:
        return []
    problems = []
    key, schedule = "parallelism.zero_stage", parallelism.pp_schedule
    if parallelism.zero_stage == 2:
        fix = "1 reduces once a step, which a pipeline does in any case; 3 frees parameters after forward"
        problems.append(_problem(loaded, key, '"auto", 1 or 3 with parallelism.pp above 1', fix))
    if schedule not in SPLIT_BACKWARD:
        return problems
    if parallelism.zero_stage == 3:
        allowed = f'"auto" or 1 with {schedule}, which needs the weights after backward, for their gradients'
        problems.append(_problem(loaded, key, allowed, "set it to 1, or use GPipe, 1F1B, Interleaved1F1B or LoopedBFS"))
    if loaded.config.compile.enable:
        allowed = f"false with {schedule}, which runs backward in two parts"
        fix = "leave it out, or use GPipe, 1F1B, Interleaved1F1B or LoopedBFS"
        problems.append(_problem(loaded, "compile.enable", allowed, fix))
    sharers = [name for name in ("tp", "cp", "ep") if getattr(parallelism, name) > 1]
    recomputation = loaded.config.activation_checkpoint
    fix = "leave it out, or use GPipe, 1F1B, Interleaved1F1B or LoopedBFS"
    if recomputation.mode != "none" and sharers:
        allowed = f'"none" with {schedule} and {" and ".join(sharers)}: in the second part of backward each rank '
        allowed += "recomputes in an order of its own: they would take one message for another, or wait for each other "
        allowed += "forever"
        problems.append(_problem(loaded, "activation_checkpoint.mode", allowed, fix))
    elif recomputation.mode == "selective" and recomputation.selective_ac_option == "op":
        allowed = f'"none", "full", or a number as selective_ac_option, with {schedule}: its backward in two parts '
        allowed += "recomputes a block twice, and what is kept can be used once"
        problems.append(_problem(loaded, "activation_checkpoint.mode", allowed, fix))
    return problems


def _recomputation(loaded: Loaded) -> list[Problem]:
    config, option = loaded.config, loaded.config.activation_checkpoint.selective_ac_option
    key = "activation_checkpoint.selective_ac_option"
    number = int(option[:20]) if re.fullmatch("[1-9][0-9]*", option) else 0
    if option != "op" and not 1 <= number <= config.model.n_layers:
        allowed = f'"op", or a number from "1" to "{config.model.n_layers}" (model.n_layers)'
        return [_problem(loaded, key, allowed, '"2" recomputes every second block')] if option else []
    if config.activation_checkpoint.mode != "selective" or option != "op":
        return []
    inside = "tp" if config.parallelism.tp > 1 else "experts" if config.model.moe.n_experts else ""
    if config.compile.enable and inside:
        allowed = f'"none", "full", or a number as selective_ac_option, with compile and {inside}: compiled code there '
        allowed += "hides the operators to choose from"
        return [
            _problem(loaded, "activation_checkpoint.mode", allowed, 'set selective_ac_option to "2", or mode to "full"')
        ]
    return []


def _empty_texts(loaded: Loaded) -> list[Problem]:
    """Where "" is a key's default it means something of its own."""
    texts = {name: key.field.default for name, key in KEYS.items() if key.kind == "text" and not key.in_list}
    empty = [name for name, default in texts.items() if default and not _value(loaded, name)]
    for i, source in enumerate(loaded.config.data.sources):
        fields = type(source).model_fields.items()
        empty += [f"data.sources.{i}.{name}" for name, field in fields if field.default and getattr(source, name) == ""]
    return [_problem(loaded, key, "text that is not empty", "remove the key for its default", '""') for key in empty]


def _heads(loaded: Loaded) -> list[Problem]:
    model = loaded.config.model
    problems = []
    if model.head_dim == 0 and model.dim % model.n_heads:
        allowed = f"a multiple of model.n_heads = {model.n_heads}, or model.head_dim set"
        problems.append(_problem(loaded, "model.dim", allowed, "set model.head_dim, or change dim or n_heads"))
    elif model.resolved_head_dim % 2:
        key = "model.head_dim" if model.head_dim else "model.dim"
        what = str(model.head_dim) if model.head_dim else f"{model.dim}, which makes heads of {model.resolved_head_dim}"
        problems.append(_problem(loaded, key, "an even head width (RoPE turns pairs)", "change it or n_heads", what))
    if model.n_heads % model.n_kv_heads:
        allowed = f"a divisor of model.n_heads = {model.n_heads}"
        problems.append(_problem(loaded, "model.n_kv_heads", allowed, "each serves n_heads / n_kv_heads query heads"))
    return problems


def _rope_scaling(loaded: Loaded) -> list[Problem]:
    scaling = loaded.config.model.rope_scaling
    if scaling.factor == 1 or scaling.low_freq_factor < scaling.high_freq_factor:
        return []
    allowed = f"more than low_freq_factor = {scaling.low_freq_factor}"
    return [_problem(loaded, "model.rope_scaling.high_freq_factor", allowed, "Llama 3.1 has 1.0 and 4.0")]


def _experts(loaded: Loaded) -> list[Problem]:
    model, moe = loaded.config.model, loaded.config.model.moe
    if moe.n_experts == 0:
        return []
    problems = []
    if not 1 <= moe.top_k <= moe.n_experts:
        allowed = f"1 to model.moe.n_experts = {moe.n_experts}"
        problems.append(_problem(loaded, "model.moe.top_k", allowed, "set it: Mixtral has 2 of 8, Qwen3 8 of 128"))
    for key, size in (("model.moe.expert_dim", moe.expert_dim), ("model.dim", model.dim)):
        if size == 0 or size % 8:
            allowed = "a multiple of 8 while model.moe.n_experts is above 0: grouped matmuls need rows of 16 bytes"
            problems.append(_problem(loaded, key, allowed, f"set it to {_near_multiples(size, 8)}"))
    if moe.first_k_dense >= model.n_layers:
        allowed = f"less than model.n_layers = {model.n_layers}"
        fix = "leave a layer for the experts, or set model.moe.n_experts = 0"
        problems.append(_problem(loaded, "model.moe.first_k_dense", allowed, fix))
    return problems


def _near_multiples(n: int, step: int) -> str:
    below, above = n // step * step, -(-n // step) * step
    return f"{below} or {above}" if below else "one, such as model.ffn_dim / model.moe.top_k" if n == 0 else f"{above}"


def _lr_schedule(loaded: Loaded) -> list[Problem]:
    schedule = loaded.config.lr_scheduler
    if schedule.warmup_steps <= schedule.total_steps:
        return []
    allowed = f"at most lr_scheduler.total_steps = {schedule.total_steps}"
    fix = "shorten the warmup or lengthen the schedule"
    return [_problem(loaded, "lr_scheduler.warmup_steps", allowed, fix)]


def _tokenizer(loaded: Loaded) -> list[Problem]:
    config = loaded.config
    if config.tokenizer.path != EMBEDDED or config.model.vocab_size >= EMBEDDED_VOCAB_SIZE:
        return []
    allowed = f"at least {EMBEDDED_VOCAB_SIZE}, the size of the embedded tokenizer"
    return [_problem(loaded, "model.vocab_size", allowed, "raise it, or set tokenizer.path to a smaller tokenizer")]


def _sources(loaded: Loaded) -> list[Problem]:
    sources = loaded.config.data.sources
    problems = []
    first: dict[str, int] = {}
    for i, source in enumerate(sources):
        place = EMBEDDED if source.path == EMBEDDED else os.path.realpath(source.path)
        if place in first:
            allowed = f"a path of its own (data.sources.{first[place]} is the same)"
            fix = "give the path once, with the sum of the weights"
            problems.append(_problem(loaded, f"data.sources.{i}.path", allowed, fix, shown(source.path)))
        first.setdefault(place, i)
        if source.validation_path and source.path == source.validation_path:
            fix = "leave it out for data.validation_fraction of the documents"
            key = f"data.sources.{i}.validation_path"
            problems.append(_problem(loaded, key, "another path than the source's own", fix, shown(source.path)))
    if sum(source.weight for source in sources) == float("inf"):
        fix = "weights are relative: divide all of them"
        return [*problems, _problem(loaded, "data.sources", "weights with a finite sum", fix, "weights too large")]
    weights = [Fraction(source.weight) for source in sources]  # exact
    for i, weight in enumerate(weights):
        if weight * BLOCK < sum(weights):  # block_quotas relies on it
            least = float(sum(weights) - weight) / (BLOCK - 1) * 1.00001  # so that what is shown is not rounded down
            allowed = f"at least 1/{BLOCK} of the sum of all weights, one sample in a block of {BLOCK}"
            fix = f"raise it to {least:.6g} or more, or remove the source"
            problems.append(_problem(loaded, f"data.sources.{i}.weight", allowed, fix, shown(sources[i].weight)))
    return problems


def _validation(loaded: Loaded) -> list[Problem]:
    config = loaded.config
    held_out = config.data.validation_fraction > 0 or any(source.validation_path for source in config.data.sources)
    if not config.validation.enable or held_out:
        return []
    fix = "hold documents out, give a source a validation_path, or set validation.enable = false"
    return [_problem(loaded, "data.validation_fraction", "more than 0 while validation.enable is true", fix)]


def _document_mask(loaded: Loaded) -> list[Problem]:
    config = loaded.config
    if not config.data.document_mask or config.tokenizer.add_bos or config.tokenizer.add_eos:
        return []
    fix = "set tokenizer.add_eos = true: documents are told apart by their marks"
    return [_problem(loaded, "data.document_mask", "false while tokenizer.add_bos and add_eos are false", fix)]


def _context_parallel(loaded: Loaded) -> list[Problem]:
    config, parallelism = loaded.config, loaded.config.parallelism
    if parallelism.cp == 1:
        return []
    problems = []
    chunks, length = 2 * parallelism.cp * parallelism.tp, config.training.seq_len
    if length % chunks:
        allowed = f"a multiple of 2 x cp x tp = {chunks}: every cp rank holds two chunks of each sequence"
        if parallelism.tp > 1:
            allowed += ", and its part is cut over tp"
        below, above = length // chunks * chunks, -(-length // chunks) * chunks
        fix = f"set it to {f'{below} or {above}' if below else above}, or change parallelism.cp"
        problems.append(_problem(loaded, "training.seq_len", allowed, fix))
    if config.data.document_mask and parallelism.cp_method == "ring":
        allowed = '"allgather" while data.document_mask is true: the ring\'s kernels take no mask'
        problems.append(_problem(loaded, "parallelism.cp_method", allowed, "--parallelism.cp_method allgather"))
    return problems


def _folders(loaded: Loaded) -> list[Problem]:
    config = loaded.config
    if os.path.realpath(run_folder(loaded)) != os.path.realpath(config.data.cache_dir):
        return []
    allowed = f"another folder than the run's, {run_folder(loaded)}"
    return [_problem(loaded, "data.cache_dir", allowed, "change data.cache_dir or run.name")]


def _tensor_parallel(loaded: Loaded) -> list[Problem]:
    """Heads, sequence, MLP and vocabulary must leave every rank a part. Parts of the last two may be unequal."""
    model, tp, cp = loaded.config.model, loaded.config.parallelism.tp, loaded.config.parallelism.cp
    if tp == 1:
        return []
    problems = []
    heads, kv_heads = model.n_heads, model.n_kv_heads
    degrees = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if tp not in degrees:
        allowed = (
            f"one of {degrees}: it divides n_heads = {heads}, and divides or is divided by n_kv_heads = {kv_heads}"
        )
        fix = "a rank has whole query heads, and whole key/value heads or one that its neighbours have too"
        problems.append(_problem(loaded, "parallelism.tp", allowed, fix))
    if cp == 1 and loaded.config.training.seq_len % tp:  # with cp, _context_parallel says it
        allowed = f"a multiple of tp = {tp}, the parts of a sequence"
        problems.append(_problem(loaded, "training.seq_len", allowed, "change it or parallelism.tp"))
    for key, size, got, fix in _tp_sizes(loaded):
        most = -(-size // tp)
        if (tp - 1) * most >= size:
            what = f"{got}, which is cut into {-(-size // most)} parts of at most {most}"
            problems.append(_problem(loaded, key, f"enough for {tp} tensor parallel ranks", fix, what))
    return problems


def _tp_sizes(loaded: Loaded) -> list[tuple[str, int, str, str]]:
    """What is cut over tp and need not divide: key, size, the size in words, how to change it."""
    model, tp = loaded.config.model, loaded.config.parallelism.tp
    vocab, ffn, shared = model.padded_vocab_size, model.ffn_dim, model.moe.n_shared_experts * model.moe.expert_dim
    sizes = [("model.vocab_size", vocab, f"{vocab} (padded)", f"set model.vocab_pad_multiple to a multiple of {tp}")]
    if not model.is_moe_layer(0):
        sizes.insert(0, ("model.ffn_dim", ffn, str(ffn), f"set it to a multiple of {tp}"))
    if model.moe.n_experts and shared:
        fix = f"make n_shared_experts x expert_dim a multiple of {tp}"
        sizes.append(("model.moe.expert_dim", shared, f"a shared expert of {shared}", fix))
    return sizes


def _sharded_experts(loaded: Loaded, layout: Layout) -> list[Problem]:
    config = loaded.config
    sharded = config.model.moe.n_experts > 0 and layout.world_size > 1 and not layout.uses_ddp
    recomputation = config.activation_checkpoint
    if not sharded or recomputation.mode != "selective" or recomputation.selective_ac_option != "op":
        return []
    allowed = '"none", "full", or a number as selective_ac_option, where experts are sharded over ranks: they are '
    allowed += "gathered inside of the block, which torch then cannot recompute in part"
    return [
        _problem(loaded, "activation_checkpoint.mode", allowed, 'set selective_ac_option to "2", or mode to "full"')
    ]


def _lost_shards(loaded: Loaded, layout: Layout) -> list[Problem]:
    allowed = f"a size that torch can cut over tp = {layout.tp} and then dp_shard x cp = {layout.fsdp}"
    return [
        _problem(loaded, key, allowed, fix, got)
        for key, size, got, fix in _tp_sizes(loaded)
        if not shards_are_found(size, layout.tp, layout.fsdp)
    ]


RULES: tuple[Rule, ...] = (
    _expert_parallel,
    _tensor_parallel,
    _stages,
    _pipeline_schedule,
    _recomputation,
    _empty_texts,
    _heads,
    _rope_scaling,
    _experts,
    _lr_schedule,
    _tokenizer,
    _sources,
    _validation,
    _document_mask,
    _context_parallel,
    _folders,
)


def run_folder(loaded: Loaded) -> Path:
    return Path(loaded.config.run.output_dir, loaded.config.run.name)


# --- this machine ---


def machine_problems(loaded: Loaded, gpus: int, nproc: int | None = None) -> list[Problem]:
    """What this machine lacks. gpus: CUDA devices it has; nproc: processes to start on it, when known."""
    return device_problems(loaded, gpus, nproc) + file_problems(loaded)


def file_problems(loaded: Loaded) -> list[Problem]:
    """Files and folders that are not there, or cannot be read or made."""
    config = loaded.config
    problems = []
    for i, source in enumerate(config.data.sources):
        for name in ("path", "validation_path"):
            path = getattr(source, name)
            if path and path != EMBEDDED:
                problems += _input(loaded, f"data.sources.{i}.{name}", path)
    if config.tokenizer.path and config.tokenizer.path != EMBEDDED:
        problems += _input(loaded, "tokenizer.path", config.tokenizer.path)
    run = run_folder(loaded)
    written = [("run.output_dir", run / "checkpoints" if config.checkpoint.enable else run)]
    for key, folder in (*written, ("data.cache_dir", Path(config.data.cache_dir))):
        obstacle = _cannot_write(folder)
        if obstacle and str(folder) not in ("", "."):
            problems.append(_problem(loaded, key, "a folder that can be made and written", obstacle))
    if config.checkpoint.enable:
        problems += _resume(loaded)
    if starts_from_weights(loaded):
        problems += _init_from(loaded)
    return problems


def device_problems(loaded: Loaded, gpus: int, nproc: int | None) -> list[Problem]:
    device = loaded.config.run.device
    if device == "cuda" and gpus == 0:
        fix = "set run.device to auto or cpu, or check the GPU driver and CUDA_VISIBLE_DEVICES"
        return [_problem(loaded, "run.device", '"auto" or "cpu": this machine shows no CUDA GPU', fix)]
    if device != "cpu" and nproc is not None and 0 < gpus < nproc:
        allowed = f"at most one process a GPU, and this machine shows {gpus}"
        fix = f"run {gpus} here, or set run.device to cpu"
        return [Problem("", "processes", str(nproc), allowed, fix)]
    return []


def _input(loaded: Loaded, key: str, path: str) -> list[Problem]:
    """A file, a folder or a glob. What is in it is looked at when the data is prepared, still before any worker."""
    allowed = "a file, a folder or a glob that exists and can be read"
    if os.path.exists(path):
        folder = os.path.isdir(path)
        if os.access(path, os.R_OK | (os.X_OK if folder else 0)):
            return []
        fix = f"change its permissions: this {'folder' if folder else 'file'} cannot be read"
        return [_problem(loaded, key, allowed, fix, shown(path))]
    if glob.has_magic(path):
        fix = "nothing matches this pattern"
        try:
            if next(expand(path)[1], None) is not None:
                return []
        except OSError as error:
            fix = f"{error.filename} cannot be read ({error.strerror})"
        return [_problem(loaded, key, allowed, fix, shown(path))]
    return [_problem(loaded, key, allowed, _not_there(path), shown(path))]


def _not_there(path: str) -> str:
    """Why a path is not there, and the nearest one that is."""
    parent, name = os.path.split(os.path.normpath(path))
    if not os.path.isdir(parent or "."):
        return f"there is no folder {os.path.abspath(parent)}"
    close = nearest(name, os.listdir(parent or ".")) if os.access(parent or ".", os.R_OK) else None
    return f"did you mean {os.path.join(parent, close)}?" if close else f"there is no {os.path.abspath(path)}"


def _cannot_write(folder: Path) -> str | None:
    """What keeps a folder from being made and written, if anything does: looks at its nearest parent that exists."""
    place = Path(os.path.abspath(folder))
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is {'a file' if place.exists() else 'a link to nowhere'}"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written"
    return None


def _resume(loaded: Loaded) -> list[Problem]:
    resume = loaded.config.checkpoint.resume
    if resume in ("auto", "never", ""):
        return []
    if not os.path.isdir(resume):
        fix = f"{resume} is a file" if os.path.exists(resume) else _not_there(resume)
        return [_problem(loaded, "checkpoint.resume", '"auto", "never" or the path of a step folder', fix)]
    if os.path.isfile(os.path.join(resume, "manifest.json")):
        return []
    manifests = Path(resume).glob("**/step-*/manifest.json")
    steps = sorted(str(manifest.parent) for manifest in manifests if storage.step_of(manifest.parent) is not None)
    fix = f"did you mean {steps[-1]}?" if steps else "give a folder outputs/NAME/checkpoints/step-N"
    return [_problem(loaded, "checkpoint.resume", "a committed checkpoint: a folder with a manifest.json", fix)]


def starts_from_weights(loaded: Loaded) -> bool:
    """Whether checkpoint.init_from will be read: it is what a run starts from that has nothing to resume."""
    checkpoint = loaded.config.checkpoint
    if not checkpoint.init_from:
        return False
    resumes = checkpoint.resume not in ("auto", "never") or _has_checkpoints(run_folder(loaded))
    return not (checkpoint.enable and resumes)


def _has_checkpoints(run: Path) -> bool:
    return bool(storage.committed_folders(run / "checkpoints"))


def _init_from(loaded: Loaded) -> list[Problem]:
    """Whether there are weights, and of which kind. What is in them is looked at by the launcher, with torch."""
    key, path = "checkpoint.init_from", loaded.config.checkpoint.init_from
    allowed = "a step folder, a run folder with a checkpoint, or the folder of a Hugging Face model"
    if not os.path.isdir(path):
        fix = f"{path} is a file: give its folder" if os.path.exists(path) else _not_there(path)
        return [_problem(loaded, key, allowed, fix)]
    folder = Path(path)
    if storage.committed_at(folder) or (folder / "config.json").is_file():
        return []
    fix = "it has no manifest.json, no config.json, and no checkpoints/step-N with a manifest.json"
    return [_problem(loaded, key, allowed, fix)]


# --- warnings ---


def warnings(loaded: Loaded, world_size: int | None) -> list[str]:
    """Settings that are legal but ignored, changed, or most likely not meant."""
    config = loaded.config
    found = _embedded(loaded) + _switched_off(loaded) + _lr_warnings(loaded) + _mask_warnings(loaded)
    found += _checkpoint_warnings(loaded)
    scaling = _chosen(loaded, "model.rope_scaling")
    if scaling and config.model.rope_scaling.factor == 1:
        found.append(f"{', '.join(scaling)}: ignored while model.rope_scaling.factor is 1.")
    found += _expert_warnings(loaded)
    option = "activation_checkpoint.selective_ac_option"
    if config.activation_checkpoint.mode != "selective" and option in _chosen(loaded, "activation_checkpoint"):
        found.append(f'{option}: ignored while activation_checkpoint.mode is not "selective".')
    world = world_size if world_size is not None else fixed_world_size(config.parallelism)
    try:
        layout = resolve_layout(config.parallelism, world) if world else None
    except InputError:
        layout = None  # static_problems says so
    return found if layout is None else found + _layout_warnings(loaded, layout)


def _chosen(loaded: Loaded, section: str) -> list[str]:
    """Keys of a section that were given, with another value than the default (a resolved config gives all of them)."""
    values: BaseModel = loaded.config
    for name in section.split("."):
        values = getattr(values, name)
    fields = type(values).model_fields
    keys = {f"{section}.{name}": getattr(values, name) != field.default for name, field in fields.items()}
    return [key for key in loaded.origins if keys.get(key)]


def _embedded(loaded: Loaded) -> list[str]:
    config = loaded.config
    if config.model.vocab_size < 4 * EMBEDDED_VOCAB_SIZE:
        return []
    tokenizer = 'tokenizer.path = "your.model"' if config.tokenizer.path == EMBEDDED else ""
    if any(source.path == EMBEDDED for source in config.data.sources):
        lines = ['data.sources = [{ path = "your/texts" }]', *([tokenizer] if tokenizer else [])]
        return [
            f"THIS RUN DOES NOT TRAIN ON REAL DATA. Its model has {config.model.vocab_size} token ids, but it uses the "
            "embedded text (the Python source of sympy, 16.6 MB): good for seeing that it runs, not for a model. "
            f"Set: {' and '.join(lines)}."
        ]
    if tokenizer:
        return [
            f"the model has {config.model.vocab_size} token ids, but the embedded tokenizer only {EMBEDDED_VOCAB_SIZE} "
            f"pieces. Set: {tokenizer}."
        ]
    return []


_ALWAYS_READ = ("checkpoint.init_from", "checkpoint.allow_rope_change")  # also where nothing is saved


def _switched_off(loaded: Loaded) -> list[str]:
    """Keys given beside, or after, an enable = false that makes them idle."""
    found = []
    for section in ("checkpoint", "validation"):
        if getattr(loaded.config, section).enable:
            continue
        off_by = loaded.origin(f"{section}.enable")
        keys = [key for key in _chosen(loaded, section) if key not in (f"{section}.enable", *_ALWAYS_READ)]
        # Switching a section of the file off on the command line is no mistake.
        idle = [key for key in keys if off_by != COMMAND_LINE or loaded.origin(key) == COMMAND_LINE]
        if idle:
            found.append(f"{', '.join(idle)}: ignored while {section}.enable is false.")
    return found


def _checkpoint_warnings(loaded: Loaded) -> list[str]:
    checkpoint = loaded.config.checkpoint
    folder = run_folder(loaded) / "checkpoints"
    found = []
    if checkpoint.allow_rope_change and not checkpoint.init_from:
        found.append("checkpoint.allow_rope_change: ignored without checkpoint.init_from.")
    if not checkpoint.enable:
        if _has_checkpoints(run_folder(loaded)):
            found.append(
                f"checkpoint.enable is false: what is in {folder} is not gone on from. The run starts anew, and the "
                "metrics of the earlier one are set aside."
            )
        return found
    if checkpoint.walltime and not checkpoint.before_walltime:
        found.append("checkpoint.walltime: ignored while checkpoint.before_walltime is 0.")
    if checkpoint.init_from and checkpoint.resume not in ("auto", "never"):
        found.append("checkpoint.init_from: ignored while checkpoint.resume is the path of a checkpoint.")
    if checkpoint.keep_every and checkpoint.keep_latest_k == 0:
        found.append("checkpoint.keep_every: ignored while checkpoint.keep_latest_k is 0, which keeps all checkpoints.")
    elif checkpoint.keep_every % checkpoint.interval:
        kept = math.lcm(checkpoint.keep_every, checkpoint.interval)
        found.append(
            f"checkpoint.keep_every = {checkpoint.keep_every} is no multiple of checkpoint.interval = "
            f"{checkpoint.interval}: only every {kept}th step is both saved and kept for good."
        )
    return found


def _lr_warnings(loaded: Loaded) -> list[str]:
    schedule, steps = loaded.config.lr_scheduler, loaded.config.training.steps
    found = []
    left = schedule.total_steps - schedule.warmup_steps
    if schedule.decay_ratio < 1 and schedule.decay_steps > left >= 0:
        found.append(
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio} asks for {schedule.decay_steps} steps of decay, but "
            f"warmup leaves {left}: the decay takes these {left}."
        )
    if schedule.decay_ratio > 0 and steps > schedule.total_steps:
        found.append(
            f"training.steps = {steps} goes past lr_scheduler.total_steps = {schedule.total_steps}: from there the "
            f"learning rate is {schedule.min_lr_factor} of the peak."
        )
    idle = [key for key in _chosen(loaded, "lr_scheduler") if key.endswith((".decay_type", ".min_lr_factor"))]
    if schedule.decay_ratio == 0 and idle:
        found.append(f"{', '.join(idle)}: ignored while lr_scheduler.decay_ratio is 0.")
    return found


def _expert_warnings(loaded: Loaded) -> list[str]:
    moe, chosen = loaded.config.model.moe, _chosen(loaded, "model.moe")
    if moe.n_experts == 0:
        return [f"{', '.join(chosen)}: ignored while model.moe.n_experts is 0."] if chosen else []
    found = []
    balancing = [key for key in chosen if key.endswith((".bias_update_rate", ".aux_loss_coeff"))]
    if moe.top_k == moe.n_experts and balancing:
        found.append(f"{', '.join(balancing)}: changes nothing, every token goes through all {moe.n_experts} experts.")
    if moe.top_k == 1 and moe.route_norm:
        found.append(
            "model.moe.route_norm with model.moe.top_k = 1: the weight of the one expert is always 1, so the loss "
            "teaches the router nothing. Set model.moe.route_norm = false."
        )
    return found


def _mask_warnings(loaded: Loaded) -> list[str]:
    seq_len = loaded.config.training.seq_len
    if not loaded.config.data.document_mask or seq_len % 16 == 0:
        return []
    return [
        f"data.document_mask with training.seq_len = {seq_len}, which 16 does not divide: on a GPU torch "
        "pads the mask, and may keep one for every head of every layer."
    ]


def _reduce_warnings(loaded: Loaded, layout: Layout) -> list[str]:
    """Where a narrow dtype of reduction does nothing, or nothing good."""
    key = "training.mixed_precision_reduce"
    if layout.world_size == 1:
        return [f"{key}: ignored, one process sums nothing over ranks."]
    if layout.uses_ddp or layout.fsdp > 1:
        return []
    if layout.pp > 1 or resolve_zero_stage(loaded.config.parallelism, layout) == 1:
        why = "a pipeline" if layout.pp > 1 else "zero_stage 1"
        return [f"{key}: ignored, under {why} it is the dtype of sums over dp_shard x cp, which is 1, alone."]
    if layout.dp_replicate == 1:
        return [f"{key}: rounds gradients and sends nothing in it, as dp_replicate x dp_shard x cp is 1."]
    return []


def _layout_warnings(loaded: Loaded, layout: Layout) -> list[str]:
    config = loaded.config
    found = []
    if config.parallelism.zero_stage != "auto" and (layout.uses_ddp or layout.world_size == 1):
        why = "whole replicas (dp_replicate alone)" if layout.uses_ddp else "one process"
        found.append(f"parallelism.zero_stage = {config.parallelism.zero_stage}: ignored, {why} shards nothing.")
    elif config.parallelism.zero_stage != "auto" and layout.fsdp == 1:
        found.append(
            f"parallelism.zero_stage = {config.parallelism.zero_stage}: shards nothing while dp_shard x cp is 1; it "
            "only says when weights in another dtype are freed and gradients are reduced."
        )
    if config.training.mixed_precision_reduce != "float32":
        found += _reduce_warnings(loaded, layout)
    if layout.cp == 1 and config.parallelism.cp_method != "ring":
        found.append("parallelism.cp_method: ignored while parallelism.cp is 1.")
    pp_keys = ("pp_schedule", "pp_microbatches", "pp_layers_per_stage")
    idle = [key for key in _chosen(loaded, "parallelism") if key.rpartition(".")[2] in pp_keys]
    if layout.pp == 1 and idle:
        found.append(f"{', '.join(idle)}: ignored while parallelism.pp is 1.")
    try:
        pipeline = plan_pipeline(config.model, config.parallelism)
        plan = plan_batch(config.training, layout, pipeline)
    except InputError:
        return found
    if pipeline is not None and pipeline.schedule in ("GPipe", "LoopedBFS") and config.training.loss_chunk_tokens:
        rows = -(-config.model.padded_vocab_size // layout.tp)
        held = plan.microbatches * rows * config.model.dim * 4
        if held >= 2**30:
            found.append(
                f"parallelism.pp_schedule = {pipeline.schedule} keeps the output matrix's gradient of each of "
                f"{plan.microbatches} microbatches: {held / 2**30:.1f} GiB on the last stage. 1F1B keeps one at a "
                "time; fewer microbatches (parallelism.pp_microbatches) are fewer."
            )
    if plan.local_batch_size < min(config.training.local_batch_size, plan.rank_samples):
        found.append(
            f"training.local_batch_size = {config.training.local_batch_size}: {plan.local_batch_size} is used, the "
            f"largest divisor of this layout's {plan.rank_samples} samples a rank."
        )
    return found
