"""Servers as processes: their start and restart, and ports that nothing has nor will get meanwhile."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from socflower.engines.deployment import flower_processes
from socflower.engines.deployment.flower_processes import ListeningProcess, free_ports
from socflower.engines.deployment.private_network import MACHINE_NETWORK
from socflower.errors import TrainingFailed
from tests.one_line import refused

LISTEN = "import socket, sys, time; server = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


def server(program: str, folder: Path) -> ListeningProcess:
    port = free_ports(1)[0]
    return ListeningProcess(
        "the server",
        [sys.executable, "-c", program, str(port)],
        port,
        os.environ,
        folder / "log",
        engine="test",
    )


def test_a_server_listens_once_started_and_again_after_it_was_killed(tmp_path: Path) -> None:
    found = server(LISTEN, tmp_path)
    try:
        for _ in range(2):
            assert found.ended() is None and MACHINE_NETWORK.listens(found._port)
            os.kill(found.pid, signal.SIGKILL)
            found._process.wait()
            assert found.ended() == "the server ended (killed by SIGKILL)"
            found.start()
    finally:
        found.end()
    assert found.ended() == "the server ended (killed by SIGTERM)"
    assert not MACHINE_NETWORK.listens(found._port)


def test_a_server_killed_at_its_start_says_so_and_is_given_up_at_the_third_in_a_row(
    tmp_path: Path,
) -> None:
    found = server("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert found.ended() == "the server ended (killed by SIGKILL)"
    found.start()
    refused(lambda: found.start(), "killed", "3", error=TrainingFailed)


def test_a_server_that_fails_or_never_listens_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(
        lambda: server("raise SystemExit('no database')", tmp_path),
        "engine test",
        "no database",
        error=TrainingFailed,
    )
    monkeypatch.setattr(flower_processes, "_START_TIMEOUT_S", 0.5)
    refused(lambda: server("import time; time.sleep(600)", tmp_path), "0.5", error=TrainingFailed)


def test_free_ports_are_unlike_can_be_had_and_are_given_to_no_connection() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert first <= 20000 or not any(first <= port <= last for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_somebody_has_is_passed_over_and_the_system_is_asked_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(flower_processes, "_server_ports", lambda: range(number, number + 1))
        (port,) = free_ports(1)
        assert port not in (0, number)


@pytest.mark.parametrize(
    ("given", "first"), [("32768\t60999\n", 10000), ("1024\t65535\n", 1024), ("", 10000)]
)
def test_server_ports_lie_below_those_of_connections_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, first: int
) -> None:
    (tmp_path / "range").write_text(given)
    monkeypatch.setattr(flower_processes, "_EPHEMERAL_PORTS", tmp_path / "range")
    ports = flower_processes._server_ports()
    assert ports[0] == first and len(ports) > 20000
