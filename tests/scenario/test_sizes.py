"""Sizes that cannot be meant are refused at once, or cost nothing: no number in a file makes planning long."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from socflower.cluster.cluster_file import MOST_SOCS
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.field_rules import keys_of
from socflower.hierarchy.sync_intervals import _IntervalCursor
from socflower.peers.ring.settings import RingSettings
from socflower.scenario.heat import predicted_heat
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.config import (
    EventConfig,
    PrecisionConfig,
    StrategyConfig,
    TrainConfig,
)
from socflower.scenario.schema.file import parse_scenario, scenario_cluster
from socflower.toml_file import read_table
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused

TABLES = {
    "train": TrainConfig,
    "strategy": StrategyConfig,
    "ring": RingSettings,
    "precision": PrecisionConfig,
}
HUGE = {int: 10**15, float: 1e300}
TINY = {int: 1, float: 1e-300}


def numbers(table: type) -> dict[str, type]:
    """Return the keys of a table that take a number, and the kind of number."""
    found = {}
    for name, key in keys_of(table).items():
        kinds = (
            get_args(key.annotation)
            if get_origin(key.annotation) in (Union, UnionType)
            else (key.annotation,)
        )
        plain = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
        for kind in (int, float):
            if kind in plain:
                found[name] = kind
    return found


def parse(document: dict[str, Any]) -> Any:
    whole = {"cluster": {"boards": 2, "socs_per_board": 2}, **document}
    return parse_scenario(whole, name="case", question="", where="case.toml")


@pytest.fixture
def num_walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many intervals between synchronisations planning has walked along, in its only entry."""
    count, next_one = [0], _IntervalCursor.next

    def counting(walk: _IntervalCursor) -> Any:
        count[0] += 1
        return next_one(walk)

    monkeypatch.setattr(_IntervalCursor, "next", counting)
    return count


@pytest.mark.parametrize(
    ("table", "key", "kind"),
    [
        (table, key, kind)
        for table, config in TABLES.items()
        for key, kind in numbers(config).items()
    ],
)
def test_a_number_beyond_all_meaning_is_refused_or_planned_with_little_work(
    table: str, key: str, kind: type, num_walked: list[int]
) -> None:
    refusals = []
    for value in (HUGE[kind], TINY[kind]):
        tables = {"strategy": {"groups": 2}}
        tables[table] = {**tables.get(table, {}), key: value}
        try:
            plan_scenario(parse(tables))
        except (ConfigError, InfeasiblePlan) as error:
            refusals.append(value)
            assert "\n" not in str(error) and (key in str(error) or "groups" in str(error))
    assert num_walked[0] <= 20_000
    if kind is int and key != "held_out":
        assert HUGE[int] in refusals


def test_planning_costs_the_same_whatever_the_epochs(num_walked: list[int]) -> None:
    work = []
    for epochs in (100, 1_000_000):
        num_walked[0] = 0
        document = plan_scenario(parse({"strategy": {"groups": 2}, "train": {"epochs": epochs}}))
        work.append(num_walked[0])
        assert document["predicted"]["epoch_s"] > 0
    assert work[0] == work[1] < 500


@pytest.mark.parametrize(
    "cluster",
    [
        {"boards": 10**9},
        {"boards": 2, "socs_per_board": 10**9},
        {"boards": [1, 10**9]},
        {"boards": MOST_SOCS + 1, "socs_per_board": 1},
    ],
)
def test_more_socs_than_a_rack_can_have_are_refused_before_a_board_is_made(
    cluster: dict[str, Any],
) -> None:
    refused(lambda: scenario_cluster(parse({"cluster": cluster})), MOST_SOCS, "boards")


def test_boards_in_tables_are_counted_together() -> None:
    boards = [{"socs": 2, "count": MOST_SOCS // 2}, {"socs": 1}]
    refused(lambda: parse({"cluster": {}, "board": boards}), "[[board]]", MOST_SOCS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("window", [[0.0, 1e15]]),
    ],
)
def test_sizes_of_a_split_training_are_refused(key: str, value: Any) -> None:
    strategy = {"name": "split-replay"}
    refused(lambda: parse({"strategy": strategy, "edgecloud": {key: value}}), f"{key} = {value}")


@pytest.mark.parametrize("key", ["round", "rounds"])
def test_rounds_of_events_are_bounded(key: str) -> None:
    event = {"kind": "preempt", "soc": 0, "round": 1, key: 10**15}
    refused(lambda: read_table(EventConfig, event, "x"), f"{key} = {10**15}")


def test_the_heat_of_more_days_or_rounds_than_are_followed_is_refused() -> None:
    for model, data, named in (("vgg11", "cifar10", "14 days"), ("lenet5", "digits", "20000")):
        tables = {"train": {"epochs": 100_000}, "strategy": {"groups": 2}, "thermal": {}}
        scenario = parse({**tables, "model": {"name": model}, "data": {"name": data}})
        refused(lambda: predicted_heat(scenario, scenario_cluster(scenario)), named)  # noqa: B023


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where commands run: a scenario, one with a cloud, an app and a token."""
    (tmp_path / "app").mkdir()
    for name, text in (
        ("case.toml", "[cluster]\nboards = [2]\n"),
        ("split.toml", "[cluster]\nboards = [1]\n[strategy]\nname = 'split-replay'\n"),
        (
            "app/pyproject.toml",
            "[tool.flwr.app.components]\nserverapp = 'a:b'\nclientapp = 'a:c'\n",
        ),
        ("cloud-token", "0123456789abcdef0123456789abcdef\n"),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("run case.toml --workers", -1),
        ("run case.toml --workers", 10**9),
        ("compare case.toml --workers", 10**9),
        ("run app --cluster case.toml --nodes", 0),
        ("run app --cluster case.toml --training-flops", "inf"),
        ("profile --threads", 10**9),
        ("profile --repeats", 10**9),
        ("profile --batch-size", 10**9),
        ("profile --serve", 70000),
        ("profile --serve", -1),
        ("cloud measure split.toml --repeats", 10**9),
        ("cloud measure split.toml --threads", 10**9),
        ("cloud serve split.toml --threads", 10**9),
    ],
)
def test_numbers_of_options_that_cannot_be_meant_are_one_line(
    socflower: Socflower, folder: Path, command: str, number: object
) -> None:
    is_mistake(socflower(command, number), command.rpartition(" ")[2])


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("heat --watch 1e300", "interval"),
        ("plan case.toml --groups 1000000000", "groups"),
        ("plan case.toml --set train.epochs=100000000", "[train] epochs = 100000000"),
    ],
)
def test_numbers_of_keys_that_cannot_be_meant_are_one_line(
    socflower: Socflower, folder: Path, command: str, named: str
) -> None:
    is_mistake(socflower(command), named)
