"""Runs a benchmark: `python -m benchmarks NAME --quick --json`."""

import sys

from benchmarks.harness import main

if __name__ == "__main__":
    sys.exit(main(f"benchmarks.{sys.argv.pop(1).replace('-', '_')}"))
