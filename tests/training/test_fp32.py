"""FP32 training takes a model as it is: its layout in memory and the modes of its layers are its maker's."""

import copy
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from socflower.training.fp32 import FP32Trainer, OptimizerFn, SchedulerFn, sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import Trainer, TrainingSpan
from tests.one_line import refused
from tests.seeded import built
from tests.training.by_torch import assert_equal, by_torch, trained
from tests.training.test_group import small_network

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


class FlattensByView(nn.Module):
    """As in Flower's PyTorch quickstart: `view` needs features that lie channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool, self.linear = nn.MaxPool2d(2), nn.Linear(16 * 5 * 5, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(torch.relu(self.conv2(self.pool(torch.relu(self.conv1(images))))))
        return self.linear(features.view(-1, 16 * 5 * 5))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 8, 3, 32, 32, generator=generator)
    return list(zip(inputs, torch.randint(0, 10, (count, 8), generator=generator), strict=True))


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in model.parameters()]


def test_a_model_that_flattens_by_view_trains_as_in_a_loop_of_its_own() -> None:
    model = built(FlattensByView, 2)
    optimizer = sgd(0.05, 0.9)
    data = batches(3)
    losses = [partial(loss_of, inputs=inputs, labels=labels) for inputs, labels in data]
    reference = by_torch(copy.deepcopy(model), optimizer, losses)
    assert_equal(
        trained(FP32Trainer(optimizer=optimizer), model, [[each] for each in data]), reference
    )


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


@pytest.mark.parametrize("of_inputs", LAYOUTS)
@pytest.mark.parametrize("of_model", LAYOUTS)
@pytest.mark.parametrize("mixed", [False, True])
def test_model_and_inputs_keep_their_layouts(of_model: str, of_inputs: str, mixed: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.LazyLinear(10)
    )
    model(torch.zeros(1, 3, 32, 32))
    model = model.to(memory_format=LAYOUTS[of_model])  # type: ignore[call-overload]
    before = strides(model)
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    inputs, labels = batches(1)[0]
    inputs = inputs.contiguous(memory_format=LAYOUTS[of_inputs])
    trainer = MixedPrecisionTrainer(rule="fp32", parallel=False) if mixed else FP32Trainer()
    trainer.start(model, TrainingSpan()).step([(inputs, labels)])
    assert strides(model) == before
    assert seen == [inputs.stride()]


def test_channels_last_is_there_for_the_asking() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 28 * 28, 10))
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    FP32Trainer(channels_last=True).start(model, TrainingSpan()).step(batches(1))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def normalised() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * 28 * 28, 10),
    )


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_layer_in_evaluation_mode_stays_in_it_in_a_model_that_trains(num_members: int) -> None:
    """A BatchNorm that its maker has frozen keeps its statistics; the other one follows the batches."""
    model = normalised()
    model[1].eval()
    frozen, moving = (model[place].running_mean.clone() for place in (1, 4))
    trained(FP32Trainer(), model, [batches(num_members)])
    assert [module.training for module in model] == [True, False, True, True, True, True, True]
    assert torch.equal(model[1].running_mean, frozen)
    assert not torch.equal(model[4].running_mean, moving)


def test_a_model_in_evaluation_mode_as_a_whole_trains_as_a_whole() -> None:
    """Libraries hand out pretrained models so."""
    model = normalised().eval()
    FP32Trainer().start(model, TrainingSpan())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "trainer", [Int8Trainer(), MixedPrecisionTrainer(rule="paper", parallel=False, npu_ratio=0.5)]
)
def test_int8_refuses_a_norm_that_is_to_keep_its_statistics_and_no_other_mode(
    trainer: Trainer,
) -> None:
    model = small_network(norm=True)
    model[1].eval()
    step = [(torch.rand(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64))]
    refused(lambda: trained(trainer, model, [step]), "BatchNorm2d '1'", "train in FP32")
    model.train()[2].eval()
    trained(trainer, model, [step])
    assert [module.training for module in model] == [True, True, False, True, True]
    trained(trainer, model.eval(), [step])


@pytest.mark.parametrize("passes", [{}, {"reduction": "always"}])
@pytest.mark.parametrize(
    "optimizer", [sgd(0.05, 0.9, weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)]
)
def test_frozen_parameters_know_no_weight_decay_however_members_pass(
    passes: dict[str, Any], optimizer: OptimizerFn
) -> None:
    model = normalised()
    names = [name for name, _ in model.named_parameters()][::2]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trained(FP32Trainer(optimizer=optimizer, **passes), model, [batches(2)] * 2)
    kept = [name for name, value in model.named_parameters() if torch.equal(value, before[name])]
    assert kept == names


def weight_and_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def of_nothing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def of_more(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, torch.zeros(1, requires_grad=True)], lr=0.1)


def of_the_first(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:1], lr=0.1)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (of_nothing, ("SGD", "no parameters of the model")),
        (of_more, ("SGD", "no parameters of the model")),
        (of_the_first, ("SGD", "1.bias", "requires_grad_(False)")),
        (partial(torch.optim.SGD, lr=0.0), ("SGD", "lr = 0", "scheduler")),
        (partial(torch.optim.Adam, lr=math.inf), ("Adam", "lr = inf")),
        (torch.optim.LBFGS, ("LBFGS", "closure")),
    ],
)
def test_an_optimiser_that_would_not_train_the_model_is_refused(
    optimizer: OptimizerFn, named: tuple[str, ...], mixed: bool
) -> None:
    fp32 = FP32Trainer(optimizer=optimizer)
    trainer = MixedPrecisionTrainer(rule="half", parallel=False, fp32=fp32) if mixed else fp32
    refused(lambda: trainer.start(weight_and_bias(), TrainingSpan()), *named)


def in_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.0}], lr=0.1)


def of_trainable(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for parameter in parameters if parameter.requires_grad], lr=0.1
    )


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (in_groups, None),
        (of_trainable, None),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), None),
        (
            partial(torch.optim.SGD, lr=0.0),
            lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps),
        ),
        (
            partial(torch.optim.SGD, lr=0.1),
            lambda optimizer, steps: LambdaLR(optimizer, lambda step: step / steps),
        ),
    ],
)
def test_whatever_trains_the_model_is_taken_at_a_rate_that_begins_at_0_too(
    optimizer: OptimizerFn, scheduler: SchedulerFn | None
) -> None:
    model = weight_and_bias()
    model[1].bias.requires_grad_(optimizer is not of_trainable)
    before = model[1].weight.detach().clone()
    trainer = FP32Trainer(optimizer=optimizer, scheduler=scheduler)
    session = trainer.start(model, TrainingSpan(total_steps=4))
    for each in batches(2):
        session.step([each])
    assert not torch.equal(model[1].weight, before)
    # A session goes on from a state in which the rate stands at 0.
    trainer.start(model, TrainingSpan(first_step=2, total_steps=4), session.finish().state)


@pytest.mark.parametrize(
    "trainer", [FP32Trainer(), MixedPrecisionTrainer(rule="half", parallel=False)]
)
def test_labels_beyond_the_outputs_are_the_callers_mistake_and_not_the_accelerators(
    trainer: Trainer,
) -> None:
    inputs, labels = batches(1)[0]
    labels[-1] = 12  # in the accelerator's part of the batch
    refused(lambda: trained(trainer, weight_and_bias(), [[(inputs, labels)]]), "12", "10 outputs")
