"""Flower's own mods around clients that train as groups: which of them work, and how the others fail."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Strategy,
)

from socflower.clients.app import make_client_app
from socflower.clients.privacy_mods import adapt_mod
from socflower.engines.local.grid import LocalGrid
from socflower.errors import TrainingFailed
from socflower.flower_adapter import begin_run
from socflower.strategies.socflow import SoCFlow
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import (
    ASK,
    ASK_STATUS,
    CONFIG,
    DEPARTURES,
    GROUP,
    RING,
    STATUS,
    GroupTask,
    HeatReport,
    NodeStatus,
    RingOutcome,
    RingTask,
    decode,
    encode,
)
from tests.one_line import refused
from tests.strategies import ring_app

FAR = 1e9
"""A norm that no update reaches: with it, and without noise, clipping leaves all weights as they are."""

Around = Callable[[SoCFlow], Strategy]


def itself(strategy: SoCFlow) -> Strategy:
    return strategy


def fixed(norm: float) -> Around:
    return lambda strategy: DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, norm, 2)


def adaptive(strategy: SoCFlow) -> Strategy:
    return DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.0, 2, FAR)


def train(mods: Sequence[Mod], around: Around = itself) -> ArrayRecord:
    """Return what two groups of two SoCs make of a network in an epoch."""
    app = make_client_app(
        lambda context: ring_app.network(),
        ring_app.part,
        FP32Trainer(optimizer=sgd(0.05)),
        mods=mods,
    )
    strategy = ring_app.strategy(ring_app.cluster(), num_epochs=1)
    with LocalGrid(app, 4, num_workers=0) as grid:
        return (
            around(strategy).start(grid, ring_app.initial(), num_rounds=strategy.num_rounds).arrays
        )


def norm_of_update(trained: ArrayRecord) -> float:
    first = ring_app.initial()
    return float(
        np.sqrt(sum(((trained[name].numpy() - first[name].numpy()) ** 2).sum() for name in first))
    )


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("mod", "around"),
    [
        (message_size_mod, itself),
        (arrays_size_mod, itself),
        (LocalDpMod(FAR, 0.0, 1.0, 0.1), itself),
        (fixedclipping_mod, fixed(FAR)),
        (adaptiveclipping_mod, adaptive),
    ],
)
def test_mods_that_need_change_nothing_change_nothing(mod: Mod, around: Around) -> None:
    ours, reference = train([mod], around), train([])
    for name in reference:
        np.testing.assert_allclose(ours[name].numpy(), reference[name].numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("mod", "around"), [(LocalDpMod(0.01, 0.0, 1.0, 0.1), itself), (fixedclipping_mod, fixed(0.01))]
)
def test_a_groups_update_is_clipped(mod: Mod, around: Around) -> None:
    assert norm_of_update(train([])) > 0.1
    assert 0.0 < norm_of_update(train([mod], around)) <= 0.01 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("mod", "around", "says"),
    [
        (fixedclipping_mod, itself, "fixedclipping_mod requires the key 'clipping_norm'"),
        (adaptiveclipping_mod, itself, "adaptiveclipping_mod requires the key 'clipping_norm'"),
        (secagg_mod, itself, "KeyError.*secaggplus_configs"),
        (secaggplus_mod, itself, "KeyError.*secaggplus_configs"),
    ],
)
def test_mods_without_their_other_half_end_the_training_with_a_line(
    mod: Mod, around: Around, says: str
) -> None:
    with pytest.raises(TrainingFailed, match=says) as caught:
        train([mod], around)
    assert "\n" not in str(caught.value) and "node 1000" in str(caught.value)


@pytest.mark.parametrize(
    "mod", [fixedclipping_mod, adaptiveclipping_mod, LocalDpMod(1.0, 0.0, 1.0, 0.1)]
)
def test_a_member_of_a_ring_is_refused_by_the_name_of_the_mod(mod: Mod) -> None:
    begin_run(1)
    app = make_client_app(lambda context: ring_app.network(), ring_app.part, mods=[mod])
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    records = {
        CONFIG: ConfigRecord({"clipping_norm": 1.0}),
        GROUP: ConfigRecord(),
        RING: ConfigRecord(),
    }
    refused(
        lambda: app(Message(RecordDict(records), 1, "train"), context),
        getattr(mod, "__name__", "LocalDpMod"),
    )


def test_questions_pass_by_mods_for_training() -> None:
    """Flower's have no eye for the type of a message, and a strategy takes an error for a node that is none of its."""
    begin_run(1)
    app = make_client_app(
        lambda context: ring_app.network(), ring_app.part, mods=[fixedclipping_mod]
    )
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    question = Message(RecordDict({CONFIG: ConfigRecord({ASK: ASK_STATUS})}), 1, "query.socflower")
    reply = app(question, context)
    assert NodeStatus.decode(reply.content.config_records[STATUS]) == NodeStatus()


def test_a_group_that_has_left_is_no_fault_of_the_mod() -> None:
    begin_run(1)

    def leaves(message: Message, context: Context) -> Message:
        assert {GROUP, DEPARTURES} <= set(message.content.config_records)
        return Message(RecordDict({"outcome": ConfigRecord({"answers": False})}), reply_to=message)

    mod = adapt_mod(fixedclipping_mod)
    records = {
        "arrays": ring_app.initial(),
        CONFIG: ConfigRecord({"clipping_norm": 1.0}),
        GROUP: ConfigRecord(),
        DEPARTURES: ConfigRecord(),
    }
    message = Message(RecordDict(records), 1, "train")
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = mod(message, context, leaves)
    assert reply.has_content() and "outcome" in reply.content
    assert set(message.content) == set(records)


def test_other_mods_are_left_as_they_are() -> None:
    for mod in (message_size_mod, arrays_size_mod, secagg_mod, ring_app.disturbed):
        assert adapt_mod(mod) is mod


def test_no_record_of_ours_has_an_empty_value_that_need_not_be_there() -> None:
    """Flower's mod for the sizes of messages raises IndexError over one."""
    task = GroupTask(
        group_id=0,
        num_groups=1,
        members=(0,),
        leader=0,
        partitions=(0,),
        num_partitions=1,
        capacities=(1.0,),
        first_step=0,
        num_steps=1,
        steps_per_epoch=1,
        total_steps=1,
        batch_size=1,
        reshuffle=True,
        deal_epoch=0,
        seed=1,
        num_samples=1,
    )
    ring = RingTask(
        participant=0,
        leader=0,
        addresses=("a:1",),
        token="0a",
        transport="grpc",
        heartbeat_s=1.0,
        rendezvous_s=1.0,
    )
    outcome = RingOutcome(outcome="completed", members=(0,), num_steps=1, answers=True)
    for values in (task, ring, outcome, NodeStatus(), HeatReport()):
        record = ConfigRecord(
            {key: value for key, value in encode(values).items() if value is not None}
        )
        assert record.count_bytes() > 0
    for values in (task, ring, outcome, NodeStatus()):
        assert decode(type(values), encode(values), "it") == values
    refused(
        lambda: decode(
            RingOutcome,
            {"outcome": "completed", "members": [0], "num-steps": 1, "what": 1},
            "outcome",
        ),
        "answers",
        "met_samples",
        "what",
    )
