"""Worker processes between rounds."""

import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import AppReference, ProcessWorkers


def test_a_worker_that_died_while_it_was_idle_costs_no_message() -> None:
    with LocalGrid(AppReference(target="tests.engines.local.apps_for_tests:app"), 2, num_workers=1) as grid:
        def ask() -> list[Message]:
            return grid.send_and_receive([Message(RecordDict({"config": ConfigRecord({})}), node, "train")
                                          for node in grid.get_node_ids()])

        pid = ask()[0].content["metrics"]["pid"]
        assert isinstance(pid, int)
        workers = grid._workers
        assert isinstance(workers, ProcessWorkers)
        (worker,) = workers._workers
        os.kill(pid, signal.SIGKILL)
        # Until its executor has noticed; from then on it refuses work instead of failing it.
        with pytest.raises(BrokenProcessPool):
            while True:
                worker._worker.submit(os.getpid).exception()
        replies = ask()
        assert all(reply.has_content() for reply in replies)
        assert {reply.content["metrics"]["pid"] for reply in replies} != {pid}


def test_a_script_that_each_worker_would_run_again_is_told_before_any_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from socflower.engines.local.workers import ProcessWorkers\nProcessWorkers('module:app', 2)\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    *_, last = ran.stderr.splitlines()
    assert "ConfigError: script.py, line 2: the local engine starts worker processes outside of" in last
    assert ran.stderr.count("Traceback") == 1 and last.endswith("or give num_workers=0")
