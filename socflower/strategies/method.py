"""What a method of training is to `RoundStrategy`: how a round is opened, settled, priced and reported."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.cluster import Usage
from socflower.plain_numbers import plain_numbers
from socflower.strategies.reply_events import ReplyEvent


class OpenRound(Protocol):
    """A round between its messages and its replies."""

    @property
    def server_round(self) -> int:
        """Its number, from 1."""

    @property
    def sent(self) -> ArrayRecord:
        """The model that it began with."""


class SettledReplies(Protocol):
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
    def epoch(self) -> float:
        """Epochs completed at its end."""

    @property
    def events(self) -> tuple[ReplyEvent, ...]:
        """Failures and changes."""

    def entry(self) -> dict[str, Any]:
        """Return what a result has of this round only because of the method, as plain values."""


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReport:
    """The report of one round; the latest is `strategy.reports[-1]`."""

    server_round: int
    # Epochs completed at its end.
    epoch: float
    # Of this round alone; zero without a clock and a profile.
    usage: Usage
    events: tuple[ReplyEvent, ...]
    # Mixed precision, means over groups: the confidence in int8 models of their own (F9), or the similarity of
    # quantised copies; and the share of samples trained on CPUs (F11).
    alpha: float | None = None
    copy_similarity: float | None = None
    cpu_share: float | None = None
    # Whether groups that share an uplink exchanged in turn (F6); None without groups.
    uplink_turns: bool | None = None
    # Groups whose leader has no state of this round's end to resume from.
    without_state: tuple[int, ...] = ()

    def entry(self) -> dict[str, Any]:
        """Return the figures of mixed precision and of turns that are known."""
        figures = {
            "uplink_turns": self.uplink_turns,
            "alpha": self.alpha,
            "copy_similarity": self.copy_similarity,
            "cpu_share": self.cpu_share,
        }
        return {key: value for key, value in figures.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesForEvaluation:
    """The nodes that may be asked to evaluate a round's model."""

    soc_of_node: Mapping[int, int]  # in the order of the plan
    # Whose part of the data is evaluated, by SoC; None: each node evaluates its own.
    participant_of: Mapping[int, int] | None = None


class OuterClients(NamedTuple):
    """What an outer strategy takes for its clients."""

    num_models: int
    # Whether each is a ring of machines, which exchange gradients among themselves.
    in_rings: bool


RoundT = TypeVar("RoundT", bound=OpenRound)
SettledT = TypeVar("SettledT", bound=SettledReplies)


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a method says of its latest plan."""

    # For the log.
    lines: Sequence[str]
    # How data are exchanged besides Flower's messages, by what it is between.
    between: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any] | None:
        """Return the plan as plain values, for a result; None without one."""
        return None

    def transports(self) -> dict[str, str]:
        """Return how the latest round's data was exchanged besides Flower's messages, by what it is between."""
        return {**self.between}


class OuterModels(ABC, Generic[RoundT, SettledT]):
    """What an outer strategy has to do with in rounds of a method: models for its step, and nodes that evaluate."""

    @abstractmethod
    def clients(self, this: RoundT) -> OuterClients:
        """Return what the outer strategy's clients are in a round."""

    def models(self, this: RoundT, settled: SettledT, merged: ArrayRecord) -> Sequence[Message]:
        """Return the replies that the outer strategy is given."""
        return settled.usable

    @abstractmethod
    def nodes(self, this: RoundT, grid: Grid) -> NodesForEvaluation:
        """Return the nodes of a round that are still present."""


class Method(ABC, Generic[RoundT, SettledT]):
    """A method of training, as a sequence of planned rounds.

    `RoundStrategy` calls `open`, `settle`, `merge`, `price` and `report` once a round, in this order. A
    method knows nothing of resuming, of wrapping strategies, or of the outer step.
    """

    seed: int
    """Of everything that is drawn."""
    outer_models: OuterModels[RoundT, SettledT] | None = None
    """None if it takes no outer strategy."""

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """How many rounds the whole training has."""

    @property
    @abstractmethod
    def socs(self) -> Sequence[int]:
        """The SoCs that take part, as planned."""

    @abstractmethod
    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[RoundT, list[Message]]:
        """Plan a round over the nodes that are present; return it with its messages.

        `config` is the caller's and is not changed.
        """

    @abstractmethod
    def settle(self, this: RoundT, replies: Sequence[Message]) -> SettledT:
        """Read a round's replies; `TrainingFailed` if none is usable."""

    @abstractmethod
    def merge(self, this: RoundT, settled: SettledT) -> ArrayRecord:
        """Return the model that the replies make."""

    def complete(self, this: RoundT, made: ArrayRecord) -> ArrayRecord:
        """Return the whole model with what a round made, if that is a part of it."""
        return made

    def price(self, this: RoundT, settled: SettledT) -> Usage:
        """Return the round's virtual time, energy and bytes, and advance the clock by them.

        Zero if the grid prices the messages.
        """
        return Usage()

    @abstractmethod
    def report(
        self, this: RoundT, settled: SettledT, usage: Usage, events: tuple[ReplyEvent, ...]
    ) -> Report:
        """Return what is reported of a round."""

    def save(self) -> dict[str, Any]:
        """Return the state besides the weights that the next rounds depend on: arrays and plain values."""
        return {}

    def restore(self, server_round: int, state: Mapping[str, Any]) -> None:
        """Restore what `save` returned at the end of `server_round`."""
        return None

    @abstractmethod
    def describe(self) -> Description:
        """Return what there is to say of the latest plan."""

    def require_each_model(self, needing: str) -> None:
        """Give the hub each model in its own round, not only their mean; `ConfigError` if that cannot be.

        `needing` is what needs it.
        """
        return None

    def close(self) -> None:
        """End what the method has opened on other machines."""
        return None
