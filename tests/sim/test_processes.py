"""Processes that react, on the same processors and links as task graphs."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simgrid import Flow, flow_ends_s, integrated_ends_s
from socflower.cluster import Activity, Cluster, GraphBuilder, TaskGraph, Tier
from socflower.cluster.link_rate import RateSteps
from socflower.cluster.task_graph import Compute
from socflower.errors import ConfigError, SocflowerError
from socflower.sim import EventClock, Trace
from socflower.sim.processes import Credits, Event, Process, Queue, Simulation, all_of, first_of
from socflower.thermal.fans.policies import FixedSpeed
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, changes
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.rack import Rack

MakeCluster = Callable[..., Cluster]
SECONDS = st.integers(0, 40).map(lambda part: part / 8)


# ------------------------------------------------------------------------------------- one engine for both


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Tasks of all kinds on five SoCs and the hub."""
    b = GraphBuilder()
    for index in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        if draw(st.booleans()):
            b.compute(
                f"c{index}",
                draw(st.integers(0, 4)),
                draw(SECONDS),
                processor=draw(st.sampled_from(["cpu", "npu"])),
                after=after,
            )
        else:
            ends = draw(st.permutations([0, 1, 2, 3, 4, "hub"]))[:2]
            b.transfer(
                f"t{index}",
                ends[0],
                ends[1],
                50.0 * draw(st.integers(0, 9)),
                num_messages=draw(st.integers(0, 3)),
                after=after,
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
                yield simulation.compute(
                    simulation.processor(task.device, task.processor), task.seconds
                )
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
def test_a_task_graph_as_processes_costs_what_the_graph_costs(
    make_cluster: MakeCluster, graph: TaskGraph
) -> None:
    cluster = make_cluster((3, 2), uplink=150.0, message_s=0.25)
    expected = EventClock(cluster).run(graph)
    usage = EventClock(cluster).run_processes(as_processes(graph), socs=range(5))
    assert usage.duration_s == pytest.approx(expected.duration_s, rel=1e-12)
    assert usage.num_bytes == pytest.approx(expected.num_bytes)
    for activity, joules in expected.energy_j.items():
        assert usage.energy_j[activity] == pytest.approx(joules, rel=1e-9, abs=1e-9)


def test_a_pipeline_of_three_stages_that_alternate_forward_and_backward_is_twenty_lines(
    make_cluster: MakeCluster,
) -> None:
    """1F1B with free links: filling, alternating and draining take (M + P - 1) (f + b)."""
    num_stages, num_batches, forward_s, backward_s = 3, 7, 1.0, 2.0

    def start(simulation: Simulation) -> None:
        inputs = [Queue[int]() for _ in range(num_stages)]
        gradients = [Queue[int]() for _ in range(num_stages)]

        def send(queue: Queue[int], source: int, target: int, batch: int) -> None:
            simulation.send(source, target, 1e-9).then(lambda _: queue.put(batch))

        def stage(rank: int) -> Process[None]:
            cpu, last = simulation.processor(rank), rank == num_stages - 1
            warm_up = min(num_batches, num_stages - rank)
            order = (
                ["F"] * (warm_up - 1)
                + ["F", "B"] * (num_batches - warm_up + 1)
                + ["B"] * (warm_up - 1)
            )
            for kind in order:
                batch = yield (inputs if kind == "F" else gradients)[rank].get()
                yield simulation.compute(
                    cpu, forward_s if kind == "F" else backward_s, f"{kind}{batch}"
                )
                if kind == "F" and last:
                    gradients[rank].put(batch)
                elif kind == "F":
                    send(inputs[rank + 1], rank, rank + 1, batch)
                elif rank:
                    send(gradients[rank - 1], rank, rank - 1, batch)

        for batch in range(num_batches):
            inputs[0].put(batch)
        for rank in range(num_stages):
            simulation.start(stage(rank), f"stage {rank}")

    usage = EventClock(make_cluster((3,))).run_processes(start, socs=range(3))
    assert usage.duration_s == pytest.approx(
        (num_batches + num_stages - 1) * (forward_s + backward_s), abs=1e-6
    )
    assert usage.soc_seconds[Activity.COMPUTE] == pytest.approx(
        num_stages * num_batches * (forward_s + backward_s)
    )


# ------------------------------------------------------------------------------------------ changing links


@st.composite
def rates(draw: st.DrawFn) -> RateSteps:
    parts = draw(
        st.lists(
            st.tuples(st.floats(0.5, 30), st.sampled_from([0.0, 50.0]) | st.floats(20, 5000)),
            min_size=1,
            max_size=5,
        )
    )
    times_s = [0.0]
    for length_s, _ in parts:
        times_s.append(times_s[-1] + length_s)
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
    make_cluster: MakeCluster,
    steps: RateSteps,
    num_bytes: list[float],
    begin_s: float,
) -> None:
    simulation = Simulation(make_cluster((1,)), [0], now_s=begin_s)
    link = simulation.link("the link", steps)

    def one_after_another() -> Process[None]:
        at_s = begin_s
        for count in num_bytes:
            yield simulation.transfer([link], count)
            at_s = steps.passed_s(at_s, count)
            assert simulation.now_s == pytest.approx(at_s, rel=1e-9)
            assert simulation.rate(link) == steps.rate(simulation.now_s)

    simulation.start(one_after_another(), "sender")
    simulation.run()


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
    parts: list[tuple[float, float]],
    start_s: float,
    repeats: bool,
    num_bytes: list[int],
) -> None:
    """Equal and different ones, while the bandwidth rises above that at their start and falls below it."""
    times_s = [0.0, *accumulate(length_s for length_s, _ in parts)]
    end_s, rates = times_s.pop() if repeats else inf, [rate for _, rate in parts]
    times_s = times_s[: len(rates)]
    ends_s = flow_ends_s(
        [RateSteps(tuple(times_s), tuple(rates), end_s)],
        [Flow(start_s=start_s, path=(0,), num_bytes=count) for count in num_bytes],
    )
    assert ends_s == pytest.approx(
        integrated_ends_s(times_s, rates, end_s, start_s, num_bytes), rel=1e-9
    )


def test_a_flow_becomes_faster_than_it_began() -> None:
    rising, flow = (
        RateSteps((0.0, 2.0, 5.0), (100.0, 50.0, 200.0)),
        Flow(start_s=0.0, path=(0,), num_bytes=1000),
    )
    assert (
        flow_ends_s([rising], [flow])
        == integrated_ends_s(rising.times_s, rising.bytes_per_s, inf, 0.0, [1000])
        == [8.25]
    )


def test_a_changing_link_is_shared_evenly_as_others_limit_it(make_cluster: MakeCluster) -> None:
    """Two edges with 60 and 200 B/s of their own behind an uplink of 100, later 300, B/s."""
    simulation = Simulation(make_cluster((2,)), [0, 1])
    uplink = simulation.link("uplink", RateSteps((0.0, 10.0), (100.0, 300.0)))
    ends = []

    def edge(own_bytes_per_s: float, num_bytes: float) -> Process[None]:
        yield simulation.transfer([simulation.link("own", own_bytes_per_s), uplink], num_bytes)
        ends.append(simulation.now_s)

    simulation.start(edge(60.0, 50.0 * 10 + 60.0 * 5), "slow")
    simulation.start(edge(200.0, 50.0 * 10 + 200.0 * 7), "quick")
    simulation.run()
    assert ends == pytest.approx([15.0, 17.0])


def test_links_of_the_cluster_can_change(make_cluster: MakeCluster) -> None:
    """A transfer of the cluster follows the narrowest link of its route; others keep theirs."""
    simulation, ends = Simulation(make_cluster((2,), link=100.0), [0, 1]), []
    simulation.change_rates({"soc1/rx": RateSteps((0.0, 2.0, 5.0), (50.0, 0.0, 400.0))})

    def send(source: int, target: int, num_bytes: float) -> Process[None]:
        yield simulation.send(source, target, num_bytes)
        ends.append((source, simulation.now_s))

    simulation.start(send(0, 1, 300.0), "there")
    simulation.start(send(1, 0, 300.0), "back")
    simulation.run()
    assert ends == [(1, 3.0), (0, 7.0)]
    with pytest.raises(ConfigError, match="no link 'soc7/rx'; links are such as soc0/tx"):
        simulation.change_rates({"soc7/rx": RateSteps((0.0,), (1.0,))})


def test_a_process_can_follow_the_bandwidth(make_cluster: MakeCluster) -> None:
    simulation, seen = Simulation(make_cluster((1,)), [0], now_s=4.0), []
    link = simulation.link("radio", RateSteps((0.0, 5.0), (100.0, 0.0), 8.0))

    def watch() -> Process[None]:
        while simulation.now_s < 16.0:
            yield simulation.rate_change(link)
            seen.append((simulation.now_s, simulation.rate(link)))

    simulation.start(watch(), "watcher")
    simulation.run()
    assert seen == [(5.0, 0.0), (8.0, 100.0), (13.0, 0.0), (16.0, 100.0)]


@settings(max_examples=40)
@given(steps=rates())
def test_a_process_that_follows_the_bandwidth_sees_every_step_in_turn(
    make_cluster: MakeCluster,
    steps: RateSteps,
) -> None:
    """Also where rounding puts the time of a repeated step a little before it."""
    simulation, seen = Simulation(make_cluster((1,)), [0]), [steps.bytes_per_s[0]]
    link = simulation.link("radio", steps)

    def watch() -> Process[None]:
        while True:
            yield simulation.rate_change(link)
            seen.append(simulation.rate(link))

    def wait() -> Process[None]:
        yield simulation.timeout(300.0)

    simulation.start(watch(), "watcher", background=True)
    simulation.start(wait(), "the end")
    simulation.run()
    expected = [*steps.bytes_per_s] * len(seen)
    if steps.end_s == inf:
        assert seen == [*steps.bytes_per_s]
    elif len(steps.bytes_per_s) > 1:
        assert seen == expected[: len(seen)]
        assert len(seen) >= len(steps.bytes_per_s) * int(300.0 / steps.end_s)


# ------------------------------------------------------------------------------------------- changing speeds


def test_work_under_way_goes_on_at_the_new_speed(make_cluster: MakeCluster) -> None:
    simulation, ends = Simulation(make_cluster((2,)), [0, 1]), {}

    def work(soc: int) -> Process[None]:
        ran_s = yield simulation.compute(simulation.processor(soc), 10.0)
        ends[soc] = (simulation.now_s, ran_s)

    def slow_down() -> Process[None]:
        yield simulation.timeout(4.0)
        change = simulation.speed_change()
        simulation.set_speeds({0: 0.5})
        assert change.happened
        assert simulation.speed(0) == 0.5
        yield simulation.timeout(4.0)
        simulation.set_speeds({0: 0.0})
        yield simulation.timeout(100.0)
        simulation.set_speeds({0: 2.0})

    for soc in (0, 1):
        simulation.start(work(soc), f"SoC {soc}")
    simulation.start(slow_down(), "governor")
    simulation.run()
    assert ends[1] == (10.0, 10.0)
    assert ends[0] == pytest.approx((110.0, 110.0))  # 4 at 1, 2 at 0.5, the last 4 at 2 after 100 s


def rack(*, socs: int, around: Surroundings | None = None) -> RackDynamics:
    return RackDynamics(
        Rack(slots_per_board=(socs,), chassis_j_per_k=300.0, soc_to_board_w_per_k=0.4),
        FixedSpeed(fixed_rpm=3250.0),
        surroundings=around,
    )


def steps(num_steps: int, seconds: float) -> Callable[[Simulation], None]:
    def start(simulation: Simulation) -> None:
        def work(soc: int) -> Process[None]:
            for _ in range(num_steps):
                yield simulation.compute(simulation.processor(soc), seconds)

        for soc in range(5):
            simulation.start(work(soc), f"SoC {soc}")

    return start


def test_heat_slows_processes_down_as_it_slows_a_graph(make_cluster: MakeCluster) -> None:
    """Ten minutes of work: steps of a graph end at the speed at which they began, which makes the difference."""
    b = GraphBuilder()
    for soc in range(5):
        b.compute("work", soc, 1.0)
    cluster, of_graph, of_processes = make_cluster((5,)), rack(socs=5), rack(socs=5)
    graph = EventClock(cluster, of_graph).run(b.build(range(5)), repeat=600)
    processes = EventClock(cluster, of_processes).run_processes(steps(600, 1.0), socs=range(5))
    assert processes.duration_s > 630.0
    assert processes.duration_s == pytest.approx(graph.duration_s, rel=2e-3)
    assert processes.total_energy_j == pytest.approx(graph.total_energy_j, rel=5e-3)
    assert of_processes.temperatures_c == pytest.approx(of_graph.temperatures_c, abs=0.2)


def test_a_soc_that_a_user_takes_waits(make_cluster: MakeCluster) -> None:
    taken = changes(
        NOBODY, [(20.0, BackgroundLoad(share=0.0, power_w=1.0, taken=True)), (50.0, NOBODY)]
    )
    around = Surroundings(background_load=(taken, *[changes(NOBODY, [])] * 4))
    free = EventClock(make_cluster((5,)), rack(socs=5)).run_processes(steps(40, 1.0), socs=range(5))
    clock = EventClock(make_cluster((5,)), rack(socs=5, around=around))
    assert clock.run_processes(steps(40, 1.0), socs=range(5)).duration_s == pytest.approx(
        free.duration_s + 30.0
    )


# ---------------------------------------------------------------------------------- events, queues, mistakes


def test_events_queues_and_credits(make_cluster: MakeCluster) -> None:
    simulation, log = Simulation(make_cluster((1,)), [0]), []
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

    simulation.start(main(), "main")
    simulation.start(consumer(), "consumer")
    simulation.run()
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
def test_simultaneous_events_have_one_order(
    make_cluster: MakeCluster, seconds: Sequence[float]
) -> None:
    """Work that is asked for together is done in the order of asking; the same again takes the same course."""

    def course() -> list[tuple[int, float]]:
        simulation, ended = Simulation(make_cluster((1,)), [0]), []

        def ask(index: int) -> Process[None]:
            yield simulation.compute(simulation.processor(0), seconds[index])
            ended.append((index, simulation.now_s))

        for index in range(len(seconds)):
            simulation.start(ask(index), f"{index}")
        simulation.run()
        return ended

    first = course()
    assert [index for index, _ in first] == list(range(len(seconds)))
    assert [at_s for _, at_s in first] == pytest.approx(
        [sum(seconds[: index + 1]) for index in range(len(seconds))]
    )
    assert course() == first


def test_a_simulation_goes_on_where_it_was_left(make_cluster: MakeCluster) -> None:
    def course(stops: Sequence[float]) -> tuple[list[float], list[dict[object, float]]]:
        simulation, log = Simulation(make_cluster((2,), link=10.0), [0, 1]), []

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


def test_the_trace_shows_processes_and_links(make_cluster: MakeCluster) -> None:
    trace = Trace()

    def start(simulation: Simulation) -> None:
        def edge() -> Process[None]:
            yield simulation.compute(simulation.processor(0), 2.0, "forward 0")
            yield simulation.transfer([simulation.link("radio", 10.0)], 30.0, "batch 0", socs=(0,))
            yield simulation.compute(simulation.processor("cloud", "half 0"), 1.0, "step 0")

        simulation.start(edge(), "edge")

    usage = EventClock(make_cluster((1,)), trace=trace).run_processes(
        start, socs=[0], label="split"
    )
    assert usage.num_bytes[Tier.WAN] == 30.0
    spans = {(span[0], span[1]): span[2:4] for span in trace.state()["spans"]}
    rows = [tuple(row[:2]) for row in trace.state()["rows"]]
    assert {(rows[row], name): times for (row, name), times in spans.items()} == {
        (("SoCs", "SoC 0 cpu"), "forward 0"): [0.0, 2.0],
        (("SoCs", "SoC 0 network"), "batch 0"): [2.0, 3.0],
        (("links", "radio"), "batch 0"): [2.0, 3.0],
        (("servers", "cloud half 0"), "step 0"): [5.0, 1.0],
        (("runs", "runs"), "split"): [0.0, 6.0],
    }


def test_what_can_never_happen_is_said(make_cluster: MakeCluster) -> None:
    def stuck(process: Callable[[Simulation], Process[None]]) -> str:
        simulation = Simulation(make_cluster((1,)), [0])
        simulation.start(process(simulation), "edge 3")
        with pytest.raises(SocflowerError) as caught:
            simulation.run()
        return str(caught.value)

    def waits(simulation: Simulation) -> Process[None]:
        yield Queue("a gradient").get()

    def sends(simulation: Simulation) -> Process[None]:
        yield simulation.transfer(
            [simulation.link("its up link", RateSteps((0.0, 4.0), (1.0, 0.0)))], 5.0, "batch 7"
        )

    assert stuck(waits) == "edge 3 waits for a gradient, which can never happen"
    assert "its up link carries nothing any more after 4.000 s, so batch 7 never arrives" in stuck(
        sends
    )


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        (lambda simulation: simulation.processor(5), "SoC 5 takes no part"),
        (lambda simulation: simulation.processor(0, "gpu"), "gpu"),
        (
            lambda simulation: simulation.compute(simulation.processor(0), -1.0),
            "seconds must be finite and not negative",
        ),
        (
            lambda simulation: simulation.transfer([simulation.link("a", 1.0)], inf),
            "num_bytes must be finite",
        ),
        (lambda simulation: simulation.timeout(-0.5), "a timeout of -0.5 s"),
        (lambda simulation: simulation.link("a", -1.0), "the bandwidth of a must be"),
    ],
)
def test_mistakes_name_what_is_wrong(
    make_cluster: MakeCluster,
    mistake: Callable[[Simulation], object],
    complaint: str,
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        mistake(Simulation(make_cluster((1,)), [0]))
