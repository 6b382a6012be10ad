"""Traces of virtual time in the Chrome trace format, which Perfetto opens."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from socflower.errors import ConfigError

PROCESSES = ("runs", "SoCs", "links", "servers")
"""The groups of rows, top to bottom."""

_MICROSECONDS = 1e6


class _Span(NamedTuple):
    row: tuple[str, str]
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any]


class Trace:
    """Collects spans in virtual seconds; beyond `max_spans` it counts what it drops and says so in the file."""

    def __init__(self, max_spans: int = 200_000) -> None:
        if max_spans < 1:
            raise ConfigError(f"trace: max_spans must be at least 1, got {max_spans}")
        self.max_spans = max_spans
        self.num_dropped = 0
        self._spans: list[_Span] = []
        self._rows: dict[tuple[str, str], tuple[int, ...]] = {}

    @property
    def num_spans(self) -> int:
        """How many spans are kept."""
        return len(self._spans)

    @property
    def room(self) -> int:
        """How many more spans will be kept."""
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
        """Return the trace from a span on, as plain values that JSON keeps exactly; see `restore`."""
        rows = {row: index for index, row in enumerate(self._rows)}
        return {"first_span": first_span, "num_dropped": self.num_dropped,
                "rows": [[*row, list(order)] for row, order in self._rows.items()],
                "spans": [[rows[span.row], span.name, span.start_s, span.duration_s, dict(span.args)]
                          for span in self._spans[first_span:]]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add what another trace has said of itself; called with consecutive parts, the trace is that other one."""
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
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            partial.write_text(json.dumps(document, separators=(",", ":")), "utf-8")
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
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


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}
