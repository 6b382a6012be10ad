"""Each option of a command is either read or refused, whatever the command is given to work on."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from socflower.cli import main as cli
from socflower.errors import ConfigError
from socflower.scenario import (
    app_comparison,
    app_folder,
    app_planning,
    comparison,
    prepared_run,
    runner,
)
from socflower.wire.logs import LOG_FORMAT, logs_json
from tests.command_line import Ran, Socflower, is_mistake

SCENARIO = "[cluster]\nboards = [2, 2]\n[strategy]\ngroups = 2\n"
PIPELINE = "[cluster]\nboards = [2]\n[strategy]\nname = 'hybrid-pipeline'\n"
SPLIT = "[cluster]\nboards = [1]\n[strategy]\nname = 'split-replay'\n[edgecloud]\nlink = 'wifi'\n"

DEPLOYED = "--engine deployment"
REMOTELY = f"{DEPLOYED} --superlink 127.0.0.1:9"
TARGETS = {
    "scenario": "case.toml",
    "scenario, simulation": "case.toml --engine simulation",
    "scenario, deployment": f"case.toml {DEPLOYED}",
    "scenario, remote": f"case.toml {REMOTELY}",
    "scenario, remote with checkpoints": f"case.toml {REMOTELY} --checkpoint-folder /kept",
    "split scenario": "split.toml",
    "split scenario, deployment": f"split.toml {DEPLOYED}",
    "app folder": "app --cluster cluster.toml",
    "app folder, deployment": f"app --cluster cluster.toml {DEPLOYED}",
}
HERE = {"scenario", "split scenario"}
DEPLOYED_HERE = {"scenario, deployment", "split scenario, deployment"}
REMOTE = {"scenario, remote", "scenario, remote with checkpoints"}
APPS = {"app folder", "app folder, deployment"}
SCENARIOS = TARGETS.keys() - APPS
READ_BY_RUN = {
    "engine": TARGETS.keys(),
    "out": TARGETS.keys(),
    "set_": TARGETS.keys(),
    "workers": HERE | {"app folder"},
    "cluster": APPS,
    "nodes": APPS,
    "training_flops": APPS,
    "expect": APPS,
    "deadline": SCENARIOS - REMOTE,
    "fresh": SCENARIOS - {"scenario, remote"} | {"app folder"},
    "superlink": DEPLOYED_HERE | REMOTE,
    "superlink_ca": REMOTE,
    "restarts": DEPLOYED_HERE | {"app folder, deployment", "scenario, remote with checkpoints"},
    "checkpoint_folder": REMOTE,
    "fresh_processes": DEPLOYED_HERE | {"app folder, deployment"},
    "save_model": SCENARIOS,
    "log": TARGETS.keys(),
    "metrics": TARGETS.keys(),
    "log_format": TARGETS.keys(),
}
"""By parameter: what reads it. That --json is read everywhere shows in the tests of what commands print."""

VALUES = {
    "engine": "--engine simulation",
    "out": "--out elsewhere",
    "set_": "--set train.epochs=2",
    "workers": "--workers 3",
    "cluster": "--cluster other.toml",
    "nodes": "--nodes 1",
    "training_flops": "--training-flops 1e9",
    "deadline": "--deadline 23:59",
    "fresh": "--fresh",
    "superlink": "--superlink 127.0.0.1:8",
    "superlink_ca": "--superlink-ca ca.pem",
    "restarts": "--restarts 1",
    "checkpoint_folder": "--checkpoint-folder /other",
    "fresh_processes": "--fresh-processes",
    "save_model": "--save-model model.npz",
    "strategies": "--strategies ring",
    "expect": "--expect accuracy>=0.5",
    "vary": "--vary key=1,2",
    "seeds": "--seeds 1,2",
    "tune": "--tune epochs=1,2",
    "search": "--search 5",
    "until_target": "--until-target",
    "front": "--front",
    "log": "--log csv,jsonl",
    "metrics": "--metrics 127.0.0.1:0",
    "log_format": "--log-format json",
    "fusion": "--fusion per-tensor",
    "groups": "--groups 1",
    "start": "--start 22:00",
    "price_per_kwh": "--price-per-kwh 0.3",
}


class Begun(ConfigError):
    """Says with what work would have begun: the text of an error is what a command prints of it."""


@pytest.fixture
def begins(socflower: Socflower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Socflower:
    """The command up to where work begins, which it prints instead."""

    def begin(*arguments: object, **named: object) -> NoReturn:
        plain = {key: value for key, value in named.items() if not callable(value)}
        raise Begun(f"begun with {arguments} {plain}, JSON lines: {logs_json()}")

    for module, name in (
        (runner, "run_to_folder"),
        (app_folder, "run_app_folder"),
        (comparison, "compare"),
        (app_comparison, "compare_apps"),
    ):
        monkeypatch.setattr(module, name, begin)
    monkeypatch.setenv(LOG_FORMAT, "text")
    monkeypatch.setattr(prepared_run, "prepare", lambda scenario, *_, **named: scenario)
    planning, pipelines = (
        import_module(f"socflower.cli.{name}") for name in ("plan", "pipeline_plan")
    )
    monkeypatch.setattr(planning, "_plan_cluster", begin)
    monkeypatch.setattr(app_planning, "plan_app_folder", begin)
    monkeypatch.setattr(pipelines, "plan_pipeline_scenario", begin)
    files = {"case.toml": SCENARIO, "split.toml": SPLIT, "pipeline.toml": PIPELINE, "ca.pem": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "app").mkdir()

    def command(words: str, *arguments: object) -> Ran:
        as_json = ["--json"] if words.startswith(("run", "compare")) else []
        return socflower(words, *arguments, *as_json)

    return command


def parameters(command: str) -> Iterator[Any]:
    """Yield a command's options."""
    group: Any = typer.main.get_command(cli.app)
    for parameter in group.commands[command].params:
        if parameter.param_type_name == "option" and parameter.name not in ("as_json", "help"):
            yield parameter


def is_begun(ran: Ran) -> bool:
    return ran.err.startswith("error: begun with")


def is_refused(ran: Ran, option: str) -> None:
    is_mistake(ran, option)
    assert not is_begun(ran)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("target", TARGETS)
def test_each_option_of_run_is_read_or_refused(
    begins: Socflower, target: str, tmp_path: Path
) -> None:
    command = f"run {TARGETS[target]}"
    without = begins(command)
    assert is_begun(without)
    for parameter in parameters("run"):
        # With --seeds a run is a suite, whose options have a test of their own.
        if parameter.name == "seeds" or (parameter.name == "engine" and "--engine" in command):
            continue
        given = VALUES[parameter.name]
        ran = begins(f"{command} {given}")
        if target in READ_BY_RUN[parameter.name]:
            assert is_begun(ran) and ran.err != without.err, (parameter.name, ran.err)
        else:
            is_refused(ran, given.split()[0])
    assert not (tmp_path / "out").exists()


OF_APPS = {"cluster", "vary", "nodes", "training_flops", "expect"}
OF_SCENARIOS = {"strategies", "seeds", "tune", "search", "until_target", "front", "fusion"}
OF_CLUSTERS = {"fusion"}


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("engine", ["local", "simulation", "deployment"])
@pytest.mark.parametrize("compared", ["case.toml", "split.toml", "app other"])
def test_each_option_of_compare_is_read_or_refused(
    begins: Socflower,
    compared: str,
    engine: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    is_app = compared == "app other"
    cluster = "--cluster cluster.toml" if is_app else ""
    command = f"compare {compared} {cluster} --engine {engine}"
    unread = {"workers"} if engine != "local" else set()
    unread |= OF_SCENARIOS if is_app else OF_APPS
    if compared == "split.toml":
        unread |= OF_CLUSTERS
    without = begins(command)
    assert is_begun(without)
    for parameter in parameters("compare"):
        if parameter.name == "engine":
            continue
        given = VALUES[parameter.name]
        ran = begins(f"{command} {given}")
        if parameter.name in unread:
            is_refused(ran, given.split()[0])
        else:
            assert is_begun(ran) and ran.err != without.err, (parameter.name, ran.err)


IN_GROUPS = {"deadline", "price_per_kwh"}
READ_BY_PLAN = {
    "case.toml": {"set_", "groups", "fusion", *IN_GROUPS},
    "split.toml": {"set_"},
    "pipeline.toml": {"set_", "out"},
    "app --cluster cluster.toml": {"set_", "cluster", "training_flops"},
}


@pytest.mark.parametrize("target", READ_BY_PLAN)
def test_each_option_of_plan_is_read_or_refused(
    begins: Socflower, target: str, tmp_path: Path
) -> None:
    without = begins(f"plan {target}")
    assert is_begun(without)
    for parameter in parameters("plan"):
        given = VALUES[parameter.name]
        ran = begins(f"plan {target} {given}")
        if parameter.name in READ_BY_PLAN[target]:
            assert is_begun(ran) and ran.err != without.err, (parameter.name, ran.err)
        else:
            is_refused(ran, given.split()[0])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("given", [("--workers", 0), ("--restarts", 3), ("--superlink", "")])
def test_an_option_that_is_given_with_its_default_is_given(
    begins: Socflower, given: tuple[object, ...]
) -> None:
    is_refused(begins("run case.toml --engine simulation", *given), str(given[0]))


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("target", ["case.toml", "split.toml", "app"])
def test_an_engine_that_nobody_knows_is_refused_with_the_list(
    begins: Socflower, command: str, target: str
) -> None:
    ran = begins(f"{command} {target} --engine bogus")
    is_mistake(ran, "--engine bogus", "local, simulation, deployment")


def test_an_app_folder_for_another_superlink_is_told_what_runs_it(begins: Socflower) -> None:
    ran = begins(f"run app --cluster cluster.toml {REMOTELY}")
    is_mistake(ran, "--superlink", "flwr run app NAME")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("compare app", "--cluster FILE"),
        ("compare app --cluster cluster.toml", "one app"),
        ("compare app app --cluster cluster.toml", "an app is named twice"),
        ("compare app --cluster cluster.toml --vary key=1", "--vary key=1"),
        ("compare app case.toml", "takes one scenario file"),
        ("compare case.toml split.toml", "takes one scenario file"),
        ("plan app", "--cluster FILE"),
        ("plan app --cluster cluster.toml --groups 2", "--set with the key"),
        ("plan case.toml --price-per-kwh -1", "--price-per-kwh -1"),
        ("plan case.toml --training-flops 1e6", "--training-flops"),
        ("plan case.toml --out plan", "'hybrid-pipeline'"),
        ("plan split.toml --groups 2", "--groups"),
        ("plan case.toml --set strategy.name=ring --groups 2", "--groups"),
        ("bench --quick", "--quick"),
        ("profile --serve 0 --threads 1", "--threads"),
        ("profile --serve 0 --repeats 5", "--repeats"),
        ("profile --serve 0 --data cifar10", "--data"),
        ("profile --device x86-core --threads 2", "--threads"),
        ("profile --device x86-core --repeats 5 --data mnist", "--data, --repeats"),
        ("fan fans.toml --restore --json", "--json"),
        ("fan fans.toml --restore --dry-run", "--dry-run"),
        ("fan fans.toml --calibrate --json", "--json"),
        ("cloud serve split.toml --certificate ca.pem --key ca.pem --insecure", "--insecure"),
        ("cloud status 127.0.0.1:9 --ca ca.pem --insecure", "--insecure"),
        ("cloud measure split.toml --side cloud --cloud ca.pem", "--cloud"),
    ],
)
def test_what_this_use_of_a_command_does_not_read_or_lacks_is_refused(
    begins: Socflower, command: str, named: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    is_refused(begins(command), named)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["compare case.toml --strategies", "profile --peer"])
def test_an_empty_value_is_refused(begins: Socflower, command: str) -> None:
    is_refused(begins(command, ""), command.rsplit(maxsplit=1)[-1])


def test_what_one_of_the_strategies_cannot_do_is_found_before_the_first_trains(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text(SCENARIO)
    for strategies, named in (
        ("socflow,split", "split: cannot run the workload of 'socflow'"),
        ("socflow,socflow", "twice"),
        (",", "unknown"),
    ):
        is_mistake(socflower(f"compare case.toml --strategies {strategies} --json"), named)
    assert [path.name for path in tmp_path.iterdir()] == ["case.toml"]


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_mistake_that_only_the_cluster_shows_names_the_file_too(
    command: str, socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "case.toml").write_text(SCENARIO.replace("groups = 2", "groups = 5"))
    is_mistake(socflower(f"{command} deep/case.toml"), "deep/case.toml", "groups = 5", "4 SoCs")
