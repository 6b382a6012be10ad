"""Step timings between and beyond what was measured, and which processors can work beside each other."""

from bisect import bisect_left
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import Device, Processor, StepTimings, device, device_names
from tests.one_line import refused
from tests.toy_clusters import TOY

seconds = st.floats(1e-6, 1e3)
tables = st.dictionaries(st.integers(1, 300), seconds, min_size=1, max_size=6)


def timings_of(table: dict[int, float], *, rise: bool = False) -> StepTimings:
    batches = sorted(table)
    step_s = sorted(table.values()) if rise else [table[batch] for batch in batches]
    return StepTimings(batches=tuple(batches), step_s=tuple(step_s))


timings = tables.map(timings_of)
rising = tables.map(lambda table: timings_of(table, rise=True))


@given(timings, st.floats(0, 1000), st.floats(0, 1000))
def test_more_samples_never_take_less_time(measured: StepTimings, one: float, other: float) -> None:
    few, many = sorted((one, other))
    # Rounding: the line through two points misses the second by some ulps.
    assert measured.seconds(few) <= measured.seconds(many) * (1 + 1e-9)


@given(timings, st.floats(0, 1000, exclude_min=True))
def test_any_sample_takes_time_and_none_takes_none(
    measured: StepTimings, num_samples: float
) -> None:
    assert measured.seconds(0) == 0.0
    assert measured.seconds(num_samples) > 0.0 or num_samples < 1e-300


@given(rising)
def test_what_was_measured_is_given_back(measured: StepTimings) -> None:
    assert tuple(map(measured.seconds, measured.batches)) == measured.step_s


@given(rising, st.floats(1, 300))
def test_between_two_measurements_it_is_the_straight_line(
    measured: StepTimings, num_samples: float
) -> None:
    right = bisect_left(measured.batches, num_samples)
    if 0 < right < len(measured.batches):
        x0, x1 = measured.batches[right - 1 : right + 1]
        y0, y1 = measured.step_s[right - 1 : right + 1]
        expected = (y0 * (x1 - num_samples) + y1 * (num_samples - x0)) / (x1 - x0)
        assert measured.seconds(num_samples) == pytest.approx(expected, rel=1e-9)


@given(st.floats(0, 1), st.floats(1e-4, 1), st.integers(0, 1000))
def test_a_device_with_a_fixed_cost_and_a_rate_is_found_exactly(
    fixed_s: float, sample_s: float, count: int
) -> None:
    """The line of the cost model, measured at three batches, holds below, between and above them."""
    measured = timings_of({batch: fixed_s + sample_s * batch for batch in (4, 16, 64)})
    expected_s = fixed_s + sample_s * count if count else 0.0
    assert measured.seconds(count) == pytest.approx(expected_s, rel=1e-6)


def test_one_measurement_goes_in_proportion() -> None:
    measured = StepTimings(batches=(8,), step_s=(2.0,))
    assert [measured.seconds(count) for count in (2, 8, 16)] == [0.5, 2.0, 4.0]


def test_noise_between_batches_does_not_make_larger_ones_faster() -> None:
    measured = StepTimings(batches=(1, 2, 4), step_s=(1.0, 3.0, 2.0))
    assert [measured.seconds(count) for count in (2, 3, 4)] == [3.0, 3.0, 3.0]
    assert measured.seconds(8) == 3.0 + 4 * 3.0 / 4  # no slope left: seconds per sample


@pytest.mark.parametrize(
    ("batches", "step_s", "named"),
    [
        ((), (), "batches"),
        ((1,), (1.0, 2.0), "step_s"),
        ((0,), (1.0,), "batches"),
        ((2, 2), (1.0, 2.0), "batches"),
        ((1, 2), (1.0, 0.0), "step_s"),
        ((1,), (float("nan"),), "step_s"),
        ((1,), (float("inf"),), "step_s"),
    ],
)
def test_timings_that_cannot_be(
    batches: tuple[int, ...], step_s: tuple[float, ...], named: str
) -> None:
    refused(lambda: StepTimings(batches=batches, step_s=step_s), named)


def made(**processors: tuple[float, str, str]) -> Device:
    own = {
        name: Processor(
            name=name, flops_per_s=rate, active_w=1.0, number_format=kind, shares=shares
        )
        for name, (rate, kind, shares) in processors.items()
    }
    return replace(TOY, processors=own)


names = st.sampled_from(("a", "b", "c", "d"))


@given(
    st.dictionaries(
        names,
        st.tuples(st.floats(1, 9), st.sampled_from(("fp32", "int8")), st.just("")),
        min_size=1,
    ),
    st.sets(names),
)
def test_the_accelerator_is_the_fastest_int8_processor_beside_the_default_one(
    processors: dict[str, tuple[float, str, str]],
    sharing: set[str],
) -> None:
    default = next(iter(processors))
    shared = {
        name: (rate, kind, default if name in sharing and name != default else "")
        for name, (rate, kind, _) in processors.items()
    }
    soc = made(**shared)
    int8 = {name: rate for name, (rate, kind, _) in shared.items() if kind == "int8"}
    apart = {name: rate for name, rate in int8.items() if name != default and not shared[name][2]}
    for found, rates in ((soc.int8_processor, int8), (soc.accelerator, apart)):
        assert (found is None) == (not rates)
        assert found is None or rates[found] == max(rates.values())


def test_the_phone_has_an_npu_beside_its_cpu_and_the_others_none() -> None:
    for name in device_names():
        expected = "npu" if name.startswith("snapdragon") else None
        assert device(name).int8_processor == device(name).accelerator == expected
    assert device("snapdragon-865").silicon("cpu-int8") == "cpu"


@pytest.mark.parametrize("shares", ["b", "nobody", "c"])
def test_silicon_is_shared_with_another_processor_that_has_its_own(shares: str) -> None:
    sharing = {"b": (1.0, "int8", shares), "c": (1.0, "int8", "a")}
    refused(lambda: made(a=(1.0, "fp32", ""), **sharing), "processor b", f"shares = '{shares}'")
