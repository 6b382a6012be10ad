"""The cells of the matrix of pairs of faults: which training, which two faults, and when."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

NODE, LEADER, GROUP, SERVER_APP, SUPERLINK, LINK = (
    "node",
    "leader",
    "group",
    "server-app",
    "superlink",
    "link",
)
CLIENT, CLOUD, STAGE = "client", "cloud", "stage"
SAME, FOLLOWING, RESUME, RANDOM = "same round", "following round", "during a resume", "random"
GROUPS, PIPELINE, SPLIT = "groups", "pipeline", "split"

KINDS = {
    GROUPS: (NODE, LEADER, GROUP, SERVER_APP, SUPERLINK, LINK),
    PIPELINE: (STAGE, LEADER, SERVER_APP, SUPERLINK, LINK),
    SPLIT: (CLOUD, NODE, SERVER_APP, SUPERLINK, LINK),
}
"""By training: the faults that can befall it. Pairs without the one that only a training has are of `GROUPS`."""
_OWN = {GROUPS: "", PIPELINE: STAGE, SPLIT: CLOUD}
# Systemd starts a process again after two seconds; a node that was without power boots.
_OUTAGE_S = {NODE: 5.0, LEADER: 5.0, GROUP: 5.0, STAGE: 5.0, LINK: 7.0, CLOUD: 2.0, SUPERLINK: 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is struck. `victim` counts among the parts of a kind; 0 and 1 are in different groups."""

    kind: str
    victim: int = 0
    # How long the part is away; ignored for processes that the run itself starts.
    outage_s: float = 0.0
    # Random cells only: seconds after the command's start.
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run and the faults that befall it."""

    training: str
    timing: str
    faults: tuple[Fault, Fault]
    # Random cells only.
    number: int = 0

    @property
    def name(self) -> str:
        """A name that is a file's too."""
        first, second = (fault.kind for fault in self.faults)
        number = f" {self.number}" if self.timing == RANDOM else ""
        return f"{self.training}, {first} and {second}, {self.timing}{number}"


def matrix() -> Iterator[Cell]:
    """Yield each pair of kinds: at one moment of a round, in the next round (in either order), and during a resume."""
    for training, kinds in KINDS.items():
        for timing in (SAME, RESUME, FOLLOWING):
            pairs = (
                product(kinds, repeat=2)
                if timing == FOLLOWING
                else combinations_with_replacement(kinds, 2)
            )
            for first, second in pairs:
                if _OWN[training] in ("", first, second):
                    yield Cell(
                        training=training,
                        timing=timing,
                        faults=(_fault(first, 0), _fault(second, 1)),
                    )


def random_cells(count: int, seed: int, longest_s: float) -> Iterator[Cell]:
    """Yield random pairs at random moments of the first `longest_s` seconds of a command."""
    dice = random.Random(seed)
    for number in range(count):
        training = dice.choices((GROUPS, PIPELINE, SPLIT), (6, 2, 2))[0]
        kinds = [*KINDS[training], *([CLIENT] if training != SPLIT else [])]
        faults = sorted(
            (
                Fault(
                    kind=dice.choice(kinds),
                    victim=dice.randrange(2),
                    outage_s=round(dice.uniform(1.0, 12.0), 1),
                    at_s=round(dice.uniform(0.0, longest_s), 2),
                )
                for _ in range(2)
            ),
            key=lambda fault: fault.at_s,
        )
        yield Cell(training=training, timing=RANDOM, faults=(faults[0], faults[1]), number=number)


def _fault(kind: str, victim: int) -> Fault:
    return Fault(kind=kind, victim=victim, outage_s=_OUTAGE_S.get(kind, 0.0))
