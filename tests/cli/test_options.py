"""Each option of a command is either read or refused, whatever the command is given to work on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from socflower.cli import main as cli
from socflower.errors import ConfigError
from socflower.scenario import app_comparison, app_folder, comparison, prepared_run, runner
from tests.command_line import Ran, Socflower

SCENARIO = "[cluster]\nboards = [2, 2]\n[strategy]\ngroups = 2\n"
SPLIT = "[cluster]\nboards = [1]\n[strategy]\nname = 'split-replay'\n[edgecloud]\nlink = 'wifi'\n"

DEPLOYED = ("--engine", "deployment")
REMOTE_ARGS = (*DEPLOYED, "--superlink", "127.0.0.1:9")
TARGETS = {
    "scenario": ("case.toml",),
    "scenario, simulation": ("case.toml", "--engine", "simulation"),
    "scenario, deployment": ("case.toml", *DEPLOYED),
    "scenario, remote": ("case.toml", *REMOTE_ARGS),
    "scenario, remote with checkpoints": (
        "case.toml",
        *REMOTE_ARGS,
        "--checkpoint-folder",
        "/kept",
    ),
    "split scenario": ("split.toml",),
    "split scenario, deployment": ("split.toml", *DEPLOYED),
    "app folder": ("app", "--cluster", "cluster.toml"),
    "app folder, deployment": ("app", "--cluster", "cluster.toml", *DEPLOYED),
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
    "fresh": SCENARIOS - {"scenario, remote"} | {"app folder"},
    "superlink": DEPLOYED_HERE | REMOTE,
    "superlink_ca": REMOTE,
    "restarts": DEPLOYED_HERE | {"app folder, deployment", "scenario, remote with checkpoints"},
    "checkpoint_folder": REMOTE,
    "warm": DEPLOYED_HERE | {"app folder, deployment"},
    "save_model": SCENARIOS,
    "log": TARGETS.keys(),
}
"""By parameter: what reads it. That --json is read everywhere shows in the tests of what commands print."""

VALUES = {
    "engine": ("--engine", "simulation"),
    "out": ("--out", "elsewhere"),
    "set_": ("--set", "train.epochs=2"),
    "workers": ("--workers", 3),
    "cluster": ("--cluster", "other.toml"),
    "nodes": ("--nodes", 1),
    "training_flops": ("--training-flops", 1e9),
    "fresh": ("--fresh",),
    "superlink": ("--superlink", "127.0.0.1:8"),
    "superlink_ca": ("--superlink-ca", "ca.pem"),
    "restarts": ("--restarts", 1),
    "checkpoint_folder": ("--checkpoint-folder", "/other"),
    "warm": ("--warm",),
    "save_model": ("--save-model", "model.npz"),
    "strategies": ("--strategies", "ring"),
    "expect": ("--expect", "accuracy>=0.5"),
    "vary": ("--vary", "key=1,2"),
    "seeds": ("--seeds", "1,2"),
    "tune": ("--tune", "epochs=1,2"),
    "log": ("--log", "csv,jsonl"),
    "fusion": ("--fusion", "per-tensor"),
}


class Begun(ConfigError):
    """Says with what work would have begun: the text of an error is what a command prints of it."""


@pytest.fixture
def begins(socflower: Socflower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Socflower:
    """The command up to where work begins, which it prints instead."""

    def begin(*arguments: object, **named: object) -> NoReturn:
        plain = {key: value for key, value in named.items() if not callable(value)}
        raise Begun(f"begun with {arguments} {plain}")

    for module, name in (
        (runner, "run_to_folder"),
        (app_folder, "run_app_folder"),
        (comparison, "compare"),
        (app_comparison, "compare_apps"),
    ):
        monkeypatch.setattr(module, name, begin)
    monkeypatch.setattr(prepared_run, "prepare", lambda scenario, *_, **named: scenario)
    for name, text in (("case.toml", SCENARIO), ("split.toml", SPLIT), ("ca.pem", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "app").mkdir()
    return lambda *arguments: socflower(
        *arguments, *(("--json",) if arguments[0] in ("run", "compare") else ())
    )


def parameters(command: str) -> Iterator[Any]:
    """Yield a command's options."""
    group: Any = typer.main.get_command(cli.app)
    for parameter in group.commands[command].params:
        if parameter.param_type_name == "option" and parameter.name not in ("as_json", "help"):
            yield parameter


def is_begun(ran: Ran) -> bool:
    return ran.err.startswith("error: begun with")


def is_refused(ran: Ran, option: str) -> bool:
    one_line = ran.err.startswith("error: ") and ran.err.count("\n") == 1 and ran.err.endswith("\n")
    return (
        ran.status == 2 and ran.out == "" and one_line and option in ran.err and not is_begun(ran)
    )


@pytest.mark.parametrize("target", TARGETS)
def test_each_option_of_run_is_read_or_refused(
    begins: Socflower, target: str, tmp_path: Path
) -> None:
    without = begins("run", *TARGETS[target])
    assert is_begun(without)
    for parameter in parameters("run"):
        if parameter.name == "engine" and "--engine" in TARGETS[target]:
            continue
        ran = begins("run", *TARGETS[target], *VALUES[parameter.name])
        if target in READ_BY_RUN[parameter.name]:
            assert is_begun(ran) and ran.err != without.err, (parameter.name, ran.err)
        else:
            assert is_refused(ran, VALUES[parameter.name][0]), (parameter.name, ran.err)
    assert not (tmp_path / "out").exists()


OF_APPS = {"cluster", "vary", "nodes", "training_flops", "expect"}
OF_SCENARIOS = {"strategies", "seeds", "tune", "fusion"}
OF_CLUSTERS = {"fusion"}


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
    base = (
        "compare",
        *compared.split(),
        *(("--cluster", "cluster.toml") if is_app else ()),
        "--engine",
        engine,
    )
    without = begins(*base)
    assert is_begun(without)
    for parameter in parameters("compare"):
        if parameter.name == "engine":
            continue
        ran = begins(*base, *VALUES[parameter.name])
        unread = (
            OF_SCENARIOS
            if is_app
            else OF_APPS | (OF_CLUSTERS if compared == "split.toml" else set())
        )
        unread = unread | ({"workers"} if engine != "local" else set())
        if parameter.name in unread:
            assert is_refused(ran, VALUES[parameter.name][0]), ran.err
        else:
            assert is_begun(ran) and ran.err != without.err, (parameter.name, ran.err)


@pytest.mark.parametrize("given", [("--workers", 0), ("--restarts", 3), ("--superlink", "")])
def test_an_option_that_is_given_with_its_default_is_given(
    begins: Socflower, given: tuple[object, ...]
) -> None:
    ran = begins("run", "case.toml", "--engine", "simulation", *given)
    assert is_refused(ran, str(given[0])), ran.err


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("target", ["case.toml", "split.toml", "app"])
def test_an_engine_that_nobody_knows_is_refused_with_the_list(
    begins: Socflower, command: str, target: str
) -> None:
    ran = begins(command, target, "--engine", "bogus")
    assert is_refused(ran, "--engine bogus: unknown; use one of local, simulation, deployment"), (
        ran.err
    )


def test_an_app_folder_for_another_superlink_is_told_what_runs_it(begins: Socflower) -> None:
    ran = begins("run", "app", "--cluster", "cluster.toml", *REMOTE_ARGS)
    assert is_refused(ran, "--superlink") and "flwr run app NAME" in ran.err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("compare", "app"), "name the cluster that the apps run on with --cluster FILE"),
        (
            ("compare", "app", "--cluster", "cluster.toml"),
            "is one app; name others to compare it with, or values of",
        ),
        (("compare", "app", "app", "--cluster", "cluster.toml"), "an app is named twice"),
        (
            ("compare", "app", "--cluster", "cluster.toml", "--vary", "key=1"),
            "--vary key=1: write a key of the run config",
        ),
        (("compare", "app", "case.toml"), "takes one scenario file, or folders of Flower apps"),
        (
            ("compare", "case.toml", "split.toml"),
            "takes one scenario file, or folders of Flower apps",
        ),
        (("plan", "app"), "name the cluster it runs on with --cluster FILE"),
        (
            ("plan", "app", "--cluster", "cluster.toml", "--groups", 2),
            "the ServerApp of app sets its groups",
        ),
        (("plan", "case.toml", "--training-flops", 1e6), "is for the folder of a Flower app"),
        (
            ("plan", "case.toml", "--out", "plan"),
            "is for strategy.name = 'hybrid-pipeline', and case.toml has another",
        ),
    ],
)
def test_a_command_that_cannot_use_an_app_folder_so_says_what_to_do(
    begins: Socflower,
    arguments: tuple[str, ...],
    line: str,
) -> None:
    assert is_refused(begins(*arguments), line)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("plan", "split.toml", "--groups", 2), "--groups"),
        (("plan", "case.toml", "--set", "strategy.name=ring", "--groups", 2), "--groups"),
        (("bench", "--quick"), "--quick"),
        (("compare", "case.toml", "--strategies", ""), "--strategies"),
        (("profile", "--serve", 0, "--threads", 1), "--threads"),
        (("profile", "--serve", 0, "--repeats", 5), "--repeats"),
        (("profile", "--serve", 0, "--data", "cifar10"), "--data"),
        (("profile", "--device", "x86-core", "--threads", 2), "--threads"),
        (
            ("profile", "--device", "x86-core", "--repeats", 5, "--data", "mnist"),
            "--data, --repeats",
        ),
        (("profile", "--peer", ""), "--peer"),
        (("fan", "fans.toml", "--restore", "--json"), "--json"),
        (("fan", "fans.toml", "--restore", "--dry-run"), "--dry-run"),
        (("fan", "fans.toml", "--calibrate", "--json"), "--json"),
        (
            (
                "cloud",
                "serve",
                "split.toml",
                "--certificate",
                "ca.pem",
                "--key",
                "ca.pem",
                "--insecure",
            ),
            "--insecure",
        ),
        (("cloud", "status", "127.0.0.1:9", "--ca", "ca.pem", "--insecure"), "--insecure"),
        (("cloud", "measure", "split.toml", "--side", "cloud", "--cloud", "ca.pem"), "--cloud"),
    ],
)
def test_an_option_that_this_use_of_a_command_does_not_read_is_refused(
    begins: Socflower,
    arguments: tuple[object, ...],
    option: str,
    tmp_path: Path,
) -> None:
    before = sorted(tmp_path.iterdir())
    ran = begins(*arguments)
    assert is_refused(ran, option), ran.err
    assert sorted(tmp_path.iterdir()) == before


def test_what_one_of_the_strategies_cannot_do_is_found_before_the_first_trains(
    socflower: Socflower,
    tmp_path: Path,
) -> None:
    (tmp_path / "case.toml").write_text(SCENARIO)
    for strategies, says in (
        ("socflow,split", "split: cannot run the workload of 'socflow'"),
        ("socflow,socflow", "is named twice"),
        (",", "unknown"),
    ):
        ran = socflower(
            "compare", "case.toml", "--strategies", strategies, "--workers", 0, "--json"
        )
        assert is_refused(ran, says), ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["case.toml"]


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_mistake_that_only_the_cluster_shows_names_the_file_too(
    command: str,
    socflower: Socflower,
    tmp_path: Path,
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "case.toml").write_text(
        "[cluster]\nboards = [2, 2]\n[strategy]\ngroups = 5\n"
    )
    ran = socflower(command, "deep/case.toml")
    assert is_refused(
        ran, "error: deep/case.toml [strategy] groups = 5, but only 4 SoCs take part"
    ), ran.err
