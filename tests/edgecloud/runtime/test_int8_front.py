"""The edge's half in int8: the integer trainer in two pieces, replayed, saved and moved like a half in FP32."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.runtime.int8_front import Int8Front
from socflower.edgecloud.split_program import HalvesProgram, LayeredProgram
from socflower.errors import TrainingFailed
from socflower.model_graph.cut_points import SplitModel, capture_split
from socflower.precision import NITI, Int8Model, int8_algorithm
from socflower.precision.algorithm import BackwardRule
from socflower.training.int8 import Int8Trainer
from socflower.training.trainer import TrainingSpan
from socflower.wire.codecs.quantisation import decode, encode
from tests.edgecloud.runtime.split_training import LOSS, one_batch, sgd
from tests.one_line import refused
from tests.seeded import built

IMAGE, CLASSES, BATCH, TOTAL = (2, 8, 8), 5, 8, 12
FIXED_POINT = int8_algorithm("adaptive-fixed-point", 0.9)
ALGORITHMS = pytest.mark.parametrize("algorithm", [NITI, FIXED_POINT], ids=lambda one: one.name)
RECUT = ActionKind.RECUT


def network(seed: int = 0, *, dropout: float = 0.0, norm: bool = True) -> nn.Module:
    def make() -> nn.Module:
        first = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
        last = [nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)]
        if not norm:
            first.pop(1)
        return nn.Sequential(*first, nn.Dropout(dropout), *last)

    return built(make, seed)


def source(batch: int) -> Samples:
    rng = np.random.default_rng(batch)
    return (
        torch.from_numpy(rng.normal(size=(BATCH, *IMAGE)).astype(np.float32)),
        rng.integers(0, CLASSES, BATCH),
        np.arange(BATCH) + BATCH * batch,
    )


def split_of(**settings: Any) -> SplitModel:
    return capture_split(network(**settings), IMAGE)


def front_of(split: SplitModel, cut: int, algorithm: Any = NITI) -> Int8Front:
    return Int8Front(
        split.copy(),
        cut,
        source,
        Int8Trainer(algorithm=algorithm, learning_rate=0.05),
        progress=lambda batch: batch / TOTAL,
        loss=LOSS,
    )


def back_of(split: SplitModel, cut: int) -> TorchBack:
    return TorchBack(split.copy(), cut, sgd, LOSS)


def differing(one: Any, other: Any) -> list[str]:
    return [name for name in one if not np.array_equal(one[name], other[name])]


@ALGORITHMS
def test_with_all_layers_the_half_is_the_int8_trainer(algorithm: Any) -> None:
    split, model = split_of(), network()
    front = front_of(split, split.num_cuts, algorithm)
    span = TrainingSpan(first_step=0, total_steps=TOTAL)
    session = Int8Trainer(algorithm=algorithm, learning_rate=0.05).start(model, span)
    for batch in range(TOTAL):
        images, labels, _ = source(batch)
        loss = float(session.step([(images, torch.from_numpy(labels))]))
        assert front.train_alone(batch) == pytest.approx(loss, rel=1e-6)
    session.finish()
    assert differing(front.weights(), arrays_of(model)) == []


def arrays_of(model: nn.Module) -> dict[str, Any]:
    return {name: each.numpy() for name, each in model.state_dict().items()}


@ALGORITHMS
def test_forward_and_backward_are_a_training_step(algorithm: Any) -> None:
    """With the gradient of the loss rounded as the rule `fp32` says, a step in two pieces has the bits of one."""
    rule = BackwardRule(rounding=algorithm.backward.rounding, loss="fp32")
    made = {"input_shape": IMAGE, "algorithm": replace(algorithm, backward=rule)}
    whole, pieces = (Int8Model.from_module(network(), head=head, **made) for head in (True, False))
    how = {"learning_rate": 0.001, "progress": 0.5}
    for batch in range(TOTAL):
        images, labels, _ = source(batch)
        whole.train_step(images.numpy(), labels, **how)
        logits = pieces.forward(images.numpy())[0].reshape(BATCH, CLASSES).astype(np.float64)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        gradient = powers / powers.sum(axis=1, keepdims=True)
        gradient[np.arange(BATCH), labels] -= 1.0
        # So that both rules have one exponent.
        assert 63.5 < np.abs(gradient).max() * 128 <= 127
        shaped = (gradient / BATCH).reshape(BATCH, CLASSES, 1, 1).astype(np.float32)
        pieces.backward(shaped, **how)
    assert differing(whole.arrays(), pieces.arrays()) == []


@pytest.mark.few_cells(2)
@ALGORITHMS
@pytest.mark.parametrize("window", [0, 3])
def test_a_half_is_an_int8_network_beside_a_torch_one(algorithm: Any, window: int) -> None:
    """Against the engine driven by hand: every batch is replayed with the weights present as its gradient arrives."""
    split, cut, trainer = split_of(), 2, Int8Trainer(algorithm=algorithm, learning_rate=0.05)
    front, back = front_of(split, cut, algorithm), back_of(split, cut)
    actions = constant_staleness(TOTAL, window, cut=cut)
    run_actions(actions, [front], [back])
    edge = trainer.model(split.copy().front(cut), IMAGE, head=False)
    cloud = split.copy().back(cut).train()
    updates = sgd(cloud.parameters())
    waiting: dict[int, Any] = {}
    for action in actions:
        images, labels, _ = source(action.batch)
        if action.kind is ActionKind.FORWARD:
            waiting[action.batch] = edge.forward(images.numpy(), keep=window == 0)[0]
        elif action.kind is ActionKind.STEP:
            leaf = torch.from_numpy(waiting[action.batch]).requires_grad_()
            updates.zero_grad()
            LOSS(cloud(leaf), torch.from_numpy(labels)).backward()
            updates.step()
            assert leaf.grad is not None
            waiting[action.batch] = leaf.grad.numpy()
        else:
            if window:
                edge.forward(images.numpy(), replay=True)
            progress, gradient = action.batch / TOTAL, waiting.pop(action.batch)
            edge.backward(gradient, learning_rate=trainer.rate(progress), progress=progress)
    assert differing(front.weights(), edge.arrays()) == []
    assert front.weights()["1.num_batches_tracked"] == TOTAL
    assert differing(back.weights(), arrays_of(cloud)) == []


def test_the_gradient_at_the_edge_points_where_that_in_fp32_does() -> None:
    split, changes = split_of(), []
    plain = TorchFront(split.copy(), 1, source, lambda weights: torch.optim.SGD(weights, lr=0.05))
    for front in (front_of(split, 1, int8_algorithm("adaptive-fixed-point")), plain):
        before = {name: np.array(each) for name, each in front.weights().items()}
        one_batch(front, back_of(split, 1), 0)
        after = front.weights()
        names = ("0.weight", "1.weight", "1.bias")
        changes.append(np.concatenate([(after[name] - before[name]).ravel() for name in names]))
    one, other = changes
    norms = np.linalg.norm(one), np.linalg.norm(other)
    assert one @ other / (norms[0] * norms[1]) > 0.97 and 0.9 < norms[0] / norms[1] < 1.1


@pytest.mark.parametrize("seed", range(3))
def test_at_8_bits_int8_features_cross_without_loss(seed: int) -> None:
    split = split_of(seed=seed)
    for cut in range(split.num_cuts):
        front = front_of(split, cut)
        features = front.forward(seed)
        quantum: Any = {"quantum": front.feature_quantum}
        for grouping in ("tensor", "sample"):
            encoded = encode(features, 8, grouping=grouping, **quantum)
            assert np.array_equal(decode(encoded), features)
            assert encoded.num_bytes <= features.size + 8 * BATCH
        assert not np.array_equal(decode(encode(features, 4, **quantum)), features)


@ALGORITHMS
def test_a_restored_half_continues_with_the_same_weights(algorithm: Any) -> None:
    split, cut = split_of(dropout=0.25), 3

    def after(stop: int | None) -> dict[str, Any]:
        front, back = front_of(split, cut, algorithm), back_of(split, cut)
        for batch in range(TOTAL):
            if batch == stop:
                saved = front.save()
                front = front_of(split, 0, algorithm)
                front.restore(saved)
            one_batch(front, back, batch, keep_graph=batch % 2 == 0)
        return dict(front.weights())

    assert differing(after(None), after(TOTAL // 2)) == []


def test_a_layer_moves_with_its_momentum_or_is_rounded_under_integer_updates() -> None:
    split = split_of()

    def trained(algorithm: Any) -> tuple[Int8Front, TorchBack]:
        front, back = front_of(split, 3, algorithm), back_of(split, 3)
        for batch in range(2):
            one_batch(front, back, batch)
        return front, back

    front, back = trained(FIXED_POINT)
    moved = []
    for _ in range(2):
        moved.append(front.export_layers(0))
        back.import_layers(0, moved[-1])
        moved.append(back.export_layers(3))
        front.import_layers(3, moved[-1])
    assert moved[0]["5.weight::momentum_buffer"].any()
    for other in moved[1:]:
        assert other.keys() == moved[0].keys() and differing(moved[0], other) == []
    front, back = trained(NITI)
    for cut in (0, 3):
        run_actions([Action(RECUT, 0, 2, cut, 32, 0)], [front], [back])
        one_batch(front, back, 2)
    assert len(np.unique(front.weights()["5.weight"])) <= 255


def test_a_gradient_that_is_not_finite_is_refused_by_name() -> None:
    front = front_of(split_of(), 2)
    features = front.forward(0)
    nans = np.full_like(features, np.nan)
    refused(lambda: front.apply(0, nans), "3", "float32", error=TrainingFailed)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"reverse": True}, ["reverse"]),
        ({"frozen": "0"}, ["frozen = '0'"]),
        ({"max_grad_norm": 1.0}, ["max_grad_norm = 1.0"]),
        ({"autocast": torch.bfloat16}, ["autocast = torch.bfloat16"]),
    ],
)
def test_what_int8_cannot_do_is_refused(settings: dict[str, Any], named: list[str]) -> None:
    made = {"model_fn": network, "example": IMAGE, "edge_trainer": Int8Trainer()}
    refused(lambda: LayeredProgram(**made, **settings), "edge_trainer", *named)


def test_named_halves_have_no_int8() -> None:
    made = {"model_fn": network, "example": {}, "edge_trainer": Int8Trainer()}
    refused(lambda: HalvesProgram(**made), "edge_trainer", "LayeredProgram")


def test_an_operator_without_an_integer_form_counts_only_before_the_cut() -> None:
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanhshrink()]
    split = capture_split(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5)), IMAGE)
    strict = Int8Trainer(unsupported="refuse")

    def without_fp32(cut: int) -> Int8Front:
        return Int8Front(split.copy(), cut, source, strict, progress=lambda batch: 0.0, loss=LOSS)

    without_fp32(0).forward(0)
    refused(lambda: without_fp32(1), "3", "Tanhshrink", "unsupported='fp32'")

    def with_fp32(cut: int, **loss: Any) -> Int8Front:
        trainer = Int8Trainer()
        return Int8Front(split.copy(), cut, source, trainer, progress=lambda batch: 0.0, **loss)

    one_batch(with_fp32(1), back_of(split, 1), 0)
    refused(lambda: with_fp32(split.num_cuts, loss=nn.MSELoss()), "softmax cross-entropy")
