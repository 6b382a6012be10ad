"""The feature codec, against PyTorch's quantised tensors at 8 bits and NumPy with `packbits` at 4 and 2.

A case encodes a batch of features (float32, behind a ReLU) to bytes and decodes them again, in one thread; finding
the least and the largest value is included on both sides. The limit is the rate of copying the features.
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.harness import Row, measure_interleaved, more_is_better
from socflower.edgecloud.half_protocols import Array
from socflower.wire.codecs.quantisation import decode, encode

SHAPES = {
    "LeNet-5, behind the first pooling, batch 64": (64, 6, 12, 12),
    "VGG-11 on CIFAR-10, behind the first pooling, batch 32": (32, 64, 16, 16),
    "ResNet-18 on CIFAR-10, behind the first stage, batch 32": (32, 64, 32, 32),
}
_TORCH = "torch.quantize_per_tensor, int_repr, dequantize"
_PACKBITS = "numpy, packbits and unpackbits"


def run(quick: bool = False) -> list[Row]:
    """Return a row per shape and width; all answers, ours and the peers', may be off by half a step."""
    num_threads = torch.get_num_threads()
    # NumPy uses one thread, and an edge would spend no more on coding: its other cores train.
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # PyTorch warns that quantised tensors will move to torchao.
            warnings.simplefilter("ignore", UserWarning)
            return [
                _compare(case, shape, bits, quick)
                for case, shape in SHAPES.items()
                for bits in (8, 4, 2)
            ]
    finally:
        torch.set_num_threads(num_threads)


def _compare(case: str, shape: tuple[int, ...], bits: int, quick: bool) -> Row:
    features = np.maximum(np.random.default_rng(bits).standard_normal(shape, dtype=np.float32), 0)
    peer, theirs = (_TORCH, _by_torch) if bits == 8 else (_PACKBITS, _by_packbits)
    half_step = float(features.max() - features.min()) / (2**bits - 1) / 2

    def ours() -> Array:
        return decode(encode(features, bits))

    def right(coded: Callable[[], Array]) -> bool:
        return bool(np.abs(coded() - features).max() <= half_step * (1 + 1e-3))

    functions: list[Callable[[], object]] = [ours, lambda: theirs(features, bits), features.copy]
    timings = measure_interleaved(functions, repeats=5 if quick else 25, warmup=2)
    ours_gb, theirs_gb, copied_gb = (features.nbytes / timing.median_s / 1e9 for timing in timings)
    return more_is_better(
        f"{case}, {bits} bits",
        ours_gb,
        peer,
        theirs_gb,
        "GB/s",
        limit=copied_gb,
        ok=right(ours) and right(lambda: theirs(features, bits)),
    )


def _by_torch(features: Array, bits: int) -> Array:
    tensor = torch.from_numpy(features)
    low, high = torch.aminmax(tensor)
    step = float(high - low) / (2**bits - 1)
    zero_point = round(-float(low) / step)
    sent = torch.quantize_per_tensor(tensor, step, zero_point, torch.quint8).int_repr()
    come = torch._make_per_tensor_quantized_tensor(sent, step, zero_point)
    decoded: Array = come.dequantize().numpy()
    return decoded


def _by_packbits(features: Array, bits: int) -> Array:
    low = features.min()
    step = (features.max() - low) / (2**bits - 1)
    levels = np.rint((features.reshape(-1) - low) / step).astype(np.uint8)
    sent = np.packbits(np.unpackbits(levels[:, None], axis=1)[:, -bits:])
    come = np.unpackbits(sent, count=levels.size * bits).reshape(-1, bits)
    decoded: Array = (low + np.packbits(come, axis=1)[:, 0] / 2 ** (8 - bits) * step).astype(
        np.float32
    )
    return decoded.reshape(features.shape)
