"""`socflower tune`: the method, the number of SoCs and the settings that suit a scenario, or an app's run config."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    AppCluster,
    AppFlops,
    AppNodes,
    Json,
    Set,
    Workers,
    mistakes_name_file,
    refuse_unread,
    require_cluster,
    scenario_argument,
    unread_by_tune,
)
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import OUT, print_json, print_notice, print_text, run_progress
from socflower.engines.names import MAX_WORKERS, require_count
from socflower.errors import ConfigError
from socflower.quantities import human_joules, human_seconds

# Importing pydantic and the planners takes long, so only the command that needs them does.
if TYPE_CHECKING:
    from socflower.report.quality import Quality

_PREFERENCES = ("time", "energy")


_Scenario = Annotated[
    Path,
    scenario_argument(
        "A scenario file (TOML), the name of a shipped scenario, or the folder of a Flower app."
    ),
]
_Strategies = Annotated[
    str | None, typer.Option(help="Comma-separated; default all without a cloud.")
]
_Arithmetics = Annotated[str, typer.Option(help="Comma-separated: some of fp32, int8, mixed.")]
_Budget = Annotated[
    int,
    typer.Option(
        help="How long the search trains: a quarter of so many trainings. Of an app: how many run configs run."
    ),
]
_Prefer = Annotated[str, typer.Option(help="`time` or `energy`: which end of the front is chosen.")]
_Out = Annotated[Path | None, typer.Option(help="Folder; an interrupted search continues there.")]
_Vary = Annotated[
    list[str] | None,
    typer.Option(help="For an app folder: KEY=VALUE,VALUE,... of its run config. Repeatable."),
]
_TargetAccuracy = Annotated[
    float | None, typer.Option(help="For an app folder: the accuracy to reach.")
]
_TargetLoss = Annotated[float | None, typer.Option(help="For an app folder: the loss to reach.")]
_RoundsKey = Annotated[
    str, typer.Option(help="For an app folder: the key of its run config with its rounds.")
]


def tune(
    context: typer.Context,
    scenario: _Scenario,
    strategies: _Strategies = None,
    arithmetics: _Arithmetics = "fp32,int8,mixed",
    budget: _Budget = 16,
    prefer: _Prefer = "time",
    out: _Out = None,
    vary: _Vary = None,
    target_accuracy: _TargetAccuracy = None,
    target_loss: _TargetLoss = None,
    rounds_key: _RoundsKey = "num-server-rounds",
    cluster: AppCluster = None,
    nodes: AppNodes = None,
    training_flops: AppFlops = None,
    set_: Set = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find the method, SoCs and settings that reach the target of [compare] at the least time or energy."""
    from socflower.cluster.cluster_file import MOST_SOCS

    is_app = scenario.is_dir()
    refuse_unread(context, unread_by_tune(of_app_folder=is_app))
    require_count("--workers", workers, 0, MAX_WORKERS)
    require_count("--nodes", nodes, 1, MOST_SOCS)
    if prefer not in _PREFERENCES:
        raise ConfigError(f"--prefer {prefer}: write one of {', '.join(_PREFERENCES)}")
    if is_app:
        settings: dict[str, Any] = {
            "cluster_file": require_cluster(cluster, scenario),
            "num_nodes": nodes,
            "training_flops": training_flops,
            "overrides": tuple(set_ or ()),
            "num_workers": workers,
        }
        quality, target = _target_of_app(target_accuracy, target_loss)
        found = {
            "quality": quality,
            "target": target,
            "budget": budget,
            "prefer": prefer,
            "rounds_key": rounds_key,
        }
        where = out or Path("out") / f"{scenario.resolve().name}-tune"
        document = _tuned_app(scenario, settings, vary or [], found, where)
    else:
        loaded_name, document = _tuned_scenario(
            scenario, set_ or [], strategies, arithmetics, out, workers, as_json, budget, prefer
        )
        where = out or _default_out(loaded_name)
    if as_json:
        print_json(document)
    else:
        print_tuned(OUT, document, where)


def _default_out(name: str) -> Path:
    return Path("out") / f"{name}-tune"


def _tuned_scenario(
    path: Path,
    overrides: list[str],
    strategies: str | None,
    arithmetics: str,
    out: Path | None,
    workers: int | None,
    as_json: bool,
    budget: int,
    prefer: str,
) -> tuple[str, dict[str, Any]]:
    """Tune a scenario; return its name and the document."""
    from socflower.scenario.schema.config import ARITHMETICS
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.tune import runner, tuned_strategies
    from socflower.scenario.tune import tune as run_tune
    from socflower.strategies.presets import family_of

    loaded = load_scenario(path, overrides)
    names = _listed(strategies) if strategies else tuned_strategies()
    for name in names:
        if name not in tuned_strategies() or name not in family_of(loaded.strategy.name):
            raise ConfigError(
                f"--strategies {name}: cannot be tuned here; use some of {', '.join(tuned_strategies())}"
            )
    kinds = _listed(arithmetics)
    for kind in kinds:
        if kind not in ARITHMETICS:
            raise ConfigError(
                f"--arithmetics {kind}: is unknown; use some of {', '.join(ARITHMETICS)}"
            )
    target = out or _default_out(loaded.name)
    with mistakes_name_file(loaded.name, path), run_progress(as_json) as bar:
        run = runner(target, "local", workers, bar)
        document = run_tune(
            loaded, names, target, run, budget=budget, prefer=prefer, arithmetics=kinds
        )
    return loaded.name, document


def _tuned_app(
    folder: Path,
    settings: dict[str, Any],
    vary: list[str],
    search: dict[str, Any],
    out: Path,
) -> dict[str, Any]:
    """Tune an app's run config; return the document."""
    from socflower.scenario.app_folder import AppRun
    from socflower.scenario.app_tune import AppSearch, parse_axes, tune_app

    run = AppRun(folder=folder, **settings)
    with prints_to_stderr():
        return tune_app(
            run, AppSearch(axes=parse_axes(vary), **search), out, on_notice=print_notice
        )


def _target_of_app(accuracy: float | None, loss: float | None) -> "tuple[Quality, float]":
    """Return what an app is to reach; `ConfigError` unless one of the two is given."""
    from socflower.report.quality import ACCURACY, LOSS

    if accuracy is not None and loss is None:
        return ACCURACY, accuracy
    if loss is not None and accuracy is None:
        return LOSS, loss
    raise ConfigError("tune: an app folder needs one of --target-accuracy and --target-loss")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def print_tuned(console: Console, document: Mapping[str, Any], out: Path) -> None:
    """Print the front of time against energy, and what was chosen."""
    table = Table("strategy", "settings", "time", "energy", header_style="bold", pad_edge=False)
    for row in sorted(document["settings"], key=lambda row: float(row["time_s"])):
        if row["on_front"]:
            table.add_row(
                row["strategy"],
                _settings(row),
                human_seconds(row["time_s"]),
                human_joules(row["energy_j"]),
            )
    console.print(table)
    for name, why in document["refused"].items():
        print_text(f"without {name}: {why}", console, "dim")
    for line in document.get("notes", ()):
        print_text(line, console, "dim")
    chosen = document["chosen"]
    print_text(
        f"{len(document['trainings'])} trainings of {document['num_candidates']} candidates; what none of the "
        f"{len(document['settings'])} settings that reached the target dominates is above",
        console,
        "dim",
    )
    print_text(
        f"chosen: {chosen['strategy']}, {_settings(chosen)}: {human_seconds(chosen['time_s'])} and "
        f"{human_joules(chosen['energy_j'])} when trained",
        console,
        "bold",
    )
    print_text(f"settings: {out / 'chosen.toml'}   report: {out / 'report.html'}", console)


_FIGURES = (
    "strategy",
    "time_s",
    "energy_j",
    "predicted_time_s",
    "predicted_energy_j",
    "on_front",
    "reached",
)


def _settings(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key not in _FIGURES
    )
