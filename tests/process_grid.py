"""A Flower Grid with a process of its own for every node: a deployment without SuperLink and SuperNodes.

Messages run at the same time on all nodes, as on real machines, so that clients whose node config names a ring address
form real rings. What it leaves out is Flower's processes and polling, which take seconds a message: it is for tests and
benchmarks of what happens between the nodes.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic, sleep

from flwr.app import Error, Message, UserConfig

from socflower.engines.local.grid import EngineGrid, NodeConfigs
from socflower.engines.local.workers import ClientAppSource, NodeProcess, WorkerDied
from socflower.flower_adapter import CLIENT_APP_CRASHED, give_id

_NODE_UNAVAILABLE = 5  # Flower's error code of a node that has left
_PULL_INTERVAL_S = 0.02


class ProcessGrid(EngineGrid):
    """Runs a ClientApp for nodes with the given configs, each in its own process.

    A node whose process died answers the message it had with an error, at once, and the next one with a new process
    and the state of its last reply, as a SuperNode does whose ClientApp died. `remove` makes a node vanish, as a
    SuperNode that died: the message it had is never answered, later ones with an error.
    """

    def __init__(
        self,
        client_app: ClientAppSource,
        node_configs: NodeConfigs,
        *,
        run_config: UserConfig | None = None,
    ) -> None:
        super().__init__(node_configs, run_config)
        self._processes = {node_id: NodeProcess(client_app) for node_id in self._contexts}
        # One thread a node: its messages run one after the other, each with the state that the one before left.
        self._queues = {
            node_id: ThreadPoolExecutor(1, f"node-{node_id}") for node_id in self._contexts
        }
        self._running: dict[str, tuple[Message, Future[Message]]] = {}

    def pid_of(self, node_id: int) -> int:
        """Return the process id of a node's process, waiting until it has started."""
        return self._processes[node_id].pid

    def remove(self, node_id: int) -> None:
        """Let a node vanish: its process is killed, its message is never answered."""
        # Gone before its process is: what its thread does when that has died must not bring it back.
        del self._contexts[node_id]
        self._queues[node_id].shutdown(wait=False, cancel_futures=True)
        for message_id, (message, _) in list(self._running.items()):
            if message.metadata.dst_node_id == node_id:
                self._running.pop(message_id, None)
        self._processes[node_id].kill()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there, each once."""
        replies = []
        for message_id in list(message_ids):
            if message_id in self._running and self._running[message_id][1].done():
                replies.append(self._take(message_id))
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Run messages and return their replies; after `timeout` seconds, those that are there."""
        waiting = set(self.push_messages(messages))
        deadline_s = None if timeout is None else monotonic() + timeout
        replies = []
        while waiting and (deadline_s is None or monotonic() < deadline_s):
            for reply in self.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
            sleep(_PULL_INTERVAL_S)
        return replies

    def close(self) -> None:
        """Kill all processes."""
        # Messages that wait are not to start processes anew while these are killed.
        for queue in self._queues.values():
            queue.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.values():
            process.kill()
        for queue in self._queues.values():
            queue.shutdown(wait=True)

    def __enter__(self) -> "ProcessGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, message_id: str, message: Message) -> None:
        """Begin to run a message; a node's second one waits for its first."""
        self._running[message_id] = message, self._begin(message.metadata.dst_node_id, message)

    def _take(self, message_id: str) -> Message:
        _, future = self._running.pop(message_id)
        reply = future.result()
        give_id(reply)
        return reply

    def _begin(self, node_id: int, message: Message) -> Future[Message]:
        if node_id in self._contexts:
            return self._queues[node_id].submit(self._answer, node_id, message)
        gone: Future[Message] = Future()
        gone.set_result(Message(Error(_NODE_UNAVAILABLE, "the node is gone"), reply_to=message))
        return gone

    def _answer(self, node_id: int, message: Message) -> Message:
        try:
            reply, context = (
                self._processes[node_id].submit(message, self._contexts[node_id]).result()
            )
            if node_id in self._contexts:
                self._contexts[node_id] = context
            return reply
        except WorkerDied:
            return Message(Error(CLIENT_APP_CRASHED, "the client's process died"), reply_to=message)
