"""Accuracy over the number of groups and over the interval between synchronisations (SoCFlow+ Figs. 4 and 5).

LeNet-5 on digits, 32 SoCs, trained for eight epochs with each number of groups and, in 8 groups, with each interval. A
row is the mean of the best accuracies of three seeds; its peer is one group, or an interval of one epoch. Rows of the
first epoch (of an interval of two or four epochs, of the first interval), and of the virtual seconds to 90 %, have the
same peers. A run that does not reach 90 % counts with all its seconds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import Row, less_is_better, more_is_better, note
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import load_scenario

GROUPS = (1, 2, 4, 8, 16, 32)
INTERVALS = (1.0, 0.25, 0.5, 2.0, 4.0)
SEEDS = (1, 2, 3)
TARGET = 0.9
_SCENARIO = Path(__file__).resolve().parents[1] / "scenarios" / "digits_demo.toml"


def run(quick: bool = False) -> list[Row]:
    """Return the rows of all numbers of groups and of all intervals; `quick` takes one seed and two of each."""
    seeds, first = SEEDS[: 1 if quick else None], 2 if quick else None
    rows = _rows({f"{number} groups": {"groups": number} for number in GROUPS[:first]}, seeds)
    intervals = {f"{each:g} epochs": {"sync_interval_epochs": each} for each in INTERVALS[:first]}
    return [*rows, *_rows(intervals, seeds)]


def _rows(cases: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> list[Row]:
    """Return the rows of each case beside those of the first one."""
    found = {case: [_trained(changes, seed) for seed in seeds] for case, changes in cases.items()}
    peer, *_ = cases
    rows = []
    for case in cases:
        best, first, seconds = (mean(values) for values in zip(*found[case], strict=True))
        peer_best, peer_first, peer_s = (mean(each) for each in zip(*found[peer], strict=True))
        ok = 0.0 < best <= 1.0
        rows += [
            more_is_better(f"{case}: best", best, peer, peer_best, "accuracy", ok=ok),
            more_is_better(f"{case}: first epoch", first, peer, peer_first, "accuracy", ok=ok),
            less_is_better(f"{case}: to {TARGET:.0%}", seconds, peer, peer_s, "virtual s", ok=ok),
        ]
    return rows


def _trained(changes: Mapping[str, Any], seed: int) -> tuple[float, float, float]:
    """Return the best accuracy of a run, that after its first epoch, and its seconds to the target."""
    keys = {"groups": 8, "sync_interval_epochs": 0.25, **changes}
    settings = [f"strategy.{key}={value}" for key, value in keys.items()]
    work = ("model.name=lenet5", "train.epochs=8", f"seed={seed}")
    scenario = load_scenario(_SCENARIO, (*work, *settings))
    result = run_scenario(scenario.replaced(expect=type(scenario.expect)()), num_workers=0)
    rounds = result["rounds"]
    note(f"{settings}, seed {seed}: {result['final_accuracy']:.3f}")
    first = [each["accuracy"] for each in rounds if each["epoch"] >= 1.0]
    reached = (each["virtual_s"] for each in rounds if each["accuracy"] >= TARGET)
    return max(each["accuracy"] for each in rounds), first[0], next(reached, result["virtual_s"])
