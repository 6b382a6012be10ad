"""The three convolutions of a training step, in int8, against torch's in FP32 and in quantised inference.

Layers are those of the networks of docs/results.md at batch 64. Forward: bias, ReLU and rounding to int8 included,
as in FBGEMM and oneDNN; FP32 has the bias only. Input gradient: rounded to int8. Weight gradient: int32. Activations
lie in 0..127 and weights and gradients in -127..127, where FBGEMM is exact without VNNI too.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row, Timing, less_is_better, measure_interleaved, peer_notes
from benchmarks.int8_settings import describe_peers, one_thread, rows_of, settings
from socflower import _int8

BATCH = 64
_CHANNELS_OF_IMAGES = 3
_PSEUDO_STOCHASTIC = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A convolution of square images, windows, strides and paddings."""

    name: str
    in_channels: int
    out_channels: int
    # Pixels per side of the input.
    size: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    groups: int = 1

    @property
    def out_size(self) -> int:
        """Pixels per side of the output."""
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def case(self) -> str:
        """The layer's name in a row."""
        kernel = f"{self.kernel} x {self.kernel}" + (f" / {self.stride}" if self.stride > 1 else "")
        depthwise = " depthwise" if self.groups > 1 else ""
        return f"{self.name}, {kernel}{depthwise}, {self.in_channels} to {self.out_channels}, {self.size} x {self.size}"

    def num_products(self) -> int:
        """Return the number of products for the batch, without products with padding."""
        along_one_side = sum(
            0 <= out * self.stride - self.padding + tap < self.size
            for out in range(self.out_size)
            for tap in range(self.kernel)
        )
        return BATCH * along_one_side**2 * self.out_channels * self.in_channels // self.groups


LAYERS = (
    Layer(name="VGG-11", in_channels=3, out_channels=64, size=32),
    Layer(name="VGG-11", in_channels=64, out_channels=128, size=16),
    Layer(name="VGG-11", in_channels=128, out_channels=256, size=8),
    Layer(name="VGG-11", in_channels=256, out_channels=256, size=8),
    Layer(name="VGG-11", in_channels=512, out_channels=512, size=4),
    Layer(name="VGG-11", in_channels=512, out_channels=512, size=2),
    Layer(name="LeNet-5", in_channels=1, out_channels=6, size=28, kernel=5, padding=2),
    Layer(name="LeNet-5", in_channels=6, out_channels=16, size=14, kernel=5, padding=0),
    Layer(name="ResNet-18", in_channels=64, out_channels=64, size=32),
    Layer(name="ResNet-18", in_channels=128, out_channels=256, size=16, stride=2),
    Layer(
        name="ResNet-18", in_channels=64, out_channels=128, size=32, kernel=1, stride=2, padding=0
    ),
    Layer(name="MobileNetV1", in_channels=64, out_channels=64, size=32, stride=2, groups=64),
    Layer(name="MobileNetV1", in_channels=512, out_channels=512, size=4, groups=512),
    Layer(name="MobileNetV1", in_channels=64, out_channels=128, size=16, kernel=1, padding=0),
    Layer(name="MobileNetV1", in_channels=512, out_channels=512, size=4, kernel=1, padding=0),
)
QUICK = (LAYERS[5], LAYERS[7], LAYERS[12])


def run(quick: bool = False) -> list[Row]:
    """Return the times of all layers in each setting; ours must equal exact sums of integers bit for bit."""
    peer_notes.update(describe_peers())
    return [
        row
        for setting in settings()
        for row in rows_of(setting, "benchmarks.conv:rows", quick=quick)
    ]


def rows(kernel: str, quick: bool) -> list[Row]:
    """Return this process's rows. `limit` is the time at the best rate that any layer reached in the same function.

    A limit is given only if products are computed one by one: Winograd needs fewer, and a depthwise convolution is not
    a matrix product.
    """
    import torch

    one_thread(torch)
    engine = _int8.Engine(kernel=kernel)
    measured = []
    for layer in QUICK if quick else LAYERS:
        tensors = _Tensors(torch, layer)
        # A training step does not compute the gradient of its images, the input of a first layer.
        inner = () if layer.in_channels <= _CHANNELS_OF_IMAGES else (_input_gradient,)
        for function in (_forward, *inner, _weight_gradient):
            compared = function(tensors, engine)
            calls = [compared.call, *(peer.call for peer in compared.peers)]
            times = measure_interleaved(calls, repeats=3 if quick else 15)
            measured.append(
                _Measured(
                    layer, compared, compared.plan.algorithm(engine, compared.function), times
                )
            )
    return [row for each in measured for row in each.rows(kernel, measured)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    """Another library's function, and whether its result is right."""

    name: str
    call: Callable[[], Any]
    right: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """One of the three functions of a layer: ours, whether ours is right, and its peers."""

    function: str
    plan: _int8.Convolution
    call: Callable[[], Any]
    right: bool
    peers: list[_Peer]


@dataclass(frozen=True, slots=True)
class _Measured:
    """A comparison with its times: ours, then those of the peers in their order."""

    layer: Layer
    compared: _Comparison
    algorithm: str
    times: list[Timing]

    @property
    def one_by_one(self) -> bool:
        """Whether every product is computed, as in a product of matrices."""
        return self.algorithm == "direct" and self.layer.groups == 1

    def rows(self, kernel: str, everything: Sequence["_Measured"]) -> list[Row]:
        """Return a row for each peer."""
        function, ours = self.compared.function, self.times[0]
        limit = None
        if self.one_by_one:
            alike = [
                each
                for each in everything
                if each.one_by_one and each.compared.function == function
            ]
            s_per_product = min(
                each.times[0].median_s / each.layer.num_products() for each in alike
            )
            limit = self.layer.num_products() * s_per_product * 1e3
        return [
            less_is_better(
                f"{kernel}: {function.replace('_', ' ')}, {self.layer.case}, {self.algorithm}",
                ours.median_s * 1e3,
                peer.name if peer.right else f"{peer.name}, whose result is wrong",
                time.median_s * 1e3,
                "ms",
                limit=limit,
                ok=self.compared.right,
            )
            for peer, time in zip(self.compared.peers, self.times[1:], strict=True)
        ]


class _Tensors:
    """The operands of a layer as integers: for us in int8, for torch in FP32, and in float64 for exact results."""

    def __init__(self, torch: Any, layer: Layer) -> None:
        self.torch, self.layer = torch, layer
        rng = np.random.default_rng(0)
        weight_shape = (
            layer.out_channels,
            layer.in_channels // layer.groups,
            layer.kernel,
            layer.kernel,
        )
        dy_shape = (BATCH, layer.out_channels, layer.out_size, layer.out_size)
        self.x = rng.integers(
            0, 128, (BATCH, layer.in_channels, layer.size, layer.size), dtype=np.int8
        )
        self.weight = rng.integers(-127, 128, weight_shape, dtype=np.int8)
        self.dy = rng.integers(-127, 128, dy_shape, dtype=np.int8)
        self.bias = rng.integers(-1000, 1000, layer.out_channels, dtype=np.int32)
        self.plan = _int8.Convolution(
            BATCH, layer.size, layer.size, layer.in_channels, layer.out_channels, layer.kernel, layer.kernel,
            layer.stride, layer.stride, layer.padding, layer.padding, layer.groups,
        )  # fmt: skip
        self.x8, self.dy8 = _hwnc(self.x), _hwnc(self.dy)
        self.weight8 = _weight_layout(self.weight)
        self.bias32 = np.zeros(self.dy8.shape[3], dtype=np.int32)
        self.bias32[: layer.out_channels] = self.bias

    def real(self, array: npt.NDArray[Any], dtype: Any) -> Any:
        """Return an (n, c, h, w) array as a channels-last tensor of `dtype`."""
        return (
            self.torch.from_numpy(array)
            .to(dtype)
            .contiguous(memory_format=self.torch.channels_last)
        )

    def convolution(self, dtype: Any) -> Callable[[], Any]:
        """Return torch's forward convolution of the operands in `dtype`."""
        layer, x, weight = self.layer, self.real(self.x, dtype), self.real(self.weight, dtype)
        bias = self.torch.from_numpy(self.bias).to(dtype)
        conv2d = self.torch.nn.functional.conv2d
        return lambda: conv2d(x, weight, bias, layer.stride, layer.padding, groups=layer.groups)

    def gradient(self, dtype: Any, index: int) -> Callable[[], Any]:
        """Return torch's gradient of the input (index 0) or of the weight (1) in `dtype`."""
        layer = self.layer
        operands = [self.real(array, dtype) for array in (self.dy, self.x, self.weight)]
        strides, paddings = [layer.stride] * 2, [layer.padding] * 2
        wanted = [index == 0, index == 1, False]
        backward = self.torch.ops.aten.convolution_backward
        return lambda: backward(
            *operands,
            [layer.out_channels],
            strides,
            paddings,
            [1, 1],
            False,
            [0, 0],
            layer.groups,
            wanted,
        )[index]

    def fp32_peer(self, call: Callable[[], Any], exact: npt.NDArray[np.float64]) -> _Peer:
        """Return torch's FP32 function; its result may differ by rounding."""
        error = float(np.abs(call().numpy() - exact).max())
        return _Peer(name="torch FP32", call=call, right=error <= 1e-5 * float(np.abs(exact).max()))


def _forward(tensors: _Tensors, engine: _int8.Engine) -> _Comparison:
    exact = tensors.convolution(tensors.torch.float64)().numpy()
    accumulators = _hwnc(exact.astype(np.int32))
    plan, workspace = tensors.plan, np.empty(tensors.plan.workspace_bytes(engine), np.uint8)
    wide, out = np.empty_like(accumulators), np.empty(accumulators.shape, np.int8)
    operands = engine, tensors.x8, tensors.weight8, tensors.bias32
    plan.forward(*operands, wide, workspace, True)
    rectified = np.maximum(accumulators, 0)
    shift = max(1, int(rectified.max()).bit_length() - 7)

    def ours() -> None:
        plan.forward(*operands, out, workspace, True, shift, 0, True)

    ours()
    nearest = np.minimum((rectified + (1 << (shift - 1))) >> shift, 127)
    right = np.array_equal(wide, accumulators) and np.array_equal(out, nearest)
    fp32 = tensors.fp32_peer(tensors.convolution(tensors.torch.float32), exact)
    peers = [fp32, *_quantised_peers(tensors, exact, shift)]
    return _Comparison(function="forward", plan=plan, call=ours, right=right, peers=peers)


def _quantised_peers(
    tensors: _Tensors, exact: npt.NDArray[np.float64], shift: int
) -> Iterator[_Peer]:
    """Yield inference with prepacked weights: uint8 in and out, bias, ReLU and rounding (half to even) fused."""
    torch, layer = tensors.torch, tensors.layer
    # It is deprecated, but there is no other way to these kernels.
    warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
    expected = np.clip(np.rint(np.ldexp(exact, -shift)), 0, 255)
    images = torch.quantize_per_tensor(tensors.real(tensors.x, torch.float32), 1.0, 0, torch.quint8)
    weight = torch.quantize_per_tensor(
        tensors.real(tensors.weight, torch.float32), 1.0, 0, torch.qint8
    )
    for name, engine in (("FBGEMM", "fbgemm"), ("oneDNN", "onednn")):
        if engine not in torch.backends.quantized.supported_engines:
            continue
        torch.backends.quantized.engine = engine
        packed = torch.ops.quantized.conv2d_prepack(
            weight, torch.from_numpy(tensors.bias).float(), [layer.stride] * 2, [layer.padding] * 2, [1, 1],
            layer.groups,
        )  # fmt: skip

        def call(packed: Any = packed) -> Any:
            return torch.ops.quantized.conv2d_relu(images, packed, float(2**shift), 0)

        yield _Peer(
            name=f"{name} int8",
            call=call,
            right=np.array_equal(call().int_repr().numpy(), expected),
        )


def _input_gradient(tensors: _Tensors, engine: _int8.Engine) -> _Comparison:
    exact = tensors.gradient(tensors.torch.float64, 0)().numpy()
    accumulators = _hwnc(exact.astype(np.int32))
    plan, workspace = tensors.plan, np.empty(tensors.plan.workspace_bytes(engine), np.uint8)
    wide, out, expected = np.empty_like(accumulators), *np.empty((2, *accumulators.shape), np.int8)
    shift = max(1, int(np.abs(accumulators).max()).bit_length() - 7)
    plan.input_gradient(engine, tensors.dy8, tensors.weight8, wide, workspace)

    def ours() -> None:
        plan.input_gradient(
            engine, tensors.dy8, tensors.weight8, out, workspace, shift, _PSEUDO_STOCHASTIC
        )

    ours()
    _int8.requantise(
        _int8.Engine(kernel="portable"), accumulators, expected, shift, _PSEUDO_STOCHASTIC
    )
    right = np.array_equal(wide, accumulators) and np.array_equal(out, expected)
    peer = tensors.fp32_peer(tensors.gradient(tensors.torch.float32, 0), exact)
    return _Comparison(function="input_gradient", plan=plan, call=ours, right=right, peers=[peer])


def _weight_gradient(tensors: _Tensors, engine: _int8.Engine) -> _Comparison:
    exact = tensors.gradient(tensors.torch.float64, 1)().numpy()
    plan, workspace = tensors.plan, np.empty(tensors.plan.workspace_bytes(engine), np.uint8)
    out = np.empty(tensors.weight8.shape, np.int32)

    def ours() -> None:
        plan.weight_gradient(engine, tensors.x8, tensors.dy8, out, workspace, True)

    ours()
    right = np.array_equal(out, _weight_layout(exact.astype(np.int32)))
    peer = tensors.fp32_peer(tensors.gradient(tensors.torch.float32, 1), exact)
    return _Comparison(function="weight_gradient", plan=plan, call=ours, right=right, peers=[peer])


def _hwnc(nchw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return (n, c, h, w) in the engine's order, (h, w, n, channel stride)."""
    return _padded(nchw.transpose(2, 3, 0, 1))


def _weight_layout(oihw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return (out, in, kh, kw) in the engine's order, (kh, kw, in, stride of out)."""
    return _padded(oihw.transpose(2, 3, 1, 0))


def _padded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy whose last dimension is filled up with zeros to the engine's block of channels."""
    padded = np.zeros((*array.shape[:-1], _int8.channel_stride(array.shape[-1])), dtype=array.dtype)
    padded[..., : array.shape[-1]] = array
    return padded
