"""Scenarios of pipelines: planned and predicted, their claims checked, and refused where they would be run."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from socflower.cli.options import mistakes_name_file
from socflower.cli.pipeline_plan import print_pipeline_plan
from socflower.cluster.device_catalog import device_table, figure, toml_text
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.planner import selection
from socflower.scenario.expectations import check_plan
from socflower.scenario.pipeline_planning import (
    micro_batch_sizes,
    pipeline_problem,
    plan_of_pipeline,
)
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import from_document, load_scenario, to_document
from socflower.scenario.shipped import scenario_files
from tests.command_line import Socflower

PLANNED = sorted((Path(__file__).parents[2] / "scenarios" / "planned").glob("*.toml"))
PIPELINE_PAYS = next(path for path in PLANNED if path.stem == "pipeline_pays")
BASE = """
[cluster]
boards = 2
socs_per_board = 1
device = "jetson-nano"
soc_bytes_per_s = 1e9
[model]
name = "lenet5"
[train]
batch_size = 64
[strategy]
name = "hybrid-pipeline"
"""


def scenario(tmp_path: Path, *overrides: str, text: str = BASE) -> Scenario:
    path = tmp_path / "case.toml"
    path.write_text(text)
    return load_scenario(path, overrides)


@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_the_claims_of_each_planned_scenario_hold(path: Path) -> None:
    document, _ = plan_of_pipeline(load_scenario(path))
    assert document["expectations"] and all(claim["holds"] for claim in document["expectations"]), (
        document["verdict"]
    )
    lines = path.read_text().splitlines()
    assert any("?" in line for line in lines if line.startswith("#"))
    assert [line for line in lines if line.startswith("[")][-1] == "[expect]"


def test_the_four_scenarios_are_shipped_and_one_is_of_each_kind() -> None:
    names = {"data_parallelism_pays", "pipeline_pays", "two_dimensions_pay", "one_device_pays"}
    assert {path.stem for path in PLANNED} == names <= set(scenario_files())


def test_the_document_has_stages_shares_memory_prediction_and_peers(tmp_path: Path) -> None:
    document, planned = plan_of_pipeline(scenario(tmp_path))
    assert document["kind"] == "pipeline" and document["num_devices"] == len(planned.plan.socs)
    for pipeline in document["pipelines"]:
        for stage in pipeline["stages"]:
            assert (
                sum(member["share"] for member in stage["devices"]) == pipeline["micro_batch_size"]
            )
            assert all(
                member["memory_bytes"] <= member["budget_bytes"] for member in stage["devices"]
            )
    predicted = document["predicted"]
    assert predicted["epoch_s"] == pytest.approx(predicted["step_s"] * (4000 // 64))
    assert [row["name"] for row in document["peers"]] == [
        "single-device",
        "data-parallel",
        "pipeline-parallel",
        "2d",
    ]
    assert document["architecture"] in document["verdict"]
    assert json.loads(json.dumps(document)) == document


def test_a_pruned_plan_says_so_and_its_steps_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = plan_of_pipeline(scenario(tmp_path))
    assert whole["exact"] and not any("pruned" in note for note in whole["notes"])
    monkeypatch.setattr(selection, "WORK_LIMIT", 0.0)
    steps: list[tuple[str, int, int]] = []
    pruned, _ = plan_of_pipeline(scenario(tmp_path), on_step=lambda *step: steps.append(step))
    assert not pruned["exact"] and any(
        note.startswith("the search was pruned") for note in pruned["notes"]
    )
    assert [done for _, done, _ in steps] == list(range(14)) and {total for *_, total in steps} == {
        14
    }
    assert steps[-1][0] == "comparing with 2d"


def test_micro_batches_are_parts_of_the_mini_batch(tmp_path: Path) -> None:
    assert list(micro_batch_sizes(scenario(tmp_path))) == [16, 8, 4, 2]
    assert list(micro_batch_sizes(scenario(tmp_path, "train.batch_size=7"))) == [7]
    own = scenario(tmp_path, "pipeline.micro_batch_sizes=[32]")
    problem, num_samples = pipeline_problem(own)
    assert (problem.micro_batch_size, problem.num_micro_batches, num_samples) == (32, 2, 4000)
    assert problem.optimizer_copies == 1.0
    assert pipeline_problem(scenario(tmp_path, "train.optimizer='adam'"))[0].optimizer_copies == 2.0


def test_a_scenario_reads_back_from_its_resolved_document(tmp_path: Path) -> None:
    own = scenario(tmp_path, "pipeline.micro_batch_sizes=[32]", "expect={min_devices=1}")
    assert from_document({**to_document(own), "name": own.name, "question": own.question}) == own
    assert own.compare.strategies == ("hybrid-pipeline", "ring", "fedavg", "sgd")
    assert own.under("ring").pipeline is None and own.under("hybrid-pipeline") == own


def test_a_2d_plan_prints_the_micro_batches_of_each_pipeline_and_of_all_and_why_the_closed_form_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document, planned = plan_of_pipeline(load_scenario(PLANNED[-1]))
    predicted = document["predicted"]
    assert isinstance(planned.plan, TwoDPlan) and predicted["formula_s"] > 1.2 * predicted["step_s"]
    assert predicted["duplex_s"] == pytest.approx(predicted["step_s"], rel=0.05)
    console = Console(width=250)
    print_pipeline_plan(console, document)
    said = capsys.readouterr().out
    assert (
        "2 pipelines side by side, 256 samples an update: 32 micro-batches of 4 + 4 = 8 samples"
        in said
    )
    assert "pipeline 0: 32 micro-batches of 4 samples" in said
    assert "one after the other, as in the paper, 10.1 s with both at once" in said
    assert "min_pipelines = 2, observed 2\n" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.groups=2", "groups is for groups"),
        ("precision.arithmetic='int8'", "trains in fp32"),
        ("pipeline.micro_batch_sizes=[48]", "48 does not divide"),
        ("pipeline.sample=[3, 32]", "of a square image"),
        ("pipeline.sample=[3, 32, 32]", "give both or none"),
        ("pipeline.num_classes=3", "is for a model with sample"),
        ("strategy.server_interval=2", r"\[strategy\] server_interval is for groups"),
        (
            "pipeline.sample=[1000000]",
            r"sample = \[1000000\]: is larger than anything that is trained",
        ),
        ("pipeline.sample=[3, 9999, 9999]", "is larger than anything"),
        ("model.name='bert-small'", r"take \[tokens\]"),
        ("strategy.name='ring'", None),
        ("edgecloud={}", r"\[edgecloud\]: .* leave it out"),
        ("expect.min_accurcy=0.5", "did you mean 'min_accuracy'"),
        ("pipeline.activation_bits=7", "activation_bits"),
        ("pipeline.backup_steps=-1", "backup_steps"),
        ("pipeline.int8_socs='all'", "int8_socs"),
        (
            "pipeline.int8_socs=[1, 0, 1]",
            r"int8_socs = \[1, 0, 1\] names a SoC twice; name each once",
        ),
        (
            "pipeline={int8_socs='auto', cuts='operations'}",
            "a stage may have nothing that int8 computes; use 'layers'",
        ),
        ("cluster.soc_bytes_per_s=0", "soc_bytes_per_s"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, override: str, message: str | None
) -> None:
    text = BASE + ("[pipeline]\ncuts = 'layers'\n" if message is None else "")
    with pytest.raises(
        ConfigError, match=message or r"\[pipeline\] is for name = 'hybrid-pipeline'"
    ) as caught:
        scenario(tmp_path, override, text=text)
    assert "\n" not in str(caught.value)


def test_one_device_and_no_memory_are_refused_in_one_line(tmp_path: Path) -> None:
    for override, where in (
        ("cluster.boards=1", r"\[cluster\]"),
        ("strategy.socs=1", r"\[strategy\] socs = 1"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^case {where}: one device, jetson-nano, .* needs 2 or more"
        ) as caught:
            plan_of_pipeline(scenario(tmp_path, override))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="socs = 3, but the cluster has 2"):
        plan_of_pipeline(scenario(tmp_path, "strategy.socs=3"))
    board = device_table("jetson-nano") | {
        "memory_bytes": figure(0.1e9, "assumption: of this test")
    }
    small = BASE.replace("jetson-nano", "small") + toml_text({"device": {"small": board}})
    with pytest.raises(InfeasiblePlan, match="no plan of bert-small fits") as nothing:
        plan_of_pipeline(
            scenario(
                tmp_path,
                "model.name='bert-small'",
                "pipeline.sample=[8]",
                "pipeline.num_samples=99",
                text=small,
            )
        )
    assert "\n" not in str(nothing.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.device='bogus'"], r"case\.toml: device 'bogus' is unknown; the catalogue has"),
        (["cluster.boards=1"], r"case\.toml \[cluster\]: one device"),
        (["model.name='bogus'"], r"case\.toml \[model\] name = 'bogus'"),
        (
            ["model.name='bogus'", "pipeline.sample=[32]", "pipeline.num_samples=99"],
            r"case\.toml \[model\] name = 'bogus' is unknown; pipelines know lenet5",
        ),
        (
            ["model.name='vgg11'", "pipeline.sample=[32]", "pipeline.num_samples=99"],
            r"case\.toml \[pipeline\] sample = \[32\]: is of tokens, which bert-small and gpt-small take",
        ),
        (
            ["model.name='bert-small'", "pipeline.sample=[600]", "pipeline.num_samples=99"],
            r"case\.toml \[pipeline\] sample = \[600\]: model bert-small: takes sequences of up to 512 tokens",
        ),
        (
            ["model.name='mobilenet-v2'", "pipeline.sample=[3, 8, 8]", "pipeline.num_samples=99"],
            r"case\.toml \[pipeline\] sample = \[3, 8, 8\]: model mobilenet-v2: takes images of 16x16",
        ),
    ],
)
def test_mistakes_that_only_planning_finds_name_file_and_key(
    tmp_path: Path,
    overrides: list[str],
    message: str,
) -> None:
    own = scenario(tmp_path, *overrides)
    with (
        pytest.raises(ConfigError, match=message) as caught,
        mistakes_name_file("case", tmp_path / "case.toml"),
    ):
        plan_of_pipeline(own)
    assert "\n" not in str(caught.value)


def test_one_update_of_one_sample_is_counted_plainly(tmp_path: Path) -> None:
    work = plan_of_pipeline(scenario(tmp_path, "train.batch_size=1"))[0]["work"]
    assert work.endswith("10 epochs of 4000 updates of 1 sample")


def test_a_pipeline_without_data_is_planned_and_not_run(
    tmp_path: Path, socflower: Socflower
) -> None:
    with pytest.raises(
        ConfigError, match="no data to train on; give \\[data\\] instead, or use `socflower plan`"
    ):
        prepare(load_scenario(PIPELINE_PAYS))
    (tmp_path / "case.toml").write_text(BASE + "[expect]\nmin_devices = 3\n")
    for command in ("run", "compare"):
        ran = socflower(command, str(PIPELINE_PAYS))
        assert ran.status == 2 and "no data" in ran.err and len(ran.err.strip().splitlines()) == 1
    planned = socflower("plan", "case.toml")
    assert planned.status == 1 and "FAILS" in planned.out and "pays here" in planned.out
    document = json.loads(socflower("plan", "case.toml", "--json", "--out", "plan").out)
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == document
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {
        "plan.json",
        "trace.json",
        "report.html",
    }
    assert document["expectations"][0]["holds"] is False
    assert check_plan({"min_devices": 1, "max_stages": 2}, document)[0]["holds"] is True


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "ring.compression='int8'",
            r"\[ring\] compression = 'int8': .*'hybrid-pipeline'.* sums gradients",
        ),
        ("train.reduction='ring'", r"\[train\] reduction = 'ring': .* does not read it"),
        (
            "data.partition='dirichlet'",
            r"\[data\]: \[pipeline\] sample = .* leave one of the two out",
        ),
        ("pipeline.num_samples=3", r"num_samples = 3 is less than \[train\] batch_size"),
    ],
)
def test_what_a_plan_does_not_read_is_refused(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_scenario(PIPELINE_PAYS, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_pipeline_runs_on_both_engines_with_equal_weights(tmp_path: Path) -> None:
    own = scenario(tmp_path, "train.epochs=1", "train.batch_size=128")
    results = [run_scenario(own, engine, num_workers=1) for engine in ("local", "simulation")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["virtual_s"] == results[1]["virtual_s"] > 0
    assert results[0]["plan"]["pipelines"][0]["stages"]


IN_INT8 = BASE.replace("jetson-nano", "snapdragon-865") + "[pipeline]\nint8_socs = 'auto'\n"


def test_a_plan_in_int8_says_so_and_takes_less_time_and_energy(tmp_path: Path) -> None:
    int8, planned = plan_of_pipeline(scenario(tmp_path, text=IN_INT8))
    fp32, _ = plan_of_pipeline(scenario(tmp_path, "pipeline.int8_socs=[]", text=IN_INT8))
    assert planned.problem.int8_socs == (0, 1)
    assert {
        member["processor"]
        for pipeline in int8["pipelines"]
        for stage in pipeline["stages"]
        for member in stage["devices"]
    } == {"npu"}
    assert any(note.startswith("stages compute in int8 on SoCs 0, 1") for note in int8["notes"])
    for key in ("step_s", "energy_j"):
        assert int8["predicted"][key] < fp32["predicted"][key]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.device='jetson-nano'"],
            "int8_socs = 'auto', and no device has an int8 processor among jetson-nano",
        ),
        (["pipeline.int8_socs=[7]"], "int8_socs has SoC 7, which takes no part"),
        (["model.name='resnet8'"], "tensors go .*use cuts = 'blocks'"),
        (
            ["model.name='bert-small'", "pipeline.sample=[8]", "pipeline.num_samples=99"],
            "int64 goes into layer 0",
        ),
    ],
)
def test_int8_stages_that_cannot_be_are_refused_in_one_line(
    tmp_path: Path,
    overrides: list[str],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_of_pipeline(scenario(tmp_path, *overrides, text=IN_INT8))
    assert "\n" not in str(caught.value)


def test_residual_blocks_are_planned_in_int8_between_blocks(tmp_path: Path) -> None:
    own = scenario(tmp_path, "model.name='resnet8'", "pipeline.cuts='blocks'", text=IN_INT8)
    assert pipeline_problem(own)[0].int8_socs == (0, 1)


@pytest.mark.slow
def test_a_pipeline_in_int8_runs_on_both_engines_with_equal_weights(tmp_path: Path) -> None:
    own = scenario(tmp_path, "train.epochs=1", "train.batch_size=128", text=IN_INT8)
    results = [run_scenario(own, engine, num_workers=1) for engine in ("local", "simulation")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["virtual_s"] == results[1]["virtual_s"] > 0
    assert "int8" in results[0]["kernels"] and any(
        "snapdragon-865's npu" in note for note in results[0]["notes"]
    )


def test_shares_that_virtual_time_would_not_change_are_refused(
    tmp_path: Path, socflower: Socflower
) -> None:
    out = tmp_path / "out"
    ran = socflower(
        "run", "pipeline_on_a_hot_board", "--set", "strategy.rebalance=shares", "--out", str(out)
    )
    assert ran.status == 2 and not out.exists()
    assert "rebalance = 'shares': in virtual time" in ran.err and "use 'groups'" in ran.err
