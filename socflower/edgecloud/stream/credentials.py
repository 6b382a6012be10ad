"""The tokens of split training: the operator's, and one for the edges of each run."""

import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from socflower.errors import ConfigError
from socflower.wire.logs import warn
from socflower.wire.secure_channel import stamp_of

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

    The cloud makes it of the run's name, so it is not sent there, and keeps it with the run's session.
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


class TokenFile:
    """The token in a file that may be replaced while it is in use; a call returns the newest.

    Until it can be read, the one before is used. Raises `ConfigError` as `read_token` does if there is none yet.
    `grace_s` is how long after a change the one before is accepted, since the file changes at another time on another
    machine; `clock` is in Unix seconds.
    """

    def __init__(
        self, path: Path, *, grace_s: float = 60.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._grace_s, self._clock = path, grace_s, clock
        self._lock = Lock()
        self._stamp = stamp_of(path)
        self._token = read_token(path)
        # The one before, and the time of the change.
        self._before: tuple[str, float] | None = None

    def __call__(self) -> str:
        """Return the newest token."""
        return self.accepted()[0]

    def accepted(self) -> tuple[str, ...]:
        """Return the newest token, and the one before while it may still be used."""
        with self._lock:
            self._read()
            if self._before is not None and self._clock() < self._before[1] + self._grace_s:
                return self._token, self._before[0]
            return (self._token,)

    def _read(self) -> None:
        if (stamp := stamp_of(self._path)) in (self._stamp, None):
            return
        self._stamp = stamp
        try:
            token = read_token(self._path)
        except ConfigError as error:
            warn(f"{error}; the token before is used")
            return
        if token != self._token:
            # Nobody may have asked since the change. A copy may have the time of its original.
            changed_s = min(self._clock(), self._path.stat().st_mtime)
            self._before, self._token = (self._token, changed_s), token


Token: TypeAlias = str | TokenFile
"""A token, or where the newest is."""


def newest(token: Token) -> str:
    """Return the token, of a file the newest."""
    return token if isinstance(token, str) else token()


def check_token(token: str, where: str) -> str:
    """Return the token; `ConfigError` if it is too short or cannot be sent in a header."""
    printable = token.isascii() and token.isprintable() and " " not in token
    if not printable or len(token) < _MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"{where}: a token has at least {_MIN_TOKEN_LENGTH} printable ASCII characters without blanks; make one "
            "with `openssl rand -hex 32`"
        )
    return token
