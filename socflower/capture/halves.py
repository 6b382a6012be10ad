"""The two halves of a captured model as modules, which share their layers with it.

Plain torch draws all masks of a pass from one stream, so that those behind the cut would depend on how many were drawn
before it, on another machine. Here every layer that draws begins a stream of its own, which depends on seed, batch and
layer only. Nothing need be kept for a replay (F22), and a pass that both halves share draws what it draws in one place.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn

from socflower.capture.operations import Reading
from socflower.capture.random_state import forked_generator


class GraphHalves:
    """Builds halves of a model; operations up to `frozen_until` (none: -1) are those of evaluation mode."""

    def __init__(self, reading: Reading, places: Sequence[fx.Node], frozen_until: int) -> None:
        self._reading = reading
        self._places = tuple(places)
        evaluating = reading.evaluating() if frozen_until >= 0 else {}
        # Frozen operations are copied from the graph of evaluation mode, whose nodes these lead back from.
        self._source = {node: evaluating.get(node, node) if reading.position[node] <= frozen_until else node
                        for node in reading.nodes}
        self._original = {node: node for node in reading.nodes} | {other: node for node, other in evaluating.items()}
        self.random_layers: Mapping[int, str] = {
            reading.position[node]: reading.layer(node) for node in reading.nodes
            if reading.seen[node].draws and reading.position[node] > frozen_until}
        """Operations that draw random numbers in training, by their place in the graph, which numbers the stream."""

    def front(self, cut: int) -> nn.Module:
        """Return everything up to a cut; all of the model for the number behind the last."""
        if cut == len(self._places):
            return self._module(self._reading.nodes, None, None)
        place = self._places[cut]
        return self._module(self._reading.front(place), None, place)

    def back(self, cut: int) -> nn.Module:
        """Return everything behind a cut."""
        place = self._places[cut]
        return self._module(self._reading.back(place), place, None)

    def _module(self, nodes: Sequence[fx.Node], start: fx.Node | None, end: fx.Node | None) -> nn.Module:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        if start is not None:
            made[start] = graph.placeholder("features")
        for node in nodes:
            if (position := self._reading.position[node]) in self.random_layers:
                graph.call_function(start_stream, (position,))
            made[node] = graph.node_copy(self._source[node], lambda other: made[self._original[other]])
        if end is not None:
            graph.output(made[end])
        return fx.GraphModule(self._reading.model, graph)


_active = threading.local()


def layer_seed(seed: int, batch: int, layer: int) -> int:
    """Return the seed of a layer's stream for a batch, in 0 .. 2^63 - 1; layers are numbered by the traced graph."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def random_streams(seed: int, batch: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from the streams of a batch within; afterwards the global random state is what it was before.

    Halves in other threads wait, so that none draws of ours.
    """
    with forked_generator(cuda=[device] if device is not None and device.type == "cuda" else []):
        before = getattr(_active, "key", None)
        _active.key = (seed, batch)
        try:
            start_stream(0)  # for modules that were not traced
            yield
        finally:
            _active.key = before


def start_stream(layer: int) -> None:
    """Begin the stream of a layer; outside `random_streams` torch's own state goes on."""
    key: tuple[int, int] | None = getattr(_active, "key", None)
    if key is not None:
        torch.manual_seed(layer_seed(key[0], key[1], layer))
