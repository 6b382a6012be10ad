"""The two halves of a captured model as modules, which share their layers with it.

Plain torch draws all masks of a pass from one random stream, so that masks behind the cut would depend on the number of
draws before it, on another machine. Here every layer that draws starts its own stream, which depends only on seed,
batch and layer. A replay (F22) needs no stored state, and a pass over two halves draws the same numbers as a whole one.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn

from socflower.capture.operations import CapturedGraph
from socflower.capture.random_state import forked_generator


class GraphHalves:
    """Builds halves of a model; operations up to `frozen_until` (none: -1) run in evaluation mode."""

    def __init__(self, captured: CapturedGraph, places: Sequence[fx.Node], frozen_until: int) -> None:
        self._captured = captured
        self._places = tuple(places)
        evaluating = captured.evaluating() if frozen_until >= 0 else {}
        # Frozen operations are copied from the evaluation-mode graph; `_original` maps its nodes back.
        self._source = {node: evaluating.get(node, node) if captured.position[node] <= frozen_until else node
                        for node in captured.nodes}
        self._original = {node: node for node in captured.nodes} | {other: node for node, other in evaluating.items()}
        self.random_layers: Mapping[int, str] = {
            captured.position[node]: captured.layer(node) for node in captured.nodes
            if captured.observations[node].draws and captured.position[node] > frozen_until}
        """Operations that draw random numbers in training, by position in the graph, which is their stream's number."""

    def front(self, cut: int) -> nn.Module:
        """Return the layers up to a cut; the whole model if `cut` is the number of cuts."""
        if cut == len(self._places):
            return self._module(self._captured.nodes, None, None)
        place = self._places[cut]
        return self._module(self._captured.front(place), None, place)

    def back(self, cut: int) -> nn.Module:
        """Return the layers behind a cut."""
        place = self._places[cut]
        return self._module(self._captured.back(place), place, None)

    def _module(self, nodes: Sequence[fx.Node], start: fx.Node | None, end: fx.Node | None) -> nn.Module:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        if start is not None:
            made[start] = graph.placeholder("features")
        for node in nodes:
            if (position := self._captured.position[node]) in self.random_layers:
                graph.call_function(start_stream, (position,))
            made[node] = graph.node_copy(self._source[node], lambda other: made[self._original[other]])
        if end is not None:
            graph.output(made[end])
        return fx.GraphModule(self._captured.model, graph)


_active = threading.local()


def layer_seed(seed: int, batch: int, layer: int) -> int:
    """Return the seed of a layer's stream for a batch, 0 to 2^63 - 1; `layer` is its position in the captured graph."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def random_streams(seed: int, batch: int, device: torch.device | None = None) -> Iterator[None]:
    """Context in which layers draw from the streams of a batch; the global random state is restored at exit.

    Halves in other threads wait, so that they do not draw from these streams.
    """
    with forked_generator(cuda=[device] if device is not None and device.type == "cuda" else []):
        before = getattr(_active, "key", None)
        _active.key = (seed, batch)
        try:
            start_stream(0)  # for modules that were not captured
            yield
        finally:
            _active.key = before


def start_stream(layer: int) -> None:
    """Start the random stream of a layer; outside `random_streams` torch's own state continues."""
    key: tuple[int, int] | None = getattr(_active, "key", None)
    if key is not None:
        torch.manual_seed(layer_seed(key[0], key[1], layer))
