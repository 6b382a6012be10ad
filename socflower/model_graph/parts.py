"""Parts of a captured model as modules, which share their layers with it.

Plain torch draws all masks of a pass from one random stream, so masks behind a cut would depend on the draws before it,
which another machine makes. Here every layer that draws starts its own stream, which depends only on seed, batch and
layer. So a replay (F22) needs no stored state, and a pass over two halves draws the same numbers as an undivided one.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import fx, nn

from socflower.model_graph.graph import ModelGraph, Operation, module_of
from socflower.model_graph.random_state import forked_generator, seed_generators


def random_layers(graph: ModelGraph, frozen_until: int) -> dict[int, str]:
    """Return the layers that draw random numbers in training, by their operation's position: the stream's number."""
    return {
        operation.position: operation.layer
        for operation in graph.operations
        if operation.draws and operation.position > frozen_until
    }


def part_of(
    model: nn.Module,
    graph: ModelGraph,
    operations: Sequence[Operation],
    frozen_until: int,
    *,
    start: Operation | None = None,
    end: Operation | None = None,
) -> nn.Module:
    """Return operations as a module, from the result of `start` (the model's input) to that of `end` (its output).

    Operations up to position `frozen_until` (none: -1) run in evaluation mode.
    """
    starts = () if start is None else (start,)
    output = None if end is None else lambda made: made[end.position]
    return _part(model, graph, operations, frozen_until, starts, output)


def piece_of(
    model: nn.Module,
    graph: ModelGraph,
    operations: Sequence[Operation],
    *,
    starts: Sequence[Operation],
    ends: Sequence[Operation],
) -> fx.GraphModule:
    """Return operations as a module that several tensors enter and leave.

    It takes the results of `starts` one by one (if empty: the model's input) and returns a tuple of the results of
    `ends` (if empty: the model's output).
    """
    output = (lambda made: tuple(made[end.position] for end in ends)) if ends else None
    return _part(model, graph, operations, -1, starts, output)


def _part(
    model: nn.Module,
    graph: ModelGraph,
    operations: Sequence[Operation],
    frozen_until: int,
    starts: Sequence[Operation],
    output: Callable[[Mapping[int, fx.Node]], fx.node.Argument] | None,
) -> fx.GraphModule:
    streams = random_layers(graph, frozen_until)
    # Frozen operations are copied from the evaluation-mode graph, whose nodes are in the same order.
    places = {
        node: place
        for nodes in (graph.evaluation, (one.node for one in graph.operations))
        for place, node in enumerate(nodes)
    }
    part = fx.Graph()
    made = {}
    for number, start in enumerate(starts):
        name = "features" if len(starts) == 1 else f"features_{number}"
        made[start.position] = part.placeholder(name)
    for operation in operations:
        place = operation.position
        if place in streams:
            part.call_function(start_stream, (place,))
        node = graph.evaluation[place] if place <= frozen_until else operation.node
        made[place] = part.node_copy(node, lambda other: made[places[other]])
    if output is not None:
        part.output(output(made))
    return module_of(model, part, graph.constants)


_active = threading.local()


def layer_seed(seed: int, batch: int, layer: int) -> int:
    """Return the seed of a layer's stream for a batch, 0 to 2^63 - 1; `layer` is a position in the captured graph."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def random_streams(seed: int, batch: int) -> Iterator[None]:
    """Context in which layers draw from the streams of a batch; the global random state is restored at exit.

    Halves in other threads wait, so that they do not draw from these streams.
    """
    with forked_generator():
        before = getattr(_active, "key", None)
        _active.key = (seed, batch)
        try:
            # Modules that were not captured use stream 0.
            start_stream(0)
            yield
        finally:
            _active.key = before


def start_stream(layer: int) -> None:
    """Start the random stream of a layer; outside `random_streams` torch's own state continues."""
    key: tuple[int, int] | None = getattr(_active, "key", None)
    if key is not None:
        seed_generators(layer_seed(key[0], key[1], layer))
