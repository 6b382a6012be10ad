"""A grid that forwards to another one; subclasses change single methods."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class ForwardingGrid(Grid):
    """Forwards everything to `grid`, also attributes that Flower does not know, such as an engine's clock."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner grid that this one does not have."""
        # Not set yet, as in a copy.
        if name == "_grid":
            raise AttributeError(name)
        return getattr(self._grid, name)

    def set_run(self, run: Any) -> None:
        """Set the run of the inner grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The inner grid's run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message to a node."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the inner grid's node ids."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return what the inner grid knows of its nodes."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the inner grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the inner grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Exchange messages through the inner grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)
