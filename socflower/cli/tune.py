"""`socflower tune`: the method, the number of SoCs and the settings that suit a scenario."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import Json, Set, Workers, mistakes_name_file, scenario_argument
from socflower.cli.terminal import OUT, print_json, print_text, run_progress
from socflower.engines.names import MAX_WORKERS, require_count
from socflower.errors import ConfigError
from socflower.quantities import human_joules, human_seconds

_PREFERENCES = ("time", "energy")


def tune(
    scenario: Annotated[
        Path, scenario_argument("A scenario file (TOML), or the name of a shipped scenario.")
    ],
    strategies: Annotated[
        str | None, typer.Option(help="Comma-separated; default all with groups.")
    ] = None,
    budget: Annotated[int, typer.Option(help="How many candidates are trained at all.")] = 16,
    prefer: Annotated[
        str, typer.Option(help="`time` or `energy`: which end of the front is chosen.")
    ] = "time",
    out: Annotated[
        Path | None, typer.Option(help="Folder; an interrupted search continues there.")
    ] = None,
    set_: Set = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find the method, SoCs and settings that reach the target of [compare] at the least time or energy."""
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.schema.strategies import family_of
    from socflower.scenario.tune import runner, tuned_strategies
    from socflower.scenario.tune import tune as run_tune

    require_count("--workers", workers, 0, MAX_WORKERS)
    if prefer not in _PREFERENCES:
        raise ConfigError(f"--prefer {prefer}: write one of {', '.join(_PREFERENCES)}")
    loaded = load_scenario(scenario, set_ or [])
    names = tuned_strategies()
    if strategies:
        names = tuple(name.strip() for name in strategies.split(","))
    for name in names:
        if name not in tuned_strategies() or name not in family_of(loaded.strategy.name):
            raise ConfigError(
                f"--strategies {name}: cannot be tuned here; use some of {', '.join(tuned_strategies())}"
            )
    target = out or Path("out") / f"{loaded.name}-tune"
    with mistakes_name_file(loaded.name, scenario), run_progress(as_json) as bar:
        run = runner(target, "local", workers, bar)
        document = run_tune(loaded, names, target, run, budget=budget, prefer=prefer)
    if as_json:
        print_json(document)
    else:
        print_tuned(OUT, document, target)


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
    print_text(f"scenario: {out / 'chosen.toml'}   report: {out / 'report.html'}", console)


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
    return ", ".join(f"{key} {value:g}" for key, value in row.items() if key not in _FIGURES)
