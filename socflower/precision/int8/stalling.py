"""Recognise a training that has come to rest: no gradient reaches the weights, or no int8 weight changes.

After steps that were too large, the outputs of a ReLU may be zero for every image. The network then computes a
constant, its loss stays at that of a guess, and the layers before the ReLU get gradients of zero from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from socflower.errors import TrainingFailed
from socflower.precision.int8.network import INPUT, Graph, Weighted

PATIENCE_STEPS = 32
PATIENCE_SAMPLES = 512
"""A small batch may leave a healthy layer without a gradient, and momentum may still move a dead one."""


@dataclass(slots=True)
class _Rest:
    """Consecutive steps in which nothing happened, and their samples."""

    num_steps: int = 0
    num_samples: int = 0

    def lasts(self, num_samples: int) -> bool:
        """Count a step of so many samples; return whether this has lasted for too long."""
        self.num_steps += 1
        self.num_samples += num_samples
        return self.num_steps >= PATIENCE_STEPS and self.num_samples >= PATIENCE_SAMPLES


@dataclass(slots=True)
class StallWatch:
    """What a training's steps have changed so far; it counts steps whose loss has a gradient.

    `has_moved` is whether an int8 weight has changed under an integer update; then steps count no more for that.
    """

    has_moved: bool = False
    _unreached: _Rest = field(default_factory=_Rest)
    _unmoved: _Rest = field(default_factory=_Rest)

    def to_json(self) -> list[int]:
        """Return the state as plain values."""
        rests = (self._unreached, self._unmoved)
        return [
            int(self.has_moved),
            *(n for one in rests for n in (one.num_steps, one.num_samples)),
        ]

    def restore(self, values: Sequence[int]) -> None:
        """Restore a state of `to_json`; without values, begin."""
        has_moved, *counts = values or (0,) * 5
        self.has_moved = bool(has_moved)
        self._unreached = _Rest(*counts[:2])
        self._unmoved = _Rest(*counts[2:])

    def require_reach(
        self, weights: frozenset[str], reached: set[str], num_samples: int, remedy: str
    ) -> None:
        """Count a step in which the weights of the operators `reached` had gradients.

        Raises TrainingFailed if that was none of `weights` (`guards`) in many steps.
        """
        if not weights or not weights.isdisjoint(reached):
            self._unreached = _Rest()
        elif self._unreached.lasts(num_samples):
            raise TrainingFailed(
                f"{min(weights)}: its weight has had no gradient in {self._unreached.num_steps} steps, so the loss "
                f"cannot change: activations are zero for every image; {remedy} and begin again"
            )

    def require_motion(self, name: str, bits: int, num_samples: int) -> None:
        """Count a step with gradients. Raises TrainingFailed if no int8 weight has changed in many steps."""
        if not self.has_moved and self._unmoved.lasts(num_samples):
            raise TrainingFailed(
                f"{name}: no int8 weight has changed in {self._unmoved.num_steps} steps, since {bits} gradient bits "
                "round every change to 0; use more gradient_bits, such as (5, 4, 3)"
            )


def guards(graph: Graph) -> frozenset[str]:
    """Return weighted operators without whose gradients a network does not train.

    That is the first trained one whose output lies on every path from the input to the output: if its gradient is
    zero, its input or the gradient of its output is zero, so that the loss does not depend on the images. Without such
    an operator they are all trained ones, if nothing else trains; a gradient may bypass each of them, but not all.
    Otherwise there are none: the rest may train without them.
    """
    trained = [
        node for node in graph.nodes if isinstance(node, Weighted) and "weight" in node.trained
    ]
    crossed = _on_every_path(graph)
    for node in trained:
        if node.name in crossed:
            return frozenset({node.name})
    names = frozenset(node.name for node in trained)
    others = [node for node in graph.nodes if node.trained and node.name not in names]
    others += [node for node in trained if node.trained != ("weight",)]
    return frozenset() if others else names


def _on_every_path(graph: Graph) -> frozenset[str]:
    """Return the values that every path from the input to the output crosses."""
    last_reader = {INPUT: -1}
    for index, node in enumerate(graph.nodes):
        reads = [value for value in node.inputs if value in last_reader]
        for value in reads:
            last_reader[value] = index
        if reads:
            last_reader[node.name] = index
    crossed = set()
    open_until = last_reader[INPUT]
    for index, node in enumerate(graph.nodes):
        if node.name in last_reader:
            # No earlier value is read after this operator.
            if open_until <= index:
                crossed.add(node.name)
            open_until = max(open_until, last_reader[node.name])
    return frozenset(crossed)
