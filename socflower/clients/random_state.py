"""Torch's random numbers of one session of training, apart from all others."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_random_state(*key: int) -> Iterator[None]:
    """Draw torch's random numbers (dropout's, say) from a seed of the whole numbers in `key`, and leave no trace.

    With a key of seed, group and first step an interval of training repeats alone, in any process. The generator is the
    process's, and members of a ring wait for each other: in threads of one process their masks depend on who was first.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        yield
