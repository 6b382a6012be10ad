"""F4: a group's step is one SGD step on its batch, however uneven the shares."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.training.batch_statistics import depends_on_batch
from socflower.training.batches import group_batches
from socflower.training.fp32 import FP32Session, FP32Trainer, cosine_annealing, sgd
from socflower.training.group import train_group
from socflower.training.trainer import TrainingSpan
from socflower.wire.message_keys import GroupTask
from socflower.workloads.dataset import LabelledData
from socflower.workloads.map_dataset import MapDataset
from tests.rows import Rows
from tests.seeded import built
from tests.training.by_torch import assert_close, assert_equal, by_torch
from tests.training.test_batches import task


def small_network(*, norm: bool) -> nn.Sequential:
    def layers() -> nn.Sequential:
        norms = [nn.BatchNorm2d(4)] if norm else []
        first = nn.Conv2d(1, 4, 3, bias=not norm)
        return nn.Sequential(first, *norms, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))

    return built(layers, 3)


def small_data(num_samples: int) -> LabelledData:
    generator = torch.Generator().manual_seed(5)
    return LabelledData(
        inputs=torch.randint(
            0, 256, (num_samples, 1, 6, 6), generator=generator, dtype=torch.uint8
        ),
        labels=torch.randint(0, 3, (num_samples,), generator=generator),
        mean=(0.5,),
        std=(0.5,),
        num_classes=3,
    )


def session(model: nn.Module, num_members: int, **changes: object) -> FP32Session:
    trainer = FP32Trainer(**{"optimizer": sgd(0.1, 0.9), "reduction": "always", **changes})
    return trainer.start(model, TrainingSpan(num_members=num_members, total_steps=10))


def parts_of(data: LabelledData, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, labels = data.batch(torch.arange(len(data)))
    return list(zip(inputs.split(sizes), labels.split(sizes), strict=True))


def group(**changes: object) -> GroupTask:
    """Return a task of two equal members."""
    members = {"members": (0, 1), "partitions": (0, 1), "capacities": (1.0, 1.0)}
    return task(0, 1, **(members | {"steps_per_epoch": 5} | changes))


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0)
)
def test_uneven_shares_equal_the_full_batch(sizes: list[int]) -> None:
    data = small_data(sum(sizes))
    split = small_network(norm=False)
    whole = small_network(norm=False)
    in_parts = session(split, len(sizes))
    at_once = session(whole, 1)
    for _ in range(3):
        loss_parts = in_parts.step(parts_of(data, sizes))
        loss_whole = at_once.step(parts_of(data, [sum(sizes)]))
    assert loss_parts.item() == pytest.approx(loss_whole.item(), abs=1e-5)
    assert_close(split, whole)


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def test_one_group_of_everything_is_synchronous_sgd() -> None:
    """Against a plain torch loop over the same batches, bit for bit with one pass."""
    data = small_data(60)
    optimizer = sgd(0.05, 0.9)
    model = small_network(norm=False)
    reference = small_network(norm=False)
    whole = task(0, 1, num_steps=12, steps_per_epoch=6, batch_size=10)
    train_group(model, data, whole, FP32Trainer(optimizer=optimizer, channels_last=False))
    batches = [data.batch(torch.from_numpy(rows)) for rows in group_batches(whole, len(data))]
    losses = [partial(loss_of, inputs=inputs, labels=labels) for inputs, labels in batches]
    assert_equal(model, by_torch(reference, optimizer, losses))


def test_batch_norm_members_use_their_own_statistics() -> None:
    """The reference normalises each part by itself, and descends the mean loss of all samples."""
    sizes = [5, 3, 8]
    model = small_network(norm=True)
    reference = small_network(norm=True)
    parts = parts_of(small_data(16), sizes)
    together = session(model, len(sizes), channels_last=False)
    for _ in range(3):
        together.step(parts)
    together.finish()
    running_mean = torch.zeros(4)

    def mean_loss(module: nn.Module) -> torch.Tensor:
        nonlocal running_mean
        loss = torch.zeros(())
        running_mean *= 0.9
        for inputs, labels in parts:
            share = len(labels) / 16
            loss = loss + share * loss_of(module, inputs, labels)
            running_mean += 0.1 * share * module[0](inputs).mean((0, 2, 3)).detach()
        return loss

    by_torch(reference, sgd(0.1, 0.9), [mean_loss] * 3)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model[1].running_mean, running_mean)
    assert model[1].num_batches_tracked.item() == 3


def test_a_session_resumed_from_its_state_goes_on_as_if_never_stopped() -> None:
    data = small_data(80)
    trainer = FP32Trainer(optimizer=sgd(0.1, 0.9), scheduler=cosine_annealing)
    models = []
    for cuts in ([0, 10], [0, 4, 10], [0, 4, 10]):
        state = None
        models.append(small_network(norm=True))
        for first, end in pairwise(cuts):
            work = group(first_step=first, num_steps=end - first, steps_per_epoch=10)
            state = train_group(models[-1], data, work, trainer, state).end.state
    straight, resumed, again = models
    for ours, same, reference in zip(
        resumed.parameters(), again.parameters(), straight.parameters(), strict=True
    ):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("reshuffle", [True, False])
def test_a_dataset_of_the_same_samples_trains_the_same_weights(reshuffle: bool) -> None:
    whole = small_network(norm=True)
    rows = small_network(norm=True)
    own = [small_data(40)] * (1 if reshuffle else 2)
    work = group(num_steps=10, reshuffle=reshuffle)
    train_group(whole, own, work, FP32Trainer())
    train_group(rows, [MapDataset(Rows(each)) for each in own], work, FP32Trainer())
    assert_equal(rows, whole)


def test_augmentation_is_the_same_in_any_interval_and_differs_by_epoch_and_member() -> None:
    class Seen(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            inputs, label = super().__getitem__(index)
            flipped = not torch.equal(inputs, self.data.batch([index])[0][0])
            seen.setdefault((id(self.data), index), []).append(flipped)
            return inputs, label

    own = [small_data(40), small_data(40)]
    ways = []
    for intervals in (((0, 10),), ((0, 3), (3, 4), (7, 3))):
        seen: dict[tuple[int, int], list[bool]] = {}
        for first_step, num_steps in intervals:
            data = [MapDataset(Seen(each, augment=True)) for each in own]
            work = group(first_step=first_step, num_steps=num_steps, reshuffle=False)
            train_group(small_network(norm=False), data, work, FP32Trainer())
        ways.append(seen)
    assert ways[0] == ways[1]
    assert {len(flips) for flips in seen.values()} == {2}
    assert any(first != second for first, second in seen.values())
    assert any(seen[id(own[0]), index] != seen[id(own[1]), index] for index in range(40))


def test_a_new_leader_joins_the_schedule_where_it_stands() -> None:
    model = small_network(norm=False)
    trainer = FP32Trainer(optimizer=sgd(0.1), scheduler=cosine_annealing)
    begun = trainer.start(model, TrainingSpan(first_step=5, total_steps=10))
    assert begun._optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(("norm", "depends"), [(True, True), (False, False)])
def test_batch_dependence_is_found(norm: bool, depends: bool) -> None:
    assert depends_on_batch(small_network(norm=norm).train()) is depends
