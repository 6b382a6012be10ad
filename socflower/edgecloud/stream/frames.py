"""The messages of split training, and their conversion to and from a head and a body of bytes.

Data from the wire is not trusted: sizes, shapes and numbers are checked before use, and invalid ones raise
`MalformedBytes`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import Field

from socflower.edgecloud.half_protocols import Labels, Weights
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.errors import ConfigError, SocflowerError
from socflower.field_rules import checked
from socflower.peers.resumable_stream import ChannelLimits, Stream
from socflower.wire.arrays import (
    MalformedBytes,
    array_from_bytes,
    array_num_bytes,
    array_to_bytes,
    array_type,
    check_shape,
    pack_arrays,
    unpack_arrays,
)
from socflower.wire.codecs.delta_coding import DeltaMessage
from socflower.wire.codecs.quantisation import BITS, EncodedTensor, Grouping
from socflower.wire.framing import check_size

PROTOCOL_VERSION = 4
"""Increased whenever an older peer would misunderstand a newer one."""


class SplitRefused(SocflowerError):
    """The other side refused, or sent something invalid: retrying would not help."""


class StartOver(Exception):
    """Not a failure: the other side or a party has lost its state, so all join again and agree on a checkpoint."""


def check_version(version: int, peer: str) -> None:
    """Raise `SplitRefused` for a peer of another version of the protocol."""
    if version != PROTOCOL_VERSION:
        raise SplitRefused(
            f"the cloud has version {PROTOCOL_VERSION} of the split protocol, the {peer} {version}; install the same "
            "socflower on both"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFeatures:
    """Delta-coded features, with all that the other end needs to decode them."""

    message: DeltaMessage
    sample_ids: NDArray[np.int64]
    # Of either end.
    memory_bytes: int
    grouping: Grouping

    @property
    def num_bytes(self) -> int:
        """Size of the encoded features."""
        return self.message.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """A batch on its way to the back half."""

    batch: int
    cut: int
    encoded: EncodedTensor | DeltaFeatures
    labels: Labels
    # Of `digest_of_ids`: parties must have the same samples.
    ids_digest: bytes
    # Width of the gradient that comes back.
    answer_bits: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFrame:
    """A batch's gradient; without `encoded`, only the information that the batch is done (a frozen front half)."""

    batch: int
    encoded: EncodedTensor | None
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recut:
    """A move of the cut to `cut`, with or without the weights of the layers that move."""

    cut: int
    weights: Weights | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A checkpoint before `batch`: nothing is in flight, and both halves are saved with this `cut`."""

    batch: int
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye:
    """The front half is at the end of its span."""


Message: TypeAlias = Features | GradientFrame | Recut | Mark | Goodbye
SplitStream: TypeAlias = Stream[Message]


@checked
class Limits(ChannelLimits):
    """Limits on the parts that a side sends, and on the messages that it accepts, in bytes."""

    max_tensor_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    max_weights_bytes: Annotated[int, Field(ge=1)] = 4 << 30


def digest_of_ids(sample_ids: NDArray[np.int64]) -> bytes:
    """Return a 16-byte digest that is equal for batches with the same samples in the same order."""
    return hashlib.sha256(array_to_bytes(np.asarray(sample_ids, np.int64))).digest()[:16]


class SplitMessages:
    """The messages of split training for a channel with these limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def encode(self, message: Message) -> tuple[bytes, list[bytes | memoryview]]:
        """Return a message's head and body. Raises `TypeError` for arrays of a type that does not travel."""
        body: list[bytes | memoryview] = []
        head = wire.Head()
        match message:
            case Features():
                body = _put_batch(head.tensor, message)
            case GradientFrame():
                tensor = head.tensor
                tensor.gradient = True
                tensor.batch = message.batch
                tensor.loss = message.loss
                if message.encoded is not None:
                    body = [_put_encoded(tensor.plain, message.encoded)]
            case Recut():
                head.recut.cut = message.cut
                head.recut.gives = message.weights is not None
                if message.weights is not None:
                    body = [*pack_arrays(message.weights)]
            case Mark():
                head.mark.batch = message.batch
                head.mark.cut = message.cut
            case Goodbye():
                head.goodbye.SetInParent()
        return head.SerializeToString(), body

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], Message]:
        """Return the function that makes the message from its body; `MalformedBytes` if it is too large or invalid."""
        try:
            parsed = wire.Head.FromString(head)
        except DecodeError:
            raise MalformedBytes("a message whose head cannot be read") from None
        kind = parsed.WhichOneof("kind")
        tensor = parsed.tensor
        limits = self._limits
        if kind is None:
            raise MalformedBytes("a message of an unknown kind")
        largest = {"tensor": limits.max_tensor_bytes, "recut": limits.max_weights_bytes}
        check_size(num_bytes, f"a {kind}", largest.get(kind, 0))
        if kind == "tensor" and not tensor.gradient:
            if tensor.answer_bits not in BITS:
                raise MalformedBytes(f"features that want a gradient at {tensor.answer_bits} bits")
            if tensor.HasField("plain") == tensor.HasField("delta"):
                raise MalformedBytes("features that are not either plain or coded by sample")
        return partial(_decode, parsed)


def _put_batch(tensor: wire.Tensor, message: Features) -> list[bytes | memoryview]:
    """Write a batch into a head, and return the pieces of the body: features, labels, ids."""
    body = _put_features(tensor, message.encoded)
    arrays: list[NDArray[Any]] = []
    form = _labels_form(message.labels, arrays)
    # Ids come last, so that labels lie between.
    place = len(body) - isinstance(message.encoded, DeltaFeatures)
    body[place:place] = [array_to_bytes(array) for array in arrays]
    tensor.batch = message.batch
    tensor.cut = message.cut
    tensor.ids_digest = message.ids_digest
    tensor.answer_bits = message.answer_bits
    tensor.labels_form = "" if form == 0 else json.dumps(form)
    for array in arrays:
        tensor.labels.append(wire.Block(dtype=array_type(array, "labels"), shape=array.shape))
    return body


def _decode(head: wire.Head, body: memoryview) -> Message:
    kind = head.WhichOneof("kind")
    if kind == "mark":
        return Mark(batch=head.mark.batch, cut=head.mark.cut)
    if kind == "goodbye":
        return Goodbye()
    if kind == "recut":
        if not head.recut.gives and body.nbytes:
            raise MalformedBytes("a move of the cut with weights, but without layers")
        return Recut(cut=head.recut.cut, weights=unpack_arrays(body) if head.recut.gives else None)
    tensor = head.tensor
    cursor = _Cursor(body)
    plain = _encoded(tensor.plain, cursor) if tensor.HasField("plain") else None
    if tensor.gradient:
        message: Message = GradientFrame(
            batch=tensor.batch,
            loss=tensor.loss,
            encoded=plain,
        )
    else:
        message = _features(tensor, plain, cursor)
    cursor.require_end()
    return message


def _features(tensor: wire.Tensor, plain: EncodedTensor | None, cursor: "_Cursor") -> Features:
    """Return features whose body, after those that are `plain`, is still to be read."""
    delta = tensor.delta
    first = _encoded(delta.first, cursor) if delta.HasField("first") else None
    change = _encoded(delta.change, cursor) if delta.HasField("change") else None
    arrays: list[NDArray[Any]] = []
    for block in tensor.labels:
        piece = cursor.next(array_num_bytes(block.dtype, block.shape))
        arrays.append(array_from_bytes(block.dtype, block.shape, piece))
    sample_ids = np.frombuffer(cursor.next(8 * delta.num_ids), "<i8").astype(np.int64)
    encoded: EncodedTensor | DeltaFeatures | None = plain
    if encoded is None:
        message = DeltaMessage(
            count=delta.count,
            digest=delta.digest,
            first=first,
            change=change,
        )
        encoded = DeltaFeatures(
            message=message,
            sample_ids=sample_ids,
            memory_bytes=delta.memory_bytes,
            grouping="sample" if delta.by_sample else "tensor",
        )
    return Features(
        batch=tensor.batch,
        cut=tensor.cut,
        labels=_labels(tensor, arrays),
        ids_digest=tensor.ids_digest,
        answer_bits=tensor.answer_bits,
        encoded=encoded,
    )


def _labels_form(labels: Labels, arrays: list[NDArray[Any]]) -> Any:
    """Append the arrays of labels; return the labels with their places in place of them."""
    if isinstance(labels, Mapping):
        return {str(key): _labels_form(part, arrays) for key, part in labels.items()}
    if isinstance(labels, tuple | list):
        return [_labels_form(part, arrays) for part in labels]
    arrays.append(labels)
    return len(arrays) - 1


def _labels(tensor: wire.Tensor, arrays: Sequence[NDArray[Any]]) -> Labels:
    """Return labels in the form in which they were sent; tuples are lists."""

    def filled(form: Any) -> Labels:
        if isinstance(form, dict):
            return {key: filled(part) for key, part in form.items()}
        return [filled(part) for part in form] if isinstance(form, list) else arrays[form]

    form = tensor.labels_form
    try:
        return filled(json.loads(form or "0"))
    except (ValueError, TypeError, IndexError, RecursionError):
        raise MalformedBytes(f"{len(arrays)} arrays of labels in the form {form[:40]!r}") from None


class _Cursor:
    """The read position in a body."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def next(self, num_bytes: int) -> memoryview:
        piece = self._body[self._at : self._at + num_bytes]
        if piece.nbytes != num_bytes:
            raise MalformedBytes(f"a tensor whose body of {self._body.nbytes} bytes is too short")
        self._at += num_bytes
        return piece

    def require_end(self) -> None:
        """Raise `MalformedBytes` for bytes that nothing read."""
        left = self._body.nbytes - self._at
        if left:
            raise MalformedBytes(f"a tensor with {left} bytes too many")


def _put_features(
    tensor: wire.Tensor, encoded: EncodedTensor | DeltaFeatures
) -> list[bytes | memoryview]:
    """Write features into a head and return the pieces of the body, ids at the end."""
    if isinstance(encoded, EncodedTensor):
        return [_put_encoded(tensor.plain, encoded)]
    message = encoded.message
    delta = tensor.delta
    delta.count = message.count
    delta.digest = message.digest
    delta.num_ids = len(encoded.sample_ids)
    delta.memory_bytes = encoded.memory_bytes
    delta.by_sample = encoded.grouping == "sample"
    parts = ((delta.first, message.first), (delta.change, message.change))
    pieces = [_put_encoded(target, part) for target, part in parts if part is not None]
    return [*pieces, array_to_bytes(np.asarray(encoded.sample_ids, np.int64))]


def _put_encoded(target: wire.Encoded, encoded: EncodedTensor) -> bytes | memoryview:
    target.bits = encoded.bits
    target.num_bytes = memoryview(encoded.payload).nbytes
    target.shape.extend(encoded.shape)
    target.low.extend(encoded.low)
    target.high.extend(encoded.high)
    return encoded.payload


def _encoded(source: wire.Encoded, cursor: _Cursor) -> EncodedTensor:
    check_shape(source.shape)
    try:
        return EncodedTensor(
            bits=source.bits,
            shape=tuple(source.shape),
            low=tuple(source.low),
            high=tuple(source.high),
            payload=cursor.next(source.num_bytes),
        )
    except ConfigError as error:
        raise MalformedBytes(str(error)) from None
