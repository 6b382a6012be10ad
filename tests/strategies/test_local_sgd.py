"""Local SGD and DiLoCo: the outer step against torch's SGD with Nesterov momentum, how models meet, what is refused."""

import copy
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp.strategy import FedAdam
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from socflower.clients.app import make_client_app
from socflower.clients.node_training import SourceFn
from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import _end_with_parent as end_with_parent
from socflower.engines.local.workers import _start_method as start_method
from socflower.errors import ConfigError
from socflower.hierarchy import Quorum
from socflower.hierarchy.exchange.models import TREE
from socflower.precision.processor_costs import MixedPricing
from socflower.scenario.planning import plan_scenario
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import DataConfig
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.outer import OuterConfig
from socflower.scenario.workload import partitions, scenario_data
from socflower.strategies.baselines import TreeFedAvg
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.local_sgd import DiLoCo, PostLocalSGD, StreamingDiLoCo
from socflower.strategies.outer_momentum import (
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    OuterSGD,
    nesterov,
)
from socflower.strategies.settings import (
    Costs,
    ExchangeSettings,
    Grouping,
    LeaderCompression,
    Streaming,
    TrainingSchedule,
)
from socflower.strategies.socflow import SoCFlow
from socflower.training.exchange.compression import to_four_bits
from socflower.training.fp32 import (
    FP32Trainer,
    OptimizerFn,
    SchedulerFn,
    sgd,
)
from socflower.training.schedules import cosine_annealing
from socflower.workloads.dataset import LabelledData
from tests.few_digits import few_digits
from tests.one_line import refused
from tests.peers.peers import START_S
from tests.process_grid import ProcessGrid
from tests.scenario.small_runs import BOARDS, small, small_result
from tests.strategies import ring_app
from tests.strategies.fake_messages import FakeGrid, answer, model, values

NUM_ROUNDS = 4


def diloco(**settings: Any) -> DiLoCo:
    cluster = parse_cluster({"boards": 2, "socs_per_board": 2})
    schedule = TrainingSchedule(
        num_samples=32, batch_size=4, num_epochs=NUM_ROUNDS, interval_epochs=1
    )
    return DiLoCo(**{"cluster": cluster, "schedule": schedule, **settings})


def train(strategy: DiLoCo, first: int, last: int, arrays: ArrayRecord) -> list[list[float]]:
    """Return the model after each round; each SoC answers with the model it got plus its place."""
    made = []
    for server_round in range(first, last + 1):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord({}), FakeGrid())
        replies = [answer(each, values(arrays)[0] + k) for k, each in enumerate(messages)]
        merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        arrays = merged
        made.append(values(arrays))
    return made


def test_the_outer_step_is_torchs_nesterov_step_on_the_mean_change() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    step = torch.optim.SGD([weight], lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    expected = []
    for _ in range(NUM_ROUNDS):
        # The mean of changes 0, 1, 2, 3, as a gradient.
        weight.grad = torch.full((3,), -1.5)
        step.step()
        expected.append(weight.tolist())
    np.testing.assert_allclose(train(diloco(), 1, NUM_ROUNDS, model()), expected, rtol=1e-5)


def test_each_soc_is_a_group_unless_groups_are_given_and_leaders_may_meet() -> None:
    strategy = diloco(exchange=ExchangeSettings(leaders=TREE))
    assert [group.members for group in strategy.plan.groups] == [(0,), (1,), (2,), (3,)]
    assert strategy.method.describe().exchanges.leaders.kind == TREE
    assert len(diloco(groups=Grouping(num_groups=3, num_socs=3)).plan.groups) == 3
    assert [group.members for group in diloco(groups=2).plan.groups] == [(0, 1), (2, 3)]


def test_a_resumed_training_has_the_moments() -> None:
    whole, begun, resumed = (diloco() for _ in range(3))
    expected = train(whole, 1, NUM_ROUNDS, model())
    halfway = train(begun, 1, 2, model())
    resumed.resume_from(2, **begun.state)
    assert train(resumed, 3, NUM_ROUNDS, model(halfway[-1][0])) == expected[2:]


def test_a_state_has_the_moments_alone() -> None:
    strategy = diloco()
    train(strategy, 1, 1, model())
    assert {key.partition("/")[0] for key in strategy.state["outer"]} == {"moments"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"outer": object()}, "outer"),
        ({"average": max}, "average"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], named: str) -> None:
    refused(lambda: diloco(**settings), named, error=ConfigError)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"momentum": 1}, "momentum"),
        ({"momentum": float("nan")}, "momentum"),
    ],
)
def test_a_step_that_cannot_be_is_refused(settings: dict[str, Any], named: str) -> None:
    for make in (OuterSGD, nesterov):
        refused(lambda make=make: make(**settings), named)  # type: ignore[misc]


RUN: dict[str, Any] = {"groups": "auto", "epochs": 2, "interval": 1.0}


@pytest.mark.parametrize("name", ["local-sgd", "diloco", "muloco"])
def test_a_scenario_is_planned_as_it_runs(name: str) -> None:
    ran = small_result(name, **RUN)
    with few_digits():
        planned = plan_scenario(small(name, **RUN))
    assert planned["leaders"] == ran["plan"]["leaders"]
    assert len(planned["groups"]) == len(ran["plan"]["groups"]) == sum(BOARDS)
    predicted = planned["predicted"]["epoch_s"] * 2
    assert ran["virtual_s"] == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_the_presets_are_what_they_are_made_of() -> None:
    """Local SGD is groups of one, DiLoCo local SGD with AdamW and an outer step, a whole step is none."""
    weights = {
        name: small_result(name, **RUN)["weights_sha256"] for name in ("local-sgd", "diloco")
    }
    assert weights["local-sgd"] == small_result(**{**RUN, "groups": 4})["weights_sha256"]
    whole = OuterConfig(name="sgd", arguments={"learning_rate": 1.0})
    stepped = small("local-sgd", **RUN, outer=whole)
    adamw = small("local-sgd", **RUN, outer=OuterConfig(name="nesterov"))
    adamw = adamw.replaced(train=adamw.train.replaced(optimizer="adamw"))
    with few_digits():
        assert run_scenario(stepped, num_workers=0)["weights_sha256"] == weights["local-sgd"]
        assert run_scenario(adamw, num_workers=0)["weights_sha256"] == weights["diloco"]


def test_a_comparison_trains_each_method_as_published() -> None:
    scenario = small(compression="int8", outer=OuterConfig(name="fedadam"))
    scenario = scenario.replaced(train=scenario.train.replaced(optimizer="sgd", momentum=0.5))
    other = scenario.under("muloco")
    assert (other.optimizer, other.momentum, other.strategy.groups) == ("muon", 0.0, "auto")
    assert other.strategy.compression == "none" and other.strategy.outer_step == OuterConfig(
        name="nesterov"
    )
    assert scenario.under("local-sgd").momentum == 0.5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[train]\noptimizer = "adamw"\n[strategy]\nname = "muloco"', "'diloco'"),
        ('[train]\nmomentum = 0.9\n[strategy]\nname = "diloco"', "'adamw'"),
        ('[strategy]\nname = "diloco"\n[strategy.outer]\nname = "momentum"', "momentum"),
        (
            '[strategy]\nname = "diloco"\n[strategy.streaming]\nfragments = 2',
            "[strategy.streaming]",
        ),
        ('[strategy]\nname = "streaming-diloco"', "sync_interval_epochs = 'decay'"),
        ('[strategy]\nname = "tree-fedavg"\nleaders = "star"', "leaders = 'star'"),
        ('[strategy]\nname = "tree-fedavg"\ngroups = 2', "groups = 2"),
        ('[strategy]\nname = "local-sgd"\npost_local_epochs = 2', "post_local_epochs = 2"),
        ('[strategy]\nname = "post-local-sgd"\nquorum = 0.5', "quorum = 0.5"),
        ('[strategy]\nname = "post-local-sgd"\npost_local_epochs = 10', "post_local_epochs = 10"),
        ('[strategy]\nname = "post-local-sgd"\ncompression = "int8"', "compression = 'int8'"),
        ('[strategy]\nname = "tree-fedavg"\nserver_interval = 2', "does not read it"),
        (
            '[strategy]\nname = "streaming-diloco"\nsync_interval_epochs = 1\nserver_interval = 2',
            "does not read it",
        ),
        ('[strategy]\nname = "post-local-sgd"\nserver_interval = 2', "does not read it"),
        ('[strategy.outer]\nname = "sgd"\narguments.momentum = 0.9', "'momentum' (value 0.9)"),
        ('[strategy]\nname = "ring"\n[strategy.outer]\nname = "sgd"', "one group"),
    ],
)
def test_settings_that_a_method_does_not_read_are_refused(
    text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text(text)
    refused(lambda: load_scenario(tmp_path / "case.toml"), named)


# ------------------------------------------------------------------------------------------- against workers of torch
MOMENTUM = sgd(0.05, 0.9)


def made(kind: type[SoCFlow], **changes: Any) -> Any:
    settings = {"kind": kind, "reshuffle": False, "num_epochs": 4, "interval_epochs": 0.5}
    return ring_app.strategy(ring_app.cluster(), 4, **{**settings, **changes})


def run_in_process(
    strategy: Any,
    rounds: int | None = None,
    arrays: ArrayRecord | None = None,
    optimizer: OptimizerFn = MOMENTUM,
    scheduler: SchedulerFn | None = cosine_annealing,
    folder: Path | None = None,
    part: SourceFn = ring_app.part,
) -> ArrayRecord:
    app = make_client_app(
        lambda context: ring_app.network(),
        part,
        FP32Trainer(optimizer=optimizer, scheduler=scheduler),
        state_folder=lambda context: folder,
    )
    with LocalGrid(app, 4, num_workers=0) as grid:
        result = strategy.start(
            GroupGrid(grid),
            arrays or ring_app.initial(),
            num_rounds=rounds or strategy.num_rounds,
            timeout=120,
        )
    assert [report.events for report in strategy.reports] == [()] * len(strategy.reports)
    return cast(ArrayRecord, result.arrays)


class Workers:
    """Four workers of torch, each on its part of the data, in the batches of `BatchSchedule`."""

    steps_per_epoch = 5

    def __init__(
        self, optimizer: OptimizerFn = MOMENTUM, scheduler: SchedulerFn | None = None
    ) -> None:
        self.parts = [ring_app.part(Context, k, 4) for k in range(4)]  # type: ignore[arg-type]
        self.models = [ring_app.network() for _ in self.parts]
        self.steps = [optimizer(own.parameters()) for own in self.models]
        self.rates = [scheduler(step, 20) for step in self.steps] if scheduler else []

    def backward(self, number: int, only: int | None = None) -> None:
        epoch, within = divmod(number, self.steps_per_epoch)
        for k, (worker, part) in enumerate(zip(self.models, self.parts, strict=True)):
            if only not in (None, k):
                continue
            order = np.random.default_rng([4, epoch, k]).permutation(len(part))
            own = torch.from_numpy(np.array_split(order, self.steps_per_epoch)[within])
            inputs, labels = part.batch(own)
            worker.zero_grad()
            cross_entropy(worker(inputs), labels).backward()

    def step(self) -> None:
        for each in (*self.steps, *self.rates):
            each.step()

    def values(self, gradients: bool = False) -> list[list[torch.Tensor]]:
        """Return each worker's parameters, or gradients."""
        return [
            [cast(torch.Tensor, one.grad) if gradients else one.data for one in own.parameters()]
            for own in self.models
        ]


def average(values: list[list[torch.Tensor]]) -> None:
    for alike in zip(*values, strict=True):
        mean = torch.stack(alike).mean(0)
        for each in alike:
            each.copy_(mean)


def assert_weights(ours: ArrayRecord, worker: torch.nn.Module, atol: float = 1e-6) -> None:
    for name, tensor in worker.state_dict().items():
        np.testing.assert_allclose(ours[name].numpy(), tensor.numpy(), rtol=1e-4, atol=atol)


def test_post_local_sgd_is_torchs_hook_and_its_periodic_averager() -> None:
    """`post_localSGD_hook` averages gradients up to the switch, then `PeriodicModelAverager` models, every H steps.

    At the switch every worker has the momentum of the synchronous steps; none is exchanged after it.
    """
    workers, ends = Workers(scheduler=cosine_annealing), {12, 14, 17, 19}
    for number in range(20):
        workers.backward(number)
        if number < 10:
            average(workers.values(gradients=True))
        workers.step()
        if number in ends:
            average(workers.values())
    strategy = made(PostLocalSGD, synchronous_epochs=2)
    assert [each.first_step + each.num_steps - 1 for each in strategy.method.sync.intervals][-4:] == [
        12, 14, 17, 19,
    ]  # fmt: skip
    assert_weights(run_in_process(strategy), workers.models[0])


def by_torchs_hook(pipe: Connection, rank: int, file: str) -> None:
    """Be one of four processes of `DistributedDataParallel` with the hook; send the weights after 20 steps."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    # A group of one: after the switch no gradient leaves its process.
    alone = [dist.new_group([each]) for each in range(4)][rank]
    workers = Workers(scheduler=cosine_annealing)
    workers.models[rank] = cast(Any, DistributedDataParallel(workers.models[rank]))
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=10)
    workers.models[rank].register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=5, warmup_steps=14)
    for number in range(20):
        workers.backward(number, only=rank)
        workers.steps[rank].step()
        workers.rates[rank].step()
        averager.average_parameters(workers.models[rank].parameters())
    weights = workers.models[rank].module.state_dict()
    pipe.send({name: tensor.tolist() for name, tensor in weights.items()})
    dist.destroy_process_group()


@pytest.mark.slow
def test_post_local_sgd_has_the_weights_of_torchs_own_processes(tmp_path: Path) -> None:
    context = start_method()
    pipes = [context.Pipe() for _ in range(4)]
    processes = [
        context.Process(target=by_torchs_hook, args=(there, rank, str(tmp_path / "meet")))
        for rank, (_, there) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        assert all(here.poll(START_S) for here, _ in pipes), "a process does not end"
        found = [here.recv() for here, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    ours = run_in_process(made(PostLocalSGD, synchronous_epochs=2, interval_epochs=1.0))
    for weights in found:
        for name, expected in weights.items():
            np.testing.assert_allclose(ours[name].numpy(), np.array(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("done", [3, 4, 5])
def test_a_post_local_training_continues_before_at_and_after_the_switch(
    done: int, tmp_path: Path
) -> None:
    whole, begun, resumed = (made(PostLocalSGD, synchronous_epochs=2) for _ in range(3))
    halfway = run_in_process(begun, done, folder=tmp_path)
    resumed.resume_from(done, **begun.state)
    ours = run_in_process(resumed, None, halfway, folder=tmp_path)
    reference = run_in_process(whole)
    assert {name: each.data for name, each in ours.items()} == {
        name: each.data for name, each in reference.items()
    }


@pytest.mark.slow
def test_post_local_sgd_is_planned_as_it_runs_and_priced_as_its_phases() -> None:
    run = {**RUN, "epochs": 3, "post_local_epochs": 1}
    ran = small_result("post-local-sgd", **run)
    with few_digits():
        planned = plan_scenario(small("post-local-sgd", **run))
    assert ran["virtual_s"] == pytest.approx(3 * planned["predicted"]["epoch_s"], rel=0.02)
    alone = small_result("local-sgd", **{**RUN, "epochs": 3})
    ring = small_result("ring", epochs=1, interval=1.0, batch_size=128)
    assert ran["rounds"][1]["virtual_s"] == pytest.approx(ring["rounds"][1]["virtual_s"], rel=1e-6)
    assert ran["rounds"][1]["virtual_s"] > 1.5 * alone["rounds"][1]["virtual_s"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_members_of_a_ring_keep_their_own_optimiser_at_the_switch(tmp_path: Path) -> None:
    settings = {
        "synchronous_epochs": 2,
        "kind": PostLocalSGD,
        "num_epochs": 4,
        "interval_epochs": 0.5,
    }
    results = []
    for real in (False, True):
        strategy = ring_app.strategy(ring_app.cluster(), 4, **settings)
        nodes = ring_app.node_configs(ring_app.cluster())
        app, config = ring_app.client_app, {"member-passes": "ring"}
        with (
            ProcessGrid(app, nodes, run_config=config)
            if real
            else LocalGrid(app(), 4, run_config=config, num_workers=0) as grid
        ):
            results.append(
                strategy.start(
                    GroupGrid(grid), ring_app.initial(), strategy.num_rounds, timeout=120
                )
            )
        assert [report.events for report in strategy.reports] == [()] * strategy.num_rounds
    for name in results[0].arrays:
        np.testing.assert_allclose(
            results[1].arrays[name].numpy(), results[0].arrays[name].numpy(), atol=1e-5
        )


# ------------------------------------------------------------------------------------------- T-FedAvg
ENDS = (20, 80, 180, 320)


def unequal(context: Any, partition: int, num_partitions: int) -> LabelledData:
    return ring_app.samples().select(torch.arange((0, *ENDS)[partition], ENDS[partition]))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_tree_fedavg_is_fedavg_of_each_socs_own_epochs() -> None:
    """Each SoC passes twice over its own 20 to 140 samples with a new optimiser; the mean is by samples."""
    reference, optimizer = ring_app.network(), sgd(0.05, 0.9)
    for server_round in range(2):
        states, sizes = [], []
        for k in range(4):
            own, data = copy.deepcopy(reference), unequal(None, k, 4)
            step, num_steps = optimizer(own.parameters()), -(-len(data) // 16)
            rate = cosine_annealing(step, 4 * num_steps)
            for _ in range(2 * server_round * num_steps):
                rate.step()
            for epoch in (2 * server_round, 2 * server_round + 1):
                order = np.random.default_rng([4, epoch, k]).permutation(len(data))
                for indices in np.array_split(order, num_steps):
                    inputs, labels = data.batch(torch.from_numpy(indices))
                    own.zero_grad()
                    cross_entropy(own(inputs), labels).backward()
                    step.step()
                    rate.step()
            states.append(own.state_dict())
            sizes.append(len(data))
        reference.load_state_dict(
            {
                name: sum(
                    n / sum(sizes) * each[name] for n, each in zip(sizes, states, strict=True)
                )
                for name in states[0]
            }
        )
    strategy = made(TreeFedAvg, local_epochs=2)
    assert strategy.num_rounds == 2 and strategy.method.describe().exchanges.leaders.kind == TREE
    assert_weights(run_in_process(strategy, part=unequal), reference)


@pytest.mark.slow
def test_unequal_parts_are_priced_by_what_each_soc_trains() -> None:
    run = {**RUN, "boards": (2,)}
    even = small_result("tree-fedavg", **run)
    with few_digits():
        planned = plan_scenario(small("tree-fedavg", **run))
        skewed = small("tree-fedavg", **run)
        skewed = skewed.replaced(data=DataConfig(partition="dirichlet", alpha=0.1), seed=2)
        sizes = [len(each) for each in partitions(skewed, scenario_data(skewed).train, 2)]
        uneven = run_scenario(skewed, num_workers=0)
    assert even["virtual_s"] == pytest.approx(2 * planned["predicted"]["epoch_s"], rel=0.02)
    assert planned["leaders"] == even["plan"]["leaders"] == TREE
    ratio = uneven["virtual_s"] / even["virtual_s"]
    assert ratio == pytest.approx(max(sizes) / 500, rel=0.15)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"exchange": ExchangeSettings(leaders="ring")}, "leaders = 'ring'"),
        ({"local_epochs": 3}, "local_epochs = 3"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"groups": 2}, "groups"),
        ({"quorum": Quorum(fraction=0.5)}, "quorum"),
        ({"costs": Costs(pricing=MixedPricing(rule="paper"))}, "alpha"),
    ],
)
def test_what_tree_fedavg_cannot_do_is_refused(settings: dict[str, Any], named: str) -> None:
    cluster = parse_cluster({"boards": 2, "socs_per_board": 2})
    schedule = TrainingSchedule(num_samples=32, batch_size=4, num_epochs=4)
    refused(lambda: TreeFedAvg(cluster=cluster, schedule=schedule, **settings), named)


# ------------------------------------------------------------------------------------------- Streaming DiLoCo
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


def streaming(**changes: Any) -> Any:
    own = {
        key: changes.pop(key) for key in ("fragments", "delay_steps", "mixing") if key in changes
    }
    return made(StreamingDiLoCo, streaming=Streaming(**own), **{"interval_epochs": 1.0, **changes})


def bits(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: each.data for name, each in arrays.items()}


def test_one_fragment_without_delay_is_diloco() -> None:
    strategies = (streaming(fragments=1, delay_steps=0), made(DiLoCo, interval_epochs=1.0))
    ours, reference = (run_in_process(each, optimizer=ADAMW) for each in strategies)
    assert bits(ours) == bits(reference)


class FourBits:
    """The mean of four workers' tensors as four-bit changes of a common one give it, with an error for each worker."""

    def __init__(self) -> None:
        self._unsent = [torch.zeros(0)] * 4

    def mean(self, common: list[torch.Tensor], models: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return the mean in one row."""
        row = torch.cat([each.flatten() for each in common])
        total = torch.zeros_like(row)
        for k, tensors in enumerate(models):
            change = (torch.cat([each.flatten() for each in tensors]) - row) / 4
            if self._unsent[k].numel():
                change = change + self._unsent[k]
            self._unsent[k] = to_four_bits(change)[1]
            total += change - self._unsent[k]
        return row + total


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "compression"),
    [(3, 1, 0.4, "none"), (3, 0, 0.4, "none"), (1, 0, 0.0, "none"), (3, 1, 0.4, "int4")],
)
def test_streaming_diloco_is_its_papers_algorithm_and_with_one_fragment_diloco(
    fragments: int, delay: int, alpha: float, compression: LeaderCompression
) -> None:
    """Fragments of strided layers, each every five steps: the outer step of one comes late, and is mixed in."""
    codings = [FourBits() for _ in range(fragments)]
    lr, mu = 0.7, 0.9
    workers = Workers(ADAMW)
    names = [name for name, _ in workers.models[0].named_parameters()]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    outer = {name: value.clone() for name, value in workers.models[0].state_dict().items()}
    moments = {name: torch.zeros_like(value) for name, value in outer.items()}
    due: dict[int, list[str]] = {}
    exchange = ExchangeSettings(leader_compression=compression)
    strategy = streaming(
        fragments=fragments, delay_steps=delay, mixing=alpha, exchange=exchange, reshuffle=False
    )
    ends = [each.first_step + each.num_steps for each in strategy.method.sync.intervals]
    for number in range(20):
        for worker in workers.models:
            for name in due.get(number, ()):
                own = dict(worker.named_parameters())[name].data
                own.mul_(alpha).add_(outer[name], alpha=1 - alpha)
        workers.backward(number)
        workers.step()
        if number + 1 in ends:
            place = ends.index(number + 1) % fragments
            parts = [
                name for name in names if layers.index(name.rpartition(".")[0]) % fragments == place
            ]
            due[number + 1 + delay] = parts
            models = [[each.state_dict()[name] for name in parts] for each in workers.models]
            means = [torch.stack(alike).mean(0) for alike in zip(*models, strict=True)]
            if compression != "none":
                common = [outer[name] for name in parts]
                row = codings[place].mean(common, models)
                means = list(row.split([each.numel() for each in common]))
            for name, mean in zip(parts, means, strict=True):
                gradient = outer[name] - mean.view_as(outer[name])
                moments[name] = mu * moments[name] + gradient
                outer[name] = outer[name] - lr * (gradient + mu * moments[name])
    ours = run_in_process(strategy, optimizer=ADAMW, scheduler=None)
    for name, value in outer.items():
        np.testing.assert_allclose(ours[name].numpy(), value.numpy(), rtol=1e-3, atol=1e-5)


class LockStep:
    """What torchft's DiLoCo asks of its manager, for replicas in threads that average what they send."""

    _use_async_quorum = False
    start_quorum = allow_state_dict_read = disallow_state_dict_read = lambda self: None

    def __init__(self, rank: int, rows: dict[int, torch.Tensor], barrier: Barrier) -> None:
        self._rank, self._rows, self._barrier, self._step = rank, rows, barrier, 0

    def register_state_dict_fn(self, *_: object) -> None:
        return

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def allreduce(self, values: torch.Tensor, should_quantize: bool) -> SimpleNamespace:
        self._rows[self._rank] = values.clone()
        self._barrier.wait()
        values.copy_(torch.stack([self._rows[rank] for rank in sorted(self._rows)]).mean(0))
        self._barrier.wait()
        return SimpleNamespace(wait=lambda: None)


def torchfts_diloco(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `torchft.local_sgd.DiLoCo`, from its file: the package imports telemetry and a service in Rust."""
    try:
        files = metadata.files("torchft") or []
    except metadata.PackageNotFoundError:
        pytest.skip("torchft is not installed: pip install --no-deps torchft==0.2.0")
    (path,) = (each.locate() for each in files if str(each) == "torchft/local_sgd.py")
    for name, held in {
        "torchft": {"__path__": []},
        "torchft.manager": {"Manager": LockStep},
        "torchft.utils": {"get_stream_context": lambda stream: nullcontext()},
    }.items():
        stub = ModuleType(name)
        vars(stub).update(held)
        monkeypatch.setitem(sys.modules, name, stub)
    spec = spec_from_file_location("torchft.local_sgd", str(path))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DiLoCo


@pytest.mark.parametrize(("fragments", "alpha"), [(1, 0.0), (3, 0.0), (3, 0.4)])
def test_the_weights_are_those_of_torchft(
    fragments: int, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, workers, every = torchfts_diloco(monkeypatch), Workers(ADAMW), 6
    rows, barrier = dict[int, torch.Tensor](), Barrier(4)

    def replica(k: int) -> dict[str, torch.Tensor]:
        model = cast(torch.nn.Sequential, workers.models[k])
        layers = [model] if fragments == 1 else [model[0], model[3], model[5]]
        outer = [
            torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for each in layers
        ]
        averaging = kind(
            LockStep(k, rows, barrier), layers, workers.steps[k], outer, every,
            fragment_update_alpha=alpha,
        )  # fmt: skip
        with averaging:
            for number in range(18):
                workers.backward(number, only=k)
                workers.steps[k].step()
        held = zip(
            ("", "") if fragments == 1 else ("0.", "3.", "5."), averaging._fragments, strict=False
        )
        return {
            prefix + name: value
            for prefix, each in held
            for name, value in each.original_parameters.items()
        }

    with ThreadPoolExecutor(4) as threads:
        reference, *_ = threads.map(replica, range(4))
    strategy = streaming(
        fragments=fragments, delay_steps=0, mixing=alpha, interval_epochs=1.2, num_epochs=4
    )
    ours = run_in_process(strategy, 18 * fragments // every, optimizer=ADAMW, scheduler=None)
    for name, value in reference.items():
        np.testing.assert_allclose(ours[name].numpy(), value.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("done", "compression"),
    [
        (4, "int4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "none"), (1, "int4"), (4, "none"))
        ),
    ],
)
def test_a_streaming_training_continues_with_the_models_of_its_clients(
    done: int, compression: LeaderCompression, tmp_path: Path
) -> None:
    exchange = ExchangeSettings(leader_compression=compression)
    whole, begun, resumed = (
        streaming(fragments=2, delay_steps=1, exchange=exchange) for _ in range(3)
    )
    halfway = run_in_process(begun, done, folder=tmp_path)
    resumed.resume_from(done, **begun.state)
    assert bits(run_in_process(resumed, None, halfway, folder=tmp_path)) == bits(
        run_in_process(whole)
    )


class Sizes(GroupGrid):
    """What messages and replies have, in names."""

    def __init__(self, grid: Any) -> None:
        super().__init__(grid)
        self.sent: list[list[str]] = []
        self.got: list[list[str]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        for names, these in ((self.sent, messages), (self.got, replies)):
            names += [list(each.content["arrays"]) for each in these if "arrays" in each.content]
        return replies


def test_only_fragments_are_sent_after_the_first_round_and_all_of_them_are_trained() -> None:
    strategy, app = (
        streaming(fragments=2),
        make_client_app(lambda context: ring_app.network(), ring_app.part),
    )
    with LocalGrid(app, 4, num_workers=0) as grid:
        sizes = Sizes(grid)
        result = strategy.start(sizes, ring_app.initial(), strategy.num_rounds, timeout=60)
    one, other = ["0.weight", "0.bias", "5.weight", "5.bias"], ["3.weight", "3.bias"]
    assert sizes.sent[0] == list(ring_app.initial()) and len(sizes.got) == 4 * strategy.num_rounds
    assert sizes.sent[4::4] == ([one, other] * 4)[:7]
    assert sizes.got[::4] == [one, other] * 4
    initial = bits(ring_app.initial())
    assert all(initial[name] != data for name, data in bits(result.arrays).items())


@pytest.mark.slow
def test_the_exchange_of_a_fragment_is_hidden_behind_steps() -> None:
    run = {**RUN, "epochs": 2, "interval": 0.5}
    table = Streaming(fragments=2, delay_steps=2)
    ours = small_result("streaming-diloco", **run, streaming=table)
    with few_digits():
        planned = plan_scenario(small("streaming-diloco", **run, streaming=table))
    assert ours["virtual_s"] == pytest.approx(2 * planned["predicted"]["epoch_s"], rel=0.1)
    exposed = small_result(
        "streaming-diloco", **run, streaming=Streaming(fragments=2, delay_steps=0)
    )
    alone, diloco = small_result("sgd", **run), small_result("diloco", **run)
    assert ours["virtual_s"] < exposed["virtual_s"]
    assert alone["virtual_s"] / sum(BOARDS) < ours["virtual_s"]
    sent = [sum(ran["rounds"][-1]["bytes"].values()) for ran in (ours, diloco)]
    # A fragment at a time, each as often as DiLoCo sends the whole model.
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"interval_epochs": "decay"}, "'decay'"),
        ({"fragments": 6}, "fragments = 6"),
        ({"fragments": 2, "delay_steps": 3}, "delay_steps = 3"),
        ({"outer": FedAdam()}, "OuterSGD"),
        ({"quorum": Quorum(fraction=0.5)}, "quorum"),
        ({"groups": 2}, "groups"),
    ],
)
def test_what_streaming_diloco_cannot_do_is_refused(settings: dict[str, Any], named: str) -> None:
    refused(lambda: streaming(**settings), named)


def test_more_fragments_than_layers_and_another_arithmetic_are_refused() -> None:
    strategy = streaming(fragments=4, delay_steps=0, interval_epochs=2.0)
    refused(lambda: run_in_process(strategy), "fragments = 4", "3 layers")


# ------------------------------------------------------------------------------------------- on other engines
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["local-sgd", "post-local-sgd", "diloco", "streaming-diloco", "muloco", "tree-fedavg"]
)
def test_the_simulation_has_the_weights_of_the_local_engine(name: str) -> None:
    pytest.importorskip("ray", reason="flwr run needs socflower[simulation]")
    scenario = small(name, boards=(2,), groups="auto", epochs=2, interval=1.0, batch_size=128)
    here, there = (
        run_scenario(scenario, engine, num_workers=1) for engine in ("local", "simulation")
    )
    assert here["weights_sha256"] == there["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [StreamingDiLoCo, TreeFedAvg, DiLoCo])
def test_machines_of_their_own_have_the_weights_of_one_process(kind: type[SoCFlow]) -> None:
    results = []
    for real in (False, True):
        strategy, nodes = made(kind, interval_epochs=1.0), ring_app.node_configs(ring_app.cluster())
        app, config = ring_app.client_app, {"member-passes": "ring"}
        with (
            ProcessGrid(app, nodes, run_config=config)
            if real
            else LocalGrid(app(), 4, run_config=config, num_workers=0) as grid
        ):
            results.append(
                strategy.start(
                    GroupGrid(grid), ring_app.initial(), strategy.num_rounds, timeout=120
                )
            )
        assert [report.events for report in strategy.reports] == [()] * strategy.num_rounds
    for name in results[0].arrays:
        np.testing.assert_allclose(
            results[1].arrays[name].numpy(), results[0].arrays[name].numpy(), atol=1e-5
        )
