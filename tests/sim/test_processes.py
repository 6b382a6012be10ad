"""Processes that react, on the same processors and links as task graphs."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simgrid import Flow, flow_ends_s, integrated_ends_s
from socflower.cluster import TaskGraph, TaskGraphBuilder, Tier
from socflower.cluster.link_rate import RateSteps
from socflower.cluster.task_graph import Compute
from socflower.errors import SocflowerError
from socflower.sim import EventClock, Trace
from socflower.sim.processes import Credits, Event, Process, Queue, Simulation, all_of, first_of
from socflower.thermal.fans.policies import FixedSpeed
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, changes
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.rack import Rack
from tests.one_line import refused
from tests.toy_clusters import toy_cluster

SECONDS = st.integers(0, 40).map(lambda part: part / 8)


def simulation_of(num_socs: int = 1, **options: float) -> Simulation:
    return Simulation(toy_cluster((num_socs,)), range(num_socs), **options)


def started(simulation: Simulation, *processes: Process[object]) -> None:
    """Run processes to their end."""
    for number, process in enumerate(processes):
        simulation.start(process, f"process {number}")
    simulation.run()


# ------------------------------------------------------------------------------------- one engine for both
@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Tasks of all kinds on five SoCs and the hub."""
    b = TaskGraphBuilder()
    for index in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        if draw(st.booleans()):
            soc, seconds = draw(st.integers(0, 4)), draw(SECONDS)
            processor = draw(st.sampled_from(["cpu", "npu"]))
            b.compute(f"c{index}", soc, seconds, processor=processor, after=after)
        else:
            source, target = draw(st.permutations([0, 1, 2, 3, 4, "hub"]))[:2]
            num_bytes, num_messages = 50.0 * draw(st.integers(0, 9)), draw(st.integers(0, 3))
            b.transfer(
                f"t{index}", source, target, num_bytes, num_messages=num_messages, after=after
            )
    return b.build(range(5))


def as_processes(graph: TaskGraph) -> Callable[[Simulation], None]:
    """A process for each task that waits for those before it."""

    def start(simulation: Simulation) -> None:
        ends = [Event[None](task.name) for task in graph.tasks]

        def run(index: int) -> Process[None]:
            task = graph.tasks[index]
            yield all_of(*(ends[other] for other in task.after))
            if isinstance(task, Compute):
                processor = simulation.processor(task.device, task.processor)
                yield simulation.compute(processor, task.seconds)
            else:
                yield simulation.send(
                    task.source, task.target, task.num_bytes, num_messages=task.num_messages
                )
            ends[index].fire()

        for index, task in enumerate(graph.tasks):
            simulation.start(run(index), task.name)

    return start


@settings(max_examples=60)
@given(graph=graphs())
def test_a_task_graph_as_processes_costs_what_the_graph_costs(graph: TaskGraph) -> None:
    cluster = toy_cluster((3, 2), uplink=150.0, message_s=0.25)
    expected = EventClock(cluster).run(graph)
    usage = EventClock(cluster).run_processes(as_processes(graph), socs=range(5))
    assert usage.duration_s == pytest.approx(expected.duration_s, rel=1e-12)
    assert usage.num_bytes == pytest.approx(expected.num_bytes)
    for activity, joules in expected.energy_j.items():
        assert usage.energy_j[activity] == pytest.approx(joules, rel=1e-9, abs=1e-9)


# ------------------------------------------------------------------------------------------ changing links
@st.composite
def rates(draw: st.DrawFn) -> RateSteps:
    speed = st.sampled_from([0.0, 50.0]) | st.floats(20, 5000)
    parts = draw(st.lists(st.tuples(st.floats(0.5, 30), speed), min_size=1, max_size=5))
    times_s = [0.0, *accumulate(length_s for length_s, _ in parts)]
    speeds = [speed for _, speed in parts]
    speeds[-1] = speeds[-1] or 100.0
    end_s = times_s.pop() if draw(st.booleans()) else inf
    return RateSteps(tuple(times_s[: len(speeds)]), tuple(speeds), end_s)


@settings(max_examples=60)
@given(
    steps=rates(),
    num_bytes=st.lists(st.floats(1, 20_000), min_size=1, max_size=6),
    begin_s=st.floats(0, 200),
)
def test_transfers_over_a_changing_link_end_when_the_integral_of_its_rate_says(
    steps: RateSteps, num_bytes: list[float], begin_s: float
) -> None:
    simulation = simulation_of(now_s=begin_s)
    link = simulation.link("the link", steps)

    def one_after_another() -> Process[None]:
        at_s = begin_s
        for count in num_bytes:
            yield simulation.transfer([link], count)
            at_s = steps.passed_s(at_s, count)
            assert simulation.now_s == pytest.approx(at_s, rel=1e-9)

    started(simulation, one_after_another())


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(st.floats(0.5, 30), st.floats(20, 5000)), min_size=1, max_size=6),
    start_s=st.floats(0, 200),
    repeats=st.booleans(),
    num_bytes=st.lists(
        st.sampled_from([1000, 1001, 60_000]) | st.integers(1, 20_000), min_size=1, max_size=6
    ),
)
def test_flows_that_share_a_changing_link_end_when_exact_integration_says(
    parts: list[tuple[float, float]], start_s: float, repeats: bool, num_bytes: list[int]
) -> None:
    """Equal and different ones, while the bandwidth rises above that at their start and falls below it."""
    times_s = [0.0, *accumulate(length_s for length_s, _ in parts)]
    end_s, rates = times_s.pop() if repeats else inf, [rate for _, rate in parts]
    times_s = times_s[: len(rates)]
    steps = RateSteps(tuple(times_s), tuple(rates), end_s)
    flows = [Flow(start_s=start_s, path=(0,), num_bytes=count) for count in num_bytes]
    expected = integrated_ends_s(times_s, rates, end_s, start_s, num_bytes)
    assert flow_ends_s([steps], flows) == pytest.approx(expected, rel=1e-9)


def test_a_changing_link_is_shared_evenly_as_others_limit_it() -> None:
    """Two edges with 60 and 200 B/s of their own behind an uplink of 100, later 300, B/s."""
    simulation, ends = simulation_of(2), []
    uplink = simulation.link("uplink", RateSteps((0.0, 10.0), (100.0, 300.0)))

    def edge(own_bytes_per_s: float, num_bytes: float) -> Process[None]:
        yield simulation.transfer([simulation.link("own", own_bytes_per_s), uplink], num_bytes)
        ends.append(simulation.now_s)

    started(simulation, edge(60.0, 50.0 * 10 + 60.0 * 5), edge(200.0, 50.0 * 10 + 200.0 * 7))
    assert ends == pytest.approx([15.0, 17.0])


def test_links_of_the_cluster_can_change() -> None:
    """A transfer of the cluster follows the narrowest link of its route; others keep theirs."""
    simulation, ends = simulation_of(2), []
    simulation.change_rates({"soc1/rx": RateSteps((0.0, 2.0, 5.0), (50.0, 0.0, 400.0))})

    def send(source: int, target: int) -> Process[None]:
        yield simulation.send(source, target, 300.0)
        ends.append((source, simulation.now_s))

    started(simulation, send(0, 1), send(1, 0))
    assert ends == [(1, 3.0), (0, 7.0)]
    refused(
        lambda: simulation.change_rates({"soc7/rx": RateSteps((0.0,), (1.0,))}),
        "'soc7/rx'",
        "soc0/tx",
    )


# ------------------------------------------------------------------------------------------- changing speeds
def test_work_under_way_continues_at_the_new_speed() -> None:
    simulation, ends = simulation_of(2), {}

    def work(soc: int) -> Process[None]:
        ran_s = yield simulation.compute(simulation.processor(soc), 10.0)
        ends[soc] = (simulation.now_s, ran_s)

    def slow_down() -> Process[None]:
        for wait_s, speed in ((4.0, 0.5), (4.0, 0.0), (100.0, 2.0)):
            yield simulation.timeout(wait_s)
            simulation.set_speeds({0: speed})
            assert simulation.speed(0) == speed

    started(simulation, work(0), work(1), slow_down())
    assert ends[1] == (10.0, 10.0)
    # 4 s at speed 1, 2 of work at 0.5, the last 4 at 2 after 100 s.
    assert ends[0] == pytest.approx((110.0, 110.0))


def rack(around: Surroundings | None = None) -> RackDynamics:
    return RackDynamics(
        Rack(slots_per_board=(5,), chassis_j_per_k=300.0, soc_to_board_w_per_k=0.4),
        FixedSpeed(fixed_rpm=3250.0),
        surroundings=around,
    )


def steps(num_steps: int) -> Callable[[Simulation], None]:
    def start(simulation: Simulation) -> None:
        def work(soc: int) -> Process[None]:
            for _ in range(num_steps):
                yield simulation.compute(simulation.processor(soc), 1.0)

        for soc in range(5):
            simulation.start(work(soc), f"SoC {soc}")

    return start


def test_heat_slows_processes_down_as_it_slows_a_graph() -> None:
    """Ten minutes of work: steps of a graph end at the speed at which they began, which makes the difference."""
    b = TaskGraphBuilder()
    for soc in range(5):
        b.compute("work", soc, 1.0)
    of_graph, of_processes = rack(), rack()
    graph = EventClock(toy_cluster(), of_graph).run(b.build(range(5)), repeat=600)
    processes = EventClock(toy_cluster(), of_processes).run_processes(steps(600), socs=range(5))
    assert processes.duration_s > 630.0
    assert processes.duration_s == pytest.approx(graph.duration_s, rel=2e-3)
    assert processes.total_energy_j == pytest.approx(graph.total_energy_j, rel=5e-3)
    assert of_processes.temperatures_c == pytest.approx(of_graph.temperatures_c, abs=0.2)


def test_a_soc_that_a_user_takes_waits() -> None:
    user = BackgroundLoad(share=0.0, power_w=1.0, taken=True)
    taken = changes(NOBODY, [(20.0, user), (50.0, NOBODY)])
    around = Surroundings(background_load=(taken, *[changes(NOBODY, [])] * 4))
    free_s, waited_s = (
        EventClock(toy_cluster(), dynamics).run_processes(steps(40), socs=range(5)).duration_s
        for dynamics in (rack(), rack(around))
    )
    assert waited_s == pytest.approx(free_s + 30.0)


# ---------------------------------------------------------------------------------- events, queues, mistakes
def test_events_queues_and_credits() -> None:
    simulation, log = simulation_of(), []
    queue, credits = Queue[str](), Credits(2)

    def producer() -> Process[str]:
        for index in range(4):
            yield credits.take()
            queue.put(f"item {index}")
            log.append((simulation.now_s, f"put {index}"))
        return "all put"

    def consumer() -> Process[None]:
        for _ in range(4):
            yield simulation.timeout(3.0)
            log.append((simulation.now_s, (yield queue.get())))
            credits.give()

    def main() -> Process[None]:
        ended = simulation.start(producer(), "producer")
        late = simulation.timeout(100.0)
        found = yield first_of(ended, late)
        assert found is ended
        assert (yield ended) == "all put"

    started(simulation, main(), consumer())
    assert log == [
        (0.0, "put 0"),
        (0.0, "put 1"),
        (3.0, "item 0"),
        (3.0, "put 2"),
        (6.0, "item 1"),
        (6.0, "put 3"),
        (9.0, "item 2"),
        (12.0, "item 3"),
    ]
    assert simulation.now_s == 12.0, "a timeout that nobody waits for ends nothing"


@settings(max_examples=20)
@given(seconds=st.lists(SECONDS, min_size=1, max_size=12))
def test_simultaneous_events_have_one_order(seconds: Sequence[float]) -> None:
    """Work that is asked for together is done in the order of asking."""
    simulation, ended = simulation_of(), []

    def ask(index: int) -> Process[None]:
        yield simulation.compute(simulation.processor(0), seconds[index])
        ended.append((index, simulation.now_s))

    started(simulation, *map(ask, range(len(seconds))))
    assert ended == [(index, pytest.approx(at_s)) for index, at_s in enumerate(accumulate(seconds))]


def test_a_simulation_continues_where_it_was_left() -> None:
    def course(stops: Sequence[float]) -> tuple[list[float], list[dict[object, float]]]:
        simulation, log = Simulation(toy_cluster((2,), link=10.0), [0, 1]), []

        def trade(soc: int) -> Process[None]:
            for _ in range(20):
                yield simulation.compute(simulation.processor(soc), 0.7 + soc)
                yield simulation.send(soc, 1 - soc, 9.0, num_messages=0)
                log.append(simulation.now_s)

        for soc in (0, 1):
            simulation.start(trade(soc), f"SoC {soc}")
        for stop_s in (*stops, inf):
            if not simulation.done:
                simulation.run(stop_s)
        return log, simulation.take_seconds()

    whole, parts = course([]), course([0.1, 0.7, 3.0, 3.0, 17.77, 40.0])
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    for one, other in zip(parts[1], whole[1], strict=True):
        assert one == pytest.approx(other)


def test_the_trace_shows_processes_and_links() -> None:
    def start(simulation: Simulation) -> None:
        def edge() -> Process[None]:
            yield simulation.compute(simulation.processor(0), 2.0, "forward 0")
            yield simulation.transfer([simulation.link("radio", 10.0)], 30.0, "batch 0", socs=(0,))
            yield simulation.compute(simulation.processor("cloud", "half 0"), 1.0, "step 0")

        simulation.start(edge(), "edge")

    trace = Trace()
    usage = EventClock(toy_cluster((1,)), trace=trace).run_processes(start, socs=[0], label="split")
    assert usage.num_bytes[Tier.WAN] == 30.0
    state = trace.state()
    assert {
        (*state["rows"][row][:2], name, start_s, length_s)
        for row, name, start_s, length_s, _ in state["spans"]
    } == {
        ("SoCs", "SoC 0 cpu", "forward 0", 0.0, 2.0),
        ("SoCs", "SoC 0 network", "batch 0", 2.0, 3.0),
        ("links", "radio", "batch 0", 2.0, 3.0),
        ("servers", "cloud half 0", "step 0", 5.0, 1.0),
        ("runs", "runs", "split", 0.0, 6.0),
    }


def test_what_can_never_happen_is_said() -> None:
    simulation = simulation_of()
    dead = simulation.link("its up link", RateSteps((0.0, 4.0), (1.0, 0.0)))

    def waits() -> Process[None]:
        yield Queue("a gradient").get()

    def sends() -> Process[None]:
        yield simulation.transfer([dead], 5.0, "batch 7")

    refused(
        lambda: started(simulation_of(), waits()), "process 0", "a gradient", error=SocflowerError
    )
    refused(
        lambda: started(simulation, sends()),
        "its up link",
        "4.000 s",
        "batch 7",
        error=SocflowerError,
    )


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (lambda simulation: simulation.processor(5), "SoC 5"),
        (lambda simulation: simulation.processor(0, "gpu"), "gpu"),
        (lambda simulation: simulation.compute(simulation.processor(0), -1.0), "seconds"),
        (lambda simulation: simulation.transfer([simulation.link("a", 1.0)], inf), "num_bytes"),
        (lambda simulation: simulation.timeout(-0.5), "-0.5 s"),
        (lambda simulation: simulation.link("a", -1.0), "bandwidth of a"),
    ],
)
def test_mistakes_name_what_is_wrong(mistake: Callable[[Simulation], object], named: str) -> None:
    refused(lambda: mistake(simulation_of()), named)
