"""Virtual time against trainings of random cells in network namespaces, each predicted before it is measured.

`ours` is the prediction. A cell is a cluster, a model, a strategy and options, drawn from the seed; no constant is
fitted on any. In every other one SoCs sleep instead of computing, so that this machine's cores do not decide. What our
runtime costs besides (a message, an exchange, a synchronisation) is measured first, on trainings that are no cells.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Row, main
from benchmarks.truth_cells.cell import ONE_RING, Cell, draw_cells, reference_cells
from benchmarks.truth_cells.prediction import Constants
from tests.testbed.testbed import REPOSITORY, missing

_CELL_S = 60.0  # after which a cell has failed
_NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
)
CATALOGUE_MESSAGE_S = 0.000485


def run(quick: bool = False, cells: int = 100, seed: int = 0) -> list[Row]:
    """Return a row for each cell, and what all come to."""
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    constants = measured_constants()
    rows = [
        Row(
            case=f"a message of a ring over {runtime}",
            ours=seconds,
            peer="the catalogue's, fitted to a paper",
            peer_value=CATALOGUE_MESSAGE_S,
            unit="s",
            ratio=CATALOGUE_MESSAGE_S / max(seconds, 1e-9),
            ok=True,
        )
        for runtime, seconds in constants.message_s.items()
    ]
    rows += [
        Row(
            case=f"{what} over {name}",
            ours=seconds,
            peer="virtual time",
            peer_value=0.0,
            unit="s",
            ratio=0.0,
            ok=True,
        )
        for what, costs in (
            ("a step with an exchange, besides,", constants.step_s),
            ("a synchronisation, besides,", constants.synchronisation_s),
        )
        for name, seconds in costs.items()
    ]
    halves: dict[str, list[float]] = {"sleeping": [], "computing": []}
    for cell, found in measured(draw_cells(min(cells, 6) if quick else cells, seed), constants):
        row, error = _row(cell, found)
        rows.append(row)
        halves["sleeping" if cell.sleeps else "computing"].append(error)
        print(
            f"{row.case}: {row.ours:.3f} s, measured {row.peer_value:.3f}: {100 * error:+.1f} % "
            f"{_phases(found)}",
            file=sys.stderr,
            flush=True,
        )
    for name, errors in {**halves, "all": [*halves["sleeping"], *halves["computing"]]}.items():
        if len(errors) > 1:
            rows += _summary(name, [abs(error) for error in errors], seed)
    return rows


def measured_constants() -> Constants:
    """Return what our runtime costs beside bytes and computation, measured on trainings that are no cells.

    A step takes s + m * (sub-steps of its rings) longer than the bytes: least squares, none negative.
    """
    steps: dict[str, list[tuple[tuple[float, float], float]]] = {}
    synchronisation_s: dict[str, float] = {}
    for cell, found in measured(reference_cells(), Constants.none()):
        if "measured_s" not in found:
            raise RuntimeError(f"reference {cell.text}: {found['error']}")
        if cell.strategy == ONE_RING:
            substeps = 2.0 * (cell.num_socs - 1) * cell.overlap_buckets
            excess_s = (found["measured_s"] - found["predicted_s"]) / (2 * found["num_steps"])
            steps.setdefault(cell.runtime, []).append(((1.0, substeps), excess_s))
        else:
            synchronisation_s[f"{cell.transport} {cell.leaders}"] = max(
                0.0, found["between_s"] - found["synchronisation_s"]
            )
    solved = {runtime: _least_squares(rows) for runtime, rows in steps.items()}
    return Constants(
        message_s={runtime: message for runtime, (_, message) in solved.items()},
        step_s={runtime: step for runtime, (step, _) in solved.items()},
        synchronisation_s=synchronisation_s,
    )


def _least_squares(rows: Sequence[tuple[tuple[float, float], float]]) -> tuple[float, float]:
    """Return the two coefficients of least squares, none below 0."""
    left, right = np.array([each for each, _ in rows]), np.array([value for _, value in rows])
    both, *_ = np.linalg.lstsq(left, right, rcond=None)
    if (both >= 0.0).all():
        return float(both[0]), float(both[1])
    single = [max(0.0, float(column @ right / (column @ column))) for column in left.T]
    errors = [
        float(((right - column * each) ** 2).sum())
        for column, each in zip(left.T, single, strict=True)
    ]
    return (single[0], 0.0) if errors[0] < errors[1] else (0.0, single[1])


def measured(cells: Sequence[Cell], constants: Constants) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield each cell with its prediction and what was measured; or with an error, where it failed."""
    resident: _Resident | None = None
    try:
        for cell in cells:
            resident = resident or _Resident()
            found = resident.answer({"cell": cell.to_document(), "constants": asdict(constants)})
            if "measured_s" not in found:
                resident.end()
                resident = None
            yield cell, found
    finally:
        if resident is not None:
            resident.end()


class _Resident:
    """The process that has all imported, and its lines."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*_NAMESPACES, sys.executable, "-m", "benchmarks.truth_cells.resident"],
            cwd=REPOSITORY,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = {}
        while not {"measured_s", "error"} & set(found):
            try:
                line = self._lines.get(timeout=_CELL_S)
            except queue.Empty:
                return {**found, "error": f"not done after {_CELL_S:g} s"}
            if not line:
                return {**found, "error": "the resident process ended"}
            found |= json.loads(line)
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


def _row(cell: Cell, found: Mapping[str, Any]) -> tuple[Row, float]:
    """Return a cell's row and its relative error; a cell that failed is off by all."""
    predicted_s, measured_s = found.get("predicted_s", 0.0), found.get("measured_s", 0.0)
    if not measured_s:
        case = f"{cell.text}: FAILED: {found['error'].strip().splitlines()[-1]}"
        return Row(
            case=case,
            ours=predicted_s,
            peer="measured",
            peer_value=0.0,
            unit="s",
            ratio=0.0,
            ok=False,
        ), 1.0
    row = Row(
        case=f"{cell.text}, {found['num_steps']} steps",
        ours=predicted_s,
        peer="measured",
        peer_value=measured_s,
        unit="s",
        ratio=predicted_s / measured_s,
        ok=found["right"],
    )
    return row, predicted_s / measured_s - 1.0


def _phases(found: Mapping[str, Any]) -> str:
    if "between_s" not in found:
        return f"({found.get('error', '').strip()[-300:]})" if "error" in found else ""
    return (
        f"(steps {found['steps_s']:.3f}, measured {found['first_steps_s']:.3f} and {found['last_steps_s']:.3f}; "
        f"synchronisation {found['synchronisation_s']:.3f}, measured {found['between_s']:.3f})"
    )


def _summary(name: str, errors: Sequence[float], seed: int) -> list[Row]:
    """Return the median and the 95th percentile of absolute errors, beside what is aimed at."""
    figures = {
        "median error": (median(errors), 0.02),
        "95th percentile": (quantiles(errors, n=20, method="inclusive")[-1], 0.05),
        "worst": (max(errors), 0.05),
    }
    return [
        Row(
            case=f"{name}, {len(errors)} cells of seed {seed}: {what}",
            ours=100 * value,
            peer="aim",
            peer_value=100 * aim,
            unit="%",
            ratio=aim / max(value, 1e-9),
            ok=True,
        )
        for what, (value, aim) in figures.items()
    ]


if __name__ == "__main__":
    sys.exit(main(run))
