"""The resident process of the cells: builds a network for each cell and forks the cell's SoCs into it.

Runs as `python -m benchmarks.truth_cells.resident` in fresh user, network, mount and process namespaces. Each line of
input is JSON with a cell and the constants of our runtime. It writes the prediction before it measures the cell, then
the measurement or an error. It ends with its standard input.
"""

import ctypes
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.harness import from_json
from benchmarks.truth_cells.cell import Cell
from benchmarks.truth_cells.prediction import Calibration, Constants, predict, sleeping
from benchmarks.truth_cells.soc import Meeting, calibrate, serve, train
from tests.testbed.rack_process import enter_network

# CLONE_NEWNET, CLONE_NEWNS.
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_HEAD_START_S = 0.3
_MEETING_S = 60.0
_FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Answer for every cell, one after the other."""
    for line in sys.stdin:
        asked = json.loads(line)
        cell = from_json(Cell, asked["cell"])
        process = _FORK.Process(target=_do, args=(cell, Constants(**asked["constants"])))
        process.start()
        process.join()
        if process.exitcode:
            _say({"error": f"the cell's process ended with {process.exitcode}"})
    return 0


def _say(document: Mapping[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def _do(cell: Cell, constants: Constants) -> None:
    try:
        _build(cell)
        _say(_measure(cell, constants))
    except Exception:
        _say({"error": traceback.format_exc(limit=4)})
    sys.stdout.flush()
    # Without clean-up: the kernel removes the networks and whatever else is left.
    os._exit(0)


def _build(cell: Cell) -> None:
    """Build the rack in a network that ends with this process and its children."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_NETWORK | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    cell.rack.build()


class _Socs:
    """The processes of a phase, each in its network."""

    def __init__(self, work: Mapping[int, Callable[[Meeting], Any]]) -> None:
        start_s = _FORK.Value("d", 0.0)

        def soon() -> None:
            start_s.value = time.monotonic() + _HEAD_START_S

        meeting_point = _FORK.Barrier(len(work), action=soon, timeout=_MEETING_S)

        def start() -> float:
            meeting_point.wait()
            return float(start_s.value)

        meeting = Meeting(together=lambda: meeting_point.wait() and None, start=start)
        self._processes: list[BaseProcess] = []
        self._receivers: list[Connection] = []
        for place, part in work.items():
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_live, args=(place, part, meeting, sender), daemon=True)
            process.start()
            sender.close()
            self._processes.append(process)
            self._receivers.append(receiver)

    def results(self) -> list[Any]:
        """Return the results of all, or raise `RuntimeError` with the error of one."""
        found: dict[int, Any] = {}
        try:
            while len(found) < len(self._receivers):
                for ready in wait(
                    [
                        receiver
                        for index, receiver in enumerate(self._receivers)
                        if index not in found
                    ]
                ):
                    index = self._receivers.index(ready)  # type: ignore[arg-type]
                    try:
                        found[index], error = self._receivers[index].recv()
                    except EOFError:
                        error = f"place {index} ended without an answer"
                    if error:
                        raise RuntimeError(error)
        finally:
            for process in self._processes:
                if len(found) < len(self._processes):
                    process.kill()
                process.join()
        return [found[index] for index in range(len(found))]


def _live(place: int, part: Callable[[Meeting], Any], meeting: Meeting, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        enter_network(Path(f"/run/netns/soc{place}"))
        sender.send((part(meeting), ""))
    except Exception:
        with suppress(OSError):
            sender.send((None, traceback.format_exc(limit=-6)))
    sender.close()
    os._exit(0)


def _measure(cell: Cell, constants: Constants) -> dict[str, Any]:
    """Predict the cell, write the prediction, and measure the cell."""
    socs = range(cell.num_socs)
    if cell.sleeps:
        calibration = sleeping(cell)
    else:
        calibrated = _Socs(
            {soc: lambda meeting, soc=soc: calibrate(cell, soc, meeting) for soc in socs}
        ).results()
        calibration = Calibration(
            step_s={soc: passes_s for soc, (passes_s, _) in zip(socs, calibrated, strict=True)},
            update_s=max(update_s for _, update_s in calibrated),
        )
    prediction = predict(cell, calibration, constants)
    _say(
        {
            "predicted_s": prediction.seconds,
            "steps_s": prediction.steps_s,
            "synchronisation_s": prediction.synchronisation_s,
            "num_steps": prediction.interval.num_steps,
            "step_s": list(calibration.step_s.values()),
            "update_s": calibration.update_s,
            "groups": [group.members for group in prediction.plan.groups],
            "in_turn": prediction.exchanges.turns.enabled,
            "predicted_at": time.time(),
        }
    )
    parts: dict[int, Callable[[Meeting], Any]] = {
        soc: lambda meeting, soc=soc: train(cell, soc, prediction, calibration, meeting)
        for soc in socs
    }
    parts[cell.hub] = lambda meeting: serve(cell, meeting)
    began_at = time.time()
    *reports, _ = _Socs(parts).results()
    return {"began_at": began_at, **_judged(cell, prediction.interval.num_steps, reports)}


def _judged(cell: Cell, num_steps: int, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the cell and of its phases, and whether the weights are right."""
    began_s = min(report["began"][0] for report in reports)
    ended_s = max(report["steps"][-1] for report in reports)
    trained_s = max(report["steps"][num_steps - 1] for report in reports) - began_s
    # Otherwise the hub averages the models, and each group ends with weights of its own.
    is_one_model = cell.leaders == "ring" or cell.num_groups == 1
    same = not is_one_model or len({report["digests"][0] for report in reports}) == 1
    found = {
        "measured_s": ended_s - began_s,
        "first_steps_s": trained_s,
        "right": same and all(len(report["steps"]) == 2 * num_steps for report in reports),
    }
    if "synchronised" in reports[0]:
        again_s = min(report["began"][1] for report in reports)
        found |= {"between_s": again_s - began_s - trained_s, "last_steps_s": ended_s - again_s}
    return found


if __name__ == "__main__":
    sys.exit(main())
