"""A tokenizer as the files that transformers' AutoTokenizer reads, with the same ids. Torch-free.

A sentencepiece model becomes a tokenizer.json in which pieces have plain spaces, so that U+2581 in a text is spelled in
bytes as here. The merges of a byte-pair model are in its pieces and their scores: two pieces merge if their
concatenation is one, the one with the highest score first.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import TokenizerConfig
from titanlite.data.tokenizer import SPACE_MARK, Tokenizer

Spec = dict[str, Any]  # a tokenizer.json

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # sentencepiece's types of pieces
_UNIGRAM, _BPE = 1, 2  # and of models
# Below the score of any way to spell "<0x0A>" or "</s>" with pieces: text that says so is neither.
_NEVER = -1000.0


def huggingface_files(
    tokenizer: Tokenizer, config: TokenizerConfig, max_length: int, report: Callable[[str], None]
) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, and for sentencepiece the model itself, by name.

    Text becomes the ids that `tokenizer` gives, but where it spells a special piece, which is that piece there; BOS
    comes before it if training put it before documents. max_length: tokens, of the model.
    Raises InputError for a sentencepiece model that no tokenizer.json stands for.
    """
    files = {}
    beside: dict[str, Any] = {}
    if tokenizer.kind == "sentencepiece":
        files["tokenizer.model"] = tokenizer.path.read_bytes()
        spec = _spec_of_sentencepiece(files["tokenizer.model"], str(tokenizer.path))
        if spec["model"]["type"] == "Unigram":
            report(
                "warning: where two ways to cut a text score the same, as in runs of one character, transformers may "
                "take the other one, since sentencepiece rounds scores to float32"
            )
    else:
        spec = json.loads(tokenizer.path.read_text(encoding="utf-8-sig"))
        spec |= {"truncation": None, "padding": None}
        if "dropout" in spec["model"]:
            spec["model"]["dropout"] = None
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (file := tokenizer.path.with_name(name)).is_file():
                beside |= json.loads(file.read_text(encoding="utf-8-sig"))
        if (template := tokenizer.path.with_name("chat_template.jinja")).is_file():
            files[template.name] = template.read_bytes()
    bos, eos = _piece(spec, tokenizer.bos_id), _piece(spec, tokenizer.eos_id)
    spec["post_processor"] = _post_processor(
        spec.get("post_processor"), bos if config.add_bos else None, tokenizer.bos_id
    )
    beside |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one that takes tokenizer.json as it is
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": config.add_bos,  # for other programs: transformers goes by the post-processor
        "add_eos_token": False,  # after a prompt it would say that the text has ended
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if tokenizer.kind == "sentencepiece":
        beside["unk_token"] = _piece(spec, tokenizer.unk_id)
    for name, value in (("tokenizer.json", spec), ("tokenizer_config.json", beside)):
        files[name] = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    return files


def puts_bos(folder: Path) -> bool:
    """Whether the tokenizer of a Hugging Face folder puts BOS before a text, so that its model has learnt so.

    Where tokenizer.json has a template, transformers (5.24) goes by that alone, whatever add_bos_token says.
    """

    def read(name: str) -> dict[str, Any]:
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    beside = read("special_tokens_map.json") | read("tokenizer_config.json")
    bos = beside.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    given = read("tokenizer.json").get("post_processor") or {}
    for part in given.get("processors") or [given]:
        if part.get("type") == "TemplateProcessing" and part.get("single"):
            first = part["single"][0].get("SpecialToken")
            return first is not None and bos in (None, first["id"])
    return beside.get("add_bos_token") is True


def _piece(spec: Spec, number: int) -> str | None:
    for token in spec.get("added_tokens") or ():
        if token["id"] == number:
            return str(token["content"])
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, Mapping):
        return next((piece for piece, i in vocab.items() if i == number), None)
    return str(vocab[number][0]) if 0 <= number < len(vocab) else None


def _post_processor(given: Spec | None, bos: str | None, bos_id: int) -> Spec | None:
    """What puts BOS before a text, after those parts of the given one that add nothing."""
    parts = (given.get("processors") or [given]) if given else []
    parts = [part for part in parts if part["type"] == "ByteLevel"]
    if bos is not None:
        mark, first, second = ({"SpecialToken": {"id": bos, "type_id": n}} for n in (0, 0, 1))
        texts = [{"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB")]
        parts.append(
            {
                "type": "TemplateProcessing",
                "single": [mark, texts[0]],
                "pair": [first, texts[0], second, texts[1]],
                "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
            }
        )
    return {"type": "Sequence", "processors": parts} if len(parts) > 1 else parts[0] if parts else None


# ---- sentencepiece


def model_proto(data: bytes) -> Any:
    """A .model file as its protocol buffer."""
    model = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    model.ParseFromString(data)
    return model


def _spec_of_sentencepiece(data: bytes, path: str) -> Spec:
    """The tokenizer.json that gives the ids of a .model file. Raises InputError."""
    model = model_proto(data)
    texts = [
        piece.piece.replace(SPACE_MARK, " ") if piece.type in (_NORMAL, _USER_DEFINED) else piece.piece
        for piece in model.pieces
    ]
    reason = _why_not(model, texts)
    if reason:
        allowed = "a model whose ids a tokenizer.json can give"
        fix = "name a tokenizer.json of the same ids with --tokenizer PATH, or write none with --tokenizer none"
        raise InputError(Problem("", "tokenizer.path", f"{path!r}, {reason}", allowed, fix))
    by_type: dict[int, list[int]] = {}
    for i, piece in enumerate(model.pieces):
        by_type.setdefault(piece.type, []).append(i)
    has_bytes, prefix = model.trainer_spec.byte_fallback, model.normalizer_spec.add_dummy_prefix
    special = {*by_type.get(_UNKNOWN, ()), *by_type.get(_CONTROL, ())}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": texts[i], **plain, "special": i in special}
        for i in sorted(special.union(by_type.get(_USER_DEFINED, ())))
    ]
    # Without bytes to spell it in, sentencepiece takes its mark in a text for the space that it stands for.
    normalizers: list[Spec] = (
        [] if has_bytes else [{"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}]
    )
    decoders: list[Spec] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        normalizers.append({"type": "Prepend", "prepend": " "})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unk = by_type[_UNKNOWN][0]
    scores = [piece.score for piece in model.pieces]
    normal = by_type.get(_NORMAL, [])
    if model.trainer_spec.model_type == _BPE:
        tokens: Spec = {
            "type": "BPE",
            "unk_token": texts[unk],
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": _merges({texts[i]: scores[i] for i in normal}),
        }
    else:
        for kind in (_UNKNOWN, _CONTROL, _BYTE):
            for i in by_type.get(kind, ()):
                scores[i] = _NEVER
        tokens = {
            "type": "Unigram",
            "unk_id": unk,
            "byte_fallback": has_bytes,
            "vocab": list(zip(texts, scores, strict=True)),
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": tokens,
    }


def _why_not(model: Any, texts: list[str]) -> str:
    """Why no tokenizer.json gives the ids of a sentencepiece model; "" if one does."""
    types = [piece.type for piece in model.pieces]
    normalizer = model.normalizer_spec
    if model.trainer_spec.model_type not in (_BPE, _UNIGRAM):
        return "which is neither a byte-pair nor a unigram model"
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        return f"which changes text before it is cut (normalization rule {normalizer.name!r})"
    if model.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "which puts spaces at the end of pieces, or takes them for other characters"
    if normalizer.add_dummy_prefix and _USER_DEFINED in types:
        return "which puts a space before the text, and has symbols of its own that divide it"
    if _UNUSED in types or len(set(texts)) != len(texts):
        return "which has pieces that are never used, or twice the same"
    known = set(texts)
    if any(char not in known for text, kind in zip(texts, types, strict=True) if kind == _NORMAL for char in text):
        return "which has a piece with a character that is no piece"
    return ""


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make another piece, that with the highest score first.

    Of equal scores sentencepiece makes the leftmost merge: a run of spaces grows at its left end. So do these, as what
    has grown most comes first.
    """
    pairs = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                pairs.append((-score, -cut, left, right))
    return [(left, right) for _, _, left, right in sorted(pairs)]
