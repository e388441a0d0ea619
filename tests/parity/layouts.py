"""The table of the parity tests: layouts, each with the sections over BASE under which it trains as one process does.

A later parallelism adds entries here and to sabotage.FAULTS; the tests, the documents and what compares stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.harness.training import merge

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
# For pipelines of four and of eight stages; some have two layers.
DEEP: Sections = {"model": {"n_layers": 5}}
DEEPER: Sections = {"model": {"n_layers": 9}}


@dataclass(frozen=True)
class Layout:
    """A world size and the sections that say how it is used."""

    world_size: int
    sections: Sections


def _layout(training: Mapping[str, Any] | None = None, *, recompute: bool = False, **parallelism: Any) -> Layout:
    degrees = {"dp_shard": 1} | parallelism
    world_size = math.prod(degrees.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))
    sections = {"parallelism": degrees, "training": dict(training or {})}
    if recompute:
        sections["activation_checkpoint"] = {"mode": "full"}
    return Layout(world_size, sections)


def _microbatches(size: int) -> dict[str, int]:
    return {"local_batch_size": size}


ONE_PROCESS = _layout()
# name -> a layout, and the sections over BASE with which it and one process are run.
LAYOUTS: dict[str, tuple[Layout, Sections]] = {}


def _add(sections: Sections, layouts: Mapping[str, Layout]) -> None:
    assert not LAYOUTS.keys() & layouts.keys(), "a name is taken"
    LAYOUTS.update({name: (layout, sections) for name, layout in layouts.items()})


def _add_again(kind: str, sections: Sections, *names: str) -> None:
    """Layouts that are there already, of another model."""
    for name in names:
        layout, other = LAYOUTS[name]
        _add(merge(other, sections), {f"{name}, {kind}": layout})


# ---- data and context parallelism

_add(
    {},
    {
        "accumulation 2": _layout(_microbatches(12)),
        "accumulation 4": _layout(_microbatches(6)),
        "plain loss": _layout({"loss_chunk_tokens": 0}),
        "ddp 2": _layout(dp_replicate=2),
        "ddp 3": _layout(dp_replicate=3),
        "ddp 4": _layout(dp_replicate=4),
        "ddp 2, accumulation 4": _layout(_microbatches(3), dp_replicate=2),
        "ddp 2, accumulation 4, full recomputation": _layout(_microbatches(3), dp_replicate=2, recompute=True),
        "fsdp 2": _layout(dp_shard=2),
        "fsdp 3": _layout(dp_shard=3),
        "fsdp 4": _layout(dp_shard=4),
        "fsdp 2, accumulation 2": _layout(_microbatches(6), dp_shard=2),
        "fsdp 2, accumulation 2, full recomputation": _layout(_microbatches(6), dp_shard=2, recompute=True),
        "fsdp 2, accumulation 4": _layout(_microbatches(3), dp_shard=2),
        "fsdp 2, zero 2, accumulation 4": _layout(_microbatches(3), dp_shard=2, zero_stage=2),
        "fsdp 2, zero 1, accumulation 4": _layout(_microbatches(3), dp_shard=2, zero_stage=1),
        "hsdp 2x2": _layout(dp_replicate=2, dp_shard=2),
        "hsdp 2x2, full recomputation": _layout(dp_replicate=2, dp_shard=2, recompute=True),
        "hsdp 3x2": _layout(dp_replicate=3, dp_shard=2),
        "cp 2": _layout(cp=2),
        "cp 4": _layout(cp=4),
        "cp 2, accumulation 2": _layout(_microbatches(12), cp=2),
        "cp 2, accumulation 2, full recomputation": _layout(_microbatches(12), cp=2, recompute=True),
        "cp 2 x fsdp 2": _layout(cp=2, dp_shard=2),
        "cp 2 x replicas 2": _layout(cp=2, dp_replicate=2),
        "cp 2 x hsdp 2x2": _layout(cp=2, dp_replicate=2, dp_shard=2),
        "cp 2 gathered": _layout(cp=2, cp_method="allgather"),
        "cp 4 gathered": _layout(cp=4, cp_method="allgather"),
        "cp 2 gathered x fsdp 2": _layout(cp=2, cp_method="allgather", dp_shard=2),
        "cp 2 gathered x fsdp 2, full recomputation": _layout(cp=2, cp_method="allgather", dp_shard=2, recompute=True),
    },
)
for _stage in (1, 2, 3):
    _many: dict[str, Any] = {"dp_shard": 2, "zero_stage": _stage}
    _name = f"zero {_stage}, accumulation 2"
    _add({}, {f"hsdp 2x2, {_name}": _layout(_microbatches(3), dp_replicate=2, **_many)})
    _add({}, {f"cp 2 x fsdp 2, {_name}": _layout(_microbatches(6), cp=2, **_many)})
    _add({}, {f"cp 2 gathered x fsdp 2, {_name}": _layout(_microbatches(6), cp=2, cp_method="allgather", **_many)})
    _add(HEADS_8, {f"tp 2 x fsdp 2, {_name}": _layout(_microbatches(6), tp=2, **_many)})
    if _stage != 2:  # refused under a pipeline
        _add({}, {f"pp 2 x fsdp 2, {_name}": _layout(_microbatches(6), pp=2, pp_microbatches=3, **_many)})

# ---- pipelines: BASE has 3 layers, so stages of 2 and 1

_add(
    {},
    {
        "pp 2": _layout(pp=2, pp_microbatches=4),
        "pp 2, full recomputation": _layout(pp=2, pp_microbatches=4, recompute=True),
        "pp 2, GPipe, three microbatches": _layout(pp=2, pp_schedule="GPipe", pp_microbatches=3),
        "pp 2, GPipe, one microbatch": _layout(pp=2, pp_schedule="GPipe", pp_microbatches=1),
        "pp 2, accumulation 3": _layout(_microbatches(8), pp=2, pp_layers_per_stage=[1, 2]),
        "pp 3": _layout(pp=3, pp_microbatches=4),
        "pp 2 x hsdp 2x2, GPipe": _layout(pp=2, dp_shard=2, dp_replicate=2, pp_schedule="GPipe", pp_microbatches=3),
    },
)
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
for _name in SCHEDULES:
    _pp: dict[str, Any] = {"pp_schedule": _name, "pp_microbatches": 4}
    _add(DEEP, {f"pp 2, {_name}": _layout(pp=2, **_pp)})
    _add(DEEP, {f"pp 2 x dp_replicate 2, {_name}": _layout(pp=2, dp_replicate=2, **_pp)})
    _pp["pp_microbatches"] = 8  # DualPipeV needs one for each stage
    _add(DEEP if _name in ("GPipe", "1F1B") else DEEPER, {f"pp 4, {_name}": _layout(pp=4, **_pp)})
for _name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
    _pp = {"pp": 2, "pp_schedule": _name}
    _add(DEEP, {f"pp 2 x fsdp 2, {_name}": _layout(_microbatches(4), dp_shard=2, pp_microbatches=2, **_pp)})
    if _name != "1F1B":
        _add(DEEP, {f"pp 2, {_name}, full recomputation": _layout(pp_microbatches=4, recompute=True, **_pp)})
_pp = {"pp": 2, "pp_schedule": "LoopedBFS", "pp_layers_per_stage": [1, 1, 2, 1, 1, 1, 1, 1], "pp_microbatches": 3}
_add(
    DEEPER,
    {
        "pp 2, LoopedBFS, four stages a rank": _layout(**_pp),
        "pp 2 x fsdp 2, LoopedBFS, zero 3, four stages a rank": _layout(
            _microbatches(6), dp_shard=2, zero_stage=3, **_pp
        ),
        "pp 4, ZBVZeroBubble, one microbatch": _layout(pp=4, pp_schedule="ZBVZeroBubble", pp_microbatches=1),
    },
)
_add(DEEP, {"pp 2, Interleaved1F1B, one microbatch": _layout(pp=2, pp_schedule="Interleaved1F1B", pp_microbatches=1)})

# ---- tensor parallelism, and compositions of tp, pp and cp

_add(
    HEADS_8,
    {
        "tp 2": _layout(tp=2),
        "tp 4": _layout(tp=4),
        "tp 2, plain loss": _layout({"loss_chunk_tokens": 0}, tp=2),
        "tp 2, accumulation 4": _layout(_microbatches(6), tp=2),
        "tp 2, accumulation 2, full recomputation": _layout(_microbatches(12), tp=2, recompute=True),
        "tp 2 x fsdp 2": _layout(tp=2, dp_shard=2),
        "tp 2 x dp_replicate 2": _layout(tp=2, dp_replicate=2),
        "tp 2 x hsdp 2x2": _layout(tp=2, dp_replicate=2, dp_shard=2),
        "tp 2 x cp 2": _layout(tp=2, cp=2),
        "tp 2 x cp 2 x fsdp 2, accumulation 2": _layout(_microbatches(6), tp=2, cp=2, dp_shard=2),
        "pp 2 x tp 2": _layout(pp=2, tp=2, pp_microbatches=4),
        "pp 2 x tp 2 x cp 2": _layout(pp=2, tp=2, cp=2, pp_microbatches=4),
        "pp 2 x tp 2 x cp 2, full recomputation": _layout(pp=2, tp=2, cp=2, pp_microbatches=4, recompute=True),
    },
)
_add(
    {},
    {
        "pp 2 x cp 2": _layout(pp=2, cp=2, pp_microbatches=4),
        "pp 2 x cp 2 x fsdp 2, zero 3, accumulation 2": _layout(
            _microbatches(6), pp=2, cp=2, dp_shard=2, zero_stage=3, pp_microbatches=3
        ),
    },
)
_add(HEADS_8_KV_2, {"tp 4 over 2 kv heads": _layout(tp=4), "tp 4 over 2 kv heads x fsdp 2": _layout(tp=4, dp_shard=2)})
_add(HEADS_8_KV_1, {"tp 4 over 1 kv head": _layout(tp=4)})
_add(merge(HEADS_8, {"model": {"vocab_pad_multiple": 14}}), {"tp 2 x fsdp 3": _layout(tp=2, dp_shard=3)})
# With DEEP's 5 layers the norm of step 6 moves by more than 1e-5 for any order of summation (fsdp 3: 1.4e-5).
_add(
    merge(HEADS_8, {"model": {"n_layers": 8}}),
    {
        "pp 2 x tp 2, ZBVZeroBubble": _layout(pp=2, tp=2, pp_schedule="ZBVZeroBubble", pp_microbatches=4),
        "pp 2 x tp 2, Interleaved1F1B": _layout(pp=2, tp=2, pp_schedule="Interleaved1F1B", pp_microbatches=4),
    },
)
_add(
    DEEP,
    {"pp 2 x cp 2, InterleavedZeroBubble": _layout(pp=2, cp=2, pp_schedule="InterleavedZeroBubble", pp_microbatches=4)},
)
_add(
    merge(HEADS_8, TIED, CALM),
    {
        "tp 2, tied": _layout(tp=2),
        "tp 2 x fsdp 2, tied": _layout(tp=2, dp_shard=2),
        "tp 2 x cp 2 x replicas 2, tied": _layout(tp=2, cp=2, dp_replicate=2),
        "pp 2 x tp 2 x fsdp 2, tied": _layout(pp=2, tp=2, dp_shard=2, pp_microbatches=4),
        "pp 2 x tp 2 x dp_replicate 2, tied": _layout(pp=2, tp=2, dp_replicate=2, pp_microbatches=4),
    },
)
_add(
    merge(DEEP, TIED),
    {
        "pp 2 x cp 2 x dp_replicate 2, ZBVZeroBubble, tied": _layout(
            pp=2, cp=2, dp_replicate=2, pp_schedule="ZBVZeroBubble", pp_microbatches=4
        )
    },
)
_add(merge(HEADS_8_KV_1, TIED, CALM), {"tp 4 over 1 kv head, tied": _layout(tp=4)})
_add(
    merge(HEADS_8, MASKED),
    {
        "tp 2, masked": _layout(tp=2),
        "tp 2 x fsdp 2, accumulation 2, full recomputation, masked": _layout(
            _microbatches(6), tp=2, dp_shard=2, recompute=True
        ),
        "tp 2 x cp 2 gathered, masked": _layout(tp=2, cp=2, cp_method="allgather"),
        "tp 2 x cp 2 gathered x fsdp 2, masked": _layout(tp=2, cp=2, cp_method="allgather", dp_shard=2),
        "tp 2 x cp 2 gathered x dp_replicate 2, masked": _layout(tp=2, cp=2, cp_method="allgather", dp_replicate=2),
        "pp 2 x tp 2 x cp 2 gathered, masked": _layout(pp=2, tp=2, cp=2, cp_method="allgather", pp_microbatches=4),
    },
)
_add(
    MASKED,
    {
        "cp 2 gathered x dp_replicate 2, masked": _layout(cp=2, cp_method="allgather", dp_replicate=2),
        "cp 2 gathered x hsdp 2x2, masked": _layout(cp=2, cp_method="allgather", dp_replicate=2, dp_shard=2),
        "pp 2 x cp 2 gathered, masked": _layout(pp=2, cp=2, cp_method="allgather", pp_microbatches=4),
        "pp 2 x cp 2 gathered x fsdp 2, masked": _layout(
            pp=2, cp=2, cp_method="allgather", dp_shard=2, pp_microbatches=4
        ),
        "pp 2 x cp 2 gathered x dp_replicate 2, masked": _layout(
            pp=2, cp=2, cp_method="allgather", dp_replicate=2, pp_microbatches=4
        ),
    },
)

# ---- the same of another model

_add_again(
    "tied",
    TIED,
    "accumulation 4",
    "ddp 3",
    "fsdp 3",
    "hsdp 2x2, zero 2, accumulation 2",
    "cp 2",
    "pp 3",
    "pp 2 x fsdp 2, zero 3, accumulation 2",
    "pp 4, 1F1B",
    "pp 2, ZBVZeroBubble",
    "pp 2 x dp_replicate 2, ZBVZeroBubble",
    "pp 2 x dp_replicate 2, DualPipeV",
    "pp 2 x fsdp 2, InterleavedZeroBubble",
)
_add_again(
    "masked",
    MASKED,
    "ddp 2, accumulation 4",
    "fsdp 2, accumulation 2, full recomputation",
    "hsdp 2x2",
    "cp 2 gathered",
    "cp 4 gathered",
    "cp 2 gathered x fsdp 2",
    "cp 2 gathered x fsdp 2, full recomputation",
    "pp 2",
    "pp 2, accumulation 3",
    "pp 2, full recomputation",
)

# ---- the same with other recomputation


def _add_recomputing(kind: str, keys: Mapping[str, Any], *names: str) -> None:
    """Layouts that are there already, of the same models, with these keys of activation_checkpoint."""
    for name in names:
        layout, sections = LAYOUTS[name]
        recomputing = Layout(layout.world_size, merge(layout.sections, {"activation_checkpoint": keys}))
        _add(sections, {f"{name}, {kind}": recomputing})


_add_recomputing(
    "selective recomputation",
    {"mode": "selective"},
    "accumulation 2",
    "ddp 2, accumulation 4",
    "fsdp 2, accumulation 2",  # zero 3
    "fsdp 2, zero 2, accumulation 4",
    "fsdp 2, zero 1, accumulation 4",
    "hsdp 2x2",
    "hsdp 2x2, masked",
    "cp 2, accumulation 2",
    "cp 2 gathered x fsdp 2, masked",
    "pp 3, tied",
    "pp 2 x fsdp 2, zero 3, accumulation 2",
    "pp 2, Interleaved1F1B",
    "pp 2 x fsdp 2, LoopedBFS, zero 3, four stages a rank",
    "tp 2, accumulation 4",
    "tp 2, masked",
    "tp 2 x fsdp 2, zero 1, accumulation 2",
    "tp 4 over 2 kv heads x fsdp 2",
    "tp 2 x cp 2",
    "tp 2 x cp 2 gathered, masked",
    "pp 2 x tp 2",
    "pp 2 x tp 2 x cp 2",
    "pp 2 x tp 2 x fsdp 2, tied",
)
_add_recomputing(
    "every second block recomputed",
    {"mode": "selective", "selective_ac_option": "2"},
    "fsdp 3",
    "pp 2, accumulation 3",
    "pp 2, InterleavedZeroBubble",
    "tp 2 x cp 2",
)
