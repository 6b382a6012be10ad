"""What a scenario asks for and its engine or strategy would not do is refused before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from socflower.errors import ConfigError
from socflower.peers.ring.settings import RingSettings
from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.config import Scenario, TrainConfig
from tests.command_line import Socflower
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")


def compressed(name: str = "socflow") -> Scenario:
    scenario = small(name)
    return scenario.replaced(ring=replace(scenario.ring, compression="int8"))


@pytest.mark.parametrize("engine", ["local", "simulation"])
def test_compression_of_gradients_is_refused_on_engines_that_sum_whole_ones(engine: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^small \[ring\] compression = 'int8' needs --engine deployment; leave it "
        r"out$",
    ):
        prepare(compressed(), engine)
    prepare(compressed(), "deployment")
    prepare(small(), engine)


def test_compression_of_gradients_is_refused_without_rings_but_dormant_in_a_comparison() -> None:
    with pytest.raises(
        ConfigError, match=r"compression = 'int8' is of rings, and \[strategy\] name = 'fedavg' has"
    ):
        prepare(compressed("fedavg"), "deployment")
    assert compressed().under("fedavg").ring == RingSettings()
    assert compressed().under("ring").ring.compression == "int8"


def test_the_command_ends_with_status_2_and_writes_nothing(
    socflower: Socflower, tmp_path: Path
) -> None:
    ran = socflower(
        "run", "digits_demo", "--set", "ring.compression='fp16'", "--out", tmp_path / "out"
    )
    assert ran.status == 2 and "[ring] compression = 'fp16' needs --engine deployment" in ran.err
    assert not (tmp_path / "out").exists()


def test_mixed_precision_does_not_sum_in_a_rings_order() -> None:
    mixed = {"precision": {"arithmetic": "mixed", "held_out": 16}}
    with pytest.raises(
        ConfigError, match=r"\[train\] reduction = 'ring' sums gradients as a ring does"
    ):
        small().replaced(train=TrainConfig(reduction="ring"), **mixed)
