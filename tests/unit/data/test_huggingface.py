"""Tokenizers of the makes that Hugging Face repositories hold: their ids, their text, and files that are none."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from tests.unit.data.hard_text import HARD
from titanlite.config.problems import InputError
from titanlite.config.schema import DataConfig, SourceConfig, TokenizerConfig
from titanlite.data import huggingface
from titanlite.data import tokenizer as tokenizer_module
from titanlite.data.huggingface import HuggingFaceTokenizer
from titanlite.data.prepare import prepare
from titanlite.data.sentencepiece_model import SentencePieceTokenizer
from titanlite.data.shards import token_dtype
from titanlite.data.tokenizer import SPACE_MARK, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
LINES = ["the cat sat on the mat", "a dog and a cat; it's 1234", "def f(x):", "    return x + 1", "déjà vu, 中文"] * 20
SPACES = ["a;\n  b\n\nc  \n d\n    e.\n\n\n  f \n\tg\r\nh"] * 20  # so that there are pieces of several of them
NORMAL = [text for text in HARD if SPACE_MARK not in text]


def gpt2() -> dict[str, Any]:
    """Byte-level BPE with one special token, which its model's vocabulary holds too."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train_from_iterator([*LINES, *SPACES], trainer)
    return dict(json.loads(made.to_str()))


def llama3() -> dict[str, Any]:
    """66 thousand pieces of made-up merges, 256 special tokens, and a file that pads, cuts and adds BOS."""
    alphabet = list(huggingface._BYTE_OF)
    # No pair that the pattern would never see, so that texts can be cut.
    pairs = [(a, b) for a in alphabet for b in alphabet if a != "Ċ" and b != "Ġ"]
    triples = [(a + b, c) for a, b, c in zip("thercasd", "heatndex", "eanrtsio", strict=True) for a, b in [(a, b)]]
    triples += [("t" + chr(ord("a") + i % 26), chr(ord("a") + i // 26)) for i in range(26 * 26)]
    triples += [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("ĠĠ", "ĠĠ"), ("ĠĠ", "Ċ"), (";Ċ", "Ċ"), ("ĠĠĊ", "Ċ")]
    order = np.random.default_rng(0).permutation(len(pairs))
    merges = [*dict.fromkeys([*(pairs[i] for i in order), *triples])]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*alphabet, *(a + b for a, b in merges)]))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [split, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    marks = ["<|begin_of_text|>", "<|end_of_text|>"]
    made.add_special_tokens([*marks, *(f"<|reserved_special_token_{i}|>" for i in range(254))])
    bos = (marks[0], made.token_to_id(marks[0]))
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    made.enable_padding(length=7)
    made.enable_truncation(5)
    return dict(json.loads(made.to_str()))


def marked() -> dict[str, Any]:
    """gpt2() with special tokens of Llama 3's names."""
    made = tokenizers.Tokenizer.from_str(json.dumps(gpt2()))
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(9))])
    return dict(json.loads(made.to_str()))


def llama2_model() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, minloglevel=2, model_type="bpe", vocab_size=330,
        normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True,
    )  # fmt: skip
    return model.getvalue()


def llama2(form: str = "prepend") -> dict[str, Any]:
    """What transformers makes of a sentencepiece model. form: "prepend" (older) or "metaspace"."""
    model = sentencepiece.SentencePieceProcessor(model_proto=llama2_model())
    vocab = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    merges = []
    for piece in list(vocab)[3 + 256 :]:
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        merges += sorted(halves, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    order = {piece: -model.get_score(i) for piece, i in vocab.items()}
    merges.sort(key=lambda pair: order["".join(pair)])
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if form == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return dict(json.loads(made.to_str()))


LLAMA3_EOS = {"__type": "AddedToken", "content": "<|end_of_text|>", "special": True}
MAKES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "gpt2": (gpt2, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}),
    "llama3": (llama3, {"bos_token": "<|begin_of_text|>", "eos_token": LLAMA3_EOS}),
    "llama2": (llama2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "llama2 metaspace": (lambda: llama2("metaspace"), {"bos_token": "<s>", "eos_token": "</s>"}),
}


def write(folder: Path, spec: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("huggingface")
    return {
        name: write(root / name, make(), config | {"tokenizer_class": "PreTrainedTokenizerFast"})
        for name, (make, config) in MAKES.items()
    }


@pytest.fixture(scope="module", params=list(MAKES))
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path]) -> HuggingFaceTokenizer:
    tokenizer = load_tokenizer(folders[request.param])
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def loaded_from(folder: Path, spec: dict[str, Any], config: dict[str, Any] | None = None) -> HuggingFaceTokenizer:
    tokenizer = load_tokenizer(write(folder, spec, config))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


# --- text and ids ---


def returning(loaded: HuggingFaceTokenizer, texts: list[str]) -> list[str]:
    """Those that come back. The library's Metaspace puts no space before a text that has one: decoding takes that."""
    return [text for text in texts if loaded.path.parent.name != "llama2 metaspace" or text[:1] != " "]


def test_hard_text_comes_back(loaded: HuggingFaceTokenizer):
    texts = returning(loaded, HARD)
    ids = loaded.encode_batch(texts)
    assert all(one.dtype == np.int32 for one in ids)
    assert [loaded.decode(one) for one in ids] == texts
    assert loaded.exact == (texts == HARD)


def test_random_text_comes_back(loaded: HuggingFaceTokenizer):
    generator = np.random.default_rng(0)
    alphabet = [*"▁▁ \n\t\0ab<>▅⁇\ufffd\r'", "<s>", "the", "    ", "e\u0301", "<0x0A>", "<|end_of_text|>"]
    texts = ["".join(generator.choice(alphabet, generator.integers(1, 40))) for _ in range(1000)]
    points = generator.integers(0, 0x110000, 5000)
    texts += ["".join(chr(p) for p in part if not 0xD800 <= p < 0xE000) for part in np.split(points, 50)]
    texts = returning(loaded, texts)
    assert [loaded.decode(ids) for ids in loaded.encode_batch(texts)] == texts


def test_bytes_of_ids_add_up(loaded: HuggingFaceTokenizer):
    for text in returning(loaded, HARD):
        prefix = loaded.path.parent.name.startswith("llama2") and text and text[0] != SPACE_MARK  # their own space
        assert loaded.token_bytes[loaded.encode(text)].sum() == len(text.encode()) + bool(prefix)
    assert (loaded.token_bytes[[loaded.bos_id, loaded.eos_id]] == 0).all()
    assert loaded.token_bytes.dtype == np.int64 and len(loaded.token_bytes) == loaded.vocab_size


def test_ids_are_those_of_transformers(loaded: HuggingFaceTokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(loaded.path.parent)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (loaded.bos_id, loaded.eos_id)
    # U+2581, which it takes for a space, and special tokens, which it makes of text, are ours to treat otherwise.
    texts = [text for text in [*NORMAL, *LINES] if not any(piece in text for piece in loaded.special_pieces)]
    assert len(texts) > 100
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [ids.tolist() for ids in loaded.encode_batch(texts)] == expected


@pytest.mark.parametrize("form", ["prepend", "metaspace"])
def test_ids_are_those_of_the_sentencepiece_model_it_was_made_from(tmp_path: Path, form: str):
    ours = loaded_from(tmp_path / f"llama2 {form}", llama2(form))
    theirs = SentencePieceTokenizer(llama2_model())
    texts = returning(ours, HARD)
    assert len(texts) > 30
    for one, other in zip(ours.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert np.array_equal(one, other)
    later = [False] * len(HARD)
    for one, other in zip(ours.encode_parts(HARD, later), theirs.encode_parts(HARD, later), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(ours.token_bytes, theirs.token_bytes)
    assert (ours.vocab_size, ours.unk_id) == (theirs.vocab_size, theirs.unk_id)


def test_a_large_vocabulary(folders: dict[str, Path]):
    tokenizer = load_tokenizer(folders["llama3"])
    assert tokenizer.vocab_size > 65536 + 256
    assert token_dtype(tokenizer.vocab_size) == "uint32"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.vocab_size - 256, tokenizer.vocab_size - 255)
    assert len(tokenizer.encode("tab")) == 1 and tokenizer.encode("tab")[0] > 65280  # the last of the merges


def test_a_batch_gives_what_single_texts_give(loaded: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface, "_GROUP_CHARS", 20)
    for threads in (1, 2):
        batch = loaded.encode_batch(HARD, num_threads=threads)
        assert all(np.array_equal(ids, loaded.encode(text)) for ids, text in zip(batch, HARD, strict=True))
    assert loaded.encode_batch([]) == []


def test_a_lone_surrogate_is_refused(loaded: HuggingFaceTokenizer):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        loaded.encode("a\ud800")


@pytest.mark.parametrize("before", [None, "true"])
def test_one_thread_leaves_the_librarys_switch_as_it_was(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, before: str | None
):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    tokenizer: Any = load_tokenizer(folders["gpt2"])
    seen: list[str | None] = []
    encode = tokenizer._first.encode_batch_fast

    class Spy:
        def encode_batch(self, *_: Any) -> None: ...

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            seen.append(os.environ.get("TOKENIZERS_PARALLELISM"))
            return encode(texts, **options)

    monkeypatch.setattr(tokenizer, "_first", Spy())
    tokenizer.encode_batch(["a"])
    tokenizer.encode_batch(["a"], num_threads=2)
    assert seen == ["false", before]
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_one_thread_starts_no_others(folders: dict[str, Path]):
    program = (
        "import os, sys; from titanlite.data.tokenizer import load_tokenizer\n"
        "t = load_tokenizer(sys.argv[1]); n = len(os.listdir('/proc/self/task')); t.encode_batch(['the cat'] * 999)\n"
        "print(n, len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    )
    if not Path("/proc/self/task").is_dir():
        pytest.skip("threads are counted in /proc")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program, folders["gpt2"]], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1", "1", "False"]


# --- special tokens ---


def test_special_tokens_never_come_from_text_nor_are_they_added(loaded: HuggingFaceTokenizer):
    pieces = [*loaded.special_pieces, "<|endoftext|>", "</s>", "<s>", "<unk>"]
    texts = [f"{a}{piece}{b}" for piece in pieces for a, b in (("", ""), "ab", "  ", "\n\n")] + ["", "x", "y" * 50]
    texts = returning(loaded, texts)
    ids = loaded.encode_batch(texts)
    assert not loaded._is_special[np.concatenate(ids)].any()
    assert [loaded.decode(one) for one in ids] == texts


def test_special_ids_decode_to_nothing(loaded: HuggingFaceTokenizer):
    ids = loaded.encode("the cat")
    assert loaded.decode([loaded.bos_id, *ids, loaded.eos_id]) == "the cat"


def test_marks_come_from_the_files_beside_and_can_be_chosen(tmp_path: Path):
    path = write(tmp_path, marked()) / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (-1, -1, -1)
    assert tokenizer.special_pieces[1:3] == ("<|begin_of_text|>", "<|end_of_text|>")
    first = tokenizer.vocab_size - 11

    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|end_of_text|>"}, "bos_token": null}'
    )
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (-1, first + 1)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|begin_of_text|>", "bos_token": "<absent>"}')
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (-1, first)
    chosen = "<|reserved_7|>"
    tokenizer = load_tokenizer(path, bos_token=chosen)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (first + 9, first)

    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ')
    with pytest.raises(InputError, match=r"tokenizer_config.json: got a file that cannot be read"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        ("<|end_of_texts|>", r"tokenizer.eos_token: got '<\|end_of_texts\|>', which (.|\n)*mean '<\|end_of_text\|>'"),
        ("z", r"which '.*tokenizer.json' also writes where a text says so; allowed: .*'<\|endoftext\|>'"),
        ("中中中", r"does not have(.|\n)*choose one"),
    ],
)
def test_a_mark_that_is_none_is_refused(tmp_path: Path, piece: str, said: str):
    with pytest.raises(InputError, match=said):
        load_tokenizer(write(tmp_path, marked()), eos_token=piece)


def test_a_named_mark_is_special_even_if_the_file_does_not_say_so(tmp_path: Path):
    spec = gpt2()
    for kept in ([{**spec["added_tokens"][0], "special": False}], []):
        config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
        tokenizer = loaded_from(tmp_path / str(len(kept)), {**spec, "added_tokens": kept}, config)
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eos_id == 0 and 0 not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.special_pieces == ("<|endoftext|>",) and tokenizer.exact and tokenizer.token_bytes[0] == 0


def test_a_chosen_mark_counts_no_bytes_of_validation_though_the_file_calls_it_text(tmp_path: Path):
    from titanlite.data.loader import ValidationData  # torch

    spec = gpt2()
    spec["added_tokens"][0]["special"] = False
    folder = write(tmp_path / "tokenizer", spec)
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 20)
    source = SourceConfig(path=str(tmp_path / "a.txt"), validation_path=str(tmp_path / "a.txt"))
    data = DataConfig(sources=(source,), cache_dir=str(tmp_path / "cache"), prepare_workers=1)
    for eos_token, size in (("", len("<|endoftext|>")), ("<|endoftext|>", 0)):
        config = TokenizerConfig(path=str(folder), add_eos=bool(eos_token), eos_token=eos_token)
        prepared = prepare(data, config, 400, 8, report=lambda message: None, validation=True)
        assert ValidationData(prepared, 8).token_bytes[0] == size


def test_other_added_tokens_are_text(tmp_path: Path):
    made = tokenizers.Tokenizer.from_str(json.dumps(gpt2()))
    made.add_tokens(["    ", "<naïve—>", "\n\n"])
    tokenizer = loaded_from(tmp_path, json.loads(made.to_str()))
    n = tokenizer.vocab_size
    assert tokenizer.token_bytes[n - 3 :].tolist() == [4, 11, 2]
    text = "a    <naïve—>\n\n b"
    assert set(range(n - 3, n)) <= set(tokenizer.encode(text).tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.exact


def test_an_added_token_that_the_library_decodes_as_bytes_is_noticed(tmp_path: Path):
    made = tokenizers.Tokenizer.from_str(json.dumps(gpt2()))
    made.add_tokens(["naïve"])  # each of its characters is one of GPT-2's alphabet
    assert not loaded_from(tmp_path, json.loads(made.to_str())).exact


def test_a_model_that_takes_special_pieces_out_of_text_is_refused(tmp_path: Path):
    """The library's Unigram matches every piece of its vocabulary, that of the marks too."""
    vocab = [["<unk>", 0.0], ["</s>", 0.0], *([char, -9.0 - i / 99] for i, char in enumerate("▁<>/sab"))]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([tuple(pair) for pair in vocab], 0, False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.add_special_tokens(["<unk>", "</s>"])
    with pytest.raises(InputError, match=r"makes special ids of text that says '</s>'(.|\n)*use the .model file"):
        load_tokenizer(write(tmp_path, json.loads(made.to_str())))


# --- exactness ---


def changed(make: Callable[[], dict[str, Any]], **parts: Any) -> dict[str, Any]:
    spec = make()
    for name, value in parts.items():
        spec[name] = {**spec[name], **value} if name in ("model", "pre_tokenizer") and "type" not in value else value
    return spec


BERT_NORMALIZER = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
    "lowercase": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        changed(gpt2, normalizer={"type": "NFC"}),
        changed(gpt2, normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
        changed(gpt2, normalizer=BERT_NORMALIZER),
        changed(gpt2, normalizer={"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        changed(gpt2, pre_tokenizer={"add_prefix_space": True}),
        changed(gpt2, pre_tokenizer={"type": "WhitespaceSplit"}),
        changed(gpt2, decoder=None),
        changed(llama2, model={"byte_fallback": False}),
        changed(llama2, decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}),
    ],
    ids=["nfc", "lowercase", "bert", "squeeze", "prefix", "whitespace", "no decoder", "no bytes", "other decoder"],
)
def test_a_tokenizer_that_may_lose_text_says_so(tmp_path: Path, spec: dict[str, Any]):
    assert not loaded_from(tmp_path, spec).exact


def test_a_byte_that_is_missing_is_noticed(tmp_path: Path):
    spec = gpt2()
    del spec["model"]["vocab"]["ý"]  # 0xFD, which no UTF-8 has: no text can tell
    assert not loaded_from(tmp_path, spec).exact


def test_an_added_token_that_takes_spaces_with_it_is_noticed(tmp_path: Path):
    made = tokenizers.Tokenizer.from_str(json.dumps(gpt2()))
    made.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    tokenizer = loaded_from(tmp_path, json.loads(made.to_str()))
    assert not tokenizer.exact and not any(tokenizer._cuts.values())


def test_dropout_is_off(tmp_path: Path):
    tokenizer = loaded_from(tmp_path, changed(gpt2, model={"dropout": 0.5}))
    whole = loaded_from(tmp_path / "whole", gpt2())
    assert all(np.array_equal(tokenizer.encode(line), whole.encode(line)) for line in LINES[:5] * 5)


# --- long texts ---


def long_text(loaded: HuggingFaceTokenizer, seed: int) -> str:
    generator = np.random.default_rng(seed)
    alphabet = [
        *["the", "cat", "déjà", "中文", "12", "12345", ";", ".", "'s", "/", "//", "—", "😀", "e\u0301", "_", "X", "…"],
        *[" ", "\n", "\n\n", "  ", "\t", "\r\n", " \n", "\n ", "\u3000", "\xa0", "\u2028"],
    ]
    weights = np.array([8 if part.isalpha() else 20 if part in (" ", "\n") else 1 for part in alphabet])
    weights = weights / weights.sum()
    return "".join(generator.choice(alphabet, 4000, p=weights))


def test_long_texts_have_the_ids_of_the_whole(loaded: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch):
    assert all(loaded._cuts.values())
    for seed in range(5):
        text = long_text(loaded, seed)
        monkeypatch.setattr(tokenizer_module, "PART_CHARS", 1 << 30)
        whole = loaded.encode(text)
        monkeypatch.setattr(tokenizer_module, "PART_CHARS", 20)
        parts = list(loaded._parts(text))
        assert len(parts) > 100 and "".join(str(part) for part in parts) == text
        assert np.array_equal(loaded.encode(text), whole)
        assert all("".join(map(str, loaded._parts(short))) == short for short in (text[:n] for n in range(100)))


def test_every_seam_is_a_place_to_cut(loaded: HuggingFaceTokenizer):
    for seed in range(5, 8):
        text = long_text(loaded, seed)
        whole = loaded.encode(text)
        seams = {seam for at, char in enumerate(text) if char in "\n " and (seam := huggingface._seam(text, at)) >= 0}
        assert len(seams) > 100
        some = sorted(seams)[::7][:60]
        lefts = loaded.encode_batch([text[:seam] for seam in some])
        rights = loaded.encode_parts([text[seam:] for seam in some], [False] * len(some))
        assert all(np.array_equal(np.concatenate(halves), whole) for halves in zip(lefts, rights, strict=True))


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [(gpt2, "c  \n", "d"), (llama3, "a;\n", "\nb"), (gpt2, "d\n", "    e")],
)
def test_other_places_are_not(folders: dict[str, Path], make: Callable[[], dict[str, Any]], before: str, after: str):
    """What the rule leaves out would change ids."""
    tokenizer = load_tokenizer(folders[make.__name__])
    halves = tokenizer.encode_parts([before, after], [True, False])
    assert not np.array_equal(np.concatenate(halves), tokenizer.encode(before + after))


def whole_pieces(*pieces: str) -> dict[str, Any]:
    """A tokenizer that does not part text before merging, with pieces that reach over seams."""
    spec = gpt2()
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {char: i for i, char in enumerate(huggingface._BYTE_OF)}
    merges = []
    for piece in pieces:
        for i in range(2, len(piece) + 1):
            vocab.setdefault(piece[:i], len(vocab))
            merges.append([piece[: i - 1], piece[i - 1]])
    spec["model"] |= {"vocab": vocab, "merges": merges}
    spec["added_tokens"] = []
    return spec


@pytest.mark.parametrize(
    ("pieces", "newline", "space"),
    [(["the", "Ġcat"], True, True), (["qĊz"], False, True), (["qĠ"], True, False), (["qĊz", "qĠz"], False, False)],
)
def test_pieces_that_reach_over_seams_forbid_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: Sequence[str], newline: bool, space: bool
):
    tokenizer = loaded_from(tmp_path, whole_pieces(*pieces))
    assert tokenizer._cuts == {"\n": newline, " ": space}
    text = "the cat q\nz q z\n" * 50
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 10)
    assert len(list(tokenizer._parts(text))) > 1 or not (newline or space)
    assert np.array_equal(tokenizer.encode(text), whole)


def test_parts_that_reach_over_seams_forbid_cuts(tmp_path: Path):
    """A pre-tokenizer that depends on where the text starts."""
    split = {"type": "FixedLength", "length": 5}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec = gpt2() | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}}
    assert not any(loaded_from(tmp_path, spec)._cuts.values())


# --- files that are none ---


def test_without_the_package_it_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"my.key: got (.|\n)*pip install tokenizers"):
        load_tokenizer(folders["gpt2"], "my.key")


TEKKEN = {"config": {"pattern": "x"}, "vocab": [{"rank": 0, "token_bytes": base64.b64encode(b"a").decode()}]}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ("{", "JSON that is cut short or damaged"),
        (json.dumps(gpt2())[:-9], "JSON that is cut short or damaged"),
        (json.dumps(gpt2())[:999], "JSON that is cut short or damaged"),
        ('{"a": "\udcff"}', "JSON that is cut short or damaged"),
        ("[" * 100_000, "JSON that is cut short or damaged"),
        ("{}", r"JSON that is no tokenizer \(its keys: none\)"),
        ("[1]", "not a sentencepiece model|JSON that is no tokenizer"),
        ('{"vocab_size": 3, "model_type": "llama"}', r"no tokenizer \(its keys: 'vocab_size', 'model_type'\)"),
        ('{"a": 0, "b": 1}', "a list of pieces"),
        (json.dumps(TEKKEN), "a tekken.json"),
        ('{"model": {}}', "did not match any variant"),
        ('{"model": {"type": "BPE"}}', "Missing vocab/merges|missing"),
        (json.dumps(gpt2() | {"version": "9.0"}), "Unknown tokenizer version"),
        (json.dumps(gpt2() | {"normalizer": {"type": "New"}}), "copy the file again, or update"),
        (json.dumps(gpt2() | {"normalizer": 5}), "copy the file again, or update"),
        (json.dumps(gpt2() | {"normalizer": {}}), "copy the file again, or update"),
        (json.dumps(changed(gpt2, model={"vocab": {}, "merges": []}) | {"added_tokens": []}), "0 ids"),
        (json.dumps(changed(gpt2, model={"vocab": {"a": 4_000_000_000}, "merges": []})), r"\d+ ids"),
    ],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, contents: str, said: str):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(contents.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"tokenizer.path: got '.*tokenizer.json'") as caught:
        load_tokenizer(path)
    assert pytest.raises(InputError, match=said).matches(caught.value)


def test_the_tokenizer_beside_is_pointed_to(folders: dict[str, Path]):
    with pytest.raises(InputError, match=r"no tokenizer \(its keys: .*(\n|.)*name '.*gpt2/tokenizer.json'"):
        load_tokenizer(folders["gpt2"] / "tokenizer_config.json")


def test_a_file_with_a_mark_of_its_encoding_is_read(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(gpt2(), indent=2), encoding="utf-8-sig")
    assert load_tokenizer(path).exact


def test_a_model_that_fails_on_text(tmp_path: Path):
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(InputError, match=r"which fails on text .*UNK"):
        load_tokenizer(write(tmp_path, json.loads(made.to_str())))


def test_a_panic_of_the_library_is_an_error():
    class PanicException(BaseException): ...

    with pytest.raises(RuntimeError, match="index out of bounds"), huggingface._panics():
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), huggingface._panics():
        raise KeyboardInterrupt
