"""A Grid around any Grid that lets a strategy decide itself how a round's messages are exchanged."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

Exchange: TypeAlias = Callable[[Grid, Iterable[Message], float | None], Iterable[Message]]


class RoundGrid(Grid):
    """Forwards everything to `grid`, but for `send_and_receive`, which is `exchange`.

    Flower's `Strategy.start` waits there for every node's reply; a group needs but one, and a member that died is
    reported a minute late.
    """

    def __init__(self, grid: Grid, exchange: Exchange) -> None:
        self._grid, self._exchange = grid, exchange

    @property
    def inner(self) -> Grid:
        """The grid that everything is forwarded to."""
        return self._grid

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
