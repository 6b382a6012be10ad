"""Torch's global random generators, shared by all threads of a process; a lock gives one thread exclusive use.

Layers draw their initial weights and their masks from them. Without a lock, a thread that seeds or restores a generator
changes the numbers that another thread draws at the same time.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.model_graph.torch_device import accelerator

_LOCK = threading.RLock()

_P = ParamSpec("_P")
_T = TypeVar("_T")


def seed_generators(seed: int) -> None:
    """Seed the CPU's generator, and those of an accelerator that is in use, as `torch.manual_seed` does.

    For each kind of device that is not in use yet, `torch.manual_seed` formats a stack trace and keeps the seed for
    later: it takes longer than a small layer, and memory at every call.
    """
    torch.default_generator.manual_seed(seed)
    for module in _in_use():
        seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed
        seed_all(seed)


def _in_use() -> Iterator[Any]:
    """Yield the module of the accelerator, if there is one and this process uses it."""
    device = accelerator()
    if device is not None:
        module = getattr(torch, device.type)
        # After a fork, a process must not use the accelerator of its parent.
        if getattr(module, "is_initialized", lambda: True)():
            yield module


class RandomState:
    """The states of torch's global generators at this moment: the CPU's, and those of an accelerator in use."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self._others = [(module, _device_states(module)) for module in _in_use()]

    @property
    def accelerators(self) -> list[torch.Tensor]:
        """The states of an accelerator's generators, as bytes; empty if none is in use."""
        return [state for _, states in self._others for state in states]

    def restore(self) -> None:
        """Set the generators to these states, once no other thread uses them exclusively."""
        with _LOCK:
            torch.set_rng_state(self.cpu)
            for module, states in self._others:
                for index, state in enumerate(states):
                    module.set_rng_state(state, *_index_of(module, index))


def generator_states() -> dict[str, NDArray[Any]]:
    """Return the states of the global generators of torch, NumPy and `random`, which any process can restore."""
    state = RandomState()
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    assert (kind, version) == ("MT19937", 3)
    return {
        "torch": state.cpu.numpy(),
        **{f"torch-{index}": each.numpy() for index, each in enumerate(state.accelerators)},
        "numpy": np.asarray(key),
        "numpy-position": np.array([position, has_gauss]),
        "numpy-gauss": np.array([gauss]),
        "python": np.array(words),
        "python-gauss": np.array([] if next_gauss is None else [next_gauss]),
    }


def same_states(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether two results of `generator_states` are the same states."""
    return one.keys() == other.keys() and all(map(np.array_equal, one.values(), other.values()))


def restore_generators(states: Mapping[str, NDArray[Any]]) -> None:
    """Restore states from `generator_states`; `KeyError` names a state that is missing.

    An accelerator that is not in use yet is left alone, since the app seeds it.
    """
    position, has_gauss = map(int, states["numpy-position"])
    with _LOCK:
        torch.set_rng_state(torch.from_numpy(states["torch"]))
        for module in _in_use():
            for index in range(module.device_count()):
                if (saved := states.get(f"torch-{index}")) is not None:
                    module.set_rng_state(torch.from_numpy(saved), *_index_of(module, index))
        np.random.set_state(
            ("MT19937", states["numpy"], position, has_gauss, float(states["numpy-gauss"][0]))
        )
        gauss = states["python-gauss"].tolist()
        random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))


def _device_states(module: Any) -> list[torch.Tensor]:
    count = module.device_count()
    return [module.get_rng_state(*_index_of(module, index)) for index in range(count)]


def _index_of(module: Any, index: int) -> tuple[int, ...]:
    """Return the argument that chooses a generator; mps has a single one."""
    return () if module is torch.mps else (index,)


@contextmanager
def forked_generator(seed: int | None = None) -> Iterator[None]:
    """Use the global generators exclusively, seeded with `seed` if given; their states are restored at exit.

    Code inside must not wait for another thread that forks.
    """
    with _LOCK:
        before = RandomState()
        try:
            if seed is not None:
                seed_generators(seed)
            yield
        finally:
            before.restore()


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

    No other thread forks the generator meanwhile. Afterwards the generator keeps the state that the function left.
    """
    with _LOCK:
        return build(*args, **kwargs)


@contextmanager
def own_random_state(*key: int) -> Iterator[None]:
    """Draw torch's random numbers (dropout masks) from a seed made of the integers in `key`; restore the state at exit.

    With a key of seed, group and first step, an interval of training is reproducible in any process. Ring members wait
    for each other, so they cannot hold the lock: members in threads of one process draw in varying order.
    """
    with _LOCK:
        before = RandomState()
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
        # torch keeps the seed for an accelerator that is first used in the context.
        seed_generators(seed) if accelerator() is None else torch.manual_seed(seed)
    try:
        yield
    finally:
        before.restore()
