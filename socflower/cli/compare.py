"""`socflower compare`: the same work under several strategies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    AppClaims,
    AppCluster,
    AppFlops,
    AppNodes,
    Fusion,
    Json,
    Log,
    Set,
    Workers,
    mistakes_name_file,
    refuse_fusion_of_split,
    refuse_unread,
    require_cluster,
    round_logging,
    scenario_argument,
    unread_by_compare,
)
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import (
    ERR,
    OUT,
    exit_on_failed_claims,
    print_claims,
    print_json,
    print_notice,
    print_question,
    print_text,
    run_progress,
    step_progress,
)
from socflower.engines.names import MAX_WORKERS, require_count, require_engine
from socflower.errors import ConfigError
from socflower.quantities import human_bytes, human_joules, human_ratio, human_seconds
from socflower.report.quality import QUALITIES, Quality

# Importing pydantic and the planners takes long, so only the command that needs them does.
if TYPE_CHECKING:
    from socflower.engines.run_log import RoundLogging
    from socflower.scenario.predicted_methods import Front
    from socflower.scenario.schema.scenario_file import Scenario


_NARROW: dict[str, Any] = {
    "header_style": "bold",
    "padding": (0, 1),
    "collapse_padding": True,
    "pad_edge": False,
}
"""The look of tables with many columns."""


_Scenario = Annotated[
    list[Path],
    scenario_argument(
        "A scenario file (TOML), the name of a shipped scenario, or the folders of Flower apps."
    ),
]
_Strategies = Annotated[
    str | None, typer.Option(help="Comma-separated; default the scenario's [compare].")
]
_Engine = Annotated[str, typer.Option(help="As of run.")]
_Out = Annotated[
    Path | None, typer.Option(help="Folder; an interrupted comparison continues there.")
]
_Seeds = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: each strategy under each; prints mean ± sample standard deviation."
    ),
]
_Tune = Annotated[
    list[str] | None,
    typer.Option(
        help="KEY=VALUE,VALUE,...: search a key of [train] or [strategy] for each "
        "strategy, "
        "with an unreported seed, for the quickest to [compare] "
        "target, else the best accuracy or loss. Repeatable."
    ),
]
_Search = Annotated[
    int | None,
    typer.Option(
        help="So many trainings for each strategy: halve and double its SoCs, batch, rate, epochs, groups and "
        "interval while it reaches the target sooner, with an unreported seed."
    ),
]
_UntilTarget = Annotated[
    bool,
    typer.Option("--until-target", help="End each run at the target of [compare]."),
]
_Front = Annotated[
    bool,
    typer.Option(
        "--front",
        help="Print every strategy's prediction, then train only the first one, one SoC (sgd), and those on the "
        "front of time against energy to the target, predicted by [compare.epochs_to_target].",
    ),
]
_Vary = Annotated[
    str, typer.Option(help="For app folders: KEY=VALUE,VALUE,... of their run config.")
]


def compare(
    context: typer.Context,
    scenario: _Scenario,
    strategies: _Strategies = None,
    engine: _Engine = "local",
    out: _Out = None,
    seeds: _Seeds = None,
    tune: _Tune = None,
    search: _Search = None,
    until_target: _UntilTarget = False,
    front: _Front = False,
    cluster: AppCluster = None,
    vary: _Vary = "",
    nodes: AppNodes = None,
    training_flops: AppFlops = None,
    expect: AppClaims = None,
    fusion: Fusion = None,
    set_: Set = None,
    workers: Workers = None,
    log: Log = "",
    as_json: Json = False,
) -> None:
    """Run the same work under several strategies, or several Flower apps, and put them side by side."""
    from socflower.cluster.cluster_file import MOST_SOCS

    folders = [path for path in scenario if path.is_dir()]
    require_engine(engine)
    refuse_unread(context, unread_by_compare(engine, of_app_folders=bool(folders)))
    require_count("--workers", workers, 0, MAX_WORKERS)
    require_count("--nodes", nodes, 1, MOST_SOCS)
    if len(scenario) > 1 and len(folders) < len(scenario):
        raise ConfigError("compare takes one scenario file, or folders of Flower apps")
    shared: dict[str, Any] = {"engine": engine, "num_workers": workers}
    if folders:
        settings: dict[str, Any] = {
            "num_nodes": nodes,
            "training_flops": training_flops,
            "overrides": tuple(set_ or ()),
            "claims": tuple(expect or ()),
        }
        logging = round_logging(log)
        claims = _compare_app_folders(
            folders, cluster, out, vary, as_json, logging, **settings, **shared
        )
    else:
        claims = _compare_strategies(
            _loaded(scenario[0], set_ or [], fusion),
            scenario[0],
            strategies,
            out,
            as_json,
            seeds=seeds,
            tune=tune,
            search=search,
            until_target=until_target,
            front=front,
            logging=round_logging(log),
            **shared,
        )
    exit_on_failed_claims(claims)


def _loaded(path: Path, overrides: list[str], fusion: str | None) -> "Scenario":
    """Return the scenario with the price of messages that --fusion names."""
    from socflower.scenario.schema.file import load_scenario

    loaded = load_scenario(path, overrides)
    # The option is checked first, so that a mistake names it and not a key of the file.
    refuse_fusion_of_split(loaded, fusion)
    if fusion is None:
        return loaded
    return load_scenario(path, [*overrides, f"strategy.fusion={fusion}"])


def _compare_strategies(
    scenario: "Scenario",
    path: Path,
    strategies: str | None,
    out: Path | None,
    as_json: bool,
    *,
    seeds: str | None,
    tune: list[str] | None,
    search: int | None,
    front: bool,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Compare strategies, print the comparison and return the claims."""
    from socflower.scenario.comparison import compare as run_comparison
    from socflower.scenario.comparison import parse_seeds
    from socflower.scenario.search import Search
    from socflower.scenario.tuning import parse_tuning

    if tune and search is not None:
        raise ConfigError("--tune and --search both choose settings; give one of them")
    found_by = None if search is None else Search(budget=search)
    names = list(scenario.compare.strategies)
    if strategies:
        names = [name.strip() for name in strategies.split(",")]
    target = out or Path("out") / f"{scenario.name}-compare"
    with (
        mistakes_name_file(scenario.name, path),
        prints_to_stderr() as stdout,
        run_progress(as_json) as bar,
        _shown_front(scenario, None if as_json else Console(file=stdout)) as shown,
    ):
        document = run_comparison(
            scenario,
            names,
            target,
            on_start=bar,
            seeds=parse_seeds(seeds) if seeds else (),
            tuning=parse_tuning(tune) if tune else found_by,
            front=shown if front else None,
            **settings,
        )
    return _printed(scenario, document, target, as_json)


@contextmanager
def _shown_front(scenario: "Scenario", console: Console | None) -> "Iterator[Front]":
    """Yield what prints the predictions of all methods to a console before anything trains; nothing without one."""
    from socflower.scenario.predicted_methods import Front, PredictedMethods
    from socflower.strategies.presets import family_of

    bar = step_progress(ERR, disable=console is None)
    task = bar.add_task("", total=len(family_of(scenario.strategy.name)))

    def on_method(name: str) -> None:
        bar.start()
        bar.update(task, description=f"predicting {name}", advance=1)

    def on_predicted(methods: PredictedMethods) -> None:
        bar.stop()
        quality, target = scenario.compare.target_of([])
        if console is not None:
            print_methods(console, methods.to_document(), quality.goal(target))

    try:
        yield Front(on_method=on_method, on_predicted=on_predicted)
    finally:
        bar.stop()


def _compare_app_folders(
    folders: Sequence[Path],
    cluster: Path | None,
    out: Path | None,
    vary: str,
    as_json: bool,
    logging: "RoundLogging",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Compare app folders, print the comparison and return the claims."""
    cluster_file = require_cluster(cluster, folders[0])
    from socflower.scenario.app_comparison import app_variants, compare_apps

    runs = app_variants(folders, vary, cluster_file=cluster_file, **settings)
    names = "-".join(folder.resolve().name for folder in folders)
    target = out or Path("out") / f"{names}-compare"
    with prints_to_stderr():
        document = compare_apps(runs, target, on_notice=print_notice, logging=logging)
    return _printed(None, document, target, as_json)


def _printed(
    scenario: "Scenario | None", document: Mapping[str, Any], out: Path, as_json: bool
) -> list[dict[str, Any]]:
    """Print a comparison, and return its claims."""
    if as_json:
        print_json(document)
    else:
        print_comparison(OUT, scenario, document, out)
    claims: list[dict[str, Any]] = document["expectations"]
    return claims


def print_comparison(
    console: Console, scenario: "Scenario | None", document: Mapping[str, Any], out: Path
) -> None:
    """Print the strategies, or apps, side by side."""
    if scenario is not None:
        print_question(console, scenario)
    deployed = any(row["virtual_s"] is None for row in document["rows"])
    measured = "times as measured; energy and bytes as predicted"
    console.print(_table("app" if scenario is None else "strategy", document, deployed))
    print_text(measured if deployed else "virtual times", console, "dim")
    if means := document.get("means"):
        seeds = ", ".join(map(str, means[0]["seeds"]))
        print_text(f"mean ± sample standard deviation over seeds {seeds}", console, "dim")
    if document["headline"]:
        print_text(document["headline"], console, "bold")
    if methods := document.get("methods"):
        _print_front(console, methods["front"], document["rows"])
    for caveat in document.get("caveats", ()):
        print_text(f"but {caveat}", console)
    if tuning := document.get("tuning"):
        chosen = [f"{name} {found['chosen']}" for name, found in tuning["strategies"].items()]
        print_text(
            f"{tuning['key']}, searched with seed {tuning['seed']}: {', '.join(chosen)}", console
        )
    if document.get("fusions"):
        _print_fusions(console, document["fusions"])
    if document.get("predictions"):
        _print_predictions(console, document["predictions"])
    print_claims(console, document["expectations"])
    print_text(f"report: {out / 'report.html'}", console)


def _table(kind: str, document: Mapping[str, Any], deployed: bool) -> Table:
    """Return a row for each run, or for each strategy's mean over seeds."""
    quality = QUALITIES[document["quality"]]
    goal = quality.goal(document[quality.target_key])
    # Heads of two lines, so that eight columns fit a terminal of 80.
    heads = (f"final\n{quality.name}", f"time to\n{goal}", "energy\nto it")
    totals = ("time\nin all", "energy\nin all", "between\nSoCs", "over\nhub")
    table = Table(kind, *heads, *totals, **_NARROW)
    if means := document.get("means"):
        for row in means:
            _add_means(table, row, quality, deployed)
        return table
    for row in document["rows"]:
        traffic: Mapping[str, float] = row["bytes"] or {}
        inside = traffic["intra_board"] + traffic["inter_board"] if traffic else None
        reached = row[quality.time_key]
        missed = reached is None and document[quality.target_key] is not None
        table.add_row(
            row["strategy"],
            quality.shown(row[quality.final_key]),
            "not reached" if missed else human_seconds(reached),
            _joules(row[quality.energy_key]),
            human_seconds(row["wall_s"] if deployed else row["virtual_s"]),
            _joules(row["energy_j"]),
            human_bytes(inside),
            human_bytes(traffic.get("hub")),
        )
    return table


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
        epochs = [f"{row['strategy']} {human_seconds(row['epoch_s'][fusion])}" for row in rows]
        print_text(f"an epoch, messages {fusion}: {', '.join(epochs)}", console, "dim")


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
        title="Predicted, not trained: an epoch at equal samples a step, below it each at its best",
        title_justify="left",
        **_NARROW,
    )
    for row in found["rows"]:
        pairs = zip(row["equal_epoch_s"], row["best_epoch_s"], strict=True)
        table.add_row(
            row["model"],
            row["arithmetic"],
            *(f"{human_seconds(equal)}\n{human_seconds(best)}" for equal, best in pairs),
            f"{human_ratio(row['equal_gain'])}\n{human_ratio(row['best_gain'])}",
        )
    console.print(table)
    if strategies[1:]:
        print_text(
            f"the gain is {strategies[0]}'s over the quickest of {', '.join(strategies[1:])}; all take "
            f"{found['rows'][0]['step_samples']} samples a step; at its best each has the number of SoCs and the "
            "overlap that are quickest",
            console,
            "dim",
        )


def print_methods(console: Console, methods: Mapping[str, Any], goal: str) -> None:
    """Print what is predicted of every strategy, and which of them train."""
    heads = ("an epoch at\nequal steps", "the same\nat its best", "with", f"to\n{goal}")
    table = Table("predicted", *heads, "settings", **_NARROW)
    for row in methods["rows"]:
        verdict = "not searched"
        if row["time_s"] is not None:
            verdict = "on the front" if row["on_front"] else "dominated"
        # One bucket is no overlap.
        best = [f"{each} {_OF_BEST[key]}" for key, each in row["best"].items() if each != 1]
        table.add_row(
            row["strategy"],
            _below(row["equal_epoch_s"], row["equal_epoch_energy_j"]),
            _below(row["best_epoch_s"], row["best_epoch_energy_j"]),
            "\n".join(best),
            _below(row["time_s"], row["energy_j"]),
            verdict,
        )
    console.print(table)
    for name, why in methods["refused"].items():
        print_text(f"without {name}: {why}", console, "dim")
    print_text(
        f"from the cost model, without heat, at {methods['step_samples']} samples a step. An epoch does not teach "
        f"every method the same: epochs to {goal} are known from earlier trainings, with settings that were searched",
        console,
        "dim",
    )
    left_out = f"; dominated: {', '.join(methods['left_out'])}" if methods["left_out"] else ""
    print_text(f"training {', '.join(methods['trained'])}{left_out}", console, "bold")


_OF_BEST = {"socs": "SoCs", "overlap_buckets": "buckets"}


def _below(seconds: float | None, joules: float | None) -> str:
    return "-" if seconds is None else f"{human_seconds(seconds)}\n{_joules(joules)}"


def _print_front(
    console: Console, front: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print which of the trained strategies no other one dominates: by the one seed, or by the means over seeds."""
    best = [
        f"{row['strategy']} {human_seconds(row['time_s'])}, {_joules(row['energy_j'])}"
        for row in sorted(front, key=lambda row: float(row["time_s"]))
        if row["on_front"]
    ]
    seeds = ", ".join(dict.fromkeys(str(row["seed"]) for row in rows))
    if best:
        print_text(f"on the front as trained with seed {seeds}: {'; '.join(best)}", console)


def _joules(value: float | None) -> str:
    return human_joules(value).partition(" (")[0]
