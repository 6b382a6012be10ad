"""Groups that share an uplink take turns to exchange (F6), in the order of their communication groups.

In each step, a group waits until its conflicting groups of earlier communication groups have exchanged in this step,
and those of later ones in the previous step. One member waits for the whole group and signals the others over their
ring.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING

from socflower.peers.collective import Poll
from socflower.peers.transports.port import Caller, RingPort
from socflower.wire.logs import log
from socflower.wire.secure_channel import PeerFailed

_POLL_INTERVAL_S = 0.05
# The pause between attempts to deliver a notification.
_RETRY_INTERVAL_S = 0.25
# The time for delivering pending notifications at the end.
_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The groups that share an uplink with a group, and the participants of each."""

    # These exchange before the group in a step.
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    members: Mapping[int, Sequence[int]]


class TurnSignals:
    """Tracks which neighbouring groups have exchanged; every member is notified, so that any of them can wait.

    The wait for a neighbouring group ends if none of its members answers: a collision on the uplink only costs time,
    but waiting for a dead group would block the training.
    """

    def __init__(
        self,
        port: RingPort,
        group_id: int,
        neighbours: Neighbours,
        *,
        heartbeat_s: float,
        rendezvous_s: float,
    ) -> None:
        self._port, self._group_id, self._neighbours = port, group_id, neighbours
        self._heartbeat_s = heartbeat_s
        self._start_until_s = time.monotonic() + rendezvous_s
        self._changed = threading.Condition()
        # The exchanges of each group.
        self._done = dict.fromkeys((*neighbours.before, *neighbours.after), 0)
        self._given_up: set[int] = set()
        self._notifiers = [
            _Notifier(port, member, group_id, heartbeat_s / 4)
            for group in self._done
            for member in neighbours.members[group]
        ]
        port.handle("turn", self._on_turn)
        port.handle("alive", lambda caller, body: b"")

    def wait(self, step: int, poll: Poll) -> None:
        """Return when it is this group's turn to exchange in `step`, counted from 0 in the interval."""
        needed = {
            **dict.fromkeys(self._neighbours.before, step + 1),
            **dict.fromkeys(self._neighbours.after, step),
        }
        asked_s = time.monotonic()
        while True:
            with self._changed:
                late = [
                    group
                    for group, steps in needed.items()
                    if self._done[group] < steps and group not in self._given_up
                ]
                if not late:
                    return
                self._changed.wait(_POLL_INTERVAL_S)
            poll()
            if time.monotonic() - asked_s > self._heartbeat_s:
                for group in late:
                    self._give_up_if_gone(group)
                asked_s = time.monotonic()

    def finish_step(self, step: int) -> None:
        """Notify the neighbours that this group has exchanged in `step`; returns at once.

        May be repeated, also by another member: the first notification is lost if its sender died.
        """
        for notifier in self._notifiers:
            notifier.notify(step + 1)

    def close(self) -> None:
        """Try briefly to deliver pending notifications, then stop."""
        for notifier in self._notifiers:
            notifier.close()
        until_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for notifier in self._notifiers:
            notifier.join(until_s)

    def _on_turn(self, caller: Caller, body: bytes) -> bytes:
        notice = json.loads(body)
        with self._changed:
            group = int(notice["group"])
            if group in self._done:
                self._done[group] = max(self._done[group], int(notice["done"]))
                self._changed.notify_all()
        return b""

    def _give_up_if_gone(self, group: int) -> None:
        if time.monotonic() < self._start_until_s:
            return
        for member in self._neighbours.members[group]:
            try:
                self._port.call(member, "alive", timeout_s=self._heartbeat_s / 4)
                return
            except PeerFailed:
                continue
        with self._changed:
            self._given_up.add(group)
        log(
            WARNING,
            "ring: no member of group %d answers; group %d no longer takes turns with it",
            group,
            self._group_id,
        )


class _Notifier:
    """Notifies one member of a neighbouring group of this group's progress, with retries.

    Only the latest value matters, so a member that hangs costs one thread and no queue. A lost notification must be
    repeated even if another one is expected soon: both groups may be waiting for each other.
    """

    def __init__(self, port: RingPort, member: int, group_id: int, timeout_s: float) -> None:
        self._port, self._member, self._group_id, self._timeout_s = (
            port,
            member,
            group_id,
            timeout_s,
        )
        self._changed = threading.Condition()
        self._done = self._acknowledged = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    def notify(self, done: int) -> None:
        with self._changed:
            self._done = max(self._done, done)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, until_s: float) -> None:
        self._thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._done > self._acknowledged)
                done, last = self._done, self._closed
            if done > self._acknowledged:
                try:
                    self._port.call(
                        self._member,
                        "turn",
                        json.dumps({"group": self._group_id, "done": done}).encode(),
                        timeout_s=self._timeout_s,
                    )
                    self._acknowledged = done
                except PeerFailed:
                    # The member has not started, is lost, or is in another interval.
                    if not last:
                        with self._changed:
                            self._changed.wait_for(lambda: self._closed, _RETRY_INTERVAL_S)
            if last:
                return
