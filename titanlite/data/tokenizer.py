"""Text <-> token ids: what every tokenizer does, and which kind a file is. Torch-free.

The two kinds are in sentencepiece_model.py and huggingface.py. What the libraries do not give by themselves:
- A long document is encoded in parts, so that memory stays small, with the ids of the whole wherever the tokenizer
  allows it.
- U+2581, which many tokenizers write for a space, comes back as itself: it is written as its three byte pieces.
- Text never becomes a special id, whatever it says, and no special id is added to it.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titanlite.config.problems import InputError, Problem

SPACE_MARK = "\u2581"
PART_CHARS = 1 << 16
_ALLOWED = 'a sentencepiece .model file, a Hugging Face tokenizer.json, a folder with one of them, or "embedded"'
_USE_JSON = "name the tokenizer.json of the model's Hugging Face repository"


class Tokenizer(ABC):
    """Text to ids and back.

    kind:           "sentencepiece" or "huggingface"
    path:           the file it was read from
    fingerprint:    sha256 of that file, hexadecimal
    vocab_size:     largest id + 1
    bos_id, eos_id: -1 where the tokenizer's files name none and none was chosen
    unk_id:         what stands for text that has no piece; -1 when there is no such id
    special_pieces: pieces that stand for no text, in the order of their ids
    token_bytes:    int64 [vocab_size], UTF-8 bytes of text that each id stands for (special, control, unknown: 0). For
                    a tokenizer that is exact and adds no space before the text they add up to the length of the text.
    exact:          decode(encode(x)) == x for every str x, as far as the tokenizer's parts tell; otherwise it loses
                    spaces or characters, or changes them
    """

    kind: str
    path: Path
    fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    unk_id: int
    special_pieces: tuple[str, ...]
    token_bytes: np.ndarray
    exact: bool
    _space_mark_ids: np.ndarray  # int32: the bytes of U+2581; empty when it needs no care, or there is no such id

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [n]; neither BOS nor EOS is added. Raises ValueError for a lone surrogate, which is no text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """Ids int32 [n] of every text; each is what encode gives, whatever num_threads is."""
        return self.encode_parts(texts, [True] * len(texts), num_threads=num_threads)

    def encode_parts(self, texts: Sequence[str], first: Sequence[bool], *, num_threads: int = 1) -> list[np.ndarray]:
        """Ids int32 [n] of every text; where first is False the text goes on with a document, and gets no space before
        it that is not its own. Cut a document after newlines: there most tokenizers give the ids of the whole."""
        starts: list[str] = []
        laters: list[str] = []
        plans: list[list[tuple[list[str], int] | None]] = []  # per text, which part of which list; None: a space mark
        for text, is_first in zip(texts, first, strict=True):
            if not text.isascii():
                text.encode()  # UnicodeEncodeError is a ValueError that says where; the libraries would only fail
            plan: list[tuple[list[str], int] | None] = []
            for part in self._parts(text):
                if part is None:
                    plan.append(None)
                else:
                    kept = laters if plan or not is_first else starts
                    plan.append((kept, len(kept)))
                    kept.append(part)
            plans.append(plan)
        start_ids = self._encode(starts, first=True, num_threads=num_threads)
        later_ids = self._encode(laters, first=False, num_threads=num_threads)
        found = []
        for plan in plans:
            ids = [
                self._space_mark_ids if step is None else (start_ids if step[0] is starts else later_ids)[step[1]]
                for step in plan
            ]
            found.append(ids[0] if len(ids) == 1 else np.concatenate(ids))
        return found

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special ids give nothing, bytes that are not UTF-8 give U+FFFD."""

    @abstractmethod
    def _encode(self, parts: list[str], *, first: bool, num_threads: int) -> list[np.ndarray]:
        """Ids int32 of every part, which all start a document (first) or all go on with one."""

    @abstractmethod
    def _cut(self, text: str, start: int) -> int:
        """Where the part of the text that starts at `start` ends; the text goes on for more than PART_CHARS."""

    def _parts(self, text: str) -> Iterator[str | None]:
        """What is encoded at once, first a str; None stands for one U+2581."""
        segments = text.split(SPACE_MARK) if self._space_mark_ids.size else [text]
        for i, segment in enumerate(segments):
            if i:
                yield None
            start = 0
            while len(segment) - start > PART_CHARS:
                stop = self._cut(segment, start)
                yield segment[start:stop]
                start = stop
            if i == 0 or start < len(segment):
                yield segment[start:]

    def _choose(self, name: str, piece: str, found: int, is_text: bool, key: str) -> int:
        """The id of a piece that the user chose as BOS or EOS (name), which is `found` (-1: there is none).

        is_text: text can become that id. Raises InputError, naming `key`, when it cannot be used.
        """
        key = f"{key.rpartition('.')[0] or 'tokenizer'}.{name}_token"
        got = f"{piece!r}, which {str(self.path)!r} "
        allowed = f"one of its special pieces, such as {quoted(self.special_pieces)}"
        if not self.special_pieces:
            allowed = "a special piece, but it has none"
        if found < 0:
            near = difflib.get_close_matches(piece, self.special_pieces, n=3, cutoff=0.5)
            fix = f"did you mean {' or '.join(map(repr, near))}?" if near else "choose one of them"
            raise InputError(Problem("", key, got + "does not have", allowed, fix))
        if is_text:
            fix = f"choose another, or tokenizer.add_{name}=false"
            raise InputError(Problem("", key, got + "also writes where a text says so", allowed, fix))
        return found


def quoted(pieces: Sequence[str], most: int = 8) -> str:
    """A few pieces for a message."""
    return ", ".join(map(repr, pieces[:most])) + (", …" if len(pieces) > most else "")


def load_tokenizer(
    path: Path | str, key: str = "tokenizer.path", *, bos_token: str = "", eos_token: str = ""
) -> Tokenizer:
    """The tokenizer in a file, whose contents say which kind it is, or in a folder with tokenizer.json (preferred) or
    tokenizer.model.

    bos_token, eos_token: the pieces to use; empty: those that the tokenizer's own files name, if they do. For
    tokenizer.json those files are tokenizer_config.json and special_tokens_map.json beside it.
    Raises InputError, naming `key`, when it is none.
    """
    file, data = _read(Path(path), key)
    if re.match(rb'(\xef\xbb\xbf)?\s*[\[{]\s*(["\[{}\]]|$)', data):
        from titanlite.data.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(data, file, key, bos_token=bos_token, eos_token=eos_token)
    from titanlite.data.sentencepiece_model import SentencePieceTokenizer

    try:
        return SentencePieceTokenizer(data, file, key, bos_token=bos_token, eos_token=eos_token)
    except InputError:
        raise
    except ValueError as error:
        got, fix = _what_it_is(file, data) or (f": {error}", "copy the file again")
        raise not_a_tokenizer(file, key, got, fix) from None


def not_a_tokenizer(file: Path, key: str, got: str, fix: str) -> InputError:
    return InputError(Problem("", key, f"{str(file)!r}{got}", _ALLOWED, fix))


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path, key: str) -> tuple[Path, bytes]:
    """The tokenizer's file and its contents."""
    try:
        if path.is_dir():
            names = ("tokenizer.json", "tokenizer.model")
            found = [path / name for name in names if (path / name).is_file()]
            if not found:
                others = sorted(file.name for file in path.iterdir() if re.search(r"\.model|\.json$", file.name))
                got = f", a folder without {' or '.join(names)}" + (f" (it has {', '.join(others[:5])})" * bool(others))
                raise not_a_tokenizer(path, key, got, "name the tokenizer's file")
            path = found[0]
        return path, path.read_bytes()
    except OSError as error:
        raise not_a_tokenizer(path, key, f" ({error.strerror})", "correct the path") from None


def _what_it_is(file: Path, data: bytes) -> tuple[str, str] | None:
    """What a file that holds no tokenizer is instead, and what to do about it; None: not known."""
    head = data[:4096]
    if head.startswith(b"version https://git-lfs"):
        return ", a pointer that git-lfs left instead of the file", "git lfs pull, or download the file itself"
    first_lines = head.split(b"\n")[:-1][:3]
    if first_lines and all(re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?", line) for line in first_lines):
        return ", a tiktoken vocabulary (lines of base64)", f"{_USE_JSON}, which has the same ids"
    if first_lines and all(re.fullmatch(rb"[^\t]*\t-?[\d.e+-]+\r?", line) for line in first_lines):
        model = file.with_suffix(".model")
        beside = f"{str(model)!r}" if model.is_file() else "the .model file that was made with it"
        return ", a sentencepiece .vocab file, which is only a list for people to read", f"name {beside}"
    return None
