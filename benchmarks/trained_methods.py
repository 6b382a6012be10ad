"""SoCFlow against every other method of training, each with the settings that as long a search found for it.

Each row compares two methods: virtual seconds, joules or bytes to the same accuracy, means over seeds that the search
did not see. A method that misses the accuracy with any seed has no row; `peers` has its runs, all settings and what
each seed took. Data are divided evenly, or by a Dirichlet distribution of labels; then they stay on their SoCs.

A training is kept in `out/bench-trained-methods`, so that an interrupted benchmark goes on where it stopped.
"""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, less_is_better, note, peer_notes
from socflower.errors import ConfigError
from socflower.scenario.comparison import compare
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.search import Search

SEEDS = (1, 3, 4)
OURS = "socflow"
OTHERS = (
    "sgd",
    "ring",
    "ps",
    "hipress",
    "powersgd",
    "local-sgd",
    "post-local-sgd",
    "fedavg",
    "tree-fedavg",
    "diloco",
    "streaming-diloco",
    "muloco",
)
# Where a training takes minutes: one method of each kind.
ONE_OF_EACH = ("sgd", "ring", "powersgd", "local-sgd", "fedavg", "diloco")
CASES = {
    "lenet_digits": ("LeNet-5 on digits", 12, OTHERS),
    "lenet_mnist": ("LeNet-5 on MNIST", 5, ONE_OF_EACH),
    "lenet_cifar10": ("LeNet-5 on CIFAR-10", 5, ONE_OF_EACH),
    "vgg_digits": ("a small VGG on digits", 5, ONE_OF_EACH),
}
"""By file: what it trains, how many trainings each search has, and SoCFlow's rivals."""
PARTITIONS = {
    "IID": (),
    "Dirichlet 0.5": ("data.partition=dirichlet", "data.alpha=0.5", "strategy.reshuffle=false"),
    "Dirichlet 0.1": ("data.partition=dirichlet", "data.alpha=0.1", "strategy.reshuffle=false"),
}
_FOLDER = Path(__file__).with_name("trained_methods_cases")


def run(quick: bool = False, case: int = 0, partition: int = 0, workers: int = 0) -> list[Row]:
    """Return the rows of all cases and partitions, or of one each; `quick` searches two settings of two methods."""
    rows = []
    for at, (name, (label, budget, others)) in enumerate(CASES.items(), 1):
        for at_partition, (spread, changes) in enumerate(PARTITIONS.items(), 1):
            wanted = case in (0, at) and partition in (0, at_partition)
            if not wanted or (quick and rows):
                continue
            scenario = load_scenario(_FOLDER / f"{name}.toml", changes)
            methods = (OURS, *(others[:1] if quick else others))
            where = Path("out/bench-trained-methods") / f"{name}-{spread.replace(' ', '-')}"
            target = scenario.compare.target_accuracy
            title = f"{label}, {spread}, to {target:.0%}"
            found = {
                method: _measured(scenario, method, where, 2 if quick else budget, workers, title)
                for method in methods
            }
            peer_notes[title] = found
            rows += list(_rows(title, found))
    return rows


def _measured(
    scenario: Scenario, method: str, where: Path, budget: int, workers: int, title: str
) -> dict[str, Any]:
    """Return what a method's search found, and what its seeds took to the target."""
    try:
        document = compare(
            scenario,
            [method],
            where / method,
            num_workers=workers,
            seeds=SEEDS,
            tuning=Search(budget=budget),
            until_target=True,
        )
    except ConfigError as error:
        return {"refused": str(error)}
    search = document["tuning"]["strategies"][method]
    found = {
        "settings": search["settings"],
        "trainings": len(search["tried"]),
        "search_ended": search["is_done"],
        "seconds": [row["time_to_accuracy_s"] for row in document["rows"]],
        "joules": [row["energy_to_accuracy_j"] for row in document["rows"]],
        "bytes": [sum(row["bytes"].values()) for row in document["rows"]],
    }
    note(f"{title}: {method} {found}")
    return found


def _rows(title: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    ours = found[OURS]
    if not _has_reached(ours):
        return
    for method, theirs in found.items():
        if method == OURS or not _has_reached(theirs):
            continue
        for unit, quantity in (("s", "seconds"), ("J", "joules"), ("bytes", "bytes")):
            if not min(ours[quantity]) or not min(theirs[quantity]):
                # One SoC alone sends nothing.
                continue
            yield less_is_better(
                title,
                statistics.mean(ours[quantity]),
                method,
                statistics.mean(theirs[quantity]),
                unit,
                ok=True,
            )


def _has_reached(found: Mapping[str, Any]) -> bool:
    return "seconds" in found and all(each is not None for each in found["seconds"])
