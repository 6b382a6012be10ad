"""Every exchange of gradients is described, summed in one process and sent between machines in one way."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from socflower.cluster import Transfer
from socflower.hierarchy import Exchange, GradientExchange, exchange_graph
from socflower.hierarchy.exchange.gradients import CODINGS, Coding, LargestValues, gradient_coding
from socflower.peers.collective import Collective, PeerLost, exchange_over
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.links import LinkedRing
from socflower.training.exchange.compression import (
    Script,
    make_compression,
    run_together,
)
from tests.peers.ring.test_member import Members, nothing
from tests.training.exchange.test_compression import random_gradients

NUM_ELEMENTS = 50_003
STEPS = (0, 3, 6, 7, 8)
SIZES = (1, 2, 3, 5)


def codings() -> list[Coding]:
    largest = LargestValues(ratio=0.01, warm_up_steps=8)
    return [largest if name == "dgc" else gradient_coding(name) for name in CODINGS]


def by_name(coding: Coding) -> str:
    return coding.name


class Group:
    """The members' sides of a coding."""

    def __init__(self, coding: Coding, size: int) -> None:
        self.members = [make_compression(coding, seed=4, momentum=0.9) for _ in range(size)]

    def scripts(self, step: int, gradients: Sequence[Tensor]) -> list[Script[None]]:
        """Return each member's script of a step, which replaces its gradient."""
        for member in self.members:
            member.start_step(step)
        return [
            member.exchange(rank, len(gradients), 0, gradients[rank])
            for rank, member in enumerate(self.members)
        ]

    def finish(self) -> list[bytes]:
        """End the step; return the members' residuals."""
        for member in self.members:
            member.finish_step()
        return [member.state() for member in self.members]

    def restore(self, states: Sequence[bytes]) -> None:
        for member, state in zip(self.members, states, strict=True):
            member.restore(state)


class Wires:
    """A ring of threads that counts the bytes on its links."""

    def __init__(self, size: int) -> None:
        self.rings = in_process_rings(size)
        self.sent_bytes = 0
        for ring in self.rings:
            links = cast(LinkedRing, ring)._links
            links.send = self._counted(links.send)  # type: ignore[method-assign]

    def _counted(self, send: Callable[[memoryview], None]) -> Callable[[memoryview], None]:
        def counted(chunk: memoryview) -> None:
            self.sent_bytes += chunk.nbytes
            send(chunk)

        return counted

    def run(self, scripts: Sequence[Script[None]]) -> None:
        def member(ring: Collective) -> None:
            try:
                exchange_over(ring, scripts[ring.rank])
            except BaseException:
                ring.close()
                raise

        with ThreadPoolExecutor(len(self.rings)) as threads:
            list(threads.map(member, self.rings, timeout=60))

    def __enter__(self) -> "Wires":
        return self

    def __exit__(self, *_: object) -> None:
        for ring in self.rings:
            ring.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coding", codings(), ids=by_name)
def test_wires_have_the_bits_of_one_process_and_the_bytes_of_the_description(
    coding: Coding, size: int
) -> None:
    exchange, here, there = (
        GradientExchange(coding=coding),
        Group(coding, size),
        Group(coding, size),
    )
    bucket = Exchange(num_bytes=4.0 * NUM_ELEMENTS, num_tensors=1)
    with Wires(size) as wires:
        for step in STEPS:
            ours = random_gradients(size, NUM_ELEMENTS, seed=step)
            theirs = [gradient.clone() for gradient in ours]
            run_together(here.scripts(step, ours))
            wires.sent_bytes = 0
            wires.run(there.scripts(step, theirs))
            assert all(map(torch.equal, ours, theirs))
            states = here.finish()
            assert states == there.finish()
            there = Group(coding, size)
            there.restore(states)
            expected = exchange.wire_bytes(bucket.num_bytes, size, step)
            assert wires.sent_bytes / size == pytest.approx(expected, rel=0.01, abs=1e-9)
            if size > 1:
                graph = exchange_graph(range(size), bucket, exchange, step)
                transfers = [task for task in graph.tasks if isinstance(task, Transfer)]
                sent = sum(task.num_bytes * task.rounds for task in transfers)
                assert sent / size == pytest.approx(expected)


@pytest.mark.parametrize("coding", codings(), ids=by_name)
def test_a_peer_that_leaves_ends_the_exchange(coding: Coding) -> None:
    with Wires(3) as wires:
        wires.rings[2].close()
        scripts = Group(coding, 3).scripts(0, [torch.ones(100)] * 3)
        for ring in wires.rings[:2]:
            with pytest.raises(PeerLost):
                exchange_over(ring, scripts[ring.rank])


@pytest.mark.parametrize(
    "options",
    [
        {"num_buckets": 3},
        {"norm": True},
        {"own_data": True, "loss": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 4.0, 0.5]))},
    ],
    ids=["buckets", "norm", "own data and class weights"],
)
@pytest.mark.parametrize("name", CODINGS)
def test_a_group_in_one_process_has_the_bits_of_a_ring_over_intervals(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With momentum, a schedule and residuals that are saved between intervals."""
    first = Members(3, monkeypatch, nothing, compression=name, **options)
    first.check()
    Members(3, monkeypatch, nothing, compression=name, before=first, **options).check()
