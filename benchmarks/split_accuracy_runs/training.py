"""One training, in plain torch without a split or in two halves, and its result."""

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.split_accuracy_runs.recipes import Images, Recipe, Variant
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import LayeredProgram
from socflower.training.fp32 import sgd
from socflower.workloads.evaluation import evaluate
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.transfer import load_weights

Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedNetwork:
    """A trained network and measurements of its training."""

    model: nn.Module
    # By batch.
    losses: list[float]
    # Sent per sample, on average over the training; None without a split.
    feature_bytes: float | None = None
    # The largest of the training.
    staleness: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A recipe with its images and a seed.

    `pretrained` has the initial weights of all layers but the head. With `frozen` the layers up to the cut are not
    trained.
    """

    recipe: Recipe
    images: Images
    seed: int
    model_name: str
    pretrained: Path | None = None
    frozen: bool = False

    def first_model(self) -> nn.Module:
        """Return the network with its initial weights."""
        images = self.images.train
        model = build_model(
            self.model_name,
            in_channels=images.inputs.shape[1],
            image_size=images.inputs.shape[-1],
            num_classes=images.num_classes,
            seed=self.seed,
        )
        if self.pretrained is not None:
            load_weights(model, self.pretrained)
        # Convolutions are faster in this layout on most CPUs; it is the same for all variants.
        for weight in model.parameters():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        return model

    def batches(self) -> PartyBatches:
        """Return the batches of the training."""
        order = BatchOrder(self.recipe.num_images, self.recipe.batches_per_epoch, self.seed)
        return PartyBatches(self.images.train, order)

    def normal(
        self,
        num_batches: int | None = None,
        at: Mapping[int, Callable[[nn.Module], None]] | None = None,
    ) -> TrainedNetwork:
        """Train the whole network in a plain loop; functions of `at` are called with it before their batches."""
        recipe, model, batches = self.recipe, self.first_model(), self.batches()
        model.train()
        for name, module in model.named_children():
            if self.frozen and int(name) <= int(recipe.cut):
                module.eval().requires_grad_(False)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = sgd(recipe.learning_rate, recipe.momentum, recipe.weight_decay)(trained)
        losses = []
        for batch in range(recipe.num_batches if num_batches is None else num_batches):
            if at is not None and batch in at:
                at[batch](model)
            inputs, labels, _ = batches(batch)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * recipe.schedule(batch)
            optimizer.zero_grad()
            loss: Tensor = functional.cross_entropy(model(inputs), torch.from_numpy(labels))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return TrainedNetwork(model=model, losses=losses)

    def split(self, variant: Variant, num_batches: int | None = None) -> TrainedNetwork:
        """Train in two halves in one process; every gradient comes as late as the window allows."""
        if variant.window is None:
            raise ValueError(f"{variant.name} has no window, and is not trained in two halves")
        recipe = self.recipe
        program = LayeredProgram(
            model_fn=self.first_model,
            example=tuple(self.images.train.inputs.shape[1:]),
            optimizer=sgd(recipe.learning_rate, recipe.momentum, recipe.weight_decay),
            schedule=recipe.schedule,
            frozen=recipe.cut if self.frozen else None,
            seed=self.seed,
        )
        cut, batches = program.split.cut_named(recipe.cut), self.batches()
        front, back = program.front(0, cut, batches).half, program.back(cut).half
        # The memory for all samples in float16.
        delta_bytes = (
            2 * program.split.cuts[cut].feature_elements * recipe.num_images if variant.delta else 0
        )
        in_order = in_groups if variant.groups else constant_staleness
        actions = in_order(
            recipe.num_batches if num_batches is None else num_batches,
            variant.window,
            cut=cut,
            bits=variant.bits,
        )
        (report,) = run_actions(
            actions,
            [front],
            [back],
            coding=FeatureCoding(
                feedback=variant.feedback,
                grouping=variant.grouping,
                delta_bytes=delta_bytes,
            ),
        )
        model = self.first_model()
        weights = {**front.weights(), **back.weights()}
        model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        num_samples = sum(len(batches.order.rows(batch)) for batch in report.losses)
        return TrainedNetwork(
            model=model,
            losses=[report.losses[batch] for batch in sorted(report.losses)],
            feature_bytes=sum(report.feature_bytes.values()) / num_samples,
            staleness=max(report.staleness.values()),
        )


def constant_staleness(
    num_batches: int,
    window: int,
    *,
    cut: int = 0,
    bits: int = 32,
    party: int = 0,
    first_batch: int = 0,
) -> list[Action]:
    """Return actions in which every gradient arrives as late as a window K allows, the worst case of F23.

    The window fills; then the oldest gradient is applied before each further forward pass; at the end the window
    drains.
    """

    def act(kind: ActionKind, batch: int) -> Action:
        return Action(kind, party, batch, cut, bits, window)

    actions: list[Action] = []
    for batch in range(first_batch, first_batch + num_batches + window):
        oldest = batch - window
        if batch < first_batch + num_batches:
            actions += [act(ActionKind.FORWARD, batch), act(ActionKind.STEP, batch)]
        if first_batch <= oldest < first_batch + num_batches:
            actions.append(act(ActionKind.APPLY, oldest))
    return actions


def in_groups(num_batches: int, window: int, *, cut: int, bits: int) -> list[Action]:
    """Return the actions of the paper's grouped pipeline (4.1.3): K + 1 forward passes, then all their gradients."""
    actions = []
    for first in range(0, num_batches, window + 1):
        group = range(first, min(first + window + 1, num_batches))
        for batch in group:
            actions += [
                Action(kind, 0, batch, cut, bits, window)
                for kind in (ActionKind.FORWARD, ActionKind.STEP)
            ]
        actions += [Action(ActionKind.APPLY, 0, batch, cut, bits, window) for batch in group]
    return actions


def outcome(
    training: Training,
    variant: Variant,
    at: Mapping[int, Callable[[nn.Module], None]] | None = None,
) -> tuple[dict[str, Any], nn.Module]:
    """Train, and return the document of the run and the trained network."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    trained = training.normal(at=at) if variant.window is None else training.split(variant)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    found = evaluate(trained.model, training.images.test)
    last = trained.losses[-len(trained.losses) // 10 :]
    return {
        "accuracy": found.accuracy,
        "test_loss": found.loss,
        "last_training_loss": statistics.mean(last),
        "feature_bytes": trained.feature_bytes,
        "staleness": trained.staleness,
        "weights_sha256": _digest(trained.model),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
    }, trained.model


def differing_tensors(training: Training, num_batches: int) -> tuple[list[str], int]:
    """Return the tensors in which K = 0 without compression differs from normal training, and the number of all."""
    normal = training.normal(num_batches).model.state_dict()
    split = training.split(Variant(name="K = 0", window=0), num_batches).model.state_dict()
    return [name for name, value in normal.items() if not torch.equal(value, split[name])], len(
        normal
    )


def weights_of(model: nn.Module) -> Weights:
    """Return all tensors of a network as arrays."""
    return {
        name: np.array(tensor.numpy(), order="C") for name, tensor in model.state_dict().items()
    }


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, array in weights_of(model).items():
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()
