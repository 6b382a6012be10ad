"""A ring port for leaders of groups: its ranks are groups, each reached at the member that answers for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from socflower.peers.connections import DialledCall
from socflower.peers.transports.port import Admission, AttachedStream, Caller, Handler, RingPort
from socflower.wire.secure_channel import PeerFailed, PeerNotReady, PeerRefused, PeerSilent

# A prefix of methods, so that the group's own ring can use the same port.
_PREFIX = "leaders-"

_Answer = TypeVar("_Answer")


class LeaderPort:
    """One member's end of calls among leaders.

    `members` are, for each group that may be called, the participants that may answer for it, in the order in which
    they are tried. A call raises `PeerNotReady` while any of them lives, since another member replaces a lost leader.
    If all are lost, it raises the mildest of their failures.
    """

    def __init__(self, port: RingPort, group: int, members: Mapping[int, Sequence[int]]) -> None:
        self.rank = group
        self._port = port
        self._members = {ident: list(participants) for ident, participants in members.items()}
        self._group_of = {
            participant: ident
            for ident, participants in members.items()
            for participant in participants
        }

    def address_of(self, rank: int) -> str:
        """Return the member at which a group was last reached."""
        return self._port.address_of(self._members[rank][0])

    def handle(self, method: str, handler: Handler) -> None:
        """Answer other leaders' calls of `method` from now on."""
        self._port.handle(
            _PREFIX + method, lambda caller, body: handler(self._as_group(caller), body)
        )

    def handle_stream(self, method: str, admission: Admission) -> None:
        """Accept other leaders' streams of `method` from now on, in place of an earlier admission."""

        def admit(caller: Caller, greeting: bytes) -> AttachedStream:
            return admission(self._as_group(caller), greeting)

        self._port.handle_stream(_PREFIX + method, admit)

    def call(self, rank: int, method: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Return the answer of the leader of a group."""
        return self._first_of(
            rank,
            lambda participant: self._port.call(
                participant, _PREFIX + method, body, timeout_s=timeout_s
            ),
        )

    def open_stream(self, rank: int, method: str, greeting: bytes) -> tuple[DialledCall, bytes]:
        """Return a call that the leader of a group has accepted as a stream, and its answer."""
        return self._first_of(
            rank,
            lambda participant: self._port.open_stream(participant, _PREFIX + method, greeting),
        )

    def report_refused(self, peer: str, what: str) -> None:
        """Log that `what` of `peer` was refused."""
        self._port.report_refused(peer, what)

    def _first_of(self, rank: int, ask: Callable[[int], _Answer]) -> _Answer:
        failures: list[PeerFailed] = []
        for participant in list(self._members[rank]):
            try:
                answer = ask(participant)
            except PeerFailed as failure:
                failures.append(failure)
            else:
                self._put_first(participant)
                return answer
        raise max(failures, key=_liveliness)

    def _as_group(self, caller: Caller) -> Caller:
        if caller.rank not in self._group_of:
            raise PeerRefused("only leaders may ask that")
        self._put_first(caller.rank)
        return replace(caller, rank=self._group_of[caller.rank])

    def _put_first(self, participant: int) -> None:
        members = self._members[self._group_of[participant]]
        # A new list: another thread may go through the old one.
        self._members[self._group_of[participant]] = [
            participant,
            *(each for each in members if each != participant),
        ]


def _liveliness(failure: PeerFailed) -> int:
    kinds = (PeerRefused, PeerSilent, PeerNotReady)
    return max(
        (position for position, kind in enumerate(kinds) if isinstance(failure, kind)), default=-1
    )
