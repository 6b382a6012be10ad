"""What a method of training is to `RoundStrategy`: how a round is opened, settled, priced and reported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.cluster import Usage
from socflower.strategies.reply_events import ReplyEvent


class OpenRound(Protocol):
    """A round between its messages and its replies."""

    @property
    def server_round(self) -> int:
        """Its number, from 1."""

    @property
    def sent(self) -> ArrayRecord:
        """The model that it began with."""


class Settled(Protocol):
    """What the replies of a round came to."""

    @property
    def usable(self) -> Sequence[Message]:
        """The replies whose models count, in the method's order; never empty."""

    @property
    def events(self) -> Sequence[ReplyEvent]:
        """Failures and changes, in the order in which a report has them."""


class Report(Protocol):
    """What a round came to, for a program."""

    @property
    def events(self) -> tuple[ReplyEvent, ...]:
        """Failures and changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesForEvaluation:
    """The nodes that may be asked to evaluate a round's model."""

    soc_of_node: Mapping[int, int]  # in the order of the plan
    participant_of: Mapping[int, int]  # whose part of the data is evaluated, by SoC


RoundT = TypeVar("RoundT", bound=OpenRound)
SettledT = TypeVar("SettledT", bound=Settled)


class Method(Protocol[RoundT, SettledT]):
    """A method of training, as a sequence of planned rounds.

    `RoundStrategy` calls `open`, `settle`, `merge`, `price` and `report` once a round, in this order. A
    method knows nothing of resuming, of wrapping strategies, or of the outer step.
    """

    @property
    def num_rounds(self) -> int:
        """How many rounds the whole training has."""

    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[RoundT, list[Message]]:
        """Plan a round over the nodes that are present; return it with its messages.

        `config` is the caller's and is not changed.
        """

    def settle(self, this: RoundT, replies: Sequence[Message]) -> SettledT:
        """Read a round's replies; `TrainingFailed` if none is usable."""

    def merge(self, this: RoundT, settled: SettledT) -> ArrayRecord:
        """Return the model that the replies make."""

    def price(self, this: RoundT, settled: SettledT) -> Usage:
        """Return the round's virtual time, energy and bytes, and advance the clock by them."""

    def report(
        self, this: RoundT, settled: SettledT, usage: Usage, events: tuple[ReplyEvent, ...]
    ) -> Report:
        """Return what is reported of a round."""

    def save(self) -> dict[str, Any]:
        """Return the state besides the weights that the next rounds depend on."""

    def restore(self, server_round: int, state: Mapping[str, Any]) -> None:
        """Restore what `save` returned at the end of `server_round`."""

    def describe(self) -> list[str]:
        """Return the plan in lines, for the log."""
