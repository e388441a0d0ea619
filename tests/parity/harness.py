"""Runs the real trainer under a layout and records what must not depend on it (titanlite.verify.record compares).

A later parallelism adds entries to LAYOUTS and to sabotage.FAULTS; nothing else here changes.
"""

from __future__ import annotations

import importlib
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from tests.harness.distributed import run_distributed
from tests.harness.training import merge
from titanlite.config.schema import Config
from titanlite.parallel import runtime
from titanlite.verify.record import Record, Recorder

Sections = Mapping[str, Mapping[str, Any]]

STEPS = 10

# Rows of the tables (301) and of the MLP (70), and the width (34) do not divide by 3 or 4: some rank of a
# shard gets less than the others. The vocabulary is padded.
BASE: Sections = {
    "run": {"device": "cpu", "deterministic": True, "seed": 3},
    "model": {
        "vocab_size": 300,
        "dim": 34,
        "n_layers": 3,
        "n_heads": 6,
        "n_kv_heads": 3,
        "head_dim": 10,
        "ffn_dim": 70,
        "vocab_pad_multiple": 7,
        "init_std": 0.1,  # large enough for attention to matter at this width
    },
    "training": {
        "seq_len": 32,
        "global_batch_size": 24,
        "local_batch_size": 24,
        "steps": STEPS,
        "max_norm": 0.1,  # clips every step
        "mixed_precision_param": "float32",
        "loss_chunk_tokens": 100,
    },
    "optimizer": {"lr": 1e-2},
    "lr_scheduler": {"total_steps": 20, "warmup_steps": 3},
    "checkpoint": {"enable": False},
    "validation": {"enable": True, "freq": 5, "samples": 7},
    "metrics": {"log_freq": 1, "enable_tensorboard": False, "peak_tflops": 1.0},
}
TIED: Sections = {"model": {"tie_word_embeddings": True, "qk_norm": True}}
MASKED: Sections = {"data": {"document_mask": True}}
# For degrees that BASE's 6 query and 3 key/value heads do not fit.
HEADS_8: Sections = {"model": {"n_heads": 8, "n_kv_heads": 4}}
HEADS_8_KV_2: Sections = {"model": {"n_heads": 8, "n_kv_heads": 2}}
HEADS_8_KV_1: Sections = {"model": {"n_heads": 8, "n_kv_heads": 1}}
# With BASE's seed and 8 heads under QK norm, the norm of single steps moves by 1e-5 for any order of summation (1.5e-5
# under fsdp 3): rounding of the step before is magnified. With this seed the worst is 2e-6.
CALM: Sections = {"run": {"seed": 5}}
DEEP: Sections = {"model": {"n_layers": 8}}  # for pipelines with many stages


@dataclass(frozen=True)
class Layout:
    """A world size and the sections that say how it is used."""

    world_size: int
    sections: Sections


def _layout(world_size: int, training: Mapping[str, Any] | None = None, **parallelism: Any) -> Layout:
    return Layout(world_size, {"parallelism": {"dp_shard": 1, **parallelism}, "training": dict(training or {})})


def _microbatches(size: int) -> dict[str, int]:
    return {"local_batch_size": size}


ONE_PROCESS = _layout(1)
LAYOUTS: dict[str, Layout] = {
    "accumulation 2": _layout(1, _microbatches(12)),
    "accumulation 4": _layout(1, _microbatches(6)),
    "plain loss": _layout(1, {"loss_chunk_tokens": 0}),
    "ddp 2": _layout(2, dp_replicate=2),
    "ddp 3": _layout(3, dp_replicate=3),
    "ddp 4": _layout(4, dp_replicate=4),
    "ddp 2, accumulation 4": _layout(2, _microbatches(3), dp_replicate=2),
    "fsdp 2": _layout(2, dp_shard=2),
    "fsdp 3": _layout(3, dp_shard=3),
    "fsdp 4": _layout(4, dp_shard=4),
    "fsdp 2, accumulation 2": _layout(2, _microbatches(6), dp_shard=2),
    "fsdp 2, accumulation 4": _layout(2, _microbatches(3), dp_shard=2),
    "fsdp 2, zero 2, accumulation 4": _layout(2, _microbatches(3), dp_shard=2, zero_stage=2),
    "fsdp 2, zero 1, accumulation 4": _layout(2, _microbatches(3), dp_shard=2, zero_stage=1),
    "fsdp 4, zero 2": _layout(4, dp_shard=4, zero_stage=2),
    "fsdp 4, zero 1": _layout(4, dp_shard=4, zero_stage=1),
    "hsdp 2x2": _layout(4, dp_replicate=2, dp_shard=2),
    "hsdp 2x2, zero 2, accumulation 2": _layout(4, _microbatches(3), dp_replicate=2, dp_shard=2, zero_stage=2),
    "hsdp 2x2, zero 1, accumulation 2": _layout(4, _microbatches(3), dp_replicate=2, dp_shard=2, zero_stage=1),
    "hsdp 3x2": _layout(6, dp_replicate=3, dp_shard=2),
    "cp 2": _layout(2, cp=2),
    "cp 4": _layout(4, cp=4),
    "cp 2, accumulation 2": _layout(2, _microbatches(12), cp=2),
    "cp 2 x fsdp 2": _layout(4, cp=2, dp_shard=2),
    "cp 2 x fsdp 2, zero 2, accumulation 2": _layout(4, _microbatches(6), cp=2, dp_shard=2, zero_stage=2),
    "cp 2 x fsdp 2, zero 1, accumulation 2": _layout(4, _microbatches(6), cp=2, dp_shard=2, zero_stage=1),
    "cp 2 x replicas 2": _layout(4, cp=2, dp_replicate=2),
    "cp 2 gathered": _layout(2, cp=2, cp_method="allgather"),
    "cp 4 gathered": _layout(4, cp=4, cp_method="allgather"),
    "cp 2 gathered x fsdp 2": _layout(4, cp=2, cp_method="allgather", dp_shard=2),
}
for _name in (
    "fsdp 2, accumulation 2",
    "ddp 2, accumulation 4",
    "hsdp 2x2",
    "cp 2, accumulation 2",
    "cp 2 gathered x fsdp 2",
):
    _plain = LAYOUTS[_name]
    LAYOUTS[f"{_name}, full recomputation"] = Layout(
        _plain.world_size, merge(_plain.sections, {"activation_checkpoint": {"mode": "full"}})
    )
# Pipelines. BASE has 3 layers: stages of 2 and 1.
LAYOUTS |= {
    "pp 2": _layout(2, pp=2, pp_microbatches=4),
    "pp 2, GPipe": _layout(2, pp=2, pp_schedule="GPipe", pp_microbatches=3),
    "pp 2, GPipe, one microbatch": _layout(2, pp=2, pp_schedule="GPipe", pp_microbatches=1),
    "pp 2, accumulation 3": _layout(2, _microbatches(8), pp=2, pp_layers_per_stage=[1, 2]),
    "pp 3": _layout(3, pp=3, pp_microbatches=4),
    "pp 2 x fsdp 2, zero 3, accumulation 2": _layout(4, _microbatches(6), pp=2, dp_shard=2, zero_stage=3),
    "pp 2 x hsdp 2x2, GPipe": _layout(8, pp=2, dp_shard=2, dp_replicate=2, pp_schedule="GPipe", pp_microbatches=3),
}
DEEP_LAYOUTS: dict[str, Layout] = {}  # of DEEP
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
for _schedule in SCHEDULES:
    _set: dict[str, Any] = {"pp": 2, "pp_schedule": _schedule}
    DEEP_LAYOUTS[f"pp 2, {_schedule}"] = _layout(2, pp_microbatches=4, **_set)
    DEEP_LAYOUTS[f"pp 2 x dp_replicate 2, {_schedule}"] = _layout(4, _microbatches(6), dp_replicate=2, **_set)
    if _schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        DEEP_LAYOUTS[f"pp 2 x fsdp 2, {_schedule}"] = _layout(4, _microbatches(4), dp_shard=2, **_set)
        DEEP_LAYOUTS[f"pp 4, {_schedule}"] = _layout(4, pp_microbatches=4, **(_set | {"pp": 4}))
_set = {"pp": 2, "pp_schedule": "LoopedBFS", "pp_layers_per_stage": [1] * 8, "pp_microbatches": 3}
DEEP_LAYOUTS |= {
    "pp 2, LoopedBFS, four stages a rank": _layout(2, **_set),
    "pp 2 x fsdp 2, LoopedBFS, zero 3, four stages a rank": _layout(
        4, _microbatches(6), dp_shard=2, zero_stage=3, **_set
    ),
    "pp 2, Interleaved1F1B, one microbatch": _layout(2, pp=2, pp_schedule="Interleaved1F1B", pp_microbatches=1),
    "pp 4, ZBVZeroBubble, one microbatch": _layout(4, pp=4, pp_schedule="ZBVZeroBubble", pp_microbatches=1),
}
for _layouts, _name in (
    (LAYOUTS, "pp 2"),
    *((DEEP_LAYOUTS, f"pp 2, {name}") for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")),
):
    _plain = _layouts[_name]
    _layouts[f"{_name}, full recomputation"] = Layout(
        2, merge(_plain.sections, {"activation_checkpoint": {"mode": "full"}})
    )

# Each with the sections over BASE that it needs, in which one process is run for comparison too: tensor parallelism,
# and compositions.
FULL_RECOMPUTATION: Sections = {"activation_checkpoint": {"mode": "full"}}
SECTIONED_LAYOUTS: dict[str, tuple[Layout, Sections]] = {
    "tp 2": (_layout(2, tp=2), HEADS_8),
    "tp 4": (_layout(4, tp=4), HEADS_8),
    "tp 4 over 2 kv heads": (_layout(4, tp=4), HEADS_8_KV_2),
    "tp 4 over 1 kv head": (_layout(4, tp=4), HEADS_8_KV_1),
    "tp 2, plain loss": (_layout(2, {"loss_chunk_tokens": 0}, tp=2), HEADS_8),
    "tp 2, accumulation 4": (_layout(2, _microbatches(6), tp=2), HEADS_8),
    "tp 2, accumulation 2, full recomputation": (
        Layout(2, merge(_layout(2, _microbatches(12), tp=2).sections, FULL_RECOMPUTATION)),
        HEADS_8,
    ),
    "tp 2 x fsdp 2": (_layout(4, tp=2, dp_shard=2), HEADS_8),
    "tp 2 x fsdp 3": (_layout(6, tp=2, dp_shard=3), merge(HEADS_8, {"model": {"vocab_pad_multiple": 14}})),
    "tp 4 over 2 kv heads x fsdp 2": (_layout(8, tp=4, dp_shard=2), HEADS_8_KV_2),
    "tp 2 x dp_replicate 2": (_layout(4, tp=2, dp_replicate=2), HEADS_8),
    "tp 2 x hsdp 2x2": (_layout(8, tp=2, dp_replicate=2, dp_shard=2), HEADS_8),
    "tp 2 x fsdp 2, zero 1, accumulation 2": (_layout(4, _microbatches(6), tp=2, dp_shard=2, zero_stage=1), HEADS_8),
    "tp 2 x fsdp 2, zero 2, accumulation 2": (_layout(4, _microbatches(6), tp=2, dp_shard=2, zero_stage=2), HEADS_8),
    "tp 2, tied": (_layout(2, tp=2), merge(HEADS_8, TIED, CALM)),
    "tp 2 x fsdp 2, tied": (_layout(4, tp=2, dp_shard=2), merge(HEADS_8, TIED, CALM)),
    "tp 4 over 1 kv head, tied": (_layout(4, tp=4), merge(HEADS_8_KV_1, TIED, CALM)),
    "tp 2 x cp 2": (_layout(4, tp=2, cp=2), HEADS_8),
    "tp 2 x cp 2 x fsdp 2, accumulation 2": (_layout(8, _microbatches(6), tp=2, cp=2, dp_shard=2), HEADS_8),
    "tp 2 x cp 2 gathered, masked": (_layout(4, tp=2, cp=2, cp_method="allgather"), merge(HEADS_8, MASKED)),
    "tp 2 x cp 2 x replicas 2, tied": (_layout(8, tp=2, cp=2, dp_replicate=2), merge(HEADS_8, TIED, CALM)),
    "pp 2 x tp 2": (_layout(4, pp=2, tp=2), HEADS_8),
    "pp 2 x cp 2": (_layout(4, pp=2, cp=2), HEADS_8),
    "pp 2 x tp 2 x fsdp 2, tied": (_layout(8, pp=2, tp=2, dp_shard=2), merge(HEADS_8, TIED, CALM)),
    "pp 2 x tp 2 x cp 2": (_layout(8, pp=2, tp=2, cp=2), HEADS_8),
    "pp 2 x cp 2 gathered x fsdp 2, masked": (
        _layout(8, pp=2, cp=2, cp_method="allgather", dp_shard=2),
        merge(HEADS_8, MASKED),
    ),
    "pp 2 x tp 2, ZBVZeroBubble": (_layout(4, pp=2, tp=2, pp_schedule="ZBVZeroBubble"), merge(HEADS_8, DEEP)),
    "pp 2 x cp 2, InterleavedZeroBubble": (
        _layout(4, pp=2, cp=2, pp_schedule="InterleavedZeroBubble"),
        merge(HEADS_8, DEEP),
    ),
    "pp 2 x tp 2 x cp 2, full recomputation": (
        Layout(8, merge(_layout(8, pp=2, tp=2, cp=2).sections, FULL_RECOMPUTATION)),
        HEADS_8,
    ),
    "pp 2 x tp 2, Interleaved1F1B": (
        _layout(4, pp=2, tp=2, pp_schedule="Interleaved1F1B"),
        merge(HEADS_8, DEEP),
    ),
    "tp 2, masked": (_layout(2, tp=2), merge(HEADS_8, MASKED)),
    "tp 2 x fsdp 2, accumulation 2, full recomputation, masked": (
        Layout(4, merge(_layout(4, _microbatches(6), tp=2, dp_shard=2).sections, FULL_RECOMPUTATION)),
        merge(HEADS_8, MASKED),
    ),
}


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
