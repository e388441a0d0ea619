"""`titanlite prepare`: text to token shards or to a tokenizer, and a look at what training will see. Torch-free."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.command_line import Parser, say
from titanlite.config import check
from titanlite.config.load import load
from titanlite.config.problems import EXIT_DONE, InputError, Problem
from titanlite.config.schema import EMBEDDED, Config, DataConfig, TokenizerConfig
from titanlite.config.validate import COMMAND_LINE
from titanlite.data import inspection
from titanlite.data.build import build
from titanlite.data.phase import first_phase
from titanlite.data.prepare import PreparedData, marks_of, open_tokenizer
from titanlite.data.records import Reading
from titanlite.data.shards import SHARD_TOKENS
from titanlite.data.text import Text, embedded_text, text_of_inputs
from titanlite.data.tokenise import Recipe
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.tokens import find_tokens, open_tokens
from titanlite.data.train_tokenizer import train_from_text
from titanlite.files import write_atomically
from titanlite.launch import prepare_data

DESCRIPTION = """INPUT: .txt, .jsonl, .ndjson (also .gz, .zst), .parquet: a file, folder or glob; - is standard input.
The same command goes on where an interrupted one stopped, and gives the same shards whatever --workers is."""

DEFAULTS: dict[str, Any] = {
    "inputs": [],
    "json": False,
    "text_key": "text",
    "separator": "",
    "format": "",
    "on_error": "stop",
    "tokenizer": "",
    "add_bos": False,
    "add_eos": True,
    "bos_token": "",
    "eos_token": "",
    "validation_fraction": DataConfig.model_fields["validation_fraction"].default,
    "shard_tokens": SHARD_TOKENS,
    "workers": os.cpu_count() or 1,
    "model_type": "bpe",
    "seq_len": 256,
}


@dataclass(frozen=True)
class Mode:
    """One thing that the command does: its usage, the options that choose it, those it needs, those it may have."""

    usage: str
    does: str
    chosen_by: tuple[str, ...]
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    run: Callable[[argparse.Namespace, Sequence[str]], int]


def make_parser(with_inputs: bool = True) -> Parser:
    """with_inputs=False: for --config, where a bare word is the value of a key before it."""
    parser = Parser(prog="titanlite prepare", usage=_usage(), description=DESCRIPTION, keys=False, sparse=True)
    if with_inputs:
        parser.add_argument("inputs", metavar="INPUT", nargs="*", help=argparse.SUPPRESS)

    what = parser.add_argument_group("what to do")
    what.add_argument("--output", metavar="DIR", help="write token shards here, with a copy of the tokenizer")
    what.add_argument("--train-tokenizer", metavar="FILE", help="train a sentencepiece model that loses no character")
    what.add_argument("--config", metavar="NAME", help="prepare, or show, what this run's [data] names")
    what.add_argument("--stats", metavar="PATH", help="documents, tokens, tokens per byte, longest, unknown")
    what.add_argument("--show", metavar="K", type=_integer(0), help="decode sample K as training will see it")
    what.add_argument("--json", action="store_true", help="print one JSON object of the counts")

    text = parser.add_argument_group("how text is read")
    text.add_argument("--text-key", metavar="KEY", help="key (.jsonl) or column (.parquet) of the text; default: text")
    text.add_argument("--separator", metavar="TEXT", help="parts the documents of a .txt; default: one document a file")
    text.add_argument("--format", choices=("txt", "jsonl"), help="of standard input")
    text.add_argument("--on-error", choices=("stop", "skip"), help="at a record that cannot be read; default: stop")

    tokens = parser.add_argument_group("how it becomes tokens")
    tokens.add_argument("--tokenizer", metavar="PATH", help='.model, tokenizer.json or its folder, or "embedded"')
    tokens.add_argument("--add-bos", action=argparse.BooleanOptionalAction, help="BOS before a document; default: no")
    tokens.add_argument("--add-eos", action=argparse.BooleanOptionalAction, help="EOS after a document; default: yes")
    tokens.add_argument("--bos-token", metavar="PIECE", help="BOS, if not the one that the tokenizer's files name")
    tokens.add_argument("--eos-token", metavar="PIECE", help="EOS, if not the one that the tokenizer's files name")
    held_out = DEFAULTS["validation_fraction"]
    held_out_help = f"share of documents that is held out; default: {held_out}"
    tokens.add_argument("--validation-fraction", metavar="F", type=_fraction, help=held_out_help)
    tokens.add_argument("--shard-tokens", metavar="N", type=_integer(1), help=f"of a file; default: {SHARD_TOKENS}")
    tokens.add_argument("--workers", metavar="N", type=_integer(1), help="processes; default: one a core")

    other = parser.add_argument_group("for --train-tokenizer and --show")
    other.add_argument("--vocab-size", metavar="N", type=_integer(1, 1 << 24), help="pieces of the new tokenizer")
    other.add_argument("--model-type", choices=("bpe", "unigram"), help="of the new tokenizer; default: bpe")
    other.add_argument("--seq-len", metavar="S", type=_integer(1), help="tokens of a window; default: 256")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises InputError."""
    with_config = any(word == "--config" or word.startswith("--config=") for word in argv)
    options, rest = make_parser(with_inputs=not with_config).parse_known_args(argv)
    given = {name for name in vars(options) if name != "inputs" or options.inputs}
    mode = next(mode for mode in MODES if given.issuperset(mode.chosen_by))
    if not argv:
        raise InputError(Problem(COMMAND_LINE, "argument", "nothing", _usage(), "--help says more"))
    usage = f"titanlite prepare {mode.usage}"
    problems = [
        Problem(COMMAND_LINE, _flag(name), "an option that means nothing here", usage, "leave it out")
        for name in sorted(given - {*mode.chosen_by, *mode.needs, *mode.may_have})
    ]
    problems += [
        Problem(COMMAND_LINE, _flag(name), "nothing", usage, "give it, too") for name in mode.needs if name not in given
    ]
    if rest and not with_config:
        fix = "--help lists the options; keys of a TOML go with --config NAME"
        problems.append(Problem(COMMAND_LINE, "argument", " ".join(rest), usage, fix))
    if problems:
        raise InputError(problems)
    return mode.run(argparse.Namespace(**(DEFAULTS | vars(options))), rest)


# --- text to tokens, text to a tokenizer ---


def _prepare(options: argparse.Namespace, _: Sequence[str]) -> int:
    config = TokenizerConfig(
        path=options.tokenizer,
        add_bos=options.add_bos,
        add_eos=options.add_eos,
        bos_token=options.bos_token,
        eos_token=options.eos_token,
    )
    folder = Path(options.output)
    with _spelled_as_options():
        tokenizer = open_tokenizer(config, Path(DataConfig().cache_dir), say)
    text = _text(options)
    bos_id, eos_id = marks_of(tokenizer, config)
    recipe = Recipe(
        tokenizer=tokenizer.path,
        bos_id=bos_id,
        eos_id=eos_id,
        validation_fraction=options.validation_fraction,
        on_error=options.on_error,
        shard_tokens=options.shard_tokens,
        bos_token=config.bos_token,
        eos_token=config.eos_token,
    )
    _check_output(folder, options.inputs)
    built = build(folder, text, recipe, workers=options.workers, report=say)
    if built.empty:
        got, fix = f"{text.name}: no document with text in it", "name files that have some"
        raise InputError(Problem(COMMAND_LINE, "input", got, "text", fix))
    if not built.new:
        for part in filter(None, (built.train, built.validation)):
            open_tokens(part).verify()
        say(f"nothing to do: {folder} holds these tokens already, and their checksums are right")
    copied = _copy_tokenizer(tokenizer, folder)
    if options.json:
        _print_json(inspection.stats(folder, tokenizer, verify=False).as_dict())
    if built.train_tokens:
        say(f"to train on it: {_train_command(folder, copied, tokenizer, config)}")
    else:
        say("warning: every document is held out, none is left to train on; choose a smaller --validation-fraction")
    return EXIT_DONE


def _check_output(folder: Path, inputs: Sequence[str]) -> None:
    """What is written must not be found by the next reading of the input."""
    for path in map(Path, inputs):
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            got, fix = f"{str(folder)!r}, which is inside the input {str(path)!r}", "write beside it"
            raise InputError(Problem(COMMAND_LINE, "--output", got, "a folder outside of the inputs", fix))


def _text(options: argparse.Namespace) -> Text:
    if options.inputs == [EMBEDDED]:
        return embedded_text()[0]
    text = text_of_inputs(options.inputs, Reading(options.text_key, options.separator), options.format)
    for warning in text.warnings():
        say(f"warning: {warning}")
    return text


def _copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Put the tokenizer beside its tokens, with the files that name its BOS and EOS, so that the folder is whole."""
    name = "tokenizer.json" if tokenizer.kind == "huggingface" else "tokenizer.model"
    beside = ("tokenizer_config.json", "special_tokens_map.json") if tokenizer.kind == "huggingface" else ()
    sources = {name: tokenizer.path} | {other: tokenizer.path.with_name(other) for other in beside}
    for target, source in sources.items():
        if not source.is_file():
            continue
        data, copy = source.read_bytes(), folder / target
        if not copy.is_file() or copy.read_bytes() != data:
            write_atomically(copy, data)
    return folder / name


def _train_command(folder: Path, copied: Path, tokenizer: Tokenizer, config: TokenizerConfig) -> str:
    default = TokenizerConfig()
    keys = {"model.vocab_size": tokenizer.vocab_size, "tokenizer.path": str(copied)}
    for name in ("add_bos", "add_eos", "bos_token", "eos_token"):
        if getattr(config, name) != getattr(default, name):
            value = getattr(config, name)
            keys[f"tokenizer.{name}"] = str(value).lower() if isinstance(value, bool) else value
    keys["data.sources"] = f"[{{ path = {json.dumps(str(folder))} }}]"
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return f"./run_train.sh --config llama_debug --run.name mine {shlex.join(words)}"


def _train_tokenizer(options: argparse.Namespace, _: Sequence[str]) -> int:
    train_from_text(
        _text(options),
        Path(options.train_tokenizer),
        vocab_size=options.vocab_size,
        model_type=options.model_type,
        on_error=options.on_error,
        report=say,
    )
    return EXIT_DONE


# --- what a run needs, and sees ---


def _prepare_run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    _prepared(options.config, overrides)
    say(f"the data of {options.config} is ready")
    return EXIT_DONE


def _show_run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config, prepared = _prepared(options.config, overrides)
    seq_len = config.training.seq_len
    order = first_phase(prepared, seq_len=seq_len, seed=config.run.seed).order(config.data.epochs)
    print(inspection.show_sample(prepared, order, options.show, seq_len))
    return EXIT_DONE


def _prepared(name: str, overrides: Sequence[str]) -> tuple[Config, PreparedData]:
    """A run and its data, as the launcher checks and prepares it."""
    loaded = load(name, overrides)
    problems = check.static_problems(loaded, None) + check.file_problems(loaded)
    if problems:
        raise InputError(problems)
    return loaded.config, prepare_data(loaded)


# --- prepared tokens ---


def _stats(options: argparse.Namespace, _: Sequence[str]) -> int:
    found = inspection.stats(options.stats, _tokenizer_of(options, Path(options.stats)))
    if options.json:
        _print_json(found.as_dict())
    else:
        print(found)
    return EXIT_DONE


def _show_window(options: argparse.Namespace, _: Sequence[str]) -> int:
    if len(options.inputs) > 1:
        got = " ".join(options.inputs)
        raise InputError(Problem(COMMAND_LINE, "PATH", got, "one path", "name the folder with the tokens"))
    (path,) = options.inputs
    found = find_tokens(path, "PATH")
    if found is None:
        fix = "titanlite prepare makes them from text; with --config NAME the text of a run is shown"
        what = repr(path) if Path(path).exists() else f"{path!r}, which does not exist"
        raise InputError(Problem(COMMAND_LINE, "PATH", what, "prepared tokens", fix))
    tokens = open_tokens(found.train)
    print(inspection.show(tokens, _tokenizer_of(options, Path(path)), options.show, options.seq_len))
    return EXIT_DONE


def _tokenizer_of(options: argparse.Namespace, path: Path) -> Tokenizer | None:
    """The one that was named, or else the copy that lies with the tokens."""
    if options.tokenizer == EMBEDDED:
        return open_tokenizer(TokenizerConfig(add_eos=False), Path(DataConfig().cache_dir), say)
    names = ("tokenizer.json", "tokenizer.model")
    beside = [folder for folder in (path, path.parent) if any((folder / name).is_file() for name in names)]
    place = options.tokenizer or next(iter(beside), None)
    if place is None:
        return None
    return load_tokenizer(place, "--tokenizer", bos_token=options.bos_token, eos_token=options.eos_token)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


# --- options ---


_TEXT = ("text_key", "separator", "format", "on_error")
_PIECES = ("bos_token", "eos_token")
MODES = (
    Mode(
        "--stats PATH [--tokenizer PATH] [--json]",
        "counts of prepared tokens",
        chosen_by=("stats",),
        needs=(),
        may_have=("tokenizer", *_PIECES, "json"),
        run=_stats,
    ),
    Mode(
        "--show K --config NAME [--section.key VALUE ...]",
        "sample K of a run, decoded",
        chosen_by=("show", "config"),
        needs=(),
        may_have=(),
        run=_show_run,
    ),
    Mode(
        "--show K PATH [--tokenizer PATH] [--seq-len S]",
        "window K of prepared tokens, decoded",
        chosen_by=("show",),
        needs=("inputs",),
        may_have=("tokenizer", *_PIECES, "seq_len"),
        run=_show_window,
    ),
    Mode(
        "--config NAME [--section.key VALUE ...]",
        "what a run needs, into its cache",
        chosen_by=("config",),
        needs=(),
        may_have=(),
        run=_prepare_run,
    ),
    Mode(
        "INPUT... --train-tokenizer FILE --vocab-size N",
        "text to a sentencepiece model",
        chosen_by=("train_tokenizer",),
        needs=("inputs", "vocab_size"),
        may_have=(*_TEXT, "model_type"),
        run=_train_tokenizer,
    ),
    Mode(
        "INPUT... --tokenizer PATH --output DIR [options]",
        "text to token shards",
        chosen_by=(),
        needs=("inputs", "tokenizer", "output"),
        may_have=(*_TEXT, *_PIECES, "add_bos", "add_eos", "validation_fraction", "shard_tokens", "workers", "json"),
        run=_prepare,
    ),
)


def _usage() -> str:
    width = max(len(mode.usage) for mode in MODES)
    return "\n       ".join(f"titanlite prepare {mode.usage:{width}}  {mode.does}" for mode in reversed(MODES))


# What a TOML calls the options, as the faults that other rooms find name them.
_SPELLING = {
    "--tokenizer.add_bos=false": "--no-add-bos",
    "--tokenizer.add_eos=false": "--no-add-eos",
    "tokenizer.add_bos": "--add-bos",
    "tokenizer.add_eos": "--add-eos",
    "tokenizer.bos_token": "--bos-token",
    "tokenizer.eos_token": "--eos-token",
    "tokenizer.path": "--tokenizer",
}


@contextmanager
def _spelled_as_options() -> Iterator[None]:
    def spelled(text: str) -> str:
        for key, option in _SPELLING.items():
            text = text.replace(key, option)
        return text

    try:
        yield
    except InputError as error:
        problems = [Problem(*map(spelled, (p.where, p.key, p.got, p.allowed, p.fix))) for p in error.problems]
        raise InputError(problems) from None


def _flag(name: str) -> str:
    return "INPUT" if name == "inputs" else f"--{name.replace('_', '-')}"


def _integer(least: int, most: int = 10**15) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 17 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f'got "{text}", which is no integer from {least} to {most}')
        return int(text)

    return read


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f'got "{text}", which is no number from 0 to below 1')
    return value
