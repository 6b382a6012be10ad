"""Preemption by real files, real signals and real requests."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from socflower.engines.deployment.flower_processes import free_ports
from socflower.errors import ConfigError
from socflower.peers.owner_preemption import (
    FILE_CHECK_INTERVAL_S,
    Preempted,
    PreemptionSwitch,
    preempt_switch,
)
from tests.one_line import refused

LOOPBACK = "127.0.0.1"
DEADLINE_S = 60.0


def soon(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; say whether it ever did."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@pytest.fixture
def port() -> int:
    """A port that is free."""
    return free_ports(1)[0]


@pytest.fixture(autouse=True)
def _signals_are_given_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    yield
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == before


def ask(
    method: str, port: int, path: str = "/preempt", body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


# --------------------------------------------------------------------------------------------- file


def test_without_sources_it_is_never_active() -> None:
    with preempt_switch({"board": 1, "ring": "10.0.0.2:28200"}) as switch:
        assert not switch.active and switch.since_s() is None and switch.notes == []
        switch.raise_if_active()


def test_a_file_counts_as_long_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "preempt"
    with preempt_switch({"preempt-file": str(path)}) as switch:
        assert not switch.active
        path.touch()
        assert soon(lambda: switch.active)
        assert switch.since_s() is not None
        with pytest.raises(Preempted, match=r"since \d+\.\d s"):
            switch.raise_if_active()
        path.unlink()
        assert soon(lambda: not switch.active)


def test_a_file_that_is_there_already_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "preempt"
    path.touch()
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    with PreemptionSwitch(file=path) as switch:
        assert switch.active
        assert 3500 < (switch.since_s() or 0) < 3600 + DEADLINE_S


def test_a_folder_that_is_made_later_will_do(tmp_path: Path) -> None:
    with PreemptionSwitch(file=tmp_path / "run" / "preempt") as switch:
        assert not switch.active
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "preempt").touch()
        assert soon(lambda: switch.active)


def test_many_looks_are_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    stat = Path.stat

    def counted(self: Path, **options: Any) -> os.stat_result:
        calls.append(time.monotonic())
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", counted)
    with PreemptionSwitch(file=tmp_path / "preempt") as switch:
        began_s = time.monotonic()
        for _ in range(20_000):
            assert not switch.active
        assert len(calls) <= (time.monotonic() - began_s) / FILE_CHECK_INTERVAL_S + 1


def test_a_file_that_cannot_be_looked_for_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with PreemptionSwitch(file=tmp_path / "loop") as switch:
        assert not switch.active
        time.sleep(2 * FILE_CHECK_INTERVAL_S)
        assert not switch.active
        assert len(switch.notes) == 1 and "cannot be read" in switch.notes[0]


# --------------------------------------------------------------------------------------------- signals


def test_signals_leave_and_stay() -> None:
    with preempt_switch({"preempt-signal": True}) as switch:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert soon(lambda: switch.active)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert soon(lambda: not switch.active)


def test_a_thread_cannot_take_signals_and_says_so(tmp_path: Path) -> None:
    notes: list[str] = []

    def run() -> None:
        with PreemptionSwitch(signals=True, file=tmp_path / "preempt") as switch:
            (tmp_path / "preempt").touch()
            assert soon(lambda: switch.active)
            notes.extend(switch.notes)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(notes) == 1 and "main thread" in notes[0]


CHILD = """
import sys, time
from pathlib import Path
from socflower.peers.owner_preemption import preempt_switch

with preempt_switch({"preempt-signal": True, "preempt-file": sys.argv[1]}) as switch:
    print("active" if switch.active else "ready", flush=True)
    while not switch.active:
        time.sleep(0.01)
    print("left", flush=True)
    while switch.active:
        time.sleep(0.01)
    print("back", flush=True)
"""


def test_a_signal_to_one_process_holds_for_those_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "run" / "preempt"
    first = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
    )
    second: subprocess.Popen[str] | None = None
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        first.send_signal(signal.SIGUSR1)
        assert first.stdout.readline() == "left\n"
        first.kill()
        first.wait()
        assert path.exists()
        second = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert second.stdout is not None
        assert second.stdout.readline() == "active\n"
        assert second.stdout.readline() == "left\n"
        second.send_signal(signal.SIGUSR2)
        assert second.stdout.readline() == "back\n"
        assert second.wait(timeout=DEADLINE_S) == 0
        assert not path.exists()
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


# --------------------------------------------------------------------------------------------- requests


def test_requests_leave_stay_and_tell(port: int) -> None:
    with preempt_switch({"preempt-port": port}) as switch:
        assert ask("GET", port) == (200, {"preempted": False, "since_s": None})
        status, document = ask("POST", port)
        assert status == 200 and document["preempted"] and 0 <= document["since_s"] < DEADLINE_S
        assert switch.active
        first_s = switch.since_s()
        ask("POST", port)  # asking again does not start anew
        assert first_s is not None and (switch.since_s() or 0) >= first_s
        assert ask("GET", port)[1]["preempted"]
        assert ask("DELETE", port) == (200, {"preempted": False, "since_s": None})
        assert not switch.active


def test_a_request_lives_on_in_the_file(port: int, tmp_path: Path) -> None:
    path = tmp_path / "run" / "preempt"
    config = {"preempt-port": port, "preempt-file": str(path)}
    with preempt_switch(config) as switch:
        assert not switch.active
        assert ask("POST", port)[1]["preempted"]
        assert switch.active and path.exists()
    with preempt_switch(config) as switch:
        assert switch.active
        assert ask("GET", port)[1]["preempted"]
        assert not ask("DELETE", port)[1]["preempted"]
        assert not switch.active and not path.exists()


def test_a_file_that_an_operator_removes_ends_what_a_request_began(
    port: int, tmp_path: Path
) -> None:
    path = tmp_path / "preempt"
    with PreemptionSwitch(file=path, port=port) as switch:
        ask("POST", port)
        path.unlink()
        assert soon(lambda: not switch.active)
        assert not ask("GET", port)[1]["preempted"]


def test_the_second_process_of_a_device_hears_through_the_file(port: int, tmp_path: Path) -> None:
    path = tmp_path / "preempt"
    with (
        PreemptionSwitch(file=path, port=port) as first,
        PreemptionSwitch(file=path, port=port) as second,
    ):
        assert first.notes == []
        assert len(second.notes) == 1 and f"preempt-port {port}: in use" in second.notes[0]
        ask("POST", port)
        assert first.active and soon(lambda: second.active)
        ask("DELETE", port)
        assert not first.active and soon(lambda: not second.active)
    with PreemptionSwitch(port=port) as first, PreemptionSwitch(port=port) as second:
        assert "set preempt-file too" in second.notes[0]
        ask("POST", port)
        assert first.active and not second.active


def test_the_port_is_free_again_afterwards(port: int) -> None:
    for _ in range(3):
        with PreemptionSwitch(port=port) as switch:
            assert switch.notes == []
            ask("GET", port)


def test_a_file_that_cannot_be_written_still_lets_this_process_leave(
    port: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with PreemptionSwitch(file=tmp_path / "file" / "preempt", port=port) as switch:
        assert ask("POST", port)[1]["preempted"]
        assert switch.active
        assert len(switch.notes) == 1 and "cannot be written" in switch.notes[0]
        assert not ask("DELETE", port)[1]["preempted"]
        assert not switch.active


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/", {}, 404),
        ("GET", "/preempted", {}, 404),
        ("POST", "/preempt", {"Origin": "http://x"}, 403),
        ("POST", "/preempt", {"Content-Length": "-1"}, 413),
        ("POST", "/preempt", {"Content-Length": "9999999"}, 413),
        ("POST", "/preempt", {"Content-Length": "many"}, 413),
    ],
)
def test_other_requests_change_nothing(
    port: int, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    with PreemptionSwitch(port=port) as switch:
        found, document = ask(method, port, path, **headers)
        assert found == status and list(document) == ["error"]
        assert not switch.active


def test_a_body_is_read_and_ignored(port: int) -> None:
    with PreemptionSwitch(port=port):
        assert ask("POST", port, body=b"{}" * 1000)[0] == 200


def test_a_stranger_that_says_nothing_holds_nobody_up(port: int) -> None:
    with socket.socket() as silent, PreemptionSwitch(port=port):
        silent.connect((LOOPBACK, port))
        assert ask("POST", port)[0] == 200
        silent.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        assert ask("GET", port)[1]["preempted"]


def test_version_6_addresses_work_where_there_are_any(port: int) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with preempt_switch({"preempt-port": port, "preempt-bind": "::1"}):
        connection = http.client.HTTPConnection("::1", port, timeout=30)
        connection.request("GET", "/preempt")
        assert connection.getresponse().status == 200
        connection.close()


# --------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preempt-file", ""),
        ("preempt-file", "run/preempt"),
        ("preempt-file", True),
        ("preempt-file", "/a\0b"),
        ("preempt-port", 0),
        ("preempt-port", 65536),
        ("preempt-port", "28300"),
        ("preempt-port", True),
        ("preempt-port", 1.5),
        ("preempt-signal", "yes"),
        ("preempt-signal", 1),
        ("preempt-bind", "somewhere"),
        ("preempt-bind", 1),
        ("preempt-flie", "/run/preempt"),
    ],
)
def test_values_that_cannot_be_are_refused(key: str, value: object) -> None:
    refused(lambda: preempt_switch({key: value}), "node-config", key)


def test_an_address_that_is_not_this_devices_is_refused_and_nothing_stays_behind(port: int) -> None:
    with (
        pytest.raises(ConfigError, match=f"preempt-port {port}: cannot listen on 192.0.2.1"),
        PreemptionSwitch(port=port, host="192.0.2.1", signals=True),
    ):
        pass
