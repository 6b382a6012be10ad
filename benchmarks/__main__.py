"""Runs a benchmark: `python -m benchmarks NAME --quick --json`; `socflower bench` lists the names."""

import sys

from benchmarks.harness import main, note
from socflower.cli.bench import benchmark_names
from socflower.errors import ConfigError, require_known


def run_named() -> int:
    """Run the benchmark that the first argument names; 2 for an unknown one."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    try:
        require_known("bench", name, benchmark_names())
    except ConfigError as error:
        note(f"error: {error}")
        return 2
    return main(f"benchmarks.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(run_named())
