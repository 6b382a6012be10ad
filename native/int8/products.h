// Sums of products over the pixels that meet: what forward, input gradient and GEMM share (convolution.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "destination.h"
#include "kernels.h"
#include "tap_index.h"
#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8 {

// A packed right operand that is walked again and again should stay in the second-level cache.
constexpr std::size_t kPanelGroupBytes = 256 * 1024;
constexpr int kMaxRows = 16, kMaxCols = 64;  // of any block

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

// A right operand: for every tap, panels of `product.cols` columns, k-groups side by side.
struct Packed {
  int k_groups = 0, panels = 0, cols = 0;
  std::size_t panel_bytes = 0, tap_bytes = 0;
  std::uint8_t* bytes = nullptr;
  std::int32_t* column_sums = nullptr;  // (taps, panels * cols), times 128; only beside offset left operands

  const std::uint8_t* at(int tap, int panel) const { return bytes + tap * tap_bytes + panel * panel_bytes; }
};

Packed carve_packed(Arena& arena, const Product& product, int taps, int depth, int cols);

// Images by channels, pixel after pixel: as the product wants them (`ready`), or (where a kernel of one tap meets
// every pixel once) as int8, to be converted a block of images at a time into `converted`, which each thread has.
struct LeftOperand {
  const std::uint8_t* ready;
  const std::int8_t* source;
  std::uint8_t* converted;
  int channels;  // with padding
};

// A copy is left room for where the product wants other elements than int8.
LeftOperand carve_left(Arena& arena, const Product& product, int pixels, int batch, int channels, int taps,
                       int batch_block, int threads);
LeftOperand prepare_left(const Path& path, ThreadPool& pool, const Product& product, const std::int8_t* x,
                         std::size_t size, int taps, LeftOperand left);

// weight: (taps, in_c, out_cs). Forward: depth in_c, columns out_c. Backward: depth out_c, columns in_c.
void pack_weight(const Path& path, ThreadPool& pool, const Product& product, const std::int8_t* weight, int taps,
                 int in_c, int out_c, bool backward, const Packed& packed);

// Forward and input gradient: for every result pixel and image, bias + sum over the pairs of its taps.
std::uint32_t multiply(const Path& path, ThreadPool& pool, const Product& product, const TapIndex& tap_index,
                       const LeftOperand& left, const Packed& right, const std::int32_t* bias, int batch,
                       int batch_block, int out_cs, const Destination& to);

// An input gradient of few channels would leave most columns of a block empty. So its channels become the rows and
// its images the columns: the weight, (taps, in_c, out_cs), is the left operand as it is, dy is packed, and the
// results are transposed on their way out.
bool few_channels(const Product& product, const ConvShape& s);

struct FewBuffers {
  std::uint8_t* weight;
  Packed dy;  // a "tap" is a pixel here
};

FewBuffers carve_few(Arena& arena, const Product& product, const ConvShape& s);
std::uint32_t multiply_few(const Path& path, ThreadPool& pool, const Product& product, const TapIndex& tap_index,
                           const ConvShape& s, const std::int8_t* dy, const std::int8_t* weight,
                           const FewBuffers& buffers, const Destination& to);

}  // namespace socflower::int8
