"""THE cost model: every planner and every simulated second takes its compute costs from here."""

from dataclasses import dataclass

from socflower.cluster.device import Device
from socflower.cluster.profile import BACKWARD_TO_FORWARD, ModelProfile
from socflower.cluster.topology import Cluster

UPDATE_PASSES = 5.0
"""SGD with momentum reads weight, gradient and momentum and writes weight and momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """One device's share of one training step, at speed factor 1."""

    forward_s: float
    backward_s: float
    update_s: float
    processor: str

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass."""
        return self.forward_s + self.backward_s


def step_cost(model: ModelProfile, device: Device, num_samples: int, processor: str | None = None) -> StepCost:
    """Return what a device needs for `num_samples` of a batch and one update of the weights.

    compute = samples x training FLOPs / sustained rate + layers x fixed overhead (halved between the
    passes like the FLOPs), so that T_train(BS) of F1 is less than proportional in the batch;
    update = passes over the weights / memory bandwidth. No samples, no compute: such a member only updates.
    """
    name = processor or device.default_processor
    arithmetic_s = num_samples * model.training_flops / device.processor(name).rate(model.name)
    overhead_s = len(model.layers) * device.layer_overhead_s if num_samples else 0.0
    forward_share = 1.0 / (1.0 + BACKWARD_TO_FORWARD)
    compute_s = arithmetic_s + overhead_s
    return StepCost(
        forward_s=compute_s * forward_share,
        backward_s=compute_s * (1.0 - forward_share),
        update_s=UPDATE_PASSES * model.weight_bytes / device.memory_bytes_per_s,
        processor=name,
    )


def sustained_rates(cluster: Cluster, model_name: str = "") -> tuple[float, ...]:
    """Return every SoC's FLOP/s on a model, in SoC order: the capacities that shares and plans go by (F4)."""
    devices = [cluster.device_of(soc) for soc in range(cluster.num_socs)]
    return tuple(device.processor(device.default_processor).rate(model_name) for device in devices)
