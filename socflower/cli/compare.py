"""`socflower compare`: the same work under several strategies."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    Engine,
    Json,
    Log,
    ScenarioPath,
    Set,
    Workers,
    refuse_unread,
    round_logging,
    unread_by_compare,
)
from socflower.cli.terminal import (
    OUT,
    exit_on_failed_claims,
    print_claims,
    print_json,
    print_line,
    print_question,
    run_progress,
)
from socflower.engines.names import MAX_WORKERS, require_count, require_engine
from socflower.quantities import human_bytes, human_joules, human_ratio, human_seconds, percent

if TYPE_CHECKING:  # pydantic and the planners are loaded by the command that needs them
    from socflower.scenario.schema.config import Scenario


def compare(
    context: typer.Context,
    scenario: ScenarioPath,
    strategies: Annotated[str | None, typer.Option(help="Comma-separated; default the scenario's [compare].")] = None,
    engine: Engine = "local",
    out: Annotated[Path | None, typer.Option(help="Folder; an interrupted comparison continues there.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated: each strategy under each seed; prints mean ± "
                                                   "sample standard deviation. Default: the scenario's.")] = None,
    tune: Annotated[str | None, typer.Option(help="KEY=VALUE,VALUE,...: search a key of [train] for each strategy, "
                                                  "with a seed that is not reported: the quickest to the target "
                                                  "accuracy of [compare], else the most accurate.")] = None,
    set_: Set = None,
    workers: Workers = None,
    log: Log = "",
    as_json: Json = False,
) -> None:
    """Run the same work under several strategies and put them side by side."""
    require_engine(engine)
    refuse_unread(context, unread_by_compare(engine))
    require_count("--workers", workers, 0, MAX_WORKERS)
    from socflower.scenario.comparison import compare as run_comparison
    from socflower.scenario.comparison import parse_seeds
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.tuning import parse_tuning

    loaded = load_scenario(scenario, set_ or ())
    names = [name.strip() for name in strategies.split(",")] if strategies else list(loaded.compare.strategies)
    target = out or Path("out") / f"{loaded.name}-compare"
    logging = round_logging(log)
    with run_progress(as_json) as bar:
        document = run_comparison(loaded, names, target, engine=engine, num_workers=workers, on_start=bar,
                                  seeds=parse_seeds(seeds) if seeds else (),
                                  tuning=parse_tuning(tune) if tune else None, logging=logging)
    if as_json:
        print_json(document)
    else:
        print_comparison(OUT, loaded, document, target)
    exit_on_failed_claims(document["expectations"])


def print_comparison(console: Console, scenario: "Scenario", document: Mapping[str, Any], out: Path) -> None:
    """Print the strategies side by side."""
    print_question(console, scenario)
    # Heads of two lines, so that eight columns fit a terminal of 80.
    goal = percent(document["target_accuracy"])
    deployed = any(row["virtual_s"] is None for row in document["rows"])
    table = Table("strategy", "final\naccuracy", f"time to\n{goal}", "energy\nto it", "time\nin all",
                  "energy\nin all", "between\nSoCs", "over\nhub",
                  header_style="bold", padding=(0, 1), collapse_padding=True, pad_edge=False)
    for row in document["means"]:
        _add_means(table, row, deployed)
    for row in () if document["means"] else document["rows"]:
        inside = row["bytes"]["intra_board"] + row["bytes"]["inter_board"]
        reached = row["time_to_accuracy_s"]
        table.add_row(row["strategy"], percent(row["final_accuracy"]),
                      "not reached" if reached is None else human_seconds(reached),
                      _joules(row["energy_to_accuracy_j"]),
                      human_seconds(row["wall_s"] if deployed else row["virtual_s"]), _joules(row["energy_j"]),
                      human_bytes(inside), human_bytes(row["bytes"]["hub"]))
    console.print(table)
    print_line("times as measured; energy and bytes as predicted" if deployed else "virtual times", console, "dim")
    if document["means"]:
        print_line("mean ± sample standard deviation over seeds "
                   + ", ".join(map(str, document["means"][0]["seeds"])), console, "dim")
    if document["headline"]:
        print_line(document["headline"], console, "bold")
    if tuning := document["tuning"]:
        print_line(f"{tuning['key']}, searched with seed {tuning['seed']}: " + ", ".join(
            f"{name} {found['chosen']}" for name, found in tuning["strategies"].items()), console)
    if document["predictions"]:
        _print_predictions(console, document["predictions"])
    print_claims(console, document["expectations"])
    print_line(f"report: {out / 'report.html'}", console)


def _add_means(table: Table, row: Mapping[str, Any], deployed: bool) -> None:
    """Add the row of a strategy's seeds: each mean with its spread below it."""
    num_seeds, spread = len(row["seeds"]), row["spread"]

    def cell(figure: str, shown: Callable[[float | None], str]) -> str:
        if row[figure] is None:
            return f"{row['num_reached']} of {num_seeds}\nreached it" if figure == "time_to_accuracy_s" else shown(None)
        return f"{shown(row[figure])}\n± {shown(spread[figure])}"

    table.add_row(row["strategy"], cell("final_accuracy", percent), cell("time_to_accuracy_s", human_seconds),
                  cell("energy_to_accuracy_j", _joules), cell("wall_s" if deployed else "virtual_s", human_seconds),
                  cell("energy_j", _joules), human_bytes(row["bytes"]["intra_board"] + row["bytes"]["inter_board"]),
                  human_bytes(row["bytes"]["hub"]))


def _print_predictions(console: Console, predictions: Sequence[Mapping[str, Any]]) -> None:
    """Print the epochs of `[[compare.predict]]`, a row for each workload."""
    from socflower.report.summary import prediction_table

    found = prediction_table(predictions)
    strategies = found["strategies"]
    table = Table("model", "arithmetic", *strategies, "gain", title="Predicted, not trained: an epoch on this cluster",
                  title_justify="left", header_style="bold", padding=(0, 1), collapse_padding=True, pad_edge=False)
    for row in found["rows"]:
        table.add_row(row["model"], row["arithmetic"], *(
            human_seconds(seconds) for seconds in row["epoch_s"]), human_ratio(row["gain"]))
    console.print(table)
    if strategies[1:]:
        print_line(f"the gain is {strategies[0]}'s over the quickest of {', '.join(strategies[1:])}", console, "dim")


def _joules(value: float | None) -> str:
    return human_joules(value).partition(" (")[0]
