"""A machine's sensors against made-up /sys trees: the right ones are read, and nothing in them stops a training."""

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
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


def sensors_of(machine: Machine, **options: float) -> LinuxSensors:
    return LinuxSensors(machine.root, clock=machine.clock, pid=1, **options)  # type: ignore[arg-type]


def read(machine: Machine) -> Reading:
    return sensors_of(machine).read()


# ------------------------------------------------------------------------------------------------- whole machines
def test_a_jetson(tmp_path):
    machine = Machine(tmp_path, JETSON)
    sensors = sensors_of(machine)
    first = sensors.read()
    assert first.temperature_c == 64.25  # the junction; the power chip always says 100 °C
    assert first.clock_factor == pytest.approx(
        (4 * 1.0 + 2 * 0.5) / 6
    )  # no capacities: processors are counted
    assert first.throttled is False and first.battery_fraction is None and first.notes == ()
    machine.write({f"{HWMON}/hwmon3/oc3_event_cnt": 8})
    assert sensors.read().throttled is True
    assert sensors.read().throttled is False  # that event is over
    machine.write(cooling(1, "cpufreq-cpu0", 2))
    assert sensors.read().throttled is True
    assert sensors.found.throttle_sources == ("cooling devices", "over-current events")


def test_a_raspberry_pi(tmp_path):
    machine = Machine(tmp_path, RASPBERRY_PI)
    reading = read(machine)
    assert (reading.temperature_c, reading.clock_factor, reading.throttled) == (54.53, 1.0, False)
    machine.write({PI_THROTTLED: "50005"})  # as the file has it: hexadecimal without 0x
    reading = read(machine)
    assert reading.throttled is True and any("voltage is too low" in note for note in reading.notes)


@pytest.mark.parametrize("prefix", ["", "0x"])
def test_of_a_pis_bits_those_of_now_count_and_under_voltage_is_a_note(tmp_path, prefix):
    """Against the table of bits, all sixteen states of now with and without a history."""
    machine = Machine(tmp_path, RASPBERRY_PI)
    for history in (0x0, 0xF0000):
        for now in range(16):
            machine.write({PI_THROTTLED: f"{prefix}{history | now:x}"})
            reading = read(machine)
            assert reading.throttled is (now & 0b1110 != 0)
            assert any("voltage" in note for note in reading.notes) is (now & 1 == 1)


def test_an_android_phone(tmp_path):
    reading = read(Machine(tmp_path, PHONE))
    assert (
        reading.temperature_c == 43.7
    )  # not skin, nor the 41.2 °C of the other one; charge is no temperature
    weights = 4 * 256, 3 * 1000, 1024
    assert reading.clock_factor == pytest.approx(
        (weights[0] * 0.5 + weights[1] + weights[2]) / sum(weights)
    )
    assert (reading.throttled, reading.battery_fraction, reading.on_battery) == (False, 0.83, True)
    assert reading.notes == ()


def test_a_phone_whose_soc_is_closed_shows_what_is_beside_it(tmp_path):
    machine = Machine(
        tmp_path, {name: value for name, value in PHONE.items() if "zone" not in name}
    )
    assert read(machine).temperature_c == 33.1  # the battery, in tenths
    machine.write(zone(2, "xo_therm", 36))
    assert read(machine).temperature_c == 36.0


def test_a_server_with_coretemp(tmp_path):
    machine = Machine(tmp_path, SERVER)
    sensors = sensors_of(machine)
    reading = sensors.read()
    assert reading.temperature_c == 73.0  # the hottest core, not the disk
    assert reading.clock_factor == pytest.approx(
        0.75
    )  # one runs above its nominal highest: that is 1
    assert reading.throttled is False and reading.battery_fraction is None
    machine.write({f"{CPU}/cpu0/thermal_throttle/core_throttle_count": 6})
    assert sensors.read().throttled is True


@pytest.mark.parametrize("tree", [VIRTUAL, {}])
def test_a_bare_virtual_machine_says_once_that_it_has_none(tmp_path, tree):
    machine = Machine(tmp_path, tree)
    sensors = sensors_of(machine)
    readings = []
    for _ in range(5):
        readings.append(sensors.read())
        machine.now_s += 4000.0
    assert [len(reading.notes) for reading in readings] == [1, 0, 0, 0, 0]
    assert "no temperature sensor" in readings[0].notes[0]
    for reading in readings:
        said = (
            reading.temperature_c,
            reading.clock_factor,
            reading.throttled,
            reading.battery_fraction,
            reading.on_battery,
            reading.user_load,
        )
        assert said == (None,) * 6


def test_this_machine_is_read_whatever_it_has():
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
JUNK = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"nan",
            b"inf",
            b"-inf",
            b"-128000",
            b"1e400",
            b"9" * 5000,
            b"0x10",
            b"-1",
            b"<unknown>",
            b"\0",
            b"",
            b"65535",
            b"1 2",
            "٤٢".encode(),
        ]
    ),
    st.integers(-(10**7), 10**7).map(lambda number: str(number).encode()),
)


@settings(max_examples=30)
@given(
    looks=st.lists(
        st.dictionaries(
            st.sampled_from(sorted(ALL)), st.one_of(JUNK, st.just("folder"), st.none()), max_size=12
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_content_of_any_file_makes_a_read_fail(
    tmp_path_factory,
    looks,
):
    """A `Reading` checks its own ranges, so that each one made is one that can be."""
    machine = Machine(tmp_path_factory.mktemp("root"), ALL)
    sensors = sensors_of(machine)
    for spoiled in looks:
        for name, content in spoiled.items():
            path = machine.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if content == "folder":
                path.mkdir()
            elif content is not None:
                machine.write({name: content})
        machine.now_s += 60.0
        reading = sensors.read()
        assert all("\n" not in note and len(note) < 250 for note in reading.notes)
    shutil.rmtree(machine.root)


LIES = [
    "nan",
    "NaN",
    "inf",
    "",
    "hot",
    "-128000",
    "-128",
    "-256000",
    "999999999",
    "\xff\xfe",
    "4 5",
]


@pytest.mark.parametrize("lie", LIES)
def test_a_sensor_that_lies_is_left_out_with_one_note_and_taken_back(tmp_path, lie):
    machine = Machine(tmp_path, zone(0, "cpu-thermal", 70_000), zone(1, "gpu-thermal", 50_000))
    sensors = sensors_of(machine)
    assert sensors.read().temperature_c == 70.0
    machine.write(zone(0, "cpu-thermal", lie.encode("latin-1")))
    readings = [sensors.read() for _ in range(4)]
    assert {reading.temperature_c for reading in readings} == {50.0}
    assert [len(reading.notes) for reading in readings] == [1, 0, 0, 0]
    assert "cpu-thermal" in readings[0].notes[0] and "left out" in readings[0].notes[0]
    machine.write(zone(0, "cpu-thermal", 71_000))
    back = sensors.read()
    assert back.temperature_c == 71.0 and ["makes sense again" in note for note in back.notes] == [
        True
    ]
    assert sensors.read().notes == ()


def test_a_sensor_that_flickers_is_told_of_once_an_hour(tmp_path):
    machine = Machine(tmp_path, zone(0, "cpu-thermal", 70_000), zone(1, "gpu-thermal", 50_000))
    sensors = sensors_of(machine)
    notes = []
    for number in range(200):
        machine.write(zone(0, "cpu-thermal", "nan" if number % 2 else 70_000))
        machine.now_s += 60.0
        reading = sensors.read()
        notes.extend(reading.notes)
        assert reading.temperature_c == (50.0 if number % 2 else 70.0)
    assert len(notes) <= 2 * math.ceil(200 * 60 / 3600)


def test_all_sensors_lying_leave_no_temperature(tmp_path):
    machine = Machine(
        tmp_path, zone(0, "cpu-thermal", -128_000), {f"{HWMON}/hwmon0/temp1_input": "nan"}
    )
    reading = read(machine)
    assert reading.temperature_c is None and len(reading.notes) == 2


def test_a_sensor_that_disappears_is_told_of(tmp_path):
    machine = Machine(tmp_path, zone(0, "cpu-thermal", 70_000), zone(1, "gpu-thermal", 50_000))
    sensors = sensors_of(machine)
    sensors.read()
    shutil.rmtree(tmp_path / THERMAL / "thermal_zone0")
    readings = [sensors.read() for _ in range(3)]
    assert [reading.temperature_c for reading in readings] == [50.0] * 3
    assert [len(reading.notes) for reading in readings] == [1, 0, 0] and "is gone" in readings[
        0
    ].notes[0]


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EIO, errno.EAGAIN, errno.ENODEV]
)
@pytest.mark.parametrize(
    "name",
    [
        "thermal_zone1/temp",
        "thermal_zone0/temp",
        "thermal_zone0/type",
        "scaling_cur_freq",
        "get_throttled",
        "cooling_device1/cur_state",
        "capacity",
        "proc/stat",
        "battery/temp",
    ],
)
def test_a_file_that_cannot_be_read_is_left_out(
    tmp_path,
    monkeypatch,
    name,
    number,
):
    """The reading itself is made to fail: root, as whom tests may run, is refused nothing by a file's mode."""
    machine = Machine(tmp_path, {**PHONE, PI_THROTTLED: 0, "proc/stat": "cpu  1 0 0 9 0 0 0 0"})
    sensors = sensors_of(machine)
    with monkeypatch.context() as closed:
        refuse(closed, name, number)
        readings = [sensors.read() for _ in range(3)]
    assert {reading.temperature_c for reading in readings} == {
        41.2 if name == "thermal_zone1/temp" else 43.7
    }
    assert not any(reading.notes for reading in readings[1:])
    assert len(readings[0].notes) == {
        "thermal_zone0/type": 0,
        "scaling_cur_freq": 3,
        "capacity": 1,
    }.get(name, 1)
    assert sensors.read().temperature_c == 43.7


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    for method in ("read_text", "read_bytes"):
        read_file = getattr(Path, method)

        def read(path: Path, *arguments: str, read_file: Any = read_file) -> Any:
            if path.as_posix().endswith(name):
                raise OSError(number, os.strerror(number), str(path))
            return read_file(path, *arguments)

        monkeypatch.setattr(Path, method, read)


def test_a_time_that_nothing_could_be_stuck_for_is_refused():
    with pytest.raises(ConfigError, match="stuck_after_s = 0"):
        LinuxSensors(stuck_after_s=0)
