"""Finding and running the benchmarks of the source tree's `benchmarks/` folder."""

import importlib
import sys
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError

_NOT_BENCHMARKS = ("harness", "int8_settings", "int8_step_isolated", "mapping_reference", "__init__")


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
