"""The command line: exit statuses, one line for a mistake, one document for programs."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from socflower.scenario import choices
from socflower.workloads.models.onnx_file import onnx_model
from socflower.workloads.weights_file import read_weights
from tests.command_line import Ran, Socflower, is_mistake

pytestmark = pytest.mark.usefixtures("on_few_digits")
ROOT = Path(__file__).parents[2]

SCENARIO = """\
# What does it print?
[cluster]
boards = [2, 2]
[train]
epochs = 1
batch_size = 32
learning_rate = 0.05
[strategy]
groups = 2
sync_interval_epochs = 1
[expect]
min_accuracy = 0.5
"""


FILES = {"result.json", "trace.json", "report.html"}


@pytest.fixture(autouse=True)
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "case.toml"
    path.write_text(SCENARIO)
    return path


def has_failed(ran: Ran, *says: str) -> None:
    """Training that failed has one line too, and a status that tells it from a mistake."""
    is_mistake(ran, *says, status=1)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def document_of(ran: Ran) -> Any:
    assert (ran.status, ran.err) == (0, "")
    return json.loads(ran.out)


def test_a_run_whose_claims_hold_ends_with_0(socflower: Socflower, tmp_path: Path) -> None:
    ran = socflower("run case.toml --workers 0")
    assert ran.status == 0
    assert "What does it print?" in ran.out
    assert "holds" in ran.out and "FAILS" not in ran.out
    assert names_in(tmp_path / "out" / "case") == FILES


def test_a_claim_that_fails_ends_with_1_and_still_writes_the_result(
    socflower: Socflower, tmp_path: Path
) -> None:
    ran = socflower("run case.toml --workers 0 --out here --set expect.min_accuracy=0.9999 --json")
    assert (ran.status, ran.err) == (1, "")
    document = json.loads(ran.out)
    assert document == json.loads((tmp_path / "here" / "result.json").read_text())
    assert [claim["holds"] for claim in document["expectations"]] == [False]


def test_compare_prints_a_table_and_resumes(socflower: Socflower, tmp_path: Path) -> None:
    command = "compare case.toml --strategies socflow,sgd --workers 0 --out both"
    ran = socflower(command)
    assert ran.status == 0
    lines = ran.out.splitlines()
    for name in ("socflow", "sgd"):
        assert any(name in line and "%" in line for line in lines)
    assert "an epoch, messages buckets: socflow" in ran.out
    written = (tmp_path / "both" / "sgd" / "result.json").stat().st_mtime_ns
    again = socflower(f"{command} --json")
    assert again.status == 0
    document = json.loads(again.out)
    assert [row["strategy"] for row in document["rows"]] == ["socflow", "sgd"]
    of_groups, alone = (row["epoch_s"] for row in document["fusions"])
    assert of_groups["buckets"] < of_groups["per-tensor"]
    assert alone["buckets"] == alone["per-tensor"]
    assert (tmp_path / "both" / "sgd" / "result.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--set strategy.groups=9", "4 SoCs"),
        ("--set strategy.socs=9", "4 SoCs"),
        ("--set train.epoch=3", "did you mean 'epochs'?"),
        ("--set cluster.bords=3", "'boards'"),
        ("--set data.name=minst", "'mnist'"),
        ("--set model.name=lenet", "lenet5"),
        ("--set train.epochs", "--set train.epochs"),
        ("--set event=[{kind='nan',soc=4,round=1}]", "soc = 4"),
        ("--engine warp", "local, simulation"),
        ("--out case.toml", "--out case.toml"),
        ("--out case.toml/below", "--out case.toml/below"),
    ],
)
def test_a_mistake_is_one_line_and_ends_with_2(
    options: str, named: str, socflower: Socflower, tmp_path: Path
) -> None:
    is_mistake(socflower(f"run case.toml --workers 0 --json {options}"), named)
    assert names_in(tmp_path) == {"case.toml"}


@pytest.mark.parametrize("command", ["run", "compare", "plan"])
def test_a_file_that_is_not_there_is_one_line(command: str, socflower: Socflower) -> None:
    is_mistake(socflower(f"{command} no.toml"), "no.toml", "No such file")


def test_data_that_are_nowhere_are_one_line_with_where_they_were_sought(
    socflower: Socflower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOCFLOWER_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if the hub reader were not installed
    ran = socflower("run case.toml --set data.name=mnist")
    is_mistake(ran, "nowhere/mnist/train.parquet", "SOCFLOWER_DATA")


def test_markup_in_a_mistake_is_printed_as_it_stands(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "[bold]x[red].toml").write_text("[train]\nepochs = '[blue]'")
    ran = socflower("run [bold]x[red].toml")
    is_mistake(ran, "[bold]x[red].toml", "[train] epochs = '[blue]'")


def test_a_client_that_raises_is_one_line(socflower: Socflower, tmp_path: Path) -> None:
    ran = socflower("run case.toml --workers 0 --json --set event=[{kind='raise',soc=1,round=1}]")
    has_failed(ran, "group 0, SoC 0", "fault on purpose")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------- plan
def test_a_plan_is_one_document(socflower: Socflower) -> None:
    document = document_of(socflower("plan case.toml --json"))
    assert document["schema"] == 1
    for group in document["groups"]:
        assert set(group) >= {"id", "members", "leader", "boards", "split"}
    assert [group["members"] for group in document["groups"]] == [[0, 1], [2, 3]]
    assert document["contention"] == 0
    assert sorted(ids for group in document["communication_groups"] for ids in group) == [0, 1]
    predicted = document["predicted"]
    for key in ("epoch_s", "epoch_energy_j", "sync_s"):
        assert predicted[key] > 0.0
    for way in ("step", "step_with_turns", "step_without_turns"):
        assert predicted[f"{way}_s"] > 0.0


def test_a_plan_prices_messages_both_ways_and_its_option_says_which_counts(
    socflower: Socflower,
) -> None:
    single, buckets = (
        document_of(socflower(f"plan case.toml --fusion {fusion} --json"))["predicted"]
        for fusion in ("per-tensor", "buckets")
    )
    assert (single["fusion"], buckets["fusion"]) == ("per-tensor", "buckets")
    assert single["fusions"] == buckets["fusions"]
    for predicted in (single, buckets):
        own = predicted["fusions"][predicted["fusion"]]
        assert {key: predicted[key] for key in ("step_s", "sync_s")}.items() <= own.items()
    assert buckets["epoch_s"] < single["epoch_s"]
    is_mistake(socflower("plan case.toml --fusion none"), "'none'", "per-tensor, buckets")


def test_the_price_of_a_training_is_that_of_its_joules_and_printed_too(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "pair.toml").write_text("[cluster]\nboards = [2]\n[strategy]\ngroups = 1\n")
    command = "plan pair.toml --price-per-kwh 0.3"
    rows = document_of(socflower(f"{command} --json"))["choices"]
    assert rows
    for row in rows:
        assert row["price"] == pytest.approx(row["training_energy_j"] / 3.6e6 * 0.3)
    assert "price" in socflower(command).out and "price" not in socflower("plan pair.toml").out


@pytest.mark.parametrize(
    ("groups", "fusion", "uplink_turns", "faster"),
    [
        pytest.param(8, "per-tensor", False, "without_turns", marks=pytest.mark.slow),
        pytest.param(8, "buckets", True, "with_turns", marks=pytest.mark.slow),
        (20, "buckets", True, "with_turns"),
    ],
)
def test_a_plan_takes_turns_only_where_that_is_predicted_to_be_faster(
    socflower: Socflower,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: int,
    fusion: str,
    uplink_turns: bool,
    faster: str,
) -> None:
    """The two cases of F7, and its 8 groups with messages in buckets, which take turns like its 20."""
    # The other choices take ten times as long to plan; tests/scenario/test_choices.py has them.
    monkeypatch.setattr(choices, "with_choices", lambda scenario, cluster, planned: planned)
    (tmp_path / "rack.toml").write_text(
        "[cluster]\nboards = 12\nsocs_per_board = 5\n[data]\nname = 'cifar10'\n[train]\nepochs = 2\n"
        f"batch_size = 64\n[model]\nname = 'vgg11'\n[strategy]\ngroups = {groups}\n"
    )
    command = f"plan rack.toml --fusion {fusion}"
    ways = [
        document_of(socflower(f"{command} --json --set strategy.uplink_turns={asked}"))
        for asked in ("auto", "true", "false")
    ]
    steps = [document["predicted"] for document in ways]
    chosen, (with_s, without_s) = steps[0], [one["step_s"] for one in steps[1:]]
    assert (chosen["step_with_turns_s"], chosen["step_without_turns_s"]) == (with_s, without_s)
    assert chosen["step_s"] == min(with_s, without_s) == chosen[f"step_{faster}_s"]
    assert chosen["epoch_s"] == min(one["epoch_s"] for one in steps)
    assert [(one["uplink_turns"], one["uplink_turns_by"]) for one in ways] == [
        (uplink_turns, "predicted"),
        (True, "asked"),
        (False, "asked"),
    ]
    turns, free = "groups taking turns; running freely", "groups running freely; taking turns"
    assert (turns if uplink_turns else free) in socflower(command).out


def test_a_plan_is_drawn_for_people(socflower: Socflower) -> None:
    ran = socflower("plan case.toml --groups 1")
    assert ran.status == 0
    assert "board" in ran.out and "1 group, split over boards: [0]" in ran.out


def test_a_cluster_file_can_be_planned(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[cluster]\nboards = 3\nsocs_per_board = 2\n")
    document = document_of(socflower("plan cluster.toml --json"))
    assert len(document["groups"]) == 3
    assert "groups = 'auto'" in document["notes"][0]


def test_plans_that_cannot_be_are_one_line(socflower: Socflower) -> None:
    is_mistake(socflower("plan case.toml --groups 9 --json"), "9", "4")
    is_mistake(socflower("plan case.toml --groups 0 --json"), "groups = 0")
    is_mistake(socflower("plan case.toml --set strategy.name=fedavg"), "fedavg")


def test_the_plan_of_a_run_is_the_plan(socflower: Socflower) -> None:
    planned = document_of(socflower("plan case.toml --json"))
    ran = document_of(socflower("run case.toml --workers 0 --json"))
    assert ran["plan"]["groups"] == planned["groups"]
    assert ran["virtual_s"] == pytest.approx(planned["predicted"]["epoch_s"])
    assert ran["energy_j"] == pytest.approx(planned["predicted"]["epoch_energy_j"])


# ---------------------------------------------------------------------------------------------------- others
def test_doctor_finds_what_there_is_and_gives_a_remedy_for_what_is_missing(
    socflower: Socflower,
) -> None:
    ran = socflower("doctor --json")
    findings = {finding["name"]: finding for finding in json.loads(ran.out)["findings"]}
    assert findings["native kernels"]["status"] == findings["data digits"]["status"] == "ok"
    assert all(finding["status"] in ("ok", "missing", "broken") for finding in findings.values())
    broken = any(finding["status"] == "broken" for finding in findings.values())
    assert ran.status == int(broken)
    for_people = socflower("doctor")
    assert all(name in for_people.out for name in findings)


def test_bench_lists_its_names_and_refuses_others(socflower: Socflower) -> None:
    ran = socflower("bench")
    assert ran.status == 0
    assert {"aggregate", "clock"} <= set(ran.out.split())
    is_mistake(socflower("bench nonsense"), "'nonsense'", "aggregate")
    is_mistake(socflower("bench clock --cells 3"), "--cells")
    is_mistake(socflower("bench truth --cells 0"), "--cells 0", "from 1 to 10000")


@pytest.mark.slow
def test_a_benchmark_runs_as_a_process_whatever_else_it_prints(
    socflower: Socflower, tmp_path: Path
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("harness.py", "__main__.py"):
        copy(ROOT / "benchmarks" / name, folder)
    (folder / "broken.py").write_text("def run(): print('{'); raise SystemExit(3)\n")
    for name, is_right in (("noisy", True), ("wrong", False)):
        row = f"less_is_better('all', 1.0, 'none', 2.0, 's', ok={is_right})"
        (folder / f"{name}.py").write_text(
            "from benchmarks.harness import less_is_better\n"
            f"def run(): print('a peer: {{ and'); return [{row}]\n"
        )
    assert json.loads(socflower("bench noisy --json").out)["rows"][0]["ok"]
    assert socflower("bench wrong").status == 1
    ran = socflower("bench broken")
    assert ran.status == 1 and "bench broken" in ran.err and "exit status 3" in ran.err


def test_the_version_is_printed(socflower: Socflower) -> None:
    from socflower import __version__

    assert socflower("--version").out == f"socflower {__version__}\n"


def test_an_unknown_option_ends_with_2(socflower: Socflower) -> None:
    ran = socflower("run case.toml --nonsense")
    assert ran.status == 2
    assert "--nonsense" in ran.err


def test_the_installed_command_is_this_one(scenario: Path, tmp_path: Path) -> None:
    """In a narrow, dumb terminal, which must not break the line."""
    command = Path(sysconfig.get_path("scripts")) / "socflower"
    ran = subprocess.run(
        [command, "run", scenario, "--engine", "warp"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=100,
        env={**os.environ, "COLUMNS": "20", "TERM": "dumb", "FORCE_COLOR": ""},
    )
    is_mistake(Ran(ran.returncode, ran.stdout, ran.stderr), "--engine warp", "local, simulation")


# --------------------------------------------------------------------------------------------- interrupted runs
def test_a_run_that_failed_goes_on_after_its_last_good_round_or_starts_fresh(
    socflower: Socflower, tmp_path: Path
) -> None:
    run = "run case.toml --workers 0 --json"
    fault = "--set event=[{kind='raise',soc=0,round=2}] --set strategy.sync_interval_epochs=0.5"
    failed = socflower(f"{run} {fault}")
    has_failed(failed, "fault on purpose", "round 1", "out/case/checkpoint", "the same command")
    resuming, error = socflower(f"{run} {fault}").err.splitlines()
    assert "resuming out/case after round 1 of 2" in resuming and "--fresh" in resuming
    assert "fault on purpose" in error
    has_failed(socflower(f"{run} --fresh {fault}"), "fault on purpose")
    is_mistake(socflower(run), "strategy.sync_interval_epochs", "0.5", "--fresh")
    assert socflower(f"{run} --fresh").status == 0
    assert names_in(tmp_path / "out" / "case") == FILES


APP = {
    "pyproject.toml": """[tool.flwr.app.components]
serverapp = "{name}_server:app"
clientapp = "{name}_client:app"
[tool.flwr.app.config]
num-rounds = 2
fails = "all"
""",
    "{name}_server.py": """import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    arrays = ArrayRecord({{"w": Array(np.zeros(3, np.float32))}})
    FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=int(context.run_config["num-rounds"]))
""",
    "{name}_client.py": """from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    if context.run_config["fails"] in ("all", message.content["config"]["server-round"]):
        raise ValueError("not on this device")
    content = RecordDict({{"arrays": message.content["arrays"], "metrics": MetricRecord({{"num-examples": 1}})}})
    return Message(content, reply_to=message)
""",
}


def flower_app(folder: Path, name: str) -> Path:
    """Write an app of Flower's own; its modules need names that no other test has imported."""
    folder.mkdir()
    for path, text in APP.items():
        (folder / path.format(name=name)).write_text(text.format(name=name))
    (folder / "cluster.toml").write_text("[cluster]\nboards = 1\nsocs_per_board = 2\n")
    return folder


def test_an_app_in_which_no_client_succeeds_ends_with_1_and_its_first_cause(
    socflower: Socflower, tmp_path: Path
) -> None:
    """Flower's FedAvg logs what failed, keeps its weights and returns."""
    flower_app(tmp_path / "app", "all_fail")
    ran = socflower("run app --cluster app/cluster.toml --out here --workers 0")
    assert ran.status == 1 and ran.out == ""
    *_, line = ran.err.splitlines()
    for named in ("error: round 1: ", "none of 2 train", "first cause: SoC 0 (node"):
        assert named in line
    assert line.endswith("not on this device (all_fail_client.py, line 10)")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("outer", ["", '[strategy.outer]\nname = "fedadam"\n'])
def test_a_round_of_groups_in_which_no_client_succeeds_ends_with_1_and_its_first_cause(
    socflower: Socflower, tmp_path: Path, outer: str
) -> None:
    (tmp_path / "nan.toml").write_text(f"""
[cluster]
boards = 2
socs_per_board = 1
[model]
name = "vgg-tiny"
[train]
epochs = 1
[strategy]
groups = 2
sync_interval_epochs = 0.02
{outer}
[[event]]
kind = "nan"
soc = 0
round = 2
[[event]]
kind = "nan"
soc = 1
round = 2
""")
    ran = socflower("run nan.toml --out here --workers 0")
    assert ran.status == 1 and ran.out == ""
    (line,) = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert "first cause: group 0, SoC 0 (node " in line and "NaN" in line


def test_an_app_that_is_not_there_is_no_scenario(socflower: Socflower) -> None:
    is_mistake(socflower("run ./no/app --cluster cluster.toml"), "no/app: no such folder")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_any_round_in_which_no_client_succeeds_ends_the_run_of_a_strategy(
    socflower: Socflower,
    tmp_path: Path,
    fails: int,
) -> None:
    flower_app(tmp_path / "app", f"fails_{fails}")
    command = "run app --cluster app/cluster.toml --out here --workers 0 --set num-rounds=3"
    ran = socflower(f"{command} --set fails={fails}")
    assert ran.status == 1 and ran.out == ""
    (line,) = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: round {fails}: ")
    assert "none of 2 train" in line and "first cause: SoC 0 (node 1000)" in line
    kept = f"exchange {fails - 1} is kept in here/exchanges: the same command"
    assert (kept in line) == (fails > 1)
    assert [path.name for path in tmp_path.glob("here/*")] == ["exchanges"][: fails - 1]
    if fails == 2:
        for priced in ("", "--training-flops 1e6"):
            ran = socflower(f"{command} --set fails=none --fresh {priced}")
            assert ran.status == 0 and ("give --training-flops" in ran.out) == (not priced)


def test_a_file_for_the_model_is_refused_before_anything_is_trained(
    socflower: Socflower, tmp_path: Path
) -> None:
    is_mistake(socflower("run case.toml --save-model model.pt"), "--save-model model.pt", ".npz")
    is_mistake(socflower("run case.toml --save-model no/model.npz"), "--save-model no/model.npz")
    assert not (tmp_path / "out").exists()
    assert socflower("run case.toml --workers 0 --save-model model.npz").status == 0
    assert (tmp_path / "model.npz").is_file()


def test_a_model_is_saved_in_the_format_that_its_file_names(
    socflower: Socflower, tmp_path: Path
) -> None:
    pytest.importorskip("onnx", reason="pip install 'socflower[onnx]'")
    from safetensors.numpy import load_file

    for name in ("model.npz", "model.safetensors", "model.onnx"):
        assert socflower(f"run case.toml --workers 0 --fresh --save-model {name}").status == 0
    weights = read_weights(tmp_path / "model.npz")
    assert {
        key: values.tolist() for key, values in load_file(tmp_path / "model.safetensors").items()
    } == {key: values.tolist() for key, values in weights.items()}
    network = onnx_model(str(tmp_path / "model.onnx"))
    trained = sorted(values.size for values in weights.values())
    assert sorted(each.numel() for each in network.state_dict().values()) == trained
    reader = "socflower.workloads.models.onnx_file:onnx_model"
    again = f"run case.toml --workers 0 --set model={{factory='{reader}',arguments={{path='model.onnx'}}}}"
    assert socflower(again).status == 0
    assert socflower(f"{again} --set precision.arithmetic=int8").status == 0


def test_the_model_may_lie_on_another_file_system(socflower: Socflower, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system here")
    with tempfile.TemporaryDirectory(dir=memory) as elsewhere:
        model = Path(elsewhere) / "model.npz"
        assert socflower("run case.toml --workers 0 --save-model", model).status == 0
        assert model.is_file() and not list(tmp_path.glob("out/*/model.npz"))


@pytest.mark.parametrize(
    "options",
    [
        "--fresh-processes",
        "--superlink 127.0.0.1:1",
        "--fresh-processes --engine deployment --superlink 127.0.0.1:1",
    ],
)
def test_options_of_a_deployment_are_for_that_engine_and_a_warm_one_is_here(
    socflower: Socflower, options: str
) -> None:
    is_mistake(socflower(f"run case.toml {options}"), options.split(maxsplit=1)[0])


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("num-epochs", "--set num-epochs: "),
        ("num-epochs=", "--set num-epochs=: "),
        ("num-epoch=2", "num-groups, num-epochs"),
        ("num-epochs=abc", "num-epochs = 3"),
        ("num-epochs=true", "num-epochs = 3"),
        ("num-epochs=[1]", "numbers, texts, true and false"),
    ],
)
def test_a_key_of_an_apps_run_config_keeps_its_kind(
    socflower: Socflower, tmp_path: Path, override: str, named: str
) -> None:
    app = ROOT / "scenarios" / "quickstart_app"
    rack = ROOT / "scenarios" / "clusters" / "shelf_of_eight.toml"
    is_mistake(socflower(f"run {app} --cluster {rack} --set {override}"), named)
    assert not (tmp_path / "out").exists()
