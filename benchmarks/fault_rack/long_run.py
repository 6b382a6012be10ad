"""One long run on a rack whose parts die again and again, inside the namespaces: what it used, and how it went on.

Reads a line with the `Plan` as JSON, and answers with a `Course`.
"""

import json
import random
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fault_rack.cells import CLIENT, LINK, NODE, SERVER_APP, SUPERLINK
from benchmarks.fault_rack.rack import FaultRack, end_command, serve, start_command
from benchmarks.harness import from_json, note

SCENARIO = """\
# Does a rack train on while its parts die?
[cluster]
boards = {boards}
[data]
factory = "few_digits:few_digits"
[train]
epochs = {rounds}
batch_size = 16
learning_rate = 0.01
[strategy]
groups = {groups}
sync_interval_epochs = 1
[ring]
min_nodes = 1
rendezvous_s = 20
"""
_POLL_S = 0.2
_SAMPLE_S = 30.0
# A command hangs if no node trains for so long.
_SILENCE_S = 600.0
_REPORTED = "said"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run of `rounds`, or one that ends after `kills`, on `nodes` in rings of `ring`."""

    folder: str
    nodes: int
    ring: int
    rounds: int
    # Between two deaths, on average; 0: none.
    pause_s: float
    kinds: tuple[str, ...]
    seed: int = 1
    # 0: the run ends with its rounds.
    kills: int = 0
    # After which it is stopped; 0: never.
    minutes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A part that died, and the seconds until a node got a training message, if one did before the next death."""

    kind: str
    at_s: float
    age_s: float
    again_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What all processes of the rack use together, and the SuperLink's part of it."""

    at_s: float
    server_round: int
    processes: int
    pss_bytes: int
    descriptors: int
    threads: int
    superlink_bytes: int
    database_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How the run went."""

    exit_status: int | None
    said: str
    rounds: int
    wall_s: float
    # Of the rounds whose checkpoint was seen.
    round_s: float
    accuracy: float | None
    hub_bytes_per_round: float
    deaths: tuple[Death, ...]
    samples: tuple[Sample, ...]
    restarts: int
    left_over: tuple[str, ...]


class LongRun:
    """The run, its deaths and its samples."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._dice = plan, random.Random(plan.seed)
        folder = Path(plan.folder)
        boards = [plan.ring] * (plan.nodes // plan.ring)
        self._rack = FaultRack(folder / "rack", boards)
        run = folder / "run"
        run.mkdir()
        scenario = run / "long.toml"
        groups = len(boards)
        scenario.write_text(SCENARIO.format(boards=boards, groups=groups, rounds=plan.rounds))
        source = Path(__file__).with_name("few_digits.py")
        (run / source.name).write_text(source.read_text())
        self._folder, self._kept = run, run / "kept"
        self._began_s = time.time()
        self._hub_began = self._rack.hub_bytes()
        self._command = start_command(
            self._rack,
            run,
            *("run", str(scenario), "--engine", "deployment", "--json", "--restarts", "1000"),
            *("--superlink", "127.0.0.1:28000", "--checkpoint-folder", str(self._kept)),
            *("--out", str(run / "out")),
        )
        self._deaths: list[Death] = []
        self._samples: list[Sample] = []
        self._round_ends_s: dict[int, float] = {}
        self._born_s = dict.fromkeys(plan.kinds, time.time())

    def go(self) -> Course:
        """Kill parts until the end of the run, or until the last kill was recovered from."""
        plan = self._plan
        next_s, next_sample_s = self._next_death_s(), time.time()
        struck_s: float | None = None
        while self._command.poll() is None:
            now_s = time.time()
            self._note_rounds()
            if struck_s is not None and (began := self._rack.training_since(struck_s)):
                self._recovered(began - struck_s)
                struck_s = None
                if plan.kills and len(self._deaths) >= plan.kills:
                    break
            if now_s >= next_sample_s:
                self._sample()
                next_sample_s = now_s + _SAMPLE_S
            # The first death comes when something trains; later ones whether or not the run has recovered.
            goes_on = not plan.kills or len(self._deaths) < plan.kills
            if plan.pause_s and goes_on and now_s >= next_s and self._round_ends_s:
                self._die()
                struck_s, next_s = time.time(), self._next_death_s()
            if plan.minutes and now_s - self._began_s > 60 * plan.minutes:
                break
            if struck_s is not None and now_s - struck_s > _SILENCE_S:
                note(f"no node has trained for {_SILENCE_S:g} s")
                break
            time.sleep(_POLL_S)
        return self._course()

    def _next_death_s(self) -> float:
        return time.time() + self._dice.uniform(0.2, 1.8) * (self._plan.pause_s or 1e9)

    def _die(self) -> None:
        kind, rack = self._dice.choice(self._plan.kinds), self._rack
        soc = self._dice.randrange(self._plan.nodes)
        outage_s = self._dice.uniform(1.0, 15.0)
        now_s = time.time()
        self._deaths.append(
            Death(
                kind=kind,
                at_s=round(now_s - self._began_s, 1),
                age_s=round(now_s - self._born_s[kind], 1),
                again_s=None,
            )
        )
        self._born_s[kind] = now_s
        if kind == NODE:
            rack.power_off(soc, outage_s)
        elif kind == CLIENT:
            rack.kill_client(soc)
        elif kind == LINK:
            rack.cut(soc, outage_s)
        elif kind == SERVER_APP:
            rack.kill_server_app()
        elif kind == SUPERLINK:
            rack.services[SUPERLINK].kill(2.0)

    def _recovered(self, again_s: float) -> None:
        last = self._deaths[-1]
        self._deaths[-1] = Death(**{**asdict(last), "again_s": round(again_s, 2)})
        note(f"{last.at_s:.0f} s: {last.kind}, training again after {again_s:.1f} s")

    def _note_rounds(self) -> None:
        for path in self._kept.glob("round-*.ckpt"):
            with suppress(OSError, ValueError):
                self._round_ends_s.setdefault(int(path.stem[6:]), path.stat().st_mtime)

    def _sample(self) -> None:
        used = self._rack.resources()
        database = self._rack.folder / "superlink.sqlite"
        self._samples.append(
            Sample(
                at_s=round(time.time() - self._began_s, 1),
                server_round=max(self._round_ends_s, default=0),
                superlink_bytes=self._rack.superlink_bytes(),
                database_bytes=database.stat().st_size,
                **used,
            )
        )
        note(f"{self._samples[-1]}")

    def _course(self) -> Course:
        status = self._command.poll()
        self._note_rounds()
        wall_s, hub_bytes = time.time() - self._began_s, self._rack.hub_bytes() - self._hub_began
        end_command(self._command)
        result: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            result = json.loads((self._folder / "out" / "result.json").read_text())
        ends_s = [self._round_ends_s[number] for number in sorted(self._round_ends_s)]
        gaps_s = [after - before for before, after in pairwise(ends_s)]
        rounds = max(self._round_ends_s, default=0)
        if result:
            rounds = result["rounds"][-1]["round"]
        time.sleep(5.0)
        return Course(
            exit_status=status,
            said=(self._folder / _REPORTED).read_text("utf-8", "replace")[-2000:],
            rounds=rounds,
            wall_s=round(wall_s, 1),
            round_s=round(statistics.median(gaps_s), 2) if gaps_s else 0.0,
            accuracy=result.get("final_accuracy"),
            hub_bytes_per_round=hub_bytes / max(rounds, 1),
            deaths=tuple(self._deaths),
            samples=tuple(self._samples),
            restarts=len(result.get("restarts", [])),
            left_over=tuple(self._rack.left_over()),
        )


def _answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return asdict(LongRun(from_json(Plan, asked)).go())


if __name__ == "__main__":
    serve(_answer)
