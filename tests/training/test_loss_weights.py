"""The loss of a batch from those of its parts: for all losses of torch, on every way that divides a batch."""

import copy
import threading
from collections.abc import Callable, Sequence
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

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import num_samples, split
from socflower.peers.ring.gradient_exchange import GradientExchange
from socflower.peers.transports.in_process import in_process_rings
from socflower.pipeline.runtime.member import Mini
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.group import train_group
from socflower.training.loss_weights import (
    BY_SAMPLES,
    LossWeights,
    label_weight,
    require_divisible,
    weights_of,
)
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import TrainingSpan
from socflower.workloads import DataSource, as_data_source
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime import training as pipelines
from tests.seeded import built
from tests.training.test_batches import task

CLASSES = 4
WEIGHTS = torch.tensor([0.1, 2.0, 0.0, 3.5])


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, ignored: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < ignored, -100, labels)


def probabilities(count: int) -> Tensor:
    return torch.softmax(torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(3)), 1)


def signs(count: int) -> Tensor:
    return classes(count).remainder(2).mul(2).sub(1).float()


LOSSES: dict[
    str, tuple[Callable[..., Tensor], Callable[[int], Tensor], Callable[[int], Tensor]]
] = {
    name: (
        loss,
        lambda n: torch.randn(n, CLASSES, generator=torch.Generator().manual_seed(1)),
        targets,
    )
    for name, loss, targets in [
        ("plain", nn.CrossEntropyLoss(), lambda n: classes(n)),
        ("function", functional.cross_entropy, lambda n: classes(n, ignored=0.4)),
        ("class weights", nn.CrossEntropyLoss(weight=WEIGHTS), lambda n: classes(n, ignored=0.2)),
        ("ignored 1", partial(functional.cross_entropy, ignore_index=1), lambda n: classes(n)),
        (
            "smoothed",
            nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHTS),
            lambda n: classes(n, ignored=0.3),
        ),
        (
            "smoothed, unweighted",
            nn.CrossEntropyLoss(label_smoothing=0.2),
            lambda n: classes(n, ignored=0.3),
        ),
        ("probabilities", nn.CrossEntropyLoss(weight=WEIGHTS), probabilities),
        ("sum", nn.CrossEntropyLoss(reduction="sum", weight=WEIGHTS), lambda n: classes(n)),
        (
            "partial of partial",
            partial(partial(functional.nll_loss, weight=WEIGHTS), ignore_index=0),
            lambda n: classes(n),
        ),
        ("likelihood", nn.NLLLoss(weight=WEIGHTS), lambda n: classes(n, ignored=0.3)),
        ("squares", nn.MSELoss(), lambda n: probabilities(n)),
        ("sum of squares", partial(functional.mse_loss, reduction="sum"), probabilities),
        ("absolute", nn.L1Loss(), probabilities),
        ("smooth", nn.SmoothL1Loss(), probabilities),
        ("huber", nn.HuberLoss(), probabilities),
        (
            "binary",
            partial(functional.binary_cross_entropy_with_logits, pos_weight=WEIGHTS + 1),
            probabilities,
        ),
        ("divergence", nn.KLDivLoss(reduction="batchmean"), probabilities),
        ("divergence of elements", nn.KLDivLoss(), probabilities),
        ("poisson", nn.PoissonNLLLoss(), probabilities),
        ("margin", nn.SoftMarginLoss(), lambda n: signs(n * CLASSES).reshape(n, CLASSES)),
        ("hinge", nn.HingeEmbeddingLoss(), lambda n: signs(n * CLASSES).reshape(n, CLASSES)),
        ("margin of classes", nn.MultiMarginLoss(), lambda n: classes(n)),
        ("margin of labels", nn.MultiLabelMarginLoss(), lambda n: classes(n, CLASSES)),
        (
            "soft margin of labels",
            nn.MultiLabelSoftMarginLoss(),
            lambda n: probabilities(n).round(),
        ),
    ]
}


@settings(max_examples=6, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=2, max_size=5))
@pytest.mark.parametrize("name", LOSSES)
def test_parts_make_the_loss_and_the_gradient_of_the_batch(name: str, sizes: list[int]) -> None:
    loss, outputs_of, targets_of = LOSSES[name]
    weights = weights_of(loss)
    assert weights is not None
    outputs, targets = outputs_of(sum(sizes)).double().requires_grad_(), targets_of(sum(sizes))
    if targets.is_floating_point():
        targets = targets.double()
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).double()
    elif isinstance(loss, partial):
        loss = partial(
            loss.func,
            **{
                key: value.double() if isinstance(value, Tensor) else value
                for key, value in loss.keywords.items()
            },
        )
    batch = (outputs, targets)
    total = weights.of(batch)
    if not total:
        with pytest.raises(ConfigError, match="every label of a batch is ignored"):
            weights.share(0.0, total)
        return
    whole = loss(*batch)
    (expected,) = torch.autograd.grad(whole, outputs, retain_graph=True)
    parts = [(part, weights.of(part)) for part in split(batch, sizes)]
    joined = sum(weights.share(weight, total) * loss(*part) for part, weight in parts if weight)
    assert isinstance(joined, Tensor)
    (gradient,) = torch.autograd.grad(joined, outputs)
    torch.testing.assert_close(joined, whole, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


def test_labels_of_sequences_count_one_by_one() -> None:
    logits, labels = torch.randn(6, CLASSES, 9), classes(6, 9, ignored=0.5)
    own = [label_weight((logits[rows], labels[rows])) for rows in (slice(0, 2), slice(2, 6))]
    loss = functional.cross_entropy(logits, labels)
    parts = [
        functional.cross_entropy(logits[rows], labels[rows]) for rows in (slice(0, 2), slice(2, 6))
    ]
    assert sum(own) == (labels != -100).sum()
    assert sum(weight * part for weight, part in zip(own, parts, strict=True)) / sum(
        own
    ) == pytest.approx(float(loss))


@given(
    order=st.permutations(range(6)),
    weights=st.lists(st.floats(0.001, 1000.0), min_size=6, max_size=6),
)
def test_weights_add_up_to_the_same_bits_in_any_order(
    order: list[int], weights: list[float]
) -> None:
    """So one process and a ring, which adds in another order, divide by the same number."""
    own = [
        LossWeights(read=lambda batch: float(batch[0])).of(
            (torch.tensor([weight], dtype=torch.float64),)
        )
        for weight in weights
    ]
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
    with pytest.raises(ConfigError, match="must be 0 or more"):
        LossWeights(read=lambda batch: weight).of((torch.zeros(3),))


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
    "mean": (FP32Trainer(optimizer=sgd(0.1)), 0.0),
    "class weights": (
        FP32Trainer(optimizer=sgd(0.1), loss=nn.CrossEntropyLoss(weight=WEIGHTS)),
        0.0,
    ),
    "ignored labels": (FP32Trainer(optimizer=sgd(0.1)), 0.6),
    "sum": (FP32Trainer(optimizer=sgd(0.01), loss=nn.CrossEntropyLoss(reduction="sum")), 0.3),
    "own weight": (
        FP32Trainer(
            optimizer=sgd(0.1),
            train_step=own_step,
            loss_weight=lambda batch: WEIGHTS[batch[1]].sum(),
        ),
        0.0,
    ),
}


class Pairs(DataSource):
    """Inputs and labels in memory, which several threads may read."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Any, key: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        return self._inputs[indices], self._labels[indices]


def samples(ignored: float) -> DataSource:
    return Pairs(images(48), classes(48, ignored=ignored))


def alone(
    trainer: FP32Trainer, data: DataSource, rows: Sequence[Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Train by plain torch on whole batches."""
    model = copy.deepcopy(model).train()
    optimizer = trainer.optimizer(model.parameters())
    for each in rows:
        optimizer.zero_grad()
        inputs, labels = data.batch(each)
        if trainer.train_step is None:
            trainer.loss(model(inputs), labels).backward()
        else:
            trainer.train_step(model, (inputs, labels)).backward()
        optimizer.step()
    return dict(model.state_dict())


def assert_trained_alike(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, weight in reference.items():
        torch.testing.assert_close(ours[name], weight, rtol=2e-5, atol=2e-6)


BATCHES = [torch.arange(start, start + 12) for start in (0, 12, 24, 36)]
SIZES = (5, 1, 0, 6)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    "changes", [{"reduction": "always"}, {"reduction": "ring"}, {"accumulation_steps": 5}]
)
def test_members_and_passes_train_as_one_device(name: str, changes: dict[str, Any]) -> None:
    trainer, ignored = TRAINERS[name]
    data, model = samples(ignored), network()
    reference = alone(trainer, data, BATCHES, model)
    session = FP32Trainer(**{**vars(trainer), **changes}).start(
        model, TrainingSpan(num_members=4, total_steps=4)
    )
    for rows in BATCHES:
        session.step([data.batch(part) for part in rows.split(list(SIZES))])
    assert_trained_alike(dict(model.state_dict()), reference)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_members_of_a_ring_train_as_one_device(name: str) -> None:
    trainer, ignored = TRAINERS[name]
    data = samples(ignored)
    reference = alone(trainer, data, BATCHES, network())
    assert_trained_alike(ring_weights(trainer, data), reference)


def ring_weights(trainer: FP32Trainer, data: DataSource) -> dict[str, Tensor]:
    """Return what a member of a ring in threads has, after steps in which one member has no samples."""
    models = [network() for _ in SIZES]

    def train(rank: int) -> None:
        ring, model = rings[rank], models[rank]
        session, exchange = (
            trainer.start(model, TrainingSpan(total_steps=4)),
            GradientExchange(model, 2),
        )
        for rows in BATCHES:
            own = data.batch(rows.split(list(SIZES))[rank]) if SIZES[rank] else ()
            weight, total = session.batch_weight([own]), []
            if weight is not None:
                summed = torch.tensor([weight], dtype=torch.float64)
                work = ring.all_reduce(summed)
                total = [lambda work=work, summed=summed: (work.wait(), float(summed))[1]]
            exchange.begin(ring, lambda: None, overlapped=session.final_in_backward)
            session.gradients([own], len(rows), *total)
            exchange.finish()
            session.apply()
        exchange.close()

    rings = in_process_rings(len(SIZES))
    threads = [
        threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(len(SIZES))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(
        torch.equal(first, second)
        for first, second in zip(
            models[0].state_dict().values(), models[1].state_dict().values(), strict=True
        )
    )
    return dict(models[0].state_dict())


@pytest.mark.parametrize("name", TRAINERS)
def test_one_process_has_the_bits_of_a_ring(name: str) -> None:
    trainer, ignored = TRAINERS[name]
    data, model = samples(ignored), network()
    session = FP32Trainer(**{**vars(trainer), "reduction": "ring", "num_buckets": 2}).start(
        model, TrainingSpan(num_members=4, total_steps=4)
    )
    for rows in BATCHES:
        session.step([data.batch(part) if len(part) else () for part in rows.split(list(SIZES))])
    for ours, theirs in zip(
        model.state_dict().values(), ring_weights(trainer, data).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "own weight"])
@pytest.mark.parametrize("shares", [((3,), (2, 1)), ((3,), (3,))])
def test_pipelines_train_as_one_device(name: str, shares: tuple[tuple[int, ...], ...]) -> None:
    trainer, ignored = TRAINERS[name]
    module = pipelines.model()
    labels = pipelines.data().labels % CLASSES
    drawn = torch.rand(len(labels), generator=torch.Generator().manual_seed(4))
    data = Pairs(pipelines.data().inputs, torch.where(drawn < ignored, -100, labels))
    if name == "class weights":
        five = torch.tensor([0.1, 2.0, 0.0, 3.5, 1.0])
        trainer = FP32Trainer(optimizer=sgd(0.1), loss=nn.CrossEntropyLoss(weight=five))
    trainer = FP32Trainer(**{**vars(trainer), "device": "cpu"})
    steps = [Mini(step=step, indices=rows.numpy()) for step, rows in enumerate(BATCHES)]
    last = pipelines.read(module).model.num_layers - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "data", lambda: data)
        end = pipelines.train_together(module, straight_plan((1, last), shares, 4), steps, trainer)
        alone_weights = pipelines.train_alone(module, steps, trainer)
    assert_trained_alike(dict(end.weights), {name: alone_weights[name] for name in end.weights})


@pytest.mark.parametrize("name", ["class weights", "ignored labels"])
def test_members_with_batchnorm_divide_by_the_weight_of_the_whole_batch(name: str) -> None:
    """Each member normalises its own samples, as on a machine of its own; the loss is still that of the batch."""
    trainer, ignored = TRAINERS[name]
    data, model = samples(ignored), network(norm=True)
    reference = copy.deepcopy(model).train()
    optimizer = trainer.optimizer(reference.parameters())
    session = trainer.start(model, TrainingSpan(num_members=2, total_steps=4))
    for rows in BATCHES:
        parts = [data.batch(part) for part in rows.split([5, 7])]
        optimizer.zero_grad()
        made = torch.cat([reference(inputs) for inputs, _ in parts])
        trainer.loss(made, torch.cat([labels for _, labels in parts])).backward()
        optimizer.step()
        session.step(parts)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_member_without_a_label_that_counts_leaves_the_gradient_to_the_others() -> None:
    trainer, model = TRAINERS["mean"][0], network(norm=True)
    session = trainer.start(model, TrainingSpan(num_members=2))
    loss = session.step([(images(4), torch.full((4,), -100)), (images(4, seed=1), classes(4))])
    assert torch.isfinite(loss)
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def test_a_batch_without_a_label_that_counts_is_refused() -> None:
    session = TRAINERS["mean"][0].start(network(norm=True), TrainingSpan(num_members=2))
    with pytest.raises(ConfigError, match="every label of a batch is ignored"):
        session.step([(images(4), torch.full((4,), -100)), (images(2), torch.full((2,), -100))])


def test_mixed_precision_refuses_labels_that_int8_cannot_ignore() -> None:
    model = built(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), 1
    )
    session = MixedPrecisionTrainer(
        fp32=FP32Trainer(optimizer=sgd(0.1)), npu_ratio=0.5, parallel=False
    ).start(model, TrainingSpan())
    with pytest.raises(ConfigError, match="some labels are -100"):
        session.step([(torch.randn(4, 1, 6, 6), torch.tensor([0, 1, -100, 2]))])


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
        self.layer, self.passes = nn.Linear(5, CLASSES), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.count += 1
        return self.layer(inputs)


def mean_of_squares(made: Tensor, labels: Tensor) -> Tensor:
    return made.square().mean()


def weighted_by_hand(made: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(made, labels, weight=WEIGHTS)


def try_in_group(trainer: FP32Trainer, model: nn.Module, data: DataSource, **changes: Any) -> None:
    members = changes.pop("members", (0, 1))
    train_group(
        model,
        data,
        task(
            0,
            1,
            members=members,
            partitions=members,
            capacities=(1.0,) * len(members),
            num_partitions=len(members),
            num_samples=len(data),
            num_steps=2,
            steps_per_epoch=4,
            batch_size=12,
            **changes,
        ),
        trainer,
    )


@pytest.mark.parametrize(
    "loss", [contrast, weighted_by_hand, lambda made, labels: made.square().sum()]
)
def test_a_loss_that_cannot_be_divided_is_refused_before_the_first_step(
    loss: Callable[..., Tensor],
) -> None:
    model = network()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(
        ConfigError, match="the loss cannot be divided: of a batch of 12 samples it is"
    ) as refused:
        try_in_group(FP32Trainer(loss=loss), model, samples(0.0))
    assert "loss_weight" in str(refused.value)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("changes", [{"members": (0,)}, {"first_step": 4}])
def test_one_device_and_later_rounds_try_nothing(changes: dict[str, Any]) -> None:
    try_in_group(FP32Trainer(loss=contrast), network(), samples(0.0), **changes)


def test_accumulation_is_tried_on_one_device() -> None:
    with pytest.raises(ConfigError, match="the loss cannot be divided"):
        try_in_group(
            FP32Trainer(loss=contrast, accumulation_steps=2), network(), samples(0.0), members=(0,)
        )


def test_a_weight_of_ones_own_makes_it_divisible_and_a_wrong_one_does_not() -> None:
    try_in_group(
        FP32Trainer(loss=weighted_by_hand, loss_weight=lambda batch: WEIGHTS[batch[1]].sum()),
        network(),
        samples(0.0),
    )
    with pytest.raises(ConfigError, match="the loss cannot be divided"):
        try_in_group(
            FP32Trainer(loss=weighted_by_hand, loss_weight=lambda batch: len(batch[1])),
            network(),
            samples(0.0),
        )


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = Counting()
    FP32Trainer(loss=mean_of_squares).require_divisible_loss(model, (), samples(0.0), 12)
    assert (model.passes, float(model.count), model.training) == (0, 0.0, True)


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_with_random_numbers_is_accepted_and_a_sum_with_them_is_not(seed: int) -> None:
    data = Pairs(images(48, seed), classes(48, seed=seed))
    FP32Trainer(loss=mean_of_squares).require_divisible_loss(built(Noisy, seed), (), data, 12)
    with pytest.raises(ConfigError, match="cannot be divided"):
        FP32Trainer(loss=lambda made, labels: made.square().sum() ** 2).require_divisible_loss(
            built(Noisy, seed), (), data, 12
        )


def test_a_loss_that_takes_whole_batches_alone_is_refused() -> None:
    def fixed(made: Tensor, labels: Tensor) -> Tensor:
        return (made.square().mean(1) * torch.ones(12)).mean()

    with pytest.raises(ConfigError, match=r"fails .*The size of tensor"):
        FP32Trainer(loss=fixed).require_divisible_loss(network(), (), samples(0.0), 12)


def test_a_loss_that_is_not_finite_is_left_to_training() -> None:
    FP32Trainer(loss=lambda made, labels: made.mean() * float("nan")).require_divisible_loss(
        network(), (), samples(0.0), 12
    )


def test_bfloat16_is_tried_in_float32() -> None:
    FP32Trainer(loss=mean_of_squares, autocast=torch.bfloat16).require_divisible_loss(
        network(), (), samples(0.0), 12
    )


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
    loader = DataLoader(source, collate_fn=as_dict)
    data = as_data_source(loader)
    with pytest.raises(ConfigError, match="cannot be divided"):
        try_in_group(FP32Trainer(), built(Tokens, 1), data)
    counted = FP32Trainer(loss_weight=lambda batch: int((batch["labels"] != -100).sum()))
    try_in_group(counted, built(Tokens, 1), data)


def test_a_loss_that_a_model_of_its_own_loss_would_ignore_is_refused() -> None:
    session = FP32Trainer(loss=nn.MSELoss()).start(built(Tokens, 1), TrainingSpan())
    with pytest.raises(ConfigError, match="loss would be ignored"):
        session.step([{"inputs": images(3), "labels": classes(3)}])


def test_batches_of_one_sample_need_no_trial() -> None:
    require_divisible(
        network(), lambda model, batch: pytest.fail("tried"), BY_SAMPLES, [], remedy=""
    )
    assert num_samples(()) == 0
