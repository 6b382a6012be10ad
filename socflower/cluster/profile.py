"""What a model costs, layer by layer, before any device is named. `tracing.py` makes these from a torch module."""

from dataclasses import dataclass

from socflower.errors import ConfigError

BACKWARD_TO_FORWARD = 2.0
"""A backward pass multiplies twice per weight (input gradient, weight gradient) where a forward pass does once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer, per sample. Multiply and add count as two operations; activations are float32."""

    name: str
    kind: str
    forward_flops: float
    output_bytes: float
    weight_bytes: float
    num_tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """All layers of a model in the order in which they run."""

    name: str
    layers: tuple[LayerProfile, ...]
    input_bytes: float  # of one sample

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.name}: has no layers to profile")

    @property
    def forward_flops(self) -> float:
        """Operations of one sample's forward pass."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def training_flops(self) -> float:
        """Operations of one sample's forward and backward pass."""
        return self.forward_flops * (1.0 + BACKWARD_TO_FORWARD)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all trainable weights; also of one gradient exchange."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        """Number of trainable tensors, each of which costs a message in a gradient exchange."""
        return sum(layer.num_tensors for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        """Bytes of one sample's activations kept for the backward pass."""
        return self.input_bytes + sum(layer.output_bytes for layer in self.layers)

    def training_memory_bytes(self, batch_size: int, optimizer_copies: float = 1.0) -> float:
        """Return the peak memory of a training step: weights, gradients, optimiser state, activations."""
        return self.weight_bytes * (2.0 + optimizer_copies) + self.activation_bytes * batch_size
