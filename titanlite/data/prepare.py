"""From what [data] and [tokenizer] name to token shards: checked, tokenised once, cached by content. Torch-free.

The launcher calls prepare() before it starts the workers, and every worker calls it again and finds the work done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import EMBEDDED, DataConfig, SourceConfig, TokenizerConfig
from titanlite.data.build import SKIPPED, VERSION, build, records_skipped
from titanlite.data.cache import Memo, Report, get_or_build, key_of
from titanlite.data.foreign import check_ids, fingerprint, scan
from titanlite.data.records import Reading
from titanlite.data.shards import FORMAT, TokenArray, TokenShards
from titanlite.data.text import Text, check_embedded, embedded_text, text_at
from titanlite.data.tokenise import Recipe
from titanlite.data.tokenizer import Tokenizer, load_tokenizer, quoted
from titanlite.data.tokens import FoundTokens, find_tokens, open_tokens
from titanlite.data.train_tokenizer import train_embedded_tokenizer


@dataclass(frozen=True)
class PreparedSource:
    """One source, ready to be read.

    path:              as the config names it, for messages
    train, validation: what open_tokens takes; validation is None when nothing is held out
    """

    path: str
    train: Path
    validation: Path | None
    weight: float
    fingerprint: str  # of the training tokens


@dataclass(frozen=True)
class PreparedData:
    """All of a run's data. marks: the ids (BOS, EOS) that are written around documents, -1: not written."""

    tokenizer: Tokenizer
    sources: tuple[PreparedSource, ...]
    marks: tuple[int, int]
    document_mask: bool = False

    @property
    def document_marks(self) -> tuple[int, int] | None:
        """The marks by which attention is masked; None: it is not."""
        return self.marks if self.document_mask else None


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    vocab_size: int,
    seq_len: int,
    *,
    report: Report,
    validation: bool = False,
) -> PreparedData:
    """Make every source readable as token shards; does nothing, fast, when that has been done before.

    vocab_size: ids that the model knows; seq_len: tokens of a sample; validation: held-out samples are needed.
    Raises InputError with all faults that can be found at each of two stages: what is named, then what is in it.
    """
    cache_dir = Path(data.cache_dir)
    faults = _Faults()
    embedded = EMBEDDED in (tokenizer.path, *(path for one in data.sources for path in (one.path, one.validation_path)))
    if embedded:
        with faults.collected():
            text, version = embedded_text()
            check_embedded(version, text.fingerprint(cache_dir), report)
    loaded = None
    with faults.collected():
        loaded = open_tokenizer(tokenizer, cache_dir, report, vocab_size)
    opened: list[tuple[_Opened, _Opened | None]] = []
    for i, source in enumerate(data.sources):
        with faults.collected():
            held_out = source.validation_path
            opened.append(
                (
                    _open(source, source.path, f"data.sources.{i}.path", report),
                    _open(source, held_out, f"data.sources.{i}.validation_path", report) if held_out else None,
                )
            )
    faults.raise_any()
    assert loaded is not None

    shared = _Shared(data, loaded, tokenizer, report)
    sources: list[PreparedSource] = []
    for i in range(len(data.sources)):
        with faults.collected():
            sources.append(_prepare_source(shared, i, *opened[i], seq_len))
    if validation and not faults.problems:
        with faults.collected():
            _check_validation(sources, seq_len)
    faults.raise_any()
    return PreparedData(loaded, tuple(sources), shared.marks, data.document_mask)


_Opened = Text | FoundTokens


class _Faults:
    """Gathers the problems of several InputErrors, to raise them as one."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.problems += [problem for problem in error.problems if problem not in self.problems]

    def raise_any(self) -> None:
        if self.problems:
            raise InputError(self.problems)


@dataclass(frozen=True)
class _Shared:
    """What every source of a run shares."""

    data: DataConfig
    tokenizer: Tokenizer
    config: TokenizerConfig
    report: Report

    @property
    def cache_dir(self) -> Path:
        return Path(self.data.cache_dir)

    @property
    def marks(self) -> tuple[int, int]:
        return marks_of(self.tokenizer, self.config)


# --- what is named ---


def open_tokenizer(
    config: TokenizerConfig, cache_dir: Path, report: Report, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer that [tokenizer] names; the embedded one is trained when it is not there yet.

    vocab_size: ids that the model knows, if there is a model. Raises InputError when the tokenizer cannot be read, has
    more ids than that, or lacks one that add_bos or add_eos asks for.
    """
    path = train_embedded_tokenizer(cache_dir, report) if config.path == EMBEDDED else Path(config.path)
    tokenizer = load_tokenizer(path, bos_token=config.bos_token, eos_token=config.eos_token)
    problems = []
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        got = f"{vocab_size}, but the tokenizer {config.path!r} has {tokenizer.vocab_size} ids"
        fix = f"--model.vocab_size {tokenizer.vocab_size}"
        problems.append(Problem("", "model.vocab_size", got, f"at least {tokenizer.vocab_size}", fix))
    for name, wanted, token in (("bos", config.add_bos, tokenizer.bos_id), ("eos", config.add_eos, tokenizer.eos_id)):
        if wanted and token < 0:
            got = f"true, but the tokenizer {config.path!r} names no {name.upper()} id"
            fix = f"--tokenizer.add_{name}=false"
            if tokenizer.special_pieces:
                fix += f", or set tokenizer.{name}_token to one of its pieces {quoted(tokenizer.special_pieces)}"
            problems.append(Problem("", f"tokenizer.add_{name}", got, "false, or a tokenizer that has one", fix))
    if problems:
        raise InputError(problems)
    if not tokenizer.exact:
        report(
            f"warning: the tokenizer {config.path!r} loses or changes spaces or characters of some texts, so that bits "
            "per byte cannot be compared with other tokenizers'"
        )
    return tokenizer


def marks_of(tokenizer: Tokenizer, config: TokenizerConfig) -> tuple[int, int]:
    """The ids (BOS, EOS) that are written around every document, -1 for none."""
    return tokenizer.bos_id if config.add_bos else -1, tokenizer.eos_id if config.add_eos else -1


def _open(source: SourceConfig, path: str, key: str, report: Report) -> _Opened:
    """What a path names: tokens, or text."""
    if path == EMBEDDED:
        return embedded_text()[0]
    tokens = find_tokens(path, key)
    if tokens is not None:
        return tokens
    text = text_at(path, key, Reading(source.text_key, source.separator))
    for warning in text.warnings():
        report(f"warning: {warning}")
    return text


# --- what is in it ---


def _prepare_source(
    shared: _Shared, number: int, opened: _Opened, held_out: _Opened | None, seq_len: int
) -> PreparedSource:
    source, key = shared.data.sources[number], f"data.sources.{number}.path"
    fraction = 0.0 if held_out is not None else shared.data.validation_fraction
    found = _tokenised(shared, opened, fraction, key) if isinstance(opened, Text) else opened
    validation, validation_key = found.validation, key
    if held_out is not None:
        validation_key = f"data.sources.{number}.validation_path"
        held_out = _tokenised(shared, held_out, 0.0, validation_key) if isinstance(held_out, Text) else held_out
        validation = held_out.train
    content = _check_tokens(shared, open_tokens(found.train), key)
    if validation is not None:
        _check_tokens(shared, open_tokens(validation), validation_key)
    _check_length(open_tokens(found.train), validation, source.path, key, seq_len)
    return PreparedSource(source.path, found.train, validation, source.weight, content)


def _tokenised(shared: _Shared, text: Text, fraction: float, key: str) -> FoundTokens:
    """The token shards of a text, out of the cache or made now."""
    data, config = shared.data, shared.config
    content = text.fingerprint(shared.cache_dir)
    bos_id, eos_id = shared.marks
    key_of_tokens = key_of(VERSION, FORMAT, content, shared.tokenizer.fingerprint, shared.marks, fraction)
    place = shared.cache_dir / "tokens" / key_of_tokens
    recipe = Recipe(
        shared.tokenizer.path,
        bos_id,
        eos_id,
        fraction,
        data.on_error,
        bos_token=config.bos_token,
        eos_token=config.eos_token,
    )
    built = False

    def is_whole(folder: Path) -> bool:
        if not folder.exists():
            return False
        try:
            for part in ("train", "validation"):
                _verify(TokenShards(folder / part), shared.cache_dir)
            return True
        except InputError:
            return False

    def build_here(folder: Path) -> None:
        nonlocal built
        built = True
        workers = data.prepare_workers or os.cpu_count() or 1
        build(folder, text, recipe, workers=workers, report=shared.report, start_over=True)
        if text.fingerprint(shared.cache_dir) != content:  # between the first look at it and the start of the build
            got, fix = "files that changed while they were read", "start again when nothing writes to them"
            raise InputError(Problem("", key, got, "text that stays as it is", fix))

    get_or_build(place, is_whole, build_here, what=text.name, report=shared.report, resumable=True)
    if (skipped := records_skipped(place)) and data.on_error == "stop":
        got = f"{skipped:,} records of {text.name} that cannot be read (listed in {place / SKIPPED})"
        raise InputError(Problem("", key, got, "none, while data.on_error is stop", "mend them, or set it to skip"))
    train, validation = TokenShards(place / "train"), TokenShards(place / "validation")
    if built:
        for shards in (train, validation):
            _verify(shards, shared.cache_dir, just_written=True)
        shared.report(f"the tokens of {text.name} are in {place}")
    return FoundTokens(train.path, validation.path if validation.n_tokens else None)


def _verify(shards: TokenShards, cache_dir: Path, *, just_written: bool = False) -> None:
    """Check the shards' checksums, once for as long as the files stay as they are."""
    memo = Memo(cache_dir, "verified", shards.depends_on())
    if memo.get() is None:
        if not just_written:
            shards.verify()
        memo.put("good", settled=just_written)


def _check_tokens(shared: _Shared, tokens: TokenArray, key: str) -> str:
    """Refuse tokens that are damaged or not this tokenizer's; gives the fingerprint of what they say."""
    if not isinstance(tokens, TokenShards):
        return _check_foreign(shared, tokens, key)
    where, problems = repr(str(tokens.path)), []
    if tokens.tokenizer != shared.tokenizer.fingerprint:
        got = f"{where}, made with another tokenizer (sha256 {tokens.tokenizer[:12]}…)"
        allowed = f"shards of the tokenizer that tokenizer.path names (sha256 {shared.tokenizer.fingerprint[:12]}…)"
        problems.append(Problem("", key, got, allowed, "name their tokenizer, or prepare the text again"))
    else:
        for name, written, wanted in zip(("bos", "eos"), (tokens.bos_id, tokens.eos_id), shared.marks, strict=True):
            if written is not None and written != wanted:
                says, should = (f"id {token}" if token >= 0 else "none" for token in (written, wanted))
                got = f"{where}, whose documents have this {name.upper()}: {says}"
                allowed = f"{should}, as tokenizer.add_{name} and tokenizer.{name}_token say"
                fix = f"--tokenizer.add_{name}={str(written >= 0).lower()}, or prepare the text again"
                problems.append(Problem("", key, got, allowed, fix))
    if problems:
        raise InputError(problems)
    _verify(tokens, shared.cache_dir)
    return tokens.fingerprint


def _check_foreign(shared: _Shared, tokens: TokenArray, key: str) -> str:
    memo = Memo(shared.cache_dir, "scanned", tokens.depends_on())
    known = memo.get()
    scanned = json.loads(known) if known else scan(tokens)
    if known is None:
        memo.put(json.dumps(scanned))
    check_ids(tokens, scanned, shared.tokenizer.vocab_size)
    shared.report(
        f"warning: {key}: {str(tokens.path)!r} does not say which tokenizer made it, nor whether documents are marked; "
        f"its largest id is {scanned['max_id']}, and tokenizer.path has {shared.tokenizer.vocab_size} ids"
    )
    return fingerprint(tokens, scanned)


def _check_length(tokens: TokenArray, validation: Path | None, path: str, key: str, seq_len: int) -> None:
    if tokens.windows(seq_len):
        return
    got = f"{path!r}, which " + (f"has {tokens.n_tokens} tokens to train on" if tokens.n_tokens else "is empty")
    fix = "more text, or a smaller training.seq_len"
    if validation is not None:
        got += f" ({open_tokens(validation).n_tokens} are held out)"
        fix += ", or --data.validation_fraction 0"
    raise InputError(Problem("", key, got, f"at least training.seq_len + 1 = {seq_len + 1} tokens", fix))


def _check_validation(sources: Sequence[PreparedSource], seq_len: int) -> None:
    tokens = [open_tokens(source.validation).n_tokens if source.validation else 0 for source in sources]
    if any(n > seq_len for n in tokens):
        return
    got = f"{sum(tokens)} held-out tokens in {len(sources)} source(s)"
    allowed = f"at least training.seq_len + 1 = {seq_len + 1} in one source"
    fix = "raise data.validation_fraction (whole documents are held out, so there must be several; data.sources.N."
    fix += "separator parts those of one file), give a validation_path, or leave it off"
    raise InputError(Problem("", "validation.enable", got, allowed, fix))
