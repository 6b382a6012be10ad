"""A ring member's certificates, and the addresses a ring may use: any with TLS, private ones without."""

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from socflower.errors import ConfigError


@dataclass(frozen=True)
class RingTls:
    """PEM files of the ring's authority, this member's certificate (with its address as a name) and private key."""

    ca: Path
    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of authority, certificate and key; `ConfigError` if one cannot be read."""
        return _read_pem("ring-ca", self.ca), _read_pem("ring-certificate", self.certificate), \
            _read_pem("ring-key", self.key)


def _read_pem(name: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read ({error.strerror}); `ring-ca`, `ring-certificate` and "
                          "`ring-key` name PEM files") from None
    if b"-----BEGIN" not in content:
        raise ConfigError(f"{name}: {path} is no PEM file")
    return content


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port"; `ConfigError` if it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ConfigError(f'ring address "{address}" is not host:port; write it like 10.0.0.2:28200 or [fd00::2]:28200')
    return host.strip("[]"), int(port)


_REMEDY = "the ring has no TLS; give ring-ca, ring-certificate and ring-key, or ring-trusted=true"


def require_private(address: str, remedy: str = _REMEDY) -> None:
    """Raise `ConfigError` unless the address is loopback, link-local or in a private range."""
    host, _ = split_address(address)
    for resolved in _resolve(host, address):
        ip = ip_address(resolved.partition("%")[0])
        if ip.is_unspecified:
            raise ConfigError(f"ring address {address} means every interface and {remedy}")
        if not (ip.is_private or ip.is_loopback or ip.is_link_local):
            raise ConfigError(f"ring address {address} is not private and {remedy}")


def _resolve(host: str, address: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except socket.gaierror as error:
        raise ConfigError(f"ring address {address} cannot be resolved ({error.strerror})") from None
