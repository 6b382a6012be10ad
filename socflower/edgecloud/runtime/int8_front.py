"""The half with the model's input in integer arithmetic, for an edge that has an int8 accelerator."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional

from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.edgecloud.runtime.torch_half import Passes, States
from socflower.model_graph.batch_form import form_of
from socflower.model_graph.cut_points import SplitModel
from socflower.precision import Int8Model
from socflower.precision.algorithm import Fp32Update
from socflower.training.fp32 import sgd
from socflower.training.int8 import MOMENTUM, Int8PartSession, Int8Trainer
from socflower.training.session import PARAMETERS, LossFn


class Int8Front(TorchFront):
    """The layers up to the cut, trained by an `Int8Trainer`, with its own algorithm, learning rate and schedule.

    `progress(batch)` in [0, 1] is the fraction of training done before a batch. Features are int8 values times a power
    of two, the `feature_quantum`; gradients are rounded to int8 as they arrive. A batch is replayed like in FP32, with
    the present int8 weights (F22). Exponents are searched in the first pass of a batch and not in its replay, so each
    batch counts once in the exponent trackers.

    A layer that comes from the other half is rounded to int8 under an integer update, and its momentum is discarded;
    under FP32 updates weights and momentum move unchanged, both ways.
    """

    _session: Int8PartSession

    def __init__(
        self,
        split: SplitModel,
        cut: int,
        batches: Callable[[int], Samples],
        trainer: Int8Trainer,
        *,
        progress: Callable[[int], float],
        seed: int = 0,
        loss: LossFn | None = None,
    ) -> None:
        self._trainer = trainer
        self._progress_at = progress
        update = trainer.algorithm.update
        self._has_momentum = isinstance(update, Fp32Update) and update.momentum > 0.0
        super().__init__(
            split,
            cut,
            batches,
            # The engine updates the weights.
            sgd(trainer.learning_rate, 0.0),
            seed=seed,
            passes=Passes(loss=loss),
        )
        # An operator without an integer form is refused here, before anything starts.
        _ = self._session.model

    @property
    def feature_quantum(self) -> float | None:
        """The last features are multiples of this number, in float32."""
        return self._session.quantum

    # ------------------------------------------------------------------------------------ the session and the tensors

    def _new_session(self) -> Int8PartSession:
        alone = self._cut == self.all_layers_cut
        return Int8PartSession(
            self._trainer,
            self._build,
            progress=self._progress_at,
            # Logits, or features.
            output_shape=(-1,) if alone else self.split.cuts[self._cut].feature_shape,
            seed=self._seed,
            draws=bool(self.split.random_layers),
        )

    def _build(self, exponents: Mapping[str, int]) -> Int8Model:
        """Return the engine of the present layers and tensors."""
        alone = self._cut == self.all_layers_cut
        if alone and self._passes.loss is not functional.cross_entropy:
            raise self._error("with all layers in int8 the loss must be softmax cross-entropy")
        shape = self.split.samples(1).shape[1:]
        return self._trainer.model(self._layers(), shape, exponents=exponents, head=alone)

    def _prepare(self, *inputs: Any) -> None:
        if not isinstance(inputs[0], torch.Tensor):
            raise self._error(f"int8 training takes one tensor of images, not {form_of(inputs[0])}")
        super()._prepare(*inputs)
        # Built before the pass, since a capture waits for passes to end.
        _ = self._session.model

    def _repeating(self) -> AbstractContextManager[None]:
        return self._session.repeating()

    def _write_back(self) -> None:
        """Copy the engine's trained parameters to the tensors."""
        if self._session.is_newer:
            for name, array in self._session.model.arrays().items():
                self._tensors[name].data.copy_(torch.from_numpy(array))
            self._session.is_newer = False

    def _replace_tensors(self) -> None:
        """Let the engine be built again at its next use, from the tensors, with the same exponents."""
        self._write_back()
        self._session.rebuild()

    def _array(self, name: str) -> NDArray[Any]:
        self._write_back()
        return super()._array(name)

    def _fill(self, name: str, array: NDArray[Any]) -> None:
        self._replace_tensors()
        super()._fill(name, array)

    def _release_tensors(self, names: Iterable[str]) -> None:
        self._replace_tensors()
        super()._release_tensors(names)

    def _move_to(self, cut: int, taken: States | None = None) -> None:
        self._replace_tensors()
        before = self._session.state()
        moved: dict[str, dict[str, Any]] = {}
        if self._has_momentum:
            for name, state in (taken or {}).items():
                moved[name] = {key: own for key, own in state.items() if key == MOMENTUM}
        super()._move_to(cut, moved)
        self._restore_arithmetic(
            {"exponents": before.get("exponents", {}), "trackers": before.get("trackers", [])}
        )

    def _arithmetic_state(self) -> dict[str, Any]:
        state = self._session.state()
        return {key: state.get(key, empty) for key, empty in (("exponents", {}), ("trackers", []))}

    def _restore_arithmetic(self, state: Mapping[str, Any]) -> None:
        own = set(self._names(self._cut))
        exponents = {name: each for name, each in state["exponents"].items() if name in own}
        states = {
            name: each
            for name, each in self._session.state().get(PARAMETERS, {}).items()
            if name in own
        }
        self._session.restore(
            {PARAMETERS: states, "exponents": exponents, "trackers": state["trackers"]}
        )
