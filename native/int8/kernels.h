// What a kernel path provides: the inner blocks that are written for one instruction set. Everything around
// them (which rows meet which taps, packing order, threads) is in products.cc and is the same on every path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "descent.h"
#include "random24.h"
#include "row_operands.h"
#include "shape.h"

namespace socflower::int8 {

// One block of a segmented matrix product,
//
//   out[r, c] = init[c] + sum over segments s, k-groups k, e < group of
//               lhs_s[r, k, e] * rhs_s[k, c, e],            r < rows, c < cols of the product,
//
// modulo 2^32. A segment is one kernel tap (forward, input gradient), one pixel (weight gradient) or the whole
// matrix (GEMM). Element (r, k, e) of a left operand lies at
//   lhs[s] + r * lhs_row_stride + k * lhs_k_stride (bytes), then e elements on;
// element (k, c, e) of a right operand at rhs[s] + (k * cols + c) * group elements: packed, contiguous.
struct BlockArgs {
  int num_segments;
  const void* const* lhs;
  const void* const* rhs;
  int k_groups;                   // per segment, at least 1
  std::ptrdiff_t lhs_row_stride;  // bytes
  std::ptrdiff_t lhs_k_stride;    // bytes
  const std::int32_t* init;       // `cols` values, or null for zeros
  std::int32_t* out;              // row-major, always `cols` wide
  std::ptrdiff_t out_stride;      // elements between rows
};

enum class Element { kInt8, kInt16, kOffsetUint8 };

// One way of multiplying on a path.
struct Product {
  Element lhs;      // kOffsetUint8: left operands are x + 128 as uint8, and the caller subtracts
                    // 128 * (sum of the right column) through `init`
  Element rhs;      // kInt8 or kInt16
  int group;        // depth elements that lie side by side: 2, 4 or 8
  int rows, cols;   // largest block; cols is a multiple of 16
  void (*block)(const BlockArgs& args, int rows);  // 1 <= rows <= Product::rows
  // The same, quicker, for right operands and `init` whose columns from 8 on are zeros; or null.
  int narrow_rows = 0;
  void (*narrow)(const BlockArgs& args, int rows) = nullptr;  // 1 <= rows <= narrow_rows

  int lhs_bytes() const { return lhs == Element::kInt16 ? 2 : 1; }
  int rhs_bytes() const { return rhs == Element::kInt16 ? 2 : 1; }
};

// Where the exact bits are defined: reference.h, function of the same name, unless said otherwise.
struct Path {
  const char* name;
  Product general;      // int8 by int8
  Product activations;  // 0..127 by int8: what follows a ReLU
  Product wide;         // int16 by int16, modulo 2^32 (Winograd)

  // dst[i] = src[i] as int16; dst[i] = src[i] + 128 as uint8.
  void (*widen)(const std::int8_t* src, std::int16_t* dst, std::size_t size);
  void (*offset)(const std::int8_t* src, std::uint8_t* dst, std::size_t size);

  // Right operand of a product whose depth runs along the rows of src (depth, src_stride):
  // dst[panel][k-group][c][e] = src[k * group + e][panel * width + c], zero beyond depth and cols.
  // `element` and `group` as in Product; width is any number of columns per panel. With kOffsetUint8 the
  // stored value is src + 128, and 128 beyond the edges (a zero).
  void (*pack_columns)(const std::int8_t* src, std::ptrdiff_t src_stride, int depth, int cols, int width, int group,
                       Element element, void* dst);
  // The same for a src whose depth runs along its columns (cols, src_stride):
  // dst[panel][k-group][c][e] = src[panel * width + c][k * group + e].
  void (*pack_rows)(const std::int8_t* src, std::ptrdiff_t src_stride, int depth, int cols, int width, int group,
                    Element element, void* dst);

  // A tile on its way out: rows x cols (a multiple of 16), strides in elements. how.mask has out's stride.
  // Returns the largest magnitude; `out` may be null.
  std::uint32_t (*requantise_tile)(const std::int32_t* acc, std::ptrdiff_t acc_stride, std::int8_t* out,
                                   std::ptrdiff_t out_stride, int rows, int cols, const Requantise& how);
  // The same without rounding: out = acc after ReLU and mask, as int32. mask_stride in elements.
  std::uint32_t (*store_tile)(const std::int32_t* acc, std::ptrdiff_t acc_stride, std::int32_t* out,
                              std::ptrdiff_t out_stride, int rows, int cols, bool relu, const std::int8_t* mask,
                              std::ptrdiff_t mask_stride);
  // out += acc, returning the largest magnitude of the sums (meaningful after the last addition).
  std::uint32_t (*add_tile)(const std::int32_t* acc, std::ptrdiff_t acc_stride, std::int32_t* out,
                            std::ptrdiff_t out_stride, int rows, int cols);

  // Element by element; sizes are multiples of 16.
  std::uint32_t (*add)(const std::int8_t* a, int shift_a, const std::int8_t* b, int shift_b, std::int8_t* out,
                       std::size_t size, const Requantise& how);
  std::uint32_t (*affine)(const std::int8_t* x, const std::int32_t* scale, const std::int32_t* offset,
                          std::int8_t* out, std::size_t rows, int cs, const Requantise& how);
  std::uint32_t (*affine_gradient)(const std::int8_t* dy, const std::int8_t* x, const std::int8_t* gate,
                                   const std::int32_t* scale_dy, const std::int32_t* scale_x,
                                   const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                                   const Requantise& how);
  std::uint32_t (*affine_gradient_at_random)(const std::int8_t* dy, const std::int8_t* x, const std::int8_t* gate,
                                             const std::int32_t* scale_dy, const std::int32_t* scale_x,
                                             const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                                             int shift, const Dither& dither, std::size_t row);
  // From the row of image `image` on; largest is raised, which has sixteen values for each image, of any order.
  void (*affine_real8)(const std::int8_t* acc, const float* by_image, const float* scale, const float* offset,
                       const std::int8_t* other, const float* other_by_image, std::int8_t* out, const float* inverse,
                       float* largest, std::size_t rows, int cs, int batch, int image, bool relu);
  void (*affine_real32)(const std::int32_t* acc, const float* by_image, const float* scale, const float* offset,
                      const std::int8_t* other, const float* other_by_image, std::int8_t* out, const float* inverse,
                      float* largest, std::size_t rows, int cs, int batch, int image, bool relu);
  void (*normalise)(const std::int32_t* acc, const Normalisation& by, std::int8_t* x, std::int8_t* out,
                    std::size_t rows, int cs, bool relu);
  // round_by_channel_at_random of layers.h, from row `row` of the share on.
  void (*round_at_random)(const std::int32_t* acc, const float* inverse, std::int8_t* out, std::size_t rows, int cs,
                          const Dither& dither, std::size_t row);
  void (*channel_sums)(const std::int8_t* a, const std::int8_t* b, const std::int8_t* gate, std::int64_t* sum_a,
                       std::int64_t* sum_ab, std::size_t rows, int cs);
  void (*channel_largest)(const std::int8_t* a, const std::int8_t* gate, std::int32_t* largest, std::size_t rows,
                          int cs);
  // The same of int32 of magnitudes below 2^31, without a gate.
  void (*channel_largest32)(const std::int32_t* acc, std::int32_t* largest, std::size_t rows, int cs);
  // sums[c] = sum over rows of src[r, c]; cols is a multiple of 16.
  void (*column_sums)(const std::int8_t* src, std::ptrdiff_t stride, int rows, int cols, std::int32_t* sums);
  void (*channel_moments)(const std::int32_t* acc, int shift, const ChannelMoments& to, std::size_t rows, int cs);

  // Rows of `cs` channels, each with numbers of its own (rows.h). All double arithmetic is exact or rounded as
  // reference.h says. sum_a, sum_ab: a number for each row. `scratch`: cs int32.
  void (*row_sums)(const std::int8_t* a, const std::int8_t* b, const double* weight, double* sum_a, double* sum_ab,
                   std::size_t rows, int cs);
  std::uint32_t (*row_affine)(const std::int8_t* x, const RowAffine& by, std::int8_t* out, std::size_t rows, int cs,
                              const Requantise& how);
  std::uint32_t (*row_affine_gradient)(const std::int8_t* dy, const std::int8_t* x, const RowAffineGradient& by,
                                       std::int8_t* out, std::size_t rows, int cs, const Requantise& how);
  // Adds to `terms` and `sum_dy` (cs each), which hold at most 2^14 rows exactly.
  void (*row_scale_gradient)(const std::int8_t* dy, const std::int8_t* x, const double* slope, const double* mean,
                             double* terms, double* sum_dy, std::size_t rows, int cs);
  std::uint32_t (*softmax)(const std::int8_t* x, const std::int32_t* powers, std::int8_t* out, std::size_t rows,
                           int channels, int cs, std::int32_t* scratch, const Requantise& how);
  double (*softmax_gradient_largest)(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by,
                                     std::size_t rows, int cs);
  std::uint32_t (*softmax_gradient)(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by,
                                    std::int8_t* out, std::size_t rows, int cs, const Requantise& how);
  // acc = acc * factor, `drop` bits rounded off half away from zero; factor of at most 20 bits.
  void (*scale_sums)(std::int32_t* acc, std::size_t size, int factor, int drop);
  std::uint32_t (*table_gradient)(const std::int8_t* dy, const std::int8_t* x, const std::int32_t* table,
                                  std::int8_t* out, std::size_t size, const Requantise& how);

  void (*update_weight)(std::int8_t* weight, const std::int32_t* gradient, std::size_t size, int shift,
                        Rounding rounding);
  // Returns the largest magnitude of the new values; infinity if any is not finite. velocity: null without momentum.
  // scale: one for each channel. out, as `quantise` of the new values makes it, or null.
  float (*descend)(float* values, float* velocity, const std::int32_t* gradient, const float* scale, std::int8_t* out,
                   std::size_t rows, int cs, const Descent& by);
  // dst[i] = nearest int8 of src[i] * scale, half to even, saturated at +-127.
  void (*quantise)(const float* src, std::int8_t* dst, std::size_t size, float scale);
  // dst[i] = src[i] * scale rounded up if random24(index + i, seed) / 2^24 is below its fraction, else down;
  // saturated at +-127, 0 for a NaN.
  void (*quantise_at_random)(const float* src, std::int8_t* dst, std::size_t size, float scale, std::uint32_t index,
                             std::uint32_t seed);

  // One output pixel of a pooling window: x[s] are `size` int8 of the valid taps, tap[s] their index. First
  // maximum wins.
  void (*max_of)(const std::int8_t* const* x, const std::uint8_t* tap, int num_taps, std::int8_t* y,
                 std::uint8_t* argmax, std::size_t size);
  // One input pixel: sum of dy[s] where argmax[s] equals tap[s]. num_windows may be 0 (zeros).
  std::uint32_t (*max_gradient_of)(const std::int8_t* const* dy, const std::uint8_t* const* argmax,
                                   const std::uint8_t* tap, int num_windows, std::int8_t* dx, std::size_t size,
                                   const Requantise& how);
  // multiplier * sum of x[s], requantised. num_taps may be 0 (zeros). how.mask belongs to this pixel.
  std::uint32_t (*sum_of)(const std::int8_t* const* x, int num_taps, std::int32_t multiplier, std::int8_t* y,
                          std::size_t size, const Requantise& how);

  // Depthwise: out[r, c] = init[c] + sum_s x[s][r, c] * w[s][c]; rows of cs, out row-major (rows, cs).
  void (*depthwise)(const std::int8_t* const* x, const std::int8_t* const* w, int num_taps,
                    const std::int32_t* init, std::int32_t* out, int rows, int cs);
  // acc[c] += sum over rows of x[r, c] * dy[r, c].
  void (*depthwise_weight_gradient)(const std::int8_t* x, const std::int8_t* dy, int rows, int cs,
                                    std::int32_t* acc);
  // Winograd (winograd.h), every lane by itself; `size` and rows * cols lanes, multiples of 16. Point p of 36 is
  // `point_stride` elements (>= size) behind point p - 1. Into points: 6x6 pixels, 3x3 weights, or 4x4 pixels of
  // an output gradient; an operand may be null (zeros).
  void (*winograd_input)(const std::int8_t* const* pixels, std::size_t size, std::int16_t* points,
                         std::ptrdiff_t point_stride);
  void (*winograd_weight)(const std::int8_t* const* weights, std::size_t size, std::int16_t* points,
                          std::ptrdiff_t point_stride);
  void (*winograd_output_gradient)(const std::int8_t* const* pixels, std::size_t size, std::int16_t* points,
                                   std::ptrdiff_t point_stride);
  // Back from sums of products of points: to 4x4 pixels, or to 3x3 weight gradients; init[column] (unless it is
  // null) is added. Result i is `out_stride` elements behind result i - 1.
  void (*winograd_output)(const std::int32_t* sums, std::ptrdiff_t point_stride, int rows, int cols,
                          const std::int32_t* init, std::int32_t* out, std::ptrdiff_t out_stride);
  void (*winograd_weight_gradient)(const std::int32_t* sums, std::ptrdiff_t point_stride, int rows, int cols,
                                   const std::int32_t* init, std::int32_t* out, std::ptrdiff_t out_stride);
};

// The paths this build has and this machine can run, best last. The first is always "portable".
struct Paths {
  const Path* const* begin;
  int count;
};
Paths available_paths();

}  // namespace socflower::int8
