"""socflower: train neural networks with Flower on clusters of small machines with slow links.

What this module exports is what programs may rely on (docs/reference/api.md). Names are resolved when first used:
`import socflower` itself loads neither torch nor Flower.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_EXPORTS = {
    "strategies.socflow": ("SoCFlow",),
    "strategies.method": ("RoundReport",),
    "strategies.baselines": (
        "HiPress",
        "OrderedFedAvg",
        "ParameterServer",
        "PowerSGDAllReduce",
        "RingAllReduce",
        "SingleDevice",
        "TreeFedAvg",
    ),
    "strategies.local_sgd": ("DiLoCo", "LocalSGD", "PostLocalSGD", "StreamingDiLoCo"),
    "strategies.outer_momentum": ("OuterSGD", "nesterov"),
    "strategies.methods.local": ("LocalSchedule",),
    "strategies.methods.split": ("CloudSessions",),
    "strategies.methods.split_report": ("SplitRoundReport",),
    "strategies.split_replay": ("SplitReplay",),
    "strategies.group_grid": ("GroupGrid",),
    "strategies.hybrid_pipeline": ("HybridPipeline",),
    "pipeline.planner.selection": ("PlannerSettings",),
    "pipeline.profiler.module_problem": ("pipeline_problem",),
    "pipeline.runtime.payloads": ("ActivationCoding",),
    "peers.ring.settings": ("RingSettings",),
    "strategies.settings": (
        "Costs",
        "ExchangeSettings",
        "Grouping",
        "Streaming",
        "TrainingSchedule",
    ),
    "strategies.planned_rounds": ("Resumable",),
    "strategies.warm_up": ("profile_group_count",),
    "clients.app": ("make_client_app",),
    "clients.heat_mod": ("heat_mod", "node_heat_mod"),
    "clients.split.app": ("make_split_client_app",),
    "clients.split.cloud_sessions": ("CloudClient", "session_factory"),
    "clients.split.in_process": ("SplitSettings",),
    "clients.split.remote_cloud": ("CloudLink", "cloud_link"),
    "training.trainer": (
        "ExchangingSession",
        "SessionResult",
        "Trainer",
        "TrainingSession",
        "TrainingSpan",
    ),
    "training.fp32": ("FP32Trainer", "sgd"),
    "training.muon": ("muon",),
    "training.int8": ("Int8Trainer",),
    "training.int8_module": ("int8_",),
    "edgecloud.runtime.mixed_front": ("MixedEdge",),
    "training.mixed_precision": ("MixedPrecisionTrainer",),
    "training.group": ("train_group",),
    "training.model_state": ("frozen_digest", "load_trainable_state", "trainable_state"),
    "precision.int8.model": ("EngineSettings", "Int8Model", "StepResult"),
    "precision.int8.requantisation": ("RescalingPolicy",),
    "precision.int8.batch_splitting": ("best_blocks", "profile_batch_blocks"),
    "precision.algorithm": (
        "ADAPTIVE_FIXED_POINT",
        "NITI",
        "REAL_SCALES",
        "Fp32Update",
        "IntegerUpdate",
        "TrainingAlgorithm",
        "int8_algorithm",
    ),
    "precision.accelerator": ("Int8Backend", "NativeInt8Backend"),
    "precision.processor_costs": ("Int8Pricing", "MixedPricing"),
    "precision.operator_costs": ("profile_operators",),
    "edgecloud.split_program": (
        "HalvesProgram",
        "JoinedProgram",
        "LayeredProgram",
        "SplitProgram",
        "cut_shapes",
    ),
    "training.schedules": ("RateSchedule", "cosine_annealing", "torch_schedule"),
    "edgecloud.samples": ("CodeSamples", "FeatureSamples", "ImageTargets"),
    "edgecloud.plan.decision": ("WindowSchedule", "adaptive_party"),
    "edgecloud.plan.device_costs": ("split_costs",),
    "edgecloud.links.profile_generator": ("generate_bandwidth_profile",),
    "edgecloud.cloud.operator_calls": ("CloudOperator",),
    "edgecloud.stream.credentials": ("read_token",),
    "thermal.limits": ("HeatLimits", "current_guard"),
    "thermal.sensors.linux": ("LinuxSensors",),
    "thermal.sensors.reading": ("Reading",),
    "thermal.sensors.recording": ("RecordedSource", "record"),
    "thermal.sensors.guarded": ("GuardedSource",),
    "thermal.sensors.simulated": ("SensorFault", "SimulatedSource"),
    "thermal.sensors.step_times": ("StepTiming", "TimedSource"),
    "thermal.fans.control_loop": ("FanControl", "FanSettings", "StopSignals"),
    "thermal.fans.hwmon_pwm": ("HwmonPwm", "find_hwmon"),
    "thermal.fans.objectives": ("ObjectiveCooling",),
    "thermal.fans.policies": ("FixedSpeed", "PassiveCooling", "PlannedLoad", "PredictiveCooling"),
    "thermal.model.rack": ("Rack",),
    "thermal.model.dynamics": ("RackDynamics",),
    "hierarchy.group_count": ("default_candidates",),
    "hierarchy.plan": ("GroupPlan", "plan_groups"),
    "hierarchy.quorum": ("Quorum",),
    "hierarchy.rebalancing": ("Rebalancing",),
    "cluster.cluster_file": ("load_cluster", "parse_cluster"),
    "cluster.cost_model": ("ModelProfile",),
    "cluster.device": ("Device",),
    "cluster.device_catalog": ("device", "device_names"),
    "cluster.topology": ("Cluster",),
    "model_graph.exported_module": ("exported_module",),
    "model_graph.layer_profile": ("profile_module",),
    "sim.event_clock": ("EventClock",),
    "sim.trace": ("Trace",),
    "engines.launch": ("Launched", "launch", "make_loop_apps"),
    "training.loop": ("LoopGroup",),
    "engines.run_log": (
        "CsvLogger",
        "JsonLinesLogger",
        "MlflowLogger",
        "RunLogger",
        "TensorBoardLogger",
        "WandbLogger",
        "logged_evaluation",
    ),
    "engines.local.run_app": ("load_flower_app", "run_app"),
    "flower_adapter": ("quiet_flower",),
    "workloads.data_source": ("DataSource",),
    "workloads.dataset": ("DataSet", "LabelledData"),
    "workloads.map_dataset": ("MapDataset",),
    "workloads.sources": ("data_names", "load_data"),
    "workloads.partition": ("dirichlet_partition", "iid_partition"),
    "workloads.models.built_in": ("model_names",),
    "workloads.models.classifiers": ("build_model",),
    "workloads.evaluation": ("Evaluation", "evaluate"),
    "wire.message_keys": ("HEAT", "HeatReport"),
    "errors": (
        "ConfigError",
        "DataUnavailable",
        "InfeasiblePlan",
        "SocflowerError",
        "TrainingFailed",
    ),
}
"""Names by the module that has them. `make api` writes __init__.pyi, for editors, and the page of the API from this."""

_MODULES = {name: f"{__name__}.{part}" for part, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - strings all


def __getattr__(name: str) -> Any:
    """Return an exported name, importing the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
