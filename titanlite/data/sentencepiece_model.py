"""A tokenizer that is a sentencepiece .model file. Torch-free.

A damaged file is refused, a cut one too, which sentencepiece may load in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from titanlite.data import tokenizer as base
from titanlite.data.tokenizer import SPACE_MARK, Tokenizer, sha256_of

_GROUP = 64  # parts
# normalizer_spec { add_dummy_prefix: false } as a protocol buffer, which overrides the field when it is appended.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(
        self,
        model: bytes,
        path: Path = Path(),
        key: str = "tokenizer.path",
        *,
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        """model: the contents of a .model file. Raises ValueError when it is not a whole one. See load_tokenizer."""
        _check_model_file(model)
        try:
            self._first = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError("not a sentencepiece model") from error
        self.path = path
        self.fingerprint = sha256_of(model)
        self.vocab_size = int(self._first.vocab_size())
        self.bos_id = int(self._first.bos_id())
        self.eos_id = int(self._first.eos_id())
        self.unk_id = int(self._first.unk_id())
        controls = filter(self._first.is_control, range(self.vocab_size))
        self.special_pieces = tuple(self._first.id_to_piece(i) for i in controls)
        self.token_bytes = np.array([self._bytes_of(i) for i in range(self.vocab_size)], dtype=np.int64)

        # Later parts of a document must not get a dummy prefix of their own; but where the model also strips spaces,
        # the prefix stands for the newline lost at the cut.
        squeezes = self._first.normalize("a  b") == self._first.normalize("a b")
        later = model if squeezes else model + _NO_DUMMY_PREFIX
        self._later = sentencepiece.SentencePieceProcessor(model_proto=later)
        mark_bytes = [self._first.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        has_bytes = all(map(self._first.is_byte, mark_bytes))
        self._space_mark_ids = np.array(mark_bytes if has_bytes else [], dtype=np.int32)
        normalizes = self._later.normalize("\ufb01 a\t\u2165") != f"\ufb01{SPACE_MARK}a\t\u2165"
        self.exact = has_bytes and not squeezes and not normalizes

        for name, piece in (("bos", bos_token), ("eos", eos_token)):
            if piece:
                found = int(self._first.piece_to_id(piece))
                found = found if self._first.id_to_piece(found) == piece else -1
                is_text = found >= 0 and not self._first.is_control(found)
                setattr(self, f"{name}_id", self._choose(name, piece, found, is_text, key))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._first.decode(np.asarray(ids, dtype=np.int64).tolist())

    def _encode(self, parts: list[str], *, first: bool, num_threads: int) -> list[np.ndarray]:
        """By groups, since lists of Python integers take ten times the memory."""
        processor = self._first if first else self._later
        ids: list[np.ndarray] = []
        for start in range(0, len(parts), _GROUP):
            group = processor.encode(parts[start : start + _GROUP], out_type=int, num_threads=num_threads)
            ids += [np.array(part, dtype=np.int32) for part in group]
        return ids

    def _cut(self, text: str, start: int) -> int:
        """After a newline. With one that is a symbol of its own, as in the embedded tokenizer, the ids are those of the
        whole; a line longer than a part is cut where the part ends."""
        stop = start + base.PART_CHARS
        return text.rfind("\n", start, stop) + 1 or stop

    def _bytes_of(self, i: int) -> int:
        if self._first.is_control(i) or self._first.is_unknown(i) or self._first.is_unused(i):
            return 0
        if self._first.is_byte(i):
            return 1
        return len(self._first.id_to_piece(i).replace(SPACE_MARK, " ").encode())


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
