// Block kernels in plain C++. Included after loops.inc.
#pragma once

namespace socflower::int8::portable {
namespace {

constexpr int kRows = 4, kCols = 16;

template <typename Value, int kGroup>
void block(const BlockArgs& args, int rows) {
  std::uint32_t acc[kRows][kCols];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < kCols; ++c) {
      acc[r][c] = args.init != nullptr ? static_cast<std::uint32_t>(args.init[c]) : 0u;
    }
  for (int s = 0; s < args.num_segments; ++s) {
    const Value* rhs = static_cast<const Value*>(args.rhs[s]);
    for (int k = 0; k < args.k_groups; ++k, rhs += kCols * kGroup) {
      const char* lhs = static_cast<const char*>(args.lhs[s]) + k * args.lhs_k_stride;
      for (int r = 0; r < rows; ++r, lhs += args.lhs_row_stride) {
        Value x[kGroup];
        __builtin_memcpy(x, lhs, sizeof x);
        for (int c = 0; c < kCols; ++c) {
          std::uint32_t sum = 0;  // unsigned: sums wrap around
          for (int e = 0; e < kGroup; ++e) sum += static_cast<std::uint32_t>(x[e] * rhs[c * kGroup + e]);
          acc[r][c] += sum;
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) __builtin_memcpy(args.out + r * args.out_stride, acc[r], sizeof acc[r]);
}

constexpr Product kGeneral{Element::kInt8, Element::kInt8, 4, kRows, kCols, block<std::int8_t, 4>};
constexpr Product kWide{Element::kInt16, Element::kInt16, 2, kRows, kCols, block<std::int16_t, 2>};

}  // namespace
}  // namespace socflower::int8::portable
