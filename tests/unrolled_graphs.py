"""Task graphs with a task for each round, as an independent view of transfers that take place in rounds."""

from collections import Counter
from dataclasses import replace
from heapq import heapify, heappop, heappush

from socflower.cluster import TaskGraph, Transfer

Node = tuple[int, int]  # task, round


def unrolled(graph: TaskGraph, *, in_order: bool = False) -> TaskGraph:
    """Return the graph with every round of a transfer as a task of its own; other tasks keep their order.

    With `in_order` a transfer's first round follows its last one of the previous repetition, as in the graph.
    """
    rounds = [task.rounds if isinstance(task, Transfer) else 1 for task in graph.tasks]
    before: dict[Node, list[Node]] = {}
    for index, task in enumerate(graph.tasks):
        before[index, 0] = [(other, rounds[other] - 1) for other in task.after]
        for number in range(1, rounds[index]):
            assert isinstance(task, Transfer)
            before[index, number] = [
                (other, number - 1) for other in dict.fromkeys((index, *task.after_round))
            ]
    place = {node: number for number, node in enumerate(_ordered(before))}
    tasks = []
    for index, number in place:
        task = graph.tasks[index]
        previous = (*task.after_previous, *((index,) if in_order and rounds[index] > 1 else ()))
        if isinstance(task, Transfer):
            task = replace(task, rounds=1, after_round=())
        tasks.append(
            replace(
                task,
                after=tuple(place[node] for node in before[index, number]),
                after_previous=tuple(place[other, rounds[other] - 1] for other in previous)
                if number == 0
                else (),
            )
        )
    return TaskGraph(tasks=tuple(tasks), participants=graph.participants)


def _ordered(before: dict[Node, list[Node]]) -> list[Node]:
    """Return the nodes with each after those before it, the first task first."""
    missing = {node: len(others) for node, others in before.items()}
    following: dict[Node, Counter[Node]] = {node: Counter() for node in before}
    for node, others in before.items():
        for other in others:
            following[other][node] += 1
    free = [node for node, count in missing.items() if not count]
    heapify(free)
    order = []
    while free:
        order.append(heappop(free))
        for node, count in following[order[-1]].items():
            missing[node] -= count
            if not missing[node]:
                heappush(free, node)
    return order
