"""Worker processes that run a ClientApp, one message at a time, for any node."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from socflower.errors import ConfigError, SocflowerError
from socflower.flower_adapter import (
    CLIENT_APP_CRASHED,
    CLIENT_APP_RAISED_EXCEPTION,
    LOAD_CLIENT_APP_EXCEPTION,
)
from socflower.user_code import import_attribute, place_of, require_main_guard

_PRELOADED = (
    "flwr.clientapp",
    "torch",
    "torch._dynamo",
    "socflower.clients.app",
    "socflower.peers.ring.member",
)
"""Imported once in the fork server, whose children then start in milliseconds and share the memory pages.

The last two hold most of what a ClientApp imports of ours; they start no threads.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppReference:
    """A ClientApp or ServerApp by `module:attribute`, as a Flower app's pyproject.toml names it."""

    target: str
    # The folder that is prepended to the import path.
    folder: Path | None = None

    def load(self) -> object:
        """Import and return the app; `ConfigError` if that fails."""
        return import_attribute(
            self.target, self.folder, f"app {self.target!r}", "check [tool.flwr.app.components]"
        )


ClientAppSource: TypeAlias = AppReference | Callable[[], ClientApp] | ClientApp
"""A reference, a picklable factory, or (without worker processes) the app itself."""

_App = TypeVar("_App")

Work: TypeAlias = tuple[Message, Context]
Answer: TypeAlias = tuple[Message, Context]
StartMethod: TypeAlias = ForkServerContext | SpawnContext

# The limit of an exception's text in a reply.
_MOST_TEXT = 4_000
# How long a process may take to end after its last message.
_END_S = 10.0


def resolve_client_app(source: ClientAppSource) -> ClientApp:
    """Return the ClientApp of a source."""
    if isinstance(source, ClientApp):
        return source
    made = source.load() if isinstance(source, AppReference) else source()
    return require_app(source, made, ClientApp)


def require_app(source: object, made: object, kind: type[_App]) -> _App:
    """Return an app that was loaded from `source`. Raises `ConfigError` if it is of another kind."""
    if not isinstance(made, kind):
        raise ConfigError(
            f"app {source!r} is a {type(made).__name__}, not a Flower {kind.__name__}"
        )
    return made


def handle(app: ClientApp, message: Message, context: Context) -> Message:
    """Handle one message with the app; an exception becomes an error reply, as in Flower's own runtimes.

    Its reason has the file and line of the client's code. The same holds for a `BaseException` such as `sys.exit` or
    `asyncio.CancelledError`, which would end the whole run, and for a return value that is no message. A
    `KeyboardInterrupt` passes.
    """
    try:
        reply: object = app(message, context)
    except KeyboardInterrupt:
        # The user ends the run.
        raise
    except BaseException as error:
        return _raised(error, message)
    if isinstance(reply, Message):
        return reply
    reason = f"the ClientApp returned a {type(reply).__name__}, not a flwr.app.Message"
    return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _raised(error: BaseException, message: Message) -> Message:
    """Return the reply for what a client raised."""
    place = "" if isinstance(error, SocflowerError) else place_of(error)
    return Message(
        Error(CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{_text_of(error)}'>{place}"),
        reply_to=message,
    )


def _text_of(error: BaseException) -> str:
    """Return the text of an exception as protobuf takes it, shortened; its `__str__` is a client's code, too."""
    try:
        text = str(error)
    except BaseException as failure:
        return f"its text cannot be made: {type(failure).__name__}"
    return text[:_MOST_TEXT].encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


class InProcessWorkers:
    """Handles messages in this process, one after the other. A hung client cannot be interrupted."""

    def __init__(self, source: ClientAppSource) -> None:
        self._app = resolve_client_app(source)

    def run(
        self, work: Mapping[str, Work], deadline: float | None
    ) -> dict[str, tuple[Message, Context]]:
        """Return reply and context by message id; messages not started by the deadline are left out."""
        done = {}
        for message_id, (message, context) in work.items():
            if deadline is not None and monotonic() > deadline:
                break
            done[message_id] = (handle(self._app, _with_own_records(message), context), context)
        return done

    def close(self) -> None:
        """Nothing to release."""


def _with_own_records(message: Message) -> Message:
    """Return a message whose records a client may change, as in a process of its own.

    Messages of one exchange may have the same content, and Flower's secure aggregation takes keys out of it. Arrays are
    not copied, as their bytes cannot be changed.
    """
    own = copy(message)
    records: dict[str, Any] = {
        name: type(record)(dict[Any, Any](record)) for name, record in message.content.items()
    }
    own.content = RecordDict(records)
    return own


class ProcessWorkers:
    """`num_workers` processes; a free one takes the next message, of any node.

    There is one pipe per process, so that a hung or killed process loses only the message it was handling.
    """

    def __init__(self, source: ClientAppSource, num_workers: int) -> None:
        if isinstance(source, ClientApp):
            raise ConfigError(
                "local engine: worker processes import the ClientApp by reference; give AppReference("
                "'module:app') or a module-level factory, or num_workers=0 to run it in this process"
            )
        require_main_guard("the local engine starts worker processes", "give num_workers=0")
        self._workers = [NodeProcess(source) for _ in range(num_workers)]

    def run(
        self, work: Mapping[str, Work], deadline: float | None
    ) -> dict[str, tuple[Message, Context]]:
        """Return reply and context by message id; messages not answered by the deadline are left out.

        A worker that is still busy at the deadline is killed and replaced, so that the next round has all workers.
        """
        waiting = deque(work)
        idle = deque(range(len(self._workers)))
        running: dict[Future[tuple[Message, Context]], tuple[str, int]] = {}
        done: dict[str, tuple[Message, Context]] = {}
        while waiting or running:
            while waiting and idle:
                message_id, index = waiting.popleft(), idle.popleft()
                running[self._workers[index].submit(*work[message_id])] = (message_id, index)
            remaining_s = None if deadline is None else max(0.0, deadline - monotonic())
            finished, _ = wait(running, timeout=remaining_s, return_when=FIRST_COMPLETED)
            if not finished:
                for _, index in running.values():
                    self._workers[index].replace()
                break
            for future in finished:
                message_id, index = running.pop(future)
                message, context = work[message_id]
                try:
                    done[message_id] = future.result()
                except WorkerDied:
                    self._workers[index].replace()
                    done[message_id] = (
                        Message(
                            Error(CLIENT_APP_CRASHED, "the client's process died"), reply_to=message
                        ),
                        context,
                    )
                idle.append(index)
        return done

    def close(self) -> None:
        """End all worker processes."""
        for worker in self._workers:
            worker.close()


class WorkerDied(Exception):
    """A worker process has died, so its message is not answered."""


class NodeProcess:
    """A process that handles one message at a time; it is replaced when it has died."""

    def __init__(self, source: ClientAppSource) -> None:
        self._source, self._start_method = source, _start_method()
        self._worker = _Worker(source, self._start_method)

    @property
    def pid(self) -> int:
        """The process id of the process, once it has started."""
        return self._worker.pid

    def submit(self, work: Message, context: Context) -> "Future[Answer]":
        """Start handling a message; the future raises `WorkerDied` if the process dies."""
        # It died while it was idle, so this message's client did not cause it.
        if not self._worker.is_alive:
            self.replace()
        return self._worker.submit(work, context)

    def replace(self) -> None:
        """Kill the process and start another one."""
        self._worker.kill()
        self._worker = _Worker(self._source, self._start_method)

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        self._worker.kill()

    def close(self) -> None:
        """End the process when it has handled its message."""
        self._worker.close()


def _start_method() -> StartMethod:
    """Return the start method of processes: forked from a server with torch loaded, if the system supports it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class _Worker:
    """A process and a pipe to it; each side has only its own end.

    So whoever waits for the other side sees the end of the pipe when that side has died, also in the middle of an
    answer. `ProcessPoolExecutor` keeps both ends in the parent, and may then never return.
    """

    def __init__(self, source: ClientAppSource, start_method: StartMethod) -> None:
        self._connection, theirs = start_method.Pipe()
        self._process = start_method.Process(target=_serve, args=(theirs, source))
        self._process.start()
        theirs.close()
        # The thread waits for answers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    @property
    def pid(self) -> int:
        # Set since the process was started.
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def submit(self, message: Message, context: Context) -> "Future[Answer]":
        return self._thread.submit(self._exchange, message, context)

    def _exchange(self, message: Message, context: Context) -> Answer:
        try:
            self._connection.send((message, context))
            reply, own = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the client's process {self.pid} died") from error
        return reply, own

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._end()

    def close(self) -> None:
        """End the process when it has handled its message."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        # The process ends at this message.
        self._connection.close()
        self._process.join(_END_S)
        # A thread of the client may keep the process alive.
        if self._process.is_alive():
            self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.join()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._connection.close()


def _serve(connection: "Connection[Any, Any]", source: ClientAppSource) -> None:
    """Handle messages until the other end is closed."""
    # A process that a client forks, such as of a DataLoader, must not keep the pipe open when this
    # one has died.
    os.register_at_fork(after_in_child=connection.close)
    _start_worker(source)
    while True:
        try:
            message, context = connection.recv()
        except (EOFError, OSError):
            return
        answer = _handle_in_worker(message, context)
        with suppress(BrokenPipeError):
            connection.send(answer)


_app_of_this_worker: ClientApp | Exception = RuntimeError("the worker has not started")


def _start_worker(source: ClientAppSource) -> None:
    global _app_of_this_worker  # noqa: PLW0603 - one app per worker process, set once at its start
    # Ctrl-C reaches the whole process group; the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _app_of_this_worker = resolve_client_app(source)
    except Exception as error:
        # Reported in the reply to every message.
        _app_of_this_worker = error


def _end_with_parent() -> None:
    """End this worker when its parent process has ended for any reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _handle_in_worker(message: Message, context: Context) -> tuple[Message, Context]:
    app = _app_of_this_worker
    if isinstance(app, Exception):
        return Message(
            Error(LOAD_CLIENT_APP_EXCEPTION, f"{type(app)}:<'{app}'>"), reply_to=message
        ), context
    try:
        return handle(app, message, context), context
    except KeyboardInterrupt as error:
        # The client itself raised it: Ctrl-C is for the parent.
        return _raised(error, message), context
