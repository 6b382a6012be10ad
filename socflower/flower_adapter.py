"""All that socflower uses of Flower beyond `flwr.app`, `flwr.serverapp` and `flwr.clientapp`, and all that it changes.

None of it is promised, so the tests run with each minor version that `pyproject.toml` allows. The warm executor has its
own such parts, and refuses other versions.

Two records of a training, `Result` and `History`, are given to nobody but the app. So their constructors are replaced
while a foreign app runs, and nothing of a strategy is. Which strategy starts, and for how many nodes it waits, is read
from Flower's log.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias
from uuid import uuid4

from flwr.app import Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.compat.common import recorddict_compat as compat
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.server import History, server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.serverapp.strategy import Result
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.quantities import are_counted
from socflower.wire.logs import use_log_format

use_log_format()
_LOGGER = logging.getLogger("flwr")
log = _LOGGER.log

STRATEGY_STARTS = "Starting %s strategy:"
STRATEGY_ENDS = "Strategy execution finished in %.2fs"
_STRATEGY_WAITS = "Waiting for nodes to connect: %d connected (minimum required: %d)."
"""Formats of lines of Flower's log."""

_REASON = re.compile(r"<class '(?:.*\.)?(?P<kind>[^'.]+)'>:<'(?P<text>.*)'>(?P<where>(?: \(.*\))?)")
"""What Flower's clients answer for an exception; the place is ours."""

SUPERLINK_NODE_ID = 1
"""The source node of a ServerApp's messages."""

LOAD_CLIENT_APP_EXCEPTION = 1
CLIENT_APP_RAISED_EXCEPTION = 2
CLIENT_APP_CRASHED = 8
"""Error codes of replies, as Flower's own runtimes set them."""

TrainingRecord: TypeAlias = Result | History
"""What Flower records of a training: by the message API, and by the one before."""


# ------------------------------------------------------------------------------------------------------- messages
def begin_run(run_id: int) -> Run:
    """Make this process the ServerApp of run `run_id`, so that it can build messages; return the run."""
    TaskIdentity.run_id = run_id
    TaskIdentity.task_id = 0
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    return Run.create_empty(run_id)


def give_id(message: Message) -> str:
    """Give a message a new id, as a SuperLink does, and return it."""
    message_id = str(uuid4())
    message.metadata.__dict__["_message_id"] = message_id
    return message_id


def record_dict_to_bytes(records: RecordDict) -> bytes:
    """Return records as the bytes in which Flower sends them."""
    return recorddict_to_proto(records).SerializeToString(deterministic=True)


def record_dict_from_bytes(content: bytes) -> RecordDict:
    """Return the records of `record_dict_to_bytes`."""
    return recorddict_from_proto(RecordDictProto.FromString(content))


def reason_of(reply: Message) -> str:
    """Return in one line why a reply has an error: "ValueError: text" for Flower's "<class 'ValueError'>:<'text'>"."""
    # torch raises exceptions with several lines.
    reason = " ".join((reply.error.reason or f"error {reply.error.code} without a reason").split())
    found = _REASON.fullmatch(reason)
    if found is None:
        return reason
    # The name of a private class tells nothing.
    kind = "" if found["kind"].startswith("_") else f"{found['kind']}: "
    return f"{kind}{found['text']}{found['where']}"


def has_mods(app: ClientApp) -> bool:
    """Return whether a ClientApp has mods."""
    return bool(app._mods)


# ------------------------------------------------------------------------------------------------------------ log
@plain_numbers
def quiet_flower(level: int = logging.ERROR) -> None:
    """Hide Flower's log lines below `level`, which would disturb a progress bar."""
    for handler in _LOGGER.handlers:
        handler.setLevel(level)


@contextmanager
def flower_quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Hide Flower's log lines below `level` within the context, and restore the levels afterwards."""
    before = {handler: handler.level for handler in _LOGGER.handlers}
    quiet_flower(level)
    try:
        yield
    finally:
        for handler, level in before.items():
            handler.setLevel(level)


class _Listener(logging.Handler):
    """Calls functions with the values of log lines; what they raise ends the code that logs."""

    def __init__(self, called: Mapping[str, Callable[..., None]]) -> None:
        super().__init__(logging.INFO)
        self._called = called

    def emit(self, record: logging.LogRecord) -> None:
        """Call the function of the line's format."""
        if record.msg in self._called:
            self._called[record.msg](*(record.args or ()))


@contextmanager
def followed_log(called: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Call a function with the values of each line of Flower's log that has its format."""
    listener = _Listener(called)
    _LOGGER.addHandler(listener)
    try:
        yield
    finally:
        _LOGGER.removeHandler(listener)


# -------------------------------------------------------------------------------------------- what trainings record
@contextmanager
def noticed_records(on_record: Callable[[TrainingRecord], None]) -> Iterator[None]:
    """Call a function with each record of a training that is made in the context; it fills later."""
    kinds: tuple[Any, ...] = (Result, History)
    originals = [(kind, kind.__init__) for kind in kinds]

    def noticed(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def made(self: TrainingRecord, *args: Any, **named_args: Any) -> None:
            original(self, *args, **named_args)
            on_record(self)

        return made

    for kind, original in originals:
        kind.__init__ = noticed(original)
    try:
        yield
    finally:
        for kind, original in originals:
            kind.__init__ = original


# ------------------------------------------------------------------------------------------ waiting without an end
@contextmanager
def bounded_waits(num_nodes: int) -> Iterator[None]:
    """Raise `ConfigError` within the context if a strategy waits for more nodes than there are."""

    def refuse(wanted: int, key: str) -> None:
        if wanted > num_nodes:
            raise ConfigError(
                f"the strategy waits for {wanted} nodes, and there {are_counted(num_nodes, 'node')}, so it would "
                f"wait without end; give {key}={num_nodes} at most, or start more nodes"
            )

    def waits(connected: int, wanted: int) -> None:
        refuse(wanted, "min_available_nodes, min_train_nodes and min_evaluate_nodes")

    original = SimpleClientManager.wait_for

    def wait_for(self: SimpleClientManager, num_clients: int, timeout: int = 86400) -> bool:
        refuse(num_clients, "min_available_clients")
        return original(self, num_clients, timeout)

    # Flower makes the manager of its earlier API itself and logs nothing, so its class is changed.
    SimpleClientManager.wait_for = wait_for  # type: ignore[method-assign]
    try:
        with followed_log({_STRATEGY_WAITS: waits}):
            yield
    finally:
        SimpleClientManager.wait_for = original  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------- the API before the message API
@contextmanager
def messages_together() -> Iterator[None]:
    """Send the messages of a round in one exchange.

    Flower's `Server` sends each message from its own thread: their order would depend on real time, and virtual time
    would be that of one client after the other.
    """
    fit_clients, evaluate_clients = server.fit_clients, server.evaluate_clients
    server.fit_clients = _together(MessageType.TRAIN, fit_clients)
    server.evaluate_clients = _together(MessageType.EVALUATE, evaluate_clients)
    try:
        yield
    finally:
        server.fit_clients, server.evaluate_clients = fit_clients, evaluate_clients


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


__all__ = [
    "CLIENT_APP_CRASHED",
    "CLIENT_APP_RAISED_EXCEPTION",
    "LOAD_CLIENT_APP_EXCEPTION",
    "STRATEGY_ENDS",
    "STRATEGY_STARTS",
    "SUPERLINK_NODE_ID",
    "Code",
    "History",
    "Run",
    "TrainingRecord",
    "begin_run",
    "bounded_waits",
    "flower_quiet",
    "followed_log",
    "give_id",
    "has_mods",
    "log",
    "messages_together",
    "noticed_records",
    "quiet_flower",
    "record_dict_from_bytes",
    "record_dict_to_bytes",
]
