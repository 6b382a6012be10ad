"""Short trainings on a user's own rack, whose measured times are put beside what the cluster model predicts.

Rounds have between a quarter of an epoch and two epochs, so a line through their times separates what an epoch takes
(computation, and exchanges in groups) from what each round takes besides (synchronisation; on real machines also
Flower's messages and the evaluation, which virtual time does not price).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from socflower.cluster import Cluster
from socflower.cluster.cluster_file import cluster_document, load_cluster
from socflower.engines.deployment.options import DeploymentOptions
from socflower.errors import ConfigError
from socflower.scenario.prepared_run import PreparedRun, prepare
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import apply_override, parse_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.wire.folders import exclusive_folder

MOST_LOCAL_SOCS = 32
"""SuperNodes that are started on this machine; each needs about 400 MB."""

# Eight rounds: four of a quarter of an epoch, two of a half, one of one and one of two.
_ROUNDS = {"train": {"epochs": 5}, "strategy": {"doubling_epochs": 1}}
_DECIDED = (
    *("train.epochs", "strategy.name", "strategy.groups", "strategy.doubling_epochs"),
    *("strategy.sync_interval_epochs", "model.factory", "data.factory"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RackTraining:
    """One of the trainings: what it is about, and its scenario, checked for this machine."""

    about: str
    run: PreparedRun

    @property
    def scenario(self) -> Scenario:
        """The scenario, whose name is that of the training."""
        return self.run.scenario


def rack_trainings(
    rack: Path, overrides: Sequence[str], *, superlink: str = ""
) -> list[RackTraining]:
    """Return the trainings for the rack of a cluster file, the shortest chain of causes first.

    One SoC alone only computes, one group of all SoCs adds exchanges, and several groups add synchronisations.
    `overrides` are keys of the scenarios, as in `--set`. Raises `ConfigError` for a file that is no cluster's, for an
    override of a key that the comparison decides, and for more SoCs than this machine can start.
    """
    cluster = load_cluster(rack)
    num_socs = _num_socs(cluster, overrides)
    if not superlink and num_socs > MOST_LOCAL_SOCS:
        raise ConfigError(
            f"{rack}: {num_socs} SoCs are more processes than one machine runs ({MOST_LOCAL_SOCS}); name the "
            "rack's SuperLink with --superlink, or use fewer by --set strategy.socs=8"
        )
    shapes = {"one-soc": ("one SoC: computation", 1, 1)}
    if num_socs > 1:
        shapes["one-group"] = ("one group: exchanges in each step", num_socs, 1)
    if num_socs > 3:
        groups = min(max(2, len(cluster.boards)), num_socs // 2)
        shapes["groups"] = (f"{groups} groups: synchronisations between them", num_socs, groups)
    return [
        RackTraining(
            about=about,
            run=prepare(
                _scenario(rack, name, socs, groups, overrides),
                "deployment",
                trains_here=not superlink,
            ),
        )
        for name, (about, socs, groups) in shapes.items()
    ]


def _num_socs(cluster: Cluster, overrides: Sequence[str]) -> int:
    """Return how many SoCs take part: those of the cluster, or of an override."""
    document: dict[str, Any] = {}
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _DECIDED or key.startswith(("cluster", "board", "device", "site")):
            raise ConfigError(f"--set {override}: `validate` decides this key itself; leave it out")
        apply_override(document, override)
    asked = document.get("strategy", {}).get("socs", cluster.num_socs)
    if type(asked) is not int or not 1 <= asked <= cluster.num_socs:
        raise ConfigError(
            f"--set strategy.socs={asked}: must be a whole number from 1 to {cluster.num_socs}, the rack's SoCs"
        )
    return asked


def _scenario(
    rack: Path, name: str, num_socs: int, num_groups: int, overrides: Sequence[str]
) -> Scenario:
    # An epoch of a smaller model would take less than the noise of a round.
    document = {
        **cluster_document(rack),
        "model": {"name": "vgg-small"},
        "train": dict(_ROUNDS["train"]),
    }
    for override in overrides:
        apply_override(document, override)
    document["strategy"] = {
        **document.get("strategy", {}),
        **_ROUNDS["strategy"],
        "socs": num_socs,
        "groups": num_groups,
    }
    return parse_scenario(document, name=name, question="", where=str(rack))


def validate_rack(
    trainings: Sequence[RackTraining],
    out: Path,
    deployment: DeploymentOptions,
    on_notice: Callable[[str], None],
    on_training: Callable[[str], Callable[[dict[str, Any]], None]],
) -> dict[str, Any]:
    """Run the trainings one after the other, each into a folder of `out`, and return the report.

    `on_training` gets a training's name and returns the callback for its rounds. The report has `cluster` (the file's
    tables), `versions` and `trainings`: `name`, `about`, `num_socs`, `num_groups`, `accuracy`, `rounds` (`epochs`,
    `predicted_s` and `measured_s` of each but the first, in which processes start), `epoch` and `round` (see
    `compared`), `transports`, `trained_on`, `restarts` and `events`. It holds no path, address or name of a host.
    """
    rows: list[dict[str, Any]] = []
    with exclusive_folder(out, "--out"):
        for training in trainings:
            name = training.scenario.name
            result = run_to_folder(
                training.run,
                out / name,
                "deployment",
                on_round=on_training(name),
                on_notice=on_notice,
                deployment=deployment,
            )
            rows.append(_row(training, result))
    tables = ("cluster", "board", "site", "device", "model", "data", "train")
    return {
        "schema": 1,
        **{table: result["scenario"][table] for table in tables if table in result["scenario"]},
        "versions": result["versions"],
        "trainings": rows,
    }


def _row(training: RackTraining, result: Mapping[str, Any]) -> dict[str, Any]:
    rounds = list(round_times(result["rounds"]))
    strategy = result["scenario"]["strategy"]
    return {
        "name": training.scenario.name,
        "about": training.about,
        "num_socs": strategy["socs"],
        "num_groups": strategy["groups"],
        "accuracy": result["final_accuracy"],
        **compared(rounds),
        "rounds": rounds,
        "restarts": len(result["restarts"]),
        "events": sum(len(entry["events"]) for entry in result["rounds"]),
        "transports": result["transports"],
        "trained_on": result["trained_on"],
    }


def round_times(rounds: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield epochs and seconds of each round of a deployment but the first, in which processes start.

    A round after a restart has no measured time of its own, and is left out.
    """
    for before, after in pairwise(rounds[1:]):
        if before["wall_s"] is not None and after["wall_s"] is not None:
            yield {
                "epochs": after["epoch"] - before["epoch"],
                "predicted_s": after["predicted_s"] - before["predicted_s"],
                "measured_s": after["wall_s"] - before["wall_s"],
            }


def compared(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return `epoch` and `round`: each has `predicted_s`, `measured_s` and `ratio` of measured to predicted.

    seconds of a round = `round` + epochs of the round * `epoch`. The slope is the median over all pairs of rounds of
    different length (Theil 1950, Sen 1968), so that one disturbed round does not move it; the intercept is the median
    of what is left. `spread` of `epoch` is the median distance of the rounds' measured times from the line, as a part
    of the longest round. `ratio` is None if nothing is predicted, or if the
    measured time is not positive, which is noise. Raises `ConfigError` if all rounds are equally long.
    """
    lines = {key: _line(rounds, key) for key in ("predicted_s", "measured_s")}
    found: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(("epoch", "round")):
        predicted_s, measured_s = (lines[key][index] for key in ("predicted_s", "measured_s"))
        ratio = measured_s / predicted_s if min(predicted_s, measured_s) > 0.0 else None
        found[name] = {"predicted_s": predicted_s, "measured_s": measured_s, "ratio": ratio}
    epoch_s, round_s = lines["measured_s"]
    left_s = [abs(each["measured_s"] - round_s - each["epochs"] * epoch_s) for each in rounds]
    found["epoch"]["spread"] = median(left_s) / max(each["measured_s"] for each in rounds)
    return found


def _line(rounds: Sequence[Mapping[str, float]], key: str) -> tuple[float, float]:
    """Return slope and intercept of a time over the epochs of rounds."""
    slopes = [
        (later[key] - earlier[key]) / (later["epochs"] - earlier["epochs"])
        for earlier, later in combinations(rounds, 2)
        if earlier["epochs"] != later["epochs"]
    ]
    if not slopes:
        raise ConfigError(
            "validate: a batch fills every round, so rounds cannot be compared; lower train.batch_size"
        )
    slope = median(slopes)
    # To the nanosecond, since differences of sums are not exactly zero.
    return round(slope, 9), round(
        median([each[key] - slope * each["epochs"] for each in rounds]), 9
    )
