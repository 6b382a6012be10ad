"""Free ports: none that somebody has, nor one that the system may give to a connection meanwhile."""

import socket
from pathlib import Path

import pytest

from socflower.engines.deployment import flower_processes
from socflower.engines.deployment.flower_processes import free_ports


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


@pytest.mark.parametrize(("given", "first"), [("32768\t60999\n", 10000), ("1024\t65535\n", 1024), ("", 10000)])
def test_server_ports_lie_below_those_of_connections_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, first: int,
) -> None:
    (tmp_path / "range").write_text(given)
    monkeypatch.setattr(flower_processes, "_EPHEMERAL_PORTS", tmp_path / "range")
    ports = flower_processes._server_ports()
    assert ports[0] == first and len(ports) > 20000
