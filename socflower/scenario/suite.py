"""Runs the scenarios of a folder under several seeds, each in a process of its own, and gathers their claims.

Claims about other strategies are checked too: a scenario that has some runs as `socflower compare` with these, and one
with claims on the plan of a pipeline as `socflower plan`. So each row of the suite is one command that a reader can
type.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from socflower.engines.deployment.flower_processes import marked as with_mark
from socflower.engines.deployment.flower_processes import own_processes, tail
from socflower.errors import ConfigError, SocflowerError
from socflower.quantities import significant
from socflower.scenario.expectations import is_of_plan, strategies_of_claims
from socflower.scenario.schema.config import NEED_WORKERS
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import remove_partial, write_atomically

SUITE = "suite.json"

_POLL_S = 0.05
# A claim with less between its bound and the mean than so many standard deviations fails at seeds of tomorrow.
TIGHT = 2.0

OnRow = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Scenario files, the seeds that each runs under (none: its own), overrides of their keys, and how many at once."""

    files: tuple[Path, ...]
    out: Path
    seeds: tuple[int, ...] = ()
    overrides: tuple[str, ...] = ()
    num_at_once: int = 1

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for file in self.files:
            if file.stem in seen:
                raise ConfigError(f"{file}: there are two scenarios {file.stem}; rename one")
            seen.add(file.stem)

    def words(self, file: Path, scenario: Scenario) -> tuple[str, ...]:
        """Return the words after `socflower` that check the claims of a scenario."""
        changes = [word for override in self.overrides for word in ("--set", override)]
        if scenario.kind.is_pipeline and any(map(is_of_plan, scenario.expect)):
            return ("plan", str(file), *changes, "--json")
        names = dict.fromkeys((scenario.strategy.name, *strategies_of_claims(scenario.expect)))
        seeds = ("--seeds", ",".join(map(str, self.seeds))) if self.seeds else ()
        return (
            *("compare", str(file), "--strategies", ",".join(names), *seeds, *changes),
            *("--out", str(self.out / file.stem), "--json"),
            *("--workers", str(_num_workers(scenario))),
        )


def _num_workers(scenario: Scenario) -> int:
    """Return the fewest worker processes that faults need: one for each client that hangs, and one for the others."""
    if not any(event.kind in NEED_WORKERS for event in scenario.events):
        return 0
    return 1 + max(1, len({event.soc for event in scenario.events if event.kind == "hang"}))


def scenario_files_in(folder: Path) -> tuple[Path, ...]:
    """Return the scenarios of a folder, by name; none if it is the folder of an app, or has no TOML files."""
    if (folder / "pyproject.toml").exists():
        return ()
    return tuple(sorted(folder.glob("*.toml")))


def run_suite(suite: Suite, *, on_row: OnRow = lambda row: None) -> dict[str, Any]:
    """Run all scenarios and return the document, also written as `out/suite.json`.

    It has `rows`, in the order of the files: `name`, `command`, `claims` (see `claims_of`), `holds`, `error` (None, or
    the line that the command ended with), `cpu_s`, the mean processor time of a seed with the start of its process
    (None where an earlier suite has trained some of them), and `wall_s`. `holds` says whether all hold. `on_row` gets
    each row as it ends. The file has the rows that have ended, also after a `KeyboardInterrupt`, which ends the
    processes, and after a kill; the same suite trains only what is missing.
    """
    rows: dict[str, dict[str, Any]] = {}
    with exclusive_folder(suite.out, f"--out {suite.out}"):
        remove_partial(suite.out)
        with own_processes() as mark:
            document = _write(suite, rows)
            for row in _rows(suite, mark):
                rows[row["name"]] = row
                # After each: a suite takes hours, and a kill must not cost what has ended.
                document = _write(suite, rows)
                on_row(row)
    return document


def _write(suite: Suite, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write the document of the rows that have ended, in the order of the files, and return it."""
    document = _document(suite, [rows[file.stem] for file in suite.files if file.stem in rows])
    write_atomically(suite.out / SUITE, json.dumps(document, indent=1))
    return document


def _document(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "seeds": list(suite.seeds),
        "rows": list(rows),
        "num_missing": len(suite.files) - len(rows),
        "holds": len(rows) == len(suite.files) and all(row["holds"] for row in rows),
    }


@dataclass(slots=True)
class _Job:
    """A scenario's process, which writes its document to a file and everything else to a log."""

    name: str
    words: tuple[str, ...]
    process: "subprocess.Popen[bytes]"
    said: Path
    log: Path
    started_s: float
    # Whether all of its trainings are its own.
    is_whole: bool
    cpu_s: float = 0.0

    def has_ended(self) -> bool:
        """Whether the process has ended; its processor time and that of its children are known then."""
        # Not `poll`, which takes the process away without its processor time.
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        return True


def _rows(suite: Suite, mark: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each scenario as it ends, or as its file is refused."""
    waiting, running = list(suite.files), list[_Job]()
    logs = suite.out / "logs"
    logs.mkdir(exist_ok=True)
    while waiting or running:
        while waiting and len(running) < suite.num_at_once:
            file = waiting.pop(0)
            try:
                words = suite.words(file, load_scenario(file, suite.overrides))
            except SocflowerError as error:
                yield _row(file.stem, (), [], " ".join(str(error).split()))
                continue
            running.append(_started(file, words, suite.out, logs, mark))
        for job in [job for job in running if job.has_ended()]:
            running.remove(job)
            yield _row_of(job, len(suite.seeds) or 1)
        if running:
            time.sleep(_POLL_S)


def _started(file: Path, words: Sequence[str], out: Path, logs: Path, mark: str) -> _Job:
    said, log = logs / f"{file.stem}.json", logs / f"{file.stem}.log"
    is_whole = not any((out / file.stem).glob("**/result.json"))
    with said.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", "from socflower.cli.main import main; main()", *words],
            # Ctrl-C is for the suite, which ends its processes; a session of their own would lose its priority.
            process_group=0,
            env=with_mark(os.environ, mark),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    return _Job(file.stem, tuple(words), process, said, log, time.monotonic(), is_whole)


def _row_of(job: _Job, num_seeds: int) -> dict[str, Any]:
    error: str | None = None
    claims: list[dict[str, Any]] = []
    try:
        claims = claims_of(json.loads(job.said.read_text("utf-8"))["expectations"])
    except (ValueError, KeyError):
        error = f"{tail(job.log, 1)} (exit status {job.process.returncode})"
    seeds = 1 if job.words[0] == "plan" else num_seeds
    return _row(
        job.name,
        job.words,
        claims,
        error,
        cpu_s=job.cpu_s / seeds if job.is_whole else None,
        wall_s=time.monotonic() - job.started_s,
    )


def _row(
    name: str,
    words: Sequence[str],
    claims: Sequence[Mapping[str, Any]],
    error: str | None,
    **measured: float | None,
) -> dict[str, Any]:
    return {
        "name": name,
        "command": shlex.join(("socflower", *words)) if words else None,
        "claims": list(claims),
        "holds": error is None and all(claim["holds"] for claim in claims),
        "error": error,
        **({"cpu_s": None, "wall_s": None} | measured),
    }


def claims_of(expectations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each claim once, with its observed values by seed, whether it holds for all, and by how much.

    `margin` is that of the worst seed: how far the observed value is on the right side of the bound, as a part of the
    bound (of 1, for a bound of 0); negative if it fails, None if a seed has no value. `spreads` is the distance of the
    mean from the bound in sample standard deviations; None without several seeds that differ. Below `TIGHT` the claim
    is `is_tight`.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for claim in expectations:
        by_name.setdefault(claim["name"], []).append(claim)
    return [_claim(name, runs) for name, runs in by_name.items()]


def closest(claims: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the claim that fails first: one that fails, then the least `spreads`, then the least `margin`."""

    def distance(claim: Mapping[str, Any]) -> tuple[bool, bool, float]:
        by_seed = claim["spreads"]
        far = claim["margin"] if by_seed is None else by_seed
        return claim["holds"], by_seed is None, far

    known = [claim for claim in claims if claim["margin"] is not None]
    return min(known, key=distance, default=None)


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return a claim with the observed values, the lowest and the highest of several."""
    known = [value for value in claim["observed"] if value is not None]
    shown = (
        " to ".join(dict.fromkeys(significant(value, 4) for value in (min(known), max(known))))
        if known
        else "unknown"
    )
    return f"{claim['name']} {claim['expected']:g}: {shown}"


def _claim(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    expected = runs[0]["expected"]
    observed = [run["observed"] for run in runs]
    known = [value for value in observed if value is not None]
    margin = spreads = None
    if len(known) == len(observed):
        sign = 1.0 if name.startswith("min_") else -1.0
        margin = min(sign * (value - expected) + 0.0 for value in known) / (abs(expected) or 1.0)
        spread = stdev(known) if len(known) > 1 else 0.0
        spreads = sign * (fmean(known) - expected) / spread if spread else None
    return {
        "name": name,
        "expected": expected,
        "observed": observed,
        # A claim that was not checked does not hold.
        "holds": all(run["holds"] for run in runs),
        "margin": margin,
        "spreads": spreads,
        "is_tight": spreads is not None and spreads < TIGHT,
    }
