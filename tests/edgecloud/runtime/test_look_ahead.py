"""Going forward by the weights that momentum will have made (look-ahead)."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from socflower.capture.cut_points import trace_split
from socflower.edgecloud.halves import Weights
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.half_optimizer import HalfOptimizer
from socflower.edgecloud.runtime.in_process import constant_staleness, run_actions
from socflower.errors import ConfigError
from tests.edgecloud.runtime.split_training import LOSS, Source, chain

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def weights_after(window: int, *, look_ahead: bool, num_batches: int = 12) -> Weights:
    split = trace_split(chain(dropout=0.0), (6,))
    front = TorchFront(split.copy(), 3, Source(), SGD, look_ahead=look_ahead)
    back = TorchBack(split.copy(), 3, SGD, LOSS)
    run_actions(constant_staleness(num_batches, window, cut=3), [front], [back])
    return {**front.weights(), **back.weights()}


def equal(left: Weights, right: Weights) -> bool:
    return all((left[name] == right[name]).all() for name in left)


@given(momentum=st.floats(0.0, 0.99), rate=st.floats(1e-4, 1.0), num_updates=st.integers(1, 8),
       seed=st.integers(0, 1000))
def test_where_no_gradient_comes_momentum_carries_the_weights_exactly_there(
    momentum: float, rate: float, num_updates: int, seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = HalfOptimizer(partial(torch.optim.SGD, lr=rate, momentum=momentum))
    optimizer.own({"weight": weight})
    weight.grad = torch.randn(5, generator=generator, dtype=torch.float64)
    optimizer.step(0)
    before = weight.detach().clone()
    with optimizer.looking_ahead(1, num_updates):
        foreseen = weight.detach().clone()
    assert torch.equal(weight, before)
    for batch in range(num_updates):
        weight.grad = torch.zeros_like(weight)
        optimizer.step(1 + batch)
    torch.testing.assert_close(foreseen, weight.detach())


def test_without_a_window_nothing_is_looked_ahead_to() -> None:
    assert equal(weights_after(0, look_ahead=True), weights_after(0, look_ahead=False))


def test_with_a_window_it_changes_what_is_sent() -> None:
    assert not equal(weights_after(3, look_ahead=True), weights_after(3, look_ahead=False))


def test_weights_are_put_back_even_if_the_pass_fails() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = HalfOptimizer(SGD)
    optimizer.own({"weight": weight})
    weight.grad = torch.ones(2)
    optimizer.step(0)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="out of memory"), optimizer.looking_ahead(1, 3):
        raise RuntimeError("out of memory")
    assert torch.equal(weight, before)


@pytest.mark.parametrize("factory", [torch.optim.Adam, partial(SGD, nesterov=True)])
def test_other_optimisers_are_refused_in_one_line(factory: object) -> None:
    optimizer = HalfOptimizer(factory)  # type: ignore[arg-type]
    optimizer.own({"weight": nn.Parameter(torch.ones(2))})
    with pytest.raises(ConfigError, match="use SGD with plain momentum") as error, optimizer.looking_ahead(0, 1):
        pass
    assert "\n" not in str(error.value)
