"""Small changes of pipelines: what the dynamic programme misses, since it knows neither K nor all orders of devices."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf
from typing import TypeVar

from socflower.pipeline.plan import Members
from socflower.pipeline.planner.quick_schedule import Layout, QuickSchedule, Timed

MOST_DEVICES = 8
"""Devices up to which they are exchanged, and get other shares; with more, only cuts are moved."""

_CUT_STEPS = (1, 2, 4, 8)

_MOST_ROUNDS = 12

_Item = TypeVar("_Item")


def improved(
    quick: QuickSchedule,
    starts: Sequence[Timed],
    socs: Sequence[int],
    *,
    width: int,
) -> list[Timed]:
    """Return the `width` best layouts after repeated small changes of the best, the least seconds first.

    `socs` are all devices. It ends when the best have no better neighbour, or after `_MOST_ROUNDS`.
    """
    best = sorted(starts)[:width]
    known = {each.layout for each in best}
    tuned = dict[Layout, Timed]()
    expanded = set[Layout]()
    for _ in range(_MOST_ROUNDS):
        new = dict.fromkeys(
            neighbour
            for each in best
            if each.layout not in expanded
            for neighbour in neighbours(each.layout, socs)
            if neighbour not in known
        )
        expanded |= {each.layout for each in best}
        if not new:
            break
        known |= new.keys()
        # With fewer than `width` layouts, any new one is among the best.
        limit_s = best[-1].seconds if len(best) == width else inf
        found = sorted([*best, *quick.by_rules(list(new), limit_s)])[:width]
        untuned = [each for each in found if each.layout not in tuned]
        tuned |= {best_of.layout: best_of for (best_of,) in quick.with_best_counts(untuned, 1)}
        best = sorted(tuned[each.layout] for each in found)
    return best


def neighbours(layout: Layout, socs: Sequence[int]) -> Iterator[Layout]:
    """Yield layouts that differ in a cut, a share, a device or a stage; some may exceed memory."""
    yield from _other_cuts(layout)
    if len(socs) > MOST_DEVICES:
        return
    used = {soc for members in layout.members for soc, _ in members}
    spare = [soc for soc in socs if soc not in used]
    yield from _other_shares(layout, spare)
    yield from _other_devices(layout, spare)
    yield from _other_orders(layout)
    yield from _other_stages(layout, spare)


def _other_cuts(layout: Layout) -> Iterator[Layout]:
    ends = layout.ends
    for index in range(len(ends) - 1):
        least = ends[index - 1] if index else -1
        for step in _CUT_STEPS:
            for end in (ends[index] - step, ends[index] + step):
                if least < end < ends[index + 1]:
                    yield layout._replace(ends=(*ends[:index], end, *ends[index + 1 :]))


def _other_shares(layout: Layout, spare: Sequence[int]) -> Iterator[Layout]:
    """Move a sample of a stage from one device to another, which may be new to it."""
    for index, members in enumerate(layout.members):
        shares = dict(members)
        for giver, share in members:
            for taker in (*shares, *spare):
                if taker != giver:
                    new = {**shares, taker: shares.get(taker, 0) + 1, giver: share - 1}
                    yield _with_stage(layout, index, new)


def _other_devices(layout: Layout, spare: Sequence[int]) -> Iterator[Layout]:
    """Exchange two devices of different stages, or one for a device without a stage."""
    places = [(index, soc) for index, members in enumerate(layout.members) for soc, _ in members]
    pairs = [
        (one, other)
        for (stage, one), (other_stage, other) in combinations(places, 2)
        if stage != other_stage
    ]
    pairs += [(soc, free) for _, soc in places for free in spare]
    for one, other in pairs:
        names = {one: other, other: one}
        yield layout._replace(
            members=tuple(
                tuple((names.get(soc, soc), share) for soc, share in members)
                for members in layout.members
            )
        )


def _other_orders(layout: Layout) -> Iterator[Layout]:
    """Move the devices of a stage before or behind those of others, and a device within its stage."""
    for every in _moved(layout.members):
        yield layout._replace(members=every)
    for index, own in enumerate(layout.members):
        for members in _moved(own):
            yield _spliced(layout, index, 1, layout.ends[index : index + 1], (members,))


def _moved(every: tuple[_Item, ...]) -> Iterator[tuple[_Item, ...]]:
    for index, one in enumerate(every):
        others = (*every[:index], *every[index + 1 :])
        for place in range(len(every)):
            if place != index:
                yield (*others[:place], one, *others[place:])


def _other_stages(layout: Layout, spare: Sequence[int]) -> Iterator[Layout]:
    """Add a stage of one layer, leave one out, or join two."""
    ends, every = layout.ends, layout.members
    size = sum(share for _, share in every[0])
    for index, (first, last) in enumerate(zip(layout.firsts, ends, strict=True)):
        if last > first:
            for soc in spare:
                alone = ((soc, size),)
                both = (every[index], alone)
                yield _spliced(layout, index, 1, (last - 1, last), both)
                yield _spliced(layout, index, 1, (first, last), both[::-1])
    for index in range(len(ends) - 1):
        end = ends[index + 1]
        one, other = every[index : index + 2]
        yield _spliced(layout, index, 2, (end,), (one,))
        yield _spliced(layout, index, 2, (end,), (other,))
        if len(one) + len(other) <= size:
            yield _spliced(layout, index, 2, (end,), (_joined(one, other, size),))


def _joined(one: Members, other: Members, size: int) -> Members:
    """Return the members of two stages with nearly equal shares."""
    socs = [soc for soc, _ in (*one, *other)]
    share, more = divmod(size, len(socs))
    return tuple((soc, share + (index < more)) for index, soc in enumerate(socs))


def _with_stage(layout: Layout, index: int, shares: dict[int, int]) -> Layout:
    members = tuple((soc, share) for soc, share in shares.items() if share)
    return _spliced(layout, index, 1, layout.ends[index : index + 1], (members,))


def _spliced(
    layout: Layout,
    index: int,
    count: int,
    ends: tuple[int, ...],
    members: tuple[Members, ...],
) -> Layout:
    """Return the layout with other stages instead of `count` from `index` on."""
    return Layout(
        (*layout.ends[:index], *ends, *layout.ends[index + count :]),
        (*layout.members[:index], *members, *layout.members[index + count :]),
    )
