"""Layers of a torch module that compute their passes in int8, while an outside optimiser holds their FP32 masters."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.model_graph.parts import layer_seed
from socflower.precision import Int8Model
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import start_gradients, take_weights
from socflower.training.batch_statistics import require_batch_statistics
from socflower.training.trainer import require_images

STATISTICS = ("running_mean", "running_var")
"""Ends of the names of the buffers that the engine changes."""


class Int8Layers:
    """An int8 copy of layers: weights rounded at random from the masters, and gradients handed out to them (F12).

    `forward` is a differentiable function of the inputs and of the masters. Up to `num_passes` of its results may wait
    for their backward passes; each keeps an engine's memory. The engines have the same weights, exponent trackers and
    statistics, so any of them may do any pass, with the same result.
    """

    def __init__(
        self,
        layers: nn.Module,
        input_shape: Sequence[int],
        output_shape: Sequence[int],
        *,
        seed: int = 0,
        unsupported: Literal["refuse", "fp32"] = "fp32",
        input_gradient: bool = False,
        num_passes: int = 1,
        trackers: Sequence[Any] = (),
    ) -> None:
        """Build the engine. Shapes are of one sample; `trackers` (`ScaleTrackers.to_json`) may have other layers too.

        Raises ConfigError for other inputs than (channels, height, width) and (features,), and for a BatchNorm with
        frozen statistics; raises UnsupportedOperator, a ConfigError too, for operators that int8 does not have.
        """
        require_batch_statistics(layers, "int8 training")
        if len(input_shape) != 1:
            require_images(input_shape, "int8 training")
        shape = cast(tuple[int, int, int] | tuple[int], tuple(input_shape))
        self.engine = Int8Model.from_module(
            layers,
            input_shape=shape,
            algorithm=HANDED_OUT_GRADIENTS,
            unsupported=unsupported,
            head=False,
            input_gradient=input_gradient,
        )
        self._layers, self._seed, self._output_shape = layers, seed, tuple(output_shape)
        known = {node.name for node in self.engine.graph.nodes}
        self.engine.trackers.restore([entry for entry in trackers if entry[0] in known])
        self._handed_out = start_gradients(self.engine.graph, self.engine.parameters)
        self._engines = [self.engine, *(self.engine.twin() for _ in range(num_passes - 1))]

    def round_masters(self, tensors: Mapping[str, Tensor], draw: int) -> None:
        """Round the layers' parameters at random for passes that follow; `draw` numbers the random numbers (F12).

        Running statistics are taken from `tensors`; those that it lacks stay as the engine has them.
        """
        state = {name: part.detach().numpy() for name, part in self._layers.named_parameters()}
        for name, tensor in tensors.items():
            if name.endswith(STATISTICS):
                state[name] = tensor.numpy()
        engine = self.engine
        seed = layer_seed(self._seed, draw, 1) % 2**32
        take_weights(engine.graph, engine.parameters, engine.engine, state, seed)

    def forward(self, inputs: Tensor, draw: int, *, number: int = 0) -> Tensor:
        """Return the layers' result (samples, ...), differentiable; `draw` numbers the random numbers of the pass.

        `number`, below `num_passes`, selects the engine. Its last result must not wait for a backward pass.
        """
        weights = dict(self._layers.named_parameters())
        return cast(
            Tensor,
            _Int8Pass.apply(
                inputs,
                self._engines[number],
                self._handed_out,
                layer_seed(self._seed, draw, 0) >> 1,
                torch.is_grad_enabled(),
                self._output_shape,
                list(weights),
                *weights.values(),
            ),
        )

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return the layers' result in evaluation mode, not differentiable."""
        real, _ = self.engine.forward(_images(inputs), training=False, keep=False)
        return torch.from_numpy(real).reshape(len(real), *self._output_shape)

    def statistics(self) -> dict[str, Tensor]:
        """Return the running statistics of BatchNorm after the latest pass."""
        vectors = self.engine.parameters.vectors
        found = {}
        for node in self.engine.graph.nodes:
            for name in (f"{node.name}.{part}" for part in node.vectors):
                if name.endswith(STATISTICS):
                    found[name] = torch.from_numpy(vectors[name].data[: node.shape[0]])
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of the int8 weights and of the gradients that are handed out."""
        return self.engine.parameters.num_bytes

    @property
    def pass_bytes(self) -> int:
        """Bytes that all passes hold, those that are done included: their memory is kept for later ones."""
        return sum(engine.regions.held_bytes for engine in self._engines)


class _Int8Pass(torch.autograd.Function):
    """A pass as a function of inputs and masters: its backward pass hands out their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        engine: Int8Model,
        handed_out: Mapping[str, NDArray[np.float32]],
        seed: int,
        keep: bool,
        shape: tuple[int, ...],
        names: list[str],
        *weights: Tensor,
    ) -> Tensor:
        """Return the result (samples, ...); `backward` of the engine fills the arrays `handed_out`."""
        real, _ = engine.forward(_images(inputs), seed=seed, keep=keep)
        ctx.engine = engine
        ctx.names = names
        ctx.handed_out = handed_out
        ctx.input_shape = inputs.shape
        ctx.output_shape = real.shape
        ctx.shapes = [weight.shape for weight in weights]
        return torch.from_numpy(real).reshape(len(real), *shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the inputs, if the engine computes it, and of each weight, summed over the samples."""
        own = gradients[0].reshape(ctx.output_shape).numpy()
        images = ctx.engine.backward(own, learning_rate=1.0, summed=True)
        of_inputs = None if images is None else torch.from_numpy(images).reshape(ctx.input_shape)
        of_weights: list[Tensor | None] = []
        for name, shape in zip(ctx.names, ctx.shapes, strict=True):
            gradient = ctx.handed_out.get(name)
            # A copy: the engine overwrites it in the next pass.
            copied = None if gradient is None else torch.from_numpy(np.array(gradient))
            of_weights.append(None if copied is None else copied.reshape(shape))
        return (of_inputs, *(None,) * 6, *of_weights)


def _images(inputs: Tensor) -> NDArray[np.float32]:
    """Return inputs as the engine takes them: features as images of a pixel."""
    images = inputs.detach()
    if images.ndim != 4:
        images = images[..., None, None]
    return np.ascontiguousarray(images.numpy(), dtype=np.float32)
