"""Compressed exchanges over real rings of threads: the same bits everywhere, bounded errors, nothing lost for good."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from socflower.peers.collective import Collective, PeerLost, Poll, Work, no_poll
from socflower.peers.compression import (
    DeepGradientCompression,
    GradientCompression,
    all_reduce_bytes,
    make_compression,
)
from socflower.peers.transports.in_process import in_process_rings
from socflower.wire.message_keys import COMPRESSIONS
from tests.one_line import refused

NAMES = [name for name in COMPRESSIONS if name != "none"]
Result = TypeVar("Result")


def together(rings: Sequence[Collective], member: Callable[[Collective], Result]) -> list[Result]:
    """Run `member` with every end of a ring, each in a thread; close it and return the results by rank."""
    with ThreadPoolExecutor(len(rings)) as threads:
        try:
            return on_all(rings, threads, member)
        finally:
            for ring in rings:
                ring.close()


def on_all(
    rings: Sequence[Collective], threads: ThreadPoolExecutor, member: Callable[[Collective], Result]
) -> list[Result]:
    """Run `member` with every end of a ring and return the results by rank; the rings are closed if one fails."""

    def run(ring: Collective) -> Result:
        try:
            return member(ring)
        except BaseException:
            ring.close()
            raise

    futures = [threads.submit(run, ring) for ring in rings]
    failures = [error for future in futures if (error := future.exception(timeout=60)) is not None]
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerLost)), failures[0])
    return [future.result() for future in futures]


class KeptRings:
    """Rings of every size that stay open from one exchange to the next: starting threads takes longer than a sum."""

    def __init__(self) -> None:
        self._of_size: dict[int, tuple[list[Collective], ThreadPoolExecutor]] = {}

    def run(self, size: int, member: Callable[[Collective], Result]) -> list[Result]:
        """Run `member` with every end of a ring; one in which an exchange failed is not used again."""
        if size not in self._of_size:
            self._of_size[size] = in_process_rings(size), ThreadPoolExecutor(size)
        try:
            return on_all(*self._of_size[size], member)
        except BaseException:
            self._close(size)
            raise

    def close(self) -> None:
        for size in list(self._of_size):
            self._close(size)

    def _close(self, size: int) -> None:
        rings, threads = self._of_size.pop(size)
        for ring in rings:
            ring.close()
        threads.shutdown()


KEPT = KeptRings()


@pytest.fixture(scope="module", autouse=True)
def rings_are_closed() -> Iterator[None]:
    yield
    KEPT.close()


class Group:
    """The compressions of a group's members."""

    def __init__(self, name: str, size: int, **options: object) -> None:
        made = [make_compression(name, **options) for _ in range(size)]  # type: ignore[arg-type]
        self.members: list[GradientCompression] = [one for one in made if one is not None]
        assert len(self.members) == size
        self.wrap: Callable[[Collective], Collective] = lambda ring: ring

    def step(self, number: int, gradients: Sequence[Tensor], *, finish: bool = True) -> Tensor:
        """Exchange one bucket; return the sum, which is the same in all members to the bit."""

        def exchange(ring: Collective) -> Tensor:
            own, gradient = self.members[ring.rank], gradients[ring.rank].clone()
            own.start_step(number)
            own.exchange(ring, 0, gradient)
            if finish:
                own.finish_step()
            return gradient

        sums = KEPT.run(len(self.members), lambda ring: exchange(self.wrap(ring)))
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
def test_a_restored_state_goes_on_bit_for_bit(name: str) -> None:
    first, second = (
        Group(name, 3, ratio=0.02, momentum=0.9),
        Group(name, 3, ratio=0.02, momentum=0.9),
    )
    for step in range(3):
        first.step(step, random_gradients(3, 700, seed=step))
    for before, after in zip(first.members, second.members, strict=True):
        after.restore(before.state())
    for step in range(3, 6):
        gradients = random_gradients(3, 700, seed=step)
        assert torch.equal(first.step(step, gradients), second.step(step, gradients))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_done_again_leaves_no_trace_of_the_first_attempt(name: str) -> None:
    once, twice = Group(name, 2, ratio=0.02, momentum=0.9), Group(name, 2, ratio=0.02, momentum=0.9)
    for step in range(4):
        gradients = random_gradients(2, 500, seed=step)
        twice.step(step, random_gradients(2, 500, seed=100 + step), finish=False)
        assert torch.equal(once.step(step, gradients), twice.step(step, gradients))


@pytest.mark.parametrize("name", ["int8", "dgc"])
def test_an_abandoned_exchange_that_ends_late_leaves_no_trace(name: str) -> None:
    members = [make_compression(name, ratio=0.02) for _ in range(2)]
    assert members[0] is not None and members[1] is not None
    rings = in_process_rings(2)
    members[0].start_step(0)
    late = threading.Thread(
        target=members[0].exchange, args=(rings[0], 0, random_gradients(1, 500)[0])
    )
    late.start()
    members[0].start_step(0)
    members[1].start_step(0)
    members[1].exchange(rings[1], 0, random_gradients(1, 500)[0])
    late.join(timeout=60)
    for ring in rings:
        ring.close()
    members[0].finish_step()
    members[1].finish_step()
    assert not members[0]._kept and members[1]._kept


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_an_empty_bucket_is_nothing(name: str) -> None:
    group = Group(name, 3, ratio=0.5)
    assert torch.equal(group.step(0, [torch.zeros(10)] * 3), torch.zeros(10))
    assert Group(name, 2).step(0, [torch.zeros(0)] * 2).numel() == 0
    assert group.members[0].wire_bytes(0, 3) == 0


class Counting(Collective):
    """A ring that counts what its member sends."""

    def __init__(self, ring: Collective) -> None:
        self._ring = ring
        self.rank, self.size, self.transport = ring.rank, ring.size, ring.transport
        self.num_bytes = 0.0

    def all_reduce(self, buffer: Tensor) -> Work:
        self.num_bytes += 2 * (self.size - 1) / self.size * buffer.numel() * buffer.element_size()
        return self._ring.all_reduce(buffer)

    def all_gather(self, payload: bytes, poll: Poll = no_poll) -> list[bytes]:
        payloads = self._ring.all_gather(payload, poll)
        # A member passes on all payloads but the one that ends with it.
        self.num_bytes += sum(map(len, payloads)) - len(payloads[(self.rank + 1) % self.size])
        return payloads

    def broadcast(self, payload: bytes | None, source: int, poll: Poll = no_poll) -> bytes:
        raise AssertionError("no exchange broadcasts")

    def close(self) -> None:
        self._ring.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("num_elements", [1, 3, 4096, 9999])
def test_wire_bytes_are_what_is_sent(name: str, size: int, num_elements: int) -> None:
    for options in ({"ratio": 0.01}, {"ratio": 0.9}, {"ratio": 0.001, "warm_up_steps": 8}):
        group = Group(name, size, **options)
        counting: list[Counting] = []

        def counted(ring: Collective, counting: list[Counting] = counting) -> Collective:
            counting.append(Counting(ring))
            return counting[-1]

        group.wrap = counted
        group.step(3, random_gradients(size, num_elements))
        expected = group.members[0].wire_bytes(num_elements, size)
        assert len(counting) == size and all(
            math.ceil(ring.num_bytes - 1e-6) == expected for ring in counting
        )


def test_halves_are_half_of_the_bytes_and_eight_bits_a_quarter() -> None:
    num_elements = 1_000_000
    for size in (2, 5, 15):
        float32 = all_reduce_bytes(4 * num_elements, size)
        bytes_of = {
            name: Group(name, 1).members[0].wire_bytes(num_elements, size) for name in NAMES
        }
        assert bytes_of["fp16"] == pytest.approx(float32 / 2, rel=0.001)
        assert (
            bytes_of["int8"] == bytes_of["int8-stochastic"] == pytest.approx(float32 / 4, rel=0.001)
        )
        assert bytes_of["dgc"] == (size - 1) * 8 * num_elements // 1000


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


def test_a_peer_that_leaves_ends_the_exchange() -> None:
    for name in NAMES:
        rings = in_process_rings(3)
        rings[2].close()
        for ring in rings[:2]:
            own = make_compression(name)
            assert own is not None
            own.start_step(0)
            with pytest.raises(PeerLost):
                own.exchange(ring, 0, torch.ones(100))
        for ring in rings:
            ring.close()


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
    for size in (2, 15, 62):
        members = [make_compression("int8") for _ in range(size)]

        def exchange(
            ring: Collective, members: list[GradientCompression | None] = members
        ) -> Tensor:
            own, gradient = members[ring.rank], torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
            assert own is not None
            own.start_step(0)
            own.exchange(ring, 0, gradient)
            return gradient

        for exchanged in together(in_process_rings(size), exchange):
            assert torch.allclose(
                exchanged, size * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), rtol=0.51
            )


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
    rings = in_process_rings(64)
    own = make_compression("int8")
    assert own is not None
    own.start_step(0)
    refused(lambda: own.exchange(rings[0], 0, torch.ones(4)), "63", "64", "fp16")
    for ring in rings:
        ring.close()


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
    assert group.members[0].applies_momentum
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


def test_the_warm_up_sends_less_and_less() -> None:
    one = DeepGradientCompression(ratio=0.001, warm_up_steps=100)
    sent = []
    for step in range(0, 150, 5):
        one.start_step(step)
        sent.append(one.num_sent(1_000_000, 2))
    assert sorted(set(sent), reverse=True) == [250_000, 62_500, 15_625, 3_907, 1_000]
    assert sent == sorted(sent, reverse=True) and sent.index(1_000) == 100 // 5
    assert one.num_sent(1, 2) == 1


def test_where_sums_are_no_dearer_all_is_sent() -> None:
    one = DeepGradientCompression(ratio=0.25)
    assert [one.num_sent(1000, size) for size in (1, 2, 3, 4, 5)] == [1000, 250, 250, 1000, 1000]


def test_members_that_disagree_find_out() -> None:
    made = [DeepGradientCompression(ratio=ratio) for ratio in (0.01, 0.01, 0.02)]

    def exchange(ring: Collective) -> None:
        made[ring.rank].start_step(0)
        made[ring.rank].exchange(ring, 0, torch.ones(1000))

    refused(lambda: together(in_process_rings(3), exchange), "80", "160")


# --------------------------------------------------------------------------------------------- mistakes


def test_none_is_no_compression_and_others_are_refused() -> None:
    assert make_compression("none") is None
    refused(lambda: make_compression("zip"), "zip", "fp16", "int8")


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
    refused(lambda: make_compression("dgc", **{option: value}), option)  # type: ignore[arg-type]


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
