"""Every layout against one process: initial weights, loss, norm, each gradient, and the weights after some steps."""

from functools import cache

import pytest

from tests.harness.training import Sections, largest_error, merge, run_training

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

LAYOUTS: dict[str, tuple[int, Sections]] = {
    **{f"fsdp{n} stage{stage}": (n, fsdp(n, stage)) for n in (2, 3, 4) for stage in (1, 2, 3)},
    **{f"ddp{n}": (n, ddp(n)) for n in (2, 3, 4)},
    "hsdp2x2": (4, HSDP),
    "fsdp8": (8, fsdp(8)),
    "one process, accumulating": (1, ACCUMULATE),
    "one process, recomputing": (1, RECOMPUTE),
    **{f"fsdp3 stage{stage}, accumulating": (3, merge(fsdp(3, stage), ACCUMULATE)) for stage in (1, 2, 3)},
    "fsdp4, accumulating 2": (4, merge(fsdp(4), {"training": {"local_batch_size": 3}})),
    "ddp3, accumulating": (3, merge(ddp(3), ACCUMULATE)),
    "hsdp2x2 stage1, accumulating": (4, merge(HSDP, {"parallelism": {"zero_stage": 1}}, ACCUMULATE)),
    "hsdp2x2 stage2, accumulating": (4, merge(HSDP, {"parallelism": {"zero_stage": 2}}, ACCUMULATE)),
    "hsdp2x2 stage3, accumulating, recomputing": (4, merge(HSDP, ACCUMULATE, RECOMPUTE)),
    **{f"fsdp2 stage{stage}, recomputing": (2, merge(fsdp(2, stage), RECOMPUTE)) for stage in (1, 2, 3)},
    "ddp2, accumulating, recomputing": (2, merge(ddp(2), ACCUMULATE, RECOMPUTE)),
}


@cache
def one_process(kind: str):
    sections: dict[str, Sections] = {"fp32": {}, "bf16": BF16, "tied": TIED}
    return run_training(sections[kind], 1, steps=STEPS)


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


@pytest.mark.parametrize("sections", [fsdp(2, 1), ddp(2)], ids=str)
def test_gradients_are_accumulated_in_float32(sections):
    """Summed over ranks in bf16, a gradient is rounded once, however many microbatches it comes from.

    Accumulating 12 of them in bf16 doubles the error.
    """

    def error(local_batch_size):
        keys = {"local_batch_size": local_batch_size, "mixed_precision_reduce": "bfloat16"}
        grads = run_training(merge(sections, {"training": keys}), 2)["grads"]
        exact = one_process("fp32")["grads"]
        return max(((grads[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact)

    assert 1e-3 < error(12) < 1e-2, "bf16 was used"
    assert error(1) < 1.05 * error(12)


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
