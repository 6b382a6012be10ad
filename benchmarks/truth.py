"""Virtual time against trainings of random cells in network namespaces, each predicted before it is measured.

`ours` is the prediction. A cell is a cluster, a model, a strategy and options, drawn from the seed; no constant is
fitted to cells. In every other cell SoCs sleep instead of computing, so that the number of cores of this machine does
not matter. The overhead of our runtime (per message, exchange and synchronisation) is measured first, on other
trainings.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks.harness import Row, more_is_better, note
from benchmarks.processes import LineProcess
from benchmarks.truth_cells.cell import ONE_RING, Cell, draw_cells, reference_cells
from benchmarks.truth_cells.prediction import Constants
from tests.testbed.testbed import missing
from tests.testbed.topology import NAMESPACES

# A cell that does not answer within this time has failed.
_CELL_S = 60.0
CATALOGUE_MESSAGE_S = 0.000485


def run(quick: bool = False, cells: int = 100, seed: int = 0) -> list[Row]:
    """Return a row for each cell, and rows of the errors over all cells."""
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
        note(
            f"{row.case}: {row.ours:.3f} s, measured {row.peer_value:.3f}: {100 * error:+.1f} % "
            f"{_phases(found)}"
        )
    for name, errors in {**halves, "all": [*halves["sleeping"], *halves["computing"]]}.items():
        if len(errors) > 1:
            rows += _summary(name, [abs(error) for error in errors], seed)
    return rows


def measured_constants() -> Constants:
    """Return the overhead of our runtime beside bytes and computation, measured on reference trainings.

    A step takes s + m * (sub-steps of its rings) longer than its bytes; s and m are fitted by least squares, and
    neither is negative.
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
    """Return the two coefficients of non-negative least squares."""
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
    """Yield each cell with its prediction and its measurement, or with an error if it failed."""
    resident: LineProcess | None = None
    try:
        for cell in cells:
            resident = resident or _resident()
            asked = {"cell": asdict(cell), "constants": asdict(constants)}
            found = _answer(resident, json.dumps(asked))
            if "measured_s" not in found:
                resident.end()
                resident = None
            yield cell, found
    finally:
        if resident is not None:
            resident.end()


def _resident() -> LineProcess:
    """Start the process that has imported everything and forks each cell's processes."""
    return LineProcess(
        "benchmarks.truth_cells.resident",
        prefix=NAMESPACES,
        timeout_s=_CELL_S,
        stderr=subprocess.DEVNULL,
    )


def _answer(resident: LineProcess, asked: str) -> dict[str, Any]:
    resident.write(asked)
    found: dict[str, Any] = {}
    while not {"measured_s", "error"} & set(found):
        try:
            found |= json.loads(resident.read())
        except RuntimeError as error:
            return {**found, "error": str(error)}
    return found


def _row(cell: Cell, found: Mapping[str, Any]) -> tuple[Row, float]:
    """Return a cell's row and its relative error, which is 1 if the cell failed."""
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
    row = more_is_better(
        f"{cell.text}, {found['num_steps']} steps",
        predicted_s,
        "measured",
        measured_s,
        "s",
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
    """Return rows of the median, the 95th percentile and the largest of absolute errors, against the aims."""
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
