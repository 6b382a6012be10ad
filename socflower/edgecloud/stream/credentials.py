"""The tokens of split training: the operator's, and one for the edges of each run."""

import hmac
import secrets
from pathlib import Path

from socflower.errors import ConfigError

PLAIN_TEXT = (
    "there is no TLS, so features could be read on the way; give certificates, or say insecure"
)
"""The remedy for an address beyond private ones without TLS."""

_MIN_TOKEN_LENGTH = 16


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_urlsafe(32)


OPERATOR = "operator"
"""The operator's name as a caller."""

_RUN = "run/"


def run_caller(run_id: str) -> str:
    """Return the name of a run's edges as callers."""
    return _RUN + run_id


def run_of(caller: str) -> str:
    """Return the run of a caller's name; empty for the operator."""
    return caller.removeprefix(_RUN) if caller.startswith(_RUN) else ""


def run_token(operator_token: str, run_id: str) -> str:
    """Return the token of a run's edges, which tells nothing of the operator's.

    The cloud makes it of the run's name whenever it needs it, so it is neither sent to the cloud nor stored there.
    """
    return hmac.digest(operator_token.encode(), run_caller(run_id).encode(), "sha256").hex()


def read_token(path: Path) -> str:
    """Return the token in a file; `ConfigError` if it cannot be read or is invalid."""
    where = f"token file {path}"
    try:
        return check_token(path.read_text("utf-8-sig").strip(), where)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: cannot be read ({error}); name that of `socflower cloud`"
        ) from None


def check_token(token: str, where: str) -> str:
    """Return the token; `ConfigError` if it is too short or cannot be sent in a header."""
    printable = token.isascii() and token.isprintable() and " " not in token
    if not printable or len(token) < _MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"{where}: a token has at least {_MIN_TOKEN_LENGTH} printable ASCII characters without blanks; make one "
            "with `openssl rand -hex 32`"
        )
    return token
