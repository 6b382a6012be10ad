"""Traces of virtual time in the Chrome trace format, which Perfetto opens; rows are made from execution logs."""

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
        # The names of runs are few, and needed to read the trace.
        if not self.room and process != RUNS:
            self.num_dropped += 1
            return
        self._rows.setdefault((process, row), order)
        self._spans.append(_Span((process, row), name, start_s, duration_s, args or {}))

    def drop(self, num_spans: int) -> None:
        """Count spans that were not collected."""
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
            raise ConfigError(f"trace: span {state['first_span']} does not follow {self.num_spans}")
        rows = [(process, row) for process, row, _ in state["rows"]]
        orders = [tuple(order) for _, _, order in state["rows"]]
        self._rows.update(zip(rows, orders, strict=True))
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
            raise ConfigError(f"trace {path}: cannot be written ({error.strerror})") from None

    def _events(self) -> Iterator[dict[str, Any]]:
        for pid, process in enumerate(PROCESSES):
            yield _metadata("process_name", pid, 0, name=process)
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        if self.num_dropped:
            label = f"{self.num_dropped} spans beyond {self.max_spans} dropped"
            yield _metadata("process_labels", 0, 0, labels=label)

        def place(row: tuple[str, str]) -> tuple[Any, ...]:
            return PROCESSES.index(row[0]), self._rows[row], row[1]

        rows = sorted(self._rows, key=place)
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
"""Above it, rows for SoCs become rows for boards, and rows for boards become rows for servers or several boards."""


class _Row(NamedTuple):
    process: str
    name: str
    order: tuple[int, ...]
    # The name of overlapping pieces together; empty if none overlap.
    noun: str = ""


class Rows:
    """The rows of a cluster's traces: one for each processor, network and link; in a large cluster, one for many.

    A row for many shows when any of them is busy, and with how many tasks or bytes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.is_aggregated = cluster.num_socs > MOST_ROWS
        num_boards, num_servers = len(cluster.boards), len(cluster.servers)
        by_server = num_boards > MOST_ROWS >= num_servers > 0
        boards_each = ceil(num_boards / MOST_ROWS)
        self._servers_each = max(1, ceil(num_servers / MOST_ROWS))
        self._part_of_board = [
            cluster.server_of(board) if by_server else board // boards_each
            for board in range(num_boards)
        ]
        # First and last board of each part.
        self._boards: dict[int, tuple[int, int]] = {}
        for board, part in enumerate(self._part_of_board):
            first, _ = self._boards.setdefault(part, (board, board))
            self._boards[part] = (first, board)

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
        """Return the row of a link; None for a SoC's link in a large cluster, whose network row is enough."""
        if not self.is_aggregated:
            return _Row("links", name, (_number(name),), "transfers")
        port, _, direction = name.partition("/")
        if port.startswith("soc"):
            return None
        number = _number(port)
        if port.startswith("board"):
            part = self._part_of_board[number]
            boards = _range("board", *self._boards[part])
            return _Row("links", f"{boards}/{direction}", (1, part), "transfers")
        if port.startswith("server") and number >= 0:
            part = number // self._servers_each
            first = part * self._servers_each
            last = min(first + self._servers_each, len(self._cluster.servers)) - 1
            servers = _range("server", first, last)
            return _Row("links", f"{servers}/{direction}", (0, part), "transfers")
        return _Row("links", name, (-1, number), "transfers")

    def _part(self, soc: int) -> int:
        return self._part_of_board[self._cluster.board_of(soc)]

    def _socs_of(self, part: int) -> str:
        first, last = (self._cluster.socs_of(board) for board in self._boards[part])
        return _range("SoC", first.start, last.stop - 1)


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"


class _Piece(NamedTuple):
    name: str
    start_s: float
    end_s: float
    num_bytes: float = 0.0
    # Of transfers; in a row for many, of tasks.
    number: int = 0


class TracedPart(NamedTuple):
    """A component's execution, and when it starts, in seconds after the start of the run."""

    component: Component
    repeated: RepeatedRun
    before_s: float


class Recorded(NamedTuple):
    """The spans of a run by row, in seconds after its start, and the number of activities without a span."""

    pieces: Sequence[tuple[_Row, _Piece]]
    num_unlogged: int

    def add_to(self, trace: Trace, origin_s: float) -> None:
        """Add the spans of a run that starts at `origin_s`."""
        trace.drop(self.num_unlogged)
        for row, piece in self.pieces:
            args: dict[str, float] = {}
            if piece.number and row.noun == "tasks":
                args = {"tasks": piece.number}
            elif piece.number:
                args = {"bytes": piece.num_bytes, "transfers": piece.number}
            start_s, duration_s = origin_s + piece.start_s, piece.end_s - piece.start_s
            trace.add(
                row.process, row.name, piece.name, start_s, duration_s, order=row.order, args=args
            )


def record(graph: TaskGraph, parts: Iterable[TracedPart], rows: Rows, most: int) -> Recorded:
    """Return the spans of components that were executed in one run; of more than `most` activities, the first.

    Work has a row for each processor. A SoC's network and a link can serve several transfers at once; their rows show
    when they are busy, and with how many bytes. Skipped periods are one span in each row.
    """
    found: dict[_Row, list[_Piece]] = {}
    num_unlogged = 0
    for component, repeated, before_s in parts:
        outcome = repeated.outcome
        own = _pieces_of(graph, component, outcome, rows, most)
        num_unlogged += outcome.num_unlogged
        # In rows for many, all tasks of a class are one piece, so none is left out.
        if not rows.is_aggregated:
            num_all = sum(len(outcome.tasks_of(instance.task)) for instance in outcome.instances)
            num_unlogged += max(0, num_all - most)
        _add_gaps(own, graph, component, outcome, rows)
        for row, pieces in own.items():
            for piece in _with_periods(row, pieces, repeated):
                found.setdefault(row, []).append(_moved(piece, before_s))
    return _recorded(found, num_unlogged)


def _recorded(found: Mapping[_Row, Sequence[_Piece]], num_unlogged: int) -> Recorded:
    """Return the pieces of rows, merged, without those that take no time."""
    pieces = [(row, piece) for row, own in found.items() for piece in _merged(row, own)]
    busy = [(row, piece) for row, piece in pieces if piece.end_s > piece.start_s]
    return Recorded(busy, num_unlogged)


def _add_gaps(
    own: dict[_Row, list[_Piece]],
    graph: TaskGraph,
    component: Component,
    outcome: Outcome,
    rows: Rows,
) -> None:
    """Add a piece for each gap to the rows of its tasks that have other pieces."""
    for gap in outcome.gaps:
        tasks = [one for task in gap.tasks for one in outcome.tasks_of(task)]
        touched = {row for task in tasks for row, _ in _places(graph, component, task, rows)}
        for row in touched & own.keys():
            own[row].append(_Piece(_more(gap.repetitions), gap.start_s, gap.end_s))


def _with_periods(row: _Row, pieces: Sequence[_Piece], repeated: RepeatedRun) -> Sequence[_Piece]:
    """Return a row's pieces with the inserted periods as one piece."""
    recurrence = repeated.outcome.recurrence
    if recurrence is None or not repeated.num_periods:
        return pieces
    name = _more(repeated.num_periods * recurrence.repetitions)
    end_s = recurrence.at_s + repeated.inserted_s
    others = _parted(_merged(row, pieces), recurrence.at_s, repeated.inserted_s)
    return [_Piece(name, recurrence.at_s, end_s), *others]


def _moved(piece: _Piece, by_s: float) -> _Piece:
    return piece._replace(start_s=piece.start_s + by_s, end_s=piece.end_s + by_s)


def _more(repetitions: int) -> str:
    return f"{repetitions} more repetitions (not re-simulated)"


def _pieces_of(
    graph: TaskGraph,
    component: Component,
    outcome: Outcome,
    rows: Rows,
    most: int,
) -> dict[_Row, list[_Piece]]:
    """Return the pieces of each row. In a row for many, the tasks of one class are one piece."""
    found: dict[_Row, list[_Piece]] = {}
    if rows.is_aggregated:
        places: dict[int, Counter[tuple[_Row, bool]]] = {}
        for instance in outcome.instances:
            tasks = outcome.tasks_of(instance.task)
            if instance.task not in places:
                places[instance.task] = Counter(
                    place for task in tasks for place in _places(graph, component, task, rows)
                )
            whole = _piece(graph.tasks[component.tasks[tasks[0]]], instance)
            for (row, is_link), count in places[instance.task].items():
                piece = whole._replace(
                    start_s=instance.moved_s if is_link else instance.start_s,
                    num_bytes=whole.num_bytes * count,
                    number=count if row.noun else 0,
                )
                found.setdefault(row, []).append(piece)
        return found
    every = (
        (instance, task)
        for instance in outcome.instances
        for task in outcome.tasks_of(instance.task)
    )
    for instance, task in islice(every, most):
        whole = _piece(graph.tasks[component.tasks[task]], instance)
        for row, is_link in _places(graph, component, task, rows):
            piece = whole._replace(start_s=instance.moved_s) if is_link else whole
            found.setdefault(row, []).append(piece)
    return found


def _piece(task: Task, instance: Instance) -> _Piece:
    if isinstance(task, Compute):
        return _Piece(task.name, instance.start_s, instance.end_s)
    name = f"{task.name} {instance.round}" if task.rounds > 1 else task.name
    return _Piece(name, instance.start_s, instance.end_s, task.num_bytes, 1)


def _places(
    graph: TaskGraph, component: Component, number: int, rows: Rows
) -> Iterator[tuple[_Row, bool]]:
    """Yield the rows of a task, and whether each is the row of a link, which is busy only while bytes flow."""
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
            number = 1 if row.noun else 0
            piece = _Piece(span.name, span.start_s, span.end_s, number=number)
            found.setdefault(row, []).append(piece)
            continue
        whole = _Piece(span.name, span.start_s, span.end_s, span.num_bytes, 1)
        for soc in span.socs:
            found.setdefault(rows.network(soc), []).append(whole)
        for link in span.links:
            if (of_link := rows.link(link)) is not None:
                found.setdefault(of_link, []).append(whole._replace(start_s=span.moved_s))
    return _recorded(found, num_unlogged)


def _number(link: str) -> int:
    """Return the SoC or board number in a link's name, so that board 10 comes after board 9."""
    digits = "".join(filter(str.isdigit, link))
    return int(digits) if digits else -1


def _merged(row: _Row, pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """Return a row's pieces by time; in a row with a noun, overlapping pieces become one."""
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
            yield _moved(piece, inserted_s)
        else:
            before = (at_s - piece.start_s) / (piece.end_s - piece.start_s)
            yield piece._replace(end_s=at_s, num_bytes=piece.num_bytes * before)
            after = piece._replace(start_s=at_s, num_bytes=piece.num_bytes * (1.0 - before))
            yield _moved(after, inserted_s)
