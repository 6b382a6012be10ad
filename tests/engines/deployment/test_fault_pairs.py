"""Pairs of faults on racks of real processes; `python -m benchmarks fault-pairs` runs all cells."""

from collections import Counter
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest

from benchmarks.fault_pairs import outcomes_of
from benchmarks.fault_rack.cells import (
    FOLLOWING,
    GROUPS,
    KINDS,
    Cell,
    matrix,
    random_cells,
)
from tests.sampled_cells import sampled
from tests.testbed.testbed import missing


def test_the_matrix_has_each_pair_of_each_training_once_for_each_timing() -> None:
    cells = list(matrix())
    assert max(Counter(cell.name for cell in cells).values()) == 1
    for training, kinds in KINDS.items():
        own = [cell for cell in cells if cell.training == training]
        for timing in {cell.timing for cell in own}:
            found = {
                tuple(fault.kind for fault in cell.faults) for cell in own if cell.timing == timing
            }
            pairs = (
                product(kinds, repeat=2)
                if timing == FOLLOWING
                else combinations_with_replacement(kinds, 2)
            )
            # The others are those of two groups.
            assert found == {
                pair for pair in pairs if training == GROUPS or {*pair} - {*KINDS[GROUPS]}
            }
    everything = {kind for kinds in KINDS.values() for kind in kinds}
    assert {fault.kind for cell in cells for fault in cell.faults} == everything


def test_random_cells_are_those_of_their_seed_in_order_of_time() -> None:
    cells = list(random_cells(30, 7, 40.0))
    assert cells == list(random_cells(30, 7, 40.0)) != list(random_cells(30, 8, 40.0))
    assert cells[:10] == list(random_cells(10, 7, 40.0))
    for cell in cells:
        first, second = cell.faults
        assert 0.0 <= first.at_s <= second.at_s <= 40.0
    assert len({cell.name for cell in cells}) == 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.skip(reason)
    return tmp_path_factory.mktemp("cells")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", sampled(matrix()), ids=lambda cell: cell.name)
def test_a_run_survives_a_pair_of_faults(cell: Cell, folder: Path) -> None:
    (outcome,) = outcomes_of([cell], folder, 1)
    assert outcome.ok, outcome
