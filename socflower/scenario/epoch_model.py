"""How many epochs candidates will need, as those that were trained suggest: a Gaussian process over their settings.

`socflower tune` decides by it which candidates to train at all. Candidates are alike if few octaves of batch, learning
rate, groups and interval lie between them, and more so if they have the same arithmetic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from socflower.scenario.candidates import Candidate

# In octaves of a setting: how far what a training shows reaches.
_REACH = 2.0
# Standard deviations of the logarithm of epochs: between arithmetics, and within one.
_BETWEEN, _WITHIN = 0.7, 0.8
# Correlation of candidates with different arithmetics.
_ACROSS = 0.5
_LEAST, _MOST = 1e-3, 1e4
"""Epochs that stand for a target that needs no training, and for a training that failed or got nowhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
    """The logarithms of the epochs of all candidates: mean and standard deviation, arrays of their number."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


class EpochModel:
    """The epochs to the target of `candidates`, before and after some of them were trained."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        places = np.array([_place(each) for each in candidates])
        kinds = np.array([each.arithmetic for each in candidates])
        octaves = (places[:, None] - places[None]) / _REACH
        is_alike = np.where(kinds[:, None] == kinds[None], 1.0, _ACROSS)
        within = _WITHIN**2 * np.exp(-0.5 * (octaves**2).sum(axis=-1))
        self._covariance = (within + _BETWEEN**2) * is_alike
        self._places, self._kinds = places, kinds

    def after(self, epochs: Mapping[int, float], deviations: Mapping[int, float]) -> Belief:
        """Return the belief after candidates, by their index, were seen to need so many epochs, at least one of them.

        `deviations` are standard deviations of the logarithms of those epochs, s in

        mean = m + K_s (K + s^2 I)^-1 (y - m), with m the mean of all y = ln epochs (Rasmussen and Williams, 2.2).
        """
        seen = np.array(list(epochs))
        found = np.log(np.clip(list(epochs.values()), _LEAST, _MOST))
        overall = found.mean()
        between = self._covariance[seen]
        noisy = between[:, seen] + np.diag([deviations[index] ** 2 for index in epochs])
        weights = np.linalg.solve(noisy, between)
        explained = np.einsum("ij,ij->j", between, weights)
        variance = np.maximum(0.0, np.diag(self._covariance) - explained)
        return Belief(mean=overall + weights.T @ (found - overall), deviation=np.sqrt(variance))

    def middles(self) -> list[int]:
        """Return the index of the candidate in the middle of each arithmetic's settings."""
        found = []
        for kind in dict.fromkeys(self._kinds.tolist()):
            own = np.flatnonzero(self._kinds == kind)
            middle = np.median(self._places[own], axis=0)
            distances = ((self._places[own] - middle) ** 2).sum(axis=1)
            found.append(int(own[distances.argmin()]))
        return found


def _place(candidate: Candidate) -> list[float]:
    """Return the settings of a candidate in octaves."""
    samples, groups, interval_epochs = candidate.step
    rate = candidate.trained.scenario.train.learning_rate
    # Of one group, or of "decay", it is a number that is the same for all candidates.
    interval = interval_epochs or 1.0
    return [math.log2(each) for each in (samples, rate, groups, interval)]
