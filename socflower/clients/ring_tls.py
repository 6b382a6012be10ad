"""A member's certificates: with them every byte of a ring is encrypted, and strangers do not get as far as a call."""

from dataclasses import dataclass
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
