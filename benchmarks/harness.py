"""Shared by all benchmarks: interleaved timing against a named peer, results kept in files, a document of rows."""

import argparse
import inspect
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from socflower.errors import ConfigError
from socflower.wire.saved_state import write_atomically

Value = TypeVar("Value")
peer_notes: dict[str, object] = {}
"""What a run tells of its peers: their settings, and details of each case."""

# Quantiles 0.975 of Student's t distribution, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
_VERSIONS_OF = ("socflower", "flwr", "numpy", "torch", "grpcio")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. `ratio` above 1 means that ours is better, whichever way `unit` runs."""

    case: str
    ours: float
    peer: str
    peer_value: float
    unit: str
    ratio: float
    # Whether the answer was checked and is right.
    ok: bool
    # The best value of `ours`, in `unit`, that the machine or a proof allows, if it is known.
    limit: float | None = None


def less_is_better(
    case: str, ours: float, peer: str, peer_value: float, unit: str, **checked: Any
) -> Row:
    """Return the row of a time, an energy or another quantity of which less is better.

    `checked` has `ok`, and perhaps `limit`.
    """
    return Row(case, ours, peer, peer_value, unit, peer_value / ours, **checked)


def more_is_better(
    case: str, ours: float, peer: str, peer_value: float, unit: str, **checked: Any
) -> Row:
    """Return the row of a rate, an accuracy or another quantity of which more is better, as `less_is_better` does."""
    return Row(case, ours, peer, peer_value, unit, ours / peer_value, **checked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of the repeated runs of one function."""

    median_s: float
    min_s: float


def measure(function: Callable[[], object], *, repeats: int = 7, warmup: int = 1) -> Timing:
    """Return the median and minimum duration of `function` over `repeats` runs after `warmup` more."""
    return measure_interleaved([function], repeats=repeats, warmup=warmup)[0]


def measure_interleaved(
    functions: Sequence[Callable[[], object]], *, repeats: int = 7, warmup: int = 1
) -> list[Timing]:
    """Return a timing for each function. They take turns, so a machine that slows down slows all of them."""
    durations_s: list[list[float]] = [[] for _ in functions]
    for run in range(warmup + repeats):
        for function, own_s in zip(functions, durations_s, strict=True):
            start_s = time.perf_counter()
            function()
            elapsed_s = time.perf_counter() - start_s
            if run >= warmup:
                own_s.append(elapsed_s)
    return [Timing(median_s=statistics.median(own_s), min_s=min(own_s)) for own_s in durations_s]


def machine() -> dict[str, object]:
    """Return what the figures depend on: processor, cores that this process may use, system and versions."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _VERSIONS_OF},
    }


def repeated(step: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that does `times` steps, for steps that are too short to be timed one by one."""

    def run() -> None:
        for _ in range(times):
            step()

    return run


def note(text: str) -> None:
    """Print a line about the progress of a long benchmark; the standard output is for the document."""
    print(text, file=sys.stderr, flush=True)


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the JSON document in a file; if there is no file, make the document and write it."""
    if not path.exists():
        write_json(path, make())
    return json.loads(path.read_text("utf-8"))


def write_json(path: Path, document: object) -> None:
    """Write a document: a benchmark that is interrupted leaves no half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def half_width(differences: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean of two to five paired differences; infinity of a single one."""
    if len(differences) < 2:
        return inf
    return _T[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5


def from_json(kind: type[Value], document: object) -> Value:
    """Return the dataclass that `dataclasses.asdict` and JSON took apart; its lists become tuples again."""
    return TypeAdapter(kind).validate_python(document)


def document(rows: Sequence[Row]) -> dict[str, object]:
    """Return the document that `socflower bench NAME --json` prints."""
    described = {"peers": peer_notes} if peer_notes else {}
    return {"schema": 1, "machine": machine(), **described, "rows": [asdict(row) for row in rows]}


def main(module: str) -> int:
    """Run a benchmark and return its exit status: 0 if all answers are right, 2 for a user's mistake.

    A benchmark is a module with a function `run`. `--quick` asks for smaller cases, `--json` prints the document.
    Parameters of `run` that are whole numbers, paths or flags are options too. If there is a function `write_curves`,
    `--curves FOLDER` calls it.
    """
    benchmark = import_module(module)
    write_curves = getattr(benchmark, "write_curves", None)
    parser = argparse.ArgumentParser(prog=Path(str(benchmark.__file__)).stem)
    parser.add_argument("--json", action="store_true")
    if write_curves is not None:
        parser.add_argument("--curves", type=Path, metavar="FOLDER")
    for name, parameter in inspect.signature(benchmark.run).parameters.items():
        if parameter.annotation is bool:
            parser.add_argument(f"--{name}", action="store_true")
        elif parameter.annotation in (int, Path):
            parser.add_argument(f"--{name}", type=parameter.annotation, default=parameter.default)
    options = vars(parser.parse_args())
    as_json, folder = options.pop("json"), options.pop("curves", None)
    try:
        rows: list[Row] = benchmark.run(**options)
    except ConfigError as error:
        note(f"error: {error}")
        return 2
    if as_json:
        print(json.dumps(document(rows), indent=2))
    else:
        _print(rows)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        benchmark.write_curves(folder)
    return 0 if all(row.ok for row in rows) else 1


def _print(rows: Sequence[Row]) -> None:
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for row in rows:
        limit = "" if row.limit is None else f", limit {row.limit:.4g}"
        wrong = "" if row.ok else "  WRONG ANSWER"
        print(
            f"{row.case}: {row.ours:.4g} {row.unit} against {row.peer_value:.4g} ({row.peer}), "
            f"{row.ratio:.2f} x better{limit}{wrong}"
        )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
