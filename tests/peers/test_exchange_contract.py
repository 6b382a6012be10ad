"""Every exchange of gradients is described, summed in one process and sent between machines in one way."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from socflower.cluster import Transfer
from socflower.cluster.cost_model import Gradient
from socflower.hierarchy import Exchange, GradientExchange, exchange_graph
from socflower.hierarchy.exchange.coding_bytes import CODINGS, RING, SERVER, Coding, gradient_coding
from socflower.peers.collective import Collective, PeerLost, exchange_over
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.links import ClosableLinks, LinkedRing
from socflower.peers.transports.tree import Tree, in_process_trees
from socflower.training.exchange.codings import make_compression
from socflower.training.exchange.compression import Script, run_together
from socflower.training.group import train_group
from tests.peers.ring.test_member import Members, model, nothing, samples, task, trainer
from tests.training.exchange.test_compression import random_gradients

NUM_ELEMENTS = 50_003
STEPS = (0, 3, 6, 7, 8)
SIZES = (1, 2, 3, 5)


SHAPES = ((200, 250), (3,))
# Links on which fewer bytes are faster.
OPTIONS = {
    "dgc": "ratio=0.01 warm_up_steps=8",
    "hipress": "ratio=0.01 warm_up_steps=8 bytes_per_s=1e6",
    "powersgd": "rank=2 start_step=7",
}


def exchanges() -> list[GradientExchange]:
    codings = [gradient_coding(f"{name} {OPTIONS.get(name, '')}") for name in CODINGS]
    return [GradientExchange(coding=coding) for coding in codings] + [
        GradientExchange(kind=SERVER, coding=coding)
        for coding in codings
        if coding.name != "hipress"
    ]


def by_name(exchange: GradientExchange) -> str:
    return f"{exchange.kind} {exchange.coding.name}"


class Group:
    """The members' sides of a coding."""

    def __init__(self, coding: Coding, size: int) -> None:
        self.members = [make_compression(coding, seed=4, momentum=0.9) for _ in range(size)]

    def scripts(self, step: int, gradients: Sequence[Tensor]) -> list[Script[None]]:
        """Return each member's script of a step, which replaces its gradient."""
        for member in self.members:
            member.start_step(step)
        return [
            member.exchange(rank, len(gradients), 0, gradients[rank], SHAPES)
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
    """A ring, or a star, of threads that counts the bytes on its links."""

    def __init__(self, size: int, kind: str) -> None:
        self.rings = in_process_rings(size) if kind == RING else in_process_trees([()] * size)
        self.sent_bytes = 0
        for end in self.rings:
            for ring in (*end._below, *end._above) if isinstance(end, Tree) else [end]:
                self._count(cast(LinkedRing, ring)._links)

    def _count(self, links: ClosableLinks) -> None:
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
@pytest.mark.parametrize("exchange", exchanges(), ids=by_name)
def test_wires_have_the_bits_of_one_process_and_the_bytes_of_the_description(
    exchange: GradientExchange, size: int
) -> None:
    coding = exchange.coding
    here, there = Group(coding, size), Group(coding, size)
    bucket = Exchange(
        num_bytes=4.0 * NUM_ELEMENTS,
        num_tensors=len(SHAPES),
        gradients=tuple(
            Gradient(num_bytes=4.0 * math.prod(shape), done=1.0, shape=shape) for shape in SHAPES
        ),
    )
    with Wires(size, exchange.kind) as wires:
        for step in STEPS:
            ours = random_gradients(size, NUM_ELEMENTS, seed=step)
            theirs = [gradient.clone() for gradient in ours]
            run_together(here.scripts(step, ours), exchange.kind)
            wires.sent_bytes = 0
            wires.run(there.scripts(step, theirs))
            assert all(map(torch.equal, ours, theirs))
            states = here.finish()
            assert states == there.finish()
            there = Group(coding, size)
            there.restore(states)
            expected = exchange.wire_bytes(bucket, size, step)
            assert wires.sent_bytes / size == pytest.approx(expected, rel=0.01, abs=1e-9)
            if size > 1:
                graph = exchange_graph(range(size), bucket, exchange, step)
                transfers = [task for task in graph.tasks if isinstance(task, Transfer)]
                sent = sum(task.num_bytes * task.rounds for task in transfers)
                assert sent / size == pytest.approx(expected)


@pytest.mark.parametrize("exchange", exchanges(), ids=by_name)
def test_a_peer_that_leaves_ends_the_exchange(exchange: GradientExchange) -> None:
    with Wires(3, exchange.kind) as wires:
        wires.rings[2].close()
        scripts = Group(exchange.coding, 3).scripts(0, [torch.ones(NUM_ELEMENTS)] * 3)

        def is_told(ring: Collective) -> None:
            with pytest.raises(PeerLost):
                exchange_over(ring, scripts[ring.rank])
            ring.close()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(is_told, wires.rings[:2], timeout=60))


MEMBERS: dict[str, dict[str, Any]] = {
    "buckets": {"num_buckets": 3},
    "norm": {"norm": True},
    "own data and class weights": {
        "own_data": True,
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 4.0, 0.5])),
    },
}
# Each coding with one kind of members, another for its neighbour; with the others it is slow.
GROUPS = [
    pytest.param(
        name,
        kind,
        options,
        id=f"{name}-{kind}-{members}",
        marks=() if (row + column) % len(MEMBERS) == 0 else pytest.mark.slow,
    )
    for row, (name, kind) in enumerate(
        [
            *((name, RING) for name in CODINGS),
            *((name, SERVER) for name in ("none", "dgc", "powersgd")),
        ]
    )
    for column, (members, options) in enumerate(MEMBERS.items())
]


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(("name", "kind", "options"), GROUPS)
def test_a_group_in_one_process_has_the_bits_of_its_members_over_intervals(
    name: str, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With momentum, a schedule and residuals that are saved between intervals."""
    spec = f"{name} bytes_per_s=1e3" if name == "hipress" else name
    options = {**options, "compression": spec, "exchange": kind}
    first = Members(3, monkeypatch, nothing, **options)
    first.check()
    Members(3, monkeypatch, nothing, before=first, **options).check()


def test_a_server_a_ring_and_one_large_batch_train_the_same_weights() -> None:
    """Synchronous SGD, in three orders of the sum."""
    trained = []
    for size, kind in ((1, RING), (3, RING), (3, SERVER)):
        network = model()
        in_order = replace(trainer(), reduction="ring")
        train_group(network, samples(), task(size, exchange=kind), in_order)
        trained.append(parameters_to_vector(network.parameters()))
    for one, other in pairwise(trained):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(trained[0], parameters_to_vector(model().parameters()), atol=1e-2)
