"""The groups on their boards as SVG: each SoC's group, the leaders, and the links across boards."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.quantities import counted
from socflower.report.page import text

# Paul Tol's "light" scheme: distinct under the common colour deficiencies, legible under black letters.
_GROUP_COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#BBCC33", "#FFAABB", "#99DDFF", "#44BB99", "#AAAA00")
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
    communication_group: str  # a letter; empty if the plan has at most one such group


def letter(index: int) -> str:
    """Return the name of a communication group: A to Z, then A1, B1 and so on."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def communication_letters(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the letter of each group's communication group, by group id; empty if there is only one."""
    parts = plan.get("communication_groups") or []
    if len(parts) < 2:
        return {}
    return {str(group_id): letter(index) for index, part in enumerate(parts) for group_id in part}


def board_picture(plan: Mapping[str, Any], prefix: str) -> str:
    """Return the SVG of a plan's groups; `prefix` makes its ids distinct from those of other pictures."""
    slots = [int(count) for count in plan.get("slots_per_board") or []]
    members = _members(plan)
    first_soc = [sum(slots[:board]) for board in range(min(len(slots), _MAX_BOARDS))]
    shown = slots[:_MAX_BOARDS]
    scale = _scale(len(shown))
    columns = min(8, max([2, *shown]))
    width = 2 * scale.padding + columns * scale.cell + (columns - 1) * scale.gap
    per_row = max(1, min(len(shown), int((_PICTURE_WIDTH + scale.gutter) // (width + scale.gutter))))
    deepest = max((math.ceil(count / columns) for count in shown), default=1) or 1
    height = scale.header + 2 * scale.padding + deepest * (scale.cell + scale.gap) - scale.gap

    cells: list[str] = []
    centre: dict[int, tuple[float, float]] = {}
    for board, count in enumerate(shown):
        x = 1 + board % per_row * (width + scale.gutter)
        y = 1 + board // per_row * (height + scale.gutter)
        # A board with fewer slots is drawn smaller, but wide enough for its name.
        own_width = 2 * scale.padding + max(2, min(count, columns)) * (scale.cell + scale.gap) - scale.gap
        own_height = height - (deepest - max(1, math.ceil(count / columns))) * (scale.cell + scale.gap)
        cells.append(f'<rect x="{x:g}" y="{y:g}" width="{own_width:g}" height="{own_height:g}" '
                     f'rx="{scale.padding:g}" fill="#fff" stroke="#8a939c"><title>board {board}</title></rect>')
        if scale.header:
            cells.append(f'<text x="{x + scale.padding:g}" y="{y + scale.header - 1:g}" '
                         f'font-size="{scale.header * .66:g}" fill="#59636e">board {board}</text>')
        for slot in range(count):
            soc = first_soc[board] + slot
            left = x + scale.padding + slot % columns * (scale.cell + scale.gap)
            top = y + scale.header + scale.padding + slot // columns * (scale.cell + scale.gap)
            centre[soc] = (left + scale.cell / 2, top + scale.cell / 2)
            cells.append(_cell(soc, members.get(soc), left, top, scale, prefix))
    rows = math.ceil(len(shown) / per_row) if shown else 0
    total_width = 2 + per_row * (width + scale.gutter) - scale.gutter
    # Keep the last gutter, since links also run below the last row.
    total_height = 2 + rows * (height + scale.gutter)
    links = _links(plan, slots, centre, scale)
    label = _label(plan, slots, members)
    # Screen readers get the label and the table below instead of the letters of each cell.
    return (f'<svg viewBox="0 0 {total_width:g} {total_height:g}" width="{total_width:g}" '
            f'height="{total_height:g}" role="img" aria-label="{text(label)}" '
            'font-family="system-ui, sans-serif">\n'
            f'<defs><pattern id="{prefix}-idle" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#eceef0"/>'
            '<line x1="0" y1="0" x2="0" y2="6" stroke="#b4bac1" stroke-width="2"/></pattern></defs>\n'
            + "\n".join([*cells, *links]) + "\n</svg>" + _left_out(slots))


def _scale(num_boards: int) -> _Scale:
    return _READABLE if num_boards <= 24 else _COMPACT if num_boards <= 80 else _TINY


def _members(plan: Mapping[str, Any]) -> dict[int, _Member]:
    letters = communication_letters(plan)
    members: dict[int, _Member] = {}
    for index, group in enumerate(plan.get("groups") or []):
        group_id = str(group.get("id", index))
        for soc in group.get("members") or []:
            members[int(soc)] = _Member(
                group=index, group_id=group_id, leads=soc == group.get("leader"),
                split=bool(group.get("split")), communication_group=letters.get(group_id, ""))
    return members


def _cell(soc: int, member: _Member | None, x: float, y: float, scale: _Scale, prefix: str) -> str:
    """Return one slot: its group's colour and number, a star for the leader, a thick frame if the group is split."""
    box = f'x="{x:g}" y="{y:g}" width="{scale.cell:g}" height="{scale.cell:g}" rx="{scale.cell / 8:g}"'
    if member is None:
        return f'<g><title>SoC {soc}: idle</title><rect {box} fill="url(#{prefix}-idle)" stroke="#b4bac1"/></g>'
    about = f"SoC {soc}: group {member.group_id}" + (", leader" if member.leads else "") + (
        ", split over boards" if member.split else "")
    if member.communication_group:
        about += f", communication group {member.communication_group}"
    frame = 'stroke="#59636e"'
    if member.split:
        frame = f'stroke="#1b1f24" stroke-width="{max(1.5, scale.cell / 13):.3g}"'
    parts = [f"<g><title>{text(about)}</title>",
             f'<rect {box} fill="{_GROUP_COLOURS[member.group % len(_GROUP_COLOURS)]}" {frame}/>']
    middle = x + scale.cell / 2
    if scale.font:
        lettered = bool(member.communication_group) and scale.font >= _LETTERED
        size = scale.font if len(member.group_id) <= 3 else scale.font * 3 / len(member.group_id)
        baseline = y + scale.cell * (.5 if lettered else .5 + .36 * scale.font / scale.cell)
        name = text(member.group_id) if len(member.group_id) <= 6 else "…"
        parts.append(_word(middle, baseline, size, ("★" if member.leads else "") + name, bold=member.leads))
        if lettered:
            parts.append(_word(middle, y + scale.cell * .86, scale.font * .8, member.communication_group))
    elif member.leads:
        centre = f'cx="{middle:g}" cy="{y + scale.cell / 2:g}"'
        parts.append(f'<circle {centre} r="{scale.cell / 5:g}" fill="#1b1f24"/>')
    return "".join([*parts, "</g>"])


def _word(x: float, y: float, size: float, word: str, *, bold: bool = False) -> str:
    weight = ' font-weight="700"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" font-size="{size:.3g}" text-anchor="middle"'
    return f'<text {place} fill="#000"{weight}>{word}</text>'


def _links(plan: Mapping[str, Any], slots: Sequence[int], centre: Mapping[int, tuple[float, float]],
           scale: _Scale) -> list[str]:
    """Return a curve from board to board along each split group: the traffic that shares board uplinks."""
    board_of = [board for board, count in enumerate(slots) for _ in range(count)]
    paths: list[str] = []
    for group in plan.get("groups") or []:
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
                curve = f"M{x0:g} {y0:g}C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"
            else:
                y1 += scale.cell / 2
                # A cubic curve reaches 3/4 of its control points' depth, so that it stays within the gutter.
                depth = max(y0, y1) + (scale.padding + scale.gutter) * .95
                curve = f"M{x0:g} {y0:g}C{x0:g} {depth:g} {x1:g} {depth:g} {x1:g} {y1:g}"
            name = text(group.get("id", ""))
            width = max(1.0, scale.cell / 16)
            paths.append(f'<path d="{curve}" fill="none" stroke="#1b1f24" stroke-width="{width:.3g}" '
                         f'stroke-opacity=".75"><title>group {name} spans these boards</title></path>')
    return paths


def _label(plan: Mapping[str, Any], slots: Sequence[int], members: Mapping[int, _Member]) -> str:
    groups = plan.get("groups") or []
    split = sum(1 for group in groups if group.get("split"))
    idle = sum(slots) - len(members)
    return (f"{counted(len(groups), 'group')} on {counted(len(slots), 'board')} with {counted(sum(slots), 'slot')}; "
            f"{counted(split, 'group')} split over boards; {counted(idle, 'slot')} idle")


def _left_out(slots: Sequence[int]) -> str:
    if len(slots) <= _MAX_BOARDS:
        return ""
    return f'\n<p class="note">The first {_MAX_BOARDS} of {len(slots)} boards are drawn.</p>'


def picture_legend(plan: Mapping[str, Any], prefix: str) -> str:
    """Return the legend of a plan's `board_picture`, which uses the hatching defined in that picture."""
    scale = _scale(len(plan.get("slots_per_board") or []))

    def swatch(inner: str) -> str:
        return f'<svg width="22" height="18" aria-hidden="true">{inner}</svg>'

    box = '<rect x="2" y="1" width="16" height="16" rx="2"'
    group = swatch(f'{box} fill="{_GROUP_COLOURS[0]}" stroke="#59636e"/>')
    if scale.font:
        marks = [(group, "colour and number: group"), (swatch(_word(10, 14, 13, "★")), "its leader")]
    else:
        marks = [(group, "one colour: a group"),
                 (swatch('<circle cx="10" cy="9" r="4" fill="#1b1f24"/>'), "its leader")]
    if any(group.get("split") for group in plan.get("groups") or []):
        frame = swatch(f'{box} fill="{_GROUP_COLOURS[2]}" stroke="#1b1f24" stroke-width="2.5"/>')
        marks.append((frame, "split over boards, joined by a line"))
    if scale.font >= _LETTERED and communication_letters(plan):
        marks.append((swatch(_word(10, 14, 12, "A")), "communication group"))
    marks.append((swatch(f'{box} fill="url(#{prefix}-idle)" stroke="#b4bac1"/>'), "idle slot"))
    items = (f"<li>{mark}<span>{name}</span></li>" for mark, name in marks)
    return f'<ul class="legend">{"".join(items)}</ul>\n'
