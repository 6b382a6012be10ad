// Block kernel for ARMv8 with FEAT_I8MM: 32 products per instruction, two rows by two columns by eight depths.
//
// Six rows by 16 columns: 24 accumulators of 2 x 2, three registers for the row pairs, the rest for columns.
#pragma once

#include "block_neon.h"

namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE {
namespace {

constexpr int kMmlaRows = 6;

// Keeps its place among load_columns().
inline void multiply(int32x4_t& acc, int8x16_t rows, int8x16_t columns) {
  int32x4_t sum = acc;
  asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(rows), "w"(columns));
  acc = sum;
}

// Rows whose groups are adjacent in memory (weight gradients) are loaded as pairs; others are put together,
// which takes a vector slot per pair. Of an odd last row there is no partner to read, so it is its own.
template <int kRows, bool kAdjacent>
void mmla_rows(const BlockArgs& args) {
  constexpr int kPairs = (kRows + 1) / 2;
  int32x4_t acc[kPairs][8];
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    const int32x2_t start = args.init != nullptr ? vld1_s32(args.init + 2 * q) : vdup_n_s32(0);
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) acc[p][q] = vcombine_s32(start, start);
  }
  const std::ptrdiff_t row_stride = args.lhs_row_stride, k_stride = args.lhs_k_stride;
  const int k_groups = args.k_groups;
  for (int s = 0; s < args.num_segments; ++s) {
    const std::int8_t* lhs = static_cast<const std::int8_t*>(args.lhs[s]);
    const std::int8_t* rhs = static_cast<const std::int8_t*>(args.rhs[s]);
    for (int k = 0; k < k_groups; ++k) {
      int8x16_t x[kPairs];
      for (int p = 0; p < kPairs; ++p) {
        const std::int8_t* row = lhs + 2 * p * row_stride;
        if (2 * p + 1 == kRows) {
          x[p] = vcombine_s8(vld1_s8(row), vld1_s8(row));
        } else if (kAdjacent) {
          x[p] = vld1q_s8(row);
        } else {
          x[p] = vcombine_s8(vld1_s8(row), vld1_s8(row + row_stride));
        }
      }
      int8x16_t w = load_columns(rhs);
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        const int8x16_t next = q < 7 ? load_columns(rhs + 16 * (q + 1)) : w;
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) multiply(acc[p][q], x[p], w);
        w = next;
      }
      lhs += k_stride;
      rhs += 128;
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p) {
    std::int32_t* out = args.out + 2 * p * args.out_stride;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int32x4_t a = acc[p][2 * q], b = acc[p][2 * q + 1];
      vst1q_s32(out + 4 * q, vcombine_s32(vget_low_s32(a), vget_low_s32(b)));
      if (2 * p + 1 < kRows) {
        vst1q_s32(out + args.out_stride + 4 * q, vcombine_s32(vget_high_s32(a), vget_high_s32(b)));
      }
    }
  }
}

template <bool kAdjacent>
void mmla_rows_of(const BlockArgs& args, int rows) {
  switch (rows) {
    case 1: return mmla_rows<1, kAdjacent>(args);
    case 2: return mmla_rows<2, kAdjacent>(args);
    case 3: return mmla_rows<3, kAdjacent>(args);
    case 4: return mmla_rows<4, kAdjacent>(args);
    case 5: return mmla_rows<5, kAdjacent>(args);
    default: return mmla_rows<kMmlaRows, kAdjacent>(args);
  }
}

void mmla_block(const BlockArgs& args, int rows) {
  return args.lhs_row_stride == 8 ? mmla_rows_of<true>(args, rows) : mmla_rows_of<false>(args, rows);
}

constexpr Product kMmlaInt8{Element::kInt8, Element::kInt8, 8, kMmlaRows, 16, mmla_block};

}  // namespace
}  // namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE
