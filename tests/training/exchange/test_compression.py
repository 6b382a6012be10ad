"""What codings lose and keep: bounded errors, nothing lost for good, the same bits at all members."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from socflower.hierarchy.exchange.coding_bytes import (
    CODINGS,
    LargestValues,
    SelectedBuckets,
    gradient_coding,
)
from socflower.training.exchange.codings import make_compression
from socflower.training.exchange.compression import GradientCompression, run_together
from tests.one_line import refused

NAMES = [name for name in CODINGS if name != "none"]


def compression(
    name: str, seed: int = 0, momentum: float = 0.0, **largest: Any
) -> GradientCompression:
    """Return a member's side; `largest` are arguments of `LargestValues`, which other codings ignore."""
    coding = gradient_coding(name)
    if isinstance(coding, LargestValues):
        links = {"bytes_per_s": 1e6} if name == "hipress" else {}
        coding = replace(coding, **largest, **links)
    return make_compression(coding, seed=seed, momentum=momentum)


def shapes_of(num_elements: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a matrix and a vector of so many elements."""
    num_rows = math.isqrt(num_elements)
    num_columns = num_elements // max(1, num_rows)
    return (num_rows, num_columns), (num_elements - num_rows * num_columns,)


class Group:
    """The compressions of a group's members."""

    def __init__(self, name: str, size: int, **options: Any) -> None:
        self.members = [compression(name, **options) for _ in range(size)]

    def step(self, number: int, gradients: Sequence[Tensor], *, finish: bool = True) -> Tensor:
        """Exchange one bucket; return the sum, which is the same in all members to the bit."""
        sums = [gradient.clone() for gradient in gradients]
        for member in self.members:
            member.start_step(number)
        run_together(
            [
                member.exchange(rank, len(sums), 0, sums[rank], shapes_of(len(sums[rank])))
                for rank, member in enumerate(self.members)
            ]
        )
        for member in self.members if finish else ():
            member.finish_step()
        assert len({one.numpy().tobytes() for one in sums}) == 1
        return sums[0]

    def residuals(self, tensor: int = -1) -> Tensor:
        """Return the sum over members of what they have not sent."""
        return torch.stack([member._kept[0][tensor] for member in self.members]).sum(0)


def random_gradients(
    size: int, num_elements: int, seed: int = 0, spread: float = 3.0
) -> list[Tensor]:
    """Return gradients whose magnitudes differ by powers of ten, as those of layers do."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (spread * torch.rand(num_elements, generator=generator) - spread)
    return [torch.randn(num_elements, generator=generator) * scale for _ in range(size)]


# --------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_members_end_with_the_same_bits_near_the_sum(name: str, size: int) -> None:
    group = Group(name, size, ratio=0.05, momentum=0.0)
    total, exchanged = torch.zeros(5003), torch.zeros(5003)
    for step in range(4):
        gradients = random_gradients(size, 5003, seed=step)
        exchanged += group.step(step, gradients)
        total += torch.stack(gradients).sum(0)
    if group.members[0]._kept:
        exchanged += group.residuals()
    tolerance = 0.2 if name == "int8-stochastic" else 1e-3
    assert torch.linalg.vector_norm(exchanged - total) < tolerance * torch.linalg.vector_norm(total)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_what_is_not_finite_is_seen_by_all(name: str, bad: float, ratio: float) -> None:
    group = Group(name, 3, ratio=ratio)
    gradients = random_gradients(3, 1000)
    gradients[1][123] = bad
    assert not torch.isfinite(group.step(0, gradients)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_done_again_leaves_no_trace_of_the_first_attempt(name: str) -> None:
    once, twice = Group(name, 2, ratio=0.02, momentum=0.9), Group(name, 2, ratio=0.02, momentum=0.9)
    for step in range(4):
        gradients = random_gradients(2, 500, seed=step)
        twice.step(step, random_gradients(2, 500, seed=100 + step), finish=False)
        assert torch.equal(once.step(step, gradients), twice.step(step, gradients))


@pytest.mark.parametrize("name", ["int8", "dgc", "powersgd"])
def test_an_abandoned_exchange_that_ends_late_leaves_no_trace(name: str) -> None:
    group = Group(name, 2, ratio=0.02)
    gradients = random_gradients(2, 500)
    for member in group.members:
        member.start_step(0)
    late = [
        member.exchange(rank, 2, 0, gradients[rank]) for rank, member in enumerate(group.members)
    ]
    for member in group.members:
        member.start_step(0)
    run_together(late)
    for member in group.members:
        member.finish_step()
    assert not any(member._kept for member in group.members)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_an_empty_bucket_is_nothing(name: str) -> None:
    group = Group(name, 3, ratio=0.5)
    assert torch.equal(group.step(0, [torch.zeros(10)] * 3), torch.zeros(10))
    assert Group(name, 2).step(0, [torch.zeros(0)] * 2).numel() == 0


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("fp16", {}, 1e-3),
        ("int8", {}, 1e-3),
        pytest.param("int8-stochastic", {}, 0.05, marks=pytest.mark.slow),
        ("dgc", {"ratio": 0.05}, 0.02),
        ("dgc", {"ratio": 0.05, "momentum": 0.5, "warm_up_steps": 50}, 0.02),
    ],
)
def test_least_squares_converge(name: str, options: dict[str, object], tolerance: float) -> None:
    size, num_elements = 4, 60
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, 80, num_elements, generator=generator)
    solution = torch.randn(num_elements, generator=generator)
    targets = inputs @ solution
    weights = torch.zeros(num_elements)
    group = Group(name, size, **options)
    for step in range(400):
        gradients = [
            inputs[rank].T @ (inputs[rank] @ weights - targets[rank]) / 80 / size
            for rank in range(size)
        ]
        weights = weights - 0.05 * group.step(step, gradients)
    assert torch.linalg.vector_norm(weights - solution) < tolerance * torch.linalg.vector_norm(
        solution
    )


# --------------------------------------------------------------------------------------------- halves


@settings(max_examples=60)
@given(
    size=st.integers(2, 6),
    exponent=st.integers(-110, 110),
    seed=st.integers(0, 10**6),
    spread=st.floats(0, 8),
)
def test_halves_are_off_by_no_more_than_their_rounding(
    size: int, exponent: int, seed: int, spread: float
) -> None:
    gradients = [one * 2.0**exponent for one in random_gradients(size, 257, seed, spread)]
    exchanged = Group("fp16", size).step(0, gradients).double()
    stacked = torch.stack(gradients).double()
    limit = stacked.abs().amax(1).sum()
    bound = size * 2.0**-11 * stacked.abs().sum(0) * 1.01 + size * 2.0**-39 * limit
    assert ((exchanged - stacked.sum(0)).abs() <= bound).all()


def test_halves_neither_overflow_nor_underflow_together() -> None:
    for scale in (3e37, 1e-30, 1e-37):
        exchanged = Group("fp16", 4).step(0, [torch.tensor([scale, -scale / 1000])] * 4)
        assert torch.allclose(exchanged / scale, torch.tensor([4.0, -0.004]), rtol=2e-3, atol=0)


# --------------------------------------------------------------------------------------------- eight bits


def eight_bit_step(gradients: Sequence[Tensor], rounding: float = 0.5) -> Tensor:
    """Return the step of each element's block."""
    largest = [
        torch.cat([block.abs().max().expand(len(block)) for block in one.split(4096)])
        for one in gradients
    ]
    return torch.stack(largest).sum(0) / (126 - rounding * len(gradients))


@settings(max_examples=40)
@given(
    size=st.integers(2, 6),
    num_elements=st.integers(1, 9000),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-110, 110),
)
def test_eight_bits_are_off_by_half_a_step_a_member(
    size: int, num_elements: int, seed: int, exponent: int
) -> None:
    gradients = [one * 2.0**exponent for one in random_gradients(size, num_elements, seed)]
    for name, rounding in (("int8", 0.5), ("int8-stochastic", 1.0)):
        exchanged = Group(name, size, seed=seed).step(0, gradients)
        error = (exchanged.double() - torch.stack(gradients).double().sum(0)).abs()
        assert (error <= size * rounding * eight_bit_step(gradients, rounding) * 1.001).all()


def test_the_largest_values_of_all_members_add_up_to_the_last_level() -> None:
    gradient = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    for size in (2, 15, 62):
        exchanged = Group("int8", size).step(0, [gradient] * size)
        assert torch.allclose(exchanged, size * gradient, rtol=0.51)


def test_stochastic_rounding_is_right_on_average_and_repeats() -> None:
    gradients = [
        torch.tensor([1.0, 0.001, -0.003, 0.2501]),
        torch.tensor([-0.5, 0.002, 0.004, 0.3]),
    ]
    seeds = 600
    exchanged = torch.stack(
        [Group("int8-stochastic", 2, seed=seed).step(0, gradients) for seed in range(seeds)]
    )
    # A member's error has a deviation of at most half a step.
    deviation = math.sqrt(2 / seeds) * eight_bit_step(gradients, 1.0) / 2
    assert ((exchanged.mean(0) - torch.stack(gradients).sum(0)).abs() < 5 * deviation).all()
    assert torch.equal(exchanged[7], Group("int8-stochastic", 2, seed=7).step(0, gradients))
    assert len({row.numpy().tobytes() for row in exchanged}) > 1
    later = Group("int8-stochastic", 2, seed=7)
    assert any(not torch.equal(later.step(step, gradients), exchanged[7]) for step in range(1, 6))


def test_what_was_rounded_off_is_sent_later_so_that_feedback_beats_noise() -> None:
    size, num_steps = 3, 60
    errors = {}
    for name in ("int8", "int8-stochastic"):
        group = Group(name, size)
        off = torch.zeros(2000)
        step_size = torch.zeros(2000)
        for step in range(num_steps):
            gradients = random_gradients(size, 2000, seed=step)
            off += group.step(step, gradients) - torch.stack(gradients).sum(0)
            step_size = torch.maximum(step_size, eight_bit_step(gradients))
        if name == "int8":
            assert torch.allclose(off, -group.residuals(), atol=1e-4)
            # The next magnitudes include what is left: at most a percent more.
            assert (off.abs() <= size / 2 * step_size * 1.02 + 1e-4).all()
        errors[name] = float(off.square().mean().sqrt())
    assert errors["int8"] < errors["int8-stochastic"] / 5


def test_blocks_keep_the_scale_of_small_layers() -> None:
    gradient = torch.cat([torch.full((4096,), 1.0), torch.linspace(-1e-6, 1e-6, 4096)])
    exchanged = Group("int8", 2).step(0, [gradient, gradient])
    assert torch.allclose(exchanged[4096:], 2 * gradient[4096:], atol=2e-8)


def test_groups_too_large_for_eight_bits_are_refused() -> None:
    refused(lambda: Group("int8", 64).step(0, [torch.ones(4)] * 64), "63", "64", "fp16")


# --------------------------------------------------------------------------------------------- largest values


def test_what_was_not_sent_is_kept_to_the_last_bit() -> None:
    group = Group("dgc", 3, ratio=0.01)
    total, exchanged = torch.zeros(1000), torch.zeros(1000)
    random = torch.Generator().manual_seed(3)
    for step in range(20):
        # Whole numbers, whose sums are exact.
        gradients = [
            torch.randint(-1000, 1000, (1000,), generator=random).float() for _ in range(3)
        ]
        total += torch.stack(gradients).sum(0)
        exchanged += group.step(step, gradients)
        assert torch.equal(exchanged + group.residuals(), total)
    assert int((exchanged != 0).sum()) > 100


def test_the_largest_accumulated_values_go_first() -> None:
    group = Group("dgc", 2, ratio=0.1)
    gradients = [
        torch.tensor([0.0, 3.0, 1.0, -2.0, 0, 0, 0, 0, 0, 0]),
        torch.tensor([0.0, 0, 2.0, -3.0] + 6 * [0.0]),
    ]
    assert group.step(0, gradients).tolist() == [0, 3, 0, -3, 0, 0, 0, 0, 0, 0]
    assert group.step(1, gradients).tolist() == [
        0,
        0,
        4,
        -4,
        0,
        0,
        0,
        0,
        0,
        0,
    ]  # 2 + 2 has overtaken 3
    assert group.residuals().tolist() == [0, 3, 2, -3, 0, 0, 0, 0, 0, 0]


def test_all_of_the_values_with_momentum_are_momentum_sgd() -> None:
    group = Group("dgc", 3, ratio=1.0, momentum=0.9)
    parameter = torch.nn.Parameter(torch.zeros(200))
    reference = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    weights = torch.zeros(200)
    for step in range(30):
        gradients = random_gradients(3, 200, seed=step)
        weights -= 0.1 * group.step(step, gradients)
        parameter.grad = torch.stack(gradients).sum(0)
        reference.step()
    assert torch.allclose(weights, parameter.detach(), rtol=1e-4, atol=1e-6)


def test_momentum_is_corrected_and_masked() -> None:
    group = Group("dgc", 3, ratio=0.1, momentum=0.5)
    first = [torch.tensor([8.0, 1.0] + 8 * [0.0])] + 2 * [torch.zeros(10)]
    assert group.step(0, first).tolist()[:2] == [8, 0]
    assert group.step(1, [torch.zeros(10)] * 3).tolist()[:2] == [
        0,
        1.5,
    ]  # 1 + 1/2: its momentum has gone on
    assert group.step(2, [torch.zeros(10)] * 3).tolist()[:2] == [
        0,
        0,
    ]  # and both momenta ended when they were sent


class Published:
    """Deep gradient compression as Lin et al. (ICLR 2018) print it: algorithm 4, for one layer and all nodes."""

    def __init__(self, num_nodes: int, momentum: float, threshold: float, sparsities: list[float]):
        self._velocity, self._unsent = np.zeros((2, num_nodes, NUM_PUBLISHED))
        self._num_nodes, self._momentum, self._threshold = num_nodes, momentum, threshold
        # Of each epoch, in percent: 75, 93.75, 98.4375, 99.6, 99.9.
        self._sparsities = sparsities

    def step(self, epoch: int, gradients: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        total = np.zeros(NUM_PUBLISHED)
        sparsity = self._sparsities[min(epoch, len(self._sparsities) - 1)]
        for node, gradient in enumerate(gradients):
            norm = np.sqrt((gradient**2).sum())
            limit = self._threshold * self._num_nodes**-0.5
            if norm > limit:
                gradient = gradient * limit / norm
            self._velocity[node] = self._momentum * self._velocity[node] + gradient
            self._unsent[node] += self._velocity[node]
            num_sent = math.ceil((100 - sparsity) / 100 * NUM_PUBLISHED)
            limit = np.sort(np.abs(self._unsent[node]))[-num_sent]
            mask = np.abs(self._unsent[node]) >= limit
            total += np.where(mask, self._unsent[node], 0)
            self._unsent[node][mask] = self._velocity[node][mask] = 0
        return total


NUM_PUBLISHED = 4096


def test_deep_gradient_compression_is_the_published_one() -> None:
    """With momentum correction, factor masking, clipping, and a warm-up of an epoch for each sparsity."""
    steps_per_epoch = 3
    coding = gradient_coding("dgc clip_norm=30", steps_per_epoch=steps_per_epoch)
    members = [make_compression(coding, momentum=0.9) for _ in range(3)]
    sparsities = [75, 93.75, 98.4375, 100 * (1 - 1 / 256), 99.9]
    published = Published(3, 0.9, 30.0, sparsities)
    clipped = False
    for step in range(6 * steps_per_epoch):
        gradients = random_gradients(3, NUM_PUBLISHED, seed=step, spread=1.0)
        clipped = clipped or any(one.norm() > 30 / math.sqrt(3) for one in gradients)
        expected = published.step(step // steps_per_epoch, torch.stack(gradients).double().numpy())
        for member in members:
            member.start_step(step)
        run_together(
            [each.exchange(rank, 3, 0, gradients[rank]) for rank, each in enumerate(members)]
        )
        for member in members:
            member.finish_step()
        np.testing.assert_allclose(gradients[0], expected, rtol=1e-4, atol=1e-5)
    assert clipped


def test_hipress_sends_a_bucket_as_dgc_or_exactly() -> None:
    """On slow links the largest values, on fast ones sums: momentum SGD."""
    gradients = random_gradients(3, 5000)
    for links, name in (({"bytes_per_s": 1e6}, "dgc"), ({"message_s": 1.0}, "none")):
        coding = replace(SelectedBuckets(ratio=0.01, bytes_per_s=1e9), **links)
        members = [make_compression(coding) for _ in range(3)]
        found = [one.clone() for one in gradients]
        for member in members:
            member.start_step(0)
        run_together([each.exchange(rank, 3, 0, found[rank]) for rank, each in enumerate(members)])
        assert torch.equal(found[0], Group(name, 3, ratio=0.01).step(0, gradients))


def test_members_that_disagree_find_out() -> None:
    group = Group("dgc", 3, ratio=0.01)
    group.members[2] = compression("dgc", ratio=0.02)
    refused(lambda: group.step(0, [torch.ones(1000)] * 3), "80", "160")


# --------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", math.nan),
        ("ratio", 0.0),
        ("ratio", 1.5),
        ("ratio", math.nan),
        ("warm_up_steps", -1),
    ],
)
def test_options_that_cannot_be_are_refused(option: str, value: float) -> None:
    refused(lambda: compression("dgc", **{option: value}), option)


def test_a_state_of_something_else_is_refused() -> None:
    eight_bit, largest = Group("int8", 2), Group("dgc", 2)
    eight_bit.step(0, random_gradients(2, 100))
    refused(lambda: largest.members[0].restore(eight_bit.members[0].state()), "int8", "dgc")
    refused(lambda: eight_bit.step(1, random_gradients(2, 50)), "100", "50", "bucket 0")


def test_only_float32_is_compressed() -> None:
    refused(
        lambda: Group("fp16", 2).step(0, [torch.ones(5, dtype=torch.float64)] * 2),
        "float32",
        "float64",
    )
