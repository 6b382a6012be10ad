"""Worker processes between rounds."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import (
    AppReference,
    NodeProcess,
    ProcessWorkers,
    WorkerDied,
    handle,
)
from socflower.flower_adapter import begin_run


def test_a_worker_that_died_while_it_was_idle_costs_no_message() -> None:
    with LocalGrid(
        AppReference(target="tests.engines.local.apps_for_tests:app"), 2, num_workers=1
    ) as grid:

        def ask() -> list[Message]:
            return grid.send_and_receive(
                [
                    Message(RecordDict({"config": ConfigRecord({})}), node, "train")
                    for node in grid.get_node_ids()
                ]
            )

        pid = ask()[0].content["metrics"]["pid"]
        assert isinstance(pid, int)
        workers = grid._workers
        assert isinstance(workers, ProcessWorkers)
        (worker,) = workers._workers
        os.kill(pid, signal.SIGKILL)
        worker._worker._process.join()
        replies = ask()
        assert all(reply.has_content() for reply in replies)
        assert {reply.content["metrics"]["pid"] for reply in replies} != {pid}


def test_a_script_that_each_worker_would_run_again_is_told_before_any_starts(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from socflower.engines.local.workers import ProcessWorkers\nProcessWorkers('module:app', 2)\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    *_, last = ran.stderr.splitlines()
    assert (
        "ConfigError: script.py, line 2: the local engine starts worker processes outside of"
        in last
    )
    assert ran.stderr.count("Traceback") == 1 and last.endswith("or give num_workers=0")


def app_of_large_answers() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        array = Array(np.zeros(250_000, np.float32))  # 1 MB: more than a pipe holds
        return Message(RecordDict({"arrays": ArrayRecord({"w": array})}), reply_to=message)

    return app


def a_message() -> tuple[Message, Context]:
    begin_run(1)
    message = Message(RecordDict({"config": ConfigRecord({})}), 1000, "train")
    message.metadata.__dict__["_run_id"] = 1
    return message, Context(
        run_id=1, node_id=1000, node_config={}, state=RecordDict(), run_config={}
    )


@pytest.mark.parametrize("num_kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_while_it_writes_its_answer_is_seen_to_be_dead(
    num_kills: int,
) -> None:
    """The kills are spread over the writing of the answer."""
    node = NodeProcess(app_of_large_answers)
    try:
        node.submit(*a_message()).result(timeout=60.0)
        outcomes = []
        for number in range(num_kills):
            answer = node.submit(*a_message())
            time.sleep(number % 20 * 1e-4)
            ended: list[None] = []
            killer = threading.Thread(
                target=lambda ended=ended: ended.append(node.replace()), daemon=True
            )
            killer.start()
            killer.join(60.0)
            assert ended == [None], f"the kill of process {number} does not end"
            outcomes.append(answer.exception(timeout=60.0))
    finally:
        node.kill()
    assert all(outcome is None or isinstance(outcome, WorkerDied) for outcome in outcomes)
    assert any(isinstance(outcome, WorkerDied) for outcome in outcomes)


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Own(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (asyncio.CancelledError("stopped"), "CancelledError'>:<'stopped'>"),
        (GeneratorExit(), "GeneratorExit"),
        (Own("no Exception"), "Own'>:<'no Exception'>"),
        (NoText(), "its text cannot be made: RuntimeError"),
        (SystemExit(0), "SystemExit'>:<'0'>"),
        (ValueError("file \udce9.png"), "file \\udce9.png"),
        (ValueError("a\0" + "x" * 10_000_000), "a\\0xxx"),
    ],
)
def test_whatever_a_client_raises_is_an_error_reply(error: BaseException, says: str) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise error

    reply = handle(app, *a_message())
    assert says in reply.error.reason and len(reply.error.reason) < 10_000
    reply.error.reason.encode()


def test_a_keyboard_interrupt_ends_the_run() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        handle(app, *a_message())
