// Block kernel for ARMv8 with FEAT_DotProd: 16 products per instruction.
//
// Six rows by 16 columns: 24 accumulators, four registers for the right operand, four left over for the left
// one. Larger blocks spill, and where two pipes take dot products (Cortex-A76) the ten loads hide behind 24.
#pragma once

#include "block_neon.h"

namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE {
namespace {

constexpr int kSdotRows = 6;

// These keep their places among load_columns(): cores that do not reorder (Cortex-A55) need every load well
// before its use.
inline int8x8_t load_row(const std::int8_t* at) {
  typedef std::int32_t Unaligned __attribute__((may_alias, aligned(1)));
  int8x8_t row;
  asm volatile("ldr %s0, %1" : "=w"(row) : "m"(*reinterpret_cast<const Unaligned*>(at)));
  return row;
}

inline void multiply(int32x4_t& acc, int8x16_t columns, int8x8_t row) {
  int32x4_t sum = acc;
  asm volatile("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(columns), "w"(row));
  acc = sum;
}

template <int kRows>
void sdot_rows(const BlockArgs& args) {
  int32x4_t acc[kRows][4];
  start_rows(args, acc);
  const std::ptrdiff_t k_stride = args.lhs_k_stride;
  std::ptrdiff_t row_at[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    row_at[r] = r * args.lhs_row_stride;
    asm("" : "+r"(row_at[r]));  // a register each, instead of a chain of additions from row to row
  }
  for (int s = 0; s < args.num_segments; ++s) {
    const std::int8_t* lhs = static_cast<const std::int8_t*>(args.lhs[s]);
    const std::int8_t* rhs = static_cast<const std::int8_t*>(args.rhs[s]);
    int8x16_t w[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) w[q] = load_columns(rhs + 16 * q);
    int8x8_t x = load_row(lhs);
    for (int k = args.k_groups; k > 0; --k) {
      // Where the segment ends, the loads for the next step repeat those of this one.
      const std::int8_t* next_lhs = k > 1 ? lhs + k_stride : lhs;
      const std::int8_t* next_rhs = k > 1 ? rhs + 64 : rhs;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const int8x8_t next = load_row(r + 1 < kRows ? lhs + row_at[r + 1] : next_lhs);
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          multiply(acc[r][q], w[q], x);
          if (r + 1 == kRows) w[q] = load_columns(next_rhs + 16 * q);
        }
        x = next;
      }
      lhs = next_lhs;
      rhs = next_rhs;
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
