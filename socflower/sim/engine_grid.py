"""What all Grids that are engines of ours have in common: their run, their nodes, and how messages are made."""

import secrets
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from flwr.app import Context, Message, RecordDict, UserConfig
from flwr.serverapp import Grid

from socflower.sim.flower_internals import Run, begin_run

NodeConfigs: TypeAlias = Sequence[Mapping[str, str | int | float | bool]]

_FIRST_NODE_ID = 1000


class EngineGrid(Grid):
    """A Grid that is not connected to any SuperLink, and has a run of its own."""

    def __init__(self, node_configs: NodeConfigs, run_config: UserConfig | None) -> None:
        """Make the contexts of the nodes; their ids ascend, and each knows its partition if its config names none."""
        self._run = begin_run(secrets.randbits(62))
        self._contexts = {
            _FIRST_NODE_ID + index: Context(
                run_id=self._run.run_id, node_id=_FIRST_NODE_ID + index, state=RecordDict(),
                node_config={"partition-id": index, "num-partitions": len(node_configs), **node_config},
                run_config=dict(run_config or {}))
            for index, node_config in enumerate(node_configs)
        }

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
