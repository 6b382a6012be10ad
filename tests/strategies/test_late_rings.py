"""A quorum of groups of real machines: the grid returns without a late group, and has its answer in a later round."""

from pathlib import Path

import pytest

from socflower.hierarchy import Quorum
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.reply_events import ARRIVED, LATE, LATE_DROPPED
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app
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


def test_a_late_group_that_dies_is_dropped(tmp_path: Path) -> None:
    mark_of(tmp_path, PARTITION, 1, "trained").touch()
    events = trained(tmp_path, late_rounds=10, **{"dies-in": "rendezvous"})
    assert events[0] == [(LATE, SLOW)]
    assert (LATE_DROPPED, SLOW) in [event for each in events[2:] for event in each]


def test_groups_that_miss_too_many_rounds_are_planned_without(tmp_path: Path) -> None:
    events = trained(tmp_path, late_rounds=1)
    assert events[:2] == [[(LATE, SLOW)], [(LATE_DROPPED, SLOW)]]
    assert ("replanned", 0) in events[2]
