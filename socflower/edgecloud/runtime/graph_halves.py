"""The two halves of a traced model as modules, which share their layers with it."""

from collections.abc import Mapping, Sequence

from torch import fx, nn

from socflower.edgecloud.runtime.graph_reading import Reading
from socflower.edgecloud.runtime.random_streams import start_stream


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
