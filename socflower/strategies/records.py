"""Converts Flower's ArrayRecords to NumPy arrays and back, with as few copies as possible.

A Flower `Array` carries the bytes of a .npy file: a header, then the elements. Reading them in place instead
of through `Array.numpy()`, and letting the aggregation kernel write into the reply's own bytes, means that an
aggregation costs one pass over the replies.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from socflower import _native
from socflower.cluster import ModelProfile
from socflower.hierarchy.averaging import average_tensors, averaged_by, is_native_float32
from socflower.wire.codecs.int8_weights import coded, decoded
from socflower.wire.message_keys import ARRAYS, SCALES, UNTRAINED

_NUMPY_STYPE = "numpy.ndarray"  # flwr's SType.NUMPY: `data` is a .npy file
# Of .npy version 1.0: magic, version, length of the header; sufficient for tensors.
_NPY_PREAMBLE_BYTES = 10


def array_views(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the record's arrays by name, in its order, read-only and sharing the record's memory.

    Views may start at any byte. Arrays in Fortran order, of Python objects or in another serialisation go
    through `Array.numpy()`, which copies them or raises an error that says what is wrong.
    """
    return {name: _view(array) for name, array in record.items()}


def with_weights(profile: ModelProfile, arrays: ArrayRecord) -> ModelProfile:
    """Return the profile; if only its FLOPs are known, with the arrays as its weights."""
    if profile.weight_bytes or not profile.layers:
        return profile
    views = array_views(arrays).values()
    *others, last = profile.layers
    return replace(
        profile,
        gradients=(),
        layers=(
            *others,
            replace(
                last, weight_bytes=float(sum(view.nbytes for view in views)), num_tensors=len(views)
            ),
        ),
    )


def layout_of(record: ArrayRecord) -> dict[str, tuple["np.dtype[Any]", tuple[int, ...]]]:
    """Return the record's data types and shapes, by name of the array."""
    return {name: (view.dtype, view.shape) for name, view in array_views(record).items()}


def layout_difference(layout: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the first difference between two layouts; empty if they are equal."""
    for name in [*expected, *layout]:
        if name not in layout:
            return f"it has no tensor {name!r}"
        if name not in expected:
            return f"tensor {name!r} was not sent"
        if layout[name] != expected[name]:
            (dtype, shape), (sent_dtype, sent_shape) = layout[name], expected[name]
            return f"tensor {name!r} is {dtype} of shape {shape} and was sent as {sent_dtype} of shape {sent_shape}"
    return ""


def to_array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return `arrays` as an ArrayRecord with the same bytes as `Array(ndarray)`, in one copy each."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = _serialised(array)
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class SentInt8:
    """A model as it was sent: int8 weights, their scales, and what the rounding has left out of these weights."""

    arrays: ArrayRecord
    scales: ConfigRecord
    left_out: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, model: ArrayRecord) -> "SentInt8":
        """Return a float32 model in int8."""
        views = array_views(model)
        sent, scales = coded(views)
        received = decoded(sent, scales)
        return cls(
            arrays=to_array_record(sent),
            scales=ConfigRecord(dict(scales)),
            left_out={name: views[name] - received[name] for name in scales},
        )

    def in_float32(self, reply: Message) -> Message:
        """Return a reply with its model in float32 and what was left out of the model that it began at.

        So nothing is lost for good. A reply without a model, or with one that cannot be read, stays: `fault_of` says
        what is wrong with it.
        """
        if not reply.has_content() or ARRAYS not in reply.content.array_records:
            return reply
        scales = reply.content.config_records.get(SCALES, ConfigRecord())
        try:
            views = array_views(reply.content.array_records[ARRAYS])
            model = decoded(views, cast(Mapping[str, float], scales))
            for name, rest in self.left_out.items():
                own = model.get(name)
                if own is not None and own.shape == rest.shape and own.dtype == np.float32:
                    model[name] = own + rest
        except (ValueError, TypeError, EOFError):
            return reply
        return with_model(reply, to_array_record(model))


def with_model(reply: Message, arrays: ArrayRecord) -> Message:
    """Return a reply with a model in place of its own, if it has one."""
    given = copy.copy(reply)
    given.content = RecordDict({**reply.content, ARRAYS: arrays})
    return given


def aggregate_records(replies: Sequence[ArrayRecord], weights: Sequence[float]) -> ArrayRecord:
    """Return the weighted average of the replies (F8), as computed by `hierarchy.averaging.weighted_average`.

    float32 tensors are summed directly into the bytes of the new record: nothing besides the result is allocated.
    Raises `ConfigError`, naming the tensor, if the replies differ in names, shapes or types.
    """
    return ArrayRecord(averaged_by(_average, [array_views(reply) for reply in replies], weights))


def _average(tensors: Sequence[NDArray[Any]], shares: Sequence[float]) -> Array:
    """Return the weighted average of one tensor of every reply."""
    if not is_native_float32(tensors[0]):
        return _serialised(average_tensors(tensors, shares))
    shape, dtype = tensors[0].shape, tensors[0].dtype
    contiguous = [np.ascontiguousarray(tensor) for tensor in tensors]
    return _array(
        shape, dtype, _native.weighted_sum_bytes(_npy_header(shape, dtype), contiguous, shares)
    )


def _view(array: Array) -> NDArray[Any]:
    if array.stype != _NUMPY_STYPE or (layout := _layout(array.data)) is None:
        return _read_only(array.numpy())
    shape, dtype, offset = layout
    if len(array.data) < offset + math.prod(shape) * dtype.itemsize:
        return _read_only(array.numpy())  # truncated: NumPy's reader raises the error
    return np.ndarray(shape, dtype, array.data, offset)


_Layout = tuple[tuple[int, ...], "np.dtype[Any]", int]


def _layout(file: bytes) -> _Layout | None:
    """Return shape, dtype and offset of the elements of a .npy file, or None if it cannot be read in place."""
    if file[:6] != npy.MAGIC_PREFIX or len(file) < _NPY_PREAMBLE_BYTES or file[6:8] != b"\x01\x00":
        return None
    return _parse_header(file[: _NPY_PREAMBLE_BYTES + int.from_bytes(file[8:10], "little")])


@lru_cache(
    maxsize=4096
)  # parsing takes longer than summing a small tensor, and replies have equal headers
def _parse_header(header: bytes) -> _Layout | None:
    try:
        shape, fortran_order, dtype = npy.read_array_header_1_0(BytesIO(header[8:]))
    except ValueError:
        return None
    if dtype.hasobject or (fortran_order and len(shape) > 1):
        return None
    return shape, dtype, len(header)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _serialised(array: NDArray[Any]) -> Array:
    """Return `array` as `Array(array)` does, but copies its elements only once, directly into the final bytes."""
    if not array.flags.c_contiguous or array.dtype.hasobject or array.dtype.kind in "VmM":
        return Array(array)  # NumPy's writer knows Fortran order, records and dates
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _array(
        array.shape, array.dtype, b"".join((_npy_header(array.shape, array.dtype), elements.data))
    )


def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return what `numpy.save` writes before the elements of a C-contiguous array."""
    header = BytesIO()
    description = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(header, description)
    return header.getvalue()


def _array(shape: tuple[int, ...], dtype: np.dtype[Any], data: bytes) -> Array:
    return Array(dtype=str(dtype), shape=tuple(shape), stype=_NUMPY_STYPE, data=data)


def untrained_of(replies: Sequence[Message]) -> frozenset[str]:
    """Return the tensors that are averaged and not trained: integers, and those that most groups name.

    One malicious group must not decide which tensors escape a robust rule.
    """
    named: dict[str, int] = {}
    for reply in replies:
        names = reply.content.config_records.get(UNTRAINED, ConfigRecord()).get("names", [])
        for name in (
            {name for name in names if isinstance(name, str)} if isinstance(names, list) else ()
        ):
            named[name] = named.get(name, 0) + 1
    return frozenset(
        name for name, count in named.items() if 2 * count > len(replies)
    ) | integers_of(cast(ArrayRecord, replies[0].content[ARRAYS]))


def integers_of(model: ArrayRecord) -> frozenset[str]:
    """Return the names of a model's integer tensors."""
    return frozenset(
        name
        for name, (dtype, _) in layout_of(model).items()
        if not np.issubdtype(dtype, np.inexact)
    )
