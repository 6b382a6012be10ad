"""The edge's half in int8: the integer trainer in two pieces, replayed, saved and moved like a half in FP32."""

from collections.abc import Callable, Iterator
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
from socflower.errors import ConfigError, TrainingFailed
from socflower.model_graph.cut_points import SplitModel, capture_split
from socflower.precision import NITI, Int8Model, int8_algorithm
from socflower.precision.algorithm import BackwardRule
from socflower.training.int8 import Int8Trainer
from socflower.training.trainer import TrainingSpan
from socflower.wire.codecs.quantisation import decode, encode
from tests.edgecloud.runtime.split_training import LOSS, one_batch, sgd
from tests.seeded import built

IMAGE, CLASSES, BATCH, TOTAL = (2, 8, 8), 5, 8, 12
FIXED_POINT = int8_algorithm("adaptive-fixed-point", 0.9)
ALGORITHMS = pytest.mark.parametrize("algorithm", [NITI, FIXED_POINT], ids=lambda one: one.name)
RECUT = ActionKind.RECUT


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        ),
        seed,
    )


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
    split = split_of()
    front = front_of(split, split.num_cuts, algorithm)
    alone = [front.train_alone(batch) for batch in range(TOTAL)]
    model = network()
    session = Int8Trainer(algorithm=algorithm, learning_rate=0.05).start(
        model, TrainingSpan(first_step=0, total_steps=TOTAL)
    )
    losses = []
    for batch in range(TOTAL):
        images, labels, _ = source(batch)
        losses.append(float(session.step([(images, torch.from_numpy(labels))])))
    session.finish()
    assert np.allclose(alone, losses, rtol=1e-6)
    assert (
        differing(
            front.weights(), {name: each.numpy() for name, each in model.state_dict().items()}
        )
        == []
    )


@pytest.mark.parametrize("algorithm", [NITI, FIXED_POINT], ids=lambda one: one.name)
def test_forward_and_backward_are_a_training_step(algorithm: Any) -> None:
    """With the gradient of the loss rounded as the rule `fp32` says, a step in two pieces has the bits of one."""
    algorithm = replace(
        algorithm, backward=BackwardRule(rounding=algorithm.backward.rounding, loss="fp32")
    )
    whole, pieces = (
        Int8Model.from_module(network(), input_shape=IMAGE, algorithm=algorithm, head=head)
        for head in (True, False)
    )
    for batch in range(TOTAL):
        images, labels, _ = source(batch)
        whole.train_step(images.numpy(), labels, learning_rate=0.001, progress=0.5)
        logits = pieces.forward(images.numpy())[0].reshape(BATCH, CLASSES).astype(np.float64)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        gradient = powers / powers.sum(axis=1, keepdims=True)
        gradient[np.arange(BATCH), labels] -= 1.0
        assert 63.5 < np.abs(gradient).max() * 128 <= 127  # so that both rules have one exponent
        pieces.backward(
            (gradient / BATCH).reshape(BATCH, CLASSES, 1, 1).astype(np.float32),
            learning_rate=0.001,
            progress=0.5,
        )
    assert differing(whole.arrays(), pieces.arrays()) == []


@ALGORITHMS
@pytest.mark.parametrize("window", [0, 3])
def test_a_half_is_an_int8_network_beside_a_torch_one(algorithm: Any, window: int) -> None:
    """Against the engine driven by hand: every batch is replayed with the weights present as its gradient arrives."""
    split, cut, trainer = split_of(), 2, Int8Trainer(algorithm=algorithm, learning_rate=0.05)
    front, back = front_of(split, cut, algorithm), back_of(split, cut)
    run_actions(constant_staleness(TOTAL, window, cut=cut), [front], [back])
    edge = trainer.model(split.copy().front(cut), IMAGE, head=False)
    cloud = split.copy().back(cut).train()
    updates = sgd(cloud.parameters())
    waiting: dict[int, Any] = {}
    for action in constant_staleness(TOTAL, window, cut=cut):
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
            progress = action.batch / TOTAL
            edge.backward(
                waiting.pop(action.batch), learning_rate=trainer.rate(progress), progress=progress
            )
    assert differing(front.weights(), edge.arrays()) == []
    assert front.weights()["1.num_batches_tracked"] == TOTAL
    trained = {name: each.numpy() for name, each in cloud.state_dict().items()}
    assert differing({name: trained[name] for name in back.weights()}, back.weights()) == []


def test_the_gradient_at_the_edge_points_where_that_in_fp32_does() -> None:
    split, cut = split_of(), 1
    algorithm = int8_algorithm("adaptive-fixed-point")
    changes = []
    plain = TorchFront(split.copy(), cut, source, lambda weights: torch.optim.SGD(weights, lr=0.05))
    for front in (front_of(split, cut, algorithm), plain):
        before = {name: np.array(each) for name, each in front.weights().items()}
        one_batch(front, back_of(split, cut), 0)
        changes.append(
            np.concatenate(
                [
                    (front.weights()[name] - before[name]).ravel()
                    for name in ("0.weight", "1.weight", "1.bias")
                ]
            )
        )
    one, other = changes
    assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > 0.97
    assert 0.9 < np.linalg.norm(one) / np.linalg.norm(other) < 1.1


@pytest.mark.parametrize("seed", range(3))
def test_at_8_bits_int8_features_cross_without_loss(seed: int) -> None:
    split = split_of(seed=seed)
    for cut in range(split.num_cuts):
        front = front_of(split, cut)
        features = front.forward(seed)
        for grouping in ("tensor", "sample"):
            encoded = encode(features, 8, grouping=grouping, quantum=front.feature_quantum)  # type: ignore[arg-type]
            assert np.array_equal(decode(encoded), features)
            assert encoded.num_bytes <= features.size + 8 * BATCH
        assert not np.array_equal(
            decode(encode(features, 4, quantum=front.feature_quantum)), features
        )


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


def test_a_layer_moves_with_its_momentum_under_fp32_updates_and_is_rounded_under_integer_ones() -> (
    None
):
    split = split_of()

    def trained(algorithm: Any, cuts: tuple[int, ...]) -> tuple[Any, Any]:
        front, back = front_of(split, cuts[0], algorithm), back_of(split, cuts[0])
        for batch, cut in enumerate(cuts):
            run_actions([Action(RECUT, 0, batch, cut, 32, 0)], [front], [back])
            one_batch(front, back, batch)
        return front, back

    front, back = trained(FIXED_POINT, (2, 2))
    before = {**front.weights(), **back.weights()}
    velocity = front.save()
    run_actions([Action(RECUT, 0, 2, 0, 32, 0), Action(RECUT, 0, 2, 2, 32, 0)], [front], [back])
    assert (
        differing(before, {**front.weights(), **back.weights()}) == [] and front.save() == velocity
    )
    front, back = trained(NITI, (1, 1))
    given = front.weights()
    run_actions([Action(RECUT, 0, 2, 0, 32, 0)], [front], [back])
    assert (
        differing(
            {name: each for name, each in given.items() if name in back.weights()}, back.weights()
        )
        == []
    )
    run_actions([Action(RECUT, 0, 2, 3, 32, 0)], [front], [back])
    one_batch(front, back, 2)
    assert len(np.unique(front.weights()["5.weight"])) <= 255


def test_a_gradient_that_is_not_finite_is_refused_by_name() -> None:
    split = split_of()
    front = front_of(split, 2)
    features = front.forward(0)
    with pytest.raises(TrainingFailed, match="3: its gradient has left float32"):
        front.apply(0, np.full_like(features, np.nan))


def _program(model_fn: Callable[[], nn.Module] = network, **settings: Any) -> LayeredProgram:
    return LayeredProgram(model_fn=model_fn, example=IMAGE, edge_trainer=Int8Trainer(), **settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"reverse": True}, "edge_trainer in a reverse split, whose edge has the loss"),
        (
            {"frozen": "0"},
            "frozen = '0' is not for an edge_trainer: frozen layers stay in evaluation mode",
        ),
        ({"max_grad_norm": 1.0}, "max_grad_norm = 1.0 is not for an edge_trainer"),
        ({"autocast": torch.bfloat16}, "autocast = torch.bfloat16 is not for an edge_trainer"),
    ],
)
def test_what_int8_cannot_do_is_refused_in_one_line(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        _program(**settings)
    assert "\n" not in str(raised.value)


def test_named_halves_have_no_int8() -> None:
    with pytest.raises(
        ConfigError, match="edge_trainer is for a LayeredProgram: the parts of a HalvesProgram"
    ):
        HalvesProgram(model_fn=network, example={}, edge_trainer=Int8Trainer())


def test_an_operator_without_an_integer_form_counts_only_before_the_cut() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 5)
    )
    split = capture_split(model, IMAGE)
    front_of(split, 0).forward(0)
    with pytest.raises(
        ConfigError, match=r"3: int8 training has no GELU; use Int8Trainer\(unsupported='fp32'\)"
    ):
        front_of(split, 1)
    trainer = Int8Trainer(unsupported="fp32")
    front = Int8Front(split.copy(), 1, source, trainer, progress=lambda batch: 0.0)
    one_batch(front, back_of(split, 1), 0)
    with pytest.raises(
        ConfigError, match="with all layers in int8 the loss is softmax cross-entropy"
    ):
        Int8Front(
            split.copy(),
            split.num_cuts,
            source,
            trainer,
            progress=lambda batch: 0.0,
            loss=nn.MSELoss(),
        )
