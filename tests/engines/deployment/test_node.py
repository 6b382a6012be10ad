"""`socflower node` shows what a SuperNode does, and drains it: the interval is completed, and the next one declined."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from socflower.clients.node_record import is_drained, switch_of
from socflower.engines.deployment.flower_processes import free_ports, is_running
from socflower.engines.deployment.node import DrainableNode
from socflower.flower_adapter import begin_run
from socflower.wire.message_keys import ASK, ASK_STATUS, STATUS
from socflower.wire.node_files import NODE_FOLDER, drain_file, read_record
from tests.clients.test_app import make_app, message, node
from tests.command_line import Socflower, is_mistake

SOCFLOWER = Path(sysconfig.get_path("scripts")) / "socflower"
# What a SuperNode is to its parent: a process that ends by SIGTERM, whose child works on a message.
AT_WORK = """\
import sys, time
from dataclasses import replace
from socflower.wire.node_files import NodeRecord, drain_file, write_record
import os
record = NodeRecord(kind="train", server_round=4, run="7", working_since_s=time.time(), pid=os.getpid())
write_record(record)
while not drain_file().exists():
    time.sleep(0.02)
time.sleep(float(sys.argv[1]))
write_record(replace(record, messages=1, working_since_s=None, answered_at_s=time.time()))
open(sys.argv[2], "w").write("complete")
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a node that `socflower node` started."""
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    begin_run(1)
    return tmp_path


def eventually(happened: Callable[[], bool], limit_s: float = 60.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not happened() and time.monotonic() < end_s:
        time.sleep(0.05)
    return happened()


def test_clients_record_what_they_answer_and_what_fails(folder: Path) -> None:
    context = node()
    make_app()(message(), context)
    record = read_record(folder)
    assert record is not None
    assert (record.messages, record.failed, record.kind) == (1, 0, "train")
    assert record.working_since_s is None and record.busy_s > 0 and record.loss is not None
    context.node_config["ring-trusted"] = True
    with pytest.raises(Exception, match="ring-trusted"):
        make_app()(message(), context)
    after = read_record(folder)
    assert after is not None and (after.messages, after.failed) == (2, 1)


def test_without_the_command_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_FOLDER, raising=False)
    assert read_record() is None and drain_file() is None and not is_drained()


def test_a_drained_node_says_that_it_is_away_and_leaves_the_next_interval(folder: Path) -> None:
    def asked(context: Context) -> bool:
        question = Message(
            RecordDict({"config": ConfigRecord({ASK: ASK_STATUS})}), 5, "query.socflower"
        )
        return bool(make_app()(question, context).content.config_records[STATUS].get("preempted"))

    context = node()
    assert not asked(context) and not switch_of({}).active
    (folder / "drain").touch()
    assert asked(context) and switch_of({}).active


@pytest.mark.parametrize("limit_s", [100.0, 0.2])
def test_sigterm_waits_for_the_end_of_the_interval_or_for_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    monkeypatch.setattr("socflower.engines.deployment.node._IDLE_S", 0.2)
    done = tmp_path / "done"
    command = [sys.executable, "-c", AT_WORK, "0.5" if limit_s > 1 else "60", str(done)]
    child = DrainableNode(command, tmp_path, drain_s=limit_s)
    states: list[dict[str, Any]] = []

    def drain() -> None:
        eventually(lambda: child.record.working_since_s is not None)
        states.append(dict(child.port_state().document))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        states.append({**child.port_state().document, "why": child.port_state().not_ready})

    thread = threading.Thread(target=drain)
    thread.start()
    assert child.run() == 0
    thread.join()
    assert (states[0]["state"], states[0]["round"]) == ("train", 4)
    assert (states[1]["state"], states[1]["why"]) == ("draining", "draining")
    assert done.exists() == (limit_s > 1)


def test_a_supernode_that_ends_by_itself_gives_its_status(tmp_path: Path) -> None:
    child = DrainableNode([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, drain_s=1.0)
    assert child.run() == 3
    assert child.port_state().fault == "the SuperNode does not run"


def test_a_client_that_was_killed_at_work_is_a_failed_message(folder: Path) -> None:
    (folder / "record.json").write_text(json.dumps({"working_since_s": 1.0, "pid": 2**22 + 1}))
    record = DrainableNode(["flower-supernode"], folder, drain_s=1.0).record
    assert (record.working_since_s, record.failed) == (None, 1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("node -- flower-superlink", "write -- flower-supernode"),
        ("node --drain 0 -- flower-supernode", "--drain 0"),
        ("node --metrics 9.9.9.9:1 -- flower-supernode", "is not private"),
        ("node --log-format yaml -- flower-supernode", "use text or json"),
    ],
)
def test_mistakes_are_one_line(socflower: Socflower, words: str, named: str) -> None:
    is_mistake(socflower(words), named)


@pytest.mark.slow
def test_a_real_supernode_is_seen_and_ends_by_sigterm(tmp_path: Path) -> None:
    """Its SuperLink is away, so it stays idle."""
    port, node_port = free_ports(2)
    words = [
        *("node", "--metrics", f"127.0.0.1:{port}", "--", "flower-supernode", "--insecure"),
        *("--superlink", "127.0.0.1:1", "--host", "127.0.0.1", "--port", str(node_port)),
    ]
    process = subprocess.Popen([SOCFLOWER, *words], env={**os.environ, "FLWR_HOME": str(tmp_path)})
    try:

        def is_healthy() -> bool:
            try:
                connection = HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
            except OSError:
                return False

        assert eventually(is_healthy)
        process.terminate()
        assert process.wait(60) == 0
        assert eventually(lambda: not is_running(process.pid))
    finally:
        process.kill()
        process.wait()
