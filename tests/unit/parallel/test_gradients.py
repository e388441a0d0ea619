"""Token scale, norm, clip and the finite check on plain tensors."""

import pytest
import torch
from torch import nn

from titanlite.parallel.gradients import finish, global_norm


def with_gradients(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def test_norm_and_scale_of_the_mean():
    stats = finish(with_gradients(torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])), torch.tensor(2.0), max_norm=0.0)
    assert stats.norm.item() == 2.5, "norm of the sum is 5, of the mean per token 2.5"
    assert stats.grad_scale.item() == 2.0
    assert stats.found_inf.item() == 0.0
    assert stats.norm.dtype == stats.grad_scale.dtype == stats.found_inf.dtype == torch.float32


def test_clip_rides_on_the_scale_as_in_torch():
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0))
    tokens, max_norm = 8.0, 0.25
    stats = finish(with_gradients(gradient * tokens), torch.tensor(tokens), max_norm)
    (reference,) = with_gradients(gradient.clone())
    norm = torch.nn.utils.clip_grad_norm_([reference], max_norm)
    assert stats.norm.item() == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(gradient * tokens / stats.grad_scale, reference.grad)


def test_a_small_gradient_is_not_clipped():
    stats = finish(with_gradients(torch.tensor([0.5])), torch.tensor(1.0), max_norm=1.0)
    assert stats.grad_scale.item() == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_not_finite_is_found(bad, max_norm):
    stats = finish(with_gradients(torch.ones(3), torch.tensor([1.0, bad])), torch.tensor(4.0), max_norm)
    assert stats.found_inf.item() == 1.0


def test_norm_of_many_elements_is_exact():
    """torch's own float32 norm is off by 7e-4 here, and by something else for every way to shard."""
    gradient = torch.randn(2**24 + 5, generator=torch.Generator().manual_seed(0))
    expected = gradient.double().norm().item()
    whole = global_norm(with_gradients(gradient)).item()
    parts = global_norm(with_gradients(*(part.clone() for part in gradient.tensor_split(3)), torch.empty(0))).item()
    assert whole == pytest.approx(expected, rel=1e-7)
    assert parts == pytest.approx(expected, rel=1e-7)


def test_missing_gradient_is_an_error():
    with pytest.raises(AssertionError, match="no gradient"):
        global_norm([nn.Parameter(torch.zeros(2))])
