"""The fan daemon: real processes on a made-up /sys, real HTTP, and a line for every mistake in its configuration."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans.config import read_fan_file
from socflower.thermal.fans.daemon import run_fan
from socflower.thermal.fans.policies import FanObservation, FanPolicy
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C, Reading
from socflower.thermal.sensors.remote import BackgroundSource, FileSource, HttpSource

PATIENCE_S = 60.0


class Proportional:
    """100 rpm for each degree, fast where nobody knows."""

    def rpm(self, observation: FanObservation) -> float:
        return 9000.0 if observation.hottest_c is None else 100.0 * observation.hottest_c


def make_policy(name: str, settings: Mapping[str, object]) -> FanPolicy:
    """Stand in for the real policies."""
    if name != "fixed" or settings.keys() - {"rpm"}:
        raise ConfigError(f"[policy] name = {name!r} with {dict(settings)}: unknown")
    return Proportional()


FAN = {"min_rpm": 1000, "max_rpm": 9000, "failsafe_rpm": 6000, "period_s": 0.05}


class Rack:
    """A folder with a chip of two PWM outputs, the files of two SoCs, and configurations for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chip = folder / "hwmon0"
        self.chip.mkdir()
        for name, content in {
            "name": "nct6798",
            "pwm1": 90,
            "pwm1_enable": 5,
            "fan1_input": 1500,
            "pwm2": 90,
            "pwm2_enable": 2,
            "fan2_input": 1500,
        }.items():
            (self.chip / name).write_text(f"{content}\n")
        self.status_file = folder / "fan.json"
        for soc in (0, 1):
            self.heat(soc, 30.0 + soc)

    def heat(self, soc: int, temperature_c: object) -> None:
        partial = self.folder / f".soc{soc}"
        partial.write_text(json.dumps({"temperature_c": temperature_c}))
        partial.rename(self.soc_file(soc))

    def soc_file(self, soc: int) -> Path:
        return self.folder / f"soc{soc}.json"

    def number(self, name: str) -> int:
        return int(
            (self.chip / name).read_text() or -1
        )  # empty for the moment in which it is written

    def config(
        self,
        *,
        text: str = "",
        sources: str | None = None,
        policy: str = 'name = "fixed"',
        **fan: object,
    ) -> Path:
        table = {"output": "hwmon", "folder": str(self.chip), "pwm": [1, 2], **FAN, **fan}
        lines = [
            f"status_file = {json.dumps(str(self.status_file))}",
            text,
            "[fan]",
            *(f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None),
            "[policy]",
            policy,
        ]
        if sources is None:
            sources = "\n".join(
                f'[[source]]\nkind = "file"\npath = {json.dumps(str(self.soc_file(soc)))}\n'
                "max_age_s = 600"
                for soc in (0, 1)
            )
        path = self.folder / "fan.toml"
        path.write_text("\n".join([*lines, sources]))
        return path

    def status(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self.status_file.read_text())
        except FileNotFoundError:
            return {}
        return document


@pytest.fixture
def rack(tmp_path: Path) -> Rack:
    return Rack(tmp_path)


class Ran:
    """What a run in this process printed."""

    def __init__(self, config: Path, **options: Any) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self.holds = run_fan(
            config, make_policy=make_policy, show=self.out.append, say=self.err.append, **options
        )


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)


@contextmanager
def daemon(config: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the daemon as a process of its own, with this file's policy; whatever happens, it is gone at the end."""
    program = (
        "import sys; from pathlib import Path; from tests.thermal.fans.test_daemon import make_policy; "
        "from socflower.thermal.fans.daemon import run_fan; "
        "run_fan(Path(sys.argv[1]), make_policy=make_policy)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(config)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


# ------------------------------------------------------------------------------------------------- the daemon
def test_a_second_daemon_is_refused_while_the_first_lives(rack: Rack) -> None:
    config = rack.config(period_s=600)  # no file is being written when it is killed
    with daemon(config) as process:
        until(lambda: rack.status().get("fans"), "a status")
        for options in ({"once": True}, {"restore": True}, {}):
            with pytest.raises(
                ConfigError, match=f"fan.toml: fans: process {process.pid} is at work there"
            ):
                Ran(config, **options)
        assert process.poll() is None
    Ran(config, restore=True)  # a daemon that was killed keeps nobody out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_and_gives_the_fans_back(
    rack: Rack, number: signal.Signals
) -> None:
    with daemon(rack.config()) as process:
        until(lambda: rack.status().get("rpm") == 3100.0, "the first step")
        until(
            lambda: rack.number("pwm1_enable") == rack.number("pwm2_enable") == 1, "the fans taken"
        )
        assert min(rack.number("pwm1"), rack.number("pwm2")) >= 51
        rack.heat(0, 75.0)
        until(lambda: rack.status().get("rpm") == 7500.0, "a faster fan")
        status = rack.status()
        assert status["temperatures_c"] == {"0": 75.0, "1": 31.0} and status["hottest_c"] == 75.0
        assert [fan["name"] for fan in status["fans"]] == ["pwm1 of nct6798", "pwm2 of nct6798"]
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and out == ""
    assert (rack.number("pwm1_enable"), rack.number("pwm2_enable")) == (5, 2)
    assert err.splitlines() == [
        "fans at 3100 rpm: the hottest SoC has 31.0 °C",
        "fans at 7500 rpm: the hottest SoC has 75.0 °C",
    ]


def test_sensors_that_die_bring_the_failsafe_speed_and_a_line(rack: Rack) -> None:
    with daemon(rack.config(max_silence_s=0.2)) as process:
        until(lambda: rack.status().get("rpm") == 3100.0, "the first step")
        rack.heat(0, -128)
        rack.soc_file(1).unlink()
        until(lambda: rack.status().get("failsafe"), "the fail-safe speed")
        assert rack.status()["rpm"] == 6000.0 and rack.status()["num_unknown"] == 2
        rack.heat(1, 50.0)
        until(lambda: rack.status().get("rpm") == 5000.0, "the policy's speed again")
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "SoC 0 shows no temperature; left out until it makes sense" in err
    assert "SoC 1 makes sense again" in err and rack.number("pwm1_enable") == 5


def test_a_daemon_that_was_killed_is_followed_by_one_that_gives_the_fans_back(rack: Rack) -> None:
    config = rack.config(automatic_mode=5, period_s=600)
    with daemon(config) as process:
        until(lambda: rack.number("pwm1_enable") == 1 and rack.status(), "the first step")
        process.kill()
        process.wait(timeout=PATIENCE_S)
    assert rack.number("pwm1_enable") == 1
    ran = Ran(config, restore=True)
    assert ran.holds and (rack.number("pwm1_enable"), rack.number("pwm2_enable")) == (5, 5)


def take_number(rack: Rack) -> tuple[Path, dict[str, bytes]]:
    """Let another chip have the number of the rack's chip, which gets another one; return its folder and files."""
    other = rack.chip
    rack.chip = rack.chip.rename(rack.folder / "hwmon7")
    other.mkdir()
    for name, content in {
        "name": "amdgpu",
        "pwm1": 40,
        "pwm1_enable": 2,
        "pwm2": 40,
        "pwm2_enable": 2,
        "fan1_input": 900,
        "fan2_input": 900,
    }.items():
        (other / name).write_text(f"{content}\n")
    return other, {path.name: path.read_bytes() for path in other.iterdir()}


@pytest.mark.parametrize("action", ["restore", "once"])
def test_after_a_kill_no_chip_that_took_the_number_is_touched(
    rack: Rack,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    monkeypatch.setattr("socflower.thermal.fans.daemon._RESTORE_RETRY_S", 0.0)
    config = rack.config(automatic_mode=5, period_s=600)
    with daemon(config) as process:
        until(lambda: rack.number("pwm1_enable") == 1 and rack.status(), "the first step")
        process.kill()
        process.wait(timeout=PATIENCE_S)
    other, before = take_number(rack)
    ran = Ran(config, **{action: True})
    assert ran.holds and {path.name: path.read_bytes() for path in other.iterdir()} == before
    assert (rack.number("pwm1_enable"), rack.number("pwm2_enable")) == (5, 5)
    assert not ran.out or ran.out[-1] == "fan pwm2 of nct6798: 3100 rpm, turned at 1500 rpm before"
    rack.chip.rename(rack.folder / "removed")
    with pytest.raises(ConfigError, match="was nct6798, but there is no nct6798 now"):
        Ran(config, **{action: True})
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


def test_a_restore_waits_for_a_chip_whose_driver_is_being_loaded(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, waits = rack.chip.rename(rack.folder / "away"), list[float]()

    def wait(stop: object, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            away.rename(rack.chip)
        return False

    monkeypatch.setattr("socflower.thermal.fans.daemon.StopSignals.wait", wait)
    assert Ran(rack.config(period_s=5), restore=True).holds and waits == [1.0, 1.0]
    rack.chip.rename(away)
    with pytest.raises(ConfigError, match="cannot be read"):
        Ran(rack.config(period_s=5), restore=True)
    assert len(waits) == 4


def test_a_chip_that_gets_another_number_is_driven_and_given_back(rack: Rack) -> None:
    with daemon(rack.config()) as process:
        until(lambda: rack.status().get("rpm") == 3100.0, "the first step")
        other, before = take_number(rack)
        rack.heat(0, 75.0)
        until(
            lambda: rack.number("pwm1") == rack.number("pwm2") == 217, "a faster fan"
        )  # 0.2 + 0.8 * 6.5/8 of 255
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert (rack.number("pwm1_enable"), rack.number("pwm2_enable")) == (5, 2)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


def test_a_chip_that_is_gone_ends_the_daemon_and_no_speed_is_shown(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    away = rack.folder / "away"

    def wait(stop: object, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            rack.chip.rename(away)
            rack.heat(0, 75.0)
        return len(waits) == 9

    monkeypatch.setattr("socflower.thermal.fans.daemon.StopSignals.wait", wait)
    ran = Ran(rack.config())
    assert (
        not ran.holds and len(waits) == 4
    )  # it was not there in the third reading, nor in the next two
    assert [(fan["set_rpm"], fan["measured_rpm"]) for fan in rack.status()["fans"]] == [
        (None, None)
    ] * 2
    assert any(
        "not there in 3 readings" in line and "there is no nct6798 now" in line for line in ran.err
    )
    assert any("its control cannot be restored" in line for line in ran.err)
    assert not any(line.startswith("fans at 7500") for line in ran.err)


def test_a_command_that_fails_shows_no_speed_and_is_tried_again(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ipmitool` while its controller starts again."""
    ended = iter([False] * 5 + [True])
    monkeypatch.setattr(
        "socflower.thermal.fans.daemon.StopSignals.wait", lambda stop, seconds: next(ended)
    )
    config = rack.config(
        output="command",
        folder=None,
        pwm=None,
        set=f"{sys.executable} -c 1/0 {{percent}}",
        measure=f"{sys.executable} -c print(65535)",
    )
    ran = Ran(config)
    assert not ran.holds and rack.status()["num_output_errors"] == 6
    assert [(fan["set_rpm"], fan["measured_rpm"]) for fan in rack.status()["fans"]] == [
        (None, None)
    ]
    assert ran.err[0].startswith("fan ") and "cannot be set" in ran.err[0]
    assert ran.err[1] == "1 of 1 fans cannot be set to 3100 rpm: the hottest SoC has 31.0 °C"


def test_without_a_mode_to_give_back_the_fans_are_left_at_the_failsafe_speed(rack: Rack) -> None:
    for name in ("pwm1_enable", "pwm2_enable"):
        (rack.chip / name).write_text("1\n")
    ran = Ran(rack.config(), restore=True)
    assert not ran.holds and len(ran.err) == 2 and "it is left at 6000 rpm" in ran.err[0]
    assert rack.number("pwm1") == rack.number("pwm2") == 179  # 0.2 + 0.8 * 5/8 of 255


def test_systemd_hears_that_the_daemon_is_ready_alive_and_stopping(rack: Rack) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0socflower-{os.getpid()}")
        listener.settimeout(PATIENCE_S)
        with daemon(rack.config(), NOTIFY_SOCKET=f"@socflower-{os.getpid()}") as process:
            assert listener.recv(100) == listener.recv(100) == b"READY=1\nWATCHDOG=1"
            process.terminate()
            while (heard := listener.recv(100)) != b"STOPPING=1":
                assert heard == b"READY=1\nWATCHDOG=1"
            process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


# --------------------------------------------------------------------------------------------------- one step


def test_once_looks_sets_prints_and_gives_back(rack: Rack) -> None:
    ran = Ran(rack.config(), once=True)
    assert ran.holds and ran.out == [
        "SoC 0: 30.0 °C",
        "SoC 1: 31.0 °C",
        "fan pwm1 of nct6798: 3100 rpm, turned at 1500 rpm before",
        "fan pwm2 of nct6798: 3100 rpm, turned at 1500 rpm before",
    ]
    assert (
        rack.number("pwm1") == 105 and rack.number("pwm1_enable") == 5
    )  # 0.2 + 0.8 * 2.1/8 of 255


@pytest.mark.parametrize(
    ("policy", "rpm"),
    [
        ('name = "fixed"\nrpm = 4000', 4000.0),
        ('name = "passive"\nlow_rpm = 2000\nhigh_rpm = 8000', 2000.0),
        ('name = "passive"\nhigh_rpm = 8000\nhot_c = 30.5\ncool_c = 29', 8000.0),
        # A load that is over before the daemon's first look: the low speed.
        ('name = "predictive"\nrack_w = 200\nlocal_rise_c = 2\nend_s = 0\nlow_rpm = 1500', 1500.0),
    ],
)
def test_the_policies_that_come_along_work_from_a_file(rack: Rack, policy: str, rpm: float) -> None:
    shown: list[str] = []
    assert run_fan(
        rack.config(policy=policy), once=True, as_json=True, show=shown.append, say=shown.append
    )
    assert json.loads(shown[-1])["rpm"] == rpm


def test_a_dry_run_touches_nothing(rack: Rack) -> None:
    ran = Ran(rack.config(), once=True, dry_run=True, as_json=True)
    document = json.loads(ran.out[0])
    assert (
        ran.holds and document["dry_run"] and document["rpm"] == 3100.0 and document["schema"] == 1
    )
    assert document["fans"][0] == {
        "name": "pwm1 of nct6798, not touched",
        "set_rpm": 3100.0,
        "measured_rpm": 1500.0,
    }
    assert (rack.number("pwm1"), rack.number("pwm1_enable")) == (90, 5)


def test_once_does_not_hold_where_nobody_knows_how_hot_it_is(rack: Rack) -> None:
    rack.heat(0, None)
    rack.heat(1, "hot")
    ran = Ran(rack.config(), once=True)
    assert not ran.holds and ran.out[:2] == ["SoC 0: not known", "SoC 1: not known"]
    assert rack.status()["failsafe"]


@pytest.mark.parametrize("boards", [(0, 0, 1), (0, 1, 1)])
def test_a_board_of_which_nobody_knows_how_hot_it_is_means_the_failsafe_speed(
    rack: Rack, boards: tuple[int]
) -> None:
    rack.heat(2, None)
    sources = "\n".join(
        f'[[source]]\nkind = "file"\npath = {json.dumps(str(rack.soc_file(soc)))}\nboard = {board}'
        for soc, board in enumerate(boards)
    )
    ran = Ran(rack.config(sources=sources), once=True)
    dark = boards == (0, 0, 1)
    assert ran.holds != dark and rack.status()["failsafe"] == dark
    assert rack.status()["rpm"] == (FAN["failsafe_rpm"] if dark else 3100.0)
    assert (
        "no temperature of board 1 is known; the fans turn at the fail-safe speed" in ran.out
    ) == dark


def test_a_command_sets_the_fans(rack: Rack) -> None:
    log = rack.folder / "log"
    tee = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"a\").write(sys.argv[2] + chr(10))' {log}"
    config = rack.config(
        output="command",
        folder=None,
        pwm=None,
        begin=f"{tee} begin",
        set=f"{tee} {{percent}}",
        restore=f"{tee} restore",
        measure=f"{sys.executable} -c 'print(\"FAN1,3000\")'",
        curve_percent=[20, 100],
        curve_rpm=[1000, 9000],
    )
    ran = Ran(config, once=True)
    assert ran.holds and log.read_text().split() == ["begin", "41", "restore"]
    assert "turned at 3000 rpm before" in ran.out[2]


def test_ipmitool_sets_the_fans(rack: Rack) -> None:
    tool = rack.folder / "ipmitool"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {rack.folder}/log\necho "FAN 1,4200"\n')
    tool.chmod(0o755)
    config = rack.config(
        output="ipmi",
        folder=None,
        pwm=None,
        ipmitool=f"{tool} -H bmc",
        sensor="FAN 1",
        begin="raw 0x30 0x45 0x01 0x01",
        set="raw 0x30 0x70 0x66 0x01 0x00 {percent}",
        restore="raw 0x30 0x45 0x01 0x00",
    )
    ran = Ran(config, once=True)
    assert ran.holds and "turned at 4200 rpm before" in ran.out[2]
    assert (rack.folder / "log").read_text().splitlines() == [
        "-H bmc -c sensor reading FAN 1",
        "-H bmc raw 0x30 0x45 0x01 0x01",
        "-H bmc raw 0x30 0x70 0x66 0x01 0x00 41",
        "-H bmc raw 0x30 0x45 0x01 0x00",
    ]


def test_simulated_fans_with_one_that_stands_still(rack: Rack) -> None:
    ran = Ran(
        rack.config(output="simulated", folder=None, pwm=None, num_fans=2, failure="stopped"),
        once=True,
    )
    assert ran.holds and ran.out[2].startswith("fan simulated fan, stopped: 3100 rpm")


def test_a_status_file_that_cannot_be_written_is_said_and_the_fans_go_on(rack: Rack) -> None:
    config = rack.config()
    rack.status_file.mkdir()
    ran = Ran(config, once=True)
    assert ran.holds and rack.number("pwm1") == 105
    assert any("fan.json: cannot be written" in line for line in ran.err)


def test_calibration_prints_the_keys_to_paste(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(stop: object, seconds: float) -> bool:
        for fan in (1, 2):
            (rack.chip / f"fan{fan}_input").write_text(f"{40 * rack.number(f'pwm{fan}')}\n")
        return False

    monkeypatch.setattr("socflower.thermal.fans.daemon.StopSignals.wait", wait)
    ran = Ran(rack.config(), calibrate_fans=True)
    assert ran.out[:2] == [
        "# pwm1 of nct6798",
        "curve_percent = [20, 30, 40, 50, 60, 70, 80, 90, 100]",
    ]
    assert ran.out[2].startswith("curve_rpm = [2040, 3080, ") and ran.out[3] == "# pwm2 of nct6798"
    assert (rack.number("pwm1_enable"), rack.number("pwm2_enable")) == (5, 2)
    keys = dict(line.split(" = ") for line in ran.out[1:3])
    pasted = read_fan_file(rack.config(**{key: json.loads(value) for key, value in keys.items()}))
    assert pasted.fan.outputs()[0].curve.duty(2040.0) == 0.2  # type: ignore[attr-defined]


def test_what_cannot_be_calibrated_says_so(rack: Rack) -> None:
    with pytest.raises(ConfigError, match="--calibrate: simulated fan has no duty"):
        Ran(rack.config(output="simulated", folder=None, pwm=None), calibrate_fans=True)
    with pytest.raises(ConfigError, match="give one of them"):
        Ran(rack.config(), calibrate_fans=True, once=True)


# ---------------------------------------------------------------------------------------------------- sources


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    httpd.block_on_close = False
    thread = threading.Thread(
        target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/heat"
    finally:
        httpd.shutdown()
        httpd.server_close()


def reply(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_another_boards_heat_comes_over_http(rack: Rack) -> None:
    with server(
        lambda handler: reply(
            handler, b'{"schema": 1, "reading": {"at_s": 5, "temperature_c": 62.5}}'
        )
    ) as url:
        ran = Ran(
            rack.config(sources=f'[[source]]\nkind = "http"\nurl = "{url}"\nsoc = 12'),
            once=True,
            dry_run=True,
        )
        assert HttpSource(url, timeout_s=PATIENCE_S).read() == Reading(at_s=5.0, temperature_c=62.5)
    loaded = b'{"temperature_c": 62.5, "at_s": 5, "user_load": %s}'
    for load, taken in ((b"0.25", 0.25), (b"1.5", None), (b'"much"', None)):
        with server(lambda handler, load=load: reply(handler, loaded % load)) as url:
            assert HttpSource(url, timeout_s=PATIENCE_S).read().user_load == taken
    assert ran.holds and ran.out[0] == "SoC 12: 62.5 °C"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"7",
        b'"x"',
        b"null",
        b'{"reading": 3}',
        b"\xff\xfe",
        b"[" * 60000,
        b'{"temperature_c": NaN}',
        b'{"temperature_c": "40"}',
        b'{"temperature_c": true}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_an_answer_that_is_no_reading_is_no_temperature(body: bytes) -> None:
    with server(lambda handler: reply(handler, body)) as url:
        reading = HttpSource(url, timeout_s=PATIENCE_S).read()
    assert reading.temperature_c is None and len(reading.notes) == 1


def test_a_server_that_refuses_is_gone_or_talks_nonsense_is_no_temperature() -> None:
    with server(lambda handler: reply(handler, b'{"temperature_c": 40}', 500)) as url:
        assert "no answer (HTTPError)" in HttpSource(url, timeout_s=PATIENCE_S).read().notes[0]
    assert "no answer (URLError)" in HttpSource(url, timeout_s=PATIENCE_S).read().notes[0]
    with server(lambda handler: handler.wfile.write(b"nonsense\n")) as url:
        assert "no answer" in HttpSource(url, timeout_s=PATIENCE_S).read().notes[0]


@given(
    value=st.one_of(
        st.floats(), st.integers(), st.text(), st.none(), st.booleans(), st.just(10**400)
    ),
    at_s=st.one_of(st.floats(), st.text(), st.none()),
)
def test_whatever_a_file_says_a_reading_comes(
    tmp_path_factory: pytest.TempPathFactory,
    value: Any,
    at_s: Any,
) -> None:
    path = tmp_path_factory.mktemp("source") / "soc.json"
    path.write_text(json.dumps({"temperature_c": value, "at_s": at_s}))
    reading = FileSource(path, max_age_s=3600.0).read()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    possible = number and COLDEST_C <= value <= HOTTEST_C
    assert (
        reading.temperature_c == (value if possible else None) and bool(reading.notes) != possible
    )


def test_a_file_that_is_old_or_from_the_future_or_missing_is_no_temperature(tmp_path: Path) -> None:
    path = tmp_path / "soc.json"
    path.write_text('{"temperature_c": 40}')
    now_s = path.stat().st_mtime
    for age_s, temperature_c in (
        (0.0, 40.0),
        (9.0, 40.0),
        (11.0, None),
        (-9.0, 40.0),
        (-11.0, None),
    ):
        now = now_s + age_s
        assert (
            FileSource(path, max_age_s=10.0, now=lambda now=now: now).read().temperature_c
            == temperature_c
        )
    path.unlink()
    assert "cannot be read (No such file" in FileSource(path, max_age_s=10.0).read().notes[0]
    path.mkdir()
    assert FileSource(path, max_age_s=10.0).read().temperature_c is None


def test_a_source_that_hangs_or_raises_holds_nobody_up() -> None:
    hang = threading.Event()
    answers: list[Any] = [Reading(at_s=1.0, temperature_c=40.0), ValueError("x")]

    class Moody:
        def read(self) -> Reading:
            if not answers:
                hang.wait(PATIENCE_S)
                return Reading(at_s=3.0)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

    now_s = [0.0]
    source = BackgroundSource(Moody(), period_s=0.01, max_age_s=10.0, clock=lambda: now_s[0])
    try:
        assert source.wait_for_first(PATIENCE_S)
        until(lambda: source.read().notes == ("cannot be read (ValueError)",), "the second answer")
        until(lambda: not answers, "the third read")
        now_s[0] = 11.0
        assert source.read() == Reading(at_s=11.0, notes=("does not answer",))
    finally:
        source.close()
        hang.set()


# ----------------------------------------------------------------------------------------------- bad input


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"output": "smoke"},
        r"\[fan\] output = 'smoke' is unknown; use one of hwmon, ipmi, command, simulated",
    ),
    ({"output": 3}, r"\[fan\] output = 3 is unknown"),
    ({"minrpm": 3}, r"unknown key 'minrpm' .* did you mean 'min_rpm'"),
    ({"set": "true {rpm}"}, r"unknown key 'set'"),
    ({"min_rpm": 0}, "min_rpm = 0 must be a number above 0"),
    ({"min_rpm": -5}, "min_rpm = -5 must be"),
    ({"min_rpm": 9000, "failsafe_rpm": 9000}, "min_rpm"),
    ({"min_rpm": "slow"}, "must be a"),
    ({"failsafe_rpm": 500}, "failsafe_rpm"),
    ({"failsafe_rpm": 9500}, "failsafe_rpm"),
    ({"max_rpm": None}, "max_rpm is missing"),
    ({"folder": None}, "folder is missing"),
    ({"folder": "no-chip"}, "no such chip"),
    ({"folder": "/nowhere"}, "pwm1: cannot be read"),
    ({"pwm": []}, "pwm = .* that is not empty"),
    ({"pwm": [1, 1]}, "list each output once"),
    ({"pwm": [0]}, "whole numbers of 1 or more"),
    ({"pwm": 1}, "must be a"),
    ({"pwm": [3]}, "pwm3: cannot be read"),
    ({"tachometer": [1]}, "needs 2 numbers"),
    ({"automatic_mode": 1}, "automatic_mode = 1"),
    ({"period_s": 0}, "period_s = 0"),
    ({"max_silence_s": -1}, "max_silence_s = -1"),
    ({"stuck_after_s": 0}, "stuck_after_s"),
    ({"spin_up_s": 0}, "spin_up_s"),
    ({"min_duty_percent": 0}, "min_duty_percent = 0"),
    ({"min_duty_percent": 100}, "min_duty_percent = 100"),
    ({"curve_percent": [20, 100]}, "curve_rpm 0; give a speed for each"),
    ({"curve_percent": [20, 100], "curve_rpm": [9, 5]}, "do not rise"),
    ({"curve_percent": [20], "curve_rpm": [9]}, "too few"),
    ({"output": "command", "folder": None, "pwm": None}, "set is missing"),
    (
        {"output": "command", "folder": None, "pwm": None, "set": "true"},
        "neither {percent} nor {rpm}",
    ),
    (
        {
            "output": "ipmi",
            "folder": None,
            "pwm": None,
            "set": "raw {percent}",
            "ipmitool": "no-ipmitool",
        },
        "no program 'no-ipmitool'",
    ),
    ({"output": "simulated", "folder": None, "pwm": None, "num_fans": 0}, "num_fans = 0"),
    ({"output": "simulated", "folder": None, "pwm": None, "failure": "loud"}, "failure = 'loud'"),
    ({"text": "fans = 3"}, "unknown key 'fans'"),
    ({"text": "schema = 2"}, "fan.toml: schema = 2 must be 1"),
    ({"policy": ""}, "needs a name"),
    ({"policy": "name = 3"}, "needs a name"),
    ({"policy": 'name = "wise"'}, "name = 'wise'"),
    ({"policy": 'name = "fixed"\nspeed = 3'}, "'speed': 3"),
    ({"sources": ""}, r"there is no \[\[source\]\]"),
    ({"sources": "[source]\nkind = 'local'"}, "a list of tables"),
    ({"sources": "[[source]]"}, "kind = None is unknown"),
    ({"sources": "[[source]]\nkind = 'usb'"}, "kind = 'usb'"),
    ({"sources": "[[source]]\nkind = 'local'\nurl = 'http://x'"}, "unknown key 'url'"),
    ({"sources": "[[source]]\nkind = 'local'\nmax_age_s = 0"}, "max_age_s = 0"),
    (
        {"sources": "[[source]]\nkind = 'local'\nroot = 'here'"},
        "root = 'here': give an absolute path",
    ),
    (
        {"sources": "[[source]]\nkind = 'file'\npath = 'soc.json'"},
        "path = 'soc.json': give an absolute path",
    ),
    ({"sources": "[[source]]\nkind = 'file'"}, "path is missing"),
    ({"sources": "[[source]]\nkind = 'http'\nurl = 'ftp://x'"}, "give an address such as"),
    ({"sources": "[[source]]\nkind = 'http'\nurl = 'http://x:99999'"}, "give an address such as"),
    ({"sources": "[[source]]\nkind = 'http'\nurl = 'http://'"}, "give an address such as"),
    ({"sources": "[[source]]\nkind = 'http'\nurl = 'http://x'\ntimeout_s = 0"}, "timeout_s = 0"),
    (
        {"sources": "[[source]]\nkind = 'local'\nsoc = 1\n[[source]]\nkind = 'local'"},
        "2 soc = 1: give each source an",
    ),
    ({"sources": "[[source]]\nkind = 'local'\nsoc = -1"}, "soc = -1"),
    (
        {"sources": "[[source]]\nkind = 'local'\nboard = -1"},
        "board = -1 must be a whole number of 0 or more",
    ),
    (
        {"sources": "[[source]]\nkind = 'local'\nboard = 1\n[[source]]\nkind = 'local'"},
        "soc = 1 has no board, but",
    ),
]


@pytest.mark.parametrize(("changes", "says"), BAD, ids=[says for _, says in BAD])
def test_a_configuration_that_cannot_be_is_refused_in_one_line_before_a_fan_is_touched(
    rack: Rack,
    changes: dict[str, Any],
    says: str,
) -> None:
    before = {path.name: path.read_bytes() for path in rack.chip.iterdir()}
    with pytest.raises(ConfigError, match=says) as caught:
        Ran(rack.config(**changes), once=True)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{rack.folder}")
    assert {
        path.name: path.read_bytes() for path in rack.chip.iterdir()
    } == before and not rack.status()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"\xff", "not UTF-8"),
        (b"[fan", "not valid TOML"),
        (b"", r"\[policy\] needs a name"),
        (b"fan = 3\n[policy]\nname = 'fixed'", r"\[fan\] must be a table"),
        (b"policy = 3", r"\[policy\] must be a table"),
        (b"status_file = 'fan.json'\n[policy]\nname = 'fixed'", "give an absolute path"),
        (b"status_file = 7\n[policy]\nname = 'fixed'", "status_file = 7 must be a text"),
        (
            b"status_file = '/nowhere/at/all/fan.json'\n[policy]\nname = 'fixed'",
            "its folder is not there",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "fan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        Ran(path, once=True)
