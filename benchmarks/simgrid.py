"""Our virtual time against SimGrid 3.32, an independent simulator, and against exact integration.

SimGrid (Debian's `libsimgrid-dev`) replays the same tasks on the same directed links by its model CM02: no cross
traffic, no TCP windows, full bandwidths. Rows of deviations give the largest relative deviation of any finish time;
`ok` says whether it is within the limit, if there is one.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.harness import Row, less_is_better
from socflower.cluster import (
    HUB,
    Board,
    Cluster,
    Server,
    TaskGraph,
    TaskGraphBuilder,
    parse_cluster,
)
from socflower.cluster.link_rate import RateSteps
from socflower.cluster.task_graph import Compute, Endpoint
from socflower.errors import ConfigError
from socflower.sim import EventClock
from socflower.sim.compiled_graph import compile_graph
from socflower.sim.execution import Execution, Instance
from socflower.sim.flows import RateTable
from socflower.sim.processes import Event, Process, Simulation, all_of

NUM_CASES = 50
LIMIT, EXACT_LIMIT = 1e-6, 1e-9
LATENCY_S = 1e-4
SOURCE = Path(__file__).with_name("simgrid_replay.cpp")
OPTIONS = (
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    # Its default, lazy updates, gives other results with latency.
    "network/optim:Full",
)
RISING = RateSteps((0.0, 2.0, 5.0), (100.0, 50.0, 200.0))

Replay = Callable[[Sequence[str]], list[float]]
"""Returns the finish time of every task of a description, whose format is in benchmarks/simgrid_replay.cpp."""


# ------------------------------------------------------------------------------------------------------ SimGrid


@contextmanager
def simgrid() -> Iterator[Replay]:
    """Compile the replay and yield it. Raises `ConfigError` if SimGrid or a compiler is missing."""
    with TemporaryDirectory() as folder:
        program = Path(folder) / "replay"
        try:
            built = subprocess.run(
                ["g++", "-std=c++17", "-O1", "-o", program, SOURCE, "-lsimgrid"],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise ConfigError(
                "bench simgrid: needs a C++ compiler and SimGrid; on Debian: apt-get install g++ "
                "libsimgrid-dev"
            ) from None
        if (
            "simgrid/" in built.stderr and "No such file" in built.stderr
        ) or "cannot find -lsimgrid" in built.stderr:
            raise ConfigError(
                "bench simgrid: SimGrid is missing; on Debian: apt-get install libsimgrid-dev"
            )
        assert not built.returncode, built.stderr

        def replay(lines: Sequence[str]) -> list[float]:
            ran = subprocess.run(
                [program, "--log=root.thres:warning", *(f"--cfg={option}" for option in OPTIONS)],
                input="\n".join(lines),
                capture_output=True,
                text=True,
                check=False,
            )
            assert not ran.returncode, ran.stderr
            return [float(line) for line in ran.stdout.splitlines()]

        yield replay


def graph_lines(graph: TaskGraph, cluster: Cluster, latency_s: Callable[[str], float]) -> list[str]:
    """Return a graph's description; `latency_s` maps a link's name to its latency."""
    ends = {
        end
        for task in graph.tasks
        if not isinstance(task, Compute)
        for end in (task.source, task.target)
    }
    processors = {
        (task.device, task.processor) for task in graph.tasks if isinstance(task, Compute)
    }
    pairs = {(task.source, task.target) for task in graph.tasks if not isinstance(task, Compute)}
    lines = [f"host {end}" for end in ends] + [
        f"host {device}/{name}" for device, name in processors
    ]
    lines += [
        f"link {name} {latency_s(name)!r} 1 0 {rate!r}"
        for name, rate in cluster.link_bytes_per_s.items()
    ]
    for source, target in pairs:
        path = cluster.path(source, target)
        lines.append(f"route {source} {target} {len(path)} {' '.join(path)}")
    for task in graph.tasks:
        what = (
            f"compute {task.device}/{task.processor} {task.seconds!r}"
            if isinstance(task, Compute)
            else f"transfer {task.source} {task.target} {task.num_bytes:.0f}"
        )
        lines.append(f"{what} {len(task.after)} {' '.join(map(str, task.after))}")
    return lines


# ------------------------------------------------------------------------------------------------------- graphs


def random_cluster(random: Random) -> Cluster:
    """Return one server or a site of several, with links that are equal or not; messages cost nothing."""
    equal = random.random() < 0.5

    def rate() -> float:
        return 1e8 if equal else random.uniform(1e7, 2e8)

    def slots() -> list[int]:
        return [random.randint(1, 5) for _ in range(random.randint(1, 4))]

    table = {"soc_bytes_per_s": rate(), "board_bytes_per_s": rate(), "hub_bytes_per_s": rate()}
    rack = parse_cluster({**table, "boards": [2, *slots()]}, where="benchmark")
    if random.random() < 0.5:
        return replace(rack, message_s=0.0)
    boards: list[Board] = []
    servers: list[Server] = []
    uplink_bytes_per_s = rate()
    for _ in range(random.randint(2, 4)):
        links = {"soc_bytes_per_s": rate(), "uplink_bytes_per_s": rate()}
        own = [replace(rack.boards[0], num_slots=num_slots, **links) for num_slots in slots()]
        boards += own
        servers.append(Server(num_boards=len(own), uplink_bytes_per_s=uplink_bytes_per_s))
    return replace(rack, boards=tuple(boards), servers=tuple(servers), message_s=0.0)


def random_graph(random: Random, cluster: Cluster) -> TaskGraph:
    """Return 20 to 80 tasks. Tasks of a processor follow each other, since SimGrid would let them share it."""
    builder, last = TaskGraphBuilder(), dict[tuple[Endpoint, str], int]()
    places: list[Endpoint] = [*range(cluster.num_socs), HUB]
    for index in range(random.randint(20, 80)):
        after = set(random.sample(range(index), min(index, random.choice((0, 1, 1, 2, 3)))))
        if random.random() < 0.4:
            where = random.choice(places), random.choice(("cpu", "npu"))
            after |= {last[where]} if where in last else set()
            last[where] = builder.compute(
                f"{index}",
                where[0],
                random.uniform(0.01, 2.0),
                processor=where[1],
                after=sorted(after),
            )
        else:
            source, target = random.sample(places, 2)
            num_bytes = random.choice((10_000_000, random.randint(100_000, 40_000_000)))
            builder.transfer(
                f"{index}", source, target, num_bytes, num_messages=0, after=sorted(after)
            )
    return builder.build(range(cluster.num_socs))


def clock_ends_s(graph: TaskGraph, cluster: Cluster) -> list[float]:
    """Return the finish time of every task on the event clock."""
    ends_s = [0.0] * len(graph.tasks)
    for component in compile_graph(graph, cluster).components:
        program = component.program
        outcome = Execution(
            program,
            RateTable(program.paths, program.capacities),
            1,
            extrapolate=False,
            max_instances=len(graph.tasks),
        ).run()
        for instance in map(Instance._make, outcome.instances):
            ends_s[component.tasks[instance.task]] = instance.end_s
    assert abs(EventClock(cluster).run(graph).duration_s - max(ends_s)) <= EXACT_LIMIT * max(ends_s)
    return ends_s


def process_ends_s(
    graph: TaskGraph, cluster: Cluster, latency_s: Callable[[str], float]
) -> list[float]:
    """Return the finish time of every task run as a process; transfers first wait for their path's latency."""
    simulation = Simulation(cluster, range(cluster.num_socs))
    ends = [Event[None](task.name) for task in graph.tasks]
    ends_s = [0.0] * len(ends)

    def execute(index: int) -> Process[None]:
        task = graph.tasks[index]
        yield all_of(*(ends[other] for other in task.after))
        if isinstance(task, Compute):
            yield simulation.compute(
                simulation.processor(task.device, task.processor), task.seconds
            )
        else:
            yield simulation.timeout(sum(map(latency_s, cluster.path(task.source, task.target))))
            yield simulation.send(task.source, task.target, task.num_bytes, num_messages=0)
        ends_s[index] = simulation.now_s
        ends[index].fire()

    for index, task in enumerate(graph.tasks):
        simulation.start(execute(index), task.name)
    simulation.run()
    return ends_s


def deviation(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """Return the greatest relative deviation of a finish time or of the makespan."""
    pairs = zip([*ours_s, max(ours_s)], [*theirs_s, max(theirs_s)], strict=True)
    return max(abs(ours / theirs - 1.0) for ours, theirs in pairs)


def _no_latency(_: str) -> float:
    return 0.0


def _every_link(_: str) -> float:
    return LATENCY_S


def _first_link(name: str) -> float:
    """Return a latency for first links only, so that all paths have the same latency."""
    return LATENCY_S if name.endswith("/tx") else 0.0


def graph_rows(replay: Replay, num_cases: int) -> list[Row]:
    """Return rows of deviations over random graphs, without and with latency in SimGrid."""
    clock = processes = latency = waiting = equal = 0.0
    num_tasks = 0
    for seed in range(num_cases):
        random = Random(seed)
        cluster = random_cluster(random)
        graph = random_graph(random, cluster)
        num_tasks += len(graph.tasks)
        free_s, every_s, first_s = (
            replay(graph_lines(graph, cluster, latency_s))
            for latency_s in (_no_latency, _every_link, _first_link)
        )
        ours_s = clock_ends_s(graph, cluster)
        clock = max(clock, deviation(ours_s, free_s))
        processes = max(processes, deviation(process_ends_s(graph, cluster, _no_latency), free_s))
        latency = max(latency, deviation(ours_s, every_s))
        waiting = max(waiting, deviation(process_ends_s(graph, cluster, _every_link), every_s))
        equal = max(equal, deviation(process_ends_s(graph, cluster, _first_link), first_s))
    graphs = f"{num_cases} random graphs of {num_tasks} tasks"
    return [
        _required(f"{graphs}, message cost 0, task graphs", clock, LIMIT),
        _required(f"{graphs}, message cost 0, processes", processes, LIMIT),
        _reported(
            f"{graphs}, {LATENCY_S * 1e3} ms a link in SimGrid; links of our clusters have none",
            latency,
            clock,
            "without latency",
        ),
        _reported(
            "the same where our transfers wait for their path's latency first; SimGrid's shares remain",
            waiting,
            latency,
            "without waiting",
        ),
        _required(
            "the same where all paths have the same latency, so that SimGrid shares evenly",
            equal,
            LIMIT,
        ),
    ]


def shares_row(replay: Replay) -> Row:
    """Return the row of SimGrid's sharing with latency: in inverse proportion to the paths' latencies, here 2 to 1.

    The first flow has the link to itself until the second's latency has passed, and 2/3 of it afterwards.
    """
    num_bytes, rate = 40_000_000, 1e8
    cluster = parse_cluster({"boards": [2, 1], "soc_bytes_per_s": rate}, where="benchmark")
    builder = TaskGraphBuilder()
    # Over two links and over four.
    for target in (1, 2):
        builder.transfer(f"to {target}", 0, target, num_bytes, num_messages=0)
    graph = builder.build(range(3))
    ours_s = clock_ends_s(graph, replace(cluster, message_s=0.0))[0]
    theirs_s = replay(graph_lines(graph, cluster, _every_link))[0]
    return less_is_better(
        "two transfers from one SoC, over two links and over four: when the first ends",
        ours_s,
        f"SimGrid, {LATENCY_S * 1e3} ms a link: it shares in inverse proportion to the latency of paths",
        theirs_s,
        "s",
        ok=abs(ours_s - 2.0 * num_bytes / rate) <= LIMIT * ours_s
        and abs(theirs_s - LATENCY_S - 1.5 * num_bytes / rate) <= LIMIT * theirs_s,
    )


def handling_row(replay: Replay) -> Row:
    """Return the row of our message cost, which occupies the interface for one message after another."""
    count, num_bytes, rate = 8, 1_000_000, 1e8
    cluster = replace(
        parse_cluster({"boards": [count + 1], "soc_bytes_per_s": rate}, where="benchmark"),
        message_s=LATENCY_S,
    )
    builder = TaskGraphBuilder()
    for target in range(1, count + 1):
        builder.transfer(f"{target}", 0, target, num_bytes)
    graph = builder.build(range(count + 1))
    ours_s = EventClock(cluster).run(graph).duration_s
    theirs_s = max(replay(graph_lines(graph, cluster, _first_link)))
    bytes_s = count * num_bytes / rate
    right = (
        abs(ours_s - count * LATENCY_S - bytes_s) <= LIMIT * ours_s
        and abs(theirs_s - LATENCY_S - bytes_s) <= LIMIT * theirs_s
    )
    return less_is_better(
        f"{count} messages from one SoC at once, {LATENCY_S * 1e3} ms of handling each, one after another",
        ours_s,
        "SimGrid, as much latency, all at once",
        theirs_s,
        "s",
        ok=right,
    )


# ----------------------------------------------------------------------------------------- changing bandwidths


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Bytes that start at a time and take a path of links, given by their numbers."""

    start_s: float
    path: tuple[int, ...]
    num_bytes: int


def flow_ends_s(links: Sequence[RateSteps], flows: Sequence[Flow]) -> list[float]:
    """Return the finish time of every flow by processes."""
    simulation = Simulation(parse_cluster({"boards": [1]}, where="benchmark"), [])
    made = [simulation.link(f"link {number}", steps) for number, steps in enumerate(links)]
    ends_s = [0.0] * len(flows)

    def send(index: int, flow: Flow) -> Process[None]:
        yield simulation.timeout(flow.start_s)
        yield simulation.transfer([made[number] for number in flow.path], flow.num_bytes)
        ends_s[index] = simulation.now_s

    for index, flow in enumerate(flows):
        simulation.start(send(index, flow), f"flow {index}")
    simulation.run()
    return ends_s


def flow_lines(links: Sequence[RateSteps], flows: Sequence[Flow], until_s: float) -> list[str]:
    """Return the description of flows; a computation delays each until its start, steps repeat up to `until_s`."""
    lines = [f"host {end}{index}" for index in range(len(flows)) for end in ("from", "to")]
    for number, steps in enumerate(links):
        listed, time_s = list[str](), 0.0
        while time_s < until_s:
            rate, next_s = steps.step_at(time_s)
            listed.append(f"{time_s!r} {rate!r}")
            time_s = next_s
        lines.append(f"link {number} 0 {len(listed)} {' '.join(listed)}")
    for index, flow in enumerate(flows):
        lines.append(
            f"route from{index} to{index} {len(flow.path)} {' '.join(map(str, flow.path))}"
        )
    for index, flow in enumerate(flows):
        lines.append(f"compute from{index} {flow.start_s!r} 0")
        lines.append(f"transfer from{index} to{index} {flow.num_bytes} 1 {2 * index}")
    return lines


def random_flows(random: Random) -> tuple[list[RateSteps], list[Flow]]:
    """Return links whose bandwidths fall and return to their first value, and flows on random paths."""
    links = []
    for _ in range(random.randint(2, 6)):
        full, times_s = random.uniform(1e6, 1e7), [0.0]
        for _ in range(random.randint(2, 12)):
            times_s.append(times_s[-1] + random.uniform(1.0, 15.0))
        rates = [full * random.choice((1.0, 1.0, random.uniform(0.1, 1.0))) for _ in times_s]
        links.append(
            RateSteps(
                tuple(times_s),
                (full, *rates[1:-1], full),
                times_s[-1] + random.uniform(1.0, 15.0) if random.random() < 0.5 else inf,
            )
        )
    flows = [
        Flow(
            start_s=random.uniform(0.1, 60.0),
            num_bytes=random.randint(1_000_000, 60_000_000),
            path=tuple(random.sample(range(len(links)), random.randint(1, min(4, len(links))))),
        )
        for _ in range(random.randint(2, 12))
    ]
    return links, flows


def narrowest_bytes_per_s(links: Sequence[RateSteps], flow: Flow, end_s: float) -> list[float]:
    """Return the bandwidth of a flow's narrowest link at its start and after every change."""
    times_s = [flow.start_s]
    while (next_s := min(links[number].step_at(times_s[-1])[1] for number in flow.path)) < end_s:
        times_s.append(next_s)
    return [min(links[number].rate(time_s) for number in flow.path) for time_s in times_s]


def comparable_flows(random: Random) -> tuple[list[RateSteps], list[Flow], list[float], int]:
    """Return links, flows, our finish times, and how often a path's bandwidth changed under a flow.

    No path's bandwidth rises above its value at the flow's start, since SimGrid 3.32 keeps a flow at that value. Flows
    that break this rule are removed until none is left.
    """
    while True:
        links, flows = random_flows(random)
        while flows:
            ends_s = flow_ends_s(links, flows)
            courses = [
                narrowest_bytes_per_s(links, flow, end_s)
                for flow, end_s in zip(flows, ends_s, strict=True)
            ]
            kept = [
                flow
                for flow, course in zip(flows, courses, strict=True)
                if max(course) <= course[0]
            ]
            if kept == flows:
                changes = sum(
                    before != after for course in courses for before, after in pairwise(course)
                )
                if changes and len(flows) > 1:
                    return links, flows, ends_s, changes
                break
            flows = kept


def profile_rows(replay: Replay, num_cases: int) -> list[Row]:
    """Return the row of deviations over random flows, and the row of SimGrid under a rising bandwidth."""
    greatest, num_flows, num_changes = 0.0, 0, 0
    for seed in range(num_cases):
        links, flows, ends_s, changes = comparable_flows(Random(seed))
        theirs_s = replay(flow_lines(links, flows, 2.0 * max(ends_s)))[1::2]
        greatest = max(greatest, deviation(ends_s, theirs_s))
        num_flows, num_changes = num_flows + len(flows), num_changes + changes
    lone = [Flow(start_s=0.0, path=(0,), num_bytes=1000)]
    ours_s = flow_ends_s([RISING], lone)[0]
    theirs_s = replay(flow_lines([RISING], lone, 20.0))[1]
    return [
        _required(
            f"{num_cases} networks, {num_flows} flows under {num_changes} changes of bandwidth, none above that "
            "at a flow's start",
            greatest,
            LIMIT,
        ),
        less_is_better(
            "1,000 B over 100, from 2 s on 50, from 5 s on 200 B/s: 8.25 s by hand",
            ours_s,
            "SimGrid, which holds a flow at the 100 B/s at its start",
            theirs_s,
            "s",
            ok=abs(ours_s - 8.25) <= EXACT_LIMIT and abs(theirs_s - 11.5) <= LIMIT,
        ),
    ]


# ------------------------------------------------------------------------------------------- exact integration


def integrated_ends_s(
    times_s: Sequence[float],
    bytes_per_s: Sequence[float],
    end_s: float,
    start_s: float,
    num_bytes: Sequence[float],
) -> list[float]:
    """Return the end times of flows that start together and share one link evenly, in exact fractions.

    When flow k ends, the link has carried min(b_i, b_k) bytes of each flow i. So the integral of the rate from
    `start_s` to T_k equals the sum of min(b_i, b_k) over all i.
    """
    sizes = [Fraction(count) for count in num_bytes]
    return [
        float(
            _carried_s(
                times_s,
                bytes_per_s,
                end_s,
                Fraction(start_s),
                sum(min(other, size) for other in sizes),
            )
        )
        for size in sizes
    ]


def _carried_s(
    times_s: Sequence[float],
    bytes_per_s: Sequence[float],
    end_s: float,
    start_s: Fraction,
    left: Fraction | int,
) -> Fraction:
    """Return the moment at which `left` bytes have passed since `start_s`, step by step of the rate."""
    origin_s = Fraction(0)
    while True:
        for index, rate in enumerate(map(Fraction, bytes_per_s)):
            begin_s = max(start_s, origin_s + Fraction(times_s[index]))
            until = times_s[index + 1] if index + 1 < len(times_s) else end_s
            if until == inf:
                return begin_s + left / rate
            length_s = max(origin_s + Fraction(until) - begin_s, Fraction(0))
            if left <= rate * length_s:
                return begin_s + left / rate
            left -= rate * length_s
        origin_s += Fraction(end_s)


def oracle_row(num_cases: int) -> Row:
    """Return the row of the deviation from exact integration, for flows over one link of changing bandwidth."""
    greatest = 0.0
    for seed in range(num_cases):
        random = Random(seed)
        times_s = [0.0]
        for _ in range(random.randint(1, 8)):
            times_s.append(times_s[-1] + random.uniform(0.5, 20.0))
        rates = [random.uniform(20.0, 5000.0) for _ in times_s]
        if seed % 2:
            rates.sort()
        end_s = times_s[-1] + random.uniform(0.5, 20.0) if random.random() < 0.5 else inf
        size = random.randint(1_000, 200_000)
        sizes = (
            [size] * random.randint(1, 6)
            if seed % 3
            else [random.randint(1_000, 200_000) for _ in range(5)]
        )
        start_s = random.uniform(0.0, 100.0)
        expected_s = integrated_ends_s(times_s, rates, end_s, start_s, sizes)
        ours_s = flow_ends_s(
            [RateSteps(tuple(times_s), tuple(rates), end_s)],
            [Flow(start_s=start_s, path=(0,), num_bytes=count) for count in sizes],
        )
        greatest = max(greatest, deviation(ours_s, expected_s))
    return _required(
        f"{num_cases} links whose bandwidths rise and fall under one to six flows, against exact "
        "integration",
        greatest,
        EXACT_LIMIT,
    )


# --------------------------------------------------------------------------------------------------------- rows


def _required(case: str, greatest: float, limit: float) -> Row:
    return _reported(case, greatest, limit, "required at most", ok=greatest <= limit)


def _reported(case: str, greatest: float, beside: float, peer: str, *, ok: bool = True) -> Row:
    return Row(
        case=case,
        ours=greatest,
        peer=peer,
        peer_value=beside,
        unit="greatest deviation",
        ratio=beside / max(greatest, sys.float_info.epsilon),
        ok=ok,
    )


def run(quick: bool = False) -> list[Row]:
    """Return all rows; `quick` has a tenth of the cases."""
    num_cases = NUM_CASES // 10 if quick else NUM_CASES
    with simgrid() as replay:
        return [
            *graph_rows(replay, num_cases),
            shares_row(replay),
            handling_row(replay),
            *profile_rows(replay, num_cases),
            oracle_row(4 * num_cases),
        ]
