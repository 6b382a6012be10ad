"""HybridPipeline with a model and data that are not ours, in a Flower app on the engines in which one client trains."""

import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from socflower import (
    ActivationCoding,
    EventClock,
    FP32Trainer,
    HybridPipeline,
    Int8Trainer,
    PlannerSettings,
    Rebalancing,
    TrainingSchedule,
    make_client_app,
    pipeline_problem,
    sgd,
)
from socflower.cluster import Cluster, parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.errors import InfeasiblePlan, TrainingFailed
from socflower.pipeline.plan import PipelinePlan, Plan
from socflower.pipeline.problem import PipelineProblem, to_json
from socflower.pipeline.replanning import replanned
from socflower.pipeline.runtime.group import train_pipeline
from socflower.pipeline.runtime.stage import OutOfMemory
from socflower.pipeline.schedule.run import simulate_schedule
from socflower.training.model_state import frozen_digest, trainable_state
from socflower.wire.message_keys import FROZEN_SHA256
from socflower.workloads.dataset import LabelledData
from socflower.workloads.map_dataset import as_data_source
from tests.one_line import refused
from tests.pipeline.problems import straight_plan
from tests.strategies.pipeline_app import (
    BATCH,
    NUM_SAMPLES,
    Sentences,
    Tagger,
    client_app,
    shelf,
    tagger,
)


@pytest.fixture
def problem() -> PipelineProblem:
    return pipeline_problem(tagger(), Sentences().tokens[:1], shelf(), batch_size=BATCH)


def schedule(**settings: Any) -> TrainingSchedule:
    return TrainingSchedule(
        **{
            "num_samples": NUM_SAMPLES,
            "batch_size": BATCH,
            "num_epochs": 2,
            "interval_epochs": 1.0,
            **settings,
        }
    )


def cut_in_three(problem: PipelineProblem) -> PipelinePlan:
    last = problem.model.num_layers - 1
    return straight_plan((0, 1, last), ((6,), (6,), (6,)), 4)


def train(strategy: HybridPipeline, client: ClientApp | None = None) -> dict[str, Tensor]:
    with LocalGrid(client or client_app(), len(strategy.plan.participants), num_workers=0) as grid:
        result = strategy.start(
            grid, ArrayRecord(tagger().state_dict()), num_rounds=strategy.num_rounds
        )
    return dict(result.arrays.to_torch_state_dict())


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], atol=2e-6) for name in one
    )


def test_any_plan_trains_the_weights_of_one_device(problem: PipelineProblem) -> None:
    planned = HybridPipeline(problem=problem, schedule=schedule())
    own = HybridPipeline(problem=problem, schedule=schedule(), plan=cut_in_three(problem))
    alone = HybridPipeline(
        problem=problem,
        schedule=schedule(),
        plan=straight_plan((problem.model.num_layers - 1,), ((24,),), 1),
    )
    weights = [train(strategy) for strategy in (planned, own, alone)]
    assert (
        own.pipeline.plan.architecture == "pipeline"
        and alone.pipeline.plan.architecture == "single device"
    )
    assert close(weights[0], weights[1]) and close(weights[1], weights[2])
    assert not close(weights[2], dict(tagger().state_dict()))
    assert len(own.reports) == own.num_rounds == 2


BOARDS = """
[cluster]
boards = [3, 2]
device = "jetson-nano"
soc_bytes_per_s = 12.5e6
"""


@pytest.mark.parametrize("grid", [0, 2])
def test_2d_parallelism_trains_the_weights_of_one_device_also_without_one_that_is_lost(
    grid: int,
) -> None:
    """Pipelines of two and three devices beside each other, and after a loss of two and two."""
    cluster = parse_cluster(tomllib.loads(BOARDS)["cluster"])
    own = pipeline_problem(tagger(), Sentences().tokens[:1], cluster, batch_size=BATCH)
    planner = PlannerSettings(grid=grid, micro_batch_sizes=(6,))
    strategy = HybridPipeline(problem=own, schedule=schedule(), planner=planner)
    plan = strategy.pipeline.plan
    assert (plan.architecture, len(plan.socs), len(plan.pipelines)) == ("2-D", 5, 2)
    alone = HybridPipeline(
        problem=own,
        schedule=schedule(),
        plan=straight_plan((own.model.num_layers - 1,), ((24,),), 1),
    )
    assert close(train(strategy), train(alone))
    smaller = strategy._work.planned_for((0, 1, 3, 4)).plan
    assert [len(each.stages) for each in smaller.pipelines] == [2, 2]


def test_a_round_costs_its_updates_and_the_way_of_the_weights_to_the_hub(
    problem: PipelineProblem,
) -> None:
    clock = EventClock(problem.cluster)
    strategy = HybridPipeline(
        problem=problem, schedule=schedule(), plan=cut_in_three(problem), clock=clock
    )
    train(strategy)
    step_s, steps = strategy.pipeline.prediction.step_s, strategy.method.sync.steps_per_epoch
    weights = sum(layer.weight_bytes for layer in problem.model.layers)
    updates_s = clock.now_s - 2 * weights / 12.5e6
    assert steps * 2 * step_s * 0.7 < updates_s < steps * 2 * step_s * 1.05  # updates overlap
    assert [report.usage.duration_s > 0 for report in strategy.reports] == [True, True]
    assert clock.now_s == pytest.approx(sum(report.usage.duration_s for report in strategy.reports))


def test_a_round_that_is_planned_for_slower_devices_is_priced_at_the_clocks_speeds(
    problem: PipelineProblem,
) -> None:
    """The clock slows devices down itself; they must not be slow twice."""
    clock = EventClock(problem.cluster)
    own = straight_plan((problem.model.num_layers - 1,), ((24,),), 1)  # on device 0
    strategy = HybridPipeline(
        problem=replace(problem, devices=problem.devices[:2]),
        schedule=schedule(),
        clock=clock,
        plan=own,
        rebalancing=Rebalancing(),
    )
    strategy.method.planner.balancer.in_use.take({0: 0.25, 1: 1.0})
    train(strategy)
    plan, model = strategy.pipeline.plan, problem.model
    assert strategy.pipeline.problem.device(0).seconds.device == "jetson-nx at 25%"
    sized = replace(
        problem,
        micro_batch_size=plan.pipelines[0].micro_batch_size,
        num_micro_batches=plan.pipelines[0].num_micro_batches,
    )
    updates_s = (
        2
        * simulate_schedule(
            sized, plan, num_steps=strategy.method.sync.steps_per_epoch
        ).usage.duration_s
    )
    weights = sum(layer.weight_bytes for layer in model.layers)
    assert clock.now_s == pytest.approx(
        updates_s + 2 * (weights / 12.5e6 + problem.cluster.message_s)
    )
    twice_s = (
        2
        * simulate_schedule(
            strategy.pipeline.problem, plan, num_steps=strategy.method.sync.steps_per_epoch
        ).usage.duration_s
    )
    assert twice_s > 1.5 * updates_s  # so the plan uses the slow device, and this test would see it


def test_coded_activations_train_otherwise_and_cost_less(problem: PipelineProblem) -> None:
    plan = cut_in_three(problem)
    exact, coded = (
        train(HybridPipeline(problem=problem, schedule=schedule(), plan=plan, coding=coding))
        for coding in (ActivationCoding(), ActivationCoding(bits=4, gradient_bits=4))
    )
    assert not close(exact, coded)
    assert all(torch.allclose(exact[name], coded[name], atol=0.3) for name in exact)


def test_a_device_that_is_away_is_planned_for_anew_and_its_optimiser_state_goes_on(
    problem: PipelineProblem,
) -> None:
    plan = cut_in_three(problem)
    whole = train(HybridPipeline(problem=problem, schedule=schedule(), plan=plan))
    strategy = HybridPipeline(problem=problem, schedule=schedule(), plan=plan)
    begin = strategy.configure_train

    def lose_one(server_round: int, *args: Any) -> Any:
        if server_round == 2:
            strategy.method.planner.registry.mark_away([2])
        return begin(server_round, *args)

    strategy.configure_train = lose_one  # type: ignore[method-assign]
    weights = train(strategy)
    assert strategy.pipeline.plan.socs and 2 not in strategy.pipeline.plan.socs
    assert "new plan" in " ".join(
        event.text for report in strategy.reports for event in report.events
    )
    assert close(weights, whole)  # so momentum went with the layers


def test_frozen_layers_stay_at_the_nodes_and_the_others_train_as_on_one_device() -> None:
    """As in fine-tuning by adapters; the first stage has nothing to train."""

    def frozen() -> Tagger:
        module = tagger()
        module.table.requires_grad_(False)
        module.mix[0].weight.requires_grad_(False)
        return module

    own = pipeline_problem(frozen(), Sentences().tokens[:1], shelf(), batch_size=BATCH)
    weights = []
    for plan in (cut_in_three(own), straight_plan((own.model.num_layers - 1,), ((24,),), 1)):
        strategy = HybridPipeline(problem=own, schedule=schedule(), plan=plan)
        with LocalGrid(client_app(model=frozen), 3, num_workers=0) as grid:
            weights.append(
                dict(
                    strategy.start(
                        grid,
                        ArrayRecord(trainable_state(frozen())),
                        num_rounds=strategy.num_rounds,
                        train_config=ConfigRecord({FROZEN_SHA256: frozen_digest(frozen())}),
                    ).arrays.to_torch_state_dict()
                )
            )
    assert "table.weight" not in weights[0] and "mix.0.bias" in weights[0]
    assert close(*weights) and not close(weights[0], dict(trainable_state(frozen())))


def test_a_device_that_leaves_within_an_interval_is_gone_on_without_at_that_update(
    problem: PipelineProblem,
) -> None:
    plan, data = cut_in_three(problem), as_data_source(Sentences())
    task = HybridPipeline(problem=problem, schedule=schedule(), plan=plan)
    own = task.method.messages.task(task.plan.groups[0], task.method.sync.intervals[0])
    trainer, whole, left, undisturbed = (
        FP32Trainer(optimizer=sgd(0.2), device="cpu"),
        tagger(),
        tagger(),
        tagger(),
    )
    outcome = train_pipeline(whole, data, own, plan, trainer, departures={1: 2})
    first = train_pipeline(left, data, replace(own, num_steps=2), plan, trainer)
    train_pipeline(
        left,
        data,
        replace(own, first_step=2, num_steps=own.num_steps - 2),
        replanned(plan, problem.model, {0, 2}),
        trainer,
        first.end.state,
    )
    train_pipeline(undisturbed, data, own, plan, trainer)
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole.parameters(), left.parameters(), strict=True)
    )
    assert close(dict(whole.state_dict()), dict(undisturbed.state_dict()))
    assert outcome.num_samples == NUM_SAMPLES and outcome.mean_loss > 0
    nobody = train_pipeline(
        tagger(), data, own, plan, trainer, departures=dict.fromkeys(plan.socs, 0)
    )
    assert nobody.num_samples == 0 and not np.isfinite(nobody.mean_loss)


@pytest.mark.parametrize("with_problem", [False, True])
def test_a_stage_that_loses_a_device_continues_within_the_budgets(
    problem: PipelineProblem, with_problem: bool
) -> None:
    """All samples of the first stage would need more than the device that is left has."""
    plan = straight_plan((1, problem.model.num_layers - 1), ((3, 3), (6,)), 4)
    budgets = {0: 48_600.0, 1: 48_600.0, 2: 1e6}
    tight = replace(
        problem,
        devices=tuple(replace(each, memory_bytes=budgets[each.soc]) for each in problem.devices),
    )
    strategy, data = HybridPipeline(problem=tight, schedule=schedule(), plan=plan), Sentences()
    own = strategy.method.messages.task(strategy.plan.groups[0], strategy.method.sync.intervals[0])
    trainer, whole, undisturbed = FP32Trainer(optimizer=sgd(0.2), device="cpu"), tagger(), tagger()
    known = to_json(tight) if with_problem else ""

    def train(model: nn.Module, by: Plan, **options: Any) -> None:
        train_pipeline(model, as_data_source(data), own, by, trainer, **options)

    train(undisturbed, plan, budget_bytes=budgets)
    with pytest.raises(OutOfMemory):
        train(tagger(), replanned(plan, problem.model, {1, 2}), budget_bytes=budgets)
    train(whole, plan, departures={0: 2}, budget_bytes=budgets, problem=known)
    assert close(dict(whole.state_dict()), dict(undisturbed.state_dict()))


@pytest.mark.parametrize("rebalancing", [None, Rebalancing()])
def test_a_device_that_returns_while_another_is_away_is_planned_with(
    problem: PipelineProblem, rebalancing: Rebalancing | None
) -> None:
    strategy = HybridPipeline(problem=problem, schedule=schedule(), rebalancing=rebalancing)
    strategy.method.work.latest = strategy.method.work.planned_for((1,))
    fresh = HybridPipeline(problem=problem, schedule=schedule())
    assert (
        strategy.method.work.planned_for((0, 1)).plan
        == fresh.method.work.planned_for((0, 1)).plan
        != strategy.method.work.latest.plan
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": schedule(batch_size=12)}, "batch_size"),
        ({"schedule": schedule(reshuffle=False)}, "reshuffle=True"),
        ({"problem": "shelf.toml"}, "pipeline_problem"),
        ({"planner": PlannerSettings(samples_on=9)}, "SoC 9"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_starts(
    problem: PipelineProblem, options: dict[str, Any], said: str
) -> None:
    refused(lambda: HybridPipeline(**{"problem": problem, "schedule": schedule(), **options}), said)


def test_a_budget_that_nothing_fits_is_refused_by_the_strategy(problem: PipelineProblem) -> None:
    tiny = replace(
        problem, devices=tuple(replace(device, memory_bytes=1000.0) for device in problem.devices)
    )
    with pytest.raises(InfeasiblePlan):
        HybridPipeline(problem=tiny, schedule=schedule())


class Wider(Tagger):
    """Another model than the one that was planned."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        )


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (client_app(Int8Trainer()), "FP32Trainer"),
        (client_app(FP32Trainer(device="cpu", max_grad_norm=1.0)), "max_grad_norm"),
        (client_app(FP32Trainer(device="cpu", accumulation_steps=2)), "accumulation_steps"),
    ],
)
def test_a_client_that_cannot_train_stages_says_why(
    problem: PipelineProblem, client: ClientApp, said: str
) -> None:
    refused(
        lambda: train(
            HybridPipeline(problem=problem, schedule=schedule(), plan=cut_in_three(problem)), client
        ),
        said,
        error=TrainingFailed,
    )


def test_a_node_with_another_model_says_so(problem: PipelineProblem) -> None:
    def wider(context: Context) -> nn.Module:
        return Wider()

    client = make_client_app(wider, lambda context, partition, count: Sentences())
    strategy = HybridPipeline(problem=problem, schedule=schedule())
    with (
        LocalGrid(client, 3, num_workers=0) as grid,
        pytest.raises(TrainingFailed, match="other layers here"),
    ):
        strategy.start(grid, ArrayRecord(Wider().state_dict()), num_rounds=2)


def phones(*kinds: str) -> Cluster:
    return parse_cluster(
        {"soc_bytes_per_s": 12.5e6}, [{"count": 1, "device": kind} for kind in kinds]
    )


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


def pictures() -> LabelledData:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
    inputs = torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator)
    inputs[torch.arange(NUM_SAMPLES), 0, labels, labels] += 4.0
    return LabelledData(inputs, labels, mean=(0.0,), std=(1.0,), num_classes=4)


def in_int8(int8_socs: Any, *kinds: str) -> PipelineProblem:
    return pipeline_problem(
        classifier(), (1, 8, 8), phones(*kinds), batch_size=BATCH, int8_socs=int8_socs
    )


def train_pictures(
    strategy: HybridPipeline, trainer: FP32Trainer | None = None
) -> dict[str, Tensor]:
    client = make_client_app(
        lambda context: classifier(),
        lambda context, part, parts: pictures(),
        trainer or FP32Trainer(optimizer=sgd(0.05), device="cpu"),
    )
    with LocalGrid(client, len(strategy.plan.participants), num_workers=0) as grid:
        result = strategy.start(
            grid, ArrayRecord(classifier().state_dict()), num_rounds=strategy.num_rounds
        )
    return dict(result.arrays.to_torch_state_dict())


@pytest.mark.slow
def test_stages_in_int8_are_planned_priced_and_trained_so() -> None:
    kinds = ("snapdragon-865", "jetson-nano", "snapdragon-865")
    fp32, int8 = in_int8((), *kinds), in_int8("auto", *kinds)
    assert fp32.int8_socs == () and int8.int8_socs == (0, 2) == in_int8([2, 0], *kinds).int8_socs
    assert (
        int8.device(0).seconds is int8.device(2).seconds and int8.device(0).int8_processor == "npu"
    )
    assert int8.device(1).seconds.forward(0, 3, 8) == fp32.device(1).seconds.forward(0, 3, 8)
    assert int8.device(0).seconds.forward(0, 3, 8) < fp32.device(0).seconds.forward(0, 3, 8)
    assert int8.device(0).update_s(1e6) == pytest.approx(1.25 * fp32.device(0).update_s(1e6))
    plan = straight_plan((0, 1, 3), ((6,), (6,), (6,)), 4)
    steps_s = [
        simulate_schedule(replace(problem, micro_batch_size=6, num_micro_batches=4), plan).step_s
        for problem in (fp32, int8)
    ]
    assert steps_s[1] < steps_s[0]
    # Of one device alone, the passes draw the watts of its NPU and the update those of its CPU.
    alone = straight_plan((3,), ((24,),), 1)
    sized = replace(int8, devices=int8.devices[:1], micro_batch_size=24, num_micro_batches=1)
    usage, device, kind = simulate_schedule(sized, alone).usage, sized.devices[0], int8.kind(0)
    passes_s = device.seconds.forward(0, 3, 24) + device.seconds.backward(0, 3, 24)
    update_s = device.update_s(int8.model.weight_bytes(0, 3))
    assert usage.duration_s == pytest.approx(passes_s + update_s)
    assert usage.total_energy_j == pytest.approx(
        passes_s * kind.processors["npu"].active_w + update_s * kind.processors["cpu"].active_w
    )

    weights = [
        train_pictures(HybridPipeline(problem=problem, schedule=schedule(num_epochs=4), plan=plan))
        for problem in (fp32, int8)
    ]
    assert not close(*weights) and all(
        torch.allclose(weights[0][name], weights[1][name], atol=0.05) for name in weights[0]
    )
    again = train_pictures(HybridPipeline(problem=int8, schedule=schedule(num_epochs=4), plan=plan))
    assert all(torch.equal(weights[1][name], again[name]) for name in again)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("int8_socs", "said"),
    [
        ("auto", "int8_socs"),
        ([1], "jetson-nano"),
        ([5], "int8_socs"),
        ("all", "int8_socs"),
        (1, "int8_socs"),
    ],
)
def test_int8_where_no_device_has_it_is_refused_in_one_line(int8_socs: Any, said: str) -> None:
    refused(lambda: in_int8(int8_socs, "jetson-nano", "jetson-nano"), said)


def test_a_text_model_is_no_model_for_int8() -> None:
    refused(
        lambda: pipeline_problem(
            tagger(),
            Sentences().tokens[:1],
            phones("snapdragon-865", "snapdragon-865"),
            batch_size=BATCH,
            int8_socs="auto",
        ),
        "int64",
        "int8",
        "float32",
    )


def test_stages_in_int8_go_on_without_a_device_at_the_update_at_which_it_leaves() -> None:
    problem = in_int8("auto", *["snapdragon-865"] * 3)
    plan, data = straight_plan((0, 1, 3), ((6,), (6,), (6,)), 4), pictures()
    task = HybridPipeline(problem=problem, schedule=schedule(), plan=plan)
    own = task.method.messages.task(task.plan.groups[0], task.method.sync.intervals[0])
    trainer, whole, left = (
        FP32Trainer(optimizer=sgd(0.05), device="cpu"),
        classifier(),
        classifier(),
    )
    train_pipeline(whole, data, own, plan, trainer, departures={1: 2}, int8_socs=(0, 1, 2))
    first = train_pipeline(
        left, data, replace(own, num_steps=2), plan, trainer, int8_socs=(0, 1, 2)
    )
    train_pipeline(
        left,
        data,
        replace(own, first_step=2, num_steps=own.num_steps - 2),
        replanned(plan, problem.model, {0, 2}),
        trainer,
        first.end.state,
        int8_socs=(0, 1, 2),
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole.parameters(), left.parameters(), strict=True)
    )
