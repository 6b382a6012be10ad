"""The fan daemon: real processes on a fake /sys, real HTTP, and refusals of every mistake in its configuration."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.fans.config import read_fan_file
from socflower.thermal.fans.daemon import run_fan
from socflower.thermal.sensors.guarded import GuardedSource
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.remote import FileSource, HttpSource
from socflower.wire.saved_state import write_atomically
from tests.one_line import refused
from tests.thermal.fake_machines import Clock, contents, write_files
from tests.thermal.refusals import refused_each

PATIENCE_S = 60.0
FAN = {"min_rpm": 1000, "max_rpm": 9000, "failsafe_rpm": 6000, "period_s": 0.05}
NO_CHIP = {"folder": None, "pwm": None}
PYTHON = f"{sys.executable} -c"
# 3,100 rpm up to 40 °C and 7,500 rpm above: 105 and 217 of 255, since duties go from 0.2 at 1,000 rpm to 1 at 9,000.
POLICY = 'name = "passive"\nlow_rpm = 3100\nhigh_rpm = 7500\nhot_c = 40\ncool_c = 35'
DAEMON = (
    "import sys, pathlib, socflower.thermal.fans.daemon as d; d.run_fan(pathlib.Path(sys.argv[1]))"
)


CHIP = {
    "name": "nct6798",
    "pwm1": 90,
    "pwm1_enable": 5,
    "fan1_input": 1500,
    "pwm2": 90,
    "pwm2_enable": 2,
    "fan2_input": 1500,
}
SOURCES = """
[[source]]
kind = "file"
path = "FOLDER/soc0.json"
max_age_s = 600
[[source]]
kind = "file"
path = "FOLDER/soc1.json"
max_age_s = 600
"""


class Rack:
    """A folder with a chip of two PWM outputs, the files of two SoCs, and configurations for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chip = folder, folder / "hwmon0"
        self.status_file = folder / "fan.json"
        write_files(self.chip, CHIP)
        self.heat(0, 30.0)
        self.heat(1, 31.0)

    def heat(self, soc: int, temperature_c: object) -> None:
        write_atomically(
            self.folder / f"soc{soc}.json",
            (b'{"temperature_c": %s}' % json.dumps(temperature_c).encode(),),
        )

    def both(self, file: str) -> list[int]:
        """Return the integers of a file of either output; -1 while one is being written."""
        return [int((self.chip / file.format(fan)).read_text() or -1) for fan in (1, 2)]

    def modes(self) -> list[int]:
        return self.both("pwm{}_enable")

    def config(
        self, *, text: str = "", sources: str = SOURCES, policy: str = POLICY, **fan: object
    ) -> Path:
        table = {"output": "hwmon", "folder": "FOLDER/hwmon0", "pwm": [1, 2], **FAN, **fan}
        keys = [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]
        status = 'status_file = "FOLDER/fan.json"'
        parts = [status, text, "[fan]", *keys, "[policy]", policy, sources]
        path = self.folder / "fan.toml"
        path.write_text("\n".join(parts).replace("FOLDER", str(self.folder)))
        return path

    def status(self) -> Any:
        return json.loads(self.status_file.read_bytes()) if self.status_file.exists() else {}

    def speeds(self) -> list[tuple[float | None, float | None]]:
        return [(fan["set_rpm"], fan["measured_rpm"]) for fan in self.status()["fans"]]


@pytest.fixture
def rack(tmp_path: Path) -> Rack:
    return Rack(tmp_path)


class Ran:
    """What a run in this process printed, and whether the control held."""

    def __init__(self, config: Path, **options: Any) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self.holds = run_fan(config, show=self.out.append, say=self.err.append, **options)


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)


@contextmanager
def daemon(rack: Rack, config: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the daemon as a process, from its first step on; it is killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(config)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        until(lambda: rack.status().get("rpm") == 3100.0, "the first step")
        yield process
    finally:
        process.kill()
        process.communicate()


def waits_of(monkeypatch: pytest.MonkeyPatch, wait: Callable[[int], object]) -> list[float]:
    """Replace the waits of runs in this process; `wait` gets their number and returns whether to stop."""
    waits: list[float] = []

    def wait_for(stop: object, seconds: float) -> bool:
        waits.append(seconds)
        return bool(wait(len(waits)))

    monkeypatch.setattr("socflower.thermal.fans.daemon.StopSignals.wait", wait_for)
    return waits


# ------------------------------------------------------------------------------------------------- the daemon
def test_a_second_daemon_is_refused_while_the_first_runs(rack):
    config = rack.config(period_s=600)  # no file is being written when it is killed
    with daemon(rack, config) as process:
        for options in ({"once": True}, {"restore": True}, {}):
            refused(partial(Ran, config, **options), "fan.toml", process.pid)
        assert process.poll() is None
        assert Ran(config, once=True, dry_run=True).holds
    Ran(config, restore=True)  # a daemon that was killed holds no lock


def test_a_signal_ends_the_daemon_and_restores_the_fans(rack):
    with daemon(rack, rack.config()) as process:
        assert rack.modes() == [1, 1] and min(rack.both("pwm{}")) >= 51
        rack.heat(0, 75.0)
        until(lambda: rack.status()["rpm"] == 7500.0, "a faster fan")
        status = rack.status()
        assert status["temperatures_c"] == {"0": 75.0, "1": 31.0} and status["hottest_c"] == 75.0
        assert [fan["name"] for fan in status["fans"]] == ["pwm1 of nct6798", "pwm2 of nct6798"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and out == "" and rack.modes() == [5, 2]
    slow, fast = err.splitlines()
    assert "3100" in slow and "31.0" in slow and "7500" in fast and "75.0" in fast


def test_failing_sensors_bring_the_failsafe_speed_and_a_line(rack):
    with daemon(rack, rack.config(max_silence_s=0.2)) as process:
        rack.heat(0, -128)
        (rack.folder / "soc1.json").unlink()
        until(lambda: rack.status()["failsafe"], "the fail-safe speed")
        assert rack.status()["rpm"] == 6000.0 and rack.status()["num_unknown"] == 2
        rack.heat(1, 50.0)
        until(lambda: rack.status()["rpm"] == 7500.0, "the policy's speed again")
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and rack.modes() == [5, 2]
    assert "SoC 0" in err and err.count("SoC 1") == 2


def move_chip(rack: Rack) -> Callable[[], bool]:
    """Give the chip's number to another chip; return a call that tells whether that one is untouched."""
    other = rack.chip
    rack.chip = rack.chip.rename(rack.folder / "hwmon7")
    write_files(other, {**CHIP, "name": "amdgpu", "pwm1": 40, "pwm2": 40})
    before = contents(other)
    return lambda: contents(other) == before


@pytest.mark.parametrize("action", ["restore", "once"])
def test_after_a_kill_the_fans_are_restored_whatever_chip_has_their_number(
    rack, monkeypatch, action
):
    monkeypatch.setattr("socflower.thermal.fans.daemon._RESTORE_RETRY_S", 0.0)
    config = rack.config(automatic_mode=5, period_s=600)
    with daemon(rack, config) as process:
        process.kill()
        process.wait(timeout=PATIENCE_S)
    assert rack.modes() == [1, 1]
    is_untouched = move_chip(rack)
    ran = Ran(config, **{action: True})
    assert ran.holds and is_untouched() and rack.modes() == [5, 5]
    assert not ran.out or ran.out[-1] == "fan pwm2 of nct6798: 3100 rpm, turned at 1500 rpm before"
    rack.chip.rename(rack.folder / "removed")
    refused(partial(Ran, config, **{action: True}), "was nct6798")
    assert is_untouched()


def test_a_restore_waits_for_a_chip_whose_driver_is_being_loaded(rack, monkeypatch):
    away = rack.chip.rename(rack.folder / "away")
    waits = waits_of(monkeypatch, lambda number: number == 2 and not away.rename(rack.chip))
    config = rack.config(period_s=5)
    assert Ran(config, restore=True).holds and waits == [1.0, 1.0]
    rack.chip.rename(away)
    refused(partial(Ran, config, restore=True), rack.chip)
    assert len(waits) == 4


def test_a_removed_chip_ends_the_daemon_and_no_speed_is_shown(rack, monkeypatch):
    def wait(number):
        if number == 2:
            rack.chip.rename(rack.folder / "away")
            rack.heat(0, 75.0)
        return number == 9

    waits = waits_of(monkeypatch, wait)
    ran = Ran(rack.config())
    # The chip was not there in the third step, nor in the next two.
    assert not ran.holds and len(waits) == 4 and rack.speeds() == [(None, None)] * 2
    assert sum("there is no nct6798 now" in line for line in ran.err) >= 3
    assert not any(line.startswith("fans at 7500") for line in ran.err)


def test_a_failing_command_shows_no_speed_and_is_tried_again(rack, monkeypatch):
    """As `ipmitool` while its controller restarts."""
    waits_of(monkeypatch, lambda number: number == 3)
    commands = {"set": f"{PYTHON} 1/0 {{percent}}", "measure": f"{PYTHON} print(65535)"}
    ran = Ran(rack.config(output="command", **NO_CHIP, **commands))
    assert not ran.holds and rack.status()["num_output_errors"] == 3
    assert rack.speeds() == [(None, None)]
    failed, speed, *_ = ran.err
    assert failed.startswith("fan ") and "1 of 1" in speed and "3100 rpm" in speed


def test_without_a_mode_to_restore_the_fans_are_left_at_the_failsafe_speed(rack):
    write_files(rack.chip, {"pwm1_enable": 1, "pwm2_enable": 1})
    ran = Ran(rack.config(), restore=True)
    assert not ran.holds and len(ran.err) == 2 and "6000 rpm" in ran.err[0]
    assert rack.both("pwm{}") == [179, 179]  # 0.2 + 0.8 * 5/8 of 255


def test_systemd_is_told_that_the_daemon_is_ready_alive_and_stopping(rack):
    name = f"socflower-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(PATIENCE_S)
        with daemon(rack, rack.config(), NOTIFY_SOCKET=f"@{name}") as process:
            assert listener.recv(100) == listener.recv(100) == b"READY=1\nWATCHDOG=1"
            process.terminate()
            while (told := listener.recv(100)) != b"STOPPING=1":
                assert told == b"READY=1\nWATCHDOG=1"
            process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


# --------------------------------------------------------------------------------------------------- one step
def test_once_reads_sets_prints_and_restores(rack):
    ran = Ran(rack.config(), once=True)
    fans = [f"fan pwm{n} of nct6798: 3100 rpm, turned at 1500 rpm before" for n in (1, 2)]
    assert ran.holds and ran.out == ["SoC 0: 30.0 °C", "SoC 1: 31.0 °C", *fans]
    assert rack.both("pwm{}") == [105, 105] and rack.modes() == [5, 2]


def test_a_dry_run_touches_nothing(rack):
    before = contents(rack.chip)
    ran = Ran(rack.config(), once=True, dry_run=True, as_json=True)
    document = json.loads(ran.out[0])
    assert ran.holds and document["dry_run"] and document["schema"] == 1
    assert rack.speeds() == [(3100.0, 1500.0)] * 2 and document["rpm"] == 3100.0
    assert document["fans"][0]["name"].startswith("pwm1 of nct6798, ")
    assert contents(rack.chip) == before


def test_once_does_not_hold_if_no_temperature_is_known(rack):
    rack.heat(0, None)
    rack.heat(1, "hot")
    ran = Ran(rack.config(), once=True)
    assert not ran.holds and rack.status()["failsafe"]
    assert [line[:6] for line in ran.out[:2]] == ["SoC 0:", "SoC 1:"]


@pytest.mark.parametrize(("second", "dark"), [(0, True), (1, False)])
def test_a_board_without_a_known_temperature_means_the_failsafe_speed(rack, second, dark):
    rack.heat(2, None)
    boards = iter((0, second, 1))
    sources = SOURCES + SOURCES[: len(SOURCES) // 2].replace("soc0", "soc2")
    sources = re.sub("max_age_s = 600", lambda _: f"board = {next(boards)}", sources)
    ran = Ran(rack.config(sources=sources), once=True)
    status = rack.status()
    assert (ran.holds, status["failsafe"]) == (not dark, dark)
    assert status["rpm"] == (6000.0 if dark else 3100.0)
    assert any("board 1 " in line for line in ran.out) == dark


def test_a_command_sets_the_fans(rack):
    log = rack.folder / "log"
    tee = f"{PYTHON} 'import sys; open(sys.argv[1], \"a\").write(sys.argv[2] + chr(10))' {log}"
    commands = {"begin": f"{tee} begin", "set": f"{tee} {{percent}}", "restore": f"{tee} restore"}
    curve = {"curve_percent": [20, 100], "curve_rpm": [1000, 9000]}
    measure = f"{PYTHON} 'print(\"FAN1,3000\")'"
    ran = Ran(
        rack.config(output="command", measure=measure, **NO_CHIP, **commands, **curve), once=True
    )
    assert ran.holds and log.read_text().split() == ["begin", "41", "restore"]
    assert "3000 rpm" in ran.out[2]


def test_ipmitool_sets_the_fans(rack):
    tool, log = rack.folder / "ipmitool", rack.folder / "log"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho "FAN 1,4200"\n')
    tool.chmod(0o755)
    raw = {"begin": "raw 1 1", "set": "raw 2 {percent}", "restore": "raw 1 0"}
    options = {"ipmitool": f"{tool} -H bmc", "sensor": "FAN 1", **raw, **NO_CHIP}
    ran = Ran(rack.config(output="ipmi", **options), once=True)
    assert ran.holds and "4200 rpm" in ran.out[2]
    ran_with = [line.removeprefix("-H bmc ") for line in log.read_text().splitlines()]
    assert ran_with == ["-c sensor reading FAN 1", "raw 1 1", "raw 2 41", "raw 1 0"]


def test_simulated_fans_with_one_that_stops(rack):
    config = rack.config(output="simulated", num_fans=2, failure="stopped", **NO_CHIP)
    ran = Ran(config, once=True)
    assert ran.holds and ran.out[2].startswith("fan simulated fan, stopped: 3100 rpm")


def test_a_status_file_that_cannot_be_written_does_not_stop_the_fans(rack):
    rack.status_file.mkdir()
    ran = Ran(rack.config(), once=True)
    assert ran.holds and rack.both("pwm{}") == [105, 105]
    assert sum("fan.json" in line for line in ran.err) == 1


def test_calibration_prints_the_keys_to_paste(rack, monkeypatch):
    def wait(number):
        first, second = rack.both("pwm{}")
        write_files(rack.chip, {"fan1_input": 40 * first, "fan2_input": 40 * second})

    waits_of(monkeypatch, wait)
    title, percent, rpm, next_title, *_ = Ran(rack.config(), calibrate_fans=True).out
    assert (title, next_title) == ("# pwm1 of nct6798", "# pwm2 of nct6798")
    assert percent == "curve_percent = [20, 30, 40, 50, 60, 70, 80, 90, 100]"
    assert rpm.startswith("curve_rpm = [2040, 3080, ") and rack.modes() == [5, 2]
    keys = tomllib.loads(f"{percent}\n{rpm}")
    pasted: Any = read_fan_file(rack.config(**keys)).fan.outputs()[0]
    assert pasted.curve.duty(2040.0) == 0.2


def test_invalid_calibrations_are_refused(rack):
    simulated = rack.config(output="simulated", **NO_CHIP)
    refused(partial(Ran, simulated, calibrate_fans=True), "--calibrate", "simulated fan")
    refused(partial(Ran, simulated, calibrate_fans=True, once=True), "--calibrate", "--once")


# ---------------------------------------------------------------------------------------------------- sources
@contextmanager
def server(body: bytes, status: int = 200) -> Iterator[Callable[[], Reading]]:
    """Serve one answer, status 0 for one that is no HTTP; yield a call that reads it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads, httpd.block_on_close = True, False
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield HttpSource(f"http://127.0.0.1:{httpd.server_port}/heat", timeout_s=PATIENCE_S).read
    finally:
        httpd.shutdown()
        httpd.server_close()


def test_another_boards_temperature_comes_over_http(rack):
    with server(b'{"schema": 1, "reading": {"at_s": 5, "temperature_c": 62.5}}') as read:
        assert read() == Reading(at_s=5.0, temperature_c=62.5)
        url = read.__self__._url
        config = rack.config(sources=f'[[source]]\nkind = "http"\nurl = "{url}"\nsoc = 12')
        ran = Ran(config, once=True, dry_run=True)
    assert ran.holds and ran.out[0] == "SoC 12: 62.5 °C"
    for load, known in ((b"0.25", 0.25), (b"1.5", None), (b'"much"', None)):
        with server(b'{"temperature_c": 62.5, "at_s": 5, "user_load": %s}' % load) as read:
            assert read().user_load == known


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200),
        (b"[1]", 200),
        (b"null", 200),
        (b'{"reading": 3}', 200),
        (b"\xff\xfe", 200),
        (b"[" * 60000, 200),
        (b'{"temperature_c": true}', 200),
        (b'{"temperature_c": 40}', 500),
        (b"nonsense\n", 0),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_answer_without_a_reading_has_no_temperature(body, status):
    with server(body, status) as read:
        reading = read()
    assert reading.temperature_c is None and len(reading.notes) == 1
    assert read().notes[0].startswith("http")  # the server is gone


@given(
    value=st.floats() | st.integers() | st.text() | st.none() | st.booleans() | st.just(10**400),
    at_s=st.floats() | st.text() | st.none(),
)
def test_a_file_with_any_content_gives_a_reading(tmp_path_factory, value, at_s):
    path = tmp_path_factory.getbasetemp() / "soc.json"
    path.write_text(json.dumps({"temperature_c": value, "at_s": at_s}))
    reading = FileSource(path, max_age_s=3600.0).read()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    possible = number and -40.0 <= value <= 150.0
    assert reading.temperature_c == (value if possible else None)
    assert bool(reading.notes) != possible


def test_a_file_that_is_old_in_the_future_or_missing_has_no_temperature(tmp_path):
    path = tmp_path / "soc.json"
    path.write_text('{"temperature_c": 40}')
    now = Clock()
    source = FileSource(path, max_age_s=10.0, now=now)
    known = []
    for age_s in (-11.0, -9.0, 0.0, 9.0, 11.0):
        now.now_s = path.stat().st_mtime + age_s
        known.append(source.read().temperature_c)
    assert known == [None, 40.0, 40.0, 40.0, None]
    path.unlink()
    assert str(path) in source.read().notes[0]
    path.mkdir()
    assert source.read().temperature_c is None


def test_a_source_that_hangs_or_raises_blocks_no_caller():
    hang, now, answers = threading.Event(), Clock(0.0), [Reading(at_s=1.0, temperature_c=40.0)]

    class Unreliable:
        def read(self):
            if not answers:
                hang.wait(PATIENCE_S)
            return answers.pop(0)

    source = GuardedSource(Unreliable, timeout_s=0.0, max_age_s=10.0, clock=now)
    source.read()
    assert source.wait(PATIENCE_S) and source.read().temperature_c == 40.0
    now.now_s = 10.0
    assert source.read().temperature_c == 40.0
    now.now_s = 11.0
    silent = source.read()
    assert (silent.at_s, silent.temperature_c) == (11.0, None) and len(silent.notes) == 1
    hang.set()  # from now on reads raise
    until(lambda: "IndexError" in "".join(source.read().notes), "an answer")


# ----------------------------------------------------------------------------------------------- bad input
def test_an_invalid_fan_table_is_refused_before_a_fan_is_touched(rack):
    before = contents(rack.chip)

    def make(**changes):
        Ran(rack.config(**changes), once=True)

    refused_each(
        make,
        output=("smoke", 3),
        minrpm=(3,),
        set=("true {rpm}",),
        min_rpm=(0, "slow", 9000),
        failsafe_rpm=(500, 9500),
        folder=("no-chip",),
        pwm=([], [1, 1], [0], 1),
        tachometer=([1],),
        period_s=(0,),
        max_silence_s=(-1,),
        stuck_after_s=(0,),
        spin_up_s=(0,),
        min_duty_percent=(0, 100),
    )
    refused(partial(make, min_rpm=9000, failsafe_rpm=9000), "min_rpm", "max_rpm")
    for key in ("max_rpm", "folder"):
        refused(partial(make, **{key: None}), key)
    refused(partial(make, curve_percent=[20, 100]), "curve_percent", "curve_rpm")
    refused(partial(make, curve_percent=[20, 100], curve_rpm=[9, 5]), "9", "5")
    refused_each(partial(make, output="simulated", **NO_CHIP), num_fans=(0,), failure=("loud",))
    refused(partial(make, output="command", **NO_CHIP), "set")
    tool = {"output": "ipmi", "set": "raw {percent}", "ipmitool": "no-ipmitool", **NO_CHIP}
    refused(partial(make, **tool), "no-ipmitool")
    assert contents(rack.chip) == before and not rack.status()


SOURCE = "[[source]]\nkind = "
BAD_TEXTS = [
    ("text", "fans = 3", "fans"),
    ("text", "schema = 2", "fan.toml: schema = 2"),
    ("policy", "", "name"),
    ("policy", "name = 3", "name"),
    ("policy", 'name = "wise"', "wise"),
    ("policy", 'name = "fixed"\nrpm = 1\nspeed = 3', "policy fixed: unknown key 'speed'"),
    ("policy", 'name = "passive"\nhot_c = "x"', "policy passive: hot_c = 'x'"),
    ("sources", "\n", "[[source]]"),
    ("sources", "[source]\nkind = 'local'", "source"),
    ("sources", "[[source]]", "kind"),
    ("sources", f"{SOURCE}'usb'", "usb"),
    ("sources", f"{SOURCE}'local'\nurl = 'http://x'", "url"),
    ("sources", f"{SOURCE}'local'\nmax_age_s = 0", "max_age_s"),
    ("sources", f"{SOURCE}'local'\nroot = 'here'", "root = 'here'"),
    ("sources", f"{SOURCE}'file'\npath = 'soc.json'", "path = 'soc.json'"),
    ("sources", f"{SOURCE}'file'", "path"),
    ("sources", f"{SOURCE}'http'\nurl = 'ftp://x'", "ftp://x"),
    ("sources", f"{SOURCE}'http'\nurl = 'http://x:99999'", "http://x:99999"),
    ("sources", f"{SOURCE}'http'\nurl = 'http://'", "url"),
    ("sources", f"{SOURCE}'http'\nurl = 'http://x y'", "url"),
    ("sources", f"{SOURCE}'http'\nurl = 'http://x'\ntimeout_s = 0", "timeout_s"),
    ("sources", f"{SOURCE}'local'\nsoc = 1\n{SOURCE}'local'", "[[source]] 2 soc = 1"),
    ("sources", f"{SOURCE}'local'\nsoc = -1", "soc = -1"),
    ("sources", f"{SOURCE}'local'\nboard = -1", "board = -1"),
    ("sources", f"{SOURCE}'local'\nboard = 1\n{SOURCE}'local'", "soc = 1", "board"),
]


@pytest.mark.parametrize("case", BAD_TEXTS, ids=repr)
def test_an_invalid_table_is_refused(rack, case):
    key, text, *named = case
    refused(lambda: Ran(rack.config(**{key: text}), once=True), rack.folder, *named)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\xff", "UTF-8"),
        (b"[fan", "TOML"),
        (b"", "name"),
        (b"fan = 3\n[policy]\nname = 'fixed'", "fan"),
        (b"policy = 3", "policy"),
        (b"status_file = 'fan.json'\n[policy]\nname = 'fixed'", "status_file = 'fan.json'"),
        (b"status_file = 7\n[policy]\nname = 'fixed'", "status_file = 7"),
        (b"status_file = '/nowhere/x'\n[policy]\nname = 'fixed'", "/nowhere/x"),
    ],
)
def test_a_file_without_a_configuration_is_refused(tmp_path, content, named):
    path = tmp_path / "fan.toml"
    refused(partial(Ran, path, once=True), path)
    path.write_bytes(content)
    refused(partial(Ran, path, once=True), path, named)
