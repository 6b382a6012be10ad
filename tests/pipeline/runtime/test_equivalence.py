"""Every plan computes the gradients of one device, and every way to run it the same bits."""

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from socflower.pipeline.plan import PipelinePlan, Plan, from_json, to_json
from socflower.pipeline.runtime.micro_batches import micro_batches
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.pipeline.schedule.order import ScheduledPass
from socflower.wire.codecs.error_feedback import KeptError, diagonal, rank_one
from socflower.wire.codecs.quantisation import decode, encode
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import (
    NUM_LAYERS,
    assert_close,
    assert_same,
    data,
    difference,
    minis,
    model,
    pipelines,
    plans,
    read,
    train_alone,
    train_in_threads,
    train_together,
)


@settings(max_examples=8, deadline=None)
@given(plan=plans(), num_samples=st.integers(1, 24), seed=st.integers(0, 9))
def test_a_plan_computes_the_weights_of_one_device(plan: Plan, num_samples: int, seed: int) -> None:
    module, steps = model(seed), minis(2, min(num_samples, plan.num_samples), seed)
    end = train_together(module, plan, steps)
    assert_close(end.weights, train_alone(module, steps), 1e-6)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            assert max(end.peak_in_flight[soc] for soc in stage.devices) <= stage.in_flight


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(plan=plans(), coded=st.booleans(), seed=st.integers(0, 9))
def test_threads_with_random_delays_compute_the_same_bits_within_their_places_in_flight(
    plan: Plan, coded: bool, seed: int
) -> None:
    module = model(seed, norm=plan.pipelines[0].micro_batch_size > 6, dropout=0.3)
    steps = minis(2, max(1, plan.num_samples - 1), seed)
    coding, dice = ActivationCoding(bits=8 if coded else 32), random.Random(seed)

    def delay(soc: int, operation: ScheduledPass) -> None:
        time.sleep(dice.random() * 0.001)

    together = train_together(module, plan, steps, coding=coding)
    assert_same(together, train_in_threads(module, plan, steps, coding=coding, on_pass=delay))


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
    sizes = [batch.size for batch in batches] or [0]
    assert max(sizes) <= min(plan.micro_batch_size, min(sizes) + 1)
    for batch in batches:
        assert all(sum(shares) == batch.size for shares in batch.shares)
    full = micro_batches(plan, plan.num_samples)
    planned = tuple(stage.shares for stage in plan.stages)
    assert [batch.shares for batch in full] == [planned] * plan.num_micro_batches


def test_an_optimiser_continues_under_another_plan() -> None:
    module, steps = model(), minis(4, 16)
    plan, other = (straight_plan(cuts, ((4,),) * len(cuts), 4) for cuts in ((2, 5), (0, 3, 5)))
    whole = train_together(module, plan, steps)
    half = train_together(module, plan, steps[:2])
    module.load_state_dict(half.weights)
    assert_close(
        train_together(module, other, steps[2:], state=half.state).weights, whole.weights, 1e-6
    )
    fresh = train_together(module, other, steps[2:])
    assert not torch.allclose(fresh.weights["last.weight"], whole.weights["last.weight"], atol=1e-6)


@pytest.mark.parametrize("form", ["diagonal", "rank-one"])
def test_error_feedback_corrects_a_gradient_by_the_error_of_its_own_activations(form: Any) -> None:
    """With one cut and plain SGD, the first stage's step is that of the corrected gradient, computed by hand."""
    module, steps, plan = model(), minis(1, 8), straight_plan((2, 5), ((4,), (4,)), 2)
    coding = ActivationCoding(bits=4, feedback=form)
    end = train_together(module, plan, steps, coding=coding)
    front, back = read(module).stage(module, 0, 2), read(module).stage(module, 3, 5)
    inputs, labels = data().batch(torch.from_numpy(steps[0].indices))
    for rows in (slice(0, 4), slice(4, 8)):
        (features,) = front(inputs[rows])
        kept = features.detach().numpy()
        sent = torch.from_numpy(decode(encode(kept, 4))).requires_grad_()
        (functional.cross_entropy(back(sent), labels[rows]) * 0.5).backward()
        correct = diagonal if form == "diagonal" else rank_one
        error = KeptError.of(kept, sent.detach().numpy()).error()
        assert sent.grad is not None
        features.backward(torch.from_numpy(correct(sent.grad.numpy(), error)))
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
    module, steps = model(), minis(3, 16)
    plan = straight_plan((1, 3, 5), ((4,), (2, 2), (4,)), 4)
    coding = ActivationCoding(bits=bits, gradient_bits=bits)
    exact, coded = (
        train_together(module, plan, steps),
        train_together(module, plan, steps, coding=coding),
    )
    error = difference(exact.weights, coded.weights).norm()
    assert 0.0 < error / difference(exact.weights, dict(module.named_parameters())).norm() < most
