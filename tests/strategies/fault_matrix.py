"""The fault matrix: what may befall a member of a ring, in each phase of a round.

    python -m tests.strategies.fault_matrix docs/results/fault-matrix.json

runs all of it, some ten minutes on two cores, and writes the recovery times.
"""

import functools
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.strategies.faulty_run import FaultyRun

HEARTBEAT_S, RENDEZVOUS_S = 4.0, 6.0
PHASES = ("before the rendezvous", "rendezvous", "mid-batch", "synchronisation", "evaluation")
EVENTS = ("member killed", "leader killed", "member stopped", "leader stopped")
_LATE_S = 2.5  # by which the third member comes later where one of the other two is struck at the rendezvous
_LEADER, _MEMBER = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    event: str
    phase: str
    transport: str = "gloo"

    @property
    def struck(self) -> int:
        return _LEADER if self.event.startswith("leader") else _MEMBER

    @property
    def name(self) -> str:
        return f"{self.event}, {self.phase}, {self.transport}".replace(" ", "-").replace(",", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of a cell: times in seconds."""

    event: str
    phase: str
    transport: str
    recovery_s: (
        float | None
    )  # from the strike to the first step of a ring without the struck; None: none was needed.
    # Of a member that is wanted: until it had left
    target_s: float | None
    events: list[str]  # kinds of the strategy's

    @property
    def in_time(self) -> bool:
        return self.recovery_s is None or self.target_s is None or self.recovery_s <= self.target_s


def cells() -> Iterator[Cell]:
    """Yield all cells; where the bytes are on their way, with both transports."""
    for event in EVENTS:
        for phase in PHASES:
            for transport in ("gloo", "grpc") if phase == "mid-batch" else ("gloo",):
                yield Cell(event=event, phase=phase, transport=transport)
    for event in ("member slow", "member raises"):
        for phase in ("rendezvous", "mid-batch", "synchronisation"):
            for transport in ("gloo", "grpc") if phase == "mid-batch" else ("gloo",):
                yield Cell(event=event, phase=phase, transport=transport)


def run_cell(cell: Cell, folder: Path) -> Row:
    """Run a training through a cell's fault and check all that must hold; return how long the recovery took."""
    struck, event = cell.struck, cell.event
    strikes = event.endswith(("killed", "stopped"))
    struck_at: list[float] = []

    def strike(run: FaultyRun) -> None:
        struck_at.append(run.kill(struck) if event.endswith("killed") else run.stop(struck))

    def evaluate(run: FaultyRun, server_round: int) -> None:
        if strikes and cell.phase == "evaluation" and server_round == 1:
            strike(run)
            time.sleep(0.5)

    # A node that hangs before it has come to its ring finds out only after the rendezvous that it has been left behind.
    slow = event.endswith("stopped") and cell.phase not in ("rendezvous", "mid-batch")
    # Who was stopped is asked in a round whether it is back, and takes part in the next, or on a loaded machine in one
    # after that; all else shows in two rounds.
    with FaultyRun(
        folder,
        transport=cell.transport,
        num_epochs=3 if event.endswith("stopped") else 1,
        interval_epochs=0.5,
        step_s=0.4 if slow else 0.1,
        of_soc=_delays(cell),
        evaluate=evaluate,
    ) as run:
        if strikes and cell.phase == "evaluation":
            run.wait(lambda: struck_at, "the evaluation")
        elif strikes:
            _wait_for_phase(run, cell)
            strike(run)
        if event.endswith("stopped"):
            # Where nobody missed it in the first round, the second one will.
            missed_in = 2 if cell.phase in ("synchronisation", "evaluation") else 1
            run.wait_steps(2, missed_in, 1)
            run.wait(
                lambda: run.mark(2, missed_in, "trained").exists(),
                "the end of the round that missed it",
            )
            run.go_on(struck)
        run.result()
        run.check_weights()
        run.check_ledger(
            {}
            if event.endswith("slow")
            else {server_round: {struck} for server_round in range(1, run.strategy.num_rounds + 1)}
        )
        kinds, texts = run.kinds(), [event.text for event in run.events]
        # At the rendezvous a ring can form only when the last member has come.
        recovery_s = (
            run.recovery_s(
                struck_at[0],
                [struck],
                struck_at[0] + _LATE_S if cell.phase == "rendezvous" else 0.0,
            )
            if strikes
            else None
        )
    assert _wanted(cell) <= set(kinds), texts
    assert kinds == [] or not event.endswith("slow"), texts
    return Row(
        event=event,
        phase=cell.phase,
        transport=cell.transport,
        recovery_s=None if recovery_s is None else round(max(0.0, recovery_s), 2),
        target_s=_target_s(cell),
        events=kinds,
    )


def run_wanted(transport: str, folder: Path) -> Row:
    """Run a training in whose first round a user wants a member's device; return how long the member took to leave."""
    wanted = folder / "wanted"
    with FaultyRun(
        folder,
        transport=transport,
        num_epochs=1,
        interval_epochs=0.5,
        step_s=0.3,
        of_soc={_MEMBER: {"preempt-file": str(wanted)}},
    ) as run:
        run.wait_steps(_MEMBER, 1, 3)
        wanted.touch()
        asked_s = time.monotonic()
        run.wait_mark(_MEMBER, 1, "trained")
        left_s = time.monotonic() - asked_s
        run.check_weights()
        kinds = run.kinds()
    assert "preempted" in kinds and "member-lost" not in kinds, kinds
    return Row(
        event="member wanted by its user",
        phase="mid-batch",
        transport=transport,
        recovery_s=round(left_s, 2),
        target_s=2.0,
        events=kinds,
    )


def _delays(cell: Cell) -> dict[int, dict[str, Any]]:
    struck = cell.struck
    if cell.event.endswith("raises"):
        return {struck: {"raises-in": cell.phase}}
    if cell.event.endswith("slow"):
        return {
            struck: {
                "rendezvous": {"begin-delay-s": 3.0},
                "mid-batch": {"slower": 5},
                "synchronisation": {"end-delay-s": 3.0},
            }[cell.phase]
        }
    if cell.phase == "before the rendezvous":
        return {struck: {"begin-delay-s": 3.0}}
    if cell.phase == "rendezvous":
        return {2: {"begin-delay-s": _LATE_S}}  # the other two meet, and wait for this one
    if cell.phase == "synchronisation":
        return {struck: {"end-delay-s": 3.0}}
    return {}


def _wait_for_phase(run: FaultyRun, cell: Cell) -> None:
    if cell.phase == "before the rendezvous":
        run.wait_mark(cell.struck, 1, "asked")
    elif cell.phase == "rendezvous":
        for soc in (_LEADER, _MEMBER):
            host, _, port = str(run.configs[run.num_socs - 1 - soc]["ring"]).partition(":")
            run.wait(functools.partial(_is_open, host, int(port)), f"the ring port of SoC {soc}")
        time.sleep(0.7)
    elif cell.phase == "mid-batch":
        run.wait_steps(cell.struck, 1, 3)
    else:
        run.wait_mark(cell.struck, 1, "trained")


def _is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _wanted(cell: Cell) -> set[str]:
    """Return the kinds of events that must say what happened."""
    who, _, what = cell.event.partition(" ")
    if what == "slow":
        return set()
    if what == "raises":
        return {"member-lost"} if cell.phase != "synchronisation" else set()
    back = {"returned"} if what == "stopped" else set()
    if cell.phase == "mid-batch":
        return {"member-lost", "ring-formed-again", "replanned", *back}
    if cell.phase == "synchronisation":
        return (
            {"leader-lost"}
            if who == "leader"
            else {"member-lost", *back}
            if what == "stopped"
            else set()
        )
    if cell.phase == "evaluation" and what == "killed":
        return set()  # its next message finds a new process
    return {"member-lost", "replanned", *back}


def _target_s(cell: Cell) -> float | None:
    """Return how long a recovery may take.

    Who has not come yet may still come, and is waited for as long as the rendezvous lasts, hung or dead.
    """
    _, _, what = cell.event.partition(" ")
    if what not in ("killed", "stopped"):
        return None
    if cell.phase == "before the rendezvous" or (
        what == "stopped" and cell.phase in ("synchronisation", "evaluation")
    ):
        return RENDEZVOUS_S + 5.0
    if what == "stopped" and cell.phase == "rendezvous" and cell.struck == _LEADER:
        return RENDEZVOUS_S + 5.0
    return 5.0 if what == "killed" else HEARTBEAT_S + 5.0


def main(target: Path) -> int:
    """Run all cells; return how many were late."""
    runs = [
        *(functools.partial(run_cell, cell) for cell in cells()),
        *(functools.partial(run_wanted, transport) for transport in ("gloo", "grpc")),
    ]
    rows = []
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            row = run(Path(folder))
        rows.append(row)
        print(
            f"{row.event:16} {row.phase:22} {row.transport:5} {row.recovery_s} of {row.target_s} s  "
            f"{' '.join(sorted(set(row.events)))}",
            flush=True,
        )
    target.write_text(
        json.dumps(
            {
                "schema": 1,
                "command": f"python -m tests.strategies.fault_matrix {target}",
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
                "heartbeat_s": HEARTBEAT_S,
                "rendezvous_s": RENDEZVOUS_S,
                "rows": [asdict(row) for row in rows],
            },
            indent=1,
        )
        + "\n"
    )
    return sum(not row.in_time for row in rows)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
