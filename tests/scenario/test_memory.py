"""Every planner keeps to the memory of the devices, or says in one line what is missing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from socflower.cluster.device_catalog import device_table, figure, toml_text
from socflower.errors import InfeasiblePlan
from socflower.scenario.comparison import compare
from socflower.scenario.costs import model_profile
from socflower.scenario.planning import group_work, plan_scenario
from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_planning import plan_split
from socflower.strategies import warm_up
from socflower.strategies.settings import Costs, Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.strategies.warm_up import profile_group_count
from tests import one_line

pytestmark = pytest.mark.usefixtures("on_few_digits")
GROUPS = (
    '[cluster]\nboards = 4\nsocs_per_board = 1\ndevice = "small"\n[train]\nbatch_size = 32\nepochs = 1\n'
    "[strategy]\ngroups = 2\n"
)
SPLIT = (
    '[cluster]\nboards = 1\nsocs_per_board = 1\ndevice = "small"\n[model]\nname = "vgg-small"\n[train]\n'
    'batch_size = 32\nepochs = 1\n[strategy]\nname = "split-replay"\n[edgecloud]\nlink = "constant"\n'
    "bytes_per_s = [1e6, 2e6]\n"
)


def with_memory(
    tmp_path: Path, text: str, usable_bytes: float, overrides: Sequence[str] = ()
) -> Scenario:
    """Return a scenario whose devices have this memory for training."""
    memory = figure(
        2.0 * usable_bytes, "assumption: of this test"
    )  # of which half is for the system
    table = {**device_table("raspberry-pi-4b"), "memory_bytes": memory}
    path = tmp_path / "case.toml"
    path.write_text("# Does it fit?\n" + text + toml_text({"device": {"small": table}}))
    return load_scenario(path, overrides)


class Untrained(SoCFlow):
    """A strategy whose training is over at once."""

    def train_round(self, *_: Any, **__: Any) -> ArrayRecord:
        return ArrayRecord()


def refused(use: Callable[..., object], *arguments: object, **named: object) -> None:
    one_line.refused(lambda: use(*arguments, **named), "memory", "small", error=InfeasiblePlan)


def needed_by_groups(tmp_path: Path, *overrides: str) -> float:
    """Return the memory that the largest share takes, by the formula of the cost model."""
    scenario = with_memory(tmp_path, GROUPS, 4e9, overrides)
    share = max(group_work(scenario, scenario_cluster(scenario)).shares.values())
    copies = 1.0 if scenario.momentum else 0.0
    return model_profile(scenario).training_memory_bytes(share, copies)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.momentum=0.0",),
        ("train.batch_size=64",),
        ("strategy.groups=4",),
        ("strategy.name='ring'",),
        ("strategy.name='sgd'",),
    ],
)
def test_groups_fit_exactly_from_the_memory_of_their_largest_share_on(
    tmp_path: Path,
    overrides: tuple[str, ...],
) -> None:
    needed = needed_by_groups(tmp_path, *overrides)
    fits = with_memory(tmp_path, GROUPS, needed, overrides)
    plan_scenario(fits)
    prepare(fits)
    for short in (needed - 1.0, 1.0):
        refused(plan_scenario, with_memory(tmp_path, GROUPS, short, overrides))
        refused(prepare, with_memory(tmp_path, GROUPS, short, overrides))


def test_fedavg_trains_whole_batches_on_every_device(tmp_path: Path) -> None:
    needed = model_profile(with_memory(tmp_path, GROUPS, 4e9)).training_memory_bytes(32, 1.0)
    prepare(with_memory(tmp_path, GROUPS, needed, ["strategy.name='fedavg'"]))
    refused(prepare, with_memory(tmp_path, GROUPS, needed - 1.0, ["strategy.name='fedavg'"]))


def test_int8_takes_a_quarter(tmp_path: Path) -> None:
    needed = needed_by_groups(tmp_path, "train.momentum=0.0")
    int8 = ["precision.arithmetic='int8'", "precision.algorithm='niti'"]
    prepare(with_memory(tmp_path, GROUPS, needed / 4, int8))
    refused(prepare, with_memory(tmp_path, GROUPS, needed / 4 - 1.0, int8))


def test_auto_plans_as_many_groups_as_fit(tmp_path: Path) -> None:
    """Fewer groups have smaller shares: of 32 samples one group of four has 8 each, four groups 32 each."""
    two = needed_by_groups(tmp_path, "strategy.groups=2")
    auto = with_memory(tmp_path, GROUPS, two, ["strategy.groups='auto'"])
    plan = plan_scenario(auto)
    assert len(plan["groups"]) == 2 and plan["one_soc"] is None and plan["verdict"] is None
    assert any(
        note.startswith("one SoC alone cannot train: SoC 0: to train") for note in plan["notes"]
    )


def test_the_strategy_of_an_app_refuses_its_plan_and_auto_tries_what_fits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid: Any = None
    monkeypatch.setattr(warm_up, "GroupGrid", lambda inner: inner)
    scenario = with_memory(tmp_path, GROUPS, needed_by_groups(tmp_path, "train.momentum=0.0"))
    tried: list[int] = []

    def strategy(num_groups: int) -> SoCFlow:
        made = Untrained(
            cluster=scenario_cluster(scenario),
            groups=Grouping(num_groups=num_groups),
            costs=Costs(model_profile=model_profile(scenario)),
            schedule=TrainingSchedule(num_samples=64, batch_size=32, num_epochs=9),
        )
        tried.append(num_groups)
        return made

    refused(strategy, 4)
    tried.clear()
    found = profile_group_count(
        grid, ArrayRecord(), lambda arrays: 0.9, strategy, (1, 2, 4), rule="paper"
    )
    assert found.num_groups == 2 and set(found.accuracies) == {1, 2} and 4 not in tried
    refused(profile_group_count, grid, ArrayRecord(), lambda arrays: 0.9, strategy, (4,))


def test_the_cut_is_the_fastest_of_those_that_fit(tmp_path: Path) -> None:
    """For every budget, against all cuts tried one by one."""
    (edge,) = plan_split(with_memory(tmp_path, SPLIT, 4e9))["edges"]
    needs = sorted(row["edge_memory_bytes"] for row in edge["cuts"])
    assert len(set(needs)) > 3
    for budget in (*needs, needs[0] + 1.0, needs[-1] - 1.0):
        (planned,) = plan_split(with_memory(tmp_path, SPLIT, budget))["edges"]
        fitting = [row for row in edge["cuts"] if row["edge_memory_bytes"] <= budget]
        assert (
            planned["deployment"]["cut_name"]
            == min(fitting, key=lambda row: row["batch_s"])["name"]
        )
    for short in (needs[0] - 1.0, 1e6):
        refused(plan_split, with_memory(tmp_path, SPLIT, short))
        refused(prepare, with_memory(tmp_path, SPLIT, short))


@pytest.mark.parametrize(
    "strategy", ["split-replay", "pipelined", "split", "joint-dnn", "edge-only", "splitfed"]
)
def test_no_method_is_planned_a_half_that_does_not_fit(tmp_path: Path, strategy: str) -> None:
    ample = with_memory(tmp_path, SPLIT, 4e9, [f"strategy.name={strategy!r}"])
    (edge,) = plan_split(ample)["edges"]
    cut, needs = (
        edge["deployment"]["cut_name"],
        {row["name"]: row["edge_memory_bytes"] for row in edge["cuts"]},
    )
    needed = max(needs.values()) if cut is None else needs[cut]
    tight = with_memory(tmp_path, SPLIT, needed - 1.0, [f"strategy.name={strategy!r}"])
    try:
        (other,) = plan_split(tight)["edges"]
    except InfeasiblePlan as error:
        assert strategy != "split-replay" and "takes at least" in str(error)
    else:
        assert (
            other["deployment"]["cut_name"] is not None
            and needs[other["deployment"]["cut_name"]] < needed
        )


def test_a_given_cut_and_training_without_the_cloud_must_fit(tmp_path: Path) -> None:
    rows = plan_split(with_memory(tmp_path, SPLIT, 4e9))["edges"][0]["cuts"]
    last = rows[-1]
    memory = last["edge_memory_bytes"]
    plan_split(with_memory(tmp_path, SPLIT, memory, [f"edgecloud.cut={last['name']!r}"]))
    refused(
        plan_split, with_memory(tmp_path, SPLIT, memory - 1.0, [f"edgecloud.cut={last['name']!r}"])
    )
    # Over a slow link the edge had better train alone, which takes more than any half.
    alone = [
        "edgecloud.allow_edge_only=true",
        "edgecloud.bytes_per_s=[1e3, 1e3]",
    ]
    assert plan_split(with_memory(tmp_path, SPLIT, 4e9, alone))["cut"] is None
    assert plan_split(with_memory(tmp_path, SPLIT, memory, alone))["cut"] is not None


def test_a_comparison_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """Groups fit, the one SoC of `sgd` does not."""
    scenario = with_memory(tmp_path, GROUPS, needed_by_groups(tmp_path))
    refused(compare, scenario, ["socflow", "sgd"], tmp_path / "out", num_workers=0)
    assert not (tmp_path / "out").exists()
