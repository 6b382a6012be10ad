"""Preemption: a file, a signal or an HTTP request makes the training release the device for its user.

Flower starts a process for every message, so a request must outlive the process: it is stored in a file. If
`preempt-file` is set, the file is the state, and signals and requests create or remove it. All clients of the device
with the same file are preempted, including those of later messages, until the file is removed. Without a file, a
request or a signal holds for the lifetime of the process that received it. A file below /run is removed by a reboot.

    preempt-file="/run/socflower/preempt"   leave while it exists: `touch` it, `rm` it
    preempt-port=28300                      POST /preempt, DELETE /preempt, GET /preempt
    preempt-bind="127.0.0.1"                the address on which that port listens
    preempt-signal=true                     SIGUSR1 to the client's process: leave; SIGUSR2: stay
"""

import errno
import ipaddress
import json
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from types import FrameType
from typing import Any

from socflower.errors import ConfigError
from socflower.wire.http_server import HttpHandler, HttpServer
from socflower.wire.logs import log, warn

FILE_CHECK_INTERVAL_S = 0.05
"""The minimum interval between checks of the file; reading `active` in between costs nothing."""

_LOOPBACK = "127.0.0.1"
_DEFAULTS = {
    "preempt-file": None,
    "preempt-port": None,
    "preempt-bind": _LOOPBACK,
    "preempt-signal": False,
}
_KEYS = tuple(_DEFAULTS)
_REQUEST_TIMEOUT_S = 5.0
_LARGEST_BODY_BYTES = 65536


class Preempted(Exception):
    """The device is preempted; the text says since when."""


class PreemptionSwitch:
    """Whether this device is preempted; a context manager that listens to its sources while it is entered.

    Parameters
    ----------
    file : Path, optional
        The device is preempted while the file exists, whoever created it.
    port, host : int and str, optional
        The address for HTTP requests. If the port is in use, normally by another client of the device, a warning is
        logged and the other sources are used; requests to that client arrive here through the file.
    signals : bool
        Whether to handle SIGUSR1 and SIGUSR2. Only a process's main thread can; elsewhere a warning is logged and
        signals are not handled.
    """

    def __init__(
        self,
        *,
        file: Path | None = None,
        port: int | None = None,
        host: str = _LOOPBACK,
        signals: bool = False,
    ) -> None:
        self.notes: list[str] = []
        """The warnings, a line each."""
        self._file, self._port, self._host, self._signals = file, port, host, signals
        # Plain assignments, no lock: a signal handler may interrupt the same method that it calls.
        # The Unix time of a signal or request that is not stored in a file.
        self._requested_at_s: float | None = None
        self._file_exists = False
        self._next_check_s = -math.inf
        self._unlogged: list[str] = []
        self._server: _Server | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "PreemptionSwitch":
        """Begin to listen; `ConfigError` if the address cannot be used."""
        try:
            if self._port is not None:
                self._listen(self._port)
            if self._signals:
                self._catch_signals()
        except BaseException:
            self.__exit__()
            raise
        self._flush_warnings()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the port and restore the signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        self._flush_warnings()

    @property
    def active(self) -> bool:
        """Whether the device is preempted; cheap enough to be read at every layer of a backward pass.

        Signals and requests of this process take effect at once, a file within `FILE_CHECK_INTERVAL_S`.
        """
        if self._unlogged:
            self._flush_warnings()
        if self._requested_at_s is not None:
            return True
        if self._file is None:
            return False
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + FILE_CHECK_INTERVAL_S
            self._file_exists = self._file_time_s() is not None
        return self._file_exists

    def raise_if_active(self) -> None:
        """Raise `Preempted` if the device is preempted."""
        if self.active:
            raise Preempted(
                f"the device is preempted by its user, since {self.since_s() or 0.0:.1f} s"
            )

    def since_s(self) -> float | None:
        """Return for how many seconds the device has been preempted, or None if it is not."""
        began_s = self._requested_at_s if self._requested_at_s is not None else self._file_time_s()
        return None if began_s is None else max(0.0, time.time() - began_s)

    def activate(self) -> None:
        """Preempt the device, as a signal or a request does."""
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                # An existing file keeps its modification time.
                os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644))
                self._requested_at_s, self._next_check_s = None, -math.inf
                return
            except OSError as error:
                self._warn_once(
                    f"preempt-file {self._file}: cannot be written ({error.strerror}); this process "
                    "leaves, but those of later messages will not"
                )
        if self._requested_at_s is None:
            self._requested_at_s = time.time()

    def deactivate(self) -> None:
        """End the preemption."""
        self._requested_at_s = None
        if self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                self._warn_once(
                    f"preempt-file {self._file}: cannot be removed ({error.strerror}), so the device stays "
                    "preempted; remove it"
                )
            self._next_check_s = -math.inf

    def _file_time_s(self) -> float | None:
        """Return the file's modification time, or None; if it cannot be read, the last known state is kept."""
        if self._file is None:
            return None
        try:
            return self._file.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn_once(
                f"preempt-file {self._file}: cannot be read ({error.strerror}); let the client's user "
                "read its folder"
            )
            return time.time() if self._file_exists else None

    # ------------------------------------------------------------------------------------------------ sources

    def _listen(self, port: int) -> None:
        try:
            self._server = _Server(self._host, port, self)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"preempt-port {port}: cannot listen on {self._host} ({error.strerror}); choose a "
                    "port above 1023 and an address of this device in preempt-bind"
                ) from None
            heard = "set preempt-file too, so that requests to it arrive here"
            if self._file is not None:
                heard = "requests to it arrive through preempt-file"
            self._warn_once(f"preempt-port {port}: in use on {self._host}; {heard}")
            return
        threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="preempt-port",
            daemon=True,
        ).start()

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._warn_once(
                "preempt-signal: the client does not run in its process's main thread, so signals are left "
                "alone; use preempt-file"
            )
            return
        for number, answer in ((signal.SIGUSR1, self.activate), (signal.SIGUSR2, self.deactivate)):

            def handler(_number: int, _frame: FrameType | None, answer: Any = answer) -> None:
                answer()

            self._previous[number] = signal.signal(number, handler)

    def _warn_once(self, text: str) -> None:
        """Record a warning, once. It is logged later: the signal handler may have interrupted the logging itself."""
        if text not in self.notes:
            self.notes.append(text)
            self._unlogged.append(text)

    def _flush_warnings(self) -> None:
        while self._unlogged:
            log(WARNING, "%s", self._unlogged.pop(0))


def preempt_switch(node_config: Mapping[str, Any]) -> PreemptionSwitch:
    """Return the switch for a SuperNode's `--node-config`; without any of the keys, it is never active.

    Raises `ConfigError` for an invalid value, and for an unknown key that begins with "preempt".
    """
    unknown = [key for key in node_config if key.startswith("preempt") and key not in _KEYS]
    if unknown:
        raise ConfigError(f"node-config {unknown[0]}: there is no such key; use {', '.join(_KEYS)}")
    file, port, host, signals = (node_config.get(key, _DEFAULTS[key]) for key in _KEYS)
    # Absolute, since each message has its own process, in a working folder of Flower's.
    is_path = isinstance(file, str) and Path(file).is_absolute() and "\0" not in file
    for key, valid, takes in (
        ("preempt-file", file is None or is_path, "an absolute path"),
        (
            "preempt-port",
            port is None or (type(port) is int and 0 < port < 65536),
            "from 1 to 65535",
        ),
        ("preempt-bind", _is_address(host), "an IP address of this device"),
        ("preempt-signal", isinstance(signals, bool), "true or false"),
    ):
        if not valid:
            raise ConfigError(f"node-config {key} = {node_config[key]!r} must be {takes}")
    return PreemptionSwitch(
        file=Path(file) if file is not None else None, port=port, host=host, signals=signals
    )


def _is_address(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


class _Server(HttpServer):
    def __init__(self, host: str, port: int, switch: PreemptionSwitch) -> None:
        self.switch = switch
        super().__init__(host, port, _RequestHandler, "preempt-port", warn)


class _RequestHandler(HttpHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.server.switch.activate)

    def do_DELETE(self) -> None:
        self._answer(self.server.switch.deactivate)

    def _answer(self, change: Any) -> None:
        length = self.headers.get("Content-Length", "0")
        if self.path.split("?")[0].rstrip("/") != "/preempt":
            self._reply(404, {"error": "there is only /preempt"})
        elif not length.isdigit() or int(length) > _LARGEST_BODY_BYTES:
            self._reply(413, {"error": "send no body"})
        elif change is not None and "Origin" in self.headers:
            # Browsers add it to requests of web pages, which must not be able to preempt a training.
            self._reply(403, {"error": "not from a web page"})
        else:
            self.rfile.read(int(length))
            if change is not None:
                change()
            since_s = self.server.switch.since_s()
            shown_s = None if since_s is None else round(since_s, 3)
            self._reply(200, {"preempted": since_s is not None, "since_s": shown_s})

    def _reply(self, status: int, document: dict[str, Any]) -> None:
        self.reply(status, json.dumps(document) + "\n", "application/json")
