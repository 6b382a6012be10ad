"""A machine's sensors against fake /sys trees: the right ones are read, and no file's content stops a training."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.reading import Reading
from tests.thermal.fake_machines import (
    CPU,
    HWMON,
    JETSON,
    PHONE,
    PI_THROTTLED,
    RASPBERRY_PI,
    SERVER,
    THERMAL,
    VIRTUAL,
    Machine,
    cooling,
    zone,
)
from tests.thermal.refusals import refused_each


def sensors_of(machine: Machine) -> LinuxSensors:
    return LinuxSensors(machine.root, clock=machine.clock, pid=1)


# ------------------------------------------------------------------------------------------------- whole machines
def test_a_jetson(tmp_path):
    machine = Machine(tmp_path, JETSON)
    sensors = sensors_of(machine)
    first = sensors.read()
    assert first.temperature_c == 64.25  # the junction; the power chip always shows 100 °C
    assert first.clock_factor == pytest.approx((4 * 1.0 + 2 * 0.5) / 6)  # there are no capacities
    assert (first.throttled, first.battery_fraction, first.notes) == (False, None, ())
    machine.write({f"{HWMON}/hwmon3/oc3_event_cnt": 8})
    assert [sensors.read().throttled for _ in range(2)] == [True, False]  # an event is over
    machine.write(cooling(1, "cpufreq-cpu0", 2))
    assert sensors.read().throttled is True
    assert sensors.found.throttle_sources == ("cooling devices", "over-current events")


@pytest.mark.parametrize("prefix", ["", "0x"])
def test_a_raspberry_pi(tmp_path, prefix):
    """Against the table of bits, all sixteen present states with and without a history; under-voltage is a note."""
    machine = Machine(tmp_path, RASPBERRY_PI)
    for history in (0x0, 0xF0000):
        for now in range(16):
            machine.write({PI_THROTTLED: f"{prefix}{history | now:x}"})
            reading = sensors_of(machine).read()
            assert (reading.temperature_c, reading.clock_factor) == (54.53, 1.0)
            assert reading.throttled is (now & 0b1110 != 0)
            assert any("voltage" in note for note in reading.notes) is (now & 1 == 1)


def test_an_android_phone(tmp_path):
    reading = sensors_of(Machine(tmp_path, PHONE)).read()
    # Not skin, nor the 41.2 °C of the other sensor; charge is no temperature.
    assert reading.temperature_c == 43.7
    little, big, prime = 4 * 256, 3 * 1000, 1024
    factor = (little * 0.5 + big + prime) / (little + big + prime)
    assert reading.clock_factor == pytest.approx(factor)
    assert (reading.throttled, reading.battery_fraction, reading.on_battery) == (False, 0.83, True)
    assert reading.notes == ()


def test_without_a_soc_sensor_the_battery_or_the_board_is_read(tmp_path):
    machine = Machine(
        tmp_path, {name: value for name, value in PHONE.items() if "zone" not in name}
    )
    assert sensors_of(machine).read().temperature_c == 33.1  # the battery, in tenths
    machine.write(zone(2, "xo_therm", 36))
    assert sensors_of(machine).read().temperature_c == 36.0


def test_a_server_with_coretemp(tmp_path):
    machine = Machine(tmp_path, SERVER)
    sensors = sensors_of(machine)
    reading = sensors.read()
    assert reading.temperature_c == 73.0  # the hottest core, not the disk
    assert reading.clock_factor == pytest.approx(0.75)  # one above its nominal highest counts as 1
    assert reading.throttled is False and reading.battery_fraction is None
    machine.write({f"{CPU}/cpu0/thermal_throttle/core_throttle_count": 6})
    assert sensors.read().throttled is True


@pytest.mark.parametrize("tree", [VIRTUAL, {}])
def test_a_bare_virtual_machine_has_one_note(tmp_path, tree):
    machine = Machine(tmp_path, tree)
    sensors = sensors_of(machine)
    first = sensors.read()
    assert first == Reading(at_s=100.0, notes=first.notes) and len(first.notes) == 1
    machine.now_s = 8000.0
    assert sensors.read() == Reading(at_s=8000.0)


def test_this_machine_is_read():
    sensors = LinuxSensors()
    assert all(isinstance(sensors.read(), Reading) for _ in range(2))


# ------------------------------------------------------------------------------------------------ never an error
ALL = {
    **JETSON,
    **RASPBERRY_PI,
    **SERVER,
    **PHONE,
    "proc/stat": "cpu  10 0 0 90 0 0 0 0\ncpu0 10 0 0 90",
    "proc/1/stat": "1 (a) S 0 0 0 0 0 0 0 0 0 0 5 5 0 0 20 0 1 0 7 0",
    "proc/1/cmdline": "init",
}
NUMBERS = b"nan inf -inf -128000 1e400 0x10 -1 <unknown> \0 65535".split()
JUNK = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([*NUMBERS, b"9" * 5000, b"", b"1 2", "٤٢".encode()]),
    st.integers(-(10**7), 10**7),
    st.none(),
    st.just("folder"),
)


@settings(max_examples=20)
@given(
    spoiled=st.lists(
        st.dictionaries(st.sampled_from(sorted(ALL)), JUNK, max_size=12), min_size=1, max_size=3
    )
)
def test_no_content_of_any_file_makes_a_read_fail(tmp_path_factory, spoiled):
    """A `Reading` checks its own ranges, so that each one made is possible."""
    machine = Machine(tmp_path_factory.mktemp("root"), ALL)
    sensors = sensors_of(machine)
    for files in spoiled:
        for name, content in files.items():
            path = machine.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.mkdir() if content == "folder" else machine.write({name: content})
        machine.now_s += 60.0
        assert all("\n" not in note and len(note) < 250 for note in sensors.read().notes)


def two_zones(root: Path) -> tuple[Machine, LinuxSensors]:
    machine = Machine(root, zone(0, "cpu-thermal", 70_000), zone(1, "gpu-thermal", 50_000))
    return machine, sensors_of(machine)


INVALID = ["nan", "inf", "", "hot", "-128000", "-128", "999999999", b"\xff\xfe", "4 5", None]


@pytest.mark.parametrize("content", INVALID)
def test_an_invalid_sensor_is_left_out_with_one_note_and_accepted_again(tmp_path, content):
    machine, sensors = two_zones(tmp_path)
    assert sensors.read().temperature_c == 70.0
    machine.write({f"{THERMAL}/thermal_zone0/temp": content})
    first, *later = [sensors.read() for _ in range(3)]
    assert {reading.temperature_c for reading in (first, *later)} == {50.0}
    assert len(first.notes) == 1 and "cpu-thermal" in first.notes[0]
    assert not any(reading.notes for reading in later)
    machine.write(zone(0, "cpu-thermal", 71_000))
    back = sensors.read()
    assert back.temperature_c == 71.0 and len(back.notes) == 1 and sensors.read().notes == ()


def test_a_flickering_sensor_is_reported_once_an_hour(tmp_path):
    machine, sensors = two_zones(tmp_path)
    notes = []
    for number in range(200):
        machine.write(zone(0, "cpu-thermal", "nan" if number % 2 else 70_000))
        machine.now_s += 60.0
        reading = sensors.read()
        notes.extend(reading.notes)
        assert reading.temperature_c == (50.0 if number % 2 else 70.0)
    assert 6 <= len(notes) <= 8  # begin and end of each, in 200 minutes


def test_without_a_valid_sensor_there_is_no_temperature(tmp_path):
    zones = zone(0, "cpu-thermal", -128_000)
    reading = sensors_of(Machine(tmp_path, zones, {f"{HWMON}/hwmon0/temp1_input": "nan"})).read()
    assert reading.temperature_c is None and len(reading.notes) == 2


def test_a_sensor_that_disappears_is_reported(tmp_path):
    _, sensors = two_zones(tmp_path)
    sensors.read()
    shutil.rmtree(tmp_path / THERMAL / "thermal_zone0")
    readings = [sensors.read() for _ in range(3)]
    assert [reading.temperature_c for reading in readings] == [50.0] * 3
    assert [len(reading.notes) for reading in readings] == [1, 0, 0]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENODEV])
@pytest.mark.parametrize(
    ("name", "num_notes"),
    [
        ("thermal_zone1/temp", 1),
        ("thermal_zone0/temp", 1),
        ("thermal_zone0/type", 0),
        ("scaling_cur_freq", 3),
        ("get_throttled", 1),
        ("cooling_device1/cur_state", 1),
        ("capacity", 1),
        ("proc/stat", 1),
        ("battery/temp", 1),
    ],
)
def test_a_file_that_cannot_be_read_is_left_out(tmp_path, monkeypatch, name, num_notes, number):
    """The reading itself is made to fail: root, who may run this, may read everything."""
    machine = Machine(tmp_path, {**PHONE, PI_THROTTLED: 0, "proc/stat": "cpu  1 0 0 9 0 0 0 0"})
    sensors = sensors_of(machine)
    read_text = Path.read_text

    def read(path, *arguments):
        if path.as_posix().endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return read_text(path, *arguments)

    with monkeypatch.context() as closed:
        closed.setattr(Path, "read_text", read)
        readings = [sensors.read() for _ in range(2)]
    hottest_c = 41.2 if name == "thermal_zone1/temp" else 43.7
    assert [reading.temperature_c for reading in readings] == [hottest_c] * 2
    assert [len(reading.notes) for reading in readings] == [num_notes, 0]
    assert sensors.read().temperature_c == 43.7


def test_an_invalid_time_is_refused():
    refused_each(LinuxSensors, stuck_after_s=(0,))
