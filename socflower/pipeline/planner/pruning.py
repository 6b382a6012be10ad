"""Orders of devices for a search, and pruning of a search that would take too long.

A pruned search first tries some cuts and some places of groups. A second search tries all near the best of the first.
"""

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np

from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.problem import Ints, PipelineDevice, PipelineProblem

MOST_CUTS = 49
MOST_PLACES = 20
MOST_STAGES = 12
_NEAR_LAYERS = 8
# The reach on either side of a place: the first one with at most `_MOST_NEAR_PLACES` places.
_NEAR_PLACES = (3, 2, 1)
_MOST_NEAR_PLACES = 30
_CALL_VALUES = 8_000
"""The cost of prepending a stage to one kept pipeline besides its ranges, in ranges of layers."""


def by_memory(devices: Sequence[PipelineDevice]) -> list[PipelineDevice]:
    """Return devices by memory, descending, as Algorithm 2 takes them; equal ones by speed, faster first."""
    return sorted(
        devices, key=lambda device: (-device.memory_bytes, seconds_of(device), device.soc)
    )


def orders(
    problem: PipelineProblem, samples_on: int | None = None, *, all_of: int = 0
) -> list[list[PipelineDevice]]:
    """Return orders of the devices to plan for: by memory, by speed both ways and as numbered; all of up to `all_of`.

    With `samples_on`, they are also returned with that device first. Of orders that only exchange equal devices behind
    equal links (`links_of`), one is returned.
    """
    devices = problem.devices
    by_speed = sorted(devices, key=lambda device: (seconds_of(device), device.soc))
    chosen: list[Sequence[PipelineDevice]] = [
        by_memory(devices),
        by_speed,
        by_speed[::-1],
        sorted(devices, key=lambda device: device.soc),
    ]
    if len(devices) <= all_of:
        chosen += permutations(devices)
    if samples_on is not None:
        chosen += [sorted(own, key=lambda device: device.soc != samples_on) for own in chosen]
    links = links_of(problem)

    def key_of(device: PipelineDevice) -> tuple[object, ...]:
        slot = -1 if device.soc != samples_on else device.soc
        return (
            id(device.seconds),
            device.memory_bytes,
            device.update_bytes_per_s,
            links[device.soc],
            slot,
        )

    found: dict[tuple[object, ...], list[PipelineDevice]] = {}
    for order in chosen:
        found.setdefault(tuple(map(key_of, order)), list(order))
    return list(found.values())


def links_of(problem: PipelineProblem) -> dict[int, tuple[float, ...]]:
    """Return, by SoC, what two devices have in common that are behind equal links.

    These are the rates of the links if the devices are on one board, or each on its own. Otherwise they also depend on
    the device at the other end, and no two devices count as alike.
    """
    cluster = problem.cluster
    boards = {device.soc: cluster.board_of(device.soc) for device in problem.devices}
    alike = len(set(boards.values())) in (1, len(boards)) and not cluster.servers
    found = dict[int, tuple[float, ...]]()
    for soc, number in boards.items():
        board = cluster.boards[number]
        rates = (board.soc_bytes_per_s, board.uplink_bytes_per_s)
        found[soc] = rates if alike else (*rates, float(soc))
    return found


def seconds_of(device: PipelineDevice) -> float:
    """Return a device's seconds for one sample of the whole model."""
    return device.seconds.both(0, device.seconds.num_layers - 1, 1)


def search_work(problem: PipelineProblem, width: int) -> float:
    """Return the approximate number of values that the whole search of one order computes.

    The search prepends stages 2, 3, … to kept pipelines, for every two places of the order that leave enough devices
    behind. Each time it computes a value for all ranges of layers, and some more (`_CALL_VALUES`).
    """
    layers, size = problem.model.num_layers, len(problem.devices)
    calls = 0
    for behind in range(1, min(size, layers)):
        calls += (size - behind) * (size - behind + 1) // 2
    ranges = layers * (layers + 1) // 2
    return float(max(1, calls) * width * (ranges + _CALL_VALUES))


def likely_cuts(problem: PipelineProblem, count: int) -> Ints:
    """Return about `count` cuts: in each part of equal time, the cut that the fewest bytes cross."""
    model, size = problem.model, problem.micro_batch_size
    forward, backward = (
        np.mean([each.seconds.prefixes(size)[which][:, size] for each in problem.devices], axis=0)
        for which in (0, 1)
    )
    done_s = forward + backward
    part = np.minimum((done_s / max(done_s[-1], 1e-300) * (count - 1)).astype(int), count - 2)
    inner = []
    for number in np.unique(part[1:-1]):
        cuts = np.nonzero(part[1:-1] == number)[0] + 1
        inner.append(int(cuts[model.entering_bytes[cuts].argmin()]))
    return np.array([0, *sorted(inner), model.num_layers], np.int64)


def likely_places(order: Sequence[PipelineDevice], count: int) -> list[int]:
    """Return about `count` even places in an order, and the places where the kind of device changes."""
    even = {round(index * len(order) / count) for index in range(count)}
    kinds = set()
    for index, (before, after) in enumerate(pairwise(order), 1):
        if (before.seconds, before.memory_bytes) != (after.seconds, after.memory_bytes):
            kinds.add(index)
    # If kinds alternate, there are too many such places.
    return sorted(even | kinds) if len(kinds) <= count else sorted(even)


def near(
    problem: PipelineProblem, plan: PipelinePlan, order: Sequence[PipelineDevice]
) -> tuple[Ints, list[int]]:
    """Return the cuts and the places of groups of devices near those of a plan."""
    num_layers, size = problem.model.num_layers, len(order)
    position = {device.soc: index for index, device in enumerate(order)}
    cuts, ends = {0, num_layers}, set[int]()
    for stage in plan.stages:
        first = stage.first_layer
        if first:
            cuts.update(
                range(max(1, first - _NEAR_LAYERS), min(num_layers, first + _NEAR_LAYERS + 1))
            )
        own = [position[soc] for soc in stage.devices]
        ends.update((min(own), max(own) + 1))
    places = set[int]()
    for reach in _NEAR_PLACES:
        places = {0}
        for end in ends:
            places.update(range(max(0, end - reach), min(size, end + reach + 1)))
        if len(places) <= _MOST_NEAR_PLACES:
            break
    return np.array(sorted(cuts), np.int64), sorted(places)
