"""F4: a group's step is one SGD step on its batch, however uneven the shares."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.errors import ConfigError
from socflower.hierarchy import split_batch
from socflower.training.batch_statistics import depends_on_batch
from socflower.training.fp32 import FP32Session, FP32Trainer, cosine_annealing, sgd
from socflower.training.group import train_group
from socflower.training.trainer import TrainingSpan
from socflower.workloads import LabelledData, MapDataset
from tests.rows import Rows
from tests.seeded import built
from tests.training.test_batches import task


def small_network(*, norm: bool) -> nn.Sequential:
    def layers() -> nn.Sequential:
        first: list[nn.Module] = [nn.Conv2d(1, 4, 3, bias=not norm)]
        if norm:
            first.append(nn.BatchNorm2d(4))
        return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))

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


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0)
)
def test_uneven_shares_equal_the_full_batch(sizes: list[int]) -> None:
    data = small_data(sum(sizes))
    split, whole = small_network(norm=False), small_network(norm=False)
    in_parts, at_once = session(split, len(sizes)), session(whole, 1)
    for _ in range(3):
        loss_parts = in_parts.step(parts_of(data, sizes))
        loss_whole = at_once.step(parts_of(data, [sum(sizes)]))
    assert loss_parts.item() == pytest.approx(loss_whole.item(), abs=1e-5)
    for ours, reference in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_one_pass_for_all_members_gives_the_weights_of_a_pass_for_each() -> None:
    data = small_data(64)
    each, once = small_network(norm=False), small_network(norm=False)
    settings_ = {
        "members": tuple(range(4)),
        "partitions": tuple(range(4)),
        "capacities": (1.0, 2.0, 1.0, 3.0),
        "num_steps": 8,
        "steps_per_epoch": 4,
        "batch_size": 16,
    }
    train_group(each, data, task(0, 1, **settings_), FP32Trainer(reduction="always"))
    train_group(once, data, task(0, 1, **settings_), FP32Trainer(reduction="auto"))
    for ours, reference in zip(each.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_one_group_of_everything_is_synchronous_sgd() -> None:
    """Against a plain torch loop over the same batches, bit for bit with one pass."""
    data, num_steps = small_data(60), 12
    model, reference = small_network(norm=False), small_network(norm=False)
    whole = task(0, 1, num_steps=num_steps, steps_per_epoch=6, batch_size=10)
    train_group(model, data, whole, FP32Trainer(optimizer=sgd(0.05, 0.9), channels_last=False))
    from socflower.training.batches import group_batches

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for indices in group_batches(whole, len(data)):
        inputs, labels = data.batch(torch.from_numpy(indices))
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_batch_norm_members_use_their_own_statistics() -> None:
    """The reference is the same split on copies of the model that share nothing but averaged gradients."""
    sizes = [5, 3, 8]
    data = small_data(sum(sizes))
    model = small_network(norm=True)
    copies = [copy.deepcopy(model) for _ in sizes]
    group = session(model, len(sizes), channels_last=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in copies]
    for _ in range(3):
        group.step(parts_of(data, sizes))
        for each, optimizer, (inputs, labels) in zip(
            copies, optimizers, parts_of(data, sizes), strict=True
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(each(inputs), labels).backward()
        for gradients in zip(*([p for p in each.parameters()] for each in copies), strict=True):
            mean = sum(size / sum(sizes) * p.grad for size, p in zip(sizes, gradients, strict=True))
            for parameter in gradients:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    group.finish()
    for ours, reference in zip(model.parameters(), copies[0].parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)
    norm, norms = model[1], [each[1] for each in copies]
    expected = sum(
        size / sum(sizes) * each.running_mean for size, each in zip(sizes, norms, strict=True)
    )
    torch.testing.assert_close(norm.running_mean, expected)
    assert norm.num_batches_tracked.item() == 3


def test_a_session_resumed_from_its_state_goes_on_as_if_never_stopped() -> None:
    data = small_data(80)
    through, resumed = small_network(norm=True), small_network(norm=True)
    trainer = FP32Trainer(optimizer=sgd(0.1, 0.9), scheduler=cosine_annealing)
    members = {
        "members": (0, 1),
        "partitions": (0, 1),
        "capacities": (1.0, 1.0),
        "steps_per_epoch": 10,
    }
    first = train_group(resumed, data, task(0, 1, num_steps=4, **members), trainer).end.state
    train_group(resumed, data, task(0, 1, first_step=4, num_steps=6, **members), trainer, first)
    # The reference settles its members' statistics at the same step, as every synchronisation does.
    state = train_group(through, data, task(0, 1, num_steps=4, **members), trainer).end.state
    train_group(through, data, task(0, 1, first_step=4, num_steps=6, **members), trainer, state)
    straight = small_network(norm=True)
    train_group(straight, data, task(0, 1, num_steps=10, **members), trainer)
    for ours, same, reference in zip(
        resumed.parameters(), through.parameters(), straight.parameters(), strict=True
    ):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("reshuffle", [True, False])
def test_a_dataset_of_the_same_samples_trains_the_same_weights(reshuffle: bool) -> None:
    members = {
        "members": (0, 1),
        "partitions": (0, 1),
        "capacities": (1.0, 1.0),
        "steps_per_epoch": 5,
        "reshuffle": reshuffle,
    }
    data = small_data(40)
    whole, rows = small_network(norm=True), small_network(norm=True)
    own = [data] if reshuffle else [data, data]
    train_group(whole, own, task(0, 1, num_steps=10, **members), FP32Trainer())
    train_group(
        rows,
        [MapDataset(Rows(each)) for each in own],
        task(0, 1, num_steps=10, **members),
        FP32Trainer(),
    )
    for ours, reference in zip(rows.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, reference)


def test_augmentation_is_the_same_in_any_interval_and_differs_by_epoch_and_member() -> None:
    class Seen(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            inputs, label = super().__getitem__(index)
            flipped = not torch.equal(inputs, self.data.batch([index])[0][0])
            seen.setdefault((id(self.data), index), []).append(flipped)
            return inputs, label

    seen: dict[tuple[int, int], list[bool]] = {}
    members = {
        "members": (0, 1),
        "partitions": (0, 1),
        "capacities": (1.0, 1.0),
        "steps_per_epoch": 5,
        "reshuffle": False,
    }
    own = [small_data(40), small_data(40)]
    train_group(
        small_network(norm=False),
        [MapDataset(Seen(each, augment=True)) for each in own],
        task(0, 1, num_steps=10, **members),
        FP32Trainer(),
    )
    at_once = {key: list(flips) for key, flips in seen.items()}
    assert {len(flips) for flips in at_once.values()} == {2}
    assert any(first != second for first, second in at_once.values())
    assert any(at_once[id(own[0]), index] != at_once[id(own[1]), index] for index in range(40))
    seen.clear()
    for first_step, num_steps in ((0, 3), (3, 4), (7, 3)):
        train_group(
            small_network(norm=False),
            [MapDataset(Seen(each, augment=True)) for each in own],
            task(0, 1, first_step=first_step, num_steps=num_steps, **members),
            FP32Trainer(),
        )
    assert seen == at_once


def test_a_new_leader_joins_the_schedule_where_it_stands() -> None:
    model = small_network(norm=False)
    trainer = FP32Trainer(optimizer=sgd(0.1), scheduler=cosine_annealing)
    begun = trainer.start(model, TrainingSpan(first_step=5, total_steps=10))
    assert begun._optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(("norm", "depends"), [(True, True), (False, False)])
def test_batch_dependence_is_found(norm: bool, depends: bool) -> None:
    assert depends_on_batch(small_network(norm=norm).train()) is depends


def test_an_unknown_mode_of_passes_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction = 'sometimes'"):
        FP32Trainer(reduction="sometimes")


def test_members_shares_are_those_of_the_plan() -> None:
    assert (
        split_batch(10, (1.0, 1.0, 2.0)) == (3, 2, 5) or sum(split_batch(10, (1.0, 1.0, 2.0))) == 10
    )
