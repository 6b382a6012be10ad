"""C++ kernels of socflower. Arrays are C-contiguous float32 buffers of any byte alignment and any shape.

Anything else raises `ValueError` with the offending argument and numbers. The lock is released while computing.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

_Float32s: TypeAlias = NDArray[Any] | Buffer

def weighted_sum_into(
    out: _Float32s, inputs: Sequence[_Float32s], weights: Sequence[float]
) -> None:
    """Write sum_k weights[k] * inputs[k] into `out`, in double, in the order of the inputs.

    `out` must be writable, as long as every input, and share memory with none of them.
    """

def weighted_sum_bytes(
    prefix: bytes, inputs: Sequence[_Float32s], weights: Sequence[float]
) -> bytes:
    """Return `prefix` followed by the weighted sum as float32, as one bytes object made without a copy."""

def first_non_finite(x: _Float32s) -> int:
    """Return the flat index of the first NaN or infinity in `x`, or -1."""

def all_finite(x: _Float32s) -> bool:
    """Return whether `x` holds neither NaN nor infinity."""
