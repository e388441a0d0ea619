"""The data of a run and how far each source is read, over all changes of sources and weights at resumes. Torch-free.

Every checkpoint holds a RunData: with the number of samples taken, it says which sample comes next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from titanlite.data.order import BLOCK, Phase, SampleOrder, block_quotas
from titanlite.data.prepare import PreparedData
from titanlite.data.tokens import open_tokens


@dataclass(frozen=True)
class SourceState:
    """A source at the start of a phase.

    path:        as data.sources names it, for messages only
    fingerprint: of its training tokens: two sources with the same one are the same source
    windows:     whole samples in it
    quota:       its places in every block; 0 for a former source
    stream:      keys its permutations (order.Phase)
    offset:      samples of it that earlier phases took
    """

    path: str
    fingerprint: str
    windows: int
    quota: int
    stream: int
    offset: int


@dataclass(frozen=True)
class RunData:
    """All that says which tokens sample k >= start of the run holds.

    former: sources that earlier phases read and this one does not, where they were left, in case they come back
    """

    start: int
    sources: tuple[SourceState, ...]
    former: tuple[SourceState, ...]
    tokenizer: str  # fingerprint
    seq_len: int
    seed: int

    @property
    def fingerprint(self) -> str:
        """sha256 over what the config and the texts say. Where each phase began is the run's history, and left out."""
        content = {
            "definition": 1,  # of order.py and of the windows
            "sources": [source.fingerprint for source in self.sources],
            "quotas": [source.quota for source in self.sources],
            "tokenizer": self.tokenizer,
            "seq_len": self.seq_len,
            "seed": self.seed,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def phase(self) -> Phase:
        streams, offsets = zip(*((source.stream, source.offset) for source in self.sources), strict=True)
        return Phase(self.start, streams, offsets)

    def order(self, epochs: int = 0) -> SampleOrder:
        """The order of this phase's samples. Quotas are weights that round to themselves."""
        windows, quotas = zip(*((source.windows, source.quota) for source in self.sources), strict=True)
        return SampleOrder(windows, quotas, self.seed, epochs, self.phase)

    def __str__(self) -> str:
        return ", ".join(f"{source.quota / BLOCK:.3g} {source.path}" for source in self.sources)

    def record(self) -> dict[str, Any]:
        """This as JSON, for a checkpoint's manifest."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> RunData:
        sources, former = (tuple(SourceState(**state) for state in record[key]) for key in ("sources", "former"))
        return cls(**{**record, "sources": sources, "former": former})


def first_phase(prepared: PreparedData, *, seq_len: int, seed: int) -> RunData:
    """The data of a run that starts now."""
    quotas = block_quotas([source.weight for source in prepared.sources])
    sources = tuple(
        SourceState(
            source.path, source.fingerprint, open_tokens(source.train).windows(seq_len), quota, stream=i, offset=0
        )
        for i, (source, quota) in enumerate(zip(prepared.sources, quotas, strict=True))
    )
    return RunData(0, sources, (), prepared.tokenizer.fingerprint, seq_len, seed)


def resume(train_state: Mapping[str, Any], configured: RunData) -> tuple[RunData, list[str]]:
    """The data that a run goes on with from a checkpoint, and what has changed, in words.

    train_state: the checkpoint's, which identity.check_same_run has accepted
    configured:  the first phase of what the config names now
    """
    if "data" not in train_state:  # of a titanlite whose runs had one phase: check_same_run saw that it is this one
        return configured, []
    before = RunData.of_record(train_state["data"])
    if before.fingerprint != configured.fingerprint:
        after = _next_phase(before, configured, train_state["samples"])
        return after, _changes(before, after)
    moved = zip(before.sources, configured.sources, strict=True)
    return replace(before, sources=tuple(replace(old, path=new.path) for old, new in moved)), []


def _next_phase(before: RunData, configured: RunData, samples: int) -> RunData:
    """Sources are known again by their contents; one that never was read has an unused stream and starts at 0."""
    counts = before.order().counts(samples)
    known = [replace(source, offset=count) for source, count in zip(before.sources, counts, strict=True)]
    known += before.former
    unused = 1 + max(source.stream for source in known)
    sources = []
    for source in configured.sources:
        same = next((one for one in known if one.fingerprint == source.fingerprint), None)
        if same is None:
            sources.append(replace(source, stream=unused, offset=0))
            unused += 1
        else:
            known.remove(same)
            sources.append(replace(source, stream=same.stream, offset=same.offset))
    former = tuple(replace(source, quota=0) for source in known)
    return replace(configured, start=samples, sources=tuple(sources), former=former)


def _changes(before: RunData, after: RunData) -> list[str]:
    known = {source.stream for source in (*before.sources, *before.former)}
    paths = {source.path for source in (*before.sources, *before.former)}
    parts = []
    for source in after.sources:
        if source.stream in known:
            state = f"goes on at its sample {source.offset}"
        else:
            state = "new: other tokens than it had" if source.path in paths else "new"
        parts.append(f"{source.quota / BLOCK:.3g} {source.path} ({state})")
    reading = {source.stream for source in before.sources}
    left = [source for source in after.former if source.stream in reading]
    return [
        f"data: from sample {after.start} on {', '.join(parts)}",
        *(f"data: {source.path} is left at its sample {source.offset}" for source in left),
    ]
