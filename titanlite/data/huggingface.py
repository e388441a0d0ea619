"""A tokenizer that is a Hugging Face tokenizer.json, through the optional package `tokenizers`. Torch-free.

The file says how text is split and merged. What it says about padding, truncation, dropout and the adding of special
tokens does not hold here: text in, its ids out.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.problems import InputError, Problem
from titanlite.data import tokenizer as base
from titanlite.data.tokenizer import SPACE_MARK, Tokenizer, not_a_tokenizer, quoted, sha256_of

_GROUP_CHARS = 1 << 21  # encoded at once: the library takes a hundred bytes and more a token
_MAX_VOCABULARY = 1 << 24
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")  # the first that names a piece counts

# GPT-2's alphabet: the printable bytes stand for themselves, the others for characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in set(_PRINTABLE))}

# Parts after which every character of the text is still there. Prepend and Replace are looked at more closely.
_KEEPING_NORMALIZERS = {"ByteLevel", "Prepend", "Replace"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts", "FixedLength"}

_HARD_TEXTS = (
    "", " ", "  ", "a", " a", "  a  ", "a  b   c", "\n", "\n\n \n", "\t\tx\t", "a\r\nb\rc\x0b\x0c", "\0\x01\x1b\x7f",
    "A bC.", "don't  stop 'S 'll", "x = 12345678;\n    return  x", "(a , b) ! ? . n't 's", "##a ##", "▁", "▁▁ a▁b",
    " ▁", "⁇", "<0x0A><0xE2>", "<unk> [UNK] <s>", "\ufeff\ufffd\ufffe",
    "e\u0301 \u00e9 \ufb01 \u2165 \uff76\uff9e \u0130", "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "中文 日本語 한국어", "👩‍👩‍👧 😀🏽", "\u2028\u2029\x85\xa0\u200b\u3000", "\U0010ffff",
    "a" * 300, " " * 300, "``quoted''", "Ġ Ċ â",
)  # fmt: skip

# Places where a text may be cut (see _seam), as the texts before and after them.
_BEFORE_NEWLINE = (
    "foo", "5", "x = 1;", "f(a)", "a}", "“q”", "中文。", "man\u0303ana", "-", "_", "/", "//", "...", "'", '"', "\\",
    "😀", "\u05e9", "\u200b", "a '", "#", "12345", " x", "  .",
)  # fmt: skip
_BEFORE_SPACE = (
    "foo", "Foo", "fooBar", "x 12a", "中文", "éa", "I'm", "don", "_a", " a", "\u05e9", "...b", "\nx", "  ß",
)  # fmt: skip
_AFTER = ("bar", "Bar", "b", "sb", "éb", "中文", "xBAR", "\u05e9a", "ll", "s.", "x  y", "a\n\n", "Ж1")


class HuggingFaceTokenizer(Tokenizer):
    kind = "huggingface"

    def __init__(self, data: bytes, path: Path, key: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """data: the contents of a tokenizer.json. See load_tokenizer."""
        self.path = path
        self.fingerprint = sha256_of(data)
        spec = _parse(data, path, key)
        model = spec["model"]
        named = _named_marks(path.parent)
        marks = {"bos": bos_token or named.get("bos", ""), "eos": eos_token or named.get("eos", "")}
        try:
            self._first = _load(data.decode("utf-8-sig"), marks.values(), key)
            changed = {part: _without_prefix(spec.get(part)) for part in _TEXT_PARTS}
            same = all(changed[part] == spec.get(part) for part in _TEXT_PARTS)
            self._later = self._first if same else _load(json.dumps(spec | changed), marks.values(), key)
        except InputError:
            raise
        except Exception as error:  # the library knows no other kind
            raise not_a_tokenizer(path, key, f": {error}", "copy the file again, or update `tokenizers`") from None

        pieces: dict[str, int] = self._first.get_vocab(with_added_tokens=False)
        added = self._first.get_added_tokens_decoder()
        self.vocab_size = max([*pieces.values(), *added], default=-1) + 1
        if not 0 < self.vocab_size <= _MAX_VOCABULARY:
            raise not_a_tokenizer(path, key, f", which has {self.vocab_size} ids", f"at most {_MAX_VOCABULARY}")
        unk = pieces.get(model.get("unk_token") or "", -1)
        self.unk_id = int(model["unk_id"]) if isinstance(model.get("unk_id"), int) else unk
        special = sorted(i for i, token in added.items() if token.special)
        self.special_pieces = tuple(added[i].content for i in special)

        self._byte_level = any(part["type"] == "ByteLevel" for name in _TEXT_PARTS for part in _flat(spec.get(name)))
        self._space_mark = _space_mark_of(spec)
        self._model = model
        texts = {i: self._bytes_of(piece) for piece, i in pieces.items()}
        texts |= {i: token.content.encode() for i, token in added.items()}
        texts |= dict.fromkeys([*special, *([self.unk_id] if self.unk_id >= 0 else [])], b"")
        self.token_bytes = np.zeros(self.vocab_size, dtype=np.int64)
        self.token_bytes[list(texts)] = [len(text) for text in texts.values()]
        self._is_special = np.zeros(self.vocab_size, dtype=np.bool_)
        self._is_special[special] = True

        mark_bytes = [pieces.get(f"<0x{byte:02X}>", -1) for byte in SPACE_MARK.encode()]
        cares = self._space_mark == SPACE_MARK and bool(model.get("byte_fallback")) and min(mark_bytes) >= 0
        self._space_mark_ids = np.array(mark_bytes if cares else [], dtype=np.int32)

        others = [token for token in added.values() if not token.special]
        simple = not any(token.lstrip or token.rstrip or token.single_word for token in others)
        self._cuts = {"\n": False, " ": False}  # before _seam is asked, texts are not cut
        try:
            self._find_marks(marks, bool(bos_token), bool(eos_token), key)
            self._cuts = self._safe_cuts(texts.values()) if simple else self._cuts
            hard = [*_HARD_TEXTS, *(f"{a}{token.content}{b}" for token in others[:64] for a, b in ("ab", "  ", "\n\n"))]
            self.exact = simple and self._keeps_text(spec, pieces) and self._comes_back([*hard, "".join(hard)])
        except InputError:
            raise
        except Exception as error:
            raise not_a_tokenizer(path, key, f", which fails on text ({error})", "correct it, or use another") from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with _panics():
            return self._first.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def _encode(self, parts: list[str], *, first: bool, num_threads: int) -> list[np.ndarray]:
        """num_threads: 1, or else as many as the library chooses (RAYON_NUM_THREADS, TOKENIZERS_PARALLELISM)."""
        library = self._first if first else self._later
        encode = getattr(library, "encode_batch_fast", library.encode_batch)
        ids: list[np.ndarray] = []
        with _threads(num_threads), _panics():
            start = 0
            while start < len(parts):
                stop, size = start, 0
                while stop < len(parts) and size < _GROUP_CHARS:
                    size += len(parts[stop])
                    stop += 1
                encoded = encode(parts[start:stop], add_special_tokens=False)
                ids += [np.array(one.ids, dtype=np.int32) for one in encoded]
                start = stop
        return ids

    # --- where a long text is cut ---

    def _cut(self, text: str, start: int) -> int:
        """The last seam in a part; without one, the next seam of the text, or its end."""
        stop = start + base.PART_CHARS
        for mark in ("\n", " "):
            if self._cuts[mark]:
                at = stop
                while (at := text.rfind(mark, start + 1, at)) >= 0:
                    if (seam := _seam(text, at)) > start:
                        return seam
        following = [at for mark in ("\n", " ") if self._cuts[mark] and (at := _next_seam(text, mark, stop)) >= 0]
        return min(following, default=len(text))

    def _safe_cuts(self, pieces: Iterable[bytes]) -> dict[str, bool]:
        """At which kinds of seams the ids of both sides together are those of the whole.

        No piece may reach over the seam, so that no merge and no choice of the model can; the other parts are tried.
        """
        together = b"\0".join(pieces).decode("utf-8", "replace")
        over = {"\n": re.search(r"\n[^\W\d_]|\n\ufffd", together), " ": re.search(r"[^\W\d_] |\ufffd ", together)}
        pairs = {
            "\n": [(f"{a}\n", b) for a in _BEFORE_NEWLINE for b in _AFTER],
            " ": [(a, f" {b}") for a in _BEFORE_SPACE for b in _AFTER],
        }
        return {mark: over[mark] is None and self._parts_at(pairs[mark]) for mark in pairs}

    def _parts_at(self, pairs: list[tuple[str, str]]) -> bool:
        whole = [a + b for a, b in pairs]
        rights = self._encode([b for _, b in pairs], first=False, num_threads=1)
        for first in (True, False):
            lefts = self._encode([a for a, _ in pairs], first=first, num_threads=1)
            ids = self._encode(whole, first=first, num_threads=1)
            joined = map(np.concatenate, zip(lefts, rights, strict=True))
            if not all(map(np.array_equal, ids, joined)):
                return False
        return True

    # --- what is known of it ---

    def _find_marks(self, marks: dict[str, str], bos_chosen: bool, eos_chosen: bool, key: str) -> None:
        """Sets bos_id and eos_id. Raises InputError where a chosen one is none or text can write a special id."""
        for name, chosen in (("bos", bos_chosen), ("eos", eos_chosen)):
            found = self._first.token_to_id(marks[name]) if marks[name] else None
            found = -1 if found is None else int(found)
            if chosen:
                texts = [marks[name], f"a{marks[name]}b", f" {marks[name]} "]
                ids = np.concatenate([*self.encode_batch(texts), *self.encode_parts(texts, [False] * 3)])
                found = self._choose(name, marks[name], found, found in ids, key)
            setattr(self, f"{name}_id", found)
        texts = [f"{a}{piece}{b}" for piece in self.special_pieces for a, b in (("", ""), "ab", "  ")]
        ids = np.unique(np.concatenate([np.array([], dtype=np.int32), *self.encode_batch(texts)]))
        written = [int(i) for i in ids if self._is_special[i] and i != self.unk_id]
        if written:
            pieces = quoted([str(self._first.id_to_token(i)) for i in written])
            got = f", which makes special ids of text that says {pieces}"
            raise not_a_tokenizer(
                self.path, key, got, "use the .model file that it was made from, or another tokenizer"
            )

    def _keeps_text(self, spec: dict[str, Any], pieces: dict[str, int]) -> bool:
        """Whether no part of it is known, or might be, to lose or change text."""
        model = self._model
        for part in _flat(spec.get("normalizer")):
            if part["type"] not in _KEEPING_NORMALIZERS:
                return False
            if part["type"] == "Replace" and not (self._space_mark and part.get("content") == self._space_mark):
                return False
        for part in _flat(spec.get("pre_tokenizer")):
            if part["type"] not in _KEEPING_PRE_TOKENIZERS or part.get("behavior") == "Removed":
                return False
        if model.get("type") not in ("BPE", "Unigram", None):
            return False
        if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
            return False
        if self._byte_level:
            return all(char in pieces for char in _BYTE_OF)
        return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in pieces for byte in range(256))

    def _comes_back(self, texts: list[str]) -> bool:
        return [self.decode(ids) for ids in self.encode_batch(texts)] == texts

    def _bytes_of(self, piece: str) -> bytes:
        """The text that a piece of the model stands for."""
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, piece))
            except KeyError:
                return piece.encode()
        if self._model.get("byte_fallback") and (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        piece = piece.removesuffix(self._model.get("end_of_word_suffix") or "")
        piece = piece.removeprefix(self._model.get("continuing_subword_prefix") or "")
        return (piece.replace(self._space_mark, " ") if self._space_mark else piece).encode()


# --- reading the file ---

_TEXT_PARTS = ("normalizer", "pre_tokenizer")


def _parse(data: bytes, path: Path, key: str) -> dict[str, Any]:
    """The file as JSON. Raises InputError where it is none, or no tokenizer."""
    try:
        spec = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise not_a_tokenizer(path, key, f": JSON that is cut short or damaged ({error})", "copy it again") from None
    if isinstance(spec, dict) and isinstance(spec.get("model"), dict):
        return spec
    beside = path.parent / "tokenizer.json"
    fix = "name the tokenizer.json of the model's Hugging Face repository"
    if beside.is_file() and path.name != beside.name:
        fix = f"name {str(beside)!r}"
    if not isinstance(spec, dict):
        raise not_a_tokenizer(path, key, ", JSON that is no tokenizer", fix)
    if isinstance(spec.get("vocab"), list) and isinstance(spec.get("config"), dict):
        raise not_a_tokenizer(path, key, ", a tekken.json, Mistral's own form", fix)
    if spec and all(isinstance(value, int) for value in spec.values()):
        raise not_a_tokenizer(path, key, ", a list of pieces (vocab.json) without the merges", fix)
    keys = quoted(list(spec), 5) or "none"
    raise not_a_tokenizer(path, key, f", JSON that is no tokenizer (its keys: {keys})", fix)


def _named_marks(folder: Path) -> dict[str, str]:
    """The pieces that the files beside a tokenizer.json name as "bos" and "eos". Raises InputError."""
    named: dict[str, str] = {}
    for name in _CONFIGS:
        file = folder / name
        try:
            config = json.loads(file.read_text(encoding="utf-8-sig"))
            if not isinstance(config, dict):
                raise ValueError("no object")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError) as error:
            got = f"a file that cannot be read ({error})"
            raise InputError(Problem("", str(file), got, "a JSON object", "copy it again, or remove it")) from None
        for mark in ("bos", "eos"):
            piece = config.get(f"{mark}_token")
            piece = piece.get("content") if isinstance(piece, dict) else piece
            if isinstance(piece, str) and piece:
                named.setdefault(mark, piece)
    return named


def _load(spec: str, marks: Iterable[str], key: str) -> Any:
    """The library's tokenizer. marks: pieces that are special, whatever the file says. Raises InputError without it."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        got, fix = "a tokenizer.json, but the package tokenizers is not installed", "pip install tokenizers"
        raise InputError(Problem("", key, got, "an installed package tokenizers", fix)) from None
    with _panics():
        loaded = library.Tokenizer.from_str(spec)
        loaded.no_truncation()
        loaded.no_padding()
        loaded.post_processor = None
        if getattr(loaded.model, "dropout", None) is not None:
            loaded.model.dropout = None
        loaded.encode_special_tokens = True  # the library's name for: special tokens in text are text
        loaded.add_special_tokens([piece for piece in marks if piece and loaded.token_to_id(piece) is not None])
    return loaded


def _flat(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A part of the file, or those of a sequence."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _flat(inner)
    else:
        yield part


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """The same normalizer or pre-tokenizer, which puts no space before the text."""
    if part is None:
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [_without_prefix(inner) for inner in part[name]]
        return {**part, name: [inner for inner in kept if inner is not None]}
    if part["type"] == "Prepend":
        return None
    off = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {**part, **{name: value for name, value in off.items() if name in part}}


def _space_mark_of(spec: dict[str, Any]) -> str:
    """What the pieces have in place of a space; "" when that is a space."""
    for part in (part for name in _TEXT_PARTS for part in _flat(spec.get(name))):
        if part["type"] == "Metaspace":
            return str(part.get("replacement") or SPACE_MARK)
        if part["type"] == "Replace" and part.get("pattern") == {"String": " "}:
            return str(part.get("content") or "")
    return ""


def _seam(text: str, at: int) -> int:
    """Where to cut at the newline or space at `at`; -1: not there.

    After a newline between a character that is no space and a letter, or before a space between letters: the patterns
    by which GPT-2, Llama 3 and their kin part a text before merging never reach over these. They do reach over others,
    or look beyond them: how GPT-2's parts spaces depends on what comes after them.
    """
    if not 0 < at < len(text) - 1 or not text[at + 1].isalpha():
        return -1
    if text[at] == "\n":
        return -1 if text[at - 1].isspace() else at + 1
    return at if text[at - 1].isalpha() else -1


def _next_seam(text: str, mark: str, start: int) -> int:
    at = start - 1
    while (at := text.find(mark, at + 1)) >= 0:
        if (seam := _seam(text, at)) >= 0:
            return seam
    return -1


# --- calling the library ---


@contextmanager
def _panics() -> Iterator[None]:
    """A panic of the library, which is no Exception to Python, as a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """With one thread, the library's switch for its pool of threads is off as long as this lasts."""
    switch = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(switch)
    if num_threads == 1:
        os.environ[switch] = "false"
    try:
        yield
    finally:
        if num_threads == 1:
            if before is None:
                del os.environ[switch]
            else:
                os.environ[switch] = before
