"""Where the groups of a plan are on their boards: the geometry of the picture in `templates/boards.html.j2`."""

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
_LETTERED = 12.0  # font size from which a cell has room for its communication group too
_MAX_BOARDS = 400
"""Further boards are only counted in text: more than about 2,000 cells are unreadable and slow in browsers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Sizes in pixels; large clusters get small cells without letters."""

    cell: float
    gap: float
    padding: float
    header: float
    gutter: float  # between boards; links of split groups run through it
    font: float  # of the group numbers; 0 leaves them out


_READABLE = _Scale(cell=34, gap=4, padding=7, header=18, gutter=26, font=12)
_COMPACT = _Scale(cell=22, gap=2, padding=5, header=14, gutter=16, font=9)
_TINY = _Scale(cell=13, gap=1.5, padding=4, header=0, gutter=10, font=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A SoC's role in a plan."""

    group: int  # position among the plan's groups
    group_id: str
    leads: bool
    split: bool
    letter: str  # of its communication group; empty if the plan has at most one


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
    shown = slots[:_MAX_BOARDS]
    scale = _READABLE if len(shown) <= 24 else _COMPACT if len(shown) <= 80 else _TINY
    pitch = scale.cell + scale.gap
    columns = min(8, max([2, *shown]))
    width = 2 * scale.padding + columns * pitch - scale.gap
    per_row = max(
        1, min(len(shown), int((_PICTURE_WIDTH + scale.gutter) // (width + scale.gutter)))
    )
    deepest = max((math.ceil(count / columns) for count in shown), default=1) or 1
    height = scale.header + 2 * scale.padding + deepest * pitch - scale.gap

    boards, cells = list[dict[str, float]](), list[dict[str, Any]]()
    centre = dict[int, tuple[float, float]]()
    for board, count in enumerate(shown):
        x = 1 + board % per_row * (width + scale.gutter)
        y = 1 + board // per_row * (height + scale.gutter)
        # A board with fewer slots is drawn smaller, but wide enough for its name.
        boards.append(
            {
                "number": board,
                "x": x,
                "y": y,
                "width": 2 * scale.padding + max(2, min(count, columns)) * pitch - scale.gap,
                "height": height - (deepest - max(1, math.ceil(count / columns))) * pitch,
            }
        )
        for slot in range(count):
            left = x + scale.padding + slot % columns * pitch
            top = y + scale.header + scale.padding + slot // columns * pitch
            soc = len(cells)
            centre[soc] = (left + scale.cell / 2, top + scale.cell / 2)
            cells.append(_cell(soc, members.get(soc), left, top, scale))
    return {
        "prefix": prefix,
        "scale": scale,
        "colours": _GROUP_COLOURS,
        "boards": boards,
        "num_boards": len(slots),
        "cells": cells,
        "links": _links(groups, slots, centre, scale),
        "width": 2 + per_row * (width + scale.gutter) - scale.gutter,
        # Keep the last gutter, since links also run below the last row.
        "height": 2 + math.ceil(len(shown) / per_row) * (height + scale.gutter),
        "has_split": num_split > 0,
        "is_lettered": scale.font >= _LETTERED and bool(communication_letters(plan)),
        "label": f"{counted(len(groups), 'group')} on {counted(len(slots), 'board')} with "
        f"{counted(sum(slots), 'slot')}; {counted(num_split, 'group')} split over boards; "
        f"{counted(sum(slots) - len(members), 'slot')} idle",
    }


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
    return {
        "title": f"SoC {soc}: group {member.group_id}"
        + (", leader" if member.leads else "")
        + (", split over boards" if member.split else "")
        + (f", communication group {member.letter}" if member.letter else ""),
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
    """Return a curve from board to board along each split group, and its id: the traffic that shares board uplinks."""
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
            links.append(
                (
                    f"M{x0:g} {y0:g}C{x0:g} {first:g} {x1:g} {second:g} {x1:g} {y1:g}",
                    group.get("id", ""),
                )
            )
    return links
