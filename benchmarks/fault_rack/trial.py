"""One run on a rack while two faults befall it, and what must hold of it afterwards."""

import json
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fault_rack.cells import (
    CLIENT,
    CLOUD,
    GROUP,
    GROUPS,
    LEADER,
    LINK,
    NODE,
    PIPELINE,
    RANDOM,
    RESUME,
    SAME,
    SERVER_APP,
    SPLIT,
    STAGE,
    SUPERLINK,
    Cell,
    Fault,
)
from benchmarks.fault_rack.rack import FaultRack, end_command, start_command
from socflower.engines.deployment.flower_processes import tail

SCENARIOS = {name: Path(__file__).with_name(f"{name}.toml") for name in (GROUPS, PIPELINE, SPLIT)}
BOARDS = {GROUPS: (2, 2), PIPELINE: (1, 1, 1), SPLIT: (1,)}
# The round in which the first fault comes.
_ROUND = 2
_BETWEEN_S = 0.5
# A run hangs if no round ends and no training message begins for so long.
_SILENCE_S = 300.0
_LEFT_OVER_S = 20.0
_POLL_S = 0.05
# Of FP32 sums in another order.
_TOLERANCE = 2e-3
_LEAST_ACCURACY = 0.6
# SoCs by kind and victim; 0 and 1 are in different groups.
_SOCS = {
    GROUPS: {
        NODE: ((1,), (3,)),
        LEADER: ((0,), (2,)),
        GROUP: ((0, 1), (2, 3)),
        LINK: ((1,), (3,)),
        CLIENT: ((0,), (3,)),
    },
    PIPELINE: {STAGE: ((1,), (2,)), LEADER: ((0,), (0,)), LINK: ((1,), (2,)), CLIENT: ((1,), (2,))},
    SPLIT: {NODE: ((0,), (0,)), LINK: ((0,), (0,))},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a cell; times in seconds."""

    cell: str
    ok: bool
    # What is wrong, a line each.
    faults: tuple[str, ...]
    exit_status: int | None
    wall_s: float
    # From the last strike to the first training message after it, and to the end of the first round after it.
    training_again_s: float | None
    next_round_s: float | None
    restarts: tuple[str, ...]
    # Largest difference to the weights of engine local; None without weights.
    weights_differ: float | None
    # Kinds of the events, by round.
    events: dict[str, list[str]]
    # When the faults came, after the command's start.
    struck_at_s: tuple[float, ...]


class Trial:
    """A run on the rack in a folder of its own."""

    def __init__(self, rack: FaultRack, cell: Cell, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._rack, self._cell, self._folder = rack, cell, folder
        self.kept = folder / "kept"
        self._began_s = time.time()
        self._command = start_command(
            rack,
            folder,
            *("run", str(SCENARIOS[cell.training]), "--engine", "deployment", "--json"),
            *("--superlink", "127.0.0.1:28000", "--checkpoint-folder", str(self.kept)),
            *("--out", str(folder / "out"), "--save-model", str(folder / "model.npz")),
            *("--restarts", "10"),
        )
        self.strikes_s: list[float] = []
        self._rounds_s: dict[int, float] = {}
        self._watch = threading.Thread(target=self._watch_rounds, daemon=True)
        self._watch.start()

    def _watch_rounds(self) -> None:
        """Note when each checkpoint appears: rounds may be repeated, so the latest time counts."""
        while self._command.poll() is None:
            for path in self.kept.glob("round-*.ckpt"):
                with suppress(OSError, ValueError):
                    self._rounds_s[int(path.stem[6:])] = path.stat().st_mtime
            time.sleep(_POLL_S)

    def go(self) -> None:
        """Strike as the cell says."""
        first, second = self._cell.faults
        if self._cell.timing == RANDOM:
            for fault in (first, second):
                self._await(lambda fault=fault: time.time() - self._began_s >= fault.at_s)
                self._strike(fault)
            return
        if not self._await(lambda: self._rack.trains(_ROUND)):
            return
        if self._cell.timing == RESUME:
            before = {each.pid for each in self._rack.server_apps()}
            self._rack.kill_server_app()
            if not self._await(
                lambda: bool({each.pid for each in self._rack.server_apps()} - before)
            ):
                return
        self._strike(first)
        if self._cell.timing in (SAME, RESUME):
            time.sleep(_BETWEEN_S)
        else:
            struck_s, newest = time.time(), max(self._rounds_s, default=0)
            # The next round trains on, whoever is there.
            self._await(
                lambda: (
                    self._rack.training_since(struck_s) is not None
                    and max(self._rounds_s, default=0) > newest
                    and self._rack.trains(1)
                )
            )
        self._strike(second)

    def _await(self, happened: Any) -> bool:
        """Wait for a moment of the run; False if the run ended before."""
        while not happened():
            if self._command.poll() is not None or self._hangs():
                return False
            time.sleep(_POLL_S)
        return True

    def _hangs(self) -> bool:
        """Return whether nothing has happened for too long."""
        signs = [self._began_s, *self.strikes_s, *self._rounds_s.values()]
        silent_since_s = time.time() - _SILENCE_S
        return max(signs) < silent_since_s and self._rack.training_since(silent_since_s) is None

    def _strike(self, fault: Fault) -> None:
        if self._command.poll() is not None:
            return
        self.strikes_s.append(time.time())
        rack = self._rack
        socs = _SOCS[self._cell.training].get(fault.kind, ((), ()))[fault.victim]
        if fault.kind == SERVER_APP:
            rack.kill_server_app()
        elif fault.kind in (SUPERLINK, CLOUD):
            rack.services[fault.kind].kill(fault.outage_s)
        for soc in socs:
            if fault.kind == LINK:
                rack.cut(soc, fault.outage_s)
            elif fault.kind == CLIENT:
                rack.kill_client(soc)
            else:
                rack.power_off(soc, fault.outage_s)

    def outcome(self, reference: Mapping[str, NDArray[Any]]) -> Outcome:
        """Wait for the end and judge the run."""
        again_s = None
        last_s = max(self.strikes_s, default=None)
        while self._command.poll() is None and not self._hangs():
            if last_s is not None and again_s is None:
                again_s = self._rack.training_since(last_s)
            time.sleep(_POLL_S)
        faults = []
        status = self._command.poll()
        if status is None:
            faults.append(f"nothing happened for {_SILENCE_S:g} s")
        elif status:
            faults.append(f"exit status {status}: {tail(self._folder / 'said', 2)}")
        wall_s = time.time() - self._began_s
        if status is None:
            self._keep_evidence()
        end_command(self._command)
        self._watch.join()
        result = self._result() if status == 0 else {}
        rounds = result.get("rounds", [])
        numbers = [entry["round"] for entry in rounds]
        if status == 0 and numbers != [*range(len(numbers))]:
            faults.append(f"rounds {numbers}")
        differ = None
        if status == 0:
            differ = self._difference(reference)
            events = [event for entry in rounds for event in entry["events"]]
            is_lost = any(event["kind"] in ("group-lost", "no-reply") for event in events)
            if differ > _TOLERANCE and not is_lost and not any(map(_is_without_group, events)):
                faults.append(f"weights differ by {differ:.2g}")
            if rounds[-1]["accuracy"] < _LEAST_ACCURACY:
                faults.append(f"accuracy {rounds[-1]['accuracy']}")
        if left := self._left_over():
            faults.append(f"left over: {'; '.join(left[:5])}")
        after = [at_s for at_s in self._rounds_s.values() if last_s is not None and at_s > last_s]
        return Outcome(
            cell=self._cell.name,
            ok=not faults,
            faults=tuple(faults),
            exit_status=status,
            wall_s=round(wall_s, 1),
            training_again_s=_since(again_s, last_s),
            next_round_s=_since(min(after, default=None), last_s),
            restarts=tuple(each["cause"] for each in result.get("restarts", [])),
            weights_differ=differ,
            events={
                str(entry["round"]): kinds
                for entry in rounds
                if (kinds := [event["kind"] for event in entry["events"]])
            },
            struck_at_s=tuple(round(at_s - self._began_s, 1) for at_s in self.strikes_s),
        )

    def _result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / "out" / "result.json").read_text())
        return found

    def _difference(self, reference: Mapping[str, NDArray[Any]]) -> float:
        with np.load(self._folder / "model.npz") as ours:
            return max(
                float(np.abs(ours[name].astype(float) - reference[name]).max())
                for name in reference
            )

    def _left_over(self) -> list[str]:
        end_s = time.time() + _LEFT_OVER_S
        while (left := self._rack.left_over()) and time.time() < end_s:
            time.sleep(0.5)
        return left

    def _keep_evidence(self) -> None:
        """Write what all nodes say they do, and the ends of their logs."""
        lines = []
        for part, service in self._rack.services.items():
            lines += [f"== {part}", *(service.folder / "log").read_text().splitlines()[-40:]]
        for soc in range(self._rack.network.num_socs):
            lines.append(f"{soc}: {self._rack.record(soc)}")
        (self._folder / "evidence").write_text("\n".join(lines))


def _is_without_group(event: Mapping[str, Any]) -> bool:
    """Return whether all nodes of a group were left out as a run was resumed: it has no part in that round then."""
    if event["kind"] != "no-answer":
        return False
    named = re.search(r"left out with SoC ([\d, ]+\d)", event["text"])
    away = {int(soc) for soc in re.findall(r"\d+", named[1])} if named else set()
    return any(away.issuperset(group) for group in _SOCS[GROUPS][GROUP])


def _since(moment_s: float | None, start_s: float | None) -> float | None:
    return None if moment_s is None or start_s is None else round(moment_s - start_s, 2)
