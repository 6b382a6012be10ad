"""The half with the loss: it updates its weights from features, and returns the gradient with respect to them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from socflower.edgecloud.half_protocols import Array, Labels, arrays_in
from socflower.edgecloud.runtime.torch_half import Passes, TorchHalf, targets_from
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.tensor_arrays import to_array, to_tensor
from socflower.training.schedules import Schedule, constant_rate
from socflower.training.session import LossFn, OptimizerFn


class TorchBack(TorchHalf):
    """The layers behind the cut, with a loss of outputs and targets that is a mean over the batch.

    Targets are the labels that travel with features, as int64 if they are whole numbers. In a reverse split this half's
    owner has them: then they are `targets(batch)`. Features of several parties are concatenated along dimension 1.
    """

    def __init__(
        self,
        split: SplitModel,
        cut: int,
        optimizer: OptimizerFn,
        loss: LossFn,
        *,
        schedule: Schedule = constant_rate,
        seed: int = 0,
        device: torch.device | str = "cpu",
        targets: Callable[[int], torch.Tensor] | None = None,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(
            "back",
            split,
            cut,
            optimizer=optimizer,
            schedule=schedule,
            seed=seed,
            device=device,
            passes=passes or Passes(loss=loss),
        )
        self._targets = targets

    def step(
        self, batch: int, features: Sequence[Array], labels: Labels
    ) -> tuple[list[Array | None], float]:
        """Do forward, backward and update; return the gradient for each part of the features, and the loss.

        Gradients are by the weights before the update. Raises `ConfigError`, with nothing changed, for features or
        labels that do not fit.
        """
        # An edge may move all layers to itself and then send features.
        if self._cut == self.split.num_cuts:
            raise self._error(f"has no layers for the features of batch {batch}")
        trains = self.split.front_trains(self._cut)
        self._check_features(batch, features, labels)
        layout = self.split.cuts[self._cut].layout
        leaves = [to_tensor(part, self._device, layout).requires_grad_(trains) for part in features]
        targets = (
            targets_from(labels, self._device) if self._targets is None else self._targets(batch)
        )
        gradients, loss = self._train(batch, targets, *leaves)
        arrays = [None if one is None else to_array(one, copy=False) for one in gradients]
        return arrays[1:], loss

    def _run(self, batch: int, *inputs: Any) -> torch.Tensor:
        targets, *leaves = inputs
        return self._loss_of(batch, self._joined(leaves), targets)

    def _joined(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(leaves) > 1:
            return torch.cat(list(leaves), dim=1)
        # Neither an autograd leaf nor the caller's array may be overwritten.
        return leaves[0].clone() if self.split.writes_in_place else leaves[0]

    def _check_features(
        self,
        batch: int,
        features: Sequence[Array],
        labels: Labels,
    ) -> None:
        expected = self.split.cuts[self._cut].feature_shape
        for part in features:
            if str(part.dtype) != "float32" or (expected and tuple(part.shape[1:]) != expected):
                raise self._error(
                    f"features of batch {batch} are {part.dtype} of shape {tuple(part.shape)}; at cut {self._cut} "
                    f"a sample has {expected} of float32"
                )
        samples = {part.shape[0] for part in features}
        if self._targets is None:
            samples |= {len(array) for array in arrays_in(labels) if array.ndim} or {0}
        if len(samples) > 1:
            counts = ", ".join(map(str, sorted(samples)))
            raise self._error(f"batch {batch} has features and labels of {counts} samples")
