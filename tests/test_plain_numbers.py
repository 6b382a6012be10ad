"""Numbers of NumPy for the arguments of all exports: whatever is made of them is what Python's numbers make."""

import functools
import inspect
import json
import pickle
import re
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import socflower
from socflower import ConfigError, FP32Trainer, ModelProfile, hierarchy
from socflower.cluster import (
    Board,
    GraphBuilder,
    LayerProfile,
    Processor,
    Server,
    TaskGraph,
    parse_cluster,
)
from socflower.cluster.cost_model import Gradient
from socflower.cluster.device import StepTimings
from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.plan.device_costs import CutShape
from socflower.engines.local.grid import LocalGrid
from socflower.plain_numbers import plain
from socflower.thermal.fans.policies import FixedSpeed
from socflower.thermal.sensors.reading import Reading
from socflower.wire.message_keys import GroupTask
from socflower.wire.saved_state import StateKind, StateStore
from socflower.workloads import (
    LabelledData,
    VerticalSamples,
    build_click_model,
    build_generator,
    click_data,
    partition,
)

CLUSTER = parse_cluster({"boards": [2, 2]})
TOY = ModelProfile(
    name="toy",
    input_bytes=64.0,
    layers=tuple(
        LayerProfile(
            name=f"layer{number}",
            kind="Linear",
            forward_flops=1e6,
            output_bytes=4096.0,
            weight_bytes=1024.0,
            num_tensors=2,
        )
        for number in range(3)
    ),
)
SCHEDULE = socflower.TrainingSchedule(num_samples=12, batch_size=4, num_epochs=1)
QUICK = socflower.PlannerSettings(width=1, num_simulated=1, num_tuned=1)
CUTS = (
    CutShape(name="layer0", num_layers=1, feature_elements_per_sample=1024),
    CutShape(name="layer1", num_layers=2, feature_elements_per_sample=512),
)
LABELS = np.arange(60) % 4
TOKEN = "a-token-of-thirty-two-characters"
DEVICE = socflower.device("raspberry-pi-4b")


def network(*_: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def images(num_samples: int = 12) -> LabelledData:
    generator = torch.Generator().manual_seed(2)
    return LabelledData(
        inputs=torch.randn(num_samples, 1, 2, 2, generator=generator),
        labels=torch.arange(num_samples) % 3,
        mean=(0.0,),
        std=(1.0,),
        num_classes=3,
    )


@functools.cache
def problem() -> Any:
    return socflower.pipeline_problem(network(), (1, 2, 2), CLUSTER, batch_size=4)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(network().parameters(), lr=0.25)


def source() -> Any:
    return socflower.SimulatedSource(lambda: 40.0, clock=lambda: 0.0)


def split_costs(**changes: Any) -> Any:
    return socflower.split_costs(TOY, CUTS, DEVICE, DEVICE, **{"batch_size": 4, **changes})


def party(**changes: Any) -> Any:
    return socflower.adaptive_party(
        split_costs(), constant(1e6, 1e6), **{"num_batches": 6, **changes}
    )


def chip(folder: Path) -> Path:
    for name, text in {
        "name": "nct6798",
        "pwm2": "100",
        "pwm2_enable": "5",
        "fan3_input": "900",
    }.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def background(**changes: Any) -> Any:
    made = socflower.BackgroundSource(source(), clock=lambda: 0.0, **changes)
    assert made.wait_for_first(5.0)
    made.close()
    return made


def recorded(folder: Path, **changes: Any) -> Any:
    path = folder / "readings.jsonl"
    path.unlink(missing_ok=True)
    waits: list[float] = []
    socflower.record(source(), path, sleep=waits.append, **changes)
    return path.read_text(), waits


def trained_group(**changes: Any) -> Any:
    model = network()
    task = GroupTask(
        group_id=0,
        num_groups=1,
        members=(0, 1),
        leader=0,
        partitions=(0, 1),
        num_partitions=2,
        capacities=(1.0, 1.0),
        first_step=0,
        num_steps=2,
        steps_per_epoch=2,
        total_steps=2,
        batch_size=4,
        reshuffle=True,
        deal_epoch=0,
        seed=1,
        num_samples=12,
    )
    socflower.train_group(model, images(), task, FP32Trainer(device="cpu"), **changes)
    return model


def batch_blocks(**changes: Any) -> Any:
    model = socflower.Int8Model.from_module(network(), input_shape=(1, 2, 2))
    return socflower.profile_batch_blocks(model.graph, engine=model.engine, **changes)


def run(**changes: Any) -> Any:
    """The run as the server app sees it."""
    from flwr.serverapp import ServerApp

    app, seen = ServerApp(), []

    @app.main()
    def main(grid: Any, context: Context) -> None:
        seen.append((len(list(grid.get_node_ids())), dict(context.run_config)))

    socflower.run_app(
        app,
        socflower.make_client_app(network, lambda *where: images()),
        cluster=CLUSTER,
        model_profile=TOY,
        **changes,
    )
    return seen


def group_count(**changes: Any) -> Any:
    tried: list[Any] = []

    def strategy(num_groups: int) -> Any:
        tried.append(num_groups)
        return socflower.SoCFlow(
            cluster=CLUSTER,
            schedule=SCHEDULE,
            groups=num_groups,
            costs=socflower.Costs(model_profile=TOY),
        )

    grid = LocalGrid(
        socflower.make_client_app(network, lambda *where: images()), num_nodes=4, num_workers=0
    )
    with grid:
        choice = socflower.profile_group_count(
            grid, ArrayRecord(network().state_dict()), lambda arrays: 0.5, strategy, **changes
        )
    return choice, tried


# ------------------------------------------------------------------------------------- examples of all arguments
SEED = {"seed": 3}
HALVES = {"model_fn": network, "device": "cpu"}
LIMITS = {"seed": 3, "max_grad_norm": 0.5}
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (arguments with numbers, all others)
    "ActivationCoding": ({"bits": 8, "gradient_bits": 16}, {}),
    "BackgroundSource": ({"period_s": 2.0, "max_age_s": 8.0}, {}),
    "CloudClient": (
        {"patience_s": 2.0},
        {
            "operator": socflower.CloudOperator(address="127.0.0.1:8", token=TOKEN),
            "program": None,
            "name": "name",
        },
    ),
    "CloudLink": ({"heartbeat_s": 2.0, "give_up_s": 8.0}, {}),
    "CloudOperator": (
        {"timeout_s": 8.0, "heartbeat_s": 2.0},
        {"address": "127.0.0.1:8", "token": TOKEN},
    ),
    "Cluster": (
        {"hub_bytes_per_s": 1024.0, "message_s": 0.25},
        {"name": "rack", "boards": CLUSTER.boards},
    ),
    "Device": (
        {
            "idle_w": 1.0,
            "network_w": 0.5,
            "memory_bytes": 4096.0,
            "memory_bytes_per_s": 512.0,
            "layer_overhead_s": 0.25,
        },
        {"name": "toy", "processors": DEVICE.processors},
    ),
    "EngineSettings": (
        {"num_threads": 2, "cores": (0, 0), "batch_blocks": {"1": 2}, "memory_budget_bytes": 2**20},
        {},
    ),
    "Evaluation": ({"metrics": {"rmse": 0.5}, "num_samples": 4, "weight": 4.0}, {}),
    "ExchangeSettings": ({"overlap_buckets": 2}, {}),
    "FP32Trainer": (
        {"max_grad_norm": 0.5, "accumulation_steps": 2, "num_buckets": 2},
        {"reduction": "ring"},
    ),
    "FanControl": (
        {
            "sources": {0: source(), 1: source()},
            "min_rpm": 1000.0,
            "max_rpm": 8000.0,
            "failsafe_rpm": 4000.0,
            "boards": {0: 0, 1: 1},
            "period_s": 2.0,
            "max_silence_s": 16.0,
            "stuck_after_s": 512.0,
            "spin_up_s": 8.0,
        },
        {"policy": FixedSpeed(fixed_rpm=4000.0), "output": object()},
    ),
    "FeatureSamples": (
        {"party": 1},
        {
            "samples": VerticalSamples(
                torch.arange(4), (torch.zeros(4, 2), torch.ones(4, 2)), torch.arange(4)
            )
        },
    ),
    "FixedSpeed": ({"fixed_rpm": 4000.0}, {}),
    "Fp32Update": ({"momentum": 0.5}, {}),
    "GroupPlan": (
        {
            "communication_groups": ((0,), (1,)),
            "contention": 1,
            "slots_per_board": (2, 2),
            "participants": (0, 1, 2, 3),
        },
        {"groups": socflower.plan_groups(CLUSTER, 2).groups, "proven_optimal": True},
    ),
    "Grouping": ({"num_groups": 2, "num_socs": 4}, {}),
    "HalvesProgram": (LIMITS, {**HALVES, "example": torch.zeros(1, 1, 2, 2)}),
    "HeatLimits": (
        {
            "resume_c": 60.0,
            "shrink_c": 64.0,
            "pause_c": 80.0,
            "min_battery_fraction": 0.5,
            "max_user_load": 0.25,
            "max_pause_s": 64.0,
            "min_share": 0.5,
            "stuck_s": 32.0,
        },
        {},
    ),
    "HeatReport": (
        {
            "temperature_c": 50.0,
            "peak_c": 60.0,
            "clock_factor": 0.5,
            "throttled_s": 2.0,
            "share": 0.5,
            "battery_fraction": 0.5,
            "user_load": 0.25,
            "paused_s": 4.0,
        },
        {},
    ),
    "HwmonPwm": (
        {
            "pwm": 2,
            "min_rpm": 1000.0,
            "max_rpm": 8000.0,
            "min_duty": 0.25,
            "fan": 3,
            "automatic_mode": 5,
        },
        {"folder": chip},
    ),
    "HybridPipeline": ({"backup_steps": 2}, {}),
    "Int8Trainer": ({"learning_rate": 0.25}, {}),
    "IntegerUpdate": ({"bits": (5, 4), "starts": (0.0, 0.5)}, {}),
    "JoinedProgram": (
        LIMITS,
        {**HALVES, "top": "3", "bottoms": ("0", "1"), "examples": (torch.zeros(1, 4),) * 2},
    ),
    "LabelledData": (
        {"mean": (0.5,), "std": (2.0,), "num_classes": 3},
        {"inputs": torch.zeros(12, 1, 2, 2), "labels": images().labels},
    ),
    "LayeredProgram": ({**LIMITS, "example": (1, 2, 2)}, {**HALVES}),
    "LinuxSensors": ({"stuck_after_s": 64.0, "pid": 1}, {"root": lambda folder: folder}),
    "MapDataset": (
        {"num_workers": 1, "timeout_s": 8.0},
        {"dataset": torch.utils.data.TensorDataset(torch.arange(4.0))},
    ),
    "MixedEdge": ({"npu_ratios": (0.5, 0.25)}, {}),
    "MixedPrecisionTrainer": ({"npu_ratio": 0.5}, {"held_out": images()}),
    "MixedPricing": ({"alpha": 0.5, "cpu_share": 0.25}, {}),
    "ModelProfile": ({"input_bytes": 64.0}, {"name": "toy", "layers": TOY.layers}),
    "PassiveCooling": ({"low_rpm": 2000.0, "high_rpm": 8000.0, "hot_c": 36.0, "cool_c": 34.0}, {}),
    "PlannedLoad": ({"rack_w": 64.0, "local_rise_c": 2.0, "begin_s": 1.0, "end_s": 64.0}, {}),
    "PlannerSettings": (
        {
            "width": 2,
            "num_simulated": 4,
            "num_tuned": 2,
            "micro_batch_sizes": (4, 8),
            "samples_on": 0,
        },
        {},
    ),
    "PredictiveCooling": (
        {
            "chassis_j_per_k": 512.0,
            "ambient_c": 24.0,
            "limit_c": 35.0,
            "resume_c": 33.0,
            "band_c": 0.25,
            "horizon_s": 64.0,
            "low_rpm": 2000.0,
            "high_rpm": 8000.0,
            "max_slowdown": 0.25,
            "coast_limit_c": 38.0,
            "coast_slowdown": 0.25,
            "coast_power": 0.5,
        },
        {"load": socflower.PlannedLoad(rack_w=64.0, local_rise_c=2.0)},
    ),
    "Rack": (
        {
            "slots_per_board": (2, 2),
            "soc_to_board_w_per_k": 0.5,
            "board_to_air_w_per_k": 2.0,
            "soc_j_per_k": 16.0,
            "board_j_per_k": 64.0,
            "chassis_j_per_k": 512.0,
            "airflow": {0: 0.5, 1: 1.0},
            "coupling": {0: 0.25, 1: 0.5},
        },
        {},
    ),
    "RackDynamics": (
        {"start_c": 30.0, "tick_s": 2.0, "sensor_step_c": 0.25, "start_rpm": 4000.0},
        {"rack": socflower.Rack(slots_per_board=(2, 2)), "policy": FixedSpeed(fixed_rpm=4000.0)},
    ),
    "Rebalancing": ({"steps": 4, "tolerance": 0.25}, {}),
    "RescalingPolicy": ({"warm_up_batches": 4}, {}),
    "RingAllReduce": (
        {"num_socs": 2},
        {"cluster": CLUSTER, "schedule": SCHEDULE, "costs": socflower.Costs(model_profile=TOY)},
    ),
    "RingSettings": ({"heartbeat_s": 2.0, "rendezvous_s": 64.0, "leader_grace_s": 16.0}, {}),
    "RoundReport": (
        {"server_round": 1, "epoch": 0.5, "alpha": 0.5, "cpu_share": 0.25, "without_state": (1,)},
        {"usage": None, "events": ()},
    ),
    "SensorFault": ({"from_s": 2.0, "until_s": 4.0, "sensor": 0}, {"kind": "stuck"}),
    "SessionResult": ({"metrics": {"train-loss": 0.5, "npu-ratios": [0.5, 0.25]}}, {"state": b""}),
    "SimulatedSource": (
        {"step_c": 0.25, "noise_c": 0.5, "seed": 3, "num_sensors": 2, "stuck_after_s": 64.0},
        {"temperature_of": lambda: 40.0, "clock": lambda: 0.0},
    ),
    "SoCFlow": (
        {"groups": 2},
        {"cluster": CLUSTER, "schedule": SCHEDULE, "costs": socflower.Costs(model_profile=TOY)},
    ),
    "SplitReplay": (
        {
            "batches_per_epoch": 6,
            "num_epochs": 2,
            "round_epochs": (0.5, 2.0),
            "seed": 3,
            "cloud_processors": 2,
        },
        {"cluster": CLUSTER, "parties": [party()], "edge_names": lambda party, cut: ["layer0"]},
    ),
    "SplitRoundReport": (
        {"server_round": 1, "epoch": 0.5, "answered": (1, 2)},
        {"usage": None, "events": (), "timeline": None},
    ),
    "SplitSettings": ({"delta_bytes": 64, "checkpoint_batches": 4}, {}),
    "StepResult": ({"loss": 0.5, "num_correct": 2, "num_samples": 4}, {}),
    "StepTiming": ({"window": 3, "references_s": {8: 0.5}}, {}),
    "TimedSource": (
        {"throttled_below": 0.5},
        {"source": source(), "timing": socflower.StepTiming()},
    ),
    "Trace": ({"max_spans": 64}, {}),
    "TrainingSchedule": (
        {
            "num_samples": 64,
            "batch_size": 16,
            "num_epochs": 2,
            "interval_epochs": 0.5,
            "server_interval": 2,
            "seed": 3,
        },
        {},
    ),
    "TrainingSpan": (
        {
            "num_members": 2,
            "first_step": 1,
            "total_steps": 8,
            "steps_per_epoch": 4,
            "proximal_mu": 0.25,
            "seed": (3, 1),
            "npu_ratios": (0.5, 0.25),
        },
        {},
    ),
    "WindowSchedule": ({"steps": ((0.0, 1), (0.5, 4))}, {}),
    "adaptive_party": (
        {"num_batches": 6, "bits": (8, 4), "edge_memory_bytes": 2.0**30},
        {"link": constant(1e6, 1e6)},
    ),
    "build_model": (
        {"in_channels": 1, "image_size": 28, "num_classes": 4, "seed": 3},
        {"name": "lenet5"},
    ),
    "cosine_annealing": ({"total_steps": 8}, {"optimizer": optimizer}),
    "default_candidates": ({"num_socs": 8}, {}),
    "dirichlet_partition": (
        {"num_partitions": 3, "alpha": 0.5, "seed": 3, "min_size": 2},
        {"labels": LABELS},
    ),
    "evaluate": ({"batch_size": 4}, {"model": network, "data": images()}),
    "generate_bandwidth_profile": (
        {"seed": 3, "duration_s": 32.0, "step_s": 2.0},
        {"kind": "wifi"},
    ),
    "heat_mod": (
        {"sample_interval_s": 0.5, "poll_interval_s": 1.0, "read_timeout_s": 2.0},
        {"source": source()},
    ),
    "iid_partition": ({"num_samples": 12, "num_partitions": 3, "seed": 3}, {}),
    "int8_algorithm": ({"momentum": 0.5}, {"name": "adaptive-fixed-point"}),
    "int8_algorithm of gradient bits": ({"gradient_bits": (4, 3, 2)}, {"name": "niti"}),
    "make_client_app": (
        {"num_threads": 2},
        {"model_fn": network, "data_fn": lambda *where: images()},
    ),
    "make_split_client_app": (
        {"num_threads": 2},
        {"program_fn": network, "data_fn": lambda *where: images()},
    ),
    "pipeline_problem": (
        {
            "batch_size": 8,
            "optimizer_copies": 2.0,
            "num_socs": 3,
            "int8_socs": (0, 1),
            "example": (1, 2, 2),
        },
        {"module": network, "cluster": CLUSTER},
    ),
    "plan_groups": (
        {"num_groups": 2, "num_socs": 4, "capacities": [1.0, 0.5, 1.0, 0.5]},
        {"cluster": CLUSTER},
    ),
    "profile_batch_blocks": ({"batch": 4, "repeats": 1}, {}),
    "profile_group_count": ({"candidates": (1, 2), "timeout_s": 64.0}, {}),
    "profile_module": ({"example_input": (1, 2, 2)}, {"module": network, "name": "toy"}),
    "profile_operators": (
        {"input_shape": (1, 2, 2), "batch": 4, "repeats": 1},
        {"module": network},
    ),
    "quiet_flower": ({"level": 40}, {}),
    "record": ({"interval_s": 2.0, "num_readings": 3}, {}),
    "run_app": (
        {"num_nodes": 3, "run_config": {"a": 1, "b": 0.5}, "num_workers": 0, "batch_size": 4},
        {},
    ),
    "sgd": ({"learning_rate": 0.25, "momentum": 0.5, "weight_decay": 0.125}, {}),
    "split_costs": (
        {
            "batch_size": 4,
            "frozen_layers": 0,
            "optimizer_copies": 2.0,
            "label_bytes_per_sample": 4.0,
            "gradient_bits": 8,
            "codec_passes": 2.0,
            "edge_value_bytes": 1.0,
            "edge_shares": {"cpu": 4},
            "merge_passes": 1.0,
        },
        {},
    ),
    "torch_schedule": ({"num_batches": 4}, {"scheduler": socflower.cosine_annealing}),
    "train_group": ({"departures": {1: 1}}, {}),
}

CALLS: dict[str, Callable[..., Any]] = {
    "BackgroundSource": lambda folder, **changes: background(**changes),
    "HwmonPwm": lambda folder, **changes: socflower.HwmonPwm(chip(folder), **changes),
    "LinuxSensors": lambda folder, **changes: socflower.LinuxSensors(folder, **changes),
    "adaptive_party": lambda folder, **changes: party(**changes),
    "HybridPipeline": lambda folder, **changes: socflower.HybridPipeline(
        problem=problem(), schedule=SCHEDULE, planner=QUICK, **changes
    ),
    "profile_batch_blocks": lambda folder, **changes: [
        each.name for each in batch_blocks(**changes)
    ],
    "profile_group_count": lambda folder, **changes: group_count(**changes),
    "profile_operators": lambda folder, **changes: [
        each.name for each in socflower.profile_operators(network(), **changes).latencies
    ],
    "record": lambda folder, **changes: recorded(folder, **changes),
    "run_app": lambda folder, **changes: run(**changes),
    "split_costs": lambda folder, **changes: split_costs(**changes),
    "train_group": lambda folder, **changes: trained_group(**changes),
}


def called(name: str, arguments: Mapping[str, Any], folder: Path) -> Any:
    """What an export makes of arguments, as nested values with their types."""
    if name in CALLS:
        return snapshot(CALLS[name](folder, **arguments))
    others = {
        key: value() if key in ("module", "model", "optimizer") else value
        for key, value in EXAMPLES[name][1].items()
    }
    return snapshot(getattr(socflower, name.partition(" ")[0])(**others, **arguments))


def snapshot(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return a value as nested tuples of its numbers' types; objects give attributes, functions their closure."""
    if value is None or isinstance(value, str | bytes | bool | int | float | np.generic):
        return type(value).__name__, value if value == value else "nan"
    if id(value) in above:
        return "above"
    inner = partial(snapshot, above=(*above, id(value)))
    if isinstance(value, Tensor | np.ndarray):
        return str(value.dtype), json.dumps(value.tolist())
    if isinstance(value, Mapping):
        return type(value).__name__, [(inner(key), inner(part)) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, [*map(inner, value)]
    if isinstance(value, nn.Module):
        return inner(value.state_dict())
    if isinstance(value, partial):
        return inner((value.func, value.args, value.keywords))
    if isinstance(value, types.FunctionType):
        cells = (
            [cell.cell_contents for cell in value.__closure__ or ()]
            if "socflower" in value.__module__
            else []
        )
        return value.__qualname__, [*map(inner, cells)]
    if not type(value).__module__.startswith(("socflower", "torch.optim")):
        return type(value).__name__
    slots = [
        name
        for kind in type(value).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(value, name)
    ]
    names = (*getattr(value, "__dict__", ()), *slots)
    return type(value).__name__, [(name, inner(getattr(value, name))) for name in names]


VARIANTS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "int64": (int, np.int64),
    "int32": (int, np.int32),
    "float32": (float, np.float32),
    "whole float": (
        float,
        lambda value: np.int64(value) if value == int(value) else np.float64(value),
    ),
}


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A value with all its numbers of a type changed."""
    if (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and (kind is np.generic or type(value) is kind)
    ):
        return change(value)
    if isinstance(value, dict):
        return {
            mapped(key, kind, change): mapped(part, kind, change) for key, part in value.items()
        }
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, kind, change) for part in value)
    return value


def failures(
    name: str, arguments: Mapping[str, Any], made_of: Callable[[Mapping[str, Any]], Any]
) -> Iterator[str]:
    """Each argument, with its type of number, that is refused, or of which something else is made."""
    for key, value in arguments.items():
        expected: dict[str, Any] = {}
        for kind, change in VARIANTS.values():
            of_numpy = mapped(value, kind, change)
            of_python = mapped(of_numpy, np.generic, lambda number: number.item())
            if repr(of_numpy) == repr(of_python):
                continue  # it has no number of this type
            if repr(of_python) not in expected:
                expected[repr(of_python)] = made_of({**arguments, key: of_python})
            try:
                made = made_of({**arguments, key: of_numpy})
            except Exception as error:
                yield f"{name}({key}={of_numpy!r}): {type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                if made != expected[repr(of_python)]:
                    yield f"{name}({key}={of_numpy!r}): is not what Python's number makes"


def failures_of_export(name: str, folder: Path) -> list[str]:
    return [*failures(name, EXAMPLES[name][0], lambda arguments: called(name, arguments, folder))]


def failures_of_method(name: str) -> list[str]:
    make, arguments, others = METHODS[name]

    def made_of(changed: Mapping[str, Any]) -> Any:
        of = make()
        result = getattr(of, name.partition(".")[2])(**others, **changed)
        return snapshot(
            (result, None if isinstance(of, socflower.Int8Model) else of)
        )  # that one measures its time

    return [*failures(name, arguments, made_of)]


# ------------------------------------------------------------------------------------- methods that users call
def flow() -> Any:
    return socflower.SoCFlow(
        cluster=CLUSTER, schedule=SCHEDULE, costs=socflower.Costs(model_profile=TOY)
    )


def replay() -> Any:
    return socflower.SplitReplay(
        cluster=CLUSTER,
        parties=[party()],
        edge_names=lambda party, cut: ["layer0"],
        batches_per_epoch=3,
        num_epochs=1,
        round_epochs=[interval.epoch_end for interval in flow().intervals],
    )


def step(
    soc: int = 0,
    other: int = 1,
    seconds: float = 0.5,
    num_bytes: float = 64.0,
    rounds: int = 1,
    participants: tuple[int, ...] = (0, 1),
) -> TaskGraph:
    builder = GraphBuilder()
    done = builder.compute("step", soc, seconds)
    builder.transfer("model", soc, other, num_bytes, rounds=rounds, after=(done,))
    return builder.build(participants)


def dynamics() -> Any:
    return socflower.RackDynamics(
        socflower.Rack(slots_per_board=(2, 2)), FixedSpeed(fixed_rpm=4000.0)
    )


def clock() -> Any:
    return socflower.EventClock(CLUSTER, trace=socflower.Trace())


def int8_model() -> Any:
    return socflower.Int8Model.from_module(network(), input_shape=(1, 2, 2))


PIXELS, CLASSES = np.ones((4, 1, 2, 2), np.float32), np.arange(4, dtype=np.int32) % 3
METHODS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    # class and method: (an object, arguments with numbers, all others)
    "EventClock.run": (clock, {"repeat": 2, "head_start_s": 0.25}, {"graph": step()}),
    "EventClock.predicted_s": (clock, {"repeat": 2}, {"graph": step()}),
    "Int8Model.evaluate": (int8_model, {"batch_size": 2}, {"images": PIXELS, "labels": CLASSES}),
    "Int8Model.train_step": (
        int8_model,
        {"learning_rate": 0.25, "progress": 0.5, "seed": 3},
        {"images": PIXELS, "labels": CLASSES},
    ),
    "RackDynamics.advance": (dynamics, {"duration_s": 8.0, "power_w": [2.0] * 4}, {}),
    "SoCFlow.resume_from": (flow, {"server_round": 1, "without_state": (0,)}, {}),
    "SplitReplay.resume_from": (replay, {"server_round": 1}, {}),
    "StepTiming.add_step": (socflower.StepTiming, {"seconds": 0.5, "num_samples": 4}, {}),
}

PARTS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    # what arguments of exports are made of, and what parts of the package export
    "Board": (
        Board,
        {"num_slots": 2, "soc_bytes_per_s": 64.0, "uplink_bytes_per_s": 128.0},
        {"device": DEVICE},
    ),
    "Server": (Server, {"num_boards": 2, "uplink_bytes_per_s": 64.0}, {}),
    "Processor": (
        Processor,
        {"flops_per_s": 1024.0, "active_w": 2.0, "flops_per_s_by_model": {"toy": 512.0}},
        {"name": "cpu"},
    ),
    "StepTimings": (StepTimings, {"batches": (4, 8), "step_s": (0.5, 0.75)}, {}),
    "LayerProfile": (
        LayerProfile,
        {
            "forward_flops": 64.0,
            "output_bytes": 16.0,
            "weight_bytes": 8.0,
            "num_tensors": 2,
            "frozen_bytes": 4.0,
            "backward_to_forward": 2.0,
        },
        {"name": "0", "kind": "Linear"},
    ),
    "Gradient": (Gradient, {"num_bytes": 64.0, "done": 0.5}, {}),
    "Reading": (Reading, {"at_s": 0.5, "temperature_c": 40.0, "clock_factor": 0.5}, {}),
    "TaskGraph": (
        step,
        {
            "soc": 2,
            "other": 3,
            "seconds": 0.25,
            "num_bytes": 32.0,
            "rounds": 2,
            "participants": (2, 3, 0, 1),
        },
        {},
    ),
    "parse_cluster": (
        lambda **table: parse_cluster(table),
        {"boards": 2, "socs_per_board": 3, "soc_bytes_per_s": 64.0, "board_bytes_per_s": 128.0},
        {},
    ),
    "parse_cluster of slots": (lambda **table: parse_cluster(table), {"boards": [2, 3]}, {}),
    "build_click_model": (build_click_model, {"num_parties": 2, "seed": 3}, {}),
    "build_generator": (build_generator, {"seed": 3, "num_classes": 4}, {}),
    "choose_group_count": (
        hierarchy.choose_group_count,
        {"candidates": (1, 2), "relative_drop": 0.25, "floor": 0.25},
        {"first_epoch_accuracy": lambda num_groups: 0.5},
    ),
    "click_data": (click_data, {"seed": 3, "num_train": 64, "num_test": 16}, {}),
    "group_steps_per_epoch": (
        hierarchy.group_steps_per_epoch,
        {"num_samples": 64, "num_groups": 2, "batch_size": 4},
        {},
    ),
    "integrity_greedy": (
        hierarchy.integrity_greedy,
        {"slots_per_board": (2, 2), "num_groups": 2, "num_socs": 4},
        {},
    ),
    "map_groups": (
        hierarchy.map_groups,
        {"slots_per_board": (2, 2), "num_groups": 2, "num_socs": 4, "budget": 100},
        {},
    ),
    "partition": (
        partition,
        {"num_partitions": 3, "alpha": 0.5, "seed": 3},
        {"labels": LABELS, "scheme": "dirichlet"},
    ),
    "sync_schedule": (
        hierarchy.sync_schedule,
        {"num_epochs": 2, "steps_per_epoch": 4, "interval_epochs": 0.5, "server_interval": 2},
        {},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_export_makes_the_same_of_numbers_of_numpy(name: str, tmp_path: Path) -> None:
    assert failures_of_export(name, tmp_path) == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_makes_the_same_of_numbers_of_numpy(name: str) -> None:
    assert failures_of_method(name) == []


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_an_argument_is_the_same_of_numbers_of_numpy(name: str) -> None:
    made, arguments, others = PARTS[name]
    assert [*failures(name, arguments, lambda changed: snapshot(made(**others, **changed)))] == []


def numeric_arguments(made: Any) -> Iterator[str]:
    """The arguments with int or float in their annotation, but for functions and arrays."""
    for each in inspect.signature(made, eval_str=True).parameters.values():
        kind = (
            each.annotation.__name__ if isinstance(each.annotation, type) else str(each.annotation)
        )
        if "Callable" not in kind and re.search(r"\b(int|float)\b", kind):
            yield each.name


@pytest.mark.parametrize("name", socflower._MODULES)
def test_every_argument_that_is_a_number_has_an_example(name: str) -> None:
    made = inspect.unwrap(getattr(socflower, name))
    if (
        not (inspect.isclass(made) or inspect.isfunction(made))
        or getattr(made, "_is_protocol", False)
        or inspect.isabstract(made)
        or (inspect.isclass(made) and issubclass(made, Exception))
    ):
        return
    tried = [
        key
        for key, example in EXAMPLES.items()
        if key.partition(" ")[0] == name
        for key in example[0]
    ]
    assert set(numeric_arguments(made)) <= set(tried)


@pytest.mark.parametrize(
    "kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
)
def test_an_integer_of_any_width_is_a_whole_number(kind: type[np.integer[Any]]) -> None:
    schedule = socflower.TrainingSchedule(
        num_samples=kind(100), batch_size=kind(100), num_epochs=kind(100)
    )
    assert schedule == socflower.TrainingSchedule(num_samples=100, batch_size=100, num_epochs=100)
    assert 3 * schedule.num_samples == 300 and type(schedule.num_samples) is int


def test_arrays_are_sequences_of_numbers() -> None:
    assert socflower.IntegerUpdate(
        bits=np.array([5, 4]), starts=np.array([0.0, 0.5])
    ) == socflower.IntegerUpdate(bits=[5, 4], starts=[0.0, 0.5])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [True, np.True_, np.float64(2.0), np.float32(2.0), "2", np.array([2])]
)
def test_what_is_no_whole_number_is_refused_as_before(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_groups = .* must be a whole number, 1 or more"):
        socflower.Grouping(num_groups=value)


def test_exported_functions_are_pickled_by_name() -> None:
    for name in socflower._MODULES:
        value = getattr(socflower, name)
        if inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False), st.booleans(), st.text()
)
NESTED = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(0, 100)), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(value=NESTED, variant=st.sampled_from(sorted(VARIANTS)))
def test_nested_numbers_become_those_of_python(value: Any, variant: str) -> None:
    kind, change = VARIANTS[variant]
    if variant == "whole float":
        change = np.float32
    assert snapshot(plain(mapped(value, kind, change))) == snapshot(value)
    assert plain(value) is value


# ------------------------------------------------------------------------------------- what is saved and sent
def trained(of: Callable[[Any], Any], folder: Path) -> Any:
    """The weights, the state and the files of a training whose settings are numbers `of` Python or NumPy."""
    strategy = socflower.SoCFlow(
        cluster=CLUSTER,
        groups=of(2),
        costs=socflower.Costs(model_profile=TOY),
        schedule=socflower.TrainingSchedule(
            num_samples=of(12), batch_size=of(4), num_epochs=of(2), seed=of(3)
        ),
        exchange=socflower.ExchangeSettings(overlap_buckets=of(2)),
    )
    trainer = FP32Trainer(
        optimizer=socflower.sgd(of(0.25), of(0.5)),
        scheduler=socflower.cosine_annealing,
        accumulation_steps=of(2),
        max_grad_norm=of(0.5),
        device="cpu",
    )
    app = socflower.make_client_app(
        network, lambda *where: images(), trainer=trainer, num_threads=of(1)
    )
    loggers = (
        socflower.JsonLinesLogger(folder / "rounds.jsonl"),
        socflower.CsvLogger(folder / "rounds.csv"),
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        for logger in loggers:
            logger.log(of(server_round), {"loss": of(0.5)})

    with LocalGrid(app, num_nodes=of(4), num_workers=0) as grid:
        result = strategy.start(
            grid,
            ArrayRecord(network().state_dict()),
            num_rounds=of(strategy.num_rounds),
            evaluate_fn=evaluate,
        )
    for logger in loggers:
        logger.close()
    store = StateStore(
        folder, StateKind(name="state", schema=1, remedy="none"), prefix="state-", suffix=""
    )
    state = {
        **strategy.state,
        "reports": [[report.server_round, report.epoch] for report in strategy.reports],
    }
    store.write(
        1,
        {key: value for key, value in state.items() if key not in ("outer", "servers", "feedback")},
    )
    trace = socflower.Trace()
    trace.add("SoCs", "row", "name", of(0.5), of(2.0), args={"samples": of(3)})
    trace.write(folder / "trace.json")
    weights = {name: array.numpy().tobytes() for name, array in result.arrays.items()}
    return (
        weights,
        store.read(1)[0],
        {path.name: path.read_text() for path in folder.glob("*.[jc]s*")},
    )


@pytest.mark.parametrize("width", [32, 64])
def test_what_is_trained_saved_and_sent_is_the_same(width: int, tmp_path: Path) -> None:
    def of_numpy(value: float) -> Any:
        return getattr(np, f"{type(value).__name__}{width}")(value)

    for name in ("python", "numpy"):
        (tmp_path / name).mkdir()
    expected = trained(lambda value: value, tmp_path / "python")
    assert len(expected[2]) == 3 and expected[1]["reports"]
    assert trained(of_numpy, tmp_path / "numpy") == expected
