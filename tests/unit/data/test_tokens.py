"""What a path of tokens means: each kind of folder, file and glob, and those that leave a doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.helpers import IDS, LENGTHS, llm_c, megatron, nanogpt, ours
from titanlite.config.problems import InputError
from titanlite.data.shards import TokenShards
from titanlite.data.tokens import FoundTokens, find_tokens, open_tokens

KEY = "data.sources.0.path"


def names(found: FoundTokens | None) -> list[list[str]] | None:
    """The files of each part."""
    if found is None:
        return None
    return [[file.name for file in open_tokens(part).files] for part in (found.train, found.validation) if part]


def test_a_folder_of_nanogpt(tmp_path: Path):
    nanogpt(tmp_path / "train.bin", IDS)
    (tmp_path / "meta.pkl").touch()
    assert find_tokens(str(tmp_path), KEY) == FoundTokens(tmp_path / "train.bin", None)
    nanogpt(tmp_path / "val.bin", IDS)
    assert find_tokens(str(tmp_path), KEY) == FoundTokens(tmp_path / "train.bin", tmp_path / "val.bin")


def test_a_folder_of_llm_c(tmp_path: Path):
    folder = tmp_path / "odd [name]*"
    folder.mkdir()
    for name in ("fineweb_train_000002", "fineweb_train_000001", "fineweb_val_000000"):
        llm_c(folder / f"{name}.bin", IDS)
    (folder / "fineweb_train_000001.txt").touch()
    (folder / "README.md").touch()
    expected = [["fineweb_train_000001.bin", "fineweb_train_000002.bin"], ["fineweb_val_000000.bin"]]
    assert names(find_tokens(str(folder), KEY)) == expected


def test_a_folder_of_llm_c_with_one_file_each(tmp_path: Path):
    llm_c(tmp_path / "tiny_shakespeare_train.bin", IDS)
    assert names(find_tokens(str(tmp_path), KEY)) == [["tiny_shakespeare_train.bin"]]
    llm_c(tmp_path / "tiny_shakespeare_val.bin", IDS)
    assert names(find_tokens(str(tmp_path), KEY)) == [["tiny_shakespeare_train.bin"], ["tiny_shakespeare_val.bin"]]


def test_folders_of_ours(tmp_path: Path):
    ours(tmp_path / "flat", IDS)
    assert find_tokens(str(tmp_path / "flat"), KEY) == FoundTokens(tmp_path / "flat", None)
    ours(tmp_path / "both" / "train", IDS)
    assert find_tokens(str(tmp_path / "both"), KEY) == FoundTokens(tmp_path / "both" / "train", None)
    ours(tmp_path / "both" / "validation", IDS)
    both = tmp_path / "both"
    assert find_tokens(str(both), KEY) == FoundTokens(both / "train", both / "validation")
    assert isinstance(open_tokens(both / "train"), TokenShards)
    (both / "train" / "00000.bin").unlink()
    with pytest.raises(InputError, match="no such file"):
        find_tokens(str(both), KEY)


def test_what_is_no_tokens(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "x.bin").write_bytes(b"ab")
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "*.txt", tmp_path / "none.bin", tmp_path / "*.idx"):
        assert find_tokens(str(path), KEY) is None
    assert find_tokens("embedded", KEY) is None
    with pytest.raises(InputError, match=r"none\.bin: got no such file"):
        open_tokens(tmp_path / "none.bin")


def test_a_name_with_the_characters_of_a_glob(tmp_path: Path):
    file = nanogpt(tmp_path / "a[0-9]*.bin", IDS)
    nanogpt(tmp_path / "a1.bin", IDS)
    assert names(find_tokens(str(file), KEY)) == [["a[0-9]*.bin"]]


def test_a_glob_follows_no_links_to_folders_so_that_it_ends(tmp_path: Path):
    (tmp_path / "d" / "deep").mkdir(parents=True)
    nanogpt(tmp_path / "d" / "deep" / "x.bin", IDS)
    (tmp_path / "d" / "a.txt").touch()
    for i in range(12):
        (tmp_path / "d" / "deep" / f"back{i}").symlink_to(tmp_path / "d")
    assert find_tokens(f"{tmp_path}/d/**/*.txt", KEY) is None
    assert names(find_tokens(f"{tmp_path}/d/**/*.bin", KEY)) == [["x.bin"]]


def test_an_index_means_its_bin(tmp_path: Path):
    megatron(tmp_path / "x.bin", IDS, LENGTHS)
    for pattern in ("x.idx", "x.*"):
        assert names(find_tokens(str(tmp_path / pattern), KEY)) == [["x.bin"]]
    assert open_tokens(tmp_path / "x.bin").depends_on() == [tmp_path / "x.bin", tmp_path / "x.idx"]


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({"train.bin", "a_train_0.bin"}, "", r"data.sources.0.path: got .*has train.bin and \*_train_\*.bin"),
        ({"a.bin", "b.bin"}, "", r"neither train.bin nor \*_train_\*.bin; allowed: a folder that says what is"),
        ({"a_val_0.bin"}, "", r"with a_val_0.bin but neither"),
        ({"a.bin", "a.txt"}, "*", "which matches a.bin and a.txt; allowed: token files or text, not both"),
    ],
)
def test_ambiguous_paths_are_refused(tmp_path: Path, files: set[str], path: str, message: str):
    for name in files:
        nanogpt(tmp_path / name, IDS)
    with pytest.raises(InputError, match=message):
        find_tokens(str(tmp_path / path), KEY)


def test_mixed_files_are_refused_once(tmp_path: Path):
    llm_c(tmp_path / "a.bin", IDS)
    llm_c(tmp_path / "b.bin", IDS, magic=20240801, version=7)
    llm_c(tmp_path / "c.bin", IDS, magic=20240801, version=7)
    with pytest.raises(InputError, match=r"got uint16 of llm.c \(a.bin\) and uint32 of llm.c \(b.bin\)") as caught:
        find_tokens(str(tmp_path / "*.bin"), KEY)
    assert len(caught.value.problems) == 1
    megatron(tmp_path / "b.bin", IDS, LENGTHS)
    with pytest.raises(InputError, match=r"uint16 of llm.c \(a.bin\) and uint16 of Megatron \(b.bin\)"):
        find_tokens(str(tmp_path / "[ab].bin"), KEY)


def test_a_folder_that_cannot_be_read_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match=r"data.sources.0.path: got '.*' \(Permission denied\)"):
        find_tokens(str(tmp_path), KEY)
