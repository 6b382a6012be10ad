"""What every benchmark shares: interleaved timing against a named peer, and one document of rows."""

import argparse
import inspect
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_VERSIONS_OF = ("socflower", "flwr", "numpy", "torch", "grpcio")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison. `ratio` above 1 means that ours is better, whichever way `unit` runs."""

    case: str
    ours: float
    peer: str
    peer_value: float
    unit: str
    ratio: float
    limit: float | None = (
        None  # what the machine or a proof allows `ours` at best, in `unit`, where known
    )
    ok: bool  # whether the answer was checked and right


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
    """Time `functions` in turn, so that a machine that slows down or is shared slows all of them alike."""
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
    """Return what the figures depend on: processor, cores usable here, system and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _VERSIONS_OF},
    }


def document(rows: Sequence[Row], peers: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the document that `socflower bench NAME --json` prints; `peers` says how they were built and held."""
    described = {} if peers is None else {"peers": peers}
    return {"schema": 1, "machine": machine(), **described, "rows": [asdict(row) for row in rows]}


def main(
    run: Callable[..., list[Row]], peers: Callable[[], Mapping[str, object]] | None = None
) -> int:
    """Run a benchmark as a script: `--quick` for fewer repeats, `--json` for programs. 0 if all answers are right.

    Parameters of `run` that are whole numbers are options too.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    for name, parameter in inspect.signature(run).parameters.items():
        if parameter.annotation is int:
            parser.add_argument(f"--{name}", type=int, default=parameter.default)
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    rows = run(**options)
    if as_json:
        print(json.dumps(document(rows, None if peers is None else peers()), indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in machine().items()))
        for row in rows:
            limit = "" if row.limit is None else f", limit {row.limit:.4g}"
            print(
                f"{row.case}: {row.ours:.4g} {row.unit} against {row.peer_value:.4g} ({row.peer}), "
                f"{row.ratio:.2f} x better{limit}{'' if row.ok else '  WRONG ANSWER'}"
            )
    return 0 if all(row.ok for row in rows) else 1


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
