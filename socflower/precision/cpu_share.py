"""Splitting a batch between CPU and NPU: confidence, compute power and the CPU's share (SoCFlow+ section 3.2).

    alpha = cos(logits FP32, logits INT8)                    F9
    beta  = NPU throughput / (NPU + CPU throughput)          F10
    gamma = max(floor(alpha), 1 - beta)                      F11, the share of the CPU

The floor is e^-alpha under `paper`, and (e^-alpha - e^-1) / (1 - e^-1), which falls to 0, under `normalised`.

The throughputs of beta are measured from the steps themselves and renewed when they change.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError

MIXING_RULES = ("paper", "normalised", "fp32", "int8", "half")
"""`paper` and `normalised` follow alpha and beta; the others are the fixed shares of the ablation (Fig. 15)."""

MERGES = ("gradients", "weights")
"""What CPU and NPU merge: gradients in every step (F12), or the weights at every synchronisation (Eq. 5)."""

RULES_BY_THROUGHPUT = ("paper", "normalised")

_FIXED = {"fp32": 1.0, "int8": 0.0, "half": 0.5}


def confidence(fp32_logits: npt.ArrayLike, int8_logits: npt.ArrayLike) -> float:
    """Return alpha in [0, 1]: the mean over samples of the cosine between two (samples, classes) logits (F9).

    A sample counts as 0 if one of its logits has norm 0 or a value that is not finite. A negative mean is returned as
    0, because the rules are not defined for it.
    """
    fp32 = np.asarray(fp32_logits, dtype=np.float64)
    int8 = np.asarray(int8_logits, dtype=np.float64)
    if fp32.shape != int8.shape or fp32.ndim != 2 or not len(fp32):
        raise ConfigError(f"confidence: need (samples, classes) twice: {fp32.shape}, {int8.shape}")
    with np.errstate(all="ignore"):
        lengths = np.linalg.norm(fp32, axis=1) * np.linalg.norm(int8, axis=1)
        cosines = (fp32 * int8).sum(axis=1) / lengths
    mean = np.where(np.isfinite(cosines), cosines, 0.0).mean()
    return float(np.clip(mean, 0.0, 1.0))


def compute_power_ratio(npu_samples_per_s: float, cpu_samples_per_s: float) -> float:
    """Return beta in [0, 1): the NPU's part of both throughputs together (F10); 0 without an NPU."""
    if not (0.0 <= npu_samples_per_s < math.inf and 0.0 < cpu_samples_per_s < math.inf):
        raise ConfigError(
            f"compute power: throughputs of {npu_samples_per_s} and {cpu_samples_per_s} samples/s; the "
            "NPU's must be 0 or more, the CPU's above 0"
        )
    return npu_samples_per_s / (npu_samples_per_s + cpu_samples_per_s)


def cpu_share(rule: str, alpha: float, beta: float) -> float:
    """Return gamma, the CPU's share of the samples and of the merge (F11); alpha is clamped to [0, 1].

    Under the rules that depend on alpha and beta it lies in [1 - beta, 1].
    """
    if rule in _FIXED:
        return _FIXED[rule]
    if rule not in MIXING_RULES:
        raise ConfigError(f"mixing rule {rule!r} is unknown; use one of {', '.join(MIXING_RULES)}")
    if math.isnan(alpha) or not 0.0 <= beta <= 1.0:
        raise ConfigError(f"mixing: alpha = {alpha} must be a number, beta = {beta} in [0, 1]")
    return min(1.0, max(accuracy_floor(rule, alpha), 1.0 - beta))


def accuracy_floor(rule: str, alpha: float) -> float:
    """Return the smallest CPU share that accuracy allows, at any throughputs (F11)."""
    if rule not in RULES_BY_THROUGHPUT:
        return 0.0
    floor = math.exp(-min(1.0, max(0.0, alpha)))
    if rule == "paper":
        return floor
    least = math.exp(-1.0)
    return max(0.0, (floor - least) / (1.0 - least))


def most_speedup(rule: str) -> float:
    """Return how many times faster than the CPU alone a rule can be, however fast the NPU: 1 / smallest gamma.

    e = 2.72 for `paper` (F11); infinity if the floor can be 0.
    """
    floor = cpu_share(rule, alpha=1.0, beta=1.0)
    return 1.0 / floor if floor else math.inf


def cpu_samples(num_samples: int, gamma: float, floor: float = 0.0) -> int:
    """Return how many of a member's samples the CPU takes: gamma of them to the nearest, but no less than the floor.

    The share from the throughputs is rounded to nearest; the floor is rounded up ("no less than e^-alpha", SoCFlow+
    3.2).
    """
    # Without the 1e-9 a floor that is a whole number but for rounding would be one too high.
    least = math.ceil(floor * num_samples - 1e-9)
    return min(num_samples, max(least, math.floor(gamma * num_samples + 0.5)))


def without_single(num_cpu: int, num_samples: int) -> int:
    """Return the CPU's samples so that neither processor normalises a batch by the statistics of one sample.

    The CPU gets the NPU's only sample, and a second one if it has one itself; all, if that leaves the NPU one or none.
    """
    if num_samples < 2 or 1 not in (num_cpu, num_samples - num_cpu):
        return num_cpu
    return 2 if num_cpu == 1 and num_samples >= 4 else num_samples


_RETIMED_AFTER = 49
"""Steps in a row without samples for a processor after which both are timed again, so within 50."""

_SMOOTHING = 0.2
"""Weight of the newest step in the running mean of a processor's seconds per sample."""


@dataclass(slots=True)
class ThroughputRatio:
    """beta (F10), profiled once and renewed when the clocks change.

    Step times are noisy, and a ratio updated at every step would change the split without a reason. So beta stays
    the same until the smoothed seconds per sample of a processor differ from their reference, `cpu_s` and `npu_s`, by
    more than the fraction `tolerance` for `patience` steps in a row.

    Of a processor without samples nothing is measured: after `_RETIMED_AFTER` such steps the ratio `is_stale`.
    """

    cpu_s: float
    npu_s: float
    tolerance: float = 0.15
    patience: int = 10
    num_renewals: int = 0
    num_idle_steps: int = 0
    _recent_cpu_s: float = 0.0
    _recent_npu_s: float = 0.0
    _num_away: int = 0

    def __post_init__(self) -> None:
        self._recent_cpu_s = self.cpu_s
        self._recent_npu_s = self.npu_s

    @property
    def beta(self) -> float:
        """The NPU's part of both throughputs."""
        return compute_power_ratio(1.0 / self.npu_s, 1.0 / self.cpu_s)

    @property
    def is_stale(self) -> bool:
        """Whether a processor had no samples for so long that both are to be timed again."""
        return self.num_idle_steps >= _RETIMED_AFTER

    def note(self, *, cpu: tuple[int, float], npu: tuple[int, float]) -> None:
        """Record a step: samples and seconds of each processor; a processor without samples is not timed."""
        self.num_idle_steps = 0 if cpu[0] and npu[0] else self.num_idle_steps + 1
        self._recent_cpu_s = _smoothed(self._recent_cpu_s, *cpu)
        self._recent_npu_s = _smoothed(self._recent_npu_s, *npu)
        cpu_change = abs(self._recent_cpu_s / self.cpu_s - 1.0)
        npu_change = abs(self._recent_npu_s / self.npu_s - 1.0)
        is_away = max(cpu_change, npu_change) > self.tolerance
        self._num_away = self._num_away + 1 if is_away else 0
        if self._num_away >= self.patience:
            self.cpu_s = self._recent_cpu_s
            self.npu_s = self._recent_npu_s
            self._num_away = 0
            self.num_renewals += 1


def _smoothed(mean_s: float, num_samples: int, seconds: float) -> float:
    if not num_samples:
        return mean_s
    return (1.0 - _SMOOTHING) * mean_s + _SMOOTHING * seconds / num_samples
