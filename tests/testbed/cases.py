"""The cases that are measured: how groups lie on boards, and what the simulator has to answer for."""

from dataclasses import dataclass

from socflower.hierarchy import plan_groups
from tests.testbed.ring_driver import Run
from tests.testbed.topology import Rack

RACK = Rack(slots_per_board=(4, 4, 4))
SMALL_BYTES = 4_000_000
VGG11_BYTES = 4 * 9_225_610
TOLERANCE = 0.05
"""How far the simulator may be off, relative to what was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One arrangement of rings on the rack."""

    name: str
    question: str
    rings: tuple[tuple[int, ...], ...]
    computes: bool = False  # about as long as the exchange would take alone
    in_turn: bool = False

    @property
    def drifts(self) -> bool:
        """Whether rings run freely with computation: how long a step takes depends on how far they are apart."""
        return self.computes and not self.in_turn

    def run(self, transport: str, num_bytes: int) -> Run:
        """Return the run that measures it: enough steps for a median of three or more without the first."""
        large = num_bytes > 2 * SMALL_BYTES
        num_steps = (6 if self.computes else 4) if large else 9
        # 0.1 s for 0.8 MB: what a ring of six that is alone takes at 100 Mbit/s, rounded.
        compute_s = round(num_bytes / 8e6, 1) if self.computes else 0.0
        return Run(
            transport=transport,
            rings=self.rings,
            num_bytes=num_bytes,
            num_steps=num_steps,
            compute_s=compute_s,
            in_turn=self.in_turn,
        )


def _planned(num_groups: int, socs: range | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the rings that the planner makes of these SoCs of the rack, or of all."""
    capacities = None if socs is None else [float(soc in socs) for soc in range(RACK.num_socs)]
    plan = plan_groups(RACK.cluster(), num_groups, None if socs is None else len(socs), capacities)
    return tuple(group.members for group in plan.groups)


INSIDE = Case(name="inside", question="A ring of four on one board.", rings=_planned(1, range(4)))
ACROSS = Case(
    name="across",
    question="The same across two boards, two members on each, in the order of the plan.",
    rings=_planned(1, range(2, 6)),
)
INTERLEAVED = Case(
    name="interleaved",
    question="The same with ranks that alternate between the boards.",
    rings=((2, 4, 3, 5),),
)
CONTENDING = Case(
    name="contending",
    question="Two groups of six that share the uplink of the board between them, "
    "exchanging freely.",
    rings=_planned(2),
)
IN_TURN = Case(name="in turn", question="The same two in turn.", rings=_planned(2), in_turn=True)
FREE = Case(
    name="free, computing",
    question="The same two with computation between exchanges, running freely.",
    rings=_planned(2),
    computes=True,
)
COMPUTING_IN_TURN = Case(
    name="in turn, computing",
    question="The same two with that computation, exchanging in turn.",
    rings=_planned(2),
    computes=True,
    in_turn=True,
)
FOUR_PLANNED = Case(
    name="four groups",
    question="Four groups of three on three boards, all at once, as the planner "
    "places them: one is split and has the uplinks to itself.",
    rings=_planned(4),
)
FOUR_IN_SEQUENCE = Case(
    name="four groups in sequence",
    question="Four groups of three laid out in sequence, all at "
    "once: two are split and share the uplink of the board between them.",
    rings=((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)),
)

CASES = (
    INSIDE,
    ACROSS,
    INTERLEAVED,
    CONTENDING,
    IN_TURN,
    FREE,
    COMPUTING_IN_TURN,
    FOUR_PLANNED,
    FOUR_IN_SEQUENCE,
)
