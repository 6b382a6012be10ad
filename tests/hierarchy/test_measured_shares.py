"""The capacities that shares go by: deaf to noise, quick for a lasting change, and at rest under a constant load."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.hierarchy import split_batch
from socflower.hierarchy.batch_shares import CapacityFilter
from socflower.training.batches import ensure_one_sample
from tests.one_line import refused

RATES = st.floats(1e-2, 1e3)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Takes `fixed_s` for a step and `sample_s` for each sample."""

    fixed_s: float = 0.0
    sample_s: float = 1.0

    def seconds(self, num_samples: float) -> float:
        return self.fixed_s + self.sample_s * num_samples


DEVICES = st.lists(
    st.builds(Device, fixed_s=st.floats(0.0, 2.0), sample_s=st.floats(0.01, 1.0)),
    min_size=2,
    max_size=6,
)


def one_slow(sample_s: float = 100.0) -> list[Device]:
    return [Device(sample_s=each) for each in (0.1, 0.1, sample_s)]


def even(num_members: int, **options: float) -> CapacityFilter:
    return CapacityFilter(dict.fromkeys(range(num_members), 1.0), **options)


def sizes_by(filtered: CapacityFilter, batch_size: int) -> tuple[int, ...]:
    rates = filtered.capacities()
    return ensure_one_sample(
        split_batch(batch_size, [rates[member] for member in sorted(rates)]), filtered.due
    )


def step(
    filtered: CapacityFilter, devices: Sequence[Device], batch_size: int
) -> tuple[tuple[int, ...], list[float]]:
    """Let the devices do a step by the filter's shares, and the filter see it; return shares and seconds."""
    sizes = sizes_by(filtered, batch_size)
    taken_s = [device.seconds(size) for device, size in zip(devices, sizes, strict=True)]
    filtered.note(dict(enumerate(zip(sizes, taken_s, strict=True))))
    return sizes, taken_s


def note_rates(filtered: CapacityFilter, rates: Sequence[float]) -> bool:
    return filtered.note({member: (rate, 1.0) for member, rate in enumerate(rates)})


# --------------------------------------------------------------------------------------------- the iteration


@given(devices=DEVICES, shares=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6))
def test_step_times_approach_each_other_monotonically(
    devices: list[Device], shares: list[float]
) -> None:
    """The theorem of the module's docstring, in real numbers: t' - T = (a / t) (t - T)."""
    sizes = [64.0 * share / sum(shares[: len(devices)]) for share in shares[: len(devices)]]
    for _ in range(200):
        taken_s = [device.seconds(size) for device, size in zip(devices, sizes, strict=True)]
        rates = [size / seconds for size, seconds in zip(sizes, taken_s, strict=True)]
        common_s = 64.0 / math.fsum(rates)
        assert min(taken_s) * (1 - 1e-9) <= common_s <= max(taken_s) * (1 + 1e-9)
        sizes = [common_s * rate for rate in rates]
        after_s = [device.seconds(size) for device, size in zip(devices, sizes, strict=True)]
        for device, before, after in zip(devices, taken_s, after_s, strict=True):
            assert after - common_s == pytest.approx(
                device.fixed_s / before * (before - common_s), abs=1e-6 * common_s
            )
        assert max(after_s) <= max(taken_s) * (1 + 1e-9)
        assert min(after_s) >= min(taken_s) * (1 - 1e-9)


@given(devices=DEVICES, batch_size=st.integers(48, 512))
def test_under_constant_load_shares_come_to_rest_where_times_are_equal_within_a_sample(
    devices: list[Device],
    batch_size: int,
) -> None:
    """Equal but for the mean time of a sample and what the dead band lets pass."""
    filtered = even(len(devices))
    for _ in range(150):
        step(filtered, devices, batch_size)
    moves = filtered.num_moves
    for _ in range(150):
        sizes, taken_s = step(filtered, devices, batch_size)
    assert filtered.num_moves == moves
    busy = [(size, seconds) for size, seconds in zip(sizes, taken_s, strict=True) if size]
    common_s = batch_size / sum(size / seconds for size, seconds in busy)
    for size, seconds in busy:
        assert abs(seconds - common_s) <= (1.0 / size + 0.11) * max(seconds, common_s) + 1e-9
    # So the slowest member costs no more than the dead band and a sample of its own.
    size, longest_s = max(busy, key=lambda each: each[1])
    assert longest_s * (1.0 - 1.0 / size) <= 1.11 * common_s + 1e-9


@given(rates=st.lists(RATES, min_size=2, max_size=6))
def test_without_fixed_costs_one_move_is_enough(rates: list[float]) -> None:
    filtered = even(len(rates))
    for _ in range(20):
        note_rates(filtered, rates)
    assert filtered.num_moves <= 1
    if filtered.num_moves:
        accepted = filtered.capacities()
        assert [accepted[member] for member in range(len(rates))] == rates


# --------------------------------------------------------------------------------------------------- noise


@given(noise=st.lists(st.lists(st.floats(-0.04, 0.04), min_size=3, max_size=3), max_size=80))
def test_noise_within_the_dead_band_never_moves_shares(noise: list[list[float]]) -> None:
    """Parts of a whole: 1.04 / 0.96 is below 1.1, so no part can be away by 10 %."""
    filtered = even(3)
    for factors in noise:
        assert not note_rates(filtered, [5.0 * (1.0 + factor) for factor in factors])
    assert filtered.capacities() == {0: 1.0, 1: 1.0, 2: 1.0}


@given(
    factor=st.sampled_from([0.1, 0.01, 10.0, 100.0]),
    at=st.integers(0, 30),
    member=st.integers(0, 2),
)
def test_one_step_that_is_far_off_is_ignored(factor: float, at: int, member: int) -> None:
    filtered = even(3)
    for number in range(40):
        note_rates(
            filtered,
            [7.0 * (factor if (number, other) == (at, member) else 1.0) for other in range(3)],
        )
    assert filtered.num_moves == 0


@given(at=st.integers(3, 20), member=st.integers(0, 3))
def test_two_steps_that_are_far_off_are_ignored_by_a_full_window(at: int, member: int) -> None:
    filtered = even(4)
    for number in range(40):
        off = at + 2 <= number < at + 4
        note_rates(filtered, [0.1 if off and other == member else 1.0 for other in range(4)])
    assert filtered.num_moves == 0


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.1])
def test_a_lasting_change_is_taken_up_when_the_median_has_turned_and_patience_is_over(
    factor: float,
) -> None:
    filtered = even(3)
    for _ in range(10):
        note_rates(filtered, [4.0, 4.0, 4.0])
    changed = [note_rates(filtered, [4.0, 4.0, 4.0 * factor]) for _ in range(10)]
    assert changed.index(True) == 3
    assert filtered.capacities() == {0: 4.0, 1: 4.0, 2: 4.0 * factor}


def test_observations_that_are_medians_themselves_may_count_at_once() -> None:
    filtered = even(3, enough=1, patience=1)
    assert note_rates(filtered, [4.0, 4.0, 2.0])
    assert filtered.capacities() == {0: 4.0, 1: 4.0, 2: 2.0}
    assert not note_rates(filtered, [4.0, 4.0, 2.03])


def test_all_members_slower_by_the_same_factor_move_nothing() -> None:
    filtered = even(4)
    for number in range(40):
        note_rates(filtered, [3.0 * (0.5 if number > 10 else 1.0)] * 4)
    assert filtered.num_moves == 0


@given(seen=st.lists(st.lists(RATES, min_size=3, max_size=3), max_size=40))
def test_equal_observations_give_equal_bits_also_after_a_restore(seen: list[list[float]]) -> None:
    first, second = even(3), even(3)
    for rates in seen:
        note_rates(first, rates)
        second.note(
            {member: (rates[member], 1.0) for member in (2, 0, 1)}
        )  # the order in which they are told
        third = even(3)
        third.restore(json.loads(json.dumps(second.state())))
        second = third
        assert first.state() == second.state()
        assert first.capacities() == second.capacities()


# --------------------------------------------------------------------------------- members without samples


def test_a_member_too_slow_for_a_sample_is_probed_ever_more_rarely_at_most_every_128_steps() -> (
    None
):
    filtered = even(3)
    probes = [
        number for number in range(1000) if step(filtered, one_slow(), 16)[0][2] and number > 10
    ]
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert gaps == [17, 33, 65, 129, 129, 129, 129, 129, 129][: len(gaps)]
    assert len(gaps) >= 8


def test_a_member_that_has_become_fast_again_gets_its_share_back() -> None:
    filtered = even(3)
    for _ in range(100):
        sizes, _ = step(filtered, one_slow(), 30)
    assert sizes[2] == 0
    for _ in range(150):
        sizes, _ = step(filtered, one_slow(0.1), 30)
    assert sizes == (10, 10, 10)


def test_a_member_that_is_faster_than_nothing_but_still_too_slow_is_left_alone_again() -> None:
    filtered = even(3)
    for _ in range(100):
        step(filtered, one_slow(), 16)
    with_sample = [step(filtered, one_slow(50.0), 16)[0][2] for _ in range(600)]
    assert sum(with_sample) <= 25
    assert with_sample[-100:].count(1) <= 1


def test_a_member_of_no_capacity_is_never_probed() -> None:
    filtered = CapacityFilter({0: 1.0, 1: 2.0, 2: 0.0})
    for _ in range(300):
        assert step(filtered, [Device()] * 3, 12)[0][2] == 0


def test_members_that_are_absent_keep_their_place_beside_the_others() -> None:
    filtered = even(3)
    for _ in range(20):
        filtered.note({0: (8, 1.0), 1: (4, 1.0)})
    accepted = filtered.capacities()
    assert (accepted[0], accepted[1]) == (8.0, 4.0)
    assert accepted[2] == pytest.approx(6.0)  # as it was beside both


@given(
    samples=st.sampled_from([-1.0, 3.0, math.nan, math.inf]),
    seconds=st.sampled_from([0.0, -1.0, math.nan, math.inf]),
)
def test_observations_that_cannot_be_tell_nothing(samples: float, seconds: float) -> None:
    filtered = even(2)
    for _ in range(30):
        filtered.note({0: (4, 1.0), 1: (samples, seconds)})
    assert filtered.capacities() == {0: 1.0, 1: 1.0}
    assert not filtered.due


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("nominal", "options", "named"),
    [
        ({0: -1.0, 1: 1.0}, {}, "-1.0"),
        ({0: math.nan}, {}, "nan"),
        ({0: math.inf}, {}, "inf"),
        ({0: 0.0, 1: 0.0}, {}, "nominal"),
        ({}, {}, "nominal"),
        ({0: 1.0}, {"threshold": 0.0}, "threshold = 0.0"),
        ({0: 1.0}, {"threshold": math.nan}, "threshold = nan"),
        ({0: 1.0}, {"patience": 0}, "patience = 0"),
        ({0: 1.0}, {"window": 2}, "window = 2"),
        ({0: 1.0}, {"enough": 0}, "enough = 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    nominal: dict[int, float], options: dict[str, float], named: str
) -> None:
    refused(lambda: CapacityFilter(nominal, **options), named)


def test_strangers_are_refused() -> None:
    refused(lambda: even(2).note({0: (1, 1.0), 5: (1, 1.0)}), "[5]", "[0, 1]")
    refused(lambda: even(2).restore(even(3).state()), "[0, 1, 2]", "[0, 1]")
