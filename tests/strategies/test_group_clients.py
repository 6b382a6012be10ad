"""ClientApps that know nothing of groups are refused before any of them trains."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import nn
from torch.utils.data import TensorDataset

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.errors import ConfigError
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow

CLUSTER = parse_cluster({"boards": 2, "socs_per_board": 2})
trained: list[str] = []


class Numbers(NumPyClient):
    def fit(self, parameters: Any, config: Any) -> Any:
        trained.append("fit")
        return parameters, 1, {}


def of_messages() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append("train")
        return Message(
            RecordDict(
                {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
            ),
            reply_to=message,
        )

    return app


def data(context: Context, partition: int, num_partitions: int) -> TensorDataset:
    raise AssertionError("nothing is read before the first round")


class WithoutProbe(ForwardingGrid):
    """A grid whose nodes are asked by messages, as in Flower's simulation."""

    in_one_process = False
    probe = None


@pytest.mark.parametrize("grid_of", [GroupGrid, WithoutProbe])
@pytest.mark.parametrize(
    "make", [of_messages, lambda: ClientApp(lambda context: Numbers().to_client()), ClientApp]
)
def test_a_client_app_without_groups_is_refused_before_round_1(
    make: Callable[[], ClientApp],
    grid_of: Callable[[Grid], Grid],
) -> None:
    trained.clear()
    strategy = SoCFlow(
        cluster=CLUSTER,
        groups=2,
        schedule=TrainingSchedule(num_samples=8, batch_size=2, num_epochs=1),
    )
    with LocalGrid(make(), 4, num_workers=0) as grid, pytest.raises(ConfigError) as caught:
        strategy.start(
            grid_of(grid),
            ArrayRecord({"x": Array(np.zeros(2, np.float32))}),
            num_rounds=strategy.num_rounds,
        )
    assert str(caught.value).startswith(
        "SoCFlow: the ClientApp of node 1000 trains on its own and not in groups; "
    )
    assert trained == []


def test_a_probe_leaves_no_state_and_asks_nothing_of_the_users_functions() -> None:
    def trainer(context: Context) -> Any:
        raise AssertionError("not asked for")

    app = make_client_app(lambda context: nn.Linear(2, 2), data, trainer)
    strategy = SoCFlow(
        cluster=CLUSTER,
        groups=2,
        schedule=TrainingSchedule(num_samples=8, batch_size=2, num_epochs=1),
    )
    with LocalGrid(app, 4, num_workers=0) as grid:
        strategy.method.planner.plan_round(grid, None)
        strategy.method.planner.registry.require_group_clients(grid)
        assert all(not context.state for context in grid._contexts.values())
