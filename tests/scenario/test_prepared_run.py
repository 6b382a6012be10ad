"""What a scenario asks for and its engine or strategy would not do is refused before anything starts."""

from pathlib import Path

import pytest

from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.config import Scenario, TrainConfig
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")


def compressed(name: str = "socflow", **changes: str) -> Scenario:
    scenario = small(name)
    return scenario.replaced(
        strategy=scenario.strategy.replaced(**{"compression": "int8"} | changes)
    )


def test_compression_of_gradients_is_refused_without_groups_but_dormant_in_a_comparison() -> None:
    refused(lambda: compressed("fedavg"), "compression = 'int8'", "name = 'fedavg'")
    for name, kept in (("fedavg", "none"), ("sgd", "none"), ("ring", "int8")):
        assert compressed().under(name).strategy.compression == kept
    adam = TrainConfig(optimizer="adam")
    largest = compressed(compression="dgc")
    refused(lambda: largest.replaced(train=adam), "compression = 'dgc'", "optimizer = 'adam'")
    refused(lambda: compressed(compression="zip"), "zip", "dgc")
    alone = small(groups=4, compression="fp16")
    refused(lambda: prepare(alone), "compression = 'fp16'", "one SoC")


def test_the_command_ends_with_status_2_and_writes_nothing(
    socflower: Socflower, tmp_path: Path
) -> None:
    command = "run digits_demo --set strategy.name='fedavg' --set strategy.compression='fp16' --out"
    is_mistake(socflower(command, tmp_path / "out"), "[strategy] compression = 'fp16'", "fedavg")
    assert not (tmp_path / "out").exists()
