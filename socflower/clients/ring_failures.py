"""How a call to another member can fail: it is dead, it hangs, or it does not want to."""

from typing import Any

import grpc


class PeerUnreachable(Exception):
    """Nobody listens there, or the connection broke: it has not begun yet, or it is dead."""


class PeerNotReady(PeerUnreachable):
    """It listens but does not take this call yet; try again."""


class PeerSilent(Exception):
    """It does not answer: the time was up, or its machine or process hangs."""


class PeerRefused(Exception):
    """It answered that it does not want this; the text says why. Handlers raise it to say so."""


def failure_of(peer: str, error: Any) -> Exception:
    """Return what the status of an ended gRPC call means."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.INVALID_ARGUMENT):
        return PeerRefused(f"{peer}: {details}")
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return PeerNotReady(f"{peer}: {details}")
    if code == grpc.StatusCode.UNKNOWN:  # its handler raised
        return PeerRefused(f"{peer} failed: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerSilent(f"{peer} did not answer in time")
    # gRPC has one code for "refused", "broken" and "hangs"; only its words tell them apart.
    if any(word in details.lower() for word in ("keepalive", "ping timeout", "timeout", "timed out")):
        return PeerSilent(f"{peer} hangs ({details})")
    return PeerUnreachable(f"{peer} cannot be reached ({details})")
