"""Authentication: tokens, certificates, and the addresses that are allowed without TLS."""

import hashlib
import hmac
import secrets
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import grpc

from socflower.errors import ConfigError

TOKEN_KEY = "split-token"
"""Metadata key of the token: the operator's in a manager's calls, the run's in an edge's stream."""

RUN_KEY = "split-run"
"""Metadata key of the run in an edge's stream."""

_MIN_TOKEN_LENGTH = 16


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    """Return the SHA-256 of a token, which is stored instead of it, so that files and dumps do not reveal it."""
    return hashlib.sha256(token.encode()).digest()


def token_matches(shown: str | bytes | None, digest: bytes) -> bool:
    """Whether a token has this digest, compared in constant time."""
    return isinstance(shown, str) and hmac.compare_digest(hash_token(shown), digest)


def read_token(path: Path) -> str:
    """Return the token in a file; `ConfigError` if it cannot be read or is invalid."""
    try:
        return check_token(path.read_text("utf-8").strip(), f"token file {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path}: cannot be read ({error}); name the text file that the cloud was started "
                          "with") from None


def check_token(token: str, where: str) -> str:
    """Return the token; `ConfigError` if it is too short or cannot be sent in a header."""
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where}: a token has at least {_MIN_TOKEN_LENGTH} printable ASCII characters without "
                          "blanks; make one with `openssl rand -hex 32`")
    return token


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTls:
    """PEM files of one end.

    The cloud needs `certificate` and `key`, and with `ca` requires certificates of that authority from edges. The edge
    needs `ca`, the authority that signed the cloud's certificate, and presents `certificate` and `key` if required.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("split TLS: a certificate needs its key and a key its certificate; give both or neither")

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with; `ConfigError` for files that are missing or no PEM."""
        if self.certificate is None or self.key is None:
            raise ConfigError("split TLS: the cloud needs a certificate and a key")
        ca = _read_pem("ca", self.ca)
        return grpc.ssl_server_credentials(
            [(_read_pem("key", self.key), _read_pem("certificate", self.certificate))],
            root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what an edge dials with; `ConfigError` for files that are missing or no PEM."""
        return grpc.ssl_channel_credentials(
            _read_pem("ca", self.ca), _read_pem("key", self.key), _read_pem("certificate", self.certificate))


def _read_pem(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"split TLS: {name} {path} cannot be read ({error.strerror}); give a PEM file") from None
    if b"-----BEGIN" not in content:
        raise ConfigError(f"split TLS: {name} {path} is no PEM file; it begins with -----BEGIN")
    return content


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port"; `ConfigError` if it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ConfigError(f'split address "{address}" is not host:port; write 10.0.0.2:28400 or [fd00::2]:28400')
    return host.strip("[]"), int(port)


def require_private_address(address: str) -> None:
    """Raise `ConfigError` unless plain text may go to or come from that address: loopback, link-local or private."""
    host, _ = split_address(address)
    remedy = "there is no TLS, so features and tokens could be read on the way; give certificates, or say insecure"
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise ConfigError(f"split address {address} cannot be resolved ({error.strerror}); give a name or address that "
                          "this machine knows") from None
    for resolved in sorted(found):
        ip = ip_address(resolved.partition("%")[0])
        if ip.is_unspecified:
            raise ConfigError(f"split address {address} means every interface, and {remedy}")
        if not (ip.is_private or ip.is_loopback or ip.is_link_local):
            raise ConfigError(f"split address {address} is not private, and {remedy}")


def transport_options(heartbeat_s: float, largest_frame_bytes: int) -> list[tuple[str, int]]:
    """Return gRPC options for either end: pings both ways, no retries, bounded windows.

    A ping goes out every quarter of `heartbeat_s`, also between calls, and a peer that leaves one unanswered for the
    other three is dead; they are answered below Python, also while it computes. On a slow line a ping queues behind
    what was written before it, hence the longer part for the answer.
    """
    ping_ms, answer_ms = max(1, round(250 * heartbeat_s)), max(1, round(750 * heartbeat_s))
    return [
        ("grpc.keepalive_time_ms", ping_ms), ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # otherwise an unanswered ping counts after a minute only
        ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1), ("grpc.http2.max_ping_strikes", 0),
        # A window that follows the line's speed would take dozens of MiB for one who does not read.
        ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.max_receive_message_length", largest_frame_bytes), ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 << 10), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
