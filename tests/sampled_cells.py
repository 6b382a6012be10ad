"""A few cells of a matrix of tests that would take hours; `make test-matrix` runs all of them."""

import os
import random
from collections.abc import Iterable
from typing import TypeVar

Cell = TypeVar("Cell")

NUM_SAMPLED = 12


def sampled(cells: Iterable[Cell], count: int = NUM_SAMPLED) -> list[Cell]:
    """Return `count` of the cells in their order, the same in every process; all of them if `SOCFLOWER_CELLS=all`.

    `SOCFLOWER_CELLS` may be a number too, which draws other cells.
    """
    found = list(cells)
    wanted = os.environ.get("SOCFLOWER_CELLS", "0")
    if wanted == "all" or len(found) <= count:
        return found
    drawn = sorted(random.Random(int(wanted)).sample(range(len(found)), count))
    return [found[at] for at in drawn]
