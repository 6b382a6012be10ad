"""Constant sensors: left out only if load and other sensors contradict them. Units that are detected from numbers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.sensors.linux import LinuxSensors, SensorKind, kind_of
from socflower.thermal.sensors.plausibility import SensorFilter, TemperatureUnit
from socflower.thermal.sensors.sysfs import NoteLog
from tests.thermal.fake_machines import Machine, zone
from tests.thermal.refusals import refused_each

PATHS_C = st.lists(st.floats(20.0, 90.0), max_size=30)


def accepted(path_c: list[float], *, busy: bool = True, every_s: float = 60.0) -> list[bool]:
    """Return at every reading whether a sensor that is constant at 40 °C is accepted, next to one with this path."""
    sensors = SensorFilter(NoteLog(), stuck_after_s=600.0)
    return [
        "stuck" in sensors.apply(number * every_s, {"stuck": 40.0, "other": other_c}, busy=busy)
        for number, other_c in enumerate(path_c)
    ]


def test_a_sensor_constant_under_load_is_left_out_while_another_changes():
    assert accepted([40.0 + number for number in range(20)]) == [True] * 10 + [False] * 10
    # Readings hours apart prove nothing.
    assert accepted([40.0, 60.0, 80.0, 60.0], every_s=7200.0) == [True] * 4


@given(quiet_c=st.lists(st.floats(40.0, 42.9), max_size=30), path_c=PATHS_C)
def test_a_sensor_is_not_stuck_if_no_other_changes_or_nothing_runs(quiet_c, path_c):
    assert all(accepted(quiet_c)) and all(accepted(path_c, busy=False))


@given(num_reads=st.integers(1, 30), every_s=st.floats(0.1, 1e4))
def test_an_only_sensor_is_accepted_however_long_it_is_constant(num_reads, every_s):
    sensors = SensorFilter(NoteLog())
    for number in range(num_reads):
        assert sensors.apply(number * every_s, {"stuck": 40.0}, busy=True) == {"stuck": 40.0}


@given(path_c=st.lists(st.floats(20.0, 90.0), min_size=1, max_size=60))
def test_a_sensor_that_changes_at_every_reading_is_accepted(path_c):
    sensors = SensorFilter(NoteLog(), stuck_after_s=60.0)
    for number, other_c in enumerate(path_c):
        shown_c = 50.0 + number % 2
        found = sensors.apply(number * 60.0, {"a": shown_c, "b": other_c}, busy=True)
        assert found["a"] == shown_c


@pytest.mark.parametrize(("change_c", "is_accepted"), [(2.9, True), (3.0, False), (-3.0, False)])
def test_another_sensor_counts_from_three_degrees_of_change(change_c, is_accepted):
    assert accepted([50.0] * 5 + [50.0 + change_c] * 10)[-1] is is_accepted


def test_a_rejected_sensor_that_disappears_is_not_reported_again():
    notes = NoteLog()
    sensors = SensorFilter(notes)
    sensors.apply(0.0, {"a": 50.0, "b": "permission denied"}, busy=True)
    assert len(notes.drain()) == 1
    assert sensors.apply(1.0, {"a": 50.0}, busy=True) == {"a": 50.0}
    assert notes.drain() == () and sensors.rejections == {}


def test_a_stuck_sensor_is_rejected_after_busy_time_until_it_changes():
    notes = NoteLog()
    sensors = SensorFilter(notes, stuck_after_s=600.0)
    found = []
    # Busy every other minute, so that it takes twice as long.
    for number in range(30):
        values = {"stuck": 40.0, "other": 40.0 + number}
        found.append("stuck" in sensors.apply(number * 60.0, values, busy=number % 2 == 0))
    assert found == [True] * 20 + [False] * 10
    assert sensors.rejections.keys() == {"stuck"} and len(notes.drain()) == 1
    for at_s, value in ((1800.0, "permission denied"), (1860.0, 40.0)):
        assert "stuck" not in sensors.apply(at_s, {"stuck": value, "other": 60.0}, busy=True)
    assert notes.drain() == ()
    assert sensors.apply(1920.0, {"stuck": 40.5, "other": 62.0}, busy=True)["stuck"] == 40.5
    assert len(notes.drain()) == 1


def hottest_of_a_machine(root: Path, busy_part: float) -> list[float | None]:
    """The hotter of two cores sticks at 95 °C while the other cools down by a degree a minute."""
    machine = Machine(root, zone(0, "cpu0-thermal", 95_000))
    sensors = LinuxSensors(root, clock=machine.clock, pid=1)
    hottest_c = []
    for number in range(20):
        machine.write(zone(1, "cpu1-thermal", 80_000 - 1000 * number))
        machine.work(busy_s=busy_part * 240.0 * number, idle_s=(1.0 - busy_part) * 240.0 * number)
        hottest_c.append(sensors.read().temperature_c)
        machine.now_s += 60.0
    return hottest_c


def test_a_machine_detects_its_stuck_sensor_by_its_own_load(tmp_path):
    """Half of one processor of four is load enough."""
    hottest_c = hottest_of_a_machine(tmp_path / "busy", busy_part=0.125)
    assert hottest_c[:10] == [95.0] * 10 and hottest_c[10] == 70.0 and hottest_c[-1] == 61.0
    assert set(hottest_of_a_machine(tmp_path / "idle", busy_part=0.05)) == {95.0}


def test_an_invalid_time_is_refused():
    def make(stuck_after_s):
        return SensorFilter(NoteLog(), stuck_after_s=stuck_after_s)

    refused_each(make, stuck_after_s=(0.0, -1.0, float("nan")))


# --------------------------------------------------------------------------------------------- names and units
NAMES = {
    SensorKind.SOC: "cpu-thermal CPU-therm x86_pkg_temp tj-thermal tsens_tz_sensor5 mtktscpu BIG soc-thermal "
    "SOC0-therm cpu_thermal bcm2835_thermal cv0-thermal PLL-therm aoss0-usr gpuss-0 GPU-therm",
    SensorKind.OTHER: "battery bms PMIC-Die pm8150b_tz skin-therm xo_therm quiet-therm-adc BAT0 iwlwifi_1 Tboard_tegra "
    "Tdiode_tegra thermal-fan-est mtktspmic mtktsAP modem0-usr usb chg_temp pa_therm0 case_therm thermistor_board",
    SensorKind.UNNAMED: "acpitz",
    None: "soc pm8998-vbat-lvl0 ibat-high pm6150l-bcl-lvl0 vbat",
}
CHIP_NAMES = {
    "coretemp Core 0": SensorKind.SOC,
    "coretemp Package id 0": SensorKind.SOC,
    "k10temp Tctl": SensorKind.SOC,
    "nvme Composite": SensorKind.OTHER,
    "nct6775 SYSTIN": SensorKind.OTHER,
    "amdgpu edge": SensorKind.OTHER,
    "acpitz temp1": SensorKind.UNNAMED,
    "": SensorKind.UNNAMED,
    "INT3400 Thermal": SensorKind.UNNAMED,
}


def test_names_show_what_a_sensor_measures():
    expected = {name: kind for kind, names in NAMES.items() for name in names.split()} | CHIP_NAMES
    assert {name: kind_of(name) for name in expected} == expected


@given(
    per_degree=st.sampled_from([1, 10, 1000]),
    path_c=st.lists(st.integers(20, 145), min_size=1, max_size=30),
)
def test_a_unit_is_kept_so_that_every_temperature_is_right(per_degree, path_c):
    unit = TemperatureUnit()
    assert unit.degrees(40 * per_degree) == 40.0
    assert [unit.degrees(value_c * per_degree) for value_c in path_c] == path_c


@given(raw=st.floats(allow_nan=False, allow_infinity=False))
def test_a_first_number_is_taken_in_a_unit_that_makes_it_a_temperature_or_not_at_all(raw):
    try:
        value_c = TemperatureUnit().degrees(raw)
    except ValueError:
        return
    assert -40.0 <= value_c <= 150.0 and value_c in (raw, raw / 10, raw / 1000)


@pytest.mark.parametrize(
    "raw", [100, 101.5, 150, 1000, 1200, 1500, -41, -128, -999, -128_000, 150_001]
)
def test_an_ambiguous_first_number_decides_nothing(raw):
    unit = TemperatureUnit()
    assert unit.degrees(0) == 0.0  # which decides nothing either
    with pytest.raises(ValueError, match="unit"):
        unit.degrees(raw)
    assert unit.degrees(412) == 41.2


@pytest.mark.parametrize(
    ("garbage", "raw", "true_c"), [(65_535, 45, 45.0), (45, 45_000, 45.0), (65_535, 412, 41.2)]
)
def test_a_unit_from_an_invalid_number_is_decided_again(garbage, raw, true_c):
    unit = TemperatureUnit()
    unit.degrees(garbage)
    # Until then there is no temperature.
    for _ in range(4):
        with pytest.raises(ValueError, match="impossible"):
            unit.degrees(raw)
    assert unit.degrees(raw) == true_c
