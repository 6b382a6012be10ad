"""Simulated sensors: coarse, noisy, and lying on demand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.simulated import FAULTS, SensorFault, SimulatedSource


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def path_of(
    source: SimulatedSource, time: Time, num_looks: int, every_s: float = 60.0
) -> list[Reading]:
    readings = []
    for _ in range(num_looks):
        readings.append(source.read())
        time.now_s += every_s
    return readings


@given(true_c=st.floats(-39.0, 149.0), step_c=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_without_noise_a_reading_is_the_truth_within_half_a_step(true_c, step_c):
    shown_c = SimulatedSource(lambda: true_c, step_c=step_c).read().temperature_c
    assert shown_c is not None and abs(shown_c - true_c) <= step_c / 2 + 1e-9
    if step_c:
        assert shown_c / step_c == pytest.approx(round(shown_c / step_c))


def test_equal_seeds_give_equal_noise_and_a_fault_of_one_sensor_leaves_the_others_noise():
    def path(**options):
        time = Time()
        source = SimulatedSource(lambda: 50.0, noise_c=1.0, clock=time, num_sensors=2, **options)  # type: ignore[arg-type]
        return [reading.temperature_c for reading in path_of(source, time, 50)]

    assert path(seed=3) == path(seed=3) != path(seed=4)
    gone = path(seed=3, faults=[SensorFault(kind="missing", from_s=600.0, until_s=1200.0)])
    assert gone[:10] == path(seed=3)[:10] and gone[20:] == path(seed=3)[20:]


@pytest.mark.parametrize("kind", sorted(set(FAULTS) - {"stuck"}))
def test_a_sensor_that_lies_leaves_none_alone_and_the_other_beside_another(kind):
    fault = SensorFault(kind=kind, from_s=120.0, until_s=240.0)
    for num_sensors, meanwhile in ((1, None), (2, 50.0)):
        time = Time()
        source = SimulatedSource(lambda: 50.0, clock=time, num_sensors=num_sensors, faults=[fault])
        readings = path_of(source, time, 6)
        assert [reading.temperature_c for reading in readings] == [
            50.0,
            50.0,
            meanwhile,
            meanwhile,
            50.0,
            50.0,
        ]
        assert [len(reading.notes) for reading in readings] == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_sensor_that_lies_from_the_start_never_fails(kind):
    time = Time()
    readings = path_of(
        SimulatedSource(lambda: 50.0, clock=time, faults=[SensorFault(kind=kind)]), time, 5
    )
    assert {reading.temperature_c for reading in readings} == {50.0 if kind == "stuck" else None}


def test_a_stuck_sensor_hides_heat_alone_and_is_found_beside_another():
    fault = SensorFault(kind="stuck", from_s=60.0)
    hottest_c = {}
    for num_sensors in (1, 2):
        time = Time()
        source = SimulatedSource(
            lambda time=time: 80.0 - time.now_s / 60.0,
            clock=time,
            num_sensors=num_sensors,
            faults=[fault],
        )
        hottest_c[num_sensors] = [reading.temperature_c for reading in path_of(source, time, 25)]
    assert set(hottest_c[1]) == {80.0}
    assert hottest_c[2][:10] == [80.0] * 10 and hottest_c[2][-1] == 56.0


def test_an_idle_stuck_sensor_is_believed():
    time = Time()
    source = SimulatedSource(
        lambda: 80.0 - time.now_s / 60.0,
        clock=time,
        num_sensors=2,
        busy_of=lambda: False,
        faults=[SensorFault(kind="stuck")],
    )
    assert {reading.temperature_c for reading in path_of(source, time, 25)} == {80.0}


@pytest.mark.parametrize(
    ("speed", "factor", "throttled"),
    [(1.0, 1.0, False), (0.64, 0.64, True), (1.2, 1.0, False), (-1.0, 0.0, True)],
)
def test_a_slow_clock_is_throttled(speed, factor, throttled):
    reading = SimulatedSource(lambda: 50.0, lambda: speed).read()
    assert (reading.clock_factor, reading.throttled) == (factor, throttled)


@pytest.mark.parametrize("true_c", [math.nan, math.inf, 400.0, -300.0])
def test_a_model_that_leaves_this_world_is_a_sensor_that_lies(true_c):
    reading = SimulatedSource(lambda: true_c).read()
    assert reading.temperature_c is None and len(reading.notes) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"step_c": -1.0}, "step_c = -1.0"),
        ({"noise_c": math.nan}, "noise_c = nan"),
        ({"num_sensors": 0}, "num_sensors"),
        ({"faults": [SensorFault(kind="nan", sensor=1)]}, "there is no sensor 1 among 1"),
        ({"stuck_after_s": 0.0}, "stuck_after_s"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        SimulatedSource(lambda: 50.0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kind": "tired"}, "there are stuck, nan"),
        ({"kind": "nan", "from_s": 2.0, "until_s": 1.0}, "from_s < until_s"),
        ({"kind": "nan", "sensor": -1}, "sensor = -1"),
    ],
)
def test_faults_that_cannot_be_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        SensorFault(**options)  # type: ignore[arg-type]
