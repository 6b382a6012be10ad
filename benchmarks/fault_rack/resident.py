"""The process inside the namespaces, which keeps a rack and runs cells on it: `Resident` starts it and asks it.

Each line that it reads is a JSON document with a cell, and is answered by the cell's outcome.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fault_rack.cells import SPLIT, Cell
from benchmarks.fault_rack.rack import PREFIX, FaultRack, serve
from benchmarks.fault_rack.trial import BOARDS, SCENARIOS, Outcome, Trial
from benchmarks.harness import from_json
from benchmarks.processes import LineProcess


class Resident:
    """A rack for the cells of one training, in a process with namespaces of its own; a context manager."""

    def __init__(self, training: str, folder: Path, reference: Path) -> None:
        self._process = LineProcess(
            "benchmarks.fault_rack.resident",
            *(training, str(folder), str(reference)),
            prefix=PREFIX,
            timeout_s=900.0,
        )

    def run(self, cell: Cell) -> Outcome:
        """Run a cell."""
        return from_json(Outcome, json.loads(self._process.ask(json.dumps(asdict(cell)))))

    def end(self) -> None:
        """End the rack with all its processes."""
        self._process.end()


def _main(training: str, folder: Path, reference: Path) -> None:
    rack: FaultRack | None = None
    with np.load(reference) as weights:
        right = dict(weights)

    def answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal rack
        rack = rack or FaultRack(
            folder / "rack",
            BOARDS[training],
            cloud_scenario=SCENARIOS[training] if training == SPLIT else None,
        )
        cell = from_json(Cell, asked)
        trial = Trial(rack, cell, folder / cell.name.replace(" ", "-").replace(",", ""))
        trial.go()
        return asdict(trial.outcome(right))

    serve(answer)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
