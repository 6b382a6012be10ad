"""Symmetric parts are executed once, and it does not show: against full simulation, also where one part differs."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.cluster import (
    HUB,
    Activity,
    Cluster,
    TaskGraph,
    TaskGraphBuilder,
)
from socflower.cluster.topology import Board, Server
from socflower.sim import EventClock, Trace, steady_state, symmetry, trace
from socflower.sim.compiled_graph import compile_graph
from socflower.sim.symmetry import reduce_program
from tests.toy_clusters import TOY, same_usage


@pytest.fixture(autouse=True)
def reduce_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reduce the smallest programs too."""
    monkeypatch.setattr(steady_state, "reduce_program", lambda program: reduce_program(program, 0))
    yield


def cluster_of(slots: Sequence[int], links: Sequence[float], uplinks: Sequence[float]) -> Cluster:
    return Cluster(
        name="toys",
        hub_bytes_per_s=170.0,
        message_s=0.05,
        boards=tuple(
            Board(num_slots=count, device=TOY, soc_bytes_per_s=link, uplink_bytes_per_s=uplink)
            for count, link, uplink in zip(slots, links, uplinks, strict=True)
        ),
    )


def training(
    groups: Sequence[Sequence[int]],
    seconds: Callable[[int], float],
    num_bytes: float = 30.0,
    *,
    barrier: bool = False,
    leaders_meet: bool = False,
) -> TaskGraph:
    """Compute, a ring in each group, an update; then leaders meet at the hub, and the next repetition."""
    b = TaskGraphBuilder()
    computes, updates = {}, {}
    for group in groups:
        holds = []
        for soc in group:
            computes[soc] = b.compute("compute", soc, seconds(soc))
            holds.append((b.compute("npu", soc, 0.5, processor="npu", after=(computes[soc],)),))
        n = len(group)
        if n > 1:
            first = b.next_index
            sent = [
                b.transfer(
                    "ring",
                    soc,
                    group[(rank + 1) % n],
                    num_bytes,
                    rounds=2 * (n - 1),
                    after=holds[rank],
                    after_round=(first + (rank - 1) % n,),
                )
                for rank, soc in enumerate(group)
            ]
            holds = [(sent[rank - 1], sent[rank]) for rank in range(n)]
        for soc, after in zip(group, holds, strict=True):
            updates[soc] = b.compute("update", soc, 0.25, activity=Activity.UPDATE, after=after)
            b.follow_previous(computes[soc], [updates[soc]])
    if leaders_meet:
        up = [
            b.transfer("up", group[0], HUB, num_bytes, after=(updates[group[0]],))
            for group in groups
        ]
        mean = b.compute("mean", HUB, 0.1, after=up)
        down = {
            group[0]: b.transfer("down", HUB, group[0], num_bytes, after=(mean,))
            for group in groups
        }
        for group in groups:
            for source, target in pairwise(group):
                down[target] = b.transfer(
                    "hand on", source, target, num_bytes, after=(down[source],)
                )
            for soc in group:
                b.follow_previous(computes[soc], [down[soc]])
    elif barrier:
        for compute in computes.values():
            b.follow_previous(compute, list(updates.values()))
    return b.build(sorted(computes))


@settings(max_examples=25)
@given(data=st.data())
def test_symmetric_and_nearly_symmetric_clusters_take_what_full_simulation_says(
    data: st.DataObject,
) -> None:
    """Boards of equal slots, perhaps one other; equal members, perhaps one that is 1 % slower."""
    num_boards, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    counts, links, uplinks = (
        [slots] * num_boards,
        [100.0] * num_boards,
        [data.draw(st.sampled_from([60.0, 250.0]))] * 6,
    )
    odd = data.draw(st.sampled_from(["none", "slots", "link", "uplink", "member"]))
    which = data.draw(st.integers(0, num_boards - 1))
    if odd == "slots":
        counts[which] = data.draw(st.integers(1, 5))
    elif odd == "link":
        links[which] *= 0.99
    elif odd == "uplink":
        uplinks[which] *= 0.99
    cluster = cluster_of(counts, links, uplinks[:num_boards])
    slow = data.draw(st.integers(0, cluster.num_socs - 1)) if odd == "member" else -1
    size = data.draw(st.sampled_from([1, 2, 3, slots, cluster.num_socs]))
    order = data.draw(
        st.sampled_from(
            [
                list(range(cluster.num_socs)),
                sorted(range(cluster.num_socs), key=lambda soc: (soc % slots, soc)),
            ]
        )
    )
    groups = [order[first : first + size] for first in range(0, cluster.num_socs, size)]
    graph = training(
        groups,
        lambda soc: 1.01 if soc == slow else 1.0,
        data.draw(st.sampled_from([0.0, 30.0, 125.0])),
        barrier=data.draw(st.booleans()),
        leaders_meet=data.draw(st.booleans()),
    )
    repeat = data.draw(st.integers(1, 12))
    same_usage(
        EventClock(cluster).run(graph, repeat=repeat),
        EventClock(cluster, extrapolate=False).run(graph, repeat=repeat),
    )


def program_of(graph: TaskGraph, cluster: Cluster) -> symmetry.Program:
    (component,) = compile_graph(graph, cluster).components
    return component.program


def equal_boards(num_boards: int, slots: int, uplink: float = 100.0) -> Cluster:
    return cluster_of([slots] * num_boards, [100.0] * num_boards, [uplink] * num_boards)


def refined_at_once(parts: symmetry._Parts) -> list[int]:
    """Return equitable colours by comparing all neighbours of all parts in every round."""
    colours = parts._first_colours().tolist()
    while True:
        neighbours: list[list[tuple[int, int]]] = [[] for _ in colours]
        edges = zip(parts.source.tolist(), parts.target.tolist(), parts.kind.tolist(), strict=True)
        for source, target, kind in edges:
            neighbours[source].append((kind, colours[target]))
        numbers: dict[object, int] = {}
        refined = [
            numbers.setdefault((colour, tuple(sorted(others))), len(numbers))
            for colour, others in zip(colours, neighbours, strict=True)
        ]
        if len(numbers) == len(set(colours)):
            return refined
        colours = refined


@settings(max_examples=60)
@given(data=st.data())
def test_colours_are_the_coarsest_equitable_ones(data: st.DataObject) -> None:
    num_boards, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    num_socs = num_boards * slots
    size = data.draw(st.integers(1, num_socs))
    groups = [list(range(first, min(first + size, num_socs))) for first in range(0, num_socs, size)]
    slow = data.draw(st.sets(st.integers(0, num_socs - 1), max_size=2))
    graph = training(
        groups,
        lambda soc: 1.01 if soc in slow else 1.0,
        barrier=data.draw(st.booleans()),
        leaders_meet=data.draw(st.booleans()),
    )
    for component in compile_graph(graph, equal_boards(num_boards, slots)).components:
        parts = symmetry._Parts(component.program)
        expected = refined_at_once(parts)
        found = parts.refined(parts.num_tasks)
        assert found is not None
        num_classes = len(set(expected))
        assert len(set(found.tolist())) == num_classes
        assert len(set(zip(found.tolist(), expected, strict=True))) == num_classes
        num_of_tasks = len(set(expected[: parts.num_tasks]))
        assert parts.refined(num_of_tasks) is not None
        assert parts.refined(num_of_tasks - 1) is None


def test_a_ring_has_the_classes_of_one_board_and_one_odd_member_undoes_them() -> None:
    cluster = equal_boards(10, 4)
    ring = [list(range(40))]
    plain = program_of(training(ring, lambda soc: 1.0), cluster)
    reduced = reduce_program(plain, 0)
    assert reduced is not None
    assert len(reduced.program.steps) == 4 * 4
    assert len(plain.steps) == 40 * 4
    odd = program_of(training(ring, lambda soc: 1.01 if soc == 17 else 1.0), cluster)
    assert reduce_program(odd, 0) is None


def test_a_star_of_leaders_is_one_flow_with_the_weight_of_all() -> None:
    cluster = equal_boards(50, 2)
    groups = [[soc, soc + 1] for soc in range(0, 100, 2)]
    star = program_of(training(groups, lambda soc: 1.0, leaders_meet=True), cluster)
    reduced = reduce_program(star, 0)
    assert reduced is not None
    assert len(reduced.program.steps) * 30 < len(star.steps)
    assert max(weight for weights in reduced.weights for weight in weights) == 50
    assert reduce_program(star, len(star.steps) + 1) is None, (
        "small programs are executed as they are"
    )


def test_tasks_of_one_processor_are_served_in_their_order() -> None:
    """Equal tasks that wait together are no class: one is served after the other."""
    b = TaskGraphBuilder()
    for soc in range(6):
        works = [b.compute("work", soc, 1.0) for _ in range(3)]
        b.transfer("send", soc, (soc + 1) % 6, 50.0, after=(works[1],))
    cluster = equal_boards(1, 6)
    graph = b.build(range(6))
    reduced = reduce_program(program_of(graph, cluster), 0)
    assert reduced is not None
    assert len(reduced.program.steps) == 4
    same_usage(
        EventClock(cluster).run(graph, repeat=4),
        EventClock(cluster, extrapolate=False).run(graph, repeat=4),
    )


def test_a_trace_shows_all_members_of_a_class() -> None:
    cluster = equal_boards(3, 3)
    graph = training([list(range(9))], lambda soc: 1.0)
    reduced, full = Trace(), Trace()
    EventClock(cluster, trace=reduced).run(graph)
    EventClock(cluster, trace=full, extrapolate=False).run(graph)
    ours, theirs = (
        sorted(
            (trace.state()["rows"][row][1], name, round(at_s, 9), round(long_s, 9))
            for row, name, at_s, long_s, _ in trace.state()["spans"]
        )
        for trace in (reduced, full)
    )
    assert ours == theirs


# ---------------------------------------------------------------------------------------------- rows of many
Spans: TypeAlias = list[tuple[float, float, dict[str, Any]]]


def spans_of(cluster: Cluster, graph: TaskGraph, extrapolate: bool) -> dict[str, Spans]:
    """Run the graph three times, and return start, end and arguments of each row's spans."""
    traced = Trace()
    clock = EventClock(cluster, trace=traced, extrapolate=extrapolate)
    clock.run(graph, repeat=2)
    clock.run(graph)
    found: dict[str, Spans] = {}
    state = traced.state()
    for row, _, start_s, duration_s, args in state["spans"]:
        found.setdefault(state["rows"][row][1], []).append((start_s, start_s + duration_s, args))
    return found


def busy(spans: Spans) -> list[list[float]]:
    """Return the intervals that spans cover together, without gaps of rounding."""
    found: list[list[float]] = []
    for start_s, end_s, _ in sorted(spans, key=lambda span: span[:2]):
        if found and start_s <= found[-1][1] + 1e-9:
            found[-1][1] = max(found[-1][1], end_s)
        else:
            found.append([start_s, end_s])
    return found


def rows_of(name: str) -> list[str]:
    """Return the rows of single SoCs, boards or servers that a row such as "SoCs 3-5 cpu" joins."""
    found = re.fullmatch(r"(SoC|board|server)s? ?(\d+)-?(\d*)([ /].*)", name)
    if not found:
        return [name]
    noun, first, last, kind = found.groups()
    space = " " if noun == "SoC" else ""
    numbers = range(int(first), int(last or first) + 1)
    return [f"{noun}{space}{number}{kind}" for number in numbers]


@settings(max_examples=5)
@given(data=st.data())
@pytest.mark.parametrize("most", [1, 2, 3])
def test_rows_of_a_large_cluster_are_those_of_its_socs_together(
    most: int, data: st.DataObject
) -> None:
    """Each row of boards or servers is busy when any of its SoCs is, and has all their tasks and bytes."""
    num_boards, slots = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    cluster = equal_boards(num_boards, slots, 60.0)
    servers = data.draw(st.sampled_from([1, *(each for each in (2, 3) if num_boards % each == 0)]))
    if servers > 1:
        each = Server(num_boards=num_boards // servers, uplink_bytes_per_s=80.0)
        cluster = replace(cluster, servers=(each,) * servers)
    assume(cluster.num_socs > most)
    socs = list(range(cluster.num_socs))
    size = data.draw(st.integers(1, slots * 2))
    slow = data.draw(st.sampled_from([None, 0, socs[-1]]))
    graph = training(
        [socs[first : first + size] for first in range(0, len(socs), size)],
        lambda soc: 1.3 if soc == slow else 1.0,
        50.0,
        leaders_meet=data.draw(st.booleans()),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "MOST_ROWS", 10**6)
        own = spans_of(cluster, graph, data.draw(st.booleans()))
        patch.setattr(trace, "MOST_ROWS", most)
        together = spans_of(cluster, graph, data.draw(st.booleans()))
    of_socs = {name for name in together if name.startswith("SoC")}
    assert len({name.rpartition(" ")[0] for name in of_socs}) <= most
    seen = set()
    for name, spans in together.items():
        ours = rows_of(name)
        seen |= set(ours)
        alone = [span for each in ours for span in own.get(each, [])]
        np.testing.assert_allclose(busy(spans), busy(alone), rtol=1e-9, atol=1e-9)
        for key in ("bytes", "transfers"):
            assert sum(args.get(key, 0) for *_, args in spans) == pytest.approx(
                sum(args.get(key, 0) for *_, args in alone)
            ), (name, key)
        if "tasks" in spans[0][2]:
            assert sum(args["tasks"] for *_, args in spans) == len(alone)
    assert {name for name in own if not name.startswith("soc")} == seen & set(own)
