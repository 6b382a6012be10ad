"""The search of `socflower tune FOLDER` over an app's run config; one case trains a stranger's app."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from socflower.errors import ConfigError, TrainingFailed
from socflower.report.quality import ACCURACY
from socflower.scenario.app_folder import AppRun
from socflower.scenario.app_tune import AppSearch, parse_axes, tune_app
from tests.command_line import Socflower
from tests.one_line import refused

ROOT = Path(__file__).parents[2]
APP = ROOT / "scenarios" / "quickstart_app"
SHELF = ROOT / "scenarios" / "clusters" / "shelf_of_eight.toml"


def search(**changes: Any) -> AppSearch:
    settings: dict[str, Any] = {
        "axes": parse_axes(["batch-size=8,16,32", "learning-rate=0.01,0.02"]),
        "quality": ACCURACY,
        "target": 0.8,
        "budget": 6,
        "rounds_key": "num-epochs",
    }
    return AppSearch(**{**settings, **changes})


def app() -> AppRun:
    return AppRun(folder=APP, cluster_file=SHELF, overrides=("num-epochs=8",))


class Known:
    """Runs whose accuracy is 1 - batch / (20 rounds), at `batch` joules and 100 / batch ** 2 seconds a round."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def run(self, run: AppRun, out: Path, **_: Any) -> Mapping[str, Any]:
        config = dict(each.split("=") for each in run.overrides)
        batch, num_rounds = int(config["batch-size"]), int(config["num-epochs"])
        self.rounds.append(num_rounds)
        rounds = [
            {
                "round": each,
                "accuracy": 1.0 - min(1.0, batch / (20 * max(each, 0.5))),
                "virtual_s": each * 100 / batch**2,
                "energy_j": float(each * batch),
            }
            for each in range(num_rounds + 1)
        ]
        last = rounds[-1]
        result = {
            "label": run.title,
            "rounds": rounds,
            "final_accuracy": last["accuracy"],
            "virtual_s": last["virtual_s"],
            "energy_j": last["energy_j"],
            "notes": [],
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result))
        return result


@pytest.mark.parametrize(("prefer", "batch"), [("time", 32), ("energy", 8)])
def test_the_chosen_run_config_is_the_best_of_all_that_reach_the_target(
    prefer: str, batch: int, tmp_path: Path
) -> None:
    known = Known()
    document = tune_app(app(), search(prefer=prefer), tmp_path, run_one=known.run)
    assert document["chosen"]["batch-size"] == batch
    chosen = tomllib.loads((tmp_path / "chosen.toml").read_text())
    assert chosen["batch-size"] == batch and chosen["num-groups"] == 4
    assert document == json.loads((tmp_path / "tune.json").read_text())
    assert (tmp_path / "report.html").exists()
    # Fewer rounds than those of all six run configs, and none of them again.
    assert sum(known.rounds) < 6 * 8
    again = Known()
    assert tune_app(app(), search(prefer=prefer), tmp_path, run_one=again.run) == document
    assert again.rounds == []


def test_what_nobody_reaches_ends_in_a_line(tmp_path: Path) -> None:
    hard = search(target=0.9999)
    refused(
        lambda: tune_app(app(), hard, tmp_path, run_one=Known().run),
        "num-epochs = 8",
        error=TrainingFailed,
    )
    assert not (tmp_path / "chosen.toml").exists()


def test_values_that_the_app_does_not_take_are_refused_before_anything_runs(tmp_path: Path) -> None:
    known = Known()
    for axes in (["batch-size=8,many"], ["nothing=1,2"]):
        wrong = search(axes=parse_axes(axes))
        refused(lambda wrong=wrong: tune_app(app(), wrong, tmp_path, run_one=known.run), "--set")
    refused(lambda: parse_axes(["a=1,2", "a=3,4"]), "a", error=ConfigError)
    assert known.rounds == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_strangers_app_is_tuned(socflower: Socflower, tmp_path: Path) -> None:
    found = socflower(
        f"tune {APP} --cluster {SHELF} --set num-epochs=2 --rounds-key num-epochs --vary num-groups=2,4 "
        f"--vary learning-rate=0.01,0.05 --target-accuracy 0.7 --out {tmp_path / 'out'} --workers 0 --json"
    )
    assert found.status == 0, found.err
    document = json.loads(found.out)
    assert document["chosen"]["reached"]
    assert any(row["on_front"] for row in document["settings"])
    chosen = tomllib.loads((tmp_path / "out" / "chosen.toml").read_text())
    assert chosen["num-groups"] == document["chosen"]["num-groups"]
