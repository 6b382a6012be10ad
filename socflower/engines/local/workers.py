"""Worker processes that run a ClientApp, one message at a time, for any node."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from socflower.engines.local.flower_internals import (
    CLIENT_APP_CRASHED,
    CLIENT_APP_RAISED_EXCEPTION,
    LOAD_CLIENT_APP_EXCEPTION,
)
from socflower.errors import ConfigError, SocflowerError
from socflower.user_code import import_attribute, place_of, require_main_guard

_PRELOADED = ("flwr.clientapp", "torch", "torch._dynamo", "socflower.clients.app", "socflower.rings.member")
"""Imported once in the fork server, whose children then start in milliseconds and share the memory pages.

The last two hold most of what a ClientApp imports of ours; they start no threads.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppReference:
    """A ClientApp or ServerApp by `module:attribute`, as a Flower app's pyproject.toml names it."""

    target: str
    folder: Path | None = None  # prepended to the import path

    def load(self) -> object:
        """Import and return the app; `ConfigError` if that fails."""
        return import_attribute(self.target, self.folder, f"app {self.target!r}",
                                "check [tool.flwr.app.components]")


ClientAppSource: TypeAlias = AppReference | Callable[[], ClientApp] | ClientApp
"""A reference, a picklable factory, or (without worker processes) the app itself."""

Work: TypeAlias = tuple[Message, Context]


def resolve_client_app(source: ClientAppSource) -> ClientApp:
    """Return the ClientApp of a source."""
    if isinstance(source, ClientApp):
        return source
    made = source.load() if isinstance(source, AppReference) else source()
    if not isinstance(made, ClientApp):
        raise ConfigError(f"app {source!r} is a {type(made).__name__}, not a flwr.clientapp.ClientApp")
    return made


def handle(app: ClientApp, message: Message, context: Context) -> Message:
    """Handle one message with the app; an exception becomes an error reply, as in Flower's own runtimes.

    Its reason has the file and line of the client's code. The same holds for `sys.exit`, which would end the whole run,
    and for a return value that is no message.
    """
    try:
        reply: object = app(message, context)
    except (Exception, SystemExit) as error:
        reason = f"{type(error)}:<'{error}'>{'' if isinstance(error, SocflowerError) else place_of(error)}"
        return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
    if isinstance(reply, Message):
        return reply
    reason = f"the ClientApp returned a {type(reply).__name__}, not a flwr.app.Message"
    return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


class InProcessWorkers:
    """Handles messages in this process, one after the other. A hung client cannot be interrupted."""

    def __init__(self, source: ClientAppSource) -> None:
        self._app = resolve_client_app(source)

    def run(self, work: Mapping[str, Work], deadline: float | None) -> dict[str, tuple[Message, Context]]:
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
    """Return a message whose records a client may change, as where it comes to another process.

    Messages of one exchange may have the same content, and Flower's secure aggregation takes keys out of it. Arrays are
    not copied, as their bytes cannot be changed.
    """
    own = copy(message)
    records: dict[str, Any] = {name: type(record)(dict[Any, Any](record)) for name, record in message.content.items()}
    own.content = RecordDict(records)
    return own


class ProcessWorkers:
    """`num_workers` processes; a free one takes the next message, of any node.

    There is one executor per process, so that a hung or killed process loses only the message it was handling.
    """

    def __init__(self, source: ClientAppSource, num_workers: int) -> None:
        if isinstance(source, ClientApp):
            raise ConfigError("local engine: worker processes import the ClientApp by reference; give AppReference("
                              "'module:app') or a module-level factory, or num_workers=0 to run it in this process")
        require_main_guard("the local engine starts worker processes", "give num_workers=0")
        self._workers = [NodeProcess(source) for _ in range(num_workers)]

    def run(self, work: Mapping[str, Work], deadline: float | None) -> dict[str, tuple[Message, Context]]:
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
                except BrokenProcessPool:
                    self._workers[index].replace()
                    done[message_id] = (Message(Error(CLIENT_APP_CRASHED, "the client's process died"),
                                                reply_to=message), context)
                idle.append(index)
        return done

    def close(self) -> None:
        """End all worker processes."""
        for worker in self._workers:
            worker.close()


class NodeProcess:
    """A process that handles one message at a time; it is replaced when it has died."""

    def __init__(self, source: ClientAppSource) -> None:
        self._source, self._start_method = source, _start_method()
        self._worker = _Worker(source, self._start_method)

    @property
    def pid(self) -> int:
        """The process id of the process, once it has started."""
        return self._worker.pid

    def submit(self, work: Message, context: Context) -> "Future[tuple[Message, Context]]":
        """Start handling a message; the future raises `BrokenProcessPool` if the process dies."""
        try:
            return self._worker.submit(_handle_in_worker, work, context)
        except BrokenProcessPool:
            # It died while it was idle, so this message's client did not cause it.
            self.replace()
            return self._worker.submit(_handle_in_worker, work, context)

    def replace(self) -> None:
        """Kill the process and start another one."""
        self._worker.kill()
        self._worker = _Worker(self._source, self._start_method)

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        self._worker.kill()

    def close(self) -> None:
        """End the process when it has handled its message."""
        self._worker.shutdown(wait=True, cancel_futures=True)


def _start_method() -> BaseContext:
    """Return the start method of processes: forked from a server with torch loaded, if the system supports it."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(_PRELOADED))
    return context


class _Worker(ProcessPoolExecutor):
    """One process that can be killed: its first task returns its process id."""

    def __init__(self, source: ClientAppSource, start_method: BaseContext) -> None:
        super().__init__(max_workers=1, mp_context=start_method, initializer=_start_worker, initargs=(source,))
        self._pid = self.submit(os.getpid)

    @property
    def pid(self) -> int:
        return self._pid.result(timeout=60.0)

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        # If the pool broke before the first task returned, the process has ended already.
        with suppress(BrokenProcessPool, ProcessLookupError):
            os.kill(self._pid.result(timeout=60.0), signal.SIGKILL)
        self.shutdown(wait=True, cancel_futures=True)


_app_of_this_worker: ClientApp | Exception = RuntimeError("the worker has not started")


def _start_worker(source: ClientAppSource) -> None:
    global _app_of_this_worker  # noqa: PLW0603 - one app per worker process, set once at its start
    # Ctrl-C reaches the whole process group; the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _app_of_this_worker = resolve_client_app(source)
    except Exception as error:  # reported in the reply to every message; an initializer's exception would be lost
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
        return Message(Error(LOAD_CLIENT_APP_EXCEPTION, f"{type(app)}:<'{app}'>"), reply_to=message), context
    return handle(app, message, context), context
