"""`socflower bench`: the benchmarks of the source tree."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from socflower.cli.options import (
    Json,
    refuse_all_but,
)
from socflower.cli.process import prints_on_stderr
from socflower.cli.terminal import (
    OUT,
    print_json,
)
from socflower.errors import ConfigError

_NOT_BENCHMARKS = ("harness", "int8_settings", "int8_step_isolated", "mapping_reference", "__init__")


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without one, the list.")] = None,
    quick: Annotated[bool, typer.Option(help="Smaller cases, fewer repeats.")] = False,
    as_json: Json = False,
) -> None:
    """Run a benchmark: ours against a named peer, in the same run, answers checked."""
    if name is None:
        refuse_all_but(context, "as_json", because="without a name, bench only lists what there is")
        if as_json:
            print_json({"schema": 1, "benchmarks": benchmark_names()})
        else:
            OUT.print("\n".join(benchmark_names()))
        return
    with prints_on_stderr():
        document = run_benchmark(name, quick=quick)
    if as_json:
        print_json(document)
    else:
        print_benchmark(OUT, document)
    if not all(row["ok"] for row in document["rows"]):
        raise typer.Exit(1)


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks, as `socflower bench NAME` takes them."""
    return sorted(path.stem.replace("_", "-") for path in _folder().glob("*.py") if path.stem not in _NOT_BENCHMARKS)


def run_benchmark(name: str, *, quick: bool) -> dict[str, Any]:
    """Run a benchmark and return its document: machine, peers where it describes them, and a row per case."""
    if name not in benchmark_names():
        raise ConfigError(f"bench {name!r} is unknown; there are {', '.join(benchmark_names())}")
    folder = _folder()
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    harness = importlib.import_module("benchmarks.harness")
    rows = module.run(quick=quick)
    document: dict[str, Any] = harness.document(rows, module.peers() if hasattr(module, "peers") else None)
    return document


def _folder() -> Path:
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / "benchmarks" / "harness.py").exists():
            return root / "benchmarks"
    raise ConfigError("bench: no benchmarks/ folder here; run it in a checkout of socflower's sources")


def print_benchmark(console: Console, document: Mapping[str, Any]) -> None:
    """Show a benchmark's rows, a line each: cases are sentences, which a table would break."""
    console.print(", ".join(f"{key} {value}" for key, value in document["machine"].items()), style="dim")
    for row in document["rows"]:
        limit = "" if row["limit"] is None else f", limit {row['limit']:.4g}"
        console.print(f"{escape(row['case'])}: [bold]{row['ours']:.4g} {row['unit']}[/] against "
                      f"{row['peer_value']:.4g} ({escape(row['peer'])}), ratio {row['ratio']:.3g}{limit}"
                      f"{'' if row['ok'] else '  [bold red]WRONG ANSWER[/]'}", soft_wrap=True, highlight=False)
