"""Traces of virtual time in the Chrome trace format, which Perfetto opens; rows are made of execution logs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from socflower.cluster import Compute, Endpoint, TaskGraph
from socflower.errors import ConfigError, require_range
from socflower.sim.execution import Repeated
from socflower.sim.processes import Span
from socflower.sim.program import Component, TransferStep
from socflower.wire.saved_state import write_atomically

PROCESSES = ("runs", "SoCs", "links", "servers")
"""The groups of rows, top to bottom."""

_MICROSECONDS = 1e6
_BELOW = 1 << 31  # orders rows of a part after all SoCs and boards


class _Span(NamedTuple):
    row: tuple[str, str]
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any]


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
        """Number of spans that can still be added."""
        return self.max_spans - len(self._spans)

    def add(self, process: str, row: str, name: str, start_s: float, duration_s: float, *,
            order: tuple[int, ...] = (0,), args: Mapping[str, Any] | None = None) -> None:
        """Add a span to a row of one of `PROCESSES`; rows are sorted by `order`, then by name."""
        assert process in PROCESSES, f"no process {process!r}"
        if not self.room:
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
        return {"first_span": first_span, "num_dropped": self.num_dropped,
                "rows": [[*row, list(order)] for row, order in self._rows.items()],
                "spans": [[rows[span.row], span.name, span.start_s, span.duration_s, dict(span.args)]
                          for span in self._spans[first_span:]]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add a part of another trace's state; consecutive parts together restore that trace."""
        if state["first_span"] != self.num_spans:
            raise ConfigError(f"trace: a part from span {state['first_span']} does not follow {self.num_spans} spans")
        rows = [(process, row) for process, row, _ in state["rows"]]
        self._rows.update({row: tuple(order) for row, (_, _, order) in zip(rows, state["rows"], strict=True)})
        self._spans += [_Span(rows[row], name, start_s, duration_s, args)
                        for row, name, start_s, duration_s, args in state["spans"]]
        self.num_dropped = state["num_dropped"]

    def write(self, path: Path) -> None:
        """Write the trace in one step: a reader finds the old file or the whole new one."""
        document = {
            "displayTimeUnit": "ms",
            "otherData": {"time": "virtual", "num_spans": len(self._spans), "num_spans_dropped": self.num_dropped},
            "traceEvents": list(self._events()),
        }
        try:
            write_atomically(path, json.dumps(document, separators=(",", ":")))
        except OSError as error:
            raise ConfigError(f"trace {path}: cannot be written ({error.strerror}); check the folder") from None

    def _events(self) -> Iterator[dict[str, Any]]:
        for pid, process in enumerate(PROCESSES):
            yield _metadata("process_name", pid, 0, name=process)
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        if self.num_dropped:
            yield _metadata("process_labels", 0, 0,
                            labels=f"{self.num_dropped} spans beyond {self.max_spans} dropped")
        rows = sorted(self._rows, key=lambda row: (PROCESSES.index(row[0]), self._rows[row], row[1]))
        ids: dict[tuple[str, str], tuple[int, int]] = {}
        for tid, row in enumerate(rows, start=1):
            pid = PROCESSES.index(row[0])
            ids[row] = (pid, tid)
            yield _metadata("thread_name", pid, tid, name=row[1])
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
        for span in sorted(self._spans, key=lambda span: (ids[span.row], span.start_s)):
            pid, tid = ids[span.row]
            yield {"ph": "X", "pid": pid, "tid": tid, "name": span.name, "ts": span.start_s * _MICROSECONDS,
                   "dur": span.duration_s * _MICROSECONDS, "args": span.args}


class NamedTrace(Trace):
    """The rows of a part in the trace of the whole: "SoC 0 cpu" of the part "edge" is "edge: SoC 0 cpu", below all."""

    def __init__(self, whole: Trace, name: str) -> None:
        super().__init__(whole.max_spans)
        self._whole, self._name = whole, name

    @property
    def room(self) -> int:
        """Number of spans that can still be added to the whole."""
        return self._whole.room

    def add(self, process: str, row: str, name: str, start_s: float, duration_s: float, *,
            order: tuple[int, ...] = (0,), args: Mapping[str, Any] | None = None) -> None:
        """Add a span to a row of the part; see `Trace.add`."""
        self._whole.add(process, f"{self._name}: {row}", name, start_s, duration_s, order=(_BELOW, *order), args=args)

    def drop(self, num_spans: int) -> None:
        """Count spans that were not even collected."""
        self._whole.drop(num_spans)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


_Row = tuple[str, str, tuple[int, ...]]


class _Piece(NamedTuple):
    name: str
    start_s: float
    end_s: float
    num_bytes: float
    num_transfers: int


def record(trace: Trace, graph: TaskGraph, component: Component, repeated: Repeated, origin_s: float) -> None:
    """Add the execution of a component from `origin_s` on.

    Work has a row for each processor. A SoC's network and a link can serve several transfers at once; their
    rows show when they are busy, and with how many bytes. Where periods were skipped, each row shows one span.
    """
    trace.drop(repeated.outcome.num_unlogged)
    rows: dict[_Row, list[_Piece]] = {}
    for instance in repeated.outcome.instances:
        task = graph.tasks[component.tasks[instance.task]]
        step = component.program.steps[instance.task]
        if isinstance(task, Compute):
            row = _processor_row(task.device, task.processor)
            rows.setdefault(row, []).append(_Piece(task.name, instance.start_s, instance.end_s, 0.0, 0))
            continue
        assert isinstance(step, TransferStep)
        name = f"{task.name} {instance.round}" if task.rounds > 1 else task.name
        whole = _Piece(name, instance.start_s, instance.end_s, task.num_bytes, 1)
        for end in (task.source, task.target):
            if isinstance(end, int):
                rows.setdefault(("SoCs", f"SoC {end} network", (end, 1)), []).append(whole)
        if task.num_bytes:
            moving = whole._replace(start_s=instance.moved_s)
            for resource in component.program.paths[step.data_path]:
                link = component.resources[resource]
                rows.setdefault(("links", link, (_number(link),)), []).append(moving)
    recurrence = repeated.outcome.recurrence
    if recurrence is None or not repeated.num_periods:
        _add_rows(trace, rows, origin_s)
        return
    for row, pieces in rows.items():
        rows[row] = list(_parted(_in_row(row, pieces), recurrence.at_s, repeated.inserted_s))
        trace.add(row[0], row[1], f"{repeated.num_periods * recurrence.repetitions} more repetitions "
                  "(not re-simulated)", origin_s + recurrence.at_s, repeated.inserted_s, order=row[2])
    _add_rows(trace, rows, origin_s)


def record_spans(trace: Trace, spans: Iterable[Span], num_unlogged: int) -> None:
    """Add the activities of processes; rows are those of `record`."""
    trace.drop(num_unlogged)
    rows: dict[_Row, list[_Piece]] = {}
    for span in spans:
        if span.processor is not None:
            row = _processor_row(span.processor.device, span.processor.name)
            rows.setdefault(row, []).append(_Piece(span.name, span.start_s, span.end_s, 0.0, 0))
            continue
        whole = _Piece(span.name, span.start_s, span.end_s, span.num_bytes, 1)
        for soc in span.socs:
            rows.setdefault(("SoCs", f"SoC {soc} network", (soc, 1)), []).append(whole)
        for link in span.links:
            rows.setdefault(("links", link, (_number(link),)), []).append(whole._replace(start_s=span.moved_s))
    _add_rows(trace, rows, 0.0)


def _in_row(row: _Row, pieces: list[_Piece]) -> list[_Piece]:
    """Return a row's pieces; those of a network or link, which may overlap, merged."""
    return list(_merged(pieces)) if row[0] == "links" or row[2][-1] == 1 else pieces


def _add_rows(trace: Trace, rows: Mapping[_Row, list[_Piece]], origin_s: float) -> None:
    for row, pieces in rows.items():
        process, name, order = row
        for piece in _in_row(row, pieces):
            if piece.end_s > piece.start_s:
                args = {"bytes": piece.num_bytes, "transfers": piece.num_transfers} if piece.num_transfers else {}
                trace.add(process, name, piece.name, origin_s + piece.start_s, piece.end_s - piece.start_s,
                          order=order, args=args)


def _processor_row(device: Endpoint, processor: str) -> _Row:
    if isinstance(device, int):
        return "SoCs", f"SoC {device} {processor}", (device, 0)
    return "servers", f"{device} {processor}", (0, 0)


def _number(link: str) -> int:
    """Return the SoC or board number in a link's name, so that board 10 comes after board 9."""
    digits = "".join(character for character in link if character.isdigit())
    return int(digits) if digits else -1


def _merged(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Yield pieces by time, those that overlap as one."""
    current: _Piece | None = None
    for piece in sorted(pieces, key=lambda piece: (piece.start_s, piece.end_s, piece.name)):
        if current is None or piece.start_s >= current.end_s:
            if current is not None:
                yield current
            current = piece
        else:
            count = current.num_transfers + piece.num_transfers
            current = _Piece(f"{count} transfers", current.start_s, max(current.end_s, piece.end_s),
                             current.num_bytes + piece.num_bytes, count)
    if current is not None:
        yield current


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
            yield piece._replace(start_s=at_s + inserted_s, end_s=piece.end_s + inserted_s,
                                 num_bytes=piece.num_bytes * (1.0 - before))
