"""Error feedback: corrects a gradient for the error of the feature codec, to first order (F25).

The back half differentiates at h′ = h + E, where E is the codec's error; the front half needs the gradient at h:

    δ ≈ δ̂ − H·E,    where H is the Hessian of the loss by h′, estimated from the gradient δ̂ alone.

The paper has two forms. With H = δ̂δ̂ᵀ (Eq. 7–8): δ̂ − (E·δ̂)δ̂, per sample, since a sample's loss does not depend on
other samples' features. With only its diagonal (Alg. 1): δ̂ − E ⊙ δ̂ ⊙ δ̂.

**Scale.** The outer product of gradients estimates the Hessian of one sample's log-likelihood. Training losses are
means over a batch of B. So the returned gradient is δ̂ = g/B for a sample's own gradient g, and the Hessian of the mean
by that sample's features is ggᵀ/B = B·δ̂δ̂ᵀ. The paper omits B, and so does this module: with B the errors of the
gradients differ in the third digit at most, at any width (`docs/results/split-accuracy.json`).

**Effect.** It is small. The rank-one form multiplies a sample's gradient by 1 − E·δ̂ (or 1 − B·E·δ̂). E is as often
positive as negative, and at most half a step, so E·δ̂ is far below 1 at 8 bits; the direction does not change. The
diagonal form changes each element by the fraction |E·δ̂| of that element, which is smaller still.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.wire.codecs.quantisation import Floats
from socflower.wire.saved_state import from_bytes, to_bytes

Form: TypeAlias = Literal["none", "diagonal", "rank-one"]

FORMS: tuple[Form, ...] = ("none", "diagonal", "rank-one")

_KIND = "error feedback"


def diagonal(gradient: Floats, error: Floats) -> Floats:
    """Return δ̂ − E ⊙ δ̂ ⊙ δ̂ (F25; paper, Alg. 1); `ConfigError` if shapes differ."""
    _check_shapes(gradient, error)
    correction: Floats = np.multiply(error, gradient)
    correction *= gradient
    corrected: Floats = gradient - correction
    return corrected


def rank_one(gradient: Floats, error: Floats) -> Floats:
    """Return δ̂ − (E·δ̂)δ̂, with an inner product per sample, the first dimension (F25; paper, Eq. 7–8).

    Raises `ConfigError` if shapes differ or there is no first dimension.
    """
    _check_shapes(gradient, error)
    if not gradient.ndim:
        raise ConfigError("error feedback: a gradient without dimensions has no samples")
    if not gradient.size:
        return gradient.copy()
    rows = gradient.reshape(len(gradient), -1)
    inner = np.einsum("ij,ij->i", rows, error.reshape(rows.shape), dtype=np.float64)
    corrected: Floats = rows * (1 - inner).astype(np.float32)[:, None]
    return corrected.reshape(gradient.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptError:
    """An error E in one byte per element, so that a small device can keep K + 1 batches in flight.

    E is kept as round(127·E/max|E|). Its error is at most max|E|/254, a 508th of the codec's step, and the many zeros
    behind a ReLU stay zeros. If E is 0, nothing is kept.
    """

    shape: tuple[int, ...]
    # max|E|/127
    unit: float
    # (elements,); None if E is 0 everywhere.
    levels: NDArray[np.int8] | None

    @classmethod
    def of(cls, features: Floats, decoded: Floats) -> "KeptError":
        """Keep E = decoded − features; `ConfigError` if shapes differ."""
        if features.shape != decoded.shape:
            raise ConfigError(
                f"error feedback: features of shape {features.shape} were decoded to {decoded.shape}"
            )
        error = np.subtract(decoded, features, dtype=np.float64).reshape(-1)
        unit = max(error.max(initial=0.0), -error.min(initial=0.0)) / 127
        if unit == 0:
            return cls(shape=features.shape, unit=0.0, levels=None)
        error /= unit
        levels = np.rint(error, out=error).astype(np.int8)
        return cls(shape=features.shape, unit=float(unit), levels=levels)

    @property
    def num_bytes(self) -> int:
        """Bytes of the kept error."""
        return 0 if self.levels is None else self.levels.nbytes

    def error(self) -> Floats:
        """Return E."""
        if self.levels is None:
            return np.zeros(self.shape, np.float32)
        error = np.multiply(self.levels, self.unit, dtype=np.float64)
        return error.astype(np.float32).reshape(self.shape)


class ErrorFeedback:
    """Error feedback at the front half: stores the errors of the batches in flight, one byte per element.

    Memory: (K + 1)·elements of a batch's features, in bytes. `form` "none" keeps nothing and corrects nothing.
    """

    def __init__(self, form: Form) -> None:
        if form not in FORMS:
            raise ConfigError(f"error feedback: form {form!r} is unknown; use {', '.join(FORMS)}")
        self.form: Form = form
        self._kept: dict[int, KeptError] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept errors."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def keep(self, batch: int, features: Floats, decoded: Floats) -> None:
        """Keep the codec's error of a batch: the back half gets `decoded` for `features`.

        A batch that is sent again replaces its former error. Raises `ConfigError` if shapes differ.
        """
        if self.form != "none":
            self._kept[batch] = KeptError.of(features, decoded)

    def correct(self, batch: int, gradient: Floats) -> Floats:
        """Return a batch's corrected gradient; the argument is not changed.

        Raises `ConfigError` for a batch that was not kept, and for a gradient of another shape than its features.
        """
        if self.form == "none":
            return gradient
        kept = self._kept.get(batch)
        if kept is None:
            raise ConfigError(f"error feedback: nothing is kept of batch {batch}")
        if kept.levels is None and kept.shape == gradient.shape:
            return gradient
        correct = diagonal if self.form == "diagonal" else rank_one
        return correct(gradient, kept.error())

    def forget(self, batch: int) -> None:
        """Discard the error of a batch, if one is kept."""
        self._kept.pop(batch, None)

    def save(self) -> bytes:
        """Return the state for `restore`."""
        batches, levels = [], {}
        for batch, kept in self._kept.items():
            batches.append({"batch": batch, "shape": kept.shape, "unit": kept.unit})
            if kept.levels is not None:
                levels[str(batch)] = kept.levels
        return to_bytes(_KIND, {"form": self.form, "batches": batches}, levels)

    def restore(self, saved: bytes) -> None:
        """Restore a state from `save`; `ConfigError` if it is damaged or of another form."""
        header, levels = from_bytes(_KIND, saved)
        if header["form"] != self.form:
            raise ConfigError(
                f"error feedback: the saved state is of form {header['form']!r}, not {self.form!r}"
            )
        self._kept = {}
        for kept in header["batches"]:
            batch, shape = kept["batch"], tuple(kept["shape"])
            own = KeptError(shape=shape, unit=kept["unit"], levels=levels.get(str(batch)))
            self._kept[batch] = own


def _check_shapes(gradient: Floats, error: Floats) -> None:
    if gradient.shape != error.shape:
        raise ConfigError(
            f"error feedback: a gradient of shape {gradient.shape}, but an error of {error.shape}"
        )
