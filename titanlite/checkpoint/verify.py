"""Is a checkpoint what was written? All ranks together read every byte of it, before any of them loads a tensor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint import dcp, storage
from titanlite.checkpoint.checksum import FileRecord

if TYPE_CHECKING:
    from titanlite.parallel.runtime import ObjectChannel


def verify(folder: Path, files: Mapping[str, FileRecord], channel: ObjectChannel) -> str:
    """Read the files of a committed checkpoint, each rank its share; returns what there is to say. Collective.

    files: as its manifest says, on all ranks alike. Raises DamagedError, on all ranks, that names all bad files;
    InputError if some may not be read; CheckpointError if a rank does not see them, or reading fails.
    """
    start = time.perf_counter()

    def read() -> None:
        mine = {name: files[name] for name in storage.share(files, channel.rank, channel.size)}
        storage.wait_for_files(folder, {name: record.bytes for name, record in mine.items()})
        storage.check_files(folder, mine)

    dcp.agree(channel, f"reading {folder}", read)
    without = sum(record.checksum is None for record in files.values())
    if without:
        return f"warning: {folder} has no checksums of {without} files: only their sizes were compared"
    size, seconds = sum(record.bytes for record in files.values()), time.perf_counter() - start
    return f"verified {folder.name} ({size / 1e6:,.1f} MB in {seconds:.2f} s)"
