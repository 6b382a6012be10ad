"""Output of the command line for people: progress bars and tables, without computation."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from socflower.cli.process import prints_to_stderr
from socflower.errors import ConfigError
from socflower.quantities import human_joules, human_seconds, percent, significant
from socflower.report.quality import ACCURACY, LOSS
from socflower.wire.logs import LOG_FORMAT, json_line, logs_json

# Importing pydantic and the planners takes long, so only the command that needs them does.
if TYPE_CHECKING:
    from socflower.scenario.schema.scenario_file import Scenario

OUT = Console()
ERR = Console(stderr=True)

OnRound: TypeAlias = Callable[[dict[str, Any]], None]
StartBar: TypeAlias = Callable[[str], OnRound]

_NARROW, _MEDIUM_TIMES, _MEDIUM = 64, 72, 104
"""Terminal widths in columns below which a bar shows less: only the quality, no virtual time, no energy."""


@contextmanager
def progress(console: Console, *, disable: bool, prints_rounds: bool = False) -> Iterator[StartBar]:
    """Yield a function that starts a bar for a strategy and returns the callback for its rounds.

    Without a terminal `prints_rounds` prints a line for each round; as JSON lines rounds are always printed.
    """
    # On a narrow terminal only the bar shrinks; times are not cut off.
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    bar = Progress(*columns, console=console, disable=disable, expand=True)
    started = False

    def add(strategy: str) -> TaskID:
        nonlocal started
        if not started:
            bar.start()
            started = True
        return bar.add_task(_shortened(strategy, console.width), total=None, state="starting")

    try:

        def start(strategy: str) -> OnRound:
            # Without a terminal only the final state is printed, and nothing before an error.
            task = add(strategy) if console.is_interactive else None

            def on_round(entry: dict[str, Any]) -> None:
                nonlocal task
                if logs_json():
                    print_line(json_line("round", **entry), console)
                    return
                if prints_rounds and not console.is_interactive:
                    print_line(_round_line(entry), console)
                task = add(strategy) if task is None else task
                bar.update(
                    task,
                    total=entry["num_rounds"],
                    completed=entry["round"],
                    state=progress_state(entry, console.width),
                )
                for event in entry["events"]:
                    console.print(
                        f"[yellow]{strategy}, round {entry['round']}:[/] {escape(event['text'])}",
                        soft_wrap=True,
                        highlight=False,
                    )

            return on_round

        yield start
    finally:
        if started:
            bar.stop()


def _round_line(entry: Mapping[str, Any]) -> str:
    """Return a round as a line of at most 80 columns."""
    of = f"round {entry['round']} of {entry['num_rounds']}: "
    return of + progress_state(entry, _MEDIUM_TIMES)


def step_progress(console: Console, *, disable: bool) -> Progress:
    """Return the progress bar of work in steps: the current one, how many of all are done, and the elapsed time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        console=console,
        disable=disable or not console.is_interactive,
        expand=True,
        transient=True,
    )


def _shortened(label: str, width: int) -> str:
    """Return a bar's label, shortened so that label, state, times and bar fit a terminal of `width` columns."""
    state = 6 if width < _NARROW else 15 if width < _MEDIUM_TIMES else 28 if width < _MEDIUM else 50
    most = max(12, width - state - 28)
    return label if len(label) <= most else label[: most - 1] + "…"


def progress_state(entry: Mapping[str, Any], width: int) -> str:
    """Return a bar's text on a round, shortened to a terminal of `width` columns."""
    quality = ACCURACY if entry["accuracy"] is not None else LOSS
    value = quality.shown(entry[quality.name])
    # In a deployment the bar's elapsed time is the real one.
    virtual_s = None if "wall_s" in entry else human_seconds(entry["virtual_s"])
    if width < _NARROW:
        return value
    if virtual_s is None or width < _MEDIUM:
        return f"{quality.name} {value}" + (
            "" if virtual_s is None or width < _MEDIUM_TIMES else f"  {virtual_s}"
        )
    return f"{quality.name} {value}  {virtual_s} virtual  {human_joules(entry['energy_j'])}"


def print_question(console: Console, scenario: "Scenario") -> None:
    """Print a scenario's question, if it has one."""
    if scenario.question:
        console.print(scenario.question, style="italic", markup=False, highlight=False)


def print_claims(console: Console, expectations: Sequence[Mapping[str, Any]]) -> None:
    """Print each claim and whether it holds."""
    words = {
        True: "[green]holds[/]",
        False: "[bold red]FAILS[/]",
        None: "[dim]open: its other strategy did not run[/]",
    }
    for claim in expectations:
        of = "".join(
            f", {prefix}{claim[key]}"
            for key, prefix in (("seed", "seed "), ("app", ""))
            if key in claim
        )
        console.print(
            f"{words[claim['holds']]}  {claim['name']} = {claim['expected']:g}{_observed(claim)}{of}"
        )


def _observed(claim: Mapping[str, Any]) -> str:
    """Return the observed value, with enough digits to tell it from the expected one."""
    found, expected = claim["observed"], claim["expected"]
    if found is None:
        return ""
    # Counts are shown in full.
    if isinstance(found, int):
        return f", observed {found}"
    return (
        f", observed {found if significant(found) == significant(expected) else significant(found)}"
    )


def share_of(part: float, whole: Mapping[str, float]) -> str:
    """Return a quantity's share of the whole as a percentage."""
    total = sum(whole.values())
    return percent(part / total) if total else "-"


@contextmanager
def run_progress(as_json: bool, *, prints_rounds: bool = False) -> Iterator[StartBar]:
    """Redirect all other output to stderr, and show progress unless the output is JSON."""
    prints_rounds = prints_rounds and not as_json
    with prints_to_stderr(), progress(ERR, disable=as_json, prints_rounds=prints_rounds) as bar:
        yield bar


def use_log_format(log_format: str) -> None:
    """Let this process and its children log as `--log-format` says; `ConfigError` if that is unknown."""
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format {log_format}: is unknown; use text or json")
    os.environ[LOG_FORMAT] = log_format


def print_line(line: str, console: Console = OUT, style: str = "") -> None:
    """Print one line as it is: not wrapped, and what it quotes is no markup."""
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


def print_text(line: str, console: Console = OUT, style: str = "") -> None:
    """Print one sentence as it is, wrapped between words; a path that is longer than a line stays whole."""
    print_line(
        textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False),
        console,
        style,
    )


def print_notice(line: str) -> None:
    """Print a line about a run on standard error."""
    print_line(json_line(line, "WARNING") if logs_json() else line, ERR)


def print_json(document: Mapping[str, Any], *, one_line: bool = False) -> None:
    """Print a document as JSON on standard output."""
    # Not through rich, which would wrap and colour it. Flushed, for readers of a pipe.
    sys.stdout.write(json.dumps(document, indent=None if one_line else 1, allow_nan=False) + "\n")
    sys.stdout.flush()


def exit_on_failed_claims(expectations: list[dict[str, Any]]) -> None:
    """Exit with status 1 if a claim does not hold."""
    if any(claim["holds"] is False for claim in expectations):
        raise typer.Exit(1)
