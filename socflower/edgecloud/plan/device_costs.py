"""The costs of a split on devices of the catalogue: `SplitCosts` from a layer profile, without running anything."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from socflower.cluster.cost_model import UPDATE_PASSES, ModelProfile, compute_seconds
from socflower.cluster.device import Device
from socflower.cluster.device_memory import require_memory
from socflower.edgecloud.plan.cost_model import training_s
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import Phases
from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.wire.codecs.quantisation import BITS

CODEC_PASSES = 105.0
"""Passes over float32 features that quantisation and error feedback cost, as a measure of a device's speed.

The paper's lines (Fig. 11), 26.4 ms a MB on a Raspberry Pi 4B and 4.15 ms on a Jetson TX2, are 92 and 124 passes at
the catalogue's memory rates; this is their geometric mean. For a faster codec pass a smaller value.
"""

BYTE_PASSES = 4.0
"""Copies of a byte between a tensor and the network interface: serialising, encryption, to the kernel, to the card."""

_FLOAT32_BYTES = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CutShape:
    """A possible cut, from the layer profile and the captured graph of a model."""

    name: str  # of the front half's last layer
    num_layers: int  # how many of `ModelProfile.layers` the front half has
    feature_elements_per_sample: int
    front_state_bytes: float = (
        0.0  # weights and buffers of the front half, if they are more than the profile's weights
    )

    def __post_init__(self) -> None:
        require_range(
            f"cut {self.name}",
            least=1,
            num_layers=self.num_layers,
            feature_elements_per_sample=self.feature_elements_per_sample,
        )
        require_range(f"cut {self.name}", least=0, front_state_bytes=self.front_state_bytes)


@plain_numbers
def split_costs(
    model: ModelProfile,
    cuts: Sequence[CutShape],
    edge: Device,
    cloud: Device,
    batch_size: int,
    *,
    frozen_layers: int = 0,
    optimizer_copies: float = 1.0,
    label_bytes_per_sample: float = 8.0,
    gradient_bits: int = 32,
    codec_passes: float = CODEC_PASSES,
    edge_processor: str | None = None,
    cloud_processor: str | None = None,
    reverse: bool = False,
    edge_value_bytes: float = _FLOAT32_BYTES,
    edge_shares: Mapping[str, int] | None = None,
    merge_passes: float = 0.0,
) -> SplitCosts:
    """Return the costs of a batch at every cut, with the front half at the edge (in a `reverse` split: in the cloud).

    The seconds of a whole step are those of the cost model (`cluster.cost_model`), measured ones where the device has
    them, distributed over the layers by FLOPs and fixed overhead, and within a layer over forward and backward pass by
    FLOPs: a third is the forward pass of a layer that trains. The first `frozen_layers` have no backward pass and no
    update. Memory at the edge: weights, gradients and optimiser state of the trained layers, the weights only of frozen
    layers, and the batch's activations, of `edge_value_bytes` each (1 in int8).

    `edge_shares`, in place of `edge_processor`, is how many samples of a batch each processor of the edge takes, at the
    same time: a pass is as long as the longest; and `merge_passes` over the weights merge their gradients.

    Raises ConfigError if cuts do not follow each other, leave no layer behind them, or the batch is empty.
    """
    _check(model, cuts, batch_size, frozen_layers, optimizer_copies, codec_passes)
    shares = {name: count for name, count in (edge_shares or {}).items() if count}
    by_processor = {
        name: _Seconds.on(model, edge, count, frozen_layers, name) for name, count in shares.items()
    }
    at_edge = (
        _Together(
            model, edge, tuple(by_processor.values()), merge_passes if len(shares) > 1 else 0.0
        )
        if by_processor
        else _Seconds.on(model, edge, batch_size, frozen_layers, edge_processor)
    )
    whole_s = {
        name: seconds.forward_s(0, len(model.layers)) + seconds.backward_s(0, len(model.layers))
        for name, seconds in by_processor.items()
    }
    if whole_s:
        edge_processor = max(whole_s, key=lambda name: whole_s[name])
    in_cloud = _Seconds.on(model, cloud, batch_size, frozen_layers, cloud_processor)
    num_layers = len(model.layers)

    def moving_bytes(first: int, last: int) -> float:
        """Return the bytes of trained weights and of their optimiser state; frozen ones stay at both ends."""
        trained = model.layers[max(first, frozen_layers) : last]
        return sum(layer.weight_bytes for layer in trained) * (1.0 + optimizer_copies)

    def memory_bytes(first: int, last: int, input_bytes: float) -> float:
        trained = model.layers[max(first, frozen_layers) : last]
        weights_bytes = sum(
            layer.weight_bytes + layer.frozen_bytes for layer in model.layers[first:last]
        )
        return (
            weights_bytes
            + sum(layer.weight_bytes for layer in trained) * (1.0 + optimizer_copies)
            + batch_size
            * (input_bytes + sum(layer.output_bytes for layer in model.layers[first:last]))
            * edge_value_bytes
            / _FLOAT32_BYTES
        )

    costs: list[CutCost] = []
    for cut in cuts:
        front = model.layers[: cut.num_layers]
        weights_bytes = sum(layer.weight_bytes + layer.frozen_bytes for layer in front)
        elements = cut.feature_elements_per_sample * batch_size
        first, last, elsewhere = 0, cut.num_layers, (cut.num_layers, num_layers)
        input_bytes = model.input_bytes
        if reverse:
            first, last, elsewhere = cut.num_layers, num_layers, (0, cut.num_layers)
            input_bytes = cut.feature_elements_per_sample * _FLOAT32_BYTES
        costs.append(
            CutCost(
                name=cut.name,
                edge_forward_s=at_edge.forward_s(first, last),
                edge_backward_s=at_edge.backward_s(first, last),
                cloud_s=in_cloud.forward_s(*elsewhere) + in_cloud.backward_s(*elsewhere),
                feature_elements=elements,
                front_weight_bytes=moving_bytes(0, cut.num_layers)
                + max(0.0, cut.front_state_bytes - weights_bytes),
                edge_memory_bytes=memory_bytes(first, last, input_bytes),
                front_trains=cut.num_layers > frozen_layers,
            )
        )
    codec_s = codec_passes * _FLOAT32_BYTES / edge.memory_bytes_per_s
    return SplitCosts(
        model=model.name,
        batch_size=batch_size,
        cuts=tuple(costs),
        edge_only_s=at_edge.forward_s(0, num_layers) + at_edge.backward_s(0, num_layers),
        edge_only_memory_bytes=memory_bytes(0, num_layers, model.input_bytes),
        label_bytes=0.0 if reverse else label_bytes_per_sample * batch_size,
        codec_s_per_element={bits: codec_s for bits in BITS if bits < 32},
        edge_s_per_byte=BYTE_PASSES / edge.memory_bytes_per_s,
        gradient_bits=gradient_bits,
        edge_processor=edge_processor,
        edge_beside=tuple(
            (name, seconds / whole_s[edge_processor])
            for name, seconds in whole_s.items()
            if edge_processor is not None and name != edge_processor
        ),
        model_weight_bytes=max(
            cost.front_weight_bytes + moving_bytes(cut.num_layers, num_layers)
            for cost, cut in zip(costs, cuts, strict=True)
        ),
    )


def require_edge_memory(device: Device, costs: SplitCosts, plan: SplitPlan, edge: int) -> None:
    """Raise `InfeasiblePlan` if an edge's device has too little memory for its half of a plan."""
    needed_bytes = (
        costs.edge_only_memory_bytes if plan.cut is None else costs.cuts[plan.cut].edge_memory_bytes
    )
    half = "all layers" if plan.cut is None else f"its half at cut {costs.cuts[plan.cut].name}"
    require_memory(
        device,
        needed_bytes,
        f"edge {edge}: to train {half} of {costs.model} on {costs.batch_size} samples a batch",
        "use a smaller batch or another cut",
    )


def edge_energy_j(
    device: Device,
    *,
    compute_s: float,
    network_s: float,
    duration_s: float,
    processor: str | None = None,
    beside: Sequence[tuple[str, float]] = (),
) -> float:
    """Return the joules of an edge that computed, sent or received, and was idle within `duration_s`.

    The device draws its active watts while its processor computes and its idle watts otherwise; the network's watts are
    added while its interface is busy, as in the simulator; those of processors `beside` it for their part of its time.
    Raises ConfigError for a part longer than the whole.
    """
    if not (
        0 <= compute_s <= duration_s * (1 + 1e-9)
        and 0 <= network_s <= duration_s * (1 + 1e-9) < math.inf
    ):
        raise ConfigError(
            f"energy: compute_s = {compute_s} and network_s = {network_s} must lie between 0 and "
            f"duration_s = {duration_s}, which must be finite"
        )
    active_w = device.processor(processor or device.default_processor).active_w
    active_w += sum(
        (device.processor(name).active_w - device.idle_w) * part for name, part in beside
    )
    return (
        active_w * compute_s
        + device.idle_w * max(0.0, duration_s - compute_s)
        + device.network_w * network_s
    )


def training_energy_j(
    device: Device,
    phases: Phases,
    num_batches: int,
    window: float,
    processor: str | None = None,
    beside: Sequence[tuple[str, float]] = (),
) -> float:
    """Return the joules of an edge for a training of F26; the network is busy for at most the whole duration."""
    duration_s = training_s(phases, num_batches, window)
    network_s = num_batches * (phases.up_s + phases.down_s)
    return edge_energy_j(
        device,
        compute_s=num_batches * phases.edge_s,
        network_s=min(network_s, duration_s),
        duration_s=duration_s,
        processor=processor,
        beside=beside,
    )


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Forward and backward seconds of every layer for a batch; the backward seconds include the update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @staticmethod
    def on(
        model: ModelProfile,
        device: Device,
        batch_size: int,
        frozen_layers: int,
        processor: str | None,
    ) -> "_Seconds":
        name = processor or device.default_processor
        rate = device.processor(name).rate(model.name)
        by_formula = [
            batch_size * layer.training_flops / rate + device.layer_overhead_s
            for layer in model.layers
        ]
        whole_s = compute_seconds(model, device, batch_size, name)
        scale = whole_s / total if (total := sum(by_formula)) else 0.0
        forward = tuple(
            seconds * scale * layer.forward_share
            for layer, seconds in zip(model.layers, by_formula, strict=True)
        )
        backward = tuple(
            0.0
            if index < frozen_layers
            else by_formula[index] * scale * (1.0 - layer.forward_share)
            + UPDATE_PASSES * layer.weight_bytes / device.memory_bytes_per_s
            for index, layer in enumerate(model.layers)
        )
        return _Seconds(forward, backward)

    def forward_s(self, first: int, last: int) -> float:
        return math.fsum(self.forward[first:last])

    def backward_s(self, first: int, last: int) -> float:
        return math.fsum(self.backward[first:last])


@dataclass(frozen=True, slots=True)
class _Together:
    """Seconds of processors that each compute a part of a batch, and merge their gradients."""

    model: ModelProfile
    device: Device
    parts: tuple[_Seconds, ...]
    merge_passes: float

    def forward_s(self, first: int, last: int) -> float:
        return max(part.forward_s(first, last) for part in self.parts)

    def backward_s(self, first: int, last: int) -> float:
        merged_bytes = sum(layer.weight_bytes for layer in self.model.layers[first:last])
        return (
            max(part.backward_s(first, last) for part in self.parts)
            + self.merge_passes * merged_bytes / self.device.memory_bytes_per_s
        )


def _check(
    model: ModelProfile,
    cuts: Sequence[CutShape],
    batch_size: int,
    frozen_layers: int,
    optimizer_copies: float,
    codec_passes: float,
) -> None:
    require_range("split costs", least=1, batch_size=batch_size)
    require_range(
        "split costs", least=0, optimizer_copies=optimizer_copies, codec_passes=codec_passes
    )
    if not cuts:
        raise ConfigError(f"model {model.name}: has no place to cut it; give at least one")
    for before, after in pairwise(cuts):
        if after.num_layers < before.num_layers:
            raise ConfigError(
                f"model {model.name}: cut {after.name} comes after cut {before.name} but has fewer "
                f"layers, {after.num_layers} against {before.num_layers}; give cuts in running order"
            )
    if cuts[-1].num_layers >= len(model.layers):
        raise ConfigError(
            f"model {model.name}: cut {cuts[-1].name} leaves no layer behind it; it must come before the "
            f"last of {len(model.layers)} layers"
        )
    if not 0 <= frozen_layers < len(model.layers):
        raise ConfigError(
            f"model {model.name}: frozen_layers = {frozen_layers} must be 0 or more and leave one of "
            f"{len(model.layers)} to train"
        )
