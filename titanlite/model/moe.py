"""Mixture of experts on plain local tensors: router, grouped experts, balancing terms, counts. It knows nothing of
meshes; parallelism uses its seams: `MoE.dispatcher`, `MoE.sum_over_sequence`, `Router.route` and `Experts.forward`.

Every token goes through its top_k experts, whatever they have to do already: no capacity, nothing dropped, no padding.
A row is one token on its way through one expert; the rows of an expert lie together, so that all experts are three
grouped matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import ModelConfig, MoEConfig
from titanlite.model.layers import MLP

# Per thread, as autograd recomputes in threads of its own.
_counting: ContextVar[bool] = ContextVar("counting", default=True)


@contextmanager
def uncounted() -> Iterator[None]:
    """Within it no MoE counts its tokens: they were counted when the same forward pass ran first."""
    token = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(token)


# ---- router


class Routing(NamedTuple):
    """Where T tokens go, and how sure the router is.

    weights: [T, k] fp32, what each expert's output is multiplied with
    experts: [T, k] int64, by falling score (plus bias)
    scores:  [T, E] fp32, summing to 1 over the experts
    logits:  [T, E] fp32
    """

    weights: Tensor
    experts: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """Chooses top_k of n_experts for each token.

    Scores are the softmax of the logits over all experts (Shazeer et al. 2017; Mixtral, Qwen3-MoE), or the sigmoid of
    each (DeepSeek-V3, section 2.1.2). Chosen are the highest scores + expert_bias; of equal ones the lower index. The
    weights are the chosen scores without the bias, scaled to sum 1 if route_norm, times route_scale.

    The weight is rounded to the dtype of x as everywhere, since FSDP gathers it so; all else is fp32. On CUDA the
    product and its gradients may be TF32, as all of fp32 there, if run.deterministic is off: it rounds factors to 11
    bits, so that of bf16 x and weight, which have 8, logits are what fp32 would make them.
    """

    expert_bias: Tensor | None

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.sigmoid = config.score_func == "sigmoid"
        self.route_norm = config.route_norm
        self.route_scale = config.route_scale
        self.weight = nn.Parameter(torch.empty(config.n_experts, dim))
        biased = config.bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(config.n_experts) if biased else None)

    def forward(self, x: Tensor) -> Routing:
        """x: [T, dim], any floating dtype."""
        return self.route(x, self.weight)

    def route(self, x: Tensor, weight: Tensor) -> Routing:
        """forward with another tensor for the weight, [E, dim]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), weight.to(x.dtype).to(wide))
        gates = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        wanted = gates.detach() if self.expert_bias is None else gates.detach() + self.expert_bias
        # topk says nothing about the order of equal elements; a stable sort keeps that of their indices everywhere.
        experts = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k].contiguous()
        weights = gates.gather(1, experts)
        if self.route_norm:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.route_scale != 1.0:
            weights = weights * self.route_scale
        scores = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20) if self.sigmoid else gates
        return Routing(weights, experts, scores, logits)


# ---- experts


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up, which keeps the two factors and makes silu(gate) again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])


def grouped_swiglu(rows: Tensor, offs: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down_e(silu(gate_e(x)) * up_e(x)) of each row x by the expert e whose row it is.

    rows: [R, dim], sorted by expert. offs: int32 [E], the end of each expert's rows; those of none end where they
    begin, and its gradients are zero. gate, up: [E, expert_dim, dim]; down: [E, dim, expert_dim]; cast to rows' dtype,
    bf16 or fp32. Sizes of rows in memory must be multiples of 16 bytes. Rows past offs[-1] are undefined.

    For backward are kept, besides the cast weights: rows, three of [R, expert_dim].
    """
    gate, up, down = (weight.to(rows.dtype).transpose(1, 2) for weight in (gate, up, down))
    inner = _SiluMul.apply(F.grouped_mm(rows, gate, offs=offs), F.grouped_mm(rows, up, offs=offs))
    return F.grouped_mm(inner, down, offs=offs)


class Experts(nn.Module):
    """The weights of all experts, stacked: gate and up [E, expert_dim, dim], down [E, dim, expert_dim], fp32 at rest.

    Parallelism may replace forward by one that calls grouped_swiglu with its part of them.
    """

    def __init__(self, n_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.up = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.down = nn.Parameter(torch.empty(n_experts, dim, expert_dim))

    def forward(self, rows: Tensor, offs: Tensor) -> Tensor:
        """rows [R, dim], bf16 or fp32, sorted by expert; offs int32 [E], their ends: [R, dim], as grouped_swiglu."""
        return grouped_swiglu(rows, offs, self.gate, self.up, self.down)


# ---- tokens to rows and back


def sort_by_expert(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """For experts [T, k]: the rows of each expert together, in the order of the tokens.

    experts: int64, each in range(n_experts). Returns (tokens [T k] int64, the token of each row; inverse [T, k] int64,
    the row of each token's slot; offs int32 [n_experts], the end of each expert's rows). Nothing waits for the device.
    """
    flat = experts.flatten()
    by_expert, order = flat.sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    boundaries = torch.arange(n_experts, device=flat.device)
    offs = torch.searchsorted(by_expert, boundaries, right=True, out_int32=True)
    return order // experts.shape[1], inverse.view(experts.shape), offs


def _sum_slots(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over slots, one after the other, in fp32, of each token's rows (times its weights): [T, dim]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(inverse.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for slot in range(inverse.shape[1]):
        part = rows[inverse[:, slot]]
        if weights is None:
            total.add_(part)
        else:
            total.addcmul_(part.to(wide), weights[:, slot, None])
    return total


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sum_slots(grads[0], inverse, None).to(grads[0].dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, inverse)
        return _sum_slots(rows, inverse, weights).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, inverse = ctx.saved_tensors
        grad = grads[0].to(weights.dtype)
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for slot in range(inverse.shape[1]):
            row = inverse[:, slot]
            grad_rows[row] = (grad * weights[:, slot, None]).to(rows.dtype)
            grad_weights[:, slot] = (grad * rows[row]).sum(dim=-1)
        return grad_rows, grad_weights, None


def permute(x: Tensor, tokens: Tensor, inverse: Tensor) -> Tensor:
    """x [T, dim] -> rows [T k, dim], with tokens and inverse from sort_by_expert. The gradient of a token is the sum
    over its slots in their order, in fp32. Keeps inverse.
    """
    rows: Tensor = _Permute.apply(x, tokens, inverse)
    return rows


def unpermute(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """rows [T k, dim], weights fp32 [T, k] -> [T, dim]: each token's weighted sum over its slots in their order, in
    fp32, then in rows' dtype. Keeps its arguments.
    """
    out: Tensor = _Unpermute.apply(rows, weights, inverse)
    return out


class Dispatcher(Protocol):
    """Brings tokens to their experts and back. `state` is the dispatcher's own, but for `offs`."""

    def dispatch(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Any]:
        """x [T, dim], experts int64 [T, k] -> (rows [R, dim] in x's dtype, sorted by the experts here; state).

        state.offs: int32, the end of each local expert's rows.
        """

    def combine(self, rows: Tensor, weights: Tensor, state: Any) -> Tensor:
        """rows [R, dim], weights fp32 [T, k] -> [T, dim]: the weighted sum over slots in fp32, then in rows' dtype."""


class LocalState(NamedTuple):
    """offs: int32 [E], the end of each expert's rows; inverse: int64 [T, k], the row of each token's slot."""

    offs: Tensor
    inverse: Tensor


class LocalDispatcher:
    """All E experts are here."""

    def __init__(self, n_experts: int) -> None:
        self.n_experts = n_experts

    def dispatch(self, x: Tensor, experts: Tensor) -> tuple[Tensor, LocalState]:
        """x [T, dim], experts int64 [T, k], each in range(E) -> (rows [T k, dim] in x's dtype, state)."""
        tokens, inverse, offs = sort_by_expert(experts, self.n_experts)
        return permute(x, tokens, inverse), LocalState(offs, inverse)

    def combine(self, rows: Tensor, weights: Tensor, state: LocalState) -> Tensor:
        """rows [T k, dim], weights fp32 [T, k] -> [T, dim] in rows' dtype."""
        return unpermute(rows, weights, state.inverse)


# ---- the layer


class _AddObjective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, objective: Tensor) -> Tensor:
        ctx.objective = objective.shape, objective.dtype, objective.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.objective
        return grads[0], torch.ones(shape, dtype=dtype, device=device)


def add_objective(x: Tensor, objective: Tensor) -> Tensor:
    """x itself; a backward pass through it also adds the gradient of `objective`, a scalar, to what is minimised.

    So a term of a layer needs no way out of it, through blocks and pipeline stages, to the loss. Backward must start
    from the sum of token losses with gradient 1. It is pure: it may run twice.
    """
    out: Tensor = _AddObjective.apply(x, objective)
    return out


def _identity(counts: Tensor) -> Tensor:
    return counts


class MoE(nn.Module):
    """sum over a token's experts of weight * expert(x), + shared(x): in the place of a block's MLP.

    Adds to the sum of token losses (by add_objective, so that the loss stays the cross-entropy):
        aux = aux_loss_coeff * sum over tokens t and experts i of f_i p_ti, p = Routing.scores, where f_i = E * (share
              of the assignments of t's sequence that go to expert i), a constant: 1 per token at balance
              (Fedus et al. 2022, eq. 4, for each sequence by itself as DeepSeek-V3 has it)
        z   = z_loss_coeff * sum over tokens of logsumexp(logits)^2 (Zoph et al. 2022, eq. 5)

    Counts while gradients are enabled and not within uncounted(), until `init_buffers` or ExpertBalance.take:
        load: int64 [E], assignments to each expert
        sums: fp64 [4], tokens, entropy of their scores in nats, aux, z

    dispatcher:       may be replaced by any Dispatcher.
    sum_over_sequence: counts [B, E] int64 -> their sum over the ranks that share these sequences.

    For backward a row keeps twice dim (before and after its expert) and three times expert_dim, in x's dtype; a token
    its input in fp32, and a few numbers per expert.
    """

    load: Tensor
    sums: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.aux_loss_coeff = moe.aux_loss_coeff
        self.z_loss_coeff = moe.z_loss_coeff
        self.router = Router(config.dim, moe)
        self.experts = Experts(moe.n_experts, config.dim, moe.expert_dim)
        self.shared = MLP(config.dim, moe.n_shared_experts * moe.expert_dim) if moe.n_shared_experts else None
        self.dispatcher: Dispatcher = LocalDispatcher(moe.n_experts)
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _identity
        self.register_buffer("load", torch.zeros(moe.n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("sums", torch.zeros(4, dtype=torch.float64), persistent=False)

    def init_buffers(self) -> None:
        """Counters and the router's bias to zero."""
        for buffer in (self.load, self.sums, self.router.expert_bias):
            if buffer is not None:
                buffer.zero_()

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[B, S, dim] -> [B, S, dim]; S may be this rank's part of the sequences."""
        tokens = x.flatten(0, 1)
        routing: Routing = self.router(tokens)
        weights = self._balance(routing, x.shape[0]) if torch.is_grad_enabled() else routing.weights
        rows, state = self.dispatcher.dispatch(tokens, routing.experts)
        out = self.dispatcher.combine(self.experts(rows, state.offs), weights, state).view_as(x)
        return out if self.shared is None else out + self.shared(x)

    def _balance(self, routing: Routing, samples: int) -> Tensor:
        """The routing's weights, with aux and z behind them; counts."""
        experts, n_experts = routing.experts, routing.scores.shape[1]
        first = torch.arange(0, samples * n_experts, n_experts, device=experts.device)  # of each sequence's counts
        cells = (experts.view(samples, -1) + first[:, None]).flatten()
        counts = experts.new_zeros(samples * n_experts).scatter_add_(0, cells, torch.ones_like(cells))
        counts = counts.view(samples, n_experts)
        aux = z = routing.scores.new_zeros(())
        if self.aux_loss_coeff > 0:
            whole = self.sum_over_sequence(counts)
            shares = whole.to(routing.scores.dtype) / whole.sum(dim=1, keepdim=True)
            mass = routing.scores.view(samples, -1, n_experts).sum(dim=1)
            aux = self.aux_loss_coeff * n_experts * (shares * mass).sum()
        if self.z_loss_coeff > 0:
            z = self.z_loss_coeff * routing.logits.logsumexp(dim=-1).square().sum()
        if _counting.get():
            with torch.no_grad():
                self.load += counts.sum(dim=0)
                entropy = torch.special.entr(routing.scores).sum()
                tokens = torch.full_like(entropy, routing.scores.shape[0])
                self.sums += torch.stack((tokens, entropy, aux, z))
        objective = aux + z
        return add_objective(routing.weights, objective) if objective.requires_grad else routing.weights
