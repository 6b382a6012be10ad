"""What a pipeline is planned for: a model by layers, unequal devices with measured seconds, links and memory budgets.

Symbols of the paper: layer l has forward and backward seconds t_f(l, β), t_b(l, β) of β samples on each kind of device,
w_l bytes of weights and a_l bytes of output; device d has a budget u_d; b(d, d′) is the bandwidth between two devices.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from socflower.cluster import Cluster, Device
from socflower.cluster.cost_model import UPDATE_PASSES
from socflower.errors import ConfigError, require_range

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayer:
    """One layer, per sample where it says so. A cut may follow any layer but the last."""

    name: str
    forward_flops: float  # per sample; multiply and add are two operations
    backward_flops: float  # per sample
    weight_bytes: float  # of the weights that are trained; also of their gradients
    activation_bytes: (
        float  # per sample: what the layer makes and keeps from its forward to its backward pass
    )
    output_bytes: float  # per sample: all tensors that cross a cut behind the layer
    frozen_bytes: float = 0.0  # of the weights that are not trained
    num_tensors: int = 0  # that are trained
    num_operations: int = 1  # primitive operations, each with a fixed cost

    def __post_init__(self) -> None:
        require_range(
            f"layer {self.name}",
            least=0,
            forward_flops=self.forward_flops,
            backward_flops=self.backward_flops,
            weight_bytes=self.weight_bytes,
            frozen_bytes=self.frozen_bytes,
            num_tensors=self.num_tensors,
            activation_bytes=self.activation_bytes,
            output_bytes=self.output_bytes,
            num_operations=self.num_operations,
        )


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """All layers of a model, in the order in which they run."""

    name: str
    layers: tuple[PipelineLayer, ...]
    input_bytes: float  # per sample
    label_bytes: float = 0.0  # per sample
    cuts: str = "layers"  # how it was cut into layers, so that others cut it alike
    sample_shape: tuple[int, ...] = ()  # of the samples that it was read with; (): unknown

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.name}: has no layers; a pipeline needs at least one")
        require_range(
            f"model {self.name}",
            least=0,
            input_bytes=self.input_bytes,
            label_bytes=self.label_bytes,
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def sha256(self) -> str:
        """Digest of the layers' names, weights and outputs, by which processes know that they have the same model."""
        parts = [
            (layer.name, layer.weight_bytes, layer.frozen_bytes, layer.output_bytes)
            for layer in self.layers
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def weight_prefix(self) -> Floats:
        """Trained bytes of the first l layers, for l from 0 to all."""
        return _prefix([layer.weight_bytes for layer in self.layers])

    @cached_property
    def frozen_prefix(self) -> Floats:
        """Frozen bytes of the first l layers."""
        return _prefix([layer.frozen_bytes for layer in self.layers])

    @cached_property
    def activation_prefix(self) -> Floats:
        """Kept bytes per sample of the first l layers."""
        return _prefix([layer.activation_bytes for layer in self.layers])

    @cached_property
    def entering_bytes(self) -> Floats:
        """Bytes per sample that enter layer l, for l from 0; at the end those of the last layer's output."""
        return np.array([self.input_bytes, *(layer.output_bytes for layer in self.layers)])

    @cached_property
    def cut_bytes(self) -> Floats:
        """Bytes per sample that cross a cut before layer l, for l from 0 to all; none at either end."""
        return np.array([0.0, *(layer.output_bytes for layer in self.layers[:-1]), 0.0])

    def weight_bytes(self, first: int, last: int) -> float:
        """Return the trained bytes of layers `first` to `last`."""
        return float(self.weight_prefix[last + 1] - self.weight_prefix[first])

    def kept_bytes(self, first: int, last: int) -> float:
        """Return what a stage of these layers keeps for each sample in flight: its input and its activations (F28)."""
        return float(
            self.entering_bytes[first]
            + self.activation_prefix[last + 1]
            - self.activation_prefix[first]
        )

    def state_bytes(self, first: int, last: int, optimizer_copies: float) -> float:
        """Return MOD + OPT of these layers (F28): weights, gradient buffers, optimiser state, frozen weights."""
        frozen = float(self.frozen_prefix[last + 1] - self.frozen_prefix[first])
        return (2.0 + optimizer_copies) * self.weight_bytes(first, last) + frozen


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSeconds:
    """Seconds of each layer's forward and backward pass on one kind of device, at several batch sizes.

    Two devices of a kind share one object, by which planners know that they are equal.
    """

    device: str  # the kind
    batches: tuple[int, ...]  # samples, rising
    forward_s: Floats  # [layer][batch], of the whole batch
    backward_s: Floats  # [layer][batch]
    estimated: bool = False  # computed from operations, not measured
    _tables: list[tuple[Floats, Floats]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"seconds on {self.device}"
        if (
            not self.batches
            or self.batches[0] < 1
            or any(after <= before for before, after in pairwise(self.batches))
        ):
            raise ConfigError(
                f"{where}: batches must rise from 1 or more, got {list(self.batches)}"
            )
        for key in ("forward_s", "backward_s"):
            array = np.array(getattr(self, key), dtype=np.float64)
            if array.ndim != 2 or not len(array) or array.shape[1] != len(self.batches):
                raise ConfigError(
                    f"{where}: {key} must be of layers x {len(self.batches)} batches, got {array.shape}"
                )
            if not (np.isfinite(array).all() and (array >= 0.0).all()):
                raise ConfigError(f"{where}: {key} must be 0 or more and finite everywhere")
            array.flags.writeable = False
            object.__setattr__(self, key, array)
        if len(self.forward_s) != len(self.backward_s):
            raise ConfigError(
                f"{where}: forward_s is of {len(self.forward_s)} layers and backward_s of "
                f"{len(self.backward_s)}"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.forward_s)

    def forward(self, first: int, last: int, num_samples: int) -> float:
        """Return the seconds of the forward pass of layers `first` to `last`; 0 without samples."""
        table = self.prefixes(num_samples)[0]
        return float(table[last + 1, num_samples] - table[first, num_samples])

    def backward(self, first: int, last: int, num_samples: int) -> float:
        """Return the seconds of the backward pass of layers `first` to `last`; 0 without samples."""
        table = self.prefixes(num_samples)[1]
        return float(table[last + 1, num_samples] - table[first, num_samples])

    def prefixes(self, max_samples: int) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of the first l layers as [l][samples], for at least `max_samples`.

        Each layer's seconds follow `cluster.device.StepTimings`: linear between measured batches, beyond them with the
        slope of the nearest two, and never less for more samples.
        """
        if max_samples < 0:
            raise ConfigError(
                f"seconds on {self.device}: a number of samples must not be negative, got {max_samples}"
            )
        if not self._tables or self._tables[0][0].shape[1] <= max_samples:
            columns = 1 << max(5, max_samples.bit_length())
            samples = np.arange(columns, dtype=np.float64)
            self._tables[:] = [
                (self._table(self.forward_s, samples), self._table(self.backward_s, samples))
            ]
        return self._tables[0]

    def _table(self, seconds: Floats, samples: Floats) -> Floats:
        batches, rising_s = (
            np.array(self.batches, np.float64),
            np.maximum.accumulate(seconds, axis=1),
        )
        dense = (
            rising_s[:, :1] * samples / batches[0]
        )  # in proportion: one measurement, or the least below the first
        if len(batches) > 1:
            slopes_s = np.diff(rising_s, axis=1) / np.diff(batches)
            slopes_s[:, -1] = np.where(
                slopes_s[:, -1] > 0.0, slopes_s[:, -1], rising_s[:, -1] / batches[-1]
            )
            segment = np.clip(
                np.searchsorted(batches, samples, side="right") - 1, 0, len(batches) - 2
            )
            line = rising_s[:, segment] + slopes_s[:, segment] * (samples - batches[segment])
            # The last slope is that of the extrapolation; within the segment, noise may have made it 0.
            within = (samples >= batches[-2]) & (samples <= batches[-1])
            share = (samples - batches[-2]) / (batches[-1] - batches[-2])
            last = rising_s[:, -2:-1] + share * (rising_s[:, -1:] - rising_s[:, -2:-1])
            beyond = rising_s[:, -1:] + slopes_s[:, -1:] * (samples - batches[-1])
            line = np.where(within, last, np.where(samples > batches[-1], beyond, line))
            first = rising_s[:, :1] - (rising_s[:, 1:2] - rising_s[:, :1]) / (
                batches[1] - batches[0]
            ) * (batches[0] - samples)
            dense = np.where(samples < batches[0], np.maximum(first, dense), line)
        dense[:, 0] = 0.0
        return np.vstack([np.zeros((1, len(samples))), np.cumsum(dense, axis=0)])


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineDevice:
    """A device that may take part, in a slot of the cluster."""

    soc: int  # its number in the cluster
    name: str
    seconds: LayerSeconds
    memory_bytes: float  # budget
    update_bytes_per_s: float = (
        math.inf
    )  # of memory, for the update of weights; infinite: the update is free
    byte_s: float = 0.0  # of its processor, for each byte of activations and gradients that it sends or receives
    int8_processor: str = ""  # computes its passes, whose masters stay in FP32; none: in FP32 on the default processor

    def __post_init__(self) -> None:
        require_range(f"device {self.name}", least=0, soc=self.soc, byte_s=self.byte_s)
        require_range(
            f"device {self.name}",
            above=0,
            memory_bytes=self.memory_bytes,
            advice="give the bytes that training may use",
        )
        if not self.update_bytes_per_s > 0:
            raise ConfigError(
                f"device {self.name}: update_bytes_per_s = {self.update_bytes_per_s} must be above 0"
            )

    def update_s(self, weight_bytes: float) -> float:
        """Return the seconds in which it updates so many bytes of weights."""
        return UPDATE_PASSES * weight_bytes / self.update_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class PipelineProblem:
    """A model, the devices that may train it, and a mini-batch of `num_micro_batches` x `micro_batch_size` samples."""

    model: PipelineModel
    devices: tuple[PipelineDevice, ...]
    cluster: Cluster
    micro_batch_size: int  # samples, over all devices of a stage
    num_micro_batches: int
    optimizer_copies: float = 1.0  # of the trained weights: 1 for SGD with momentum, 2 for Adam
    activation_part: float = (
        1.0  # of the bytes of tensors that cross a cut, what is sent: 0.25 in eight bits
    )
    gradient_part: float = 1.0  # and of their gradients

    def __post_init__(self) -> None:
        require_range(
            "pipeline",
            least=1,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
        )
        require_range("pipeline", least=0, optimizer_copies=self.optimizer_copies)
        require_range(
            "pipeline",
            above=0,
            most=1,
            activation_part=self.activation_part,
            gradient_part=self.gradient_part,
        )
        if not self.devices:
            raise ConfigError("pipeline: no devices; give at least one")
        socs = [device.soc for device in self.devices]
        twice = next((soc for soc in socs if socs.count(soc) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"pipeline: SoC {twice} is given to two devices; each needs a slot of its own"
            )
        for device in self.devices:
            self.cluster.board_of(device.soc)
            if device.seconds.num_layers != self.model.num_layers:
                raise ConfigError(
                    f"pipeline: device {device.name} has seconds of {device.seconds.num_layers} layers, "
                    f"and model {self.model.name} has {self.model.num_layers}; profile it for this model"
                )

    @property
    def mini_batch_size(self) -> int:
        """Samples of one update of the weights."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def sent_part(self) -> float:
        """What is sent of a cut's bytes both ways: 2 where nothing is coded."""
        return self.activation_part + self.gradient_part

    @cached_property
    def _device_of(self) -> dict[int, PipelineDevice]:
        return {device.soc: device for device in self.devices}

    def device(self, soc: int) -> PipelineDevice:
        """Return the device in a slot; `ConfigError` if it is none of the problem's."""
        try:
            return self._device_of[soc]
        except KeyError:
            raise ConfigError(
                f"pipeline: SoC {soc} is no device of this problem; it has "
                f"{', '.join(str(device.soc) for device in self.devices)}"
            ) from None

    def pass_s(
        self, device: PipelineDevice, first: int, last: int, share: int
    ) -> tuple[float, float]:
        """Return the seconds of the forward and the backward pass of `share` samples over layers `first` to `last`.

        In them is what the processor itself takes for the bytes that cross the cuts on either side (`byte_s`).
        """
        crossing_s = device.byte_s * share * float(self.model.cut_bytes[[first, last + 1]].sum())
        return (
            device.seconds.forward(first, last, share) + crossing_s * self.activation_part,
            device.seconds.backward(first, last, share) + crossing_s * self.gradient_part,
        )

    def kind(self, soc: int) -> Device:
        """Return the kind of hardware in a slot: processors and watts."""
        return self.cluster.device_of(soc)

    @property
    def int8_socs(self) -> tuple[int, ...]:
        """The devices whose stages compute in int8."""
        return tuple(device.soc for device in self.devices if device.int8_processor)

    @cached_property
    def _bandwidths(self) -> dict[tuple[int, int], float]:
        return {}

    def bandwidth(self, source: int, target: int) -> float:
        """Return b(d, d′): the least bandwidth of the links between two devices, in bytes per second."""
        pair = (source, target)
        if pair not in self._bandwidths:
            links = self.cluster.link_bytes_per_s
            self._bandwidths[pair] = min(links[link] for link in self.cluster.path(source, target))
        return self._bandwidths[pair]

    def least_bandwidth(self, socs: Sequence[int]) -> float:
        """Return the least bandwidth between any two of several devices; infinite for one."""
        return min((self.bandwidth(a, b) for a in socs for b in socs if a != b), default=math.inf)


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
