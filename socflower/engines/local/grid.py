"""A Flower Grid without Ray: a node is a `Context`, and worker processes of this machine handle messages."""

import secrets
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from flwr.app import Context, Message, RecordDict, UserConfig
from flwr.serverapp import Grid

from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.workers import ClientAppSource, InProcessWorkers, ProcessWorkers, Work
from socflower.engines.names import num_cores
from socflower.errors import ConfigError, require_range
from socflower.flower_adapter import Run, begin_run, give_id

# Imported here, since it loads torch.
if TYPE_CHECKING:
    from socflower.engines.local.exchange_record import ExchangeRecord

NodeConfigs: TypeAlias = Sequence[Mapping[str, str | int | float | bool]]

_FIRST_NODE_ID = 1000


class EngineGrid(Grid):
    """A Grid without a SuperLink, with its own run."""

    def __init__(self, node_configs: NodeConfigs, run_config: UserConfig | None) -> None:
        """Create the nodes' contexts with ascending ids; a config without a partition gets the node's index."""
        self._run = begin_run(secrets.randbits(62))
        self._contexts = {
            _FIRST_NODE_ID + index: Context(
                run_id=self._run.run_id,
                node_id=_FIRST_NODE_ID + index,
                state=RecordDict(),
                node_config={
                    "partition-id": index,
                    "num-partitions": len(node_configs),
                    **node_config,
                },
                run_config=dict(run_config or {}),
            )
            for index, node_config in enumerate(node_configs)
        }
        # With SoCs that have left.
        self._all_nodes = tuple(self._contexts)

    def set_run(self, run: Run) -> None:
        """Set the grid's run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The grid's run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the node ids in the order of their SoCs."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Assign an id to each message and accept it; `ConfigError` for an unknown node."""
        message_ids = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id not in self._all_nodes:
                raise ConfigError(
                    f"message to unknown node {node_id}; ask the grid's get_node_ids()"
                )
            message_id = give_id(message)
            self._accept(message_id, message)
            message_ids.append(message_id)
        return message_ids

    @abstractmethod
    def _accept(self, message_id: str, message: Message) -> None:
        """Take a message that will be pulled by its id."""


class LocalGrid(EngineGrid):
    """Runs unmodified ClientApps for `num_nodes` nodes; a node's `Context.state` is kept as long as the grid.

    Node ids ascend with the SoC index, and `node_config` has `partition-id` and `num-partitions` as in Flower's
    simulation. `num_workers` is the number of worker processes (default: one per core); 0 handles all messages in this
    process. Replies are in the order of their messages, whichever worker finishes first. `messages` records the result
    of each message. An exchange that `record` has is answered from it; it saves all others.
    """

    # A group's members run in one client call.
    in_one_process = True

    def __init__(
        self,
        client_app: ClientAppSource,
        num_nodes: int,
        *,
        run_config: UserConfig | None = None,
        num_workers: int | None = None,
        messages: MessageLog | None = None,
        record: "ExchangeRecord | None" = None,
    ) -> None:
        require_range("local engine", least=1, num_nodes=num_nodes)
        super().__init__([{}] * num_nodes, run_config)
        count = num_cores() if num_workers is None else num_workers
        self._workers = ProcessWorkers(client_app, count) if count else InProcessWorkers(client_app)
        self._pushed: dict[str, Message] = {}
        self._messages, self._record = messages, record
        self._soc_of_node = {node: soc for soc, node in enumerate(self._contexts)}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Handle the pushed messages with these ids and return their replies."""
        return self._answer(message_ids, None, pulled=True)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Handle messages and return their replies; after `timeout` seconds, the replies received so far."""
        return self._answer(self.push_messages(messages), timeout)

    def probe(self, message: Message) -> Message:
        """Return the reply to a message that neither record, log nor the node's state has afterwards."""
        context = self._contexts[message.metadata.dst_node_id]
        without_state = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=context.node_config,
            state=RecordDict(),
            run_config=context.run_config,
        )
        name = give_id(message)
        return self._workers.run({name: (message, without_state)}, None)[name][0]

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    def __enter__(self) -> "LocalGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, message_id: str, message: Message) -> None:
        self._pushed[message_id] = message

    def _answer(
        self, message_ids: Iterable[str], timeout_s: float | None, *, pulled: bool = False
    ) -> list[Message]:
        asked = {
            message_id: self._pushed.pop(message_id)
            for message_id in message_ids
            if message_id in self._pushed
        }
        answered = self._recorded(asked) if self._record is not None and asked else None
        if answered is None:
            answered = self._handled(asked, timeout_s)
        if self._messages is not None:
            self._messages.record(
                [(message, answered.get(message_id)) for message_id, message in asked.items()],
                self._soc_of_node,
                pulled=pulled,
            )
        return [answered[message_id] for message_id in asked if message_id in answered]

    def _handled(self, asked: Mapping[str, Message], timeout_s: float | None) -> dict[str, Message]:
        """Return the clients' replies by message id, and keep the states in which they left the nodes."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        answered: dict[str, Message] = {}
        for turn in _one_message_per_node(asked):
            work: dict[str, Work] = {
                message_id: (asked[message_id], self._contexts[node]) for message_id, node in turn
            }
            for message_id, (reply, context) in self._workers.run(work, deadline).items():
                # A worker process returns a copy of the context with the state the client left in it.
                self._contexts[context.node_id] = context
                give_id(reply)
                answered[message_id] = reply
        if self._record is not None and asked:
            nodes = dict.fromkeys(message.metadata.dst_node_id for message in asked.values())
            self._record.add(
                [*asked.values()],
                [*map(answered.get, asked)],
                {node: self._contexts[node].state for node in nodes},
            )
        return answered

    def _recorded(self, asked: Mapping[str, Message]) -> dict[str, Message] | None:
        """Return the recorded replies by message id, and set the nodes' states to the recorded ones; None without."""
        assert self._record is not None
        exchange = self._record.replay([*asked.values()])
        if exchange is None:
            return None
        replies, states = exchange
        for node, state in states.items():
            self._contexts[node].state = state
        answered = {
            message_id: reply
            for message_id, reply in zip(asked, replies, strict=True)
            if reply is not None
        }
        for message_id, reply in answered.items():
            # A reply on record answers the message of an earlier process.
            reply.metadata.__dict__["_reply_to_message_id"] = message_id
            give_id(reply)
        return answered


def _one_message_per_node(messages: Mapping[str, Message]) -> list[list[tuple[str, int]]]:
    """Divide (message id, node id) into turns with one message per node: a second one needs the first one's state."""
    turns: list[list[tuple[str, int]]] = []
    num_seen: dict[int, int] = {}
    for message_id, message in messages.items():
        node_id = message.metadata.dst_node_id
        turn = num_seen.get(node_id, 0)
        num_seen[node_id] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append((message_id, node_id))
    return turns
