"""Which sample is seen when: every one once an epoch, whatever the numbers of groups, samples and steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from socflower.hierarchy import group_steps_per_epoch
from socflower.training.batches import BatchSchedule, group_batches, local_batches
from socflower.wire.message_keys import GroupTask


def task(group_id: int, num_groups: int, **changes: object) -> GroupTask:
    values: dict[str, object] = {
        "group_id": group_id,
        "num_groups": num_groups,
        "members": (0,),
        "partitions": (0,),
        "num_partitions": 1,
        "capacities": (1.0,),
        "first_step": 0,
        "num_steps": 1,
        "steps_per_epoch": 1,
        "total_steps": 10,
        "batch_size": 8,
        "reshuffle": True,
        "deal_epoch": 0,
        "seed": 7,
        "num_samples": 100,
    }
    values |= changes
    return GroupTask(**{"leader": values["members"][0], **values})  # type: ignore[index]


@given(
    num_groups=st.integers(1, 9), num_samples=st.integers(20, 300), batch_size=st.integers(1, 40)
)
def test_an_epoch_uses_every_sample_once_over_all_groups(
    num_groups: int, num_samples: int, batch_size: int
) -> None:
    steps = group_steps_per_epoch(num_samples, num_groups, batch_size)
    seen: list[int] = []
    for group_id in range(num_groups):
        batches = list(
            group_batches(
                task(
                    group_id,
                    num_groups,
                    num_steps=steps,
                    steps_per_epoch=steps,
                    batch_size=batch_size,
                ),
                num_samples,
            )
        )
        assert len(batches) == steps
        assert all(len(batch) <= batch_size for batch in batches)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        seen.extend(np.concatenate(batches).tolist())
    assert sorted(seen) == list(range(num_samples))


@given(first=st.integers(0, 20), length=st.integers(1, 15))
def test_an_interval_sees_the_same_batches_as_the_whole_training(first: int, length: int) -> None:
    whole = list(group_batches(task(1, 3, num_steps=40, steps_per_epoch=6), 100))
    part = list(
        group_batches(task(1, 3, first_step=first, num_steps=length, steps_per_epoch=6), 100)
    )
    assert all(
        np.array_equal(a, b) for a, b in zip(part, whole[first : first + length], strict=True)
    )


def test_a_deal_moves_samples_between_groups_and_an_epoch_without_one_does_not() -> None:
    def samples_of(group_id: int, epoch: int, deal_epoch: int) -> list[int]:
        return np.concatenate(
            list(
                group_batches(
                    task(
                        group_id,
                        4,
                        first_step=epoch * 5,
                        num_steps=5,
                        steps_per_epoch=5,
                        deal_epoch=deal_epoch,
                    ),
                    200,
                )
            )
        ).tolist()

    first = samples_of(0, 0, 0)
    same_deal = samples_of(0, 1, 0)
    new_deal = samples_of(0, 1, 1)
    assert first != same_deal
    assert set(first) == set(same_deal) != set(new_deal)
    assert sorted(sample for group in range(4) for sample in samples_of(group, 1, 0)) == list(
        range(200)
    )


def test_data_that_stay_are_permuted_anew_each_epoch_by_each_member() -> None:
    schedule = BatchSchedule(
        task(
            0,
            4,
            members=(3, 8),
            partitions=(2, 5),
            capacities=(1.0, 9.0),
            reshuffle=False,
            steps_per_epoch=5,
        ),
        [50, 23],
    )
    for member, size in enumerate((50, 23)):
        own = [
            np.concatenate(
                [schedule.shares(step, [0, 1])[member] for step in range(epoch * 5, epoch * 5 + 5)]
            )
            for epoch in range(2)
        ]
        assert sorted(own[0]) == sorted(own[1]) == list(range(size))
        assert own[0].tolist() != own[1].tolist()


@given(
    present=st.sets(st.integers(0, 3), min_size=1), step=st.integers(0, 9), reshuffle=st.booleans()
)
def test_a_member_that_is_gone_leaves_its_share_to_the_others_where_data_are_dealt(
    present: set[int],
    step: int,
    reshuffle: bool,
) -> None:
    schedule = BatchSchedule(
        task(
            0,
            1,
            members=(0, 1, 2, 3),
            partitions=(0, 1, 2, 3),
            capacities=(1.0, 2.0, 1.0, 3.0),
            steps_per_epoch=5,
            reshuffle=reshuffle,
        ),
        [100] if reshuffle else [30, 31, 32, 33],
    )
    everyone = schedule.shares(step, [0, 1, 2, 3])
    left = schedule.shares(step, sorted(present))
    if reshuffle:
        assert np.concatenate(left).tolist() == np.concatenate(everyone).tolist()
    else:
        assert [each.tolist() for each in left] == [
            everyone[member].tolist() for member in sorted(present)
        ]


@given(num_samples=st.integers(1, 100), batch_size=st.integers(1, 30), num_epochs=st.integers(1, 3))
def test_a_client_alone_sees_every_sample_once_an_epoch(
    num_samples: int, batch_size: int, num_epochs: int
) -> None:
    batches = list(local_batches(num_samples, batch_size, num_epochs, seed=(1, 2), first_epoch=0))
    assert (
        np.bincount(np.concatenate(batches), minlength=num_samples).tolist()
        == [num_epochs] * num_samples
    )
    assert all(0 < len(batch) <= batch_size for batch in batches)
