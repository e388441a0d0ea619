"""What tests/parity leaves out: more ranks than rows, bf16 gradient by gradient, no clipping, the same run twice."""

from functools import cache

import pytest

from tests.harness.training import Sections, merge, run_training
from titanlite.verify.record import largest_error

STEPS = 3
ACCUMULATE = {"training": {"local_batch_size": 2}}
BF16 = {"training": {"mixed_precision_param": "bfloat16"}}
BF16_REDUCE = {"training": {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "bfloat16"}}


def fsdp(n, stage=3):
    return {"parallelism": {"dp_shard": n, "zero_stage": stage}}


def ddp(n):
    return {"parallelism": {"dp_replicate": n}}


HSDP = {"parallelism": {"dp_replicate": 2, "dp_shard": 2}}


@cache
def one_process(kind: str):
    sections: dict[str, Sections] = {"fp32": {}, "bf16": BF16}
    return run_training(sections[kind], 1, steps=STEPS)


def relative(got, expected):
    return max(abs(g - e) / e for g, e in zip(got, expected, strict=True))


def test_more_ranks_than_some_parameters_have_rows():
    """8 ranks: some hold nothing of a norm's weight, in gradients, norm and update."""
    expected, got = one_process("fp32"), run_training(fsdp(8), 8, steps=STEPS)
    assert got["init_hash"] == expected["init_hash"]
    assert relative(got["losses"], expected["losses"]) < 1e-6
    assert relative(got["norms"], expected["norms"]) < 1e-6
    assert largest_error(got["grads"], expected["grads"]) < (1e-6, "")
    assert largest_error(got["parameters"], expected["parameters"]) < (5e-6, "")
    assert got["n_updates"] == STEPS


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
