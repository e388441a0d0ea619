"""From text to shards: every kind of source, nothing lost, nothing done twice, each wrong input named."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.problems import InputError
from titanlite.config.schema import DataConfig, SourceConfig, TokenizerConfig
from titanlite.data import prepare as prepare_module
from titanlite.data import records as records_module
from titanlite.data import text as text_module
from titanlite.data import tokenise as tokenise_module
from titanlite.data import train_tokenizer as train_module
from titanlite.data.build import build
from titanlite.data.prepare import PreparedData, prepare
from titanlite.data.records import Chunk
from titanlite.data.shards import TokenShards
from titanlite.data.text import EMBEDDED_FINGERPRINT, check_embedded, embedded_text
from titanlite.data.tokenise import Tokenise, Tokenised
from titanlite.data.tokenizer import Tokenizer, load_tokenizer

Prepare = Callable[..., PreparedData]


@pytest.fixture
def run(tmp_path: Path, small_model: Path) -> Prepare:
    """prepare() of paths with the small tokenizer, in a cache of the test's own."""

    def run(
        *paths: Path | str,
        weights: tuple[float, ...] = (),
        bos: bool = False,
        eos: bool = True,
        model: Path | str = small_model,
        fraction: float = 0.0,
        vocab_size: int = 512,
        seq_len: int = 32,
        report: Callable[[str], None] = lambda message: None,
        validation: bool = False,
        eos_token: str = "",
        source: dict[str, str] | None = None,
        **data_keys: Any,
    ) -> PreparedData:
        weights = weights or (1.0,) * len(paths)
        sources = tuple(
            SourceConfig(path=str(p), weight=w, **(source or {})) for p, w in zip(paths, weights, strict=True)
        )
        data = DataConfig(sources=sources, validation_fraction=fraction, cache_dir=str(tmp_path / "cache"), **data_keys)
        tokenizer = TokenizerConfig(path=str(model), add_bos=bos, add_eos=eos, eos_token=eos_token)
        return prepare(data, tokenizer, vocab_size, seq_len, report=report, validation=validation)

    return run


def tokens_of(folder: Path | None) -> list[int]:
    assert folder is not None
    shards = TokenShards(folder)
    return np.concatenate(
        [[], *(shards.window(w, 1)[:1] for w in range(shards.n_tokens - 1)), shards._map(0)[-1:]]
    ).tolist()


def documents_of(folder: Path | None, tokenizer: Tokenizer) -> list[str]:
    """The documents in a folder of shards that were written with EOS only."""
    tokens = np.array(tokens_of(folder), dtype=np.int64)
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[part != tokenizer.eos_id]) for part in np.split(tokens, ends + 1)[:-1]]


def test_embedded_text_is_the_released_one(embedded: PreparedData):
    text, version = embedded_text()
    documents = list(text.documents())
    assert version == "1.14.0"
    assert (len(text.files), sum(document.size for document in documents)) == (854, 16_612_271)
    assert not any("tests" in Path(file.name).parts for file in text.files)
    assert [file.name for file in text.files] == sorted(file.name for file in text.files)
    messages: list[str] = []
    check_embedded(version, text.fingerprint(Path("/nonexistent")), messages.append)
    assert messages == [f"embedded text: Python source of sympy 1.14.0, sha256 {EMBEDDED_FINGERPRINT}"]


def test_embedded_preparation_is_whole(embedded: PreparedData):
    (source,) = embedded.sources
    assert source.validation is not None
    train, validation = TokenShards(source.train), TokenShards(source.validation)
    train.verify()
    validation.verify()
    assert train.meta["bytes"] + validation.meta["bytes"] == 16_612_271
    assert train.meta["documents"] + validation.meta["documents"] == 839  # 15 files are empty
    assert 0.005 < validation.n_tokens / train.n_tokens < 0.02
    assert train.meta["tokenizer"] == embedded.tokenizer.fingerprint
    assert load_tokenizer(embedded.tokenizer.path).fingerprint == embedded.tokenizer.fingerprint
    assert source.fingerprint == train.fingerprint


@pytest.mark.parametrize(
    ("version", "fingerprint", "warning"),
    [
        ("1.13.3", "f" * 64, "meant to be sympy 1.14.0's; with 1.13.3"),
        ("1.14.0", "f" * 64, "differs from the released one"),
    ],
)
def test_another_embedded_text_works_with_a_warning(version: str, fingerprint: str, warning: str):
    messages: list[str] = []
    check_embedded(version, fingerprint, messages.append)
    assert len(messages) == 2
    assert messages[1].startswith("warning: ") and warning in messages[1]


def test_embedded_text_without_sympy(run: Prepare, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="no installed package sympy") as caught:
        run("embedded", model="embedded")
    assert len(caught.value.problems) == 1  # once, though text and tokenizer both need it


def test_a_folder_of_text_becomes_its_documents_in_order(run: Prepare, text_folder: Path, small_model: Path):
    (text_folder / "notes.md").write_text("not text of this corpus")
    (source,) = run(text_folder).sources
    paths = sorted(text_folder.rglob("*.txt"), key=lambda path: path.relative_to(text_folder).as_posix())
    expected = [data.decode() for path in paths if (data := path.read_bytes())]
    assert documents_of(source.train, load_tokenizer(small_model)) == expected
    assert source.validation is None
    meta = TokenShards(source.train).meta
    assert (meta["documents"], meta["bytes"]) == (11, sum(len(text.encode()) for text in expected))


def test_a_text_file_is_one_document_and_its_name_does_not_matter(run: Prepare, text_folder: Path, small_model: Path):
    path = text_folder / "00.txt"
    (source,) = run(path).sources
    assert documents_of(source.train, load_tokenizer(small_model)) == [path.read_bytes().decode()]
    messages: list[str] = []
    (renamed,) = run(path.rename(text_folder / "other.TXT"), report=messages.append).sources
    assert replace(renamed, path=source.path) == source and not messages


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_marks_of_documents(run: Prepare, text_folder: Path, small_model: Path, bos: bool, eos: bool):
    tokenizer = load_tokenizer(small_model)
    path = text_folder / "00.txt"
    ids = tokenizer.encode(path.read_bytes().decode()).tolist()
    assert tokens_of(run(path, bos=bos, eos=eos).sources[0].train) == [1] * bos + ids + [2] * eos


def test_one_id_for_both_marks_is_written_twice(run: Prepare, text_folder: Path):
    tokens = tokens_of(run(text_folder, bos=True, eos=True, eos_token="<s>").sources[0].train)
    assert tokens[0] == tokens[-1] == 1
    assert tokens.count(1) == 22
    assert sum(pair == (1, 1) for pair in itertools.pairwise(tokens)) == 10


def test_large_vocabularies_are_written_as_uint32(
    run: Prepare, text_folder: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
):
    narrow = run(text_folder).sources[0]
    shutil.rmtree(text_folder.parent / "cache")
    monkeypatch.setattr(tokenise_module, "token_dtype", lambda vocab_size: "uint32")
    wide = run(text_folder).sources[0]
    assert TokenShards(wide.train).meta["dtype"] == "uint32"
    assert tokens_of(wide.train) == tokens_of(narrow.train)


def test_the_second_time_nothing_is_done(run: Prepare, text_folder: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    first = run(text_folder, fraction=0.3, report=messages.append).sources
    assert any("tokenised" in message and "held out" in message for message in messages)
    monkeypatch.setattr(prepare_module, "build", lambda *args, **named: pytest.fail("tokenised again"))
    messages.clear()
    assert run(text_folder, fraction=0.3, report=messages.append).sources == first
    assert messages == []


def test_whatever_changes_the_tokens_is_in_the_key(run: Prepare, text_folder: Path, embedded: PreparedData):
    places = [run(text_folder).sources[0].train, run(text_folder, bos=True).sources[0].train]
    places += [run(text_folder, eos=False).sources[0].train, run(text_folder, fraction=0.3).sources[0].train]
    places.append(run(text_folder, model=embedded.tokenizer.path, vocab_size=4096).sources[0].train)
    path = text_folder / "00.txt"
    path.write_bytes(path.read_bytes()[::-1])  # of the same size
    places.append(run(text_folder).sources[0].train)
    assert len(set(places)) == 6


def test_held_out_documents(run: Prepare, text_folder: Path, small_model: Path):
    tokenizer = load_tokenizer(small_model)
    everything = set(documents_of(run(text_folder).sources[0].train, tokenizer))
    (source,) = run(text_folder, fraction=0.4, validation=True).sources
    train = documents_of(source.train, tokenizer)
    held_out = documents_of(source.validation, tokenizer)
    assert train and held_out
    assert set(train) | set(held_out) == everything and not set(train) & set(held_out)
    (text_folder / "00.txt").rename(text_folder / "zz.txt")  # neither name nor order changes a document's side
    (text_folder / "empty.txt").write_text("one more document")
    (again,) = run(text_folder, fraction=0.4).sources
    both = set(documents_of(again.train, tokenizer)), set(documents_of(again.validation, tokenizer))
    assert set(train) <= both[0] and set(held_out) <= both[1]
    (more,) = run(text_folder, fraction=0.6).sources
    assert set(held_out) <= set(documents_of(more.validation, tokenizer))


def test_prepared_shards_are_a_source(run: Prepare, text_folder: Path, tmp_path: Path):
    (source,) = run(text_folder, fraction=0.4).sources
    shutil.copytree(source.train.parent, tmp_path / "mine")
    (whole,) = run(tmp_path / "mine").sources
    assert (whole.train, whole.validation) == (tmp_path / "mine" / "train", tmp_path / "mine" / "validation")
    assert whole.fingerprint == source.fingerprint
    (train_only,) = run(tmp_path / "mine" / "train").sources
    assert (train_only.train, train_only.validation) == (tmp_path / "mine" / "train", None)


def test_several_sources_of_every_kind(run: Prepare, text_folder: Path, tmp_path: Path):
    shutil.copytree(run(text_folder / "deep").sources[0].train, tmp_path / "mine")
    prepared = run(tmp_path / "mine", text_folder, text_folder / "00.txt", weights=(0.5, 0.3, 0.2))
    assert [source.weight for source in prepared.sources] == [0.5, 0.3, 0.2]
    assert len({source.fingerprint for source in prepared.sources}) == 3


def test_damage_in_the_cache_is_repaired(run: Prepare, text_folder: Path):
    (source,) = run(text_folder).sources
    shard = source.train / "00000.bin"
    good = shard.read_bytes()
    for bad in (good[:-2], bytes([good[0] ^ 1]) + good[1:]):
        shard.write_bytes(bad)
        messages: list[str] = []
        assert run(text_folder, report=messages.append).sources == (source,)
        assert "is damaged and is made again" in messages[0]
        assert shard.read_bytes() == good


def test_damage_in_the_users_shards_is_refused(run: Prepare, text_folder: Path, tmp_path: Path):
    folder = tmp_path / "mine"
    shutil.copytree(run(text_folder).sources[0].train, folder)
    good = (folder / "00000.bin").read_bytes()
    for bad, message in ((good[:-2], "bytes; allowed:"), (bytes([good[0] ^ 1]) + good[1:], "contents with sha256")):
        run(folder)
        (folder / "00000.bin").write_bytes(bad)
        with pytest.raises(InputError, match=message):
            run(folder)
        (folder / "00000.bin").write_bytes(good)


def test_shards_of_another_tokenizer_are_refused(
    run: Prepare, text_folder: Path, tmp_path: Path, embedded: PreparedData
):
    shutil.copytree(run(text_folder).sources[0].train, tmp_path / "mine")
    with pytest.raises(InputError, match=r"data\.sources\.0\.path: got .*made with another tokenizer"):
        run(tmp_path / "mine", model=embedded.tokenizer.path, vocab_size=4096)


def test_text_that_is_too_short_is_refused(run: Prepare, text_folder: Path, tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(InputError) as caught:
        run(tmp_path / "empty.txt", tmp_path / "short.txt", text_folder, seq_len=256)
    empty, short = map(str, caught.value.problems)
    assert "data.sources.0.path" in empty and "which is empty; allowed: at least training.seq_len + 1 = 257" in empty
    assert "data.sources.1.path" in short and "tokens to train on; allowed" in short


def test_all_documents_held_out_is_said(run: Prepare, tmp_path: Path, text_folder: Path):
    with pytest.raises(InputError, match=r"(?s)which is empty \(\d+ are held out\).*--data.validation_fraction 0"):
        run(text_folder / "00.txt", fraction=1 - 1e-12)


def test_validation_without_a_held_out_sample_is_refused(run: Prepare, text_folder: Path):
    run(text_folder, fraction=0.0)
    with pytest.raises(InputError, match=r"validation.enable: got 0 held-out tokens in 1 source"):
        run(text_folder, fraction=0.0, validation=True)


def test_exactly_one_sample_is_enough(run: Prepare, tmp_path: Path, small_model: Path):
    (tmp_path / "a.txt").write_text("\n" * 32)
    run(tmp_path / "a.txt", seq_len=32)
    with pytest.raises(InputError, match="has 33 tokens"):
        run(tmp_path / "a.txt", seq_len=33)


def test_text_that_is_not_utf8_is_refused_with_its_place(run: Prepare, text_folder: Path):
    (text_folder / "deep" / "bad.txt").write_bytes(b"good \xc3\xa9 then \xff bad")
    with pytest.raises(InputError, match=r"deep/bad.txt: got byte 0xff at offset 13, which is no UTF-8"):
        run(text_folder)


def test_text_that_cannot_be_read_is_refused(run: Prepare, text_folder: Path):
    (text_folder / "gone.txt").symlink_to(text_folder / "nothing")
    with pytest.raises(InputError, match=r"(?s)gone.txt: got a file that cannot be read.*fix: restore it"):
        run(text_folder)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_is_a_bar(
    run: Prepare, text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    messages: list[str] = []
    run(text_folder, report=messages.append)
    assert [message.split()[0] for message in messages] == ["tokenising", "tokenised", "the"]
    drawn = capsys.readouterr().err
    assert ("tokenising" in drawn and "100%" in drawn) if terminal else drawn == ""  # the bar is told of every byte


def test_bits_per_byte_of_a_tokenizer_that_loses_text_are_warned_of(run: Prepare, text_folder: Path, tmp_path: Path):
    lossy = tmp_path / "lossy.model"
    options = {"remove_extra_whitespaces": True, "allow_whitespace_only_pieces": False}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setitem(train_module._TRAINING, name, value)
        lossy.write_bytes(train_module.train_tokenizer(["the cat sat on the mat"] * 20, 280))
    for model, warned in ((lossy, True), (None, False)):
        messages: list[str] = []
        named = {} if model is None else {"model": model}
        run(text_folder, fraction=0.4, report=messages.append, **named)
        assert any("bits per byte" in message for message in messages) == warned


def test_all_wrong_inputs_are_reported_at_once(run: Prepare, tmp_path: Path):
    (tmp_path / "x.md").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.md").touch()
    bad = [tmp_path / "absent.txt", tmp_path / "x.md", tmp_path / "folder"]
    with pytest.raises(InputError) as caught:
        run(*bad, model=tmp_path / "absent.model")
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["tokenizer.path", *(f"data.sources.{i}.path" for i in range(3))]
    assert all(problem.fix for problem in caught.value.problems)
    text = str(caught.value)
    assert "which does not exist" in text
    assert "x.md'; allowed: a file, a folder or a glob of .txt" in text
    assert "a folder without text files (it has .md)" in text


def test_ids_that_do_not_fit_the_model_or_are_missing_are_refused(
    run: Prepare, text_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def load(path: Path, **tokens: str) -> Tokenizer:
        tokenizer = load_tokenizer(path, **tokens)
        tokenizer.bos_id = tokenizer.eos_id = -1
        return tokenizer

    monkeypatch.setattr(prepare_module, "load_tokenizer", load)
    run(text_folder, eos=False)
    with pytest.raises(InputError) as caught:
        run(text_folder, bos=True, eos=True, vocab_size=511)
    vocabulary, bos, eos = map(str, caught.value.problems)
    assert "model.vocab_size: got 511, but the tokenizer" in vocabulary and "at least 512" in vocabulary
    assert "tokenizer.add_bos: got true, but the tokenizer" in bos and "names no BOS id" in bos
    assert "tokenizer.add_eos: got true, but the tokenizer" in eos and "names no EOS id" in eos


def test_text_that_changes_while_it_is_read_is_not_kept(
    run: Prepare, text_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenise = Tokenise.__call__

    def changing(self: Tokenise, chunk: Chunk) -> Tokenised:
        (text_folder / "00.txt").write_text("another text")
        return tokenise(self, chunk)

    monkeypatch.setattr(Tokenise, "__call__", changing)
    with pytest.raises(InputError, match="files that changed while they were read"):
        run(text_folder)
    assert not list((text_folder.parent / "cache" / "tokens").rglob("meta.json"))


def test_a_cache_that_cannot_be_written(run: Prepare, text_folder: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(InputError, match=r"data.cache_dir: got .*allowed: a folder that can be written"):
        run(text_folder)


def test_an_interrupted_preparation_goes_on(run: Prepare, text_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(tokenise_module, "_FEW_CHUNKS", 1000)  # all in this process
    defaults = build.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "journal_seconds", 0.0)
    (whole,) = run(text_folder, fraction=0.3).sources
    expected = {part: (whole.train.parent / part / "00000.bin").read_bytes() for part in ("train", "validation")}
    shutil.rmtree(text_folder.parent / "cache" / "tokens")
    tokenise, calls = Tokenise.__call__, itertools.count()

    def interrupted(self: Tokenise, chunk: Chunk) -> Tokenised:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return tokenise(self, chunk)

    monkeypatch.setattr(Tokenise, "__call__", interrupted)
    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(text_folder, fraction=0.3)
    (source,) = run(text_folder, fraction=0.3, report=messages.append).sources
    assert source == whole
    assert any("going on in" in message for message in messages)
    assert expected == {part: (whole.train.parent / part / "00000.bin").read_bytes() for part in expected}
    assert not list(whole.train.parents[1].glob("*.partial"))


def test_meta_says_what_was_prepared(run: Prepare, text_folder: Path):
    (source,) = run(text_folder).sources
    meta = json.loads((source.train / "meta.json").read_text())
    assert meta["format"] == "titanlite-tokens-1"
    assert meta["tokens"] == len(tokens_of(source.train))


def test_held_out_text_of_its_own(run: Prepare, text_folder: Path, small_model: Path, tmp_path: Path):
    (tmp_path / "held.txt").write_text("a held-out document\n" * 30)
    (source,) = run(
        text_folder, fraction=0.4, source={"validation_path": str(tmp_path / "held.txt")}, validation=True
    ).sources
    assert source.validation is not None
    tokenizer = load_tokenizer(small_model)
    assert documents_of(source.validation, tokenizer) == ["a held-out document\n" * 30]
    assert len(documents_of(source.train, tokenizer)) == 11  # no document of the source is held out besides
    with pytest.raises(InputError, match=r"data.sources.0.validation_path: got .*does not exist"):
        run(text_folder, source={"validation_path": str(tmp_path / "no.txt")})


def test_documents_of_one_file_parted_by_a_separator(run: Prepare, small_model: Path, tmp_path: Path):
    (tmp_path / "all.txt").write_text("one document\n<|endoftext|>\nanother\n<|endoftext|>a third that is longer" * 20)
    (source,) = run(tmp_path / "all.txt", source={"separator": "<|endoftext|>"}, fraction=0.3).sources
    tokenizer = load_tokenizer(small_model)
    found = documents_of(source.train, tokenizer) + documents_of(source.validation, tokenizer)
    assert len(found) == 41 and {"another", "one document"} <= set(found)


def test_bad_records_stop_or_are_skipped(run: Prepare, tmp_path: Path, text_folder: Path):
    lines = [json.dumps({"body": document.read_text()}) for document in sorted(text_folder.rglob("*.txt"))]
    lines.insert(3, '{"body": 5}')
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    named = {"source": {"text_key": "body"}}
    with pytest.raises(InputError, match=r"(?s)x.jsonl:4: got .*data.on_error = \"skip\""):
        run(tmp_path / "x.jsonl", **named)
    messages: list[str] = []
    (source,) = run(tmp_path / "x.jsonl", **named, on_error="skip", report=messages.append).sources
    assert TokenShards(source.train).meta["documents"] == 11
    assert any("x.jsonl:4" in message for message in messages)
    with pytest.raises(InputError, match=r"data.sources.0.path: got 1 records of .* that cannot be read"):
        run(tmp_path / "x.jsonl", **named)


def test_token_files_of_other_stacks(run: Prepare, tmp_path: Path):
    ids = np.arange(1000, dtype=np.uint16) % 500
    ids.tofile(tmp_path / "train.bin")
    ids[:100].tofile(tmp_path / "val.bin")
    messages: list[str] = []
    (source,) = run(tmp_path, report=messages.append, validation=True).sources
    assert (source.train, source.validation) == (tmp_path / "train.bin", tmp_path / "val.bin")
    assert any("does not say which tokenizer made it" in message for message in messages)
    again = run(tmp_path).sources[0].fingerprint
    ids[7] = 3
    ids.tofile(tmp_path / "train.bin")
    assert source.fingerprint == again != run(tmp_path).sources[0].fingerprint
    ids[70] = 512
    ids.tofile(tmp_path / "train.bin")
    with pytest.raises(InputError, match=r"train.bin: got .*512"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("bos", "eos", "marks"), [(True, False, (1, -1)), (False, True, (-1, 2)), (True, True, (1, 2))]
)
def test_document_masks_go_by_the_marks_that_are_written(
    run: Prepare, text_folder: Path, bos: bool, eos: bool, marks: tuple[int, int]
):
    assert run(text_folder, bos=bos, eos=eos).document_marks is None
    assert run(text_folder, bos=bos, eos=eos, document_mask=True).document_marks == marks


def test_shards_with_other_marks_are_refused(run: Prepare, text_folder: Path, tmp_path: Path):
    shutil.copytree(run(text_folder).sources[0].train, tmp_path / "mine")
    run(tmp_path / "mine")
    with pytest.raises(InputError) as caught:
        run(tmp_path / "mine", bos=True, eos=False)
    assert [problem.fix.split(",")[0] for problem in caught.value.problems] == [
        "--tokenizer.add_bos=false",
        "--tokenizer.add_eos=true",
    ]
    meta = json.loads((tmp_path / "mine" / "meta.json").read_text())
    del meta["bos_id"], meta["eos_id"]  # of an older version, which did not say
    (tmp_path / "mine" / "meta.json").write_text(json.dumps(meta))
    run(tmp_path / "mine", bos=True, eos=False)


def test_what_is_not_read_is_said(run: Prepare, text_folder: Path):
    (text_folder / "notes.md").write_text("not text of this corpus")
    messages: list[str] = []
    run(text_folder, report=messages.append, source={"text_key": "body"})
    assert any("not read: .md" in message for message in messages)
    assert any("text_key 'body' means nothing" in message for message in messages)


def test_a_change_between_the_first_look_and_the_build_is_noticed(
    run: Prepare, text_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    build = prepare_module.build

    def late(*args: Any, **named: Any) -> Any:
        (text_folder / "00.txt").write_text("another text")
        return build(*args, **named)

    monkeypatch.setattr(prepare_module, "build", late)
    with pytest.raises(InputError, match=r"data.sources.0.path: got files that changed while they were read"):
        run(text_folder)
