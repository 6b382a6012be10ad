"""Every plan computes the gradients of the same split run serially in plain torch, also where layers depend on batches.

The reference knows nothing of graphs, cuts or messages: a device of a stage is a copy of its layers, written out by
hand, that gets its rows only; `torch.cat` joins what a stage makes, and one autograd graph goes through all of it.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, TwoDPlan
from socflower.training.fp32 import FP32Trainer, sgd
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import (
    Residual,
    data,
    minis,
    model,
    pipelines,
    plans,
    read,
    train_together,
)

ONE_TO_ONE = FP32Trainer(optimizer=sgd(1.0, momentum=0.0), device="cpu")
"""A step by this is the gradient."""

Tensors = tuple[Tensor, ...]


def layers_of(own: Residual) -> list[Callable[..., Tensors]]:
    """Return the model's layers as the profiler cuts them: before each one that multiplies."""
    first, second = own.blocks
    return [
        lambda x: (own.first(x),),
        lambda x: (x, first[:-1](x)),
        lambda x, inner: (torch.relu(x + first[-1](inner)),),
        lambda x: (x, second[:-1](x)),
        lambda x, inner: (torch.relu(x + second[-1](inner)).flatten(1),),
        lambda x: (own.last(x),),
    ]


@dataclass
class Device:
    """A copy of the model, and the samples that it has trained."""

    model: Residual
    num_samples: int = 0


def run_split(
    plan: PipelinePlan, stages: Sequence[Sequence[Device]], inputs: Tensor, labels: Tensor
) -> Tensor:
    """Return the sum of the samples' losses; `stages` are the devices, by stage."""
    total = torch.zeros(())
    count = -(-len(inputs) // plan.micro_batch_size)
    for rows in np.array_split(np.arange(len(inputs)), count):
        made: Tensors = (inputs[rows],)
        for stage, devices in zip(plan.stages, stages, strict=True):
            shares = split_batch(len(rows), stage.shares)
            split = zip(*(tensor.split(shares) for tensor in made), strict=True)
            parts = []
            for device, part in zip(devices, split, strict=True):
                device.num_samples += len(part[0])
                if len(part[0]):
                    for layer in layers_of(device.model)[stage.first_layer : stage.last_layer + 1]:
                        part = layer(*part)
                    parts.append(part)
            made = tuple(map(torch.cat, zip(*parts, strict=True)))
        # Each device of the last stage has the mean of its rows, weighted by them: of all, the sum.
        total = total + functional.cross_entropy(made[0], labels[rows], reduction="sum")
    return total


def serial(
    module: Residual, plan: Plan, indices: np.ndarray
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients, and the devices' means of the running statistics by their samples, by name."""
    inputs, labels = data().batch(torch.from_numpy(indices))
    sizes = split_batch(len(indices), [pipeline.num_samples for pipeline in plan.pipelines])
    total, devices = torch.zeros(()), []
    for pipeline, x, y in zip(
        plan.pipelines, inputs.split(sizes), labels.split(sizes), strict=True
    ):
        stages = [
            [Device(copy.deepcopy(module).train()) for _ in stage.devices]
            for stage in pipeline.stages
        ]
        if len(x):
            total = total + run_split(pipeline, stages, x, y)
        devices += [device for stage in stages for device in stage]
    (total / len(indices)).backward()
    gradients = {name: torch.zeros_like(weight) for name, weight in module.named_parameters()}
    for name, gradient in gradients.items():
        for device in devices:
            own = device.model.get_parameter(name).grad
            gradient += 0.0 if own is None else own
    statistics = {}
    for name, start in module.named_buffers():
        buffers = [device.model.get_buffer(name) for device in devices]
        # A device whose stage lacks the layer has left its statistics as they were.
        used = [number for number, own in enumerate(buffers) if not torch.equal(own, start)]
        own = torch.stack([buffers[number] for number in used])
        if start.is_floating_point():
            weights = [devices[number].num_samples for number in used]
            mean = np.average(own.double().numpy(), axis=0, weights=weights)
            statistics[name] = torch.from_numpy(mean).float()
        else:
            statistics[name] = own.amax(0)
    return gradients, statistics


def check(module: Residual, plan: Plan, num_samples: int, seed: int) -> None:
    steps = minis(1, num_samples, seed)
    gradients, statistics = serial(module, plan, steps[0].indices)
    end = train_together(module, plan, steps, ONE_TO_ONE)
    for name, parameter in module.named_parameters():
        found = parameter.detach() - end.weights[name]
        torch.testing.assert_close(found, gradients[name], rtol=1e-5, atol=2e-6)
    for name, expected in statistics.items():
        torch.testing.assert_close(end.weights[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=8)
@given(plan=plans(), missing=st.integers(0, 8), seed=st.integers(0, 9))
def test_a_plan_computes_the_gradients_of_the_same_split_run_serially(
    plan: Plan, missing: int, seed: int
) -> None:
    check(model(seed, norm=True), plan, max(1, plan.num_samples - missing), seed)


@settings(max_examples=8)
@given(plan=pipelines())
def test_devices_with_rows_of_their_own_have_other_gradients_than_one_with_all(
    plan: PipelinePlan,
) -> None:
    """The reference is sharp: with BatchNorm it differs from the whole batch, which the test above must not accept."""
    module = model(3, norm=True)
    steps = minis(1, plan.num_samples)
    gradients, _ = serial(module, plan, steps[0].indices)
    whole, _ = serial(module, straight_plan((5,), ((plan.num_samples,),), 1), steps[0].indices)
    same = all(torch.allclose(gradients[name], whole[name], rtol=1e-5, atol=2e-6) for name in whole)
    widths = [
        len(stage.devices)
        for stage in plan.stages
        if stage.first_layer <= 3 and stage.last_layer >= 1
    ]
    assert same == (plan.num_micro_batches == 1 and max(widths) == 1)


def test_pipelines_side_by_side_keep_statistics_by_their_samples() -> None:
    second = straight_plan((5,), ((3,),), 2, first_soc=3)
    plan = TwoDPlan(groups=(straight_plan((2, 5), ((5, 1), (6,)), 2), second))
    check(model(norm=True), plan, plan.num_samples, 0)


def test_layers_are_cut_where_the_reference_cuts_them() -> None:
    module = model(norm=True)
    chain = read(module).chain
    made: Tensors = (data().batch(torch.arange(3))[0],)
    for number, layer in enumerate(layers_of(module)):
        own = chain.module(module, number, number)(*made)
        made = layer(*made)
        for one, other in zip(own if isinstance(own, tuple) else (own,), made, strict=True):
            torch.testing.assert_close(one, other)
