"""A network of a run's own: what listens there is reached from inside only; where there can be none, it is said why."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network, private_network

LISTENER = """\
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with private_network(os.environ) as network:
        if network.shared_because:
            pytest.skip(network.shared_because)
        yield network


def reached_from_here(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_what_listens_inside_is_reached_from_inside_only(network: Network) -> None:
    listener = subprocess.Popen(
        network.command([sys.executable, "-c", LISTENER]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        port, pid = map(int, listener.stdout.readline().split())
        assert pid == listener.pid  # so it can be watched, and ended, as if it were anywhere
        assert network.listens(port)
        assert not reached_from_here(port)
        assert not MACHINE_NETWORK.listens(port)
    finally:
        listener.kill()
        listener.communicate()
    assert not network.listens(port)


def test_nothing_outside_is_reached_from_inside_and_files_are_the_users(
    network: Network, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        assert not network.listens(outside.getsockname()[1])
    subprocess.run(network.command(["touch", str(tmp_path / "made")]), check=True)
    assert (tmp_path / "made").stat().st_uid == os.getuid()


def test_a_machine_that_forbids_it_is_told_of_with_its_own_words(tmp_path: Path) -> None:
    for tool, words in (
        ("unshare", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"),
        ("nsenter", "exit 1"),
    ):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / tool).chmod(0o755)
    with private_network({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}) as network:
        assert network.shared_because == (
            "no network namespace can be made here: unshare: unshare failed: Operation not permitted"
        )
        assert network.command(["flwr"]) == ["flwr"]
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert network.listens(server.getsockname()[1])


def test_a_machine_without_the_tools_is_told_of(tmp_path: Path) -> None:
    with private_network({**os.environ, "PATH": str(tmp_path)}) as network:
        assert (
            network.shared_because
            == "there is no command unshare here, which makes network namespaces on Linux"
        )
