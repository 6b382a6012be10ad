// The direct weight gradient: packed images by packed images, for every tap (convolution.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "tap_index.h"
#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8 {

// The weight gradient of one tap is a product of the images: left (channels x images) by right (images x channels).
// Left is x and right dy or, where blocks fit better, the other way around, and the result is transposed.
struct GradientPlan {
  Product product;
  bool swapped;
  int left_c, right_c;
  int left_pixels, right_pixels;  // that are packed at a time
  int chunk_pixels;               // output pixels of one right panel that stay in the first-level cache
};

GradientPlan plan_gradient(const Path& path, const ConvShape& s, bool activations, int images);

// Both operands: for every pixel, panels of `product.rows` or `product.cols` channels by k-groups of images.
struct GradientBuffers {
  int k_groups, left_panels, right_panels;
  std::size_t left_panel_bytes, left_pixel_bytes, right_panel_bytes, right_pixel_bytes;
  std::uint8_t *left, *right;
  std::int32_t* right_sums;  // (pixels, right_panels * cols): sums over the images, only beside offset operands
  std::int32_t* transposed;  // (taps, left channels, stride of right channels), only where the roles are swapped
};

GradientBuffers carve_gradient(Arena& arena, const GradientPlan& plan, int taps, int images);

// pairs: of input and output pixel, one for each pixel of the plan; or null, and all pixels are packed in order.
void pack_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan, const TapIndex::Pair* pairs,
                   const std::int8_t* x, const std::int8_t* dy, int batch, int first_row, int rows,
                   const GradientBuffers& b);

// acc (taps, left channels, stride of right channels) = or += sum over the packed images, tap by tap. The pixels
// are taken in chunks: a chunk of one right panel stays in the first-level cache while all left panels and all
// taps meet it.
std::uint32_t multiply_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan, int pixels,
                                const TapIndex& taps, const GradientBuffers& b, bool add, std::int32_t* acc);

// The same for a kernel of one tap, with the packing, a few pixels at a time.
std::uint32_t multiply_pointwise_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan,
                                          const std::vector<TapIndex::Pair>& pairs, const std::int8_t* x,
                                          const std::int8_t* dy, int batch, int first_row, int rows,
                                          const GradientBuffers& b, std::int32_t* acc);

// (taps, left channels, stride of right channels) to (taps, right channels, stride of left channels).
void transpose_taps(const std::int32_t* from, int taps, int left_c, int right_c, std::int32_t* to);

}  // namespace socflower::int8
