"""The active flows, their max-min fair rates, and their end times."""

from collections.abc import Hashable, Mapping, Sequence
from heapq import heappush
from math import inf
from typing import TypeVar

Resource = TypeVar("Resource", bound=Hashable)

SAME_SHARE = 1e-12
"""Relative difference below which two resources saturate together, so that symmetric flows get equal rates."""


def max_min_rates(
    paths: Sequence[Sequence[Resource]],
    capacities: Mapping[Resource, float],
    weights: Sequence[Sequence[int]] | None = None,
) -> list[float]:
    """Return the max-min fair rate of each flow, in the capacities' unit.

    `paths[f]` holds the resources that flow f crosses, at least one. No flow can get more without taking from a flow
    that has no more: every flow crosses a saturated resource on which no flow is faster. Progressive filling: all rates
    rise together; when a resource saturates, its flows stop rising. With `weights[f]`, one number for each resource of
    its path, f stands for that many equal flows there.
    """
    crossing: dict[Resource, list[int]] = {}
    rising: dict[Resource, int] = {}
    weights = weights or [(1,) * len(path) for path in paths]
    for flow, path in enumerate(paths):
        assert path, f"flow {flow} crosses no resource, so its rate has no bound"
        for resource, weight in zip(path, weights[flow], strict=True):
            crossing.setdefault(resource, []).append(flow)
            rising[resource] = rising.get(resource, 0) + weight
    left = {resource: capacities[resource] for resource in crossing}
    rates = [-1.0] * len(paths)
    while rising:
        shares = {resource: left[resource] / count for resource, count in rising.items()}
        # Rounding may make a later share slightly smaller than an earlier one; a rate is never negative.
        level = max(min(shares.values()), 0.0)
        for resource, share in shares.items():
            # This resource is not saturated yet.
            if share > level * (1.0 + SAME_SHARE):
                continue
            for flow in crossing[resource]:
                if rates[flow] < 0.0:
                    rates[flow] = level
                    for crossed, weight in zip(paths[flow], weights[flow], strict=True):
                        left[crossed] -= weight * level
                        rising[crossed] -= weight
        rising = {resource: count for resource, count in rising.items() if count}
    return rates


Event = tuple[float, int, int, int]
"""Time, kind, task, version: ordered, so that equal times are processed in a fixed order."""

COMPUTE_END, FLOW_END = 0, 1


SAME_INSTANT = 1e-12
"""Relative difference below which two events happen together: the difference is due to rounding."""

_MAX_KNOWN = 1_000_000


class RateTable:
    """Max-min rates by the multiset of paths that share; steps repeat, so allocations do."""

    def __init__(
        self,
        paths: Sequence[Sequence[int]],
        capacities: Sequence[float],
        weights: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.paths: list[Sequence[int]] = []
        # How many equal flows one flow of a path stands for, on each of its resources.
        self.weights: list[Sequence[int]] = []
        self.capacities = list(capacities)
        # Rate of a single flow on each path.
        self.alone: list[float] = []
        self._by_resource = dict(enumerate(capacities))
        self._known: dict[tuple[int, ...], Mapping[int, float]] = {}
        self._size = 0
        for number, path in enumerate(paths):
            self.add_path(path, None if weights is None else weights[number])

    def add_resource(self, capacity: float) -> int:
        """Add a resource and return its number."""
        self.capacities.append(capacity)
        self._by_resource[len(self.capacities) - 1] = capacity
        return len(self.capacities) - 1

    def add_path(self, path: Sequence[int], weights: Sequence[int] | None = None) -> int:
        """Add a path over resources and return its number."""
        self.paths.append(path)
        self.weights.append(weights or (1,) * len(path))
        self.alone.append(self._alone(len(self.paths) - 1))
        return len(self.paths) - 1

    def _alone(self, path: int) -> float:
        return min(
            [
                self.capacities[resource] / weight
                for resource, weight in zip(self.paths[path], self.weights[path], strict=True)
            ]
        )

    def set_capacity(self, resource: int, capacity: float) -> None:
        """Change a resource's capacity; 0 stops the flows across it."""
        self.capacities[resource] = self._by_resource[resource] = capacity
        self._known.clear()
        self._size = 0
        for number, path in enumerate(self.paths):
            if resource in path:
                self.alone[number] = self._alone(number)

    def rates(self, sharing: Sequence[int]) -> Mapping[int, float]:
        """Return the rate of each path, given the paths of all flows that share (sorted, repeats included)."""
        key = tuple(sharing)
        known = self._known.get(key)
        if known is None:
            # A thousand flows that end one by one would fill the memory.
            if self._size > _MAX_KNOWN:
                self._known.clear()
                self._size = 0
            # Flows of one path cross the same bottleneck, so their rates are equal.
            rates = max_min_rates(
                [self.paths[path] for path in key],
                self._by_resource,
                [self.weights[path] for path in key],
            )
            known = self._known[key] = dict(zip(key, rates, strict=True))
            self._size += len(key)
        return known


class Flows:
    """Active flows by task; a change re-shares only the flows connected to it through shared resources.

    Of flows that share, only those that end first get an event: by then the rates of the others have changed. If a
    resource carries nothing, its flows have no event until its capacity changes. An event is valid if its version is
    `versions[task]`; a later change of rate makes it invalid.
    """

    def __init__(
        self, table: RateTable, num_tasks: int, events: list[Event], versions: list[int]
    ) -> None:
        self.table = table
        self._events = events
        self._versions = versions
        self._users: list[dict[int, None]] = [{} for _ in table.capacities]
        # Flows that cross each resource, with their weights.
        self._load = [0] * len(table.capacities)
        self._path = [0] * num_tasks
        self._left = [0.0] * num_tasks
        self._rate = [0.0] * num_tasks
        self._since_s = [0.0] * num_tasks
        self.end_s = [0.0] * num_tasks
        # Resources whose flows have changed since the rates were last shared.
        self.changed: set[int] = set()

    def grow(self, num_tasks: int) -> None:
        """Make room for tasks with numbers below `num_tasks`, and for the table's new resources."""
        for column in (self._left, self._rate, self._since_s, self.end_s):
            column.extend([0.0] * (num_tasks - len(column)))
        self._path.extend([0] * (num_tasks - len(self._path)))
        self._users.extend([{} for _ in range(len(self.table.capacities) - len(self._users))])
        self._load.extend([0] * (len(self.table.capacities) - len(self._load)))

    def is_used(self, resource: int) -> bool:
        """Whether a flow crosses a resource."""
        return bool(self._users[resource])

    def stopped(self) -> list[int]:
        """Return the tasks whose flows have rate 0, by number."""
        return sorted({task for users in self._users for task in users if not self._rate[task]})

    def add(self, task: int, path: int, volume: float, now_s: float) -> None:
        """Add a flow; it has no rate until `share`."""
        self._path[task] = path
        self._left[task] = volume
        self._rate[task] = 0.0
        self._since_s[task] = now_s
        resources, load = self.table.paths[path], self._load
        self.changed.update(resources)
        for resource, weight in zip(resources, self.table.weights[path], strict=True):
            self._users[resource][task] = None
            load[resource] += weight

    def remove(self, task: int) -> None:
        """Remove a flow that has ended."""
        path, load = self._path[task], self._load
        resources = self.table.paths[path]
        self.changed.update(resources)
        for resource, weight in zip(resources, self.table.weights[path], strict=True):
            del self._users[resource][task]
            load[resource] -= weight

    def postpone(self, task: int, shift_s: float) -> None:
        """Delay a flow by `shift_s` at its present rate; the caller delays all flows that share with it."""
        self._since_s[task] += shift_s
        self.end_s[task] += shift_s
        self._versions[task] += 1
        if self.end_s[task] < inf:
            heappush(self._events, (self.end_s[task], FLOW_END, task, self._versions[task]))

    def share(self, now_s: float) -> None:
        """Update rates and ends of the flows affected by changes since the last call."""
        reached: set[int] = set()
        for first in self.changed:
            users = self._users[first]
            # The users of one resource are reached together.
            if not users or not reached.isdisjoint(users):
                continue
            tasks, level, crossing = self._connected(first)
            reached.update(tasks)
            alone, path_of = self.table.alone, self._path
            if crossing == len(tasks) and level <= min([alone[path_of[task]] for task in tasks]):
                # All cross the narrowest resource and no other resource limits one: equal shares.
                self._set_rates(tasks, [level] * len(tasks), now_s)
            else:
                rates = self.table.rates(sorted([path_of[task] for task in tasks]))
                self._set_rates(tasks, [rates[path_of[task]] for task in tasks], now_s)
        self.changed.clear()

    def _connected(self, first: int) -> tuple[list[int], float, int]:
        """Return the flows connected to a resource, the least equal share on a resource, and the flows there."""
        users, path_of, load = self._users, self._path, self._load
        paths, capacities = self.table.paths, self.table.capacities
        # A flow that shares nothing is the most frequent case.
        if len(users[first]) == 1:
            (task,) = users[first]
            if all([len(users[resource]) == 1 for resource in paths[path_of[task]]]):
                return [task], self.table.alone[path_of[task]], 1
        seen = {first}
        tasks: dict[int, None] = {}
        frontier = [first]
        level, crossing = inf, 0
        while frontier:
            resource = frontier.pop()
            sharing = users[resource]
            share = capacities[resource] / load[resource]
            if share < level:
                level, crossing = share, len(sharing)
            for task in sharing:
                if task not in tasks:
                    tasks[task] = None
                    for other in paths[path_of[task]]:
                        if other not in seen:
                            seen.add(other)
                            if len(users[other]) > 1:
                                frontier.append(other)
        return list(tasks), level, crossing

    def _set_rates(self, tasks: Sequence[int], rates: Sequence[float], now_s: float) -> None:
        left, rate_of, since_s, end_s = self._left, self._rate, self._since_s, self.end_s
        for task, rate in zip(tasks, rates, strict=True):
            before = rate_of[task]
            if rate != before:
                # What has flowed at the old rate since it was set.
                remaining = left[task] - before * (now_s - since_s[task])
                left[task] = remaining = max(remaining, 0.0)
                rate_of[task] = rate
                since_s[task] = now_s
                end_s[task] = now_s + remaining / rate if rate else inf
            elif not rate:
                end_s[task] = inf
        first_s = min([end_s[task] for task in tasks]) * (1.0 + SAME_INSTANT)
        for task in tasks:
            # Earlier events of these flows are no longer valid.
            self._versions[task] += 1
            if end_s[task] <= first_s < inf:
                heappush(self._events, (end_s[task], FLOW_END, task, self._versions[task]))
