"""Cells: what is drawn for each from the seed, and nothing else."""

import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.testbed.topology import Rack

SHAPES = (
    (2,),
    (3,),
    (1, 1),
    (1, 2),
    (2, 2),
    (1, 1, 1),
    (3, 1),
    (2, 3),
    (1, 2, 1),
    (3, 3),
    (2, 2, 2),
)
_COMPUTING_SHAPES = (
    (2,),
    (1, 1),
)  # a core for each SoC: two on one core would slow each other down
SOC_MBIT_PER_S = (40, 60, 80)
UPLINK_FACTORS = (0.5, 1.0, 2.0)
MODELS = ("mlp", "cnn", "transformer")
REFERENCE = "reference"
ONE_RING, GROUPS, FEDERATED = "one ring", "groups", "federated"
STRATEGIES = (ONE_RING, GROUPS, FEDERATED)
LEADERS = ("ring", "star")
TRANSPORTS = ("gloo", "grpc")
BUCKETS = (1, 2, 4)
SPEEDS = (0.5, 1.0)
_SAMPLES = (8, 16, 32)  # of a batch, for each member on average, where SoCs sleep
_COMPUTED_SAMPLES = (64, 128, 256)  # where they compute, so that a step takes some milliseconds
_STEP_S = (0.1, 0.4)  # of computation, as drawn for a member of speed 1 with the mean share
_BURST_S = 0.0006  # of its rate that a link sends at once after a pause: timers are that late
_LEAST_BURST_BYTES = 2 * 1514 + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training: two intervals of equal numbers of steps with a synchronisation between, or one interval of both."""

    number: int
    slots_per_board: tuple[int, ...]
    soc_mbit_per_s: int
    uplink_mbit_per_s: int
    speeds: tuple[float, ...]  # of each board's SoCs
    model: str
    strategy: str
    num_groups: int
    leaders: str
    transport: str
    overlap_buckets: int
    in_turn: bool  # groups that share an uplink
    sleeps: bool  # instead of computing
    batch_size: int  # of a group
    sample_s: float  # that a SoC of speed 1 sleeps for one; unused where SoCs compute

    @property
    def rack(self) -> Rack:
        """The SoCs with the hub on a board of its own behind them."""
        return Rack(
            slots_per_board=(*self.slots_per_board, 1),
            soc_bit_per_s=self.soc_mbit_per_s * 1_000_000,
            uplink_bit_per_s=self.uplink_mbit_per_s * 1_000_000,
            burst_bytes=max(
                _LEAST_BURST_BYTES,
                int(_BURST_S * 1e6 / 8 * max(self.soc_mbit_per_s, self.uplink_mbit_per_s)),
            ),
        )

    @property
    def num_socs(self) -> int:
        """Those that train."""
        return sum(self.slots_per_board)

    @property
    def hub(self) -> int:
        """The number of the hub's place in the rack."""
        return self.num_socs

    @property
    def runtime(self) -> str:
        """What decides what our runtime costs: the transport, and whether SoCs sleep or compute."""
        return f"{self.transport}, {'sleeping' if self.sleeps else 'computing'}"

    @property
    def text(self) -> str:
        """What the cell is, in one line."""
        groups = {ONE_RING: "one ring", FEDERATED: "all alone, star"}.get(
            self.strategy, f"{self.num_groups} groups, leaders in a {self.leaders}"
        )
        speeds = (
            ""
            if set(self.speeds) == {1.0}
            else f", speeds {'/'.join(f'{speed:g}' for speed in self.speeds)}"
        )
        return (
            f"cell {self.number}, {'sleeping' if self.sleeps else 'computing'}: boards of "
            f"{'+'.join(map(str, self.slots_per_board))} at {self.soc_mbit_per_s}/{self.uplink_mbit_per_s} Mbit/s"
            f"{speeds}, {self.model}, {groups}, {self.transport}, {self.overlap_buckets} buckets"
            f"{', in turn' if self.in_turn else ''}"
        )

    def to_document(self) -> dict[str, Any]:
        """Return the cell for a document."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Cell":
        """Return the cell of a document."""
        return cls(
            **{
                **document,
                "slots_per_board": tuple(document["slots_per_board"]),
                "speeds": tuple(document["speeds"]),
            }
        )


def draw_cells(count: int, seed: int) -> list[Cell]:
    """Return `count` cells; every other one sleeps. A cell depends on the seed and its number alone."""
    return [_draw(number, random.Random(f"{seed} {number}")) for number in range(count)]


def _draw(number: int, chance: random.Random) -> Cell:
    sleeps = number % 2 == 0
    slots = chance.choice(SHAPES if sleeps else _COMPUTING_SHAPES)
    soc = chance.choice(SOC_MBIT_PER_S)
    num_socs = sum(slots)
    strategy = chance.choice(STRATEGIES if num_socs > 2 or not sleeps else (ONE_RING, FEDERATED))
    num_groups = {ONE_RING: 1, FEDERATED: num_socs}.get(strategy) or chance.randint(
        2, max(2, num_socs - 1)
    )
    # Real computation cannot be slowed down to a speed.
    speeds = tuple(chance.choice(SPEEDS) if sleeps else 1.0 for _ in slots)
    samples = chance.choice(_SAMPLES if sleeps else _COMPUTED_SAMPLES)
    return Cell(
        number=number,
        slots_per_board=slots,
        soc_mbit_per_s=soc,
        speeds=speeds,
        strategy=strategy,
        uplink_mbit_per_s=int(soc * chance.choice(UPLINK_FACTORS)),
        model=chance.choice(MODELS),
        num_groups=num_groups,
        leaders=chance.choice(LEADERS) if strategy == GROUPS else "star",
        transport=chance.choice(TRANSPORTS),
        overlap_buckets=chance.choice(BUCKETS),
        in_turn=chance.choice((False, True)),
        sleeps=sleeps,
        batch_size=samples * num_socs // num_groups,
        sample_s=round(chance.uniform(*_STEP_S) / samples, 6),
    )


def reference_cells() -> list[Cell]:
    """Return trainings of a model that is never drawn, of which the constants of our runtime are measured."""
    rings = [
        (transport, ONE_RING, (size,), 1, "star", buckets, sleeps)
        for transport in TRANSPORTS
        for size, buckets, sleeps in (
            (2, 1, True),
            (4, 1, True),
            (4, 4, True),
            (6, 2, True),
            (2, 1, False),
            (2, 4, False),
        )
    ]
    synchronisations = [
        (transport, GROUPS, (4,), 2, leaders, 1, True)
        for transport in TRANSPORTS
        for leaders in LEADERS
    ]
    return [
        Cell(
            number=1000 + number,
            slots_per_board=slots,
            soc_mbit_per_s=40,
            uplink_mbit_per_s=40,
            speeds=(1.0,),
            model=REFERENCE,
            strategy=strategy,
            num_groups=num_groups,
            leaders=leaders,
            transport=transport,
            overlap_buckets=buckets,
            in_turn=False,
            sleeps=sleeps,
            batch_size=(16 if sleeps else 128) * slots[0] // num_groups,
            sample_s=0.1 / 16,
        )
        for number, (transport, strategy, slots, num_groups, leaders, buckets, sleeps) in enumerate(
            [*rings, *synchronisations]
        )
    ]
