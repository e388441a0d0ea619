from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.unit.model.helpers import batch, difference, gradients, init_model_, small_config, small_model
from titanlite.model.attention import causal_attention
from titanlite.model.transformer import Block, Transformer

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"qk_norm": True, "n_kv_heads": 4, "head_dim": 24},
]


def test_parameter_names_and_shapes_are_final() -> None:
    config = small_config(n_layers=1, qk_norm=True, head_dim=8)
    shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    assert shapes == {
        "embedding.weight": (384, 64),
        "layers.0.attention_norm.weight": (64,),
        "layers.0.attention.wq.weight": (32, 64),
        "layers.0.attention.wk.weight": (16, 64),
        "layers.0.attention.wv.weight": (16, 64),
        "layers.0.attention.wo.weight": (64, 32),
        "layers.0.attention.q_norm.weight": (8,),
        "layers.0.attention.k_norm.weight": (8,),
        "layers.0.mlp_norm.weight": (64,),
        "layers.0.mlp.gate.weight": (96, 64),
        "layers.0.mlp.up.weight": (96, 64),
        "layers.0.mlp.down.weight": (64, 96),
        "norm.weight": (64,),
        "output.weight": (384, 64),
    }
    tied = Transformer(small_config(tie_word_embeddings=True))
    assert "output.weight" not in tied.state_dict()
    assert all(p.dtype == torch.float32 for p in tied.parameters())
    assert set(tied.state_dict()) == {name for name, _ in tied.named_parameters()}, "buffers are not saved"


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("chunk_tokens", [0, 10, 1024])
def test_loss_is_the_sum_of_the_logits_cross_entropies(changes: dict[str, Any], chunk_tokens: int) -> None:
    config = small_config(**changes)
    model = small_model(config, loss_chunk_tokens=chunk_tokens)
    tokens, labels = batch(config)
    loss, logits = model(tokens, labels), model(tokens)
    assert loss.shape == () and loss.dtype == torch.float32
    assert logits.shape == (3, 24, 257)
    wanted = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert difference(loss, wanted) < 1e-6


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("chunk_tokens", [0, 10])
def test_padding_rows_have_exactly_no_gradient(changes: dict[str, Any], chunk_tokens: int) -> None:
    config = small_config(**changes)
    model = small_model(config, loss_chunk_tokens=chunk_tokens)
    model(*batch(config)).backward()
    got = gradients(model)
    assert set(got) == {name for name, _ in model.named_parameters()}
    for name in ("embedding.weight", "output.weight"):
        if name in got:
            assert got[name][257:].count_nonzero() == 0 and got[name][:257].count_nonzero() > 0


@pytest.mark.parametrize("changes", VARIANTS)
def test_padding_changes_nothing(changes: dict[str, Any]) -> None:
    losses = []
    for multiple in (1, 128, 512):
        config = small_config(vocab_pad_multiple=multiple, **changes)
        model = small_model(config, loss_chunk_tokens=16)
        losses.append(model(*batch(config)).item())
    assert max(losses) / min(losses) - 1 < 1e-6


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("splits", [(0, 1, 3), (0, 0, 2, 3, 3)])
def test_stages_compose_to_the_whole(changes: dict[str, Any], splits: tuple[int, ...]) -> None:
    """Pipeline stages, some of them without layers: the same loss and gradients to the bit."""
    config = small_config(n_layers=3, **changes)
    whole = small_model(config, loss_chunk_tokens=16)
    tokens, labels = batch(config)
    whole_loss = whole(tokens, labels)
    whole_loss.backward()
    last = len(splits) - 2
    stages = [
        Transformer(config, loss_chunk_tokens=16, layers=range(a, b), has_embedding=i == 0, has_head=i == last)
        for i, (a, b) in enumerate(pairwise(splits))
    ]
    names: list[str] = []
    for stage in stages:
        own = dict(stage.named_parameters())
        stage.load_state_dict({name: p for name, p in whole.state_dict().items() if name in own})
        names += own
    h: Tensor = tokens
    for stage in stages[:-1]:
        h = stage(h)
        assert h.shape == (3, 24, 64)
    loss = stages[-1](h, labels)
    loss.backward()
    assert torch.equal(loss, whole_loss)
    wanted = gradients(whole)
    assert set(names) == set(wanted)
    got: dict[str, Tensor] = {}
    for stage in stages:
        for name, gradient in gradients(stage).items():
            got[name] = got[name] + gradient if name in got else gradient
    for name in wanted:
        if config.tie_word_embeddings and name == "embedding.weight":  # two copies, added here
            assert difference(got[name], wanted[name]) < 1e-6
        else:
            assert torch.equal(got[name], wanted[name]), name
    with pytest.raises(ValueError, match="without head"):
        stages[0](tokens, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_checkpointing_is_exact(dtype: torch.dtype) -> None:
    config = small_config(qk_norm=True)
    tokens, labels = batch(config)
    results = []
    for recompute in (False, True):
        model = small_model(config, compute_dtype=dtype, loss_chunk_tokens=16)
        if recompute:
            for block in model.layers.values():
                plain = block.forward
                block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
        loss = model(tokens, labels)
        loss.backward()
        results.append((loss, gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


@pytest.mark.parametrize("changes", VARIANTS)
def test_blocks_compile_without_graph_breaks(changes: dict[str, Any]) -> None:
    """aot_eager runs the traced graphs without a C++ compiler."""
    torch._dynamo.reset()
    config = small_config(**changes)
    tokens, labels = batch(config)
    eager, compiled = small_model(config), small_model(config)
    for block in compiled.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    losses = [eager(tokens, labels), compiled(tokens, labels)]
    for loss in losses:
        loss.backward()
    assert difference(losses[1], losses[0]) < 1e-6
    got = gradients(compiled)
    for name, wanted in gradients(eager).items():
        assert difference(got[name], wanted) < 1e-5, name


def test_meta_construction_then_to_empty_and_buffers() -> None:
    config = small_config()
    wanted = small_model(config)
    with torch.device("meta"):
        model = Transformer(config)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.rope_frequencies.fill_(float("nan"))
    model.init_buffers("cpu")
    model.load_state_dict(wanted.state_dict())
    tokens, labels = batch(config)
    assert torch.equal(model(tokens, labels), wanted(tokens, labels))


def test_positions_default_to_row_order_and_only_distances_matter() -> None:
    config = small_config()
    model = small_model(config)
    tokens, _ = batch(config)
    row_order = torch.arange(24)
    wanted = model(tokens)
    assert torch.equal(model(tokens, positions=row_order), wanted)
    assert torch.equal(model(tokens, positions=row_order.expand(3, 24)), wanted)
    assert difference(model(tokens, positions=row_order + 100), wanted) < 1e-4
    assert difference(model(tokens, positions=row_order * 2), wanted) > 1e-3


def test_shuffled_rows_with_their_positions_give_shuffled_logits() -> None:
    """What context parallelism relies on: with `attend` going by position, the order of the rows does not matter."""
    config = small_config()
    model = small_model(config)
    tokens, _ = batch(config)
    order = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(s)) for s in range(3)])
    wanted = model(tokens).gather(1, order[..., None].expand(-1, -1, 257))

    def attend_by_position(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is None
        mask = order[:, None, :, None] >= order[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    for block in model.layers.values():
        assert isinstance(block, Block)
        assert block.attention.attend is causal_attention
        block.attention.attend = attend_by_position
    got = model(tokens.gather(1, order), positions=order)
    assert difference(got, wanted) < 1e-5


def test_future_tokens_have_no_influence() -> None:
    config = small_config()
    model = small_model(config)
    tokens, _ = batch(config)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 257
    assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])


@pytest.mark.parametrize("changes", VARIANTS)
def test_bf16_is_near_fp32(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    tokens, labels = batch(config)
    exact = small_model(config)
    exact_loss = exact(tokens, labels)
    exact_loss.backward()
    wanted = gradients(exact)
    for bf16_weights in (False, True):  # True: as FSDP's mixed precision gathers them
        model = small_model(config, compute_dtype=torch.bfloat16, loss_chunk_tokens=16)
        if bf16_weights:
            model.to(torch.bfloat16)
            model.init_buffers("cpu")
        loss = model(tokens, labels)
        loss.backward()
        assert loss.dtype == torch.float32
        assert difference(loss, exact_loss) < 1e-2
        assert model(tokens).dtype == torch.bfloat16
        for name, gradient in gradients(model).items():
            assert gradient.dtype == (torch.bfloat16 if bf16_weights else torch.float32)
            cosine = F.cosine_similarity(gradient.double().flatten(), wanted[name].double().flatten(), dim=0)
            assert cosine > 0.99, (name, cosine)


def test_weights_in_fp32_or_bf16_compute_the_same_in_bf16() -> None:
    """FSDP only moves the cast before the all-gather."""
    config = small_config(qk_norm=True)
    tokens, labels = batch(config)
    cast_at_use = small_model(config, compute_dtype=torch.bfloat16, loss_chunk_tokens=16)
    cast_before = small_model(config, compute_dtype=torch.bfloat16, loss_chunk_tokens=16).to(torch.bfloat16)
    cast_before.init_buffers("cpu")
    losses = [model(tokens, labels) for model in (cast_at_use, cast_before)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    early = gradients(cast_before)
    for name, gradient in gradients(cast_at_use).items():
        assert torch.equal(gradient.bfloat16(), early[name]), name


def test_a_step_learns() -> None:
    config = small_config()
    model = Transformer(config, loss_chunk_tokens=16)
    init_model_(model, config, 1)
    tokens, labels = batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(tokens, labels)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_rotary_tables_may_not_be_rounded() -> None:
    config = small_config()
    block = small_model(config).layers["0"]
    tables = [torch.ones(24, 1, 16, dtype=torch.bfloat16)] * 2
    with pytest.raises(AssertionError, match="fp32"):
        block(torch.zeros(1, 24, 64), *tables)
