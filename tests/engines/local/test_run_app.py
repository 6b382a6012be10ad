"""The local engine as one call: an ordinary Flower app from its folder, and what is wrong with a folder."""

import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, SimpleClientManager
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy

from socflower.cluster import parse_cluster
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.run_app import load_flower_app, run_app
from socflower.engines.local.workers import AppReference
from socflower.errors import TrainingFailed
from socflower.flower_adapter import quiet_flower
from socflower.sim import EventClock
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from tests.engines.foreign_apps import ZERO, client_app
from tests.engines.local import apps_for_tests
from tests.one_line import refused

QUICKSTART = Path(__file__).parents[3] / "scenarios" / "quickstart_app"
CLUSTER = parse_cluster({"boards": 2, "socs_per_board": 4})
COMPONENTS = '[tool.flwr.app.components]\nserverapp = "a:app"\nclientapp = "b:app"\n'


@pytest.fixture
def modules_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An app's folder goes on the import path; here it must not stay there."""
    path, names = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - names:
        if name.partition(".")[0] == "quickstart":
            del sys.modules[name]


def test_the_quickstart_app_runs_unchanged_in_virtual_time(
    modules_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    app = load_flower_app(QUICKSTART)
    assert app.run_config == {
        "num-groups": 4,
        "num-epochs": 3,
        "batch-size": 16,
        "learning-rate": 0.02,
    }
    clock = run_app(
        app.server_app,
        app.client_app,
        cluster=CLUSTER,
        num_workers=0,
        run_config=app.run_config | {"num-epochs": 1},
    )
    assert clock.now_s > 0.0
    # Four groups synchronise four times in an epoch: their leaders in a ring, which uploads LeNet-5 once.
    assert clock.usage.num_bytes["hub"] == 4 * 4 * 61_706
    accuracies = [
        float(line.split()[-1])
        for line in capsys.readouterr().out.splitlines()
        if "accuracy" in line
    ]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.5 > accuracies[0]


def test_the_server_app_gets_the_run_config_and_a_node_for_each_soc() -> None:
    seen: list[object] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        seen.extend(
            [
                len(list(grid.get_node_ids())),
                dict(context.run_config),
                grid.run.run_id == context.run_id,
            ]
        )

    clock = EventClock(CLUSTER)
    assert (
        run_app(
            app,
            apps_for_tests.app,
            cluster=CLUSTER,
            num_workers=0,
            run_config={"a": 1},
            clock=clock,
        )
        is clock
    )
    assert seen == [8, {"a": 1}, True]
    seen.clear()
    run_app(app, apps_for_tests.app, cluster=CLUSTER, num_workers=0, num_nodes=3)
    assert seen == [3, {}, True]


def test_what_the_server_app_raises_is_raised() -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        raise LookupError("in the server")

    with pytest.raises(LookupError, match="in the server"):
        run_app(app, apps_for_tests.app, cluster=CLUSTER, num_workers=0)


@pytest.mark.parametrize("ask", [False, True])
def test_a_server_app_that_exits_with_0_has_ended_and_with_another_status_has_failed(
    ask: bool,
) -> None:
    """Whether the run succeeded is judged by its messages either way."""

    def run(code: object, client: ClientApp) -> MessageLog:
        app, messages = ServerApp(), MessageLog()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            if ask:
                config = RecordDict({"config": ConfigRecord()})
                grid.send_and_receive(
                    [Message(config, node, "train") for node in grid.get_node_ids()]
                )
            sys.exit(code)

        run_app(app, client, cluster=CLUSTER, num_workers=0, messages=messages)
        return messages

    for code in (0, None, False):
        assert [event.kind for event in run(code, apps_for_tests.app).events] == (
            [] if ask else ["no-message"]
        )
    for code in (1, 3, "no data", ""):
        with pytest.raises(
            TrainingFailed, match=re.escape(f"the ServerApp ended with sys.exit({code!r})")
        ):
            run(code, apps_for_tests.app)
    if ask:
        refused(lambda: run(0, ClientApp()), "No train function", error=TrainingFailed)
        refused(lambda: run(3, ClientApp()), "ServerApp", "SystemExit", error=TrainingFailed)


def test_a_server_app_that_is_none_is_named() -> None:
    refused(
        lambda: run_app(
            AppReference(target=f"{apps_for_tests.__name__}:not_an_app"),
            apps_for_tests.app,
            cluster=CLUSTER,
        ),
        "ServerApp",
    )
    refused(
        lambda: run_app(
            AppReference(target="no_such_module:app"), apps_for_tests.app, cluster=CLUSTER
        ),
        "no_such_module:app",
    )


def test_nested_run_config_has_dotted_keys(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        COMPONENTS + "[tool.flwr.app.config]\na = 1\n[tool.flwr.app.config.b]\n"
        "c = 'x'\nd.e = true\n"
    )
    app = load_flower_app(tmp_path)
    assert app.run_config == {"a": 1, "b.c": "x", "b.d.e": True}
    assert app.server_app == AppReference(target="a:app", folder=tmp_path.resolve())
    assert app.client_app.target == "b:app"


def test_an_app_without_a_run_config_has_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(COMPONENTS)
    assert load_flower_app(tmp_path).run_config == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read (No such file or directory); check the path"),
        (b"[tool", "not valid TOML"),
        (b"# caf\xe9", "is not UTF-8 text"),
        (b"[project]\nname = 'x'", "lacks 'tool' of [tool.flwr.app.components]"),
        (b"[tool.flwr.app]\npublisher = 'x'", "lacks 'components'"),
        (b"[tool.flwr.app.components]\nserverapp = 'a:app'", "lacks 'clientapp'"),
        (b"[tool.flwr]\napp = 3", "must be a table"),
        (b"[tool.flwr.app]\ncomponents = 'a:app'", "must be a table"),
    ],
)
def test_a_folder_that_is_no_app_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "pyproject.toml").write_bytes(content)
    refused(lambda: load_flower_app(tmp_path), says, str(tmp_path))


def test_flowers_log_can_be_quietened() -> None:
    logger, stream = logging.getLogger("flwr"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        quiet_flower()
        logger.info("below errors")
        logger.error("an error")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "an error\n"


def socflow() -> SoCFlow:
    return SoCFlow(
        cluster=CLUSTER,
        groups=2,
        schedule=TrainingSchedule(num_samples=64, batch_size=8, num_epochs=1),
    )


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (socflow, "SoCFlow"),
        (FedAvg, "FedAvg"),
        (
            lambda: DifferentialPrivacyServerSideFixedClipping(socflow(), 1.0, 1.0, 2),
            "DifferentialPrivacyServerSideFixedClipping",
        ),
    ],
)
def test_a_strategy_of_the_message_api_among_server_components_is_told_where_it_starts(
    strategy: Callable[[], Any], name: str
) -> None:
    app = ServerApp(server_fn=lambda context: ServerAppComponents(strategy=strategy()))
    refused(
        lambda: run_app(app, ClientApp(), cluster=CLUSTER, num_workers=0),
        name,
        "ServerAppComponents",
        "@app.main",
        "GroupGrid",
    )
    # Flower's own runtimes, too.
    if name == "SoCFlow":
        refused(
            lambda: socflow().initialize_parameters(SimpleClientManager()),
            "SoCFlow",
            "ServerAppComponents",
        )


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (FedAvg(min_available_nodes=9), "min_available_nodes"),
        (FedAvg(min_train_nodes=10, min_available_nodes=3), "min_train_nodes"),
        (FedAvg(min_evaluate_nodes=9), "min_evaluate_nodes"),
        (
            DifferentialPrivacyServerSideFixedClipping(FedAvg(min_available_nodes=20), 1.0, 1.0, 8),
            "waits for 20 nodes",
        ),
    ],
)
def test_a_strategy_that_would_wait_for_nodes_without_end_is_refused(
    strategy: Strategy, says: str
) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, ZERO, num_rounds=1)

    refused(lambda: run_app(app, client_app({}), cluster=CLUSTER, num_workers=0), says)


def test_as_many_nodes_as_there_are_may_be_asked_for() -> None:
    app, rounds = ServerApp(), []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            min_train_nodes=8, min_available_nodes=8, min_evaluate_nodes=99, fraction_evaluate=0.0
        )
        rounds.append(list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)))
        strategy.start(grid, ArrayRecord(), num_rounds=0)

    run_app(app, apps_for_tests.app, cluster=CLUSTER, num_workers=0)
    assert len(rounds[0]) == 8
