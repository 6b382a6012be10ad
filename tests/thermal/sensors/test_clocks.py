"""Clocks, throttle states and batteries of fake machines."""

from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors import linux as battery
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.sysfs import NoteLog
from tests.thermal.fake_machines import CPU, HWMON, POWER, Files, Machine, cooling, policy


def sensors_of(machine: Machine) -> LinuxSensors:
    return LinuxSensors(machine.root, clock=machine.clock, pid=1)


KHZ = st.integers(1, 3_000_000)


@given(
    policies=st.lists(
        st.tuples(st.integers(1, 4), KHZ, KHZ, st.integers(1, 1024)), min_size=1, max_size=4
    )
)
@settings(max_examples=20)
def test_the_clock_is_the_mean_over_processors_weighted_by_capacity(tmp_path_factory, policies):
    """Against the mean over single processors."""
    machine = Machine(tmp_path_factory.mktemp("root"))
    done, whole, first = 0.0, 0.0, 0
    for num_cpus, present, highest, capacity in policies:
        machine.write(policy(first, num_cpus, present, highest, capacity=capacity))
        first += num_cpus
        done += num_cpus * capacity * min(1.0, present / highest)
        whole += num_cpus * capacity
    assert sensors_of(machine).read().clock_factor == pytest.approx(done / whole)


@pytest.mark.parametrize(
    ("present", "highest"), [("<unknown>", 10), (0, 10), (-5, 10), (5, 0), (5, "x"), ("", 10)]
)
def test_an_invalid_clock_is_left_out_with_a_note(tmp_path, present, highest):
    machine = Machine(tmp_path, policy(0, 2, 500, 1000), policy(2, 2, present, highest))
    sensors = sensors_of(machine)
    first, second = sensors.read(), sensors.read()
    assert first.clock_factor == second.clock_factor == 0.5
    assert any("policy2" in note for note in first.notes) and second.notes == ()
    # The processors of a policy may all be offline, which is no error.
    machine.write({f"{CPU}/cpufreq/policy2/affected_cpus": ""})
    reading = sensors_of(machine).read()
    assert reading.clock_factor == 0.5 and not any("policy2" in note for note in reading.notes)


def test_the_counter_of_another_device_with_the_same_number_is_no_throttling(tmp_path):
    def events(number, chip, count):
        return {f"{HWMON}/hwmon{number}/name": chip, f"{HWMON}/hwmon{number}/oc1_event_cnt": count}

    machine = Machine(tmp_path, events(3, "soctherm_oc", 2))
    sensors = sensors_of(machine)
    assert [sensors.read().throttled for _ in range(2)] == [None, False]
    machine.write(events(3, "other", 7) | events(5, "soctherm_oc", 2))
    assert [sensors.read().throttled for _ in range(2)] == [None, False]
    machine.write(events(5, "soctherm_oc", 3))
    assert sensors.read().throttled is True


def test_without_throttle_states_a_lowered_cap_counts(tmp_path):
    machine = Machine(tmp_path)
    sensors = sensors_of(machine)
    throttled = []
    # The first may be the user's own.
    for cap in (800, 600, 800):
        machine.write(policy(0, 4, 500, 1000, cap_khz=cap))
        throttled.append(sensors.read().throttled)
    assert throttled == [False, True, False]


@pytest.mark.parametrize(
    ("name", "state", "throttled"),
    [
        ("thermal-cpufreq-1", 3, True),
        ("cpufreq-cpu4", 1, True),
        ("devfreq-3d00000.gpu", 2, True),
        ("Processor", 1, True),
        ("GPU-balanced", 1, True),
        ("intel_powerclamp", -1, False),
        ("intel_powerclamp", 20, True),
        ("thermal-devfreq-0", 0, False),
        ("pwm-fan", 4, None),
        ("LCD", 1, None),
    ],
)
def test_cooling_devices_that_lower_clocks_count_and_fans_do_not(tmp_path, name, state, throttled):
    assert sensors_of(Machine(tmp_path, cooling(0, name, state))).read().throttled is throttled


def battery_files(name: str, charge: object, status: str, **more: str) -> Files:
    files = {"type": "Battery", "capacity": charge, "status": status, **more}
    return {f"{POWER}/{name}/{key}": value for key, value in files.items()}


@pytest.mark.parametrize(
    ("status", "on_battery"),
    [
        ("Discharging", True),
        ("Charging", False),
        ("Full", False),
        ("Not charging", False),
        ("Unknown", None),
        ("", None),
    ],
)
def test_a_battery_shows_whether_it_is_used(tmp_path, status, on_battery):
    machine = Machine(tmp_path, battery_files("BAT0", 50, status))
    assert sensors_of(machine).read().on_battery is on_battery


def test_two_batteries_count_as_one_and_that_of_a_mouse_does_not(tmp_path):
    mouse = battery_files("hid-1", 1, "Full", scope="Device")
    batteries = battery_files("BAT0", 90, "Full") | battery_files("BAT1", 30, "Discharging")
    reading = sensors_of(Machine(tmp_path, batteries, mouse)).read()
    assert reading.battery_fraction == pytest.approx(0.6) and reading.on_battery is True


@pytest.mark.parametrize("charge", ["101", "-1", "full", ""])
def test_an_invalid_charge_is_left_out_with_a_note(tmp_path, charge):
    reading = sensors_of(Machine(tmp_path, battery_files("BAT0", charge, "Charging"))).read()
    assert reading.battery_fraction is None and reading.on_battery is False
    assert any("charge" in note for note in reading.notes)


def test_without_sys_psutil_is_asked_for_the_battery(tmp_path, monkeypatch):
    monkeypatch.setattr(battery, "matching_paths", lambda *_: [])
    full = type("Battery", (), {"percent": 40.0, "power_plugged": False})()
    monkeypatch.setattr(psutil, "sensors_battery", lambda: full, raising=False)

    def read(root=Path("/")):
        return battery.read_battery(root, NoteLog(), 0.0)

    assert (read().fraction, read().on_battery) == (0.4, True)
    assert read(tmp_path).fraction is None  # it is not of another root

    def fails():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(psutil, "sensors_battery", fails, raising=False)
    assert read().fraction is None
