"""From what [data] and [tokenizer] name to token shards: checked, tokenised once, cached by content. Torch-free.

The launcher calls prepare() before it starts the workers, and every worker calls it again and finds the work done.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import EMBEDDED, DataConfig, TokenizerConfig
from titanlite.data.cache import Memo, Report, get_or_build, key_of
from titanlite.data.shards import FORMAT, META, ShardWriter, TokenShards, token_dtype
from titanlite.data.text import FingerprintOfText, Text, check_embedded, decode, embedded_text, text_at
from titanlite.data.tokenizer import Tokenizer, load_tokenizer, train_embedded_tokenizer

_VERSION = 1  # raise it when the same text would become other shards: it is in the cache's keys
_BATCH_BYTES = 2 << 20  # of text tokenised at once
_SPLIT_SALT = b"titanlite\n"  # so that the split is independent of what others chose by a document's sha256
_THREADS = os.cpu_count() or 1  # sentencepiece's own; the ids do not depend on it


@dataclass(frozen=True)
class PreparedSource:
    """One source, ready to be read: folders of token shards. validation: None when nothing is held out."""

    train: Path
    validation: Path | None
    weight: float
    fingerprint: str  # of the training tokens


@dataclass(frozen=True)
class PreparedData:
    tokenizer_path: Path
    tokenizer_fingerprint: str
    sources: tuple[PreparedSource, ...]


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
    embedded = EMBEDDED in (tokenizer.path, *(source.path for source in data.sources))
    if embedded:
        with faults.collected():
            text, version = embedded_text()
            check_embedded(version, text.fingerprint(cache_dir), report)
    loaded = None
    with faults.collected():
        loaded_path, loaded = _open_tokenizer(tokenizer, cache_dir, vocab_size, report)
    inputs: list[Text | _Shards] = []
    for i, source in enumerate(data.sources):
        with faults.collected():
            inputs.append(_open_source(source.path, f"data.sources.{i}.path", loaded, cache_dir))
    faults.raise_any()
    assert loaded is not None
    if validation and not loaded.exact:
        report(
            f"warning: the tokenizer {tokenizer.path!r} loses spaces or characters of the text, so that bits per byte "
            "cannot be compared with other tokenizers'"
        )

    sources = []
    for i, (source, opened) in enumerate(zip(data.sources, inputs, strict=True)):
        with faults.collected():
            if isinstance(opened, Text):
                opened = _tokenised(opened, loaded, tokenizer, data, f"data.sources.{i}.path", report)
            train = TokenShards(opened.train)
            _check_length(train, opened.validation, source.path, f"data.sources.{i}.path", seq_len)
            sources.append(PreparedSource(opened.train, opened.validation, source.weight, train.fingerprint))
    if validation and not faults.problems:
        with faults.collected():
            _check_validation(sources, seq_len)
    faults.raise_any()
    return PreparedData(loaded_path, loaded.fingerprint, tuple(sources))


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
class _Shards:
    train: Path
    validation: Path | None


def _open_tokenizer(
    config: TokenizerConfig, cache_dir: Path, vocab_size: int, report: Report
) -> tuple[Path, Tokenizer]:
    """Load the tokenizer and check that the model's ids and the document marks are there."""
    path = train_embedded_tokenizer(cache_dir, report) if config.path == EMBEDDED else Path(config.path)
    tokenizer = load_tokenizer(path)
    problems = []
    if tokenizer.vocab_size > vocab_size:
        got = f"{vocab_size}, but the tokenizer {config.path!r} has {tokenizer.vocab_size} ids"
        fix = f"--model.vocab_size {tokenizer.vocab_size}"
        problems.append(Problem("", "model.vocab_size", got, f"at least {tokenizer.vocab_size}", fix))
    for name, wanted, token in (("bos", config.add_bos, tokenizer.bos_id), ("eos", config.add_eos, tokenizer.eos_id)):
        if wanted and token < 0:
            got = f"true, but the tokenizer {config.path!r} has no {name.upper()} id"
            fix = f"--tokenizer.add_{name}=false"
            problems.append(Problem("", f"tokenizer.add_{name}", got, "false, or a tokenizer that has one", fix))
    if problems:
        raise InputError(problems)
    return path, tokenizer


def _open_source(path: str, key: str, tokenizer: Tokenizer | None, cache_dir: Path) -> Text | _Shards:
    """What a source's path names. A folder of shards is checked whole; its tokenizer too, if ours could be loaded."""
    if path == EMBEDDED:
        return embedded_text()[0]
    folder = Path(path)
    if (folder / META).is_file():
        shards = _Shards(folder, None)
    elif (folder / "train" / META).is_file():
        held_out = folder / "validation"
        shards = _Shards(folder / "train", held_out if (held_out / META).is_file() else None)
    else:
        return text_at(folder, key)
    for part in filter(None, (shards.train, shards.validation)):
        opened = TokenShards(part)
        if tokenizer is not None and opened.tokenizer != tokenizer.fingerprint:
            got = f"{str(part)!r}, made with another tokenizer (sha256 {opened.tokenizer[:12]}…)"
            allowed = f"shards of the tokenizer that tokenizer.path names (sha256 {tokenizer.fingerprint[:12]}…)"
            raise InputError(Problem("", key, got, allowed, "name their tokenizer, or prepare the text again"))
        _verify(opened, cache_dir)
    return shards


def _verify(shards: TokenShards, cache_dir: Path, *, just_written: bool = False) -> None:
    """Check the shards' checksums, once for as long as the files stay as they are."""
    files = [shards.path / META, *(shards.path / shard["file"] for shard in shards.meta["shards"])]
    memo = Memo(cache_dir, "verified", files)
    if memo.get() is None:
        if not just_written:
            shards.verify()
        memo.put("good", settled=just_written)


def _check_length(shards: TokenShards, validation: Path | None, path: str, key: str, seq_len: int) -> None:
    if shards.windows(seq_len):
        return
    got = f"{path!r}, which " + (f"has {shards.n_tokens} tokens to train on" if shards.n_tokens else "is empty")
    fix = "more text, or a smaller training.seq_len"
    if validation is not None:
        got += f" ({TokenShards(validation).n_tokens} are held out)"
        fix += ", or --data.validation_fraction 0"
    raise InputError(Problem("", key, got, f"at least training.seq_len + 1 = {seq_len + 1} tokens", fix))


def _check_validation(sources: Sequence[PreparedSource], seq_len: int) -> None:
    tokens = [TokenShards(source.validation).n_tokens if source.validation else 0 for source in sources]
    if any(n > seq_len for n in tokens):
        return
    got = f"{sum(tokens)} held-out tokens in {len(sources)} source(s)"
    allowed = f"at least training.seq_len + 1 = {seq_len + 1} in one source"
    fix = "raise data.validation_fraction (whole documents are held out, so there must be several), or leave it off"
    raise InputError(Problem("", "validation.enable", got, allowed, fix))


def _tokenised(
    text: Text, tokenizer: Tokenizer, config: TokenizerConfig, data: DataConfig, key: str, report: Report
) -> _Shards:
    """The token shards of a text, out of the cache or made now."""
    cache_dir = Path(data.cache_dir)
    fingerprint = text.fingerprint(cache_dir)
    marks, fraction = [config.add_bos, config.add_eos], data.validation_fraction
    key_of_tokens = key_of(_VERSION, FORMAT, fingerprint, tokenizer.fingerprint, marks, fraction)
    place = cache_dir / "tokens" / key_of_tokens

    def is_whole(folder: Path) -> bool:
        if not folder.exists():
            return False
        try:
            for part in ("train", "validation"):
                _verify(TokenShards(folder / part), cache_dir)
            return True
        except InputError:
            return False

    built = False

    def build(folder: Path) -> None:
        nonlocal built
        built = True
        found = _tokenise(text, tokenizer, config, fraction, folder, report)
        if found != fingerprint:
            got, allowed = "files that changed while they were read", "text that stays as it is"
            raise InputError(Problem("", key, got, allowed, "start again when nothing writes to them"))

    get_or_build(place, is_whole, build, what=text.name, report=report)
    train, validation = TokenShards(place / "train"), TokenShards(place / "validation")
    if built:
        for shards in (train, validation):
            _verify(shards, cache_dir, just_written=True)
    return _Shards(train.path, validation.path if validation.n_tokens else None)


def _tokenise(
    text: Text, tokenizer: Tokenizer, config: TokenizerConfig, fraction: float, folder: Path, report: Report
) -> str:
    """Write folder/train and folder/validation; gives the fingerprint of the text that was read."""
    started = time.monotonic()
    dtype = token_dtype(tokenizer.vocab_size)
    train, validation = (
        ShardWriter(folder / part, dtype=dtype, tokenizer=tokenizer.fingerprint) for part in ("train", "validation")
    )
    # Both marks are written when both are asked for, also where a tokenizer uses one id for the two.
    before = np.full(int(config.add_bos), tokenizer.bos_id, dtype=np.int32)
    after = np.full(int(config.add_eos), tokenizer.eos_id, dtype=np.int32)
    digest = FingerprintOfText()
    with _progress(text, report) as advance:
        for batch in _batches(text.documents()):
            texts = [decode(text, file, document) for file, document in batch]
            for (file, document), ids in zip(batch, tokenizer.encode_batch(texts, num_threads=_THREADS), strict=True):
                digest.add(file, document)
                if document:  # an empty file is no document
                    writer = validation if _held_out(document, fraction) else train
                    tokens = np.concatenate([before, ids, after])
                    writer.write(tokens, documents=1, text_bytes=len(document))
            advance(sum(len(document) for _, document in batch), train.tokens + validation.tokens)
    train.close()
    validation.close()
    report(
        f"tokenised {text.name}: {train.tokens:,} tokens to train on, {validation.tokens:,} held out, "
        f"{train.documents + validation.documents:,} documents, {time.monotonic() - started:.1f} s"
    )
    return digest.hexdigest()


def _held_out(document: bytes, fraction: float) -> bool:
    """A document's side depends on its contents alone, so that copies of it never lie on both sides."""
    return int.from_bytes(hashlib.sha256(_SPLIT_SALT + document).digest()[:8], "big") < fraction * 2.0**64


def _batches(documents: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    batch, size = [], 0
    for file, document in documents:
        batch.append((file, document))
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _progress(text: Text, report: Report) -> Iterator[Callable[[int, int], None]]:
    """Gives advance(bytes read, tokens so far): a bar on a terminal, else a line every ten seconds."""
    total = text.size()
    report(f"tokenising {text.name}: {total / 1e6:,.1f} MB in {len(text.files):,} files")
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("tokenising", total=total)
            yield lambda size, _: bar.update(task, advance=size)
        return
    done, last = 0, time.monotonic()

    def advance(size: int, tokens: int) -> None:
        nonlocal done, last
        done += size
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            report(f"tokenising {text.name}: {done / max(total, 1):.0%}, {tokens:,} tokens")

    yield advance
