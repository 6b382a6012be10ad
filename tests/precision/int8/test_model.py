"""Int8Model from outside: that it learns, what it refuses, its state_dict, FP32 operators, and divergence."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from socflower.errors import ConfigError, TrainingFailed
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    ALGORITHMS,
    NITI,
    EngineSettings,
    Int8Model,
    RescalingPolicy,
)
from socflower.precision.algorithm import Fp32Update, IntegerUpdate
from socflower.precision.int8.requantisation import MAX_EXPONENT
from socflower.precision.int8.updates import update_weight
from tests.precision import numpy_kernels as nk
from tests.precision.networks import CLASSES, IMAGE, NETWORKS, batches, build
from tests.seeded import built

MOMENTUM = dataclasses.replace(ADAPTIVE_FIXED_POINT, update=Fp32Update(momentum=0.9))


def model_of(name="plain", algorithm=NITI, **more):
    return Int8Model.from_module(build(name), input_shape=IMAGE, algorithm=algorithm, **more)


@pytest.mark.parametrize(
    ("algorithm", "rate"),
    [(NITI, 0.1), (ADAPTIVE_FIXED_POINT, 0.3), (MOMENTUM, 0.1)], ids=["niti", "fp32", "momentum"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["normalised", "residual"])
def test_the_loss_falls(name, algorithm, rate):
    model = model_of(name, algorithm)
    data = batches(60, size=32)
    losses = [
        model.train_step(images, labels, learning_rate=rate, progress=index / len(data)).loss
        for index, (images, labels) in enumerate(data)
    ]
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    images, labels = batches(1, size=200, seed=7)[0]
    result = model.evaluate(images, labels)
    assert result.accuracy > 0.5
    real = model.predict(images)
    log_softmax = real - np.log(np.exp(real).sum(axis=1, keepdims=True))
    assert result.loss == pytest.approx(-log_softmax[np.arange(200), labels].mean(), rel=1e-9)
    assert result.num_correct == int((real.argmax(axis=1) == labels).sum())


def test_the_kernel_that_runs_is_said():
    assert model_of(settings=EngineSettings(kernel="portable")).kernel == "portable"
    with pytest.raises(ConfigError, match="no kernel path 'abacus'"):
        model_of(settings=EngineSettings(kernel="abacus"))
    with pytest.raises(ConfigError, match="num_threads must be 1 to 1024, got 0"):
        model_of(settings=EngineSettings(num_threads=0))


def test_the_fewest_gradient_bits_take_any_gradient():
    fewest = dataclasses.replace(
        NITI, name="fewest", update=IntegerUpdate(bits=(-8,), starts=(0.0,))
    )
    model = model_of("plain", fewest)
    weight = model.parameters.weights["0.weight"]
    before, gradient = weight.data.copy(), np.full(weight.data.shape, 2**25 + 2**15, np.int32)
    update_weight(
        "0", model.engine, fewest, weight, gradient, largest=2**25 + 2**15, gradient_scale=1.0, learning_rate=0.0,
        progress=0.0, scratch=np.empty(0, np.float32),
    )  # fmt: skip
    step = nk.round_shift(gradient, 30, nk.PSEUDO_STOCHASTIC)
    assert step.all(), "the carry alone moves the weights"
    np.testing.assert_array_equal(weight.data, np.clip(before - step, -127, 127))


def test_master_weights_that_all_vanish_become_zeros():
    model = model_of("plain", ADAPTIVE_FIXED_POINT)
    for weight in model.parameters.weights.values():
        weight.master *= np.float32(1e-35)
    data = batches(3)
    model.train_step(*data[0], learning_rate=0.0, progress=0.0)
    assert set(model.weight_exponents().values()) == {-MAX_EXPONENT}
    assert not any(weight.data.any() for weight in model.parameters.weights.values())


# ------------------------------------------------------------------------------------------- wrong input


def wrong(change):
    images, labels = batches(1)[0]
    return change(images, labels)


def with_pixel(images, value):
    images = images.copy()
    images[3, 1, 2, 2] = value
    return images


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x.astype(np.float64), y), r"images: need float32, got float64"),
        (lambda x, y: ((x * 50).astype(np.uint8), y), r"images: need float32, got uint8"),
        (lambda x, y: (x[0], y[:1]), r"images: need shape \(n, 3, 10, 10\) .* got \(3, 10, 10\)"),
        (lambda x, y: (x[:, :2], y), r"images: need shape .* got \(6, 2, 10, 10\)"),
        (lambda x, y: (x[:, :, :9], y), r"images: need shape .* got \(6, 3, 9, 10\)"),
        (lambda x, y: (x.transpose(0, 2, 3, 1), y), r"images: need shape .* got \(6, 10, 10, 3\)"),
        (lambda x, y: (x[:0], y[:0]), r"images: need shape .* n of 1 or more"),
        (lambda x, y: (with_pixel(x, np.nan), y), r"images: there is a NaN or an infinity"),
        (lambda x, y: (with_pixel(x, -np.inf), y), r"images: there is a NaN or an infinity"),
        (lambda x, y: (x, y[:5]), r"labels: need 6 integers, got int32 of shape \(5,\)"),
        (lambda x, y: (x, y[:, None]), r"labels: need 6 integers, got int32 of shape \(6, 1\)"),
        (lambda x, y: (x, y.astype(np.float32)), r"labels: need 6 integers, got float32"),
        (lambda x, y: (x, y + CLASSES), r"labels: need 0 to 4, got \d+ to \d"),
        (lambda x, y: (x, y - CLASSES), r"labels: need 0 to 4, got -\d+ to -\d"),
        (lambda x, y: (x, y.astype(np.int64) + 2**32), r"labels: need 0 to 4"),
    ],
)
def test_wrong_input_is_refused_and_changes_nothing(change, message):
    model, untouched = model_of("normalised"), model_of("normalised")
    images, labels = wrong(change)
    for call in (partial(model.train_step, progress=0.0), model.evaluate):
        with pytest.raises(ConfigError, match=message):
            call(images, labels)
    for name, array in untouched.arrays().items():
        np.testing.assert_array_equal(model.arrays()[name], array)
    data = batches(1)[0]
    assert model.train_step(*data, progress=0.0) == untouched.train_step(*data, progress=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate must be 0 or more, got -0.1"),
        ({"learning_rate": float("nan")}, "learning_rate must be 0 or more, got nan"),
        ({"learning_rate": float("inf")}, "learning_rate must be 0 or more, got inf"),
        ({"progress": 1.1}, r"progress must be in \[0, 1\], got 1.1"),
        ({"progress": float("nan")}, r"progress must be in \[0, 1\], got nan"),
    ],
)
def test_wrong_numbers_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        model_of().train_step(*batches(1)[0], **{"progress": 0.0, **settings})


def test_without_progress_nothing_freezes_nitis_bits_at_the_first():
    """Whoever forgets it is told; where the bits never change, or an algorithm has none, nobody needs it."""
    images, labels = batches(1)[0]
    with pytest.raises(
        ConfigError,
        match=r"niti takes its gradient bits 5, 4, 3 .*; pass progress=step / num_steps",
    ):
        model_of().train_step(images, labels)
    one = dataclasses.replace(NITI, update=IntegerUpdate(bits=(3,), starts=(0.0,)))
    for algorithm in (one, ADAPTIVE_FIXED_POINT):
        assert model_of(algorithm=algorithm).train_step(images, labels) == model_of(
            algorithm=algorithm
        ).train_step(images, labels, progress=0.9)


def test_input_in_any_layout_and_integer_type_is_taken():
    images, labels = batches(1)[0]
    expected = model_of().train_step(images, labels, progress=0.0)
    assert (
        model_of().train_step(np.asfortranarray(images), labels.astype(np.uint8), progress=0.0)
        == expected
    )
    assert model_of().train_step(images, labels.astype(np.int64), progress=0.0) == expected


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e6])
def test_images_of_any_scale_are_taken(scale):
    images, labels = batches(1)[0]
    assert np.isfinite(
        model_of("normalised").train_step(images * np.float32(scale), labels, progress=0.0).loss
    )


@pytest.mark.parametrize("scale", [1e-35, 1e35])
def test_images_that_no_exponent_fits_are_a_config_error(scale):
    images, labels = batches(1)[0]
    images *= np.float32(scale)
    model = model_of()
    for call in (partial(model.train_step, progress=0.0), model.evaluate):
        with pytest.raises(
            ConfigError, match=r"images: the largest magnitude is .*; normalise them"
        ):
            call(images, labels)


@pytest.mark.parametrize("name", NETWORKS)
def test_black_images_train(name):
    images, labels = batches(1)[0]
    assert np.isfinite(model_of(name).train_step(np.zeros_like(images), labels, progress=0.0).loss)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_below_1_is_refused(batch_size):
    images, labels = batches(1)[0]
    for call in (lambda: model_of().predict(images, batch_size=batch_size),
                 lambda: model_of().evaluate(images, labels, batch_size=batch_size)):  # fmt: skip
        with pytest.raises(ConfigError, match=f"batch_size must be 1 or more, got {batch_size}"):
            call()


@pytest.mark.parametrize(
    ("batch_blocks", "message"),
    [
        ({"nose": 2}, "batch_blocks: the network has no convolution 'nose'"),
        ({"2": 2}, "batch_blocks: the network has no convolution '2'"),
        ({"0": -1}, "batch_blocks: 0 must be 0 or more images at a time, got -1"),
    ],
)
def test_batch_blocks_for_what_is_no_convolution_or_below_0_are_refused(batch_blocks, message):
    with pytest.raises(ConfigError, match=message):
        model_of(settings=EngineSettings(batch_blocks=batch_blocks))


# ------------------------------------------------------------------------------------------- state_dict


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_int8_to_torch_to_int8_is_the_identity(name, algorithm):
    model = model_of(name, algorithm)
    for images, labels in batches(3):
        model.train_step(images, labels, learning_rate=0.05, progress=0.0)
    module = build(name, seed=5)
    module.load_state_dict(model.state_dict(), strict=True)
    other = model_of(name, algorithm)
    other.load_state_dict(module.state_dict())
    for key, weight in model.parameters.weights.items():
        real = np.ldexp(weight.data.astype(np.float64), weight.exponent)
        again = other.parameters.weights[key]
        np.testing.assert_array_equal(np.ldexp(again.data.astype(np.float64), again.exponent), real)
    for key, array in model.arrays().items():
        np.testing.assert_array_equal(other.arrays()[key], array)
        assert other.arrays()[key].dtype == array.dtype
    images, labels = batches(1, seed=4)[0]
    np.testing.assert_array_equal(model.predict(images), other.predict(images))


def spoil(state, key, value):
    state = dict(state)
    if value is None:
        del state[key]
    else:
        state[key] = value
    return state


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("0.weight", None, r"state: 0.weight of shape \(12, 3, 3, 3\) is missing"),
        ("1.running_var", None, r"state: 1.running_var of shape \(12,\) is missing"),
        ("9.bias", None, r"state: 9.bias of shape \(5,\) is missing"),
        ("nose.weight", torch.zeros(3), r"state: the network does not use nose.weight"),
        (
            "0.weight",
            torch.zeros(12, 3, 3),
            r"0.weight has shape \(12, 3, 3\), the network needs \(12, 3, 3, 3\)",
        ),
        ("9.weight", torch.full((5, 16), torch.nan), r"9.weight: element \(0, 0.*\) is nan"),
        ("1.bias", torch.full((12,), torch.inf), r"1.bias: element \(0,\) is inf"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(key, value, message):
    model, untouched = model_of("normalised"), model_of("normalised")
    with pytest.raises(ConfigError, match=message):
        model.load_state_dict(spoil(build("normalised", seed=8).state_dict(), key, value))
    data = batches(2)
    for images, labels in data:
        assert model.train_step(images, labels, progress=0.0) == untouched.train_step(
            images, labels, progress=0.0
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named_with_their_place(bad):
    module = build("plain")
    with torch.no_grad():
        module[3].weight[4, 1, 0, 2] = bad
    with pytest.raises(ConfigError, match=rf"3.weight: element \(4, 1, 0, 2\) is {bad}"):
        Int8Model.from_module(module, input_shape=IMAGE)


def test_what_is_exported_is_no_view_of_what_trains():
    model = model_of("normalised", ADAPTIVE_FIXED_POINT)
    arrays, state = model.arrays(), model.state_dict()
    kept = {name: array.copy() for name, array in arrays.items()}
    model.train_step(*batches(1)[0], learning_rate=0.5, progress=0.0)
    for name, array in kept.items():
        np.testing.assert_array_equal(arrays[name], array)
        np.testing.assert_array_equal(state[name].numpy(), array)


def test_kept_exponents_make_the_round_trip_exact_where_the_largest_weight_shrank():
    model = model_of()
    for weight in model.parameters.weights.values():
        np.clip(weight.data, -60, 60, out=weight.data)
    module = build("plain", seed=5)
    module.load_state_dict(model.state_dict())
    kept = Int8Model.from_module(module, input_shape=IMAGE, exponents=model.weight_exponents())
    finest = Int8Model.from_module(module, input_shape=IMAGE)
    assert kept.weight_exponents() == model.weight_exponents()
    for name, weight in model.parameters.weights.items():
        np.testing.assert_array_equal(kept.parameters.weights[name].data, weight.data)
        assert finest.weight_exponents()[name] == weight.exponent - 1
        np.testing.assert_array_equal(finest.parameters.weights[name].data, 2 * weight.data)


def test_an_exponent_at_which_a_weight_does_not_fit_is_not_kept():
    model = model_of()
    low = {name: exponent - 3 for name, exponent in model.weight_exponents().items()}
    assert model_of(exponents=low).weight_exponents() == model.weight_exponents()
    some = {"0.weight": model.weight_exponents()["0.weight"] + 1}
    assert model_of(exponents=some).weight_exponents() == model.weight_exponents() | some


@pytest.mark.parametrize("algorithm", [NITI, MOMENTUM], ids=["niti", "momentum"])
@pytest.mark.parametrize("name", ["normalised", "residual"])
def test_training_taken_up_in_another_model_goes_on_bit_for_bit(name, algorithm):
    """Parameters, exponents, momentum and what is known of scales are all that a model is."""
    seldom = EngineSettings(rescaling=RescalingPolicy(warm_up_batches=2))
    model = model_of(name, algorithm, settings=seldom)
    data = batches(12)
    for images, labels in data[:6]:
        model.train_step(images, labels, learning_rate=0.05, progress=0.0)
    module = build(name, seed=5)
    module.load_state_dict(model.state_dict())
    other = Int8Model.from_module(
        module,
        input_shape=IMAGE,
        algorithm=algorithm,
        settings=seldom,
        exponents=model.weight_exponents(),
    )
    other.restore_trackers(json.loads(json.dumps(model.trackers_to_json())))
    other.restore_velocities({key: velocity.copy() for key, velocity in model.velocities().items()})
    for images, labels in data[6:]:
        result = model.train_step(images, labels, learning_rate=0.05, progress=0.0)
        assert other.train_step(images, labels, learning_rate=0.05, progress=0.0) == result
    for key, array in model.arrays().items():
        np.testing.assert_array_equal(other.arrays()[key], array)
    assert other.weight_exponents() == model.weight_exponents()
    assert other.trackers_to_json() == model.trackers_to_json()
    for key, velocity in model.velocities().items():
        np.testing.assert_array_equal(other.velocities()[key], velocity)


def test_velocities_are_those_of_fp32_updates_with_momentum():
    trained = {
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
        "6.weight",
        "6.bias",
        "8.weight",
        "8.bias",
    }
    for algorithm, expected in ((NITI, set()), (ADAPTIVE_FIXED_POINT, set()), (MOMENTUM, trained)):
        model = model_of("plain", algorithm)
        assert not model.velocities()
        model.train_step(*batches(1)[0], progress=0.0)
        assert set(model.velocities()) == expected


def test_a_new_state_forgets_what_was_known_of_scales():
    model = model_of()
    model.train_step(*batches(1)[0], progress=0.0)
    assert {role for _, role, _ in model.trackers_to_json()} == {"forward", "backward"}
    model.load_state_dict(model.state_dict())
    assert model.trackers_to_json() == []


# ---------------------------------------------------------------------------------------- FP32 operators


def with_fp32(make, seed=3):
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            make(),
            nn.Flatten(),
            nn.Linear(8 * 16, CLASSES),
        ),
        seed,
    )


@pytest.mark.parametrize(
    "make", [nn.GELU, nn.SiLU, lambda: nn.GroupNorm(2, 8), lambda: nn.Conv2d(8, 8, 1)]
)
@pytest.mark.parametrize("algorithm", [NITI, ADAPTIVE_FIXED_POINT], ids=["niti", "fp32"])
def test_a_network_with_an_fp32_operator_learns(make, algorithm):
    module = with_fp32(make)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = Int8Model.from_module(
        module, input_shape=IMAGE, algorithm=algorithm, fp32_operators=["3"]
    )
    losses = [
        model.train_step(images, labels, learning_rate=0.1, progress=0.0).loss
        for images, labels in batches(40, size=24)
    ]
    assert np.mean(losses[-5:]) < 0.9 * losses[0]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    state = model.state_dict()
    for name in state:
        if name.startswith("3."):
            assert not torch.equal(state[name], before[name]), (
                "the FP32 operator's own parameters train"
            )
    module.load_state_dict(state)
    images, _ = batches(1, size=20, seed=9)[0]
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(images)).numpy()
    assert np.abs(model.predict(images) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "spoilt", [None, torch.zeros(3), torch.full((8,), torch.nan)], ids=["none", "shape", "nan"]
)
def test_a_wrong_state_of_an_fp32_operator_is_refused(spoilt):
    model = Int8Model.from_module(
        with_fp32(lambda: nn.GroupNorm(2, 8)), input_shape=IMAGE, fp32_operators=["3"]
    )
    before = model.arrays()
    changed = {name: value * 2 for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"3\.weight"):
        model.load_state_dict(spoil(changed, "3.weight", spoilt))
    for name, array in before.items():
        np.testing.assert_array_equal(model.arrays()[name], array)


def test_an_fp32_operator_that_diverges_is_failed_training():
    class Explode(nn.Module):
        def forward(self, x):
            return x / 0.0

    model = Int8Model.from_module(
        with_fp32(lambda: nn.LayerNorm([8, 4, 4])), input_shape=IMAGE, fp32_operators=["3"]
    )
    model._fp32_factory.__closure__[0].cell_contents["3"] = Explode()
    model.parameters.fp32.clear()
    with pytest.raises(TrainingFailed, match=r"3: the FP32 operator made a NaN or an infinity"):
        model.train_step(*batches(1)[0], progress=0.0)


def test_operators_on_the_fp32_side_cannot_be_saved(tmp_path):
    model = Int8Model.from_module(with_fp32(nn.GELU), input_shape=IMAGE, fp32_operators=["3"])
    with pytest.raises(ConfigError, match="save: operators on the FP32 side"):
        model.save(tmp_path / "model.npz")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------- divergence


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rate", [1e10, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("label", ["niti", "fp32", "momentum"])
@pytest.mark.parametrize("name", ["plain", "normalised", "residual"])
def test_diverged_training_fails_and_never_gives_garbage(name, label, rate):
    """Each step gives a finite loss with finite parameters, or raises TrainingFailed."""
    model = model_of(
        name, {"niti": NITI, "fp32": ADAPTIVE_FIXED_POINT, "momentum": MOMENTUM}[label]
    )
    for images, labels in batches(12, size=16):
        try:
            result = model.train_step(images, labels, learning_rate=rate, progress=0.0)
        except TrainingFailed as error:
            assert "lower the learning rate" in str(error) or "int32" in str(error)
            return
        assert np.isfinite(result.loss)
        for key, array in model.arrays().items():
            assert np.isfinite(array).all(), key


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_a_network_whose_weights_all_run_in_fp32_trains_and_counts_their_memory(algorithm):
    module = built(
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 25, CLASSES)), 1
    )
    model = Int8Model.from_module(
        module, input_shape=IMAGE, algorithm=algorithm, fp32_operators=["2"]
    )
    assert not model.parameters.weights
    held = sum(parameter.nbytes for parameter in module.parameters())
    assert model.memory_bytes() == held
    model.train_step(*batches(1)[0], progress=0.0)
    assert model.memory_bytes() == held + model.regions.held_bytes > held
    assert not np.array_equal(model.arrays()["2.weight"], module[2].weight.detach().numpy())
