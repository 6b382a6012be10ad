"""One contract for every service of the secure channel, a ring's port and a split training's cloud: who gets in.

Attackers speak gRPC or raw TCP, each without something that the service asks for; the service refuses them, and a
rightful caller is answered afterwards.
"""

import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from socflower.edgecloud.cloud.cloud_service import SERVICE, CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, open_session, session_status
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import OPERATOR as OPERATOR_NAME
from socflower.edgecloud.stream.credentials import run_caller, run_token
from socflower.peers.transports.port import PROTOCOL_VERSION, RingPort
from socflower.wire.authentication import ClientAuthentication, ForgedAnswer, ServerAuthentication
from socflower.wire.certificates import write_certificates
from socflower.wire.secure_channel import Address, PeerNotTrusted, Tls, failure_of, open_channel
from tests.edgecloud.runtime.numpy_halves import FINGERPRINT, OPERATOR, make_half
from tests.one_line import refused
from tests.peers.peers import TOKEN, free_addresses

TIMEOUT_S = 20.0
PLAIN = pytest.mark.parametrize("service", ["ring", "cloud"], indirect=True)


@dataclass
class Service:
    """A service under attack: how its rightful caller calls it."""

    address: str
    tls: Tls | None
    method: str
    caller: str
    token: bytes
    receiver: str | None
    body: bytes
    lines: list[str] = field(default_factory=list)
    # A rightful one, of another run.
    other_token: bytes = b""

    def authentication(self, **changes: Any) -> ClientAuthentication:
        caller, token = changes.get("caller", self.caller), changes.get("token", self.token)
        tls = self.tls is not None
        return ClientAuthentication(caller, token, tls=tls, receiver=self.receiver)

    def channel(self, tls: Tls | str | None = "own") -> grpc.Channel:
        files = self.tls if isinstance(tls, str) else tls
        return open_channel(
            self.address,
            files.channel_credentials() if files else None,
            heartbeat_s=5.0,
            max_message_bytes=1 << 22,
        )

    def call(
        self, *, tls: Tls | str | None = "own", body: bytes | None = None, **changes: Any
    ) -> bytes:
        with self.channel(tls) as channel:
            call = self.authentication(**changes).on(channel).unary_unary(self.method)
            return bytes(call(self.body if body is None else body, timeout=TIMEOUT_S))

    def assert_unharmed(self) -> None:
        assert self.call() is not None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    made = {}
    for name in ("ours", "theirs"):
        one = write_certificates(tmp_path_factory.mktemp(name), ["127.0.0.1"])["127.0.0.1"]
        made[name] = Tls(one.ca, one.certificate, one.key)
    return made


@pytest.fixture(params=["ring", "ring+tls", "cloud", "cloud+tls"])
def service(request: pytest.FixtureRequest, files: dict[str, Tls]) -> Iterator[Service]:
    tls = files["ours"] if request.param.endswith("tls") else None
    lines: list[str] = []
    if request.param.startswith("ring"):
        addresses = free_addresses(2)
        port = RingPort(
            addresses[0],
            rank=0,
            addresses=addresses,
            token=TOKEN,
            tls=tls,
            heartbeat_s=5.0,
            log=lines.append,
        )
        port.handle("echo", lambda caller, body: b"%d:%s" % (caller.rank, body))
        with closing(port):
            yield Service(
                addresses[0],
                tls,
                f"/socflower.Ring.v{PROTOCOL_VERSION}/echo",
                "1",
                TOKEN,
                "0",
                b"hello",
                lines,
                other_token=os.urandom(32),
            )
        return
    cloud = CloudService(
        "127.0.0.1:0", make_half, operator_token=OPERATOR, tls=tls, log=lines.append
    )
    with closing(cloud):
        yield Service(
            cloud.address,
            tls,
            f"/{SERVICE}/Status",
            OPERATOR_NAME,
            OPERATOR.encode(),
            None,
            wire.StatusRequest().SerializeToString(),
            lines,
            other_token=run_token(OPERATOR, "another").encode(),
        )


def refused_with(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert "\n" not in str(caught.value.details())  # type: ignore[attr-defined]
    return caught.value.code()  # type: ignore[attr-defined,no-any-return]


def test_the_rightful_caller_is_answered(service: Service) -> None:
    for _ in range(3):
        service.assert_unharmed()
    assert not service.lines


@pytest.mark.parametrize(
    "token", [b"", b"x" * 32, "another run's"], ids=["empty", "wrong", "other-run"]
)
def test_a_wrong_token_is_refused_with_a_line(service: Service, token: bytes | str) -> None:
    shown = service.other_token if isinstance(token, str) else token
    assert refused_with(lambda: service.call(token=shown)) == grpc.StatusCode.UNAUTHENTICATED
    assert len(service.lines) == 1 and "token" in service.lines[0] and "\n" not in service.lines[0]
    service.assert_unharmed()


def test_a_token_is_refused_under_another_name(service: Service) -> None:
    for caller in ("2", "-1", "nobody", run_caller("run"), ""):
        assert (
            refused_with(lambda caller=caller: service.call(caller=caller))
            == grpc.StatusCode.UNAUTHENTICATED
        )
    service.assert_unharmed()


def test_a_call_without_a_token_is_refused_before_its_body_is_read(service: Service) -> None:
    never = threading.Event()

    def body() -> Iterator[bytes]:
        never.wait(TIMEOUT_S)
        yield b""

    began_s = time.monotonic()
    with service.channel() as channel:
        assert (
            refused_with(lambda: channel.stream_unary(service.method)(body(), timeout=TIMEOUT_S))
            == grpc.StatusCode.UNAUTHENTICATED
        )
    assert time.monotonic() < began_s + TIMEOUT_S / 2
    never.set()
    service.assert_unharmed()


class Recorder(grpc.UnaryUnaryClientInterceptor):
    """Notes what goes out below the authentication, and may change it."""

    def __init__(self, change: Callable[[bytes], bytes] = bytes) -> None:
        self.sent: list[tuple[Any, bytes]] = []
        self._change = change

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: bytes
    ) -> Any:
        changed = self._change(request)
        self.sent.append((client_call_details.metadata, changed))
        return continuation(client_call_details, changed)


@PLAIN
def test_without_tls_a_token_never_travels_and_a_recorded_call_cannot_be_played_again(
    service: Service,
) -> None:
    recorder = Recorder()
    with service.channel() as channel:
        service.authentication().on(grpc.intercept_channel(channel, recorder)).unary_unary(
            service.method
        )(service.body, timeout=TIMEOUT_S)
    metadata, body = next(sent for sent in recorder.sent if sent[0])
    seen = body + b"".join(
        value if isinstance(value, bytes) else value.encode() for _, value in metadata
    )
    assert service.token not in seen and service.token.hex().encode() not in seen
    with service.channel() as channel:
        assert (
            refused_with(
                lambda: channel.unary_unary(service.method)(
                    body, timeout=TIMEOUT_S, metadata=metadata
                )
            )
            == grpc.StatusCode.UNAUTHENTICATED
        )
    assert len(service.lines) == 1 and "replayed" in service.lines[0]
    service.assert_unharmed()


@PLAIN
@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
        lambda sealed: sealed + b"x",
        lambda sealed: sealed[:20],
        lambda sealed: b"",
        lambda sealed: bytes(16) + sealed[16:],
    ],
    ids=["last-byte", "longer", "cut", "empty", "nonce"],
)
def test_without_tls_a_message_cannot_be_changed(
    service: Service, change: Callable[[bytes], bytes]
) -> None:
    with service.channel() as channel:
        # Only the call itself: the challenge before it has no body.
        changing = grpc.intercept_channel(
            channel, Recorder(lambda sent: change(sent) if sent else sent)
        )
        code = refused_with(
            lambda: (
                service.authentication()
                .on(changing)
                .unary_unary(service.method)(service.body, timeout=TIMEOUT_S)
            )
        )
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert len(service.lines) == 1 and "a changed message" in service.lines[0]
    service.assert_unharmed()


def test_a_huge_message_is_refused(service: Service) -> None:
    assert refused_with(lambda: service.call(body=bytes(16 << 20))) in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNKNOWN,
    )
    service.assert_unharmed()


def test_plain_text_to_tls_and_tls_to_plain_text_fail(
    service: Service, files: dict[str, Tls]
) -> None:
    wrong = None if service.tls else files["ours"]
    assert refused_with(lambda: service.call(tls=wrong)) == grpc.StatusCode.UNAVAILABLE
    service.assert_unharmed()


@pytest.mark.parametrize("service", ["ring+tls", "cloud+tls"], indirect=True)
def test_certificates_of_another_authority_are_refused_on_both_sides(
    service: Service, files: dict[str, Tls]
) -> None:
    ours, theirs = files["ours"], files["theirs"]
    with service.channel(theirs) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(service.method)(b"", timeout=TIMEOUT_S)
    assert isinstance(failure_of("it", caught.value), PeerNotTrusted)
    for tls in (Tls(ours.ca, theirs.certificate, theirs.key), Tls(ours.ca)):
        assert refused_with(lambda tls=tls: service.call(tls=tls)) == grpc.StatusCode.UNAVAILABLE
    service.assert_unharmed()


@pytest.mark.few_cells(2)
def test_many_attackers_at_once_do_not_stop_it_nor_fill_its_log(service: Service) -> None:
    """Callers with wrong tokens, connections that say nothing, say it slowly, or send junk."""
    over = threading.Event()
    host, number = service.address.split(":")

    def knock() -> None:
        while not over.is_set():
            with suppress(grpc.RpcError):
                service.call(token=b"x" * 32)

    def stay(junk: bytes) -> None:
        with (
            suppress(OSError),
            socket.create_connection((host, int(number)), timeout=TIMEOUT_S) as connection,
        ):
            for at in range(len(junk)):
                connection.sendall(junk[at : at + 1])
                if over.wait(0.1):
                    return
            over.wait(TIMEOUT_S)

    attackers = [threading.Thread(target=knock, daemon=True) for _ in range(4)]
    attackers += [
        threading.Thread(target=stay, args=(junk,), daemon=True)
        for junk in (
            b"",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/1.1\r\n",
            os.urandom(50),
        )
        * 4
    ]
    for attacker in attackers:
        attacker.start()
    try:
        for _ in range(3):
            service.assert_unharmed()
            time.sleep(0.1)
    finally:
        over.set()
        for attacker in attackers:
            attacker.join(TIMEOUT_S)
    assert 1 <= len(service.lines) <= 8


def test_an_answer_that_was_made_without_the_token_is_refused() -> None:
    class Impostor(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(
                lambda body, context: bytes(16) + b"trust me, I am the server"
            )

    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Impostor()])
    number = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for receiver in ("0", None):
            with (
                grpc.insecure_channel(f"127.0.0.1:{number}") as channel,
                pytest.raises(ForgedAnswer),
            ):
                ClientAuthentication("1", TOKEN, tls=False, receiver=receiver).on(
                    channel
                ).unary_unary("/a/b")(b"", timeout=TIMEOUT_S)
    finally:
        server.stop(None)


def test_a_call_recorded_before_a_restart_of_the_cloud_is_refused_after_it() -> None:
    number = int(free_addresses(1)[0].rpartition(":")[2])
    recorder = Recorder()
    for start in range(2):
        cloud = CloudService(
            f"127.0.0.1:{number}", make_half, operator_token=OPERATOR, log=lambda _: None
        )
        with closing(cloud), grpc.insecure_channel(cloud.address) as channel:
            if start == 0:
                ClientAuthentication(OPERATOR_NAME, OPERATOR.encode(), tls=False).on(
                    grpc.intercept_channel(channel, recorder)
                ).unary_unary(f"/{SERVICE}/Status")(b"", timeout=TIMEOUT_S)
                continue
            metadata, body = next(sent for sent in recorder.sent if sent[0])
            with pytest.raises(grpc.RpcError, match="for another receiver"):
                channel.unary_unary(f"/{SERVICE}/Status")(
                    body, timeout=TIMEOUT_S, metadata=metadata
                )


def test_messages_of_a_stream_cannot_be_moved_left_out_or_sent_back() -> None:
    """Each frame's tag stands for its position, its direction and its call."""
    from socflower.wire.authentication import _Session
    from socflower.wire.secure_channel import PeerRefused

    def session(token: bytes = TOKEN, hello: bytes = b"h" * 32) -> _Session:
        return _Session(token, "/a/b", "1", hello)

    messages = [b"one", b"", b"three" * 1000]
    sealed = list(session().seal(iter(messages), b"request"))
    assert [bytes(each) for each in session().open(iter(sealed), b"request")] == messages
    one, two, three = sealed
    nonce = one[:16]
    for wrong in ([one, three], [one, two, two], [nonce + two], [three], [one, one]):
        with pytest.raises(PeerRefused, match="changed"):
            list(session().open(iter(wrong), b"request"))
    for other, direction in (
        (session(), b"answer"),
        (session(b"x" * 32), b"request"),
        (session(hello=b"g" * 32), b"request"),
    ):
        with pytest.raises(PeerRefused, match="changed"):
            list(other.open(iter(sealed), direction))


def test_the_mac_of_a_call_is_as_described() -> None:
    from socflower.wire.authentication import _Session

    expected = hmac.digest(TOKEN, b"call\0/a/b\0" + b"caller\0" + b"h" * 32, "sha256")
    assert _Session(TOKEN, "/a/b", "caller", b"h" * 32).mac() == expected


def test_used_numbers_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from socflower.wire import authentication

    monkeypatch.setattr(authentication, "_MOST_NONCES", 5)
    made: list[ServerAuthentication] = []

    class Noted(ServerAuthentication):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("socflower.edgecloud.cloud.cloud_service.ServerAuthentication", Noted)
    with closing(
        CloudService("127.0.0.1:0", make_half, operator_token=OPERATOR, log=lambda _: None)
    ) as cloud:
        operator = CloudOperator(address=cloud.address, token=OPERATOR)
        for _ in range(12):
            assert session_status(operator) == []
            assert len(made[0]._nonces) <= 5


def test_an_edge_cannot_manage_runs() -> None:
    lines: list[str] = []
    with closing(
        CloudService("127.0.0.1:0", make_half, operator_token=OPERATOR, log=lines.append)
    ) as cloud:
        operator = CloudOperator(address=cloud.address, token=OPERATOR)
        token = open_session(operator, run_id="run", fingerprint=FINGERPRINT)
        with grpc.insecure_channel(cloud.address) as channel:
            edge = ClientAuthentication(run_caller("run"), token.encode(), tls=False).on(channel)
            for method in ("Status", "Close"):
                assert (
                    refused_with(
                        lambda method=method: edge.unary_unary(f"/{SERVICE}/{method}")(
                            b"", timeout=TIMEOUT_S
                        )
                    )
                    == grpc.StatusCode.PERMISSION_DENIED
                )
        assert len(session_status(operator)) == 1 and "by an edge" in lines[0]


@pytest.mark.parametrize(
    ("text", "host", "number"),
    [
        ("10.0.0.2:28200", "10.0.0.2", 28200),
        ("[fd00::2]:1", "fd00::2", 1),
        ("soc-1.rack:0", "soc-1.rack", 0),
    ],
)
def test_an_address_is_read_and_printed(text: str, host: str, number: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, number, text)
    assert address == Address.parse(text, "ring address")


@pytest.mark.parametrize(
    "text", ["", "28200", ":1", "fd00::1:28200", "host:", "host:x", "host:65536", "host:-1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    refused(lambda: Address.parse(text, "cloud address"), "cloud address", text, "host:port")


def test_tls_files_are_all_or_named(tmp_path: Path) -> None:
    assert Tls.from_keys({"ring": "x"}, "ring") is None
    assert Tls.from_keys({"cloud-ca": "a"}, "cloud") == Tls(Path("a"))
    refused(lambda: Tls.from_keys({"cloud-certificate": "a"}, "cloud"), "key")
    refused(Tls(tmp_path / "none").channel_credentials, tmp_path / "none", "cannot be read")
