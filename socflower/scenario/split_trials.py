"""A split training in virtual time without training, and the trials of its calibration: which K and bits, how long."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

from socflower.edgecloud.plan import cost_model
from socflower.edgecloud.plan.accuracy_budget import (
    SplitCodec,
    TrialPlan,
    plan_trials,
    worthwhile,
)
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.split_pipeline import Timeline, moved, simulate_split
from socflower.scenario.split_setting import SplitSetting, spans_of
from socflower.sim import EventClock

_WINDOWS, _WIDTHS = (0, 1, 2, 4, 8), (32, 8, 4)
"""The K and the bits that a calibration may choose."""
_PREDICTED_BATCHES = 200
"""The rest of a longer training is predicted to take as long for each batch."""


def run_split(setting: SplitSetting, clock: EventClock) -> None:
    """Let the whole training pass on a clock, without training."""
    parties: Sequence[Party] = setting.parties()
    for first, num_batches in spans_of(setting.round_ends()):
        parties = moved(parties, _pass(setting, parties, first, num_batches, clock))


def _pass(
    setting: SplitSetting, parties: Sequence[Party], first: int, num_batches: int, clock: EventClock
) -> Timeline:
    return simulate_split(
        parties,
        num_batches,
        first,
        clock=clock,
        cluster=setting.cluster,
        cloud=setting.mode,
        uplink=setting.uplink,
        cloud_processors=setting.scenario.split.cloud_processors,
        reverse=setting.is_reverse,
    )


def predicted_s(setting: SplitSetting, num_batches: int, start_s: float = 0.0) -> float:
    """Return the seconds of the first batches without heat and users, if they begin at `start_s`."""
    clock = EventClock(setting.cluster)
    nothing = dict.fromkeys(("soc_seconds", "energy_j", "num_bytes"), ())
    clock.restore({"duration_s": start_s, **nothing})
    return _pass(setting, setting.parties(), 0, num_batches, clock).duration_s


def with_codec(setting: SplitSetting, codec: SplitCodec, trial_batches: int) -> SplitSetting:
    """Return the setting with the values of a codec for what is to be calibrated."""
    split = setting.scenario.split
    values = {
        "window": ((0.0, float(codec.window)),),
        "bits": (codec.bits,),
        "gradient_bits": codec.gradient_bits,
    }
    given: dict[str, Any] = {key: values[key] for key in split.calibrated}
    other = copy(setting)
    # Of the other codec.
    other.__dict__.pop("_initial_plans", None)
    other.trial_batches = trial_batches
    # With K = 0 every batch is a group.
    given["grouped"] = split.grouped and codec.window > 0
    chosen = split.replaced(**given, loss_budget=None)
    other.scenario = setting.scenario.replaced(edgecloud=chosen)
    other.costs = tuple(
        replace(costs, gradient_bits=codec.gradient_bits) for costs in setting.costs
    )
    return other


def planned_trials(setting: SplitSetting) -> TrialPlan:
    """Return the trials of `SplitSetting.trial_plan`."""
    codecs, num_batches = tuple(_codecs(setting)), setting.total_batches
    if not setting.scenario.split.loss_budget:
        return TrialPlan(codecs=codecs[:1], num_batches=0, run_s={}, share=0.0)
    settings = {codec: with_codec(setting, codec, 0) for codec in codecs}
    # A formula for what each codec gains, since the pipeline takes long to simulate.
    formula = {codec: _formula_s(each) for codec, each in settings.items()}
    batches = min(num_batches, _PREDICTED_BATCHES)
    run_s = {
        codec: predicted_s(settings[codec], batches) * num_batches / batches
        for codec in worthwhile(formula)
    }
    return plan_trials(
        run_s, lambda codec, length: predicted_s(settings[codec], length), num_batches
    )


def _codecs(setting: SplitSetting) -> Iterator[SplitCodec]:
    """Yield the codecs that a calibration may choose, the most exact one first; what is given has one value."""
    split = setting.scenario.split
    widths, gradient_bits = split.widths(setting.scenario.strategy.name)
    windows: tuple[int, ...] = (max(limit for _, limit in setting.schedule.steps),)
    if "window" in split.calibrated and not setting.is_sequential:
        windows = _WINDOWS
    for window, bits, back in product(
        windows,
        _WIDTHS if "bits" in split.calibrated else (min(widths),),
        _WIDTHS if "gradient_bits" in split.calibrated else (gradient_bits,),
    ):
        yield SplitCodec(window=window, bits=bits, gradient_bits=back)


def _formula_s(setting: SplitSetting) -> float:
    """Return the seconds of the training by F26, on mean rates."""
    return max(
        cost_model.predicted_s(
            party.costs,
            party.split_plan,
            setting.planned_rates(party.bandwidth_profile.mean_rates()),
            setting.total_batches,
            reverse=setting.is_reverse,
        )
        for party in setting.parties()
    )
