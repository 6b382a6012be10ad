"""The calls that a run's manager makes to the cloud: open a session, fetch its weights, close it, get its status."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from socflower.edgecloud.cloud.cloud_service import SERVICE
from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import (
    OPERATOR,
    PLAIN_TEXT,
    Token,
    check_token,
    newest,
    run_token,
)
from socflower.edgecloud.stream.frames import PROTOCOL_VERSION, SplitRefused
from socflower.peers.resumable_stream import StreamLost
from socflower.plain_numbers import plain_numbers
from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays
from socflower.wire.authentication import ClientAuthentication
from socflower.wire.framing import (
    LARGEST_FRAME_BYTES,
    LARGEST_PART_BYTES,
    Assembly,
    body_num_bytes,
    parts_of,
)
from socflower.wire.secure_channel import (
    Address,
    PeerNotTrusted,
    PeerRefused,
    Tls,
    failure_of,
    open_channel,
)

T = TypeVar("T")


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class CloudOperator:
    """The address of a cloud and the token that authorises the management of its runs.

    A token that is in a file may be replaced there: each call reads it anew. Calls take `timeout_s` at most. `insecure`
    allows plain text beyond private addresses.
    """

    address: str
    token: Token
    tls: Tls | None = None
    insecure: bool = False
    timeout_s: float = 120.0
    heartbeat_s: float = 5.0

    def __post_init__(self) -> None:
        address = Address.parse(self.address, "cloud address")
        check_token(newest(self.token), "operator token")
        if self.tls is None and not self.insecure:
            address.require_private(PLAIN_TEXT)


def open_session(
    operator: CloudOperator,
    *,
    run_id: str,
    fingerprint: str,
    weights: Weights | None = None,
    settings: Mapping[str, Any] | None = None,
    num_parties: int = 1,
    joined: bool = False,
    reverse: bool = False,
    replace: bool = False,
) -> str:
    """Open a run: `weights` and `settings` go to the cloud's factory. Return the token of the run's edges.

    `replace` ends a run of that name first. Raises `SplitRefused` if the cloud refuses it, and `StreamLost` if the
    cloud cannot be reached.
    """
    pieces = pack_arrays(weights) if weights else []
    opening = wire.Opening(
        version=PROTOCOL_VERSION,
        run_id=run_id,
        fingerprint=fingerprint,
        num_parties=num_parties,
        joined=joined,
        reverse=reverse,
        settings=json.dumps(dict(settings or {})),
        num_bytes=body_num_bytes(pieces),
        replace=replace,
    )

    def messages() -> Iterator[bytes]:
        yield wire.OpenPart(opening=opening).SerializeToString()
        for piece in parts_of(pieces, LARGEST_PART_BYTES) if pieces else ():
            yield wire.OpenPart(part=piece).SerializeToString()

    # The edges' token is made of the one with which the run was opened.
    token = newest(operator.token)
    with _open_channel(dataclasses.replace(operator, token=token)) as channel:
        channel.stream_unary(f"/{SERVICE}/Open")(messages(), timeout=operator.timeout_s)
    return run_token(token, run_id)


def fetch_weights(operator: CloudOperator, run_id: str) -> tuple[int, Weights]:
    """Return the number of batches that the cloud's half was trained on, and its weights.

    Raises `SplitRefused` while a span runs, and for a run that is not open; `StreamLost` if the cloud cannot be
    reached.
    """
    return _fetch(operator, run_id, unpack_arrays, whole_state=False)


def fetch_state(operator: CloudOperator, run_id: str) -> tuple[int, bytes]:
    """Return the number of batches that the cloud's half was trained on, and the bytes for `Half.restore`.

    Raises what `fetch_weights` raises.
    """
    return _fetch(operator, run_id, bytes, whole_state=True)


def close_session(operator: CloudOperator, run_id: str, *, forget: bool = True) -> None:
    """Close a run: its edges are refused from now on. `forget` removes its checkpoints too."""
    request = wire.CloseRequest(run_id=run_id, forget=forget).SerializeToString()
    with _open_channel(operator) as channel:
        channel.unary_unary(f"/{SERVICE}/Close")(request, timeout=operator.timeout_s)


def session_status(operator: CloudOperator, run_id: str = "") -> list[dict[str, Any]]:
    """Return `CloudSession.status` of one run, or of all."""
    request = wire.StatusRequest(run_id=run_id).SerializeToString()
    with _open_channel(operator) as channel:
        reply = channel.unary_unary(f"/{SERVICE}/Status")(request, timeout=operator.timeout_s)
        sessions: list[dict[str, Any]] = json.loads(wire.StatusReply.FromString(reply).sessions)
        return sessions


def _fetch(
    operator: CloudOperator,
    run_id: str,
    read: Callable[[memoryview], T],
    *,
    whole_state: bool,
) -> tuple[int, T]:
    content: Assembly | None = None
    request = wire.FetchRequest(run_id=run_id, whole_state=whole_state).SerializeToString()
    with _open_channel(operator) as channel:
        replies = channel.unary_stream(f"/{SERVICE}/Fetch")(request, timeout=operator.timeout_s)
        for message in replies:
            part = wire.FetchPart.FromString(message)
            content = content or Assembly(part.num_bytes, "a half")
            content.add(part.part)
        if content is None:
            raise MalformedBytes("no half")
        return part.batch, read(content.whole())


@contextmanager
def _open_channel(operator: CloudOperator) -> Iterator[grpc.Channel]:
    tls = operator.tls
    cloud = f"the cloud at {operator.address}"
    channel = open_channel(
        operator.address,
        tls.channel_credentials() if tls is not None else None,
        heartbeat_s=operator.heartbeat_s,
        max_message_bytes=LARGEST_FRAME_BYTES,
    )
    token = newest(operator.token).encode()
    try:
        yield ClientAuthentication(
            OPERATOR,
            token,
            tls=tls is not None,
        ).on(channel)
    except PeerRefused as refused:
        raise SplitRefused(f"{cloud}: {refused}") from None
    except MalformedBytes as malformed:
        raise SplitRefused(f"{cloud} sends {malformed}") from None
    except grpc.RpcError as error:
        failure = failure_of(cloud, error)
        if isinstance(failure, PeerRefused | PeerNotTrusted):
            raise SplitRefused(str(failure)) from None
        remedy = "see that `socflower cloud serve` runs there"
        # A server that requires certificates hangs up on those who show none, without a reason.
        if tls is not None and tls.certificate is None:
            remedy += ", and give certificate and key if it was started with --ca"
        raise StreamLost(f"{failure}; {remedy}") from None
    finally:
        channel.close()
