"""Brings the testbed up, runs rings in it, leaves nothing behind. No root where user namespaces are allowed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.testbed.ring_driver import Run
from tests.testbed.topology import NAMESPACES, Rack

REPOSITORY = Path(__file__).resolve().parents[2]
_PROBE_TIMEOUT_S = 60.0


class TestbedError(Exception):
    """The testbed could not be built, a SoC failed in it, or it was not done in time; the text has what it said."""

    __test__ = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What the SoCs measured in a run."""

    run: Run
    socs: tuple[dict[str, Any], ...]  # of `ring_driver.drive`, by SoC

    @property
    def right(self) -> bool:
        """Whether every member of every ring had the right sums at the end."""
        return all(soc["right"] for soc in self.socs if soc["ring"] is not None)

    @property
    def cpu_s(self) -> float:
        """Seconds of this machine's cores that all SoCs together took from the common start on."""
        return float(sum(soc["cpu_s"] for soc in self.socs if soc["ring"] is not None))

    def ends_s(self, ring: int) -> list[float]:
        """Return when each step of a ring was over at all members, from the end of the first one on, which has no time.

        A step ends when the last of the members has the sum.
        """
        members = [soc["ends_s"] for soc in self.socs if soc["ring"] == ring]
        ends = [max(step) for step in zip(*members, strict=True)]
        return [end - ends[0] for end in ends]

    def steps_s(self, ring: int) -> list[float]:
        """Return what each step of a ring took, but for the first, in which everything happens for the first time."""
        return [after - before for before, after in pairwise(self.ends_s(ring))]

    def median_s(self, ring: int) -> float:
        """Return what a step took in the median: what steady exchanges are judged by."""
        return median(self.steps_s(ring))

    def mean_s(self, ring: int) -> float:
        """Return what a step took on average: what free-running groups are judged by, whose steps differ."""
        return mean(self.steps_s(ring))


@cache
def missing() -> str | None:
    """Return why the testbed cannot be built here, or None: builds the smallest one."""
    for tool in ("unshare", "ip", "tc", "bash", "mount", "sysctl"):
        if shutil.which(tool) is None:
            return f"the testbed needs the command {tool}"
    try:
        tried = subprocess.run(
            [*NAMESPACES, "bash", "-c", Rack(slots_per_board=(1, 1)).script()],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"the testbed could not be built within {_PROBE_TIMEOUT_S:g} s"
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        return f"no network namespaces with limited rates here: {said[-1]}"
    return None


def measure(rack: Rack, runs: Sequence[Run], *, timeout_s: float) -> Iterator[RunResult]:
    """Build the rack, do the runs in it one after the other, and yield each one's result as it ends.

    Raises `TestbedError` if a SoC fails, or if not all is done after `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        plan, said = Path(folder, "plan.json"), Path(folder, "stderr")
        plan.write_text(
            json.dumps({"rack": asdict(rack), "runs": [asdict(run) for run in runs]}), "utf-8"
        )
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                [*NAMESPACES, sys.executable, "-m", "tests.testbed.rack_process", str(plan)],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            assert process.stdout is not None
            for run in runs:
                line = process.stdout.readline()
                if not line:
                    process.wait()
                    why = (
                        f"not done after {timeout_s:g} s"
                        if late.is_set()
                        else f"ended with {process.returncode}"
                    )
                    raise TestbedError(
                        f"testbed: {why}\n{_shortened(said.read_text('utf-8', 'replace'))}"
                    )
                yield RunResult(run=run, socs=tuple(json.loads(line)))
            process.wait()
        finally:
            timer.cancel()
            _end(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _shortened(said: str) -> str:
    """Return what was said first, which is the cause, and last, which is who found out."""
    return said if len(said) < 10_000 else f"{said[:8000]}\n…\n{said[-1000:]}"


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill the testbed's process outside; the kernel then ends the first one inside, and with it all others."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
