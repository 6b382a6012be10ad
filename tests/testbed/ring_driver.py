"""One SoC of the testbed: it joins its ring, computes and all-reduces step by step, and notes when."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from socflower.errors import ConfigError
from tests.testbed.topology import Rack

if TYPE_CHECKING:
    from torch import Tensor

    from socflower.peers.transports.port import RingPort

RING_PORT = 28200
STORE_PORT = 29400
TURN_PORT = 30400
LEADER_PORT = 31400
PATIENCE_S = 300.0
"""How long anybody waits for a peer; whoever runs the testbed ends it sooner."""

_LARGEST_SUM = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What all SoCs do together: in each step every ring's members compute, then all-reduce once."""

    transport: str  # a key of `TRANSPORTS`
    rings: tuple[tuple[int, ...], ...]  # SoCs in rank order; a SoC is in one ring at most
    num_bytes: int
    num_steps: int
    compute_s: float = 0.0  # asleep: many SoCs share this machine's cores, and computing would slow the others down
    delays_s: tuple[float, ...] = ()  # by ring, before the first step; none where empty
    in_turn: bool = False  # whether rings exchange one after the other, in the order of `rings`

    def __post_init__(self) -> None:
        members = [soc for ring in self.rings for soc in ring]
        if len(members) != len(set(members)) or any(len(ring) < 2 for ring in self.rings):
            raise ConfigError(
                f"run: rings {self.rings} must have two members or more, and none in common"
            )
        if self.num_bytes % 4 or self.num_bytes < 4 or self.num_steps < 2:
            raise ConfigError(
                f"run: need num_bytes in whole float32 and two steps or more, got {self.num_bytes} and "
                f"{self.num_steps}"
            )
        if self.delays_s and len(self.delays_s) != len(self.rings):
            raise ConfigError(
                f"run: {len(self.delays_s)} delays for {len(self.rings)} rings; give one for each"
            )
        # A buffer is summed again and again without being filled anew, which would take a core's time between steps.
        if max(map(len, self.rings)) ** self.num_steps > _LARGEST_SUM:
            raise ConfigError(f"run: {self.num_steps} steps overflow float32; take fewer")

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Run":
        """Return the run of what `dataclasses.asdict` made of one, by way of JSON."""
        return cls(
            **{
                **document,
                "rings": tuple(map(tuple, document["rings"])),
                "delays_s": tuple(document["delays_s"]),
            }
        )


class Turns(Protocol):
    """Whose turn it is to exchange, as the first member of each ring knows it."""

    def wait(self, step: int) -> None:
        """Return when it is this ring's turn in a step."""
        ...

    def end(self, step: int) -> None:
        """Pass the turn on."""
        ...

    def close(self) -> None:
        """Take no more turns."""
        ...


class Ring(Protocol):
    """What a transport offers here; a member can be reached once it has been made."""

    def open(self) -> None:
        """Join the others, all of whom can be reached by now."""
        ...

    def turns(self, rings: Sequence[Sequence[int]], index: int) -> Turns:
        """Return the turns among all rings, this one being `index`; they go in the order of `rings`."""
        ...

    def all_reduce(self, buffer: "Tensor") -> None:
        """Sum the buffer over all members, in place, and return when that is done."""
        ...

    def close(self) -> None:
        """Leave the ring."""
        ...


def drive(soc: int, rack: Rack, run: Run, number: int, meet: Callable[[], float]) -> dict[str, Any]:
    """Do a SoC's part of the run that has this number; return its moments in seconds of the monotonic clock.

    `meet` waits for all SoCs and returns the moment at which they start together.
    """
    index = next((index for index, ring in enumerate(run.rings) if soc in ring), None)
    if index is None:
        for _ in range(3):
            meet()
        return {"soc": soc, "ring": None}
    import torch

    torch.set_num_threads(1)
    members = run.rings[index]
    rank = members.index(soc)
    ring = TRANSPORTS[run.transport](rack, members, rank, number)
    meet()
    ring.open()
    turns = ring.turns(run.rings, index) if run.in_turn and rank == 0 else None
    pattern = (torch.arange(run.num_bytes // 4) % 7 + 1).to(torch.float32)
    buffer, gate = pattern * (rank + 1), torch.zeros(1)
    ring.all_reduce(gate)  # connections, caches and threads are there before anything is timed
    begins, ends = [], []
    cpu_s = time.process_time()
    _sleep_until(meet() + (run.delays_s[index] if run.delays_s else 0.0))
    for step in range(run.num_steps):
        if run.compute_s:
            time.sleep(run.compute_s)
        if run.in_turn:
            if turns is not None:
                turns.wait(step)
            ring.all_reduce(
                gate
            )  # nobody's is done before the first member, who waits for the turn, takes part
        begins.append(time.monotonic())
        ring.all_reduce(buffer)
        ends.append(time.monotonic())
        if turns is not None:
            turns.end(step)
    cpu_s = time.process_time() - cpu_s
    meet()  # nobody leaves while another may still read
    if turns is not None:
        turns.close()
    ring.close()
    size = len(members)
    expected = pattern * (size * (size + 1) / 2 * float(size) ** (run.num_steps - 1))
    right = bool(torch.allclose(buffer, expected, rtol=1e-5, atol=0.0))
    return {
        "soc": soc,
        "ring": index,
        "begins_s": begins,
        "ends_s": ends,
        "right": right,
        "cpu_s": cpu_s,
    }


class Token:
    """Turns as plain sockets take them: a byte that goes round between the first members of the rings."""

    def __init__(self, rack: Rack, rings: Sequence[Sequence[int]], index: int, number: int) -> None:
        port = TURN_PORT + number
        with socket.create_server((rack.address(rings[index][0]), port)) as listener:
            listener.settimeout(PATIENCE_S)
            self._next = _connect((rack.address(rings[(index + 1) % len(rings)][0]), port))
            self._previous, _ = listener.accept()
        self._previous.settimeout(PATIENCE_S)
        self._mine = index == 0

    def wait(self, step: int) -> None:
        if not self._mine and self._previous.recv(1) != b"t":
            raise ConnectionError("turns: the ring before this one is gone")
        self._mine = True

    def end(self, step: int) -> None:
        self._mine = False
        self._next.sendall(b"t")

    def close(self) -> None:
        self._next.close()
        self._previous.close()


class TorchGloo:
    """A ring as plain torch builds it: a process group of gloo, its addresses exchanged through a TCP store."""

    def __init__(self, rack: Rack, members: Sequence[int], rank: int, number: int) -> None:
        self._rack, self._members, self._rank, self._number = rack, members, rank, number

    def open(self) -> None:
        import torch.distributed as dist

        rack, members = self._rack, self._members
        patience = timedelta(seconds=PATIENCE_S)
        self._store = dist.TCPStore(
            rack.address(members[0]),
            STORE_PORT + self._number,
            is_master=self._rank == 0,
            wait_for_workers=False,
            timeout=patience,
        )
        options = dist.ProcessGroupGloo._Options()
        options._timeout = patience
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=rack.address(members[self._rank]))
        ]
        self._group = dist.ProcessGroupGloo(self._store, self._rank, len(members), options)

    def all_reduce(self, buffer: "Tensor") -> None:
        self._group.allreduce([buffer]).wait()

    def turns(self, rings: Sequence[Sequence[int]], index: int) -> Turns:
        return Token(self._rack, rings, index, self._number)

    def close(self) -> None:
        del self._group, self._store


class OurRing:
    """A ring of `socflower.peers`, over the transport of that name."""

    def __init__(
        self, transport: str, rack: Rack, members: Sequence[int], rank: int, number: int
    ) -> None:
        from socflower.peers.transports.port import RingPort

        self._transport, self._members = transport, members
        # Participants of the port are all SoCs, as those of a deployment are all members of all groups.
        addresses = [f"{rack.address(soc)}:{RING_PORT}" for soc in range(rack.num_socs)]
        soc = members[rank]
        self._port = RingPort(
            addresses[soc],
            rank=soc,
            addresses=addresses,
            token=number.to_bytes(32, "big"),
            tls=None,
            heartbeat_s=PATIENCE_S,
        )

    def open(self) -> None:
        from socflower.peers.ring.member import open_ring

        self._ring = open_ring(self._transport, self._port, self._members, 0, PATIENCE_S)

    def all_reduce(self, buffer: "Tensor") -> None:
        self._ring.all_reduce(buffer).wait()

    def turns(self, rings: Sequence[Sequence[int]], index: int) -> Turns:
        return OurTurns(self._port, rings, index)

    def close(self) -> None:
        self._ring.close()
        self._port.close()


class TorchStar(TorchGloo):
    """The sum by way of the first member, which gets all buffers and sends the sum back, over plain gloo."""

    def all_reduce(self, buffer: "Tensor") -> None:
        others = range(1, len(self._members))
        if self._rank:
            self._group.send([buffer], 0, 0).wait()
            self._group.recv([buffer], 0, 0).wait()
            return
        arrived = [buffer.new_empty(buffer.shape) for _ in others]
        for work in [
            self._group.recv([each], rank, 0) for rank, each in zip(others, arrived, strict=True)
        ]:
            work.wait()
        for each in arrived:
            buffer += each
        for work in [self._group.send([buffer], rank, 0) for rank in others]:
            work.wait()


class LeaderRing:
    """What leaders of groups of one do at the end of an interval, from finding each other to their mean, each time.

    Every time over ports of their own, which are open when the first leader is done, as those of a round are.
    """

    def __init__(self, rack: Rack, members: Sequence[int], rank: int, number: int) -> None:
        self._rack, self._members, self._rank = rack, members, rank
        self._number = LEADER_PORT + 100 * number
        self._port = self._open_port()

    def open(self) -> None:
        pass

    def all_reduce(self, buffer: "Tensor") -> None:
        from socflower.peers.collective import no_poll
        from socflower.peers.leaders.leader_port import LeaderPort
        from socflower.peers.leaders.model_exchange import GroupsModel, LeaderMeeting

        port, self._port = self._port, self._open_port()
        groups = range(len(self._members))
        meeting = LeaderMeeting(
            LeaderPort(port, self._rank, {group: (group,) for group in groups}),
            groups,
            heartbeat_s=5.0,
            rendezvous_until_s=time.monotonic() + PATIENCE_S,
        )
        mean = meeting.exchange(
            GroupsModel(arrays={"model": buffer.numpy().copy()}, samples=1.0, groups=(self._rank,)),
            no_poll,
        )
        buffer.numpy()[:] = mean.arrays["model"] * len(self._members)
        port.close()

    def turns(self, rings: Sequence[Sequence[int]], index: int) -> Turns:
        raise ConfigError("leaders exchange when all groups are done, and take no turns")

    def close(self) -> None:
        self._port.close()

    def _open_port(self) -> "RingPort":
        from socflower.peers.transports.port import RingPort

        self._number += 1
        return RingPort(
            f"{self._rack.address(self._members[self._rank])}:{self._number}",
            rank=self._rank,
            addresses=[f"{self._rack.address(soc)}:{self._number}" for soc in self._members],
            token=self._number.to_bytes(32, "big"),
            tls=None,
            heartbeat_s=PATIENCE_S,
        )


class OurTurns:
    """Turns of `socflower.peers`, among all rings."""

    def __init__(self, port: "RingPort", rings: Sequence[Sequence[int]], index: int) -> None:
        from socflower.peers.ring import turn_signals as turns

        neighbours = turns.Neighbours(
            before=range(index),
            after=range(index + 1, len(rings)),
            members={other: rings[other] for other in range(len(rings)) if other != index},
        )
        self._turns = turns.TurnSignals(
            port, index, neighbours, heartbeat_s=PATIENCE_S, rendezvous_s=PATIENCE_S
        )

    def wait(self, step: int) -> None:
        self._turns.wait(step, lambda: None)

    def end(self, step: int) -> None:
        self._turns.finish_step(step)

    def close(self) -> None:
        self._turns.close()


TRANSPORTS: dict[str, Callable[[Rack, Sequence[int], int, int], Ring]] = {
    "torch": TorchGloo,
    "gloo": lambda *place: OurRing("gloo", *place),
    "grpc": lambda *place: OurRing("grpc", *place),
    "star": TorchStar,
    "leaders": LeaderRing,
}


def _connect(address: tuple[str, int]) -> socket.socket:
    """Connect to a peer that may not listen yet."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(moment_s - time.monotonic(), 0.0))
