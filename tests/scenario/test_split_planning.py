import json
from pathlib import Path
from typing import Any

import pytest

from socflower.scenario.schema.file import load_scenario
from socflower.scenario.split_measuring import measure_split, measured_costs
from socflower.scenario.split_planning import plan_split
from socflower.scenario.split_setting import SplitSetting
from tests.command_line import Socflower
from tests.one_line import refused

SPLIT = """# Does it pay?
schema = 1
[cluster]
boards = 1
socs_per_board = 1
device = "raspberry-pi-4b"
[model]
name = "lenet5"
[train]
batch_size = 8
[strategy]
name = "split-replay"
[edgecloud]
link = "constant"
bytes_per_s = [1e6, 2e6]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "split.toml"
    file.write_text(SPLIT)
    return file


def test_the_plan_is_the_fastest_of_its_own_table(path: Path) -> None:
    plan = plan_split(load_scenario(path))
    (edge,) = plan["edges"]
    assert edge["batch_s"] == min(row["batch_s"] for row in edge["cuts"])
    assert plan["cut"] == min(edge["cuts"], key=lambda row: row["batch_s"])["name"]
    # The time of an epoch is that of its batches, but for filling the pipeline once.
    assert edge["epoch_s"] == pytest.approx(500 * edge["batch_s"], rel=0.02)


def test_a_faster_link_never_makes_the_plan_slower(path: Path) -> None:
    batch_s = [
        plan_split(load_scenario(path, [f"edgecloud.bytes_per_s=[{rate}, 2e6]"]))["predicted"][
            "batch_s"
        ]
        for rate in (1e4, 1e5, 1e6, 1e7, 1e8)
    ]
    assert batch_s == sorted(batch_s, reverse=True)
    assert batch_s[0] > batch_s[-1]


@pytest.mark.parametrize("strategy", ["pipelined", "joint-dnn", "split", "edge-only"])
def test_every_baseline_has_a_plan(path: Path, strategy: str) -> None:
    """At 8 Mbit/s the edge alone trains LeNet fastest; JointDNN may always choose that."""
    (edge,) = plan_split(load_scenario(path, [f"strategy.name={strategy}"]))["edges"]
    assert edge["deployment"]["window"] == (5 if strategy == "pipelined" else 0)
    assert (edge["deployment"]["cut"] is None) == (strategy in ("edge-only", "joint-dnn"))
    assert edge["batch_s"] > 0.0
    allowing = load_scenario(path, [f"strategy.name={strategy}", "edgecloud.allow_edge_only=true"])
    (allowed,) = plan_split(allowing)["edges"]
    assert (allowed["deployment"]["cut"] is None) == (strategy != "split")


@pytest.mark.parametrize("strategy", ["pipelined", "joint-dnn", "split", "splitfed"])
def test_every_strategy_has_the_codec_unless_it_is_ours_alone(path: Path, strategy: str) -> None:
    fast = "edgecloud.bytes_per_s=[1e8, 2e6]"

    def sent_s(name: str, bits: int, coded: str = "all") -> list[tuple[float, float]]:
        codec = [f"edgecloud.{key}={bits}" for key in ("gradient_bits", "bits")]
        codec[1] = f"edgecloud.bits=[{bits}]"
        settings = [f"strategy.name={name}", *codec, f"edgecloud.codec_for={coded}", fast]
        (edge,) = plan_split(load_scenario(path, settings))["edges"]
        return [(row["up_s"], row["down_s"]) for row in edge["cuts"]]

    wide = sent_s("split-replay", 32)
    assert sent_s(strategy, 32) == sent_s(strategy, 8, "ours") == wide
    if strategy != "joint-dnn":
        assert sent_s(strategy, 8) == sent_s("split-replay", 8)
    narrow = zip(sent_s("split-replay", 8, "ours"), wide, strict=True)
    assert all(one[way] < other[way] for one, other in narrow for way in (0, 1))


def test_a_plan_says_what_each_technique_adds(path: Path) -> None:
    fast = ["edgecloud.bytes_per_s=[1e8, 2e6]", "edgecloud.gradient_bits=8"]
    (edge,) = plan_split(load_scenario(path, fast))["edges"]
    gains = edge["gains"]
    assert gains["epoch_s"] < gains["joint_dnn_epoch_s"]
    assert [each["name"] for each in gains["techniques"]] == ["window", "features", "gradients"]
    # The link down is the slow one.
    assert gains["techniques"][2]["last"] > gains["techniques"][1]["last"]
    (peer,) = plan_split(load_scenario(path, ["strategy.name=joint-dnn"]))["edges"]
    assert peer["gains"] == {}


def test_joint_dnn_is_planned_as_the_edge_alone_where_every_cut_is_slower() -> None:
    scenario = Path(__file__).parents[2] / "scenarios" / "split_against_edge.toml"
    settings = ["strategy.name=joint-dnn", "edgecloud.codec_for=ours"]
    (edge,) = plan_split(load_scenario(scenario, settings))["edges"]
    assert edge["deployment"]["text"] == "edge alone"
    assert edge["batch_s"] == edge["edge_only_s"] < min(row["batch_s"] for row in edge["cuts"])


def test_the_command_prints_the_document(path: Path, socflower: Socflower) -> None:
    document = json.loads(socflower("plan split.toml --json").out)
    assert document == {**plan_split(load_scenario(path)), "heat": None}
    assert "edge alone" in socflower("plan split.toml").out


def test_measured_costs_take_the_place_of_the_catalogues(path: Path, tmp_path: Path) -> None:
    scenario = load_scenario(path)
    program = SplitSetting(scenario).workload.program
    cloud, edge = tmp_path / "cloud.json", tmp_path / "costs.json"
    for side, file, other in (("cloud", cloud, None), ("edge", edge, cloud)):
        found = measure_split(scenario, program, side=side, cloud=other, repeats=1, threads=1)
        file.write_text(json.dumps(found))
    (costs,) = SplitSetting(load_scenario(path, [f"edgecloud.costs={edge}"])).costs
    assert [cut.cloud_s for cut in costs.cuts] == json.loads(cloud.read_text())["cloud_s"]
    assert costs.edge_only_s == json.loads(edge.read_text())["edge_only_s"]
    # A path is relative to the scenario, wherever the command runs.
    path.write_text(f'{SPLIT}costs = "costs.json"\n')
    assert SplitSetting(load_scenario(path)).costs == (costs,)


def test_costs_of_something_else_are_refused_in_one_line(path: Path, tmp_path: Path) -> None:
    scenario, file = load_scenario(path), tmp_path / "costs.json"
    setting = SplitSetting(scenario)

    def measured(side: str, cloud: Path | None = None) -> dict[str, Any]:
        program = setting.workload.program
        return measure_split(scenario, program, side=side, cloud=cloud, repeats=1, threads=1)

    document = measured("edge")
    for content, named in (
        ("nonsense", "cannot be read"),
        ("[]", "JSON"),
        ("{}", "measure again"),
        (json.dumps({**document, "batch_size": 9}), "9"),
    ):
        file.write_text(content)
        refused(lambda: measured_costs(file, setting.costs[0]), named)
    refused(lambda: measured("middle"), "--side middle")
    (tmp_path / "edge.json").write_text(json.dumps(document))
    refused(lambda: measured("edge", tmp_path / "edge.json"), "edge.json")
