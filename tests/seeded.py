"""Modules whose first weights are the same in every run and every thread."""

from collections.abc import Callable
from typing import TypeVar

from socflower.model_graph.random_state import forked_generator

T = TypeVar("T")


def built(make: Callable[[], T], seed: int) -> T:
    """Return what `make` builds from torch's global generator, seeded; the generator stands afterwards where it stood.

    Threads that build at the same time take turns.
    """
    with forked_generator(seed):
        return make()
