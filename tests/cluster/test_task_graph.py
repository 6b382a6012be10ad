"""Values that cross between parts: task graphs, usage, and what messages carry."""

from socflower.cluster import Activity, Compute, TaskGraph, TaskGraphBuilder, Tier, Usage
from socflower.wire.message_keys import GroupTask
from tests.one_line import refused

TASK = GroupTask(
    group_id=1,
    num_groups=2,
    members=(3, 4),
    leader=3,
    partitions=(0, 1),
    num_partitions=4,
    capacities=(1.0, 2.0),
    first_step=5,
    num_steps=6,
    steps_per_epoch=7,
    total_steps=70,
    batch_size=8,
    reshuffle=False,
    deal_epoch=0,
    seed=9,
    num_samples=100,
)


def test_a_group_task_survives_the_message() -> None:
    record = TASK.encode()
    assert all(isinstance(value, int | float | bool | str | list) for value in record.values())
    assert all("_" not in key for key in record)
    assert GroupTask.decode(record) == TASK


def test_a_record_of_another_version_is_refused() -> None:
    record = TASK.encode()
    del record["seed"]
    refused(lambda: GroupTask.decode(record | {"sead": 1}), "'seed'", "'sead'")


def test_a_group_needs_a_capacity_and_a_partition_for_each_member() -> None:
    record = TASK.encode() | {"capacities": [1.0]}
    refused(lambda: GroupTask.decode(record), "group 1", "capacities")


def test_a_graph_is_in_order() -> None:
    builder = TaskGraphBuilder()
    first = builder.compute("a", 0, 1.0)
    second = builder.transfer("b", 0, 1, 10.0, after=[first])
    builder.follow_previous(first, [second])
    graph = builder.build([0, 1])
    assert graph.tasks[first].after_previous == (second,)
    for wrong in ({"after": (0,)}, {"after_previous": (3,)}):
        task = Compute(name="a", device=0, seconds=1.0, **wrong)
        refused(lambda task=task: TaskGraph(tasks=(task,), participants=(0,)), "task 0 (a)")


def test_usages_add_up() -> None:
    one = Usage(duration_s=1.0, energy_j={Activity.COMPUTE: 2.0}, num_bytes={Tier.HUB: 3.0})
    two = Usage(
        duration_s=4.0,
        energy_j={Activity.COMPUTE: 1.0, Activity.IDLE: 5.0},
        soc_seconds={Activity.IDLE: 6.0},
    )
    total = one + two
    assert total.duration_s == 5.0
    assert total.energy_j == {Activity.COMPUTE: 3.0, Activity.IDLE: 5.0}
    assert total.total_energy_j == 8.0
    assert (total.num_bytes, total.soc_seconds) == ({Tier.HUB: 3.0}, {Activity.IDLE: 6.0})
