"""On CUDA, in fresh processes: the run of one GPU, and of all of them, against the CPU's."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.distributed.test_pipeline_parallel import DEEP, pipeline, validated
from tests.harness.distributed import run_distributed, run_spawned
from tests.harness.training import build, merge, rank_batches, train_step
from tests.parity.harness import _record, data_section, make_text, run
from tests.parity.layouts import BASE, MASKED, ONE_PROCESS, STEPS, Sections
from tests.unit.model.helpers import difference
from tests.unit.model.test_document_mask import attended, heads, numbers
from tests.unit.model.test_moe import expert_loop, moe_layer
from titanlite.config.schema import RunConfig
from titanlite.model.attention import document_mask
from titanlite.model.moe import grouped_swiglu
from titanlite.parallel import context_parallel
from titanlite.parallel.attention_kernels import AttentionKernel, CpuFlash, CudaEfficient, CudaFlash, kernel_for
from titanlite.verify.record import Record, worst

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("gpu") / "text")


@pytest.fixture(scope="module")
def reference(text: Path) -> Record:
    return run(ONE_PROCESS, text)[0]


def on_cuda(text: Path, world_size: int, more: Sections | None = None, **training: object) -> list[Record]:
    data = {"tokenizer": {"path": str(text / "tokenizer.model")}, "data": data_section(text)}
    sections = merge(BASE, data, {"run": {"device": "cuda"}, "training": training}, more or {})
    return run_spawned(_record, world_size, sections, "", run=RunConfig(device="cuda"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_float32_on_cuda_follows_the_cpu(world_size: int, text: Path, reference: Record) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    records = on_cuda(text, world_size)
    assert len(records[0].losses) == STEPS
    found = worst(records, reference)
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4, found


def test_document_masks_on_cuda_follow_the_cpu(text: Path) -> None:
    found = worst(on_cuda(text, 1, MASKED), run(ONE_PROCESS, text, sections=MASKED)[0])
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4, found


@pytest.mark.parametrize("length", [640, 641])  # SDPA pads a mask whose rows are not a multiple of 16
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_a_fused_cuda_kernel_takes_the_document_mask(length: int, dtype: torch.dtype, tolerance: float) -> None:
    documents = numbers((length,), (600, length - 600))
    tensors = heads(2, length, 6, 2, dtype)
    wanted = attended(tensors, document_mask(documents, dtype))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):  # anything else raises
        got = attended([x.cuda() for x in tensors], document_mask(documents.cuda(), dtype))
    assert max(difference(a.cpu(), b) for a, b in zip(got, wanted, strict=True)) < tolerance


def test_bfloat16_on_cuda_learns(text: Path, reference: Record) -> None:
    record = on_cuda(text, 1, mixed_precision_param="bfloat16")[0]
    assert record.losses[0] == pytest.approx(reference.losses[0], rel=1e-2)
    assert record.losses[-1] == pytest.approx(reference.losses[-1], rel=5e-2)


def half_precision(kernel: type[AttentionKernel]) -> torch.dtype:
    return torch.bfloat16 if kernel is CudaFlash else torch.float32


@pytest.mark.parametrize("kernel", [CudaFlash, CudaEfficient])
@pytest.mark.parametrize("dim", [64, 10])  # 10: padded to 16
@pytest.mark.parametrize(("n_heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("length", "keys"), [(256, 256), (33, 33), (40, 96), (1, 7)])  # as many: causal
def test_kernels_of_ring_attention_are_sdpa(
    kernel: type[AttentionKernel], dim: int, n_heads: int, kv_heads: int, length: int, keys: int
) -> None:
    """NOT RUN YET. Output, lse and gradients of a block against plain mathematics in float64 on the CPU."""
    dtype, causal = half_precision(kernel), length == keys
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, length, n_heads), (2, keys, kv_heads), (2, keys, kv_heads), (2, length, n_heads)]
    q, k, v, grad = (torch.randn((*s, dim), generator=generator).to(dtype).transpose(1, 2) for s in shapes)
    exact = CpuFlash().forward(q.double(), k.double(), v.double(), causal)
    exact_grads = CpuFlash().backward(
        grad.double(), q.double(), k.double(), v.double(), exact[0], exact[1].contiguous(), causal
    )
    q, k, v, grad = (x.cuda() for x in (q, k, v, grad))
    assert isinstance(kernel_for(q), kernel)
    out, lse = kernel_for(q).forward(q, k, v, causal)
    grads = kernel_for(q).backward(grad, q, k, v, out, lse.contiguous(), causal)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for got, wanted in zip((out, lse, *grads), (*exact, *exact_grads), strict=True):
        assert got.shape == wanted.shape and difference(got.cpu().double(), wanted) < tolerance


@pytest.mark.parametrize("kernel", [CudaFlash, CudaEfficient])
def test_blocks_of_ring_attention_merge_on_cuda(kernel: type[AttentionKernel]) -> None:
    """NOT RUN YET. Two halves of the keys, merged; each half's gradient with the merged out and lse."""
    dtype = half_precision(kernel)
    generator = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(2, 128, 4, 64, generator=generator).to("cuda", dtype).transpose(1, 2) for _ in "qkvg")
    ring = kernel_for(q)
    wanted, wanted_lse = ring.forward(q, k, v, False)
    wanted_grads = ring.backward(grad, q, k, v, wanted, wanted_lse.contiguous(), False)
    halves = [(k[:, :, :64], v[:, :, :64]), (k[:, :, 64:], v[:, :, 64:])]
    blocks = [ring.forward(q, *half, False) for half in halves]
    out, lse = blocks[0][0].float(), blocks[0][1].clone()
    context_parallel.merge(out, lse, *blocks[1])
    grads = [ring.backward(grad, q, *half, out.to(dtype), lse, False) for half in halves]
    got = (out, lse, grads[0][0] + grads[1][0], *(torch.cat((grads[0][i], grads[1][i]), dim=2) for i in (1, 2)))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for mine, one in zip(got, (wanted, wanted_lse, *wanted_grads), strict=True):
        assert difference(mine.float(), one.float()) < tolerance


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_context_parallelism_on_cuda_follows_the_cpu(method: str, text: Path, reference: Record) -> None:
    """NOT RUN YET. NCCL's exchanges, the efficient kernel."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    parallelism: Sections = {"parallelism": {"dp_shard": 1, "cp": 2, "cp_method": method}}
    found = worst(on_cuda(text, 2, parallelism), reference)
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4, found


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_a_pipeline_on_cuda_validates_and_trains_as_the_cpu(schedule: str) -> None:
    """NOT RUN YET. Two stages a rank: NCCL's sends and receives of two ranks share a queue."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    sections = merge(pipeline(schedule), {"run": {"device": "cuda"}})
    first, second = run_spawned(validated, 2, sections, run=RunConfig(device="cuda"))
    assert first == second, "ranks disagree"
    assert first == pytest.approx(run_distributed(validated, 1, DEEP)[0], rel=1e-4)


def _step_that_waits_for_nothing(sections: Sections) -> float:
    """Gradient norm of a second step, in which any wait of the host for the device is an error."""
    config, ranks, model, optimizer = build(sections)
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 1), config, 1)
    batches = [{name: rows.pin_memory() for name, rows in batch.items()} for batch in rank_batches(config, ranks, 2)]
    tokens = torch.ones((), device=ranks.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.zero_grad()
        ranks.sum_over_data(model.forward_backward([model.shard(batch) for batch in batches]))
        stats = model.finish_gradients(tokens, config.training.max_norm)
        optimizer.step(1e-3, stats.grad_scale, stats.found_inf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return stats.norm.item()


@pytest.mark.parametrize(
    "parallelism",
    [
        {"dp_shard": 1},
        {"dp_shard": 2},
        {"dp_shard": 1, "tp": 2},
        {"dp_shard": 1, "cp": 2},
        {"dp_shard": 1, "cp": 2, "cp_method": "allgather"},
    ],
)
def test_a_step_waits_for_nothing(parallelism: dict[str, object]) -> None:
    """NOT RUN YET."""
    world_size = 1 if parallelism == {"dp_shard": 1} else 2
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    sections = {"run": {"device": "cuda", "deterministic": False}, "parallelism": parallelism}
    assert all(run_spawned(_step_that_waits_for_nothing, world_size, sections, run=RunConfig(device="cuda")))


# ---- experts


@pytest.mark.parametrize("offs", [[64, 192, 193, 256], [0, 0, 256, 256], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_grouped_matmuls_on_cuda_are_those_of_a_loop(offs: list[int], dtype: torch.dtype, tolerance: float) -> None:
    """NOT RUN YET. Experts without rows, and no rows at all, too."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(4, 24, 32), (4, 24, 32), (4, 32, 24)]
    data = [torch.randn(shape, generator=generator) for shape in [*shapes, (offs[-1], 32), (offs[-1], 32)]]
    results = []
    for device, function in (
        ("cuda", lambda x, weights: grouped_swiglu(x, torch.tensor(offs, dtype=torch.int32, device="cuda"), *weights)),
        ("cpu", lambda x, weights: expert_loop(x, offs, weights)),
    ):
        *weights, rows, slope = (tensor.to(device) for tensor in data)
        leaves = [tensor.requires_grad_() for tensor in (*weights, rows.to(dtype).detach())]
        out = function(leaves[-1], tuple(leaves[:-1]))
        (out * slope.to(dtype)).sum().backward()
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
    assert [len(result) for result in results] == [5, 5], "experts without rows have a gradient, of zero"
    for got, wanted in zip(*results, strict=True):
        if wanted.numel() and wanted.abs().max():
            assert difference(got, wanted) < tolerance
        else:
            assert not got.any()


def test_counts_of_experts_are_deterministic_on_cuda() -> None:
    """NOT RUN YET. scatter_add_ of integers, index_put and their like raise where torch has no deterministic kernel."""
    x = torch.randn(4, 128, 32, generator=torch.Generator().manual_seed(1)).cuda()
    layers = [moe_layer(aux_loss_coeff=0.1, z_loss_coeff=0.1).cuda() for _ in range(2)]
    torch.use_deterministic_algorithms(True)
    try:
        outs = [layer(x) for layer in layers]
        for out in outs:
            out.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*outs) and torch.equal(layers[0].load, layers[1].load)
    pairs = zip(layers[0].parameters(), layers[1].parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def _waits_of_a_step(sections: Sections) -> int:
    """How often the host waits for the device in the forward and backward passes of a second step."""
    config, ranks, model, optimizer = build(sections)
    train_step(model, optimizer, ranks, rank_batches(config, ranks, 1), config, 1)
    batches = [{name: rows.pin_memory() for name, rows in batch.items()} for batch in rank_batches(config, ranks, 2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.forward_backward([model.shard(batch) for batch in batches])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_wait_once_a_layer_and_only_for_other_ranks(ep: int) -> None:
    """NOT RUN YET. In bfloat16: of float32, grouped matmuls are a loop over counts that the host must know."""
    if torch.cuda.device_count() < ep:
        pytest.skip(f"needs {ep} GPUs")
    sections = {
        "run": {"device": "cuda", "deterministic": False},
        "model": {"dim": 32, "moe": {"n_experts": 4, "top_k": 2, "expert_dim": 32}},
        "training": {"mixed_precision_param": "bfloat16"},
        "parallelism": {"dp_shard": ep, "ep": ep},
    }
    found = run_spawned(_waits_of_a_step, ep, sections, run=RunConfig(device="cuda"))
    assert found == [0 if ep == 1 else 2] * ep, "two layers"
