"""Calibrates K and the bits of a split training: trials train its first batches, and it goes on from one of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO
from typing import TYPE_CHECKING, Any, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord

from socflower.edgecloud.plan.accuracy_budget import (
    CodecChoice,
    SplitCodec,
    TrialPlan,
    Tried,
    choose_codec,
)
from socflower.errors import TrainingFailed
from socflower.flower_adapter import log
from socflower.scenario.app.round_record import round_end_of
from socflower.scenario.split_setting import SplitSetting
from socflower.scenario.split_trials import predicted_s, run_split, with_codec
from socflower.sim import EventClock
from socflower.strategies.split_replay import SplitReplay

if TYPE_CHECKING:
    from socflower.scenario.app.strategy import RunParts

MakeSplit: TypeAlias = Callable[[SplitSetting, str], SplitReplay]


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedSplit:
    """A split training with its K and bits."""

    setting: SplitSetting
    strategy: SplitReplay
    # What it starts from after its trial; None: the arrays of the run.
    arrays: ArrayRecord | None = None


def calibrated_split(parts: "RunParts", make: MakeSplit) -> CalibratedSplit:
    """Return the training with the K and bits that it is to calibrate, or as it is if all are given.

    `make` returns the strategy of a setting, whose states have the name of a trial. A resumed run has its calibration
    in the checkpoint. Otherwise trials take virtual time and joules of the run, and the chosen one is its first round.
    """
    setting, record = parts.run.split_setting, parts.record
    budget = setting.scenario.split.loss_budget
    if budget is None:
        return CalibratedSplit(setting=setting, strategy=make(setting, ""))
    if known := record.warm_up:
        codec = SplitCodec(**{key: known[key] for key in ("window", "bits", "gradient_bits")})
        chosen = with_codec(setting, codec, known["num_batches"])
        return CalibratedSplit(setting=chosen, strategy=make(chosen, codec.name))
    plan = setting.trial_plan
    initial = record.entry(0, parts.arrays, None)[0]
    trials = {codec: _Trial(parts, codec, plan, make) for codec in plan.codecs}
    choice = choose_codec(plan, trials, budget)
    best = trials[choice.codec]
    for codec, trial in trials.items():
        if codec in choice.tried and trial is not best:
            trial.strategy.method.close()
    document = _document(choice, plan, parts)
    if not choice.tried:
        record.warm_up = document
        return CalibratedSplit(setting=best.setting, strategy=best.strategy)
    record.begin_with(
        [initial, best.entry],
        document,
        best.strategy.num_rounds,
        best.arrays,
        best.strategy.state,
    )
    return CalibratedSplit(setting=best.setting, strategy=best.strategy, arrays=best.arrays)


def undisturbed_s(setting: SplitSetting, calibration: Mapping[str, Any]) -> float:
    """Return the seconds of a calibrated training without heat and users, with those that its other trials took."""
    clock = EventClock(setting.cluster)
    run_split(setting, clock)
    others = (s for name, s in calibration["seconds"].items() if name != calibration["chosen"])
    return clock.now_s + math.fsum(others)


class _Trial:
    """The first batches with one codec."""

    def __init__(
        self, parts: "RunParts", codec: SplitCodec, plan: TrialPlan, make: MakeSplit
    ) -> None:
        self._num_batches = plan.num_batches
        self.setting = with_codec(parts.run.split_setting, codec, self._num_batches)
        self.strategy = make(self.setting, codec.name)
        self.arrays, self.entry = parts.arrays, dict[str, Any]()
        self._parts, self._codec = parts, codec
        self._must_train = codec == plan.codecs[0]

    def predicted_s(self) -> float:
        """Return the predicted seconds of the trial if it begins now."""
        return predicted_s(self.setting, self._num_batches, self._parts.clock.now_s)

    def run(self) -> Tried:
        """Train the first round; a loss of NaN if it leaves no model."""
        parts, began_s = self._parts, self._parts.clock.now_s
        try:
            self.arrays = self.strategy.train_round(
                1,
                parts.grid,
                parts.arrays,
                timeout_s=parts.scenario.train.reply_timeout_s,
                train_config=ConfigRecord({**parts.frozen, **parts.record.train_config}),
            )
        except TrainingFailed as error:
            if self._must_train:
                raise
            log(INFO, "calibration: not with %s: %s", self._codec.name, error)
            loss = math.nan
        else:
            self.entry, metrics = parts.record.entry(1, self.arrays, round_end_of(self.strategy))
            loss = metrics.loss
        tried = Tried(loss=loss, seconds=parts.clock.now_s - began_s)
        log(
            INFO,
            "calibration: %s: loss %.4f, %.4g s",
            self._codec.name,
            tried.loss,
            tried.seconds,
        )
        return tried


def _document(choice: CodecChoice, plan: TrialPlan, parts: "RunParts") -> dict[str, Any]:
    """Return the result's `warm_up`."""
    codec, tried = choice.codec, choice.tried
    return {
        "chosen": codec.name,
        "window": codec.window,
        "bits": codec.bits,
        "gradient_bits": codec.gradient_bits,
        "loss_budget": parts.scenario.split.loss_budget,
        "loss": {
            each.name: one.loss if math.isfinite(one.loss) else None for each, one in tried.items()
        },
        "seconds": {each.name: one.seconds for each, one in tried.items()},
        "untried": [each.name for each in plan.codecs if each not in tried],
        "num_batches": plan.num_batches,
        "num_rounds": 1 if tried else 0,
        "virtual_s": parts.clock.now_s,
        "energy_j": parts.clock.usage.total_energy_j,
    }
