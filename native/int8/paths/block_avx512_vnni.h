// Block kernels for AVX-512 VNNI. Why they are assembly stands in block_avx2.h.
//
// A multiplication waits four or five cycles for the one before it on the same accumulator, while two can start
// in every cycle. Blocks of up to three rows have too few accumulators to hide that, so they keep two sets and
// alternate between them.
#pragma once

#include "../kernels.h"

namespace socflower::int8::avx512_vnni {
namespace {

alignas(64) const std::int32_t kZeros[32] = {};

// Row r of a block uses the accumulators of its first sixteen and second sixteen columns given as lo and hi.
// Row 0 loads what every row starts with; the others copy it.
#define SOCFLOWER_START_ROW(r, lo, hi) \
  ".if %c[rows] > " #r "\n\t"          \
  "vmovdqa32 %%zmm0, %%zmm" #lo "\n\t" \
  "vmovdqa32 %%zmm1, %%zmm" #hi "\n\t" \
  ".endif\n\t"

#define SOCFLOWER_STORE_ROW(r, lo, hi)     \
  ".if %c[rows] > " #r "\n\t"              \
  "vmovdqu32 %%zmm" #lo ", (%[out])\n\t"   \
  "vmovdqu32 %%zmm" #hi ", 64(%[out])\n\t" \
  "add %[out_stride], %[out]\n\t"          \
  ".endif\n\t"

#define SOCFLOWER_ROW(multiply, r, lo, hi, address) \
  ".if %c[rows] > " #r "\n\t"                       \
  "vpbroadcastd " address ", %%zmm18\n\t"           \
  multiply " %%zmm16, %%zmm18, %%zmm" #lo "\n\t"    \
  multiply " %%zmm17, %%zmm18, %%zmm" #hi "\n\t"    \
  ".endif\n\t"

// One k-group into the first set of accumulators.
#define SOCFLOWER_STEP(multiply)                                    \
  "vmovdqu32 (%[rhs]), %%zmm16\n\t"                                 \
  "vmovdqu32 64(%[rhs]), %%zmm17\n\t"                               \
  "add $128, %[rhs]\n\t"                                            \
  SOCFLOWER_ROW(multiply, 0, 0, 1, "(%[lhs])")                      \
  SOCFLOWER_ROW(multiply, 1, 2, 3, "(%[lhs], %[row_stride])")       \
  SOCFLOWER_ROW(multiply, 2, 4, 5, "(%[lhs], %[row_stride], 2)")    \
  SOCFLOWER_ROW(multiply, 3, 6, 7, "(%[lhs3])")                     \
  SOCFLOWER_ROW(multiply, 4, 8, 9, "(%[lhs3], %[row_stride])")      \
  SOCFLOWER_ROW(multiply, 5, 10, 11, "(%[lhs3], %[row_stride], 2)") \
  SOCFLOWER_ROW(multiply, 6, 12, 13, "(%[lhs6])")                   \
  SOCFLOWER_ROW(multiply, 7, 14, 15, "(%[lhs6], %[row_stride])")    \
  "add %[k_stride], %[lhs]\n\t"                                     \
  ".if %c[rows] > 3\n\t"                                            \
  "add %[k_stride], %[lhs3]\n\t"                                    \
  ".endif\n\t"                                                      \
  ".if %c[rows] > 6\n\t"                                            \
  "add %[k_stride], %[lhs6]\n\t"                                    \
  ".endif\n\t"

// One into the second set, for blocks of up to three rows.
#define SOCFLOWER_SECOND_STEP(multiply)                            \
  "vmovdqu32 (%[rhs]), %%zmm16\n\t"                                \
  "vmovdqu32 64(%[rhs]), %%zmm17\n\t"                              \
  "add $128, %[rhs]\n\t"                                           \
  SOCFLOWER_ROW(multiply, 0, 6, 7, "(%[lhs])")                     \
  SOCFLOWER_ROW(multiply, 1, 8, 9, "(%[lhs], %[row_stride])")      \
  SOCFLOWER_ROW(multiply, 2, 10, 11, "(%[lhs], %[row_stride], 2)") \
  "add %[k_stride], %[lhs]\n\t"

#define SOCFLOWER_CLEAR_SECOND_SET       \
  ".if %c[rows] <= 3\n\t"                \
  "vpxord %%zmm6, %%zmm6, %%zmm6\n\t"    \
  "vpxord %%zmm7, %%zmm7, %%zmm7\n\t"    \
  "vpxord %%zmm8, %%zmm8, %%zmm8\n\t"    \
  "vpxord %%zmm9, %%zmm9, %%zmm9\n\t"    \
  "vpxord %%zmm10, %%zmm10, %%zmm10\n\t" \
  "vpxord %%zmm11, %%zmm11, %%zmm11\n\t" \
  ".endif\n\t"

#define SOCFLOWER_ADD_SECOND_SET       \
  ".if %c[rows] <= 3\n\t"              \
  "vpaddd %%zmm6, %%zmm0, %%zmm0\n\t"  \
  "vpaddd %%zmm7, %%zmm1, %%zmm1\n\t"  \
  "vpaddd %%zmm8, %%zmm2, %%zmm2\n\t"  \
  "vpaddd %%zmm9, %%zmm3, %%zmm3\n\t"  \
  "vpaddd %%zmm10, %%zmm4, %%zmm4\n\t" \
  "vpaddd %%zmm11, %%zmm5, %%zmm5\n\t" \
  ".endif\n\t"

#define SOCFLOWER_BLOCK(name, multiply)                                                                     \
  template <int kRows>                                                                                      \
  void name(const BlockArgs& args) {                                                                        \
    const void* const* lhs_list = args.lhs;                                                                 \
    const void* const* rhs_list = args.rhs;                                                                 \
    std::int64_t segments = args.num_segments;                                                              \
    const std::int64_t k_groups = args.k_groups;                                                            \
    const std::int32_t* init = args.init ? args.init : kZeros;                                              \
    std::int32_t* out = args.out;                                                                           \
    const std::int64_t out_stride = args.out_stride * std::int64_t(sizeof(std::int32_t));                   \
    const char *lhs, *lhs3, *lhs6, *rhs;                                                                    \
    std::int64_t k;                                                                                         \
    asm volatile(                                                                                           \
        "vmovdqu32 (%[init]), %%zmm0\n\t"                                                                   \
        "vmovdqu32 64(%[init]), %%zmm1\n\t"                                                                 \
        SOCFLOWER_START_ROW(1, 2, 3)                                                                        \
        SOCFLOWER_START_ROW(2, 4, 5)                                                                        \
        SOCFLOWER_START_ROW(3, 6, 7)                                                                        \
        SOCFLOWER_START_ROW(4, 8, 9)                                                                        \
        SOCFLOWER_START_ROW(5, 10, 11)                                                                      \
        SOCFLOWER_START_ROW(6, 12, 13)                                                                      \
        SOCFLOWER_START_ROW(7, 14, 15)                                                                      \
        SOCFLOWER_CLEAR_SECOND_SET                                                                          \
        "test %[segments], %[segments]\n\t"                                                                 \
        "jle 5f\n"                                                                                          \
        "1:\n\t"                                                                                            \
        "mov (%[lhs_list]), %[lhs]\n\t"                                                                     \
        "mov (%[rhs_list]), %[rhs]\n\t"                                                                     \
        "add $8, %[lhs_list]\n\t"                                                                           \
        "add $8, %[rhs_list]\n\t"                                                                           \
        "lea (%[lhs], %[row_stride], 2), %[lhs3]\n\t"                                                       \
        "add %[row_stride], %[lhs3]\n\t"                                                                    \
        "lea (%[lhs3], %[row_stride], 2), %[lhs6]\n\t"                                                      \
        "add %[row_stride], %[lhs6]\n\t"                                                                    \
        "mov %[k_groups], %[k]\n\t"                                                                         \
        ".if %c[rows] <= 3\n\t"                                                                             \
        "dec %[k]\n\t"                                                                                      \
        "jz 3f\n\t"                                                                                         \
        ".p2align 5\n"                                                                                      \
        "2:\n\t"                                                                                            \
        SOCFLOWER_STEP(multiply)                                                                            \
        SOCFLOWER_SECOND_STEP(multiply)                                                                     \
        "sub $2, %[k]\n\t"                                                                                  \
        "jg 2b\n\t"                                                                                         \
        "jnz 4f\n"                                                                                          \
        "3:\n\t"                                                                                            \
        SOCFLOWER_STEP(multiply)                                                                            \
        ".else\n\t"                                                                                         \
        ".p2align 5\n"                                                                                      \
        "2:\n\t"                                                                                            \
        SOCFLOWER_STEP(multiply)                                                                            \
        "dec %[k]\n\t"                                                                                      \
        "jnz 2b\n\t"                                                                                        \
        ".endif\n"                                                                                          \
        "4:\n\t"                                                                                            \
        "dec %[segments]\n\t"                                                                               \
        "jnz 1b\n"                                                                                          \
        "5:\n\t"                                                                                            \
        SOCFLOWER_ADD_SECOND_SET                                                                            \
        SOCFLOWER_STORE_ROW(0, 0, 1)                                                                        \
        SOCFLOWER_STORE_ROW(1, 2, 3)                                                                        \
        SOCFLOWER_STORE_ROW(2, 4, 5)                                                                        \
        SOCFLOWER_STORE_ROW(3, 6, 7)                                                                        \
        SOCFLOWER_STORE_ROW(4, 8, 9)                                                                        \
        SOCFLOWER_STORE_ROW(5, 10, 11)                                                                      \
        SOCFLOWER_STORE_ROW(6, 12, 13)                                                                      \
        SOCFLOWER_STORE_ROW(7, 14, 15)                                                                      \
        "vzeroupper"                                                                                        \
        : [lhs_list] "+r"(lhs_list), [rhs_list] "+r"(rhs_list), [segments] "+r"(segments), [out] "+r"(out), \
          [lhs] "=&r"(lhs), [lhs3] "=&r"(lhs3), [lhs6] "=&r"(lhs6), [rhs] "=&r"(rhs), [k] "=&r"(k)          \
        : [rows] "i"(kRows), [init] "r"(init), [row_stride] "r"(args.lhs_row_stride),                       \
          [k_stride] "r"(args.lhs_k_stride), [k_groups] "m"(k_groups), [out_stride] "m"(out_stride)         \
        : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",           \
          "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18");         \
  }

// uint8 by int8 in depth groups of 4, int16 by int16 in depth groups of 2.
SOCFLOWER_BLOCK(multiply_uint8, "vpdpbusd")
SOCFLOWER_BLOCK(multiply_int16, "vpdpwssd")

#undef SOCFLOWER_BLOCK
#undef SOCFLOWER_ADD_SECOND_SET
#undef SOCFLOWER_CLEAR_SECOND_SET
#undef SOCFLOWER_SECOND_STEP
#undef SOCFLOWER_STEP
#undef SOCFLOWER_ROW
#undef SOCFLOWER_STORE_ROW
#undef SOCFLOWER_START_ROW

void block_uint8(const BlockArgs& args, int rows) {
  static constexpr void (*kBlocks[])(const BlockArgs&) = {multiply_uint8<1>, multiply_uint8<2>,
                                                          multiply_uint8<3>, multiply_uint8<4>,
                                                          multiply_uint8<5>, multiply_uint8<6>,
                                                          multiply_uint8<7>, multiply_uint8<8>};
  kBlocks[rows - 1](args);
}

void block_int16(const BlockArgs& args, int rows) {
  static constexpr void (*kBlocks[])(const BlockArgs&) = {multiply_int16<1>, multiply_int16<2>,
                                                          multiply_int16<3>, multiply_int16<4>,
                                                          multiply_int16<5>, multiply_int16<6>,
                                                          multiply_int16<7>, multiply_int16<8>};
  kBlocks[rows - 1](args);
}

constexpr Product kGeneral = {Element::kOffsetUint8, Element::kInt8, 4, 8, 32, block_uint8};
constexpr Product kActivations = {Element::kInt8, Element::kInt8, 4, 8, 32, block_uint8};
constexpr Product kWide = {Element::kInt16, Element::kInt16, 2, 8, 32, block_int16};

}  // namespace
}  // namespace socflower::int8::avx512_vnni
