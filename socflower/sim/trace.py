"""Traces of virtual time in the Chrome trace format, which Perfetto opens; rows are made of execution logs."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from socflower.cluster import Cluster, Compute, Endpoint, TaskGraph
from socflower.cluster.task_graph import Task
from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain, plain_numbers
from socflower.sim.compiled_graph import Component, TransferStep
from socflower.sim.execution import Instance, Outcome
from socflower.sim.processes import EndedActivity
from socflower.sim.steady_state import RepeatedRun
from socflower.wire.saved_state import write_atomically

RUNS = "runs"
PROCESSES = (RUNS, "SoCs", "links", "servers")
"""The groups of rows, top to bottom."""

_MICROSECONDS = 1e6


class _Span(NamedTuple):
    row: tuple[str, str]
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any]


@plain_numbers
class Trace:
    """Collects spans in virtual seconds; spans beyond `max_spans` are dropped and counted in the file."""

    def __init__(self, max_spans: int = 200_000) -> None:
        require_range("trace", least=1, max_spans=max_spans)
        self.max_spans = max_spans
        self.num_dropped = 0
        self._spans: list[_Span] = []
        self._rows: dict[tuple[str, str], tuple[int, ...]] = {}

    @property
    def num_spans(self) -> int:
        """Number of spans kept."""
        return len(self._spans)

    @property
    def room(self) -> int:
        """Number of spans that can still be added; the names of runs always can."""
        return max(0, self.max_spans - len(self._spans))

    def add(
        self,
        process: str,
        row: str,
        name: str,
        start_s: float,
        duration_s: float,
        *,
        order: tuple[int, ...] = (0,),
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a span to a row of one of `PROCESSES`; rows are sorted by `order`, then by name."""
        assert process in PROCESSES, f"no process {process!r}"
        if not self.room and process != RUNS:
            self.num_dropped += 1
            return
        self._rows.setdefault((process, row), order)
        self._spans.append(_Span((process, row), name, start_s, duration_s, args or {}))

    def drop(self, num_spans: int) -> None:
        """Count spans that were not even collected."""
        self.num_dropped += num_spans

    def state(self, first_span: int = 0) -> dict[str, Any]:
        """Return the trace from a span on, as plain values that JSON stores exactly; see `restore`."""
        rows = {row: index for index, row in enumerate(self._rows)}
        return {
            "first_span": first_span,
            "num_dropped": self.num_dropped,
            "rows": [[*row, list(order)] for row, order in self._rows.items()],
            "spans": [
                [rows[span.row], span.name, span.start_s, span.duration_s, dict(span.args)]
                for span in self._spans[first_span:]
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add a part of another trace's state; consecutive parts together restore that trace."""
        if state["first_span"] != self.num_spans:
            raise ConfigError(
                f"trace: a part from span {state['first_span']} does not follow {self.num_spans} spans"
            )
        rows = [(process, row) for process, row, _ in state["rows"]]
        self._rows.update(
            {row: tuple(order) for row, (_, _, order) in zip(rows, state["rows"], strict=True)}
        )
        self._spans += [
            _Span(rows[row], name, start_s, duration_s, args)
            for row, name, start_s, duration_s, args in state["spans"]
        ]
        self.num_dropped = state["num_dropped"]

    def write(self, path: Path) -> None:
        """Write the trace in one step: a reader finds the old file or the whole new one."""
        document = {
            "displayTimeUnit": "ms",
            "otherData": {
                "time": "virtual",
                "num_spans": len(self._spans),
                "num_spans_dropped": self.num_dropped,
            },
            "traceEvents": list(self._events()),
        }
        try:
            write_atomically(path, json.dumps(document, separators=(",", ":"), default=plain))
        except OSError as error:
            raise ConfigError(
                f"trace {path}: cannot be written ({error.strerror}); check the folder"
            ) from None

    def _events(self) -> Iterator[dict[str, Any]]:
        for pid, process in enumerate(PROCESSES):
            yield _metadata("process_name", pid, 0, name=process)
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        if self.num_dropped:
            yield _metadata(
                "process_labels",
                0,
                0,
                labels=f"{self.num_dropped} spans beyond {self.max_spans} dropped",
            )
        rows = sorted(
            self._rows, key=lambda row: (PROCESSES.index(row[0]), self._rows[row], row[1])
        )
        ids: dict[tuple[str, str], tuple[int, int]] = {}
        for tid, row in enumerate(rows, start=1):
            pid = PROCESSES.index(row[0])
            ids[row] = (pid, tid)
            yield _metadata("thread_name", pid, tid, name=row[1])
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
        for span in sorted(self._spans, key=lambda span: (ids[span.row], span.start_s)):
            pid, tid = ids[span.row]
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": span.name,
                "ts": span.start_s * _MICROSECONDS,
                "dur": span.duration_s * _MICROSECONDS,
                "args": span.args,
            }


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


MOST_ROWS = 256
"""A cluster of more SoCs has rows for its boards instead, one of more boards for its servers or for several boards."""


class _Row(NamedTuple):
    process: str
    name: str
    order: tuple[int, ...]
    noun: str = ""  # what overlapping pieces are called together; empty where none overlap


class Rows:
    """The rows of a cluster's traces: one for each processor, network and link, or in a large cluster of many of them.

    A row of many shows when any of them is busy, and with how many tasks or bytes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.is_aggregated = cluster.num_socs > MOST_ROWS
        num_boards, num_servers = len(cluster.boards), len(cluster.servers)
        by_server = num_boards > MOST_ROWS >= num_servers > 0
        boards_each, servers_each = (
            ceil(num_boards / MOST_ROWS),
            max(1, ceil(num_servers / MOST_ROWS)),
        )
        self._part_of_board = [
            cluster.server_of(board) if by_server else board // boards_each
            for board in range(num_boards)
        ]
        boards: dict[int, list[int]] = {}
        for board, part in enumerate(self._part_of_board):
            boards.setdefault(part, []).append(board)
        self._boards = {part: (each[0], each[-1]) for part, each in boards.items()}
        self._servers_each = servers_each

    def processor(self, device: Endpoint, processor: str) -> _Row:
        """Return the row of a processor."""
        if not isinstance(device, int):
            return _Row("servers", f"{device} {processor}", (0, 0))
        if not self.is_aggregated:
            return _Row("SoCs", f"SoC {device} {processor}", (device, 0))
        part = self._part(device)
        return _Row("SoCs", f"{self._socs_of(part)} {processor}", (part, 0), "tasks")

    def network(self, soc: int) -> _Row:
        """Return the row of a SoC's network."""
        if not self.is_aggregated:
            return _Row("SoCs", f"SoC {soc} network", (soc, 1), "transfers")
        part = self._part(soc)
        return _Row("SoCs", f"{self._socs_of(part)} network", (part, 1), "transfers")

    def link(self, name: str) -> _Row | None:
        """Return the row of a link; None for a SoC's own in a large cluster, where its network is enough."""
        if not self.is_aggregated:
            return _Row("links", name, (_number(name),), "transfers")
        port, _, direction = name.partition("/")
        if port.startswith("soc"):
            return None
        number = _number(port)
        if port.startswith("board"):
            part = self._part_of_board[number]
            return _Row(
                "links",
                f"{_range('board', *self._boards[part])}/{direction}",
                (1, part),
                "transfers",
            )
        if port.startswith("server") and number >= 0:
            part = number // self._servers_each
            last = min((part + 1) * self._servers_each, len(self._cluster.servers)) - 1
            return _Row(
                "links",
                f"{_range('server', part * self._servers_each, last)}/{direction}",
                (0, part),
                "transfers",
            )
        return _Row("links", name, (-1, number), "transfers")

    def _part(self, soc: int) -> int:
        return self._part_of_board[self._cluster.board_of(soc)]

    def _socs_of(self, part: int) -> str:
        first, last = self._boards[part]
        return _range(
            "SoC", self._cluster.socs_of(first).start, self._cluster.socs_of(last).stop - 1
        )


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"


class _Piece(NamedTuple):
    name: str
    start_s: float
    end_s: float
    num_bytes: float = 0.0
    number: int = 0  # of transfers, or in a row of many of tasks


class TracedPart(NamedTuple):
    """A component's execution, and its seconds after the beginning of the run."""

    component: Component
    repeated: RepeatedRun
    before_s: float


class Recorded(NamedTuple):
    """The spans of a run from its beginning on, by row, and the number of activities without one."""

    pieces: Sequence[tuple[_Row, _Piece]]
    num_unlogged: int

    def add_to(self, trace: Trace, origin_s: float) -> None:
        """Add the spans of a run that begins at `origin_s`."""
        trace.drop(self.num_unlogged)
        for row, piece in self.pieces:
            args = (
                {}
                if not piece.number
                else {"tasks": piece.number}
                if row.noun == "tasks"
                else {"bytes": piece.num_bytes, "transfers": piece.number}
            )
            trace.add(
                row.process,
                row.name,
                piece.name,
                origin_s + piece.start_s,
                piece.end_s - piece.start_s,
                order=row.order,
                args=args,
            )


def record(graph: TaskGraph, parts: Iterable[TracedPart], rows: Rows, most: int) -> Recorded:
    """Return the spans of components that were executed in one run; of more than `most` activities, the first.

    Work has a row for each processor. A SoC's network and a link can serve several transfers at once; their
    rows show when they are busy, and with how many bytes. Where periods were skipped, each row shows one span.
    """
    found: dict[_Row, list[_Piece]] = {}
    num_unlogged = 0
    for component, repeated, before_s in parts:
        outcome = repeated.outcome
        own = _pieces_of(graph, component, outcome, rows, most)
        num_all = sum(
            1 if outcome.members is None else len(outcome.members[instance.task])
            for instance in outcome.instances
        )
        num_unlogged += outcome.num_unlogged + max(
            0, num_all - (num_all if rows.is_aggregated else most)
        )
        for gap in outcome.gaps:
            members = outcome.members
            each = (
                gap.tasks
                if members is None
                else [one for task in gap.tasks for one in members[task]]
            )
            for row in {
                row for task in each for row, _ in _places(graph, component, task, rows)
            } & own.keys():
                own[row].append(_Piece(_more(gap.repetitions), gap.start_s, gap.end_s))
        recurrence = outcome.recurrence
        for row, pieces in own.items():
            if recurrence is not None and repeated.num_periods:
                more = _Piece(
                    _more(repeated.num_periods * recurrence.repetitions),
                    recurrence.at_s,
                    recurrence.at_s + repeated.inserted_s,
                )
                pieces = [
                    more,
                    *_parted(_merged(row, pieces), recurrence.at_s, repeated.inserted_s),
                ]
            found.setdefault(row, []).extend(
                piece._replace(start_s=piece.start_s + before_s, end_s=piece.end_s + before_s)
                for piece in pieces
            )
    return Recorded(
        [
            (row, piece)
            for row, pieces in found.items()
            for piece in _merged(row, pieces)
            if piece.end_s > piece.start_s
        ],
        num_unlogged,
    )


def _more(repetitions: int) -> str:
    return f"{repetitions} more repetitions (not re-simulated)"


def _pieces_of(
    graph: TaskGraph,
    component: Component,
    outcome: Outcome,
    rows: Rows,
    most: int,
) -> dict[_Row, list[_Piece]]:
    """Return the pieces of each row. In a row of many, tasks of one class that are there are one piece."""
    found: dict[_Row, list[_Piece]] = {}
    if rows.is_aggregated:
        places: dict[int, Counter[tuple[_Row, bool]]] = {}
        for instance in outcome.instances:
            counts = places.get(instance.task)
            if counts is None:
                of_class = (
                    (instance.task,) if outcome.members is None else outcome.members[instance.task]
                )
                counts = places[instance.task] = Counter(
                    place for task in of_class for place in _places(graph, component, task, rows)
                )
            one = (
                outcome.members[instance.task][0] if outcome.members is not None else instance.task
            )
            whole = _piece(graph.tasks[component.tasks[one]], instance)
            for (row, is_link), count in counts.items():
                start_s = instance.moved_s if is_link else instance.start_s
                found.setdefault(row, []).append(
                    _Piece(
                        whole.name,
                        start_s,
                        whole.end_s,
                        whole.num_bytes * count,
                        count if row.noun else 0,
                    )
                )
        return found
    every = (
        (instance, task)
        for instance in outcome.instances
        for task in (
            (instance.task,) if outcome.members is None else outcome.members[instance.task]
        )
    )
    for instance, task in islice(every, most):
        whole = _piece(graph.tasks[component.tasks[task]], instance)
        for row, is_link in _places(graph, component, task, rows):
            found.setdefault(row, []).append(
                whole._replace(start_s=instance.moved_s) if is_link else whole
            )
    return found


def _piece(task: Task, instance: Instance) -> _Piece:
    if isinstance(task, Compute):
        return _Piece(task.name, instance.start_s, instance.end_s)
    name = f"{task.name} {instance.round}" if task.rounds > 1 else task.name
    return _Piece(name, instance.start_s, instance.end_s, task.num_bytes, 1)


def _places(
    graph: TaskGraph, component: Component, number: int, rows: Rows
) -> Iterator[tuple[_Row, bool]]:
    """Yield the rows of a task, and whether each is that of a link, which is busy while bytes flow."""
    task, step = graph.tasks[component.tasks[number]], component.program.steps[number]
    if isinstance(task, Compute):
        yield rows.processor(task.device, task.processor), False
        return
    assert isinstance(step, TransferStep)
    for end in (task.source, task.target):
        if isinstance(end, int):
            yield rows.network(end), False
    if task.num_bytes:
        for resource in component.program.paths[step.data_path]:
            if (row := rows.link(component.resources[resource])) is not None:
                yield row, True


def record_spans(spans: Iterable[EndedActivity], num_unlogged: int, rows: Rows) -> Recorded:
    """Return the activities of processes; rows are those of `record`."""
    found: dict[_Row, list[_Piece]] = {}
    for span in spans:
        if span.processor is not None:
            row = rows.processor(span.processor.device, span.processor.name)
            found.setdefault(row, []).append(
                _Piece(span.name, span.start_s, span.end_s, number=int(row.noun != ""))
            )
            continue
        whole = _Piece(span.name, span.start_s, span.end_s, span.num_bytes, 1)
        for soc in span.socs:
            found.setdefault(rows.network(soc), []).append(whole)
        for link in span.links:
            if (of_link := rows.link(link)) is not None:
                found.setdefault(of_link, []).append(whole._replace(start_s=span.moved_s))
    return Recorded(
        [
            (row, piece)
            for row, pieces in found.items()
            for piece in _merged(row, pieces)
            if piece.end_s > piece.start_s
        ],
        num_unlogged,
    )


def _number(link: str) -> int:
    """Return the SoC or board number in a link's name, so that board 10 comes after board 9."""
    digits = "".join(character for character in link if character.isdigit())
    return int(digits) if digits else -1


def _merged(row: _Row, pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """Return a row's pieces by time, those that overlap as one, where they may."""
    if not row.noun:
        return pieces
    found: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.start_s, piece.end_s, piece.name)):
        if not found or piece.start_s >= found[-1].end_s:
            found.append(piece)
            continue
        current = found[-1]
        number = current.number + piece.number
        found[-1] = _Piece(
            f"{number} {row.noun}" if number else current.name,
            current.start_s,
            max(current.end_s, piece.end_s),
            current.num_bytes + piece.num_bytes,
            number,
        )
    return found


def _parted(pieces: Iterable[_Piece], at_s: float, inserted_s: float) -> Iterator[_Piece]:
    """Yield the pieces with a gap of `inserted_s` at `at_s`; a piece across it continues after the gap."""
    for piece in pieces:
        if piece.end_s <= at_s:
            yield piece
        elif piece.start_s >= at_s:
            yield piece._replace(start_s=piece.start_s + inserted_s, end_s=piece.end_s + inserted_s)
        else:
            before = (at_s - piece.start_s) / (piece.end_s - piece.start_s)
            yield piece._replace(end_s=at_s, num_bytes=piece.num_bytes * before)
            yield piece._replace(
                start_s=at_s + inserted_s,
                end_s=piece.end_s + inserted_s,
                num_bytes=piece.num_bytes * (1.0 - before),
            )
