"""Shared by all benchmarks: interleaved timing against a named peer, results kept in files, a document of rows."""

import argparse
import inspect
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

Value = TypeVar("Value")
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
    case: str,
    ours: float,
    peer: str,
    peer_value: float,
    unit: str,
    *,
    ok: bool,
    limit: float | None = None,
) -> Row:
    """Return the row of a time, an energy or another quantity of which less is better."""
    return Row(case, ours, peer, peer_value, unit, peer_value / ours, ok, limit)


def more_is_better(
    case: str,
    ours: float,
    peer: str,
    peer_value: float,
    unit: str,
    *,
    ok: bool,
    limit: float | None = None,
) -> Row:
    """Return the row of a rate, an accuracy or another quantity of which more is better."""
    return Row(case, ours, peer, peer_value, unit, ours / peer_value, ok, limit)


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
        document = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: a benchmark that is interrupted leaves no half of a file.
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        partial.replace(path)
    return json.loads(path.read_text("utf-8"))


def from_json(kind: type[Value], document: object) -> Value:
    """Return the dataclass that `dataclasses.asdict` and JSON took apart; its lists become tuples again."""
    return TypeAdapter(kind).validate_python(document)


def document(rows: Sequence[Row], peers: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the document that `socflower bench NAME --json` prints; `peers` describes the peers' settings."""
    described = {} if peers is None else {"peers": peers}
    return {"schema": 1, "machine": machine(), **described, "rows": [asdict(row) for row in rows]}


def main(
    run: Callable[..., list[Row]],
    peers: Callable[[], Mapping[str, object]] | None = None,
    *,
    write_curves: Callable[[Path], None] | None = None,
) -> int:
    """Run a benchmark as a script and return its exit status: 0 if all answers are right.

    `--quick` asks for smaller cases, `--json` prints the document. With `write_curves` there is `--curves FOLDER`.
    Parameters of `run` that are whole numbers or flags are options too.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    if write_curves is not None:
        parser.add_argument("--curves", type=Path, metavar="FOLDER")
    for name, parameter in inspect.signature(run).parameters.items():
        if parameter.annotation is bool:
            parser.add_argument(f"--{name}", action="store_true")
        elif parameter.annotation in (int, Path):
            parser.add_argument(f"--{name}", type=parameter.annotation, default=parameter.default)
    options = vars(parser.parse_args())
    as_json, folder = options.pop("json"), options.pop("curves", None)
    rows = run(**options)
    if as_json:
        print(json.dumps(document(rows, None if peers is None else peers()), indent=2))
    else:
        _print(rows)
    if write_curves is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_curves(folder)
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
