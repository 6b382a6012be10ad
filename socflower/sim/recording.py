"""From what an execution logged to rows of a trace."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from socflower.cluster import Compute, Endpoint, TaskGraph
from socflower.sim.program import Component, TransferStep
from socflower.sim.solution import Repeated
from socflower.sim.trace import Trace

_Row = tuple[str, str, tuple[int, ...]]


class _Piece(NamedTuple):
    name: str
    start_s: float
    end_s: float
    num_bytes: float
    num_transfers: int


def record(trace: Trace, graph: TaskGraph, component: Component, repeated: Repeated, origin_s: float) -> None:
    """Add what a component did from `origin_s` on.

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
        whole = _Piece(task.name, instance.start_s, instance.end_s, task.num_bytes, 1)
        for end in (task.source, task.target):
            if isinstance(end, int):
                rows.setdefault(("SoCs", f"SoC {end} network", (end, 1)), []).append(whole)
        if task.num_bytes:
            moving = whole._replace(start_s=instance.moved_s)
            for resource in component.program.paths[step.data_path]:
                link = component.resources[resource]
                rows.setdefault(("links", link, (_number(link),)), []).append(moving)
    recurrence = repeated.outcome.recurrence
    for (process, name, order), pieces in rows.items():
        merged = list(_merged(pieces)) if process == "links" or order[-1] == 1 else pieces
        if recurrence is not None and repeated.num_periods:
            merged = list(_parted(merged, recurrence.at_s, repeated.inserted_s))
            trace.add(process, name, f"{repeated.num_periods * recurrence.repetitions} more repetitions "
                      "(not re-simulated)", origin_s + recurrence.at_s, repeated.inserted_s, order=order)
        for piece in merged:
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
    """Yield the pieces with `inserted_s` made free at `at_s`; one under way there goes on after it."""
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
