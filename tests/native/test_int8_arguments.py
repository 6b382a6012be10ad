"""socflower._int8 with arguments that its contract excludes: always an exception that names them, never a crash."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower import _int8

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
        return [result, *(np.array(arguments[name]) for name in (*self.outputs, *self.inputs))]


SHIFTS = (-1, 31, 32, 2**31, -(2**31), 2**70, 1.5, "3", None)
ROUNDINGS = (-1, 2, 7, 2**40, "nearest", None)
ROUNDED = {"shift": SHIFTS, "rounding": ROUNDINGS}
EXPONENTS = {"exponent": (-101, 101, 2**31, -(2**63), 0.5, "0", None)}
SEEDS = (-1, 2**32, 2**70, 0.5, "0", None)
SCALES = (float("nan"), float("inf"), -float("inf"), 1e39, -1e300, "1", None)
MULTIPLIERS = (-1, 2**31 // (128 * 9) + 1, 2**31 - 1, -(2**31), 2**40, None)
WORKSPACE = ((CONVOLUTION.workspace_bytes(ENGINE),), np.uint8)
X, DY, W = (6, 5, 4, 32), (6, 5, 4, 48), (3, 3, 20, 48)
PX, PY = (6, 6, 4, 32), (3, 3, 4, 32)
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
        {"outside": RNG.standard_normal((33, 3, 3, 20)).astype(np.float32)},
        {"out": (W, np.int8)},
        {"exponent": -5, "seed": 2**32 - 1},
        {**EXPONENTS, "seed": SEEDS},
    ),
    "export_gradient": Call(
        _int8.export_gradient,
        {"gradient": wide(2**30, *W)},
        {"outside": ((33, 3, 3, 20), np.float32)},
        {"scale": 2.0**-20},
        {"scale": SCALES},
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
EXPECTED = {name: call.run(call.arguments()) for name, call in CALLS.items()}


def assert_still_right(name):
    call = CALLS[name]
    for got, expected in zip(call.run(call.arguments()), EXPECTED[name], strict=True):
        if not np.array_equal(
            got, expected
        ):  # outputs only: what a workspace holds is nobody's business
            assert isinstance(got, np.ndarray)
            assert got.dtype == np.uint8, f"{name} no longer gives its result"
            assert "workspace" in call.outputs


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
    return (
        np.ascontiguousarray(array[:-1])
        if array.ndim > 1
        else array[: max(0, array.size - 17)].copy()
    )


OTHER_TYPES = (
    np.float64,
    np.float32,
    np.int16,
    np.uint8,
    np.int8,
    np.int32,
    np.int64,
    np.bool_,
    ">i4",
    "<U2",
    object,
)


def spoilt(draw, call, name, array):
    """Return something in place of `array`, and whether the message must name just this argument."""
    kinds = [
        "type",
        "strided",
        "reversed",
        "smaller",
        "empty",
        "larger",
        "text",
        "number",
        "list",
        "bytes",
    ]
    if name not in call.any_shape:
        kinds += ["flattened", "transposed"]
    if name in call.outputs:
        kinds.append("read-only")
    if array.itemsize > 1:
        kinds.append("unaligned")
    if name not in call.optional:
        kinds.append("none")
    kind = draw(st.sampled_from(kinds))
    whole = {
        "strided": lambda: np.repeat(array, 2, axis=-1)[..., ::2],
        "reversed": lambda: array[::-1] if array.shape[0] > 1 else array[..., ::-1],
        "smaller": lambda: smaller(array),
        "empty": lambda: array[:0].copy(),
        "larger": lambda: (
            np.concatenate([array, array[:1]])
            if array.ndim > 1
            else np.resize(array, array.size + 1)
        ),
        "text": lambda: "int8",
        "number": lambda: 3,
        "list": lambda: array.tolist(),
        "bytes": lambda: bytes(array.nbytes),
        "flattened": lambda: array.reshape(1, -1),
        "transposed": lambda: np.ascontiguousarray(np.moveaxis(array, 0, -1)[..., None]),
        "read-only": lambda: read_only(array),
        "unaligned": lambda: unaligned(array),
        "none": lambda: None,
    }
    if kind == "type":
        allowed = (
            {array.dtype, np.dtype(np.int8), np.dtype(np.int32)} if name == "out" else {array.dtype}
        )
        other = draw(st.sampled_from([t for t in OTHER_TYPES if np.dtype(t) not in allowed]))
        return np.zeros(array.shape, other), kind
    return whole[kind](), kind


@settings(max_examples=600)
@given(st.data())
def test_a_spoilt_array_is_refused_by_name_and_harms_nothing(data):
    name = data.draw(st.sampled_from(sorted(CALLS)))
    call = CALLS[name]
    arguments = call.arguments()
    which = data.draw(st.sampled_from(sorted({*call.inputs, *call.outputs})))
    arguments[which], kind = spoilt(data.draw, call, which, arguments[which])
    if which == "workspace" and kind in ("larger", "flattened", "transposed"):
        return  # as good as the one asked for
    if which == "outside" and kind == "larger":
        return  # as good: the stride has room for one more channel
    before = {
        key: array.copy()
        for key, array in arguments.items()
        if key in call.outputs and key != which
    }
    with pytest.raises(REFUSALS) as caught:
        call.run(arguments)
    for key, array in before.items():
        np.testing.assert_array_equal(arguments[key], array, f"{key} was written to")
    message = str(caught.value)
    if kind in (
        "smaller",
        "empty",
        "larger",
    ):  # sizes disagree: either of the two may be called wrong
        assert any(argument in message for argument in (*call.inputs, *call.outputs)), message
    else:
        assert which in message, message
    assert_still_right(name)


NUMBERS = [
    (name, key, value)
    for name, call in CALLS.items()
    for key, values in call.out_of_range.items()
    for value in values
]


@pytest.mark.parametrize(("name", "key", "value"), NUMBERS)
def test_a_number_out_of_range_is_refused_and_harms_nothing(name, key, value):
    call = CALLS[name]
    with pytest.raises(REFUSALS) as caught:
        call.run({**call.arguments(), key: value})
    names = (
        key,
        *call.inputs,
        *call.outputs,
    )  # a wrong size shows in the array that should have it
    assert any(argument in str(caught.value) for argument in names), str(caught.value)
    assert_still_right(name)


@pytest.mark.parametrize("leading", [(), (None,), ("engine",), (3,), (_int8.Engine,)])
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.leading])
def test_a_wrong_engine_is_a_type_error(name, leading):
    call = CALLS[name]
    with pytest.raises(TypeError):
        call.function(*leading, **call.arguments())


@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_unknown_or_missing_argument_is_a_type_error(name):
    call = CALLS[name]
    with pytest.raises(TypeError):
        call.function(*call.leading, **call.arguments(), spoon=1)
    for missing in (*call.inputs, *call.outputs):
        if missing in call.optional and missing == "mask":
            continue
        arguments = call.arguments()
        del arguments[missing]
        with pytest.raises(TypeError):
            call.function(*call.leading, **arguments)


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
    a, b = arguments[out], arguments[other]
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
    with pytest.raises(
        ValueError, match=f"({out} shares memory with {other}|{other} shares memory with {out})"
    ):
        call.run(arguments)
    assert_still_right(name)


EXCHANGES = ("round_weights", "export_gradient")


def exchange(name, **changes):
    """Return (arguments, the one that is written) of an exchange of weights; zeros where shapes are given."""
    arguments = CALLS[name].arguments()
    for key, value in changes.items():
        arguments[key] = (
            np.zeros(value, arguments[key].dtype) if isinstance(value, tuple) else value
        )
    return arguments, next(iter(CALLS[name].outputs))


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("outs", [1, 32, 49, 64])
def test_weights_of_another_number_of_channels_than_the_stride_holds_are_refused_in_one_line(
    name, outs
):
    arguments, written = exchange(name, outside=(outs, 3, 3, 20))
    before = arguments[written].copy()
    with pytest.raises(
        ValueError, match=rf"has room for 48 channels, outside has {outs}, which need"
    ) as caught:
        CALLS[name].run(arguments)
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(arguments[written], before)
    assert_still_right(name)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("outs", [33, 40, 48])
def test_the_stride_holds_any_number_of_channels_of_its_last_block(name, outs):
    CALLS[name].run(exchange(name, outside=(outs, 3, 3, 20))[0])
    assert_still_right(name)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (33,),
        (33, 180),
        (33, 20, 3, 3),
        (33, 3, 20, 3),
        (33, 3, 3, 21),
        (33, 3, 3, 20, 1),
        (1, 33, 3, 3, 20),
    ],
)
def test_weights_of_another_shape_or_memory_order_are_refused_in_one_line(name, shape):
    arguments, written = exchange(name, outside=shape)
    before = arguments[written].copy()
    with pytest.raises(
        ValueError, match=r"outside: need (shape \(33, 3, 3, 20\)|4 dimensions)"
    ) as caught:
        CALLS[name].run(arguments)
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(arguments[written], before)
    assert_still_right(name)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("empty", [(0, 3, 20), (3, 0, 20), (3, 3, 0)])
def test_weights_of_no_depth_are_exchanged_for_nothing(name, empty):
    inside = "out" if name == "round_weights" else "gradient"
    CALLS[name].run(exchange(name, outside=(33, *empty), **{inside: (*empty, 48)})[0])
    assert_still_right(name)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_scale_that_is_no_float32_is_refused_and_nothing_is_written(scale):
    arguments, written = exchange("export_gradient", scale=scale)
    with pytest.raises(ValueError, match=r"^scale: need a finite number$"):
        CALLS["export_gradient"].run(arguments)
    assert (arguments[written] == 7.0).all()


@pytest.mark.parametrize("exponent", [-101, 101])
def test_an_exponent_that_float32_may_not_scale_by_is_refused_and_nothing_is_written(exponent):
    arguments, written = exchange("round_weights", exponent=exponent)
    with pytest.raises(ValueError, match=rf"^exponent: need -100 to 100, got {exponent}$"):
        CALLS["round_weights"].run(arguments)
    assert (arguments[written] == 7).all()


@pytest.mark.parametrize("name", ["forward", "weight_gradient", "gemm"])
def test_negative_activations_are_refused(name):
    call = CALLS[name]
    for position in (0, 5, -1):
        arguments = call.arguments()
        which = "lhs" if name == "gemm" else "x"
        arguments[which].reshape(-1)[position] = -1
        with pytest.raises(ValueError, match=rf"{which}: activations must lie in 0..127"):
            call.run(arguments)
        arguments["activations"] = False
        call.run(arguments)


@pytest.mark.parametrize("label", [-1, 10, 2**31 - 1, -(2**31)])
def test_labels_out_of_range_are_refused(label):
    arguments = CALLS["softmax_gradient"].arguments()
    arguments["labels"][4] = label
    with pytest.raises(ValueError, match=rf"labels\[4\] = {label}, need 0 to 9"):
        _int8.softmax_gradient(**arguments)


@pytest.mark.parametrize(
    ("name", "which", "bound"),
    [
        ("affine", "scale", 2**22), ("affine", "offset", 2**29), ("affine_gradient", "scale_dy", 2**22),
        ("affine_gradient", "scale_x", 2**22), ("affine_gradient", "offset", 2**29),
    ],
)  # fmt: skip
def test_coefficients_that_may_leave_int32_are_refused(name, which, bound):
    for value in (bound, -bound, -(2**31)):
        arguments = CALLS[name].arguments()
        arguments[which][3] = value
        with pytest.raises(ValueError, match=rf"{which}\[3\] = {value} is beyond"):
            CALLS[name].run(arguments)
        arguments[which][3] = bound - 1
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


@settings(max_examples=250)
@given(
    mostly([2, 6, 6, 4, 4, 3, 3, 1, 1, 1, 1, 1, 0]),
    st.sampled_from(["auto", "direct", "winograd", "fft"]),
)
def test_a_convolution_of_any_shape_is_made_or_refused(sizes, algorithm):
    try:
        plan = _int8.Convolution(*sizes, algorithm=algorithm)
    except REFUSALS as error:
        assert str(error)
        return
    _, in_h, in_w, _, _, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, _, _ = sizes
    assert pixels_out(in_h, kernel_h, stride_h, pad_h) > 0
    assert pixels_out(in_w, kernel_w, stride_w, pad_w) > 0
    assert 0 < plan.workspace_bytes(ENGINE) < 2**62


@settings(max_examples=250)
@given(mostly([2, 6, 6, 4, 3, 3, 2, 2, 1]))
def test_a_pooling_of_any_shape_is_made_or_refused(sizes):
    try:
        plan = _int8.Pooling(*sizes)
    except REFUSALS as error:
        assert str(error)
        return
    _, in_h, in_w, _, kernel_h, kernel_w, stride_h, stride_w, pad_h = sizes
    assert pixels_out(in_h, kernel_h, stride_h, pad_h) > 0
    assert pixels_out(in_w, kernel_w, stride_w, 0) > 0
    assert isinstance(plan.overlapping, bool)


@pytest.mark.parametrize("make", [
    lambda padding: _int8.Convolution(2, 6, 6, 4, 4, 3, 3, 1, 1, padding, 1),
    lambda padding: _int8.Convolution(2, 6, 6, 4, 4, 3, 3, 1, 1, 1, padding),
    lambda padding: _int8.Pooling(2, 6, 6, 4, 3, 3, 1, 1, padding, 1),
    lambda padding: _int8.Pooling(2, 6, 6, 4, 3, 3, 1, 1, 1, padding),
])  # fmt: skip
def test_padding_beyond_any_image_is_refused(make):
    with pytest.raises(ValueError, match=r"padding|elements"):
        make(2**31 - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 4, 4, 3, 8, 5, 5), r"kernel of 5x5 does not fit into an input of 4x4"),
        (
            (1, 4, 4, 6, 8, 3, 3, 1, 1, 1, 1, 4),
            r"6 input and 8 output channels cannot be split into 4 groups",
        ),
        ((1, 1, 1, 131072, 8, 1, 1), r"131072 products of int8 may leave int32; at most 131071"),
        ((4, 4, 4, 3, 8, 3, 3, 1, 1, 1, 1, 1, 5), r"batch_block must be 0 to 4, got 5"),
        ((4, 4, 4, 3, 8, 3, 3, 1, 1, 1, 1, 1, -1), r"batch_block must be 0 to 4, got -1"),
        (
            (4, 4, 4, 3, 8, 3, 3, 2, 2, 1, 1, 1, 0, "winograd"),
            r"Winograd needs a 3x3 kernel.* stride 1",
        ),
        ((4, 4, 4, 3, 8, 3, 3, 1, 1, 1, 1, 1, 0, "fft"), r"algorithm: .* got 'fft'"),
        ((0, 4, 4, 3, 8, 3, 3), r"at least 1"),
    ],
)
def test_a_convolution_that_cannot_be_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        _int8.Convolution(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 40, 40, 3, 17, 17, 1, 1), r"window of 17x17 has more than 256 taps"),
        ((1, 4, 4, 3, 5, 5, 1, 1), r"window of 5x5 does not fit into an input of 4x4"),
        ((1, 4, 4, 3, 3, 3, 1, 1, 2, 2), r"padding must be at most half the window"),
        ((1, 4, 4, 3, 3, 3, 0, 1), r"at least 1"),
    ],
)
def test_a_pooling_that_cannot_be_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        _int8.Pooling(*arguments)
