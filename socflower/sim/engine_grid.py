"""What all Grids that are engines of ours have in common: the run they work for, and how messages are made."""

import secrets

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from socflower.sim.flower_internals import Run, begin_run

FIRST_NODE_ID = 1000


class EngineGrid(Grid):
    """A Grid that is not connected to any SuperLink, and has a run of its own."""

    def __init__(self) -> None:
        self._run = begin_run(secrets.randbits(62))

    def set_run(self, run: Run) -> None:
        """Set the run this grid works for."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid works for."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None,
    ) -> Message:
        """Return a new message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)
