// Block kernel for ARMv8 with FEAT_DotProd: 16 products per instruction.
//
// Six rows by 16 columns: 24 accumulators, four registers for the right operand, four left over for the left
// one. Larger blocks spill, and where two pipes take dot products (Cortex-A76) the ten loads hide behind 24.
#pragma once

#include "block_neon.h"

namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE {
namespace {

constexpr int kSdotRows = 6;

template <int kRows>
void sdot_rows(const BlockArgs& args) {
  int32x4_t acc[kRows][4];
  start_rows(args, acc);
  for (int s = 0; s < args.num_segments; ++s) {
    const std::int8_t* lhs = static_cast<const std::int8_t*>(args.lhs[s]);
    const std::int8_t* rhs = static_cast<const std::int8_t*>(args.rhs[s]);
    for (int k = 0; k < args.k_groups; ++k) {
      const int8x16_t w[4] = {vld1q_s8(rhs), vld1q_s8(rhs + 16), vld1q_s8(rhs + 32), vld1q_s8(rhs + 48)};
      for (int r = 0; r < kRows; ++r) {
        const int8x8_t four = vreinterpret_s8_s32(load_four(lhs + r * args.lhs_row_stride));
        for (int q = 0; q < 4; ++q) acc[r][q] = vdotq_lane_s32(acc[r][q], w[q], four, 0);
      }
      lhs += args.lhs_k_stride;
      rhs += 64;
    }
  }
  store_rows(args, acc);
}

void sdot_block(const BlockArgs& args, int rows) {
  switch (rows) {
    case 1: return sdot_rows<1>(args);
    case 2: return sdot_rows<2>(args);
    case 3: return sdot_rows<3>(args);
    case 4: return sdot_rows<4>(args);
    case 5: return sdot_rows<5>(args);
    default: return sdot_rows<kSdotRows>(args);
  }
}

constexpr Product kSdotInt8{Element::kInt8, Element::kInt8, 4, kSdotRows, 16, sdot_block};

}  // namespace
}  // namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE
