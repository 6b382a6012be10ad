"""App folders that know nothing of socflower: metrics, claims, engines, comparisons."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from socflower.engines.run_log import RoundLogging, scalars
from socflower.errors import TrainingFailed
from socflower.scenario import jobs
from socflower.scenario.app_comparison import app_variants, compare_apps
from socflower.scenario.app_folder import AppRun, run_app_folder
from socflower.scenario.expectations import check_app_claims, parse_claims
from tests.one_line import refused

PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"
    [project]
    name = "mean"
    version = "1.0.0"
    [tool.hatch.build.targets.wheel]
    packages = ["."]
    [tool.flwr.app]
    publisher = "somebody"
    [tool.flwr.app.components]
    serverapp = "server:app"
    clientapp = "client:app"
    [tool.flwr.app.config]
    rounds = 3
    rate = 0.5
    loop = false
    fail = false
"""
CLIENT = """
    # Each client pulls a number towards its own, which is its partition id.
    import numpy as np
    from flwr.app import ArrayRecord, Array, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def state(message, context):
        own = context.node_config["partition-id"]
        return own, float(message.content["arrays"]["x"].numpy()[0])

    @app.train()
    def train(message, context):
        assert set(context.run_config) == {"rounds", "rate", "loop", "fail"}
        if context.run_config["fail"]:
            raise RuntimeError("no such data")
        own, x = state(message, context)
        x += context.run_config["rate"] * (own - x)
        return Message(RecordDict({
            "arrays": ArrayRecord({"x": Array(np.array([x], np.float32))}),
            "metrics": MetricRecord({"train_loss": (own - x) ** 2, "num-examples": own + 1})}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        own, x = state(message, context)
        return Message(RecordDict({"metrics": MetricRecord({
            "eval_acc": x / 10, "eval_loss": abs(own - x), "num-examples": own + 1})}), reply_to=message)
"""
SERVER = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    NAME = "CALLED"
    app = ServerApp()

    @app.main()
    def main(grid, context):
        start = ArrayRecord({"x": Array(np.zeros(1, np.float32))})
        if context.run_config["loop"]:
            for _ in range(context.run_config["rounds"]):
                grid.send_and_receive([Message(RecordDict({"arrays": start, "config": ConfigRecord()}), node, "train")
                                       for node in grid.get_node_ids()])
            return
        def on_server(server_round, arrays):
            return MetricRecord({NAME: float(arrays["x"].numpy()[0])})
        FedAvg().start(grid, start, num_rounds=context.run_config["rounds"], evaluate_fn=on_server)
"""
NUM_NODES, RATE = 3, 0.5


@pytest.fixture
def rack(tmp_path: Path) -> Path:
    path = tmp_path / "rack.toml"
    path.write_text(f"[cluster]\nboards = 1\nsocs_per_board = {NUM_NODES}\n", "utf-8")
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty reports, since drawing takes longer than such runs."""
    monkeypatch.setattr(jobs, "write_report", lambda path, *_, **__: path.touch())


def write_app(folder: Path, *, called: str = "level") -> Path:
    folder.mkdir()
    for name, text in (("pyproject.toml", PROJECT), ("client.py", CLIENT), ("server.py", SERVER)):
        (folder / name).write_text(textwrap.dedent(text).replace("CALLED", called), "utf-8")
    return folder


def run(folder: Path, rack: Path, out: Path, *overrides: str, **settings: Any) -> dict[str, Any]:
    return run_app_folder(
        AppRun(
            folder=folder, cluster_file=rack, overrides=overrides, **{"num_workers": 0, **settings}
        ),
        out,
    )


def expected_rounds(num_rounds: int) -> list[Mapping[str, float]]:
    """Compute what FedAvg does with these clients, by hand."""
    weights, x, rounds = [own + 1 for own in range(NUM_NODES)], 0.0, []
    for _ in range(num_rounds):
        moved = [x + RATE * (own - x) for own in range(NUM_NODES)]
        losses = [(own - each) ** 2 for own, each in enumerate(moved)]
        x = sum(weight * each for weight, each in zip(weights, moved, strict=True)) / sum(weights)
        errors = [abs(own - x) for own in range(NUM_NODES)]
        rounds.append(
            {
                "x": x,
                "train_loss": sum(map(float.__mul__, map(float, weights), losses)) / sum(weights),
                "eval_loss": sum(map(float.__mul__, map(float, weights), errors)) / sum(weights),
            }
        )
    return rounds


def test_rounds_have_the_metrics_of_the_strategy_and_rising_virtual_time(
    rack: Path, tmp_path: Path
) -> None:
    result = run(write_app(tmp_path / "app"), rack, tmp_path / "out", training_flops=1e9)
    assert result == json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    first, *rounds = result["rounds"]
    assert (first["round"], first["server"], first["virtual_s"]) == (0, {"level": 0.0}, 0.0)
    for entry, wanted in zip(rounds, expected_rounds(3), strict=True):
        assert entry["train"]["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-5)
        assert entry["evaluate"]["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
        assert entry["server"]["level"] == pytest.approx(wanted["x"], rel=1e-5)
        assert entry["accuracy"] == pytest.approx(wanted["x"] / 10, rel=1e-5)
        assert entry["loss"] == entry["evaluate"]["eval_loss"]
    times = [entry["virtual_s"] for entry in result["rounds"]]
    assert times == sorted(set(times)) and times[-1] == result["virtual_s"]
    assert result["rounds"][-1]["energy_j"] == result["energy_j"] > 0
    assert result["rounds"][-1]["bytes"] == result["bytes"]
    assert (result["strategy"], result["final_accuracy"]) == (
        "FedAvg",
        result["rounds"][-1]["accuracy"],
    )
    assert len(result["weights_sha256"]) == 64
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Accuracy over virtual time" in page and "&#34;rate&#34;: 0.5" in page


@pytest.mark.usefixtures("undrawn")
def test_an_app_without_a_strategy_has_the_means_of_its_replies(rack: Path, tmp_path: Path) -> None:
    result = run(write_app(tmp_path / "app"), rack, tmp_path / "out", "loop=true")
    assert [entry["round"] for entry in result["rounds"]] == [1, 2, 3]
    for entry in result["rounds"]:
        assert entry["train"]["train_loss"] == pytest.approx(expected_rounds(1)[0]["train_loss"])
    assert (result["final_accuracy"], result["weights_sha256"]) == (None, None)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("override", ["loop=false", "loop=true"])
def test_the_rounds_of_an_app_are_logged_as_in_its_result(
    override: str, rack: Path, tmp_path: Path
) -> None:
    app = AppRun(
        folder=write_app(tmp_path / "app"),
        cluster_file=rack,
        num_workers=0,
        training_flops=1e9,
        overrides=(override,),
    )
    result = run_app_folder(app, tmp_path / "out", logging=RoundLogging(("csv", "jsonl")))
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    assert [line.pop("round") for line in lines] == [entry["round"] for entry in result["rounds"]]
    for line, entry in zip(lines, result["rounds"], strict=True):
        assert line == pytest.approx(scalars(entry))
    assert len((tmp_path / "out" / "metrics.csv").read_text("utf-8").splitlines()) == len(lines) + 1


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_comparison_of_apps_logs_each_and_what_it_reuses(
    rack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = app_variants(
        [write_app(tmp_path / "app")], "rate=0.5,0.25", cluster_file=rack, num_workers=0
    )
    compare_apps(runs[:1], tmp_path / "out")
    compare_apps(runs, tmp_path / "out", logging=RoundLogging(("jsonl",)))
    for name in ("rate=0.5", "rate=0.25"):
        assert len((tmp_path / "out" / name / "metrics.jsonl").read_text("utf-8").splitlines()) == 4


@pytest.mark.usefixtures("undrawn")
def test_claims_are_checked_on_the_last_round_that_has_the_metric(
    rack: Path, tmp_path: Path
) -> None:
    claims = {
        "eval_acc>=0.1": ("min_eval_acc", True),
        "eval_loss <= 0.1": ("max_eval_loss", False),
        "level>=1": ("min_level", True),
        "virtual_s<=1e9": ("max_virtual_s", True),
        "f1>=0.5": ("min_f1", False),
        "accuracy>=0.1": ("min_accuracy", True),
        "train/train_loss>=0": ("min_train/train_loss", True),
        "server/train_loss>=0": ("min_server/train_loss", False),
    }
    result = run(write_app(tmp_path / "app"), rack, tmp_path / "out", claims=tuple(claims))
    checked = [(claim["name"], claim["holds"]) for claim in result["expectations"]]
    assert checked == list(claims.values())
    missing = "f1: the app has no such metric; it has level, eval_acc, eval_loss, train_loss"
    assert any(missing in note for note in result["notes"])
    ((level,), _) = check_app_claims(parse_claims(["level>=9"]), result)
    assert level["observed"] == pytest.approx(expected_rounds(3)[-1]["x"])


@pytest.mark.parametrize(
    ("claim", "named"),
    [
        ("accurcy>=0.5", "did you mean 'accuracy'?"),
        ("evaluate/eval_lss<=0.5", "'eval_lss'; did you mean 'eval_loss'?"),
        ("min_accuracy>=0.5", "'accuracy>=...'"),
        ("peak_c<=60", "accuracy, loss, virtual_s"),
        ("speedup_over_fedavg>=2", "speedup_over_fedavg"),
    ],
)
def test_a_claim_on_a_metric_that_cannot_be_is_refused_before_the_app_runs(
    claim: str, named: str, rack: Path, tmp_path: Path
) -> None:
    app = AppRun(folder=write_app(tmp_path / "app"), cluster_file=rack, claims=("level>=0", claim))
    refused(lambda: run_app_folder(app, tmp_path / "out"), named)
    assert not (tmp_path / "out").exists()


def test_a_claim_on_a_metric_that_may_be_is_not_refused(rack: Path, tmp_path: Path) -> None:
    """The last one is a package's, composed while the app runs."""
    claims = ("level>=0", "f1>=0.5", "eval_x>=0", "virtual_s<=1", "train-loss<=1")
    AppRun(folder=write_app(tmp_path / "app"), cluster_file=rack, claims=claims).check()


@pytest.mark.parametrize(
    "claim", ["accuracy", "accuracy>0.5", "accuracy>=high", "accuracy>=nan", ">=0.5", "a b>=1"]
)
def test_a_claim_has_a_metric_a_sign_and_a_number(claim: str) -> None:
    refused(lambda: parse_claims([claim]), f"--expect {claim}")


@pytest.mark.usefixtures("undrawn")
def test_nothing_of_another_run_stays_beside_the_result_and_a_failed_run_changes_nothing(
    rack: Path,
    tmp_path: Path,
) -> None:
    app, out = write_app(tmp_path / "app"), tmp_path / "out"
    out.mkdir()
    for name in ("result.json", "report.html", "comparison.json", "notes.txt"):
        (out / name).write_text("of another run")
    refused(lambda: run(app, rack, out, "fail=true"), "no such data", error=TrainingFailed)
    assert (out / "report.html").read_text("utf-8") == "of another run"
    run(app, rack, out)
    files = {file.name for file in out.iterdir()}
    assert files == {"result.json", "trace.json", "report.html", "notes.txt"}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_apps_with_modules_of_the_same_names_are_compared_and_finished_ones_kept(
    rack: Path, tmp_path: Path
) -> None:
    apps = [
        write_app(tmp_path / "before", called="accuracy"),
        write_app(tmp_path / "after", called="acc"),
    ]
    # After one round the level is below 1, as an accuracy is.
    settings = {"claims": ("accuracy>=0.1",), "overrides": ("rounds=1",), "num_workers": 0}
    runs, begun = app_variants(apps, "", cluster_file=rack, **settings), list[str]()
    document = compare_apps(runs, tmp_path / "out", on_notice=begun.append)
    assert begun == ["running before", "running after"]
    assert [row["strategy"] for row in document["rows"]] == ["before", "after"]
    kept = [
        json.loads((tmp_path / "out" / name / "result.json").read_text("utf-8"))
        for name in ("before", "after")
    ]
    assert [set(result["rounds"][0]["server"]) for result in kept] == [{"accuracy"}, {"acc"}]
    holds = [(claim["app"], claim["holds"]) for claim in document["expectations"]]
    assert holds == [("before", True), ("after", True)]
    assert document == json.loads((tmp_path / "out" / "comparison.json").read_text("utf-8"))
    assert compare_apps(runs, tmp_path / "out", on_notice=begun.append) == document
    server = apps[1] / "server.py"
    server.write_text(server.read_text("utf-8") + "# changed\n", "utf-8")
    compare_apps(runs, tmp_path / "out", on_notice=begun.append)
    assert begun[2:] == ["running after"]


@pytest.mark.usefixtures("undrawn")
def test_values_of_the_run_config_are_compared(rack: Path, tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    runs = app_variants([app], "rate=0.1,0.9", cluster_file=rack, num_workers=0)
    document = compare_apps(runs, tmp_path / "out")
    slow, quick = document["rows"]
    assert (slow["strategy"], slow["run_config"]["rate"]) == ("rate=0.1", 0.1)
    assert (quick["strategy"], quick["run_config"]["rate"]) == ("rate=0.9", 0.9)
    assert slow["final_accuracy"] < quick["final_accuracy"]
    unknown = app_variants([app], "rat=0.1,0.9", cluster_file=rack)
    refused(lambda: compare_apps(unknown, tmp_path / "out"), "'rat'", "rounds, rate")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_apps_without_accuracy_are_compared_by_the_loss_that_they_evaluate(
    evaluates: bool,
    rack: Path,
    tmp_path: Path,
) -> None:
    app = write_app(tmp_path / "app")
    client = (app / "client.py").read_text("utf-8").replace('"eval_acc": x / 10, ', "")
    (app / "client.py").write_text(
        client if evaluates else client.replace("eval_loss", "eval_error"), "utf-8"
    )
    document = compare_apps(
        app_variants([app], "rate=0.1,0.9", cluster_file=rack, num_workers=0), tmp_path / "out"
    )
    slow, quick = document["rows"]
    # The training's own loss judges nothing.
    if not evaluates:
        assert (document["quality"], document["target_loss"], slow["final_loss"]) == (
            "accuracy",
            None,
            None,
        )
        return
    assert document["quality"] == slow["quality"] == "loss" and slow["final_accuracy"] is None
    assert document["target_loss"] == pytest.approx(
        1.01 * max(slow["final_loss"], quick["final_loss"])
    )
    assert 0 < quick["time_to_loss_s"] <= slow["time_to_loss_s"]
    kept = json.loads((tmp_path / "out" / "rate=0.9" / "result.json").read_text("utf-8"))
    assert [entry["loss"] is None for entry in kept["rounds"]] == [True, False, False, False]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_nodes": 9}, "rack.toml has 3 SoCs"),
        ({"training_flops": -1.0}, "--training-flops -1.0"),
        ({"overrides": ("rate=fast",)}, "rate"),
        ({"claims": ("accuracy",)}, "--expect accuracy"),
        ({"folder": Path("nowhere")}, "nowhere"),
        ({"cluster_file": Path("no.toml")}, "no.toml"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(
    change: dict[str, Any], named: str, rack: Path, tmp_path: Path
) -> None:
    app = AppRun(folder=write_app(tmp_path / "app"), cluster_file=rack, engine="simulation")
    refused(lambda: run_app_folder(replace(app, **change), tmp_path / "out"), named)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_flowers_engines_run_the_same_app_with_the_same_metrics(
    engine: str, rack: Path, tmp_path: Path
) -> None:
    """On a deployment, nodes reply in any order, so that sums may differ in their last bits."""
    app = write_app(tmp_path / "app")
    here, there = (
        run(app, rack, tmp_path / "here"),
        run(app, rack, tmp_path / "there", engine=engine),
    )
    assert there["engine"] == engine
    assert there["run_config"] == here["run_config"]
    for ours, theirs in zip(here["rounds"], there["rounds"], strict=True):
        for source in ("train", "evaluate", "server"):
            assert ours.get(source, {}) == pytest.approx(theirs.get(source, {}), rel=1e-5)
    times = (there["virtual_s"], there.get("predicted_s"))
    assert times == (
        (here["virtual_s"], None)
        if engine == "simulation"
        else (None, pytest.approx(here["virtual_s"]))
    )
    failed = tmp_path / "failed"
    refused(
        lambda: run(app, rack, failed, "fail=true", engine=engine),
        "no such data",
        error=TrainingFailed,
    )
