"""Re-balancing on real SuperNodes under CPU quotas: step time against equal shares.

Four SuperNodes with quotas of 0.6, 0.6, 0.3 and 0.15 cores train under SoCFlow, as one group of four and as two groups
of two, once with equal shares and once with re-balancing: inside a ring every few batches, and between rounds, when
nodes also change groups. Times are between the steps of the nodes' ledgers in the last round; the slowest group's step
counts.

`socflower bench rebalancing` compares the same rings without Flower around them, with rates measured alone.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import getloadavg
from pathlib import Path

from benchmarks.harness import Row, less_is_better, peer_notes
from benchmarks.hub_traffic import deployed
from tests.cpu_quota import missing, quotas

APP = Path(__file__).with_name("rebalancing_app")
CORES = (0.6, 0.6, 0.3, 0.15)
NUM_ROUNDS, STEPS_PER_ROUND, BATCH_SIZE, LOOK_STEPS = 3, 14, 256, 2
# Steps at the end of a round.
_COUNTED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRound:
    """The last round of a run."""

    # Of the slowest group.
    step_s: float
    # Of all groups together.
    samples_per_s: float
    groups: tuple[tuple[int, ...], ...]
    shares: dict[int, int]
    events: tuple[str, ...]


def run(quick: bool = False) -> list[Row]:
    """Return rows of one group and of two; none if no quota can be set."""
    peer_notes["quotas"] = missing() or list(CORES)
    if missing() is not None:
        return []
    rows = []
    for num_groups in (1,) if quick else (1, 2):
        equal, balanced = (_train(num_groups, steps) for steps in (-1, LOOK_STEPS))
        case = f"{len(CORES)} SuperNodes in {num_groups} group{'s' if num_groups > 1 else ''}"
        peer_notes[case] = {
            "load_average": round(getloadavg()[0], 2),
            "equal": _described(equal),
            "balanced": _described(balanced),
        }
        rows.append(
            less_is_better(
                f"{case}: a step",
                balanced.step_s,
                "equal shares",
                equal.step_s,
                "s",
                ok=sum(balanced.shares.values()) == num_groups * BATCH_SIZE,
            )
        )
    return rows


def _train(num_groups: int, rebalance_steps: int) -> LastRound:
    """Train on a new deployment; the quotas apply once the nodes are ready."""
    with deployed(len(CORES), warm=True, app=APP) as cluster:
        cluster.wait_until_idle()
        ledgers = cluster.folder / "ledgers"
        with quotas(cluster.node_pids, CORES):
            marks = cluster.run(
                num_groups=num_groups,
                num_rounds=NUM_ROUNDS,
                steps_per_round=STEPS_PER_ROUND,
                batch_size=BATCH_SIZE,
                rebalance_steps=rebalance_steps,
                ledgers=str(ledgers),
            )
        lines = {
            node: [
                json.loads(line)
                for line in (ledgers / f"node-{node}.jsonl").read_text().splitlines()
            ]
            for node in range(len(CORES))
        }
    last = {
        node: [line for line in own if line["round"] == NUM_ROUNDS][-_COUNTED - 1 :]
        for node, own in lines.items()
    }
    groups = tuple(tuple(group) for group in marks[-1]["groups"])
    steps_s = [statistics.median(_gaps_s(last[group[0]])) for group in groups]
    return LastRound(
        step_s=max(steps_s),
        samples_per_s=sum(BATCH_SIZE / step_s for step_s in steps_s),
        groups=groups,
        shares={node: len(own[-1]["samples"]) for node, own in last.items()},
        events=tuple(event for mark in marks for event in mark["events"]),
    )


def _gaps_s(lines: Sequence[dict[str, float]]) -> list[float]:
    return [after["at_s"] - before["at_s"] for before, after in pairwise(lines)]


def _described(outcome: LastRound) -> dict[str, object]:
    return {
        "step_s": round(outcome.step_s, 3),
        "samples_per_s": round(outcome.samples_per_s, 1),
        "groups": outcome.groups,
        "shares": outcome.shares,
        "events": outcome.events,
    }
