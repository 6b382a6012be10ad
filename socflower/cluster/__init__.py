"""The hardware, its cost model, and the values that all other parts exchange. Imports neither torch nor flwr."""

from socflower.cluster.cluster_file import load_cluster, parse_cluster
from socflower.cluster.cost_model import (
    FP32,
    Gradient,
    LayerProfile,
    ModelProfile,
    OneProcessor,
    Pricing,
    ProcessorCost,
    StepCost,
    bucket_starts,
    step_cost,
    sustained_rates,
)
from socflower.cluster.device import Device, LayerTimings, Processor, StepTimings
from socflower.cluster.device_catalog import device, device_names
from socflower.cluster.task_graph import (
    HUB,
    Activity,
    Compute,
    Endpoint,
    TaskGraph,
    TaskGraphBuilder,
    Transfer,
)
from socflower.cluster.topology import Board, Cluster, Server, Tier
from socflower.cluster.virtual_clock import DeviceDynamics, Usage, VirtualClock

__all__ = [
    "FP32",
    "HUB",
    "Activity",
    "Board",
    "Cluster",
    "Compute",
    "Device",
    "DeviceDynamics",
    "Endpoint",
    "Gradient",
    "LayerProfile",
    "LayerTimings",
    "ModelProfile",
    "OneProcessor",
    "Pricing",
    "Processor",
    "ProcessorCost",
    "Server",
    "StepCost",
    "StepTimings",
    "TaskGraph",
    "TaskGraphBuilder",
    "Tier",
    "Transfer",
    "Usage",
    "VirtualClock",
    "bucket_starts",
    "device",
    "device_names",
    "load_cluster",
    "parse_cluster",
    "step_cost",
    "sustained_rates",
]
