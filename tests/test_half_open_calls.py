"""Calls that nobody finishes, as of an attack on a rack: at every port the operator is answered, and a line tells."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from socflower.edgecloud.cloud.cloud_service import SERVICE
from socflower.edgecloud.cloud.operator_calls import CloudOperator, session_status
from socflower.peers import owner_preemption
from socflower.peers.owner_preemption import PreemptionSwitch
from socflower.peers.transports.port import RingPort
from socflower.wire.secure_channel import Tls
from socflower.wire.status_port import PortState, StatusPort
from tests.edgecloud.cloud.local import Cloud
from tests.edgecloud.runtime.numpy_halves import OPERATOR
from tests.peers.certificates import Authority
from tests.peers.peers import TOKEN, free_addresses

NUM_CALLS = pytest.mark.parametrize(
    "num_calls", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
CHALLENGE = "/socflower.Authentication/Challenge"


def fastest_s(ask: Callable[[], object]) -> float:
    """The time of an answer, the best of five: other processes may have the processor."""
    times_s = []
    for _ in range(5):
        start_s = time.monotonic()
        ask()
        times_s.append(time.monotonic() - start_s)
    return min(times_s)


def eventually(happened: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 20
    while not happened() and time.monotonic() < end_s:
        time.sleep(0.05)
    return happened()


# ------------------------------------------------------------------------------------------------ HTTP
Http: TypeAlias = tuple[str, str]
"""An address and the path that an operator asks for."""


@contextmanager
def metrics(lines: list[str]) -> Iterator[Http]:
    with StatusPort("127.0.0.1:0", lambda: PortState(document={}), log_line=lines.append) as port:
        yield port.address, "/healthz"


@contextmanager
def preempting(lines: list[str]) -> Iterator[Http]:
    (address,) = free_addresses(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner_preemption, "warn", lines.append)
        with PreemptionSwitch(port=int(address.rpartition(":")[2])):
            yield address, "/preempt"


@NUM_CALLS
@pytest.mark.parametrize("listening", [metrics, preempting])
def test_connections_without_a_request_keep_neither_threads_nor_an_operator(
    listening: Callable[[list[str]], "contextmanager[Http]"], num_calls: int
) -> None:
    lines: list[str] = []
    before = threading.active_count()

    def ask() -> None:
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 200
        connection.close()

    with ExitStack() as stack:
        address, path = stack.enter_context(listening(lines))
        host, _, number = address.rpartition(":")
        for _ in range(num_calls):
            stack.enter_context(socket.create_connection((host, int(number)), timeout=10))
        assert fastest_s(ask) < 1.0
        assert eventually(lambda: threading.active_count() <= before + 20)
    # One line at once, and at the end how many there were.
    first, last = lines
    assert "127.0.0.1" in first and "127.0.0.1" in last
    # The operator's connections came beyond the sixteen, too.
    assert num_calls - 17 <= int(last.split(": ")[1].split()[0]) <= num_calls


# ------------------------------------------------------------------------------------------------ gRPC
Port: TypeAlias = tuple[str, str, Callable[[], object]]
"""An address, a method of it, and how an operator or a member asks."""


@contextmanager
def ring(tls: Tls | None, lines: list[str]) -> Iterator[Port]:
    addresses = free_addresses(2)
    here, peer = (
        RingPort(
            addresses[rank],
            rank=rank,
            addresses=addresses,
            token=TOKEN,
            tls=tls,
            heartbeat_s=5.0,
            log=lines.append,
        )
        for rank in range(2)
    )
    here.handle("echo", lambda caller, body: body)
    try:
        method = f"/socflower.Ring.v{here.version}/echo"
        yield addresses[0], method, lambda: peer.call(0, "echo", b"still", timeout_s=30.0)
    finally:
        peer.close()
        here.close()


@contextmanager
def cloud(tls: Tls | None, lines: list[str]) -> Iterator[Port]:
    with Cloud(tls=tls, log=lines.append) as served:
        address = served.service.address
        operator = CloudOperator(address=address, token=OPERATOR, tls=tls, timeout_s=30.0)
        yield address, f"/{SERVICE}/Status", lambda: session_status(operator)


@pytest.mark.few_cells(2)
@NUM_CALLS
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("listening", [ring, cloud])
def test_calls_without_a_token_whose_request_never_comes_hold_no_thread(
    listening: Callable[[Tls | None, list[str]], "contextmanager[Port]"],
    with_tls: bool,
    num_calls: int,
    tmp_path: Path,
) -> None:
    """With certificates, too: an attacker may have one, as of a node that was stolen."""
    tls, lines, ended = Authority(tmp_path).member("m") if with_tls else None, [], threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(120.0)
        yield from ()

    with ExitStack() as stack:
        address, method, ask = stack.enter_context(listening(tls, lines))
        credentials = tls.channel_credentials() if tls else None
        options = [("grpc.use_local_subchannel_pool", 1)]
        for number in range(num_calls):
            # Ten calls a connection: a server may hold more connections than calls of one.
            if number % 10 == 0:
                channel = stack.enter_context(
                    grpc.secure_channel(address, credentials, options)
                    if credentials
                    else grpc.insecure_channel(address, options)
                )
            called = CHALLENGE if number % 20 < 10 and listening is cloud else method
            channel.stream_unary(called).future(never())
        stack.callback(ended.set)
        assert fastest_s(ask) < 1.0
        assert eventually(lambda: any("127.0.0.1" in line for line in lines))
    assert len(lines) < 20, "the attack does not fill the log"
