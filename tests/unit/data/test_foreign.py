"""Other stacks' token files: read as they are, told apart, and refused with the reason where they are damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.helpers import IDS, LENGTHS, llm_c, megatron, nanogpt, ours
from titanlite.config.problems import InputError
from titanlite.data import foreign
from titanlite.data.foreign import ForeignTokens, check_ids, fingerprint, scan
from titanlite.data.shards import TokenShards
from titanlite.data.tokens import FoundTokens, find_tokens, open_tokens

KEY = "data.sources.0.path"


KINDS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "nanogpt": (lambda file: nanogpt(file, IDS), "nanoGPT", "uint16"),
    "llm.c gpt-2": (lambda file: llm_c(file, IDS), "llm.c", "uint16"),
    "llm.c llama-3": (lambda file: llm_c(file, IDS, magic=20240801, version=7), "llm.c", "uint32"),
    "megatron uint16": (lambda file: megatron(file, IDS, LENGTHS), "Megatron", "uint16"),
    "megatron int32": (lambda file: megatron(file, IDS, LENGTHS, code=4), "Megatron", "int32"),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read(tmp_path: Path, name: str):
    write, kind, dtype = KINDS[name]
    tokens = open_tokens(write(tmp_path / "x.bin"))
    assert isinstance(tokens, ForeignTokens)
    assert (tokens.kind, tokens.dtype, tokens.n_tokens) == (kind, dtype, 97)
    assert (tokens.tokenizer, tokens.bos_id, tokens.eos_id, tokens.text_bytes) == (None,) * 4
    assert tokens.documents == (4 if kind == "Megatron" else None)
    tokens.verify()
    for seq_len in (1, 4, 32, 96):
        assert tokens.windows(seq_len) == 96 // seq_len
        for w in range(tokens.windows(seq_len)):
            window = tokens.window(w, seq_len)
            assert window.dtype == np.dtype(dtype)
            assert np.array_equal(window, IDS[w * seq_len : w * seq_len + seq_len + 1])
    with pytest.raises(IndexError, match="window 24 of 24"):
        tokens.window(24, 4)
    assert find_tokens(str(tokens.path), KEY) == FoundTokens(tokens.path, None)


def test_a_window_is_no_copy(tmp_path: Path):
    assert not open_tokens(llm_c(tmp_path / "x.bin", IDS)).window(1, 8).flags.owndata


@pytest.mark.parametrize("name", KINDS)
def test_files_are_one_array_in_sorted_order(tmp_path: Path, name: str):
    write = KINDS[name][0]
    for part in ("b", "c", "a"):
        write(tmp_path / f"{part}.bin")
    tokens = open_tokens(tmp_path / "*.bin")
    assert [file.name for file in tokens.files] == ["a.bin", "b.bin", "c.bin"]
    whole = np.tile(IDS, 3)
    assert tokens.n_tokens == len(whole)
    for w in range(tokens.windows(40)):
        assert np.array_equal(tokens.window(w, 40), whole[w * 40 : w * 40 + 41])
    assert np.array_equal(tokens.window(0, 250), whole[:251])
    assert tokens.locate(96) == (tmp_path / "a.bin", 96)
    assert tokens.locate(97) == (tmp_path / "b.bin", 0)
    tokens.window(0, 40)
    data = pickle.dumps(tokens)
    assert len(data) < 500
    assert np.array_equal(pickle.loads(data).window(3, 40), whole[120:161])


def test_empty_files_are_no_tokens(tmp_path: Path):
    for name, ids in (("a", []), ("b", IDS[:5]), ("c", []), ("d", []), ("e", IDS[5:]), ("f", [])):
        nanogpt(tmp_path / f"{name}.bin", ids)
    tokens = open_tokens(tmp_path / "*.bin")
    assert np.array_equal(tokens.window(0, 96), IDS)
    assert tokens.locate(5) == (tmp_path / "e.bin", 0)
    for file in (nanogpt(tmp_path / "a.bin", []), llm_c(tmp_path / "l.bin", []), megatron(tmp_path / "m.bin", [], [])):
        empty = open_tokens(file)
        assert (empty.n_tokens, empty.windows(1)) == (0, 0)
        assert empty.read(0, 0).shape == (0,)
        assert scan(empty)["max_id"] == -1
        check_ids(empty, scan(empty), 10)


# --- damage ---


def cut(file: Path, size: int) -> None:
    os.truncate(file, size)


@pytest.mark.parametrize(
    ("write", "damage", "message"),
    [
        ("nanogpt", lambda f: cut(f, 193), "x.bin: got 193 bytes, an odd number; allowed: raw uint16"),
        ("nanogpt", lambda f: f.rename(f.with_stem("a_text_document")), "name of a Megatron .bin, and no .idx"),
        ("llm.c gpt-2", lambda f: cut(f, 1000), "got a header of 1000 bytes; allowed: llm.c's header of 1024 bytes"),
        ("llm.c gpt-2", lambda f: cut(f, 12), "got a header of 12 bytes"),
        ("llm.c gpt-2", lambda f: cut(f, 4), "got a header of 4 bytes"),
        (
            "llm.c gpt-2",
            lambda f: cut(f, 1024 + 192),
            "got 1216 bytes; allowed: 1218: a header and 97 tokens of uint16",
        ),
        ("llm.c llama-3", lambda f: cut(f, 1024 + 194), "got 1218 bytes; allowed: 1412: .* 97 tokens of uint32"),
        ("llm.c gpt-2", lambda f: f.write_bytes(f.read_bytes() + b"\0\0"), "got 1220 bytes; allowed: 1218"),
        ("llm.c gpt-2", lambda f: llm_c(f, IDS, tokens=-1), "a header that says -1 tokens"),
        (
            "llm.c gpt-2",
            lambda f: llm_c(f, IDS, version=2),
            "got llm.c's magic 20240520 version 2; allowed: 20240520 v",
        ),
        ("llm.c gpt-2", lambda f: llm_c(f, IDS, magic=20240801, version=1), "magic 20240801 version 1"),
        ("llm.c gpt-2", lambda f: llm_c(f, IDS, magic=20240522), "magic 20240522 .*\n.*not its models or evaluations"),
        ("megatron uint16", lambda f: f.unlink(), "x.bin: got no such file, but x.idx"),
        ("megatron uint16", lambda f: cut(f.with_suffix(".idx"), 20), "x.idx: got 20 bytes; allowed: a header of 34"),
        ("megatron uint16", lambda f: cut(f.with_suffix(".idx"), 121), "x.idx: got 121 bytes; allowed: 122: 4 seq"),
        ("megatron uint16", lambda f: cut(f, 193), "x.bin: got 193 bytes; allowed: whole tokens of uint16"),
        ("megatron uint16", lambda f: cut(f, 192), "x.bin: got 192 bytes; allowed: 194, where the last sequence"),
        ("megatron uint16", lambda f: megatron(f, IDS, [10, 0, 50, 38]), "x.bin: got 194 bytes; allowed: 196"),
        ("megatron uint16", lambda f: megatron(f, IDS, []), "x.bin: got 194 bytes; allowed: 0"),
        ("megatron uint16", lambda f: megatron(f, IDS, LENGTHS, version=2), "x.idx: got version 2; allowed: version 1"),
        ("megatron uint16", lambda f: megatron(f, IDS, LENGTHS, magic=b"TNTIDX\0\0\0"), r"starts with b'TNTIDX"),
        ("megatron uint16", lambda f: megatron(f, IDS, LENGTHS, code=7), r"dtype code 7 \(float32\); allowed: 4"),
        ("megatron uint16", lambda f: megatron(f, IDS, LENGTHS, code=1), r"dtype code 1 \(uint8\)"),
        ("megatron uint16", lambda f: megatron(f, IDS, LENGTHS, code=99), r"dtype code 99 \(none\)"),
    ],
)
def test_damage_is_refused_when_found(tmp_path: Path, write: str, damage: Callable[[Path], object], message: str):
    KINDS[write][0](tmp_path / "x.bin")
    find_tokens(str(tmp_path / "x.bin"), KEY)
    damage(tmp_path / "x.bin")
    paths = [tmp_path / "x.bin", *tmp_path.glob("*.bin"), *tmp_path.glob("*.idx")]
    refused = 0
    for path in paths:
        if path.exists() or path.with_suffix(".idx").exists():
            refused += 1
            with pytest.raises(InputError, match=message) as caught:
                find_tokens(str(path), KEY)
            assert "fix: " in str(caught.value)
    assert refused


@pytest.mark.parametrize("block", [1, 2, 1 << 18])
@pytest.mark.parametrize(
    ("lengths", "pointers", "message"),
    [
        ([10, 0, 50, 37], [0, 20, 20, 120], None),
        ([10, 0, 50, 37], [0, 20, 22, 120], "x.idx: got sequence 2 at byte 22; allowed: each sequence where the one"),
        ([10, 0, 50, 37], [2, 20, 20, 120], "got sequence 0 at byte 2"),
        ([10, -1, 51, 37], [0, 20, 18, 120], "got the length -1; allowed: sequences of 0 tokens or more"),
        ([37, 60], [120, 0], "got 194 bytes; allowed: 120"),
        ([10, 87, 0], [0, 20, 194], None),
        ([10, 86, 0], [0, 20, 194], "got sequence 2 at byte 194"),
    ],
)
def test_an_index_with_gaps_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    lengths: list[int],
    pointers: list[int],
    message: str | None,
):
    monkeypatch.setattr(foreign, "_INDEX_BLOCK", block)
    file = megatron(tmp_path / "x.bin", IDS, lengths, pointers=pointers)
    if message is None:
        scan(open_tokens(file))
        return
    with pytest.raises(InputError, match=message):
        scan(open_tokens(file))


def test_all_damaged_files_are_named_at_once(tmp_path: Path):
    for name in "abc":
        llm_c(tmp_path / f"{name}.bin", IDS)
    cut(tmp_path / "a.bin", 1100)
    cut(tmp_path / "c.bin", 1026)
    with pytest.raises(InputError) as caught:
        open_tokens(tmp_path / "*.bin")
    assert [Path(problem.key).name for problem in caught.value.problems] == ["a.bin", "c.bin"]


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = nanogpt(tmp_path / "x.bin", IDS)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"x.bin: got a file that cannot be read \(Permission denied\)"):
        open_tokens(file)


def test_a_file_that_became_shorter_is_an_input_error(tmp_path: Path):
    file = nanogpt(tmp_path / "x.bin", IDS)
    tokens = open_tokens(file)
    cut(file, 100)
    with pytest.raises(InputError, match="became shorter while it was read"):
        scan(tokens)


# --- contents ---


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
def test_scan_is_of_the_token_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(foreign, "_BLOCK", block)
    one = open_tokens(llm_c(tmp_path / "one.bin", IDS))
    found = scan(one)
    assert found == {
        "sha256": foreign.hashlib.sha256(IDS.astype("<u2").tobytes()).hexdigest(),
        "max_id": int(IDS.max()), "max_at": int(IDS.argmax()), "min_id": int(IDS.min()), "min_at": int(IDS.argmin()),
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    # Neither the kind of file nor where it is cut changes what it holds; another dtype is taken for other content.
    nanogpt(tmp_path / "cut0.bin", IDS[:30])
    nanogpt(tmp_path / "cut1.bin", IDS[30:])
    cuts = open_tokens(tmp_path / "cut*.bin")
    assert scan(cuts) == found
    assert fingerprint(cuts, scan(cuts)) == fingerprint(one, found)
    wide = open_tokens(llm_c(tmp_path / "wide.bin", IDS, magic=20240801, version=7))
    assert fingerprint(wide, scan(wide)) != fingerprint(one, found)
    halves = open_tokens(nanogpt(tmp_path / "halves.bin", IDS.astype("<u4").view("<u2")))
    assert scan(halves)["sha256"] == scan(wide)["sha256"]
    assert fingerprint(halves, scan(halves)) != fingerprint(wide, scan(wide))
    changed = IDS.copy()
    changed[50] ^= 1
    other = open_tokens(nanogpt(tmp_path / "other.bin", changed))
    assert fingerprint(other, scan(other)) != fingerprint(one, found)


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(foreign, "_BLOCK", block)
    ids = np.arange(20)
    nanogpt(tmp_path / "a.bin", ids)
    ids[7], ids[9] = 500, 500
    nanogpt(tmp_path / "b.bin", ids)
    tokens = open_tokens(tmp_path / "*.bin")
    found = scan(tokens)
    check_ids(tokens, found, 501)
    with pytest.raises(
        InputError, match=r"b.bin: got the id 500 at token 7; allowed: ids from 0 to 499, which tokenizer"
    ):
        check_ids(tokens, found, 500)


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_a_negative_id_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(foreign, "_BLOCK", block)
    ids = np.arange(97)
    ids[[30, 60]] = -5
    tokens = open_tokens(megatron(tmp_path / "a.bin", ids, LENGTHS, code=4))
    with pytest.raises(InputError, match=r"a.bin: got the id -5 at token 30; allowed: ids from 0 to 99"):
        check_ids(tokens, scan(tokens), 100)
    with pytest.raises(InputError) as caught:
        check_ids(tokens, scan(tokens), 50)
    assert len(caught.value.problems) == 2


def test_the_fingerprint_of_our_shards_is_final(tmp_path: Path):
    """Checkpoints hold it; the ids of the marks are not part of it."""
    expected = "4ffcb2b22303a7164dbc2641480b12bb1170d0c175c81d34c8bf2e35c20ef208"
    shards = TokenShards(ours(tmp_path / "a", np.arange(97)))
    assert shards.fingerprint == expected
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    meta = json.loads((tmp_path / "b" / "meta.json").read_text())
    (tmp_path / "b" / "meta.json").write_text(json.dumps({**meta, "bos_id": -1, "eos_id": 3}))
    marked = TokenShards(tmp_path / "b")
    assert (marked.fingerprint, marked.bos_id, marked.eos_id) == (expected, -1, 3)
