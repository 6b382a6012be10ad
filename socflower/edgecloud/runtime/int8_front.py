"""The half with the model's input in integer arithmetic, for an edge that has an int8 accelerator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.edgecloud.runtime.half_optimizer import SEPARATOR
from socflower.edgecloud.runtime.torch_half import Loss, Passes
from socflower.model_graph.batch_form import Batch, form_of
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.parts import layer_seed
from socflower.precision import Int8Model
from socflower.precision.algorithm import Fp32Update
from socflower.precision.int8.parameters import export_velocities, import_velocities
from socflower.training.fp32 import sgd
from socflower.training.int8 import Int8Trainer

_MOMENTUM = f"{SEPARATOR}momentum_buffer"
"""The key of SGD's momentum, under which it moves with a layer to the cloud and back."""


class Int8Front(TorchFront):
    """The layers up to the cut, trained by an `Int8Trainer`, with its own algorithm, learning rate and schedule.

    `progress(batch)` in [0, 1] is the fraction of training done before a batch. Features are int8 values times a power
    of two, the `feature_quantum`; gradients are rounded to int8 as they arrive. A batch is replayed like in FP32, with
    the present int8 weights (F22). Exponents are searched in the first pass of a batch and not in its replay, so each
    batch counts once in the exponent trackers.

    A layer that comes from the other half is rounded to int8 under an integer update, and its momentum is discarded;
    under FP32 updates weights and momentum move unchanged, both ways.
    """

    # Built at its first use, and again after weights or layers were replaced.
    _engine: Int8Model | None = None
    # Whether the engine's parameters are newer than the tensors.
    _updated = False

    def __init__(
        self,
        split: SplitModel,
        cut: int,
        batches: Callable[[int], Samples],
        trainer: Int8Trainer,
        *,
        progress: Callable[[int], float],
        seed: int = 0,
        loss: Loss | None = None,
    ) -> None:
        self._trainer = trainer
        self._progress_at = progress
        self._exponents: Mapping[str, int] = {}
        self._trackers: list[Any] = []
        self._kept_batch: int | None = None
        self._quantum: float | None = None
        update = trainer.algorithm.update
        self._has_momentum = isinstance(update, Fp32Update) and update.momentum > 0.0
        # The optimiser updates nothing here: it holds the momentum of layers that come and go.
        super().__init__(
            split,
            cut,
            batches,
            sgd(trainer.learning_rate, 0.0),
            seed=seed,
            passes=Passes(loss=loss),
        )
        # An operator without an integer form is refused here, before anything starts.
        self._int8()

    @property
    def feature_quantum(self) -> float | None:
        """The last features are multiples of this number, in float32."""
        return self._quantum

    def train_alone(self, batch: int) -> float:
        """Do a whole training step with all layers, which must be in this half, and return the loss."""
        inputs, labels, _ = self._samples(batch)
        engine = self._int8()
        progress = self._progress_at(batch)
        with self._passing(batch):
            result = engine.train_step(
                self._images(inputs),
                np.asarray(labels),
                learning_rate=self._trainer.rate(progress),
                progress=progress,
                seed=self._layer_seed(batch),
            )
        self._updated = True
        self._num_updates += 1
        return result.loss

    # ------------------------------------------------------------------------------------------------------ passes

    def _first_pass(
        self,
        batch: int,
        inputs: Batch,
        *,
        keep: bool,
    ) -> tuple[Array, object | None]:
        return self._pass(
            batch,
            inputs,
            keep=keep,
            replay=False,
        ), batch if keep else None

    def _replay(
        self,
        batch: int,
        inputs: Batch,
        shape: tuple[int, ...],
        gradient: Array,
    ) -> None:
        features = self._pass(batch, inputs, keep=True, replay=True)
        self._require_shape(batch, features.shape, shape)
        self._update(batch, batch, gradient)

    def _update(self, batch: int, kept: object, gradient: Array) -> None:
        engine = self._int8()
        progress = self._progress_at(batch)
        if self._kept_batch != batch:
            # The pass of a later batch took its memory.
            self._pass(batch, self._samples(batch)[0], keep=True, replay=True)
        self._kept_batch = None
        shape = engine.graph.shape_of(engine.graph.output)
        engine.backward(
            gradient.reshape(len(gradient), *shape),
            learning_rate=self._trainer.rate(progress),
            progress=progress,
        )
        self._updated = True

    def _pass(
        self,
        batch: int,
        inputs: Batch,
        *,
        keep: bool,
        replay: bool,
    ) -> Array:
        engine = self._int8()
        self._kept_batch = None
        images = self._images(inputs)
        how = {"keep": keep, "replay": replay}
        # Operators in FP32 draw the batch's random numbers.
        with self._passing(batch):
            real, self._quantum = engine.forward(
                images,
                seed=self._layer_seed(batch),
                **how,
            )
        # BatchNorm's running statistics have changed.
        self._updated = True
        self._kept_batch = batch if keep else None
        return real.reshape(len(real), *self.split.cuts[self._cut].feature_shape)

    def _images(self, inputs: Batch) -> NDArray[np.float32]:
        if not isinstance(inputs, torch.Tensor):
            raise self._error(f"int8 training takes one tensor of images, not {form_of(inputs)}")
        return np.ascontiguousarray(inputs.numpy(), dtype=np.float32)

    def _layer_seed(self, batch: int) -> int:
        return layer_seed(self._seed, batch, 0) >> 1

    # ------------------------------------------------------------------------------------ the engine and the tensors

    def _int8(self) -> Int8Model:
        """Return the engine of the present layers and tensors."""
        if self._engine is not None:
            return self._engine
        alone = self._cut == self.all_layers_cut
        if alone and self._passes.loss is not functional.cross_entropy:
            raise self._error("with all layers in int8 the loss must be softmax cross-entropy")
        shape = self.split.samples(1).shape[1:]
        engine = self._trainer.model(
            self._layers(),
            shape,
            exponents=self._exponents,
            head=alone,
        )
        known = {node.name for node in engine.graph.nodes}
        engine.trackers.restore([entry for entry in self._trackers if entry[0] in known])
        state = self._optimizer.state()
        velocities = {key.removesuffix(_MOMENTUM): array for key, array in state.items()}
        import_velocities(engine.graph, engine.parameters, velocities)
        self._engine = engine
        return engine

    def _write_back(self) -> None:
        """Copy the engine's trained parameters to the tensors."""
        if self._engine is None or not self._updated:
            return
        for name, array in self._engine.arrays().items():
            self._tensors[name].data.copy_(torch.from_numpy(array))
        velocities = export_velocities(self._engine.graph, self._engine.parameters)
        momentum = {f"{name}{_MOMENTUM}": array for name, array in velocities.items()}
        self._optimizer.set_weights(self._own_tensors(), momentum)
        self._updated = False

    def _drop_engine(self) -> None:
        """Let the engine be built again at its next use, from the tensors, with the same exponents."""
        if self._engine is not None:
            self._write_back()
            state = self._arithmetic_state()
            self._engine = None
            self._exponents = state["exponents"]
            self._trackers = state["trackers"]

    def _array(self, name: str) -> NDArray[Any]:
        self._write_back()
        return super()._array(name)

    def _fill(self, name: str, array: NDArray[Any]) -> None:
        self._drop_engine()
        super()._fill(name, array)

    def _release_tensors(self, names: Iterable[str]) -> None:
        self._drop_engine()
        super()._release_tensors(names)

    def _move_to(self, cut: int, taken: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._drop_engine()
        momentum = {key: array for key, array in (taken or {}).items() if key.endswith(_MOMENTUM)}
        super()._move_to(cut, momentum if self._has_momentum else {})
        own = self._names(cut)
        self._exponents = {name: each for name, each in self._exponents.items() if name in own}

    def _arithmetic_state(self) -> dict[str, Any]:
        if self._engine is None:
            return {"exponents": dict(self._exponents), "trackers": self._trackers}
        return {
            "exponents": self._engine.parameters.exponents,
            "trackers": self._engine.trackers.to_json(),
        }

    def _restore_arithmetic(self, state: Mapping[str, Any]) -> None:
        self._drop_engine()
        self._exponents = state["exponents"]
        self._trackers = state["trackers"]

    def _resume(self, progress: Sequence[Sequence[int]]) -> None:
        super()._resume(progress)
        self._kept_batch = None
