"""Token shards: what is written is read, wherever it is cut; damage is refused with a clear message."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.problems import InputError
from titanlite.data import shards as shards_module
from titanlite.data.shards import ShardWriter, TokenShards, token_dtype


def write(folder: Path, tokens: np.ndarray, *, dtype: str = "uint16", shard_tokens: int = 1 << 20) -> TokenShards:
    writer = ShardWriter(folder, dtype=dtype, tokenizer="t" * 64, shard_tokens=shard_tokens)
    for part in np.array_split(tokens, 7):
        writer.write(part, documents=1, text_bytes=3 * len(part))
    writer.close()
    return TokenShards(folder)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("shard_tokens", [1, 3, 10, 97, 100, 1000])
def test_windows_cross_shards(tmp_path: Path, dtype: str, shard_tokens: int):
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 97, endpoint=True)
    shards = write(tmp_path, tokens, dtype=dtype, shard_tokens=shard_tokens)
    assert len(list(tmp_path.glob("*.bin"))) == -(-97 // shard_tokens)
    for seq_len in (1, 4, 32, 96):
        assert shards.windows(seq_len) == 96 // seq_len
        for w in range(shards.windows(seq_len)):
            window = shards.window(w, seq_len)
            assert np.array_equal(window, tokens[w * seq_len : w * seq_len + seq_len + 1])


def test_number_of_windows_needs_a_next_token(tmp_path: Path):
    assert [write(tmp_path / str(n), np.arange(n)).windows(4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("w", [-1, 24])
def test_a_window_out_of_range_is_an_index_error(tmp_path: Path, w: int):
    shards = write(tmp_path, np.arange(97))
    with pytest.raises(IndexError, match=f"window {w} of 24"):
        shards.window(w, 4)


def test_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards_module, "_MAX_OPEN", 4)
    shards = write(tmp_path, np.arange(97), shard_tokens=5)
    order = np.random.default_rng(0).permutation(np.tile(np.arange(24), 3))
    for w in order:
        assert np.array_equal(shards.window(w, 4), np.arange(4 * w, 4 * w + 5))
    assert len(shards._maps) <= 4


def test_meta_is_the_final_format(tmp_path: Path):
    shards = write(tmp_path, np.arange(97), shard_tokens=50)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert {key: meta[key] for key in ("format", "dtype", "tokens", "documents", "bytes", "tokenizer")} == {
        "format": "titanlite-tokens-1", "dtype": "uint16", "tokens": 97, "documents": 7, "bytes": 291,
        "tokenizer": "t" * 64,
    }  # fmt: skip
    assert [set(shard) for shard in meta["shards"]] == [{"file", "tokens", "sha256"}] * 2
    assert [(shard["file"], shard["tokens"]) for shard in meta["shards"]] == [("00000.bin", 50), ("00001.bin", 47)]
    assert (tmp_path / "00000.bin").read_bytes() == np.arange(50, dtype="<u2").tobytes()
    assert shards.tokenizer == "t" * 64


def test_fingerprint_is_of_the_content(tmp_path: Path):
    one = write(tmp_path / "one", np.arange(97))
    again = write(tmp_path / "again", np.arange(97))
    other = write(tmp_path / "other", np.arange(97)[::-1])
    assert one.fingerprint == again.fingerprint
    assert one.fingerprint != other.fingerprint


def test_pickles_as_its_path(tmp_path: Path):
    shards = write(tmp_path, np.arange(97), shard_tokens=10)
    shards.window(0, 32)
    data = pickle.dumps(shards)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).window(2, 32), np.arange(64, 97))


def test_an_id_that_does_not_fit_is_never_written(tmp_path: Path):
    for tokens in (np.array([65536]), np.array([-1])):
        with pytest.raises(AssertionError, match="do not fit uint16"):
            write(tmp_path, tokens)


def test_dtype_is_the_smallest():
    assert [token_dtype(n) for n in (4096, 65535, 65536, 65537, 128_256)] == ["uint16"] * 3 + ["uint32"] * 2


def edit_meta(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        change(meta)
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[11] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "meta.json").unlink(), "meta.json: got no such file"),
        (lambda f: (f / "meta.json").write_text('{"format": '), "meta.json: got no JSON"),
        (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe"), "meta.json: got no JSON"),
        (lambda f: (f / "meta.json").write_text("[]"), "meta.json: got format list"),
        (edit_meta(lambda m: m.update(format="else")), "got format 'else'; allowed: 'titanlite-tokens-1'"),
        (edit_meta(lambda m: m.update(dtype="float32")), "got dtype 'float32'"),
        (edit_meta(lambda m: m.update(dtype="uint32")), r"00000.bin: got 100 bytes; allowed: 200: 50 tokens of uint32"),
        (edit_meta(lambda m: m.update(tokens=96)), "got 96 tokens; allowed: the shards' sum, 97"),
        (edit_meta(lambda m: m.update(tokens=True)), "got tokens True"),
        (edit_meta(lambda m: m.pop("tokenizer")), "got tokenizer None"),
        (edit_meta(lambda m: m["shards"][0].pop("sha256")), "malformed list of shards"),
        (edit_meta(lambda m: m["shards"][0].update(file="../x.bin")), "malformed list of shards"),
        (lambda f: (f / "00001.bin").unlink(), "00001.bin: got no such file"),
        (lambda f: (f / "00001.bin").write_bytes(bytes(93)), "00001.bin: got 93 bytes; allowed: 94"),
        (lambda f: (f / "00000.bin").write_bytes(bytes(102)), "00000.bin: got 102 bytes; allowed: 100"),
    ],
)
def test_damage_is_refused_when_opened(tmp_path: Path, damage: Callable[[Path], None], message: str):
    write(tmp_path, np.arange(97), shard_tokens=50)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        TokenShards(tmp_path)
    assert "fix: " in str(caught.value)


def test_all_damaged_shards_are_named_at_once(tmp_path: Path):
    write(tmp_path, np.arange(97), shard_tokens=30)
    (tmp_path / "00000.bin").write_bytes(b"")
    (tmp_path / "00003.bin").unlink()
    with pytest.raises(InputError) as caught:
        TokenShards(tmp_path)
    assert [Path(problem.key).name for problem in caught.value.problems] == ["00000.bin", "00003.bin"]


def test_a_flipped_bit_is_found_by_verify(tmp_path: Path):
    shards = write(tmp_path, np.arange(97), shard_tokens=50)
    shards.verify()
    flip(tmp_path / "00001.bin")
    with pytest.raises(InputError, match=r"00001\.bin: got contents with sha256"):
        TokenShards(tmp_path).verify()


def test_a_folder_without_its_meta_does_not_count(tmp_path: Path):
    writer = ShardWriter(tmp_path, dtype="uint16", tokenizer="t" * 64)
    writer.write(np.arange(10), documents=1, text_bytes=1)
    with pytest.raises(InputError, match="no such file"):
        TokenShards(tmp_path)


def test_marks_are_in_the_meta_when_they_are_known(tmp_path: Path):
    known: list[dict[str, Any]] = [{}, {"bos_id": -1, "eos_id": 2}, {"bos_id": 0, "eos_id": -1}]
    for i, marks in enumerate(known):
        writer = ShardWriter(tmp_path / str(i), dtype="uint16", tokenizer="t" * 64, **marks)
        writer.close()
        shards = TokenShards(tmp_path / str(i))
        assert (shards.bos_id, shards.eos_id) == (marks.get("bos_id"), marks.get("eos_id"))
        assert ("bos_id" in shards.meta) == bool(marks)


@pytest.mark.parametrize("bad", [True, -2, "1", None, 1.0])
def test_a_mark_that_is_no_id_is_refused(tmp_path: Path, bad: object):
    write(tmp_path, np.arange(97))
    edit_meta(lambda meta: meta.update(eos_id=bad))(tmp_path)
    with pytest.raises(InputError, match=f"got eos_id {bad!r}; allowed: an id, or -1"):
        TokenShards(tmp_path)


def test_a_shard_is_partial_until_it_is_full(tmp_path: Path):
    writer = ShardWriter(tmp_path, dtype="uint16", tokenizer="t" * 64, shard_tokens=10)
    writer.write(np.arange(25), documents=1, text_bytes=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.bin", "00001.bin", "00002.bin.partial"]
    assert writer.shards == 2
    writer.close()
    assert sorted(path.name for path in tmp_path.glob("*.bin*")) == ["00000.bin", "00001.bin", "00002.bin"]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("more", [0, 1, 7, 60])
def test_a_writer_goes_on_from_a_state(tmp_path: Path, dtype: str, more: int):
    """more: tokens written after the state was taken, and lost."""
    whole = write(tmp_path / "whole", np.arange(97), dtype=dtype, shard_tokens=10)
    for n in range(7):
        folder = tmp_path / str(n)
        options: dict[str, Any] = {"dtype": dtype, "tokenizer": "t" * 64, "shard_tokens": 10}
        writer = ShardWriter(folder, **options)
        parts = np.array_split(np.arange(97), 7)
        for part in parts[:n]:
            writer.write(part, documents=1, text_bytes=3 * len(part))
        state = json.loads(json.dumps(writer.sync()))
        writer.write(np.arange(more), documents=1, text_bytes=1)
        writer.close() if n % 2 else writer.abandon()
        writer = ShardWriter(folder, **options, state=state)
        assert not (folder / "meta.json").exists()
        for part in parts[n:]:
            writer.write(part, documents=1, text_bytes=3 * len(part))
        writer.close()
        assert TokenShards(folder).meta == whole.meta
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in whole.path.iterdir()
        }


def test_what_was_synced_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    monkeypatch.setattr(shards_module, "fsync_file", lambda file: synced.append(Path(file.name).name))
    writer = ShardWriter(tmp_path, dtype="uint16", tokenizer="t" * 64, shard_tokens=10)
    writer.write(np.arange(15), documents=1, text_bytes=1)
    writer.sync()
    writer.sync()  # nothing new
    writer.write(np.arange(1), documents=1, text_bytes=1)
    writer.sync()
    writer.abandon()
    assert synced == ["00000.bin.partial", "00001.bin.partial", "00001.bin.partial"]
