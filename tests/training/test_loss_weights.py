"""The loss of a batch from those of its parts: for all losses of torch, on every way that divides a batch."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from socflower.hierarchy.exchange.gradients import EXACT_RING
from socflower.model_graph.batch_form import num_samples, split
from socflower.pipeline.runtime.member import Mini
from socflower.training.exchange.group_sum import GroupSum
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.group import train_group
from socflower.training.loss_weights import (
    BY_SAMPLES,
    LossWeights,
    require_divisible,
    weights_of,
)
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import Part, TrainingSpan
from socflower.workloads.data_source import DataSource
from socflower.workloads.map_dataset import as_data_source
from tests.one_line import refused
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime import training as pipelines
from tests.seeded import built
from tests.training.by_torch import assert_close, assert_equal, by_torch, trained
from tests.training.test_batches import task
from tests.training.test_group import small_network

CLASSES = 5
WEIGHTS = torch.tensor([0.1, 2.0, 0.0, 3.5, 1.0])


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, ignored: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < ignored, -100, labels)


def probabilities(count: int) -> Tensor:
    return torch.softmax(torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(3)), 1)


def signs(count: int) -> Tensor:
    return classes(count, CLASSES).remainder(2).mul(2).sub(1).float()


Losses = tuple[Callable[..., Tensor], Callable[[int], Tensor]]
LOSSES: dict[str, Losses] = {
    "plain": (nn.CrossEntropyLoss(), classes),
    "function": (functional.cross_entropy, partial(classes, ignored=0.4)),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), partial(classes, ignored=0.2)),
    "ignored 1": (partial(functional.cross_entropy, ignore_index=1), classes),
    "smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHTS),
        partial(classes, ignored=0.3),
    ),
    "smoothed, unweighted": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        partial(classes, ignored=0.3),
    ),
    "sequences": (functional.cross_entropy, lambda n: classes(n, 9, ignored=0.5)),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHTS), probabilities),
    "sum": (nn.CrossEntropyLoss(reduction="sum", weight=WEIGHTS), classes),
    "partial of partial": (
        partial(partial(functional.nll_loss, weight=WEIGHTS), ignore_index=0),
        classes,
    ),
    "likelihood": (nn.NLLLoss(weight=WEIGHTS), partial(classes, ignored=0.3)),
    "sum of squares": (partial(functional.mse_loss, reduction="sum"), probabilities),
    "binary": (
        partial(functional.binary_cross_entropy_with_logits, pos_weight=WEIGHTS + 1),
        probabilities,
    ),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), probabilities),
    "margin of classes": (nn.MultiMarginLoss(), classes),
    "margin of labels": (nn.MultiLabelMarginLoss(), lambda n: classes(n, CLASSES)),
    "soft margin of labels": (
        nn.MultiLabelSoftMarginLoss(),
        lambda n: probabilities(n).round(),
    ),
    **{
        type(loss).__name__: (loss, probabilities)
        for loss in (
            nn.MSELoss(),
            nn.L1Loss(),
            nn.SmoothL1Loss(),
            nn.HuberLoss(),
            nn.KLDivLoss(),
            nn.PoissonNLLLoss(),
        )
    },
    **{
        type(loss).__name__: (loss, signs)
        for loss in (nn.SoftMarginLoss(), nn.HingeEmbeddingLoss())
    },
}


def in_float64(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    keywords = getattr(loss, "keywords", {}).items()
    exact = {key: value.double() if isinstance(value, Tensor) else value for key, value in keywords}
    return partial(getattr(loss, "func", loss), **exact)


@settings(max_examples=6, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=2, max_size=5))
@pytest.mark.parametrize("name", LOSSES)
def test_parts_make_the_loss_and_the_gradient_of_the_batch(name: str, sizes: list[int]) -> None:
    loss, targets_of = LOSSES[name]
    weights = weights_of(loss)
    loss = in_float64(loss)
    assert weights is not None
    targets = targets_of(sum(sizes))
    shape = (sum(sizes), CLASSES, *([9] if name == "sequences" else []))
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    batch = (outputs, targets.double() if targets.is_floating_point() else targets)
    total = weights.of(batch)
    if not total:
        refused(lambda: weights.share(0.0, total), "every label")
        return
    whole = loss(*batch)
    (expected,) = torch.autograd.grad(whole, outputs, retain_graph=True)
    parts = [(part, weights.of(part)) for part in split(batch, sizes)]
    joined = sum(weights.share(weight, total) * loss(*part) for part, weight in parts if weight)
    assert isinstance(joined, Tensor)
    (gradient,) = torch.autograd.grad(joined, outputs)
    torch.testing.assert_close(joined, whole, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@given(
    order=st.permutations(range(6)),
    weights=st.lists(st.floats(0.001, 1000.0), min_size=6, max_size=6),
)
def test_weights_add_up_to_the_same_bits_in_any_order(
    order: list[int], weights: list[float]
) -> None:
    """So one process and a ring, which adds in another order, divide by the same number."""
    read = LossWeights(read=lambda batch: float(batch[0]))
    own = [read.of((torch.tensor([weight], dtype=torch.float64),)) for weight in weights]
    assert sum(own[place] for place in order) == sum(own)


class Subclass(nn.CrossEntropyLoss):
    """May compute anything."""


@pytest.mark.parametrize(
    "loss",
    [
        Subclass(),
        lambda made, labels: made.sum(),
        partial(functional.cross_entropy, torch.zeros(1)),
        nn.BCELoss(weight=torch.ones(8)),
        partial(functional.mse_loss, size_average=False),
        nn.CosineEmbeddingLoss(),
        nn.CrossEntropyLoss(reduction="none"),
    ],
)
def test_other_losses_are_unknown(loss: Callable[..., Any]) -> None:
    assert weights_of(loss) is None


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    refused(
        lambda: LossWeights(read=lambda batch: weight).of((torch.zeros(3),)), weight, "0 or more"
    )


# ---------------------------------------------------------------------------------------------- every way of training


def network(norm: bool = False) -> nn.Sequential:
    return built(
        lambda: nn.Sequential(
            nn.Linear(5, 8),
            nn.BatchNorm1d(8) if norm else nn.LayerNorm(8),
            nn.ReLU(),
            nn.Linear(8, CLASSES),
        ),
        3,
    )


def contrast(made: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each sample against all others of the batch."""
    alike = functional.normalize(made)
    return functional.cross_entropy(alike @ alike.T, torch.arange(len(made)))


def own_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, weight=WEIGHTS)


TRAINERS: dict[str, tuple[FP32Trainer, float]] = {
    name: (FP32Trainer(optimizer=sgd(0.05), device="cpu", **settings), ignored)
    for name, settings, ignored in [
        ("mean", {}, 0.0),
        ("class weights", {"loss": nn.CrossEntropyLoss(weight=WEIGHTS)}, 0.0),
        ("ignored labels", {}, 0.6),
        ("sum", {"loss": nn.CrossEntropyLoss(reduction="sum")}, 0.3),
        (
            "own weight",
            {"train_step": own_step, "loss_weight": lambda batch: WEIGHTS[batch[1]].sum()},
            0.0,
        ),
    ]
}


class Pairs(DataSource):
    """Inputs and labels in memory, which several threads may read."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self._inputs = inputs
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Any, key: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        return self._inputs[indices], self._labels[indices]


def samples(ignored: float) -> DataSource:
    return Pairs(images(48), classes(48, ignored=ignored))


def alone(trainer: FP32Trainer, data: DataSource, model: nn.Module) -> nn.Module:
    """Train by plain torch on whole batches."""
    losses = [partial(trainer.loss_of, batch=data.batch(rows)) for rows in BATCHES]
    return by_torch(copy.deepcopy(model).train(), trainer.optimizer, losses)


def in_parts(data: DataSource) -> list[list[Any]]:
    """Return each batch in the members' parts."""
    shares = [rows.split(list(SIZES)) for rows in BATCHES]
    return [[data.batch(part) if len(part) else () for part in parts] for parts in shares]


BATCHES = [torch.arange(start, start + 12) for start in (0, 12, 24, 36)]
SIZES = (5, 1, 0, 6)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("changes", [{"reduction": "always"}, {"accumulation_steps": 5}])
def test_members_and_passes_train_as_one_device(name: str, changes: dict[str, Any]) -> None:
    trainer, ignored = TRAINERS[name]
    data = samples(ignored)
    model = network()
    reference = alone(trainer, data, model)
    assert_close(trained(replace(trainer, **changes), model, in_parts(data)), reference, rtol=2e-5)


@pytest.mark.parametrize("name", TRAINERS)
def test_members_that_sum_as_a_ring_train_as_one_device(name: str) -> None:
    trainer, ignored = TRAINERS[name]
    data = samples(ignored)
    ours = in_ring_order(trainer, network(), in_parts(data))
    assert_close(ours, alone(trainer, data, network()), rtol=2e-5)


def in_ring_order(
    trainer: FP32Trainer, model: nn.Module, steps: Sequence[Sequence[Part]]
) -> nn.Module:
    """Train the model in place on the members' parts of each step, summed as a ring does, and return it."""
    session = trainer.start(model, TrainingSpan(num_members=len(SIZES), total_steps=len(steps)))
    members = range(len(SIZES))
    group = GroupSum(session, model, EXACT_RING, members, num_buckets=2, seed=0, residuals={})
    for step, parts in enumerate(steps):
        group.step(parts, members, step)
    return model


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "own weight"])
@pytest.mark.parametrize("shares", [((3,), (2, 1)), ((3,), (3,))])
def test_pipelines_train_as_one_device(
    monkeypatch: pytest.MonkeyPatch, name: str, shares: tuple[tuple[int, ...], ...]
) -> None:
    trainer, ignored = TRAINERS[name]
    module = pipelines.model()
    source = pipelines.data()
    drawn = torch.rand(len(source), generator=torch.Generator().manual_seed(4))
    data = Pairs(source.inputs, torch.where(drawn < ignored, -100, source.labels))
    monkeypatch.setattr(pipelines, "data", lambda: data)
    steps = [Mini(step=step, indices=rows.numpy()) for step, rows in enumerate(BATCHES)]
    last = pipelines.read(module).model.num_layers - 1
    plan = straight_plan((1, last), shares, 4)
    end = pipelines.train_together(module, plan, steps, trainer)
    reference = pipelines.train_alone(module, steps, trainer)
    for weight in end.weights:
        torch.testing.assert_close(end.weights[weight], reference[weight], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["class weights", "ignored labels"])
def test_members_with_batchnorm_divide_by_the_weight_of_the_whole_batch(name: str) -> None:
    """Each member normalises its own samples, as on a machine of its own; the loss is still that of the batch."""
    trainer, ignored = TRAINERS[name]
    data = samples(ignored)
    model = network(norm=True)
    reference = copy.deepcopy(model)
    steps = [[data.batch(part) for part in rows.split([5, 7])] for rows in BATCHES]

    def loss(module: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        made = torch.cat([module(inputs) for inputs, _ in parts])
        return trainer.loss(made, torch.cat([labels for _, labels in parts]))

    by_torch(reference, trainer.optimizer, [partial(loss, parts=parts) for parts in steps])
    trained(trainer, model, steps)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_member_without_a_label_that_counts_leaves_the_gradient_to_the_others() -> None:
    trainer = TRAINERS["mean"][0]
    ignored = (images(4), torch.full((4,), -100))
    model = trained(trainer, network(norm=True), [[ignored, (images(4, seed=1), classes(4))]])
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
    refused(lambda: trained(trainer, network(norm=True), [[ignored, ignored]]), "every label")


def test_mixed_precision_refuses_labels_that_int8_cannot_ignore() -> None:
    trainer = MixedPrecisionTrainer(npu_ratio=0.5, parallel=False)
    step = [(torch.randn(4, 1, 6, 6), torch.tensor([0, 1, -100, 2]))]
    refused(lambda: trained(trainer, small_network(norm=False), [step]), "labels", -100)


# ------------------------------------------------------------------------------------------------------------ trials


class Noisy(nn.Module):
    """Draws random numbers in evaluation mode as well, as a variational auto-encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + 0.5 * torch.randn(len(inputs), CLASSES)


class Counting(nn.Module):
    """Counts its passes in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)
        self.passes = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.count += 1
        return self.layer(inputs)


def mean_of_squares(made: Tensor, labels: Tensor) -> Tensor:
    return made.square().mean()


def weighted_by_hand(made: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(made, labels, weight=WEIGHTS)


def try_in_group(
    trainer: FP32Trainer,
    model: nn.Module,
    data: DataSource,
    *,
    members: tuple[int, ...] = (0, 1),
    first_step: int = 0,
) -> None:
    work = task(
        0,
        1,
        members=members,
        partitions=members,
        capacities=(1.0,) * len(members),
        num_partitions=len(members),
        num_samples=len(data),
        first_step=first_step,
        num_steps=2,
        steps_per_epoch=4,
        batch_size=12,
    )
    train_group(model, data, work, trainer)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (contrast, {}),
        (weighted_by_hand, {}),
        (weighted_by_hand, {"loss_weight": lambda batch: len(batch[1])}),
        (lambda made, labels: made.square().sum(), {}),
        (contrast, {"members": (0,), "accumulation_steps": 2}),
    ],
)
def test_a_loss_that_cannot_be_divided_is_refused_before_the_first_step(
    loss: Callable[..., Tensor], settings: dict[str, Any]
) -> None:
    model = network()
    members = settings.pop("members", (0, 1))
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    trainer = FP32Trainer(loss=loss, **settings)
    refused(
        lambda: try_in_group(trainer, model, samples(0.0), members=members),
        "cannot be divided",
        "12 samples",
        "loss_weight",
    )
    assert_equal(model, before)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("changes", [{"members": (0,)}, {"first_step": 4}])
def test_one_device_and_later_rounds_try_nothing(changes: dict[str, Any]) -> None:
    try_in_group(FP32Trainer(loss=contrast), network(), samples(0.0), **changes)


def test_a_weight_of_ones_own_makes_it_divisible() -> None:
    trainer = FP32Trainer(loss=weighted_by_hand, loss_weight=lambda batch: WEIGHTS[batch[1]].sum())
    try_in_group(trainer, network(), samples(0.0))


def tried(
    loss: Callable[..., Tensor], model: nn.Module, data: DataSource | None = None, **settings: Any
) -> None:
    trainer = FP32Trainer(loss=loss, **settings)
    trainer.require_divisible_loss(model, (), data or samples(0.0), 12)


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = Counting()
    tried(mean_of_squares, model)
    assert (model.passes, float(model.count), model.training) == (0, 0.0, True)


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_with_random_numbers_is_accepted_and_a_sum_with_them_is_not(seed: int) -> None:
    data = Pairs(images(48, seed), classes(48, seed=seed))
    model = built(Noisy, seed)
    tried(mean_of_squares, model, data)
    refused(lambda: tried(lambda made, labels: made.square().sum() ** 2, model, data), "divided")


def test_a_loss_that_takes_whole_batches_alone_is_refused() -> None:
    def fixed(made: Tensor, labels: Tensor) -> Tensor:
        return (made.square().mean(1) * torch.ones(12)).mean()

    refused(lambda: tried(fixed, network()), "12 samples", "The size of tensor", "loss_weight")


def test_a_loss_that_is_not_finite_is_left_to_training_and_bfloat16_is_tried_in_float32() -> None:
    tried(lambda made, labels: made.mean() * float("nan"), network())
    tried(mean_of_squares, network(), autocast=torch.bfloat16)


class Tokens(nn.Module):
    """Computes its own loss, the mean over tokens that count, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=functional.cross_entropy(self.layer(inputs), labels))


def as_dict(rows: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {
        "inputs": torch.stack([row[0] for row in rows]),
        "labels": torch.stack([row[1] for row in rows]),
    }


def test_a_models_own_loss_is_tried_and_takes_a_weight() -> None:
    source = TensorDataset(images(48), classes(48, ignored=0.5))
    data = as_data_source(DataLoader(source, collate_fn=as_dict))
    model = built(Tokens, 1)
    refused(lambda: try_in_group(FP32Trainer(), model, data), "cannot be divided")
    counted = FP32Trainer(loss_weight=lambda batch: int((batch["labels"] != -100).sum()))
    try_in_group(counted, model, data)


def test_a_loss_that_a_model_of_its_own_loss_would_ignore_is_refused() -> None:
    step = [{"inputs": images(3), "labels": classes(3)}]
    trainer = FP32Trainer(loss=nn.MSELoss())
    refused(lambda: trained(trainer, built(Tokens, 1), [step]), "loss", "ignored")


def test_batches_of_one_sample_need_no_trial() -> None:
    require_divisible(
        network(), lambda model, batch: pytest.fail("tried"), BY_SAMPLES, [], remedy=""
    )
    assert num_samples(()) == 0
