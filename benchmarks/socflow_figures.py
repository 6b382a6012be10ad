"""SoCFlow+'s Figs. 2c, 10 and 14 by training: LeNet-5 on digits, seconds and joules in virtual time, three seeds.

    socflower bench socflow-figures --json        (a quarter of an hour of one core; continues after an interruption)

Scalability (Fig. 10): groups of four SoCs against one ring of all, on 8 to 60 SoCs, to the same accuracy. Each arm has
the best batch and learning rate that a search of six trainings finds, with a seed that is not reported. Ablation
(Fig. 14): from the ring of 32 SoCs on, groups placed in the order of slots, the mapping of F5, communication groups in
turn, mixed precision. Mapping and turns may change time alone; `ok` is that they leave the weights as they are. Int8 on
32 SoCs (Fig. 2c): accuracy after six epochs, each arithmetic with the best of three settings.

Rows are means. `peers` has the settings and each seed's figures. A run that does not reach the accuracy counts with all
its seconds. Finished trainings are kept in `out/bench-socflow-figures`.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Row, kept, less_is_better, more_is_better, note, peer_notes
from socflower.cluster import Cluster
from socflower.engines.any_engine import EngineChoice
from socflower.engines.ending import Ending
from socflower.errors import TrainingFailed
from socflower.hierarchy import communication_groups
from socflower.hierarchy.plan import Group, GroupPlan
from socflower.paper.socflow_plus.predictions import GROUP_SIZE, NUM_SOCS, OURS, RING, rack
from socflower.report.quality import ACCURACY
from socflower.scenario.jobs import run_job
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import ScenarioJob
from socflower.scenario.schema.file import parse_scenario, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.search import NOT_REACHED, Choice, Cost, moves_of, pattern_search
from socflower.scenario.tuning import with_choice
from socflower.strategies.presets import STRATEGIES, GroupStrategy
from socflower.strategies.settings import Grouping
from socflower.strategies.socflow import SoCFlow

FOLDER = Path("out/bench-socflow-figures")
SEEDS, SEARCH_SEED = (1, 2, 3), 9
SIZES = (8, 16, NUM_SOCS, 60)
TARGET = 0.93
BUDGET = 6
IN_SEQUENCE = "in-sequence"

# Where the searches begin. A ring is evaluated more often, since its epochs are longer.
_STARTS: Mapping[str, Mapping[str, Any]] = {
    OURS: {"batch_size": 32, "learning_rate": 0.04, "interval": 0.25},
    RING: {"batch_size": 64, "learning_rate": 0.02, "interval": 0.1},
}
# What the ablation adds, in its order, to SoCFlow without it.
_ABLATION: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "groups": {"strategy": {"name": IN_SEQUENCE, "uplink_turns": False}},
    "mapping": {"strategy": {"uplink_turns": False}},
    "turns": {"strategy": {"uplink_turns": True}},
    "mixed precision": {"strategy": {"uplink_turns": True}, "precision": {"arithmetic": "mixed"}},
}
_RATES = tuple({"train": {"learning_rate": rate}} for rate in (0.01, 0.02, 0.04))
_INT8_EPOCHS = 6
# By arithmetic: the three settings that are tried.
_INT8: Mapping[str, Sequence[Mapping[str, Mapping[str, Any]]]] = {
    "fp32": _RATES,
    "real-scales": tuple({**each, "precision": {"arithmetic": "int8"}} for each in _RATES),
    "niti": tuple(
        {"precision": {"arithmetic": "int8", "algorithm": "niti", "gradient_bits": bits}}
        for bits in ((5, 4, 3), (3, 2, 1), (2, 1, 0))
    ),
}


def run(quick: bool = False, figure: int = 0) -> list[Row]:
    """Return the rows of Figs. 10, 14 and 2c, or of one; `quick` has one seed of Fig. 10, on 8 SoCs."""
    if quick:
        return scalability(SIZES[:1], SEEDS[:1], budget=2)
    figures = {10: scalability, 14: ablation, 2: int8}
    return [row for number, rows in figures.items() if figure in (0, number) for row in rows()]


def scalability(
    sizes: Sequence[int] = SIZES, seeds: Sequence[int] = SEEDS, *, budget: int = BUDGET
) -> list[Row]:
    """Return seconds and joules of groups against one ring, for each number of SoCs."""
    rows = []
    for size in sizes:
        ours, ring = (
            _measured(f"scalability/{size}/{name}", scenario, _searched(scenario, budget), seeds)
            for name in (OURS, RING)
            for scenario in (_scenario(name, size),)
        )
        rows += _costs(f"{size} SoCs", ours, RING, ring)
    return rows


def ablation() -> list[Row]:
    """Return seconds and joules with each technique against those without it."""
    ring, ours = _scenario(RING), _scenario()
    before, last = _measured("ablation/ring", ring, _searched(ring), SEEDS), RING
    groups = _searched(ours)
    rows = []
    for name, changes in _ABLATION.items():
        with patch.dict(STRATEGIES, {IN_SEQUENCE: _in_sequence_kind()}):
            scenario = _scenario(changes=changes)
            # Where only time changes, the settings are those of groups.
            settings = _searched(scenario) if name == "mixed precision" else groups
            found = _measured(f"ablation/{name}", scenario, settings, SEEDS)
        keeps = name not in ("mapping", "turns") or found["weights"] == before["weights"]
        rows += _costs(f"+ {name}", found, last, before, keeps=keeps)
        before, last = found, name
    return rows


def int8() -> list[Row]:
    """Return the accuracy of int8 training on 32 SoCs against that of FP32."""
    found: dict[str, dict[str, Any]] = {}
    for name, choices in _INT8.items():
        ending = Ending(most_epochs=_INT8_EPOCHS)
        scenarios = [
            _scenario(
                changes={"strategy": {"sync_interval_epochs": 0.5}, **each}, epochs=_INT8_EPOCHS
            )
            for each in choices
        ]
        tried = [_trained(each.replaced(seed=SEARCH_SEED), ending) for each in scenarios]
        best = max(range(len(tried)), key=lambda at: tried[at]["accuracy"])
        runs = [_trained(scenarios[best].replaced(seed=seed), ending) for seed in SEEDS]
        found[name] = {"settings": choices[best], "accuracy": [each["accuracy"] for each in runs]}
        peer_notes[f"int8/{name}"] = found[name]
    fp32 = mean(found["fp32"]["accuracy"])
    return [
        more_is_better(f"int8: {name}", mean(own["accuracy"]), "fp32", fp32, "accuracy", ok=True)
        for name, own in found.items()
    ]


def in_sequence(*, cluster: Cluster, groups: Grouping, **settings: Any) -> SoCFlow:
    """Return SoCFlow with groups in the order of slots."""
    plan = planned_in_sequence(cluster, groups.num_groups)
    return SoCFlow(cluster=cluster, groups=plan, **settings)


def planned_in_sequence(cluster: Cluster, num_groups: int) -> GroupPlan:
    """Return groups of equal size that take all SoCs in the order of their slots, whatever their boards."""
    size = cluster.num_socs // num_groups
    starts = range(0, num_groups * size, size)
    groups = tuple(
        Group(
            group_id=at,
            members=tuple(range(start, start + size)),
            leader=start,
            boards=tuple(sorted(set(map(cluster.board_of, range(start, start + size))))),
        )
        for at, start in enumerate(starts)
    )
    split = Counter(board for group in groups if group.split for board in group.boards)
    return GroupPlan(
        groups=groups,
        communication_groups=communication_groups(groups),
        contention=max(split.values(), default=0),
        slots_per_board=cluster.slots_per_board,
        participants=tuple(range(num_groups * size)),
        proven_optimal=False,
    )


def _in_sequence_kind() -> GroupStrategy:
    return GroupStrategy(target=f"{__name__}:{in_sequence.__name__}")


def _scenario(
    name: str = OURS,
    num_socs: int = NUM_SOCS,
    changes: Mapping[str, Mapping[str, Any]] = {},
    *,
    epochs: int = 12,
) -> Scenario:
    start = _STARTS[name]
    train = {"epochs": epochs, **{key: start[key] for key in ("batch_size", "learning_rate")}}
    strategy = {"name": name, "sync_interval_epochs": start["interval"]}
    if name == OURS:
        strategy["groups"] = num_socs // GROUP_SIZE
    tables: dict[str, Mapping[str, Any]] = {
        "cluster": rack(num_socs),
        "model": {"name": "lenet5"},
        "data": {"name": "digits"},
        "train": {**train, **changes.get("train", {})},
        "strategy": {**strategy, **changes.get("strategy", {})},
        "precision": changes.get("precision", {}),
    }
    return parse_scenario(tables, name=name, question="", where="benchmark")


def _searched(scenario: Scenario, budget: int = BUDGET) -> Choice:
    """Return the batch and learning rate that reach the accuracy soonest, of so many that are tried."""

    def cost_of(choice: Choice, best: Cost) -> Cost:
        limit_s = best[0] if math.isfinite(best[0]) else None
        variant = with_choice(scenario, choice).replaced(seed=SEARCH_SEED)
        try:
            found = _trained(variant, _to_target(limit_s))
        except TrainingFailed:
            return NOT_REACHED
        return (found["seconds"], 0.0) if found["reached"] else (math.inf, -found["accuracy"])

    train = scenario.train
    start = {"batch_size": train.batch_size, "learning_rate": train.learning_rate}
    return pattern_search(start, moves_of(scenario), cost_of, budget).best.choice


def _measured(
    label: str, scenario: Scenario, choice: Choice, seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the settings of an arm, and what each seed took to the accuracy."""
    variant = with_choice(scenario, choice)
    runs = [_trained(variant.replaced(seed=seed), _to_target()) for seed in seeds]
    found = {key: [each[key] for each in runs] for key in runs[0]}
    peer_notes[label] = {"settings": dict(choice), **found}
    note(f"{label}: {peer_notes[label]}")
    return found


def _to_target(most_virtual_s: float | None = None) -> Ending:
    return Ending(quality=ACCURACY.name, target=TARGET, most_virtual_s=most_virtual_s)


def _trained(scenario: Scenario, ending: Ending) -> dict[str, Any]:
    """Return what a training came to when it ended; a finished one is read from its file."""
    asked = json.dumps([to_document(scenario), asdict(ending)], sort_keys=True)

    def train() -> dict[str, Any]:
        job = ScenarioJob(run=prepare(scenario), ending=ending)
        result = run_job(job, EngineChoice(num_workers=0))
        latest = result["rounds"][-1]
        return {
            "seconds": latest["virtual_s"],
            "joules": latest["energy_j"],
            "accuracy": latest["accuracy"],
            "reached": latest["accuracy"] >= TARGET,
            "weights": result["weights_sha256"],
        }

    found: dict[str, Any] = kept(FOLDER / f"{sha256(asked.encode()).hexdigest()[:16]}.json", train)
    return found


def _costs(
    case: str,
    ours: Mapping[str, Any],
    peer: str,
    theirs: Mapping[str, Any],
    *,
    keeps: bool = True,
) -> list[Row]:
    ok = keeps and all([*ours["reached"], *theirs["reached"]])
    return [
        less_is_better(case, mean(ours[key]), peer, mean(theirs[key]), unit, ok=ok)
        for key, unit in (("seconds", "s"), ("joules", "J"))
    ]
