"""Torch's global random generator, shared by all threads of a process; a lock gives one thread exclusive use.

Layers always draw their initial weights and their masks from it. Without a lock, a thread that seeds or restores it
changes the numbers that another thread draws at the same time.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import ParamSpec, TypeVar

import numpy as np
import torch

_LOCK = threading.RLock()

_P = ParamSpec("_P")
_T = TypeVar("_T")


def seed_generators(seed: int) -> None:
    """Seed the generators of this process as `torch.manual_seed` does.

    Without an accelerator only the CPU's is seeded: torch would format a stack trace for each kind of device that has
    not been used yet, which takes longer than a small layer.
    """
    if _accelerated():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _accelerated() -> bool:
    """Whether another generator than the CPU's may be drawn from; torch before 2.6 does not tell."""
    return not hasattr(torch, "accelerator") or torch.accelerator.is_available()


@contextmanager
def forked_generator(seed: int | None = None, *, cuda: Sequence[int | torch.device] = ()) -> Iterator[None]:
    """Use the global generator exclusively, seeded with `seed` if given; its state is restored at exit.

    The generators of the devices in `cuda` are restored too. Code inside must not wait for another thread that forks.
    """
    with _LOCK, torch.random.fork_rng(devices=list(cuda)):
        if seed is not None:
            seed_generators(seed)
        yield


@contextmanager
def forked_generators(seed: int | None = None) -> Iterator[None]:
    """Like `forked_generator`, for the global generators of torch, NumPy and `random`, all seeded with `seed`."""
    with forked_generator(seed):
        numpy_state, python_state = np.random.get_state(), random.getstate()
        if seed is not None:
            np.random.seed(seed)
            random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def build_exclusively(build: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a user's function, which may seed the global generator and draw weights from it.

    No other thread forks the generator meanwhile; the state in which the function leaves it is kept.
    """
    with _LOCK:
        return build(*args, **kwargs)


@contextmanager
def own_random_state(*key: int) -> Iterator[None]:
    """Draw torch's random numbers (dropout masks) from a seed made of the integers in `key`; restore the state at exit.

    With a key of seed, group and first step, an interval of training is reproducible in any process. The generator is
    shared by the process, and ring members wait for each other: as threads of one process they draw in varying order.
    """
    with _LOCK:
        before = torch.get_rng_state()
        seed_generators(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
    try:
        yield
    finally:
        restore_generator(before)


def restore_generator(state: torch.Tensor) -> None:
    """Set the state of the CPU's generator, while no other thread uses it exclusively."""
    with _LOCK:
        torch.set_rng_state(state)
