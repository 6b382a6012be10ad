"""Delta coding: sends the change of a sample's features since they were last sent, as AQ-SGD does (F25).

Both ends hold, per sample, the features m that the receiver decoded last. The sender sends C(h − m), and both set
m ← m + C(h − m). From one epoch to the next features change less and less. So the range that 2 or 4 bits divide shrinks
during training, while the range of the features does not. m are the *decoded* features, not the sender's exact ones:
errors do not accumulate, because the next change corrects them. A sample that is not held is sent without delta coding,
at 8 bits or more.

**Memory**, at each end: samples × elements of a sample's features × 2 bytes (float16), up to `max_bytes`; the 5,000
digits behind LeNet's first pooling (6 × 12 × 12) take 8.6 MB. Beyond that, both ends drop the samples that were unused
for longest, in the same order. An epoch uses every sample once, so each is dropped just before its next use: less
memory than all samples need gains little.

Both ends must process the same messages in the same order. Each message has a digest of its sender's state, so that a
receiver that has missed a message refuses the next one instead of decoding it wrongly.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError, require_range
from socflower.wire.codecs.quantisation import EncodedTensor, Floats, Grouping, decode, encode
from socflower.wire.saved_state import from_bytes, to_bytes

_KIND = "delta coding"
# The least width of a sample that is not held.
_FIRST_BITS = 8
# The rounding of a held value to float16 is part of the next change: it does not accumulate. Decoded features are not
# rounded.
_HELD = np.dtype(np.float16)
_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaMessage:
    """A batch's encoded features, without the sample ids, which are sent separately."""

    # Messages before this one.
    count: int
    # A digest of the sender's state before this message.
    digest: bytes
    # Features of the samples that are not held, in batch order.
    first: EncodedTensor | None
    # Changes of the samples that are held.
    change: EncodedTensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        parts = [part.num_bytes for part in (self.first, self.change) if part is not None]
        return 8 + len(self.digest) + sum(parts)


class DeltaEnd:
    """The state that both ends of a link share: the last decoded features of each sample, and a running digest.

    Both have the same `max_bytes` for held features (0: none, and all samples are sent without delta coding), and the
    same `grouping`, as in `encode`.
    """

    def __init__(self, *, max_bytes: int, grouping: Grouping = "tensor") -> None:
        require_range("delta coding", least=0, max_bytes=max_bytes)
        self._max_bytes, self._grouping = max_bytes, grouping
        # Features by sample; the sample unused for longest is the first.
        self._held: dict[int, NDArray[Any]] = {}
        # The shape of one sample.
        self._shape: tuple[int, ...] = ()
        self._count = 0
        # Ends with different settings must not accept each other's messages.
        settings = repr(self._settings()).encode()
        self._digest = hashlib.blake2b(settings, digest_size=_DIGEST_BYTES).digest()

    @property
    def num_samples(self) -> int:
        """How many samples are held."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of the held features."""
        return sum(features.nbytes for features in self._held.values())

    def reset(self) -> None:
        """Discard all held features, for instance if the cut moves to another layer. Call it at both ends."""
        self._held.clear()
        self._update_digest(b"reset")

    def save(self) -> bytes:
        """Return the state for `restore`: the held features, in order, and the digest."""
        header = {"settings": self._settings(), "count": self._count, "digest": self._digest.hex()}
        features = np.array(list(self._held.values()), _HELD).reshape(-1, *self._shape)
        samples = np.array(list(self._held), np.int64)
        return to_bytes(_KIND, header, {"samples": samples, "features": features})

    def restore(self, saved: bytes) -> None:
        """Restore the state that this end or the other one saved.

        Raises `ConfigError` for other settings and for a damaged state.
        """
        header, arrays = from_bytes(_KIND, saved)
        if header["settings"] != self._settings():
            raise ConfigError(
                f"delta coding: the saved state has settings {header['settings']}, not {self._settings()}"
            )
        self._count, self._digest = header["count"], bytes.fromhex(header["digest"])
        self._shape = arrays["features"].shape[1:]
        pairs = zip(arrays["samples"].tolist(), arrays["features"], strict=True)
        self._held = {sample: features.copy() for sample, features in pairs}

    # ----------------------------------------------------------------------------------------- for both ends

    def _settings(self) -> list[Any]:
        return [self._max_bytes, _FIRST_BITS, _HELD.name, self._grouping]

    def _is_held(
        self, samples: Sequence[int], shape: tuple[int, ...], plain: bool
    ) -> NDArray[np.bool_]:
        """Return which samples of a batch are held in its shape; with `plain`, none is used."""
        usable = shape == self._shape and not plain
        return np.array([usable and sample in self._held for sample in samples], bool)

    def _held_features(self, samples: Sequence[int], known: NDArray[np.bool_]) -> Floats:
        """Return the held features (known samples, ...)."""
        pairs = zip(samples, known, strict=True)
        held = [self._held[sample] for sample, is_held in pairs if is_held]
        return np.stack(held).astype(np.float32)

    def _store_features(
        self, samples: Sequence[int], features: Floats, message: DeltaMessage
    ) -> None:
        """Hold decoded features of a batch; the later ones of a sample that occurs twice."""
        if features.shape[1:] != self._shape:
            self._held.clear()
            self._shape = features.shape[1:]
        largest = np.finfo(_HELD).max
        narrow = np.clip(features, -largest, largest).astype(_HELD)
        for sample, own in zip(samples, narrow, strict=True):
            self._held.pop(sample, None)
            # A view would keep the memory of the whole batch.
            self._held[sample] = own.copy()
        sample_bytes = math.prod(self._shape) * _HELD.itemsize
        # Samples without elements take no memory and carry nothing: none of them is held.
        num_kept = self._max_bytes // sample_bytes if sample_bytes else 0
        for sample in list(self._held)[: max(0, len(self._held) - num_kept)]:
            del self._held[sample]
        self._update_digest(
            np.array(samples, "<i8").tobytes(),
            *_contents(message.first),
            *_contents(message.change),
        )

    def _update_digest(self, *contents: bytes | memoryview) -> None:
        digest = hashlib.blake2b(self._digest, digest_size=_DIGEST_BYTES)
        for content in contents:
            digest.update(content)
        self._digest = digest.digest()
        self._count += 1


class DeltaSender(DeltaEnd):
    """The end that sends features."""

    def encode(
        self, sample_ids: NDArray[np.int64], features: Floats, bits: int
    ) -> tuple[DeltaMessage, Floats]:
        """Return the message for a batch (samples, ...), and the features that the receiver makes of it.

        Changes are sent in `bits`, samples that are not held in at least 8; at 32 bits all are sent unchanged. Raises
        `ConfigError`, and changes nothing, as `encode` does, and if numbers and features differ in length.
        """
        samples = _checked(sample_ids, features.shape)
        known = self._is_held(samples, features.shape[1:], bits == 32)
        first = change = None
        decoded = np.empty(features.shape, np.float32)
        if not known.all() or not known.size:
            first = encode(features[~known], max(bits, _FIRST_BITS), grouping=self._grouping)
            decoded[~known] = decode(first)
        if known.any():
            last = self._held_features(samples, known)
            with np.errstate(over="ignore", invalid="ignore"):
                # `encode` refuses values that are not finite.
                changes = features[known] - last
            change = encode(changes, bits, grouping=self._grouping, what="changes of features")
            decoded[known] = last + decode(change)
        message = DeltaMessage(count=self._count, digest=self._digest, first=first, change=change)
        self._store_features(samples, decoded, message)
        return message, decoded


class DeltaReceiver(DeltaEnd):
    """The end that receives features."""

    def decode(self, sample_ids: NDArray[np.int64], message: DeltaMessage) -> Floats:
        """Return the features (samples, ...) of a batch.

        Raises `ConfigError`, and changes nothing, if this end's state differs from the sender's, because a message was
        lost, repeated or overtaken, or if the message has another number of samples.
        """
        if (message.count, message.digest) != (self._count, self._digest):
            raise ConfigError(
                f"delta coding: message {message.count} was made in another state than this end's after "
                f"{self._count}; restore both ends from the same batch, or reset both"
            )
        first, change = message.first, message.change
        part = first if first is not None else change
        if part is None:
            raise ConfigError("delta coding: a message without features")
        shape = part.shape[1:]
        samples = _checked(sample_ids, (len(sample_ids), *shape))
        is_plain = first is not None and first.bits == 32 and change is None
        known = self._is_held(samples, shape, is_plain)
        _check_part("first", first, (int((~known).sum()), *shape))
        _check_part("changed", change, (int(known.sum()), *shape))
        decoded = np.empty((len(samples), *shape), np.float32)
        if first is not None:
            decoded[~known] = decode(first)
        if change is not None:
            decoded[known] = self._held_features(samples, known) + decode(change)
        self._store_features(samples, decoded, message)
        return decoded


def _checked(sample_ids: NDArray[np.int64], shape: tuple[int, ...]) -> list[int]:
    """Return the numbers of a batch's samples."""
    if not shape or sample_ids.shape != shape[:1]:
        raise ConfigError(
            f"delta coding: {sample_ids.size} sample numbers for features of shape {shape}"
        )
    samples: list[int] = sample_ids.tolist()
    return samples


def _check_part(name: str, part: EncodedTensor | None, shape: tuple[int, ...]) -> None:
    found = (0, *shape[1:]) if part is None else part.shape
    if found != shape:
        raise ConfigError(
            f"delta coding: {name} features of shape {found}, where this end expects {shape}"
        )


def _contents(part: EncodedTensor | None) -> list[bytes | memoryview]:
    """Return everything that the decoded values depend on."""
    if part is None:
        return [b"-"]
    ranges = np.array([part.low, part.high], "<f4").tobytes()
    return [struct.pack(f"<{len(part.shape) + 1}q", part.bits, *part.shape), ranges, part.payload]
