"""What the command line shows people: progress bars and tables. Nothing here computes."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from socflower.cli.process import prints_on_stderr
from socflower.quantities import human_joules, human_seconds, percent
from socflower.scenario.schema.config import Scenario

OUT = Console()
ERR = Console(stderr=True)

OnRound: TypeAlias = Callable[[dict[str, Any]], None]
StartBar: TypeAlias = Callable[[str], OnRound]

_NARROW, _MEDIUM_TIMES, _MEDIUM = 64, 72, 104
"""Columns of a terminal below which a bar says less: the accuracy alone, no virtual time, no energy."""

@contextmanager
def progress(console: Console, *, disable: bool) -> Iterator[StartBar]:
    """Yield a function that starts a bar for a strategy and returns what to call after each of its rounds."""
    # Only the bar gives way where a terminal is narrow: half a time is none.
    columns = (TextColumn("{task.description:10}"), BarColumn(bar_width=None), TextColumn("{task.fields[state]}"),
               TimeElapsedColumn(table_column=Column(no_wrap=True)),
               TimeRemainingColumn(table_column=Column(no_wrap=True)))
    bar = Progress(*columns, console=console, disable=disable, expand=True)
    begun = False

    def add(strategy: str) -> TaskID:
        nonlocal begun
        if not begun:
            bar.start()
            begun = True
        return bar.add_task(strategy, total=None, state="starting")

    try:

        def start(strategy: str) -> OnRound:
            # What is no terminal gets the last state of all, and nothing before an error.
            task = add(strategy) if console.is_interactive else None

            def on_round(entry: dict[str, Any]) -> None:
                nonlocal task
                task = add(strategy) if task is None else task
                bar.update(task, total=entry["num_rounds"], completed=entry["round"],
                           state=progress_state(entry, console.width))
                for event in entry["events"]:
                    console.print(f"[yellow]{strategy}, round {entry['round']}:[/] {escape(event['text'])}",
                                  soft_wrap=True, highlight=False)

            return on_round

        yield start
    finally:
        if begun:
            bar.stop()


def progress_state(entry: Mapping[str, Any], width: int) -> str:
    """Return what a bar says of a round beside its times, as much as fits a terminal that is `width` columns wide."""
    accuracy = percent(entry["accuracy"])
    # In a deployment time is real, and the bar shows it.
    virtual_s = None if "wall_s" in entry else human_seconds(entry["virtual_s"])
    if width < _NARROW:
        return accuracy
    if virtual_s is None or width < _MEDIUM:
        return f"accuracy {accuracy}" + ("" if virtual_s is None or width < _MEDIUM_TIMES else f"  {virtual_s}")
    return f"accuracy {accuracy}  {virtual_s} virtual  {human_joules(entry['energy_j'])}"


def print_question(console: Console, scenario: Scenario) -> None:
    """Print what a scenario asks, if it asks something."""
    if scenario.question:
        console.print(f"[italic]{escape(scenario.question)}[/]")


def print_claims(console: Console, expectations: Sequence[Mapping[str, Any]]) -> None:
    """Print each claim and whether it holds."""
    words = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: "[dim]open: its other strategy did not run[/]"}
    for claim in expectations:
        observed = "" if claim["observed"] is None else f", observed {claim['observed']:.6g}"
        console.print(f"{words[claim['holds']]}  {claim['name']} = {claim['expected']:g}{observed}")


def share_of(part: float, whole: Mapping[str, float]) -> str:
    """Return what part of a whole a quantity is."""
    total = sum(whole.values())
    return percent(part / total) if total else "-"


@contextmanager
def run_progress(as_json: bool) -> Iterator[StartBar]:
    """Keep everything but the command's own output off standard output, and show progress unless it is JSON."""
    with prints_on_stderr(), progress(ERR, disable=as_json) as bar:
        yield bar


def print_notice(line: str) -> None:
    """Print a line about a run on standard error."""
    ERR.print(escape(line), soft_wrap=True, highlight=False)


def print_json(document: dict[str, Any]) -> None:
    """Print a document as JSON, by itself on standard output."""
    # Not through rich, which would wrap and colour it.
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def exit_by(expectations: list[dict[str, Any]]) -> None:
    """Exit with status 1 if a claim does not hold."""
    if any(claim["holds"] is False for claim in expectations):
        raise typer.Exit(1)
