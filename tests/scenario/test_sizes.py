"""Sizes that cannot be meant are refused at once, or cost nothing: no number in a file makes planning long."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from socflower.cluster.cluster_file import MOST_SOCS
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.field_rules import keys_of
from socflower.hierarchy.delayed_sync import _IntervalCursor
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
from socflower.scenario.schema.split import EdgeCloudConfig
from socflower.toml_file import read_table
from tests.command_line import Socflower

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
    return parse_scenario(
        {"cluster": {"boards": 2, "socs_per_board": 2}, **document},
        name="case",
        question="",
        where="case.toml",
    )


@pytest.mark.parametrize(
    ("table", "key", "kind"),
    [
        (table, key, kind)
        for table, config in TABLES.items()
        for key, kind in numbers(config).items()
    ],
)
def test_a_number_beyond_all_meaning_is_refused_or_planned_with_little_work(
    table: str,
    key: str,
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work is counted in intervals between synchronisations that planning walks along."""
    num_walked, next_one = [0], _IntervalCursor.next

    def counting(walk: _IntervalCursor) -> Any:
        num_walked[0] += 1
        return next_one(walk)

    monkeypatch.setattr(_IntervalCursor, "next", counting)
    refused = []
    for value in (HUGE[kind], TINY[kind]):
        try:
            plan_scenario(
                parse(
                    {
                        "strategy": {"groups": 2},
                        table: {key: value}
                        | ({"groups": 2} if table == "strategy" and key != "groups" else {}),
                    }
                )
            )
        except (ConfigError, InfeasiblePlan) as error:
            refused.append(value)
            assert "\n" not in str(error) and (key in str(error) or "groups" in str(error))
    assert num_walked[0] <= 20_000
    if kind is int and key not in ("held_out",):
        assert HUGE[int] in refused


def test_planning_costs_the_same_whatever_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    num_walked, next_one = [0], _IntervalCursor.next

    def counting(walk: _IntervalCursor) -> Any:
        num_walked[0] += 1
        return next_one(walk)

    monkeypatch.setattr(_IntervalCursor, "next", counting)
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
    with pytest.raises(
        ConfigError, match=f"SoCs, of at most {MOST_SOCS} in a cluster; lower boards"
    ):
        scenario_cluster(parse({"cluster": cluster}))


def test_boards_in_tables_are_counted_together() -> None:
    with pytest.raises(ConfigError, match=rf"\[\[board\]\] 2: .* of at most {MOST_SOCS}"):
        scenario_cluster(
            parse({"cluster": {}, "board": [{"socs": 2, "count": MOST_SOCS // 2}, {"socs": 1}]})
        )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"round_epochs": 1e-300}, "round_epochs = 1e-300 .* rounds"),
        ({"window": [[0.0, 1e15]]}, "window = .* 0 to"),
        ({"trace_seed": -1}, "trace_seed = -1"),
        ({"trace_seed": 10**15}, "trace_seed"),
    ],
)
def test_sizes_of_a_split_training_are_refused(table: dict[str, Any], says: str) -> None:
    assert set(table) <= set(keys_of(EdgeCloudConfig))
    with pytest.raises(ConfigError, match=says):
        parse({"strategy": {"name": "split-replay"}, "edgecloud": table})


def test_rounds_of_events_are_bounded() -> None:
    for key in ("round", "rounds"):
        with pytest.raises(
            ConfigError,
            match=rf"{key} = 1000000000000000 must be a whole number above 0 and at most",
        ):
            read_table(EventConfig, {"kind": "preempt", "soc": 0, "round": 1, key: 10**15}, "x")


def test_the_heat_of_more_days_or_rounds_than_are_followed_is_refused() -> None:
    for model, epochs, says in (
        ("vgg11", 100_000, r"followed for 14 days, and this training takes \d+ d"),
        ("lenet5", 100_000, r"round by round, and these are \d+ rounds, of at most 20000"),
    ):
        scenario = parse(
            {
                "train": {"epochs": epochs},
                "strategy": {"groups": 2},
                "thermal": {},
                "model": {"name": model},
                "data": {"name": "cifar10" if model == "vgg11" else "digits"},
            }
        )
        with pytest.raises(ConfigError, match=says):
            predicted_heat(scenario, scenario_cluster(scenario))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("run", "case.toml", "--workers", -1), "--workers"),
        (("run", "case.toml", "--workers", 10**9), "--workers"),
        (("compare", "case.toml", "--workers", 10**9), "--workers"),
        (("run", "app", "--cluster", "case.toml", "--nodes", 0), "--nodes"),
        (("run", "app", "--cluster", "case.toml", "--training-flops", "inf"), "--training-flops"),
        (("profile", "--threads", 10**9), "--threads"),
        (("profile", "--repeats", 10**9), "--repeats"),
        (("profile", "--batch-size", 10**9), "--batch-size"),
        (("profile", "--serve", 70000), "--serve"),
        (("profile", "--serve", -1), "--serve"),
        (("heat", "--watch", "1e300"), "interval"),
        (("cloud", "measure", "split.toml", "--repeats", 10**9), "--repeats"),
        (("cloud", "measure", "split.toml", "--threads", 10**9), "--threads"),
        (("cloud", "serve", "split.toml", "--threads", 10**9), "--threads"),
        (("plan", "case.toml", "--groups", 10**9), "groups"),
        (
            ("plan", "case.toml", "--set", "train.epochs=100000000"),
            "[train] epochs = 100000000 must be a whole number",
        ),
    ],
)
def test_numbers_of_options_that_cannot_be_meant_are_one_line(
    socflower: Socflower,
    tmp_path: Path,
    arguments: tuple[object, ...],
    option: str,
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    (tmp_path / "split.toml").write_text(
        "[cluster]\nboards = [1]\n[strategy]\nname = 'split-replay'\n"
    )
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nserverapp = 'a:b'\nclientapp = 'a:c'\n"
    )
    (tmp_path / "cloud-token").write_text("0123456789abcdef0123456789abcdef\n")
    ran = socflower(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1 and option in ran.err, ran.err
