"""Measured against simulated: one row for each ring of a run, and what taking turns gained."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from tests.testbed.cases import COMPUTING_IN_TURN, FREE, TOLERANCE, Case
from tests.testbed.prediction import predicted_steps_s
from tests.testbed.ring_driver import Run
from tests.testbed.testbed import RunResult
from tests.testbed.topology import Rack


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One ring of one case: seconds of a step (computation and all-reduce), median or, of drifting groups, mean."""

    case: str
    transport: str
    num_bytes: int
    compute_s: float
    ring: int
    members: tuple[int, ...]
    measured_s: float
    steps_s: tuple[float, ...]  # each that was measured
    simulated_s: float  # of drifting groups: as far apart as they were found to be
    error: float  # simulated over measured, less 1; of drifting groups it decides nothing
    bracket_s: (
        tuple[float, float] | None
    )  # of drifting groups, which decides: staggered, and all starting together
    closed_form_s: float
    cpu_s: float  # of this machine, for the whole case
    sums_right: bool
    ok: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times as fast taking turns is as running freely (F7)."""

    transport: str
    num_bytes: int
    compute_s: float
    measured: float
    simulated: float  # with the groups as far apart as they were found to be
    bracket: tuple[float, float]  # evenly staggered groups, groups that start together
    closed_form: float  # (C + 2S) / max(C + S, 2S)
    ok: bool


def compare(rack: Rack, case: Case, result: RunResult) -> list[Row]:
    """Return a row for each ring of a case."""
    run = result.run
    statistic = mean if case.drifts else median
    simulated = predicted_steps_s(rack, _as_found(case, result))
    brackets: list[tuple[float, float]] = []
    if case.drifts:
        together = predicted_steps_s(rack, run)
        brackets = [
            (mean(steps), mean(other))
            for steps, other in zip(_staggered(rack, run), together, strict=True)
        ]
    rows = []
    for ring, members in enumerate(run.rings):
        steps_s = tuple(result.steps_s(ring))
        measured_s, simulated_s = statistic(steps_s), statistic(simulated[ring])
        error = simulated_s / measured_s - 1.0
        bracket_s = brackets[ring] if brackets else None
        # The ends of the bracket are simulated too, and as good as any.
        within = bracket_s is None or bracket_s[0] * (1 - TOLERANCE) <= measured_s <= bracket_s[
            1
        ] * (1 + TOLERANCE)
        rows.append(
            Row(
                case=case.name,
                transport=run.transport,
                num_bytes=run.num_bytes,
                compute_s=run.compute_s,
                ring=ring,
                members=members,
                measured_s=measured_s,
                steps_s=steps_s,
                simulated_s=simulated_s,
                error=error,
                bracket_s=bracket_s,
                closed_form_s=closed_form_s(rack, run, ring),
                cpu_s=result.cpu_s,
                sums_right=result.right,
                ok=result.right and within and (case.drifts or abs(error) <= TOLERANCE),
            )
        )
    return rows


def gains(rows: Sequence[Row]) -> list[Gain]:
    """Return what taking turns gained, for each transport and size for which both cases were measured."""
    found = []
    for transport, num_bytes in dict.fromkeys((row.transport, row.num_bytes) for row in rows):
        both = [
            [
                row
                for row in rows
                if (row.case, row.transport, row.num_bytes) == (case.name, transport, num_bytes)
            ]
            for case in (FREE, COMPUTING_IN_TURN)
        ]
        if not all(both):
            continue
        free, turns = both
        base_s = mean(row.simulated_s for row in turns)
        measured = mean(row.measured_s for row in free) / mean(row.measured_s for row in turns)
        simulated = mean(row.simulated_s for row in free) / base_s
        ends = [row.bracket_s for row in free if row.bracket_s is not None]
        lowest, highest = (
            mean(low for low, _ in ends) / base_s,
            mean(high for _, high in ends) / base_s,
        )
        found.append(
            Gain(
                transport=transport,
                num_bytes=num_bytes,
                compute_s=free[0].compute_s,
                measured=measured,
                simulated=simulated,
                bracket=(lowest, highest),
                closed_form=free[0].closed_form_s / turns[0].closed_form_s,
                ok=1.0 + TOLERANCE < measured < highest * (1.0 + TOLERANCE),
            )
        )
    return found


def closed_form_s(rack: Rack, run: Run, ring: int) -> float:
    """Return 2(n-1)/n bytes over the rate that is left of a link, with F7's computation. It stands beside the rest.

    In turn, S is a ring's own exchange and the step max(C + S, sum of S); freely, rings share every link evenly.
    """
    cluster, rates = rack.cluster(), rack.cluster().link_bytes_per_s
    links = [
        [
            link
            for soc, following in zip(members, (*members[1:], members[0]), strict=True)
            for link in cluster.path(soc, following)
        ]
        for members in run.rings
    ]

    def exchange_s(own: int, sharing: Counter[str]) -> float:
        size = len(run.rings[own])
        return (
            2
            * (size - 1)
            / size
            * run.num_bytes
            * max(sharing[link] / rates[link] for link in links[own])
        )

    if run.in_turn:
        alone_s = [exchange_s(own, Counter(links[own])) for own in range(len(run.rings))]
        return max(run.compute_s + alone_s[ring], sum(alone_s))
    return run.compute_s + exchange_s(ring, Counter(link for own in links for link in own))


def _staggered(rack: Rack, run: Run) -> list[list[float]]:
    """Return the simulated steps of two rings that begin half a step apart, so that they meet as little as can be.

    Half of a step in turn, that is: once staggered, it takes no longer.
    """
    in_turn = predicted_steps_s(rack, replace(run, in_turn=True))
    return predicted_steps_s(rack, replace(run, delays_s=(0.0, mean(map(mean, in_turn)) / 2)))


def _as_found(case: Case, result: RunResult) -> Run:
    """Return the run, of two drifting groups with the second as late as they were apart on average.

    In the simulator a distance stays: whoever is first in a step is first by as much in the next. Between real groups
    it changes with every exchange that the network shares unevenly, so there is no other way to know it. A step is
    shorter by just the distance with which it begins, so its mean is that of the mean distance.
    """
    if not case.drifts:
        return result.run
    first, second = (
        [
            max(step)
            for step in zip(
                *(soc["ends_s"] for soc in result.socs if soc["ring"] == ring), strict=True
            )
        ]
        for ring in range(2)
    )
    apart_s = mean(abs(own - other) for own, other in zip(first[:-1], second[:-1], strict=True))
    return replace(result.run, delays_s=(0.0, apart_s))
