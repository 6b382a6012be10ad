"""Pairs of faults on deployments of real processes in network namespaces, each with each, and at random moments.

    python -m benchmarks fault-pairs --cells FOLDER --random 100 --seed 1 --most 20 --json

A rack of SuperNodes trains under `socflower run --superlink`: two groups of two, a pipeline of three boards, or an edge
with a cloud. Nodes, a group's leader, a whole group, the ServerApp, the SuperLink, a link, the cloud and stages are
struck, two at a time: at one moment of a round, in the following round, and while a killed ServerApp resumes. Random
cells strike twice at random moments of a command. A part that was struck comes back as under systemd.

A cell is right if the command ends well, with the weights of engine `local` unless a whole group's interval was lost,
each round once, and nothing of the run still running. `ours` are the seconds from the last strike to the first training
message after it. FOLDER has a file for each cell that has run, and only the others are run.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.fault_rack.cells import Cell, matrix, random_cells
from benchmarks.fault_rack.rack import SOCFLOWER
from benchmarks.fault_rack.resident import Resident
from benchmarks.fault_rack.trial import SCENARIOS, Outcome
from benchmarks.harness import Row, from_json, kept, note, peer_notes
from tests.testbed.testbed import missing

LONGEST_S = 40.0
_AIM_S = 5.0


def run(
    quick: bool = False,
    cells: Path = Path("out/fault-pairs"),
    random: int = 100,
    seed: int = 1,
    most: int = 0,
) -> list[Row]:
    """Return a row for each cell of the matrix and of `random` random pairs; -1 of `most` runs none now."""
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    wanted = [*matrix(), *random_cells(random, seed, LONGEST_S)]
    if quick:
        wanted = wanted[::16]
    outcomes = list(outcomes_of(wanted, cells, most or len(wanted)))
    peer_notes.update(cells=len(wanted), outcomes=[asdict(outcome) for outcome in outcomes])
    return [*map(_row, outcomes), *_summary(outcomes)]


def outcomes_of(cells: Iterable[Cell], folder: Path, most: int) -> Iterator[Outcome]:
    """Yield the outcomes in `folder`; cells without one are run first, at most `most` of them."""
    num_run = 0
    with _Racks(folder) as racks:
        for cell in cells:
            path = folder / f"{cell.name.replace(', ', '/').replace(' ', '-')}.json"
            if not path.exists():
                if num_run >= most:
                    continue
                num_run += 1
            yield from_json(Outcome, kept(path, partial(racks.run, cell)))


class _Racks:
    """The rack that cells run on: one for consecutive cells of a training, as long as they are right."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._training = folder, ""
        self._resident: Resident | None = None

    def __enter__(self) -> "_Racks":
        return self

    def __exit__(self, *_: object) -> None:
        if self._resident is not None:
            self._resident.end()
            self._resident = None

    def run(self, cell: Cell) -> dict[str, object]:
        """Run a cell."""
        if self._training != cell.training:
            self.__exit__()
        if self._resident is None:
            self._resident, self._training = self._started(cell.training), cell.training
        outcome = self._resident.run(cell)
        note(f"{cell.name}: {'right' if outcome.ok else '; '.join(outcome.faults)}")
        if not outcome.ok:
            # What went wrong may still be there.
            self.__exit__()
        return asdict(outcome)

    def _started(self, training: str) -> Resident:
        """Start a rack; the undisturbed weights are trained once."""
        reference = (self._folder / "references" / f"{training}.npz").resolve()
        if not reference.exists():
            reference.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="fault-pairs-") as out:
                command = [SOCFLOWER, "run", str(SCENARIOS[training]), "--workers", "0", "--json"]
                command += ["--out", out, "--save-model", str(reference)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        # The logs of cells stay there.
        work = Path(tempfile.mkdtemp(prefix="fault-pairs-"))
        note(f"a rack for {training}, in {work}")
        return Resident(training, work, reference)


def _row(outcome: Outcome) -> Row:
    faults = "" if outcome.ok else f": {'; '.join(outcome.faults)}"
    return _beside_aim(f"{outcome.cell}{faults}", outcome.training_again_s or 0.0, ok=outcome.ok)


def _summary(outcomes: list[Outcome]) -> Iterator[Row]:
    again_s = [each.training_again_s for each in outcomes if each.training_again_s is not None]
    right = sum(each.ok for each in outcomes)
    if not again_s:
        return
    for name, value in (("median", statistics.median(again_s)), ("longest", max(again_s))):
        case = f"{right} of {len(outcomes)} right; training again, {name}"
        yield _beside_aim(case, value, ok=right == len(outcomes))


def _beside_aim(case: str, again_s: float, *, ok: bool) -> Row:
    """Return a row of the seconds until something trains again; 0 if nothing had to."""
    return Row(
        case=case,
        ours=again_s,
        peer="aim",
        peer_value=_AIM_S,
        unit="s",
        ratio=_AIM_S / again_s if again_s else 0.0,
        ok=ok,
    )
