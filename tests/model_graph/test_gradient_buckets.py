"""Virtual time sends a model in the buckets of real rings, and as early as a backward pass completes them (F8a)."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from socflower.hierarchy import Exchange
from socflower.model_graph.layer_profile import profile_module
from socflower.training.exchange.buckets import make_buckets
from tests.model_graph.small_models import Tied


def mlp(widths: list[int], frozen: int) -> nn.Module:
    layers = [
        nn.Linear(before, after, bias=index % 2 == 0)
        for index, (before, after) in enumerate(pairwise(widths))
    ]
    layers[frozen % len(layers)].requires_grad_(len(layers) == 1)
    return nn.Sequential(*layers)


def check(module: nn.Module, inputs: tuple[int, ...], num_buckets: int) -> list[float]:
    profile = profile_module(module, inputs, "any")
    assert sum(gradient.num_bytes for gradient in profile.gradients) == profile.weight_bytes
    assert len(profile.gradients) == profile.num_tensors
    buckets = Exchange(
        num_bytes=profile.weight_bytes, num_tensors=profile.num_tensors, gradients=profile.gradients
    ).buckets(num_buckets)
    assert [bucket.exchange.num_bytes for bucket in buckets] == [
        bucket.buffer.nbytes for bucket in make_buckets(module, num_buckets)
    ]
    done = [bucket.done for bucket in buckets]
    assert done == sorted(done) and done[0] > 0.0 and done[-1] == 1.0
    return done


@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    frozen=st.integers(0, 6),
    num_buckets=st.integers(1, 9),
)
def test_buckets_are_those_of_rings(widths: list[int], frozen: int, num_buckets: int) -> None:
    check(mlp(widths, frozen), (widths[0],), num_buckets)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Tied, (6,)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
        (
            lambda: nn.Sequential(
                nn.Unflatten(-1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 3)
            ),
            (8,),
        ),
    ],
)
def test_models_of_other_layers(make: Callable[[], nn.Module], inputs: tuple[int, ...]) -> None:
    for num_buckets in range(1, 8):
        check(make(), inputs, num_buckets)


def test_a_bucket_is_complete_with_the_operations_behind_it() -> None:
    equal = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)))
    assert check(equal, (10,), 3) == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_weights_that_are_used_twice_or_never_are_sent_last() -> None:
    gradients = profile_module(Tied(), (6,), "tied").gradients
    done = {gradient.num_bytes: gradient.done for gradient in gradients}
    assert done[4.0 * 6 * 30] == done[4.0 * 36] == 1.0


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 5])
def test_a_backward_pass_completes_tensors_in_the_order_of_their_parts(num_buckets: int) -> None:
    module = nn.Sequential(
        nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2)
    )
    order: list[int] = []
    for index, parameter in enumerate(reversed(list(module.parameters()))):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    module(torch.ones(4, 6)).sum().backward()
    gradients = profile_module(module, (6,), "any").gradients
    done = [gradients[index].done for index in order]
    assert done == sorted(done)
    check(module, (6,), num_buckets)
