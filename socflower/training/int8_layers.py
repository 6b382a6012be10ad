"""Layers of a torch module that compute their passes in int8, while an outside optimiser holds their FP32 masters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.model_graph.parts import layer_seed
from socflower.precision import EngineSettings, Int8Model
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import start_gradients, take_weights
from socflower.training.batch_statistics import require_batch_statistics
from socflower.training.trainer import require_images

STATISTICS = ("running_mean", "running_var")
"""Ends of the names of the buffers that the engine changes."""


class Lease(Protocol):
    """The right to an engine until the backward pass; it ends when nothing refers to it."""

    def check(self) -> None:
        """Raise `ConfigError` if the backward pass can no longer be computed."""
        ...


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
        settings: EngineSettings | None = None,
        fp32_operators: Sequence[str] = (),
        unsupported: Literal["refuse", "fp32"] = "fp32",
        input_gradient: bool = False,
        num_passes: int = 1,
        trackers: Sequence[Any] = (),
        trains_alone: bool = True,
    ) -> None:
        """Build the engine. Shapes are of one sample; `trackers` (`ScaleTrackers.to_json`) may have other layers too.

        `trains_alone` is that of `Int8Model`.

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
            settings=settings,
            fp32_operators=fp32_operators,
            unsupported=unsupported,
            head=False,
            input_gradient=input_gradient,
        )
        self.engine.trains_alone = trains_alone
        self._layers, self._seed, self._output_shape = layers, seed, tuple(output_shape)
        known = {node.name for node in self.engine.graph.nodes}
        self.engine.trackers.restore([entry for entry in trackers if entry[0] in known])
        self._handed_out = start_gradients(self.engine.graph, self.engine.parameters)
        self._engines = [self.engine, *(self.engine.twin() for _ in range(num_passes - 1))]

    def round_masters(self, tensors: Mapping[str, Tensor], draw: int | None) -> None:
        """Round the layers' parameters at random for passes that follow (F12); to nearest if `draw` is None.

        `draw` numbers the random numbers. Running statistics are taken from `tensors`; those that it lacks stay as the
        engine has them.
        """
        state = {name: part.detach().numpy() for name, part in self._layers.named_parameters()}
        for name, tensor in tensors.items():
            # FP32 operators may have buffers of their own.
            if name.endswith(STATISTICS) or name in self.engine.parameters.fp32:
                state[name] = tensor.detach().numpy()
        engine = self.engine
        seed = None if draw is None else layer_seed(self._seed, draw, 1) % 2**32
        take_weights(engine.graph, engine.parameters, engine.engine, state, seed)

    def add_pass(self) -> int:
        """Allow one more result to wait for its backward pass; return the number of its engine."""
        self._engines.append(self.engine.twin())
        return len(self._engines) - 1

    def forward(
        self, inputs: Tensor, draw: int, *, number: int = 0, lease: Lease | None = None
    ) -> Tensor:
        """Return the layers' result (samples, ...), differentiable; `draw` numbers the random numbers of the pass.

        `number`, below `num_passes`, selects the engine. Its last result must not wait for a backward pass. `lease` is
        held as long as the result may get one.
        """
        weights = dict(self._layers.named_parameters())
        one = _Pass(
            engine=self._engines[number],
            handed_out=self._handed_out,
            seed=layer_seed(self._seed, draw, 0) >> 1,
            keep=torch.is_grad_enabled(),
            output_shape=self._output_shape,
            names=tuple(weights),
            lease=lease,
        )
        return cast(Tensor, _Int8Pass.apply(inputs, one, *weights.values()))

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return the layers' result in evaluation mode, not differentiable."""
        real = self.engine.infer(_images(inputs))
        return torch.from_numpy(real).reshape(len(real), *self._output_shape)

    def statistics(self) -> dict[str, Tensor]:
        """Return the running statistics of BatchNorm, and FP32 operators' buffers, after the latest pass."""
        parameters = self.engine.parameters
        found = {}
        for node in self.engine.graph.nodes:
            for name in (f"{node.name}.{part}" for part in node.vectors):
                if name.endswith(STATISTICS):
                    vector = parameters.vectors[name].data[: node.shape[0]]
                    found[name] = torch.from_numpy(vector)
        own = dict(self._layers.named_buffers())
        for name in own.keys() & parameters.fp32.keys():
            found[name] = torch.from_numpy(np.array(parameters.fp32[name]))
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of the int8 weights and of the gradients that are handed out."""
        return self.engine.parameters.num_bytes

    @property
    def pass_bytes(self) -> int:
        """Bytes that all passes hold, those that are done included: their memory is kept for later ones."""
        return sum(engine.regions.held_bytes for engine in self._engines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """An engine, and the settings of one of its passes."""

    engine: Int8Model
    # The engine writes the gradients of the parameters here.
    handed_out: Mapping[str, NDArray[np.float32]]
    seed: int
    keep: bool
    output_shape: tuple[int, ...]
    names: tuple[str, ...]
    lease: Lease | None


class _Int8Pass(torch.autograd.Function):
    """A pass as a function of inputs and masters: its backward pass hands out their gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, one: _Pass, *weights: Tensor) -> Tensor:
        """Return the result (samples, ...); `backward` of the engine fills the arrays that it hands out."""
        real, _ = one.engine.forward(_images(inputs), seed=one.seed, keep=one.keep)
        ctx.one = one
        ctx.input_shape = inputs.shape
        ctx.result_shape = real.shape
        ctx.shapes = [weight.shape for weight in weights]
        return torch.from_numpy(real).reshape(len(real), *one.output_shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the inputs, if the engine computes it, and of each weight, summed over the samples."""
        one: _Pass = ctx.one
        if one.lease is not None:
            one.lease.check()
        own = gradients[0].reshape(ctx.result_shape).numpy()
        images = one.engine.backward(own, learning_rate=1.0, summed=True)
        of_inputs = None if images is None else torch.from_numpy(images).reshape(ctx.input_shape)
        of_weights: list[Tensor | None] = []
        for name, shape in zip(one.names, ctx.shapes, strict=True):
            gradient = one.handed_out.get(name)
            # A copy: the engine overwrites it in the next pass.
            copied = None if gradient is None else torch.from_numpy(np.array(gradient))
            of_weights.append(None if copied is None else copied.reshape(shape))
        return (of_inputs, None, *of_weights)


def _images(inputs: Tensor) -> NDArray[np.float32]:
    """Return inputs as the engine takes them: features as images of a pixel."""
    images = inputs.detach()
    if images.ndim != 4:
        images = images[..., None, None]
    return np.ascontiguousarray(images.numpy(), dtype=np.float32)
