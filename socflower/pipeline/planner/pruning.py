"""Orders of devices, and the parts of a search that are looked at where all of it would take too long.

Cuts and places of groups are thinned out first; a second search then looks at all that are near the best of the first.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.problem import Ints, PipelineDevice, PipelineProblem

MOST_CUTS = 49
MOST_PLACES = 20
MOST_STAGES = 12
_ALL_ORDERS_OF = 4  # devices, of models up to so many layers:
_ALL_ORDERS_LAYERS = 64
_NEAR_LAYERS = 8
_NEAR_PLACES = (3, 2, 1)  # on either side of a place: the first with which there are not too many
_MOST_NEAR_PLACES = 30
_CALL_VALUES = 8_000
"""Ranges of layers that cost as much as the rest of prepending a stage to one kept pipeline."""


def by_memory(devices: Sequence[PipelineDevice]) -> list[PipelineDevice]:
    """Return devices by memory, descending, as Algorithm 2 takes them; equal ones by speed, faster first."""
    return sorted(
        devices, key=lambda device: (-device.memory_bytes, seconds_of(device), device.soc)
    )


def orders(problem: PipelineProblem, samples_on: int | None = None) -> list[list[PipelineDevice]]:
    """Return orders of the devices to plan for: by memory, by speed both ways, as numbered; of a few devices, all.

    Each is also returned with the device first that has the samples, if one has.

    Of orders in which equal devices change places behind equal links, one is enough; links are taken as equal if all
    devices are on one board or on boards of their own.
    """
    devices = problem.devices
    by_speed = sorted(devices, key=lambda device: (seconds_of(device), device.soc))
    chosen: list[Sequence[PipelineDevice]] = [
        by_memory(devices),
        by_speed,
        by_speed[::-1],
        sorted(devices, key=lambda device: device.soc),
    ]
    if len(devices) <= _ALL_ORDERS_OF and problem.model.num_layers <= _ALL_ORDERS_LAYERS:
        chosen += list(permutations(devices))
    chosen += [
        sorted(order, key=lambda device: device.soc != samples_on)
        for order in chosen[:4]
        if samples_on is not None
    ]
    boards = [problem.cluster.board_of(device.soc) for device in devices]
    alike = len(set(boards)) in (1, len(boards))
    found: dict[tuple[object, ...], list[PipelineDevice]] = {}
    for order in chosen:
        key = tuple(
            (
                id(device.seconds),
                device.memory_bytes,
                device.update_bytes_per_s,
                -1 if alike and device.soc != samples_on else device.soc,
            )
            for device in order
        )
        found.setdefault(key, list(order))
    return list(found.values())


def seconds_of(device: PipelineDevice) -> float:
    """Return a device's seconds for one sample of the whole model."""
    return device.seconds.forward(0, device.seconds.num_layers - 1, 1) + device.seconds.backward(
        0, device.seconds.num_layers - 1, 1
    )


def search_work(problem: PipelineProblem, width: int) -> float:
    """Return about how many values the whole search of one order computes.

    Stages p = 2, 3, … are prepended to the pipelines kept of the last devices, for every two places of the order that
    leave p − 1 devices: each over all ranges of layers, and with a cost of its own.
    """
    layers, size = problem.model.num_layers, len(problem.devices)
    calls = sum(
        (size - behind) * (size - behind + 1) // 2 for behind in range(1, min(size, layers))
    )
    return float(max(1, calls) * width * (layers * (layers + 1) // 2 + _CALL_VALUES))


def likely_cuts(problem: PipelineProblem, count: int) -> Ints:
    """Return about `count` cuts: of each part of equal time, the one that the fewest bytes cross."""
    model = problem.model
    size = problem.micro_batch_size
    forward, backward = (
        np.mean(
            [device.seconds.prefixes(size)[which][:, size] for device in problem.devices], axis=0
        )
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
    """Return about `count` even places in an order, and those where the kind of device changes."""
    size = len(order)
    even = {round(index * size / count) for index in range(count)}
    kinds = {
        index
        for index in range(1, size)
        if order[index].seconds is not order[index - 1].seconds
        or order[index].memory_bytes != order[index - 1].memory_bytes
    }
    # Where kinds alternate, places of change are not few.
    return sorted(even | (kinds if len(kinds) <= count else set()))


def near(
    problem: PipelineProblem, plan: PipelinePlan, order: Sequence[PipelineDevice]
) -> tuple[Ints, list[int]]:
    """Return the cuts and the places of groups of devices near those of a plan."""
    num_layers, position = (
        problem.model.num_layers,
        {device.soc: index for index, device in enumerate(order)},
    )
    cuts = {0, num_layers}
    ends: set[int] = set()
    for stage in plan.stages:
        cuts.update(
            range(
                max(1, stage.first_layer - _NEAR_LAYERS),
                min(num_layers, stage.first_layer + _NEAR_LAYERS + 1),
            )
            if stage.first_layer
            else ()
        )
        own = [position[soc] for soc in stage.devices]
        ends.update((min(own), max(own) + 1))
    places: set[int] = set()
    for reach in _NEAR_PLACES:
        places = {
            0,
            *(
                place
                for end in ends
                for place in range(max(0, end - reach), min(len(order), end + reach + 1))
            ),
        }
        if len(places) <= _MOST_NEAR_PLACES:
            break
    return np.array(sorted(cuts), np.int64), sorted(places)
