"""A rack of SoCs as network namespaces: which commands build it, and which cluster the simulator sees in it.

Every SoC is a network namespace with one interface. Boards are bridges, the core switch is one more, and a pair of
virtual interfaces between a board and the core is the board's uplink. All bridges are in the namespace that runs the
commands. Rates are limited where a link's sender queues: on both ends of a SoC's link by a token bucket, on both ends
of an uplink by one class for each SoC, so that SoCs which share an uplink share it evenly.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from socflower.cluster import Board, Cluster
from socflower.cluster.device_catalog import device
from socflower.errors import ConfigError

GOODPUT = 1448 / 1514
"""Payload of a full TCP segment on Ethernet with time stamps, over the bytes that a shaper counts for it."""

MESSAGE_S = 0.0005
"""What a sub-step of a ring costs beside its bytes, for all cases: two ends that wake up and one round trip's half."""

NAMESPACES = tuple(
    ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
)
"""The command that starts a process in fresh namespaces, which end with it."""

_LIMITS = {"burst_bytes": 2 * 1514, "queue_s": 0.0, "soc_bit_per_s": 0, "uplink_bit_per_s": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rack:
    """Boards of SoCs, numbered through; rates are those of the links, framing included, in each direction."""

    slots_per_board: tuple[int, ...]
    soc_bit_per_s: int = 100_000_000
    uplink_bit_per_s: int = 100_000_000
    # A smaller one makes the kernel split what TCP hands down whole, which costs time.
    burst_bytes: int = 128 * 1024
    queue_s: float = 0.05  # what a link's sender queues at most before it drops

    def __post_init__(self) -> None:
        if not self.slots_per_board or not all(1 <= slots <= 250 for slots in self.slots_per_board):
            raise ConfigError(
                f"rack: slots_per_board = {self.slots_per_board} must name 1 to 250 slots for each board"
            )
        if len(self.slots_per_board) > 250:
            raise ConfigError(
                f"rack: {len(self.slots_per_board)} boards have no addresses; at most 250"
            )
        for key, least in _LIMITS.items():
            if not getattr(self, key) > least:
                raise ConfigError(f"rack: {key} must be above {least}, got {getattr(self, key)}")

    def script(self) -> str:
        """Return the script that builds the rack; it keeps namespaces in /run of its own mount namespace."""
        return "\n".join(
            ["set -e", "mount -t tmpfs none /run", "mkdir -p /run/netns", *self.commands()]
        )

    def build(self) -> None:
        """Build the rack in the network and mount namespaces of this process."""
        subprocess.run(
            ["bash", "-c", self.script()],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )

    @property
    def num_socs(self) -> int:
        """Number of slots over all boards."""
        return sum(self.slots_per_board)

    def address(self, soc: int) -> str:
        """Return the IPv4 address of a SoC."""
        board, slot = self._place(soc)
        return f"10.77.{board}.{slot + 1}"

    def cluster(self) -> Cluster:
        """Return the rack as the simulator has it: the links' goodput, and the one cost of a message.

        The devices are of any kind, since the cases say what computing takes; nothing hangs on the hub.
        """
        boards = tuple(
            Board(
                num_slots=slots,
                device=device("snapdragon-865"),
                soc_bytes_per_s=GOODPUT * self.soc_bit_per_s / 8,
                uplink_bytes_per_s=GOODPUT * self.uplink_bit_per_s / 8,
            )
            for slots in self.slots_per_board
        )
        return Cluster(
            name="testbed",
            boards=boards,
            hub_bytes_per_s=GOODPUT * self.uplink_bit_per_s / 8,
            message_s=MESSAGE_S,
        )

    def commands(self) -> list[str]:
        """Return the shell commands that build the rack in a fresh network namespace, in order."""
        built = ["ip link set lo up", *_bridge("core")]
        for board in range(len(self.slots_per_board)):
            built += [*_bridge(f"board{board}"), *self._uplink(board)]
        for soc in range(self.num_socs):
            built += self._soc(soc)
        return built

    @property
    def _window_bytes(self) -> int:
        """Return what a connection may have under way: less than any queue on its way holds.

        So nothing is dropped. A flow that recovers from a loss leaves its share of an uplink to others for a while,
        and how often that happens is chance.
        """
        return int(0.8 * self.queue_s * min(self.soc_bit_per_s, self.uplink_bit_per_s) / 8)

    def _place(self, soc: int) -> tuple[int, int]:
        slot = soc
        for board, slots in enumerate(self.slots_per_board):
            if 0 <= slot < slots:
                return board, slot
            slot -= slots
        raise ConfigError(f"rack: no SoC {soc}; it has 0 to {self.num_socs - 1}")

    def _soc(self, soc: int) -> Iterator[str]:
        """Yield a namespace with `eth0`, whose other end is `soc3` on the bridge of its board."""
        board, _ = self._place(soc)
        shaped = f"root tbf rate {self.soc_bit_per_s}bit burst {self.burst_bytes} latency {1e3 * self.queue_s:g}ms"
        inside = f"ip -n soc{soc}"
        yield f"ip netns add soc{soc}"
        yield f"ip link add soc{soc} type veth peer name eth0 netns soc{soc}"
        yield f"ip link set soc{soc} master board{board} up"
        yield f"{inside} link set lo up"
        yield f"{inside} address add {self.address(soc)}/16 dev eth0"
        yield f"{inside} link set eth0 up"
        # BBR, where it is the default, probes for rates; all that is to be measured here is the links'.
        yield f"{inside} route replace 10.77.0.0/16 dev eth0 src {self.address(soc)} congctl cubic"
        sysctl = f"ip netns exec soc{soc} sysctl -qw"
        yield f"{sysctl} net.ipv4.tcp_slow_start_after_idle=0"
        yield f"{sysctl} net.ipv4.tcp_wmem='4096 {self._window_bytes // 4} {self._window_bytes}'"
        yield f"tc qdisc add dev soc{soc} {shaped}"
        yield f"tc -n soc{soc} qdisc add dev eth0 {shaped}"

    def _uplink(self, board: int) -> Iterator[str]:
        """Yield `up0` on the board's bridge and `down0` on the core's, each named for where its sender sends."""
        yield f"ip link add up{board} type veth peer name down{board}"
        socs = [soc for soc in range(self.num_socs) if self._place(soc)[0] == board]
        for name, bridge, end in (
            (f"up{board}", f"board{board}", "src"),
            (f"down{board}", "core", "dst"),
        ):
            yield f"ip link set {name} master {bridge} up"
            yield f"tc qdisc add dev {name} root handle 1: htb"
            whole = f"rate {self.uplink_bit_per_s}bit burst {self.burst_bytes} cburst {self.burst_bytes}"
            yield f"tc class add dev {name} parent 1: classid 1:1 htb {whole} quantum 60000"
            for leaf, soc in enumerate(socs, start=0x10):
                yield (
                    f"tc class add dev {name} parent 1:1 classid 1:{leaf:x} htb "
                    f"rate {self.uplink_bit_per_s // len(socs)}bit ceil {self.uplink_bit_per_s}bit "
                    f"burst {self.burst_bytes} cburst {self.burst_bytes} quantum 60000"
                )
                yield (
                    f"tc qdisc add dev {name} parent 1:{leaf:x} bfifo "
                    f"limit {int(self.queue_s * self.uplink_bit_per_s / 8)}"
                )
                yield (
                    f"tc filter add dev {name} parent 1: protocol ip prio 1 u32 "
                    f"match ip {end} {self.address(soc)}/32 flowid 1:{leaf:x}"
                )


def _bridge(name: str) -> tuple[str, str]:
    return f"ip link add {name} type bridge", f"ip link set {name} up"
