"""`socflower bench`: the benchmarks of the source tree."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from socflower.cli.options import Json, refuse_all_but
from socflower.cli.terminal import OUT, print_json
from socflower.engines.names import require_count
from socflower.errors import ConfigError, TrainingFailed

_TRUTH, _MOST_CELLS = "truth", 10_000
_NOT_BENCHMARKS = (
    "harness",
    "int8_settings",
    "int8_step_isolated",
    "heat_calibration",
    "mapping_reference",
    "processes",
    "__main__",
)


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Name of the benchmark; without one, the list.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Smaller cases, fewer repeats.")] = False,
    cells: Annotated[
        int | None, typer.Option(help="Of truth: how many trainings are drawn (default: 100).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of truth: what they are drawn from (default: 0).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a benchmark: it times ours and a named peer in the same run, and checks both answers."""
    if name is None:
        refuse_all_but(context, "as_json", because="without a name, bench only lists what there is")
        if as_json:
            print_json({"schema": 1, "benchmarks": benchmark_names()})
        else:
            OUT.print("\n".join(benchmark_names()))
        return
    if name != _TRUTH:
        refuse_all_but(
            context, "name", "quick", "as_json", because=f"only bench {_TRUTH} draws its cases"
        )
    if cells is not None:
        require_count("--cells", cells, 1, _MOST_CELLS)
    draws = {"cells": cells, "seed": seed}
    document = run_benchmark(
        name, quick=quick, **{key: value for key, value in draws.items() if value is not None}
    )
    if as_json:
        print_json(document)
    else:
        print_benchmark(OUT, document)
    if not all(row["ok"] for row in document["rows"]):
        raise typer.Exit(1)


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks, as `socflower bench NAME` takes them."""
    return sorted(
        path.stem.replace("_", "-")
        for path in _folder().glob("*.py")
        if path.stem not in _NOT_BENCHMARKS
    )


def run_benchmark(name: str, *, quick: bool, **options: int) -> dict[str, Any]:
    """Run a benchmark in a process of its own and return its document: machine, peers if it describes them, rows.

    `options` are the benchmark's own. Raises `ConfigError` for a name that does not exist and `TrainingFailed` for a
    benchmark that ends without a document.
    """
    if name not in benchmark_names():
        raise ConfigError(f"bench {name!r} is unknown; there are {', '.join(benchmark_names())}")
    folder = _folder()
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        name,
        "--json",
        *(["--quick"] if quick else []),
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    ran = subprocess.run(command, cwd=folder.parent, stdout=subprocess.PIPE, text=True, check=False)
    # What a peer printed stands before the document, which begins with a brace on a line of its own.
    _, _, document = f"\n{ran.stdout}".partition("\n{\n")
    try:
        found: dict[str, Any] = json.loads("{" + document)
    except ValueError:
        raise TrainingFailed(
            f"bench {name}: ended with exit status {ran.returncode} and without a result"
        ) from None
    return found


def _folder() -> Path:
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / "benchmarks" / "harness.py").exists():
            return root / "benchmarks"
    raise ConfigError(
        "bench: no benchmarks/ folder here; run it in a checkout of socflower's sources"
    )


def print_benchmark(console: Console, document: Mapping[str, Any]) -> None:
    """Print a benchmark's rows, one per line, since the text of a case is too long for a table."""
    console.print(
        ", ".join(f"{key} {value}" for key, value in document["machine"].items()), style="dim"
    )
    for row in document["rows"]:
        limit = "" if row["limit"] is None else f", limit {row['limit']:.4g}"
        console.print(
            f"{escape(row['case'])}: [bold]{row['ours']:.4g} {row['unit']}[/] against "
            f"{row['peer_value']:.4g} ({escape(row['peer'])}), ratio {row['ratio']:.3g}{limit}"
            f"{'' if row['ok'] else '  [bold red]WRONG ANSWER[/]'}",
            soft_wrap=True,
            highlight=False,
        )
