"""`[train] device`: what runs where, and what is refused before anything starts."""

from pathlib import Path

import pytest

from socflower.scenario.arithmetic import trainer
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import PrecisionConfig
from socflower.scenario.schema.scenario_file import Scenario
from tests.command_line import Socflower, is_mistake
from tests.fake_device import fake_device  # noqa: F401 - a fixture
from tests.one_line import refused
from tests.scenario.small_runs import small, small_result
from tests.scenario.test_split_runs import EXACT, ran, ran_with_window, split


def on(device: str, scenario: Scenario) -> Scenario:
    return scenario.replaced(train=scenario.train.replaced(device=device))


@pytest.mark.slow
@pytest.mark.usefixtures("on_few_digits", "fake_device")
def test_a_scenario_on_the_accelerator_has_the_weights_of_the_cpu() -> None:
    for name in ("socflow", "fedavg"):
        ours, expected = run_scenario(on("auto", small(name)), num_workers=0), small_result(name)
        assert ours["final_accuracy"] == expected["final_accuracy"]
        assert ours["virtual_s"] == expected["virtual_s"]
        assert ours["trained_on"] == {"fake:0": [0, 1, 2, 3]} and expected["trained_on"] == {
            "cpu": [0, 1, 2, 3]
        }
        assert ours["processors"][0]["trained"] == "fake:0"
    both = ran(on("auto", split(**EXACT, window=[[0.0, 0]])))
    assert both["trained_on"] == {"fake:0": [0]}
    assert both["weights_sha256"] == ran_with_window(0)["weights_sha256"]


def test_scenarios_stay_on_the_cpu_unless_they_ask() -> None:
    assert trainer(small()).device == "cpu"  # type: ignore[attr-defined]


def test_a_device_that_is_not_there_ends_a_command_in_one_line(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n[strategy]\ngroups = 1\n")
    for command in ("run", "compare"):
        ended = socflower(f"{command} case.toml --set train.device=cuda")
        is_mistake(ended, "[train] device = 'cuda'", "cpu", "auto")
    for name in ("0", "'gpu 1'"):
        is_mistake(socflower("run case.toml --set", f"train.device={name}"), "[train] device = ")


def test_integer_kernels_refuse_an_accelerator() -> None:
    mixed = PrecisionConfig(arithmetic="mixed")
    refused(lambda: on("cuda", small()).replaced(precision=mixed), "[train] device = 'cuda'")
