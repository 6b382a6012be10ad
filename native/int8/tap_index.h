// Which pixels meet under which kernel tap: the geometry shared by convolutions and pooling. Taps that fall
// into the padding do not appear.
#pragma once

#include <cstdint>
#include <vector>

#include "shape.h"

namespace socflower::int8 {

enum class By { kOutput, kInput, kTap };

// Grouped by output pixel (pairs are input pixel, tap), by input pixel (output pixel, tap) or by tap (input
// pixel, output pixel).
struct TapIndex {
  struct Pair {
    std::int32_t from, to;
  };
  std::vector<std::int32_t> begin;  // group g is pairs[begin[g]] .. pairs[begin[g + 1] - 1]
  std::vector<Pair> pairs;
};

TapIndex tap_index(const ConvShape& shape, By by);

}  // namespace socflower::int8
