"""A model whose buffers are not finite by design, such as a causal mask of -inf, trains under every strategy."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from socflower import (
    FP32Trainer,
    GroupGrid,
    LayeredProgram,
    LocalSchedule,
    OrderedFedAvg,
    SoCFlow,
    SplitReplay,
    TrainingSchedule,
    cut_shapes,
    device,
    make_client_app,
    make_split_client_app,
    profile_module,
    run_app,
    sgd,
    split_costs,
)
from socflower.cluster import parse_cluster
from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import Party
from socflower.workloads.map_dataset import MapDataset
from tests.seeded import built

CLUSTER = {"boards": 2, "socs_per_board": 2, "device": "raspberry-pi-4b"}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.softmax(inputs[:, None] + self.mask, -1)[:, -1])


def samples() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), number % 3) for number in range(16)]


def groups(count: int, **options: Any) -> SoCFlow:
    return SoCFlow(
        cluster=parse_cluster(CLUSTER),
        groups=count,
        schedule=TrainingSchedule(num_samples=16, batch_size=4, num_epochs=2, interval_epochs=1),
        **options,
    )


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: groups(1),
        lambda: groups(2),
        lambda: groups(2, outer=FedAvg(fraction_evaluate=0.0)),
        lambda: FedAvg(fraction_evaluate=0.0, min_available_nodes=4),
        lambda: OrderedFedAvg(schedule=LocalSchedule(num_rounds=2), num_socs=4),
    ],
    ids=["one group", "two groups", "outer", "FedAvg", "OrderedFedAvg"],
)
def test_a_mask_of_minus_infinity_stays_and_the_rest_trains(strategy: Callable[[], Any]) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    model, server, ends = built(Masked, 1), ServerApp(), []
    loader = torch.utils.data.DataLoader(samples())
    client = make_client_app(
        lambda context: built(Masked, 1),
        lambda context, partition, count: loader,
        FP32Trainer(optimizer=sgd(0.1)),
    )
    made = strategy()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        in_groups = isinstance(made, SoCFlow)
        ends.append(
            made.start(
                GroupGrid(grid) if in_groups else grid,
                ArrayRecord(model.state_dict()),
                num_rounds=2,
            )
        )

    run_app(server, client, cluster=parse_cluster(CLUSTER), num_workers=0)
    trained = ends[0].arrays.to_torch_state_dict()
    assert torch.equal(trained["mask"], model.state_dict()["mask"])
    assert not torch.equal(trained["layer.weight"], model.state_dict()["layer.weight"])
    if isinstance(made, SoCFlow):
        assert [event for report in made.reports for event in report.events] == []


@pytest.mark.parametrize("cut", range(2))
def test_a_mask_in_either_half_of_a_divided_model_stays_and_the_rest_trains(cut: int) -> None:
    class TwiceMasked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
            self.register_buffer("front_mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
            self.register_buffer("back_mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            features = torch.softmax(self.first(inputs) + self.front_mask, -1)
            return self.second(torch.softmax(features * 3 + self.back_mask, -1))

    program = LayeredProgram(
        model_fn=lambda: built(TwiceMasked, 1), example=(4,), optimizer=sgd(0.5)
    )
    profile = profile_module(program.model_fn(), (4,), "masked")
    costs = split_costs(
        profile,
        cut_shapes(program.split, profile),
        device("raspberry-pi-4b"),
        device("gpu-v100"),
        4,
    )
    assert len(costs.cuts) == 2
    data = MapDataset(samples())
    strategy = SplitReplay(
        cluster=parse_cluster({"boards": 1, "socs_per_board": 1, "device": "raspberry-pi-4b"}),
        parties=[
            Party(
                costs=costs,
                bandwidth_profile=constant(1e6, 1e6),
                split_plan=SplitPlan(cut=cut, window=1),
            )
        ],
        edge_names=program.edge_names,
        fingerprint=program.fingerprint(),
        batches_per_epoch=4,
        num_epochs=2,
    )
    server, ends, model = ServerApp(), [], program.model_fn()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        ends.append(
            strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=strategy.num_rounds)
        )

    run_app(
        server,
        make_split_client_app(lambda context: program, lambda context, party, count: data),
        cluster=parse_cluster(CLUSTER),
        num_workers=0,
    )
    trained, before = ends[0].arrays.to_torch_state_dict(), model.state_dict()
    assert all(torch.equal(trained[name], before[name]) for name in ("front_mask", "back_mask"))
    assert not torch.equal(trained["first.weight"], before["first.weight"])
    assert not torch.equal(trained["second.weight"], before["second.weight"])
