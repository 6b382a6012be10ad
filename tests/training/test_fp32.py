"""FP32 training takes a model as it is: its layout in memory and the modes of its layers are its maker's."""

import copy
import math
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from socflower.errors import ConfigError
from socflower.training.fp32 import FP32Trainer, OptimizerFn, SchedulerFn, sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import Trainer, TrainingSpan

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


def built(model: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return model()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(8, 3, 32, 32, generator=generator),
            torch.randint(0, 10, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in model.parameters()]


def test_a_model_that_flattens_by_view_trains_as_in_a_loop_of_its_own() -> None:
    model, reference = built(FlattensByView), built(FlattensByView)
    session = FP32Trainer(optimizer=sgd(0.05, 0.9)).start(model, TrainingSpan())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in batches(3):
        session.step([(inputs, labels)])
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    session.finish()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("of_inputs", LAYOUTS)
@pytest.mark.parametrize("of_model", LAYOUTS)
@pytest.mark.parametrize("mixed", [False, True])
def test_model_and_inputs_keep_their_layouts(of_model: str, of_inputs: str, mixed: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.LazyLinear(10)
    )
    model(torch.zeros(1, 3, 32, 32))
    model = model.to(memory_format=LAYOUTS[of_model])  # type: ignore[call-overload]
    before, seen = strides(model), []
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
    frozen, moving = (copy.deepcopy(model[place].running_mean) for place in (1, 4))
    session = FP32Trainer().start(model, TrainingSpan(num_members=num_members))
    session.step([(inputs, labels) for inputs, labels in batches(num_members)])
    session.finish()
    assert [module.training for module in model] == [True, False, True, True, True, True, True]
    assert torch.equal(model[1].running_mean, frozen)
    assert not torch.equal(model[4].running_mean, moving)


def test_a_model_in_evaluation_mode_as_a_whole_trains_as_a_whole() -> None:
    """Libraries hand out pretrained models so."""
    model = normalised().eval()
    FP32Trainer().start(model, TrainingSpan())
    assert all(module.training for module in model.modules())


def test_measuring_confidence_leaves_modes_as_they_were() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
    )
    model[2].eval()
    generator = torch.Generator().manual_seed(3)
    inputs, labels = (
        torch.randn(8, 1, 6, 6, generator=generator),
        torch.randint(0, 3, (8,), generator=generator),
    )
    session = MixedPrecisionTrainer(rule="paper", parallel=False, npu_ratio=0.5).start(
        model, TrainingSpan()
    )
    session.step([(inputs, labels)])
    session.finish()
    assert [module.training for module in model] == [True, True, False, True, True]


@pytest.mark.parametrize(
    "trainer", [Int8Trainer(), MixedPrecisionTrainer(rule="half", parallel=False)]
)
def test_int8_refuses_a_norm_that_is_to_keep_its_statistics(trainer: Trainer) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
    )
    model[1].eval()
    batch = torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(
        ConfigError, match=r"BatchNorm2d '1' is in evaluation mode, .* or train in FP32"
    ):
        trainer.start(model, TrainingSpan()).step([batch])
    model.eval()
    trainer.start(model, TrainingSpan()).step([batch])


@pytest.mark.parametrize("passes", ["auto", "always", "ring"])
@pytest.mark.parametrize(
    "optimizer", [sgd(0.05, 0.9, weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)]
)
def test_frozen_parameters_know_no_weight_decay_however_members_pass(
    passes: str, optimizer: OptimizerFn
) -> None:
    model = normalised()
    names = [name for name, _ in model.named_parameters()][::2]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = FP32Trainer(
        optimizer=optimizer, reduction=passes, num_buckets=2 if passes == "ring" else 1
    )
    session = trainer.start(model, TrainingSpan(num_members=2))
    for _ in range(2):
        session.step(batches(2))
    session.finish()
    assert [
        name for name, value in model.named_parameters() if torch.equal(value, before[name])
    ] == names


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Sequential has all of its parameters frozen .*; leave at least one"
    ):
        FP32Trainer().start(normalised().requires_grad_(False), TrainingSpan())
    with pytest.raises(ConfigError, match="Flatten has no parameters"):
        FP32Trainer().start(nn.Flatten(), TrainingSpan())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *(({"learning_rate": rate}, "learning_rate") for rate in (0.0, -0.1, math.nan, math.inf)),
        *(({"momentum": momentum}, "momentum") for momentum in (-0.1, 1.0, math.nan)),
        *(({"weight_decay": decay}, "weight_decay") for decay in (-0.1, math.nan, math.inf)),
    ],
)
def test_settings_of_sgd_that_train_nothing_or_diverge_are_refused(
    settings: dict[str, float], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"sgd: {says} = .* must be"):
        sgd(**settings)


@pytest.mark.parametrize("reduction", ["auto", "always"])
def test_buckets_without_a_ring_order_are_refused_by_name(reduction: str) -> None:
    assert FP32Trainer(reduction="ring", num_buckets=3).num_buckets == 3
    with pytest.raises(
        ConfigError, match=f"num_buckets = 3 divides .* and reduction = '{reduction}' has none"
    ):
        FP32Trainer(reduction=reduction, num_buckets=3)
    with pytest.raises(ConfigError, match="num_buckets = 0"):
        FP32Trainer(reduction="ring", num_buckets=0)


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
    ("optimizer", "says"),
    [
        (of_nothing, "SGD holds tensors that are no parameters of the model"),
        (of_more, "SGD holds tensors that are no"),
        (
            of_the_first,
            r"SGD leaves out 1\.bias, which would never be trained; .* or freeze those in model_fn",
        ),
        (partial(torch.optim.SGD, lr=0.0), "SGD has lr = 0 and no scheduler raises it"),
        (partial(torch.optim.Adam, lr=math.inf), "Adam has lr = inf; it must be"),
        (partial(torch.optim.SGD, lr=math.nan), "lr = nan; it must be|Invalid learning rate"),
        (torch.optim.LBFGS, "LBFGS evaluates the loss several times a step"),
    ],
)
def test_an_optimiser_that_would_not_train_the_model_is_refused(
        optimizer: OptimizerFn, says: str, mixed: bool) -> None:  # fmt: skip
    fp32 = FP32Trainer(optimizer=optimizer)
    trainer = MixedPrecisionTrainer(rule="half", parallel=False, fp32=fp32) if mixed else fp32
    with pytest.raises(ConfigError, match=says) as refusal:
        trainer.start(weight_and_bias(), TrainingSpan())
    assert "\n" not in str(refusal.value)


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
        optimizer: OptimizerFn, scheduler: SchedulerFn | None) -> None:  # fmt: skip
    model = weight_and_bias()
    if optimizer is of_trainable:
        model[1].bias.requires_grad_(False)
    before, trainer = (
        model[1].weight.detach().clone(),
        FP32Trainer(optimizer=optimizer, scheduler=scheduler),
    )
    session = trainer.start(model, TrainingSpan(total_steps=4))
    for each in batches(2):
        session.step([each])
    assert not torch.equal(model[1].weight, before)
    # A session goes on from a state in which the rate stands at 0.
    trainer.start(model, TrainingSpan(first_step=2, total_steps=4), session.finish().state)


@pytest.mark.parametrize("mixed", [False, True])
def test_labels_beyond_the_outputs_are_the_callers_mistake_and_not_the_accelerators(
    mixed: bool,
) -> None:
    inputs, labels = batches(1)[0]
    labels[-1] = 12  # in the accelerator's part of the batch
    trainer = MixedPrecisionTrainer(rule="half", parallel=False) if mixed else FP32Trainer()
    with pytest.raises(
        ConfigError, match="the labels reach 12, but the model has 10 outputs; give the model an"
    ):
        trainer.start(weight_and_bias(), TrainingSpan()).step([(inputs, labels)])


def test_an_optimiser_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"AdamW\(...\) is one model's; give a function that makes it"
    ):
        FP32Trainer(optimizer=torch.optim.AdamW(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]
