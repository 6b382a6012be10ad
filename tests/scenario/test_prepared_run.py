"""What a scenario asks for and its engine or strategy would not do is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.config import PrecisionConfig, TrainConfig
from socflower.scenario.schema.scenario_file import Scenario
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


def test_a_strategy_that_decides_the_exchange_refuses_another_one() -> None:
    refused(
        lambda: compressed("ring", compression="none", exchange="server"),
        "exchange = 'server'",
        "'ring'",
    )
    refused(lambda: compressed("hipress", compression="fp16"), "compression = 'fp16'", "'hipress'")
    refused(
        lambda: compressed("fedavg", compression="none", exchange="server"),
        "exchange = 'server'",
        "'fedavg'",
    )
    refused(
        lambda: compressed("ps", compression="hipress"), "compression = 'hipress'", "server", "dgc"
    )
    refused(lambda: compressed(compression="powersgd rank=x"), "rank=x", "rank=N")
    refused(lambda: prepare(small(groups=4, exchange="server")), "exchange", "one SoC")
    adam = TrainConfig(optimizer="adam")
    refused(lambda: small("hipress").replaced(train=adam), "name = 'hipress'", "'adam'")
    int8 = PrecisionConfig(arithmetic="int8")
    in_int8 = small("powersgd").replaced(precision=int8)
    refused(lambda: prepare(in_int8), "name = 'powersgd'", "int8")


@pytest.mark.parametrize("name", ["local-sgd", "diloco", "muloco", "tree-fedavg"])
@pytest.mark.parametrize("own", [{"overlap_buckets": 4}, {"uplink_turns": True}])
def test_what_acts_inside_groups_is_refused_where_each_soc_is_one(
    name: str, own: dict[str, Any]
) -> None:
    """It is dormant in a comparison, and read by the first epochs of post-local SGD."""
    refused(lambda: prepare(small(name, groups="auto", **own)), *own)
    prepare(small(**own).under(name))
    prepare(small("post-local-sgd", groups="auto", epochs=2, **own))


def test_fragments_of_real_machines_are_not_compressed() -> None:
    scenario = small("streaming-diloco", groups="auto", leader_compression="int4")
    prepare(scenario)
    refused(lambda: prepare(scenario, "deployment"), "leader_compression = 'int4'", "at the hub")


@pytest.mark.parametrize(
    ("name", "exchange", "compression"),
    [
        ("socflow", "server", "int8"),
        ("ring", "ring", "int8"),
        ("ps", "server", "int8"),
        ("powersgd", "ring", "powersgd"),
    ],
)
def test_a_comparison_keeps_what_a_strategy_lets_the_file_decide(
    name: str, exchange: str, compression: str
) -> None:
    scenario = small(exchange="server", compression="int8").under(name)
    assert (scenario.exchange.exchange, scenario.exchange.compression) == (exchange, compression)


def test_the_command_ends_with_status_2_and_writes_nothing(
    socflower: Socflower, tmp_path: Path
) -> None:
    command = "run digits_demo --set strategy.name='fedavg' --set strategy.compression='fp16' --out"
    is_mistake(socflower(command, tmp_path / "out"), "[strategy] compression = 'fp16'", "fedavg")
    assert not (tmp_path / "out").exists()
