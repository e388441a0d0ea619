"""Experts against plain loops: routing, the way to the experts and back, balancing terms, counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.model.helpers import batch, difference, gradients, small_config, small_model
from titanlite.config.schema import ActivationCheckpointConfig, ModelConfig, MoEConfig
from titanlite.model.init import init_std
from titanlite.model.moe import (
    LocalDispatcher,
    MoE,
    Router,
    add_objective,
    from_rows,
    grouped_swiglu,
    sort_by_expert,
    to_rows,
    uncounted,
)
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint

DTYPES = [torch.float32, torch.bfloat16]


def moe_config(moe: dict[str, Any], **changes: Any) -> ModelConfig:
    return small_config(
        moe=MoEConfig(**{"n_experts": 6, "top_k": 2, "expert_dim": 24, **moe}), **{"dim": 32, **changes}
    )


def moe_layer(**moe: Any) -> MoE:
    config = moe_config(moe)
    layer = MoE(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.randn(config.moe.n_experts, generator=generator) * 0.2)
    return layer


def hidden(samples: int = 3, seq_len: int = 7, dim: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(samples, seq_len, dim, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def loop(layer: MoE, x: Tensor, moe: MoEConfig) -> Tensor:
    """The layer by its definition: one token and one expert after the other."""
    outputs = []
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token
        scores = logits.sigmoid() if moe.score_func == "sigmoid" else logits.softmax(0)
        wanted = scores if layer.router.expert_bias is None else scores + layer.router.expert_bias
        chosen = sorted(range(moe.n_experts), key=lambda e: (-wanted[e].item(), e))[: moe.top_k]
        total = sum(scores[e] for e in chosen) if moe.route_norm else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            inner = F.silu(layer.experts.gate[e] @ token) * (layer.experts.up[e] @ token)
            out = out + scores[e] / total * moe.route_scale * (layer.experts.down[e] @ inner)
        if layer.shared is not None:
            shared = layer.shared
            out = out + shared.down.weight @ (F.silu(shared.gate.weight @ token) * (shared.up.weight @ token))
        outputs.append(out)
    return torch.stack(outputs).view(x.shape)


LAYERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, as scored": {"route_norm": False, "top_k": 1},
    "softmax, biased": {"bias_update_rate": 0.1, "top_k": 3},
    "sigmoid": {"score_func": "sigmoid", "n_experts": 12, "top_k": 4},
    "sigmoid, biased": {"score_func": "sigmoid", "bias_update_rate": 0.1, "route_scale": 2.5},
    "sigmoid, as scored": {"score_func": "sigmoid", "bias_update_rate": 0.1, "route_norm": False, "top_k": 1},
    "shared": {"n_shared_experts": 2},
    "all experts": {"top_k": 6},
    "one expert": {"n_experts": 1, "top_k": 1},
}


@pytest.mark.parametrize("case", list(LAYERS))
def test_a_layer_is_its_definition(case: str) -> None:
    layer, moe = moe_layer(**LAYERS[case]), moe_config(LAYERS[case]).moe
    x, x_reference = hidden(), hidden()
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    out = layer(x)
    (out * slope).sum().backward()
    found = gradients(layer)
    layer.zero_grad()
    wanted = loop(layer, x_reference, moe)
    (wanted * slope).sum().backward()
    assert difference(out, wanted) < 1e-5
    assert x.grad is not None and x_reference.grad is not None and difference(x.grad, x_reference.grad) < 1e-5
    reference = gradients(layer)
    assert found.keys() == reference.keys()
    for name, gradient in found.items():
        largest = reference[name].abs().max().item()
        if name == "router.weight" and case == "one expert":
            assert gradient.abs().max() < 1e-5 and largest < 1e-5
        else:
            assert largest > 0 and difference(gradient, reference[name]) < 1e-5, name


# ---- router


def test_deepseek_router_is_that_of_transformers() -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    settings = deepseek.DeepseekV3Config(
        hidden_size=32, n_routed_experts=12, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=2.5
    )
    moe = MoEConfig(n_experts=12, top_k=4, expert_dim=8, score_func="sigmoid", bias_update_rate=1e-3, route_scale=2.5)
    ours, theirs = Router(32, moe), deepseek.DeepseekV3TopkRouter(settings)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 32, generator=generator)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(12, 32, generator=generator))
        theirs.weight.copy_(ours.weight)
        assert ours.expert_bias is not None
        ours.expert_bias.copy_(torch.randn(12, generator=generator))
        theirs.e_score_correction_bias.copy_(ours.expert_bias)
        routing = ours(x)
        _, weights, experts = theirs(x)
    order = experts.argsort(dim=1)
    own = routing.experts.argsort(dim=1)
    assert torch.equal(routing.experts.gather(1, own), experts.gather(1, order))
    assert difference(routing.weights.gather(1, own), weights.gather(1, order)) < 1e-6
    assert torch.allclose(routing.scores.sum(dim=1), torch.ones(50))
    assert not torch.equal(routing.experts, ours(x)._replace().scores.topk(4).indices), "the bias decides"


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    router = Router(8, MoEConfig(n_experts=40, top_k=5, expert_dim=8))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[17, 0] = 1.0
    x = torch.zeros(3, 8)
    x[1, 0], x[2, 0] = 1.0, -1.0
    assert router(x).experts.tolist() == [[0, 1, 2, 3, 4], [17, 0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_router_is_fp32_whatever_the_activations_are() -> None:
    """Two experts that bf16 logits could not tell apart."""
    router = Router(256, MoEConfig(n_experts=2, top_k=1, expert_dim=8))
    with torch.no_grad():
        router.weight.fill_(1.0)
        router.weight[1, 0] = 1.0078125  # the next bf16 number
    routing = router(torch.ones(1, 256, dtype=torch.bfloat16))
    assert routing.experts.item() == 1
    assert {tensor.dtype for tensor in (routing.weights, routing.scores, routing.logits)} == {torch.float32}
    assert routing.logits.tolist() == [[256.0, 256.0078125]]


def test_bias_chooses_but_does_not_weigh_and_has_no_gradient() -> None:
    router = Router(8, MoEConfig(n_experts=4, top_k=2, expert_dim=8, bias_update_rate=0.1, route_norm=False))
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 8))
        assert router.expert_bias is not None
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 5.0, 6.0]))
    routing = router(torch.zeros(1, 8))
    assert routing.experts.tolist() == [[3, 2]] and routing.weights.tolist() == [[0.25, 0.25]]
    assert "expert_bias" in router.state_dict() and "expert_bias" not in dict(router.named_parameters())
    assert Router(8, MoEConfig(n_experts=4, top_k=2, expert_dim=8)).expert_bias is None


# ---- grouped experts


def expert_loop(rows: Tensor, ends: list[int], weights: tuple[Tensor, ...]) -> Tensor:
    parts, start = [], 0
    for e, end in enumerate(ends):
        x = rows[start:end]
        gate, up, down = (weight[e].to(rows.dtype) for weight in weights)
        parts.append((F.silu(x @ gate.t()) * (x @ up.t())) @ down.t())
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "ends", [[2, 5, 9, 11], [0, 0, 11, 11], [11, 11, 11, 11], [0, 0, 0, 11], [3, 3, 7, 11], [0, 0, 0, 0]], ids=str
)
def test_grouped_matmuls_are_those_of_a_loop(ends: list[int], dtype: torch.dtype) -> None:
    """Experts without tokens, and all tokens at one expert, too."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(4, 24, 32), (4, 24, 32), (4, 32, 24)]
    weights = tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    data = torch.randn(ends[-1], 32, generator=generator).to(dtype)
    slope = torch.randn(ends[-1], 32, generator=generator).to(dtype)
    results = []
    for function in (
        lambda rows: grouped_swiglu(rows, torch.tensor(ends, dtype=torch.int32), *weights),
        lambda rows: expert_loop(rows, ends, weights),
    ):
        rows = data.clone().requires_grad_()
        out = function(rows)
        assert out.dtype == dtype and out.shape == rows.shape
        (out * slope).sum().backward()
        results.append([out.detach(), rows.grad, *(weight.grad for weight in weights)])
        for weight in weights:
            weight.grad = None
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, wanted in zip(*results, strict=True):
        assert got is not None and wanted is not None, "an expert without tokens has a gradient, of zero"
        if wanted.abs().max() if wanted.numel() else 0:
            assert difference(got, wanted) < tolerance
        else:
            assert not got.any()


# ---- to rows and back


def test_rows_are_sorted_by_expert_and_token() -> None:
    experts = torch.tensor([[2, 0], [2, 5], [0, 2]])
    tokens, places, ends = sort_by_expert(experts, 6)
    assert tokens.tolist() == [0, 2, 0, 1, 2, 1]
    assert ends.tolist() == [2, 2, 5, 5, 5, 6] and ends.dtype == torch.int32
    assert places.tolist() == [[2, 0], [3, 5], [1, 4]]


def test_gradients_to_rows_and_back() -> None:
    generator = torch.Generator().manual_seed(5)
    experts = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(5)])
    tokens, places, _ = sort_by_expert(experts, 4)
    x = torch.randn(5, 2, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.randn(15, 2, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(5, 3, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: to_rows(x, tokens, places), (x,))
    assert torch.autograd.gradcheck(lambda rows, weights: from_rows(rows, weights, places), (rows, weights))
    assert torch.equal(from_rows(to_rows(x, tokens, places), weights, places), from_rows(x[tokens], weights, places))
    wanted = (weights.sum(dim=1, keepdim=True) * x).detach()
    assert difference(from_rows(x[tokens], weights, places), wanted) < 1e-12


def test_slots_are_summed_in_fp32() -> None:
    """1 + 256 small terms that bf16 would each round away."""
    rows = torch.full((257, 8), 2.0**-9, dtype=torch.bfloat16)
    rows[0] = 1.0
    places, weights = torch.arange(257)[None], torch.ones(1, 257)
    assert from_rows(rows, weights, places).tolist() == [[1.5] * 8]
    x = torch.zeros(1, 8, dtype=torch.bfloat16, requires_grad=True)
    to_rows(x, torch.zeros(257, dtype=torch.int64), places).backward(rows)
    assert x.grad is not None and x.grad.tolist() == [[1.5] * 8]


def test_local_dispatcher_drops_nothing_when_all_tokens_want_one_expert() -> None:
    dispatcher, x = LocalDispatcher(4), hidden(1, 9)[0]
    rows, sent = dispatcher.dispatch(x, torch.full((9, 1), 2))
    assert sent.ends.tolist() == [0, 0, 9, 9]
    assert torch.equal(dispatcher.combine(rows, torch.ones(9, 1), sent), x)


# ---- balancing terms


def objective(layer: MoE, x: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """aux and z by their formulas, sequence by sequence."""
    aux, z = torch.zeros(()), torch.zeros(())
    for sequence in x:
        logits = sequence @ layer.router.weight.t()
        gates = logits.sigmoid() if moe.score_func == "sigmoid" else logits.softmax(1)
        scores = gates / gates.sum(1, keepdim=True)
        wanted = gates if layer.router.expert_bias is None else gates + layer.router.expert_bias
        chosen = F.one_hot(wanted.topk(moe.top_k).indices, moe.n_experts).sum(1)  # [S, E]
        fraction = moe.n_experts / (moe.top_k * len(sequence)) * chosen.sum(0)
        aux = aux + moe.aux_loss_coeff * (fraction * scores.mean(0)).sum() * len(sequence)
        z = z + moe.z_loss_coeff * (logits.exp().sum(1).log() ** 2).sum()
    return aux, z


TERMS: list[dict[str, Any]] = [
    {"aux_loss_coeff": 0.3},
    {"z_loss_coeff": 0.2},
    {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2, "score_func": "sigmoid", "bias_update_rate": 0.1, "top_k": 3},
]


@pytest.mark.parametrize("terms", TERMS)
def test_terms_add_the_gradient_of_their_formulas(terms: dict[str, Any]) -> None:
    layer, moe = moe_layer(**terms), moe_config(terms).moe
    plain = moe_layer(**{key: 0.0 if key.endswith("loss_coeff") else value for key, value in terms.items()})
    slope = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(6))
    x, x_plain = hidden(), hidden()
    out, out_plain = layer(x), plain(x_plain)
    assert torch.equal(out, out_plain), "the layer's output is not touched"
    (out * slope).sum().backward()
    aux, z = objective(plain, x_plain, moe)
    ((out_plain * slope).sum() + aux + z).backward()
    assert x.grad is not None and x_plain.grad is not None and difference(x.grad, x_plain.grad) < 1e-5
    found, wanted = gradients(layer), gradients(plain)
    assert all(difference(found[name], wanted[name]) < 1e-5 for name in wanted)
    assert layer.sums[2].item() == pytest.approx(aux.item(), rel=1e-5)
    assert layer.sums[3].item() == pytest.approx(z.item(), rel=1e-5)
    assert aux.item() + z.item() > 1.0


def test_added_objective_is_an_identity_that_adds_its_gradient_each_time() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    other = torch.randn(3, dtype=torch.float64, requires_grad=True)
    out = add_objective(x, other.square().sum())
    assert torch.equal(out, x)
    for times in (1, 2):  # a schedule may run it twice
        out.backward(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), retain_graph=True)
        assert x.grad is not None and x.grad.tolist() == [times * 1.0, times * 2.0, times * 3.0]
        assert other.grad is not None and torch.equal(other.grad, times * 2 * other.detach())
    # The same as adding it to a loss: finite differences of loss + objective.
    slope = torch.randn(3, dtype=torch.float64)
    gradient = torch.autograd.grad((add_objective(x * other, other.square().sum()) * slope).sum(), other)[0]
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-6
        values = [((x * o * slope).sum() + o.square().sum()).item() for o in (other + step, other - step)]
        assert gradient[i].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


def test_aux_is_one_per_token_at_balance() -> None:
    layer = moe_layer(aux_loss_coeff=1.0, top_k=6)  # every expert has each token
    layer(hidden())
    assert layer.sums[2].item() == pytest.approx(21.0, rel=1e-6)


def test_a_sequence_in_parts_gives_the_same_gradients() -> None:
    """As under context parallelism: only counts are shared, each part adds its own tokens' terms."""
    terms = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
    whole, parts = moe_layer(**terms), moe_layer(**terms)
    x = hidden(3, 8)
    whole(x).sum().backward()
    counts = []
    for part in x.detach().split([3, 5], dim=1):
        layer = moe_layer(**terms)
        layer.sum_over_sequence = lambda count: counts.append(count) or count  # type: ignore[func-returns-value]
        layer(part)
    parts.sum_over_sequence = lambda count: counts[0] + counts[1]
    for part in x.detach().split([3, 5], dim=1):
        parts(part).sum().backward()
    found, wanted = gradients(parts), gradients(whole)
    assert all(difference(found[name], wanted[name]) < 1e-5 for name in wanted)
    assert torch.equal(parts.load, whole.load) and torch.allclose(parts.sums, whole.sums, rtol=1e-6)


# ---- counts


def test_counts() -> None:
    layer = moe_layer()
    x = hidden()
    routing = layer.router(x.flatten(0, 1))
    layer(x)
    layer(x)
    assert layer.load.dtype == torch.int64 and layer.load.sum() == 2 * 21 * 2
    assert layer.load.tolist() == [2 * int((routing.experts == e).sum()) for e in range(6)]
    entropy = -(routing.scores * routing.scores.log()).sum()
    assert layer.sums[:2].tolist() == pytest.approx([42.0, 2 * entropy.item()], rel=1e-5)
    before = layer.load.clone(), layer.sums.clone()
    with torch.no_grad():
        layer(x)
    with uncounted():
        layer(x)
    assert torch.equal(layer.load, before[0]) and torch.equal(layer.sums, before[1])
    assert not {"load", "sums"} & layer.state_dict().keys()
    layer.init_buffers()
    assert not layer.load.any() and not layer.sums.any()


def test_a_failed_recomputation_leaves_counting_on() -> None:
    with pytest.raises(KeyError), uncounted():
        raise KeyError
    layer = moe_layer()
    layer(hidden())
    assert layer.load.sum() == 42


# ---- in the model


def test_names_shapes_and_initial_weights() -> None:
    config = moe_config({"n_shared_experts": 2, "first_k_dense": 1, "bias_update_rate": 0.1}, n_layers=3, init_std=0.02)
    model = small_model(config)
    shapes = {
        name.removeprefix("layers.1.mlp."): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith("layers.1.mlp.")
    }
    assert shapes == {
        "router.weight": (6, 32),
        "router.expert_bias": (6,),
        "experts.gate": (6, 24, 32),
        "experts.up": (6, 24, 32),
        "experts.down": (6, 32, 24),
        "shared.gate.weight": (48, 32),
        "shared.up.weight": (48, 32),
        "shared.down.weight": (32, 48),
    }
    dense = [name for name in model.state_dict() if name.startswith("layers.0.mlp.")]
    assert dense == [f"layers.0.mlp.{name}.weight" for name in ("gate", "up", "down")]
    residual = 0.02 / math.sqrt(6)
    for leaf, wanted in (("router.weight", 0.02), ("experts.gate", 0.02), ("experts.up", 0.02)):
        assert init_std(config, f"layers.1.mlp.{leaf}") == wanted
    for leaf in ("experts.down", "shared.down.weight"):
        assert init_std(config, f"layers.1.mlp.{leaf}") == residual
        assert abs(model.get_parameter(f"layers.1.mlp.{leaf}").std().item() / residual - 0.9866) < 0.03
    for name in ("layers.1.mlp.experts.bias", "layers.1.mlp.experts.gate.weight.x", "layers.1.mlp.router.down"):
        with pytest.raises(ValueError, match="no rule to initialise"):
            init_std(config, name)
    assert not model.get_buffer("layers.1.mlp.router.expert_bias").any()


def test_recomputation_changes_neither_gradients_nor_counts() -> None:
    config = moe_config({"aux_loss_coeff": 0.1, "z_loss_coeff": 0.1, "n_shared_experts": 1})
    plain, forgetful = small_model(config), small_model(config)
    apply_activation_checkpoint(forgetful.layers, ActivationCheckpointConfig(mode="full"))
    tokens, labels = batch(config)
    for model in (plain, forgetful):
        model(tokens, labels).backward()
    wanted, found = gradients(plain), gradients(forgetful)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name in ("load", "sums"):
        assert torch.equal(forgetful.get_buffer(f"layers.1.mlp.{name}"), plain.get_buffer(f"layers.1.mlp.{name}"))
    assert plain.get_buffer("layers.1.mlp.load").sum() == tokens.numel() * 2


def test_model_in_bf16() -> None:
    config = moe_config({"n_shared_experts": 1, "aux_loss_coeff": 0.01}, init_std=0.05)
    tokens, labels = batch(config)
    wide, narrow = small_model(config), small_model(config, compute_dtype=torch.bfloat16)
    losses = []
    for model in (wide, narrow):
        loss = model(tokens, labels)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    wanted, found = gradients(wide), gradients(narrow)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    for name, gradient in found.items():
        assert torch.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0) > 0.95, name
