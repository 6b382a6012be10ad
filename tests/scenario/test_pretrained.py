"""Trainings that begin with the weights of a file: `[model] pretrained`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import ModelConfig, PrecisionConfig
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import initial_model, scenario_data
from socflower.strategies.presets import STRATEGIES
from socflower.workloads.evaluation import evaluate
from tests.one_line import refused
from tests.scenario.small_runs import small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")

METHODS = [name for name, kind in STRATEGIES.items() if not kind.uses_cloud]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that no seed of these tests draws."""
    path = tmp_path_factory.mktemp("weights") / "model.npz"
    state = initial_model(small(seed=77)).state_dict()
    np.savez(path, **{name: value.numpy() for name, value in state.items()})
    return path


def under(name: str, **model: Any) -> Scenario:
    """Return the small scenario under any strategy of a cluster, with keys of `[model]`."""
    # One that is synchronous at first needs an epoch of each kind.
    scenario = small(epochs=2 if STRATEGIES[name].is_synchronous_first else 1)
    if name != "socflow":
        scenario = scenario.replaced(strategy=scenario.strategy.replaced(groups="auto"))
    return scenario.under(name).replaced(model=ModelConfig(**model))


def loss_of(scenario: Scenario) -> float:
    """Return the loss of the model that a training would begin with."""
    return evaluate(initial_model(scenario), scenario_data(scenario).test).loss


# Of methods with the same strategy and client, the others are slow.
QUICK = ("socflow", "fedavg", "diloco", "hybrid-pipeline")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS],
)
def test_every_method_begins_with_the_weights_of_the_file(name: str, weights: Path) -> None:
    """Before the first step the loss is that of the saved model under a new head, to the last bit."""
    scenario = under(name, pretrained=str(weights))
    first = run_scenario(scenario, num_workers=0)["rounds"][0]
    assert first["round"] == 0
    assert first["loss"] == loss_of(under("socflow", pretrained=str(weights))) != loss_of(small())


def test_a_new_head_is_drawn_from_the_seed_and_the_rest_is_the_file_s(weights: Path) -> None:
    saved = np.load(weights)
    scenario = under("socflow", pretrained=str(weights))
    begun, random = (initial_model(each).state_dict() for each in (scenario, under("socflow")))
    names = list(begun)
    for name in names:
        expected = random[name].numpy() if name in names[-2:] else saved[name]
        assert np.array_equal(begun[name].numpy(), expected)


@pytest.mark.parametrize("arithmetic", ["int8", "mixed"])
def test_integers_begin_with_the_file_too(arithmetic: str, weights: Path) -> None:
    scenario = under("socflow", pretrained=str(weights)).replaced(
        precision=PrecisionConfig(arithmetic=arithmetic)
    )
    first = run_scenario(scenario, num_workers=0)["rounds"][0]
    assert first["loss"] == loss_of(under("socflow", pretrained=str(weights)))


def test_a_path_is_relative_to_the_scenario(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text('[model]\npretrained = "model.npz"\n')
    assert load_scenario(tmp_path / "case.toml").model.pretrained == str(tmp_path / "model.npz")


def test_files_that_are_none_are_refused_before_anything_starts(
    weights: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    np.savez(tmp_path / "other.npz", weight=np.zeros(3, np.float32))
    for file, named in (
        (tmp_path / "nowhere.npz", "no such file"),
        (tmp_path / "broken.npz", "not a readable .npz"),
        (tmp_path / "other.npz", "is it of another model"),
    ):
        scenario = under("socflow", pretrained=str(file))
        refused(lambda scenario=scenario: prepare(scenario), "[model] pretrained", file, named)
    scenario = under("ring", pretrained=str(weights))
    refused(
        lambda: prepare(scenario, "deployment", trains_here=False), "[model] pretrained", weights
    )


@pytest.mark.slow
def test_transfer_needs_fewer_epochs(tmp_path: Path) -> None:
    """All but the head of a model that was trained before is better than random weights."""
    before = run_scenario(small(epochs=2), num_workers=0, model_to=tmp_path / "model.npz")
    after = run_scenario(under("socflow", pretrained=str(tmp_path / "model.npz")), num_workers=0)
    assert before["final_loss"] < after["rounds"][0]["loss"]
    assert after["final_loss"] < small_result()["final_loss"]
