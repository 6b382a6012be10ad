"""socflower._int8 with arguments that its contract excludes: always an exception that names them, never a crash."""

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower import _int8
from tests.one_line import refused

ENGINE = _int8.Engine(2)
REFUSALS = (ValueError, TypeError, OverflowError, MemoryError)
CONVOLUTION = _int8.Convolution(4, 6, 5, 20, 33, 3, 3, 1, 1, 1, 1)
LINEAR = _int8.Convolution(4, 1, 1, 20, 33, 1, 1)
POOLING = _int8.Pooling(4, 6, 6, 20, 3, 3, 2, 2, 1, 1)
FIRST = _int8.Convolution(2, 6, 5, 3, 8, 3, 3, 1, 1, 1, 1)
RNG = np.random.default_rng(0)


def signed(*shape):
    return RNG.integers(-127, 128, shape).astype(np.int8)


def activations(*shape):
    return RNG.integers(0, 128, shape).astype(np.int8)


def wide(bound, *shape):
    return RNG.integers(-bound + 1, bound, shape).astype(np.int32)


@dataclass
class Call:
    """A valid call: inputs (copied before use), outputs by shape and type, and numbers with what is out of range."""

    function: object
    inputs: dict
    outputs: dict
    numbers: dict = field(default_factory=dict)
    out_of_range: dict = field(default_factory=dict)
    optional: tuple = ()  # arguments that may be None
    any_shape: tuple = ()  # arguments whose size counts, not their shape
    leading: tuple = (ENGINE,)

    def arguments(self):
        arrays = {name: array.copy() for name, array in self.inputs.items()}
        made = {name: np.full(shape, 7, dtype) for name, (shape, dtype) in self.outputs.items()}
        return {**arrays, **made, **self.numbers}

    def run(self, arguments):
        result = self.function(*self.leading, **arguments)
        names = [name for name in (*self.outputs, *self.inputs) if name != "workspace"]
        return [result, *(np.array(arguments[name]) for name in names)]

    def refuses(self, arguments, *named):
        """Require a refusal that names the arguments and writes nothing, and the right result afterwards."""
        before = {name: np.array(arguments[name]) for name in self.outputs}
        with pytest.raises(REFUSALS) as caught:
            self.run(arguments)
        for name, array in before.items():
            np.testing.assert_array_equal(arguments[name], array, f"{name} was written to")
        for got, expected in zip(self.run(self.arguments()), self.expected, strict=True):
            np.testing.assert_array_equal(got, expected)
        text = str(caught.value)
        assert "\n" not in text or isinstance(caught.value, TypeError)  # a TypeError is nanobind's
        for each in named:
            assert each in text
        return text

    @functools.cached_property
    def expected(self):
        return self.run(self.arguments())

    @property
    def arrays(self):
        return (*self.inputs, *self.outputs)


SHIFTS = (-1, 31, 32, 2**31, -(2**31), 2**70, 1.5, "3", None)
ROUNDINGS = (-1, 2, 7, 2**40, "nearest", None)
ROUNDED = {"shift": SHIFTS, "rounding": ROUNDINGS}
EXPONENTS = {"exponent": (-101, 101, 2**31, -(2**63), 0.5, "0", None)}
SEEDS = (-1, 2**32, 2**70, 0.5, "0", None)
MULTIPLIERS = (-1, 2**31 // (128 * 9) + 1, 2**31 - 1, -(2**31), 2**40, None)
WORKSPACE = ((CONVOLUTION.workspace_bytes(ENGINE),), np.uint8)
X = (6, 5, 4, 32)
DY = (6, 5, 4, 48)
W = (3, 3, 20, 48)
PX = (6, 6, 4, 32)
PY = (3, 3, 4, 32)
FLAT = (37, 48)
ELEMENTWISE = ("a", "b", "acc", "x", "dy", "gate", "mask", "out", "weight", "gradient", "scale", "scale_dy", "scale_x",
               "offset", "sum_a", "sum_ab", "labels")  # fmt: skip

CALLS = {
    "forward": Call(
        CONVOLUTION.forward,
        {"x": activations(*X), "weight": signed(*W), "bias": wide(2**20, 48)},
        {"out": (DY, np.int8), "workspace": WORKSPACE},
        {"activations": True, "shift": 9, "rounding": 1, "relu": True},
        ROUNDED,
        optional=("bias",),
    ),
    "input_gradient": Call(
        CONVOLUTION.input_gradient,
        {"dy": signed(*DY), "weight": signed(*W), "mask": signed(*X)},
        {"out": (X, np.int32), "workspace": WORKSPACE},
        {"shift": 9, "rounding": 0},
        ROUNDED,
        optional=("mask",),
    ),
    "weight_gradient": Call(
        CONVOLUTION.weight_gradient,
        {"x": activations(*X), "dy": signed(*DY)},
        {"out": (W, np.int32), "workspace": WORKSPACE},
        {"activations": True},
    ),
    "max": Call(POOLING.max, {"x": signed(*PX)}, {"out": (PY, np.int8), "argmax": (PY, np.uint8)}),
    "max_gradient": Call(
        POOLING.max_gradient,
        {"dy": signed(*PY), "argmax": activations(*PY).astype(np.uint8), "mask": signed(*PX)},
        {"out": (PX, np.int8)},
        {"shift": 2, "rounding": 1},
        ROUNDED,
        optional=("mask", "out"),
    ),
    "average": Call(
        POOLING.average,
        {"x": signed(*PX)},
        {"out": (PY, np.int8)},
        {"multiplier": 1820, "shift": 14, "rounding": 1},
        {**ROUNDED, "multiplier": MULTIPLIERS},
        optional=("out",),
    ),
    "average_gradient": Call(
        POOLING.average_gradient,
        {"dy": signed(*PY), "mask": signed(*PX)},
        {"out": (PX, np.int8)},
        {"multiplier": 1820, "shift": 14, "rounding": 0},
        {**ROUNDED, "multiplier": MULTIPLIERS},
        optional=("out", "mask"),
    ),
    "requantise": Call(
        _int8.requantise,
        {"acc": wide(2**20, *FLAT), "mask": signed(*FLAT)},
        {"out": (FLAT, np.int8)},
        {"shift": 13, "rounding": 1, "relu": True},
        ROUNDED,
        optional=("out", "mask"),
        any_shape=ELEMENTWISE,
    ),
    "add": Call(
        _int8.add,
        {"a": signed(*FLAT), "b": signed(*FLAT), "mask": signed(*FLAT)},
        {"out": (FLAT, np.int8)},
        {"shift_a": 3, "shift_b": 5, "shift": 6},
        {**ROUNDED, "shift_a": (-1, 21, 2**31, None), "shift_b": (-1, 21, -(2**33), "1")},
        optional=("out", "mask"),
        any_shape=ELEMENTWISE,
    ),
    "affine": Call(
        _int8.affine,
        {"x": signed(*FLAT), "scale": wide(2**22, 48), "offset": wide(2**29, 48)},
        {"out": (FLAT, np.int8)},
        {"shift": 23, "rounding": 1, "relu": True},
        ROUNDED,
        optional=("out",),
        any_shape=ELEMENTWISE,
    ),
    "affine_gradient": Call(
        _int8.affine_gradient,
        {"dy": signed(*FLAT), "x": signed(*FLAT), "gate": signed(*FLAT), "scale_dy": wide(2**22, 48),
         "scale_x": wide(2**22, 48), "offset": wide(2**29, 48)},
        {"out": (FLAT, np.int8)},
        {"shift": 24, "rounding": 0},
        ROUNDED,
        optional=("out", "gate"),
        any_shape=ELEMENTWISE,
    ),
    "channel_sums": Call(
        _int8.channel_sums,
        {"a": signed(*FLAT), "b": signed(*FLAT), "gate": signed(*FLAT)},
        {"sum_a": ((48,), np.int64), "sum_ab": ((48,), np.int64)},
        optional=("gate",),
        any_shape=ELEMENTWISE,
    ),
    "update_weight": Call(
        _int8.update_weight,
        {"gradient": wide(2**20, *FLAT)},
        {"weight": (FLAT, np.int8)},
        {"shift": 17, "rounding": 1},
        ROUNDED,
        any_shape=ELEMENTWISE,
    ),
    "quantise_images": Call(
        _int8.quantise_images,
        {"x": RNG.standard_normal((2, 3, 6, 5)).astype(np.float32)},
        {"out": ((6, 5, 2, 16), np.int8)},
        {"batch": 2, "channels": 3, "height": 6, "width": 5, "exponent": -5},
        {**EXPONENTS, "batch": (0, -1, 3, 2**31, None), "channels": (0, 2, 2**31 - 1), "height": (5, -(2**31)),
         "width": (4, 2**40)},
    ),
    "quantise_patches": Call(
        _int8.quantise_patches,
        {"x": RNG.standard_normal((2, 3, 6, 5)).astype(np.float32)},
        {"out": ((6, 5, 2, 32), np.int8), "workspace": ((_int8.patch_images_bytes(FIRST),), np.uint8)},
        {"exponent": -5},
        EXPONENTS,
        leading=(ENGINE, FIRST),
    ),
    "quantise": Call(
        _int8.quantise,
        {"x": RNG.standard_normal(FLAT).astype(np.float32)},
        {"out": (FLAT, np.int8)},
        {"exponent": -5},
        EXPONENTS,
        any_shape=(*ELEMENTWISE, "x"),
    ),
    "round_weights": Call(
        _int8.round_weights,
        {
            "outside": RNG.standard_normal((33, 3, 3, 20)).astype(np.float32),
            "inverse": np.full(48, 32.0, np.float32),
        },
        {"out": (W, np.int8)},
        {"seed": 2**32 - 1},
        {"seed": SEEDS},
    ),
    "export_gradient": Call(
        _int8.export_gradient,
        {"gradient": wide(2**30, *W), "scale": np.full(48, 2.0**-20, np.float32)},
        {"outside": ((33, 3, 3, 20), np.float32)},
        {},
        {},
    ),
    "quantise_by_channel": Call(
        _int8.quantise_by_channel,
        {
            "x": RNG.standard_normal(FLAT).astype(np.float32),
            "inverse": np.full(48, 32.0, np.float32),
        },
        {"out": (FLAT, np.int8)},
        {},
        {},
        any_shape=("x", "out", "inverse"),
    ),
    "softmax_gradient": Call(
        _int8.softmax_gradient,
        {"logits": signed(1, 1, 9, 16), "labels": RNG.integers(0, 10, 9).astype(np.int32)},
        {"out": ((1, 1, 9, 16), np.int8)},
        {"exponent": -4, "classes": 10, "rounding": 1},
        {"rounding": ROUNDINGS, "exponent": (-1001, 2**31, None), "classes": (0, -3, 17, 2**31 - 1, 2**40, None)},
        any_shape=("labels",),
        leading=(),
    ),
    "gemm": Call(
        _int8.gemm,
        {"lhs": activations(7, 33), "rhs": signed(18, 33)},
        {"out": ((7, 18), np.int32)},
        {"rows": 7, "cols": 18, "depth": 33, "activations": True},
        {"rows": (0, 8, 2**31), "cols": (-1, 17, None), "depth": (0, 32, 131072, 2**31 - 1, "3")},
    ),
}  # fmt: skip


def unaligned(array):
    raw = np.empty(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def read_only(array):
    array.flags.writeable = False
    return array


def smaller(array):
    """Return the array without its last row, or without 17 of its elements where rows do not count."""
    rows = array[:-1] if array.ndim > 1 else array[: max(0, array.size - 17)]
    return np.ascontiguousarray(rows)


OTHER_TYPES = ("f8", "f4", "i2", "u1", "i1", "i4", "i8", "?", ">i4", "<U2", "O")


SPOILT = {
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "reversed": lambda array: array[::-1] if array.shape[0] > 1 else array[..., ::-1],
    "smaller": smaller,
    "empty": lambda array: array[:0].copy(),
    "larger": lambda array: (
        np.concatenate([array, array[:1]]) if array.ndim > 1 else np.resize(array, array.size + 1)
    ),
    "text": lambda array: "int8",
    "number": lambda array: 3,
    "list": lambda array: array.tolist(),
    "bytes": lambda array: bytes(array.nbytes),
    "flattened": lambda array: array.reshape(1, -1),
    "transposed": lambda array: np.ascontiguousarray(np.moveaxis(array, 0, -1)[..., None]),
    "read-only": read_only,
    "unaligned": unaligned,
    "none": lambda array: None,
}


def spoilt(draw, call, name, array):
    """Return something in place of `array`, and how it was spoilt."""
    without = {
        "flattened": name in call.any_shape,
        "transposed": name in call.any_shape,
        "read-only": name not in call.outputs,
        "unaligned": array.itemsize == 1,
        "none": name in call.optional,
    }
    kind = draw(st.sampled_from(["type", *(kind for kind in SPOILT if not without.get(kind))]))
    if kind != "type":
        return SPOILT[kind](array), kind
    allowed = {array.dtype, *([np.dtype("i1"), np.dtype("i4")] if name == "out" else [])}
    other = draw(st.sampled_from([t for t in OTHER_TYPES if np.dtype(t) not in allowed]))
    return np.zeros(array.shape, other), kind


@pytest.mark.slow
@settings(max_examples=600)
@given(st.data())
def test_a_spoilt_array_is_refused_by_name_and_harms_nothing(data):
    call = CALLS[data.draw(st.sampled_from(sorted(CALLS)))]
    arguments = call.arguments()
    which = data.draw(st.sampled_from(sorted(call.arrays)))
    arguments[which], kind = spoilt(data.draw, call, which, arguments[which])
    # A larger workspace is as good, and so are weights of one more channel: the stride has room for it.
    good = {"workspace": ("larger", "flattened", "transposed"), "outside": ("larger",)}
    if kind in good.get(which, ()):
        return
    if kind in (
        "smaller",
        "empty",
        "larger",
    ):  # sizes disagree: either of the two may be called wrong
        message = call.refuses(arguments)
        assert any(argument in message for argument in call.arrays), message
    else:
        call.refuses(arguments, which)


@pytest.mark.parametrize("name", CALLS)
def test_a_number_out_of_range_is_refused_and_harms_nothing(name):
    call = CALLS[name]
    for key, values in call.out_of_range.items():
        for value in values:
            message = call.refuses({**call.arguments(), key: value})
            # A wrong size shows in the array that should have it.
            assert any(argument in message for argument in (key, *call.arrays)), (value, message)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.leading])
def test_a_wrong_engine_is_a_type_error(name):
    call = CALLS[name]
    for leading in ((), (None,), ("engine",), (3,), (_int8.Engine,)):
        with pytest.raises(TypeError):
            call.function(*leading, **call.arguments())


@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_unknown_or_missing_argument_is_a_type_error(name):
    call = CALLS[name]
    arguments = CALLS[name].arguments()
    needed = [key for key in call.arrays if key != "mask" or key not in call.optional]
    for changed in (
        {**arguments, "spoon": 1},
        *({key: arguments[key] for key in arguments if key != missing} for missing in needed),
    ):
        with pytest.raises(TypeError):
            call.function(*call.leading, **changed)


OVERLAPS = [
    (name, out, other)
    for name, call in CALLS.items()
    for out in call.outputs
    for other in (*call.inputs, *call.outputs)
    if out != other and (out, other) != ("workspace", "out")
]


@pytest.mark.parametrize(("name", "out", "other"), OVERLAPS)
def test_an_output_that_shares_memory_is_refused(name, out, other):
    call = CALLS[name]
    arguments = call.arguments()
    a = arguments[out]
    b = arguments[other]
    raw = np.zeros(a.nbytes + b.nbytes, np.uint8)
    start = min(a.nbytes, b.nbytes) // 2 // 16 * 16  # b begins inside a
    for array, at, key in ((a, 0, out), (b, start, other)):
        view = raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array if key in call.inputs else 0
        arguments[key] = view
    if "labels" in arguments and other != "labels":
        arguments["labels"][...] = 1
    if arguments.get("activations"):
        arguments["activations"] = False  # half of x is something else now
    call.refuses(arguments, out, other, "shares memory with")


EXCHANGES = ("round_weights", "export_gradient")


def exchange(name, **shapes):
    """Return the arguments of an exchange of weights, with zeros of these shapes."""
    arguments = CALLS[name].arguments()
    for key, shape in shapes.items():
        arguments[key] = np.zeros(shape, arguments[key].dtype)
    return arguments


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("outs", [1, 32, 33, 40, 48, 49, 64])
def test_the_stride_holds_any_number_of_channels_of_its_last_block(name, outs):
    arguments = exchange(name, outside=(outs, 3, 3, 20))
    if 33 <= outs <= 48:
        CALLS[name].run(arguments)
    else:
        CALLS[name].refuses(arguments, "48 channels", f"outside has {outs}")


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(
    "shape", [(), (33, 180), (33, 20, 3, 3), (33, 3, 3, 21), (33, 3, 3, 20, 1)]
)
def test_weights_of_another_shape_or_memory_order_are_refused(name, shape):
    CALLS[name].refuses(exchange(name, outside=shape), "outside: need")


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("empty", [(0, 3, 20), (3, 0, 20), (3, 3, 0)])
def test_weights_of_no_depth_are_exchanged_for_nothing(name, empty):
    inside = "out" if name == "round_weights" else "gradient"
    CALLS[name].run(exchange(name, outside=(33, *empty), **{inside: (*empty, 48)}))


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("round_weights", "inverse"),
        ("quantise_by_channel", "inverse"),
        ("export_gradient", "scale"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_factors_of_channels_that_are_not_finite_are_refused(name, which, value):
    arguments = CALLS[name].arguments()
    arguments[which][5] = value
    CALLS[name].refuses(arguments, which, "finite")


@pytest.mark.parametrize(
    ("name", "which"), [("forward", "x"), ("weight_gradient", "x"), ("gemm", "lhs")]
)
@pytest.mark.parametrize("position", [0, 5, -1])
def test_negative_activations_are_refused(name, which, position):
    arguments = CALLS[name].arguments()
    arguments[which].reshape(-1)[position] = -1
    CALLS[name].refuses(arguments, which, "0..127")
    CALLS[name].run({**arguments, "activations": False})


@pytest.mark.parametrize("label", [-1, 10, 2**31 - 1, -(2**31)])
def test_labels_out_of_range_are_refused(label):
    arguments = CALLS["softmax_gradient"].arguments()
    arguments["labels"][4] = label
    CALLS["softmax_gradient"].refuses(arguments, f"labels[4] = {label}", "0 to 9")


COEFFICIENTS = {"scale": 2**22, "scale_dy": 2**22, "scale_x": 2**22, "offset": 2**29}


@pytest.mark.parametrize("name", ["affine", "affine_gradient"])
def test_coefficients_that_may_leave_int32_are_refused(name):
    for which in COEFFICIENTS.keys() & CALLS[name].inputs:
        for value in (COEFFICIENTS[which], -COEFFICIENTS[which], -(2**31)):
            arguments = CALLS[name].arguments()
            arguments[which][3] = value
            CALLS[name].refuses(arguments, f"{which}[3] = {value}")
            arguments[which][3] = COEFFICIENTS[which] - 1
            CALLS[name].run(arguments)


LARGE = st.sampled_from([2**15, 2**16 + 1, 2**30, 2**31 - 1, 2**31, 2**63, 10**30])
ODD = st.one_of(
    LARGE, LARGE.map(lambda n: -n), st.integers(-2, 9), st.sampled_from([None, "3", 2.5])
)


def mostly(usual):
    """Return lists of sizes that differ from the usual ones here and there."""
    return st.tuples(*(st.one_of(*[st.just(size)] * 4, ODD) for size in usual))


def pixels_out(size, kernel, stride, padding):
    return (size + 2 * padding - kernel) // stride + 1


def made_or_refused(make, *sizes, **settings_):
    try:
        return make(*sizes, **settings_)
    except REFUSALS as error:
        assert str(error)
        return None


@settings(max_examples=250)
@given(
    mostly([2, 6, 6, 4, 4, 3, 3, 1, 1, 1, 1, 1, 0]),
    st.sampled_from(["auto", "direct", "winograd", "fft"]),
)
def test_a_convolution_of_any_shape_is_made_or_refused(sizes, algorithm):
    if plan := made_or_refused(_int8.Convolution, *sizes, algorithm=algorithm):
        _, in_h, in_w, _, _, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, _, _ = sizes
        assert pixels_out(in_h, kernel_h, stride_h, pad_h) > 0
        assert pixels_out(in_w, kernel_w, stride_w, pad_w) > 0
        assert 0 < plan.workspace_bytes(ENGINE) < 2**62


@settings(max_examples=250)
@given(mostly([2, 6, 6, 4, 3, 3, 2, 2, 1]))
def test_a_pooling_of_any_shape_is_made_or_refused(sizes):
    if plan := made_or_refused(_int8.Pooling, *sizes):
        _, in_h, in_w, _, kernel_h, kernel_w, stride_h, stride_w, pad_h = sizes
        assert pixels_out(in_h, kernel_h, stride_h, pad_h) > 0
        assert pixels_out(in_w, kernel_w, stride_w, 0) > 0
        assert isinstance(plan.overlapping, bool)


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("make", "arguments", "named"),
    [
        (_int8.Convolution, (1, 4, 4, 3, 8, 5, 5), ("5x5", "4x4")),
        (_int8.Convolution, (1, 4, 4, 6, 8, 3, 3, 1, 1, 1, 1, 4), ("6", "8", "4 groups")),
        (_int8.Convolution, (1, 1, 1, 131072, 8, 1, 1), ("131072", "131071")),
        (_int8.Convolution, (4, 4, 4, 3, 8, 3, 3, 1, 1, 1, 1, 1, 5), ("batch_block", "5")),
        (_int8.Convolution, (4, 4, 4, 3, 8, 3, 3, 1, 1, 1, 1, 1, -1), ("batch_block", "-1")),
        (
            _int8.Convolution,
            (4, 4, 4, 3, 8, 3, 3, 2, 2, 1, 1, 1, 0, "winograd"),
            ("3x3", "stride 1"),
        ),
        (_int8.Convolution, (4, 4, 4, 3, 8, 3, 3, 1, 1, 1, 1, 1, 0, "fft"), ("algorithm", "'fft'")),
        (_int8.Convolution, (0, 4, 4, 3, 8, 3, 3), ("at least 1",)),
        (_int8.Convolution, (2, 6, 6, 4, 4, 3, 3, 1, 1, HUGE, 1), ()),
        (_int8.Convolution, (2, 6, 6, 4, 4, 3, 3, 1, 1, 1, HUGE), ()),
        (_int8.Pooling, (1, 40, 40, 3, 17, 17, 1, 1), ("17x17", "256")),
        (_int8.Pooling, (1, 4, 4, 3, 5, 5, 1, 1), ("5x5", "4x4")),
        (_int8.Pooling, (1, 4, 4, 3, 3, 3, 1, 1, 2, 2), ("padding", "half the window")),
        (_int8.Pooling, (1, 4, 4, 3, 3, 3, 0, 1), ("at least 1",)),
        (_int8.Pooling, (2, 6, 6, 4, 3, 3, 1, 1, HUGE, 1), ()),
        (_int8.Pooling, (2, 6, 6, 4, 3, 3, 1, 1, 1, HUGE), ()),
    ],
)
def test_a_plan_that_cannot_be_says_why(make, arguments, named):
    refused(lambda: make(*arguments), *named, error=ValueError)
