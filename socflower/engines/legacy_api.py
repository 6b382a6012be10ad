"""Support for apps of Flower's API before messages: `ServerAppComponents`, workflows and `NumPyClient`.

Flower converts their instructions and results to messages, whose records have the names below.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import Message, MessageType
from flwr.common import Code
from flwr.compat.common import recorddict_compat as compat
from flwr.server import History, server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy

from socflower.errors import ConfigError
from socflower.quantities import counted

_INSTRUCTIONS = ("fitins.config", "evaluateins.config", "secaggplus_configs")
_RESULTS = ("fitres", "evaluateres")
_NUM_EXAMPLES = "num_examples"

OnMetrics = Callable[[str, int, Mapping[str, Any]], None]
"""Gets the type of the messages whose metrics these are, empty for the server's, the round, and the metrics."""


def round_of(message: Message) -> int | None:
    """Return the round of such a message, which is its group; None for other messages."""
    group = message.metadata.group_id
    is_ours = any(name in message.content.config_records for name in _INSTRUCTIONS)
    return int(group) if is_ours and group.isdecimal() else None


def metrics_of(reply: Message) -> dict[str, Any] | None:
    """Return loss and metrics of a client's result; None for other replies."""
    kind = _kind(reply)
    if kind is None:
        return None
    return {
        **reply.content.metric_records.get(f"{kind}.loss", {}),
        **reply.content.config_records.get(f"{kind}.metrics", {}),
    }


def num_examples_of(reply: Message) -> float | None:
    """Return the number of examples of a client's result; None for other replies."""
    kind = _kind(reply)
    value = (
        None
        if kind is None
        else reply.content.metric_records[f"{kind}.{_NUM_EXAMPLES}"].get(_NUM_EXAMPLES)
    )
    return value if isinstance(value, int | float) else None


def fault_of(reply: Message) -> str | None:
    """Return the fault that a client's result reports, such as that the client has no `fit`; None without."""
    for kind in (*_RESULTS, "getparametersres"):
        status = reply.content.config_records.get(f"{kind}.status")
        if status is not None and status["code"] != Code.OK.value:
            return str(status["message"] or Code(status["code"]).name)
    return None


def _kind(reply: Message) -> str | None:
    return next(
        (kind for kind in _RESULTS if f"{kind}.{_NUM_EXAMPLES}" in reply.content.metric_records),
        None,
    )


@contextmanager
def observed_history(on_metrics: OnMetrics) -> Iterator[None]:
    """Report the metrics that `History` objects get within the context, and send a round's messages together.

    Flower's `Server` sends each message from its own thread: their order would depend on real time, and virtual time
    would be that of one client after the other.
    """

    def loss_of(source: str) -> Callable[..., None]:
        def add(self: History, server_round: int, loss: float) -> None:
            on_metrics(source, server_round, {"loss": loss})
            originals[f"add_loss_{_NAMES[source]}"](self, server_round, loss)

        return add

    def metrics_from(source: str, name: str) -> Callable[..., None]:
        def add(self: History, server_round: int, metrics: dict[str, Any]) -> None:
            on_metrics(source, server_round, metrics)
            originals[name](self, server_round, metrics)

        return add

    changed: dict[str, Callable[..., None]] = {
        f"add_loss_{name}": loss_of(source) for source, name in _NAMES.items()
    }
    changed |= {
        f"add_metrics_{name}": metrics_from(source, f"add_metrics_{name}")
        for source, name in _NAMES.items()
    }
    changed["add_metrics_distributed_fit"] = metrics_from(
        MessageType.TRAIN, "add_metrics_distributed_fit"
    )
    originals = {name: getattr(History, name) for name in changed}
    fit_clients, evaluate_clients = server.fit_clients, server.evaluate_clients
    for name, method in changed.items():
        setattr(History, name, method)
    server.fit_clients = _together(MessageType.TRAIN, fit_clients)
    server.evaluate_clients = _together(MessageType.EVALUATE, evaluate_clients)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(History, name, original)
        server.fit_clients, server.evaluate_clients = fit_clients, evaluate_clients


@contextmanager
def bounded_waits(num_nodes: int) -> Iterator[None]:
    """Raise `ConfigError` within the context if a client manager waits for more clients than there are nodes."""
    original = SimpleClientManager.wait_for

    def wait_for(self: SimpleClientManager, num_clients: int, timeout: int = 86400) -> bool:
        if num_clients > num_nodes:
            raise ConfigError(
                f"the strategy waits for {num_clients} clients, and there {are_nodes(num_nodes)}, so it "
                f"would wait without end; give min_available_clients={num_nodes}, or start more nodes"
            )
        return original(self, num_clients, timeout)

    # Flower makes the manager itself, so only its class can be changed.
    SimpleClientManager.wait_for = wait_for  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimpleClientManager.wait_for = original  # type: ignore[method-assign]


def are_nodes(num_nodes: int) -> str:
    """Return "are n nodes", or "is 1 node"."""
    return f"{'is' if num_nodes == 1 else 'are'} {counted(num_nodes, 'node')}"


_NAMES = {MessageType.EVALUATE: "distributed", "": "centralized"}
"""The names of clients' and server's metrics in `History`."""


def _together(message_type: str, one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `fit_clients` that sends all messages in one exchange."""
    is_training = message_type == MessageType.TRAIN
    to_records: Callable[..., Any] = (
        compat.fitins_to_recorddict if is_training else compat.evaluateins_to_recorddict
    )
    from_records: Callable[..., Any] = (
        (lambda content: compat.recorddict_to_fitres(content, keep_input=False))
        if is_training
        else compat.recorddict_to_evaluateres
    )

    def clients(
        client_instructions: Sequence[tuple[Any, Any]],
        max_workers: int | None,
        timeout: float | None,
        group_id: int,
    ) -> tuple[list[Any], list[Any]]:
        proxies = [proxy for proxy, _ in client_instructions]
        if not all(type(proxy) is GridClientProxy for proxy in proxies):
            found: tuple[list[Any], list[Any]] = one_by_one(
                client_instructions, max_workers, timeout, group_id
            )
            return found
        sent = [
            Message(
                to_records(ins, True),
                proxy.node_id,
                message_type,
                ttl=timeout,
                group_id=str(group_id),
            )
            for proxy, ins in client_instructions
        ]
        replies = {
            reply.metadata.src_node_id: reply for reply in proxies[0].grid.send_and_receive(sent)
        }
        results: list[Any] = []
        failures: list[Any] = []
        for proxy in proxies:
            reply = replies.get(proxy.node_id)
            if reply is None or reply.has_error():
                failures.append(ValueError("no reply" if reply is None else reply.error.reason))
                continue
            result = from_records(reply.content)
            (results if result.status.code == Code.OK else failures).append((proxy, result))
        return results, failures

    return clients
