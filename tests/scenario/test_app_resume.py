"""Interrupted runs of an app folder: typed again they end as if nothing had happened, or say why they cannot."""

import json
import random
import signal
import subprocess
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from socflower.engines.local.exchange_record import ExchangeRecord
from socflower.engines.local.workers import InProcessWorkers
from socflower.errors import ConfigError, TrainingFailed
from socflower.scenario import app_folder, jobs
from socflower.scenario.app_folder import AppRun, run_app_folder
from socflower.wire.saved_state import StateStore
from tests.command_line import Socflower, is_mistake
from tests.engines.deployment.interrupted_runs import COMMAND
from tests.one_line import one_line, refused

PROJECT = """
    [tool.flwr.app]
    publisher = "somebody"
    [tool.flwr.app.components]
    serverapp = "foreign_server:app"
    clientapp = "foreign_client:app"
    [tool.flwr.app.config]
    rounds = 2
    by-hand = false
    clock = false
"""
CLIENT = """
    # Each client moves a vector by momentum, which it keeps in its Context, and by noise of the global generators.
    import random
    import numpy as np
    import torch
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        x = message.content["arrays"]["x"].numpy()
        before = context.state["momentum"]["m"].numpy() if "momentum" in context.state else np.zeros_like(x)
        noise = random.random() + np.random.normal() + torch.randn(()).item()
        m = (0.9 * before + context.node_id - x + noise).astype(np.float32)
        context.state["momentum"] = ArrayRecord({"m": Array(m)})
        return Message(RecordDict({"arrays": ArrayRecord({"x": Array(x + m / 10)}),
                                   "metrics": MetricRecord({"train_loss": float(m[0]), "num-examples": 10})}),
                       reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"eval_loss": random.random(), "num-examples": 1})}),
                       reply_to=message)
"""
SERVER = """
    import random, time
    import numpy as np
    import torch
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config = context.run_config
        start = ArrayRecord({"x": Array(np.full(3, np.random.rand(), np.float32))})
        on_server = lambda number, arrays: MetricRecord({"drawn": torch.rand(()).item() + random.gauss(0, 1)})
        if not config["by-hand"]:
            train_config = ConfigRecord({"now": time.time()}) if config["clock"] else None
            FedAvg(fraction_train=0.67).start(grid, start, config["rounds"], train_config=train_config,
                                              evaluate_fn=on_server)
            return
        for number in range(config["rounds"]):
            messages = [Message(RecordDict({"arrays": start}), node, "train") for node in grid.get_node_ids()]
            ids = list(grid.push_messages(messages))
            random.shuffle(ids)
            replies = [*grid.pull_messages(ids[:1]), *grid.pull_messages(ids[1:]), *grid.pull_messages(["unknown"])]
            start = min(replies, key=lambda reply: reply.content["arrays"]["x"].numpy()[0]).content["arrays"]
"""
NUM_NODES = 3


class Interrupted(KeyboardInterrupt):
    """As by Ctrl-C at some moment."""


@pytest.fixture
def run(tmp_path: Path) -> AppRun:
    folder = tmp_path / "app"
    folder.mkdir()
    for name, text in (
        ("pyproject.toml", PROJECT),
        ("foreign_client.py", CLIENT),
        ("foreign_server.py", SERVER),
    ):
        (folder / name).write_text(textwrap.dedent(text), "utf-8")
    rack = tmp_path / "rack.toml"
    rack.write_text(f"[cluster]\nboards = 1\nsocs_per_board = {NUM_NODES}\n", "utf-8")
    return AppRun(folder=folder, cluster_file=rack, num_workers=0, training_flops=1e8)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty reports, since drawing takes longer than such runs."""
    monkeypatch.setattr(jobs, "write_report", lambda path, *_, **__: path.touch())


class Moments:
    """Interrupts at the n-th moment: before the messages of an exchange are handled, or after it was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interrupt_at: int | None = None
        self.num_passed = 0
        handle, add = InProcessWorkers.run, ExchangeRecord.add

        def handled(*args: Any) -> Any:
            self._passes()
            return handle(*args)

        def added(*args: Any) -> None:
            add(*args)
            self._passes()

        monkeypatch.setattr(InProcessWorkers, "run", handled)
        monkeypatch.setattr(ExchangeRecord, "add", added)

    def _passes(self) -> None:
        self.num_passed += 1
        if self.num_passed == self.interrupt_at:
            raise Interrupted

    def run(
        self,
        run: AppRun,
        out: Path,
        seed: int,
        *,
        interrupt_at: int | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Run with generators of this seed, to the end or until the moment."""
        self.interrupt_at, self.num_passed = interrupt_at, 0
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        return run_app_folder(run, out, **settings)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Moments:
    return Moments(monkeypatch)


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """Return what interruptions leave as it was: everything but wall time and the interruptions."""
    rounds = [
        {key: value for key, value in entry.items() if key != "wall_s"}
        for entry in result["rounds"]
    ]
    return {**result, "rounds": rounds, "wall_s": None, "resumed_from": None}


@pytest.mark.parametrize("by_hand", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_interruption_changes_nothing(
    run: AppRun, tmp_path: Path, moments: Moments, by_hand: bool
) -> None:
    """The resumed process has other generators, and the app draws from all, at the server and at the clients."""
    run = replace(run, overrides=("by-hand=true", "rounds=1") if by_hand else ())
    whole = moments.run(run, tmp_path / "whole", seed=7)
    num_moments = moments.num_passed
    assert num_moments == (4 if by_hand else 8) and whole["resumed_from"] == []
    trace = (tmp_path / "whole" / "trace.json").read_bytes()
    for moment in range(1, num_moments + 1):
        out = tmp_path / f"interrupted {moment}"
        interrupted(run, out, moments, at=moment)
        said: list[str] = []
        resumed = moments.run(run, out, seed=moment, on_notice=said.append)
        recorded = moment // 2
        assert resumed["resumed_from"] == ([recorded] if recorded else [])
        assert len(said) == min(recorded, 1)
        assert all(f"{out} after exchange {recorded} of" in line for line in said)
        assert moments.num_passed == num_moments - 2 * recorded, "no client trains twice"
        if recorded:
            assert outcome(resumed) == outcome(whole), moment
            assert (out / "trace.json").read_bytes() == trace
        assert {path.name for path in out.iterdir()} == {"result.json", "trace.json", "report.html"}


@pytest.mark.slow
def test_two_interruptions_and_a_failure_between_them(
    run: AppRun, tmp_path: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed exchange is tried again, and what succeeded before it is not."""
    out, whole = tmp_path / "out", moments.run(run, tmp_path / "whole", seed=7)
    interrupted(run, out, moments, at=3)
    handle = InProcessWorkers.run

    def all_fail(workers: Any, work: Any, deadline: Any) -> Any:
        return {
            key: (Message(Error(2, "out of memory"), reply_to=work[key][0]), context)
            for key, (_, context) in handle(workers, work, deadline).items()
        }

    with monkeypatch.context() as patch:
        patch.setattr(InProcessWorkers, "run", all_fail)
        with pytest.raises(TrainingFailed, match=r"(?s)out of memory.*exchange.*--fresh"):
            moments.run(run, out, seed=1)
    interrupted(run, out, moments, at=4, seed=2)
    resumed = moments.run(run, out, seed=3)
    assert outcome(resumed)["rounds"][-1]["round"] == 2 and resumed["resumed_from"] == [1, 3]
    assert resumed["events"] == whole["events"] == []


def interrupted(run: AppRun, out: Path, moments: Moments, *, at: int = 6, seed: int = 7) -> None:
    with pytest.raises(Interrupted):
        moments.run(run, out, seed=seed, interrupt_at=at)


@pytest.mark.parametrize(
    "how",
    [
        "flipped",
        "missing",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "empty")),
    ],
)
def test_a_damaged_exchange_is_made_again(
    run: AppRun, tmp_path: Path, moments: Moments, how: str
) -> None:
    out, whole, said = tmp_path / "out", moments.run(run, tmp_path / "whole", seed=7), list[str]()
    interrupted(run, out, moments)
    file = out / "exchanges" / "exchange-000002.messages"
    content = file.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes({"flipped": flipped, "cut": content[:-9], "empty": b""}[how])
    resumed = moments.run(run, out, seed=1, on_notice=said.append)
    assert outcome(resumed) == outcome(whole) and resumed["resumed_from"] == [1]
    if how == "missing":
        assert len(said) == 1
    else:
        _, line = said
        one_line(line, "exchange-000002.messages", "damaged")


def test_without_its_beginning_a_record_is_refused(
    run: AppRun, tmp_path: Path, moments: Moments
) -> None:
    interrupted(run, out := tmp_path / "out", moments)
    (out / "exchanges" / "exchange-000000.messages").write_bytes(b"")
    refused(lambda: moments.run(run, out, seed=7), "exchange-000000.messages", "--fresh")
    assert moments.run(run, out, seed=7, fresh=True)["resumed_from"] == []


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    "changed", ["run_config.rounds", "code.foreign_client.py", "cluster", "training_flops"]
)
def test_another_run_is_refused_and_changes_nothing(
    run: AppRun,
    tmp_path: Path,
    moments: Moments,
    changed: str,
) -> None:
    interrupted(run, out := tmp_path / "out", moments)
    other = run
    if changed == "run_config.rounds":
        other = replace(run, overrides=("rounds=3",))
    elif changed == "training_flops":
        other = replace(run, training_flops=2e8)
    else:
        file = run.cluster_file if changed == "cluster" else run.folder / "foreign_client.py"
        file.write_text(file.read_text("utf-8") + "# changed\n", "utf-8")
    before = {path: path.read_bytes() for path in (out / "exchanges").iterdir()}
    named = ("exchanges is of another run", f"{changed} was", "--out", "--fresh")
    refused(lambda: moments.run(other, out, seed=7), *named)
    assert {path: path.read_bytes() for path in (out / "exchanges").iterdir()} == before


def test_an_app_that_sends_the_time_is_refused(
    run: AppRun, tmp_path: Path, moments: Moments
) -> None:
    run = replace(run, overrides=("clock=true",))
    interrupted(run, out := tmp_path / "out", moments)
    refused(lambda: moments.run(run, out, seed=7), "exchange-000001.messages", "ServerApp")
    assert moments.run(run, out, seed=7, fresh=True)["resumed_from"] == []


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["disk", "size"])
def test_a_full_record_does_not_end_the_run(
    run: AppRun, tmp_path: Path, moments: Moments, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on without a record; an interruption then costs what came after the last saved exchange."""
    whole, said = moments.run(run, tmp_path / "whole", seed=7), list[str]()
    write = StateStore.write

    def full(store: StateStore, number: int, *content: Any) -> None:
        if number > 2:
            raise ConfigError(
                f"{store.path(number)}: cannot be written (No space left on device); make room"
            )
        write(store, number, *content)

    def record(out: Path, inputs: Any, on_notice: Any) -> ExchangeRecord:
        return ExchangeRecord(out / "exchanges", inputs, on_notice=on_notice, most_bytes=20_000)

    with monkeypatch.context() as patch:
        if limit == "disk":
            patch.setattr(StateStore, "write", full)
        else:
            patch.setattr(app_folder, "run_record", record)
        result = moments.run(run, tmp_path / "full", seed=7, on_notice=said.append)
        assert outcome(result) == outcome(whole)
        reason = "No space left on device" if limit == "disk" else "it would have more than 20.0 kB"
        assert len(said) == 1 and reason in said[0] and "resumes after exchange" in said[0]
        interrupted(run, tmp_path / "out", moments, at=8)
    resumed = moments.run(run, tmp_path / "out", seed=7)
    assert outcome(resumed) == outcome(whole) and resumed["resumed_from"] in ([1], [2])


def test_the_command_says_what_is_kept(
    run: AppRun, tmp_path: Path, moments: Moments, socflower: Socflower
) -> None:
    out = tmp_path / "out"
    command = f"run app --cluster rack.toml --out {out}"
    moments.interrupt_at = 3
    ended = socflower(f"{command} --workers 0 --json")
    *_, line = ended.err.splitlines()
    assert ended.status == 130
    one_line(line, "exchange 1", f"{out}/exchanges", "the same command", "--fresh")
    moments.interrupt_at = None
    ended = socflower(f"{command} --workers 0 --json")
    assert ended.status == 0 and f"resuming {out} after exchange 1" in ended.err
    is_mistake(socflower(f"{command} --engine simulation --fresh"), "--fresh", "--engine local")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_app_of_a_template_goes_on_after_kills(tmp_path: Path, socflower: Socflower) -> None:
    """Our own strategy and clients, in worker processes, killed twice at any moment."""
    assert socflower("new", tmp_path / "my_app").status == 0
    app = tmp_path / "my_app"

    def command(out: Path) -> list[str]:
        options = "--workers 2 --set num-epochs=4 --json"
        words = f"run {app} --cluster {app}/cluster.toml --out {out} {options}"
        return [str(COMMAND), *words.split()]

    out, rng = tmp_path / "out", random.Random(5)
    for least in (1, 2):
        process = subprocess.Popen(
            command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not (out / "exchanges" / f"exchange-{least:06d}.messages").exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended = subprocess.run(command(out), capture_output=True, text=True, check=True)
    whole = subprocess.run(command(tmp_path / "whole"), capture_output=True, text=True, check=True)
    resumed, expected = json.loads(ended.stdout), json.loads(whole.stdout)
    assert len(resumed["resumed_from"]) == 2 and f"resuming {out} after exchange" in ended.stderr
    assert outcome(resumed) == outcome(expected)
