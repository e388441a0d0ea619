"""AdamW against torch's own on one process: updates, clipping by grad_scale, skipped steps, decay groups, state."""

import pytest
import torch
from torch import nn

from titanlite.config.schema import OptimizerConfig
from titanlite.optim.optimizer import AdamW

CONFIG = OptimizerConfig(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding.weight": (7, 5), "norm.weight": (5,), "experts.weight": (2, 3, 5)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(named, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def torch_adamw(named, lr):
    decay = [p for p in named.values() if p.ndim >= 2]
    no_decay = [p for p in named.values() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": CONFIG.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=lr,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
    )


def test_equals_torch_with_changing_lr_and_clipping_by_hand():
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(ours, CONFIG), torch_adamw(theirs, 1.0)
    tokens, max_norm = 40.0, 0.1
    for step in range(1, 8):
        lr = 0.01 / step
        set_gradients(ours, step, scale=tokens)  # of the sum
        set_gradients(theirs, step)  # of the mean
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        assert norm > max_norm, "the clip is at work"
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        optimizer.step(lr, torch.tensor(tokens) / (max_norm / (norm + 1e-6)), ZERO)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=2e-6, atol=1e-7)
    assert optimizer.n_updates == 7


def test_weight_decay_is_for_two_or_more_dims():
    named = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = AdamW(named, CONFIG)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1, ONE, ZERO)
    assert torch.equal(named["norm.weight"], before["norm.weight"])
    for name in ("embedding.weight", "experts.weight"):
        torch.testing.assert_close(named[name].detach(), before[name] * (1 - 0.1 * 0.3))


def test_zero_rows_with_zero_gradients_stay_zero():
    named = {"embedding.weight": nn.Parameter(torch.randn(4, 3))}
    optimizer = AdamW(named, CONFIG)
    with torch.no_grad():
        named["embedding.weight"][2:] = 0.0
    for _ in range(3):
        gradient = torch.randn(4, 3)
        gradient[2:] = 0.0
        named["embedding.weight"].grad = gradient
        optimizer.step(0.1, ONE, ZERO)
    assert torch.equal(named["embedding.weight"][2:], torch.zeros(2, 3))


def test_a_skipped_step_changes_nothing_and_counts_for_nothing():
    named, twin = parameters(), parameters()
    optimizer, reference = AdamW(named, CONFIG), AdamW(twin, CONFIG)
    for step in (1, 2, 3):
        set_gradients(named, step)
        if step == 2:
            named["norm.weight"].grad.fill_(float("nan"))
            optimizer.step(0.1, torch.tensor(float("nan")), ONE)
        else:
            set_gradients(twin, step)
            optimizer.step(0.1, ONE, ZERO)
            reference.step(0.1, ONE, ZERO)
    assert optimizer.n_updates == 2
    for name, expected in twin.items():
        assert torch.equal(named[name], expected)
    for name, expected in reference.state_tensors().items():
        assert torch.equal(optimizer.state_tensors()[name], expected)


def test_state_tensors_are_the_moments_and_a_restored_optimizer_goes_on_bitwise():
    named, twin = parameters(), parameters(seed=1)
    optimizer, restored = AdamW(named, CONFIG), AdamW(twin, CONFIG)
    for step in (1, 2):
        set_gradients(named, step)
        optimizer.step(0.1, ONE, ZERO)
    state = optimizer.state_tensors()
    assert sorted(state) == sorted(f"{name}.{kind}" for name in named for kind in ("exp_avg", "exp_avg_sq"))
    with torch.no_grad():
        for name, tensor in restored.state_tensors().items():
            tensor.copy_(state[name])
        for name, parameter in twin.items():
            parameter.copy_(named[name])
    restored.n_updates = optimizer.n_updates
    set_gradients(named, 3)
    set_gradients(twin, 3)
    optimizer.step(0.1, ONE, ZERO)
    restored.step(0.1, ONE, ZERO)
    for name, expected in named.items():
        assert torch.equal(twin[name], expected)
    assert restored.n_updates == 3


def test_wrong_update_count_changes_the_result():
    """The bias correction depends on it: a resume that forgot it would not be bitwise."""
    named, twin = parameters(), parameters()
    first, second = AdamW(named, CONFIG), AdamW(twin, CONFIG)
    second.n_updates = 5
    set_gradients(named, 1)
    set_gradients(twin, 1)
    first.step(0.1, ONE, ZERO)
    second.step(0.1, ONE, ZERO)
    assert not torch.equal(named["norm.weight"], twin["norm.weight"])


def test_missing_gradient_is_an_error():
    named = parameters()
    optimizer = AdamW(named, CONFIG)
    with pytest.raises(AssertionError, match="no gradient"):
        optimizer.step(0.1, ONE, ZERO)
