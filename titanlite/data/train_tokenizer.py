"""The training of sentencepiece tokenizers: the embedded one, and one of the user's own text. Torch-free."""

from __future__ import annotations

import hashlib
import heapq
import io
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import EMBEDDED_VOCAB_SIZE
from titanlite.data.cache import Report, get_or_build, key_of
from titanlite.data.records import BadRecord, documents
from titanlite.data.text import Text, embedded_text
from titanlite.files import write_atomically

SAMPLE_BYTES = {"bpe": 256 << 20, "unigram": 16 << 20}  # unigram takes ten times the time a byte, and more
# Of text that is in the sample or not, as a whole. sentencepiece would leave lines of more than a megabyte out.
_PIECE_CHARS = 1 << 16
_OVERSAMPLING = 8

# num_threads changes no piece, but sentencepiece writes it into the model and so into the fingerprint.
_TRAINING: dict[str, Any] = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n"],
    "byte_fallback": True,
    "character_coverage": 0.9999,
    "max_sentence_length": 1 << 20,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "num_threads": 2,
    "minloglevel": 2,
}
_ALWAYS_THERE = 3 + 256 + 1  # pieces: <unk> <s> </s>, the bytes, the newline


def train_tokenizer(lines: Iterable[str], vocab_size: int, *, model_type: str = "bpe") -> bytes:
    """A model in which nothing is lost (see _TRAINING), as the bytes of a .model file.

    The same lines give the same bytes with the same version of sentencepiece. Lines come without their newline.
    """
    model = io.BytesIO()
    options = _TRAINING | {"model_type": model_type}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **options
    )
    return model.getvalue()


def train_embedded_tokenizer(cache_dir: Path, report: Report) -> Path:
    """The embedded tokenizer's .model file in the cache, trained from the embedded text if it is not there yet."""
    text, _ = embedded_text()
    fingerprint = text.fingerprint(cache_dir)
    key = key_of("tokenizer", fingerprint, EMBEDDED_VOCAB_SIZE, _TRAINING, sentencepiece.__version__)
    place = cache_dir / "tokenizers" / key

    def build(folder: Path) -> None:
        report(f"training the embedded tokenizer: {EMBEDDED_VOCAB_SIZE} pieces")
        started = time.monotonic()
        lines = (line for document in text.documents() for line in document.text.split("\n") if line)
        model = train_tokenizer(lines, EMBEDDED_VOCAB_SIZE)
        sha256 = hashlib.sha256(model).hexdigest()
        write_atomically(folder / "tokenizer.model", model)
        write_atomically(folder / "sha256", sha256.encode())
        report(f"trained the embedded tokenizer in {time.monotonic() - started:.1f} s, sha256 {sha256}")

    def is_whole(folder: Path) -> bool:
        try:
            expected = (folder / "sha256").read_text()
            return hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest() == expected
        except OSError:
            return False

    get_or_build(place, is_whole, build, what="the embedded tokenizer", report=report)
    return place / "tokenizer.model"


def train_from_text(
    text: Text,
    out: Path,
    *,
    vocab_size: int,
    report: Report,
    model_type: Literal["bpe", "unigram"] = "bpe",
    sample_bytes: int = 0,
    seed: int = 0,
    on_error: Literal["stop", "skip"] = "stop",
) -> Path:
    """Train a tokenizer in which nothing is lost from at most sample_bytes (0: SAMPLE_BYTES) of the text, into `out`.

    The same text, options and version of sentencepiece give the same bytes. Returns `out`. Raises InputError for text
    and a vocab_size that do not go together, a record that cannot be read (on_error "stop"), and a file that is there
    already with other contents.
    """
    if out.is_dir():
        raise InputError(Problem("", str(out), "a folder", "a file to write, such as tokenizer.model", "name a file"))
    if vocab_size <= _ALWAYS_THERE:
        got, fix = str(vocab_size), "--vocab-size 32000 is common"
        allowed = f"more than {_ALWAYS_THERE}: the marks, the bytes and the newline are always there"
        raise InputError(Problem("", "--vocab-size", got, allowed, fix))
    if out.exists():
        report(f"{out} is there already: it is compared with the new tokenizer, and not overwritten")
    started = time.monotonic()
    sample = _sample(text, sample_bytes or SAMPLE_BYTES[model_type], seed, on_error, report)
    if not sample:
        raise InputError(Problem("", text.name, "no text", "text to learn pieces from", "name other files"))
    size = sum(map(len, sample)) / 1e6
    report(f"training a tokenizer: {model_type}, {vocab_size:,} pieces, from {size:,.1f} MB of {text.name}")
    try:
        model = train_tokenizer(_lines(sample), vocab_size, model_type=model_type)
    except RuntimeError as error:
        raise InputError(_what_went_wrong(str(error), vocab_size, text.name)) from None
    sha256 = hashlib.sha256(model).hexdigest()
    try:
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out, model)
        elif out.read_bytes() != model:
            got, fix = "a file that is there already and is another one", "choose another name, or remove it first"
            raise InputError(Problem("", str(out), got, "a new file, or the same tokenizer", fix))
    except OSError as error:
        got = f"{error.strerror or error}"
        raise InputError(Problem("", str(out), got, "a file that can be written", "choose another place")) from None
    report(f"trained {out} in {time.monotonic() - started:.1f} s, sha256 {sha256}")
    return out


def _sample(text: Text, sample_bytes: int, seed: int, on_error: str, report: Report) -> list[bytes]:
    """At most sample_bytes of the text in UTF-8, in pieces of whole lines spread evenly over it; all of it if it fits.

    Every piece gets a hash of its place, and those with the smallest hashes are kept: one pass, and no more memory than
    the sample. Of a large text most chunks are read but not parsed: those that are, at equal distances, hold several
    times the sample.
    """
    size = text.size() if all(file.path for file in text.files) else 0
    share = min(1.0, _OVERSAMPLING * sample_bytes / size) if size else 1.0
    kept: list[tuple[float, int, int, bytes]] = []  # a heap: the largest hash first
    kept_bytes = skipped = left_out = 0
    limit, phase = 1.0, _hash(seed) if share < 1 else 0.0
    said = time.monotonic()
    for i, chunk in enumerate(text.chunks()):
        if time.monotonic() - said >= 10:
            said = time.monotonic()
            done = f"{chunk.done_bytes / size:.0%}" if size else f"{chunk.done_bytes / 1e6:,.0f} MB"
            report(f"reading {text.name}: {done}")
        if int((i + 1) * share + phase) == int(i * share + phase):
            left_out += 1
            continue
        pieces = 0
        for document in documents(chunk):
            if isinstance(document, BadRecord):
                if on_error == "stop":
                    raise InputError(document.problem())
                skipped += 1
                continue
            for piece in _pieces(document.text):
                place = _hash(seed, i, pieces)
                pieces += 1
                if place >= limit:
                    left_out += 1
                    continue
                data = piece.encode()
                heapq.heappush(kept, (-place, i, pieces, data))
                kept_bytes += len(data)
                while kept_bytes > sample_bytes:
                    negative, _, _, dropped = heapq.heappop(kept)
                    limit = -negative
                    kept_bytes -= len(dropped)
                    left_out += 1
    if skipped:
        report(f"warning: {skipped:,} records of {text.name} that cannot be read are left out")
    if left_out:
        report(f"{text.name}: a sample of {kept_bytes / 1e6:,.1f} MB, spread over all of it (seed {seed})")
    return [data for _, _, _, data in sorted(kept, key=lambda item: item[1:3])]


def _hash(*place: int) -> float:
    """In [0, 1)."""
    digest = hashlib.blake2b(" ".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces, cut after newlines where it has them."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        stop = text.rfind("\n", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _lines(sample: list[bytes]) -> Iterator[str]:
    """Empties the sample, since sentencepiece makes a copy."""
    sample.reverse()
    while sample:
        yield from filter(None, sample.pop().decode().split("\n"))


def _what_went_wrong(message: str, vocab_size: int, name: str) -> Problem:
    """A RuntimeError of sentencepiece, in words."""
    if most := re.search(r"too high.*<= *(\d+)", message):
        allowed = f"at most {most[1]}, for so many pieces are in {name}"
        return Problem("", "--vocab-size", str(vocab_size), allowed, "choose a smaller one, or take more text")
    if least := re.search(r"(\d+) vs (\d+)", message):
        allowed = f"more than {least[2]}: the marks, the bytes and every common character of {name} are always there"
        return Problem("", "--vocab-size", str(vocab_size), allowed, "choose a larger one")
    return Problem("", name, f"text that sentencepiece cannot learn from ({message})", "ordinary text", "look at it")
