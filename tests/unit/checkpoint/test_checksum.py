import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import xxhash

from titanlite import files
from titanlite.checkpoint import checksum
from titanlite.checkpoint.checksum import FileRecord, HashedFile


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1])
def test_written_and_read_are_the_same_record(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    file = HashedFile(tmp_path / "a")
    for part in (data[:7], memoryview(data)[7:]):
        assert file.write(part) == len(part)
    assert file.tell() == size
    file.close()
    expected = FileRecord(size, f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}")
    assert file.record == expected == checksum.of_file(tmp_path / "a")
    assert checksum.of_bytes(data) == expected.checksum
    assert (tmp_path / "a").read_bytes() == data
    assert file.seconds > 0


def test_all_that_was_written_is_synced_before_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are in a buffer of the process until the sync: it has to come after that is empty."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    monkeypatch.delattr(files.fcntl, "F_FULLFSYNC", raising=False)
    file = HashedFile(tmp_path / "a")
    file.write(b"12345")
    file.close()
    file.close()
    assert synced == [5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_the_first_error_is_kept_with_the_files_name(size: int) -> None:
    """Also one that comes when the buffer is emptied, and whatever a library in between makes of it."""
    file = HashedFile(Path("/dev/full"))
    with pytest.raises(OSError) as error:
        file.write(b"x" * size)
        file.close()
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, "/dev/full")
    assert file.error is error.value
    file.close()

    file = HashedFile(Path("/dev/full"))
    with pytest.raises(RuntimeError, match="unexpected pos"):
        torch.save(torch.zeros(1 << 16), cast(Any, file))
    assert file.error is not None and file.error.errno == errno.ENOSPC
    file.close()
