// The specification of the integer engine: plain loops over one element at a time, sums in 64 bits. Every
// optimised path returns the same bits; the tests and the self-test at first use compare them with these.
//
// Layouts are those of shape.h. "cs" is a channel stride. Accumulators are int32; a function throws
// std::overflow_error where the exact value does not fit. Every function that takes a Requantise returns the
// largest magnitude that reached its rounding step (after ReLU and mask), and writes nothing if `out` is null.
#pragma once

#include <cstddef>
#include <cstdint>

#include "descent.h"
#include "random24.h"
#include "row_operands.h"
#include "shape.h"

namespace socflower::int8::reference {

// F14. |acc| >> shift, plus the carry of the rounding mode, saturated at 127, with the sign of acc.
// kPseudoStochastic splits the `shift` bits that fall off into a high and a low part of shift/2 bits (the high
// part has one more when shift is odd, and the low part is doubled then); the carry is high > low.
std::int8_t round_shift(std::int32_t acc, int shift, Rounding rounding);

// F14. max(0, bit length of max_magnitude - bits): how far to shift so that `bits` bits of magnitude remain.
int shift_for(std::uint32_t max_magnitude, int bits);

// out[m,n] = sum_k lhs[m,k] * rhs[n,k]; all row-major.
void gemm(const std::int8_t* lhs, const std::int8_t* rhs, std::int32_t* out, int rows, int cols, int depth);

// acc (out_h,out_w,batch,cs) = bias + correlation of x with weight. bias (cs) at the accumulator's scale, or null.
void convolution(const ConvShape& shape, const std::int8_t* x, const std::int8_t* weight,
                 const std::int32_t* bias, std::int32_t* acc);

// acc (in_h,in_w,batch,cs) = gradient of the convolution with respect to x.
void convolution_input_gradient(const ConvShape& shape, const std::int8_t* dy, const std::int8_t* weight,
                                std::int32_t* acc);

// acc (kernel_h,kernel_w,in_c/groups,cs of out_c) = gradient with respect to the weight, summed over the batch.
void convolution_weight_gradient(const ConvShape& shape, const std::int8_t* x, const std::int8_t* dy,
                                 std::int32_t* acc);

std::uint32_t requantise(const std::int32_t* acc, std::int8_t* out, std::size_t size, const Requantise& how);

// (a << shift_a) + (b << shift_b), requantised: residual addition of tensors of different exponents. Shifts
// are at most 20.
std::uint32_t add(const std::int8_t* a, int shift_a, const std::int8_t* b, int shift_b, std::int8_t* out,
                  std::size_t size, const Requantise& how);

// scale[c] * x + offset[c], requantised: BatchNorm with given integer coefficients. |scale| < 2^22, |offset| < 2^29.
// x, out: (rows, cs).
std::uint32_t affine(const std::int8_t* x, const std::int32_t* scale, const std::int32_t* offset, std::int8_t* out,
                     std::size_t rows, int cs, const Requantise& how);

// scale_dy[c] * dy + scale_x[c] * x + offset[c], requantised: BatchNorm's input gradient. Bounds as in affine.
// `gate` (rows, cs) or null: where it is not positive, dy counts as 0 (the ReLU behind the BatchNorm).
std::uint32_t affine_gradient(const std::int8_t* dy, const std::int8_t* x, const std::int8_t* gate,
                              const std::int32_t* scale_dy, const std::int32_t* scale_x,
                              const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                              const Requantise& how);

// The same sums, rounded without bias: the magnitude, plus the number below 2^shift that the top `shift` (0..30) bits
// of dither32 are, shifted right; saturated at 127, with its sign. Row r of the share is `row` + r.
std::uint32_t affine_gradient_at_random(const std::int8_t* dy, const std::int8_t* x, const std::int8_t* gate,
                                        const std::int32_t* scale_dy, const std::int32_t* scale_x,
                                        const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                                        int shift, const Dither& dither, std::size_t row);

// v = (acc * by_image[image]) * scale[c] + offset[c] + other * other_by_image[image], every operation in float32, and
// after ReLU if `relu`; `other` may be null. out = nearest int8 of v * inverse[image], half to even, saturated at
// +-127, and after a ReLU at least 1 where v > 0, so that it shows where gradients pass; or null. largest[image] = the
// maximum of |v|; or null. acc, out: (rows, cs); row r is of image r % batch. acc is int8 or int32.
template <typename T>
void affine_real(const T* acc, const float* by_image, const float* scale, const float* offset,
                 const std::int8_t* other, const float* other_by_image, std::int8_t* out, const float* inverse,
                 float* largest, std::size_t rows, int cs, int batch, bool relu);

// x = nearest int8 of acc * own_scale[c] + own_offset[c]; out = that of (acc * scale[c] + offset[c]) * inverse, after ReLU
// and at least 1 as above if `relu`. acc, x, out: (rows, cs).
void normalise(const std::int32_t* acc, const Normalisation& by, std::int8_t* x, std::int8_t* out, std::size_t rows,
               int cs, bool relu);

// acc * inverse[c] in float32, rounded up if random24 of the element's number is below 2^24 times its fraction, else
// down; saturated at +-127. Row r of the share is `row` + r.
void round_at_random(const std::int32_t* acc, const float* inverse, std::int8_t* out, std::size_t rows, int cs,
                     const Dither& dither, std::size_t row);

// sum_a[r] = sum over channels of weight * a, sum_ab[r] = that of weight * a * b; whole weights below 2^21.
void row_sums(const std::int8_t* a, const std::int8_t* b, const double* weight, double* sum_a, double* sum_ab,
              std::size_t rows, int cs);

// scale * x + rint(beta[c] - scale * mean[r]) with scale = rint(gamma[c] * slope[r]), requantised: LayerNorm with given
// statistics. |scale| < 2^22, |offset| < 2^29. x, out: (rows, cs).
std::uint32_t row_affine(const std::int8_t* x, const RowAffine& by, std::int8_t* out, std::size_t rows, int cs,
                         const Requantise& how);

// rint(gamma[c] * gain[r]) * dy + scale_x[r] * x + counted[c] * offset[r], requantised: gradient of a LayerNorm. Bounds
// as above.
std::uint32_t row_affine_gradient(const std::int8_t* dy, const std::int8_t* x, const RowAffineGradient& by,
                                  std::int8_t* out, std::size_t rows, int cs, const Requantise& how);

// terms[c] = sum over rows of rint((dy * x - dy * mean[r]) * slope[r]), each below 2^36; sum_dy[c] = that of dy.
void row_scale_gradient(const std::int8_t* dy, const std::int8_t* x, const double* slope, const double* mean,
                        std::int64_t* terms, std::int64_t* sum_dy, std::size_t rows, int cs);

// Probabilities of 14 bits, requantised. powers[d], d = 0..254, is that of an element d below its row's largest, at
// most 2^20; the quotient of a power and their sum is rounded half up.
std::uint32_t softmax(const std::int8_t* x, const std::int32_t* powers, std::int8_t* out, std::size_t rows,
                      int channels, const Requantise& how);

// p * (dy * 2^up - sum over the row of p * dy) * factor; the largest magnitude, and, after `drop` bits are rounded
// off half away from zero, requantised. up <= 14, factor <= 2^15, p >= 0.
double softmax_gradient_largest(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by,
                                std::size_t rows, int cs);
std::uint32_t softmax_gradient(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by,
                               std::int8_t* out, std::size_t rows, int cs, const Requantise& how);

// acc = acc * factor, without its last `drop` bits, rounded half away from zero. 0 <= factor <= 2^20.
void scale_sums(std::int32_t* acc, std::size_t size, int factor, int drop);

// table[x as uint8] * dy, requantised; |table| <= 2^23.
std::uint32_t table_gradient(const std::int8_t* dy, const std::int8_t* x, const std::int32_t* table,
                             std::int8_t* out, std::size_t size, const Requantise& how);

// sum_a[c] = sum over rows of a, sum_ab[c] = sum over rows of a*b (a = b gives squares). `gate` as above, for a.
void channel_sums(const std::int8_t* a, const std::int8_t* b, const std::int8_t* gate, std::int64_t* sum_a,
                  std::int64_t* sum_ab, std::size_t rows, int cs);

// largest = maximum of |a| over the rows of each channel, where gate (may be null) is positive.
void channel_largest(const std::int8_t* a, const std::int8_t* gate, std::int32_t* largest, std::size_t rows, int cs);
void channel_largest32(const std::int32_t* acc, std::int32_t* largest, std::size_t rows, int cs);

// Of each channel: sum and sum of squares of acc / 2^shift, rounded to nearest (half up), of magnitude at most 2^21;
// least and largest acc.
void channel_moments(const std::int32_t* acc, int shift, const ChannelMoments& to, std::size_t rows, int cs);

// y = maximum over the window, padding left out; argmax (as y) = index of the first tap that attains it.
void max_pool(const PoolShape& shape, const std::int8_t* x, std::int8_t* y, std::uint8_t* argmax);

// Sum over the windows that chose an input element of their dy, requantised (one window: shift 0 is exact).
std::uint32_t max_pool_gradient(const PoolShape& shape, const std::int8_t* dy, const std::uint8_t* argmax,
                                std::int8_t* dx, const Requantise& how);

// multiplier * sum over the window (padding counts as 0), requantised.
std::uint32_t average_pool(const PoolShape& shape, const std::int8_t* x, std::int32_t multiplier, std::int8_t* y,
                           const Requantise& how);
std::uint32_t average_pool_gradient(const PoolShape& shape, const std::int8_t* dy, std::int32_t multiplier,
                                    std::int8_t* dx, const Requantise& how);

// weight = saturate(weight - round_shift(gradient, shift)), at +-127: NITI's integer update.
void update_weight(std::int8_t* weight, const std::int32_t* gradient, std::size_t size, int shift,
                   Rounding rounding);

// torch.optim.SGD in float32: g = float(gradient * scale[channel], exactly) * inverse, + weight_decay * value; then, unless
// velocity is null, velocity = momentum * velocity + g and g = velocity; value = value - learning_rate * g.
// Returns the largest magnitude of the values; infinity if any is not finite.
float descend(float* values, float* velocity, const std::int32_t* gradient, const float* scale, std::size_t rows,
              int cs, const Descent& by);

// out (h,w,batch,cs) = nearest int8 of x / 2^exponent (half to even), saturated at +-127, from float32
// images (batch,channels,h,w). NaN becomes 0; so do the channels of padding.
void quantise_images(const float* x, std::int8_t* out, int batch, int channels, int h, int w, int exponent);

// Integer softmax and cross-entropy (NITI §3.3). logits (batch, cs) with exponent; labels in [0, classes).
// Per row: base-2 exponentials of the logits in fixed point with 20 fractional bits (a shift, and a table for
// the fraction where NITI drops it), normalised to 2^11, minus 2^11 at the label; dlogits is that value
// requantised by shift 4 with `rounding`. Its exponent is -7.
void softmax_gradient(const std::int8_t* logits, int exponent, const std::int32_t* labels, std::int8_t* dlogits,
                      int batch, int classes, Rounding rounding);

}  // namespace socflower::int8::reference
