"""A Grid around any Grid that lets a strategy decide itself how a round's messages are exchanged, inside others too."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from socflower.errors import ConfigError, TrainingFailed

Exchange: TypeAlias = Callable[[Grid, Iterable[Message], float | None], Iterable[Message]]

_CLIPPING_NORM = "clipping_norm"
"""The key by which Flower's wrappers with clipping at the clients hand out their norm."""


class RoundGrid(Grid):
    """Forwards everything to `grid`, but for `send_and_receive`, which is `exchange`.

    Flower's `Strategy.start` waits there for every node's reply; a group needs but one, and a member that died is
    reported a minute late. Where another strategy is around it (differential privacy), whose own `start` calls the
    strategy's hooks, that one is started with this grid.
    """

    def __init__(self, grid: Grid, exchange: Exchange) -> None:
        self._grid, self._exchange = grid, exchange

    @property
    def inner(self) -> Grid:
        """The grid that everything is forwarded to."""
        return self._grid

    def is_of(self, exchange: Exchange) -> bool:
        """Return whether rounds are exchanged by this method of this strategy."""
        return self._exchange == exchange

    def __getattr__(self, name: str) -> Any:
        """Return what only the inner grid knows, as an engine's clock."""
        return getattr(self._grid, name)

    def set_run(self, run: Any) -> None:
        """Set the run of the inner grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The inner grid's run."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None,
    ) -> Message:
        """Return a new message to a node."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the inner grid's node ids."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the inner grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the inner grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange a round's messages as the strategy does it."""
        return self._exchange(self._grid, messages, timeout)


class OpenRound:
    """The round whose messages a strategy has handed out, until it gets the replies.

    Between the two a strategy around it may keep them back, as Flower's differential privacy does with every round in
    which a client failed: training would go on with the weights it has, and end as if nothing had happened.
    """

    def __init__(self, strategy: str, advice: str = "") -> None:
        self._strategy, self._advice = strategy, advice
        self._open = 0

    @property
    def number(self) -> int:
        """The round, 0 where none is open."""
        return self._open

    def begin(self, server_round: int) -> None:
        """Note that messages go out."""
        self._open = server_round

    def end(self) -> None:
        """Note that replies have come."""
        self._open = 0

    def require_ended(self, server_round: int) -> None:
        """Raise `TrainingFailed` if the round's replies have not come: what comes after them is asked for."""
        if self._open == server_round:
            raise TrainingFailed(
                f"round {server_round}: its replies did not reach {self._strategy}: the strategy around it keeps them "
                "back, as Flower's differential privacy does where any client failed; Flower's log has the cause"
                f"{self._advice}")


def require_exchange(grid: Grid, config: ConfigRecord) -> None:
    """Raise `ConfigError` for a strategy around SoCFlow that does not fit rings."""
    if not isinstance(grid, RoundGrid):
        raise ConfigError("SoCFlow: its nodes form rings, and the strategy around it was started with the grid itself: "
                          "the replies of all members would pass for their groups'; start that strategy with "
                          "round_grid(grid) of its SoCFlow")
    if _CLIPPING_NORM in config:
        raise ConfigError(f"SoCFlow: the train config has {_CLIPPING_NORM!r}, of differential privacy with clipping at "
                          "the clients, and a member of a ring has no update of its own to clip; use the wrapper that "
                          "clips at the server")
