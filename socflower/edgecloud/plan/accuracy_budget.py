"""K and the bits of features and gradients within a budget of loss: which to try, for how long, and which to keep.

A trial trains the first batches of the training itself, from the same state; the training continues from the end of the
trial that is kept.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from socflower.errors import InfeasiblePlan, TrainingFailed, require_range

CALIBRATION_SHARE = 0.25
"""The part of the predicted time of a training that trials may take."""

_MIN_GAIN = 0.1
"""A less exact codec is tried only if it makes the training faster by this part."""

_WINDOWS_A_TRIAL = 2
"""A trial lasts at least so many windows, since the first window's gradients are all of the initial weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCodec:
    """What a split training loses accuracy by: K (F23), and the bits of features and of gradients (F24)."""

    window: int
    bits: int
    gradient_bits: int

    def is_as_exact_as(self, other: "SplitCodec") -> bool:
        """Whether no gradient is staler than with the other codec, and no value is narrower."""
        return (
            self.window <= other.window
            and self.bits >= other.bits
            and self.gradient_bits >= other.gradient_bits
        )

    @property
    def name(self) -> str:
        """A short name, in letters and digits."""
        return f"k{self.window}b{self.bits}g{self.gradient_bits}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What a trial has come to; a loss that is not finite if the training diverged."""

    loss: float
    seconds: float


class CodecTrial(Protocol):
    """The beginning of a training with one codec."""

    def predicted_s(self) -> float:
        """Return the predicted seconds of the trial if it begins now."""
        ...

    def run(self) -> Tried:
        """Train it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlan:
    """The codecs to try, the most exact one first, then the quickest first; and the batches of each trial."""

    codecs: tuple[SplitCodec, ...]
    num_batches: int
    # The predicted seconds of the training by codec, and the part of them that trials may take.
    run_s: Mapping[SplitCodec, float]
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecChoice:
    """The codec that a training keeps, and all trials in their order."""

    codec: SplitCodec
    tried: Mapping[SplitCodec, Tried]


def worthwhile(run_s: Mapping[SplitCodec, float]) -> tuple[SplitCodec, ...]:
    """Return the codecs that are faster by a tenth than every one that is as exact, quickest first.

    `run_s` has the predicted seconds of the training by codec. The most exact codec is always among them.
    """

    def pays(codec: SplitCodec) -> bool:
        return all(
            run_s[codec] <= (1.0 - _MIN_GAIN) * seconds
            for other, seconds in run_s.items()
            if other != codec and other.is_as_exact_as(codec)
        )

    return tuple(sorted(filter(pays, run_s), key=lambda codec: run_s[codec]))


def plan_trials(
    run_s: Mapping[SplitCodec, float],
    trial_s: Callable[[SplitCodec, int], float],
    num_batches: int,
    *,
    share: float = CALIBRATION_SHARE,
) -> TrialPlan:
    """Return the trials of a training of `num_batches`, whose seconds `run_s` predicts by codec.

    `trial_s` predicts those of the first batches. Trials are as long as allows that of the most exact codec and those
    of a bisection that ends with the quickest one, all within `share` of the quickest training. Codecs whose K is too
    large to show in such a trial are left out. If nothing is faster than the most exact codec, there are no trials and
    `num_batches` of the result is 0.

    Raises `InfeasiblePlan` if the training is too short to try any other codec.
    """
    require_range("loss budget", least=0.0, most=1.0, share=share)
    left = dict(run_s)
    while len(codecs := worthwhile(left)) > 1:
        exact = _most_exact(codecs)
        others = [codec for codec in codecs if codec != exact]
        needed = [exact, *_bisection(others)]
        budget_s = share * left[codecs[0]]
        largest = max(codec.window for codec in codecs)
        length = int(num_batches * budget_s / math.fsum(left[codec] for codec in needed))
        # A trial also fills and drains the pipeline.
        while length and math.fsum(trial_s(codec, length) for codec in needed) > budget_s:
            length = length * 9 // 10
        if length >= _WINDOWS_A_TRIAL * (largest + 1):
            return TrialPlan(codecs=(exact, *others), num_batches=length, run_s=left, share=share)
        left = {codec: seconds for codec, seconds in left.items() if codec.window < largest}
    quickest = worthwhile(run_s)
    if len(quickest) > 1:
        raise InfeasiblePlan(
            f"loss budget: {num_batches} batches are too few to compare K and bits within {share:g} of the training; "
            "train more epochs, use smaller batches, or give window, bits and gradient_bits"
        )
    return TrialPlan(codecs=quickest, num_batches=0, run_s=run_s, share=share)


def choose_codec(
    plan: TrialPlan, trials: Mapping[SplitCodec, CodecTrial], loss_budget: float
) -> CodecChoice:
    """Return the quickest codec found whose loss is at most (1 + `loss_budget`) times that of the most exact one.

    After the most exact codec the median of the quicker ones is tried. If its loss is within the budget, only quicker
    ones are of interest; otherwise all that are no more exact are left out, as their loss is taken to be no less. A
    codec that was not tried is never chosen. None is tried if all trials would then take more than `plan.share` of the
    quickest training that may still be chosen. A budget of 0 keeps the most exact codec without trials, since a lower
    loss in a short trial is chance.

    Raises `TrainingFailed` if the training diverges with the most exact codec.
    """
    require_range("loss budget", least=0.0, loss_budget=loss_budget)
    exact, *others = plan.codecs
    if not plan.num_batches or loss_budget == 0.0:
        return CodecChoice(codec=exact, tried={})
    tried = {exact: trials[exact].run()}
    if not math.isfinite(tried[exact].loss):
        raise TrainingFailed(
            "loss budget: the training diverges with the most exact K and bits; lower the learning rate"
        )
    most = (1.0 + loss_budget) * tried[exact].loss
    chosen, left = exact, others
    while left:
        codec = _median(left)
        spent_s = math.fsum(each.seconds for each in tried.values())
        budget_s = plan.share * min(plan.run_s[each] for each in (chosen, *left))
        if spent_s + trials[codec].predicted_s() > budget_s:
            left = [each for each in left if each != codec]
            continue
        tried[codec] = trials[codec].run()
        # A loss of NaN is not within any budget.
        if tried[codec].loss <= most and math.isfinite(tried[codec].loss):
            chosen, left = codec, left[: left.index(codec)]
        else:
            left = [each for each in left if not codec.is_as_exact_as(each)]
    return CodecChoice(codec=chosen, tried=tried)


def _median(codecs: Sequence[SplitCodec]) -> SplitCodec:
    return codecs[len(codecs) // 2]


def _bisection(codecs: Sequence[SplitCodec]) -> Iterator[SplitCodec]:
    """Yield what is tried if all are within the budget: the median, that of the quicker half, … the quickest one."""
    while codecs:
        yield _median(codecs)
        codecs = codecs[: len(codecs) // 2]


def _most_exact(codecs: Sequence[SplitCodec]) -> SplitCodec:
    return min(codecs, key=lambda codec: (codec.window, -codec.bits, -codec.gradient_bits))
