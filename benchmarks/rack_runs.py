"""Long runs on racks of real SuperNodes in network namespaces while their parts die: size, endurance, restarts.

    python -m benchmarks rack-runs --nodes 60 --ring 5 --rounds 30 --pause 30
    python -m benchmarks rack-runs --nodes 4 --ring 2 --rounds 500 --pause 20
    python -m benchmarks rack-runs --nodes 2 --ring 1 --rounds 100000 --pause 25 --kills 50 --superlink

Every process of a rack is a fork of one that has imported Flower and torch (`fault_rack/warm.py`). Nodes, clients,
links, the ServerApp and the SuperLink die at random moments, on average `pause` seconds apart, and come back; with
`--superlink` only the SuperLink dies. With `--kills` the run is stopped when it trains again after the last, with
`--minutes` after that time. `peers` of the document has the plan, every death and the samples of memory, descriptors
and threads.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from benchmarks.fault_rack.cells import CLIENT, LINK, NODE, SERVER_APP, SUPERLINK
from benchmarks.fault_rack.long_run import Course, Plan, Sample
from benchmarks.fault_rack.rack import PREFIX
from benchmarks.harness import Row, from_json, peer_notes
from benchmarks.processes import LineProcess
from tests.testbed.testbed import missing

_TIMEOUT_S = 4 * 3600.0
_AIM_S = 5.0
_ALL = (NODE, CLIENT, LINK, SERVER_APP, SUPERLINK)


def run(
    quick: bool = False,
    nodes: int = 4,
    ring: int = 2,
    rounds: int = 500,
    pause: int = 20,
    kills: int = 0,
    minutes: int = 0,
    seed: int = 1,
    superlink: bool = False,
) -> list[Row]:
    """Return rows of one run."""
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="rack-", ignore_cleanup_errors=True) as folder:
        plan = Plan(
            folder=folder,
            nodes=nodes,
            ring=ring,
            rounds=min(rounds, 6) if quick else rounds,
            pause_s=float(pause),
            kinds=(SUPERLINK,) if superlink else _ALL,
            seed=seed,
            kills=kills,
            minutes=minutes,
        )
        process = LineProcess("benchmarks.fault_rack.long_run", prefix=PREFIX, timeout_s=_TIMEOUT_S)
        try:
            course = from_json(Course, json.loads(process.ask(json.dumps(asdict(plan)))))
        finally:
            process.end()
    peer_notes.update(plan={**asdict(plan), "folder": ""}, course=asdict(course))
    return _rows(plan, course)


def _rows(plan: Plan, course: Course) -> list[Row]:
    # A run that is stopped has not ended by itself; after its last kill it trains again.
    goes_on = course.exit_status is None and bool(plan.minutes or plan.kills)
    if plan.kills:
        goes_on = goes_on and bool(course.deaths) and course.deaths[-1].again_s is not None
    ended_well = goes_on or course.exit_status == 0
    ok = ended_well and not course.left_over
    case = f"{plan.nodes} SuperNodes in rings of {plan.ring}, {course.rounds} rounds: "

    def row(what: str, ours: float, unit: str, peer: str = "none", peer_value: float = 0.0) -> Row:
        ratio = peer_value / ours if ours else 0.0
        return Row(case + what, ours, peer, peer_value, unit, ratio, ok)

    rows = [
        row("rounds a minute", 60 * course.rounds / course.wall_s, "1/min"),
        row("a round, median", course.round_s, "s"),
        row(
            "bytes of the hub in a round, polling and starts with them",
            course.hub_bytes_per_round,
            "B",
        ),
    ]
    again_s = [death.again_s for death in course.deaths if death.again_s is not None]
    if again_s:
        what = f"{len(course.deaths)} deaths, training again"
        rows += [
            row(f"{what}, median", statistics.median(again_s), "s", "aim", _AIM_S),
            row(f"{what}, longest", max(again_s), "s", "aim", _AIM_S),
        ]
    if len(course.samples) >= 4:
        rows += _growth(course.samples, row)
    return rows


def _growth(samples: tuple[Sample, ...], row: Any) -> list[Row]:
    """Return each quantity at the end against that after a quarter of the run, when all has been used once."""
    rows = []
    quarter = len(samples) // 4
    units = {
        "pss_bytes": "B",
        "descriptors": "",
        "threads": "",
        "processes": "",
        "superlink_bytes": "B",
    }
    for name, unit in units.items():
        early, late = (
            statistics.median(getattr(sample, name) for sample in part)
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        rows.append(row(f"{name}, last quarter", late, unit, "the second quarter", early))
    return rows
