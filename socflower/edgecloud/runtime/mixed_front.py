"""The half with the model's input on CPU and NPU at once: of each batch part in FP32, part in int8 (F9 to F12)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.edgecloud.runtime.torch_half import Passes, States
from socflower.field_rules import OneOf, checked
from socflower.model_graph.batch_form import Batch, form_of
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.graph import in_mode
from socflower.model_graph.parts import start_stream
from socflower.precision.cpu_share import (
    MIXING_RULES,
    accuracy_floor,
    confidence,
    cpu_samples,
    cpu_share,
)
from socflower.training.int8_layers import STATISTICS, Int8Layers
from socflower.training.schedules import Schedule, constant_rate
from socflower.training.session import OptimizerFn, loss_between, require_loss


@checked
class MixedEdge:
    """How an edge divides a batch between its CPU and its NPU.

    `npu_ratios` is beta by party. alpha is the mean cosine between the features of the FP32 and the int8 half in
    evaluation mode (F9), of `held_out` inputs, or without them of the inputs at hand. Each half measures it once, so an
    app measures it at the beginning of each round.
    """

    npu_ratios: Annotated[Sequence[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)]
    rule: Annotated[str, OneOf(MIXING_RULES)] = "paper"
    held_out: Tensor | None = None
    unsupported: Literal["refuse", "fp32"] = "fp32"


class MixedFront(TorchFront):
    """The layers up to the cut, whose FP32 masters the optimiser of the CPU updates.

    In each pass the NPU's part of the samples goes through an int8 copy, which is rounded from the present masters at
    random, by the batch's seed. The gradients of both parts are summed to the batch's mean, so nothing replaces the
    masters while batches are in flight. Each processor normalises its own part; running statistics are the mean of
    both, weighted by samples.
    """

    # The engine keeps one pass, and a replay with the same masters has the same bits.
    _keeps_passes = False
    _npu: Int8Layers | None = None

    def __init__(
        self,
        split: SplitModel,
        cut: int,
        batches: Callable[[int], Samples],
        optimizer: OptimizerFn,
        edge: MixedEdge,
        *,
        party: int = 0,
        schedule: Schedule = constant_rate,
        seed: int = 0,
        passes: Passes | None = None,
    ) -> None:
        self._edge = edge
        self._beta = edge.npu_ratios[min(party, len(edge.npu_ratios) - 1)]
        self.alpha: float | None = None
        self._trackers: list[Any] = []
        super().__init__(
            split, cut, batches, optimizer, schedule=schedule, seed=seed, passes=passes
        )
        if self._beta and edge.rule != "fp32":
            # An operator without an integer form is refused here, before anything starts.
            self._int8()

    def _prepare(self, *inputs: Any) -> None:
        if not isinstance(inputs[0], Tensor):
            raise self._error(f"int8 training takes one tensor of images, not {form_of(inputs[0])}")
        super()._prepare(*inputs)
        # The engine is built, and alpha measured, before the pass, since a capture waits for passes to end.
        if self._num_cpu(inputs[0]) < len(inputs[0]):
            self._int8()

    def _features(self, batch: int, inputs: Batch) -> Tensor:
        assert isinstance(inputs, Tensor)
        num_cpu = self._num_cpu(inputs)
        if num_cpu == len(inputs):
            return super()._features(batch, inputs)
        own = self._own_tensors()
        statistics = {name: each for name, each in own.items() if name.endswith(STATISTICS)}
        before = {name: tensor.clone() for name, tensor in statistics.items()}
        npu = self._int8()
        parts = list[Tensor]()
        if num_cpu:
            parts.append(super()._features(batch, inputs[:num_cpu]))
        else:
            self._count_batch()
        # The NPU normalises with the statistics before the CPU's part changed them.
        npu.round_masters(before, batch)
        # It draws as if it had the batch alone.
        start_stream(0)
        parts.append(npu.forward(inputs[num_cpu:], batch))
        for name, seen in npu.statistics().items():
            statistics[name].data.lerp_(seen, 1.0 - num_cpu / len(inputs))
        return torch.cat(parts)

    def _loss_of(self, batch: int, argument: Batch, labels: Any) -> Tensor:
        assert self._passes.loss is not None
        name = f"model {self.split.name}"
        features = self._features(batch, argument)
        return require_loss(loss_between(self._passes.loss, features, labels, name), name)

    @property
    def _feature_shape(self) -> tuple[int, ...]:
        if self._cut < self.all_layers_cut:
            return self.split.cuts[self._cut].feature_shape
        # Logits.
        return (-1,)

    def _num_cpu(self, inputs: Tensor) -> int:
        """Return how many samples of a batch the CPU takes (F11)."""
        rule = self._edge.rule
        held_out = self._edge.held_out
        if not self._beta or rule == "fp32":
            return len(inputs)
        if self.alpha is None:
            self.alpha = self._measured_alpha(inputs if held_out is None else held_out)
        share = cpu_share(rule, self.alpha, self._beta)
        floor = accuracy_floor(rule, self.alpha)
        return cpu_samples(len(inputs), share, floor)

    def _measured_alpha(self, inputs: Tensor) -> float:
        """Compare the features of both processors (F9), on the same weights and running statistics."""
        layers = self._layers()
        self._int8().round_masters(self._own_tensors(), 0)
        with in_mode(layers, training=False), torch.no_grad():
            fp32 = layers(inputs).flatten(1).numpy()
        return confidence(fp32, self._int8().evaluate(inputs).flatten(1).numpy())

    def _count_batch(self) -> None:
        """Count a batch whose samples all go to the NPU."""
        for name, tensor in self._own_tensors().items():
            if name.endswith("num_batches_tracked"):
                tensor += 1

    def _int8(self) -> Int8Layers:
        if self._npu is None:
            self._npu = Int8Layers(
                self._layers(),
                self.split.samples(1).shape[1:],
                self._feature_shape,
                seed=self._seed,
                unsupported=self._edge.unsupported,
                trackers=self._trackers,
            )
        return self._npu

    def _move_to(self, cut: int, taken: States | None = None) -> None:
        self._trackers = self._arithmetic_state()["trackers"]
        self._npu = None
        super()._move_to(cut, taken)

    def _arithmetic_state(self) -> dict[str, Any]:
        trackers = self._trackers if self._npu is None else self._npu.engine.trackers.to_json()
        return {"alpha": self.alpha, "trackers": trackers}

    def _restore_arithmetic(self, state: Mapping[str, Any]) -> None:
        self.alpha = state["alpha"]
        self._trackers = state["trackers"]
        self._npu = None
