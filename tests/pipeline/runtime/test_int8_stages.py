"""Stages in int8: close to FP32, the same bits however many micro-batches are in flight, and refused in a line."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from socflower.cluster import parse_cluster
from socflower.errors import TrainingFailed
from socflower.pipeline.plan import PipelinePlan, Plan, TwoDPlan
from socflower.pipeline.profiler.int8_parts import int8_part, require_int8
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.pipeline.profiler.measuring import measure_layers
from socflower.pipeline.profiler.module_problem import pipeline_problem
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.pipeline.runtime.trained_model import TrainedModel
from socflower.training.fp32 import FP32Trainer, sgd
from tests.one_line import refused
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import (
    TRAINER,
    assert_same,
    difference,
    minis,
    model,
    read,
    train_in_threads,
    train_together,
)

CUT = straight_plan((2, 4, 5), ((6,), (6,), (6,)), 4)
"""Each cut is crossed by one tensor."""

SHARED = straight_plan((2, 5), ((4, 2), (6,)), 4)
PHONES = parse_cluster({"boards": 1, "socs_per_board": 2, "device": "snapdragon-865"})
TWO_D = TwoDPlan(
    groups=(straight_plan((2, 5), ((5,), (5,)), 2), straight_plan((5,), ((3,),), 2, first_soc=2))
)


def change(end: TrainedModel, module: nn.Module) -> Tensor:
    trained = {name: own for name, own in module.named_parameters() if own.requires_grad}
    return difference(end.weights, trained)


def cosine(end: TrainedModel, other: TrainedModel, module: nn.Module) -> float:
    """Return the cosine of the changes that two trainings have made."""
    return float(cosine_similarity(change(end, module), change(other, module), dim=0))


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("plan", "int8_socs"),
    [(CUT, (0,)), (CUT, (1,)), (CUT, (2,)), (SHARED, (0,)), (TWO_D, (0, 1, 2))],
)
def test_an_update_goes_where_that_in_fp32_goes(
    plan: Plan, int8_socs: tuple[int, ...], norm: bool
) -> None:
    module, steps = model(norm=norm), minis(3, plan.num_samples)
    exact = train_together(module, plan, steps)
    int8 = train_together(module, plan, steps, int8_socs=int8_socs)
    assert cosine(exact, int8, module) > 0.9
    lengths = [float(change(end, module).norm()) for end in (int8, exact)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.15)
    assert int8.losses == pytest.approx(exact.losses, rel=0.1) and int8.losses != exact.losses
    assert {soc for soc, label in int8.devices.items() if ", int8 " in label} == {*int8_socs}
    for name, buffer in module.named_buffers():
        if name.endswith("num_batches_tracked"):
            assert int8.weights[name] == exact.weights[name] > buffer
        else:
            assert torch.allclose(int8.weights[name], exact.weights[name], atol=0.05), name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_how_many_micro_batches_are_in_flight_changes_no_bit(dropout: float) -> None:
    """Each has an engine of its own, of the same weights, exponents and statistics."""
    module, steps = model(norm=True, dropout=dropout), minis(4, CUT.num_samples - 1)
    first, *others = (
        train_together(module, with_in_flight(counts), steps, int8_socs=(0, 1, 2))
        for counts in ((1, 1, 1), (3, 2, 1), (4, 4, 4))
    )
    assert others[1].peak_in_flight == {0: 4, 1: 4, 2: 4}
    assert others[1].peak_bytes[1] > first.peak_bytes[1]
    for other in others:
        assert_same(first, replace(other, peak_in_flight=first.peak_in_flight))


def with_in_flight(counts: tuple[int, ...]) -> PipelinePlan:
    stages = (
        replace(stage, in_flight=count) for stage, count in zip(CUT.stages, counts, strict=True)
    )
    return replace(CUT, stages=tuple(stages))


def test_devices_of_a_stage_round_their_masters_alike() -> None:
    """So that two devices of equal shares have the gradient of one with both, but for the scales of their halves."""
    module, steps = model(), minis(1, CUT.num_samples)
    halves = train_together(
        module, straight_plan((2, 5), ((3, 3), (6,)), 4), steps, int8_socs=(0, 1)
    )
    whole = train_together(module, straight_plan((2, 5), ((6,), (6,)), 4), steps, int8_socs=(0,))
    assert halves.losses == pytest.approx(whole.losses, rel=1e-2)
    assert cosine(halves, whole, module) > 0.98


@pytest.mark.parametrize(
    "coding",
    [ActivationCoding(bits=8, gradient_bits=8, feedback="rank-one"), ActivationCoding(bits=4)],
)
def test_coded_activations_compose(coding: ActivationCoding) -> None:
    module, steps = model(norm=True), minis(3, CUT.num_samples)
    options = {"int8_socs": (0, 1, 2), "coding": coding}
    coded = train_together(module, CUT, steps, **options)
    assert cosine(train_together(module, CUT, steps), coded, module) > 0.8
    assert_same(coded, train_in_threads(module, CUT, steps, **options))


def test_any_loss_is_computed_in_fp32_on_what_the_stage_makes() -> None:
    def squares(made: Tensor, labels: Tensor) -> Tensor:
        return ((made - nn.functional.one_hot(labels, 5)) ** 2).mean()

    trainer, module, steps = replace(TRAINER, loss=squares), model(), minis(3, CUT.num_samples)
    exact = train_together(module, CUT, steps, trainer)
    int8 = train_together(module, CUT, steps, trainer, int8_socs=(2,))
    assert int8.losses == pytest.approx(exact.losses, rel=0.05)
    assert cosine(exact, int8, module) > 0.95


def test_frozen_layers_stay_and_pass_gradients_on() -> None:
    module = model()
    module.blocks[1].requires_grad_(False)
    steps = minis(2, CUT.num_samples)
    int8 = train_together(module, CUT, steps, int8_socs=(0, 1, 2))
    assert not any(name.startswith("blocks.1.") for name in int8.weights)
    assert cosine(train_together(module, CUT, steps), int8, module) > 0.9


def test_the_state_of_an_optimiser_goes_on_in_the_other_arithmetic() -> None:
    module, trainer = model(), FP32Trainer(optimizer=sgd(0.1, momentum=0.9), device="cpu")
    steps = minis(4, CUT.num_samples)
    first = train_together(module, CUT, steps[:2], trainer, int8_socs=(1,))
    module.load_state_dict({**module.state_dict(), **first.weights})
    exact, int8 = (
        train_together(module, CUT, steps[2:], trainer, state=first.state, int8_socs=int8_socs)
        for int8_socs in ((), (0, 2))
    )
    fresh = train_together(module, CUT, steps[2:], trainer)
    assert cosine(exact, int8, module) > 0.9
    assert change(int8, module).norm() > 1.1 * change(fresh, module).norm()


def test_a_loss_that_is_not_finite_is_one_line() -> None:
    trainer = replace(TRAINER, loss=lambda made, labels: made.sum() * float("nan"))
    train = partial(train_together, model(), CUT, minis(1, CUT.num_samples), trainer)
    refused(lambda: train(int8_socs=(0, 1, 2)), "rate", error=TrainingFailed)


def test_layers_are_measured_in_int8() -> None:
    module = model(norm=True)
    blocks = read_model(module, (1, 6, 6), "residual", granularity=Granularity.BLOCKS).chain
    before = copy.deepcopy(module.state_dict())
    measured = measure_layers(module, (1, 6, 6), (2, 4), chain=blocks, repeats=1, in_int8=True)
    assert (measured.forward_s > 0).all() and (measured.backward_s > 0).all()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def sequential(*layers: nn.Module) -> nn.Module:
    start = nn.Conv2d(1, 4, 3), nn.ReLU(), *layers, nn.Flatten()
    return nn.Sequential(*start, nn.Linear(64, 8), nn.Linear(8, 5))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).mean(1))


IMAGE = (1, 6, 6)
PIXELS = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5))


@pytest.mark.parametrize(
    ("module", "example", "cuts", "named"),
    [
        (model(), IMAGE, "layers", ("2 ", "layer 1", "'blocks'")),
        (Tokens(), torch.zeros(2, 4, dtype=torch.int64), "layers", ("int64", "layer 0")),
        (PIXELS, (3, 6), "layers", ("layer 0",)),
        (sequential(), IMAGE, "operations", ("'operations'", "'layers'")),
    ],
)
def test_what_int8_does_not_have_is_refused_before_anything_starts(
    module: nn.Module, example: Any, cuts: str, named: tuple[str, ...]
) -> None:
    options = {"batch_size": 8, "int8_socs": "auto", "cuts": cuts}
    refused(lambda: pipeline_problem(module, example, PHONES, **options), "int8_socs", *named)


def test_a_member_refuses_what_its_own_stage_does_not_have() -> None:
    """With a plan of one's own, whose problem was not asked for int8."""
    plan = straight_plan((1, 3, 5), ((6,), (6,), (6,)), 4)
    steps = minis(1, plan.num_samples)
    refused(lambda: train_together(model(), plan, steps, int8_socs=(1,)), "2 ", "layer 2")


def test_models_without_several_tensors_at_a_cut_are_accepted() -> None:
    module = model(norm=True, dropout=0.3)
    require_int8(read_model(module, IMAGE, "residual", granularity=Granularity.BLOCKS), module)
    # Cut behind the layer that flattens.
    part = int8_part(model(), read(model()).chain, 3, 4)
    assert (part.input_shape, part.output_shape) == ((4, 6, 6), (144,))
