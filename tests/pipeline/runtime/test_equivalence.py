"""Every plan computes the gradients of one device, and every way to run it the same bits."""

import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from socflower.pipeline.plan import PipelinePlan, Plan, TwoDPlan, from_json, to_json
from socflower.pipeline.runtime.micro_batches import micro_batches
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.pipeline.schedule.order import RULES, ScheduledPass
from socflower.wire.codecs.error_feedback import KeptError, diagonal, rank_one
from socflower.wire.codecs.quantisation import decode, encode
from tests.pipeline.runtime.training import (
    data,
    minis,
    model,
    plan_of,
    read,
    train_alone,
    train_in_threads,
    train_together,
)

NUM_LAYERS = 6


@st.composite
def pipelines(draw: st.DrawFn, first_soc: int = 0) -> PipelinePlan:
    """Return a plan of one to four stages on one to three devices each."""
    cuts = sorted(draw(st.sets(st.integers(0, NUM_LAYERS - 2), max_size=3)))
    size = draw(st.integers(1, 9))
    shares = []
    for _ in range(len(cuts) + 1):
        width = draw(st.integers(1, min(3, size)))
        ends = (
            sorted(draw(st.sets(st.integers(1, size - 1), min_size=width - 1, max_size=width - 1)))
            if width > 1
            else []
        )
        bounds = [0, *ends, size]
        shares.append([after - before for before, after in pairwise(bounds)])
    num_devices = sum(map(len, shares))
    samples_on = draw(
        st.none() | st.integers(first_soc, first_soc + num_devices)
    )  # the last one has no stage
    return plan_of(
        (*cuts, NUM_LAYERS - 1),
        shares,
        draw(st.integers(1, 5)),
        first_soc=first_soc,
        rule=draw(st.sampled_from(list(RULES.values()))),
        samples_on=samples_on,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    first = draw(pipelines())
    if draw(st.booleans()):
        return first
    return TwoDPlan(groups=(first, draw(pipelines(first_soc=len(first.socs) + 1))))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=25, deadline=None)
@given(plan=plans(), num_samples=st.integers(1, 24), seed=st.integers(0, 9))
def test_a_plan_computes_the_weights_of_one_device(plan: Plan, num_samples: int, seed: int) -> None:
    module, steps = model(seed), minis(2, min(num_samples, plan.num_samples), seed)
    alone, end = train_alone(module, steps), train_together(module, plan, steps)
    assert end.weights.keys() == alone.keys()
    for name, weight in alone.items():
        assert torch.allclose(end.weights[name], weight, atol=1e-6), name
    limits = {
        soc: stage.in_flight
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for soc in stage.devices
    }
    assert all(peak <= limits[soc] for soc, peak in end.peak_in_flight.items())


@settings(max_examples=8, deadline=None)
@given(plan=plans(), coded=st.booleans(), seed=st.integers(0, 9))
def test_threads_with_random_delays_compute_the_same_bits_within_their_places_in_flight(
    plan: Plan,
    coded: bool,
    seed: int,
) -> None:
    module = model(seed, norm=plan.pipelines[0].micro_batch_size > 6, dropout=0.3)
    steps, coding = (
        minis(2, max(1, plan.num_samples - 1), seed),
        ActivationCoding(bits=8 if coded else 32),
    )
    dice = random.Random(seed)

    def delay(soc: int, operation: ScheduledPass) -> None:
        time.sleep(dice.random() * 0.003)

    together = train_together(module, plan, steps, coding=coding)
    threads = train_in_threads(module, plan, steps, coding=coding, on_pass=delay)
    assert equal(dict(together.weights), dict(threads.weights))
    assert together.losses == threads.losses and together.state == threads.state
    assert together.peak_in_flight == threads.peak_in_flight


@given(plan=plans())
def test_a_plan_survives_its_message(plan: Plan) -> None:
    assert from_json(to_json(plan)) == plan


@given(plan=pipelines(), num_samples=st.integers(0, 60))
def test_micro_batches_cover_all_samples_once_and_are_nearly_equal(
    plan: PipelinePlan, num_samples: int
) -> None:
    batches = micro_batches(plan, num_samples)
    rows = [row for batch in batches for row in range(batch.first, batch.first + batch.size)]
    assert rows == list(range(num_samples))
    assert max((batch.size for batch in batches), default=0) <= plan.micro_batch_size
    assert (
        max((batch.size for batch in batches), default=0)
        - min((batch.size for batch in batches), default=0)
        <= 1
    )
    for batch in batches:
        assert all(sum(shares) == batch.size for shares in batch.shares)
    full = micro_batches(plan, plan.num_samples)
    assert [batch.shares for batch in full] == [
        tuple(stage.shares for stage in plan.stages)
    ] * plan.num_micro_batches


def test_an_optimiser_continues_under_another_plan() -> None:
    module, steps = model(), minis(4, 16)
    whole = train_together(module, plan_of((2, 5), ((4,), (4,)), 4), steps)
    half = train_together(module, plan_of((2, 5), ((4,), (4,)), 4), steps[:2])
    module.load_state_dict(half.weights)
    end = train_together(
        module, plan_of((0, 3, 5), ((4,), (4,), (4,)), 4), steps[2:], state=half.state
    )
    for name, weight in whole.weights.items():
        assert torch.allclose(end.weights[name], weight, atol=1e-6), name
    fresh = train_together(module, plan_of((0, 3, 5), ((4,), (4,), (4,)), 4), steps[2:])
    assert not torch.allclose(fresh.weights["last.weight"], whole.weights["last.weight"], atol=1e-6)


@pytest.mark.parametrize("form", ["diagonal", "rank-one"])
def test_error_feedback_corrects_a_gradient_by_the_error_of_its_own_activations(form: Any) -> None:
    """With one cut and plain SGD, the first stage's step is that of the corrected gradient, computed by hand."""
    module, steps, plan = model(), minis(1, 8), plan_of((2, 5), ((4,), (4,)), 2)
    coding = ActivationCoding(bits=4, feedback=form)
    end = train_together(module, plan, steps, coding=coding)
    front, back = read(module).stage(module, 0, 2), read(module).stage(module, 3, 5)
    inputs, labels = data().batch(torch.from_numpy(steps[0].indices))
    for rows in (slice(0, 4), slice(4, 8)):
        features = front(inputs[rows])
        assert len(features) == 1
        sent = torch.from_numpy(decode(encode(features[0].detach().numpy(), 4))).requires_grad_()
        (functional.cross_entropy(back(sent), labels[rows]) * 0.5).backward()
        correct = diagonal if form == "diagonal" else rank_one
        error = KeptError.of(features[0].detach().numpy(), sent.detach().numpy()).error()
        assert sent.grad is not None
        features[0].backward(torch.from_numpy(correct(sent.grad.numpy(), error)))
    for name, parameter in front.named_parameters():
        assert parameter.grad is not None
        stepped = parameter - 0.1 * parameter.grad
        assert torch.allclose(end.weights[name], stepped, rtol=0.0, atol=1e-7), name
    plain = train_together(module, plan, steps, coding=ActivationCoding(bits=4))
    assert not torch.equal(plain.weights["first.weight"], end.weights["first.weight"])


def test_the_model_of_these_tests_has_cuts_that_several_tensors_cross() -> None:
    crossing = [len(piece.leaving) for piece in read(model()).chain.pieces]
    assert len(crossing) == NUM_LAYERS and max(crossing) == 2


@pytest.mark.parametrize(("bits", "most"), [(16, 2e-3), (8, 0.05), (4, 1.0)])
def test_coded_activations_change_weights_as_little_as_their_bits_say(
    bits: int, most: float
) -> None:
    module, steps, plan = model(), minis(3, 16), plan_of((1, 3, 5), ((4,), (2, 2), (4,)), 4)
    exact = train_together(module, plan, steps)
    coded = train_together(
        module, plan, steps, coding=ActivationCoding(bits=bits, gradient_bits=bits)
    )
    change = torch.cat(
        [
            (exact.weights[name] - parameter.detach()).flatten()
            for name, parameter in module.named_parameters()
        ]
    ).norm()
    error = torch.cat(
        [(exact.weights[name] - coded.weights[name]).flatten() for name in exact.weights]
    ).norm()
    assert 0.0 < error / change < most
