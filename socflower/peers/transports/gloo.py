"""A ring over torch.distributed's gloo, the fastest transport, for trusted networks only: gloo has no TLS.

Gloo needs a store through which members exchange their addresses. It is hosted by the generation's first member and
accessed through the authenticated ring ports, so that no other port is open to unauthenticated clients.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from socflower.peers.collective import POLL_INTERVAL_S, Collective, PeerLost, Poll, no_poll
from socflower.peers.transports.links import QueuedCollective
from socflower.peers.transports.port import Caller, RingPort
from socflower.wire.secure_channel import (
    Address,
    PeerNotReady,
    PeerRefused,
    PeerSilent,
    PeerUnreachable,
)

# Longer than any wait: lost members are detected by the callers' polls.
GROUP_TIMEOUT = timedelta(minutes=10)
_METHOD = "rendezvous"
_LONG_POLL_S = 0.2
_RETRY_S = 0.02
_DEVICE_KEY = "device-port-{}"

_Result = TypeVar("_Result")


class GlooRing(Collective):
    """One generation of a ring among the members `ranks` of a port's addresses, in ring order.

    Returns at once; the group is built in the background, and operations begin when it is ready. `heartbeat_s` is how
    long the first member may take to answer meanwhile. A member that dies breaks the ring; a member that hangs or is
    slow does not. Raises `ConfigError` if an address is not private and the port is not trusted. A process can only be
    one member, since connections of several members in one process cannot be told apart.

    `two_way`: whether `send` has a connection for each direction. Gloo sends only after the receiver's message that
    it is ready. On a shared connection that message waits behind payloads of the other direction, so the link would
    be used in one direction at a time.
    """

    def __init__(
        self,
        port: RingPort,
        ranks: Sequence[int],
        generation: int,
        heartbeat_s: float,
        *,
        two_way: bool = False,
    ) -> None:
        if not port.trusted:
            for member in ranks:
                Address.parse(port.addresses[member], "ring address").require_private(
                    "gloo encrypts nothing; take transport grpc, or give ring-trusted=true"
                )
        self.rank = list(ranks).index(port.rank)
        self.size = len(ranks)
        self.transport = "gloo"
        self._lock = threading.Lock()
        self._heartbeat_s = heartbeat_s
        self._store = _PortStore(port, ranks[0], generation, heartbeat_s)
        self._group: Any = None
        # The group for messages to lower ranks.
        self._downward: Any = None
        self._two_way = two_way
        self._waiting: list[GlooCall[Any]] = []
        self._begun: list[GlooCall[Any]] = []
        self._ports: frozenset[int] = frozenset()
        # What `_sockets` calls the group's connections, and since when one of them is missing.
        self._connections: frozenset[str] = frozenset()
        self._incomplete_since_s: float | None = None
        self._failure: str | None = None
        self._host = Address.parse(port.addresses[port.rank]).host
        threading.Thread(target=self._build, name="ring-gloo", daemon=True).start()

    def all_reduce(self, buffer: Tensor) -> "GlooCall[None]":
        """Begin to sum a buffer over all members, in place."""
        return self._begin(lambda group: (group.allreduce([buffer]), lambda: None))

    def all_gather(self, payload: bytes, poll: Poll = no_poll) -> list[bytes]:
        """Return every member's payload, by rank."""
        lengths = [int(length) for length in self._gather(torch.tensor([len(payload)]), poll)]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(payload)] = _tensor(payload)
        gathered = self._gather(padded, poll)
        return [
            part[:length].numpy().tobytes() for part, length in zip(gathered, lengths, strict=True)
        ]

    def broadcast(self, payload: bytes | None, source: int, poll: Poll = no_poll) -> bytes:
        """Return the payload of rank `source`."""
        length = torch.tensor([0 if payload is None else len(payload)])
        self._broadcast_tensor(length, source, poll)
        content = (
            torch.zeros(int(length), dtype=torch.uint8) if payload is None else _tensor(payload)
        )
        if len(content):
            self._broadcast_tensor(content, source, poll)
        return content.numpy().tobytes()

    def send(self, payload: Tensor, target: int, tag: int) -> None:
        """Send a tensor to one member; return when its memory is free. Other threads may send and receive meanwhile.

        Messages of one tag between two members keep their order. Raises `PeerLost`.
        """
        self._begin(
            lambda group: (
                (self._downward if target < self.rank else group).send([payload], target, tag),
                lambda: None,
            ),
            PointToPoint,
        ).wait()

    def begin_receive(self, buffer: Tensor, source: int, tag: int) -> "GlooCall[None]":
        """Begin to receive a tensor of the buffer's size from one member; messages of one tag arrive in the order of
        begins."""
        return self._begin(
            lambda group: (
                (self._downward if source > self.rank else group).recv([buffer], source, tag),
                lambda: None,
            ),
            PointToPoint,
        )

    def collect(self, own: Tensor) -> list[Tensor]:
        """Return every member's tensor, by rank, at the first member, and none at the others. Raises `PeerLost`."""
        parts = [torch.empty_like(own) for _ in range(self.size if self.rank == 0 else 0)]
        return self._begin(lambda group: (group.gather(parts, own, 0), lambda: parts)).result(
            no_poll
        )

    def hand_out(self, content: Tensor) -> None:
        """Replace a tensor by the first member's, which sends it to each of the others. Raises `PeerLost`."""
        parts = [content] * (self.size if self.rank == 0 else 0)
        self._begin(lambda group: (group.scatter(content, parts, 0), lambda: None)).wait()

    def close(self) -> None:
        """Leave at once; pending operations end with `PeerLost`."""
        self._fail("the ring has been left")

    def failure(self) -> str | None:
        """Return why no pending operation will end: the ring has failed, or a connection has been gone for a while.

        A while, because a member that is done leaves, and what it sent may still be on its way.
        """
        with self._lock:
            if self._failure is not None or not self._connections:
                return self._failure
            if self._connections <= set(_sockets().values()):
                self._incomplete_since_s = None
                return None
            now_s = time.monotonic()
            self._incomplete_since_s = self._incomplete_since_s or now_s
            if now_s - self._incomplete_since_s < self._heartbeat_s:
                return None
            return "the connection to a member has closed"

    def _gather(self, own: Tensor, poll: Poll) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        return self._begin(lambda group: (group.allgather([parts], [own]), lambda: parts)).result(
            poll
        )

    def _broadcast_tensor(self, content: Tensor, source: int, poll: Poll) -> None:
        self._begin(lambda group: (group.broadcast(content, source), lambda: None)).result(poll)

    def _begin(
        self,
        operation: Callable[[Any], tuple[Any, Callable[[], _Result]]],
        kind: "type[GlooCall[_Result]] | None" = None,
    ) -> "GlooCall[_Result]":
        work = (kind or GlooCall)(operation, self.failure)
        with self._lock:
            if self._failure is not None:
                raise PeerLost(self._failure)
            if self._group is None:
                self._waiting.append(work)
            else:
                self._start(work)
        return work

    def _start(self, work: "GlooCall[Any]") -> None:
        self._begun = [earlier for earlier in self._begun if not earlier.has_ended()]
        self._begun.append(work)
        work.begin(self._group)

    def _build(self) -> None:
        try:
            before = _sockets()
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            options._timeout = GROUP_TIMEOUT
            listening = _listening_ports_since(before)
            self._store.set(_DEVICE_KEY.format(self.rank), json.dumps(listening))
            group = dist.ProcessGroupGloo(self._store, self.rank, self.size, options)
            downward = (
                dist.ProcessGroupGloo(
                    dist.PrefixStore("downward", self._store), self.rank, self.size, options
                )
                if self._two_way
                else group
            )
            ports = frozenset(
                port
                for rank in range(self.size)
                for port in json.loads(self._store.get(_DEVICE_KEY.format(rank)))
            )
        except Exception as failure:
            # Gloo only raises RuntimeError, which contains the exception of the store.
            self._fail(
                self._store.failure
                or f"the ring could not be built: {str(failure).splitlines()[0]}"
            )
            return self._store.abandon()
        with self._lock:
            self._group, self._downward, self._ports = group, downward, ports
            self._connections = _connections(ports)
            # If `close` was called meanwhile, the new group is shut down here.
            closed = self._failure is not None
            for work in self._waiting:
                self._start(work)
            self._waiting.clear()
        if closed:
            self._shut_down_group()

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failure = self._failure or why
            for work in self._waiting:
                work.fail(self._failure)
            self._waiting.clear()
        self._store.close()
        self._shut_down_group()

    def _shut_down_group(self) -> None:
        """Shut down the group's connections and drop it; open connections to a hung member would block for minutes."""
        with self._lock:
            groups, self._group, self._downward = (self._group, self._downward), None, None
            begun, self._begun = self._begun, []
        if groups[0] is None:
            return
        # Without /proc the connections cannot be found, and a leak is better than blocking.
        if not self._ports:
            _LEAKED.extend(groups)
            return
        for fd in _connected_sockets(self._ports):
            _shut_down(fd)
        threading.Thread(
            target=_drop_when_idle, args=(groups, begun), name="gloo-groups", daemon=True
        ).start()


class GlooServer(QueuedCollective):
    """A member's end of a star on a gloo ring: the first member sums in the order of ranks, as `Tree` does."""

    def __init__(self, ring: GlooRing) -> None:
        self._ring = ring
        super().__init__(ring.rank, ring.size, ring.transport)

    def _sum(self, array: NDArray[Any]) -> None:
        content = torch.from_numpy(array)
        for part in self._ring.collect(content)[1:]:
            array += part.numpy()
        self._ring.hand_out(content)

    def _gather(self, payload: bytes) -> list[bytes]:
        lengths = self._through_server(torch.tensor([len(payload)])).flatten().tolist()
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(payload)] = _tensor(payload)
        rows = self._through_server(padded)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _through_server(self, own: Tensor) -> Tensor:
        """Return all members' tensors, stacked."""
        parts = self._ring.collect(own)
        rows = torch.stack(parts) if parts else own.new_empty(self.size, *own.shape)
        self._ring.hand_out(rows)
        return rows

    def _spread(self, payload: bytes | None, source: int) -> bytes:
        return self._ring.broadcast(payload, source)

    def _close_links(self, *, graceful: bool) -> None:
        self._ring.close()


class GlooCall(Generic[_Result]):
    """An operation of a ring that begins once the group is built; the owner of the ring waits for it.

    `ring_failure` is the ring's `failure`: of a connection that breaks in the middle of a message, gloo does not tell
    the operation to which the message belongs.
    """

    def __init__(
        self,
        operation: Callable[[Any], tuple[Any, Callable[[], _Result]]],
        ring_failure: Callable[[], str | None],
    ) -> None:
        self._operation = operation
        self._ring_failure = ring_failure
        self._begun = threading.Event()
        self._work: Any = None
        self._finish: Callable[[], _Result]
        self._failure: str | None = None

    def begin(self, group: Any) -> None:
        """Begin in a group; a failure is raised by `wait`."""
        try:
            self._work, self._finish = self._operation(group)
        except RuntimeError as failure:
            self._failure = _member_gone(failure)
        self._begun.set()

    def fail(self, why: str) -> None:
        """End without a result, for a reason that `wait` raises."""
        self._failure = why
        self._begun.set()

    def wait(self, poll: Poll = no_poll) -> None:
        """Return when it is done; raise `PeerLost`, or what `poll` raises."""
        self._await_begin(poll)
        while self._failure is None:
            try:
                self._work.wait(timedelta(seconds=POLL_INTERVAL_S))
                return
            except RuntimeError as failure:
                # Perhaps only this wait timed out. `is_completed` cannot tell: the operation may
                # have completed since.
                if "timed out" in str(failure).lower() and not self._has_failed():
                    poll()
                    self._failure = self._ring_failure()
                else:
                    self._failure = _member_gone(failure)
        self._require_success()

    def has_ended(self) -> bool:
        """Whether gloo has no more to do for it."""
        return self._work is None or bool(self._work.is_completed())

    def _await_begin(self, poll: Poll) -> None:
        while not self._begun.wait(POLL_INTERVAL_S):
            poll()

    def _require_success(self) -> None:
        if self._failure is not None:
            raise PeerLost(self._failure)

    def _has_failed(self) -> bool:
        return bool(self._work.is_completed()) and not self._work.is_success()

    def result(self, poll: Poll) -> _Result:
        """Wait for the operation and return its result."""
        self.wait(poll)
        return self._finish()


class PointToPoint(GlooCall[None]):
    """A message to or from one member. Gloo breaks the ring at a time limit of its wait, so a thread waits without."""

    def begin(self, group: Any) -> None:
        """Begin in a group; a failure is raised by `wait`."""
        self._over = threading.Event()
        super().begin(group)
        if self._failure is None:
            threading.Thread(target=self._wait_for_gloo, name="gloo-message", daemon=True).start()

    def wait(self, poll: Poll = no_poll) -> None:
        """Return when it is done; raise `PeerLost`, also when the ring is closed meanwhile."""
        self._await_begin(poll)
        while self._failure is None and not self._over.wait(POLL_INTERVAL_S):
            poll()
            self._failure = self._ring_failure()
        self._require_success()

    def has_ended(self) -> bool:
        """Whether gloo has no more to do for it."""
        return self._work is None or self._over.is_set()

    def _wait_for_gloo(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as failure:
            self._failure = _member_gone(failure)
        self._over.set()


class _PortStore(dist.Store):
    """The key-value store of one generation, hosted by its first member."""

    def __init__(self, port: RingPort, host_rank: int, generation: int, heartbeat_s: float) -> None:
        super().__init__()
        self.failure: str | None = None
        self._port = port
        self._host_rank = host_rank
        self._generation = generation
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = False
        self._abandoned_by = ""
        port.handle(_METHOD, self._answer)

    def set(self, key: str, value: bytes | str) -> None:
        self._send_request("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        while True:
            answer = self._send_request("get", key)
            if answer[:1] == b"1":
                return answer[1:]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._send_request("check", key)[:1] == b"1" for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._send_request("add", key, str(amount).encode()))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Announce that this member will not join; else the others would wait for its keys."""
        if self._port.rank != self._host_rank:
            with suppress(PeerUnreachable, PeerSilent, PeerRefused):
                self._port.call(
                    self._host_rank,
                    _METHOD,
                    self._request("give-up", ""),
                    timeout_s=self._heartbeat_s,
                )

    def _request(self, what: str, key: str) -> bytes:
        return json.dumps([self._generation, what, key]).encode() + b"\n"

    def _send_request(self, what: str, key: str, value: bytes = b"") -> bytes:
        request = self._request(what, key) + value
        deadline_s: float | None = None
        while not self._closed:
            if self._port.rank == self._host_rank:
                try:
                    return self._apply(what, key, value, lambda: True)
                except PeerRefused as failure:
                    self.failure = str(failure)
                    raise
            try:
                return self._port.call(
                    self._host_rank, _METHOD, request, timeout_s=self._heartbeat_s + _LONG_POLL_S
                )
            except PeerNotReady:
                deadline_s = None
            except PeerUnreachable as failure:
                # Its port was reachable when the members agreed on the ring; a connection may need
                # a second attempt.
                deadline_s = deadline_s or time.monotonic() + self._heartbeat_s
                if time.monotonic() > deadline_s:
                    self.failure = str(failure)
                    raise
            except (PeerSilent, PeerRefused) as failure:
                self.failure = str(failure)
                raise
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _RETRY_S)
        raise PeerLost("the ring has been left")

    def _answer(self, caller: Caller, request: bytes) -> bytes:
        head, _, value = request.partition(b"\n")
        generation, what, key = json.loads(head)
        if generation > self._generation:
            raise PeerNotReady(f"generation {generation} has not begun here")
        if generation < self._generation or self._closed:
            raise PeerRefused(f"generation {generation} is over")
        if what == "give-up":
            with self._changed:
                self._abandoned_by = f"rank {caller.rank} left while the ring opened"
                self._changed.notify_all()
            return b""
        return self._apply(what, key, value, caller.is_active)

    def _apply(self, what: str, key: str, value: bytes, is_active: Callable[[], bool]) -> bytes:
        with self._changed:
            if what == "set":
                self._values[key] = value
            elif what == "add":
                self._values[key] = str(int(self._values.get(key, b"0")) + int(value)).encode()
            elif what == "get":
                self._changed.wait_for(
                    lambda: (
                        self._closed or self._abandoned_by or key in self._values or not is_active()
                    ),
                    _LONG_POLL_S,
                )
            self._changed.notify_all()
            found = self._values.get(key)
            if found is None and self._abandoned_by:
                raise PeerRefused(self._abandoned_by)
            if what == "add":
                return found or b""
            return b"0" if found is None else b"1" + found


_LEAKED: list[Any] = []


def _tensor(payload: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.empty(0, dtype=torch.uint8)
    )


def _sockets() -> dict[int, str]:
    """Return the identities of this process's sockets by their descriptors; none on platforms without /proc."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                identity = os.readlink(f"/proc/self/fd/{name}")
                if identity.startswith("socket:"):
                    found[int(name)] = identity
    return found


def _listening_ports_since(before: Mapping[int, str]) -> list[int]:
    """Return the ports of listening sockets that `before`, a result of `_sockets`, does not have."""
    # Not by descriptor alone: another thread may have closed a socket, whose descriptor the new one
    # then got.
    return [
        port
        for fd, identity in _sockets().items()
        if before.get(fd) != identity and (port := _listening_port(fd))
    ]


def _listening_port(fd: int) -> int | None:
    with suppress(OSError):
        view = socket.socket(fileno=fd)
        try:
            if view.family in (socket.AF_INET, socket.AF_INET6) and view.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                return int(view.getsockname()[1])
        finally:
            view.detach()
    return None


def _connections(ports: frozenset[int]) -> frozenset[str]:
    """Return what `_sockets` calls the connections to or from these listening ports."""
    identities = _sockets()
    return frozenset(identities[fd] for fd in _connected_sockets(ports) if fd in identities)


def _connected_sockets(ports: frozenset[int]) -> list[int]:
    """Return the descriptors of connections to or from these listening ports."""
    return [fd for fd in _sockets() if _is_connected(fd, ports)]


def _is_connected(fd: int, ports: frozenset[int]) -> bool:
    with suppress(OSError):
        view = socket.socket(fileno=fd)
        try:
            return view.family in (socket.AF_INET, socket.AF_INET6) and not ports.isdisjoint(
                (view.getsockname()[1], view.getpeername()[1])
            )
        finally:
            view.detach()
    return False


def _shut_down(fd: int) -> None:
    """Shut down a connection.

    Listening sockets are left open, or gloo would end the process. Gloo itself closes the sockets.
    """
    with suppress(OSError):
        view = socket.socket(fileno=fd)
        try:
            view.shutdown(socket.SHUT_RDWR)
        finally:
            view.detach()


def _drop_when_idle(groups: tuple[Any, ...], begun: list[GlooCall[Any]]) -> None:
    """Hold groups until their operations have ended, at the latest by `GROUP_TIMEOUT`.

    Their destructors wait for these operations, and no other thread of the interpreter runs meanwhile.
    """
    while not all(work.has_ended() for work in begun):
        time.sleep(POLL_INTERVAL_S)


def _member_gone(failure: RuntimeError) -> str:
    return f"a member is gone ({str(failure).splitlines()[0]})"
