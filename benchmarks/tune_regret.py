"""`socflower tune` against exhaustive search over the same candidates: how much more the chosen setting costs.

Three cases are trained: every candidate once, with LeNet-5 on a quarter of the digits, to the target or to the end. The
best of all settings is the optimum; tune, which knows nothing of these trainings, trains a part of them. Weights do not
depend on links and devices, so seven more cases have the same curves of learning on other clusters, with the predicted
costs of other models: there both searches are predictions. A case's cost is counted in epochs that are trained.

`regret` is the chosen setting's time to the target (joules, where energy is preferred) over that of the optimum, minus
1. Each training is kept in `out/bench-tune-regret`, so that an interrupted benchmark goes on where it stopped. The
search was made with seed 1. Stored are the three cases of skewed data with seed 2, which it had not seen, and three of
slow links with seed 1.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, from_json, kept, less_is_better, note, peer_notes
from socflower.engines.any_engine import EngineChoice
from socflower.engines.ending import Ending
from socflower.scenario.candidates import (
    Candidate,
    PredictedCosts,
    Setting,
    candidates_of,
    weights_key,
)
from socflower.scenario.halving import ENERGY, TIME
from socflower.scenario.jobs import run_job
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import ScenarioJob
from socflower.scenario.schema.file import load_scenario, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.search import is_over
from socflower.scenario.tune import target_of, tune_among
from socflower.scenario.tuning import described
from socflower.wire.folders import temporary_folder

_CASES = Path(__file__).with_name("tune_regret_cases")
_OUT = Path("out/bench-tune-regret")
SEED, BUDGET = 2, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A scenario with its changes, and what is preferred."""

    # The file of the scenario, which tells whose curves of learning a case has.
    file: str
    about: str
    arithmetics: tuple[str, ...] = ("fp32",)
    prefer: str = TIME
    # As of --set; with such changes the case is predicted.
    changes: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


_ALL = ("fp32", "int8", "mixed")
TRAINED = (
    Case(
        file="learning",
        about="LeNet-5 on 4 Snapdragon 865, groups and one ring in three arithmetics",
        arithmetics=_ALL,
    ),
    Case(file="skewed", about="LeNet-5 on 4 Jetson NX with skewed data, FedAvg and one ring"),
    Case(
        file="slow_links",
        about="LeNet-5 on 4 Raspberry Pi 4B, compression, 2-D pipelines and DiLoCo",
        prefer=ENERGY,
    ),
)


def _on(device: str, bytes_per_s: float, model: str) -> tuple[str, ...]:
    """Return the changes that make another model on other devices and links of a scenario."""
    return (
        f"cluster.device={device}",
        f"cluster.soc_bytes_per_s={bytes_per_s}",
        f"model.name={model}",
        "data.name=cifar10",
        "data.factory=",
    )


PREDICTED = (
    Case(
        file="learning",
        about="VGG-11 on 4 Snapdragon 865",
        arithmetics=_ALL,
        changes=_on("snapdragon-865", 125e6, "vgg11"),
    ),
    Case(
        file="learning",
        about="ResNet-18 on 4 Snapdragon 8 Gen 1, by joules",
        arithmetics=_ALL,
        prefer=ENERGY,
        changes=_on("snapdragon-8gen1", 125e6, "resnet18"),
    ),
    Case(
        file="learning",
        about="MobileNetV1 on 4 Snapdragon 865 at 100 Mbit/s",
        arithmetics=_ALL,
        changes=_on("snapdragon-865", 12.5e6, "mobilenet-v1"),
    ),
    Case(
        file="slow_links",
        about="VGG-11 on 4 Jetson Nano, pipelines too",
        changes=_on("jetson-nano", 125e6, "vgg11"),
        strategies=("socflow", "ring", "sgd", "2d", "powersgd", "diloco", "hybrid-pipeline"),
    ),
    Case(
        file="slow_links",
        about="ResNet-18 on 4 Raspberry Pi 4B at 1 Gbit/s, by joules",
        prefer=ENERGY,
        changes=_on("raspberry-pi-4b", 125e6, "resnet18"),
    ),
    Case(
        file="skewed",
        about="VGG-11 on 4 Snapdragon 865 with skewed data",
        changes=(*_on("snapdragon-865", 125e6, "vgg11"),),
    ),
    Case(
        file="skewed",
        about="ResNet-18 on 4 Jetson TX2 at 100 Mbit/s with skewed data, by joules",
        prefer=ENERGY,
        changes=_on("jetson-tx2", 12.5e6, "resnet18"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a setting costs to the target, by exhaustive search: infinity if its candidate misses it."""

    setting: Setting
    epochs: float
    time_s: float
    energy_j: float

    def of(self, prefer: str) -> float:
        """Return seconds, or joules."""
        return self.time_s if prefer == TIME else self.energy_j


def run(quick: bool = False, case: int = 0, seed: int = SEED) -> list[Row]:
    """Return the rows of all ten cases, or of one, from 1; `quick` has the first only."""
    rows: list[Row] = []
    for number, each in enumerate((*TRAINED, *PREDICTED), 1):
        if case in (0, number) and not (quick and rows):
            found = kept(_OUT / f"case-{number}-seed-{seed}.json", partial(_found, each, seed))
            rows += [from_json(Row, row) for row in found["rows"]]
            peer_notes.update(found["peers"])
    return rows


def _found(case: Case, seed: int) -> dict[str, Any]:
    """Return the rows of a case, and what tune chose, what was best, and the exhaustive grid."""
    scenario = _scenario(case, seed)
    learned = grid(next(each for each in TRAINED if each.file == case.file), seed)
    candidates, refused = _candidates(case, seed)
    costs = [cost for each in candidates for cost in _exhaustive(each, learned, case)]
    best = min(costs, key=lambda cost: cost.of(case.prefer))
    runs = _Runs(case, candidates, learned, seed)
    with temporary_folder() as out:
        document = tune_among(
            scenario, candidates, refused, out, runs.run, budget=BUDGET, prefer=case.prefer
        )
    chosen = document["chosen"]
    ours = next(cost for cost in costs if _is_chosen(cost, chosen))
    keys = {each.key for each in candidates}
    all_epochs = sum(own["rounds"][-1][0] for key, own in learned.items() if key in keys)
    regret = ours.of(case.prefer) / best.of(case.prefer) - 1.0
    unit = "s" if case.prefer == TIME else "J"
    title = f"{case.about}{'' if not case.changes else ', predicted'}"
    part_of_cost = runs.epochs / all_epochs
    note(f"{title}: regret {regret:.1%}, {part_of_cost:.1%} of the epochs")
    where, ok = "exhaustive search", bool(chosen["reached"])
    chosen_cost, best_cost = ours.of(case.prefer), best.of(case.prefer)
    rows = [
        less_is_better(title, chosen_cost, where, best_cost, unit, ok=ok),
        less_is_better(title, runs.epochs, where, all_epochs, "epochs", ok=ok),
    ]
    said = {
        "regret": regret,
        "part_of_cost": part_of_cost,
        "seed": seed,
        "budget": BUDGET,
        "chosen": _described(ours),
        "best": _described(best),
        "confirmed": {key: chosen[key] for key in ("time_s", "energy_j", "reached")},
        "wall_s_of_grid": sum(own["wall_s"] for own in learned.values()),
        "grid": [_described(cost) for cost in costs],
    }
    return {"rows": [asdict(row) for row in rows], "peers": {title: said}}


def _scenario(case: Case, seed: int) -> Scenario:
    return load_scenario(_CASES / f"{case.file}.toml", [*case.changes, f"seed={seed}"])


def _exhaustive(
    candidate: Candidate, learned: Mapping[str, Mapping[str, Any]], case: Case
) -> Iterator[Cost]:
    """Yield what each setting of a candidate costs to the target."""
    rounds = learned[candidate.key]["rounds"]
    epochs, _, time_s, energy_j = rounds[-1]
    reached = _reaches(candidate.trained.scenario, rounds[-1])
    over = PredictedCosts(time_s=1.0, energy_j=1.0)
    if not case.changes:
        predicted = candidate.trained.epoch.times(epochs)
        # Mixed training measures how much of a batch int8 may compute.
        over = PredictedCosts(
            time_s=time_s / predicted.time_s, energy_j=energy_j / predicted.energy_j
        )
    for setting in candidate.settings:
        needed = epochs if reached else math.inf
        yield Cost(
            setting=setting,
            epochs=needed,
            time_s=needed * setting.epoch.time_s * over.time_s,
            energy_j=needed * setting.epoch.energy_j * over.energy_j,
        )


def _reaches(scenario: Scenario, entry: Sequence[float]) -> bool:
    quality, target = target_of(scenario)
    return quality.reaches(entry[1], target)


def _is_chosen(cost: Cost, chosen: Mapping[str, Any]) -> bool:
    own = {"strategy": cost.setting.strategy, **cost.setting.choice}
    return all(chosen.get(key) == value for key, value in own.items())


def _described(cost: Cost) -> list[Any]:
    """Return a setting, its epochs to the target, seconds and joules, as short as can be; None if it missed it."""
    text = f"{cost.setting.strategy} {described(cost.setting.choice)}"
    figures = (cost.epochs, cost.time_s, cost.energy_j)
    return [text, *(float(f"{each:.5g}") if math.isfinite(each) else None for each in figures)]


class _Runs:
    """Trainings for tune: those of the grid up to where tune ends them, counted as if they were trained now."""

    def __init__(
        self,
        case: Case,
        candidates: Sequence[Candidate],
        learned: Mapping[str, Mapping[str, Any]],
        seed: int,
    ) -> None:
        self._case, self._learned, self._seed = case, learned, seed
        self._costs = {
            _identity(setting.scenario): (setting.epoch, setting is each.trained)
            for each in candidates
            for setting in each.settings
        }
        self._epochs: dict[str, float] = {}

    @property
    def epochs(self) -> float:
        """The epochs that were trained; a training that goes farther continues."""
        return sum(self._epochs.values())

    def run(self, scenario: Scenario, label: str, ending: Ending) -> Mapping[str, Any]:
        """Return the result of a training that ends so."""
        epoch, is_of_grid = self._costs[_identity(scenario)]
        rounds = self._learned[weights_key(scenario)]["rounds"]
        if not is_of_grid and not self._case.changes:
            # The chosen setting of a trained case is trained itself.
            where = _OUT / f"{self._case.file}-seed-{self._seed}" / "chosen"
            rounds = _kept_rounds(scenario, where, ending)["rounds"]
        found = []
        for at_epoch, accuracy, time_s, energy_j in rounds:
            if self._case.changes:
                time_s, energy_j = at_epoch * epoch.time_s, at_epoch * epoch.energy_j
            found.append(
                {
                    "epoch": at_epoch,
                    "accuracy": accuracy,
                    "virtual_s": time_s,
                    "energy_j": energy_j,
                }
            )
            if is_over(ending, found[-1]):
                break
        last = found[-1]
        self._epochs[label] = max(self._epochs.get(label, 0.0), last["epoch"])
        return {**last, "final_accuracy": last["accuracy"], "rounds": found}


def _identity(scenario: Scenario) -> str:
    return json.dumps(to_document(scenario), sort_keys=True)


@cache
def _candidates(case: Case, seed: int) -> tuple[list[Candidate], dict[str, str]]:
    """Return all candidates of a case, and who is left out, which takes longest of what is not trained."""
    scenario = _scenario(case, seed)
    names = case.strategies or scenario.compare.strategies
    return candidates_of(scenario, names, case.arithmetics)


# ------------------------------------------------------------------------------------------ real trainings
def grid(case: Case, seed: int) -> dict[str, dict[str, Any]]:
    """Return the training of each candidate of a trained case, by its key."""
    whole = _OUT / f"{case.file}-seed-{seed}.json"
    found: dict[str, dict[str, Any]] = kept(whole, partial(_trained, case, seed))
    return found


def _trained(case: Case, seed: int) -> dict[str, dict[str, Any]]:
    """Train each candidate of a case that has not been trained yet."""
    quality, target = target_of(_scenario(case, seed))
    ending = Ending(quality=quality.name, target=target)
    candidates, _ = _candidates(case, seed)
    where = _OUT / f"{case.file}-seed-{seed}"
    found = {}
    for number, candidate in enumerate(candidates, 1):
        found[candidate.key] = own = _kept_rounds(candidate.trained.scenario, where, ending)
        epoch, accuracy, *_ = own["rounds"][-1]
        note(
            f"{case.file} {number} of {len(candidates)}: {candidate.trained.strategy} "
            f"{described(candidate.trained.choice)}: {accuracy:.3f} after {epoch:.2f} epochs, {own['wall_s']:.1f} s"
        )
    return found


def _kept_rounds(scenario: Scenario, where: Path, ending: Ending) -> dict[str, Any]:
    """Return the rounds of a training to the target or to its end, and the seconds that it took here."""
    digest = hashlib.sha256(weights_key(scenario).encode()).hexdigest()[:12]

    def train() -> dict[str, Any]:
        started_s = time.perf_counter()
        job = ScenarioJob(run=prepare(scenario), ending=ending)
        result = run_job(job, EngineChoice(engine="local", num_workers=0))
        keys = ("epoch", "accuracy", "virtual_s", "energy_j")
        rounds = [[each[key] for key in keys] for each in result["rounds"]]
        return {"rounds": rounds, "wall_s": time.perf_counter() - started_s}

    found: dict[str, Any] = kept(where / f"{digest}.json", train)
    return found
