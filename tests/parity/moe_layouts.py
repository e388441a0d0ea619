"""Layouts of the parity tests for models with experts, each with the sections over BASE under which it is compared.

Two models: one as Mixtral and Qwen3 are (softmax), one as DeepSeek-V3 is (sigmoid scores, biases, a shared expert, a
first dense layer). Balancing losses are far above what one would train with, so that an error in them shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.harness.training import merge
from tests.parity import layouts
from tests.parity.layouts import MASKED, TIED, Layout, Sections

# Few choices of experts, so that in none of them two are equal within rounding.
_BASE: Sections = {
    "model": {"dim": 24, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40},
    "training": {"seq_len": 16, "global_batch_size": 12, "local_batch_size": 12, "loss_chunk_tokens": 50},
}


def _model(seed: int, n_layers: int, **moe: Any) -> Sections:
    experts = {"n_experts": 8, "top_k": 2, "expert_dim": 24, **moe}
    return merge(_BASE, {"run": {"seed": seed}, "model": {"n_layers": n_layers, "moe": experts}})


SOFTMAX = _model(7, 2, aux_loss_coeff=0.1, z_loss_coeff=0.01)
DEEPSEEK = _model(
    6,
    4,  # layers, for schedules with two stages a rank
    score_func="sigmoid",
    bias_update_rate=0.01,
    n_shared_experts=1,
    first_k_dense=1,
    route_scale=1.5,
    aux_loss_coeff=0.05,
)
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _layout(samples: int = 12, **how: Any) -> Layout:
    """samples: of a forward pass or schedule run, at most."""
    return layouts._layout({"local_batch_size": samples}, **how)


# Neither the experts nor the rows of one divide by 3 or 6: shards are of whole experts, uneven, for 6 two are empty.
ODD = merge(SOFTMAX, {"model": {"dim": 20, "head_dim": 6, "moe": {"expert_dim": 32}}})


def _selective(layout: Layout, option: str = "2") -> Layout:
    mode = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": option}}
    return Layout(layout.world_size, merge(layout.sections, mode))


def _with(sections: Sections, many: Mapping[str, Layout]) -> dict[str, tuple[Layout, Sections]]:
    return {name: (layout, sections) for name, layout in many.items()}


MOE_LAYOUTS: dict[str, tuple[Layout, Sections]] = {
    **_with(
        SOFTMAX,
        {
            "softmax: accumulation 2": _layout(6),
            "softmax: accumulation 4": _layout(3),
            "softmax: ddp 2, accumulation 3": _layout(2, dp_replicate=2),
            "softmax: fsdp 3": _layout(dp_shard=3),
            "softmax: tp 2": _layout(tp=2),
            "softmax: ep 2": _layout(dp_shard=2, ep=2),
            "softmax: ep 2 of fsdp 6": _layout(dp_shard=6, ep=2),
            "softmax: ep 2 of fsdp 4, zero 1, accumulation 3": _layout(1, dp_shard=4, ep=2, zero_stage=1),
            "softmax: ep 2 of cp 2": _layout(cp=2, ep=2),
            "softmax: cp 2, accumulation 2": _layout(6, cp=2),
            "softmax: cp 2, accumulation 4": _layout(3, cp=2),
            "softmax: ep 2 of tp 2, accumulation 4": _layout(3, tp=2, ep=2),
            "softmax: pp 2 x cp 2": _layout(pp=2, cp=2),
            "softmax: pp 2 x cp 2, accumulation 2": _layout(6, pp=2, cp=2),
            "softmax: pp 2 x cp 2, accumulation 4": _layout(3, pp=2, cp=2),
            "softmax: ep 8 of fsdp 2 x cp 2 x tp 2": _layout(dp_shard=2, cp=2, tp=2, ep=8),
        },
    ),
    **_with(
        ODD,
        {
            "softmax, odd: fsdp 3, accumulation 2": _layout(2, dp_shard=3),
            "softmax, odd: pp 2 x fsdp 3, zero 3": _layout(4, pp=2, dp_shard=3, zero_stage=3),
            "softmax, odd: fsdp 6, accumulation 2": _layout(1, dp_shard=6),
        },
    ),
    **_with(
        merge(SOFTMAX, TIED),
        {
            "softmax, tied: ep 2 of tp 2": _layout(tp=2, ep=2),
            "softmax, tied: pp 2 x ep 2": _layout(pp=2, dp_shard=2, ep=2),
        },
    ),
    **_with(
        DEEPSEEK,
        {
            "deepseek: accumulation 2, selective recomputation": _selective(_layout(6), "op"),
            "deepseek: pp 2 x ep 2, zero 3, full recomputation": _layout(
                6, pp=2, dp_shard=2, ep=2, zero_stage=3, recompute=True
            ),
            "deepseek: accumulation 2": _layout(6),
            "deepseek: accumulation 4, full recomputation": _layout(3, recompute=True),
            "deepseek: ddp 3, full recomputation": _layout(dp_replicate=3, recompute=True),
            "deepseek: tp 2 x fsdp 2": _layout(tp=2, dp_shard=2),
            "deepseek: ep 4": _layout(dp_shard=4, ep=4),
            "deepseek: ep 2 x replicas 2": _layout(dp_shard=2, dp_replicate=2, ep=2),
            "deepseek: ep 2 of fsdp 4, zero 2, accumulation 3": _layout(1, dp_shard=4, ep=2, zero_stage=2),
            "deepseek: ep 2 of tp 2": _layout(tp=2, ep=2),
            "deepseek: ep 4 of tp 2 x fsdp 2, full recomputation": _layout(tp=2, dp_shard=2, ep=4, recompute=True),
            "deepseek: ep 2 of cp 2 x fsdp 2": _layout(cp=2, dp_shard=2, ep=2),
            **{
                f"deepseek: pp 2 x ep 2, {schedule}": _layout(pp=2, dp_shard=2, ep=2, pp_schedule=schedule)
                for schedule in SCHEDULES
            },
            "deepseek: pp 2 x ep 2 of tp 2, full recomputation": _layout(pp=2, tp=2, ep=2, recompute=True),
            "deepseek: ep 4 of tp 2 x fsdp 2, every second layer recomputed": _selective(
                _layout(tp=2, dp_shard=2, ep=4)
            ),
            "deepseek: pp 2 x ep 2, every second layer recomputed": _selective(_layout(pp=2, dp_shard=2, ep=2)),
            "deepseek: pp 2 x ep 4 of tp 2 x cp 2": _layout(pp=2, tp=2, cp=2, ep=4),
            "deepseek: pp 2 x ep 4 of fsdp 2 x cp 2, ZBVZeroBubble": _layout(
                pp=2, dp_shard=2, cp=2, ep=4, pp_schedule="ZBVZeroBubble"
            ),
            "deepseek: ep 2 of tp 2 x hsdp 2x2": _layout(dp_replicate=2, dp_shard=2, tp=2, ep=2),
            "deepseek: ep 4 of tp 2 x hsdp 2x2, accumulation 3": _layout(1, dp_replicate=2, dp_shard=2, tp=2, ep=4),
        },
    ),
    **_with(
        merge(DEEPSEEK, MASKED),
        {
            "deepseek, masked: ep 2 of cp 2 gathered": _layout(cp=2, cp_method="allgather", ep=2),
            "deepseek, masked: pp 2 x ep 2 of cp 2 gathered": _layout(pp=2, cp=2, cp_method="allgather", ep=2),
        },
    ),
}

ALL_LAYOUTS = layouts.LAYOUTS | MOE_LAYOUTS
