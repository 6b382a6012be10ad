"""Standard output holds what the command has to say and nothing else, in a terminal of any width."""

import io
import itertools
import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from rich.console import Console

from socflower.cli.terminal import progress, progress_state
from socflower.quantities import counted
from socflower.report import report
from socflower.scenario import jobs
from socflower.scenario.schema.config import STRATEGIES
from tests.command_line import Socflower, is_mistake

COMMAND = Path(sysconfig.get_path("scripts")) / "socflower"
NOISE = """\
import atexit, ctypes, os, sys
def shout(where):
    print("python", where)
    os.write(1, f"descriptor {where}\\n".encode())
    ctypes.CDLL(None).printf(b"C %s", where.encode())     # stays in C's buffer: there is no end of line
    os.system(f"echo shell {where}")
"""
SERVER = """\
import atexit
import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from noise import shout
shout("import of the server")
atexit.register(lambda: shout("exit of the server"))
app = ServerApp()

@app.main()
def main(grid, context):
    shout("server")
    content = RecordDict({"arrays": ArrayRecord([np.zeros(3, np.float32)])})
    replies = list(grid.send_and_receive([
        Message(content, dst_node_id=node, message_type=MessageType.TRAIN) for node in grid.get_node_ids()]))
    assert all(reply.has_content() for reply in replies), replies
"""
CLIENT = """\
from flwr.app import Message
from flwr.clientapp import ClientApp
from noise import shout
shout("import of the client")
app = ClientApp()

@app.train()
def train(message, context):
    shout("client")
    return Message(message.content, reply_to=message)
"""


@pytest.fixture
def noisy_app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nserverapp = 'noisy_server:app'\nclientapp = 'noisy_client:app'\n"
    )
    for name, text in (("noise", NOISE), ("noisy_server", SERVER), ("noisy_client", CLIENT)):
        (folder / f"{name}.py").write_text(text)
    (tmp_path / "cluster.toml").write_text("[cluster]\nboards = [2]\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_document_is_all_of_standard_output_whatever_an_app_prints(
    noisy_app: Path, workers: int
) -> None:
    ran = subprocess.run(
        [COMMAND, *f"run app --cluster cluster.toml --workers {workers} --json".split()],
        cwd=noisy_app.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "TERM": "dumb"},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["engine"] == "local"
    for voice, where in itertools.product(
        ("python", "descriptor", "C", "shell"),
        ("import of the server", "server", "import of the client", "client", "exit of the server"),
    ):
        # Workers are killed before they could write what C has in its buffer.
        if voice == "C" and workers and "client" in where:
            continue
        assert f"{voice} {where}" in ran.stderr


def test_help_and_suggestions_are_plain_and_said_once(socflower: Socflower) -> None:
    for command, says in (
        ("run", "A scenario file"),
        ("certificates", "DNS names"),
        ("cloud serve", "A split scenario"),
        ("fan", "configuration (TOML)"),
    ):
        ran = socflower(f"{command} --help")
        assert ran.status == 0 and "[required]" in ran.out and "\\" not in ran.out
        assert ran.out.count("rguments:") == 1 and ran.out.count(says) == 1
    for typed, says in (("rn", "Did you mean 'run'?"), ("cloud serv", "Did you mean 'serve'?")):
        ran = socflower(typed)
        assert ran.status == 2 and ran.err.count("Did you mean") == 1 and says in ran.err


def test_counts_agree_with_what_they_count() -> None:
    assert [counted(number, "group") for number in (0, 1, 2)] == ["0 groups", "1 group", "2 groups"]
    assert [counted(number, "batch", "batches") for number in (1, 2)] == ["1 batch", "2 batches"]


def test_a_plan_of_one_of_each_is_in_the_singular(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(
        "[cluster]\nboards = [1]\n[train]\nepochs = 1\nbatch_size = 4000\n"
    )
    said = socflower("plan case.toml --groups 1").out
    assert "1 group, split over" in said and "1 epoch of 1 step," in said
    (tmp_path / "split.toml").write_text(
        "[cluster]\nboards = [1]\n[train]\nepochs = 1\n[strategy]\n"
        "name = 'edge-only'\n[edgecloud]\nlink = 'wifi'\n"
    )
    assert ", 1 epoch of " in socflower("plan split.toml").out


LONGEST = {
    "accuracy": 1.0,
    "virtual_s": 59.94 * 60,
    "energy_j": 999.4e6,
    "num_rounds": 40,
    "round": 20,
    "events": [],
}


def last_line(label: str, width: int, *rounds: int) -> str:
    """Return the last state of a progress bar that was told of these rounds."""
    screen = io.StringIO()
    console = Console(
        file=screen, width=width, force_terminal=True, color_system=None, legacy_windows=False
    )
    with progress(console, disable=False) as start:
        on_round = start(label)
        for number in rounds:
            on_round({**LONGEST, "round": number})
    shown = re.sub(r"\x1b\[\S*?[A-Za-z]", "", screen.getvalue()).replace("\r", "\n")
    *_, last = [line for line in shown.split("\n") if "100.0%" in line]
    assert len(last.rstrip()) <= width and "━" in last
    assert len(re.findall(r"\d:\d\d:\d\d", last)) == 2, last
    return last


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("strategy", [min(STRATEGIES, key=len), max(STRATEGIES, key=len)])
def test_progress_fits_a_terminal_with_all_of_its_times(strategy: str, width: int) -> None:
    """Elapsed and remaining time, name and accuracy; where there is room, virtual time and energy."""
    last = last_line(strategy, width, 20, 40)
    assert "…" not in last and strategy in last
    assert ("virtual" in last) == (width >= 104) and ("59 min 56 s" in last) == (width >= 72), last


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize(
    "label", ["ring, seed 4294967295", "split-replay, sync_interval_epochs 0.25"]
)
def test_a_long_label_is_cut_before_the_times_are(label: str, width: int) -> None:
    """As those of a comparison over seeds, or of a search."""
    assert label[:11] in last_line(label, width, 40)


@pytest.mark.slow
@pytest.mark.usefixtures("on_few_digits")
def test_what_commands_print_without_a_terminal_fits_80_columns(
    socflower: Socflower,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for paths, which are not divided."""
    monkeypatch.setenv("COLUMNS", "80")
    for module in (report, jobs):
        monkeypatch.setattr(module, "write_report", lambda path, *_, **__: path.touch())
    (tmp_path / "case.toml").write_text(
        "# A question that is longer than eighty columns, so that it has to be divided between its words, has it?\n"
        "[cluster]\nboards = [4, 4]\n[train]\nepochs = 1\n[strategy]\ngroups = 'auto'\n"
        "[expect]\nmin_accuracy = 0.1\n"
    )
    for command in (
        "plan case.toml",
        "plan split_against_edge",
        "scenarios",
        "run case.toml --workers 0 --set strategy.name=sgd",
        "compare case.toml --strategies sgd --workers 0",
    ):
        ran = socflower(command)
        assert ran.status == 0, ran.err
        lines = [line.strip() for line in (ran.out + ran.err).splitlines() if len(line) > 80]
        assert all(re.fullmatch(r"\S+", line) or len(line) <= 80 for line in lines), command


@pytest.mark.parametrize("width", range(40, 200, 4))
def test_a_deployment_shows_no_virtual_time(width: int) -> None:
    assert "59 min" not in progress_state({**LONGEST, "wall_s": 1.0}, width)


def test_a_mistake_is_one_line_where_no_terminal_shows_progress(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    (tmp_path / "file").touch()
    for command in ("run case.toml --out file", "compare case.toml --strategies star"):
        is_mistake(socflower(command))
