"""Groups that share an uplink exchange in turn (F6), in the order of their communication groups.

In a step a group waits for its conflicting groups of earlier communication groups, and for those of later ones to have
exchanged in the step before. One member waits for the whole group and tells the others over their ring.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING

from socflower.rings.collective import Poll
from socflower.rings.transports.port import Caller, PeerRefused, PeerSilent, PeerUnreachable, RingPort
from socflower.wire.logs import log

_PAUSE_S = 0.05
_REPEAT_S = 0.25  # after so long a word that did not arrive is said again
_PARTING_S = 1.0  # what may be spent, at the end, on words that have not arrived


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The groups that a group takes turns with, and the participants of each."""

    before: Sequence[int] = ()  # in a step
    after: Sequence[int] = ()
    members: Mapping[int, Sequence[int]]

    @property
    def groups(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.before, *self.after)


class Turns:
    """One group's view of whose turn it is; every member hears it, so that any of them can wait for the group.

    A neighbouring group none of whose members answers is not waited for any more: an exchange that collides costs time,
    waiting for the dead costs the training.
    """

    def __init__(
        self, port: RingPort, group_id: int, neighbours: Neighbours, *, heartbeat_s: float, rendezvous_s: float,
    ) -> None:
        self._port, self._group_id, self._neighbours = port, group_id, neighbours
        self._heartbeat_s = heartbeat_s
        self._start_until_s = time.monotonic() + rendezvous_s
        self._changed = threading.Condition()
        self._done = dict.fromkeys(neighbours.groups, 0)  # exchanges that each neighbour has ended
        self._given_up: set[int] = set()
        self._tellers = [_Teller(port, member, group_id, heartbeat_s / 4)
                         for group in neighbours.groups for member in neighbours.members[group]]
        port.handle("turn", self._on_turn)
        port.handle("alive", lambda caller, body: b"")

    def wait(self, step: int, poll: Poll) -> None:
        """Return when it is this group's turn to exchange in `step`, counted from 0 in the interval."""
        needed = {**dict.fromkeys(self._neighbours.before, step + 1), **dict.fromkeys(self._neighbours.after, step)}
        asked_s = time.monotonic()
        while True:
            with self._changed:
                late = [group for group, steps in needed.items()
                        if self._done[group] < steps and group not in self._given_up]
                if not late:
                    return
                self._changed.wait(_PAUSE_S)
            poll()
            if time.monotonic() - asked_s > self._heartbeat_s:
                for group in late:
                    self._give_up_if_gone(group)
                asked_s = time.monotonic()

    def end(self, step: int) -> None:
        """Tell the neighbours that this group has exchanged in `step`; returns at once.

        May be said again, also by another member: the first word of a member that has died since may be lost.
        """
        for teller in self._tellers:
            teller.tell(step + 1)

    def close(self) -> None:
        """Tell what is still to be told, for a moment, and end."""
        for teller in self._tellers:
            teller.close()
        until_s = time.monotonic() + _PARTING_S
        for teller in self._tellers:
            teller.join(until_s)

    def _on_turn(self, caller: Caller, body: bytes) -> bytes:
        told = json.loads(body)
        with self._changed:
            group = int(told["group"])
            if group in self._done:
                self._done[group] = max(self._done[group], int(told["done"]))
                self._changed.notify_all()
        return b""

    def _give_up_if_gone(self, group: int) -> None:
        if time.monotonic() < self._start_until_s:
            return
        for member in self._neighbours.members[group]:
            try:
                self._port.call(member, "alive", timeout_s=self._heartbeat_s / 4)
                return
            except (PeerUnreachable, PeerSilent, PeerRefused):
                continue
        with self._changed:
            self._given_up.add(group)
        log(WARNING, "ring: no member of group %d answers; group %d no longer takes turns with it", group,
            self._group_id)


class _Teller:
    """Tells one member of a neighbouring group how far this group is, until it has arrived.

    Only the newest word counts, so a member that hangs costs one thread and no queue. A word that is lost must be said
    again, however soon a next one seemed to come: both groups may be waiting for each other's.
    """

    def __init__(self, port: RingPort, member: int, group_id: int, patience_s: float) -> None:
        self._port, self._member, self._group_id, self._patience_s = port, member, group_id, patience_s
        self._changed = threading.Condition()
        self._done = self._told = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    def tell(self, done: int) -> None:
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
                self._changed.wait_for(lambda: self._closed or self._done > self._told)
                done, last = self._done, self._closed
            if done > self._told:
                try:
                    self._port.call(self._member, "turn", json.dumps({"group": self._group_id, "done": done}).encode(),
                                    timeout_s=self._patience_s)
                    self._told = done
                except (PeerUnreachable, PeerSilent, PeerRefused):  # not there yet, gone, or in another interval
                    if not last:
                        with self._changed:
                            self._changed.wait_for(lambda: self._closed, _REPEAT_S)
            if last:
                return
