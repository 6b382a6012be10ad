"""Groups of real processes with real rings, against the same groups in one process."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from socflower.sim.local_grid import LocalGrid
from socflower.sim.process_grid import ProcessGrid
from tests.strategies import ring_app

pytestmark = pytest.mark.timeout(180)


def train(grid: Any, *, norm: bool = False, **changes: Any) -> tuple[ArrayRecord, Any]:
    strategy = ring_app.strategy(ring_app.cluster(), **changes)
    result = strategy.start(grid, ring_app.initial(norm=norm), num_rounds=strategy.num_rounds, timeout=120)
    return result.arrays, strategy


def in_one_process(*, norm: bool = False, **changes: Any) -> ArrayRecord:
    with LocalGrid(ring_app.client_app(), 4, run_config={"norm": norm}, num_workers=0) as grid:
        return train(grid, norm=norm, **changes)[0]


def on_processes(*, norm: bool = False, **changes: Any) -> tuple[ArrayRecord, Any]:
    with ProcessGrid(ring_app.client_app, ring_app.node_configs(ring_app.cluster()),
                     run_config={"norm": norm}) as grid:
        return train(grid, norm=norm, **changes)


def assert_close(ours: ArrayRecord, reference: ArrayRecord, tolerance: float = 1e-5) -> None:
    for name in reference:
        np.testing.assert_allclose(ours[name].numpy(), reference[name].numpy(), atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_a_ring_of_processes_trains_what_one_process_does(transport: str) -> None:
    ours, strategy = on_processes(rings={"transport": transport}, overlap_buckets=2)
    assert strategy.transport == transport
    assert [event.text for report in strategy.reports for event in report.events] == []
    assert_close(ours, in_one_process())


def test_members_keep_their_own_batch_norm_statistics_within_an_interval() -> None:
    ours, _ = on_processes(norm=True)
    assert_close(ours, in_one_process(norm=True), tolerance=1e-4)


def test_data_that_stay_are_not_asked_of_others() -> None:
    ours, _ = on_processes(reshuffle=False)
    assert_close(ours, in_one_process(reshuffle=False))


def test_split_groups_that_take_turns_train_the_same() -> None:
    """Three SoCs a board and groups of two: the group in the middle is split over both boards."""
    changes: dict[str, Any] = {"num_groups": 2}
    ours, _ = on_processes(**changes)
    assert_close(ours, in_one_process(**changes))
