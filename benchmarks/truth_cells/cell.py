"""Cells, drawn from a seed."""

import random
from dataclasses import dataclass

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
# One core for each SoC: two SoCs on one core would slow each other down.
_COMPUTING_SHAPES = ((2,), (1, 1))
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
# Samples of a batch for each member on average, if SoCs sleep.
_SAMPLES = (8, 16, 32)
# If SoCs compute, a step should take some milliseconds.
_COMPUTED_SAMPLES = (64, 128, 256)
# The range of a step's computation for a member of speed 1 with the mean share.
_STEP_S = (0.1, 0.4)
# A link sends the bytes of this time at once after a pause, since timers are that late.
_BURST_S = 0.0006
_LEAST_BURST_BYTES = 2 * 1514 + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training: two equally long intervals with a synchronisation in between; one ring has a single interval."""

    number: int
    slots_per_board: tuple[int, ...]
    soc_mbit_per_s: int
    uplink_mbit_per_s: int
    # Of each board's SoCs.
    speeds: tuple[float, ...]
    model: str
    strategy: str
    num_groups: int
    leaders: str
    transport: str
    overlap_buckets: int
    # Whether groups that share an uplink take turns.
    in_turn: bool
    # Whether SoCs sleep instead of computing.
    sleeps: bool
    # Of a group.
    batch_size: int
    # How long a SoC of speed 1 sleeps for a sample; unused if SoCs compute.
    sample_s: float

    @property
    def rack(self) -> Rack:
        """The SoCs and, on a last board of its own, the hub."""
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
        """Number of SoCs that train."""
        return sum(self.slots_per_board)

    @property
    def hub(self) -> int:
        """The number of the hub's place in the rack."""
        return self.num_socs

    @property
    def runtime(self) -> str:
        """The key of our runtime's overhead: the transport, and whether SoCs sleep or compute."""
        return f"{self.transport}, {'sleeping' if self.sleeps else 'computing'}"

    @property
    def text(self) -> str:
        """The cell in one line."""
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
    """Return trainings of a model that is never drawn, on which our runtime's overhead is measured."""
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
