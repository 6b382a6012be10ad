"""Placements: how many SoCs of each board a group takes, and the objective by which mappings compare (F5)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from socflower.errors import ConfigError, InfeasiblePlan

Pieces = tuple[tuple[int, int], ...]
"""(board, number of its SoCs) of one group, boards ascending; more than one piece means the group is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What every group takes of every board, groups in order of their first board."""

    groups: tuple[Pieces, ...]
    proven_optimal: bool  # no placement of the same groups has a smaller objective

    @property
    def contention(self) -> int:
        """C of F5: the largest number of split groups on one board, which share its uplink."""
        present = Counter(board for pieces in self.groups if len(pieces) > 1 for board, _ in pieces)
        return max(present.values(), default=0)

    @property
    def objective(self) -> tuple[int, int, int]:
        """What F5 minimises, in this order: contention, split groups, boards spanned by split groups.

        A ring laid contiguously over k boards sends the same bytes over k uplinks, so the last one counts the
        bytes between boards.
        """
        spans = [len(pieces) for pieces in self.groups if len(pieces) > 1]
        return self.contention, len(spans), sum(spans)


def make_placement(groups: Iterable[dict[int, int]], *, proven_optimal: bool = False) -> Placement:
    """Return the placement of groups given as {board: SoCs}, in a canonical order."""
    pieces = sorted(tuple(sorted((board, count) for board, count in group.items() if count)) for group in groups)
    return Placement(groups=tuple(pieces), proven_optimal=proven_optimal)


def group_sizes(num_groups: int, num_socs: int) -> tuple[int, ...]:
    """Return sizes that sum to `num_socs` and differ by at most one, larger ones first.

    Raises `InfeasiblePlan` where a group would get no SoC.
    """
    if num_groups < 1:
        raise InfeasiblePlan(f"plan: {num_groups} groups of {num_socs} SoCs cannot be; ask for 1 or more groups")
    if num_groups > num_socs:
        raise InfeasiblePlan(f"plan: {num_groups} groups need at least {num_groups} SoCs and {num_socs} take "
                             f"part; ask for at most {num_socs} groups")
    small, num_large = divmod(num_socs, num_groups)
    return (small + 1,) * num_large + (small,) * (num_groups - num_large)


def check_slots(slots_per_board: Sequence[int], num_socs: int) -> None:
    """Raise `ConfigError` for a negative slot count and `InfeasiblePlan` where the SoCs exceed the slots."""
    if any(slots < 0 for slots in slots_per_board):
        raise ConfigError(f"plan: slots per board must not be negative, got {list(slots_per_board)}")
    if num_socs > sum(slots_per_board):
        raise InfeasiblePlan(f"plan: {num_socs} SoCs are asked for and {sum(slots_per_board)} slots are in use; "
                             f"ask for at most {sum(slots_per_board)}")
