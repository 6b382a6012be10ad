"""Integer training kernels of socflower: bindings of `native/int8/`, whose headers are the contract.

Tensors are int8 in -127..127, (height, width, batch, channel stride); weights (kernel height, kernel width, input
channels per group, channel stride of output channels); `native/int8/shape.h` describes both. Arrays are C-contiguous
and aligned; outputs are written in place and share memory with no input. Anything else raises `ValueError` with the
offending argument and numbers. `shift` is 0 to 30, `rounding` 0 (nearest) or 1 (pseudo-stochastic). Functions that
round return the largest magnitude before rounding, and only look for it where `out` may be and is None. The
interpreter's lock is released while computing.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

_Array: TypeAlias = NDArray[Any] | Buffer

MAX_EXACT_DEPTH: int

class Engine:
    """A kernel path that has passed its self-test, and threads to run it."""

    def __init__(self, num_threads: int = 1, cores: Sequence[int] = ..., kernel: str = "") -> None:
        """Start the threads, pinned if `cores` names one per thread; `kernel` "" is the best path."""

    @property
    def kernel(self) -> str:
        """Name of the kernel path."""

    @property
    def num_threads(self) -> int:
        """Number of threads."""

class Convolution:
    """A convolution or linear layer of one shape: forward, input gradient and weight gradient."""

    def __init__(
        self,
        batch: int,
        in_h: int,
        in_w: int,
        in_c: int,
        out_c: int,
        kernel_h: int,
        kernel_w: int,
        stride_h: int = 1,
        stride_w: int = 1,
        pad_h: int = 0,
        pad_w: int = 0,
        groups: int = 1,
        batch_block: int = 0,
        algorithm: str = "auto",
        dilation_h: int = 1,
        dilation_w: int = 1,
    ) -> None:
        """Lay out the index tables; `batch_block` images are worked on at a time (0: all)."""

    def algorithm(self, engine: Engine, function: str) -> Literal["direct", "winograd"]:
        """Return how "forward", "input_gradient" or "weight_gradient" is computed on the engine's path."""

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Shape of `x`: height, width, batch, channel stride."""

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of the output: height, width, batch, channel stride."""

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weight and its gradient."""

    def workspace_bytes(self, engine: Engine) -> int:
        """Return the bytes of workspace that any of the three functions needs."""

    def forward(
        self,
        engine: Engine,
        x: _Array,
        weight: _Array,
        bias: _Array | None,
        out: _Array,
        workspace: _Array,
        activations: bool = False,
        shift: int = 0,
        rounding: int = 0,
        relu: bool = False,
        accumulators: _Array | None = None,
    ) -> int:
        """Write bias + correlation of x and weight, rounded if `out` is int8; `activations` says x is 0..127.

        `accumulators`, int32, gets the same before rounding, beside an int8 `out`.
        """

    def input_gradient(
        self,
        engine: Engine,
        dy: _Array,
        weight: _Array,
        out: _Array,
        workspace: _Array,
        shift: int = 0,
        rounding: int = 0,
        mask: _Array | None = None,
    ) -> int:
        """Write the gradient with respect to x, zero where `mask` is not positive, rounded if `out` is int8."""

    def weight_gradient(
        self,
        engine: Engine,
        x: _Array,
        dy: _Array,
        out: _Array,
        workspace: _Array,
        activations: bool = False,
    ) -> int:
        """Write the int32 gradient with respect to the weight; OverflowError where it may not fit."""

class Pooling:
    """Maximum and average over the windows of one shape, and their gradients."""

    def __init__(
        self,
        batch: int,
        in_h: int,
        in_w: int,
        channels: int,
        kernel_h: int,
        kernel_w: int,
        stride_h: int,
        stride_w: int,
        pad_h: int = 0,
        pad_w: int = 0,
    ) -> None:
        """Lay out the index tables."""

    @property
    def overlapping(self) -> bool:
        """Whether windows share pixels; if not, `max_gradient` with shift 0 is exact."""

    def max(self, engine: Engine, x: _Array, out: _Array, argmax: _Array) -> None:
        """Write the maximum of each window and, as uint8, the first tap that attains it."""

    def max_gradient(
        self,
        engine: Engine,
        dy: _Array,
        argmax: _Array,
        out: _Array | None,
        shift: int = 0,
        rounding: int = 0,
        mask: _Array | None = None,
    ) -> int:
        """Write, for each pixel, the sum of the dy of the windows that chose it."""

    def average(
        self,
        engine: Engine,
        x: _Array,
        multiplier: int,
        out: _Array | None,
        shift: int = 0,
        rounding: int = 0,
    ) -> int:
        """Write multiplier * sum over each window."""

    def average_gradient(
        self,
        engine: Engine,
        dy: _Array,
        multiplier: int,
        out: _Array | None,
        shift: int = 0,
        rounding: int = 0,
        mask: _Array | None = None,
    ) -> int:
        """Write, for each pixel, multiplier * sum of the dy of its windows."""

def channel_stride(channels: int) -> int:
    """Return the channels rounded up to the block of 16."""

def compiled_kernels() -> list[str]:
    """Return the names of the kernel paths in this build."""

def available_kernels() -> list[str]:
    """Return the names of the kernel paths that this machine can run, best last."""

def requantise(
    engine: Engine,
    acc: _Array,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    relu: bool = False,
    mask: _Array | None = None,
) -> int:
    """Round int32 accumulators to int8 (F14)."""

def add(
    engine: Engine,
    a: _Array,
    shift_a: int,
    b: _Array,
    shift_b: int,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    relu: bool = False,
    mask: _Array | None = None,
) -> int:
    """Round (a << shift_a) + (b << shift_b), shifts of 0 to 20."""

def affine(
    engine: Engine,
    x: _Array,
    scale: _Array,
    offset: _Array,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    relu: bool = False,
) -> int:
    """Round scale[c] * x + offset[c]; |scale| < 2^22, |offset| < 2^29, one int32 per channel of the stride."""

def affine_gradient(
    engine: Engine,
    dy: _Array,
    x: _Array,
    gate: _Array | None,
    scale_dy: _Array,
    scale_x: _Array,
    offset: _Array,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    relu: bool = False,
    mask: _Array | None = None,
) -> int:
    """Round scale_dy[c] * dy + scale_x[c] * x + offset[c]; dy counts as 0 where `gate` is not positive."""

def affine_gradient_at_random(
    engine: Engine,
    dy: _Array,
    x: _Array,
    gate: _Array | None,
    scale_dy: _Array,
    scale_x: _Array,
    offset: _Array,
    out: _Array | None,
    shift: int,
    seed: int,
    batch: int,
    total: int,
    first: int,
) -> int:
    """Do as `affine_gradient`, but round up or down at random, without bias.

    Rows are (pixel, image) of `batch` images, from image `first` of a batch of `total`. A random number depends on the
    element's place in that batch and on `seed`, so on no division of the batch.
    """

def affine_real(
    engine: Engine,
    acc: _Array,
    by_image: _Array,
    scale: _Array,
    offset: _Array,
    other: _Array | None,
    other_by_image: _Array | None,
    out: _Array | None,
    inverse: _Array | None,
    largest: _Array | None,
    relu: bool = False,
) -> None:
    """Compute v = (acc * by_image[image]) * scale[c] + offset[c] + other * other_by_image[image] in float32.

    After ReLU if `relu`. `out` is the nearest int8 of v * inverse[image], half to even; after a ReLU it is at least 1
    where v is positive. `largest` is the maximum of |v| of each image. acc is int8 or int32, other int8; rows are
    (pixel, image).
    """

def channel_sums(
    engine: Engine, a: _Array, b: _Array, gate: _Array | None, sum_a: _Array, sum_ab: _Array
) -> None:
    """Write per channel, as int64, the sums of a and of a * b; a counts as 0 where `gate` is not positive."""

def channel_largest(engine: Engine, a: _Array, gate: _Array | None, largest: _Array) -> None:
    """Write per channel, as int32, the largest |a| of int8 values whose `gate` is positive, or of int32 without one."""

def normalise(
    engine: Engine,
    acc: _Array,
    own_scale: _Array,
    own_offset: _Array,
    scale: _Array,
    offset: _Array,
    inverse: float,
    x: _Array,
    out: _Array,
    relu: bool = False,
) -> None:
    """Write two int8 of int32 accumulators, half to even, from float32 by channel.

    `x` is acc * own_scale + own_offset; `out` is (acc * scale + offset) * inverse, after ReLU if `relu`.
    """

def channel_moments(
    engine: Engine,
    acc: _Array,
    shift: int,
    sum: _Array,
    squares: _Array,
    least: _Array,
    most: _Array,
) -> None:
    """Write per channel the sum and the sum of squares of acc / 2^shift, rounded to nearest, and the ends of acc.

    The rounded numbers are below 2^21; sums are int64, `least` and `most` int32.
    """

class MatrixProducts:
    """Products of small matrices in activations, `batches` for each of `samples` samples: int8, added in int32.

    A matrix has its rows in successive pixels of one sample and its columns in the channels. `transposed` says which
    operand is stored transposed, "neither", "right" or "left"; results are (rows, cols), sums of `depth` products.
    """

    def __init__(
        self,
        batches: int,
        samples: int,
        rows: int,
        cols: int,
        depth: int,
        transposed: Literal["neither", "right", "left"] = "neither",
    ) -> None: ...
    def workspace_bytes(self, engine: Engine) -> int:
        """Return the bytes of workspace that `multiply` needs."""

    def multiply(
        self, engine: Engine, left: _Array, right: _Array, out: _Array, workspace: _Array
    ) -> int:
        """Write int32 accumulators, zeros for channels of padding; return the largest magnitude."""

def row_sums(
    engine: Engine, a: _Array, b: _Array, weight: _Array, sum_a: _Array, sum_ab: _Array
) -> None:
    """Write for each row, as float64, the exact sums of weight[c] * a and weight[c] * a * b."""

def row_affine(
    engine: Engine,
    x: _Array,
    gamma: _Array,
    beta: _Array,
    slope: _Array,
    mean: _Array,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
) -> int:
    """Round scale * x + rint(beta[c] - scale * mean[r]) with scale = rint(gamma[c] * slope[r]); float64 operands."""

def row_affine_gradient(
    engine: Engine,
    dy: _Array,
    x: _Array,
    gamma: _Array,
    counted: _Array,
    gain: _Array,
    scale_x: _Array,
    offset: _Array,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    mask: _Array | None = None,
) -> int:
    """Round rint(gamma[c] * gain[r]) * dy + scale_x[r] * x + counted[c] * offset[r]; float64 operands."""

def row_scale_gradient(
    engine: Engine,
    dy: _Array,
    x: _Array,
    slope: _Array,
    mean: _Array,
    terms: _Array,
    sum_dy: _Array,
) -> None:
    """Write for each channel, as int64, the sums over rows of rint((dy * x - dy * mean[r]) * slope[r]) and of dy."""

def softmax(
    engine: Engine,
    x: _Array,
    powers: _Array,
    channels: int,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
) -> int:
    """Round the 14 bits of powers[d] divided by its row's sum, for elements d below the row's largest."""

def softmax_input_gradient_largest(
    engine: Engine, p: _Array, dy: _Array, channels: int, up: int, factor: int
) -> float:
    """Return the largest magnitude of p * (dy * 2^up - sum of p * dy) * factor, a whole number."""

def softmax_input_gradient(
    engine: Engine,
    p: _Array,
    dy: _Array,
    channels: int,
    up: int,
    factor: int,
    drop: int,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    mask: _Array | None = None,
) -> int:
    """Round p * (dy * 2^up - sum of p * dy) * factor, after `drop` bits are rounded off half away from zero."""

def scale_sums(engine: Engine, acc: _Array, factor: int, drop: int) -> None:
    """Multiply int32 by a factor of up to 2^20 in place, and round `drop` bits off, half away from zero."""

def largest_by_image(values: _Array, largest: _Array) -> None:
    """Write the largest magnitude of each image of float64 (height, width, batch, channels) as float32."""

def round_by_image(engine: Engine, values: _Array, inverse: _Array, out: _Array) -> None:
    """Write the nearest int8 of such values times inverse[image], half to even, saturated, as a tensor."""

def look_up(engine: Engine, x: _Array, table: _Array, out: _Array) -> None:
    """Write table[x as a byte]; 256 int8."""

def bytes_seen(x: _Array, channels: int, seen: _Array) -> None:
    """Write for each of 256 bytes 1 if it is among the channels of x, without padding, else 0."""

def table_gradient(
    engine: Engine,
    dy: _Array,
    x: _Array,
    table: _Array,
    out: _Array | None,
    shift: int = 0,
    rounding: int = 0,
    mask: _Array | None = None,
) -> int:
    """Round table[x as a byte] * dy; 256 int32 of at most 2^23."""

def update_weight(
    engine: Engine, weight: _Array, gradient: _Array, shift: int, rounding: int = 0
) -> None:
    """Subtract the rounded int32 gradient from the int8 weight in place, saturated at +-127."""

def descend(
    engine: Engine,
    values: _Array,
    velocity: _Array | None,
    gradient: _Array,
    scale: _Array,
    inverse: float,
    learning_rate: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    out: _Array | None = None,
    exponent: int = 0,
) -> float:
    """Do a step of torch.optim.SGD on float32 values in place, for the gradient int32 * scale[channel] * inverse.

    `velocity` is updated unless it is None. `out` gets the nearest int8 of the new values / 2^exponent, as from
    `quantise`. Returns the largest magnitude of the values; infinity if any is not finite.
    """

def quantise_images(
    engine: Engine,
    x: _Array,
    out: _Array,
    batch: int,
    channels: int,
    height: int,
    width: int,
    exponent: int,
) -> None:
    """Write the nearest int8 of float32 images (batch, channels, height, width) / 2^exponent as a tensor."""

def quantise_patches(
    engine: Engine,
    convolution: Convolution,
    x: _Array,
    out: _Array,
    workspace: _Array,
    exponent: int,
) -> None:
    """Write the patches of a first convolution, for a pointwise one over taps * in_c channels."""

def patch_images_bytes(convolution: Convolution) -> int:
    """Return the bytes of workspace that `quantise_patches` needs."""

def quantise(engine: Engine, x: _Array, out: _Array, exponent: int) -> None:
    """Write the nearest int8 of x / 2^exponent, half to even, saturated at +-127."""

def quantise_by_channel(engine: Engine, x: _Array, inverse: _Array, out: _Array) -> None:
    """Write the nearest int8 of x * inverse[channel], a product in float32, saturated at +-127."""

def round_by_channel_at_random(
    engine: Engine,
    acc: _Array,
    inverse: _Array,
    out: _Array,
    seed: int,
    batch: int,
    total: int,
    first: int,
) -> None:
    """Write int32 accumulators * inverse[channel], products in float32, as int8.

    Each is rounded down or up at random, so that its expectation is exact; `seed` and its place in the whole batch of
    `total` images, in which the `batch` images of this share begin at `first`, decide which.
    """

def round_elements(engine: Engine, x: _Array, mantissa_bits: int) -> None:
    """Round int8 (height, width, images, channels) in place to numbers with M = `mantissa_bits` and 2 exponent bits.

    A group is the pixels of one image and channel: its numbers have a common scale, one of 5 - M powers of two, by the
    group's largest magnitude. To nearest, half to even, saturated at the group's largest number.
    """

def round_elements_at_random(
    engine: Engine, x: _Array, mantissa_bits: int, seed: int, total: int, first: int
) -> None:
    """Do as `round_elements`, but round up or down at random, without bias.

    The images are those from `first` of a batch of `total`, and random numbers as in `affine_gradient_at_random`.
    """

def largest_by_channel(x: _Array, largest: _Array) -> None:
    """Write the largest magnitude of each channel; infinity if any value of the channel is not finite."""

def round_weights(engine: Engine, outside: _Array, out: _Array, inverse: _Array, seed: int) -> None:
    """Write float32 weights (outs, kernel height, kernel width, in) * inverse[channel] as an int8 weight.

    Each is rounded down or up at random, so that its expectation is exact; `seed` and its index decide which.
    """

def export_gradient(engine: Engine, gradient: _Array, outside: _Array, scale: _Array) -> None:
    """Write an int32 weight gradient * scale[channel] as float32 (outs, kernel height, kernel width, in)."""

def sum_of_magnitudes(x: _Array) -> int:
    """Return the sum of |x| of int8 or int32 values."""

def max_magnitude(x: _Array) -> float:
    """Return the largest magnitude of float32 values; infinity if any is not finite."""

def softmax_gradient(
    logits: _Array, exponent: int, labels: _Array, out: _Array, classes: int, rounding: int = 0
) -> None:
    """Write softmax - one-hot of (1, 1, batch, stride) logits in units of 2^-7, from integers alone."""

def gemm(
    engine: Engine,
    lhs: _Array,
    rhs: _Array,
    out: _Array,
    rows: int,
    cols: int,
    depth: int,
    activations: bool = False,
) -> None:
    """Write out[m, n] = sum over k of lhs[m, k] * rhs[n, k] as int32; depth of at most MAX_EXACT_DEPTH."""
