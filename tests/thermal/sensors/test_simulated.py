"""Simulated sensors: coarse, noisy, and faulty on demand."""

from functools import partial
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.simulated import FAULTS, SensorFault, SimulatedSource
from tests.one_line import refused
from tests.thermal.fake_machines import Clock
from tests.thermal.refusals import refused_each


def readings(num_reads: int, *, cools: bool = False, **options: Any) -> list[Reading]:
    """Return a reading a minute of a SoC at 50 °C, or one that cools from 80 °C by a degree a minute."""
    clock = Clock(0.0)

    def true_c() -> float:
        return 80.0 - clock.now_s / 60.0 if cools else 50.0

    source = SimulatedSource(true_c, clock=clock, **options)
    found = []
    for _ in range(num_reads):
        found.append(source.read())
        clock.now_s += 60.0
    return found


def temperatures(*arguments: Any, **options: Any) -> list[float | None]:
    return [reading.temperature_c for reading in readings(*arguments, **options)]


@given(true_c=st.floats(-39.0, 149.0), step_c=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_without_noise_a_reading_is_the_truth_within_half_a_step(true_c, step_c):
    shown_c = SimulatedSource(lambda: true_c, step_c=step_c).read().temperature_c
    assert abs(shown_c - true_c) <= step_c / 2 + 1e-9
    assert not step_c or shown_c / step_c == pytest.approx(round(shown_c / step_c))


def test_equal_seeds_give_equal_noise_and_a_fault_of_one_sensor_leaves_the_others_noise():
    path = partial(temperatures, 50, noise_c=1.0, num_sensors=2)
    noisy = path(seed=3)
    assert noisy == path(seed=3) != path(seed=4)
    gone = path(seed=3, faults=[SensorFault(kind="missing", from_s=600.0, until_s=1200.0)])
    assert gone[:10] == noisy[:10] and gone[20:] == noisy[20:]


@pytest.mark.parametrize("kind", sorted(set(FAULTS) - {"stuck"}))
@pytest.mark.parametrize(("num_sensors", "meanwhile"), [(1, None), (2, 50.0)])
def test_a_faulty_sensor_gives_nothing_alone_and_the_other_beside_another(
    kind, num_sensors, meanwhile
):
    fault = SensorFault(kind=kind, from_s=120.0, until_s=240.0)
    found = readings(6, num_sensors=num_sensors, faults=[fault])
    expected_c = [50.0, 50.0, meanwhile, meanwhile, 50.0, 50.0]
    assert [reading.temperature_c for reading in found] == expected_c
    assert [len(reading.notes) for reading in found] == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_sensor_may_be_faulty_from_the_start(kind):
    expected_c = 50.0 if kind == "stuck" else None
    assert temperatures(3, faults=[SensorFault(kind=kind)]) == [expected_c] * 3


def test_a_stuck_sensor_is_detected_beside_another_and_under_load():
    fault = SensorFault(kind="stuck", from_s=60.0)
    path = partial(temperatures, 25, cools=True, faults=[fault])
    assert path() == path(num_sensors=2, busy_of=lambda: False) == [80.0] * 25
    detected = path(num_sensors=2)
    assert detected[:10] == [80.0] * 10 and detected[-1] == 56.0


@pytest.mark.parametrize(
    ("speed", "factor", "throttled"),
    [(1.0, 1.0, False), (0.64, 0.64, True), (1.2, 1.0, False), (-1.0, 0.0, True)],
)
def test_a_slow_clock_is_throttled(speed, factor, throttled):
    reading = SimulatedSource(lambda: 50.0, lambda: speed).read()
    assert (reading.clock_factor, reading.throttled) == (factor, throttled)


@pytest.mark.parametrize("true_c", [nan, inf, 400.0, -300.0])
def test_an_impossible_temperature_is_left_out(true_c):
    reading = SimulatedSource(lambda: true_c).read()
    assert reading.temperature_c is None and len(reading.notes) == 1


def test_invalid_settings_and_faults_are_refused():
    make = partial(SimulatedSource, float)
    refused_each(make, step_c=(-1.0,), noise_c=(nan,), num_sensors=(0,), stuck_after_s=(0.0,))
    refused(partial(make, faults=[SensorFault(kind="nan", sensor=1)]), "sensor 1", "nan")
    refused_each(SensorFault, kind=("tired",))
    refused_each(partial(SensorFault, kind="nan"), sensor=(-1,), until_s=(0.0,))
