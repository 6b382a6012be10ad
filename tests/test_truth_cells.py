"""Cells of `bench truth` are what their seed says, can be planned, and come back from a document."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import from_json
from benchmarks.truth_cells.cell import FEDERATED, GROUPS, ONE_RING, draw_cells
from benchmarks.truth_cells.prediction import Constants, plan_of, predict, sleeping
from benchmarks.truth_cells.resident import Cell


@given(seed=st.integers(0, 10**9), count=st.integers(1, 30))
def test_a_cell_depends_on_its_seed_and_number_alone(seed: int, count: int) -> None:
    cells = draw_cells(count, seed)
    assert cells == draw_cells(count + 5, seed)[:count]
    assert [cell.sleeps for cell in cells] == [number % 2 == 0 for number in range(count)]
    for cell in cells:
        assert from_json(Cell, json.loads(json.dumps(asdict(cell)))) == cell
        assert 2 <= cell.num_socs <= 6
        assert cell.num_groups == {ONE_RING: 1, FEDERATED: cell.num_socs}.get(
            cell.strategy, cell.num_groups
        )
        assert (
            cell.strategy != GROUPS
            or 1 < cell.num_groups < cell.num_socs
            or cell.num_socs == cell.num_groups == 2
        )


def test_seeds_differ_and_all_there_is_is_drawn() -> None:
    cells = draw_cells(400, 1)
    assert cells != draw_cells(400, 2)
    for key in (
        "slots_per_board",
        "soc_mbit_per_s",
        "model",
        "strategy",
        "leaders",
        "transport",
        "overlap_buckets",
        "in_turn",
    ):
        assert len({getattr(cell, key) for cell in cells}) > 1, key


@pytest.mark.parametrize("number", range(0, 12, 4))
def test_a_cell_that_sleeps_is_predicted_from_what_was_drawn(number: int) -> None:
    cell = draw_cells(12, 5)[number]
    prediction = predict(cell, sleeping(cell), Constants.none())
    assert (
        prediction.plan.groups == plan_of(cell).groups
        and len(prediction.plan.groups) == cell.num_groups
    )
    assert prediction.steps_s > 0.0 and (prediction.synchronisation_s > 0.0) == (
        cell.num_groups > 1
    )
    slowest_s = max(sleeping(cell).step_s.values())
    assert prediction.seconds >= 2 * prediction.interval.num_steps * slowest_s
