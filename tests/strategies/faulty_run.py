"""A training on real processes that a test strikes at, and what must hold of it whatever happened."""

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from socflower.engines.local.grid import LocalGrid
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.socflow import SoCFlow
from socflower.training.batches import BatchSchedule
from socflower.wire.message_keys import GroupTask
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app

WAIT_S = 60.0  # for anything that must come at last, on a loaded machine
_LOOK_S = 0.01


class FaultyRun:
    """One training in a thread of its own, while the test strikes at its processes; a context manager.

    SoCs are numbered as in the plan. `of_soc` are additions to their node configs. `around` makes a strategy around
    SoCFlow, which is started in its place, with the grid that `wrap` makes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        boards: int = 1,
        socs_per_board: int = 3,
        num_groups: int = 1,
        transport: str = "gloo",
        step_s: float = 0.1,
        norm: bool = False,
        of_soc: Mapping[int, Mapping[str, Any]] | None = None,
        rings: Mapping[str, Any] | None = None,
        timeout_s: float = 150.0,
        evaluate: Callable[["FaultyRun", int], None] = lambda run, server_round: None,
        around: Callable[[SoCFlow], Strategy] = lambda strategy: strategy,
        wrap: Callable[[Grid], Grid] = GroupGrid,
        **changes: Any,
    ) -> None:
        self.folder, self.num_socs, self._norm, self._timeout_s = (
            folder,
            boards * socs_per_board,
            norm,
            timeout_s,
        )
        self._shape = {
            "boards": boards,
            "socs_per_board": socs_per_board,
            "num_groups": num_groups,
            **changes,
        }
        cluster = ring_app.cluster(boards, socs_per_board)
        self.strategy: SoCFlow = ring_app.strategy(
            cluster,
            num_groups,
            tolerate_client_errors=True,
            rings={
                "transport": transport,
                "heartbeat_s": 4.0,
                "rendezvous_s": 6.0,
                "leader_grace_s": 4.0,
                **(rings or {}),
            },
            **changes,
        )
        self.configs = ring_app.node_configs(cluster, of_soc)
        self.grid = ProcessGrid(
            ring_app.client_app,
            self.configs,
            run_config={"step-s": step_s, "norm": norm, "ledger": str(folder)},
        )
        self.nodes = self.grid.get_node_ids()[::-1]  # by SoC
        self._evaluate, self._around, self._wrap = evaluate, around, wrap
        self._thread = ThreadPoolExecutor(1)
        self._future: Future[ArrayRecord] | None = None
        self._stopped: set[int] = set()

    def __enter__(self) -> "FaultyRun":
        for node in self.nodes:
            self.grid.pid_of(
                node
            )  # starting them all at once takes seconds, which are nobody's recovery
        self._future = self._thread.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.grid.close()
        self._thread.shutdown(wait=False)

    # --------------------------------------------------------------------------------------------- striking

    def pid(self, soc: int) -> int:
        return self.grid.pid_of(self.nodes[soc])

    def kill(self, soc: int) -> float:
        """Kill a node's process; return when, in Unix time."""
        os.kill(self.pid(soc), signal.SIGKILL)
        return time.time()

    def stop(self, soc: int) -> float:
        self._stopped.add(self.pid(soc))
        os.kill(self.pid(soc), signal.SIGSTOP)
        return time.time()

    def go_on(self, soc: int) -> None:
        os.kill(self.pid(soc), signal.SIGCONT)

    def wait(self, what: Callable[[], object], name: str) -> None:
        """Wait until something holds; an error of the run comes out at once."""
        assert self._future is not None
        until_s = time.monotonic() + WAIT_S
        while not what():
            if self._future.done():
                self._future.result()
                raise AssertionError(f"the run ended before: {name}")
            assert time.monotonic() < until_s, f"has not come: {name}; {self.state()}"
            time.sleep(_LOOK_S)

    def wait_steps(self, soc: int, server_round: int, num_steps: int) -> None:
        """Wait until a SoC has done so many steps of a round."""
        self.wait(
            lambda: sum(line["round"] == server_round for line in self.lines(soc)) >= num_steps,
            f"step {num_steps} of round {server_round} on SoC {soc}",
        )

    def wait_mark(self, soc: int, server_round: int, what: str) -> None:
        self.wait(
            lambda: self.mark(soc, server_round, what).exists(),
            f"SoC {soc} {what} in round {server_round}",
        )

    def mark(self, soc: int, server_round: int, what: str) -> Path:
        return ring_app.mark_of(self.folder, self._partition(soc), server_round, what)

    def result(self) -> ArrayRecord:
        """Wait for the end and return the last weights."""
        assert self._future is not None
        return self._future.result(timeout=self._timeout_s)

    def state(self) -> str:
        """Say how far each SoC is, for a test that fails."""
        return "; ".join(f"SoC {soc}: {len(self.lines(soc))} steps" for soc in range(self.num_socs))

    # ------------------------------------------------------------------------------------------- what came of it

    def lines(self, soc: int) -> list[dict[str, Any]]:
        """Return a SoC's ledger so far."""
        return _lines(self.folder / f"{self._partition(soc)}.jsonl")

    @property
    def events(self) -> list[ReplyEvent]:
        return [event for report in self.strategy.reports for event in report.events]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def reference(self) -> ArrayRecord:
        """Return the weights of the same training in one process, undisturbed."""
        return _undisturbed(tuple(sorted(self._shape.items())), self._norm)

    def recovery_s(
        self, struck_s: float, struck: Iterable[int], counted_from_s: float = 0.0
    ) -> float:
        """Return the time from the strike to the first step of a ring that formed after it, without those struck."""
        gone = set(struck)
        lines = [line for soc in range(self.num_socs) for line in self.lines(soc)]
        at_strike = max((line["round"] for line in lines if line["at_s"] <= struck_s), default=1)
        after = [
            line["at_s"]
            for line in lines
            if line["at_s"] > struck_s
            and (line["round"] > at_strike or (line["members"] and not gone & set(line["members"])))
        ]
        return min(after) - max(struck_s, counted_from_s)

    def check_ledger(self, lost: Mapping[int, Iterable[int]]) -> None:
        """Check that every round's steps, and each step's samples, count exactly once.

        `lost` are, by round, the SoCs whose part need not be whole: struck, or members of a group whose work is lost.
        """
        for server_round in range(1, self.strategy.num_rounds + 1):
            for task in self._tasks(server_round):
                _check_group(
                    task,
                    server_round,
                    {
                        soc: [line for line in self.lines(soc) if line["round"] == server_round]
                        for soc in task.members
                    },
                    set(lost.get(server_round, ())),
                )

    def check_weights(self, tolerance: float = 1e-4) -> None:
        ours, reference = self.result(), self.reference()
        for name in reference:
            np.testing.assert_allclose(
                ours[name].numpy(), reference[name].numpy(), atol=tolerance, rtol=1e-3
            )

    def _tasks(self, server_round: int) -> list[GroupTask]:
        """Return what the groups were asked for in a round; of a group that was asked twice, the last."""
        tasks: dict[int, GroupTask] = {}
        for soc in range(self.num_socs):
            for record in _lines(self.mark(soc, server_round, "asked")):
                task = GroupTask.decode(record)
                if task.group_id not in tasks or len(task.members) < len(
                    tasks[task.group_id].members
                ):
                    tasks[task.group_id] = task
        assert tasks, f"nobody was asked for anything in round {server_round}"
        return list(tasks.values())

    def _partition(self, soc: int) -> int:
        return self.num_socs - 1 - soc

    def _run(self) -> ArrayRecord:
        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            self._evaluate(self, server_round)
            return None

        result = self._around(self.strategy).start(
            self._wrap(self.grid),
            ring_app.initial(norm=self._norm),
            num_rounds=self.strategy.num_rounds,
            timeout=self._timeout_s / 2,
            evaluate_fn=evaluate,
        )
        arrays = result.arrays
        assert all(np.isfinite(arrays[name].numpy()).all() for name in arrays)
        return arrays


def _check_group(
    task: GroupTask,
    server_round: int,
    ledgers: Mapping[int, list[dict[str, Any]]],
    lost: set[int],
) -> None:
    schedule = BatchSchedule(task, [ring_app.NUM_SAMPLES])
    stayed = [soc for soc in task.members if soc not in lost]
    for step in range(task.first_step, task.first_step + task.num_steps):
        where = f"round {server_round}, group {task.group_id}, step {step}"
        made = {
            soc: [line for line in ledgers[soc] if line["step"] == step] for soc in task.members
        }
        for soc in stayed:
            assert len(made[soc]) == 1, f"{where}: SoC {soc} has it {len(made[soc])} times"
        applied = [made[soc][0]["members"] for soc in stayed if not made[soc][0]["adopted"]]
        assert len({tuple(members) for members in applied}) <= 1, (
            f"{where}: members differ, {applied}"
        )
        if not stayed:
            continue
        assert applied, f"{where}: everybody has it from others"
        members = applied[0]
        present = [task.partitions.index(participant) for participant in members]
        shares = {
            task.members[position]: share.tolist()
            for position, share in zip(present, schedule.shares(step, present), strict=True)
        }
        batch = sorted(schedule.batch(step)[0].tolist())
        assert sorted(sample for share in shares.values() for sample in share) == batch, where
        for soc in stayed:
            assert soc in shares, f"{where}: SoC {soc} counts it and is not of its ring {members}"
            assert made[soc][0]["samples"] == shares[soc], f"{where}: SoC {soc} had other samples"
        assert set(shares) <= {*stayed, *lost}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line of a process that was killed may be half a line, or be under way.
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


@functools.cache
def _undisturbed(shape: tuple[tuple[str, Any], ...], norm: bool) -> ArrayRecord:
    changes = dict(shape)
    cluster = ring_app.cluster(changes.pop("boards"), changes.pop("socs_per_board"))
    strategy = ring_app.strategy(cluster, **changes)
    with LocalGrid(
        ring_app.client_app(), cluster.num_socs, run_config={"norm": norm}, num_workers=0
    ) as grid:
        return strategy.start(
            grid, ring_app.initial(norm=norm), num_rounds=strategy.num_rounds, timeout=120
        ).arrays
