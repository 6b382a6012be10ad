"""Shares that follow measured speed, against equal shares, in rings of real processes under CPU quotas.

Four members with quotas of 0.3, 0.2, 0.15 and 0.1 cores train together, each a process with one thread. The ideal is
the batch over the sum of the members' rates, and a member's rate is measured in the same run: alone, under its quota,
with an equal share of the batch. A round has four parts: each member alone, one after the other; all members at once
without a ring; the ring with equal shares; the ring that re-balances after every step. A figure is the median of the
rounds. Steps before the shares have settled do not count, nor do those before a change of the quotas. `ok`: no run's
weights differ by more than 1e-4 from those of one process that trains on whole batches.

Members get less than their quotas allow, since they share caches with each other and cores with other processes. Rows
with "side by side" compare with the rates of all members at once; rows with "in the same steps" compare with the rates
in the timed steps themselves, so that a change of the machine's speed between two runs has no effect. `peers` has the
load, the cores that each member got, and the parts of a step.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import getloadavg

import numpy as np
import torch

from benchmarks.harness import Row, more_is_better, peer_notes
from benchmarks.rebalancing_rack.plan import MemberTimes, RingRun, flat_weights, model, trainer
from benchmarks.rebalancing_rack.rack import ThrottledRack
from socflower.training.group import train_group
from tests.cpu_quota import missing
from tests.peers.peers import free_addresses

CORES = (0.3, 0.2, 0.15, 0.1)
"""Small enough to be available on a machine with other work."""

OTHERWISE = (0.1, 0.15, 0.2, 0.3)
"""The quotas before they change."""

BATCH_SIZE = 1536
TOLERANCE = 1e-4
_PEER = "equal shares"
_EQUAL_STEPS, _BALANCED_STEPS, _ALONE_STEPS = 5, 22, 4
_CHANGE_AFTER = 6
# Steps at the end of a run with re-balancing.
_COUNTED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RingCase:
    """A ring, and whether its quotas change during the training."""

    name: str
    transport: str
    changes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The results of one round, in seconds of a step."""

    ideal_s: float
    # The ideal by the rates of all members at once.
    side_by_side_s: float
    equal_s: float
    balanced_s: float
    # The ideal by the rates in the timed steps themselves.
    balanced_even_s: float
    equal_even_s: float
    told: dict[str, object] = field(default_factory=dict)
    ok: bool


CASES = (
    RingCase(name="constant quotas, gloo", transport="gloo"),
    RingCase(name="constant quotas, grpc", transport="grpc"),
    RingCase(name="quotas that change between two batches, gloo", transport="gloo", changes=True),
)


def run(quick: bool = False) -> list[Row]:
    """Return rows of a step's seconds and of the reached shares of the ideals; none if no quota can be set."""
    peer_notes[_PEER] = "the same ring and processes, rebalance_steps = 0"
    peer_notes["quotas"] = missing() or list(CORES)
    if missing() is not None:
        return []
    rounds = 1 if quick else 2
    with ThrottledRack(CORES) as rack:
        return [
            row
            for case in CASES[: 1 if quick else None]
            for row in _rows(case, [_round(rack, case, BATCH_SIZE) for _ in range(rounds)])
        ]


def _round(rack: ThrottledRack, case: RingCase, batch_size: int) -> Round:
    size = len(CORES)
    rack.hold(CORES)
    load = [round(getloadavg()[0], 2)]
    part = batch_size // size
    alone = [rack.train(_asked(case, 1, part, _ALONE_STEPS), [member])[0] for member in range(size)]
    with ThreadPoolExecutor(size) as threads:
        # So many steps that all end at about the same time.
        at_once = list(
            threads.map(
                lambda member: rack.train(
                    _asked(case, 1, part, round(_ALONE_STEPS * CORES[member] / min(CORES))),
                    [member],
                )[0],
                range(size),
            )
        )
    rates, rates_at_once = (
        [part / statistics.median(own.step_s[1:]) for own in each] for each in (alone, at_once)
    )
    whole = _asked(case, size, batch_size, _EQUAL_STEPS)
    equal = rack.train(whole)
    differences = [_difference(whole, equal)]
    load.append(round(getloadavg()[0], 2))
    balancing = _asked(case, size, batch_size, _BALANCED_STEPS, rebalance_steps=1)
    if case.changes:
        rack.hold(OTHERWISE)
        balanced = rack.train(
            balancing, on_step=lambda step: rack.hold(CORES) if step == _CHANGE_AFTER else None
        )
    else:
        balanced = rack.train(balancing)
    differences.append(_difference(balancing, balanced))
    load.append(round(getloadavg()[0], 2))
    bounds = _bounds(balanced, _COUNTED)
    told: dict[str, object] = {
        "load_average": load,
        "rates_alone": _rounded(rates),
        "rates_at_once": _rounded(rates_at_once),
        "rates_in_ring": _rounded(balanced[0].rates),
        "cores_at_once": _rounded([own.cores for own in at_once]),
        "cores_alone": _rounded([own.cores for own in alone]),
        "cores_in_ring": _rounded([own.cores for own in balanced]),
        "shares": [own.samples[-1] for own in balanced],
        "step_s": _rounded(balanced[0].step_s),
        "differences": differences,
        **bounds,
    }
    return Round(
        ideal_s=batch_size / sum(rates),
        side_by_side_s=batch_size / sum(rates_at_once),
        equal_s=statistics.median(equal[0].step_s[1:]),
        balanced_s=statistics.median(balanced[0].step_s[-_COUNTED:]),
        balanced_even_s=bounds["even_s"],
        equal_even_s=_bounds(equal, _EQUAL_STEPS - 2)["even_s"],
        told=told,
        ok=max(differences) <= TOLERANCE,
    )


def _bounds(measured: Sequence[MemberTimes], counted: int) -> dict[str, float]:
    """Return the parts of a step in seconds: medians of the last `counted` steps.

    `even_s` is the time if all members, at their speeds in that step, ended their own work together; `slowest_s` is the
    slowest member's own work, `exchange_s` the rest of the step, in which members wait for each other.
    """
    own_s, samples = (
        np.array([getattr(own, name)[-counted:] for own in measured])
        for name in ("own_s", "samples")
    )
    slowest_s = own_s.max(axis=0)
    parts = {
        "even_s": samples.sum(axis=0) / (samples / own_s).sum(axis=0),
        "slowest_s": slowest_s,
        "exchange_s": np.array(measured[0].step_s[-counted:]) - slowest_s,
    }
    return {name: round(float(np.median(values)), 3) for name, values in parts.items()}


def _asked(
    case: RingCase, size: int, batch_size: int, num_steps: int, rebalance_steps: int = 0
) -> RingRun:
    return RingRun(
        transport=case.transport,
        addresses=tuple(free_addresses(size)),
        batch_size=batch_size,
        num_steps=num_steps,
        rebalance_steps=rebalance_steps,
    )


def _rows(case: RingCase, rounds: Sequence[Round]) -> list[Row]:
    peer_notes[case.name] = [each.told for each in rounds]
    ours, theirs, ideal = (
        statistics.median(values)
        for values in zip(
            *((each.balanced_s, each.equal_s, each.ideal_s) for each in rounds), strict=True
        )
    )
    ratio = statistics.median(each.equal_s / each.balanced_s for each in rounds)
    ok = all(each.ok for each in rounds)
    rows = [
        Row(
            case=f"{case.name}: step",
            ours=ours,
            peer=_PEER,
            peer_value=theirs,
            unit="s",
            ratio=ratio,
            limit=ideal,
            ok=ok,
        )
    ]
    for name, ideals in (
        ("part of the ideal", [(each.ideal_s, each.ideal_s) for each in rounds]),
        (
            "part of what members do side by side",
            [(each.side_by_side_s, each.side_by_side_s) for each in rounds],
        ),
        (
            "part of what members do in the same steps",
            [(each.balanced_even_s, each.equal_even_s) for each in rounds],
        ),
    ):
        part = statistics.median(
            ideal_s / each.balanced_s for (ideal_s, _), each in zip(ideals, rounds, strict=True)
        )
        equal = statistics.median(
            ideal_s / each.equal_s for (_, ideal_s), each in zip(ideals, rounds, strict=True)
        )
        rows.append(
            more_is_better(f"{case.name}: {name}", part, _PEER, equal, "of ideal", limit=1.0, ok=ok)
        )
    return rows


_references: dict[tuple[int, int], np.ndarray] = {}


def _difference(run: RingRun, measured: Sequence[MemberTimes]) -> float:
    """Return the largest difference of any member's weights from those of training on whole batches."""
    key = run.batch_size, run.num_steps
    if key not in _references:
        torch.set_num_threads(1)
        whole = model()
        train_group(whole, run.samples(), run.task(), trainer())
        _references[key] = flat_weights(whole)
    return max(float(np.abs(np.load(own.weights) - _references[key]).max()) for own in measured)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]
