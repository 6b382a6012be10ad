"""Sensors that stand still: left out only where load and other sensors speak against them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.plausibility import SensorFilter
from socflower.thermal.sensors.sysfs import NoteLog
from tests.thermal.fake_machines import Machine, zone


def looks(
    path_c: list[float], *, stuck_c: float = 40.0, busy: bool = True, every_s: float = 60.0
) -> list[bool]:
    """Return at every reading whether the stuck sensor is accepted, next to one that follows the path."""
    trust = SensorFilter(NoteLog(), stuck_after_s=600.0)
    return [
        "stuck" in trust.apply(number * every_s, {"stuck": stuck_c, "other": value_c}, busy=busy)
        for number, value_c in enumerate(path_c)
    ]


def test_a_sensor_that_stands_still_under_load_while_another_moves_is_left_out_after_that_time():
    path_c = [40.0 + number for number in range(20)]
    assert looks(path_c) == [True] * 10 + [False] * 10


@given(path_c=st.lists(st.floats(40.0, 42.9), max_size=30))
def test_a_sensor_is_not_stuck_where_no_other_moves(path_c):
    assert all(looks(path_c))


@given(path_c=st.lists(st.floats(20.0, 90.0), max_size=30))
def test_a_sensor_is_not_stuck_while_nothing_runs(path_c):
    assert all(looks(path_c, busy=False))


@given(path_c=st.lists(st.floats(20.0, 90.0), max_size=30), every_s=st.floats(0.1, 1e4))
def test_an_only_sensor_is_believed_however_long_it_stands_still(path_c, every_s):
    trust = SensorFilter(NoteLog())
    for number in range(len(path_c)):
        assert trust.apply(number * every_s, {"stuck": 40.0}, busy=True) == {"stuck": 40.0}


@given(path_c=st.lists(st.integers(20, 90), min_size=1, max_size=60))
def test_a_sensor_that_changes_at_every_look_is_always_believed(path_c):
    trust = SensorFilter(NoteLog(), stuck_after_s=60.0)
    for number, other_c in enumerate(path_c):
        shown_c = 50.0 + number % 2
        assert (
            trust.apply(number * 60.0, {"a": shown_c, "b": float(other_c)}, busy=True)["a"]
            == shown_c
        )


@pytest.mark.parametrize(("moved_c", "believed"), [(2.9, True), (3.0, False), (-3.0, False)])
def test_another_sensor_moves_when_it_is_three_degrees_from_where_it_was(moved_c, believed):
    assert looks([50.0] * 5 + [50.0 + moved_c] * 10)[-1] is believed


def test_a_sensor_that_was_never_believed_disappears_without_a_word():
    notes = NoteLog()
    trust = SensorFilter(notes)
    trust.apply(0.0, {"a": 50.0, "b": "permission denied"}, busy=True)
    assert len(notes.drain()) == 1
    assert trust.apply(1.0, {"a": 50.0}, busy=True) == {"a": 50.0}
    assert notes.drain() == () and trust.rejections == {}


def test_two_looks_hours_apart_prove_nothing():
    assert looks([40.0, 60.0, 80.0, 60.0], every_s=7200.0) == [True] * 4


def test_idle_time_does_not_count():
    trust = SensorFilter(NoteLog(), stuck_after_s=600.0)
    believed = [
        "stuck"
        in trust.apply(number * 60.0, {"stuck": 40.0, "other": 40.0 + number}, busy=number % 2 == 0)
        for number in range(30)
    ]
    assert believed == [True] * 20 + [False] * 10  # every other minute: twice as long


def test_a_stuck_sensor_is_taken_back_when_it_moves_and_not_when_it_fails_meanwhile():
    notes = NoteLog()
    trust = SensorFilter(notes, stuck_after_s=600.0)
    for number in range(20):
        trust.apply(number * 60.0, {"stuck": 40.0, "other": 40.0 + number}, busy=True)
    assert "stuck" in trust.rejections and len(notes.drain()) == 1
    assert "stuck" not in trust.apply(
        1300.0, {"stuck": "permission denied", "other": 60.0}, busy=True
    )
    assert "stuck" not in trust.apply(1360.0, {"stuck": 40.0, "other": 61.0}, busy=True)
    assert notes.drain() == ()
    assert trust.apply(1420.0, {"stuck": 40.5, "other": 62.0}, busy=True)["stuck"] == 40.5
    assert notes.drain() == ("sensor stuck: makes sense again",)


def hottest_of_a_machine(root: Path, busy_part: float) -> list[float | None]:
    """The hotter of two cores sticks at 95 °C while the other cools down by a degree a minute."""
    machine = Machine(root)
    sensors = LinuxSensors(root, clock=machine.clock, pid=1)
    hottest_c = []
    for number in range(20):
        machine.write(
            {**zone(0, "cpu0-thermal", 95_000), **zone(1, "cpu1-thermal", 80_000 - 1000 * number)}
        )
        machine.work(busy_s=busy_part * 240.0 * number, idle_s=(1.0 - busy_part) * 240.0 * number)
        hottest_c.append(sensors.read().temperature_c)
        machine.now_s += 60.0
    return hottest_c


def test_a_machine_finds_its_stuck_sensor_by_its_own_load(tmp_path):
    """Half of one processor of four is load enough."""
    hottest_c = hottest_of_a_machine(tmp_path, busy_part=0.125)
    assert hottest_c[:10] == [95.0] * 10 and hottest_c[10] == 70.0 and hottest_c[-1] == 61.0


def test_an_idle_machine_calls_no_sensor_stuck(tmp_path):
    assert set(hottest_of_a_machine(tmp_path, busy_part=0.05)) == {95.0}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_cannot_be_is_refused(seconds):
    with pytest.raises(ConfigError, match="must be above 0"):
        SensorFilter(NoteLog(), stuck_after_s=seconds)
