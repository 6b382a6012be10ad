"""Which addresses a ring may use: anything with TLS, private ones without."""

import socket
from ipaddress import ip_address

from socflower.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port"; `ConfigError` if it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ConfigError(f'ring address "{address}" is not host:port; write it like 10.0.0.2:28200 or [fd00::2]:28200')
    return host.strip("[]"), int(port)


_REMEDY = "the ring has no TLS; give ring-ca, ring-certificate and ring-key, or ring-trusted=true"


def require_private(address: str, remedy: str = _REMEDY) -> None:
    """Raise `ConfigError` unless whoever can reach the address is near: loopback, link-local or private range."""
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
