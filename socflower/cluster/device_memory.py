"""Checks that a device has enough memory for its part of a training."""

from collections.abc import Mapping

from socflower.cluster.cost_model import FP32, ModelProfile, Pricing
from socflower.cluster.device import Device
from socflower.cluster.device_catalog import usable_memory_bytes
from socflower.cluster.topology import Cluster
from socflower.errors import InfeasiblePlan
from socflower.quantities import counted, human_bytes

_WIDTH_IN_INT8 = 0.25
"""Bytes of an int8 value for each byte of an FP32 value."""


def require_memory(kind: Device, needed_bytes: float, what: str, remedy: str) -> None:
    """Raise `InfeasiblePlan` if `what` takes more memory than system and runtime leave on a device."""
    usable_bytes = usable_memory_bytes(kind)
    if needed_bytes > usable_bytes:
        raise InfeasiblePlan(
            f"{what} takes at least {human_bytes(needed_bytes)} of memory, and {kind.name} has "
            f"{human_bytes(usable_bytes)} of {human_bytes(kind.memory_bytes)} left; {remedy}"
        )


def require_training_memory(
    cluster: Cluster,
    profile: ModelProfile,
    shares: Mapping[int, int],
    *,
    pricing: Pricing = FP32,
    optimizer_copies: float = 0.0,
    remedy: str = "use a smaller batch or model",
) -> None:
    """Raise `InfeasiblePlan` for the first SoC that has too little memory for its share of a step, in samples.

    A SoC needs memory for weights, gradients, `optimizer_copies` of the weights and activations; in int8 at least a
    quarter of that.
    """
    width = _WIDTH_IN_INT8 if getattr(pricing, "arithmetic", "") == "int8" else 1.0
    for soc, share in shares.items():
        require_memory(
            cluster.device_of(soc),
            profile.training_memory_bytes(share, optimizer_copies) * width,
            f"SoC {soc}: to train {profile.name} on {counted(share, 'sample')} a step",
            remedy,
        )
