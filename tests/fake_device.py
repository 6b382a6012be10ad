"""An accelerator without hardware: torch takes it for one; it keeps values, and refuses the CPU's tensors as CUDA does.

Its tensors are held and computed with on the CPU, so that results have the bits of the CPU's; a tensor that was left on
the CPU, or not brought back, raises. Torch finds it only during tests that use the fixture `fake_device`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"

_aten = torch.ops.aten
# CUDA takes numbers, which are tensors without dimensions, from the CPU where it computes element by element.
_NOT_ELEMENTWISE = (_aten.stack.default, _aten.cat.default)


class OnFake(Tensor):
    """A tensor of the device; its values are in `held`, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnFake":
        made: OnFake = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{NAME}:0",
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnFake({self.held})"

    def tolist(self) -> Any:
        """The values, which torch gives of any device's tensor, but of no class of tensors of one's own."""
        return self.held.tolist()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its history; what is assigned takes its place."""
        return OnFake(self.held)

    @data.setter
    def data(self, value: "OnFake") -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is _aten.copy_.default:
            _held(args[0]).copy_(_held(args[1]))
            return args[0]
        if operation is _aten._to_copy.default:
            made = operation(
                _held(args[0]), **{key: value for key, value in kwargs.items() if key != "device"}
            )
            to = kwargs.get("device")
            return made if to is not None and torch.device(to).type == "cpu" else OnFake(made)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [
            each
            for each in tensors
            if not isinstance(each, OnFake) and (each.dim() or operation in _NOT_ELEMENTWISE)
        ]
        if strangers:
            raise RuntimeError(
                f"{operation}: a tensor of shape {tuple(strangers[0].shape)} on {strangers[0].device} "
                f"among those on {NAME}"
            )
        made = operation(*tree_map(_held, args), **tree_map(_held, kwargs))
        own = {id(each.held): each for each in tensors if isinstance(each, OnFake)}
        return tree_map(
            lambda value: own.get(id(value), OnFake(value)) if isinstance(value, Tensor) else value,
            made,
        )


def _held(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, OnFake) else value


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    available = False

    def is_available(self) -> bool:
        return self.available

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class FakeModule:
    """`torch.fake`: what torch and its users ask of a kind of device."""

    def __init__(self) -> None:
        self.state, self.num_synchronisations = 0, 0

    def is_available(self) -> bool:
        return _hooks.available

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        self.num_synchronisations += 1

    def manual_seed_all(self, seed: int) -> None:
        self.state = seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.tensor([self.state >> 32, self.state & 0xFFFFFFFF])

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        high, low = state.tolist()
        self.state = high << 32 | low

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_hooks, MODULE = _Hooks(), FakeModule()
_libraries: list[library.Library] = []


def _register() -> None:
    # From the first backward pass on, the number of devices with a thread of their own is fixed; here, none.
    torch.ones(1, requires_grad=True).sum().backward()
    _setup_privateuseone_for_python_backend(NAME, backend_module=MODULE, hook=_hooks)
    autocast = library.Library("_", "IMPL")
    autocast.fallback(library.fallthrough_kernel, "AutocastPrivateUse1")
    made = library.Library("aten", "IMPL")
    made.impl("linear", _autocast_linear, "AutocastPrivateUse1")
    made.impl(
        "empty.memory_format",
        lambda size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
            OnFake(
                torch.empty(
                    size, dtype=dtype, memory_format=memory_format or torch.contiguous_format
                )
            )
        ),
        "PrivateUse1",
    )
    made.impl(
        "empty_strided",
        lambda size, stride, dtype=None, layout=None, device=None, pin_memory=None: OnFake(
            torch.empty_strided(size, stride, dtype=dtype)
        ),
        "PrivateUse1",
    )
    _libraries.extend((autocast, made))


def _autocast_linear(*tensors: Tensor | None) -> Tensor:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(key):
        to = torch.get_autocast_dtype(NAME)
        made: Tensor = _aten.linear.default(
            *(None if each is None else each.to(to) for each in tensors)
        )
        return made


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an accelerator that torch finds during the test; another thread than the test's needs `in_thread`."""
    if not _libraries:
        _register()
    monkeypatch.setattr(_hooks, "available", True)
    with in_thread():
        yield f"{NAME}:0"


def in_thread() -> Any:
    """Return a context in which a backward pass runs in the present thread, whatever the device."""
    return torch.autograd.set_multithreading_enabled(False)
