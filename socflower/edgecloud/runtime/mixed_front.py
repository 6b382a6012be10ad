"""The half with the model's input on CPU and NPU at once: of each batch part in FP32, part in int8 (F9 to F12)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.capture.batch_form import Batch, form_of
from socflower.capture.cut_points import SplitModel
from socflower.capture.graph import in_mode
from socflower.capture.halves import layer_seed
from socflower.edgecloud.halves import Array
from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.edgecloud.runtime.half_optimizer import OptimizerFactory, Schedule, constant_rate
from socflower.edgecloud.runtime.halves import Passes
from socflower.errors import ConfigError
from socflower.precision import Int8Model
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import start_gradients, take_weights
from socflower.precision.mixed_precision import MIXING_RULES, accuracy_floor, confidence, cpu_samples, cpu_share
from socflower.training.int8 import Int8Trainer

_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, kw_only=True)
class MixedEdge:
    """How an edge divides a batch between its CPU and its NPU.

    `npu_ratios` is beta by party. alpha is the mean cosine between the features of the FP32 and the int8 half in
    evaluation mode, of `held_out` inputs, or without them of the inputs at hand; it is measured once by each half, so
    in an app at the beginning of each round.
    """

    npu_ratios: Sequence[float]
    rule: str = "paper"
    held_out: Tensor | None = None
    unsupported: Literal["refuse", "fp32"] = "refuse"

    def __post_init__(self) -> None:
        if self.rule not in MIXING_RULES:
            raise ConfigError(f"MixedEdge: rule = {self.rule!r}; use one of {', '.join(MIXING_RULES)}")
        if not self.npu_ratios:
            raise ConfigError("MixedEdge: npu_ratios is empty; give beta of each edge")
        for beta in self.npu_ratios:
            cpu_share(self.rule, 1.0, beta)  # raises outside [0, 1]


class MixedFront(TorchFront):
    """The layers up to the cut, whose FP32 masters the optimiser of the CPU updates.

    In each pass the NPU's part of the samples goes through an int8 copy, rounded from the present masters at random by
    the batch's seed. Gradients of both parts are summed, as the batch's mean: nothing replaces the masters while
    batches are in flight. Each processor normalises its own part; running statistics are the mean of both by samples.
    """

    _engine: Int8Model | None = None
    _gradients: Mapping[str, NDArray[np.float32]]  # of the engine, which fills them

    def __init__(
        self, split: SplitModel, cut: int, batches: Callable[[int], Samples], optimizer: OptimizerFactory,
        edge: MixedEdge, *, party: int = 0, schedule: Schedule = constant_rate, seed: int = 0,
        passes: Passes | None = None,
    ) -> None:
        self._edge, self._beta = edge, edge.npu_ratios[min(party, len(edge.npu_ratios) - 1)]
        self.alpha: float | None = None
        self._trackers: list[Any] = []
        super().__init__(split, cut, batches, optimizer, schedule=schedule, seed=seed, passes=passes)
        if self._beta and edge.rule != "fp32":
            self._int8()  # so that an operator without an integer form is refused before anything starts

    def _first_pass(self, batch: int, inputs: Batch, *, keep: bool) -> tuple[Array, object | None]:
        # Always replayed: the engine keeps one pass, and a replay with the same masters has the same bits.
        return super()._first_pass(batch, inputs, keep=False)

    def _features(self, batch: int, inputs: Batch) -> Tensor:
        if not isinstance(inputs, Tensor):
            raise ConfigError(f"model {self._split.name}: int8 training takes images in one tensor, the data give "
                              f"{form_of(inputs)}; train in FP32")
        num_cpu = self._num_cpu(inputs)
        if num_cpu == len(inputs):
            return super()._features(batch, inputs)
        statistics = {name: tensor for name, tensor in self._tensors.items() if name.endswith(_STATISTICS)
                      and name in self._own_tensors()}
        before = {name: tensor.clone() for name, tensor in statistics.items()}
        engine, parts = self._int8(), list[Tensor]()
        if num_cpu:
            parts.append(super()._features(batch, inputs[:num_cpu]))
        else:
            self._count_batch()
        self._round_masters(batch, before)
        weights = dict(self._layers().named_parameters())
        with self._passing(batch):
            parts.append(cast(Tensor, _Int8Rows.apply(  # type: ignore[no-untyped-call]
                engine, self._gradients, _images(inputs[num_cpu:]), layer_seed(self._seed, batch, 0) >> 1,
                torch.is_grad_enabled(), self._feature_shape, list(weights), *weights.values())))
        for name, tensor in statistics.items():
            seen = torch.from_numpy(engine.parameters.vectors[name].data[:len(tensor)])
            tensor.data.lerp_(seen, 1.0 - num_cpu / len(inputs))
        return torch.cat(parts)

    def _loss_of(self, batch: int, argument: Batch, labels: Any) -> Tensor:
        assert self._passes.loss is not None
        return self._passes.loss(self._features(batch, argument), labels)

    @property
    def _feature_shape(self) -> tuple[int, ...]:
        if self._cut < self._split.num_cuts:
            return self._split.cuts[self._cut].feature_shape
        engine = self._int8()
        return (engine.graph.num_classes,)

    def _num_cpu(self, inputs: Tensor) -> int:
        """Return how many samples of a batch the CPU takes (F11)."""
        rule = self._edge.rule
        if not self._beta or rule == "fp32":
            return len(inputs)
        if self.alpha is None:
            self.alpha = self._measured_alpha(inputs if self._edge.held_out is None else self._edge.held_out)
        return cpu_samples(len(inputs), cpu_share(rule, self.alpha, self._beta), accuracy_floor(rule, self.alpha))

    def _measured_alpha(self, inputs: Tensor) -> float:
        """Compare the features of both processors (F9), on the same weights and running statistics."""
        layers = self._layers()
        own = self._own_tensors()
        self._round_masters(0, {name: tensor for name, tensor in own.items() if name.endswith(_STATISTICS)})
        with in_mode(layers, training=False), torch.no_grad():
            fp32 = layers(inputs).flatten(1).numpy()
        int8, _ = self._int8().forward(_images(inputs), training=False, keep=False)
        return confidence(fp32, int8.reshape(len(int8), -1))

    def _round_masters(self, batch: int, statistics: Mapping[str, Tensor]) -> None:
        engine = self._int8()
        state = {name: tensor.detach().numpy() for name, tensor in self._own_tensors().items()
                 if isinstance(tensor, nn.Parameter)}
        take_weights(engine.graph, engine.parameters, engine.engine,
                     {**state, **{name: tensor.numpy() for name, tensor in statistics.items()}},
                     layer_seed(self._seed, batch, 1) % 2**32)

    def _count_batch(self) -> None:
        """Count a batch that the CPU has no part of."""
        for name, tensor in self._own_tensors().items():
            if name.endswith("num_batches_tracked"):
                tensor += 1

    def _int8(self) -> Int8Model:
        if self._engine is None:
            trainer = Int8Trainer(algorithm=HANDED_OUT_GRADIENTS, unsupported=self._edge.unsupported)
            engine = trainer.model(self._layers(), self._split.samples(1).shape[1:], head=False)
            known = {node.name for node in engine.graph.nodes}
            engine.restore_trackers([entry for entry in self._trackers if entry[0] in known])
            self._gradients = start_gradients(engine.graph, engine.parameters)
            self._engine = engine
        return self._engine

    def _move_to(self, cut: int, taken: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._trackers, self._engine = self._arithmetic_state()["trackers"], None
        super()._move_to(cut, taken)

    def _arithmetic_state(self) -> dict[str, Any]:
        return {"alpha": self.alpha,
                "trackers": self._trackers if self._engine is None else self._engine.trackers_to_json()}

    def _restore_arithmetic(self, state: Mapping[str, Any]) -> None:
        self.alpha, self._trackers, self._engine = state.get("alpha"), state.get("trackers", []), None


def _images(inputs: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(inputs.numpy(), dtype=np.float32)


class _Int8Rows(torch.autograd.Function):
    """The int8 half of a batch as a function of the masters: its backward pass hands out their gradients."""

    @staticmethod
    def forward(
        ctx: Any, engine: Int8Model, handed_out: Mapping[str, NDArray[np.float32]], images: NDArray[np.float32],
        seed: int, keep: bool, shape: tuple[int, ...], names: list[str], *weights: Tensor,
    ) -> Tensor:
        """Return the features (samples, ...)."""
        real, _ = engine.forward(images, seed=seed, keep=keep)
        ctx.engine, ctx.names, ctx.output_shape = engine, names, real.shape
        ctx.handed_out = handed_out  # arrays that `backward` of the engine fills
        ctx.shapes = [weight.shape for weight in weights]
        return torch.from_numpy(real).reshape(len(real), *shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of each weight, summed over the samples."""
        engine: Int8Model = ctx.engine
        engine.backward(gradients[0].reshape(ctx.output_shape).numpy(), learning_rate=1.0)
        return (None,) * 7 + tuple(
            torch.from_numpy(np.array(ctx.handed_out[name])).reshape(shape) if name in ctx.handed_out else None
            for name, shape in zip(ctx.names, ctx.shapes, strict=True))
