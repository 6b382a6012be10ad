"""`socflower scenarios` lists the shipped scenarios; `socflower demo` runs a first comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from socflower.cli.compare import compare
from socflower.cli.options import Json, Workers
from socflower.cli.terminal import OUT, print_json
from socflower.quantities import counted, human_seconds

DEMO = "digits_demo"


def scenarios(as_json: Json = False) -> None:
    """List the scenarios that run, compare and plan take by name."""
    from socflower.scenario.shipped import list_scenarios

    listed = list(list_scenarios())
    if as_json:
        print_json({"schema": 1, "scenarios": listed})
    else:
        print_scenarios(OUT, listed)


def print_scenarios(console: Console, listed: Sequence[Mapping[str, Any]]) -> None:
    """Print each scenario: its name and size, its question, and what it needs."""
    for entry in listed:
        parts = [counted(entry["num_socs"], "SoC"), entry["model"], entry["data"], *entry["needs"]]
        if (cpu_s := entry["recorded_cpu_s"]) is not None:
            parts.append(f"about {human_seconds(cpu_s)} of one core")
        console.print(entry["name"], style="bold", markup=False, highlight=False)
        for text, style in ((entry["question"], "italic"), (", ".join(filter(None, parts)), "dim")):
            console.print(Padding(text, (0, 0, 0, 2)), style=style, markup=False, highlight=False)


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("out/demo"),
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Predict every method on the cluster of digits_demo and train the front, as `make demo` does.

    As `socflower compare digits_demo --front --until-target`.
    """
    from socflower.scenario.shipped import scenario_files

    compare(
        context,
        [scenario_files()[DEMO]],
        out=out,
        front=True,
        until_target=True,
        workers=workers,
        as_json=as_json,
    )
