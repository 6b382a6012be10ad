"""What mixed-precision clients tell: the alphas that held make the price, a failed accelerator makes an event."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import Cluster, LayerProfile, ModelProfile, parse_cluster
from socflower.flower_adapter import begin_run
from socflower.precision.processor_costs import Int8Pricing, MixedPricing
from socflower.sim import EventClock
from socflower.strategies.mixed_replies import client_events, mean_metric, mixed_phases
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import GroupTask
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer, model, values
from tests.strategies.options import grouped
from tests.training.test_batches import task

PROFILE = ModelProfile(
    name="toy",
    input_bytes=4.0,
    layers=(
        LayerProfile(
            name="only",
            kind="Linear",
            forward_flops=1e9,
            output_bytes=4.0,
            weight_bytes=400.0,
            num_tensors=1,
        ),
    ),
)

Held = list[tuple[float, int]]
HELD = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 5)), min_size=1, max_size=4)


def reply(group_id: int, held: Held, *, share: float = 0.5, events: Sequence[str] = ()) -> Message:
    """Reply as the mixed-precision client of a group, with each alpha and its steps."""
    begin_run(1)
    message = Message(RecordDict({"group": ConfigRecord({"group-id": group_id})}), 1, "train")
    return with_alphas(message, held, share=share, events=events)


def with_alphas(
    message: Message,
    held: Held,
    *,
    value: float = 1.0,
    num_examples: int = 1,
    share: float = 0.5,
    events: Sequence[str] = (),
) -> Message:
    metrics: dict[str, Any] = {"cpu-share": share}
    if held:
        metrics |= {
            "socflower-alpha": [alpha for alpha, _ in held],
            "socflower-alpha-steps": [float(steps) for _, steps in held],
        }
    made = answer(message, value, num_examples, **metrics)
    if events:
        made.content["socflower-events"] = ConfigRecord({"texts": list(events)})
    return made


# --------------------------------------------------------------------------------------------------- phases
@given(groups=st.lists(HELD, min_size=1, max_size=3))
def test_every_step_is_priced_at_the_alpha_that_held_in_each_group(groups: list[Held]) -> None:
    """Against one entry a step; the groups' epochs need not begin at the same step."""
    num_steps = max(sum(steps for _, steps in held) for held in groups)
    groups = [
        [*held[:-1], (held[-1][0], held[-1][1] + num_steps - sum(steps for _, steps in held))]
        for held in groups
    ]
    pricing = MixedPricing(rule="normalised")
    phases = mixed_phases(
        [reply(group_id, held) for group_id, held in enumerate(groups)], num_steps, pricing
    )
    assert all(steps > 0 for steps, _ in phases)
    priced = [pricings for steps, pricings in phases for _ in range(steps)]
    assert len(priced) == num_steps
    for group_id, held in enumerate(groups):
        expected = [pricing.with_alpha(alpha) for alpha, steps in held for _ in range(steps)]
        assert [pricings[group_id] for pricings in priced] == expected


def test_equal_alphas_make_one_phase() -> None:
    phases = mixed_phases([reply(0, [(0.5, 8)]), reply(3, [(0.25, 8)])], 8, MixedPricing())
    assert phases == [(8, {0: MixedPricing(alpha=0.5), 3: MixedPricing(alpha=0.25)})]


def test_a_group_whose_accelerator_failed_is_priced_at_the_share_that_its_cpus_had() -> None:
    pricing = MixedPricing(rule="normalised")
    phases = mixed_phases(
        [reply(0, [(0.5, 3), (0.75, 5)]), reply(1, [(0.9, 8)], share=0.8, events=["it broke"])],
        8,
        pricing,
    )
    failed = MixedPricing(rule="normalised", cpu_share=0.8)
    assert phases == [
        (3, {0: pricing.with_alpha(0.5), 1: failed}),
        (5, {0: pricing.with_alpha(0.75), 1: failed}),
    ]


@pytest.mark.parametrize("replies", [[], [(0, [])]])
def test_groups_that_tell_no_alpha_cost_what_the_pricing_says(
    replies: list[tuple[int, Held]],
) -> None:
    """Those that did not reply, and those of the FP32 rule."""
    assert mixed_phases([reply(*each) for each in replies], 8, MixedPricing()) == [(8, {})]


def test_means_are_over_the_groups_that_tell() -> None:
    replies = [
        reply(0, [(0.5, 2), (0.7, 2)], share=0.25),
        reply(1, [(0.9, 4)], share=0.75),
        reply(2, [], share=1.0),
    ]
    assert mean_metric(replies, "socflower-alpha") == pytest.approx((0.6 + 0.9) / 2)
    assert mean_metric(replies, "cpu-share") == pytest.approx(2 / 3)
    assert mean_metric(replies, "temperature") is None
    assert mean_metric([], "cpu-share") is None


def test_each_text_of_a_client_is_an_event_of_its_group() -> None:
    assert client_events(reply(0, []), 0, "group 0") == []
    events = client_events(reply(4, [], events=["NPU failed", "NPU failed again"]), 4, "group 4")
    assert [(event.kind, event.group_id) for event in events] == [("backend-dropped", 4)] * 2
    assert [event.text for event in events] == ["group 4: NPU failed", "group 4: NPU failed again"]


# ------------------------------------------------------------------------------------------------- strategy
def cluster() -> Cluster:
    return parse_cluster({"boards": [2, 2]})


def socflow(**changes: Any) -> SoCFlow:
    """Two groups of two on two boards; 100 samples in batches of 10 make 5 steps an epoch."""
    settings_: dict[str, Any] = {
        "cluster": cluster(),
        "groups": 2,
        "num_samples": 100,
        "batch_size": 10,
        "num_epochs": 2,
        "interval_epochs": 2.0,
        "model_profile": PROFILE,
        "pricing": MixedPricing(rule="paper"),
        "reshuffle": False,
    }
    return SoCFlow(**grouped(**(settings_ | changes)))


def messages(strategy: SoCFlow) -> list[Message]:
    return strategy.configure_train(1, model(), ConfigRecord({}), FakeGrid())


def priced(held: Sequence[Held], **changes: Any) -> SoCFlow:
    """Return the strategy after a round in which each group told its alphas."""
    strategy = socflow(clock=EventClock(cluster()), **changes)
    replies = [
        with_alphas(message, alphas)
        for message, alphas in zip(messages(strategy), held, strict=True)
    ]
    strategy.aggregate_train(1, replies)
    return strategy


def test_a_round_costs_the_phases_of_its_replies() -> None:
    held: list[Held] = [[(0.9, 5), (0.6, 5)], [(0.2, 5), (1.0, 5)]]
    strategy = priced(held)
    assert strategy.round is not None and strategy.round.costs is not None
    work, clock = strategy.round.costs, EventClock(cluster())
    pricing = MixedPricing(rule="paper")
    phases = [
        (5, {0: pricing.with_alpha(0.9), 1: pricing.with_alpha(0.2)}),
        (5, {0: pricing.with_alpha(0.6), 1: pricing.with_alpha(1.0)}),
    ]
    expected = work.run(strategy.method.sync.intervals[0], clock, phases)
    assert strategy.reports[-1].usage.duration_s == pytest.approx(expected.duration_s)
    assert strategy.reports[-1].usage.total_energy_j == pytest.approx(expected.total_energy_j)
    assert strategy.reports[-1].alpha == pytest.approx((0.75 + 0.6) / 2)
    assert strategy.reports[-1].cpu_share == 0.5


def test_less_confidence_never_makes_a_round_faster() -> None:
    seconds = [
        priced([[(alpha, 10)]] * 2).reports[-1].usage.duration_s
        for alpha in (1.0, 0.7, 0.4, 0.1, 0.0)
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_no_confidence_costs_what_fp32_costs() -> None:
    """gamma = 1: nothing runs beside the CPU, and nothing is merged."""
    fp32 = socflow(clock=EventClock(cluster()), pricing=MixedPricing(rule="fp32"))
    fp32.aggregate_train(1, [with_alphas(message, []) for message in messages(fp32)])
    mixed = priced([[(0.0, 10)]] * 2)
    assert mixed.reports[-1].usage.duration_s == pytest.approx(fp32.reports[-1].usage.duration_s)
    assert fp32.reports[-1].alpha is None


def test_a_client_whose_accelerator_failed_is_averaged_in_and_reported() -> None:
    strategy = socflow(clock=EventClock(cluster()))
    first, second = messages(strategy)
    arrays, metrics = strategy.aggregate_train(
        1,
        [
            with_alphas(first, [(0.9, 10)], value=1.0, num_examples=30),
            with_alphas(
                second, [], value=5.0, num_examples=10, share=1.0, events=["NPU failed at step 3"]
            ),
        ],
    )
    assert values(arrays) == [2.0] * 3
    assert metrics is not None and metrics["num-examples"] == 40
    (event,) = strategy.reports[-1].events
    assert (event.kind, event.group_id, event.text) == (
        "backend-dropped",
        1,
        "group 1: NPU failed at step 3",
    )
    healthy = priced([[(0.9, 10)]] * 2)
    assert strategy.reports[-1].usage.duration_s > healthy.reports[-1].usage.duration_s


def test_messages_carry_beta_by_the_catalogue() -> None:
    """F10; the Raspberry Pi has no NPU beside its CPU, so its ratio is 0."""
    mixed = parse_cluster(
        {}, [{"socs": 1, "device": "snapdragon-865"}, {"socs": 1, "device": "raspberry-pi-4b"}]
    )
    strategy = socflow(cluster=mixed, groups=1)
    (message,) = strategy.configure_train(1, model(), ConfigRecord({}), FakeGrid((1, 2)))
    received = GroupTask.decode(message.content.config_records["group"])
    device = mixed.device_of(0)
    npu, cpu = device.processor("npu").rate("toy"), device.processor("cpu").rate("toy")
    assert received.npu_ratios == pytest.approx((npu / (npu + cpu), 0.0))
    assert received.capacities == pytest.approx(
        [MixedPricing().rate("toy", mixed.device_of(soc)) for soc in received.members]
    )


@pytest.mark.parametrize("changes", [{"pricing": Int8Pricing()}, {"model_profile": None}])
def test_without_mixed_pricing_or_a_profile_clients_are_told_no_ratios(
    changes: dict[str, Any],
) -> None:
    for message in messages(socflow(**changes)):
        assert GroupTask.decode(message.content.config_records["group"]).npu_ratios == ()


@pytest.mark.parametrize("ratios", [(), (0.25, 0.0)])
def test_ratios_survive_the_message(ratios: tuple[float, ...]) -> None:
    sent = task(0, 1, members=(4, 7), partitions=(0, 1), capacities=(1.0, 2.0), npu_ratios=ratios)
    assert GroupTask.decode(ConfigRecord(sent.encode())) == sent


@pytest.mark.parametrize("ratios", [(0.5,), (0.5, 0.5, 0.5)])
def test_ratios_of_another_number_than_the_members_are_refused(ratios: tuple[float, ...]) -> None:
    refused(
        lambda: task(
            3, 4, members=(4, 7), partitions=(0, 1), capacities=(1.0, 2.0), npu_ratios=ratios
        ),
        f"{len(ratios)}",
        "NPU",
        "group 3: 2 members",
    )
