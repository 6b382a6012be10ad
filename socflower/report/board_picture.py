"""The geometry of the picture of groups on boards that `templates/boards.html.j2` draws."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.quantities import counted

# Paul Tol's "light" scheme: distinct under the common colour deficiencies, legible under black letters.
_GROUP_COLOURS = (
    "#77AADD",
    "#EE8866",
    "#EEDD88",
    "#BBCC33",
    "#FFAABB",
    "#99DDFF",
    "#44BB99",
    "#AAAA00",
)
_PICTURE_WIDTH = 1080.0
_LETTERED = 12.0
"""Font size from which a cell has room for its communication group too."""

_MAX_BOARDS = 400
"""Further boards are only counted in the text: above about 2,000 cells the picture is unreadable and slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Sizes in pixels; large clusters get small cells without letters."""

    cell: float
    gap: float
    padding: float
    header: float
    # Between boards; links of split groups run through it.
    gutter: float
    # Of the group numbers; 0 leaves them out.
    font: float


_READABLE = _Scale(cell=34, gap=4, padding=7, header=18, gutter=26, font=12)
_COMPACT = _Scale(cell=22, gap=2, padding=5, header=14, gutter=16, font=9)
_TINY = _Scale(cell=13, gap=1.5, padding=4, header=0, gutter=10, font=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A SoC's role in a plan."""

    # Position among the plan's groups.
    group: int
    group_id: str
    leads: bool
    split: bool
    # Of its communication group; empty if the plan has at most one.
    letter: str


def letter(index: int) -> str:
    """Return the name of a communication group: A to Z, then A1, B1 and so on."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def communication_letters(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the letter of each group's communication group, by group id; empty if there is only one."""
    parts = plan.get("communication_groups") or []
    if len(parts) < 2:
        return {}
    return {str(group_id): letter(index) for index, part in enumerate(parts) for group_id in part}


def board_picture(plan: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the picture of a plan's groups; `prefix` makes its ids distinct from those of other pictures."""
    groups = plan.get("groups") or []
    num_split = sum(1 for group in groups if group.get("split"))
    slots = [int(count) for count in plan.get("slots_per_board") or []]
    members = _members(plan)
    grid = _Grid(slots[:_MAX_BOARDS])
    scale = grid.scale
    cells = [_cell(soc, members.get(soc), x, y, scale) for soc, (x, y) in enumerate(grid.corners)]
    half = scale.cell / 2
    centre = {soc: (x + half, y + half) for soc, (x, y) in enumerate(grid.corners)}
    return {
        "prefix": prefix,
        "scale": scale,
        "colours": _GROUP_COLOURS,
        "boards": grid.boards,
        "num_boards": len(slots),
        "cells": cells,
        "links": _links(groups, slots, centre, scale),
        "width": grid.width,
        "height": grid.height,
        "has_split": num_split > 0,
        "is_lettered": scale.font >= _LETTERED and bool(communication_letters(plan)),
        "label": f"{counted(len(groups), 'group')} on {counted(len(slots), 'board')} with "
        f"{counted(sum(slots), 'slot')}; {counted(num_split, 'group')} split over boards; "
        f"{counted(sum(slots) - len(members), 'slot')} idle",
    }


class _Grid:
    """The rectangles of boards, in rows, and the upper left corners of their slots, by SoC."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.scale = scale = _scale_of(len(slots))
        self._columns = min(8, max([2, *slots]))
        self._pitch = scale.cell + scale.gap
        self._deepest = max(map(self._rows, slots), default=1)
        width = self._across(self._columns)
        height = scale.header + self._across(self._deepest)
        per_width = int((_PICTURE_WIDTH + scale.gutter) // (width + scale.gutter))
        per_row = max(1, min(len(slots), per_width))
        self.boards: list[dict[str, float]] = []
        self.corners: list[tuple[float, float]] = []
        for board, count in enumerate(slots):
            x = 1 + board % per_row * (width + scale.gutter)
            y = 1 + board // per_row * (height + scale.gutter)
            self._add_board(board, count, x, y)
        self.width = 2 + per_row * (width + scale.gutter) - scale.gutter
        # Keep the last gutter, since links also run below the last row.
        self.height = 2 + math.ceil(len(slots) / per_row) * (height + scale.gutter)

    def _rows(self, count: int) -> int:
        return max(1, math.ceil(count / self._columns))

    def _across(self, num_cells: int) -> float:
        return 2 * self.scale.padding + num_cells * self._pitch - self.scale.gap

    def _add_board(self, board: int, count: int, x: float, y: float) -> None:
        """Add a board; one with fewer slots is drawn smaller, but wide enough for its name."""
        width = self._across(max(2, min(count, self._columns)))
        height = self.scale.header + self._across(self._rows(count))
        self.boards.append({"number": board, "x": x, "y": y, "width": width, "height": height})
        left, top = x + self.scale.padding, y + self.scale.header + self.scale.padding
        for slot in range(count):
            row, column = divmod(slot, self._columns)
            self.corners.append((left + column * self._pitch, top + row * self._pitch))


def _scale_of(num_boards: int) -> _Scale:
    if num_boards <= 24:
        return _READABLE
    return _COMPACT if num_boards <= 80 else _TINY


def _members(plan: Mapping[str, Any]) -> dict[int, _Member]:
    letters = communication_letters(plan)
    members: dict[int, _Member] = {}
    for index, group in enumerate(plan.get("groups") or []):
        group_id = str(group.get("id", index))
        for soc in group.get("members") or []:
            members[int(soc)] = _Member(
                group=index,
                group_id=group_id,
                leads=soc == group.get("leader"),
                split=bool(group.get("split")),
                letter=letters.get(group_id, ""),
            )
    return members


def _cell(soc: int, member: _Member | None, x: float, y: float, scale: _Scale) -> dict[str, Any]:
    """Return one slot: its group's number, a star for the leader, a thick frame if the group is split."""
    if member is None:
        return {"title": f"SoC {soc}: idle", "x": x, "y": y, "member": None}
    lettered = bool(member.letter) and scale.font >= _LETTERED
    baseline = 0.5 if lettered else 0.5 + 0.36 * scale.font / scale.cell
    title = f"SoC {soc}: group {member.group_id}"
    if member.leads:
        title += ", leader"
    if member.split:
        title += ", split over boards"
    if member.letter:
        title += f", communication group {member.letter}"
    return {
        "title": title,
        "x": x,
        "y": y,
        "member": member,
        "name": member.group_id if len(member.group_id) <= 6 else "…",
        "name_size": scale.font * min(1.0, 3 / max(1, len(member.group_id))),
        "name_y": y + scale.cell * baseline,
    }


def _links(
    groups: Sequence[Mapping[str, Any]],
    slots: Sequence[int],
    centre: Mapping[int, tuple[float, float]],
    scale: _Scale,
) -> list[tuple[str, Any]]:
    """Return (curve, group id) for each step of a split group from board to board: traffic that shares uplinks."""
    board_of = [board for board, count in enumerate(slots) for _ in range(count)]
    links: list[tuple[str, Any]] = []
    for group in groups:
        if not group.get("split"):
            continue
        socs = sorted(int(soc) for soc in group.get("members") or [] if int(soc) in centre)
        for near, far in itertools.pairwise(socs):
            if board_of[near] == board_of[far]:
                continue
            (x0, y0), (x1, y1) = centre[near], centre[far]
            y0 += scale.cell / 2
            if y1 > y0:
                y1 -= scale.cell / 2
                bend = (y1 - y0) / 2
                first, second = y0 + bend, y1 - bend
            else:
                y1 += scale.cell / 2
                # A cubic curve reaches 3/4 of its control points' depth, so that it stays within the gutter.
                first = second = max(y0, y1) + (scale.padding + scale.gutter) * 0.95
            curve = f"M{x0:g} {y0:g}C{x0:g} {first:g} {x1:g} {second:g} {x1:g} {y1:g}"
            links.append((curve, group.get("id", "")))
    return links
