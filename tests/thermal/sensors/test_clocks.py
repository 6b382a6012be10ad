"""Clocks, throttle states and batteries of made-up machines."""

import shutil
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors import linux as battery
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.sysfs import NoteLog
from tests.thermal.fake_machines import CPU, HWMON, POWER, Machine, cooling, policy


def sensors_of(machine: Machine) -> LinuxSensors:
    return LinuxSensors(machine.root, clock=machine.clock, pid=1)


def read_clocks(machine: Machine) -> Reading:
    return sensors_of(machine).read()


@given(
    policies=st.lists(
        st.tuples(
            st.integers(1, 4),
            st.integers(1, 3_000_000),
            st.integers(1, 3_000_000),
            st.integers(1, 1024),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=40)
def test_the_clock_is_the_mean_over_processors_weighted_by_capacity(
    tmp_path_factory,
    policies,
):
    """Against the mean over single processors."""
    machine = Machine(tmp_path_factory.mktemp("root"))
    done, whole, first = 0.0, 0.0, 0
    for num_cpus, present, highest, capacity in policies:
        machine.write(policy(first, num_cpus, present, highest, capacity=capacity))
        first += num_cpus
        for _ in range(num_cpus):
            done += capacity * min(1.0, present / highest)
            whole += capacity
    assert read_clocks(machine).clock_factor == pytest.approx(done / whole)
    shutil.rmtree(machine.root)


@pytest.mark.parametrize(
    ("present", "highest"), [("<unknown>", 10), (0, 10), (-5, 10), (5, 0), (5, "x"), ("", 10)]
)
def test_a_clock_that_cannot_be_is_left_out_with_a_note(tmp_path, present, highest):
    machine = Machine(tmp_path, policy(0, 2, 500, 1000), policy(2, 2, present, highest))
    sensors = sensors_of(machine)
    first, second = sensors.read(), sensors.read()
    assert first.clock_factor == second.clock_factor == 0.5
    assert any("policy2" in note for note in first.notes) and second.notes == ()


def test_a_counter_that_took_anothers_number_is_no_throttling(tmp_path):
    def events(number, chip, count):
        return {f"{HWMON}/hwmon{number}/name": chip, f"{HWMON}/hwmon{number}/oc1_event_cnt": count}

    machine = Machine(tmp_path, events(3, "soctherm_oc", 2))
    sensors = sensors_of(machine)
    assert [sensors.read().throttled for _ in range(2)] == [None, False]
    machine.write(events(3, "other", 7) | events(5, "soctherm_oc", 2))
    assert [sensors.read().throttled for _ in range(2)] == [None, False]
    machine.write(events(5, "soctherm_oc", 3))
    assert sensors.read().throttled is True


def test_a_clock_whose_processors_are_off_is_no_trouble(tmp_path):
    machine = Machine(
        tmp_path,
        policy(0, 2, 500, 1000),
        {**policy(2, 2, "<unknown>", 10), f"{CPU}/cpufreq/policy2/affected_cpus": ""},
    )
    reading = read_clocks(machine)
    assert reading.clock_factor == 0.5 and not any("policy2" in note for note in reading.notes)


def test_without_throttle_states_a_cap_that_sank_says_it(tmp_path):
    machine = Machine(tmp_path, policy(0, 4, 500, 1000, cap_khz=800))
    sensors = sensors_of(machine)
    assert sensors.read().throttled is False  # somebody's own cap, from the start
    machine.write(policy(0, 4, 500, 1000, cap_khz=600))
    assert sensors.read().throttled is True
    machine.write(policy(0, 4, 500, 1000, cap_khz=800))
    assert sensors.read().throttled is False


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
        ("Fan", 1, None),
        ("LCD", 1, None),
    ],
)
def test_cooling_devices_that_slow_down_say_it_and_fans_do_not(
    tmp_path,
    name,
    state,
    throttled,
):
    assert read_clocks(Machine(tmp_path, cooling(0, name, state))).throttled is throttled


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
def test_a_battery_says_whether_it_is_used(tmp_path, status, on_battery):
    files = {
        f"{POWER}/BAT0/type": "Battery",
        f"{POWER}/BAT0/capacity": 50,
        f"{POWER}/BAT0/status": status,
    }
    assert read_clocks(Machine(tmp_path, files)).on_battery is on_battery


def test_two_batteries_are_one_and_a_mouse_has_none_of_them(tmp_path):
    machine = Machine(
        tmp_path,
        {
            f"{POWER}/BAT0/type": "Battery",
            f"{POWER}/BAT0/capacity": 90,
            f"{POWER}/BAT0/status": "Full",
            f"{POWER}/BAT1/type": "Battery",
            f"{POWER}/BAT1/capacity": 30,
            f"{POWER}/BAT1/status": "Discharging",
            f"{POWER}/hid-1/type": "Battery",
            f"{POWER}/hid-1/scope": "Device",
            f"{POWER}/hid-1/capacity": 1,
        },
    )
    reading = read_clocks(machine)
    assert reading.battery_fraction == pytest.approx(0.6) and reading.on_battery is True


@pytest.mark.parametrize("charge", ["101", "-1", "full", ""])
def test_a_charge_that_cannot_be_is_left_out_with_a_note(tmp_path, charge):
    files = {
        f"{POWER}/BAT0/type": "Battery",
        f"{POWER}/BAT0/capacity": charge,
        f"{POWER}/BAT0/status": "Charging",
    }
    reading = read_clocks(Machine(tmp_path, files))
    assert reading.battery_fraction is None and reading.on_battery is False
    assert any("charge" in note for note in reading.notes)


def test_where_there_is_no_sys_psutil_is_asked_for_the_battery(tmp_path, monkeypatch):
    monkeypatch.setattr(battery, "matching_paths", lambda *_: [])
    full = type("Battery", (), {"percent": 40.0, "power_plugged": False})()
    monkeypatch.setattr(psutil, "sensors_battery", lambda: full, raising=False)
    state = battery.read_battery(Path("/"), NoteLog(), 0.0)
    assert (state.fraction, state.on_battery) == (0.4, True)
    assert battery.read_battery(tmp_path, NoteLog(), 0.0).fraction is None  # not of another root

    def fails():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(psutil, "sensors_battery", fails, raising=False)
    assert battery.read_battery(Path("/"), NoteLog(), 0.0).fraction is None
