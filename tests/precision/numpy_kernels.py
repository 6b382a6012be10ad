"""The integer kernels in NumPy, written from their contracts (native/int8/shape.h, reference.h): exact and slow.

Tensors here are (height, width, batch, channels) int64 without padding channels; `padded` and `unpadded` translate.
Products run in float64 BLAS, where sums below 2^53 are exact.
"""

import numpy as np

NEAREST = 0
PSEUDO_STOCHASTIC = 1


def stride_of(channels):
    return (channels + 15) // 16 * 16


def padded(array, dtype=np.int8):
    """Return `array` with zero channels up to the stride."""
    out = np.zeros((*array.shape[:-1], stride_of(array.shape[-1])), dtype)
    out[..., : array.shape[-1]] = array
    return out


def unpadded(array, channels):
    """Return the real channels as int64; the others must be zero."""
    assert not array[..., channels:].any()
    return array[..., :channels].astype(np.int64)


def random_tensor(rng, shape, low=-127, high=127):
    return rng.integers(low, high, shape, endpoint=True)


def exact_product(lhs, rhs):
    return np.rint(lhs.astype(np.float64) @ rhs.astype(np.float64)).astype(np.int64)


def round_shift(acc, shift, rounding):
    """Return acc / 2^shift as integers of at most 127: half away from zero, or truncation plus NITI's carry."""
    magnitude = np.abs(np.asarray(acc, np.int64))
    if rounding == NEAREST:
        rounded = (2 * magnitude + 2**shift) // 2 ** (shift + 1)
    else:
        fallen = magnitude % 2**shift
        low_bits = shift // 2
        high = fallen // 2**low_bits
        low = fallen % 2**low_bits
        rounded = magnitude // 2**shift + (high > low * 2 ** (shift % 2))
    return np.sign(acc) * np.minimum(rounded, 127)


def kept(acc, relu=False, mask=None):
    """Return what ReLU and mask leave of accumulators."""
    acc = np.maximum(acc, 0) if relu else acc
    return acc if mask is None else np.where(mask > 0, acc, 0)


def largest_magnitude(acc):
    return int(np.abs(acc).max()) if np.size(acc) else 0


def shift_for(largest, bits=7):
    return max(0, len(f"{largest:b}") - bits)


def taps(array, kernel, stride, padding, dilation=(1, 1)):
    """Yield (kh, kw, window): the pixels of (h, w, ...) under a tap for every output pixel, zeros outside."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    height, width = array.shape[:2]
    out_h = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1
    out_w = (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    around = np.zeros((height + 2 * ph, width + 2 * pw, *array.shape[2:]), array.dtype)
    around[ph : ph + height, pw : pw + width] = array
    for h in range(kh):
        for w in range(kw):
            top, left = h * dh, w * dw
            yield h, w, around[top : top + sh * out_h : sh, left : left + sw * out_w : sw]


def spread(contributions, kernel, stride, padding, height, width, dilation=(1, 1)):
    """Return the transpose of `taps`: what contributions[kh][kw], one per output pixel, add up to per input pixel."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    first = contributions(0, 0)
    out_h, out_w = first.shape[:2]
    around = np.zeros(
        (height + 2 * ph + dh * kh, width + 2 * pw + dw * kw, *first.shape[2:]), np.int64
    )
    for h in range(kh):
        for w in range(kw):
            top, left = h * dh, w * dw
            around[top : top + sh * out_h : sh, left : left + sw * out_w : sw] += contributions(
                h, w
            )
    return around[ph : ph + height, pw : pw + width]


def group_slices(in_channels, out_channels, groups):
    """Yield the input and output channels of each group."""
    per_in = in_channels // groups
    per_out = out_channels // groups
    for g in range(groups):
        yield slice(g * per_in, (g + 1) * per_in), slice(g * per_out, (g + 1) * per_out)


def convolution(x, weight, *, stride=(1, 1), padding=(0, 0), groups=1, dilation=(1, 1)):
    """Return the accumulators of x (h, w, n, in) with weight (kh, kw, in / groups, out)."""
    out_channels = weight.shape[3]
    acc = None
    for h, w, window in taps(x, weight.shape[:2], stride, padding, dilation):
        if acc is None:
            acc = np.zeros((*window.shape[:3], out_channels), np.int64)
        for ins, outs in group_slices(x.shape[3], out_channels, groups):
            acc[..., outs] += exact_product(window[..., ins], weight[h, w][:, outs])
    return acc


def input_gradient(
    dy, weight, in_shape, *, stride=(1, 1), padding=(0, 0), groups=1, dilation=(1, 1)
):
    """Return the gradient with respect to x of shape (h, w, n, in)."""

    def contribution(h, w):
        part = np.zeros((*dy.shape[:3], in_shape[3]), np.int64)
        for ins, outs in group_slices(in_shape[3], dy.shape[3], groups):
            part[..., ins] = exact_product(dy[..., outs], weight[h, w][:, outs].T)
        return part

    return spread(
        contribution, weight.shape[:2], stride, padding, in_shape[0], in_shape[1], dilation
    )


def weight_gradient(x, dy, kernel, *, stride=(1, 1), padding=(0, 0), groups=1, dilation=(1, 1)):
    """Return the gradient with respect to the weight, (kh, kw, in / groups, out)."""
    gradient = np.zeros((*kernel, x.shape[3] // groups, dy.shape[3]), np.int64)
    for h, w, window in taps(x, kernel, stride, padding, dilation):
        for ins, outs in group_slices(x.shape[3], dy.shape[3], groups):
            left = window[..., ins].reshape(-1, x.shape[3] // groups)
            gradient[h, w][:, outs] = exact_product(left.T, dy[..., outs].reshape(len(left), -1))
    return gradient


def max_pool(x, kernel, stride, padding):
    """Return maxima and the index of the first tap that attains each; padding never does."""
    best = chosen = None
    inside = np.ones(x.shape[:2], bool)
    positions = list(taps(inside, kernel, stride, padding))
    for (h, w, window), (_, _, valid) in zip(
        taps(x, kernel, stride, padding), positions, strict=True
    ):
        candidate = np.where(valid[..., None, None], window, -1000)
        if best is None:
            best = np.full_like(candidate, -999)
            chosen = np.zeros(candidate.shape, np.int64)
        better = candidate > best
        best = np.where(better, candidate, best)
        chosen = np.where(better, h * kernel[1] + w, chosen)
    return best, chosen


def max_pool_gradient(dy, chosen, kernel, stride, padding, height, width):
    return spread(
        lambda h, w: np.where(chosen == h * kernel[1] + w, dy, 0),
        kernel,
        stride,
        padding,
        height,
        width,
    )


def window_sums(x, kernel, stride, padding):
    return sum(window for _, _, window in taps(x, kernel, stride, padding))


def window_sums_gradient(dy, kernel, stride, padding, height, width):
    return spread(lambda h, w: dy, kernel, stride, padding, height, width)


def quantise(real, exponent):
    """Return the nearest integers of real / 2^exponent, half to even, within +-127; NaN counts as 0."""
    return np.clip(
        np.nan_to_num(np.rint(real.astype(np.float64) / 2.0**exponent), nan=0.0), -127, 127
    ).astype(np.int64)


def softmax_gradient(logits, exponent, labels, rounding):
    """Return (batch, classes) softmax - one-hot in units of 2^-7, in Python integers (reference.h)."""
    fraction_bits = 20
    one = 2048
    log2_e = 47274
    table = [round(2.0 ** (i / 64) * 2**fraction_bits) for i in range(64)]
    rows = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        powers = []
        for logit in row:
            power_q15 = (logit - max(row)) * log2_e
            power_q15 = (
                power_q15 << min(exponent, 24) if exponent >= 0 else power_q15 >> min(-exponent, 40)
            )
            whole, fraction = divmod(power_q15, 2**15)
            powers.append(table[fraction * 64 // 2**15] >> -whole if -whole <= fraction_bits else 0)
        total = sum(powers)
        probabilities = [(2 * power * one + total) // (2 * total) for power in powers]
        rows.append([p - (one if c == label else 0) for c, p in enumerate(probabilities)])
    return round_shift(np.array(rows), 4, rounding)
