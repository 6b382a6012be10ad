"""A quorum of groups of real machines: the grid returns without a late group, and has its answer in a later round."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from socflower.errors import NodesLost
from socflower.hierarchy import Quorum
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.reply_events import ARRIVED, LATE, LATE_DROPPED
from socflower.strategies.round import new_token
from socflower.wire.message_keys import (
    COMPLETED,
    LEFT_OUT,
    NO_MODEL,
    OUTCOME,
    GroupTask,
    RingOutcome,
    RingTask,
    decode,
    encode,
)
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app
from tests.strategies.fake_messages import FakeGrid, answer, model, values
from tests.strategies.ring_app import mark_of

pytestmark = pytest.mark.timeout(300)

SLOW, NUM_ROUNDS = 2, 4
PARTITION = 0  # of the slow SoC: the nodes' order is the reverse


def trained(folder: Path, *, late_rounds: int, **of_slow: str) -> list[list[tuple[str, int]]]:
    """Return the events of late groups in four rounds, in which SoC 2 begins round 1 when SoC 1 is in round 3."""
    on = ring_app.cluster(1, 3)
    strategy = ring_app.strategy(
        on,
        3,
        num_epochs=NUM_ROUNDS,
        quorum=Quorum(fraction=0.5, grace_s=0.1, late_rounds=late_rounds),
        tolerate_client_errors=True,
    )
    # In the last round the others wait for the late group.
    last = {"waits-for": f"{PARTITION}.1.trained", "disturbed-round": NUM_ROUNDS}
    configs = ring_app.node_configs(
        on, {0: last, 1: last, SLOW: {"waits-for": "1.3.asked", **of_slow}}
    )
    with ProcessGrid(ring_app.client_app, configs, run_config={"ledger": str(folder)}) as grid:
        result = strategy.start(
            GroupGrid(grid), ring_app.initial(), num_rounds=strategy.num_rounds, timeout=60
        )
    assert result.arrays
    return [
        [
            (event.kind, event.group_id)
            for event in report.events
            if event.kind in (LATE, ARRIVED, LATE_DROPPED, "no-reply", "replanned")
        ]
        for report in strategy.reports
    ]


def test_a_late_group_counts_when_it_arrives_and_gets_no_work_before(tmp_path: Path) -> None:
    events = trained(tmp_path, late_rounds=10)
    assert events[:2] == [[(LATE, SLOW)], []]
    # It begins in round 3; whether it ends in it depends on the machine.
    later = [event for each in events[2:] for event in each]
    assert later.count((ARRIVED, SLOW)) == 1
    assert not mark_of(tmp_path, PARTITION, 2, "asked").exists()
    assert not mark_of(tmp_path, PARTITION, 3, "asked").exists()


@pytest.mark.slow
def test_a_late_group_that_dies_is_dropped(tmp_path: Path) -> None:
    mark_of(tmp_path, PARTITION, 1, "trained").touch()
    events = trained(tmp_path, late_rounds=10, **{"dies-in": "rendezvous"})
    assert events[0] == [(LATE, SLOW)]
    assert (LATE_DROPPED, SLOW) in [event for each in events[2:] for event in each]


@pytest.mark.slow
def test_groups_that_miss_too_many_rounds_are_planned_without(tmp_path: Path) -> None:
    events = trained(tmp_path, late_rounds=1)
    assert events[:2] == [[(LATE, SLOW)], [(LATE_DROPPED, SLOW)]]
    assert ("replanned", 0) in events[2]


class Refusing(FakeGrid):
    """Two nodes whose ring does not form in the first attempts, since others' work is on them."""

    def __init__(self, num_refusals: int, without_leader: str = LEFT_OUT) -> None:
        super().__init__((0, 1))
        self._without_leader = without_leader
        self.tokens: list[str] = []
        self._num_refusals = num_refusals

    def send_and_receive(self, messages: Iterable[Message]) -> list[Message]:
        return [self._reply(message) for message in messages]

    def _reply(self, message: Message) -> Message:
        ring = decode(RingTask, message.content.config_records["ring"], "ring")
        if ring.token not in self.tokens:
            self.tokens.append(ring.token)
        is_formed, leads = len(self.tokens) > self._num_refusals, ring.participant == ring.leader
        outcome = RingOutcome(
            outcome=COMPLETED if is_formed else LEFT_OUT if leads else self._without_leader,
            members=(0, 1),
            num_steps=3,
            answers=is_formed and leads,
        )
        assert ("arrays" in message.content) == leads
        reply = answer(message, 1.0)
        if not (is_formed and leads):
            del reply.content["arrays"]
        reply.content[OUTCOME] = ConfigRecord(encode(outcome))
        return reply


def members() -> list[Message]:
    """The messages of a ring of two."""
    task = GroupTask(
        **dict.fromkeys(("group_id", "first_step", "deal_epoch", "seed"), 0),
        **dict.fromkeys(("num_steps", "steps_per_epoch", "total_steps"), 3),
        **{"num_groups": 1, "members": (0, 1), "leader": 0, "partitions": (0, 1)},
        **{"num_partitions": 2, "capacities": (1.0, 1.0), "batch_size": 16, "num_samples": 48},
        reshuffle=True,
    )
    token = new_token()
    sent = []
    for participant in (0, 1):
        ring = RingTask(
            participant=participant,
            leader=0,
            addresses=("127.0.0.1:1", "127.0.0.1:2"),
            token=token,
            transport="grpc",
            heartbeat_s=5.0,
            rendezvous_s=60.0,
        )
        content = RecordDict(
            {"group": ConfigRecord(task.encode()), "ring": ConfigRecord(encode(ring))}
        )
        if participant == 0:
            content["arrays"] = model()
        sent.append(Message(content, participant, "train"))
    return sent


@pytest.mark.parametrize("without_leader", [LEFT_OUT, NO_MODEL])
@pytest.mark.parametrize("num_refusals", [0, 1, 2])
def test_a_group_without_a_model_is_asked_again_with_all_who_answered(
    num_refusals: int, without_leader: str
) -> None:
    """As where each of two runs had one of the nodes, so that neither ring could form."""
    grid = Refusing(num_refusals, without_leader)
    (reply,) = GroupGrid(grid).send_and_receive(members(), timeout=60.0)
    assert values(reply.content["arrays"]) == [1.0] * 3
    assert len(grid.tokens) == 1 + num_refusals


def test_a_group_that_never_forms_is_lost() -> None:
    with pytest.raises(NodesLost):
        GroupGrid(Refusing(9)).send_and_receive(members(), timeout=60.0)
