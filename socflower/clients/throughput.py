"""How fast two processors are, as far as their steps show: the beta of mixed precision, and when to renew it."""

from dataclasses import dataclass

from socflower.precision.mixing import compute_power_ratio

_SMOOTHING = 0.2
"""Weight of the newest step in the running mean of a processor's seconds per sample."""


@dataclass(slots=True)
class ThroughputRatio:
    """beta (F10), profiled once and renewed when the clocks change.

    A step's seconds are noisy, so a ratio that moved with every step would move the split for nothing: beta stays
    until the smoothed seconds per sample of a processor have been `tolerance` away from their reference for
    `patience` steps in a row.
    """

    cpu_s: float  # per sample, at the reference
    npu_s: float
    tolerance: float = 0.15
    patience: int = 10
    num_renewals: int = 0
    _recent_cpu_s: float = 0.0
    _recent_npu_s: float = 0.0
    _num_away: int = 0

    def __post_init__(self) -> None:
        self._recent_cpu_s, self._recent_npu_s = self.cpu_s, self.npu_s

    @property
    def beta(self) -> float:
        """The NPU's part of both throughputs."""
        return compute_power_ratio(1.0 / self.npu_s, 1.0 / self.cpu_s)

    def note(self, *, cpu: tuple[int, float], npu: tuple[int, float]) -> None:
        """Take in a step: samples and seconds of either processor; one without samples tells nothing."""
        self._recent_cpu_s = _smoothed(self._recent_cpu_s, *cpu)
        self._recent_npu_s = _smoothed(self._recent_npu_s, *npu)
        away = max(abs(self._recent_cpu_s / self.cpu_s - 1.0), abs(self._recent_npu_s / self.npu_s - 1.0))
        self._num_away = self._num_away + 1 if away > self.tolerance else 0
        if self._num_away >= self.patience:
            self.cpu_s, self.npu_s = self._recent_cpu_s, self._recent_npu_s
            self._num_away = 0
            self.num_renewals += 1


def _smoothed(mean_s: float, num_samples: int, seconds: float) -> float:
    if not num_samples:
        return mean_s
    return (1.0 - _SMOOTHING) * mean_s + _SMOOTHING * seconds / num_samples
