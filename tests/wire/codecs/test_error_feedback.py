"""Error feedback: exact to first order where its estimate of the Hessian is, and kept in a byte per element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from socflower.wire.codecs.error_feedback import ErrorFeedback, Form, KeptError, diagonal, rank_one
from socflower.wire.codecs.quantisation import Floats, decode, encode
from tests.one_line import refused

SHAPES = hnp.array_shapes(max_dims=4, max_side=6)


def tensors(num: int) -> st.SearchStrategy[list[Floats]]:
    """Return tensors of one shape."""
    return SHAPES.flatmap(
        lambda shape: st.lists(
            hnp.arrays(np.float32, shape, elements=st.floats(-4, 4, width=32)),
            min_size=num,
            max_size=num,
        )
    )


@settings(max_examples=40)
@given(pair=tensors(2))
def test_both_forms_are_the_paper_s_formulas(pair: list[Floats]) -> None:
    """Element by element, and with the outer product written out."""
    gradient, error = pair
    g, e = gradient.astype(np.float64), error.astype(np.float64)
    assert np.allclose(diagonal(gradient, error), g - e * g * g, rtol=1e-5, atol=1e-3)
    expected = np.stack(
        [
            (one.ravel() - np.outer(one.ravel(), one.ravel()) @ lost.ravel()).reshape(one.shape)
            for one, lost in zip(g, e, strict=True)
        ]
    )
    assert np.allclose(rank_one(gradient, error), expected, rtol=1e-4, atol=1e-2)


@settings(max_examples=40)
@given(pair=tensors(2), form=st.sampled_from([diagonal, rank_one]))
def test_without_an_error_nothing_is_corrected(pair: list[Floats], form: object) -> None:
    gradient, _ = pair
    before = gradient.copy()
    assert np.array_equal(form(gradient, np.zeros_like(gradient)), gradient)  # type: ignore[operator]
    assert np.array_equal(gradient, before)


@given(seed=st.integers(0, 500), num_samples=st.integers(2, 40))
def test_rank_one_of_a_sum_of_losses_is_exact_to_first_order(seed: int, num_samples: int) -> None:
    """f = sum of −log(1 − a·h), whose Hessian per sample is ggᵀ: an error of second order is left."""
    rng = np.random.default_rng(seed)
    a, h = rng.uniform(-0.3, 0.3, (2, num_samples, 9))
    direction = rng.uniform(-1, 1, h.shape)

    def gradient_at(features: np.ndarray) -> np.ndarray:
        return a / (1 - (a * features).sum(axis=1, keepdims=True))

    def left_over(size: float, *, corrects: bool = True) -> float:
        error = size * direction
        corrected = gradient_at(h + error)
        if corrects:
            corrected = rank_one(corrected, error)  # type: ignore[arg-type]
        return float(np.linalg.norm(corrected - gradient_at(h)) / np.linalg.norm(gradient_at(h)))

    # A tenth of the error leaves a hundredth.
    assert left_over(1e-2) < 1e-3
    assert left_over(1e-3) < left_over(1e-2) / 50 + 1e-6
    assert left_over(1e-3) < left_over(1e-3, corrects=False) + 1e-6


def test_the_diagonal_is_exact_to_first_order_where_elements_do_not_interact() -> None:
    rng = np.random.default_rng(4)
    a, h = rng.uniform(-0.3, 0.3, (2, 8, 9))
    error = 1e-3 * rng.uniform(-1, 1, h.shape)

    def gradient_at(features: np.ndarray) -> np.ndarray:
        return a / (1 - a * features)

    raw = gradient_at(h + error)
    before = np.linalg.norm(raw - gradient_at(h))
    assert np.linalg.norm(diagonal(raw, error) - gradient_at(h)) < before / 100  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    features=hnp.arrays(np.float32, SHAPES, elements=st.floats(-1e6, 1e6, width=32)),
    bits=st.sampled_from([2, 4, 8, 16]),
)
def test_a_kept_error_is_off_by_a_508th_of_a_step(features: Floats, bits: int) -> None:
    decoded = decode(encode(features, bits))
    kept = KeptError.of(features, decoded)
    exact = decoded.astype(np.float64) - features
    off = abs(kept.error() - exact)
    assert (off <= abs(exact).max() / 254 * (1 + 1e-6) + abs(exact) * 2**-23).all()
    step = (float(features.max()) - float(features.min())) / (2**bits - 1)
    assert (off <= step / 508 * (1 + 2**-11) + np.spacing(np.abs(decoded).max())).all()
    assert (kept.error()[exact == 0] == 0).all()
    assert kept.num_bytes == (features.size if exact.any() else 0)


def test_a_tensor_of_several_blocks_is_kept_as_a_small_one_is() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, 40_001)).astype(np.float32)
    decoded = decode(encode(features, 4))
    error = decoded.astype(np.float64) - features
    levels = np.rint(error.ravel() / (abs(error).max() / 127)).astype(np.int8)
    kept = KeptError.of(features, decoded)
    assert kept.levels is not None and np.array_equal(kept.levels, levels)


@pytest.mark.parametrize("tiny", [1e-45, 1e-38])
def test_the_tiniest_errors_are_kept(tiny: float) -> None:
    features = np.array([0, tiny, -3 * tiny], np.float32)
    kept = KeptError.of(np.zeros(3, np.float32), features)
    assert np.allclose(kept.error(), features, rtol=0.01, atol=0)


@pytest.mark.parametrize("form", ["diagonal", "rank-one"])
def test_a_gradient_is_corrected_by_the_error_of_its_own_batch(form: Form) -> None:
    rng = np.random.default_rng(1)
    feedback, batches = ErrorFeedback(form), {}
    for batch in range(4):
        features = rng.normal(size=(5, 3, 4)).astype(np.float32)
        decoded = decode(encode(features, 2))
        feedback.keep(batch, features, decoded)
        batches[batch] = KeptError.of(features, decoded).error()
    assert feedback.num_bytes == 4 * 60
    restored = ErrorFeedback(form)
    restored.restore(feedback.save())
    gradient = rng.normal(size=(5, 3, 4)).astype(np.float32)
    for batch, error in batches.items():
        expected = (diagonal if form == "diagonal" else rank_one)(gradient, error)
        assert not np.array_equal(expected, gradient)
        for either in (feedback, restored):
            assert np.array_equal(either.correct(batch, gradient), expected)
            either.forget(batch)
            # Twice does no harm.
            either.forget(batch)
            refused(lambda: either.correct(batch, gradient), f"batch {batch}")  # noqa: B023
    assert feedback.num_bytes == restored.num_bytes == 0


@pytest.mark.parametrize("form", ["none", "diagonal", "rank-one"])
def test_a_batch_that_lost_nothing_costs_nothing_and_is_not_changed(form: Form) -> None:
    feedback = ErrorFeedback(form)
    features = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    feedback.keep(0, features, features)
    assert feedback.num_bytes == 0
    restored = ErrorFeedback(form)
    restored.restore(feedback.save())
    for either in (feedback, restored):
        assert np.array_equal(either.correct(0, features), features)


def test_no_feedback_keeps_and_corrects_nothing() -> None:
    feedback = ErrorFeedback("none")
    features = np.ones((3, 4), np.float32)
    feedback.keep(0, features, 2 * features)
    assert feedback.num_bytes == 0
    assert feedback.correct(0, features) is features
    assert feedback.correct(99, features) is features


def test_empty_tensors() -> None:
    empty = np.zeros((0, 4), np.float32)
    for form in (diagonal, rank_one):
        assert form(empty, empty).shape == (0, 4)
    assert KeptError.of(empty, empty).error().shape == (0, 4)


def test_what_does_not_belong_together_is_refused() -> None:
    one, other, scalar = (np.zeros(shape, np.float32) for shape in ((2, 3), (3, 2), ()))
    feedback = ErrorFeedback("diagonal")
    feedback.keep(3, one, one + 1)
    for call in (
        lambda: diagonal(one, other),
        lambda: rank_one(one, other),
        lambda: KeptError.of(one, other),
        lambda: feedback.correct(3, other),
    ):
        refused(call, "(2, 3)", "(3, 2)")
    refused(lambda: rank_one(scalar, scalar), "no samples")
    refused(lambda: ErrorFeedback("full"), "'full'")  # type: ignore[arg-type]


def test_a_state_of_another_form_and_a_damaged_one_are_refused() -> None:
    saved = ErrorFeedback("diagonal").save()
    refused(lambda: ErrorFeedback("rank-one").restore(saved), "'diagonal'", "'rank-one'")
    for broken in (b"", b"garbage", saved[:-30], saved[50:], saved[:-1] + b"?"):
        refused(lambda broken=broken: ErrorFeedback("diagonal").restore(broken), "damaged")
