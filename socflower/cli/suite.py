"""A folder of scenarios under several seeds, as `socflower run FOLDER` shows it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.terminal import (
    ERR,
    OUT,
    print_json,
    print_line,
    print_notice,
    print_text,
    step_progress,
)
from socflower.engines.names import num_cores
from socflower.errors import ConfigError
from socflower.quantities import counted, human_seconds, percent, significant


def suite_files(path: Path, seeds: str | None) -> tuple[Path, ...]:
    """Return the scenarios of a suite: those of a folder, or with `--seeds` a single one; none for an app's folder."""
    from socflower.scenario.suite import scenario_files_in

    if not path.is_dir():
        return () if seeds is None else (path,)
    files = scenario_files_in(path)
    if seeds is not None and not files:
        raise ConfigError(f"--seeds {seeds}: is for scenarios, and {path} has none")
    return files


def run_files(
    files: Sequence[Path],
    out: Path,
    *,
    seeds: str | None,
    overrides: Sequence[str],
    workers: int | None,
    as_json: bool,
) -> None:
    """Run scenarios, print a table with a row for each, and exit with 1 unless all claims hold."""
    from socflower.scenario.comparison import parse_seeds
    from socflower.scenario.suite import SUITE, Suite, run_suite

    suite = Suite(
        files=tuple(files),
        out=out,
        seeds=parse_seeds(seeds) if seeds else (),
        overrides=tuple(overrides),
        num_at_once=workers or num_cores(),
    )
    ended: list[str] = []
    bar = step_progress(ERR, disable=as_json)
    task = bar.add_task("scenarios", total=len(files))

    def on_row(row: Mapping[str, Any]) -> None:
        ended.append(row["name"])
        bar.update(task, description=f"{row['name']} has ended", advance=1)

    try:
        with bar:
            document = run_suite(suite, on_row=on_row)
    except KeyboardInterrupt:
        print_notice(
            f"interrupted; {len(ended)} of {counted(len(files), 'scenario')} ended: {out / SUITE} has them, and the "
            "same command trains what is missing"
        )
        raise typer.Exit(130) from None
    if as_json:
        print_json(document)
    else:
        print_suite(OUT, document, out)
    if not document["holds"]:
        raise typer.Exit(1)


def print_suite(console: Console, document: Mapping[str, Any], out: Path) -> None:
    """Print a row for each scenario with its closest claim, then what failed and what is close."""
    from socflower.scenario.suite import claim_text, closest

    table = Table("scenario", "claims", "the closest one", "margin", "a seed's\nCPU", box=None)
    for row in document["rows"]:
        claims, text, margin = row["claims"], "", ""
        if claim := closest(claims):
            text, margin = claim_text(claim), percent(claim["margin"])
        held = f"{sum(claim['holds'] for claim in claims)} of {len(claims)}"
        cpu = "" if row["cpu_s"] is None else human_seconds(row["cpu_s"])
        style = None if row["holds"] else "red"
        table.add_row(
            row["name"], "error" if row["error"] else held, text, margin, cpu, style=style
        )
    console.print(table)
    for row in document["rows"]:
        if row["error"]:
            print_line(f"ERROR  {row['name']}: {row['error']}", console, "red")
        for claim in row["claims"]:
            if not claim["holds"]:
                print_text(f"FAILS  {row['name']}: {claim_text(claim)}", console, "red")
            elif claim["is_tight"]:
                distance = f"only {significant(claim['spreads'])} standard deviations inside"
                print_text(f"close  {row['name']}: {claim_text(claim)}; {distance}", console, "dim")
    num_held = sum(row["holds"] for row in document["rows"])
    seeds = f" under seeds {', '.join(map(str, document['seeds']))}" if document["seeds"] else ""
    print_text(
        f"{num_held} of {counted(len(document['rows']), 'scenario')} hold{seeds}; {out / 'suite.json'}",
        console,
        "bold",
    )
