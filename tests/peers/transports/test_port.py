"""The authenticated port: who gets in, who does not, and how fast the dead and the hanging are told apart."""

import hmac
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from socflower.peers.transports.port import CALL_LIMIT_BYTES, Caller, RingPort
from socflower.wire.secure_channel import (
    PeerNotReady,
    PeerRefused,
    PeerSilent,
    PeerUnreachable,
    Tls,
)
from tests.one_line import refused
from tests.peers.certificates import Authority
from tests.peers.peers import TOKEN, Peer, free_addresses

PATIENCE_S = 60.0


class Ports:
    """Ports of one ring in this process, and what they logged."""

    def __init__(self) -> None:
        self.addresses = free_addresses(2)
        self.lines: list[str] = []
        self._stack = ExitStack()

    def open(
        self,
        rank: int,
        *,
        token: bytes = TOKEN,
        tls: Tls | None = None,
        listen: str | None = None,
        heartbeat_s: float = 5.0,
        **options: Any,
    ) -> RingPort:
        port = RingPort(
            listen or self.addresses[rank],
            rank=rank,
            addresses=self.addresses,
            token=token,
            tls=tls,
            heartbeat_s=heartbeat_s,
            log=self.lines.append,
            **options,
        )
        self._stack.callback(port.close)
        return port

    def echoing(self, **options: Any) -> RingPort:
        port = self.open(0, **options)
        port.handle("echo", lambda caller, body: b"%d:%s" % (caller.rank, body))
        return port

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def ports() -> Iterator[Ports]:
    opened = Ports()
    yield opened
    opened.close()


def wait_until(happened: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


def assert_unharmed(port: RingPort) -> None:
    assert port.call(0, "echo", b"still", timeout_s=PATIENCE_S) == b"1:still"


# ------------------------------------------------------------------------------------------------ members


def test_a_member_is_answered_and_known_by_its_rank(ports: Ports) -> None:
    ports.echoing()
    member = ports.open(1)
    assert member.call(0, "echo", b"hello", timeout_s=PATIENCE_S) == b"1:hello"
    assert member.call(0, "echo", timeout_s=PATIENCE_S) == b"1:"
    assert (
        len(member.call(0, "echo", bytes(CALL_LIMIT_BYTES - 2), timeout_s=PATIENCE_S))
        == CALL_LIMIT_BYTES
    )
    assert not ports.lines


def test_a_handler_may_refuse_or_put_off(ports: Ports) -> None:
    def refuse(caller: Caller, body: bytes) -> bytes:
        raise PeerRefused("we are full")

    server = ports.open(0)
    server.handle("join", refuse)
    member = ports.open(1)
    with pytest.raises(PeerRefused, match="we are full"):
        member.call(0, "join", timeout_s=PATIENCE_S)
    with pytest.raises(PeerNotReady):
        member.call(0, "nothing", timeout_s=PATIENCE_S)


def test_where_nobody_listens_a_call_ends_and_later_succeeds(ports: Ports) -> None:
    member = ports.open(1)
    with pytest.raises(PeerUnreachable):
        member.call(0, "echo", timeout_s=10 * PATIENCE_S)
    ports.echoing()

    def answers() -> bool:
        try:
            return member.call(0, "echo", timeout_s=PATIENCE_S) == b"1:"
        except PeerUnreachable:
            return False

    wait_until(answers)


@pytest.mark.parametrize("number", range(10))
def test_a_member_that_has_just_started_answers_the_next_call(ports: Ports, number: int) -> None:
    """gRPC repeats its last error until it has tried to connect again; a live member must not pass for a dead one."""
    caller = ports.open(1)
    with pytest.raises(PeerUnreachable):
        caller.call(0, "echo", timeout_s=PATIENCE_S)
    ports.echoing()
    assert caller.call(0, "echo", b"x", timeout_s=PATIENCE_S) == b"1:x"


def test_a_call_that_takes_too_long_ends_and_its_handler_learns_of_it(ports: Ports) -> None:
    left = threading.Event()

    def hold(caller: Caller, body: bytes) -> bytes:
        while caller.is_active():
            time.sleep(0.01)
        left.set()
        return b""

    ports.open(0).handle("hold", hold)
    with pytest.raises(PeerSilent):
        ports.open(1).call(0, "hold", timeout_s=0.5)
    assert left.wait(PATIENCE_S)


def test_many_calls_may_be_held_at_once(ports: Ports) -> None:
    all_there = threading.Barrier(8)

    def hold(caller: Caller, body: bytes) -> bytes:
        all_there.wait(PATIENCE_S)
        return b"together"

    ports.open(0).handle("hold", hold)
    member = ports.open(1)
    answers: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(member.call(0, "hold", timeout_s=PATIENCE_S))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"together"] * 8


def test_closing_ends_a_call_that_is_held(ports: Ports) -> None:
    held = threading.Event()

    def hold(caller: Caller, body: bytes) -> bytes:
        held.set()
        while caller.is_active():
            time.sleep(0.01)
        return b""

    server = ports.open(0)
    server.handle("hold", hold)
    member = ports.open(1)
    threading.Thread(target=lambda: (held.wait(), server.close())).start()
    with pytest.raises(PeerUnreachable):
        member.call(0, "hold", timeout_s=10 * PATIENCE_S)
    member.close()
    member.close()
    with pytest.raises(PeerUnreachable, match="closed"):
        member.call(0, "hold", timeout_s=PATIENCE_S)


def test_the_process_before_may_still_hold_the_port(ports: Ports) -> None:
    before = ports.echoing()
    threading.Timer(0.5, before.close).start()
    ports.echoing()
    assert_unharmed(ports.open(1))


def test_a_port_that_stays_taken_is_a_one_line_error(ports: Ports) -> None:
    ports.echoing()
    refused(lambda: ports.open(0, bind_timeout_s=0.2), "in use")


# ----------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("listen", "complaint"),
    [
        ("8.8.8.8:28200", "ring-ca"),
        ("0.0.0.0:28200", "TLS"),
        ("28200", "is not host:port"),
        ("fd00::1:28200", "is not host:port"),
        ("no.such.host.invalid:28200", "cannot be resolved"),
    ],
)
def test_addresses_that_cannot_be(ports: Ports, listen: str, complaint: str) -> None:
    refused(lambda: ports.open(0, listen=listen), complaint)


def test_a_peer_on_a_public_address_needs_trust_or_tls(ports: Ports, tmp_path: Path) -> None:
    ports.addresses[1] = "8.8.8.8:28200"
    refused(lambda: ports.open(0), "8.8.8.8:28200")
    ports.open(0, trusted=True).close()
    ports.open(0, tls=Authority(tmp_path).member("a")).close()


def test_an_address_of_another_machine_cannot_be_listened_on(ports: Ports) -> None:
    refused(
        lambda: ports.open(0, listen="10.255.255.254:28200"),
        "10.255.255.254",
        "address of this machine",
    )


# ------------------------------------------------------------------------------------------------ intruders


def test_a_wrong_token_is_refused_and_logged_but_not_without_end(ports: Ports) -> None:
    ports.echoing()
    intruder = ports.open(1, token=b"x" * 32, listen="127.0.0.1:0")
    for _ in range(20):
        with pytest.raises(PeerRefused, match="wrong token"):
            intruder.call(0, "echo", timeout_s=PATIENCE_S)
    assert 1 <= len(ports.lines) <= 3
    assert "refused a 'echo' call with a wrong token from ipv4:127.0.0.1" in ports.lines[0]
    assert "\n" not in ports.lines[0]
    assert_unharmed(ports.open(1))


def test_who_answers_without_the_token_is_not_believed(ports: Ports) -> None:
    class Impostor(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(lambda body, context: b"trust me")

    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Impostor()])
    server.add_insecure_port(ports.addresses[0])
    server.start()
    try:
        with pytest.raises(PeerRefused, match="without knowing the token"):
            ports.open(1).call(0, "echo", timeout_s=PATIENCE_S)
        assert len(ports.lines) == 1
    finally:
        server.stop(None)


def test_a_truncated_call_is_refused(ports: Ports) -> None:
    """An HTTP/2 connection by hand: it announces a message of 1000 bytes, sends 10, and hangs up."""
    ports.echoing()
    body, names = bytes(1000), os.urandom(16) + b"0".ljust(16, b"\0")
    hello = names + hmac.digest(
        TOKEN, b"call\0/socflower.Ring.v2/echo\0" + b"1\0" + names, "sha256"
    )

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return (
            struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream) + content
        )

    def header(name: bytes, value: bytes) -> bytes:  # HPACK, literal, never indexed, no Huffman
        return b"\x10" + bytes([len(name)]) + name + length(len(value)) + value

    def length(count: int) -> bytes:
        return bytes([count]) if count < 127 else bytes([127, count - 127])

    import base64

    headers = b"".join(
        header(*pair)
        for pair in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/socflower.Ring.v2/echo"),
            (b":authority", b"ring"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"socflower-caller", b"1"),
            (b"socflower-hello-bin", base64.b64encode(hello).rstrip(b"=")),
        )
    )
    host, number = ports.addresses[0].split(":")
    with socket.create_connection((host, int(number))) as stranger:
        stranger.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, b"")
            + frame(1, 4, 1, headers)
            + frame(0, 0, 1, b"\0" + struct.pack("!I", 1000) + body[:10])
        )
        time.sleep(0.3)  # the call is to have begun when it breaks off
    wait_until(lambda: ports.lines)
    assert "truncated" in ports.lines[0]
    assert_unharmed(ports.open(1))


JUNK = {
    "http1": b"GET / HTTP/1.1\r\nHost: ring\r\n\r\n",
    "zeros": bytes(100_000),
    "random": os.urandom(5000),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(508),
    "nothing": b"",
}


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_strangers_are_hung_up_on_and_the_run_is_unharmed(
    ports: Ports, tmp_path: Path, with_tls: bool
) -> None:
    tls = Authority(tmp_path).member("member") if with_tls else None
    ports.echoing(tls=tls)
    host, number = ports.addresses[0].split(":")
    for junk in JUNK.values():
        stranger = socket.create_connection((host, int(number)), timeout=PATIENCE_S)
        # It may be hung up on at any of these.
        with stranger, suppress(OSError):
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert_unharmed(ports.open(1, tls=tls))


# ----------------------------------------------------------------------------------------------------- TLS


def test_certificates_of_the_ring_get_in_and_no_others(ports: Ports, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    member, other = authority.member("member"), Authority(tmp_path, "stranger").member("other")
    ports.echoing(tls=authority.member("server"))
    assert_unharmed(ports.open(1, tls=member))
    for tls in (other, Tls(member.ca, other.certificate, other.key), None):
        intruder = ports.open(1, tls=tls, listen="127.0.0.1:0")
        with pytest.raises(PeerUnreachable):
            intruder.call(0, "echo", timeout_s=PATIENCE_S)
    assert_unharmed(ports.open(1, tls=member, listen="127.0.0.1:0"))


def test_without_a_certificate_the_handshake_fails(ports: Ports, tmp_path: Path) -> None:
    member = Authority(tmp_path).member("member")
    ports.echoing(tls=member)
    context = ssl.create_default_context(cafile=str(member.ca))
    context.set_alpn_protocols(["h2"])
    host, number = ports.addresses[0].split(":")
    with socket.create_connection((host, int(number)), timeout=PATIENCE_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as stranger:
                answer = stranger.recv(100)  # in TLS 1.3 the refusal follows the handshake
        except (ssl.SSLError, ConnectionResetError):
            answer = b""
    assert answer == b""


def test_a_certificate_for_another_address_is_not_believed(ports: Ports, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ports.echoing(tls=authority.member("server", host="127.0.0.9"))
    with pytest.raises(PeerUnreachable):
        ports.open(1, tls=authority.member("member")).call(0, "echo", timeout_s=PATIENCE_S)


def test_missing_and_unreadable_certificates_are_named(ports: Ports, tmp_path: Path) -> None:
    tls = Authority(tmp_path).member("member")
    refused(
        lambda: ports.open(0, tls=Tls(tls.ca, tls.certificate, tmp_path / "none.key")),
        "TLS",
        "none.key",
        "cannot be read",
    )
    (tmp_path / "bad").write_text("not PEM")
    refused(
        lambda: ports.open(0, tls=Tls(tmp_path / "bad", tls.certificate, tls.key)), "TLS", "PEM"
    )


# ------------------------------------------------------------------------------------------- the dead and the hung


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_a_killed_callee_is_unreachable(ports: Ports, tmp_path: Path, with_tls: bool) -> None:
    tls = Authority(tmp_path).member("member") if with_tls else None
    with Peer("hold", 0, ports.addresses, tls=tls) as peer:
        assert peer.read_line() == "ready"
        member = ports.open(1, tls=tls)
        threading.Thread(target=lambda: (peer.read_line(), peer.kill())).start()
        with pytest.raises(PeerUnreachable):
            member.call(0, "hold", timeout_s=10 * PATIENCE_S)


def test_a_stopped_callee_is_silent_though_its_time_is_not_up(ports: Ports) -> None:
    with Peer("hold", 0, ports.addresses) as peer:
        assert peer.read_line() == "ready"
        member = ports.open(1, heartbeat_s=1.0)
        threading.Thread(target=lambda: (peer.read_line(), peer.stop())).start()
        with pytest.raises(PeerSilent):
            member.call(0, "hold", timeout_s=10 * PATIENCE_S)
        # Also where the connection is new.
        with pytest.raises(PeerSilent):
            ports.open(1, heartbeat_s=1.0, listen="127.0.0.1:0").call(
                0, "echo", timeout_s=10 * PATIENCE_S
            )


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_caller_that_dies_or_hangs_is_no_longer_active(ports: Ports, end: str) -> None:
    held, gone = threading.Event(), threading.Event()

    def hold(caller: Caller, body: bytes) -> bytes:
        held.set()
        while caller.is_active():
            time.sleep(0.01)
        gone.set()
        return b""

    ports.open(0, heartbeat_s=1.0).handle("hold", hold)
    with Peer("caller", 1, ports.addresses) as peer:
        assert held.wait(PATIENCE_S)
        getattr(peer, end)()
        assert gone.wait(PATIENCE_S)


def test_pings_between_calls_do_no_harm(ports: Ports) -> None:
    ports.echoing(
        heartbeat_s=1.0
    )  # a loaded machine may take a few tenths of a second to answer one
    member = ports.open(1, heartbeat_s=1.0)
    assert_unharmed(member)
    time.sleep(2)  # four pings in each direction
    assert_unharmed(member)
