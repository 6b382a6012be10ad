"""What a scenario asks for and its engine or strategy would not do is refused before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from socflower.peers.ring.settings import RingSettings
from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.config import Scenario, TrainConfig
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")


def compressed(name: str = "socflow") -> Scenario:
    scenario = small(name)
    return scenario.replaced(ring=replace(scenario.ring, compression="int8"))


@pytest.mark.parametrize("engine", ["local", "simulation"])
def test_compression_of_gradients_is_refused_on_engines_that_sum_whole_ones(engine: str) -> None:
    named = ("small [ring] compression = 'int8'", "--engine deployment")
    refused(lambda: prepare(compressed(), engine), *named)
    prepare(compressed(), "deployment")
    prepare(small(), engine)


def test_compression_of_gradients_is_refused_without_rings_but_dormant_in_a_comparison() -> None:
    fedavg = compressed("fedavg")
    refused(lambda: prepare(fedavg, "deployment"), "compression = 'int8'", "name = 'fedavg'")
    assert compressed().under("fedavg").ring == RingSettings()
    assert compressed().under("ring").ring.compression == "int8"


def test_the_command_ends_with_status_2_and_writes_nothing(
    socflower: Socflower, tmp_path: Path
) -> None:
    ran = socflower("run digits_demo --set ring.compression='fp16' --out", tmp_path / "out")
    is_mistake(ran, "[ring] compression = 'fp16'", "--engine deployment")
    assert not (tmp_path / "out").exists()


def test_mixed_precision_does_not_sum_in_a_rings_order() -> None:
    mixed = {"precision": {"arithmetic": "mixed", "held_out": 16}}
    in_order = TrainConfig(reduction="ring")
    refused(lambda: small().replaced(train=in_order, **mixed), "[train] reduction = 'ring'")
