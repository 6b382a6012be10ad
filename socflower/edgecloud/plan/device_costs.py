"""The costs of a split on devices of the catalogue: `SplitCosts` from a layer profile, without running anything."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import Field

from socflower.cluster.cost_model import UPDATE_PASSES, ModelProfile, compute_seconds
from socflower.cluster.device import Device
from socflower.cluster.device_catalog import usable_memory_bytes
from socflower.cluster.device_memory import require_memory
from socflower.edgecloud.plan.cost_model import training_s
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import Phases
from socflower.errors import ConfigError, require_range
from socflower.field_rules import checked
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


@checked
class CutShape:
    """A possible cut, from the layer profile and the captured graph of a model."""

    # The front half's last layer.
    name: str
    # How many of `ModelProfile.layers` the front half has.
    num_layers: Annotated[int, Field(ge=1)]
    feature_elements_per_sample: Annotated[int, Field(ge=1)]
    # Weights and buffers of the front half, if they are more than the profile's weights.
    front_state_bytes: Annotated[float, Field(ge=0)] = 0.0


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
    reverse: bool = False,
    edge_value_bytes: float = _FLOAT32_BYTES,
    edge_shares: Mapping[str, int] | None = None,
    merge_passes: float = 0.0,
) -> SplitCosts:
    """Return the costs of a batch at every cut, with the front half at the edge (in a `reverse` split: in the cloud).

    The seconds of a whole step are those of the cost model (`cluster.cost_model`), measured ones if the device has
    them. They are distributed over the layers by FLOPs and fixed overhead, and within a layer over forward and backward
    pass by FLOPs: a third is the forward pass of a layer that trains. The first `frozen_layers` have no backward pass
    and no update. `edge_value_bytes` is the size of an activation at the edge (1 in int8).

    `edge_shares`, in place of `edge_processor`, is how many samples of a batch each processor of the edge takes, at the
    same time: a pass is as long as the longest; and `merge_passes` over the weights merge their gradients.

    Raises `ConfigError` if cuts do not follow each other, leave no layer behind them, or the batch is empty.
    """
    _check(model, cuts, batch_size, frozen_layers, optimizer_copies, codec_passes)
    sizes = _Sizes(model, batch_size, frozen_layers, optimizer_copies, edge_value_bytes)
    work = _edge_work(sizes, edge, edge_processor, edge_shares or {}, merge_passes)
    in_cloud = _Seconds.on(model, cloud, batch_size, frozen_layers, None)
    num_layers = len(model.layers)
    costs = [_cut_cost(cut, sizes, work.seconds, in_cloud, reverse) for cut in cuts]
    whole_bytes = [
        cost.front_weight_bytes + sizes.moving_bytes(cut.num_layers, num_layers)
        for cost, cut in zip(costs, cuts, strict=True)
    ]
    codec_s = codec_passes * _FLOAT32_BYTES / edge.memory_bytes_per_s
    return SplitCosts(
        model=model.name,
        batch_size=batch_size,
        cuts=tuple(costs),
        edge_only_s=work.seconds.whole_s(0, num_layers),
        edge_only_memory_bytes=sizes.memory_bytes(0, num_layers, model.input_bytes),
        edge_budget_bytes=usable_memory_bytes(edge),
        label_bytes=0.0 if reverse else label_bytes_per_sample * batch_size,
        codec_s_per_element={bits: codec_s for bits in BITS if bits < 32},
        edge_s_per_byte=BYTE_PASSES / edge.memory_bytes_per_s,
        gradient_bits=gradient_bits,
        edge_processor=work.processor,
        edge_beside=work.beside,
        model_weight_bytes=max(whole_bytes, default=0.0),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The bytes of layers `first` to `last` − 1 of a model, for a batch."""

    model: ModelProfile
    batch_size: int
    frozen_layers: int
    optimizer_copies: float
    value_bytes: float

    def moving_bytes(self, first: int, last: int) -> float:
        """Return the bytes of trained weights and of their optimiser state; frozen ones stay at both ends."""
        trained = self.model.layers[max(first, self.frozen_layers) : last]
        return sum(layer.weight_bytes for layer in trained) * (1.0 + self.optimizer_copies)

    def weight_bytes(self, first: int, last: int) -> float:
        """Return the bytes of all weights."""
        layers = self.model.layers[first:last]
        return sum(layer.weight_bytes + layer.frozen_bytes for layer in layers)

    def memory_bytes(self, first: int, last: int, input_bytes: float) -> float:
        """Return the bytes for training: weights, gradients, optimiser state, and the batch's activations."""
        outputs_bytes = sum(layer.output_bytes for layer in self.model.layers[first:last])
        values = (input_bytes + outputs_bytes) * self.value_bytes / _FLOAT32_BYTES
        weights_bytes = self.weight_bytes(first, last) + self.moving_bytes(first, last)
        return weights_bytes + self.batch_size * values


def _cut_cost(
    cut: CutShape,
    sizes: _Sizes,
    at_edge: "_Seconds | _Together",
    in_cloud: "_Seconds",
    reverse: bool,
) -> CutCost:
    front, back = (0, cut.num_layers), (cut.num_layers, len(sizes.model.layers))
    here, there = (back, front) if reverse else (front, back)
    feature_bytes = cut.feature_elements_per_sample * _FLOAT32_BYTES
    input_bytes = feature_bytes if reverse else sizes.model.input_bytes
    # Buffers, which the profile does not count.
    more_bytes = max(0.0, cut.front_state_bytes - sizes.weight_bytes(*front))
    return CutCost(
        name=cut.name,
        edge_forward_s=at_edge.forward_s(*here),
        edge_backward_s=at_edge.backward_s(*here),
        cloud_s=in_cloud.whole_s(*there),
        feature_elements=cut.feature_elements_per_sample * sizes.batch_size,
        front_weight_bytes=sizes.moving_bytes(*front) + more_bytes,
        edge_memory_bytes=sizes.memory_bytes(*here, input_bytes),
        front_trains=cut.num_layers > sizes.frozen_layers,
    )


class _EdgeWork(NamedTuple):
    """The seconds of an edge's layers, its slowest processor, and the others' times as parts of that one's."""

    seconds: "_Seconds | _Together"
    processor: str | None
    beside: tuple[tuple[str, float], ...]


def _edge_work(
    sizes: _Sizes,
    edge: Device,
    processor: str | None,
    shares: Mapping[str, int],
    merge_passes: float,
) -> _EdgeWork:
    model = sizes.model
    frozen_layers = sizes.frozen_layers
    parts = {
        name: _Seconds.on(model, edge, count, frozen_layers, name)
        for name, count in shares.items()
        if count
    }
    if not parts:
        alone = _Seconds.on(model, edge, sizes.batch_size, frozen_layers, processor)
        return _EdgeWork(alone, processor, ())
    whole_s = {name: part.whole_s(0, len(model.layers)) for name, part in parts.items()}
    longest = max(whole_s, key=lambda name: whole_s[name])
    passes = merge_passes if len(parts) > 1 else 0.0
    together = _Together(model, edge, tuple(parts.values()), passes)
    others = [name for name in whole_s if name != longest]
    beside = tuple((name, whole_s[name] / whole_s[longest]) for name in others)
    return _EdgeWork(together, longest, beside)


def require_edge_memory(
    device: Device,
    costs: SplitCosts,
    plan: SplitPlan,
    edge: int,
) -> None:
    """Raise `InfeasiblePlan` if an edge's device has too little memory for its half of a plan."""
    half = "all layers" if plan.cut is None else f"its half at cut {costs.cuts[plan.cut].name}"
    require_memory(
        device,
        costs.needed_bytes(plan),
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
    added while its interface is busy, as in the simulator. Processors `beside` the first one draw their active watts
    for their part of its time.
    """
    active_w = device.processor(processor or device.default_processor).active_w
    for name, part in beside:
        active_w += (device.processor(name).active_w - device.idle_w) * part
    idle_s = max(0.0, duration_s - compute_s)
    return active_w * compute_s + device.idle_w * idle_s + device.network_w * network_s


def training_energy_j(
    device: Device,
    phases: Phases,
    num_batches: int,
    window: float,
    processor: str | None = None,
    beside: Sequence[tuple[str, float]] = (),
    *,
    grouped: bool = False,
) -> float:
    """Return the joules of an edge for a training of F26; the network is busy for at most the whole duration."""
    duration_s = training_s(phases, num_batches, window, grouped=grouped)
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
        layers_s = [
            batch_size * layer.training_flops / rate + device.layer_overhead_s
            for layer in model.layers
        ]
        whole_s = compute_seconds(model, device, batch_size, name)
        total_s = sum(layers_s)
        scale = whole_s / total_s if total_s else 0.0
        forward: list[float] = []
        backward: list[float] = []
        for index, (layer, seconds) in enumerate(
            zip(
                model.layers,
                layers_s,
                strict=True,
            )
        ):
            forward.append(seconds * scale * layer.forward_share)
            update_s = UPDATE_PASSES * layer.weight_bytes / device.memory_bytes_per_s
            backward_s = seconds * scale * (1.0 - layer.forward_share) + update_s
            backward.append(0.0 if index < frozen_layers else backward_s)
        return _Seconds(tuple(forward), tuple(backward))

    def forward_s(self, first: int, last: int) -> float:
        return math.fsum(self.forward[first:last])

    def backward_s(self, first: int, last: int) -> float:
        return math.fsum(self.backward[first:last])

    def whole_s(self, first: int, last: int) -> float:
        return self.forward_s(first, last) + self.backward_s(first, last)


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
        merge_s = self.merge_passes * merged_bytes / self.device.memory_bytes_per_s
        return max(part.backward_s(first, last) for part in self.parts) + merge_s

    def whole_s(self, first: int, last: int) -> float:
        return self.forward_s(first, last) + self.backward_s(first, last)


def _check(
    model: ModelProfile,
    cuts: Sequence[CutShape],
    batch_size: int,
    frozen_layers: int,
    optimizer_copies: float,
    codec_passes: float,
) -> None:
    where = f"model {model.name}"
    num_layers = len(model.layers)
    require_range(where, least=1, batch_size=batch_size)
    require_range(
        where,
        least=0,
        optimizer_copies=optimizer_copies,
        codec_passes=codec_passes,
    )
    require_range(where, least=0, below=num_layers, frozen_layers=frozen_layers)
    for before, after in pairwise(cuts):
        if after.num_layers < before.num_layers:
            raise ConfigError(
                f"{where}: cut {after.name} with {after.num_layers} layers follows cut {before.name} with "
                f"{before.num_layers}; give cuts in running order"
            )
    if cuts and cuts[-1].num_layers >= num_layers:
        raise ConfigError(
            f"{where}: cut {cuts[-1].name} leaves none of {num_layers} layers behind it"
        )
