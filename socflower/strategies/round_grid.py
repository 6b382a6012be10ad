"""A wrapper around a Grid that lets a strategy exchange a round's messages itself, also inside another strategy."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.errors import ConfigError, TrainingFailed
from socflower.strategies.forwarding_grid import ForwardingGrid

Exchange: TypeAlias = Callable[[Grid, Iterable[Message], float | None], Iterable[Message]]

_CLIPPING_NORM = "clipping_norm"
"""The config key in which Flower's client-side clipping strategies send the norm."""


class RoundGrid(ForwardingGrid):
    """Forwards everything to `grid`, except `send_and_receive`, which calls `exchange`.

    Flower's `Strategy.start` waits in `send_and_receive` for every node's reply, but a group needs only one reply, and
    a dead member is reported a minute late. A wrapping strategy (differential privacy) has its own `start` that calls
    this strategy's hooks; it must be started with this grid.
    """

    def __init__(self, grid: Grid, exchange: Exchange) -> None:
        super().__init__(grid)
        self._exchange = exchange

    @property
    def inner(self) -> Grid:
        """The wrapped grid."""
        return self._grid

    def uses(self, exchange: Exchange) -> bool:
        """Return whether `send_and_receive` calls this method of this strategy."""
        return self._exchange == exchange

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange a round's messages by the strategy's method."""
        return self._exchange(self._grid, messages, timeout)


class OpenRound:
    """Tracks the round whose messages were sent and whose replies have not arrived.

    A wrapping strategy may withhold the replies, as Flower's differential privacy does in every round in which a client
    failed. Training would then continue with unchanged weights, without an error.
    """

    def __init__(self, strategy: str, advice: str = "") -> None:
        self._strategy, self._advice = strategy, advice
        self._open = 0

    @property
    def number(self) -> int:
        """The number of the open round; 0 if none is open."""
        return self._open

    def begin(self, server_round: int) -> None:
        """Mark the round as open: its messages are being sent."""
        self._open = server_round

    def end(self) -> None:
        """Mark the round as closed: its replies have arrived."""
        self._open = 0

    def require_ended(self, server_round: int) -> None:
        """Raise `TrainingFailed` if the round is still open, that is, its replies were withheld."""
        if self._open == server_round:
            raise TrainingFailed(
                f"round {server_round}: its replies did not reach {self._strategy}: the strategy around it keeps them "
                "back, as Flower's differential privacy does where any client failed; Flower's log has the cause"
                f"{self._advice}")


def require_exchange(grid: Grid, config: ConfigRecord) -> None:
    """Raise `ConfigError` if the strategy around SoCFlow does not support rings."""
    if not isinstance(grid, RoundGrid):
        raise ConfigError("SoCFlow: its nodes form rings, and the strategy around it was started with the grid itself: "
                          "the replies of all members would pass for their groups'; start that strategy with "
                          "round_grid(grid) of its SoCFlow")
    if _CLIPPING_NORM in config:
        raise ConfigError(f"SoCFlow: the train config has {_CLIPPING_NORM!r}, of differential privacy with clipping at "
                          "the clients, and a member of a ring has no update of its own to clip; use the wrapper that "
                          "clips at the server")
