"""The tokens of split training: the operator's, and one for the edges of each run."""

import hashlib
import hmac
import secrets
from pathlib import Path

from socflower.errors import ConfigError

TOKEN_KEY = "split-token"
"""Metadata key of the token: the operator's in a manager's calls, the run's in an edge's stream."""

RUN_KEY = "split-run"
"""Metadata key of the run in an edge's stream."""

PLAIN_TEXT = "there is no TLS, so features could be read on the way; give certificates, or say insecure"
"""The remedy for an address beyond private ones without TLS."""

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
