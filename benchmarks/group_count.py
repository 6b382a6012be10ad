"""`groups = "auto"` (F2) against every number of groups, trained to the end: virtual seconds to an accuracy.

A row compares the run of the number that was chosen with the quickest of all numbers to the same accuracy; `ok` is
that it takes at most 1.2 times as long, and that the warm-up took at most a quarter of its run. A second row is the
run with its warm-up, `ok` if its weights are those of the chosen number. `peers` has the seconds of every number and
what the warm-up measured.
"""

from pathlib import Path
from typing import Any

from benchmarks.harness import Row, less_is_better, note, peer_notes
from socflower.hierarchy import default_candidates
from socflower.hierarchy.group_count import WARM_UP_SHARE
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario

MOST_REGRET = 1.2
_ROOT = Path(__file__).resolve().parents[1] / "scenarios"
_OFTEN = "strategy.sync_interval_epochs=0.25"

# By case: a scenario, its changes, and the accuracies to reach.
WORKLOADS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "LeNet-5 on digits, 16 SoCs": ("auto_groups", ("train.epochs=10",), (0.9, 0.95)),
    "a small VGG on digits, 32 SoCs": ("digits_demo", (_OFTEN,), (0.9, 0.95)),
    "LeNet-5 on digits that stay, Dirichlet 0.5, 16 SoCs": (
        "data_stays",
        ("train.epochs=12", _OFTEN),
        (0.9, 0.95),
    ),
    "ResNet-8 on digits, batches of 64, 16 SoCs": (
        "auto_groups",
        ("model.name=resnet8", "train.batch_size=64", "train.learning_rate=0.05"),
        (0.9, 0.95),
    ),
    "LeNet-5 on MNIST, batches of 64, 32 SoCs": (
        "digits_demo",
        (
            "model.name=lenet5",
            "data.name=mnist",
            "train.epochs=2",
            "train.batch_size=64",
            "strategy.sync_interval_epochs=0.05",
        ),
        (0.9, 0.95),
    ),
}


def run(quick: bool = False, seed: int = 0, only: int = 0) -> list[Row]:
    """Return the rows of each workload, or of one; `seed` 0 is that of its scenario, `quick` takes the first alone."""
    rows = []
    numbered = enumerate(WORKLOADS.items(), 1)
    wanted = 1 if quick else only
    for case, (name, changes, targets) in [each for at, each in numbered if wanted in (0, at)]:
        scenario = _scenario(name, (*changes, *((f"seed={seed}",) if seed else ())))
        auto = run_scenario(_in_groups(scenario, "auto"), num_workers=0)
        alone = {
            number: run_scenario(_in_groups(scenario, number), num_workers=0)
            for number in default_candidates(scenario_cluster(scenario).num_socs)
        }
        rows += _rows(case, auto, alone, targets)
        note("\n".join(map(str, rows[-2 * len(targets) :])))
    return rows


def _scenario(name: str, changes: tuple[str, ...]) -> Scenario:
    return load_scenario(_ROOT / f"{name}.toml", changes)


def _in_groups(scenario: Scenario, groups: int | str) -> Scenario:
    return scenario.replaced(
        strategy=scenario.strategy.replaced(groups=groups), expect=type(scenario.expect)()
    )


def _rows(
    case: str, auto: dict[str, Any], alone: dict[int, dict[str, Any]], targets: tuple[float, ...]
) -> list[Row]:
    warm_up = auto["warm_up"]
    chosen = alone[warm_up["num_groups"]]
    seconds: dict[str, Any] = {}
    peer_notes[case] = {"warm_up": warm_up, "seconds": seconds}
    is_cheap = warm_up["virtual_s"] <= WARM_UP_SHARE * chosen["virtual_s"] * (1 + 1e-9)
    rows = []
    for target in targets:
        times_s = {number: _time_s(result, target) for number, result in alone.items()}
        seconds[str(target)] = {str(each): time for each, time in times_s.items()}
        best_s, best = min((time, each) for each, time in times_s.items() if time is not None)
        # One that does not reach the accuracy has its whole run as a lower bound.
        chosen_s, auto_s = times_s[warm_up["num_groups"]], _time_s(auto, target)
        where = f"{case}, to {target:.0%}"
        reached = chosen_s is not None
        rows.append(
            less_is_better(
                f"{where}: {warm_up['num_groups']} groups, chosen",
                chosen_s or chosen["virtual_s"],
                f"{best} groups, the quickest",
                best_s,
                "s",
                ok=reached and (chosen_s or 0.0) <= MOST_REGRET * best_s and is_cheap,
            )
        )
        rows.append(
            less_is_better(
                f"{where}: with the warm-up",
                auto_s or auto["virtual_s"],
                f"{best} groups, the quickest",
                best_s,
                "s",
                ok=auto["weights_sha256"] == chosen["weights_sha256"],
            )
        )
    return rows


def _time_s(result: dict[str, Any], target: float) -> float | None:
    rounds = (each for each in result["rounds"] if each["accuracy"] >= target)
    return next((each["virtual_s"] for each in rounds), None)
