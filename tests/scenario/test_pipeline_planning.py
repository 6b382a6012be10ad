"""Scenarios of pipelines: planned and predicted, their claims checked, and refused where they would be run."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from socflower.cli.options import mistakes_name_file
from socflower.cli.pipeline_plan import print_pipeline_plan
from socflower.cluster.device_catalog import device_table, figure, toml_text
from socflower.errors import InfeasiblePlan, SocflowerError
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.planner import selection
from socflower.pipeline.planner.baselines import data_parallel
from socflower.pipeline.schedule.run import simulate_schedule
from socflower.scenario.expectations import check_plan
from socflower.scenario.pipeline_planning import (
    micro_batch_sizes,
    pipeline_problem,
    plan_of_pipeline,
)
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import from_document, load_scenario, to_document
from socflower.scenario.schema.pipeline import CLAIMED, PEERS
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.shipped import scenario_files
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import small

PLANNED = sorted((Path(__file__).parents[2] / "scenarios" / "planned").glob("*.toml"))
# The verdict between a hybrid and two dimensions is also in tests/pipeline/test_selection.py.
QUICK = ("pipeline_pays",)
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


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem)
        for path in PLANNED
    ],
)
def test_the_claims_of_each_planned_scenario_hold(path: Path) -> None:
    document, _ = plan_of_pipeline(load_scenario(path))
    assert document["expectations"] and all(claim["holds"] for claim in document["expectations"]), (
        document["verdict"]
    )
    lines = path.read_text().splitlines()
    assert any("?" in line for line in lines if line.startswith("#"))
    assert [line for line in lines if line.startswith("[")][-1] == "[expect]"


def test_the_four_scenarios_are_shipped_and_one_is_of_each_kind() -> None:
    names = {
        "data_parallelism_pays",
        "pipeline_pays",
        "hybrid_beats_two_dimensions",
        "one_device_pays",
    }
    assert {path.stem for path in PLANNED} == names <= set(scenario_files())


def test_the_document_has_stages_shares_memory_prediction_and_peers(tmp_path: Path) -> None:
    document, planned = plan_of_pipeline(scenario(tmp_path))
    assert document["kind"] == "pipeline" and document["num_devices"] == len(planned.plan.socs)
    for pipeline in document["pipelines"]:
        for stage in pipeline["stages"]:
            members = stage["devices"]
            assert sum(member["share"] for member in members) == pipeline["micro_batch_size"]
            assert all(member["memory_bytes"] <= member["budget_bytes"] for member in members)
    predicted = document["predicted"]
    assert predicted["epoch_s"] == pytest.approx(predicted["step_s"] * (4000 // 64))
    assert [row["name"] for row in document["peers"]] == [
        "single-device",
        "data-parallel",
        "pipeline-parallel",
        "2d",
        "local-sgd",
        "fedavg",
    ]
    assert document["architecture"] in document["verdict"]
    assert json.loads(json.dumps(document)) == document


def test_laxer_exchanges_and_int8_are_priced_and_marked_and_never_pay(tmp_path: Path) -> None:
    phones = BASE.replace("jetson-nano", "snapdragon-865")
    document, planned = plan_of_pipeline(scenario(tmp_path, text=phones))
    rows = {row["name"]: row for row in document["peers"]}
    assert {name for name, row in rows.items() if row["is_equal"]} == {*PEERS}
    assert rows.keys() == {*CLAIMED}
    assert {name: row["interval"] for name, row in rows.items() if row["interval"] > 1} == {
        "local-sgd": 8, "fedavg": 62, "local-sgd-int8": 8, "fedavg-int8": 62,
    }  # fmt: skip
    # Without an exchange at each update, a device alone bounds the time from below.
    problem, plan = planned.problem, data_parallel(planned.problem)
    own_s = simulate_schedule(problem, plan).step_s
    assert rows["fedavg"]["step_s"] < rows["local-sgd"]["step_s"] < own_s
    assert rows["fedavg-int8"]["step_s"] < rows["fedavg"]["step_s"]
    assert document["architecture"] in document["verdict"] and "fedavg" not in document["verdict"]
    assert any("fedavg-int8 is quickest" in note for note in document["notes"])
    claim = check_plan({"max_speedup_over_fedavg": 1.0, "min_speedup_over_fedavg": 0.0}, document)
    assert [each["observed"] for each in claim] == [rows["fedavg"]["over_ours"]] * 2


def test_a_pruned_plan_says_so_and_its_steps_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = plan_of_pipeline(scenario(tmp_path))
    assert whole["exact"] and not any("pruned" in note for note in whole["notes"])
    monkeypatch.setattr(selection, "WORK_LIMIT", 0.0)
    steps: list[tuple[str, int, int]] = []
    pruned, _ = plan_of_pipeline(scenario(tmp_path), on_step=lambda *step: steps.append(step))
    assert not pruned["exact"] and any("pruned" in note for note in pruned["notes"])
    assert [done for _, done, _ in steps] == list(range(14))
    assert {total for *_, total in steps} == {14}
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


@pytest.mark.slow
def test_a_2d_plan_prints_the_micro_batches_of_each_pipeline_and_of_all_and_why_the_closed_form_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = next(path for path in PLANNED if path.stem == "hybrid_beats_two_dimensions")
    two_d = load_scenario(path, ["strategy.name=2d", "expect={min_pipelines=2}"])
    document, planned = plan_of_pipeline(two_d)
    predicted = document["predicted"]
    assert isinstance(planned.plan, TwoDPlan) and predicted["formula_s"] > 1.2 * predicted["step_s"]
    # The closed form does not know K, which keeps some transfers from overlapping.
    assert predicted["duplex_s"] == pytest.approx(predicted["step_s"], rel=0.1)
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
    ("override", "named"),
    [
        ("strategy.groups=2", "groups"),
        ("precision.arithmetic='int8'", "arithmetic = 'int8'"),
        ("pipeline.micro_batch_sizes=[48]", "48"),
        ("pipeline.sample=[3, 32]", "sample = [3, 32]"),
        ("pipeline.sample=[3, 32, 32]", "num_samples"),
        ("pipeline.num_classes=3", "num_classes"),
        ("strategy.server_interval=2", "[strategy] server_interval"),
        ("pipeline.sample=[1000000]", "sample = [1000000]"),
        ("pipeline.sample=[3, 9999, 9999]", "sample = [3, 9999, 9999]"),
        ("model.name='bert-small'", "[tokens]"),
        ("edgecloud={}", "[edgecloud]"),
        ("expect.min_accurcy=0.5", "did you mean 'min_accuracy'"),
        ("pipeline.activation_bits=7", "activation_bits"),
        ("pipeline.backup_steps=-1", "backup_steps"),
        ("pipeline.int8_socs='all'", "int8_socs"),
        ("pipeline.int8_socs=[1, 0, 1]", "int8_socs = [1, 0, 1]"),
        ("pipeline={int8_socs='auto', cuts='operations'}", "'layers'"),
        ("cluster.soc_bytes_per_s=0", "soc_bytes_per_s"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, override: str, named: str
) -> None:
    refused(lambda: scenario(tmp_path, override), named)


def test_a_table_of_pipelines_is_for_pipelines(tmp_path: Path) -> None:
    text = BASE + "[pipeline]\ncuts = 'layers'\n"
    path = tmp_path / "ring.toml"
    path.write_text(text)
    refused(
        lambda: load_scenario(path, ["strategy.name='ring'"]), "[pipeline]", "'hybrid-pipeline'"
    )


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cluster.boards=1", "case [cluster]: one device, jetson-nano"),
        ("strategy.socs=1", "case [strategy] socs = 1: one device, jetson-nano"),
        ("strategy.socs=3", "socs = 3, but the cluster has 2"),
    ],
)
def test_a_pipeline_needs_two_devices_that_are_there(
    tmp_path: Path, override: str, named: str
) -> None:
    own = scenario(tmp_path, override)
    refused(lambda: plan_of_pipeline(own), named, error=SocflowerError)


TOKENS = ("model.name='bert-small'", "pipeline.sample=[8]", "pipeline.num_samples=99")


def test_devices_without_memory_have_no_plan(tmp_path: Path) -> None:
    memory = figure(0.1e9, "assumption: of this test")
    board = device_table("jetson-nano") | {"memory_bytes": memory}
    small = BASE.replace("jetson-nano", "small") + toml_text({"device": {"small": board}})
    own = scenario(tmp_path, *TOKENS, text=small)
    refused(lambda: plan_of_pipeline(own), "bert-small", error=InfeasiblePlan)


@pytest.mark.parametrize(
    ("model", "sample", "named"),
    [
        ("bogus", "[32]", "[model] name = 'bogus'"),
        ("vgg11", "[32]", "[pipeline] sample = [32]"),
        ("bert-small", "[600]", "512"),
        ("mobilenet-v2", "[3, 8, 8]", "16x16"),
    ],
)
def test_samples_that_a_model_does_not_take_name_file_and_key(
    tmp_path: Path, model: str, sample: str, named: str
) -> None:
    described = (f"pipeline.sample={sample}", "pipeline.num_samples=99")
    mistake_in_file(tmp_path, named, f"model.name='{model}'", *described)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cluster.device='bogus'", "device 'bogus' is unknown"),
        ("cluster.boards=1", "[cluster]"),
        ("model.name='bogus'", "[model] name = 'bogus'"),
    ],
)
def test_mistakes_that_only_planning_finds_name_file_and_key(
    tmp_path: Path, override: str, named: str
) -> None:
    mistake_in_file(tmp_path, named, override)


def mistake_in_file(folder: Path, named: str, *overrides: str) -> None:
    own = scenario(folder, *overrides)

    def plan() -> None:
        with mistakes_name_file("case", folder / "case.toml"):
            plan_of_pipeline(own)

    refused(plan, "case.toml", named)


def test_one_update_of_one_sample_is_counted_plainly(tmp_path: Path) -> None:
    work = plan_of_pipeline(scenario(tmp_path, "train.batch_size=1"))[0]["work"]
    assert work.endswith("10 epochs of 4000 updates of 1 sample")


def test_a_pipeline_without_data_is_planned_and_not_run(
    tmp_path: Path, socflower: Socflower
) -> None:
    refused(lambda: prepare(load_scenario(PIPELINE_PAYS)), "no data", "`socflower plan`")
    for command in ("run", "compare"):
        is_mistake(socflower(f"{command} {PIPELINE_PAYS}"), "no data")
    (tmp_path / "case.toml").write_text(BASE + "[expect]\nmin_devices = 3\n")
    planned = socflower("plan case.toml")
    assert planned.status == 1 and "FAILS" in planned.out and "pays here" in planned.out
    document = json.loads(socflower("plan case.toml --json --out plan").out)
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == document
    files = {path.name for path in (tmp_path / "plan").iterdir()}
    assert files == {"plan.json", "trace.json", "report.html"}
    for taken in ("case.toml", "case.toml/below"):
        is_mistake(socflower(f"plan case.toml --out {taken}"), f"--out {taken}")
    assert document["expectations"][0]["holds"] is False
    assert check_plan({"min_devices": 1, "max_stages": 2}, document)[0]["holds"] is True


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("strategy.compression='int8'", "[strategy] compression = 'int8'"),
        ("train.reduction='ring'", "[train] reduction = 'ring'"),
        ("data.partition='dirichlet'", "[data]"),
        ("pipeline.num_samples=3", "num_samples = 3"),
    ],
)
def test_what_a_plan_does_not_read_is_refused(override: str, named: str) -> None:
    refused(lambda: load_scenario(PIPELINE_PAYS, [override]), named)


IN_INT8 = BASE.replace("jetson-nano", "snapdragon-865") + "[pipeline]\nint8_socs = 'auto'\n"


@pytest.mark.slow
@pytest.mark.parametrize("text", [BASE, IN_INT8], ids=["fp32", "int8"])
def test_a_pipeline_runs_on_both_engines_with_equal_weights(tmp_path: Path, text: str) -> None:
    own = scenario(tmp_path, "train.epochs=1", "train.batch_size=128", text=text)
    here, there = (run_scenario(own, engine, num_workers=1) for engine in ("local", "simulation"))
    assert here["weights_sha256"] == there["weights_sha256"]
    assert here["virtual_s"] == there["virtual_s"] > 0
    assert here["plan"]["pipelines"][0]["stages"]
    if text == IN_INT8:
        assert "int8" in here["kernels"]
        assert any("snapdragon-865's npu" in note for note in here["notes"])


def test_a_plan_in_int8_says_so_and_takes_less_time_and_energy(tmp_path: Path) -> None:
    int8, planned = plan_of_pipeline(scenario(tmp_path, text=IN_INT8))
    fp32, _ = plan_of_pipeline(scenario(tmp_path, "pipeline.int8_socs=[]", text=IN_INT8))
    assert planned.problem.int8_socs == (0, 1)
    stages = [stage for pipeline in int8["pipelines"] for stage in pipeline["stages"]]
    processors = {member["processor"] for stage in stages for member in stage["devices"]}
    assert processors == {"npu"}
    assert any(note.startswith("stages compute in int8 on SoCs 0, 1") for note in int8["notes"])
    for key in ("step_s", "energy_j"):
        assert int8["predicted"][key] < fp32["predicted"][key]


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster.device='jetson-nano'"], "jetson-nano"),
        (["pipeline.int8_socs=[7]"], "SoC 7"),
        (["model.name='resnet8'"], "cuts = 'blocks'"),
        (TOKENS, "int64"),
    ],
)
def test_int8_stages_that_cannot_be_are_refused_in_one_line(
    tmp_path: Path, overrides: Sequence[str], named: str
) -> None:
    own = scenario(tmp_path, *overrides, text=IN_INT8)
    refused(lambda: plan_of_pipeline(own), named)


def test_residual_blocks_are_planned_in_int8_between_blocks(tmp_path: Path) -> None:
    own = scenario(tmp_path, "model.name='resnet8'", "pipeline.cuts='blocks'", text=IN_INT8)
    assert pipeline_problem(own)[0].int8_socs == (0, 1)


def test_shares_that_virtual_time_would_not_change_are_refused(
    tmp_path: Path, socflower: Socflower
) -> None:
    out = tmp_path / "out"
    command = "run pipeline_on_a_hot_board --set strategy.rebalance=shares --out"
    is_mistake(socflower(command, out), "rebalance = 'shares'", "'groups'")
    assert not out.exists()


# ------------------------------------------------------------------------------------------------ 2-D parallelism
GRID = BASE.replace("hybrid-pipeline", "2d").replace("socs_per_board = 1", "socs_per_board = 2")


def test_2d_takes_the_number_of_groups_or_that_of_the_least_time(tmp_path: Path) -> None:
    document, planned = plan_of_pipeline(scenario(tmp_path, text=GRID))
    given_two, _ = plan_of_pipeline(scenario(tmp_path, "strategy.groups=2", text=GRID))
    assert document["architecture"] == "2-D" and len(planned.plan.pipelines) == 2
    assert given_two["pipelines"] == document["pipelines"]
    assert "2d" not in [row["name"] for row in document["peers"]]
    equal = [row for row in document["peers"] if row["is_equal"]]
    best = min(equal, key=lambda row: row["step_s"])
    first = best["name"] if best["over_ours"] < 0.99 else "2-D"
    assert document["verdict"].startswith(f"{first} pays here: ")
    with pytest.raises(InfeasiblePlan, match="3 groups"):
        plan_of_pipeline(scenario(tmp_path, "strategy.groups=3", text=GRID))


def test_pipelines_read_a_number_of_groups_and_no_interval_only_with_2d(tmp_path: Path) -> None:
    refused(lambda: scenario(tmp_path, "strategy.groups=2"), "groups", "'hybrid-pipeline'")
    compared = {"strategies": ("2d",), "train": {"2d": {"groups": 2}}}
    own = small(boards=(2, 2)).replaced(compare=compared)
    assert own.under("2d").strategy.groups == 2 and small().under("2d").strategy.groups == "auto"
    delayed = "strategy.sync_interval_epochs=0.5"
    refused(lambda: scenario(tmp_path, delayed, text=GRID), "sync_interval_epochs", "'socflow'")
    assert (
        scenario(tmp_path, delayed, text=BASE).under("2d").strategy.sync_interval_epochs == "decay"
    )
    table = ("strategy.name='ring'", "pipeline.micro_batch_sizes=[8]")
    refused(lambda: scenario(tmp_path, *table, text=GRID), "[pipeline]", "'2d'")


@pytest.mark.slow
@pytest.mark.usefixtures("on_few_digits")
def test_pipelines_train_what_an_ordinary_scenario_trains_without_what_only_groups_read(
    tmp_path: Path,
) -> None:
    """F4: LeNet has no layer that depends on the batch, so that its weights are those of one SoC."""
    own = small(boards=(2, 2), leaders="ring", fusion="buckets", reshuffle=True, overlap_buckets=2)
    final = {}
    for name in ("2d", "hybrid-pipeline", "sgd"):
        result = run_scenario(own.under(name), num_workers=0, model_to=tmp_path / name)
        assert result["strategy"] == name and result["virtual_s"] > 0.0
        with np.load(tmp_path / name) as arrays:
            final[name] = dict(arrays)
    for name, array in final["sgd"].items():
        for other in ("2d", "hybrid-pipeline"):
            np.testing.assert_allclose(final[other][name], array, atol=1e-4)
