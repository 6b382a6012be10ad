import json
from pathlib import Path
from typing import Any

import pytest

from socflower.cli import main as cli
from socflower.errors import ConfigError
from socflower.scenario.planning import plan_split
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.split_measuring import measure_split, measured_costs
from socflower.scenario.split_setting import SplitSetting

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
up_bytes_per_s = 1e6
down_bytes_per_s = 2e6
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
        plan_split(load_scenario(path, [f"edgecloud.up_bytes_per_s={rate}"]))["predicted"][
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
def test_narrow_gradients_are_ours_alone(path: Path, strategy: str) -> None:
    fast = "edgecloud.up_bytes_per_s=1e8"

    def down_s(name: str, bits: int) -> list[float]:
        (edge,) = plan_split(
            load_scenario(path, [f"strategy.name={name}", f"edgecloud.gradient_bits={bits}", fast])
        )["edges"]
        return [row["down_s"] for row in edge["cuts"]]

    assert down_s(strategy, 8) == down_s(strategy, 32) == down_s("split-replay", 32)
    ours = zip(down_s("split-replay", 8), down_s("split-replay", 32), strict=True)
    assert all(narrow < wide for narrow, wide in ours)


def test_joint_dnn_is_planned_as_the_edge_alone_where_every_cut_is_slower() -> None:
    scenario = Path(__file__).parents[2] / "scenarios" / "split_against_edge.toml"
    (edge,) = plan_split(load_scenario(scenario, ["strategy.name=joint-dnn"]))["edges"]
    assert edge["deployment"]["text"] == "edge alone"
    assert edge["batch_s"] == edge["edge_only_s"] < min(row["batch_s"] for row in edge["cuts"])


def test_the_command_prints_the_document(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["socflower", "plan", str(path), *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        return capsys.readouterr().out

    assert json.loads(ran("--json")) == {**plan_split(load_scenario(path)), "heat": None}
    assert "edge alone" in ran()


def test_measured_costs_take_the_place_of_the_catalogues(path: Path, tmp_path: Path) -> None:
    scenario = load_scenario(path)
    program = SplitSetting(scenario).workload.program
    cloud, edge = tmp_path / "cloud.json", tmp_path / "costs.json"
    cloud.write_text(
        json.dumps(measure_split(scenario, program, side="cloud", cloud=None, repeats=1, threads=1))
    )
    edge.write_text(
        json.dumps(measure_split(scenario, program, side="edge", cloud=cloud, repeats=1, threads=1))
    )
    (costs,) = SplitSetting(load_scenario(path, [f"edgecloud.costs={edge}"])).costs
    assert [cut.cloud_s for cut in costs.cuts] == json.loads(cloud.read_text())["cloud_s"]
    path.write_text(
        f'{SPLIT}costs = "costs.json"\n'
    )  # beside the scenario, wherever the command runs
    assert SplitSetting(load_scenario(path)).costs == (costs,)
    assert costs.edge_only_s == json.loads(edge.read_text())["edge_only_s"]


def test_costs_of_something_else_are_refused_in_one_line(path: Path, tmp_path: Path) -> None:
    scenario = load_scenario(path)
    setting = SplitSetting(scenario)

    def refused(content: str, said: str) -> None:
        file = tmp_path / "costs.json"
        file.write_text(content)
        with pytest.raises(ConfigError, match=said) as error:
            measured_costs(file, setting.costs[0])
        assert "\n" not in str(error.value)

    document: dict[str, Any] = measure_split(
        scenario, setting.workload.program, side="edge", cloud=None, repeats=1, threads=1
    )
    refused("nonsense", "cannot be read")
    refused("[]", "no JSON object")
    refused("{}", "measure again")
    refused(json.dumps({**document, "batch_size": 9}), "batches of 9")
    with pytest.raises(ConfigError, match="--side middle: unknown"):
        measure_split(
            scenario, setting.workload.program, side="middle", cloud=None, repeats=1, threads=1
        )
    with pytest.raises(ConfigError, match="not what"):
        (tmp_path / "edge.json").write_text(json.dumps(document))
        measure_split(
            scenario,
            setting.workload.program,
            side="edge",
            cloud=tmp_path / "edge.json",
            repeats=1,
            threads=1,
        )
