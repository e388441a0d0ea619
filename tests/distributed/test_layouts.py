"""Every layout against one process: initial weights, loss, norm, each gradient, and the weights after some steps."""

from functools import cache

import pytest

from tests.harness.training import largest_error, merge, run_training

STEPS = 3
ACCUMULATE = {"training": {"local_batch_size": 2}}
RECOMPUTE = {"activation_checkpoint": {"mode": "full"}}
BF16 = {"training": {"mixed_precision_param": "bfloat16"}}
BF16_REDUCE = {"training": {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "bfloat16"}}
TIED = {"model": {"tie_word_embeddings": True}}


def fsdp(n, stage=3):
    return {"parallelism": {"dp_shard": n, "zero_stage": stage}}


def ddp(n):
    return {"parallelism": {"dp_replicate": n}}


HSDP = {"parallelism": {"dp_replicate": 2, "dp_shard": 2}}

LAYOUTS = {
    **{f"fsdp{n} stage{stage}": (n, fsdp(n, stage)) for n in (2, 3, 4) for stage in (1, 2, 3)},
    **{f"ddp{n}": (n, ddp(n)) for n in (2, 3, 4)},
    "hsdp2x2": (4, HSDP),
    "fsdp8": (8, fsdp(8)),
    "one process, accumulating": (1, ACCUMULATE),
    "one process, recomputing": (1, RECOMPUTE),
    **{f"fsdp3 stage{stage}, accumulating": (3, merge(fsdp(3, stage), ACCUMULATE)) for stage in (1, 2, 3)},
    "fsdp4, accumulating 2": (4, merge(fsdp(4), {"training": {"local_batch_size": 3}})),
    "ddp3, accumulating": (3, merge(ddp(3), ACCUMULATE)),
    **{f"hsdp2x2 stage{s}, accumulating": (4, merge(HSDP, {"parallelism": {"zero_stage": s}}, ACCUMULATE)) for s in (1, 2)},
    "hsdp2x2 stage3, accumulating, recomputing": (4, merge(HSDP, ACCUMULATE, RECOMPUTE)),
    **{f"fsdp2 stage{stage}, recomputing": (2, merge(fsdp(2, stage), RECOMPUTE)) for stage in (1, 2, 3)},
    "ddp2, accumulating, recomputing": (2, merge(ddp(2), ACCUMULATE, RECOMPUTE)),
}


@cache
def one_process(kind: str):
    return run_training({"fp32": {}, "bf16": BF16, "tied": TIED}[kind], 1, steps=STEPS)


def relative(got, expected):
    return max(abs(g - e) / e for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32(layout):
    world_size, sections = LAYOUTS[layout]
    expected, got = one_process("fp32"), run_training(sections, world_size, steps=STEPS)
    assert got["init_hash"] == expected["init_hash"]
    assert relative(got["losses"], expected["losses"]) < 1e-6
    assert relative(got["norms"], expected["norms"]) < 1e-6
    assert largest_error(got["grads"], expected["grads"]) < (1e-6, "")
    assert largest_error(got["parameters"], expected["parameters"]) < (5e-6, "")
    assert got["n_updates"] == STEPS


@pytest.mark.parametrize("world_size, sections", [(2, fsdp(2)), (3, fsdp(3, 1)), (2, ddp(2))], ids=str)
def test_tied_embeddings(world_size, sections):
    expected, got = one_process("tied"), run_training(merge(TIED, sections), world_size, steps=STEPS)
    assert "output.weight" not in got["grads"]
    assert got["init_hash"] == expected["init_hash"]
    assert relative(got["losses"], expected["losses"]) < 1e-6
    assert largest_error(got["grads"], expected["grads"]) < (1e-6, "")


# One-process bf16 with another microbatch size, so only another order of rounding, is off by 5e-3 in gradients.
@pytest.mark.parametrize("reduce", [BF16, BF16_REDUCE], ids=["sum in fp32", "sum in bf16"])
@pytest.mark.parametrize(
    "world_size, sections",
    [
        (1, ACCUMULATE),
        (2, ddp(2)),
        (4, merge(ddp(4), ACCUMULATE)),
        *[(3, merge(fsdp(3, stage), ACCUMULATE)) for stage in (1, 2, 3)],
        (4, merge(HSDP, ACCUMULATE)),
    ],
    ids=str,
)
def test_bf16(world_size, sections, reduce):
    expected, got = one_process("bf16"), run_training(merge(sections, reduce), world_size, steps=STEPS)
    assert got["init_hash"] == one_process("fp32")["init_hash"], "weights at rest are float32"
    assert relative(got["losses"][:1], expected["losses"][:1]) < 1e-3
    assert relative(got["norms"][:1], expected["norms"][:1]) < 5e-3
    assert largest_error(got["grads"], expected["grads"]) < (1.5e-2, "")


@pytest.mark.parametrize("world_size, sections", [(3, fsdp(3, 1)), (2, ddp(2))], ids=str)
def test_gradients_are_accumulated_in_float32(world_size, sections):
    """Many microbatches, summed over ranks in bf16: only the last sum may round, not each addition.

    Accumulated in bf16 the error grows with their number; the eight additions here then cost about 1e-2.
    """
    precise = merge(sections, {"training": {"local_batch_size": 1, "mixed_precision_reduce": "bfloat16"}})
    expected, got = one_process("fp32"), run_training(precise, world_size)
    assert largest_error(got["grads"], expected["grads"]) < (6e-3, "")


def test_max_norm_0_is_no_clipping():
    expected, got = one_process("fp32"), run_training({"training": {"max_norm": 0.0}}, 1, steps=STEPS)
    assert expected["norms"][0] > 1.0, "the default clips here"
    assert got["norms"][0] == expected["norms"][0]
    assert largest_error(got["grads"], expected["grads"]) < (1e-6, "")
    assert largest_error(got["parameters"], expected["parameters"]) > (1e-5, "")


@pytest.mark.parametrize("world_size, sections", [(1, {}), (3, fsdp(3, 2)), (3, ddp(3))], ids=str)
def test_a_run_repeats_bitwise(world_size, sections):
    first, second = (run_training(merge(sections, ACCUMULATE), world_size, steps=STEPS) for _ in range(2))
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"]
    for name, parameter in first["parameters"].items():
        assert parameter.equal(second["parameters"][name]), name
