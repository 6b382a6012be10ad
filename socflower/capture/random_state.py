"""Torch's global random generator, which all threads of a process share: who needs it for a while is alone with it.

Layers draw their first weights and their masks from it, whatever a caller would like. Without a lock a thread that
seeds it, or puts it back to where it was, changes what another thread draws meanwhile.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import numpy as np
import torch

_ALONE = threading.RLock()

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextmanager
def forked_generator(seed: int | None = None, *, cuda: Sequence[int | torch.device] = ()) -> Iterator[None]:
    """Be alone with the global generator; afterwards it stands where it stood. With a seed it begins there within.

    `cuda` are devices whose generators are put back, too. Code within must not wait for a thread that forks as well.
    """
    with _ALONE, torch.random.fork_rng(devices=list(cuda)):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def built_alone(build: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what a user's function builds, which may seed the global generator and draw weights from it.

    No other thread forks the generator meanwhile; what the function leaves of it, stays.
    """
    with _ALONE:
        return build(*args, **kwargs)


@contextmanager
def own_random_state(*key: int) -> Iterator[None]:
    """Draw torch's random numbers (dropout's, say) from a seed of the whole numbers in `key`, and leave no trace.

    With a key of seed, group and first step an interval of training repeats alone, in any process. The generator is the
    process's, and members of a ring wait for each other: in threads of one process their masks depend on who was first.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        yield
