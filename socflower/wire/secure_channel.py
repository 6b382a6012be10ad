"""gRPC connections beside Flower's own: addresses, TLS, options, servers, and what the failure of a call means."""

import errno
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from logging import WARNING
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from socflower.errors import ConfigError
from socflower.wire.logs import log

_RECONNECT_MS = 100
_BIND_RETRY_S = 0.1
_STOP_S = 5.0
_PERMANENT_ERRNOS = (errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT)


FileStamp: TypeAlias = tuple[int, int, int]
"""What changes when a file is replaced or written: inode, size and time of the change in ns."""


def stamp_of(path: Path | None) -> FileStamp | None:
    """Return the stamp of a file; None for none, or one that is not there."""
    if path is not None:
        with suppress(OSError):
            found = path.stat()
            return found.st_ino, found.st_size, found.st_mtime_ns
    return None


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a service listens; `what` names it in errors."""

    host: str
    port: int
    what: str = field(default="address", compare=False)

    @classmethod
    def parse(cls, text: str, what: str = "address") -> "Address":
        """Return the address of "host:port" or "[host]:port"; `ConfigError` if it is neither."""
        host, _, port = text.rpartition(":")
        is_port = port.isdecimal() and int(port) <= 65535
        # An address of IPv6 needs brackets, which separate it from the port.
        if not is_port or not host or (":" in host and host[0] != "["):
            raise ConfigError(
                f'{what} "{text}" is not host:port; write it like 10.0.0.2:28200 or [fd00::2]:28200'
            )
        return cls(host.strip("[]"), int(port), what)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def require_private(self, remedy: str) -> None:
        """Raise `ConfigError`, which ends with `remedy`, unless the host is loopback, link-local or private."""
        for resolved in sorted({str(entry[4][0]) for entry in self._resolved()}):
            ip = ip_address(resolved.partition("%")[0])
            is_near = ip.is_private or ip.is_loopback or ip.is_link_local
            # The unspecified address counts as private, but a server there listens to everybody.
            if is_near and not ip.is_unspecified:
                continue
            problem = "means every interface" if ip.is_unspecified else "is not private"
            raise ConfigError(f"{self.what} {self} {problem} and {remedy}")

    def why_taken(self) -> str | None:
        """Return why a server cannot listen here now; `ConfigError` if it never can. gRPC itself only prints it."""
        family, kind, protocol, _, address = self._resolved()[0]
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            if error.errno in _PERMANENT_ERRNOS:
                raise ConfigError(
                    f"{self.what} {self} cannot be listened on ({error.strerror}); give an address of this machine"
                ) from None
            return f"{self.what} {self} is in use"
        return None

    def _resolved(self) -> list[Any]:
        try:
            return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise ConfigError(
                f"{self.what} {self} cannot be resolved ({error.strerror}); give one that this machine knows"
            ) from None


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of one end: the authority that it trusts, and its own certificate and private key.

    A server needs certificate and key; with `ca` it requires certificates of that authority from its clients (mutual
    TLS). A client needs `ca`, and certificate and key where the server requires them.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS: a certificate needs its key, and a key its certificate")

    @classmethod
    def from_keys(cls, config: Any, prefix: str) -> "Tls | None":
        """Return the files that a node config names by `<prefix>-ca`, `-certificate` and `-key`; None for no file."""
        names = ("ca", "certificate", "key")
        files = {
            name: Path(str(file)) for name in names if (file := config.get(f"{prefix}-{name}"))
        }
        return cls(**files) if files else None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with; `ConfigError` for files that are missing or no PEM.

        Each handshake is with the files as they are then: certificates and authorities may be replaced while the server
        runs. While new files cannot be used, such as a key without its certificate, the ones before are.
        """
        if self.certificate is None:
            raise ConfigError(
                "TLS: a server needs a certificate and a key; name the PEM files of both"
            )
        used, stamp = self._server_configuration(), self._stamp()

        def changed() -> Any:
            nonlocal stamp
            now = self._stamp()
            if now == stamp:
                return None
            try:
                self._require_pair()
                found = self._server_configuration()
            except ConfigError as error:
                log(WARNING, "%s; the files before are used", error)
                return None
            stamp = now
            return found

        return grpc.dynamic_ssl_server_credentials(
            used, changed, require_client_authentication=self.ca is not None
        )

    def _server_configuration(self) -> Any:
        pair = (_read_pem("key", self.key), _read_pem("certificate", self.certificate))
        return grpc.ssl_server_certificate_configuration(
            [pair], root_certificates=_read_pem("ca", self.ca)
        )

    def _stamp(self) -> list[FileStamp | None]:
        return [stamp_of(path) for path in (self.ca, self.certificate, self.key)]

    def _require_pair(self) -> None:
        """Raise `ConfigError` unless the key is that of the certificate, as if only one of them was replaced yet."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(str(self.certificate), str(self.key))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"TLS: {self.certificate} and {self.key} do not belong together ({error})"
            ) from None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a client dials with; `ConfigError` for files that are missing or no PEM."""
        return grpc.ssl_channel_credentials(
            _read_pem("ca", self.ca),
            _read_pem("key", self.key),
            _read_pem("certificate", self.certificate),
        )


def _read_pem(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS: {name} {path} cannot be read ({error.strerror})") from None
    if b"-----BEGIN" not in content:
        raise ConfigError(f"TLS: {name} {path} is no PEM file, which begins with -----BEGIN")
    return content


def _options(heartbeat_s: float, max_message_bytes: int) -> list[tuple[str, int]]:
    """Return gRPC options for either end: pings both ways, no retries, bounded windows.

    A ping is sent every quarter of `heartbeat_s`, also between calls, and its answer may take three quarters; then the
    peer is dead. gRPC's own threads answer, also while Python computes. On a slow link a ping waits behind the bytes
    that were written before it, hence the long time for an answer.
    """
    ping_ms, answer_ms = max(1, round(250 * heartbeat_s)), max(1, round(750 * heartbeat_s))
    return [
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        # Without this option, an unanswered ping ends a connection only after a minute.
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # An adaptive window would grow with the link's speed, to dozens of MiB for a peer that does not read.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 << 10),
    ]


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    heartbeat_s: float,
    max_message_bytes: int,
) -> grpc.Channel:
    """Return a channel with a connection of its own; without `credentials` it sends plain text."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 2 * _RECONNECT_MS),
        # Despite its name, this is the timeout of one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", round(1000 * heartbeat_s)),
        *_options(heartbeat_s, max_message_bytes),
    ]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


@dataclass(frozen=True, slots=True)
class BoundServer:
    """A gRPC server with the threads of its handlers."""

    server: grpc.Server
    address: Address
    threads: ThreadPoolExecutor

    def start(self) -> None:
        """Accept calls."""
        self.server.start()

    def stop(self, grace_s: float) -> None:
        """End all calls after `grace_s`, and the threads that no handler holds."""
        self.server.stop(grace_s).wait(grace_s + _STOP_S)
        # Otherwise they stay until the garbage collector finds the cycle of server and handlers.
        self.threads.shutdown(wait=False)


def bind_server(
    address: Address,
    tls: Tls | None,
    handlers: Sequence[grpc.GenericRpcHandler],
    *,
    interceptors: Sequence[grpc.ServerInterceptor],
    num_threads: int,
    heartbeat_s: float,
    max_message_bytes: int,
    bind_timeout_s: float,
) -> "BoundServer":
    """Return a server that is bound but not started; port 0 asks for a free one.

    Retries for `bind_timeout_s`: a process that has ended may hold the port for a moment. Raises `ConfigError` for an
    address that cannot be listened on, and for certificates that cannot be read.
    """
    credentials = tls.server_credentials() if tls else None
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", 5000),
        *_options(heartbeat_s, max_message_bytes),
    ]
    deadline_s = time.monotonic() + bind_timeout_s
    while True:
        problem = address.why_taken()
        if problem is None:
            threads = ThreadPoolExecutor(num_threads, thread_name_prefix="socflower-grpc")
            server = grpc.server(
                threads, handlers=handlers, interceptors=interceptors, options=options
            )
            # RuntimeError: another process took the port meanwhile.
            with suppress(RuntimeError):
                if credentials is None:
                    port = server.add_insecure_port(str(address))
                else:
                    port = server.add_secure_port(str(address), credentials)
                if port:
                    return BoundServer(server, Address(address.host, port, address.what), threads)
            server.stop(None)
            threads.shutdown(wait=False)
            problem = f"{address.what} {address} is in use"
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{problem}; end the process that has it, or give another port")
        time.sleep(_BIND_RETRY_S)


class PeerFailed(Exception):
    """A call to a peer failed; the kinds below say how."""


class PeerUnreachable(PeerFailed):
    """The peer does not listen, or the connection broke: it has not started yet, or it is dead."""


class PeerNotConnected(PeerUnreachable):
    """No connection was made, now or at the last attempt; nothing of the call was sent."""


class PeerNotTrusted(PeerNotConnected):
    """The certificates do not fit; another attempt would not help."""


class PeerNotReady(PeerUnreachable):
    """The peer listens but does not accept this call yet; try again."""


class PeerSilent(PeerFailed):
    """The peer does not answer: a timeout, or its machine or process hangs."""


class PeerRefused(PeerFailed):
    """The peer refused the call; the text says why. Handlers raise this to refuse a call."""


class PeerOfOtherVersion(PeerRefused):
    """The peer has another version of the protocol; the text names both. Handlers raise this, too."""


class HandlerFailed(PeerRefused):
    """The peer's handler raised an exception that is not a refusal."""


_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
)
# gRPC has one code for "refused", "broken", "hangs" and "not trusted"; only the text distinguishes them.
_SILENCE_WORDS = ("keepalive", "ping timeout", "timeout", "timed out")
_CERTIFICATE_WORDS = (
    "certificate_verify_failed",
    "bad_signature",
    "hostname verification",
    "wrong_version_number",
    "tlsv1_alert",
    "peer name",
    "unknown_ca",
    "certificate required",
    "alert_bad_certificate",
)


def failure_of(peer: str, error: Any) -> PeerFailed:
    """Return the exception for the status of an ended gRPC call."""
    code, details = error.code(), " ".join(str(error.details() or error.code()).split())
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return PeerOfOtherVersion(f"{peer}: {details}")
    if code in _REFUSALS:
        return PeerRefused(f"{peer}: {details}")
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return PeerNotReady(f"{peer}: {details}")
    if code == grpc.StatusCode.UNKNOWN:
        return HandlerFailed(f"{peer} failed: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerSilent(f"{peer} did not answer in time")
    words = details.lower()
    if any(word in words for word in _CERTIFICATE_WORDS):
        return PeerNotTrusted(
            f"{peer}: the certificates do not fit ({details}); give the authority that signed the peer's, "
            "and dial the name in it"
        )
    if any(word in words for word in _SILENCE_WORDS):
        return PeerSilent(f"{peer} hangs ({details})")
    kind = PeerNotConnected if "failed to connect" in words else PeerUnreachable
    return kind(f"{peer} cannot be reached ({details})")
