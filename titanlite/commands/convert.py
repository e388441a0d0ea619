"""`titanlite convert`: a checkpoint to Hugging Face's files, or those to a checkpoint. Overwrites nothing."""

from __future__ import annotations

import argparse
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from titanlite.checkpoint import storage
from titanlite.checkpoint.storage import CheckpointError, DamagedError
from titanlite.command_line import Parser, print_problems, say
from titanlite.commands.checkpoint import committed, examine, size_text
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, InputError, Problem
from titanlite.config.schema import ModelConfig, TokenizerConfig
from titanlite.config.validate import COMMAND_LINE
from titanlite.data.export_tokenizer import huggingface_files, puts_bos
from titanlite.data.prepare import open_tokenizer
from titanlite.data.tokenizer import Tokenizer
from titanlite.files import write_atomically

USAGE = (
    "titanlite convert to-hf STEP_DIR OUT [--dtype DTYPE] [--tokenizer PATH|none] [--shard-size SIZE] | from-hf DIR OUT"
)
DESCRIPTION = """to-hf    a checkpoint (of a run: its newest) to a folder that transformers loads
from-hf  such a folder, with safetensors, to a checkpoint that checkpoint.init_from takes

Llama, Qwen3, Mixtral and Qwen3-MoE. OUT is a new or an empty folder. Neither model is ever in memory as a whole."""
EPILOG = "exit code: 0 converted, 1 the checkpoint is damaged or the disk is full, 2 wrong input; docs/huggingface.md"
DTYPE_NAMES = ("float32", "bfloat16", "float16")
# What stands beside weights, and is kept beside a checkpoint that is made of them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
KEPT_FILES = (*TOKENIZER_FILES, "chat_template.jinja", "generation_config.json")


def make_parser() -> Parser:
    parser = Parser("titanlite convert", USAGE, DESCRIPTION, EPILOG, keys=False)
    parser.add_argument("action", metavar="to-hf|from-hf", choices=("to-hf", "from-hf"))
    parser.add_argument("source", metavar="STEP_DIR|DIR", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32", help="of the tensors (to-hf; float32)")
    parser.add_argument("--tokenizer", metavar="PATH", default="", help="another than the run's, or none (to-hf)")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of a file, such as 500MB (to-hf; 5GB)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises InputError."""
    options = make_parser().parse_args(list(argv))
    try:
        with _new_folder(options.out):
            (to_huggingface if options.action == "to-hf" else from_huggingface)(options)
    except DamagedError as error:
        print_problems(error.problems, "nothing was converted")
        return EXIT_ERROR
    except PermissionError as error:
        got = f"{error.filename}: {error.strerror}"
        raise InputError(
            Problem(COMMAND_LINE, "PATH", got, "files that can be read", "change their permissions")
        ) from None
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(f"the disk is full ({error.filename or options.out}): make room, or name another place")
        else:
            say(str(error))
        return EXIT_ERROR
    return EXIT_DONE


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """OUT as an empty folder; if the work in it fails, what it has written is removed. Raises InputError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = f"{out}, which {'has files in it' if out.is_dir() else 'is a file'}"
        fix = "nothing is overwritten: choose another name, or remove it (what a killed conversion has left, too)"
        raise InputError(Problem(COMMAND_LINE, "OUT", got, "a new or an empty folder", fix))
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = f"{out}, which cannot be made ({error.strerror})"
        raise InputError(
            Problem(COMMAND_LINE, "OUT", got, "a new or an empty folder", "choose another place")
        ) from None
    try:
        yield
    except BaseException:
        for file in sorted(out.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
        if made:
            out.rmdir()
        raise


# --- to Hugging Face ---


def to_huggingface(options: argparse.Namespace) -> None:
    shard_bytes = _bytes(options.shard_size)
    folder = committed(options.source)[-1]
    manifest = storage.read_manifest(folder)
    model = _model_of(folder, manifest)
    from titanlite.checkpoint import convert
    from titanlite.checkpoint.huggingface_model import model_type

    kind = model_type(model)  # before anything takes time
    seq_len = _context_length(manifest, model)
    token_ids, files = _tokenizer_files(manifest, options.tokenizer, model, seq_len)
    say(f"{folder}: comparing checksums")
    verdict = examine(folder)
    if not verdict.ok:
        raise DamagedError(verdict.problems)
    if verdict.without_checksum:
        say(f"warning: {folder} has no checksums: only sizes were compared")
    convert.write_huggingface(
        folder,
        options.out,
        model,
        dtype=options.dtype,
        shard_bytes=shard_bytes,
        max_position_embeddings=seq_len,
        token_ids=token_ids,
        others=files,
        report=say,
    )
    print(f"{options.out}: {kind}, {options.dtype}, step {manifest['step']} of {folder}")


def _model_of(folder: Path, manifest: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(manifest["config"].get("model"))
    except ValidationError as error:
        keys = ", ".join(".".join(["model", *map(str, details["loc"])]) for details in error.errors())
        got = f"another [model] than this titanlite has ({keys})"
        raise InputError(
            Problem(f"{folder}/manifest.json", "config", got, "a model", "use the titanlite of it")
        ) from None


def _context_length(manifest: Mapping[str, Any], model: ModelConfig) -> int:
    """Positions that the model is good for: what it was trained on, or what its rotary scaling was made for."""
    imported = manifest["train_state"].get("max_position_embeddings")
    if imported:
        return int(imported)
    scaling, seq_len = model.rope_scaling, int(manifest["config"].get("training", {}).get("seq_len", 0))
    scaled = int(scaling.factor * scaling.original_max_position_embeddings) if scaling.factor > 1 else 0
    return max(seq_len, scaled, 1)


def _tokenizer_files(
    manifest: Mapping[str, Any], chosen: str, model: ModelConfig, max_length: int
) -> tuple[dict[str, int | None], dict[str, bytes]]:
    """(bos_token_id and eos_token_id, the tokenizer's files) of the run, or of what --tokenizer names."""
    nothing: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    section = manifest["config"].get("tokenizer")
    if chosen == "none" or (not chosen and section is None):
        say("no tokenizer is written" + ("" if chosen else ": the checkpoint names none (--tokenizer PATH)"))
        return nothing, {}
    config = TokenizerConfig.model_validate(section or {})
    config = config.model_copy(update={"path": chosen}) if chosen else config
    cache = Path(manifest["config"].get("data", {}).get("cache_dir", "outputs/cache"))
    try:
        tokenizer = open_tokenizer(config, cache, say, model.vocab_size)
    except InputError as error:
        fix = "name its file with --tokenizer PATH, or write none with --tokenizer none"
        raise InputError([Problem("", p.key, p.got, p.allowed, fix) for p in error.problems]) from None
    _check_same(tokenizer, manifest, chosen)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {key: None if i < 0 else i for key, i in ids.items()}, huggingface_files(tokenizer, config, max_length, say)


def _check_same(tokenizer: Tokenizer, manifest: Mapping[str, Any], chosen: str) -> None:
    """The file may have changed since training. Raises InputError if it is another one."""
    trained_on = manifest["train_state"].get("data", {}).get("tokenizer")
    if trained_on in (None, tokenizer.fingerprint):
        return
    got = f"{str(tokenizer.path)!r} (sha256 {tokenizer.fingerprint[:12]}…)"
    if chosen:
        say(f"warning: {got} is not the file that the run was trained with (sha256 {trained_on[:12]}…)")
        return
    allowed = f"the file that the run was trained with (sha256 {trained_on[:12]}…)"
    fix = "name that file with --tokenizer PATH, or write none with --tokenizer none"
    raise InputError(Problem("", "tokenizer.path", got, allowed, fix))


def _bytes(text: str) -> int:
    """5GB, 500MB, 1.5 gb or a plain number of bytes. Raises InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")) if found else 0
    if size <= 0:
        raise InputError(
            Problem(COMMAND_LINE, "--shard-size", text, "a size such as 5GB or 500MB", "give a number with a unit")
        )
    return size


# --- from Hugging Face ---


def from_huggingface(options: argparse.Namespace) -> None:
    from titanlite.checkpoint import convert
    from titanlite.checkpoint.huggingface import HuggingFaceWeights
    from titanlite.checkpoint.huggingface_model import model_section, read_config

    section = model_section(options.source)
    model = ModelConfig.model_validate(section)
    weights = HuggingFaceWeights(options.source, model)
    length = read_config(options.source).get("max_position_embeddings")
    for name in KEPT_FILES:
        if (file := options.source / name).is_file():
            write_atomically(options.out / name, file.read_bytes())
    config: dict[str, Any] = {"model": section}
    found = [name for name in ("tokenizer.json", "tokenizer.model") if (options.out / name).is_file()]
    if found:
        config["tokenizer"] = {"path": str((options.out / found[0]).absolute()), "add_bos": puts_bos(options.out)}
    write_atomically(options.out / "model.toml", tomli_w.dumps(config).encode())
    folder = convert.write_checkpoint(
        weights,
        options.out,
        config=config | {"model": model.model_dump(mode="json")},
        max_position_embeddings=length if isinstance(length, int) else 0,
        report=say,
    )
    size = sum(record.bytes for record in storage.records(storage.read_manifest(folder)).values())
    print(f"{folder}: {size_text(size)}; its [model] section is in {options.out / 'model.toml'}")
