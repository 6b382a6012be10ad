"""Shares that follow measured speed, against equal shares, in rings of real processes that the kernel makes slow.

Four members with quotas of 0.3, 0.2, 0.15 and 0.1 cores train together, each a process with one thread. The ideal is
the batch over the sum of the members' rates; a rate is what a member alone, under its quota, with an equal share of the
batch, does in the same run. Rounds repeat: each member alone, one after the other; all of them at once, but each for
itself; the ring with equal shares; the ring that re-balances after every step. A figure is the median of the rounds.
Steps until shares have come to rest do not count. Where quotas change in the middle of a training, neither do those
until then. `ok`: no run's weights differ by more than 1e-4 from those of one process that trains on whole batches.

What the quotas allow is not what members get where they share caches with each other, and cores with whatever else
runs: rows with "side by side" compare with the rates that they have at once, rows with "in the same steps" with those
of the very steps that are timed, which a machine that is faster or slower a minute later does not change. `peers` has
the load, the cores that each member got, and what a step consists of.
"""

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import getloadavg
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness import Row, main
from benchmarks.rebalancing_rack.plan import Measured, Run, model, trainer
from benchmarks.rebalancing_rack.rack import ThrottledRack
from socflower.training.group import train_group
from tests.cpu_quota import missing
from tests.peers.peers import free_addresses

CORES = (0.3, 0.2, 0.15, 0.1)
"""Little enough that members get it on a machine that does something else, too."""

OTHERWISE = (0.1, 0.15, 0.2, 0.3)
"""The quotas before those change."""

BATCH_SIZE = 1536
TOLERANCE = 1e-4
_PEER = "equal shares"
_EQUAL_STEPS, _BALANCED_STEPS, _ALONE_STEPS = 5, 22, 4
_CHANGE_AFTER = 6
_COUNTED = 6  # steps at the end of a run that re-balances
_said: dict[str, object] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A ring, and whether its quotas change under way."""

    name: str
    transport: str
    changes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one round came to, in seconds of a step."""

    ideal_s: float
    side_by_side_s: float  # the ideal, by the rates that members have at once
    equal_s: float
    balanced_s: float
    balanced_even_s: float  # the ideal, by the rates in the very steps that are timed
    equal_even_s: float
    told: dict[str, object] = field(default_factory=dict)
    ok: bool


CASES = (
    Case(name="constant quotas, gloo", transport="gloo"),
    Case(name="constant quotas, grpc", transport="grpc"),
    Case(name="quotas that change between two batches, gloo", transport="gloo", changes=True),
)


def run(quick: bool = False) -> list[Row]:
    """Return rows of a step's seconds and of the parts of ideals that are reached; none where no quota can be set."""
    _said.clear()
    _said["quotas"] = missing() or list(CORES)
    if missing() is not None:
        return []
    rounds = 1 if quick else 2
    with ThrottledRack(CORES) as rack:
        return [
            row
            for case in CASES[: 1 if quick else None]
            for row in _rows(case, [_round(rack, case, BATCH_SIZE) for _ in range(rounds)])
        ]


def peers() -> dict[str, object]:
    """Return how the peer was set up, what the machine was busy with, and each round's details."""
    return {_PEER: "the same ring and processes, rebalance_steps = 0", **_said}


def _round(rack: ThrottledRack, case: Case, batch_size: int) -> Round:
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


def _bounds(measured: Sequence[Measured], counted: int) -> dict[str, float]:
    """Return what a step consists of, in seconds, as the median of the last `counted` steps.

    `even_s` is what it would take if all members, as fast as they were in it, ended their own work together,
    `slowest_s` what the slowest took for its own, `exchange_s` the rest, in which all wait for each other.
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


def _asked(case: Case, size: int, batch_size: int, num_steps: int, rebalance_steps: int = 0) -> Run:
    return Run(
        transport=case.transport,
        addresses=tuple(free_addresses(size)),
        batch_size=batch_size,
        num_steps=num_steps,
        rebalance_steps=rebalance_steps,
    )


def _rows(case: Case, rounds: Sequence[Round]) -> list[Row]:
    _said[case.name] = [each.told for each in rounds]
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
            Row(
                case=f"{case.name}: {name}",
                ours=part,
                peer=_PEER,
                peer_value=equal,
                unit="of ideal",
                ratio=part / equal,
                limit=1.0,
                ok=ok,
            )
        )
    return rows


_references: dict[tuple[int, int], np.ndarray] = {}


def _difference(run: Run, measured: Sequence[Measured]) -> float:
    """Return by how much weights differ at most, of any member, from those of training on whole batches."""
    key = run.batch_size, run.num_steps
    if key not in _references:
        torch.set_num_threads(1)
        whole = model()
        train_group(whole, run.samples(), run.task(), trainer())
        _references[key] = np.concatenate(
            [parameter.detach().contiguous().numpy().ravel() for parameter in whole.parameters()]
        )
    return max(float(np.abs(np.load(own.weights) - _references[key]).max()) for own in measured)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    sys.exit(main(run, peers))
