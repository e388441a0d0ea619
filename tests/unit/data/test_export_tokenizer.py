"""What transformers' AutoTokenizer makes of exported files: the ids that training saw."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from tests.unit.data.hard_text import HARD
from tests.unit.data.test_huggingface import LINES, SPACES, gpt2, llama2_model, llama3, marked
from titanlite.config.problems import InputError
from titanlite.config.schema import TokenizerConfig
from titanlite.data import export_tokenizer
from titanlite.data.export_tokenizer import huggingface_files, puts_bos
from titanlite.data.tokenizer import SPACE_MARK, Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")

KINDS = ("llama", "qwen3", "mixtral", "qwen3_moe")
FRAGMENTS = (
    "a",
    "ab",
    "aba",
    "the",
    " ",
    "  ",
    "\n",
    "=",
    "==",
    "é",
    "中",
    "😀",
    "0",
    "x",
    "<",
    "<0x0A>",
    ".",
    SPACE_MARK,
)


def model_of(**options: Any) -> bytes:
    model = io.BytesIO()
    usual: dict[str, Any] = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "vocab_size": 330,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, *SPACES]), model_writer=model, minloglevel=2, hard_vocab_limit=False,
        **usual | options,
    )  # fmt: skip
    return model.getvalue()


def equal_scores() -> bytes:
    """Runs of spaces that all have the same score, as in Llama 2's and Mistral's models."""
    proto = export_tokenizer.model_proto(model_of(model_type="bpe", byte_fallback=True, add_dummy_prefix=False))
    for length in (2, 3, 4, 5, 8, 12, 16):
        text = SPACE_MARK * length
        found = [piece for piece in proto.pieces if piece.piece == text]
        (found[0] if found else proto.pieces.add(piece=text)).score = -1e9
    return bytes(proto.SerializeToString())


MODELS: dict[str, Callable[[], bytes | dict[str, Any]]] = {
    "byte pairs, a space before the text": llama2_model,
    "byte pairs, no bytes": lambda: model_of(model_type="bpe"),
    "byte pairs, equal scores": equal_scores,
    "unigram": lambda: model_of(
        model_type="unigram", byte_fallback=True, add_dummy_prefix=False, required_chars="<0xAE2>/sunkpad"
    ),
    "gpt2": gpt2,
    "llama3": llama3,
    "marked": marked,
}


def tokenizer_of(folder: Path, made: bytes | dict[str, Any], config: TokenizerConfig) -> Tokenizer:
    folder.mkdir()
    if isinstance(made, bytes):
        (folder / "tokenizer.model").write_bytes(made)
    else:
        (folder / "tokenizer.json").write_text(json.dumps(made))
    return load_tokenizer(folder, bos_token=config.bos_token, eos_token=config.eos_token)


def exported(folder: Path, tokenizer: Tokenizer, config: TokenizerConfig, kind: str = "llama") -> Any:
    folder.mkdir()
    for name, data in huggingface_files(tokenizer, config, 4096, print).items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def texts(tokenizer: Tokenizer) -> list[str]:
    """Hard ones and random ones. Where a space comes before a text, one that begins with the mark has it there only."""
    choice = random.Random(0)
    made = [
        "".join(choice.choices(choice.sample(FRAGMENTS, choice.choice((2, 3, 6))), k=choice.choice((3, 12, 60))))
        for _ in range(300)
    ]
    prefix = (
        tokenizer.decode(tokenizer.encode("a")) == "a"
        and tokenizer.encode("a").tolist() != tokenizer.encode_parts(["a"], [False])[0].tolist()
    )
    return [text for text in [*HARD, *LINES, *SPACES, *made] if not (prefix and text.startswith(SPACE_MARK))]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_ids_are_those_of_training(name: str, tmp_path: Path) -> None:
    made = MODELS[name]()
    named = isinstance(made, dict) and name != "gpt2"
    marks: dict[str, Any] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} if named else {}
    config = TokenizerConfig(eos_token="<|endoftext|>") if name == "gpt2" else TokenizerConfig(**marks)
    tokenizer = tokenizer_of(tmp_path / "ours", made, config)
    kind = KINDS[list(MODELS).index(name) % len(KINDS)]
    theirs = exported(tmp_path / "theirs", tokenizer, config, kind)
    every = texts(tokenizer)
    got = theirs(every, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    differing = [
        (text, ids, wanted.tolist())
        for text, ids, wanted in zip(every, got, tokenizer.encode_batch(every), strict=True)
        if ids != wanted.tolist()
    ]
    if name == "unigram":  # the best score in both, to float32's precision
        scores = [piece.score for piece in export_tokenizer.model_proto(made).pieces] if isinstance(made, bytes) else []
        differing = [
            d for d in differing if sum(scores[i] for i in d[1]) != pytest.approx(sum(scores[i] for i in d[2]))
        ]
    assert differing == []
    assert len(theirs) == tokenizer.vocab_size
    assert theirs("the cat")["input_ids"] == tokenizer.encode("the cat").tolist(), "nothing is added"
    assert theirs.decode(got[every.index(LINES[1])]) == LINES[1]
    for mark in ("bos", "eos"):
        number = getattr(tokenizer, f"{mark}_id")
        assert getattr(theirs, f"{mark}_token_id") == (None if number < 0 else number)
    assert len(every) > 300
    assert puts_bos(tmp_path / "ours") == (name == "llama3") and not puts_bos(tmp_path / "theirs")
    again = load_tokenizer(tmp_path / "theirs")
    assert [ids.tolist() for ids in again.encode_batch(every)] == got, "as titanlite reads what it wrote"


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_of_the_embedded_text(
    kind: str, small_model: Path, embedded_documents: list[str], tmp_path: Path
):
    tokenizer, config = load_tokenizer(small_model), TokenizerConfig()
    theirs = exported(tmp_path / "theirs", tokenizer, config, kind)
    every = texts(tokenizer)
    if kind == "llama":
        every += [*embedded_documents[:8], "\n".join(embedded_documents[8:40])]
        assert len(every[-1]) > 2 * 65536, "longer than the parts that are encoded at once"
    got = theirs(every, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert got == [ids.tolist() for ids in tokenizer.encode_batch(every)]
    assert [theirs.decode(ids) for ids in got] == every
    assert theirs("a</s>")["input_ids"][-1] == tokenizer.eos_id, "their convention"


@pytest.mark.parametrize("name", ["byte pairs, equal scores", "gpt2", "marked"])
def test_bos_comes_before_a_text_where_training_put_it(name: str, tmp_path: Path) -> None:
    made = MODELS[name]()
    marks = {"gpt2": ("<|endoftext|>",) * 2, "marked": ("<|begin_of_text|>", "<|end_of_text|>")}.get(name, ("", ""))
    config = TokenizerConfig(add_bos=True, bos_token=marks[0], eos_token=marks[1])
    tokenizer = tokenizer_of(tmp_path / "ours", made, config)
    theirs = exported(tmp_path / "theirs", tokenizer, config)
    ids = tokenizer.encode("the cat").tolist()
    assert theirs("the cat")["input_ids"] == [tokenizer.bos_id, *ids]
    assert theirs("the cat", "the cat")["input_ids"] == [tokenizer.bos_id, *ids, tokenizer.bos_id, *ids]
    assert puts_bos(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/tokenizer_config.json").read_text())["add_bos_token"] is True
    exported(tmp_path / "without", tokenizer, config.model_copy(update={"add_bos": False}))
    assert not puts_bos(tmp_path / "without")


def test_bos_does_not_come_before_a_text_where_training_did_not_put_it(tmp_path: Path) -> None:
    """Whatever the files of the run's tokenizer say of it; they also keep what else they say."""
    tokenizer_of(tmp_path / "ours", llama3(), TokenizerConfig())
    beside = {"add_bos_token": True, "bos_token": "<|begin_of_text|>", "pad_token": "<|reserved_special_token_3|>"}
    (tmp_path / "ours/tokenizer_config.json").write_text(json.dumps(beside))
    (tmp_path / "ours/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    theirs = exported(tmp_path / "theirs", load_tokenizer(tmp_path / "ours"), TokenizerConfig())
    ids = theirs("the cat")["input_ids"]
    assert theirs.bos_token_id is not None and theirs.bos_token_id not in ids
    assert json.loads((tmp_path / "theirs/tokenizer_config.json").read_text())["add_bos_token"] is False
    assert theirs.pad_token == beside["pad_token"]
    assert theirs.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False) == "the cat"


def test_a_model_has_learnt_bos_if_a_template_puts_it_there(tmp_path: Path) -> None:
    """add_bos_token says nothing then, as for transformers; another mark before a text is no BOS."""
    config = TokenizerConfig(add_bos=True, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    theirs = tmp_path / "theirs"
    tokenizer = tokenizer_of(tmp_path / "ours", marked(), config)
    exported(theirs, tokenizer, config)
    beside = json.loads((theirs / "tokenizer_config.json").read_text())
    for bos in (beside["bos_token"], {"content": beside["bos_token"], "lstrip": False}):
        changed = beside | {"add_bos_token": False, "bos_token": bos}
        (theirs / "tokenizer_config.json").write_text(json.dumps(changed))
        assert puts_bos(theirs)
    (theirs / "tokenizer_config.json").write_text(json.dumps(beside | {"add_bos_token": False}))
    assert transformers.AutoTokenizer.from_pretrained(theirs)("a")["input_ids"][0] == tokenizer.bos_id
    text = (theirs / "tokenizer.json").read_text()
    start = text.index('"post_processor"')
    other = text[:start] + text[start:].replace("<|begin_of_text|>", "<|end_of_text|>")
    (theirs / "tokenizer.json").write_text(other)
    assert not puts_bos(theirs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"model_type": "word"}, "neither a byte-pair nor a unigram"),
    "normalized": ({"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"}, "changes text"),
    "squeezed": ({"model_type": "bpe", "remove_extra_whitespaces": True}, "changes text"),
    "suffix": ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "spaces at the end"),
    "symbols": ({"model_type": "bpe", "user_defined_symbols": ["\n"]}, "symbols of its own"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_model_whose_ids_no_file_gives_is_refused(case: str, tmp_path: Path) -> None:
    options, reason = REFUSED[case]
    tokenizer = tokenizer_of(tmp_path / "ours", model_of(**options), TokenizerConfig())
    with pytest.raises(InputError, match=reason) as caught:
        huggingface_files(tokenizer, TokenizerConfig(), 4096, print)
    assert "--tokenizer none" in caught.value.problems[0].fix
