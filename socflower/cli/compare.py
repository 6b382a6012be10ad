"""`socflower compare`: the same work under several strategies."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    Fusion,
    Json,
    Log,
    Set,
    Workers,
    mistakes_name_file,
    refuse_fusion_of_split,
    refuse_unread,
    round_logging,
    scenario_argument,
    unread_by_compare,
)
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import (
    OUT,
    exit_on_failed_claims,
    print_claims,
    print_json,
    print_notice,
    print_question,
    print_text,
    run_progress,
)
from socflower.engines.names import MAX_WORKERS, require_count, require_engine
from socflower.errors import ConfigError
from socflower.quantities import human_bytes, human_joules, human_ratio, human_seconds
from socflower.report.quality import QUALITIES, Quality

if TYPE_CHECKING:  # pydantic and the planners are loaded by the command that needs them
    from socflower.engines.run_log import RoundLogging
    from socflower.scenario.schema.config import Scenario


def compare(
    context: typer.Context,
    scenario: Annotated[
        list[Path],
        scenario_argument(
            "A scenario file (TOML), the name of a shipped scenario, or the folders of Flower apps."
        ),
    ],
    strategies: Annotated[
        str | None, typer.Option(help="Comma-separated; default the scenario's [compare].")
    ] = None,
    engine: Annotated[str, typer.Option(help="As of run.")] = "local",
    out: Annotated[
        Path | None, typer.Option(help="Folder; an interrupted comparison continues there.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: each strategy under each; prints mean ± sample "
            "standard deviation."
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE,VALUE,...: search a key of [train] for each "
            "strategy, "
            "with an unreported seed, for the quickest to [compare] "
            "target, else the best accuracy or loss. Repeatable."
        ),
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="As of run.")] = None,
    vary: Annotated[
        str, typer.Option(help="For app folders: KEY=VALUE,VALUE,... of their run config.")
    ] = "",
    nodes: Annotated[int | None, typer.Option(help="As of run.")] = None,
    training_flops: Annotated[float | None, typer.Option(help="As of run.")] = None,
    expect: Annotated[list[str] | None, typer.Option(help="As of run; of each app.")] = None,
    fusion: Fusion = None,
    set_: Set = None,
    workers: Workers = None,
    log: Log = "",
    as_json: Json = False,
) -> None:
    """Run the same work under several strategies, or several Flower apps, and put them side by side."""
    folders = [path for path in scenario if path.is_dir()]
    require_engine(engine)
    refuse_unread(context, unread_by_compare(engine, of_app_folders=bool(folders)))
    require_count("--workers", workers, 0, MAX_WORKERS)
    from socflower.cluster.cluster_file import MOST_SOCS

    require_count("--nodes", nodes, 1, MOST_SOCS)
    if len(scenario) > 1 and len(folders) < len(scenario):
        raise ConfigError(
            f"compare {' '.join(map(str, scenario))}: takes one scenario file, or folders of Flower apps"
        )
    if folders:
        claims = _compare_app_folders(
            folders,
            cluster,
            out,
            vary,
            as_json,
            {
                "engine": engine,
                "num_nodes": nodes,
                "training_flops": training_flops,
                "overrides": tuple(set_ or ()),
                "num_workers": workers,
                "claims": tuple(expect or ()),
            },
            round_logging(log),
        )
        exit_on_failed_claims(claims)
        return
    from socflower.scenario.comparison import compare as run_comparison
    from socflower.scenario.comparison import parse_seeds
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.tuning import parse_tuning

    loaded = load_scenario(scenario[0], set_ or ())
    refuse_fusion_of_split(loaded, fusion)
    if fusion is not None:
        loaded = load_scenario(scenario[0], [*(set_ or ()), f"strategy.fusion={fusion}"])
    names = (
        [name.strip() for name in strategies.split(",")]
        if strategies
        else list(loaded.compare.strategies)
    )
    target = out or Path("out") / f"{loaded.name}-compare"
    logging = round_logging(log)
    with mistakes_name_file(loaded.name, scenario[0]), run_progress(as_json) as bar:
        document = run_comparison(
            loaded,
            names,
            target,
            engine=engine,
            num_workers=workers,
            on_start=bar,
            seeds=parse_seeds(seeds) if seeds else (),
            tuning=parse_tuning(tune) if tune else None,
            logging=logging,
        )
    if as_json:
        print_json(document)
    else:
        print_comparison(OUT, loaded, document, target)
    exit_on_failed_claims(document["expectations"])


def _compare_app_folders(
    folders: Sequence[Path],
    cluster: Path | None,
    out: Path | None,
    vary: str,
    as_json: bool,
    settings: Mapping[str, Any],
    logging: "RoundLogging",
) -> list[dict[str, Any]]:
    """Compare app folders, print the comparison and return the claims."""
    from socflower.scenario.app_comparison import app_variants, compare_apps

    if cluster is None:
        raise ConfigError(
            f"{folders[0]} is the folder of a Flower app: name the cluster that the apps run on with "
            "--cluster FILE"
        )
    runs = app_variants(folders, vary, cluster_file=cluster, **settings)
    target = out or Path("out") / (
        "-".join(folder.resolve().name for folder in folders) + "-compare"
    )
    with prints_to_stderr():
        document = compare_apps(runs, target, on_notice=print_notice, logging=logging)
    if as_json:
        print_json(document)
    else:
        print_comparison(OUT, None, document, target)
    claims: list[dict[str, Any]] = document["expectations"]
    return claims


def print_comparison(
    console: Console, scenario: "Scenario | None", document: Mapping[str, Any], out: Path
) -> None:
    """Print the strategies, or apps, side by side."""
    if scenario is not None:
        print_question(console, scenario)
    # Heads of two lines, so that eight columns fit a terminal of 80.
    quality = QUALITIES[document["quality"]]
    goal = quality.goal(document[quality.target_key])
    deployed = any(row["virtual_s"] is None for row in document["rows"])
    table = Table(
        "app" if scenario is None else "strategy",
        f"final\n{quality.name}",
        f"time to\n{goal}",
        "energy\nto it",
        "time\nin all",
        "energy\nin all",
        "between\nSoCs",
        "over\nhub",
        header_style="bold",
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    means = document.get("means")
    for row in means or ():
        _add_means(table, row, quality, deployed)
    for row in () if means else document["rows"]:
        traffic: Mapping[str, float] = row["bytes"] or {}
        inside = traffic["intra_board"] + traffic["inter_board"] if traffic else None
        reached = row[quality.time_key]
        table.add_row(
            row["strategy"],
            quality.shown(row[quality.final_key]),
            "not reached"
            if reached is None and document[quality.target_key] is not None
            else human_seconds(reached),
            _joules(row[quality.energy_key]),
            human_seconds(row["wall_s"] if deployed else row["virtual_s"]),
            _joules(row["energy_j"]),
            human_bytes(inside),
            human_bytes(traffic.get("hub")),
        )
    console.print(table)
    print_text(
        "times as measured; energy and bytes as predicted" if deployed else "virtual times",
        console,
        "dim",
    )
    if means:
        print_text(
            "mean ± sample standard deviation over seeds " + ", ".join(map(str, means[0]["seeds"])),
            console,
            "dim",
        )
    if document["headline"]:
        print_text(document["headline"], console, "bold")
    for caveat in document.get("caveats", ()):
        print_text(f"but {caveat}", console)
    if tuning := document.get("tuning"):
        print_text(
            f"{tuning['key']}, searched with seed {tuning['seed']}: "
            + ", ".join(
                f"{name} {found['chosen']}" for name, found in tuning["strategies"].items()
            ),
            console,
        )
    if document.get("fusions"):
        _print_fusions(console, document["fusions"])
    if document.get("predictions"):
        _print_predictions(console, document["predictions"])
    print_claims(console, document["expectations"])
    print_text(f"report: {out / 'report.html'}", console)


def _add_means(table: Table, row: Mapping[str, Any], quality: Quality, deployed: bool) -> None:
    """Add the row of a strategy's seeds: each mean with its spread below it."""
    num_seeds, spread = len(row["seeds"]), row["spread"]

    def cell(figure: str, shown: Callable[[float | None], str]) -> str:
        if row[figure] is None:
            has_target = figure == quality.time_key and row[quality.target_key] is not None
            return f"{row['num_reached']} of {num_seeds}\nreached it" if has_target else shown(None)
        return f"{shown(row[figure])}\n± {shown(spread[figure])}"

    table.add_row(
        row["strategy"],
        cell(quality.final_key, quality.shown),
        cell(quality.time_key, human_seconds),
        cell(quality.energy_key, _joules),
        cell("wall_s" if deployed else "virtual_s", human_seconds),
        cell("energy_j", _joules),
        human_bytes(row["bytes"]["intra_board"] + row["bytes"]["inter_board"]),
        human_bytes(row["bytes"]["hub"]),
    )


def _print_fusions(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what an epoch takes with either price of messages (F8a)."""
    for fusion in rows[0]["epoch_s"]:
        print_text(
            f"an epoch, messages {fusion}: "
            + ", ".join(
                f"{row['strategy']} {human_seconds(row['epoch_s'][fusion])}" for row in rows
            ),
            console,
            "dim",
        )


def _print_predictions(console: Console, predictions: Sequence[Mapping[str, Any]]) -> None:
    """Print the epochs of `[[compare.predict]]`, a row for each workload."""
    from socflower.report.summary import prediction_table

    found = prediction_table(predictions)
    strategies = found["strategies"]
    table = Table(
        "model",
        "arithmetic",
        *strategies,
        "gain",
        "at equal\nsamples",
        title="Predicted, not trained: an epoch on this cluster",
        title_justify="left",
        header_style="bold",
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for row in found["rows"]:
        table.add_row(
            row["model"],
            row["arithmetic"],
            *(human_seconds(seconds) for seconds in row["epoch_s"]),
            human_ratio(row["gain"]),
            human_ratio(row["equal_gain"]),
        )
    console.print(table)
    if strategies[1:]:
        own, *theirs = found["rows"][0]["step_samples"]
        print_text(
            f"the gain is {strategies[0]}'s over the quickest of {', '.join(strategies[1:])}, which take "
            f"{' and '.join(map(str, dict.fromkeys(theirs)))} samples a step, {strategies[0]} {own}; at equal "
            f"samples all take {own}",
            console,
            "dim",
        )


def _joules(value: float | None) -> str:
    return human_joules(value).partition(" (")[0]
