"""Fans on a fake /sys, real commands and a fake clock: never below the lowest duty."""

import os
import shlex
import sys
import time
from functools import partial
from math import inf, nan
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.fans import outputs as fan_output
from socflower.thermal.fans.hwmon_pwm import HwmonPwm, find_hwmon
from socflower.thermal.fans.ipmi import IpmiCommand
from socflower.thermal.fans.outputs import (
    DutyCurve,
    FanFailure,
    FanNotFound,
    SimulatedFan,
    calibrate,
    duty_curve,
    measured_speed,
)
from socflower.thermal.sensors.sysfs import DeviceIdentity, OpenFolder
from tests.one_line import refused
from tests.thermal.fake_machines import Clock, contents, write_files
from tests.thermal.refusals import refused_each

PYTHON = f"{shlex.quote(sys.executable)} -c"
CHIP = {"name": "nct6798", "pwm1": 100, "pwm1_enable": 5, "fan1_input": 900}
OTHER_CHIP = {"name": "amdgpu", "pwm1": 40, "pwm1_enable": 2, "fan1_input": 3333}

hwmon = partial(HwmonPwm, min_rpm=1000.0, max_rpm=10000.0)
command_fan = partial(IpmiCommand, min_rpm=1000.0, max_rpm=9000.0)
failure = partial(refused, error=FanFailure)
not_found = partial(refused, error=FanNotFound)


def chip(root: Path, folder: str = "hwmon0", device: str = "", **files: object) -> Path:
    """Make a chip with one PWM output in automatic mode; None removes a file."""
    path = root / "sys/class/hwmon" / folder
    write_files(path, {**CHIP, **files})
    # The target of the link need not be there.
    if device:
        (path / "device").symlink_to(f"../../../{device}")
    return path


def state(folder: Path) -> tuple[int, int]:
    """Return what is written: duty of 255, and mode."""
    return int((folder / "pwm1").read_text()), int((folder / "pwm1_enable").read_text())


def python(program: str, *arguments: object) -> str:
    """Return a command that runs a line of Python."""
    return " ".join([PYTHON, shlex.quote(program), *map(str, arguments)])


@st.composite
def curves(draw: st.DrawFn) -> DutyCurve:
    size = draw(st.integers(2, 6))
    duties = draw(st.sets(st.integers(20, 100), min_size=size, max_size=size))
    speeds = draw(st.sets(st.floats(100.0, 20000.0), min_size=size, max_size=size))
    percent = [duty / 100 for duty in sorted(duties)]
    return DutyCurve(tuple(zip(percent, sorted(speeds), strict=True)))


# ----------------------------------------------------------------------------------------------------- curves
@given(curve=curves(), speeds=st.tuples(st.floats(1.0, 30000.0), st.floats(1.0, 30000.0)))
def test_a_curves_duty_rises_with_the_speed_and_stays_within_its_ends(curve, speeds):
    slow, fast = sorted(speeds)
    assert curve.points[0][0] <= curve.duty(slow) <= curve.duty(fast) <= curve.points[-1][0]


@given(curve=curves(), part=st.floats(0.0, 1.0))
def test_the_duty_of_a_speed_on_the_curve_is_interpolated(curve, part):
    for (low, slow), (high, fast) in zip(curve.points, curve.points[1:], strict=False):
        duty = curve.duty(slow + part * (fast - slow))
        assert duty == pytest.approx(low + part * (high - low), abs=1e-9)


def test_an_invalid_curve_is_refused():
    for points in ((), ((0.2, 1000.0),)):
        refused(partial(DutyCurve, points), "curve", len(points))
    for duty, rpm in ((0.0, 1000.0), (0.2, 0.0), (0.2, 2000.0), (1.1, 1000.0), (0.2, nan)):
        refused(partial(DutyCurve, ((duty, rpm), (1.0, 2000.0))), "curve", f"{rpm:g}")
    refused(partial(DutyCurve, ((1.0, 1000.0), (0.2, 2000.0))), "curve", "1000", "2000")
    line = partial(duty_curve, None, min_rpm=100.0, max_rpm=200.0, min_duty=0.2)
    refused_each(partial(line), min_duty=(0.0, 1.0, nan))
    for bad in ({"min_rpm": 0.0}, {"min_rpm": 200.0}, {"min_rpm": nan}, {"max_rpm": inf}):
        refused(partial(line, **bad), "curve", *(f"{rpm:g}" for rpm in bad.values()))


# ------------------------------------------------------------------------------------------------------ hwmon
@given(rpm=st.floats(0.001, 1e9), min_duty=st.floats(0.01, 0.99), curve=st.none() | curves())
def test_no_pwm_is_written_below_the_lowest_duty_nor_below_the_wanted_one(
    tmp_path_factory, rpm, min_duty, curve
):
    folder = chip(tmp_path_factory.getbasetemp())
    fan = hwmon(folder, min_duty=min_duty, curve=curve)
    fan.set_rpm(rpm)
    written, mode = state(folder)
    assert max(1.0, 255 * min_duty - 1e-6, 255 * fan.curve.duty(rpm) - 1e-6) <= written <= 255
    assert mode == 1


@pytest.mark.parametrize("rpm", [0.0, -1.0, nan, inf])
def test_an_invalid_speed_is_not_written(tmp_path, rpm):
    folder = chip(tmp_path)
    failure(partial(hwmon(folder).set_rpm, rpm), rpm)
    assert state(folder) == (100, 5)


def test_a_pwm_fan_is_set_measured_and_restored(tmp_path):
    folder = chip(tmp_path)
    fan = hwmon(folder)
    assert state(folder) == (100, 5)  # nothing is written yet
    assert fan.describe() == "pwm1 of nct6798" and fan.measured_rpm() == 900.0
    fan.set_rpm(1000.0)
    assert state(folder) == (51, 1)
    chip(tmp_path, pwm1_enable=2)  # the firmware takes the output back
    fan.set_rpm(10000.0)
    assert state(folder) == (255, 1)
    fan.restore()
    assert state(folder) == (255, 5)


def test_the_tachometer_may_have_another_number_or_no_valid_speed(tmp_path):
    folder = chip(tmp_path, fan1_input=None, fan3_input=1234)
    assert hwmon(folder).measured_rpm() is None
    fan = hwmon(folder, fan=3)
    assert fan.measured_rpm() == 1234.0
    for content in (-1, "", "fast", b"\xff", 65_535, 4_294_967_295):
        chip(tmp_path, fan3_input=content)
        assert fan.measured_rpm() is None
    speeds = [measured_speed(rpm) for rpm in (-1, 65_535, nan, inf, 0, 65_534)]
    assert speeds == [None] * 4 + [0.0, 65_534.0]


@pytest.mark.parametrize(
    ("name", "mode"), [("nct6798", 1), ("nct6798", None), ("pwmfan", 0), ("pwmfan", 2)]
)
def test_an_output_without_an_automatic_mode_cannot_be_restored(tmp_path, name, mode):
    """As after a program that was killed in manual mode; modes of the driver pwmfan are none of control."""
    folder = chip(tmp_path, name=name, pwm1_enable=mode)
    fan = hwmon(folder)
    fan.set_rpm(10000.0)
    failure(fan.restore, folder / "pwm1")
    assert (folder / "pwm1").read_text() == "255\n"


def test_a_mode_for_the_end_can_be_given(tmp_path):
    folder = chip(tmp_path, pwm1_enable=1)
    fan = hwmon(folder, automatic_mode=2)
    fan.set_rpm(1000.0)
    fan.restore()
    assert state(folder) == (51, 2)
    refused_each(partial(hwmon, folder), automatic_mode=(1, -1))


def fault(monkeypatch: pytest.MonkeyPatch, file: str, *, raises: bool) -> None:
    """Let writes to a file fail, or have no effect."""
    write = OpenFolder.write

    def faulty(opened: OpenFolder, name: str, value: int) -> None:
        if name != file:
            write(opened, name, value)
        elif raises:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(OpenFolder, "write", faulty)


def test_an_output_that_fails_is_automatic_again(tmp_path, monkeypatch):
    folder = chip(tmp_path)
    fan = hwmon(folder)
    fault(monkeypatch, "pwm1", raises=True)
    failure(partial(fan.set_rpm, 5000.0), folder / "pwm1", "input/output error")
    assert state(folder) == (100, 5)
    monkeypatch.undo()
    fan.set_rpm(1000.0)
    assert state(folder) == (51, 1)


@pytest.mark.parametrize("file", ["pwm1_enable", "pwm1"])
def test_an_output_that_ignores_what_is_written_is_a_failure(tmp_path, monkeypatch, file):
    fan = hwmon(chip(tmp_path, pwm1=0))
    fault(monkeypatch, file, raises=False)
    failure(partial(fan.set_rpm, 5000.0), "pwm1")


@pytest.mark.parametrize("removed", [["pwm1"], ["pwm1", "name"], CHIP])
def test_a_removed_output_is_a_failure_and_not_created(tmp_path, removed):
    folder = chip(tmp_path)
    fan = hwmon(folder)
    for name in removed:
        (folder / name).unlink()
    before = contents(folder)
    not_found(partial(fan.set_rpm, 5000.0), folder / "pwm1")
    if "name" in removed:
        not_found(fan.restore, folder / "pwm1_enable", "nct6798")
        assert contents(folder) == before and fan.measured_rpm() is None


def test_a_chip_with_a_new_number_is_driven_and_no_other_chip(tmp_path):
    folder = chip(tmp_path, "hwmon3")
    fan = hwmon(folder)
    fan.set_rpm(1000.0)
    moved = folder.rename(folder.with_name("hwmon5"))
    write_files(moved, {"pwm1_enable": 2})  # its driver is loaded again
    other = chip(tmp_path, "hwmon3", **OTHER_CHIP)
    before = contents(other)
    assert fan.measured_rpm() == 900.0
    fan.set_rpm(10000.0)
    assert state(moved) == (255, 1)
    fan.restore()
    assert state(moved) == (255, 5) and fan.describe() == "pwm1 of nct6798"
    moved.rename(tmp_path / "removed")
    not_found(partial(fan.set_rpm, 5000.0), "nct6798")
    not_found(fan.restore, "nct6798")
    assert fan.measured_rpm() is None and contents(other) == before


def test_of_two_chips_of_one_name_the_device_identifies_the_fans(tmp_path):
    first, second = chip(tmp_path, "hwmon1", "a.1"), chip(tmp_path, "hwmon2", "a.2")
    fan = hwmon(first)
    aside = first.rename(first.with_name("aside"))
    second.rename(first)
    aside.rename(second)
    fan.set_rpm(10000.0)
    assert state(first) == (100, 5) and state(second) == (255, 1)


def test_of_two_chips_that_nothing_tells_apart_none_is_driven(tmp_path):
    folder = chip(tmp_path, "hwmon1")
    fan = hwmon(folder)
    chips = [folder.rename(folder.with_name("hwmon2")), chip(tmp_path, "hwmon3")]
    not_found(partial(fan.set_rpm, 10000.0), "several nct6798")
    assert [state(path) for path in chips] == [(100, 5)] * 2


def test_a_chip_removed_between_check_and_write_changes_no_other_chip(tmp_path, monkeypatch):
    folder = chip(tmp_path, "hwmon3")
    fan = hwmon(folder)
    write = OpenFolder.write

    def swapped(opened, name, value):
        if (folder / "name").read_text() == "nct6798\n":
            write_files(folder, dict.fromkeys(CHIP))
            folder.rename(tmp_path / "removed")
            chip(tmp_path, "hwmon3", **OTHER_CHIP)
        write(opened, name, value)

    monkeypatch.setattr(OpenFolder, "write", swapped)
    not_found(partial(fan.set_rpm, 10000.0))
    assert state(folder) == (40, 2)


def test_a_number_or_path_of_a_known_chip_leads_to_that_chip(tmp_path):
    moved, other = chip(tmp_path, "hwmon5"), chip(tmp_path, "hwmon3", **OTHER_CHIP)
    last, gone = DeviceIdentity("nct6798", None), DeviceIdentity("it87", "it87.656")
    for name in ("hwmon3", str(other)):
        assert find_hwmon(name, tmp_path) == other  # nothing is known of it
        assert find_hwmon(name, tmp_path, last=last) == moved
        assert find_hwmon(name, tmp_path, last=DeviceIdentity("amdgpu", None)) == other
        refused(partial(find_hwmon, name, tmp_path, last=gone), name, "it87")
    assert find_hwmon("amdgpu", tmp_path, last=last) == other  # the name wins


def test_a_chip_is_found_by_name_number_or_path(tmp_path):
    first = chip(tmp_path, "hwmon2", name="k10temp")
    second = chip(tmp_path, "hwmon10", "nct6775.656")
    assert find_hwmon("nct6798", tmp_path) == find_hwmon("hwmon10", tmp_path) == second
    assert find_hwmon(str(first), tmp_path) == first
    refused(partial(find_hwmon, "it87", tmp_path), "it87", "k10temp (hwmon2), nct6798 (hwmon10)")
    third = chip(tmp_path, "hwmon3", "nct6775.2592")
    for last in (None, DeviceIdentity("nct6798", "gone")):
        refused(partial(find_hwmon, "nct6798", tmp_path, last=last), "nct6798", "several")
    last = DeviceIdentity("nct6798", "nct6775.2592")
    assert find_hwmon("nct6798", tmp_path, last=last) == third
    refused(partial(find_hwmon, "it87", tmp_path / "elsewhere"), "it87", "elsewhere")


@pytest.mark.parametrize(
    ("pwm", "files"), [(2, {}), (1, {"pwm1": "full"}), (1, {"pwm1_enable": ""})]
)
def test_a_missing_output_is_refused(tmp_path, pwm, files):
    folder = chip(tmp_path, **files)
    refused(partial(hwmon, folder, pwm), folder / f"pwm{pwm}")


@pytest.mark.parametrize("file", ["pwm1", "pwm1_enable"])
def test_an_output_that_only_root_may_write_is_refused(tmp_path, monkeypatch, file):
    """The kernel's answer is faked: root, who may run this, may write everything."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != file)
    folder = chip(tmp_path)
    refused(partial(hwmon, folder), folder / file)


# --------------------------------------------------------------------------------------------------- commands
@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def writer(log: Path, *arguments: str) -> str:
    """Return a command that appends its arguments to a file."""
    program = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"
    return python(program, log, *arguments)


def test_a_command_gets_percent_and_speed_without_a_shell(log):
    fan = command_fan(
        writer(log, "{percent} 'at {rpm}' '$HOME;' a{percent}b"),
        begin=writer(log, "begin"),
        restore=writer(log, "restore"),
    )
    for rpm in (1000.0, 5000.0, 1e6, 0.1):
        fan.set_rpm(rpm)
    fan.restore()
    fan.set_rpm(9000.0)
    assert log.read_text().splitlines() == [
        "begin",
        "20 at 1000 $HOME; a20b",
        "60 at 5000 $HOME; a60b",
        "100 at 1000000 $HOME; a100b",
        "20 at 1 $HOME; a20b",
        "restore",
        "begin",
        "100 at 9000 $HOME; a100b",
    ]


@given(rpm=st.floats(0.001, 1e9), min_duty=st.floats(0.01, 0.99))
def test_no_command_gets_less_than_the_lowest_duty_nor_less_than_the_wanted_one(rpm, min_duty):
    ran = []
    fan = command_fan("true {percent}", min_duty=min_duty)
    fan._run = ran.append
    fan.set_rpm(rpm)
    percent = int(ran[0][1])
    assert max(1.0, 100 * min_duty - 1e-6, 100 * fan.curve.duty(rpm) - 1e-6) <= percent <= 100


def test_a_command_that_fails_reports_it_and_begins_again(tmp_path, log):
    flag = tmp_path / "broken"
    fails = "import os, sys; os.path.exists(sys.argv[1]) and sys.exit('Unable to\\n send 30 70')"
    fan = command_fan(python(fails, flag, "{percent}"), begin=writer(log, "begin"))
    fan.set_rpm(2000.0)
    flag.touch()
    failure(partial(fan.set_rpm, 2000.0), "status 1", "Unable to send 30 70")
    flag.unlink()
    fan.set_rpm(2000.0)
    assert log.read_text() == "begin\nbegin\n"
    failure(fan.restore, fan.describe())


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    # The child keeps the pipe open, so killing only the parent would wait for the child's end.
    program = (
        "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); "
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)"
    )
    fan = command_fan(python(program, pid_file, "{rpm}"), timeout_s=1.5)
    failure(partial(fan.set_rpm, 2000.0), "1.5 s")
    # Else it was killed before it had a child.
    if pid_file.exists() and pid_file.read_text():
        deadline_s = time.monotonic() + 60.0
        while runs(int(pid_file.read_text())):
            assert time.monotonic() < deadline_s, "the child still runs"
            time.sleep(0.02)


def runs(pid: int) -> bool:
    """Return whether a process still runs; a dead one may wait for its new parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("program", "rpm"),
    [
        ("print('FAN 1,4200')", 4200.0),
        ("print('FAN1 | 3250.5')", 3250.5),
        ("print('na\\n\\n0\\n')", 0.0),
        ("print('FAN 1,na')", None),
        ("print('FAN1,-7')", None),
        ("print(65535)", None),
        ("print()", None),
        ("print(7); raise SystemExit(3)", None),
    ],
)
def test_the_last_number_that_a_command_prints_is_the_speed(program, rpm):
    fan = command_fan("true {rpm}", measure=python(program), sensor="FAN 1")
    assert fan.measured_rpm() == rpm


def test_an_invalid_command_is_refused():
    assert command_fan("true {rpm}").measured_rpm() is None
    missing = "no-such-program {percent}"
    for template in ("", "true", "true {percent} {speed}", "true 'x {percent}", missing):
        refused(partial(command_fan, template), "set", template)
    refused_each(
        partial(command_fan, "true {rpm}"),
        restore=("true {percent}",),
        measure=("no-such-program",),
        begin=("no-such-program",),
        timeout_s=(0.0,),
        min_duty=(0.0,),
    )


def test_a_removed_program_is_a_failure(tmp_path):
    program = tmp_path / "set-fan"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    fan = command_fan(f"{program} {{percent}}")
    fan.set_rpm(1.0)
    program.unlink()
    failure(partial(fan.set_rpm, 1.0), program)


# ------------------------------------------------------------------------------------------------- simulation
@given(steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(1.0, 20000.0)), max_size=20))
def test_a_simulated_fan_never_changes_faster_than_it_can_and_arrives(steps):
    clock = Clock()
    fan = SimulatedFan(14000.0, rpm_per_s=500.0, clock=clock)
    for pause_s, rpm in steps:
        before = fan.measured_rpm()
        fan.set_rpm(rpm)
        clock.now_s += pause_s
        now = fan.measured_rpm()
        assert abs(now - before) <= 500.0 * pause_s + 1e-6 and 0.0 <= now <= 14000.0
    fan.set_rpm(3000.0)
    clock.now_s += 30.0
    assert fan.measured_rpm() == 3000.0


def test_a_simulated_fan_fails_and_recovers():
    clock = Clock()
    fan = SimulatedFan(14000.0, rpm_per_s=1000.0, clock=clock)

    def after(seconds):
        clock.now_s += seconds
        return fan.measured_rpm()

    fan.fail("stuck")
    fan.set_rpm(1000.0)
    assert after(100.0) == 14000.0 and fan.describe() == "simulated fan, stuck"
    fan.fail("stopped")
    assert (after(4.0), after(10.0)) == (10000.0, 0.0)
    fan.fail("")
    fan.restore()
    assert after(14.0) == 14000.0


def test_an_invalid_simulated_fan_is_refused():
    make = partial(SimulatedFan, 1.0)
    refused_each(lambda **bad: make(**bad), rpm_per_s=(0.0,), failure=("loud",))
    refused_each(SimulatedFan, max_rpm=(0.0, nan))


# ------------------------------------------------------------------------------------------------ calibration
class Bench:
    """A fan that measures 9,000 rpm times its duty after a wait, 0 below `stall`, at least `least_rpm`."""

    def __init__(self, stall: float = 0.0, *, least_rpm: float = 0.0, shows: bool = True) -> None:
        self.stall, self.least_rpm, self.shows = stall, least_rpm, shows
        self.duties = [0.5]
        self.settled = 0.5

    def set_duty(self, duty: float) -> None:
        self.duties.append(duty)

    def sleep(self, seconds: float) -> None:
        assert seconds == fan_output._SETTLE_S
        self.settled = self.duties[-1]

    def measured_rpm(self) -> float | None:
        rpm = 0.0 if self.settled < self.stall else max(9000.0 * self.settled, self.least_rpm)
        return rpm if self.shows else None

    def describe(self) -> str:
        return "bench"


@given(stall=st.floats(0.0, 0.89), least_rpm=st.sampled_from([0.0, 3000.0]))
def test_calibration_measures_the_curve_down_to_where_the_fan_stops(stall, least_rpm):
    bench = Bench(stall, least_rpm=least_rpm)
    curve = calibrate(bench, sleep=bench.sleep)
    all_duties = fan_output._CALIBRATION_DUTIES
    turning = [duty for duty in all_duties if duty >= stall]
    # A point is left out if its lower duty is not slower.
    points = {max(9000.0 * duty, least_rpm): duty for duty in reversed(turning)}
    assert curve.points == tuple((duty, rpm) for rpm, duty in points.items())
    # Nothing is measured below the first duty at which the fan stops, and it ends at full power.
    assert len(bench.duties) == min(len(turning) + 1, len(all_duties)) + 2
    assert bench.duties[-1] == 1.0


@pytest.mark.parametrize("bench", [Bench(shows=False), Bench(2.0), Bench(0.95)])
def test_a_fan_that_cannot_be_calibrated_runs_at_full_power(bench):
    failure(partial(calibrate, bench, sleep=bench.sleep), "bench")
    assert bench.duties[-1] == 1.0


def test_an_interrupted_calibration_leaves_full_power():
    bench = Bench()

    def interrupt(seconds):
        if bench.duties[-1] < 0.5:
            raise KeyboardInterrupt
        bench.sleep(seconds)

    with pytest.raises(KeyboardInterrupt):
        calibrate(bench, sleep=interrupt)
    assert bench.duties[-1] == 1.0
