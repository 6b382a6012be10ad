"""Int8Model from outside: that it learns, what it refuses, its state_dict, FP32 operators, and divergence."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from socflower.errors import TrainingFailed
from socflower.precision import ADAPTIVE_FIXED_POINT, NITI
from socflower.precision.algorithm import REAL_SCALES, WAGEUBN, Fp32Update, IntegerUpdate
from socflower.precision.int8.parameters import export_velocities, import_velocities
from socflower.precision.int8.requantisation import MAX_EXPONENT
from socflower.precision.int8.updates import Rate, update_weight
from tests.one_line import refused
from tests.precision import numpy_kernels as nk
from tests.precision.networks import (
    ALGORITHMS,
    CLASSES,
    CORNERS,
    MOMENTUM,
    NETWORKS,
    REACH,
    SELDOM,
    assert_same,
    batches,
    build,
    int8,
    train,
)
from tests.seeded import built


def velocities_of(model):
    return export_velocities(model.graph, model.parameters)


@pytest.mark.parametrize(
    ("name", "algorithm", "rate"),
    [
        *((name, NITI, 0.1) for name in ("normalised", "residual", *REACH)),
        # In other networks their steps are those of NumPy, bit for bit: test_steps.py.
        *(
            pytest.param(
                name, algorithm, rate, marks=() if name == "residual" else pytest.mark.slow
            )
            for algorithm, rate in ((ADAPTIVE_FIXED_POINT, 0.3), (MOMENTUM, 0.1))
            for name in ("normalised", "residual", *REACH)
        ),
    ],
)
def test_the_loss_falls(name, algorithm, rate):
    model = int8(name, algorithm)
    losses = train(model, batches(60, size=32), rate)
    assert np.mean(losses[-5:]) < (0.75 if name in REACH else 0.6) * losses[0]
    images, labels = batches(1, size=200, seed=7)[0]
    result = model.evaluate(images, labels)
    assert result.accuracy > 0.5
    real = model.predict(images)
    log_softmax = real - np.log(np.exp(real).sum(axis=1, keepdims=True))
    assert result.loss == pytest.approx(-log_softmax[np.arange(200), labels].mean(), rel=1e-9)
    assert result.num_correct == int((real.argmax(axis=1) == labels).sum())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kernel": "abacus"}, ("abacus",)),
        ({"num_threads": 0}, ("num_threads", "got 0")),
        ({"batch_blocks": {"nose": 2}}, ("batch_blocks", "nose")),
        ({"batch_blocks": {"2": 2}}, ("batch_blocks", "'2'")),
        ({"batch_blocks": {"0": -1}}, ("batch_blocks", "got -1")),
    ],
)
def test_settings_of_the_engine_that_cannot_be_are_refused(settings, named):
    refused(lambda: int8("plain", **settings), *named)
    assert int8("plain", kernel="portable").engine.kernel == "portable"


def test_the_fewest_gradient_bits_take_any_gradient():
    fewest = dataclasses.replace(
        NITI, name="fewest", update=IntegerUpdate(bits=(-8,), starts=(0.0,))
    )
    model = int8("plain", fewest)
    weight = model.parameters.weights["0.weight"]
    before = weight.data.copy()
    largest = 2**25 + 2**15
    gradient = np.full(weight.data.shape, largest, np.int32)
    update_weight(
        "0", model.engine, fewest, weight, gradient, largest=largest, gradient_scale=1.0, rate=Rate(0.0, 1),
        progress=0.0, stalls=model.parameters.stalls,
    )  # fmt: skip
    step = nk.round_shift(gradient, 30, nk.PSEUDO_STOCHASTIC)
    assert step.all(), "the carry alone moves the weights"
    np.testing.assert_array_equal(weight.data, np.clip(before - step, -127, 127))


def test_master_weights_that_all_vanish_become_zeros():
    model = int8("plain", ADAPTIVE_FIXED_POINT)
    for weight in model.parameters.weights.values():
        weight.master *= np.float32(1e-35)
    train(model, batches(1), rate=0.0)
    assert set(model.parameters.exponents.values()) == {-MAX_EXPONENT}
    assert not any(weight.data.any() for weight in model.parameters.weights.values())


# ------------------------------------------------------------------------------------------- wrong input


def with_pixel(images, value):
    images = images.copy()
    images[3, 1, 2, 2] = value
    return images


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, y: (x.astype(np.float64), y), ("images", "float32", "float64")),
        (lambda x, y: (x[0], y[:1]), ("images", "(n, 3, 10, 10)", "(3, 10, 10)")),
        (lambda x, y: (x[:, :2], y), ("images", "(6, 2, 10, 10)")),
        (lambda x, y: (x[:0], y[:0]), ("images", "1 or more")),
        (lambda x, y: (with_pixel(x, np.nan), y), ("images", "NaN")),
        (lambda x, y: (with_pixel(x, -np.inf), y), ("images", "infinity")),
        (lambda x, y: (x * np.float32(1e-35), y), ("images", "normalise")),
        (lambda x, y: (x * np.float32(1e35), y), ("images", "normalise")),
        (lambda x, y: (x, y[:5]), ("labels", "6", "(5,)")),
        (lambda x, y: (x, y[:, None]), ("labels", "(6, 1)")),
        (lambda x, y: (x, y.astype(np.float32)), ("labels", "float32")),
        (lambda x, y: (x, y + CLASSES), ("labels", "0 to 4")),
        (lambda x, y: (x, y - CLASSES), ("labels", "0 to 4", "-")),
        (lambda x, y: (x, y.astype(np.int64) + 2**32), ("labels", "0 to 4")),
    ],
)
def test_wrong_input_is_refused_and_changes_nothing(change, named):
    model = int8("normalised")
    untouched = int8("normalised")
    batch = batches(1)[0]
    wrong = change(*batch)
    for call in (partial(model.train_step, progress=0.0), model.evaluate):
        refused(lambda call=call: call(*wrong), *named)
    assert_same(model.arrays(), untouched.arrays())
    assert train(model, [batch]) == train(untouched, [batch])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("learning_rate", value) for value in (-0.1, np.nan, np.inf)),
        *(("progress", value) for value in (-0.1, 1.1, np.nan)),
        ("seed", -1),
    ],
)
def test_wrong_numbers_are_refused(key, value):
    model = int8("plain")
    batch = batches(1)[0]
    refused(lambda: model.train_step(*batch, **({"progress": 0.0} | {key: value})), key, value)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_below_1_is_refused(batch_size):
    model = int8("plain")
    batch = batches(1)[0]
    refused(lambda: model.predict(batch[0], batch_size=batch_size), "batch_size", batch_size)
    refused(lambda: model.evaluate(*batch, batch_size=batch_size), "batch_size", batch_size)


def test_without_progress_nothing_freezes_nitis_bits_at_the_first():
    """Whoever forgets it is told; where the bits never change, or an algorithm has none, nobody needs it."""
    batch = batches(1)[0]
    refused(
        lambda: int8("plain").train_step(*batch), "niti", "5, 4, 3", "progress=step / num_steps"
    )
    one = dataclasses.replace(NITI, update=IntegerUpdate(bits=(3,), starts=(0.0,)))
    for algorithm in (one, ADAPTIVE_FIXED_POINT):
        without = int8("plain", algorithm).train_step(*batch)
        assert without == int8("plain", algorithm).train_step(*batch, progress=0.9)


def test_input_in_any_layout_and_integer_type_is_taken():
    images, labels = batches(1)[0]
    expected = train(int8("plain"), [(images, labels)])
    for other in (labels.astype(np.uint8), labels.astype(np.int64)):
        assert train(int8("plain"), [(np.asfortranarray(images), other)]) == expected
    for scale in (1e-6, 1e6):
        assert np.isfinite(train(int8("normalised"), [(images * np.float32(scale), labels)]))


@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_black_images_train(name):
    images, labels = batches(1)[0]
    assert np.isfinite(train(int8(name), [(np.zeros_like(images), labels)]))


# ------------------------------------------------------------------------------------------- state_dict


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_int8_to_torch_to_int8_is_the_identity(name, algorithm):
    model = int8(name, algorithm)
    other = int8(name, algorithm)
    train(model, batches(3))
    module = build(name, seed=5)
    module.load_state_dict(model.state_dict(), strict=True)
    other.load_state_dict(module.state_dict())
    for key, weight in model.parameters.weights.items():
        again = other.parameters.weights[key]
        real, same = (np.ldexp(w.data.astype(float), w.exponent) for w in (weight, again))
        np.testing.assert_array_equal(same, real)
    assert_same(other.arrays(), model.arrays())
    images, _ = batches(1, seed=4)[0]
    np.testing.assert_array_equal(model.predict(images), other.predict(images))


def spoil(state, key, value):
    state = dict(state)
    if value is None:
        del state[key]
    else:
        state[key] = value
    return state


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("0.weight", None, ("(12, 3, 3, 3)", "missing")),
        ("1.running_var", None, ("(12,)", "missing")),
        ("9.bias", None, ("(5,)", "missing")),
        ("nose.weight", torch.zeros(3), ("does not use",)),
        ("0.weight", torch.zeros(12, 3, 3), ("(12, 3, 3)", "(12, 3, 3, 3)")),
        ("9.weight", torch.full((5, 16), torch.nan), ("(0, 0", "nan")),
        ("1.bias", torch.full((12,), torch.inf), ("(0,)", "inf")),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(key, value, named):
    model = int8("normalised")
    untouched = int8("normalised")
    data = batches(2)
    state = spoil(build("normalised", seed=8).state_dict(), key, value)
    refused(lambda: model.load_state_dict(state), key, *named)
    assert train(model, data) == train(untouched, data)


def test_what_is_exported_is_no_view_of_what_trains():
    model = int8("normalised", ADAPTIVE_FIXED_POINT)
    arrays = model.arrays()
    state = model.state_dict()
    kept = {name: array.copy() for name, array in arrays.items()}
    train(model, batches(1), rate=0.5)
    assert_same(arrays, kept)
    assert_same({name: tensor.numpy() for name, tensor in state.items()}, kept)


def test_kept_exponents_make_the_round_trip_exact_where_the_largest_weight_shrank():
    model = int8("plain")
    module = build("plain", seed=5)
    for weight in model.parameters.weights.values():
        np.clip(weight.data, -60, 60, out=weight.data)
    module.load_state_dict(model.state_dict())
    kept = int8(module, options={"exponents": model.parameters.exponents})
    finest = int8(module)
    assert kept.parameters.exponents == model.parameters.exponents
    for name, weight in model.parameters.weights.items():
        np.testing.assert_array_equal(kept.parameters.weights[name].data, weight.data)
        assert finest.parameters.exponents[name] == weight.exponent - 1
        np.testing.assert_array_equal(finest.parameters.weights[name].data, 2 * weight.data)


def test_an_exponent_at_which_a_weight_does_not_fit_is_not_kept():
    own = int8("plain").parameters.exponents
    low = {name: exponent - 3 for name, exponent in own.items()}
    some = {"0.weight": own["0.weight"] + 1}
    for exponents, expected in ((low, own), (some, own | some)):
        assert int8("plain", options={"exponents": exponents}).parameters.exponents == expected


@pytest.mark.few_cells(3)
@pytest.mark.parametrize("algorithm", [NITI, MOMENTUM], ids=["niti", "momentum"])
@pytest.mark.parametrize("name", ["normalised", "residual", *REACH])
def test_training_taken_up_in_another_model_goes_on_bit_for_bit(name, algorithm):
    """Parameters, exponents, momentum and what is known of scales are all that a model is."""
    model = int8(name, algorithm, rescaling=SELDOM)
    data = batches(12)
    module = build(name, seed=5)
    train(model, data[:6])
    module.load_state_dict(model.state_dict())
    exponents = {"exponents": model.parameters.exponents}
    other = int8(module, algorithm, rescaling=SELDOM, options=exponents)
    assert other.trackers.to_json() == [] and not velocities_of(other)
    import_velocities(other.graph, other.parameters, velocities_of(model))
    other.trackers.restore(json.loads(json.dumps(model.trackers.to_json())))
    assert train(other, data[6:]) == train(model, data[6:])
    assert_same(other.arrays(), model.arrays())
    assert_same(velocities_of(other), velocities_of(model))
    assert other.parameters.exponents == model.parameters.exponents
    assert other.trackers.to_json() == model.trackers.to_json()


def test_only_an_algorithm_with_momentum_has_velocities():
    trained = {f"{layer}.{part}" for layer in (0, 3, 6, 8) for part in ("weight", "bias")}
    for algorithm, expected in ((NITI, set()), (ADAPTIVE_FIXED_POINT, set()), (MOMENTUM, trained)):
        model = int8("plain", algorithm)
        assert not velocities_of(model)
        train(model, batches(1))
        assert set(velocities_of(model)) == expected


def test_a_new_state_forgets_what_was_known_of_scales():
    model = int8("plain")
    train(model, batches(1))
    assert {role for _, role, _ in model.trackers.to_json()} == {"forward", "backward"}
    model.load_state_dict(model.state_dict())
    assert model.trackers.to_json() == []


# ---------------------------------------------------------------------------------------- FP32 operators


def with_fp32(make, algorithm=NITI):
    """Return a module with an FP32 operator in the middle, and its int8 model."""

    def layers():
        front = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*front, make(), nn.Flatten(), nn.Linear(8 * 16, CLASSES))

    module = built(layers, 3)
    return module, int8(module, algorithm, options={"fp32_operators": ["3"]})


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.GroupNorm(2, 8), lambda: nn.Conv2d(8, 8, 1)])
@pytest.mark.parametrize("algorithm", [NITI, ADAPTIVE_FIXED_POINT], ids=["niti", "fp32"])
def test_a_network_with_an_fp32_operator_learns(make, algorithm):
    module, model = with_fp32(make, algorithm)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    losses = train(model, batches(40, size=24), rate=0.1)
    assert np.mean(losses[-5:]) < 0.9 * losses[0]
    state = model.state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        # The FP32 operator's own parameters train.
        assert not name.startswith("3.") or not torch.equal(state[name], value)
    module.load_state_dict(state)
    images, _ = batches(1, size=20, seed=9)[0]
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(images)).numpy()
    assert np.abs(model.predict(images) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "spoilt", [None, torch.zeros(3), torch.full((8,), torch.nan)], ids=["none", "shape", "nan"]
)
def test_a_wrong_state_of_an_fp32_operator_is_refused(spoilt):
    _, model = with_fp32(lambda: nn.GroupNorm(2, 8))
    before = model.arrays()
    changed = {name: value * 2 for name, value in model.state_dict().items()}
    refused(lambda: model.load_state_dict(spoil(changed, "3.weight", spoilt)), "3.weight")
    assert_same(model.arrays(), before)


def test_an_fp32_operator_that_diverges_is_failed_training():
    class Explode(nn.Module):
        def forward(self, x):
            return x / 0.0 if self.training else x

    _, model = with_fp32(Explode)
    refused(lambda: train(model, batches(1)), "3: ", "NaN", error=TrainingFailed)


# -------------------------------------------------------------------------------------------- divergence


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rate", [1e10, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("name", ["plain", "normalised", "residual"])
def test_diverged_training_fails_and_never_gives_garbage(name, algorithm, rate):
    """Each step gives a finite loss with finite parameters, or raises TrainingFailed."""
    model = int8(name, algorithm)
    for batch in batches(12, size=16):
        try:
            result = model.train_step(*batch, learning_rate=rate, progress=0.0)
        except TrainingFailed as error:
            assert "lower the learning rate" in str(error) or "int32" in str(error)
            return
        assert np.isfinite(result.loss)
        for key, array in model.arrays().items():
            assert np.isfinite(array).all(), key


@pytest.mark.parametrize("algorithm", [NITI, ADAPTIVE_FIXED_POINT], ids=["niti", "fp32"])
def test_a_network_whose_weights_all_run_in_fp32_trains_and_counts_their_memory(algorithm):
    module = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 25, CLASSES))
    model = int8(module, algorithm, options={"fp32_operators": ["2"]})
    assert not model.parameters.weights
    held = sum(parameter.nbytes for parameter in module.parameters())
    assert model.parameters.num_bytes == held
    train(model, batches(1))
    assert model.regions.held_bytes > 0
    assert not np.array_equal(model.arrays()["2.weight"], module[2].weight.detach().numpy())


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("name", [*NETWORKS, *CORNERS])
def test_a_prediction_does_not_depend_on_the_other_images(name, algorithm):
    """Not a bit, also beside an image of other magnitude, a black one, and in batches of other sizes."""
    model = int8(name, algorithm)
    train(model, batches(2))
    images = batches(1, size=12, seed=9)[0][0]
    together = model.predict(images)
    np.testing.assert_array_equal(together, model.predict(images, batch_size=5))
    alone = np.concatenate([model.predict(images[index : index + 1]) for index in range(12)])
    np.testing.assert_array_equal(together, alone)
    images[3] *= 200.0
    images[7] = 0.0
    others = [index for index in range(12) if index not in (3, 7)]
    np.testing.assert_array_equal(model.predict(images)[others], together[others])


@pytest.mark.parametrize("name", [*NETWORKS, *CORNERS])
def test_a_prediction_is_that_of_the_fp32_network(name):
    """With the weights that int8 stands for; an image is rounded in every layer at its own scale."""
    module = build(name)
    model = int8(module, NITI)
    module.load_state_dict(model.state_dict())
    images = batches(1, size=12, seed=9)[0][0]
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(images)).numpy()
    got = model.predict(images)
    assert np.linalg.norm(got - expected) <= 0.03 * np.linalg.norm(expected)


def weights_after_a_step(update: Fp32Update, learning_rate: float = 1.0) -> dict[str, np.ndarray]:
    """Return the FP32 masters of convolutions and linear layers after one step."""
    model = int8(built(NETWORKS["plain"], 3), dataclasses.replace(WAGEUBN, update=update))
    model.train_step(*batches(1)[0], learning_rate=learning_rate)
    return {name: each for name, each in model.arrays().items() if name.endswith("weight")}


def test_a_gradient_of_few_bits_is_rounded_once() -> None:
    before = weights_after_a_step(Fp32Update(), learning_rate=0.0)
    exact, rounded = (weights_after_a_step(Fp32Update(gradient_bits=bits)) for bits in (None, 5))
    for name, weight in before.items():
        gradient, coarse = weight - exact[name], weight - rounded[name]
        largest = float(np.abs(gradient).max())
        assert 0.0 < float(np.abs(coarse - gradient).max()) <= 1.01 * largest / 16
        # Subtracting from the weights has blurred the last bits.
        levels = np.round(coarse / np.float32(largest) * 4096)
        assert len(np.unique(np.abs(levels))) <= 40


def test_masters_in_fixed_point_stay_in_their_range() -> None:
    found = weights_after_a_step(Fp32Update(weight_bits=10), learning_rate=50.0)
    for weight in found.values():
        assert np.array_equal(np.rint(weight * 512), weight * 512)
        assert float(np.abs(weight).max()) <= 511 / 512
    assert max(float(np.abs(weight).max()) for weight in found.values()) == 511 / 512


def test_masters_in_fixed_point_that_diverge_are_refused() -> None:
    with pytest.raises(TrainingFailed, match="lower the learning rate"):
        weights_after_a_step(Fp32Update(weight_bits=24), learning_rate=1e39)


@pytest.mark.parametrize("operator", [nn.PReLU, lambda: nn.GroupNorm(2, 8)])
def test_sgd_with_momentum_and_weight_decay_is_torchs_in_every_operator(operator):
    """Also in FP32 operators, and where batches have unequal sizes: torch's mean gradients go into the velocity."""
    rule = Fp32Update(momentum=0.9, weight_decay=0.05)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), operator(), nn.Flatten(), nn.Linear(8 * 64, CLASSES)]
    module = nn.Sequential(*layers)
    plain = dataclasses.replace(REAL_SCALES, update=Fp32Update())
    model = int8(
        module, dataclasses.replace(REAL_SCALES, update=rule), options={"unsupported": "fp32"}
    )
    velocities = {}
    data = [
        (images[:size], labels[:size])
        for size, (images, labels) in zip((16, 7, 12), batches(3), strict=True)
    ]
    for images, labels in data:
        before = {name: np.array(each) for name, each in model.arrays().items()}
        # A step of plain SGD from the same values shows the gradient.
        other = int8(module, plain, options={"unsupported": "fp32"})
        other.load_state_dict(before)
        other.train_step(images, labels, learning_rate=1.0)
        model.train_step(images, labels, learning_rate=0.1)
        for name, value in model.arrays().items():
            gradient = before[name] - other.arrays()[name] + 0.05 * before[name]
            velocities[name] = 0.9 * velocities.get(name, 0.0) + gradient
            expected = before[name] - 0.1 * velocities[name]
            np.testing.assert_allclose(value, expected, atol=2e-6, err_msg=name)
