"""`socflower node`: runs a SuperNode, shows what it does, and ends it between two messages.

SIGTERM, as from `systemctl stop`, drains the node: it completes the interval that it works on, declines the next one,
or says to a query that it is away, and ends when that is sent, or when nothing came for `_IDLE_S`. A second SIGTERM,
or SIGINT, ends it at once.
"""

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

from socflower.engines.deployment.flower_processes import (
    end,
    end_marked,
    is_running,
    marked,
    own_processes,
    require_command,
    users_environment,
)
from socflower.engines.deployment.warm_executor import warm_supernode_command
from socflower.errors import ConfigError
from socflower.wire.folders import temporary_folder
from socflower.wire.node_files import NODE_FOLDER, NodeRecord, drain_file, read_record
from socflower.wire.status_port import PortState, StatusPort, metric

SUPERNODE = "flower-supernode"
_POLL_S = 0.2
# A round's next message comes within Flower's polling interval of 3 s after the last reply has been fetched.
_IDLE_S = 8.0
# The SuperNode sends an answer within this time.
_SEND_S = 2.0


class DrainableNode:
    """A SuperNode as a child process, with its clients' record; `command` is that of the SuperNode."""

    def __init__(self, command: Sequence[str], folder: Path, *, drain_s: float) -> None:
        self._command, self._folder, self._drain_s = command, folder, drain_s
        self._process: subprocess.Popen[bytes] | None = None
        # The Unix time at which draining began; None before.
        self._draining_since_s: float | None = None
        self._ends_now = False

    def run(self) -> int:
        """Run the SuperNode to its end, and return the exit status: 0 after a drain, else its own."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            with own_processes() as mark:
                environment = {**marked(users_environment(), mark), NODE_FOLDER: str(self._folder)}
                require_command(SUPERNODE, environment, "deployment")
                self._process = subprocess.Popen(
                    self._command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
                )
                while (code := self._process.poll()) is None and not self._is_over():
                    time.sleep(_POLL_S)
                if code is None:
                    # The SuperNode tells the SuperLink that it leaves; then its clients end too.
                    end(self._process)
                end_marked(mark)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0 if self._draining_since_s is not None or self._ends_now else abs(code or 0) or 1

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT or self._draining_since_s is not None:
            self._ends_now = True
            return
        self._draining_since_s = time.time()
        file = drain_file(self._folder)
        assert file is not None
        file.touch()

    def _is_over(self) -> bool:
        """Return whether the node may be ended now: it was drained and has been idle, or waited long enough."""
        if self._ends_now:
            return True
        if self._draining_since_s is None:
            return False
        drained_s, record = time.time() - self._draining_since_s, self.record
        if record.working_since_s is not None:
            return drained_s >= self._drain_s
        idle_s = min(drained_s, time.time() - (record.answered_at_s or 0.0))
        # The strategy knows of the drain by the answer to a message that came after it.
        has_told = record.began_at_s > self._draining_since_s
        return idle_s >= (_SEND_S if has_told else _IDLE_S)

    @property
    def record(self) -> NodeRecord:
        """What the clients have done; a client that was killed at work is a failed message."""
        record = read_record(self._folder) or NodeRecord()
        if record.working_since_s is None or is_running(record.pid):
            return record
        return replace(record, working_since_s=None, failed=record.failed + 1)

    def port_state(self) -> PortState:
        """Return what the port of `--metrics` answers."""
        record, now_s = self.record, time.time()
        runs = self._process is not None and self._process.poll() is None
        drains, works = self._draining_since_s is not None, record.working_since_s is not None
        state = "draining" if drains else record.kind if works else "idle"
        what = f"the end of its {record.kind} message" if works else "a message of the SuperLink"
        document = {
            "schema": 1,
            "kind": "node",
            "state": state if runs else "ended",
            "waiting_for": "its end" if drains and not works else what,
            "round": record.server_round or None,
            "loss": record.loss,
            "hottest_c": record.temperature_c,
            "messages": record.messages,
            "failed": record.failed,
            "last_message_s": record.answered_at_s and now_s - record.answered_at_s,
            "run": record.run,
        }
        busy_s = record.busy_s + (now_s - record.working_since_s if record.working_since_s else 0)
        return PortState(
            document=document,
            metrics=[
                metric("node_round", "Round of the newest message.", record.server_round),
                metric("node_messages_total", "Messages that were answered.", record.messages),
                metric("node_failed_total", "Messages whose client failed.", record.failed),
                metric("node_busy_seconds_total", "Seconds of work on messages.", busy_s),
                metric("node_working", "Whether a message is worked on.", works),
                metric("node_draining", "Whether the node takes no more work.", drains),
                metric("node_loss", "Training loss of the newest message.", record.loss),
                metric("node_celsius", "Temperature, with heat=true.", record.temperature_c),
            ],
            not_ready="draining" if drains else "",
            fault="" if runs else "the SuperNode does not run",
        )


def run_node(command: Sequence[str], *, metrics: str, drain_s: float, resident: bool) -> int:
    """Run `flower-supernode` with its arguments, and return the exit status.

    `metrics` is the address of the port for operators, or empty. Raises `ConfigError` for another command, and for a
    `drain_s` (seconds that an interval may take after SIGTERM) that is not positive.
    """
    if not command or Path(command[0]).name != SUPERNODE:
        raise ConfigError(
            f"node: write -- {SUPERNODE} and its options, not {' '.join(command[:1]) or 'nothing'}"
        )
    if not 0 < drain_s < 1e7:
        raise ConfigError(f"--drain {drain_s:g}: must be a positive number of seconds")
    started = warm_supernode_command(command[1:]) if resident else command
    with temporary_folder() as folder, ExitStack() as stack:
        node = DrainableNode(started, folder, drain_s=drain_s)
        if metrics:
            stack.enter_context(StatusPort(metrics, node.port_state))
        return node.run()
