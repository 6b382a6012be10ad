"""Every plan computes the gradients of the same split run serially in plain torch, also where layers depend on batches.

The reference knows nothing of graphs, cuts or messages: a device of a stage is a copy of its layers, written out by
hand, that gets its rows only; `torch.cat` joins what a stage makes, and one autograd graph goes through all of it.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, TwoDPlan
from socflower.training.fp32 import FP32Trainer, sgd
from tests.pipeline.runtime.test_equivalence import pipelines, plans
from tests.pipeline.runtime.training import (
    Residual,
    data,
    minis,
    model,
    plan_of,
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


def run_split(
    plan: PipelinePlan, copies: Sequence[Sequence[Residual]], inputs: Tensor, labels: Tensor
) -> Tensor:
    """Return the sum of the samples' losses; `copies` are the devices' models, by stage."""
    total = torch.zeros(())
    count = -(-len(inputs) // plan.micro_batch_size)
    for rows in np.array_split(np.arange(len(inputs)), count):
        made: Tensors = (inputs[rows],)
        for stage, models in zip(plan.stages, copies, strict=True):
            shares = split_batch(len(rows), stage.shares)
            parts = []
            for own, part in zip(
                models, zip(*(tensor.split(shares) for tensor in made), strict=True), strict=True
            ):
                for layer in layers_of(own)[stage.first_layer : stage.last_layer + 1]:
                    part = layer(*part) if len(part[0]) else part
                if len(part[0]):
                    parts.append(part)
            made = tuple(map(torch.cat, zip(*parts, strict=True)))
        # Each device of the last stage has the mean of its rows, weighted by them: of all, the sum.
        total = total + functional.cross_entropy(made[0], labels[rows], reduction="sum")
    return total


def serial(
    module: Residual, plan: Plan, indices: np.ndarray
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients, and the devices' means of the running statistics by their samples, by name."""
    copies = [
        [[copy.deepcopy(module).train() for _ in stage.devices] for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    inputs, labels = data().batch(torch.from_numpy(indices))
    sizes = split_batch(len(indices), [pipeline.num_samples for pipeline in plan.pipelines])
    total, first = torch.zeros(()), 0
    seen = [[[0] * len(stage.devices) for stage in pipeline.stages] for pipeline in plan.pipelines]
    for pipeline, own, counts, size in zip(plan.pipelines, copies, seen, sizes, strict=True):
        if not size:
            continue
        total = total + run_split(
            pipeline, own, inputs[first : first + size], labels[first : first + size]
        )
        for rows in np.array_split(np.arange(size), -(-size // pipeline.micro_batch_size)):
            for stage, numbers in zip(pipeline.stages, counts, strict=True):
                for device, share in enumerate(split_batch(len(rows), stage.shares)):
                    numbers[device] += share
        first += size
    (total / len(indices)).backward()
    devices = list(
        zip(
            [own for models in copies for stage in models for own in stage],
            [count for counts in seen for stage in counts for count in stage],
            strict=True,
        )
    )
    gradients = {
        name: sum(
            (
                gradient
                for own, _ in devices
                if (gradient := own.get_parameter(name).grad) is not None
            ),
            torch.zeros(()),
        )
        for name, _ in module.named_parameters()
    }
    statistics = {}
    for name, start in module.named_buffers():
        # A device whose stage lacks the layer has left its statistics as they were.
        used = [
            (own.get_buffer(name), count)
            for own, count in devices
            if not torch.equal(own.get_buffer(name), start)
        ]
        number = sum(count for _, count in used)
        statistics[name] = (
            torch.stack([buffer for buffer, _ in used]).amax(0)
            if not start.is_floating_point()
            else sum(
                (count / number * buffer.double() for buffer, count in used), torch.zeros(())
            ).float()
        )
    return gradients, statistics


def check(module: Residual, plan: Plan, num_samples: int, seed: int) -> None:
    steps = minis(1, num_samples, seed)
    gradients, statistics = serial(module, plan, steps[0].indices)
    end = train_together(module, plan, steps, ONE_TO_ONE)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.detach() - end.weights[name], gradients[name], rtol=1e-5, atol=2e-6
        )
    for name, expected in statistics.items():
        torch.testing.assert_close(end.weights[name], expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=30)
@given(plan=plans(), missing=st.integers(0, 8), seed=st.integers(0, 9))
def test_a_plan_computes_the_gradients_of_the_same_split_run_serially(
    plan: Plan, missing: int, seed: int
) -> None:
    check(model(seed, norm=True), plan, max(1, plan.num_samples - missing), seed)


@given(plan=pipelines())
def test_devices_with_rows_of_their_own_have_other_gradients_than_one_with_all(
    plan: PipelinePlan,
) -> None:
    """The reference is sharp: with BatchNorm it differs from the whole batch, which the test above must not accept."""
    module = model(3, norm=True)
    steps = minis(1, plan.num_samples)
    gradients, _ = serial(module, plan, steps[0].indices)
    whole, _ = serial(module, plan_of((5,), ((plan.num_samples,),), 1), steps[0].indices)
    same = all(torch.allclose(gradients[name], whole[name], rtol=1e-5, atol=2e-6) for name in whole)
    widths = [
        len(stage.devices)
        for stage in plan.stages
        if stage.first_layer <= 3 and stage.last_layer >= 1
    ]
    assert same == (plan.num_micro_batches == 1 and max(widths) == 1)


def test_pipelines_side_by_side_keep_statistics_by_their_samples() -> None:
    plan = TwoDPlan(
        groups=(plan_of((2, 5), ((5, 1), (6,)), 2), plan_of((5,), ((3,),), 2, first_soc=3))
    )
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
