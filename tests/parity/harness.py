"""Runs the real trainer under a layout and records what must not depend on it; titanlite.verify.record compares."""

from __future__ import annotations

import importlib
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from tests.parity.layouts import BASE, Layout, Sections
from titanlite.config.schema import Config
from titanlite.parallel import runtime
from titanlite.verify.record import Record, Recorder


def run(layout: Layout, text: Path, *, sections: Sections | None = None, fault: str = "") -> list[Record]:
    """Every rank's record of training BASE with `sections` laid over it under `layout`; `fault`: one of sabotage's."""
    data = {"tokenizer": {"path": str(text / "tokenizer.model")}, "data": data_section(text)}
    merged = merge(BASE, data, sections or {}, layout.sections)
    return run_distributed(_record, layout.world_size, merged, fault, timeout=120)


def _record(sections: Sections, fault: str) -> Record:
    if fault:
        importlib.import_module("tests.parity.sabotage").FAULTS[fault].plant()
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(merge(sections, {"run": {"output_dir": folder, "name": "parity"}}))
        recorder = Recorder(config, runtime.start(config.comm, config.run, config.parallelism))
        recorder.train()
        return recorder.record


def data_section(text: Path) -> dict[str, Any]:
    """Two sources of unequal weight, small enough for more than one epoch in STEPS steps."""
    sources = [{"path": str(text / "a"), "weight": 0.7}, {"path": str(text / "b"), "weight": 0.3}]
    return {"sources": sources, "validation_fraction": 0.2, "cache_dir": str(text / "cache")}


def make_text(folder: Path) -> Path:
    """Two folders of documents of invented words, the same every time, and a tokenizer of 300 pieces."""
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 7))) for _ in range(150)]
    lines = []
    for name, documents in (("a", 14), ("b", 12)):
        (folder / name).mkdir(parents=True)
        for number in range(documents):
            text = " ".join(generator.choices(words, k=generator.randint(20, 80)))
            (folder / name / f"{number:03}.txt").write_text(text)
            lines += [text[start : start + 200] for start in range(0, len(text), 200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder
