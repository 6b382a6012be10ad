"""What a run is doing now: who is there, its groups, round, loss and heat, and what it waits for.

The command keeps it in `status.json` of the run's folder while it runs, and serves it at the port of `--metrics`. A
ServerApp, perhaps on another machine, contributes what it has sent and received (`WatchedGrid`).
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias, cast

import psutil
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from socflower.errors import ConfigError
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.wire.message_keys import (
    CONFIG,
    GROUP,
    HEAT,
    METRICS,
    RING,
    SERVER_ROUND,
    TRAIN_LOSS,
    GroupTask,
)
from socflower.wire.saved_state import write_atomically
from socflower.wire.status_port import Metric, PortState, label, metric

STATUS_FILE = "status.json"
# What the ServerApp writes is at most so old; every line of it stays in a remote SuperLink's database.
_INTERVAL_S = 0.5
_NUM_NOTICES = 5

OnStatus: TypeAlias = Callable[[Mapping[str, Any]], None]


class RunStatus:
    """The status of one run, safe between threads; it keeps the file at `path` until `close`."""

    def __init__(self, path: Path, title: str, engine: str) -> None:
        self._path, self._lock = path, Lock()
        self._document: dict[str, Any] = {
            "schema": 1,
            "kind": "run",
            "run": title,
            "engine": engine,
            "pid": os.getpid(),
            "started_at_s": time.time(),
            "state": "starting",
            "waiting_for": "the ServerApp",
            "round": None,
            "num_rounds": None,
            "accuracy": None,
            "loss": None,
            "restarts": 0,
            "events": 0,
            "notices": [],
            "nodes": None,
            "groups": [],
            "hottest_c": None,
        }
        self._last_round_at_s: float | None = None
        self._round_s: float | None = None

    def on_round(self, entry: Mapping[str, Any]) -> None:
        """Take a round's entry of the progress log."""
        now_s = time.time()
        if entry["round"] and self._last_round_at_s is not None:
            self._round_s = now_s - self._last_round_at_s
        self._last_round_at_s = now_s
        known = {key: entry.get(key) for key in ("round", "num_rounds", "accuracy", "loss")}
        events = [event["text"] for event in entry["events"]]
        self._change(known, events)

    def on_notice(self, line: str) -> None:
        """Take a line about a failure that was recovered from."""
        is_restart = "(restart " in line
        self._change({"restarts": self._document["restarts"] + is_restart}, [line])

    def on_server(self, document: Mapping[str, Any]) -> None:
        """Take what the ServerApp knows, as `WatchedGrid` writes it."""
        self._change(document, [])

    def close(self) -> None:
        """Remove the file: the run has ended, and its folder has the result, or nothing."""
        self._path.unlink(missing_ok=True)

    def port_state(self) -> PortState:
        """Return the status as the port of `--metrics` answers it."""
        with self._lock:
            document = dict(self._document)
        is_starting = document["state"] == "starting"
        return PortState(
            document=document,
            metrics=_metrics(document, self._round_s),
            not_ready=f"waiting for {document['waiting_for']}" if is_starting else "",
        )

    def _change(self, values: Mapping[str, Any], lines: Sequence[str]) -> None:
        with self._lock:
            document = self._document
            document |= values
            document["events"] += len(lines)
            document["notices"] = [*document["notices"], *lines][-_NUM_NOTICES:]
            document["updated_at_s"] = time.time()
            # The run continues on a full disk.
            with suppress(OSError):
                write_atomically(self._path, json.dumps(document))


def _metrics(document: Mapping[str, Any], round_s: float | None) -> list[Metric]:
    nodes = document["nodes"] or {}
    waiting = [soc for group in document["groups"] for soc in group["waiting_for"]]
    return [
        metric("round", "Rounds that have ended.", document["round"]),
        metric("planned_rounds", "Rounds of the whole run.", document["num_rounds"]),
        metric("loss", "Loss of the newest model.", document["loss"]),
        metric("accuracy", "Accuracy of the newest model.", document["accuracy"]),
        metric("round_seconds", "Seconds of the newest round.", round_s),
        metric("restarts_total", "Times that the run was submitted again.", document["restarts"]),
        metric("events_total", "Failures and changes.", document["events"]),
        metric("hottest_celsius", "Hottest node of the newest replies.", document["hottest_c"]),
        metric("waiting_socs", "SoCs whose replies are awaited.", len(waiting)),
        Metric(
            name="nodes",
            help="SuperNodes that are connected, and that the run needs.",
            values={label("state", key): nodes.get(key) for key in ("connected", "needed")},
        ),
        Metric(
            name="group_socs",
            help="SoCs of each group of the round.",
            values={
                label("group", each["id"]): len(each["members"]) for each in document["groups"]
            },
        ),
    ]


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return the status of the run in a folder; of one that has ended, from its result. None if there is no run.

    Raises `ConfigError` for files that are no status or result.
    """
    path = folder / STATUS_FILE
    with suppress(FileNotFoundError):
        document = _read(path)
        if not psutil.pid_exists(int(document["pid"])):
            document["state"], document["waiting_for"] = "killed", "nothing: its command was killed"
        return document
    result = folder / "result.json"
    with suppress(FileNotFoundError):
        document = _read(result)
        last = document["rounds"][-1] if document.get("rounds") else {}
        return {
            "schema": 1,
            "kind": "run",
            "run": folder.name,
            "engine": document.get("engine"),
            "state": "ended",
            "waiting_for": "nothing",
            **{key: last.get(key) for key in ("round", "accuracy", "loss")},
        }
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON ({error}); remove it") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: is not of socflower; name a folder of `socflower run --out`")
    return document


class WatchedGrid(ForwardingGrid):
    """Tells `on_status` which members of which groups have not replied yet, and what the others reported."""

    def __init__(self, grid: Grid, on_status: OnStatus) -> None:
        super().__init__(grid)
        self._on_status = on_status
        self._told_at_s = -_INTERVAL_S
        self._is_new = False
        self._round: int | None = None
        self._groups: dict[int, dict[str, Any]] = {}
        # The group and SoCs of each message without a reply.
        self._waiting: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._heat_c: dict[int, float] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the inner grid."""
        sent = list(messages)
        ids = list(self._grid.push_messages(sent))
        self._on_sent(sent, ids)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull through the inner grid."""
        replies = list(self._grid.pull_messages(message_ids))
        self._on_replies(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Exchange messages through the inner grid."""
        sent = list(messages)
        self._on_sent(sent, [f"sent-{number}" for number in range(len(sent))])
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        self._waiting.clear()
        self._on_replies(replies)
        return replies

    def _on_sent(self, messages: Sequence[Message], ids: Sequence[str]) -> None:
        for message, ident in zip(messages, ids, strict=True):
            records = message.content.config_records
            if GROUP not in records:
                continue
            task = GroupTask.decode(records[GROUP])
            number = records.get(CONFIG, ConfigRecord()).get(SERVER_ROUND)
            if number is not None and number != self._round:
                self._round = int(cast(int, number))
                self._groups, self._waiting = {}, {}
            self._groups[task.group_id] = {
                "id": task.group_id,
                "leader": task.leader,
                "members": list(task.members),
            }
            self._waiting[ident] = (task.group_id, _socs_of(task, records))
            self._is_new = True
        self._tell()

    def _on_replies(self, replies: Sequence[Message]) -> None:
        for reply in replies:
            asked = self._waiting.pop(reply.metadata.reply_to_message_id, None)
            self._is_new |= asked is not None
            if not reply.has_content():
                continue
            heat = reply.content.config_records.get(HEAT)
            if heat is not None and "temperature-c" in heat:
                self._heat_c[reply.metadata.src_node_id] = float(cast(float, heat["temperature-c"]))
            metrics = reply.content.metric_records.get(METRICS, MetricRecord())
            loss = metrics.get(TRAIN_LOSS)
            if asked is not None and isinstance(loss, float):
                self._groups[asked[0]]["loss"] = loss
        self._tell()

    def _tell(self) -> None:
        now_s = time.monotonic()
        if not self._is_new or now_s - self._told_at_s < _INTERVAL_S:
            return
        self._told_at_s, self._is_new = now_s, False
        waiting = [
            sorted(soc for owner, socs in self._waiting.values() if owner == ident for soc in socs)
            for ident in self._groups
        ]
        groups = [
            {**group, "waiting_for": socs}
            for group, socs in zip(self._groups.values(), waiting, strict=True)
        ]
        behind = [soc for socs in waiting for soc in socs]
        self._on_status(
            {
                "state": "training",
                "training_round": self._round,
                "groups": groups,
                "nodes": {
                    "connected": len(list(self._grid.get_node_ids())),
                    "needed": sum(len(group["members"]) for group in groups),
                },
                "hottest_c": max(self._heat_c.values(), default=None),
                "waiting_for": f"SoC {', '.join(map(str, behind))}" if behind else "the next round",
            }
        )


def _socs_of(task: GroupTask, records: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the SoCs that a message is for: one member of a ring, or the whole group."""
    if RING not in records:
        return task.members
    return (task.members[task.partitions.index(records[RING]["participant"])],)


def waiting_for_nodes(connected: int, needed: int) -> dict[str, Any]:
    """Return what a ServerApp reports while nodes are missing."""
    return {
        "state": "starting",
        "nodes": {"connected": connected, "needed": needed},
        "waiting_for": f"{needed - connected} of {needed} SuperNodes",
    }
