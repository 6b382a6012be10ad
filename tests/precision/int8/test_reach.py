"""Operators beyond convolutions against torch: one rounding apart, forward and backward, on random shapes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from socflower.precision import ADAPTIVE_FIXED_POINT, NITI, Int8Model
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import start_gradients
from tests.one_line import refused
from tests.precision.networks import batches, int8, train
from tests.seeded import built

NUM_SAMPLES = 3
OPTIONS = {"head": False, "input_gradient": True, "unsupported": "refuse"}


class Of(nn.Module):
    """A module of a function of (module, x), with layers by name."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def whole(rng, shape):
    """Return integers of int8 that use the whole range."""
    values = rng.integers(-127, 128, shape)
    values.reshape(-1)[0] = 127
    return values.astype(np.float32)


def quantum_of(array):
    """Return the unit of an int8 tensor whose largest magnitude is 64 to 127 units."""
    largest = float(np.abs(array).max())
    return 2.0 ** (math.frexp(largest)[1] - 7) if largest else 1.0


def both(module, form, seed=0, scale=-4):
    """Return (int8's output, its unit, torch's output, int8's input gradient, torch's) on numbers that int8 has."""
    rng = np.random.default_rng(seed)
    x = whole(rng, (NUM_SAMPLES, *form)) * np.float32(2.0**scale)
    # A module of its own: of a network that is one layer, torch.fx would follow the inside.
    module = nn.Sequential(module)
    model = int8(module, shape=form, options=OPTIONS)
    got, exponent = model.forward(x.reshape(NUM_SAMPLES, *model.graph.input_shape))
    source = torch.from_numpy(x).requires_grad_()
    expected = module(source)
    dy = whole(rng, got.shape) * np.float32(2.0**-9)
    (gradient,) = torch.autograd.grad(
        expected, source, torch.from_numpy(dy).reshape(expected.shape)
    )
    of_input = model.backward(dy, summed=True)
    shape = expected.shape
    return (
        got.reshape(shape),
        2.0**exponent,
        expected.detach().numpy(),
        of_input.reshape(x.shape),
        gradient.numpy(),
    )


def assert_one_rounding_apart(module, form, seed=0, scale=-4, units=0.51, gradient_units=1.01):
    """A value of more than 127 units saturates, which is one unit at most."""
    got, unit, expected, of_input, gradient = both(module, form, seed, scale)
    assert np.abs(expected).max() <= 128.5 * unit
    inside = np.abs(expected) <= 127 * unit
    assert np.abs(got - expected)[inside].max() <= units * unit
    assert np.abs(got - expected).max() <= max(units, 1.01) * unit
    assert np.abs(of_input - gradient).max() <= gradient_units * quantum_of(of_input)


POINTWISE = [
    nn.ReLU6(), nn.Hardtanh(-2.0, 1.5), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.SELU(), nn.GELU(), nn.GELU("tanh"),
    nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid(), nn.Tanh(), nn.Softplus(),
    Of(lambda m, x: x * 2.5), Of(lambda m, x: x - 0.3), Of(lambda m, x: 1.0 - x), Of(lambda m, x: x / 3),
    Of(lambda m, x: -x), Of(lambda m, x: x.abs()), Of(lambda m, x: x**2), Of(lambda m, x: x.square()),
    Of(lambda m, x: x.clamp(min=-1.0)), Of(lambda m, x: torch.clamp(x, -1.0, 2.0)), Of(lambda m, x: x.sigmoid()),
    Of(lambda m, x: functional.gelu(x)), Of(lambda m, x: functional.hardswish(x)), Of(lambda m, x: 0.5 + x),
]  # fmt: skip


@pytest.mark.parametrize("scale", [-7, -4, 0])
@pytest.mark.parametrize("module", POINTWISE, ids=str)
def test_functions_of_one_element_are_one_rounding_from_torch(module, scale):
    assert_one_rounding_apart(module, (5, 3, 4), scale=scale)
    assert_one_rounding_apart(module, (17,), scale=scale)


FORM = (4, 6, 8)
PARTS = [
    nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2),
    Of(lambda m, x: x[:, 1:3]), Of(lambda m, x: x[:, :, ::2, 1:]), Of(lambda m, x: x[..., -1]),
    Of(lambda m, x: x[:, 2]),
    Of(lambda m, x: x.transpose(1, 3)), Of(lambda m, x: x.permute(0, 2, 3, 1)),
    Of(lambda m, x: x.permute(0, 2, 3, 1).reshape(x.size(0), 12, 16).transpose(1, 2)),
    Of(lambda m, x: x.flatten(2).transpose(1, 2)), Of(lambda m, x: x.chunk(2, dim=1)[1]),
    Of(lambda m, x: x.split([1, 3], 1)[1]), Of(lambda m, x: x.split(4, dim=3)[0]), Of(lambda m, x: x.unbind(2)[3]),
    Of(lambda m, x: x.view(x.shape[0], 2, 2, 6, 8).transpose(1, 2).reshape(-1, 4, 6, 8)),
]  # fmt: skip


@pytest.mark.parametrize("module", PARTS)
def test_what_moves_values_keeps_each_bit(module):
    got, _, expected, of_input, gradient = both(module, FORM)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(of_input, gradient)


REPEATED = [
    nn.Upsample(scale_factor=2), nn.Upsample(size=(9, 20)), nn.Upsample(scale_factor=(0.5, 1.5)),
    nn.Upsample(size=(7, 5), mode="nearest-exact"), nn.ZeroPad2d((1, 2, 0, 3)), nn.ReflectionPad2d((2, 1, 3, 0)),
    nn.ReplicationPad2d(2), nn.CircularPad2d((1, 0, 2, 1)), Of(lambda m, x: functional.pad(x, (1, 1))),
    Of(lambda m, x: functional.pad(x, (2, 0, 0, 1), mode="reflect")),
    Of(lambda m, x: functional.interpolate(x, scale_factor=3)),
]  # fmt: skip


@pytest.mark.parametrize("module", REPEATED)
def test_what_repeats_values_keeps_each_and_sums_their_gradients(module):
    got, _, expected, of_input, gradient = both(module, FORM)
    np.testing.assert_array_equal(got, expected)
    assert np.abs(of_input - gradient).max() <= 1.01 * quantum_of(of_input)


SUMS = [
    nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((4, 3)), nn.AdaptiveAvgPool2d((5, 7)), nn.AdaptiveMaxPool2d(2),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    nn.AvgPool2d(2, divisor_override=3),
    nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(4, 3, 1, ceil_mode=True),
    Of(lambda m, x: x.mean((2, 3))), Of(lambda m, x: x.mean((-1, -2), keepdim=True)), Of(lambda m, x: x.mean(1)),
    Of(lambda m, x: x.mean(3)), Of(lambda m, x: x.sum(2)), Of(lambda m, x: torch.mean(x, [1, 3])),
    Of(lambda m, x: x.flatten(2).transpose(1, 2).mean(1)), Of(lambda m, x: functional.avg_pool2d(x, 2)),
    Of(lambda m, x: functional.max_pool2d(x, 3, 2, 1)), Of(lambda m, x: functional.adaptive_avg_pool2d(x, 3)),
]  # fmt: skip


@pytest.mark.parametrize("module", SUMS)
def test_means_and_maxima_of_any_regions_are_one_rounding_from_torch(module):
    assert_one_rounding_apart(module, FORM, gradient_units=1.02)


def test_a_mean_over_more_than_256_pixels_is_one_rounding_from_torch():
    assert_one_rounding_apart(nn.AdaptiveAvgPool2d(1), (3, 40, 50))


def test_maxima_over_more_than_256_pixels_are_those_of_torch():
    """Of equal maxima another one may get the gradient."""
    got, _, expected, of_input, gradient = both(nn.MaxPool2d((20, 40)), (3, 40, 80))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(of_input.sum(axis=(2, 3)), gradient.sum(axis=(2, 3)))
    assert_one_rounding_apart(nn.MaxPool2d((1, 127)), (1, 1, 127))


BINARY = [
    Of(lambda m, x: torch.cat([x, x * 0.1], 1)), Of(lambda m, x: torch.cat([x[:, :1], x[:, 1:] * 7], 1)),
    Of(lambda m, x: torch.cat([x, x[:, :, :1]], 2)),
    Of(lambda m, x: torch.cat((x[..., :3], x), dim=-1)),
    Of(lambda m, x: torch.cat([x.flatten(1), x[:, 0].flatten(1)], 1)),
    Of(lambda m, x: torch.cat([x.flatten(2).transpose(1, 2)] * 2, 1)),
    Of(lambda m, x: x[:, :2] * x[:, 2:]), Of(lambda m, x: x * x[:, :, :1, :1]), Of(lambda m, x: x * x[:, :1]),
    Of(lambda m, x: x[:, :, :, :1] * x), Of(lambda m, x: x[:, :2] - x[:, 2:]),
    Of(lambda m, x: x[:, :2] + x[:, 2:].relu()),
    Of(lambda m, x: x + x[:, :1]), Of(lambda m, x: x * x.transpose(1, 3).transpose(1, 3)),
    Of(lambda m, x: x.flatten(2) * x.flatten(2)[:, :, :1]),
]  # fmt: skip


@pytest.mark.parametrize("module", BINARY)
def test_concatenations_products_and_differences_are_near_torch(module):
    """The gradient is a sum of two rounded ones where x is read twice."""
    assert_one_rounding_apart(module, FORM, units=1.6, gradient_units=3.0)


@settings(max_examples=25)
@given(st.data())
def test_a_product_of_matrices_is_one_rounding_from_torch(data):
    batches, rows, depth, columns = (data.draw(st.integers(1, 7)) for _ in range(4))
    seed = data.draw(st.integers(0, 1000))
    size = rows * depth
    shape = (batches, rows, depth)
    other = (batches, depth, columns)

    def function(m, x):
        lhs = x[:, : batches * size].view(-1, *shape)
        rhs = x[:, batches * size :].view(-1, *other)
        return lhs @ rhs

    form = (batches * size + batches * depth * columns,)
    assert_one_rounding_apart(Of(function), form, seed)


@pytest.mark.parametrize("dim", [1, 2, 3, -1])
def test_softmax_is_near_torch_over_any_dimension(dim):
    for scale in (-7, -5, -3):
        assert_one_rounding_apart(nn.Softmax(dim), FORM, scale=scale, gradient_units=4.0)


NORMS = [
    (lambda: nn.GroupNorm(2, 4), FORM), (lambda: nn.GroupNorm(1, 4, affine=False), FORM),
    (lambda: nn.InstanceNorm2d(4, affine=True), FORM), (lambda: nn.InstanceNorm2d(4), FORM),
    (lambda: nn.LayerNorm([4, 6, 8]), FORM), (lambda: nn.LayerNorm(8), FORM), (lambda: nn.LayerNorm([6, 8]), FORM),
    (lambda: nn.LayerNorm(20, bias=False), (20,)), (lambda: nn.LayerNorm(12), (5, 12)),
    (lambda: nn.GroupNorm(3, 9), (9,)),
    (lambda: nn.InstanceNorm1d(5), (5, 12)), (lambda: Of(lambda m, x: functional.layer_norm(x, (8,))), FORM),
]  # fmt: skip


@pytest.mark.parametrize(("make", "form"), NORMS)
def test_norms_of_a_sample_are_one_rounding_from_torch(make, form):
    module = make()
    rng = np.random.default_rng(1)
    for parameter in module.parameters():
        drawn = rng.normal(1.0, 0.4, tuple(parameter.shape)).astype(np.float32)
        parameter.data = torch.from_numpy(drawn)
    assert_one_rounding_apart(module, form, gradient_units=1.1)


def test_a_norm_of_constant_samples_is_its_offset():
    module = nn.GroupNorm(1, 4)
    model = int8(nn.Sequential(module), shape=FORM, options=OPTIONS)
    x = np.ones((2, *FORM), np.float32)
    got, _ = model.forward(x)
    assert not got.any()


@settings(max_examples=25)
@given(st.data())
def test_transposed_convolutions_are_one_rounding_from_torch(data):
    groups = data.draw(st.sampled_from([1, 1, 2]))
    ins, outs = (groups * data.draw(st.integers(1, 5)) for _ in range(2))
    stride = data.draw(st.integers(1, 3))
    dilation = data.draw(st.integers(1, 2))
    module = nn.ConvTranspose2d(
        ins,
        outs,
        data.draw(st.integers(1, 3)),
        stride=stride,
        padding=data.draw(st.integers(0, 1)) if dilation == 2 else 0,
        output_padding=data.draw(st.integers(0, stride - 1)),
        dilation=dilation,
        groups=groups,
        bias=data.draw(st.booleans()),
    )
    exact_weights(module, data.draw(st.integers(0, 100)))
    try:
        assert_one_rounding_apart(module, (ins, 4, 3))
    except RuntimeError:
        # torch refuses an output without pixels.
        return


def exact_weights(module, seed=0):
    """Give a module weights that int8 has, so that only results are rounded."""
    rng = np.random.default_rng(seed)
    for name, parameter in module.named_parameters():
        drawn = whole(rng, tuple(parameter.shape)) * np.float32(2.0**-9)
        parameter.data = torch.from_numpy(drawn if "weight" in name else np.round(drawn * 8) / 8)


LAYERS = [
    (lambda: nn.Conv2d(4, 5, 3, padding="same"), FORM), (lambda: nn.Conv2d(4, 5, (2, 4), padding="same"), FORM),
    (lambda: nn.Conv2d(4, 5, 3, padding="same", dilation=2), FORM),
    (lambda: nn.Conv2d(4, 6, 3, dilation=(2, 3), groups=2), FORM),
    (lambda: nn.Conv2d(4, 5, 3, padding=(1, 2), padding_mode="reflect"), FORM),
    (lambda: nn.Conv2d(4, 5, 3, padding=1, padding_mode="circular"), FORM),
    (lambda: nn.Conv2d(4, 5, 3, padding=1, padding_mode="replicate"), FORM),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (4, 12)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 7)),
    (lambda: nn.Linear(8, 5), FORM), (lambda: nn.Linear(12, 3), (5, 12)),
    (lambda: Of(lambda m, x: m.lin(x.flatten(2).transpose(1, 2)).transpose(1, 2), lin=nn.Linear(4, 6)), FORM),
    (lambda: Of(lambda m, x: m.lin(x.permute(0, 2, 3, 1).flatten(1)), lin=nn.Linear(192, 6)), FORM),
]  # fmt: skip


@pytest.mark.parametrize(("make", "form"), LAYERS)
def test_layers_in_every_setting_are_one_rounding_from_torch(make, form):
    """With padding that repeats pixels, their gradients are rounded before and after they are added."""
    module = make()
    exact_weights(module)
    repeats = getattr(module, "padding_mode", "zeros") != "zeros"
    assert_one_rounding_apart(module, form, gradient_units=4.0 if repeats else 1.01)


def test_sums_that_leave_int32_are_split_and_stay_one_rounding_from_torch():
    module = nn.Linear(140_000, 4).double()
    rng = np.random.default_rng(0)
    # All at one end: the sum is 2.26e9 units, beyond int32.
    module.weight.data = torch.full((4, 140_000), 127 * 2.0**-9, dtype=torch.float64)
    module.weight.data[1] = torch.from_numpy(whole(rng, 140_000).astype(np.float64) * 2.0**-9)
    module.weight.data[2:] *= -1.0
    module.bias.data = torch.tensor([1.0, -2.0, 0.5, 0.25], dtype=torch.float64)
    x = np.full((2, 140_000, 1, 1), 127 * 2.0**-7, np.float32)
    x[1, ::2] *= -1
    model = int8(nn.Sequential(module.float()), shape=(140_000,), options=OPTIONS)
    got, exponent = model.forward(x)
    with torch.no_grad():
        expected = module.double()(torch.from_numpy(x.reshape(2, -1)).double()).numpy()
    inside = np.abs(expected) <= 127 * 2.0**exponent
    assert np.abs(got.reshape(2, 4) - expected)[inside].max() <= 0.51 * 2.0**exponent
    dy = whole(rng, (2, 4, 1, 1)) * np.float32(2.0**-7)
    of_input = model.backward(dy, summed=True).reshape(2, -1)
    weight = module.weight.detach().numpy()
    assert np.abs(of_input - dy.reshape(2, 4) @ weight).max() <= 1.01 * quantum_of(of_input)


def test_attention_is_near_torch():
    """Scores, probabilities and results are each rounded to int8."""
    attention = built(lambda: nn.MultiheadAttention(16, 4, batch_first=True), 0)
    module = Of(lambda m, x: m.attend(x, x, x, need_weights=False)[0], attend=attention)
    got, _, expected, of_input, gradient = both(module, (9, 16), scale=-6)
    assert np.linalg.norm(got - expected) < 0.06 * np.linalg.norm(expected)
    assert np.linalg.norm(of_input - gradient) < 0.12 * np.linalg.norm(gradient)


def test_attention_by_hand_and_by_torchs_function_agree():
    def of_heads(m, x):
        q, k, v = m.project(x).chunk(3, dim=-1)
        return [part.reshape(x.size(0), 9, 4, 4).transpose(1, 2) for part in (q, k, v)]

    def by_function(m, x):
        made = functional.scaled_dot_product_attention(*of_heads(m, x))
        return made.transpose(1, 2).reshape(x.size(0), 9, 16)

    def by_matmul(m, x):
        q, k, v = of_heads(m, x)
        made = torch.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-1) @ v
        return made.transpose(1, 2).reshape(x.size(0), 9, 16)

    project = built(lambda: nn.Linear(16, 48), 0)
    results = [
        both(Of(each, project=project), (9, 16), scale=-6) for each in (by_function, by_matmul)
    ]
    for got, _, expected, of_input, gradient in results:
        assert np.linalg.norm(got - expected) < 0.08 * np.linalg.norm(expected)
        assert np.linalg.norm(of_input - gradient) < 0.12 * np.linalg.norm(gradient)


# ------------------------------------------------------------------------------------------- overwritten values


def doubled_by_relu(m, x):
    y = x * 0.5
    z = m.rectify(y)
    return y + z


def chained(m, x):
    y = x * 0.5
    return y.mul_(2.0).add_(x) * 1.5 + y


@pytest.mark.parametrize("function", [doubled_by_relu, chained])
def test_a_value_that_is_overwritten_is_read_as_torch_reads_it(function):
    got, unit, expected, _, _ = both(Of(function, rectify=nn.ReLU(inplace=True)), FORM)
    assert np.abs(got - expected).max() <= 3.0 * unit


def test_a_view_that_is_overwritten_and_read_in_another_form_is_refused():
    def function(m, x):
        y = x * 0.5
        y.view(x.size(0), -1).add_(1.0)
        return y * 2.0

    refused(lambda: int8(Of(function), shape=FORM, options=OPTIONS), "add_: overwrites mul")


def test_constants_and_buffers_of_an_island_are_read_there():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.full((4, 1, 1), 0.5))
            self.register_buffer("own", torch.full((4, 1, 1), 0.25), persistent=False)

        def forward(self, x):
            return torch.erf(x * self.kept + self.own) + torch.tensor(0.125)

    options = {"head": False, "input_gradient": True}
    module = built(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Odd()), 0)
    model = int8(module, shape=FORM, options=options)
    x = whole(np.random.default_rng(0), (2, *FORM)) * np.float32(2.0**-6)
    got, _ = model.forward(x)
    module.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    assert np.abs(got - expected).max() < 0.05
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.kept"}


def test_dropout_within_attention_trains():
    layer = built(lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.2, batch_first=True), 0)
    module = nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 16, 5, 5), Of(lambda m, x: x.transpose(1, 2)), layer,
                           Of(lambda m, x: x.mean(1)), nn.Linear(16, 5))  # fmt: skip
    model = int8(module, options={"unsupported": "refuse"})
    assert [node.kind for node in model.graph.nodes].count("dropout") == 4
    images, _ = batches(1)[0]
    one, same, other = (model.forward(images, seed=seed, keep=False)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    np.testing.assert_array_equal(model.infer(images), model.infer(images))
    assert np.isfinite(train(model, batches(3))).all()


# --------------------------------------------------------------------------------------------------- embeddings


def worded():
    """Return a classifier of seven words of 20, the first of which is padding."""
    mean = Of(lambda m, x: x.mean(1))
    return nn.Sequential(
        nn.Embedding(20, 16, padding_idx=0), nn.LayerNorm(16), mean, nn.Linear(16, 4)
    )


def words(count, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, count).astype(np.int32)
    numbers = rng.integers(0, 20, (count, 7, 1, 1))
    numbers[:, :3, 0, 0] = 5 + labels[:, None]
    return numbers, labels


def test_an_embedding_copies_its_rows_and_sums_their_gradients():
    module = built(lambda: nn.Sequential(nn.Embedding(20, 16), nn.Identity()), 0)
    exact_weights(module)
    model = int8(module, HANDED_OUT_GRADIENTS, shape=(7,), options={"head": False})
    handed_out = start_gradients(model.graph, model.parameters)
    numbers, _ = words(6)
    got, _ = model.forward(numbers)
    rows = torch.from_numpy(numbers.reshape(6, 7))
    expected = module(rows)
    np.testing.assert_array_equal(got.reshape(6, 7, 16), expected.detach().numpy())
    dy = whole(np.random.default_rng(1), got.shape) * np.float32(2.0**-9)
    model.backward(dy, summed=True, learning_rate=1.0)
    expected.backward(torch.from_numpy(dy).reshape(6, 7, 16))
    np.testing.assert_array_equal(handed_out["0.weight"], module[0].weight.grad.numpy())


@pytest.mark.parametrize("algorithm", [NITI, ADAPTIVE_FIXED_POINT], ids=["niti", "masters"])
def test_a_classifier_of_words_learns_and_keeps_the_row_of_the_padding(algorithm, tmp_path):
    module = built(worded, 0)
    model = int8(module, algorithm, shape=(7,), options={"unsupported": "refuse"})
    losses = train(model, [words(32, seed) for seed in range(40)], rate=0.1)
    assert losses[-1] < 0.7 * losses[0]
    state = model.state_dict()
    assert not state["0.weight"][0].any()
    module.load_state_dict(state)
    model.save(tmp_path / "words.npz")
    numbers, _ = words(50, 99)
    again = Int8Model.load(tmp_path / "words.npz")
    np.testing.assert_array_equal(again.predict(numbers), model.predict(numbers))
    with torch.no_grad():
        real = module(torch.from_numpy(numbers.reshape(50, 7))).numpy()
    assert (real.argmax(1) == model.predict(numbers).argmax(1)).mean() > 0.9


@pytest.mark.parametrize("number", [-1, 20, 0.5])
def test_a_number_without_a_row_is_refused(number):
    model = int8(built(worded, 0), shape=(7,))
    numbers = np.zeros((2, 7, 1, 1), np.float32)
    numbers[1, 3] = number
    refused(lambda: model.predict(numbers), f"have {number:g}", "0 to 19")


# ------------------------------------------------------------------------------------------- batches of any size


def test_a_gradient_that_leaves_int32_is_summed_over_parts_of_the_batch():
    """64 images of 64 x 33 pixels: 135,168 products of 127 * 127 each."""
    module = nn.Sequential(nn.Conv2d(16, 3, 1, bias=False), nn.Identity())
    exact_weights(module)
    options = {"head": False}
    model = int8(module, HANDED_OUT_GRADIENTS, shape=(16, 64, 33), options=options)
    handed_out = start_gradients(model.graph, model.parameters)
    images = np.full((64, 16, 64, 33), 127 * 2.0**-7, np.float32)
    images[:, 1, ::2] *= -1.0
    images[:, 2, 5] = 0.0
    got, _ = model.forward(images)
    dy = np.full(got.shape, 127 * 2.0**-9, np.float32)
    dy[:, 1] *= -1.0
    model.backward(dy, summed=True, learning_rate=1.0)
    expected = np.einsum("nohw,nihw->oi", dy.astype(np.float64), images.astype(np.float64))
    np.testing.assert_allclose(handed_out["0.weight"][..., 0, 0], expected, rtol=1e-8, atol=1e-3)
