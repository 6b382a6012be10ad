// Block kernels for ARMv8 without the dot product extensions.
//
// Both are bound by the one pipe that multiplies vectors on the cores this path is for (Cortex-A72, A76):
// 8 products of int8 or 4 products of int16 per cycle. Everything else, loads and broadcasts included, fits
// in the shadow of that pipe from four rows on, so the blocks are no larger.
#pragma once

#include <arm_neon.h>

#include "../kernels.h"

namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE {
namespace {

constexpr int kNeonRows = 4;

// Orders later loads from `at` after `acc` is computed, in program order only. Left to themselves compilers
// start with all the loads of a step and have no registers left for the accumulators.
inline void load_after(const std::int8_t*& at, int32x4_t& acc) {
  const std::int8_t* ordered = at;
  int32x4_t kept = acc;
  asm("" : "+r"(ordered), "+w"(kept));
  at = ordered;
  acc = kept;
}

// Four bytes of any alignment in the first lane: a plain load, where a broadcast takes a vector slot too.
inline int32x2_t load_four(const void* from) {
  std::int32_t x;
  __builtin_memcpy(&x, from, sizeof x);
  return int32x2_t{x, 0};
}

// Keeps its place among the other volatile statements. Compilers put all the loads of a step first, or each
// right before its use.
inline int8x16_t load_columns(const std::int8_t* at) {
  typedef int8x16_t Unaligned __attribute__((may_alias, aligned(1)));
  int8x16_t columns;
  asm volatile("ldr %q0, %1" : "=w"(columns) : "m"(*reinterpret_cast<const Unaligned*>(at)));
  return columns;
}

template <int kRows>
inline void start_rows(const BlockArgs& args, int32x4_t (&acc)[kRows][4]) {
  for (int q = 0; q < 4; ++q) {
    const int32x4_t start = args.init != nullptr ? vld1q_s32(args.init + 4 * q) : vdupq_n_s32(0);
    for (int r = 0; r < kRows; ++r) acc[r][q] = start;
  }
}

template <int kRows>
inline void store_rows(const BlockArgs& args, const int32x4_t (&acc)[kRows][4]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) vst1q_s32(args.out + r * args.out_stride + 4 * q, acc[r][q]);
  }
}

// int8 by int8. A 16-bit lane holds two products, 2 * 127 * 127 < 2^15, before it is added to its 32-bit sum.
// The two are of depths e and e + 2, which is why the right operand is taken apart in pairs: the widening
// pairwise addition then brings the four depths of one column together, and an accumulator has four columns.
template <int kRows>
void mull_rows(const BlockArgs& args) {
  int32x4_t acc[kRows][4];
  start_rows(args, acc);
  for (int s = 0; s < args.num_segments; ++s) {
    const std::int8_t* lhs = static_cast<const std::int8_t*>(args.lhs[s]);
    const std::int8_t* rhs = static_cast<const std::int8_t*>(args.rhs[s]);
    for (int k = 0; k < args.k_groups; ++k) {
      int8x16_t low[2], high[2];  // depths 0, 1 and depths 2, 3 of eight columns
      for (int half = 0; half < 2; ++half) {
        const int16x8x2_t pairs = vld2q_s16(reinterpret_cast<const std::int16_t*>(rhs + 32 * half));
        low[half] = vreinterpretq_s8_s16(pairs.val[0]);
        high[half] = vreinterpretq_s8_s16(pairs.val[1]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int16x4_t four = vreinterpret_s16_s32(load_four(lhs + r * args.lhs_row_stride));
        const int8x16_t x_low = vreinterpretq_s8_s16(vdupq_lane_s16(four, 0));
        const int8x16_t x_high = vreinterpretq_s8_s16(vdupq_lane_s16(four, 1));
        for (int half = 0; half < 2; ++half) {
          int16x8_t even = vmull_s8(vget_low_s8(low[half]), vget_low_s8(x_low));
          int16x8_t odd = vmull_high_s8(low[half], x_low);
          even = vmlal_s8(even, vget_low_s8(high[half]), vget_low_s8(x_high));
          odd = vmlal_high_s8(odd, high[half], x_high);
          acc[r][2 * half] = vpadalq_s16(acc[r][2 * half], even);
          acc[r][2 * half + 1] = vpadalq_s16(acc[r][2 * half + 1], odd);
        }
        load_after(lhs, acc[r][3]);
      }
      lhs += args.lhs_k_stride;
      rhs += 64;
    }
  }
  store_rows(args, acc);
}

// int16 by int16.
template <int kRows>
void wide_rows(const BlockArgs& args) {
  int32x4_t acc[kRows][4];
  start_rows(args, acc);
  for (int s = 0; s < args.num_segments; ++s) {
    const std::int8_t* lhs = static_cast<const std::int8_t*>(args.lhs[s]);
    const std::int16_t* rhs = static_cast<const std::int16_t*>(args.rhs[s]);
    for (int k = 0; k < args.k_groups; ++k) {
      const int16x8x2_t left = vld2q_s16(rhs), right = vld2q_s16(rhs + 16);
      for (int r = 0; r < kRows; ++r) {
        const int16x4_t pair = vreinterpret_s16_s32(load_four(lhs + r * args.lhs_row_stride));
        acc[r][0] = vmlal_lane_s16(acc[r][0], vget_low_s16(left.val[0]), pair, 0);
        acc[r][1] = vmlal_high_lane_s16(acc[r][1], left.val[0], pair, 0);
        acc[r][2] = vmlal_lane_s16(acc[r][2], vget_low_s16(right.val[0]), pair, 0);
        acc[r][3] = vmlal_high_lane_s16(acc[r][3], right.val[0], pair, 0);
        acc[r][0] = vmlal_lane_s16(acc[r][0], vget_low_s16(left.val[1]), pair, 1);
        acc[r][1] = vmlal_high_lane_s16(acc[r][1], left.val[1], pair, 1);
        acc[r][2] = vmlal_lane_s16(acc[r][2], vget_low_s16(right.val[1]), pair, 1);
        acc[r][3] = vmlal_high_lane_s16(acc[r][3], right.val[1], pair, 1);
      }
      lhs += args.lhs_k_stride;
      rhs += 32;
    }
  }
  store_rows(args, acc);
}

void mull_block(const BlockArgs& args, int rows) {
  switch (rows) {
    case 1: return mull_rows<1>(args);
    case 2: return mull_rows<2>(args);
    case 3: return mull_rows<3>(args);
    default: return mull_rows<kNeonRows>(args);
  }
}

void wide_block(const BlockArgs& args, int rows) {
  switch (rows) {
    case 1: return wide_rows<1>(args);
    case 2: return wide_rows<2>(args);
    case 3: return wide_rows<3>(args);
    default: return wide_rows<kNeonRows>(args);
  }
}

constexpr Product kMullInt8{Element::kInt8, Element::kInt8, 4, kNeonRows, 16, mull_block};
constexpr Product kWide{Element::kInt16, Element::kInt16, 2, kNeonRows, 16, wide_block};

}  // namespace
}  // namespace socflower::int8::SOCFLOWER_INT8_NAMESPACE
