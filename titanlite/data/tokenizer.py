"""Text <-> token ids through a sentencepiece model, and the training of the embedded one. Torch-free.

What sentencepiece does not give by itself and this file adds:
- U+2581, sentencepiece's mark for a space, comes back as itself: it is written as its three byte pieces.
- A long document is encoded in parts cut after newlines, so that memory stays small. With a tokenizer whose newline is
  a symbol of its own, as in the embedded one, the ids are the same as without cuts.
- A damaged model file is refused, a cut one too, which sentencepiece may load in silence.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import EMBEDDED_VOCAB_SIZE
from titanlite.data.cache import Report, get_or_build, key_of
from titanlite.data.text import decode, embedded_text
from titanlite.files import write_atomically

_SPACE_MARK = "\u2581"
_PART_CHARS = 1 << 16
_GROUP = 64  # parts
# normalizer_spec { add_dummy_prefix: false } as a protocol buffer, which overrides the field when it is appended.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

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


class Tokenizer:
    """A sentencepiece model.

    vocab_size:  number of ids
    bos_id, eos_id: -1 when the model has none
    fingerprint: sha256 of the model file, hexadecimal
    token_bytes: int64 [vocab_size], UTF-8 bytes of text that each id stands for (control and unknown: 0). For a model
                 without a dummy prefix and with byte fallback they add up to the length of the text.
    exact:       decode(encode(x)) == x for every str x; otherwise the model itself loses spaces or unknown characters
    """

    def __init__(self, model: bytes) -> None:
        """model: the contents of a .model file. Raises ValueError when it is not a whole one."""
        _check_model_file(model)
        try:
            self._first = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError("not a sentencepiece model") from error
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size = int(self._first.vocab_size())
        self.bos_id = int(self._first.bos_id())
        self.eos_id = int(self._first.eos_id())
        self.token_bytes = np.array([self._bytes_of(i) for i in range(self.vocab_size)], dtype=np.int64)

        # Later parts of a document must not get a dummy prefix of their own; but where the model also strips spaces,
        # the prefix stands for the newline lost at the cut.
        squeezes = self._first.normalize("a  b") == self._first.normalize("a b")
        later = model if squeezes else model + _NO_DUMMY_PREFIX
        self._later = sentencepiece.SentencePieceProcessor(model_proto=later)
        mark = [self._first.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        has_bytes = all(map(self._first.is_byte, mark))
        self._mark_ids = np.array(mark if has_bytes else [], dtype=np.int32)
        normalizes = self._later.normalize("\ufb01 a\t\u2165") != f"\ufb01{_SPACE_MARK}a\t\u2165"
        self.exact = has_bytes and not squeezes and not normalizes

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [n]; neither BOS nor EOS is added. Raises ValueError for a lone surrogate, which is no text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """Ids int32 [n] of every text; each is what encode gives, whatever num_threads is."""
        firsts: list[str] = []
        laters: list[str] = []
        plans: list[
            list[int]
        ] = []  # per text, what follows its first part: indices of later parts, -1 for a space mark
        for text in texts:
            if not text.isascii():
                text.encode()  # UnicodeEncodeError is a ValueError that says where; sentencepiece would only fail
            first, *rest = self._parts(text)
            firsts.append(first or "")
            plans.append([])
            for part in rest:
                plans[-1].append(-1 if part is None else len(laters))
                if part is not None:
                    laters.append(part)
        first_ids = _encode(self._first, firsts, num_threads)
        later_ids = [*_encode(self._later, laters, num_threads), self._mark_ids]
        return [
            np.concatenate([ids, *(later_ids[i] for i in plan)]) if plan else ids
            for ids, plan in zip(first_ids, plans, strict=True)
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; control ids give nothing, bytes that are not UTF-8 give U+FFFD."""
        return self._first.decode(np.asarray(ids, dtype=np.int64).tolist())

    def _parts(self, text: str) -> Iterator[str | None]:
        """What is encoded at once, first a str; None stands for one U+2581."""
        segments = text.split(_SPACE_MARK) if self._mark_ids.size else [text]
        for i, segment in enumerate(segments):
            if i:
                yield None
            start = 0
            while len(segment) - start > _PART_CHARS:
                # A line longer than a part is cut where the part ends.
                stop = segment.rfind("\n", start, start + _PART_CHARS) + 1 or start + _PART_CHARS
                yield segment[start:stop]
                start = stop
            if i == 0 or start < len(segment):
                yield segment[start:]

    def _bytes_of(self, i: int) -> int:
        if self._first.is_control(i) or self._first.is_unknown(i) or self._first.is_unused(i):
            return 0
        if self._first.is_byte(i):
            return 1
        return len(self._first.id_to_piece(i).replace(_SPACE_MARK, " ").encode())


def _encode(processor: sentencepiece.SentencePieceProcessor, parts: list[str], num_threads: int) -> list[np.ndarray]:
    """Ids int32 of every part; by groups, since lists of Python integers take ten times the memory."""
    ids: list[np.ndarray] = []
    for start in range(0, len(parts), _GROUP):
        group = processor.encode(parts[start : start + _GROUP], out_type=int, num_threads=num_threads)
        ids += [np.array(part, dtype=np.int32) for part in group]
    return ids


def load_tokenizer(path: Path | str, key: str = "tokenizer.path") -> Tokenizer:
    """The tokenizer in a sentencepiece .model file. Raises InputError, naming `key`, when it is not one."""
    path = Path(path)
    allowed = 'a sentencepiece .model file, or "embedded"'
    try:
        model = path.read_bytes()
    except OSError as error:
        raise InputError(Problem("", key, f"{str(path)!r} ({error.strerror})", allowed, "correct the path")) from None
    try:
        return Tokenizer(model)
    except ValueError as error:
        raise InputError(Problem("", key, f"{str(path)!r}: {error}", allowed, "copy the file again")) from None


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """A byte-pair model in which nothing is lost (see _TRAINING), as the bytes of a .model file.

    The same lines give the same bytes with the same version of sentencepiece. Lines come without their newline.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **_TRAINING
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
        lines = (line for file, data in text.documents() for line in decode(text, file, data).split("\n") if line)
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


def _check_model_file(model: bytes) -> None:
    """Walk the outer fields of the protocol buffer: sentencepiece loads a file cut between two fields in silence."""
    seen = set()
    at = 0
    while at < len(model):
        tag, at = _varint(model, at)
        if tag & 7 != 2:  # all outer fields of a model are messages
            raise ValueError("not a sentencepiece model")
        size, at = _varint(model, at)
        at += size
        seen.add(tag >> 3)
    pieces, trainer, normalizer = 1, 2, 3
    if at > len(model) or not {pieces, trainer, normalizer} <= seen:
        raise ValueError("a sentencepiece model that is cut short" if pieces in seen else "not a sentencepiece model")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("not a sentencepiece model, or a damaged one")
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
