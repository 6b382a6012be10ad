"""Spare SoCs stand in for participants that are away or slower, so that a training keeps its number of SoCs."""

from collections.abc import Callable, Sequence

from socflower.cluster import Cluster
from socflower.hierarchy.group_preemption import GROUPS

FASTER = 1.1
"""How many times as fast as a participant a spare SoC must be to stand in: a group may lose its momentum by it."""


def with_stand_ins(
    cluster: Cluster,
    whole: Sequence[int],
    training: Sequence[int],
    free: Sequence[int],
    rate_of: Callable[[int], float],
) -> list[int]:
    """Return the SoCs of the next round, ascending: as many of those that are free as `whole` has, if there are.

    They are those that were `training` in the last round, but for who is away, and for who is slower than a spare one
    by `FASTER`. A spare SoC on the replaced one's board is preferred, so that groups cross as few uplinks as
    before. `rate_of` is a SoC's speed in samples per second, or any unit.
    """
    present = set(free)
    chosen = [soc for soc in training if soc in present]
    spares = sorted(present.difference(chosen))

    def replace(absent: int) -> None:
        board = cluster.board_of(absent)
        best = max(spares, key=lambda soc: (rate_of(soc), cluster.board_of(soc) == board, -soc))
        spares.remove(best)
        chosen.append(best)

    missing = [soc for soc in whole if soc not in chosen]
    for soc in missing[: min(len(whole) - len(chosen), len(spares))]:
        replace(soc)
    while spares and chosen:
        slowest = min(chosen, key=rate_of)
        if max(map(rate_of, spares)) <= FASTER * rate_of(slowest):
            break
        chosen.remove(slowest)
        replace(slowest)
    return sorted(chosen)


def spares_fault(num_spares: int, *, reshuffle: bool, preemption: str) -> str:
    """Return why spare SoCs cannot stand in; empty if they can."""
    if not num_spares:
        return "all SoCs of the cluster take part, and none is spare; give fewer"
    if not reshuffle:
        return "a spare SoC does not hold the data that stay with another one; use reshuffle = true"
    if preemption == GROUPS:
        return (
            f"preemption = {GROUPS!r} lets the SoCs of a whole group rest; leave one of the two out"
        )
    return ""
