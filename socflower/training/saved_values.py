"""The states of optimisers and schedules as bytes that are read without running code."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from socflower.errors import ConfigError

_READABLE = (
    Tensor,
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)


def plain(value: Any) -> Any:
    """Return a state with tensors on the CPU and NumPy's numbers as Python's, in dicts, lists and tuples.

    A schedule by `np.cos` makes the learning rate a `np.float64`, which `torch.load(weights_only=True)` refuses.
    """
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Counter):
        return Counter({plain(key): count for key, count in value.items()})
    if isinstance(value, Mapping):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """Return a state that `from_bytes` reads, if `require_readable` accepts it."""
    stream = io.BytesIO()
    torch.save(plain(state), stream)
    return stream.getvalue()


def from_bytes(saved: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return what `to_bytes` has written, on the CPU."""
    return dict(torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu"))


def require_readable(state: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError`, with the first such value, for a state that can be saved but not read back."""
    try:
        from_bytes(to_bytes(state))
    except Exception as error:
        path, kind = next(_unreadable(plain(state)), ("a value", type(error)))
        raise ConfigError(
            f"{where}: its state has {path} of type {kind.__name__}, which cannot be read back; make it a "
            "number, a text or a tensor"
        ) from error


def _unreadable(value: Any, path: str = "") -> Iterator[tuple[str, type]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _unreadable(part, f"{path}[{key!r}]" if path else str(key))
    elif type(value) in (tuple, list):
        for number, part in enumerate(value):
            yield from _unreadable(part, f"{path}[{number}]")
    elif not isinstance(value, _READABLE):
        yield path or "a value", type(value)
