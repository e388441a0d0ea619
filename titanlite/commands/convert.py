"""`titanlite convert`: a checkpoint to Hugging Face's files, or those to a checkpoint. Overwrites nothing."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from titanlite.checkpoint import storage
from titanlite.checkpoint.storage import CheckpointError, DamagedError
from titanlite.command_line import Parser, print_problems, say
from titanlite.commands.checkpoint import committed, examine, not_permitted, size_text
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, InputError, Problem
from titanlite.config.schema import DataConfig, ModelConfig, TokenizerConfig
from titanlite.config.validate import COMMAND_LINE
from titanlite.data.export_tokenizer import huggingface_files, puts_bos
from titanlite.data.prepare import open_tokenizer
from titanlite.data.tokenizer import Tokenizer
from titanlite.files import fsync_folder, write_atomically

USAGE = (
    "titanlite convert to-hf STEP_DIR OUT [--dtype DTYPE] [--tokenizer PATH|none] [--shard-size SIZE] | from-hf DIR OUT"
)
DESCRIPTION = """to-hf    a checkpoint (of a run: its newest) to a folder that transformers loads
from-hf  such a folder, with safetensors, to a checkpoint that checkpoint.init_from takes

Llama, Qwen3, Mixtral and Qwen3-MoE. OUT is a new or an empty folder. Neither model is ever in memory as a whole."""
EPILOG = "exit code: 0 converted, 1 the checkpoint is damaged or the disk is full, 2 wrong input; docs/huggingface.md"
DTYPE_NAMES = ("float32", "bfloat16", "float16")  # keys of convert.DTYPES, which needs torch
# What stands beside weights, and is kept beside a checkpoint that is made of them.
KEPT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def make_parser() -> Parser:
    parser = Parser("titanlite convert", USAGE, DESCRIPTION, EPILOG, keys=False)
    parser.add_argument("action", metavar="to-hf|from-hf", choices=("to-hf", "from-hf"))
    parser.add_argument("source", metavar="STEP_DIR|DIR", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of the tensors (to-hf; float32)")
    parser.add_argument("--tokenizer", metavar="PATH", help="another than the run's, or none (to-hf)")
    parser.add_argument("--shard-size", metavar="SIZE", help="of a file, such as 500MB (to-hf; 5GB)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises InputError."""
    options = make_parser().parse_args(list(argv))
    try:
        with _new_folder(options.out) as folder:
            told = (to_huggingface if options.action == "to-hf" else from_huggingface)(options, folder)
    except DamagedError as error:
        print_problems(error.problems, "nothing was converted")
        return EXIT_ERROR
    except PermissionError as error:
        raise not_permitted(error, "files that may be read and written") from None
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(f"the disk is full ({error.filename or options.out}): make room, or name another place")
        else:
            say(str(error))
        return EXIT_ERROR
    print(told)
    return EXIT_DONE


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside OUT that becomes OUT once the work in it is done; if that fails, nothing is left of either, or of
    folders above that were made for it. Raises InputError, also if OUT has got files meanwhile."""
    place = Path(os.path.realpath(out))
    folder = place.with_name(f"{place.name}.{uuid.uuid4().hex}.tmp")
    missing = [parent for parent in place.parents if not parent.exists()]

    def wrong(why: str) -> InputError:
        fix = "nothing is overwritten: choose another place"
        return InputError(Problem(COMMAND_LINE, "OUT", f"{out}, which {why}", "a new or an empty folder", fix))

    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise wrong("has files in it" if place.is_dir() else "is a file")
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise wrong(f"cannot be made ({error.strerror})") from None
        yield folder
        fsync_folder(folder)
        try:
            folder.rename(place)
        except OSError as error:
            raise wrong(f"is no longer empty, or cannot be replaced ({error.strerror})") from None
        fsync_folder(place.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):  # another conversion is in it
                parent.rmdir()
        raise


# --- to Hugging Face ---


def to_huggingface(options: argparse.Namespace, out: Path) -> str:
    """Convert into the empty folder `out`; returns what there is to say when that has become OUT."""
    shard_bytes = _size(options.shard_size or "5GB")
    dtype = options.dtype or "float32"
    folder = committed(options.source)[-1]
    manifest = storage.read_manifest(folder)
    model = storage.section_of(manifest, folder, "model", ModelConfig)
    from titanlite.checkpoint import convert
    from titanlite.checkpoint.huggingface_model import model_type
    from titanlite.checkpoint.initial import open_weights

    kind = model_type(model)  # before anything takes time
    length = _context_length(manifest, model)
    token_ids, files = _tokenizer_files(folder, manifest, options.tokenizer or "", model, length)
    say(f"{folder}: comparing checksums")
    verdict = examine(folder)
    if not verdict.ok:
        raise DamagedError(verdict.problems)
    if verdict.without_checksum:
        say(f"warning: {folder} has no checksums: only sizes were compared")
    convert.write_huggingface(
        open_weights(folder, model),
        out,
        model,
        dtype=dtype,
        shard_bytes=shard_bytes,
        max_position_embeddings=length,
        token_ids=token_ids,
        others=files,
        report=say,
    )
    return f"{options.out}: {kind}, {dtype}, step {manifest['step']} of {folder}"


def _context_length(manifest: Mapping[str, Any], model: ModelConfig) -> int:
    """Positions that the model is good for: what it was trained on, or came with from Hugging Face, or, if it did not,
    what its rotary scaling was made for."""
    scaling, seq_len = model.rope_scaling, int(manifest["config"].get("training", {}).get("seq_len", 1))
    scaled = int(scaling.factor * scaling.original_max_position_embeddings) if scaling.factor > 1 else 0
    return max(seq_len, manifest["train_state"].get("max_position_embeddings") or scaled)


def _tokenizer_files(
    folder: Path, manifest: Mapping[str, Any], chosen: str, model: ModelConfig, max_length: int
) -> tuple[dict[str, int | None], dict[str, bytes]]:
    """(bos_token_id and eos_token_id, the tokenizer's files) of the run, or of what --tokenizer names."""
    nothing: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    has_one = "tokenizer" in manifest["config"]
    if chosen == "none" or (not chosen and not has_one):
        say("no tokenizer is written" + ("" if chosen else ": the checkpoint names none (--tokenizer PATH)"))
        return nothing, {}
    config = storage.section_of(manifest, folder, "tokenizer", TokenizerConfig) if has_one else TokenizerConfig()
    config = config.model_copy(update={"path": chosen}) if chosen else config
    cache = Path(manifest["config"].get("data", {}).get("cache_dir", DataConfig().cache_dir))
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


def _size(text: str) -> int:
    """5GB, 500MB, 1.5 gb or a plain number of bytes. Raises InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")) if found else 0
    if size <= 0:
        raise InputError(
            Problem(COMMAND_LINE, "--shard-size", text, "a size such as 5GB or 500MB", "give a number with a unit")
        )
    return size


# --- from Hugging Face ---


def from_huggingface(options: argparse.Namespace, out: Path) -> str:
    """Convert into the empty folder `out`; returns what there is to say when that has become OUT."""
    idle = [f"--{name}" for name in ("dtype", "tokenizer", "shard-size") if vars(options)[name.replace("-", "_")]]
    if idle:
        raise InputError(Problem(COMMAND_LINE, idle[0], "from-hf", "only with to-hf", f"leave {', '.join(idle)} out"))
    from titanlite.checkpoint import convert
    from titanlite.checkpoint.huggingface import HuggingFaceWeights
    from titanlite.checkpoint.huggingface_model import context_length, model_section

    section = model_section(options.source)
    model = ModelConfig.model_validate(section)
    length = context_length(options.source)
    weights = HuggingFaceWeights(options.source, model)
    weights.check_tied()
    for name in KEPT_FILES:
        if (file := options.source / name).is_file():
            write_atomically(out / name, file.read_bytes())
    config: dict[str, Any] = {"model": section}
    found = [name for name in ("tokenizer.json", "tokenizer.model") if (out / name).is_file()]
    if found:
        config["tokenizer"] = {"path": str((options.out / found[0]).absolute()), "add_bos": puts_bos(out)}
    write_atomically(out / "model.toml", tomli_w.dumps(config).encode())
    folder = convert.write_checkpoint(
        weights,
        out,
        config=config | {"model": model.model_dump(mode="json")},
        max_position_embeddings=length,
        report=say,
    )
    size = sum(record.bytes for record in storage.records(storage.read_manifest(folder)).values())
    kept = f"its [model] section is in {options.out / 'model.toml'}"
    return f"{options.out / folder.name}: {size_text(size)}; {kept}"
