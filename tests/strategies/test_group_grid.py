"""GroupGrid around real rings: what happens in a round is the same with any strategy around SoCFlow, and without one.

Nodes kill themselves at a step, so that a run can be repeated to the bit.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import TrainingFailed
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.group_replies import make_notes
from socflower.strategies.node_registry import QUERY_TYPE
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import (
    ASK,
    ASK_STATUS,
    CONFIG,
    NOTES,
    STATUS,
    RoundNotes,
    decode,
    encode,
)
from tests.one_line import refused
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app
from tests.strategies.test_around import PassingOn, private

pytestmark = pytest.mark.timeout(900)

Around = Callable[[SoCFlow], Strategy]
LEADER, OTHER_LEADER, MEMBER = 0, 2, 1
NOBODY: Mapping[int, str] = {}


class Trained(NamedTuple):
    arrays: ArrayRecord
    events: list[list[tuple[str, str]]]  # of each round, seconds left out
    strategy: SoCFlow


def alone(strategy: SoCFlow) -> Strategy:
    return strategy


def itself(grid: Grid) -> Grid:
    return grid


def train(
    dies_in: Mapping[int, str] = NOBODY,
    around: Around = alone,
    wrap: Callable[[Grid], Grid] = GroupGrid,
    *,
    boards: int = 2,
    socs_per_board: int = 2,
    num_groups: int = 2,
    states: Path | None = None,
    **changes: Any,
) -> Trained:
    """Train two rounds, in the first of which SoCs die in a phase."""
    on = ring_app.cluster(boards, socs_per_board)
    # Where all come to the rendezvous, a new process on a busy machine gets time for it.
    rendezvous_s = 4.0 if "rendezvous" in dies_in.values() else 60.0
    strategy = ring_app.strategy(
        on,
        num_groups,
        num_epochs=1,
        interval_epochs=0.5,
        tolerate_client_errors=True,
        rings={"heartbeat_s": 4.0, "rendezvous_s": rendezvous_s, "leader_grace_s": 3.0},
        **changes,
    )
    configs = ring_app.node_configs(on, {soc: {"dies-in": phase} for soc, phase in dies_in.items()})
    with ProcessGrid(
        ring_app.client_app, configs, run_config={"states": str(states)} if states else None
    ) as grid:
        result = around(strategy).start(
            wrap(grid), ring_app.initial(), num_rounds=strategy.num_rounds, timeout=60
        )
    # When a new process of a dead node is there depends on the machine.
    return Trained(
        result.arrays,
        [
            [
                (event.kind, re.sub(r"\d+\.\d+ s", "_ s", event.text))
                for event in report.events
                if event.kind != "returned"
            ]
            for report in strategy.reports
        ],
        strategy,
    )


@functools.cache
def undisturbed() -> Trained:
    """Return what comes of a training in which nobody dies and no strategy is around SoCFlow."""
    return train()


def kinds(trained: Trained, server_round: int, group_id: int) -> set[str]:
    return {
        event.kind
        for event in trained.strategy.reports[server_round - 1].events
        if event.group_id == group_id
    }


def assert_same(ours: Trained, reference: Trained, tolerance: float = 0.0) -> None:
    assert ours.events == reference.events
    for name in reference.arrays:
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), reference.arrays[name].numpy(), atol=tolerance, rtol=0.0
        )


# ----------------------------------------------------------------------------------------------- around SoCFlow
@pytest.mark.parametrize("around", [private, pytest.param(PassingOn, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dies_in",
    [
        pytest.param(NOBODY, id="nobody dies"),
        pytest.param({LEADER: "mid-batch"}, id="the leader dies mid-batch"),
        pytest.param(
            {LEADER: "synchronisation"},
            marks=pytest.mark.slow,
            id="the leader dies before it replies",
        ),
        pytest.param(
            {LEADER: "rendezvous"}, marks=pytest.mark.slow, id="the leader dies before its ring"
        ),
    ],
)
def test_strategies_around_it_train_the_same_and_tell_the_same(
    dies_in: Mapping[int, str], around: Around
) -> None:
    """Differential privacy computes old + (new - old), which is rounded.

    Within another strategy leaders meet at the hub, so they do without one too: in a ring they would miss who is lost.
    """
    reference = train(dies_in, leaders="star") if dies_in else undisturbed()
    assert_same(train(dies_in, around), reference, tolerance=1e-6 if around is private else 0.0)
    assert bool(reference.events[0]) == bool(dies_in)
    told = {
        "mid-batch": {"member-lost", "ring-formed-again"},
        "synchronisation": {"leader-lost"},
        "rendezvous": {"member-lost"},
    }
    assert all(told[phase] <= kinds(reference, 1, 0) for phase in dies_in.values()) and not kinds(
        reference, 1, 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("around", [alone, PassingOn, private])
def test_a_leader_and_a_member_that_die_at_once_leave_the_work_to_the_others(
    around: Around,
) -> None:
    ours = train(
        {LEADER: "mid-batch", MEMBER: "mid-batch"}, around, boards=1, socs_per_board=4, num_groups=1
    )
    undisturbed = train(boards=1, socs_per_board=4, num_groups=1)
    assert {"member-lost", "ring-formed-again"} <= kinds(ours, 1, 0)
    for name in undisturbed.arrays:
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), undisturbed.arrays[name].numpy(), atol=1e-4, rtol=1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize("around", [alone, PassingOn, private])
def test_leaders_of_two_groups_that_die_before_they_reply_are_replaced(around: Around) -> None:
    ours = train({LEADER: "synchronisation", OTHER_LEADER: "synchronisation"}, around)
    assert "leader-lost" in kinds(ours, 1, 0) and "leader-lost" in kinds(ours, 1, 1)
    assert ours.strategy.reports[0].without_state == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("around", [alone, PassingOn])
def test_a_training_is_resumed_inside_another_strategy(tmp_path: Path, around: Around) -> None:
    """Round 1 is trained once, and its state found again, by a strategy that counts from 1 itself."""
    unbroken = train(states=tmp_path)
    # Of the end of round 2.
    for later in tmp_path.glob("*/*-at-20.state"):
        later.unlink()
    kept: list[ArrayRecord] = []
    on = ring_app.cluster()
    for done in (0, 1):
        strategy = ring_app.strategy(on, num_epochs=1, interval_epochs=0.5)
        strategy.resume_from(done)
        with ProcessGrid(
            ring_app.client_app, ring_app.node_configs(on), run_config={"states": str(tmp_path)}
        ) as grid:
            result = around(strategy).start(
                GroupGrid(grid),
                kept[0] if done else ring_app.initial(),
                num_rounds=2,
                timeout=60,
                evaluate_fn=strategy.skip_done_rounds(
                    lambda number, arrays: kept.append(arrays) if number == 1 else None
                ),
            )
        assert [report.server_round for report in strategy.reports] == [1, 2][done:]
    assert len(kept) == 1
    assert_same(Trained(result.arrays, [[], []], strategy), unbroken)


# ------------------------------------------------------------------------------------------------ another grid
@pytest.mark.parametrize(
    "around",
    [
        alone,
        pytest.param(PassingOn, marks=pytest.mark.slow),
        pytest.param(private, marks=pytest.mark.slow),
    ],
)
def test_over_any_other_grid_it_trains_the_same_and_says_what_it_lacks(
    around: Around, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="flwr"):
        ours = train(around=around, wrap=itself)
    assert_same(ours, undisturbed(), tolerance=1e-6 if around is private else 0.0)
    assert caplog.text.count("strategy.start(GroupGrid(grid), ...)") == 1


@pytest.mark.parametrize("around", [alone, pytest.param(PassingOn, marks=pytest.mark.slow)])
def test_over_any_other_grid_a_group_without_its_leader_loses_its_round(around: Around) -> None:
    ours = train({LEADER: "synchronisation"}, around, itself)
    assert "no-reply" in kinds(ours, 1, 0) and not kinds(ours, 1, 1)
    assert [report.server_round for report in ours.strategy.reports] == [1, 2]
    assert "no-reply" not in kinds(ours, 2, 0)
    assert ours.strategy.reports[0].without_state == (0,)


@pytest.mark.slow
def test_over_any_other_grid_differential_privacy_keeps_a_round_with_a_death_back_and_the_training_ends() -> (
    None
):
    refused(
        lambda: train({LEADER: "synchronisation"}, private, itself),
        "SoCFlow",
        "GroupGrid",
        "round 1",
        error=TrainingFailed,
    )


def test_a_grid_around_itself_changes_nothing() -> None:
    assert_same(train(wrap=lambda grid: GroupGrid(GroupGrid(grid))), undisturbed())


# ------------------------------------------------------------------------------------- messages and their notes
def test_other_messages_pass_among_those_of_rings_and_of_two_strategies() -> None:
    """Both strategies have groups 0 and 1; a status query is answered as by any grid."""
    on = ring_app.cluster()
    with ProcessGrid(ring_app.client_app, ring_app.node_configs(on)) as grid:
        first, second = (ring_app.strategy(on, num_epochs=1, interval_epochs=0.5) for _ in range(2))
        sent = [
            message
            for strategy in (first, second)
            for message in strategy.configure_train(
                1, ring_app.initial(), ConfigRecord(), GroupGrid(grid)
            )
        ]
        query = Message(
            RecordDict({CONFIG: ConfigRecord({ASK: ASK_STATUS})}),
            grid.get_node_ids()[0],
            QUERY_TYPE,
        )
        replies = GroupGrid(grid).send_and_receive([query, *sent], timeout=60)
    assert [NOTES in reply.content.config_records for reply in replies] == [True] * 4 + [False]
    assert STATUS in replies[-1].content.config_records
    assert [reply.content["metrics"]["socflower-group"] for reply in replies[:4]] == [0, 1, 0, 1]
    for strategy, own in ((first, replies[:2]), (second, replies[2:4])):
        assert strategy.aggregate_train(1, own)[0] is not None and strategy.reports[0].events == ()


EVENTS = st.lists(
    st.builds(
        ReplyEvent,
        kind=st.sampled_from(["member-lost", "preempted"]),
        group_id=st.integers(0, 9),
        text=st.text(max_size=9),
    ),
    max_size=3,
)


@given(EVENTS, EVENTS, st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_notes_travel_in_a_record_and_add_up(
    events: list[ReplyEvent], others: list[ReplyEvent], away: set[int], replaced: set[int]
) -> None:
    first, second = make_notes(events, away), make_notes(others, (), replaced)
    both = decode(RoundNotes, encode(first), "notes") + decode(RoundNotes, encode(second), "notes")
    assert both == make_notes([*events, *others], away, replaced)
    assert both + RoundNotes() == both == RoundNotes() + both


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"kinds": ["member-lost"], "groups": [0]}, "1 kinds, 1 groups and 0 texts"),
        ({"what": 1}, "what"),
    ],
)
def test_notes_that_are_damaged_or_foreign_are_refused(record: dict[str, Any], fault: str) -> None:
    refused(lambda: decode(RoundNotes, record, "notes"), fault)
