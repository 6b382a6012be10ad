"""The order of a stage's passes, and its number of micro-batches in flight (paper §3.2, Fig. 15b)."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from socflower.errors import ConfigError, require_range
from socflower.pipeline.plan import Policy


class Pass(StrEnum):
    """A pass over a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


class ScheduledPass(NamedTuple):
    """One pass of a stage over one micro-batch."""

    kind: Pass
    micro_batch: int


def operations(policy: Policy, in_flight: int, num_micro_batches: int) -> Iterator[ScheduledPass]:
    """Yield a stage's passes of one update in their order.

    1F1B: K_p forward passes, then alternately a backward and a forward pass, then the remaining backward passes.
    Backward after forward is the same with K_p = M. At most K_p micro-batches wait for their backward pass.
    """
    ahead = min(in_flight, num_micro_batches)
    if policy == Policy.BACKWARD_AFTER_FORWARD:
        ahead = num_micro_batches
    for micro_batch in range(ahead):
        yield ScheduledPass(Pass.FORWARD, micro_batch)
    for micro_batch in range(num_micro_batches):
        yield ScheduledPass(Pass.BACKWARD, micro_batch)
        if micro_batch + ahead < num_micro_batches:
            yield ScheduledPass(Pass.FORWARD, micro_batch + ahead)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A rule for K_p, linear in the number of stages from p to the end: `slope`·(P − p) + `offset`."""

    slope: int
    offset: int

    def count(self, stages_to_end: int, num_micro_batches: int) -> int:
        """Return K_p of a stage with P − p = `stages_to_end`, at least 1 and at most M."""
        return max(1, min(num_micro_batches, self.slope * stages_to_end + self.offset))

    def counts(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """Return K_p of all stages in order."""
        to_end = range(num_stages, 0, -1)
        return tuple(self.count(stages, num_micro_batches) for stages in to_end)


ASTEROID = InFlight(2, -1)
RULES = {
    "asteroid": ASTEROID,
    "a": InFlight(2, 0),
    "b": InFlight(1, 0),
    "c": InFlight(2, 1),
}
"""The rules of the paper's Fig. 15(b): its own, 2(P − p) − 1, and a, b and c."""


def rule(name: str) -> InFlight:
    """Return a rule of the paper by name; raises `ConfigError` for an unknown name."""
    if name not in RULES:
        raise ConfigError(f"pipeline: in_flight = {name!r}; use one of {[*RULES]} or a number")
    return RULES[name]


def at_most(limit: int) -> InFlight:
    """Return the rule of the same K for all stages."""
    require_range("pipeline", least=1, in_flight=limit)
    return InFlight(0, limit)
