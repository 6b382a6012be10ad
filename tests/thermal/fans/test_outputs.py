"""Fans against a made-up /sys, real commands and a made-up clock: never below the lowest duty."""

import math
import os
import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans import outputs as fan_output
from socflower.thermal.fans.hwmon_pwm import HwmonPwm, find_hwmon
from socflower.thermal.fans.ipmi import IpmiCommand
from socflower.thermal.fans.outputs import (
    DutyCurve,
    DutyOutput,
    FanFailure,
    FanNotFound,
    SimulatedFan,
    calibrate,
    measured_speed,
)
from socflower.thermal.sensors.sysfs import DeviceIdentity, OpenFolder

ECHO = f"{shlex.quote(sys.executable)} -c"


def chip(root: Path, folder: str = "hwmon0", name: str = "nct6798", **files: object) -> Path:
    """Make a chip with one PWM output in automatic mode; None removes a file."""
    path = root / "sys/class/hwmon" / folder
    path.mkdir(parents=True, exist_ok=True)
    for file, content in {
        "name": name,
        "pwm1": 100,
        "pwm1_enable": 5,
        "fan1_input": 900,
        **files,
    }.items():
        if content is None:
            (path / file).unlink(missing_ok=True)
        else:
            (path / file).write_text(f"{content}\n")
    return path


def number(path: Path) -> int:
    return int(path.read_text())


def command(program: str, *arguments: str) -> str:
    """Return a command line that runs a line of Python."""
    return " ".join([ECHO, shlex.quote(program), *arguments])


@st.composite
def curves(draw: st.DrawFn) -> DutyCurve:
    duties = sorted(draw(st.sets(st.integers(20, 100), min_size=2, max_size=6)))
    speeds = sorted(
        draw(st.sets(st.integers(100, 20000), min_size=len(duties), max_size=len(duties)))
    )
    return DutyCurve(
        tuple((duty / 100, float(speed)) for duty, speed in zip(duties, speeds, strict=True))
    )


# ----------------------------------------------------------------------------------------------------- curves


@given(curve=curves(), speeds=st.tuples(st.floats(1.0, 30000.0), st.floats(1.0, 30000.0)))
def test_a_curves_duty_rises_with_the_speed_and_stays_within_its_ends(
    curve,
    speeds,
):
    slow, fast = sorted(speeds)
    assert curve.points[0][0] <= curve.duty(slow) <= curve.duty(fast) <= curve.points[-1][0]


@given(curve=curves(), index=st.integers(0, 4), part=st.floats(0.0, 1.0))
def test_the_duty_of_a_speed_on_the_curve_is_the_curves(curve, index, part):
    index = min(index, len(curve.points) - 2)
    (low, slow), (high, fast) = curve.points[index], curve.points[index + 1]
    assert curve.duty(slow + part * (fast - slow)) == pytest.approx(
        low + part * (high - low), abs=1e-9
    )


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (((0.2, 1000.0),), "1 points are too few"),
        ((), "0 points"),
        (((0.0, 1000.0), (1.0, 2000.0)), "cannot be"),
        (((0.2, 0.0), (1.0, 2000.0)), "cannot be"),
        (((0.2, 1000.0), (1.1, 2000.0)), "cannot be"),
        (((0.2, math.nan), (1.0, 2000.0)), "cannot be"),
        (((0.2, 1000.0), (1.0, 1000.0)), "do not rise"),
        (((1.0, 1000.0), (0.2, 2000.0)), "do not rise"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(points, says):
    with pytest.raises(ConfigError, match=f"^fan curve: .*{says}"):
        DutyCurve(points)


@pytest.mark.parametrize(
    ("speeds", "min_duty", "says"),
    [
        ((0.0, 100.0), 0.2, "min_rpm < max_rpm"),
        ((200.0, 100.0), 0.2, "min_rpm < max_rpm"),
        ((100.0, math.inf), 0.2, "min_rpm"),
        ((math.nan, 100.0), 0.2, "min_rpm"),
        ((100.0, 200.0), 0.0, "min_duty = 0"),
        ((100.0, 200.0), 1.0, "min_duty = 1"),
        ((100.0, 200.0), math.nan, "min_duty"),
    ],
)
def test_a_line_that_cannot_be_is_refused(speeds, min_duty, says):
    with pytest.raises(ConfigError, match=says):
        DutyCurve.linear(*speeds, min_duty)


# ------------------------------------------------------------------------------------------------------ hwmon


@given(rpm=st.floats(0.001, 1e9), min_duty=st.floats(0.01, 0.99), curve=st.none() | curves())
def test_no_pwm_is_written_below_the_lowest_duty_nor_below_what_was_asked(
    tmp_path_factory,
    rpm,
    min_duty,
    curve,
):
    folder = chip(tmp_path_factory.mktemp("root"))
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0, min_duty=min_duty, curve=curve)
    fan.set_rpm(rpm)
    written = number(folder / "pwm1")
    assert max(1.0, 255 * min_duty - 1e-6) <= written <= 255
    assert written >= 255 * fan.curve.duty(rpm) - 1e-6
    assert number(folder / "pwm1_enable") == 1


@pytest.mark.parametrize("rpm", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_speed_is_not_written(tmp_path, rpm):
    folder = chip(tmp_path)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    with pytest.raises(FanFailure, match="not above 0"):
        fan.set_rpm(rpm)
    assert (number(folder / "pwm1"), number(folder / "pwm1_enable")) == (100, 5)


def test_a_pwm_fan_is_set_measured_and_given_back(tmp_path):
    folder = chip(tmp_path)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    assert (number(folder / "pwm1"), number(folder / "pwm1_enable")) == (
        100,
        5,
    )  # looking changes nothing
    assert fan.describe() == "pwm1 of nct6798" and fan.measured_rpm() == 900.0
    fan.set_rpm(1000.0)
    assert number(folder / "pwm1") == 51
    fan.set_rpm(10000.0)
    assert number(folder / "pwm1") == 255
    chip(tmp_path, pwm1_enable=2)  # the firmware took it back
    fan.set_rpm(10000.0)
    assert number(folder / "pwm1_enable") == 1
    fan.restore()
    assert number(folder / "pwm1_enable") == 5


def test_the_tachometer_may_have_another_number_lie_or_be_missing(tmp_path):
    folder = chip(tmp_path, fan1_input=None, fan3_input=1234)
    assert HwmonPwm(folder, min_rpm=1.0, max_rpm=2.0).measured_rpm() is None
    fan = HwmonPwm(folder, min_rpm=1.0, max_rpm=2.0, fan=3)
    assert fan.measured_rpm() == 1234.0
    for content in ("-1", "", "fast", "\xff"):
        (folder / "fan3_input").write_text(content, "latin-1")
        assert fan.measured_rpm() is None


@pytest.mark.parametrize(
    ("name", "mode"), [("nct6798", 1), ("nct6798", None), ("pwmfan", 0), ("pwmfan", 2)]
)
def test_an_output_that_nothing_controlled_cannot_be_given_back(tmp_path, name, mode):
    """As after a program that was killed in manual mode; modes of the driver pwmfan are none of control."""
    folder = chip(tmp_path, name=name, pwm1_enable=mode)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    fan.set_rpm(10000.0)
    with pytest.raises(FanFailure, match="nothing controlled it before"):
        fan.restore()
    assert number(folder / "pwm1") == 255


def test_a_mode_for_the_end_can_be_given(tmp_path):
    folder = chip(tmp_path, pwm1_enable=1)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0, automatic_mode=2)
    fan.set_rpm(2000.0)
    fan.restore()
    assert number(folder / "pwm1_enable") == 2
    for mode in (1, -1):
        with pytest.raises(
            ConfigError, match=f"automatic_mode = {mode}: is no automatic mode of nct6798"
        ):
            HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0, automatic_mode=mode)


def test_an_output_that_fails_is_automatic_again(tmp_path, monkeypatch):
    folder = chip(tmp_path)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    write = OpenFolder.write

    def broken(chip, name, value):
        if name == "pwm1":
            raise OSError(5, "Input/output error")
        write(chip, name, value)

    monkeypatch.setattr(OpenFolder, "write", broken)
    with pytest.raises(FanFailure, match=r"pwm1: cannot be set \(input/output error\)"):
        fan.set_rpm(5000.0)
    assert number(folder / "pwm1_enable") == 5
    monkeypatch.undo()
    fan.set_rpm(5000.0)
    assert number(folder / "pwm1_enable") == 1


@pytest.mark.parametrize(("kept", "says"), [("pwm1_enable", "keeps control"), ("pwm1", "shows 0")])
def test_an_output_that_ignores_what_is_written_is_a_failure(
    tmp_path,
    monkeypatch,
    kept,
    says,
):
    fan = HwmonPwm(chip(tmp_path, pwm1=0), min_rpm=1000.0, max_rpm=10000.0)
    write = OpenFolder.write
    monkeypatch.setattr(
        OpenFolder,
        "write",
        lambda chip, name, value: None if name == kept else write(chip, name, value),
    )
    with pytest.raises(FanFailure, match=says):
        fan.set_rpm(5000.0)


def test_an_output_that_is_gone_is_a_failure_and_not_made_anew(tmp_path):
    folder = chip(tmp_path)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    for name, says in (
        ("pwm1", "no such file"),
        ("name", "there is no nct6798 now"),
        (None, "there is no nct6798"),
    ):
        for path in list(folder.iterdir()):
            if name in (None, path.name):
                path.unlink()
        kept = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(FanNotFound, match=f"pwm1: cannot be set .{says}"):
            fan.set_rpm(5000.0)
        if name != "pwm1":
            with pytest.raises(FanNotFound, match=f"pwm1_enable: cannot be set to 5 .{says}"):
                fan.restore()
            assert {path: path.read_bytes() for path in folder.iterdir()} == kept
        assert fan.measured_rpm() == (900.0 if name == "pwm1" else None)


def device(folder: Path, name: str) -> Path:
    """Give a chip the link to its device, as the kernel does; its target need not be there."""
    (folder / "device").symlink_to(f"../../../{name}")
    return folder


def test_a_chip_with_a_new_number_is_driven_and_none_that_took_its_number(tmp_path):
    folder = chip(tmp_path, "hwmon3")
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    fan.set_rpm(1000.0)
    moved = folder.rename(folder.with_name("hwmon5"))
    (moved / "pwm1_enable").write_text("2\n")  # its driver is loaded again
    other = chip(tmp_path, "hwmon3", "amdgpu", pwm1=40, pwm1_enable=2, fan1_input=3333)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    assert fan.measured_rpm() == 900.0
    fan.set_rpm(10000.0)
    assert (number(moved / "pwm1"), number(moved / "pwm1_enable")) == (255, 1)
    fan.restore()
    assert number(moved / "pwm1_enable") == 5 and fan.describe() == "pwm1 of nct6798"
    moved.rename(tmp_path / "removed")
    for act in (lambda: fan.set_rpm(5000.0), fan.restore):
        with pytest.raises(FanNotFound, match="there is no nct6798 now"):
            act()
    assert fan.measured_rpm() is None
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


def test_of_two_chips_of_one_name_the_device_says_which_is_meant(tmp_path):
    first, second = (
        device(chip(tmp_path, folder), name)
        for folder, name in (("hwmon1", "a.1"), ("hwmon2", "a.2"))
    )
    fan = HwmonPwm(first, min_rpm=1000.0, max_rpm=10000.0)
    aside = first.rename(first.with_name("aside"))
    second.rename(first)
    aside.rename(second)
    fan.set_rpm(10000.0)
    assert (number(first / "pwm1"), number(second / "pwm1")) == (100, 255)


def test_of_two_chips_that_nothing_tells_apart_none_is_driven(tmp_path):
    folder = chip(tmp_path, "hwmon1")
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    chips = [folder.rename(folder.with_name("hwmon2")), chip(tmp_path, "hwmon3")]
    with pytest.raises(FanNotFound, match="there are several nct6798"):
        fan.set_rpm(10000.0)
    assert [number(path / "pwm1") for path in chips] == [100, 100]


def test_a_chip_that_is_removed_between_the_check_and_the_write_gives_no_other_chip_away(
    tmp_path,
    monkeypatch,
):
    folder = chip(tmp_path, "hwmon3")
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    write, others = OpenFolder.write, []

    def swapped(opened, name, value):
        if not others:
            for path in folder.iterdir():
                path.unlink()
            folder.rename(tmp_path / "removed")
            others.append(chip(tmp_path, "hwmon3", "amdgpu", pwm1=40, pwm1_enable=2))
        write(opened, name, value)

    monkeypatch.setattr(OpenFolder, "write", swapped)
    with pytest.raises(FanNotFound):
        fan.set_rpm(10000.0)
    assert (number(others[0] / "pwm1"), number(others[0] / "pwm1_enable")) == (40, 2)


def test_a_number_or_path_of_a_known_chip_leads_to_it_and_to_no_other(tmp_path):
    folder, last = chip(tmp_path, "hwmon3"), DeviceIdentity("nct6798", None)
    moved = folder.rename(folder.with_name("hwmon5"))
    other = chip(tmp_path, "hwmon3", "amdgpu")
    for name in ("hwmon3", str(other)):
        assert find_hwmon(name, tmp_path) == other  # nothing is known of it
        assert find_hwmon(name, tmp_path, last=last) == moved
        assert find_hwmon(name, tmp_path, last=DeviceIdentity("amdgpu", None)) == other
        with pytest.raises(
            ConfigError, match=f"'{name}': was it87, but there is no it87 now in .*hwmon; load"
        ):
            find_hwmon(name, tmp_path, last=DeviceIdentity("it87", "it87.656"))
    assert find_hwmon("amdgpu", tmp_path, last=last) == other  # a name says which is meant


@pytest.mark.parametrize("shown", [-1, 65_535, 65_536, 4_294_967_295])
def test_what_a_register_without_a_reading_shows_is_no_speed(tmp_path, shown):
    assert [measured_speed(rpm) for rpm in (shown, math.nan, math.inf, 0, 65_534)] == [
        None,
        None,
        None,
        0.0,
        65_534.0,
    ]
    fan = HwmonPwm(chip(tmp_path, fan1_input=shown), min_rpm=1000.0, max_rpm=10000.0)
    command_fan = IpmiCommand(
        "true {rpm}", measure=command(f"print('FAN1,{shown}')"), min_rpm=1.0, max_rpm=2.0
    )
    assert fan.measured_rpm() is None and command_fan.measured_rpm() is None


@pytest.mark.parametrize(
    ("prints", "rpm"), [("FAN 1,na", None), ("FAN 1,", None), ("FAN 1,4200", 4200.0)]
)
def test_a_number_in_a_sensors_name_is_no_speed(prints, rpm):
    fan = IpmiCommand(
        "true {rpm}",
        measure=command(f"print('{prints}')"),
        sensor="FAN 1",
        min_rpm=1.0,
        max_rpm=2.0,
    )
    assert fan.measured_rpm() == rpm


@pytest.mark.parametrize(
    ("pwm", "files", "says"),
    [
        (2, {}, r"pwm2: cannot be read \(no such file"),
        (1, {"pwm1": "full"}, "pwm1: cannot be read"),
        (1, {"pwm1_enable": ""}, "pwm1: cannot be read"),
    ],
)
def test_an_output_that_is_not_there_is_refused(tmp_path, pwm, files, says):
    with pytest.raises(ConfigError, match=says):
        HwmonPwm(chip(tmp_path, **files), pwm, min_rpm=1000.0, max_rpm=10000.0)


def test_an_output_that_only_root_may_write_is_refused(tmp_path, monkeypatch):
    """By a made-up answer of the kernel: root, which may run this, may write everything."""
    folder = chip(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "pwm1_enable")
    with pytest.raises(ConfigError, match="pwm1_enable: cannot be written; run as root"):
        HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)


def test_a_chip_is_found_by_name_number_or_path(tmp_path):
    first, second = chip(tmp_path, "hwmon2", "k10temp"), chip(tmp_path, "hwmon10", "nct6798")
    assert find_hwmon("nct6798", tmp_path) == find_hwmon("hwmon10", tmp_path) == second
    assert find_hwmon(str(first), tmp_path) == first
    with pytest.raises(
        ConfigError, match=r"no such chip; .* is k10temp \(hwmon2\), nct6798 \(hwmon10\)"
    ):
        find_hwmon("it87", tmp_path)
    chip(tmp_path, "hwmon3", "nct6798")
    with pytest.raises(ConfigError, match="several such chips"):
        find_hwmon("nct6798", tmp_path)
    with pytest.raises(ConfigError, match="is no chip"):
        find_hwmon("it87", tmp_path / "elsewhere")


# --------------------------------------------------------------------------------------------------- commands


def writer(tmp_path: Path) -> str:
    """A command that appends its arguments to a file."""
    return command(
        "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')",
        str(tmp_path / "log"),
    )


def runs(pid: int) -> bool:
    """Return whether a process still does anything; one that is dead may wait for whoever adopted it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_gets_percent_and_speed_without_a_shell(tmp_path):
    log = writer(tmp_path)
    fan = IpmiCommand(
        f"{log} set {{percent}} 'at {{rpm}}' '$HOME;' a{{percent}}b",
        begin=f"{log} begin",
        restore=f"{log} restore",
        min_rpm=1000.0,
        max_rpm=9000.0,
    )
    for rpm in (1000.0, 5000.0, 9000.0, 1e6, 0.1):
        fan.set_rpm(rpm)
    fan.restore()
    fan.set_rpm(9000.0)
    assert (tmp_path / "log").read_text().splitlines() == [
        "begin",
        "set 20 at 1000 $HOME; a20b",
        "set 60 at 5000 $HOME; a60b",
        "set 100 at 9000 $HOME; a100b",
        "set 100 at 1000000 $HOME; a100b",
        "set 20 at 1 $HOME; a20b",
        "restore",
        "begin",
        "set 100 at 9000 $HOME; a100b",
    ]


@given(rpm=st.floats(0.001, 1e9), min_duty=st.floats(0.01, 0.99))
def test_no_command_gets_less_than_the_lowest_duty_nor_less_than_was_asked(rpm, min_duty):
    ran = []
    fan = IpmiCommand("true {percent}", min_rpm=1000.0, max_rpm=9000.0, min_duty=min_duty)
    fan._run = lambda words: ran.append(list(words)) or ""  # type: ignore[method-assign, func-returns-value]
    fan.set_rpm(rpm)
    percent = int(ran[0][1])
    assert max(1.0, 100 * min_duty - 1e-6) <= percent <= 100
    assert percent >= 100 * fan.curve.duty(rpm) - 1e-6


def test_a_command_that_fails_says_so_and_begins_anew(tmp_path):
    log = writer(tmp_path)
    flag = tmp_path / "broken"
    fails = command(
        "import os, sys; os.path.exists(sys.argv[1]) and sys.exit('Unable to\\n send 30 70')",
        str(flag),
        "{percent}",
    )
    fan = IpmiCommand(fails, begin=f"{log} begin", min_rpm=1000.0, max_rpm=9000.0)
    fan.set_rpm(2000.0)
    flag.touch()
    with pytest.raises(FanFailure, match=r"ended with status 1 \(Unable to send 30 70\)"):
        fan.set_rpm(2000.0)
    flag.unlink()
    fan.set_rpm(2000.0)
    assert (tmp_path / "log").read_text().splitlines() == ["begin", "begin"]
    with pytest.raises(FanFailure, match="no command was given that restores its control"):
        fan.restore()


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    # The child keeps the pipe open; who only kills the parent waits for the child's end.
    program = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)']); open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)"
    )
    fan = IpmiCommand(
        command(program, str(pid_file), "{rpm}"), min_rpm=1000.0, max_rpm=9000.0, timeout_s=3.0
    )
    with pytest.raises(FanFailure, match="did not end within 3 s"):
        fan.set_rpm(2000.0)
    if pid_file.exists() and pid_file.read_text():  # else it was killed before it had a child
        deadline_s = time.monotonic() + 60.0
        while runs(int(pid_file.read_text())):
            assert time.monotonic() < deadline_s, "the child goes on"
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("prints", "rpm"),
    [
        ("FAN1,5400", 5400.0),
        ("FAN 1 | 3250.5", 3250.5),
        ("", None),
        ("FAN1,-7", None),
        ("no reading", None),
        ("na\\n\\n0\\n", 0.0),
    ],
)
def test_the_last_number_that_a_command_prints_is_the_speed(prints, rpm):
    fan = IpmiCommand("true {rpm}", measure=command(f"print('{prints}')"), min_rpm=1.0, max_rpm=2.0)
    assert fan.measured_rpm() == rpm


def test_a_speed_that_cannot_be_measured_is_not_known():
    assert IpmiCommand("true {rpm}", min_rpm=1.0, max_rpm=2.0).measured_rpm() is None
    fan = IpmiCommand(
        "true {rpm}", measure=command("print(7); raise SystemExit(3)"), min_rpm=1.0, max_rpm=2.0
    )
    assert fan.measured_rpm() is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"template": ""}, "set: is empty"),
        ({"template": "true"}, "neither {percent} nor {rpm}"),
        ({"template": "true {percent} {speed}"}, "{speed} is unknown; use {percent} or {rpm}"),
        ({"template": "true 'x {percent}"}, "cannot be split"),
        ({"template": "no-such-program {percent}"}, "no program 'no-such-program'"),
        (
            {"template": "true {rpm}", "restore": "true {percent}"},
            "restore = .*: {percent} is unknown; use none",
        ),
        ({"template": "true {rpm}", "measure": "no-such-program"}, "measure = .* no program"),
        ({"template": "true {rpm}", "begin": "no-such-program"}, "begin = .* no program"),
        ({"template": "true {rpm}", "timeout_s": 0.0}, "timeout_s = 0"),
        ({"template": "true {rpm}", "min_duty": 0.0}, "min_duty = 0"),
    ],
)
def test_a_command_that_cannot_be_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        IpmiCommand(**{"min_rpm": 1.0, "max_rpm": 2.0, **settings})  # type: ignore[arg-type]


def test_a_program_that_is_gone_is_a_failure(tmp_path):
    program = tmp_path / "set-fan"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    fan = IpmiCommand(f"{program} {{percent}}", min_rpm=1.0, max_rpm=2.0)
    fan.set_rpm(1.0)
    program.unlink()
    with pytest.raises(FanFailure, match="cannot be run"):
        fan.set_rpm(1.0)


# ------------------------------------------------------------------------------------------------- simulation


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(1.0, 20000.0)), max_size=20))
def test_a_simulated_fan_never_changes_faster_than_it_can_and_arrives(
    steps,
):
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


def test_a_simulated_fan_breaks_and_is_whole_again():
    clock = Clock()
    fan = SimulatedFan(14000.0, rpm_per_s=1000.0, clock=clock)
    fan.fail("stuck")
    fan.set_rpm(1000.0)
    clock.now_s += 100.0
    assert fan.measured_rpm() == 14000.0 and fan.describe() == "simulated fan, stuck"
    fan.fail("stopped")
    clock.now_s += 4.0
    assert fan.measured_rpm() == 10000.0
    clock.now_s += 10.0
    assert fan.measured_rpm() == 0.0
    fan.fail("")
    fan.restore()
    clock.now_s += 14.0
    assert fan.measured_rpm() == 14000.0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rpm": 0.0},
        {"max_rpm": math.nan},
        {"max_rpm": 1.0, "rpm_per_s": 0.0},
        {"max_rpm": 1.0, "failure": "loud"},
    ],
)
def test_a_simulated_fan_that_cannot_be_is_refused(settings):
    with pytest.raises(ConfigError, match="simulated fan"):
        SimulatedFan(**settings)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ calibration


class Bench:
    """A fan with a curve of its own, which stands still below `stall` and shows what it is set to after a wait."""

    def __init__(self, stall: float = 0.0, *, max_rpm: float = 9000.0, shows: bool = True) -> None:
        self.stall, self.max_rpm, self.shows = stall, max_rpm, shows
        self.duty = self.settled = 0.5
        self.duties: list[float] = []

    def set_duty(self, duty: float) -> None:
        self.duty = duty
        self.duties.append(duty)

    def set_rpm(self, rpm: float) -> None:
        raise AssertionError

    def restore(self) -> None:
        raise AssertionError

    def sleep(self, seconds: float) -> None:
        assert seconds == fan_output._SETTLE_S
        self.settled = self.duty

    def measured_rpm(self) -> float | None:
        if not self.shows:
            return None
        return 0.0 if self.settled < self.stall else self.max_rpm * self.settled**0.7

    def describe(self) -> str:
        return "bench"


@given(stall=st.floats(0.0, 0.89))
def test_calibration_measures_the_curve_down_to_where_the_fan_stands_still(stall):
    bench = Bench(stall)
    curve = calibrate(bench, sleep=bench.sleep)
    turning = [duty for duty in fan_output._CALIBRATION_DUTIES if duty >= stall]
    assert curve.points == tuple((duty, 9000.0 * duty**0.7) for duty in reversed(turning))
    # No duty below the first at which it stood still, and full power at the end.
    assert len(bench.duties) == min(len(turning) + 1, len(fan_output._CALIBRATION_DUTIES)) + 1
    assert bench.duties[-1] == 1.0


def test_duties_that_a_fan_does_not_obey_are_left_out():
    bench = Bench()
    bench.measured_rpm = lambda: max(3000.0, 9000.0 * bench.settled)  # type: ignore[method-assign]
    curve = calibrate(bench, sleep=bench.sleep)
    assert [duty for duty, _ in curve.points] == pytest.approx(
        [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    )
    assert curve.points[0][1] == 3000.0


@pytest.mark.parametrize(
    ("bench", "says"),
    [
        (Bench(shows=False), "does not show how fast"),
        (Bench(2.0), "hardly at all"),
        (Bench(max_rpm=0.0), "hardly at all"),
        (Bench(0.95), "hardly at all"),
    ],
)
def test_what_cannot_be_calibrated_runs_at_full_power(bench, says):
    with pytest.raises(FanFailure, match=f"bench: .*{says}"):
        calibrate(bench, sleep=bench.sleep)
    assert bench.duties[-1] == 1.0


def test_an_interrupted_calibration_leaves_full_power():
    bench = Bench()

    def interrupt(seconds):
        if bench.duty < 0.5:
            raise KeyboardInterrupt
        bench.sleep(seconds)

    with pytest.raises(KeyboardInterrupt):
        calibrate(bench, sleep=interrupt)
    assert bench.duties[-1] == 1.0


def test_a_pwm_output_is_calibrated_through_its_files(tmp_path):
    folder = chip(tmp_path)
    fan = HwmonPwm(folder, min_rpm=1000.0, max_rpm=10000.0)
    assert isinstance(fan, DutyOutput)

    def sleep(seconds):
        (folder / "fan1_input").write_text(f"{40 * number(folder / 'pwm1')}\n")

    curve = calibrate(fan, sleep=sleep)
    assert curve.points[0] == (0.2, 2040.0) and curve.points[-1] == (1.0, 10200.0)
    calibrated = HwmonPwm(folder, min_rpm=1.0, max_rpm=2.0, curve=curve)
    calibrated.set_rpm(5100.0)
    assert number(folder / "pwm1") in (127, 128)


def test_the_chip_that_was_meant_is_preferred_to_another_of_its_name(tmp_path):
    for number, device in ((2, "nct6775.656"), (3, "nct6775.2592")):
        folder = tmp_path / f"sys/class/hwmon/hwmon{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text("nct6798\n")
        (folder / "device").symlink_to(f"../../../{device}")
    last = DeviceIdentity("nct6798", "nct6775.2592")
    assert find_hwmon("nct6798", tmp_path, last=last).name == "hwmon3"
    with pytest.raises(ConfigError, match="several such chips"):
        find_hwmon("nct6798", tmp_path, last=DeviceIdentity("nct6798", "gone"))
