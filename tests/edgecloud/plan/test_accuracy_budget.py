"""The choice of K and bits within a budget of loss, with trials that are scripted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.plan.accuracy_budget import (
    CodecChoice,
    SplitCodec,
    TrialPlan,
    Tried,
    choose_codec,
    plan_trials,
    worthwhile,
)
from socflower.errors import InfeasiblePlan, TrainingFailed
from tests.one_line import refused

NUM_BATCHES = 4000
CODECS = [
    SplitCodec(window=window, bits=bits, gradient_bits=back)
    for window in (0, 1, 2, 4, 8)
    for bits in (32, 8, 4)
    for back in (32, 8, 4)
]
EXACT = CODECS[0]
losses = st.lists(
    st.one_of(st.floats(0.1, 3.0), st.just(math.nan)), min_size=len(CODECS), max_size=len(CODECS)
).map(lambda values: {**dict(zip(CODECS, values, strict=True)), EXACT: 1.0})


@st.composite
def times(draw: st.DrawFn) -> dict[SplitCodec, float]:
    """Return seconds that a bottleneck drawn at random gives each codec; a wider window never takes longer."""
    edge, up, down, cloud = (draw(st.floats(0.01, 10.0)) for _ in range(4))

    def seconds(codec: SplitCodec) -> float:
        phases = (edge, up * codec.bits / 32, cloud, down * codec.gradient_bits / 32)
        return NUM_BATCHES * max(*phases, sum(phases) / (codec.window + 1))

    return {codec: seconds(codec) for codec in CODECS}


@dataclass
class Scripted:
    """Trials whose losses are given."""

    run_s: Mapping[SplitCodec, float]
    losses: Mapping[SplitCodec, float]
    num_batches: int = 0
    order: list[SplitCodec] = field(default_factory=list)

    def seconds(self, codec: SplitCodec, num_batches: int) -> float:
        return self.run_s[codec] * num_batches / NUM_BATCHES

    def plan(self) -> TrialPlan:
        plan = plan_trials(self.run_s, self.seconds, NUM_BATCHES)
        self.num_batches = plan.num_batches
        return plan

    def choose(self, loss_budget: float) -> tuple[TrialPlan, CodecChoice]:
        plan = self.plan()
        trials = {codec: _Trial(self, codec) for codec in plan.codecs}
        return plan, choose_codec(plan, trials, loss_budget)


@dataclass
class _Trial:
    script: Scripted
    codec: SplitCodec

    def predicted_s(self) -> float:
        return self.script.seconds(self.codec, self.script.num_batches)

    def run(self) -> Tried:
        self.script.order.append(self.codec)
        return Tried(loss=self.script.losses[self.codec], seconds=self.predicted_s())


@given(times(), losses, st.floats(0.0, 5.0))
def test_no_codec_beyond_the_budget_is_chosen_and_the_trials_take_a_quarter_at_most(
    run_s: dict[SplitCodec, float], losses: dict[SplitCodec, float], budget: float
) -> None:
    script = Scripted(run_s, losses)
    _, choice = script.choose(budget)
    assert choice.codec == EXACT or choice.tried[choice.codec].loss <= 1.0 + budget
    spent_s = sum(each.seconds for each in choice.tried.values())
    assert spent_s <= 0.25 * run_s[choice.codec] * (1 + 1e-9)
    assert len(set(script.order)) == len(script.order) and set(script.order) == set(choice.tried)
    # Of what was tried and is within the budget, it is the quickest.
    within = [codec for codec, each in choice.tried.items() if each.loss <= 1.0 + budget]
    assert not within or run_s[choice.codec] == min(run_s[codec] for codec in within)


@given(times(), losses)
def test_a_budget_of_zero_keeps_the_most_exact_codec_without_a_trial(
    run_s: dict[SplitCodec, float], losses: dict[SplitCodec, float]
) -> None:
    script = Scripted(run_s, losses)
    _, choice = script.choose(0.0)
    assert choice.codec == EXACT and not choice.tried and not script.order


@given(times())
def test_a_huge_budget_takes_the_quickest_codec(run_s: dict[SplitCodec, float]) -> None:
    plan, choice = Scripted(run_s, dict.fromkeys(CODECS, 1.0)).choose(1e9)
    assert run_s[choice.codec] == min(run_s[codec] for codec in plan.codecs)


@given(times())
def test_what_is_tried_is_faster_by_a_tenth_than_all_that_is_as_exact(
    run_s: dict[SplitCodec, float],
) -> None:
    tried = worthwhile(run_s)
    assert EXACT in tried
    for codec in CODECS:
        better = [
            other
            for other in CODECS
            if other != codec and other.is_as_exact_as(codec) and run_s[codec] > 0.9 * run_s[other]
        ]
        assert (codec in tried) == (not better)


@given(times())
def test_a_trial_lasts_two_windows_of_every_codec(run_s: dict[SplitCodec, float]) -> None:
    plan = Scripted(run_s, {}).plan()
    if plan.num_batches:
        assert all(plan.num_batches >= 2 * (codec.window + 1) for codec in plan.codecs)
    else:
        assert plan.codecs == worthwhile(run_s)


def test_all_that_is_no_more_exact_than_a_failure_is_left_out() -> None:
    """Then what is quicker in another way is still tried."""
    by_name = {
        EXACT: 100.0,
        SplitCodec(window=4, bits=32, gradient_bits=32): 50.0,
        SplitCodec(window=4, bits=8, gradient_bits=32): 40.0,
        SplitCodec(window=0, bits=4, gradient_bits=32): 30.0,
    }
    stale, both, narrow = list(by_name)[1:]
    script = Scripted(by_name, {EXACT: 1.0, stale: 2.0, both: 2.0, narrow: 1.05})
    _, choice = script.choose(0.1)
    assert choice.codec == narrow
    assert not (stale in script.order and both in script.order[script.order.index(stale) :])


def test_a_training_that_is_too_short_or_diverges_is_one_line() -> None:
    run_s = {EXACT: 100.0, CODECS[-1]: 10.0}
    refused(
        lambda: plan_trials(run_s, lambda codec, length: run_s[codec] * length / 50, 50),
        "50 batches",
        error=InfeasiblePlan,
    )
    script = Scripted(run_s, {EXACT: math.nan})
    refused(lambda: script.choose(0.1), "diverges", "learning rate", error=TrainingFailed)
    refused(lambda: script.choose(-0.1), "loss_budget = -0.1")
