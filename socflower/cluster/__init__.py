"""The hardware, what it costs, and the values that every other part exchanges. Needs no torch and no flwr."""

from socflower.cluster.catalog import device, device_names
from socflower.cluster.clock import DeviceDynamics, Usage, VirtualClock
from socflower.cluster.cluster_file import load_cluster, parse_cluster
from socflower.cluster.cost import FP32, OneProcessor, Pricing, ProcessorCost, StepCost, step_cost, sustained_rates
from socflower.cluster.device import Device, LayerTimings, Processor, StepTimings
from socflower.cluster.profile import LayerProfile, ModelProfile
from socflower.cluster.tasks import HUB, Activity, Compute, Endpoint, GraphBuilder, TaskGraph, Transfer
from socflower.cluster.topology import Board, Cluster, Tier

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
    "GraphBuilder",
    "LayerProfile",
    "LayerTimings",
    "ModelProfile",
    "OneProcessor",
    "Pricing",
    "Processor",
    "ProcessorCost",
    "StepCost",
    "StepTimings",
    "TaskGraph",
    "Tier",
    "Transfer",
    "Usage",
    "VirtualClock",
    "device",
    "device_names",
    "load_cluster",
    "parse_cluster",
    "step_cost",
    "sustained_rates",
]
