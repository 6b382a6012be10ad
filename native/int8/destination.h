// Where the accumulators of a convolution go.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace socflower::int8 {

// As int32 (`acc`, after ReLU and mask), or rounded to int8 (`out`), or both: one of them is set at least.
struct Destination {
  std::int32_t* acc = nullptr;
  std::int8_t* out = nullptr;
  Requantise how;
};

// Hands over a finished tile of rows x cols; `at` is the flat index of its first element in the destination,
// `stride` the elements between rows there. Returns the largest magnitude.
inline std::uint32_t deliver(const Path& path, const std::int32_t* tile, int tile_stride, const Destination& to,
                             std::size_t at, int stride, int rows, int cols) {
  Requantise how = to.how;
  if (how.mask != nullptr) how.mask += at;
  if (to.acc != nullptr) {
    const std::uint32_t largest =
        path.store_tile(tile, tile_stride, to.acc + at, stride, rows, cols, how.relu, how.mask, stride);
    if (to.out == nullptr) return largest;
  }
  return path.requantise_tile(tile, tile_stride, to.out + at, stride, rows, cols, how);
}

}  // namespace socflower::int8
