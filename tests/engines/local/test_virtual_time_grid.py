"""Prices of messages of apps that know nothing of virtual time, by hand: 100 bytes/s links, 1e9 operations/s."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from socflower.cluster import (
    FP32,
    Cluster,
    Device,
    LayerProfile,
    ModelProfile,
    Pricing,
    Usage,
    step_cost,
)
from socflower.cluster.topology import uniform_cluster
from socflower.engines.local.virtual_time_grid import VirtualTimeGrid
from socflower.errors import TrainingFailed
from socflower.flower_adapter import Run, begin_run
from socflower.precision.processor_costs import (
    MERGE_PASSES,
    REQUANTISE_PASSES,
    Int8Pricing,
    MixedPricing,
)
from socflower.sim import EventClock
from socflower.wire.message_keys import NUM_EXAMPLES, PRICED
from tests.one_line import refused

MakeCluster = Callable[..., Cluster]
Reply = Callable[[Message], Message | None]

PROFILE = ModelProfile(
    name="toy-model",
    input_bytes=4.0,
    layers=(
        LayerProfile(
            name="only",
            kind="Linear",
            forward_flops=1e9,
            output_bytes=4.0,
            weight_bytes=2e8,
            num_tensors=1,
        ),
    ),
)


@pytest.fixture(autouse=True)
def run_of_flower() -> None:
    """Messages can only be made in a process that has a run."""
    begin_run(1)


class Nodes(Grid):
    """Answers each message with `reply(message)`, or not at all."""

    def __init__(self, node_ids: Iterable[int], reply: Reply) -> None:
        self._run = Run.create_empty(1)
        self._node_ids = list(node_ids)
        self._reply = reply

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._node_ids

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [f"pushed to {message.metadata.dst_node_id}" for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [reply for message in messages if (reply := self._reply(message)) is not None]


def arrays(num_elements: int) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(num_elements, np.float32))})


def num_bytes(num_elements: int) -> int:
    """Bytes of a message's only array, its header included, as Flower sends it."""
    return len(arrays(num_elements)["w"].data)


def message(
    node: int, num_elements: int = 100, message_type: str = "train", **config: bool
) -> Message:
    return Message(
        RecordDict({"arrays": arrays(num_elements), "config": ConfigRecord(config)}),
        node,
        message_type,
    )


def trained(num_examples: float | None, num_elements: int = 100) -> Reply:
    def reply(sent: Message) -> Message:
        metrics = {} if num_examples is None else {NUM_EXAMPLES: num_examples}
        return Message(
            RecordDict({"arrays": arrays(num_elements), "metrics": MetricRecord(metrics)}),
            reply_to=sent,
        )

    return reply


def exchange(
    cluster: Cluster,
    sent: list[Message],
    reply: Reply,
    *,
    nodes: Iterable[int] = (7, 5),
    profile: ModelProfile | None = PROFILE,
    batch_size: int = 32,
    pricing: Pricing = FP32,
) -> tuple[Usage, EventClock]:
    """Return what one exchange took, zero if nothing was priced."""
    used: list[Usage] = []
    clock = EventClock(cluster)
    grid = VirtualTimeGrid(
        Nodes(nodes, reply),
        clock,
        cluster,
        model_profile=profile,
        batch_size=batch_size,
        pricing=pricing,
        on_usage=used.append,
    )
    grid.send_and_receive(sent)
    assert len(used) <= 1
    return (used[0] if used else Usage()), clock


def test_bytes_go_down_and_up_through_the_hub(make_cluster: MakeCluster) -> None:
    usage, clock = exchange(make_cluster((1, 1)), [message(5, 100), message(7, 50)], trained(0, 25))
    down, up = num_bytes(100) + num_bytes(50), 2 * num_bytes(25)
    assert {tier: count for tier, count in usage.num_bytes.items() if count} == {"hub": down + up}
    assert clock.usage.num_bytes["hub"] == down + up


@pytest.mark.parametrize("count", [-5, -0.5, math.nan, math.inf, -math.inf])
def test_training_of_no_number_of_examples_has_no_price(
    make_cluster: MakeCluster, count: float
) -> None:
    """The first in the order of the SoCs is named, whatever the order of the messages; without a profile nobody is."""
    sent = [message(7), message(5)]
    refused(
        lambda: exchange(make_cluster((1, 1)), sent, trained(count)),
        *("SoC 0 (node 5)", f"num-examples is {count:g}"),
        error=TrainingFailed,
    )
    refused(
        lambda: exchange(
            make_cluster((1, 1)),
            sent,
            lambda one: trained(count if one.metadata.dst_node_id == 7 else 8)(one),
        ),
        "SoC 1",
        error=TrainingFailed,
    )
    without, _ = exchange(make_cluster((1, 1)), sent, trained(count), profile=None)
    of_none, _ = exchange(make_cluster((1, 1)), sent, trained(0))
    assert without.num_bytes == of_none.num_bytes
    evaluated, _ = exchange(make_cluster((1, 1)), [message(5, 100, "evaluate")], trained(count))
    assert evaluated.total_energy_j > 0.0


def test_a_round_takes_download_training_and_upload(make_cluster: MakeCluster) -> None:
    """80 examples in batches of 32 are two and a half steps: 240 s, and 2.5 updates of 5 passes over 0.2 GB."""
    cluster = make_cluster((1, 1))
    usage, clock = exchange(cluster, [message(5)], trained(80))
    cost = step_cost(PROFILE, cluster.device_of(0), 32)
    assert cost.compute_s * 2.5 == pytest.approx(240.0)
    assert cost.update_s * 2.5 == pytest.approx(2.5)
    assert usage.duration_s == pytest.approx(240.0 + 2.5 + 2 * num_bytes(100) / 100.0)
    assert clock.now_s == usage.duration_s
    assert usage.soc_seconds["compute"] == pytest.approx(240.0)
    assert usage.soc_seconds["update"] == pytest.approx(2.5)


def test_fewer_examples_than_a_batch_are_one_step(make_cluster: MakeCluster) -> None:
    usage, _ = exchange(make_cluster((1, 1)), [message(5)], trained(3))
    assert usage.soc_seconds["compute"] == pytest.approx(9.0)
    assert usage.soc_seconds["update"] == pytest.approx(1.0)


def test_two_nodes_share_the_hubs_link(make_cluster: MakeCluster) -> None:
    alone, _ = exchange(make_cluster((1, 1)), [message(5)], trained(0))
    both, _ = exchange(make_cluster((1, 1)), [message(5), message(7)], trained(0))
    assert both.duration_s == pytest.approx(2 * alone.duration_s)


def test_nodes_are_socs_in_ascending_order_of_their_ids(make_cluster: MakeCluster) -> None:
    """Node 5 is SoC 0 although the grid names it last."""
    cluster = make_cluster((1, 1))
    priced: list[str] = []

    class Listening(EventClock):
        def run(self, graph, *, repeat=1, label=""):
            priced.extend(task.name for task in graph.tasks)
            return super().run(graph, repeat=repeat, label=label)

    VirtualTimeGrid(Nodes((7, 5), trained(1)), Listening(cluster), cluster).send_and_receive(
        [message(5)]
    )
    assert priced == ["to SoC 0", "from SoC 0"]


def test_messages_that_their_strategy_prices_are_left_alone(make_cluster: MakeCluster) -> None:
    usage, clock = exchange(make_cluster((1, 1)), [message(5, **{PRICED: True})], trained(80))
    assert usage == Usage()
    assert clock.now_s == 0.0
    mixed, _ = exchange(
        make_cluster((1, 1)), [message(5, **{PRICED: True}), message(7)], trained(0)
    )
    assert mixed.num_bytes["hub"] == 2 * num_bytes(100)


def silent(sent: Message) -> None:
    return None


def raised(sent: Message) -> Message:
    return Message(Error(2, "on purpose"), reply_to=sent)


@pytest.mark.parametrize("reply", [silent, raised])
def test_a_node_without_a_reply_costs_its_download_only(
    reply: Reply, make_cluster: MakeCluster
) -> None:
    usage, _ = exchange(make_cluster((1, 1)), [message(5)], reply)
    assert usage.num_bytes["hub"] == num_bytes(100)
    assert usage.duration_s == pytest.approx(num_bytes(100) / 100.0)
    assert usage.soc_seconds["compute"] == 0.0


@pytest.mark.parametrize(
    ("message_type", "profile", "num_examples"),
    [
        ("evaluate", PROFILE, 80),
        ("query", PROFILE, 80),
        ("train", None, 80),
        ("train", PROFILE, 0),
        ("train", PROFILE, None),
    ],
)
def test_what_trains_nothing_costs_its_bytes_only(
    message_type: str,
    profile: ModelProfile | None,
    num_examples: int | None,
    make_cluster: MakeCluster,
) -> None:
    usage, _ = exchange(
        make_cluster((1, 1)),
        [message(5, message_type=message_type)],
        trained(num_examples),
        profile=profile,
    )
    assert usage.duration_s == pytest.approx(2 * num_bytes(100) / 100.0)
    assert usage.soc_seconds["compute"] == 0.0


def test_a_named_train_message_is_training_too(make_cluster: MakeCluster) -> None:
    usage, _ = exchange(
        make_cluster((1, 1)), [message(5, message_type="train.warm_up")], trained(32)
    )
    assert usage.soc_seconds["compute"] == pytest.approx(96.0)


def test_a_message_without_arrays_is_one_message_of_no_bytes(make_cluster: MakeCluster) -> None:
    bare = Message(RecordDict({"config": ConfigRecord({"n": 1})}), 5, "query")
    usage, _ = exchange(
        make_cluster((1, 1), message_s=0.5),
        [bare],
        lambda sent: Message(RecordDict(), reply_to=sent),
    )
    assert usage.num_bytes.get("hub", 0.0) == 0.0
    handled_once, _ = exchange(make_cluster((1, 1), message_s=0.5), [bare], silent)
    assert usage.duration_s == pytest.approx(2 * handled_once.duration_s) != 0.0


def test_more_nodes_than_socs_are_refused_with_both_numbers(make_cluster: MakeCluster) -> None:
    refused(
        lambda: exchange(make_cluster((1, 1)), [message(1)], trained(1), nodes=(1, 2, 3)),
        "3 nodes",
        "2 SoCs",
    )


def test_idle_nodes_draw_their_idle_watts(make_cluster: MakeCluster) -> None:
    """SoC 1 takes no part in the exchange: 1 W for as long as it lasts."""
    usage, _ = exchange(make_cluster((1, 1)), [message(5)], silent)
    assert usage.energy_j["idle"] == pytest.approx(usage.duration_s * 1.0)


def test_everything_else_is_the_inner_grids(make_cluster: MakeCluster) -> None:
    inner, clock = Nodes((5, 7), trained(1)), EventClock(make_cluster((1, 1)))
    grid = VirtualTimeGrid(inner, clock, make_cluster((1, 1)))
    assert list(grid.get_node_ids()) == [5, 7]
    assert grid.clock is clock
    run = begin_run(9)
    grid.set_run(run)
    assert grid.run is inner.run is run
    made = grid.create_message(RecordDict(), "train", 7, "group")
    assert (made.metadata.dst_node_id, made.metadata.group_id) == (7, "group")
    assert list(grid.push_messages([made])) == ["pushed to 7"]
    assert list(grid.pull_messages(["pushed to 7"])) == []
    assert clock.now_s == 0.0


# ------------------------------------------------------------------------------------------ CPU and NPU at once
@pytest.fixture
def two_processors(toy: Device) -> Cluster:
    """CPU 3e9 operations/s at 5 W, so that a sample takes a second; an int8 NPU three times as fast at 3 W."""
    cpu, npu = (
        replace(toy.processors[name], flops_per_s=rate, number_format=number_format)
        for name, rate, number_format in (("cpu", 3e9, "fp32"), ("npu", 9e9, "int8"))
    )
    return uniform_cluster(
        replace(toy, processors={"cpu": cpu, "npu": npu}),
        (1, 1),
        soc_bytes_per_s=100.0,
        board_bytes_per_s=100.0,
        hub_bytes_per_s=100.0,
        message_s=0.0,
    )


@pytest.mark.parametrize(
    ("rule", "on_cpu"), [("half", 16), ("normalised", 8), ("paper", 12), ("int8", 0), ("fp32", 32)]
)
def test_of_two_processors_the_slower_decides_and_both_draw(
    rule: str, on_cpu: int, two_processors: Cluster
) -> None:
    """32 samples of a second on the CPU and a third of one on the NPU; then merge and update, on the CPU."""
    usage, _ = exchange(
        two_processors, [message(5)], trained(32), pricing=MixedPricing(rule=rule), nodes=(5,)
    )
    idle, _ = exchange(two_processors, [message(5)], trained(0), nodes=(5,))
    cpu_s, npu_s = float(on_cpu), (32 - on_cpu) / 3
    # A pass over 0.2 GB takes 0.2 s. Without the NPU nothing is rounded, and one gradient needs no merging.
    passes = (
        5.0
        + (MERGE_PASSES if 0 < on_cpu < 32 else 0.0)
        + (REQUANTISE_PASSES if on_cpu < 32 else 0.0)
    )
    trained_s = max(cpu_s, npu_s) + 0.2 * passes
    assert usage.duration_s - idle.duration_s == pytest.approx(trained_s)
    assert usage.soc_seconds["compute"] == pytest.approx(max(cpu_s, npu_s))
    # Above its idle watt the device draws 4 W while the CPU works and 2 W while the NPU does.
    drawn_j = trained_s * 1.0 + (cpu_s + 0.2 * passes) * 4.0 + npu_s * 2.0
    assert usage.total_energy_j - idle.total_energy_j == pytest.approx(drawn_j)


def test_the_fixed_rules_at_their_ends_are_the_arithmetic_of_one_processor(
    two_processors: Cluster,
) -> None:
    """But for rounding the masters, which int8 alone has none of."""
    fp32, _ = exchange(two_processors, [message(5)], trained(80))
    all_cpu, _ = exchange(
        two_processors, [message(5)], trained(80), pricing=MixedPricing(rule="fp32")
    )
    assert all_cpu == fp32
    int8, _ = exchange(two_processors, [message(5)], trained(80), pricing=Int8Pricing())
    all_npu, _ = exchange(
        two_processors, [message(5)], trained(80), pricing=MixedPricing(rule="int8")
    )
    assert all_npu.soc_seconds["compute"] == pytest.approx(int8.soc_seconds["compute"])
    assert all_npu.duration_s - int8.duration_s == pytest.approx(2.5 * 0.2 * REQUANTISE_PASSES)
