// Block kernels for AVX-VNNI. Why they are assembly stands in block_avx2.h.
//
// A multiplication waits four or five cycles for the one before it on the same accumulator, while two can start
// in every cycle. Blocks of up to three rows have too few accumulators to hide that, so they keep two sets and
// alternate between them.
#pragma once

#include "../kernels.h"

namespace socflower::int8::avx_vnni {
namespace {

alignas(32) const std::int32_t kZeros[16] = {};

// Row r of a block uses the accumulators of its first eight and second eight columns given as lo and hi.
// Row 0 loads what every row starts with; the others copy it.
#define SOCFLOWER_START_ROW(r, lo, hi) \
  ".if %c[rows] > " #r "\n\t"          \
  "vmovdqa %%ymm0, %%ymm" #lo "\n\t"   \
  "vmovdqa %%ymm1, %%ymm" #hi "\n\t"   \
  ".endif\n\t"

#define SOCFLOWER_STORE_ROW(r, lo, hi)   \
  ".if %c[rows] > " #r "\n\t"            \
  "vmovdqu %%ymm" #lo ", (%[out])\n\t"   \
  "vmovdqu %%ymm" #hi ", 32(%[out])\n\t" \
  "add %[out_stride], %[out]\n\t"        \
  ".endif\n\t"

// Without {vex}, assemblers take the AVX-512 encoding.
#define SOCFLOWER_ROW(multiply, r, lo, hi, address)         \
  ".if %c[rows] > " #r "\n\t"                               \
  "vpbroadcastd " address ", %%ymm14\n\t"                   \
  "%{vex%} " multiply " %%ymm12, %%ymm14, %%ymm" #lo "\n\t" \
  "%{vex%} " multiply " %%ymm13, %%ymm14, %%ymm" #hi "\n\t" \
  ".endif\n\t"

// One k-group into the first set of accumulators.
#define SOCFLOWER_STEP(multiply)                                    \
  "vmovdqu (%[rhs]), %%ymm12\n\t"                                   \
  "vmovdqu 32(%[rhs]), %%ymm13\n\t"                                 \
  "add $64, %[rhs]\n\t"                                             \
  SOCFLOWER_ROW(multiply, 0, 0, 1, "(%[lhs])")                      \
  SOCFLOWER_ROW(multiply, 1, 2, 3, "(%[lhs], %[row_stride])")       \
  SOCFLOWER_ROW(multiply, 2, 4, 5, "(%[lhs], %[row_stride], 2)")    \
  SOCFLOWER_ROW(multiply, 3, 6, 7, "(%[lhs3])")                     \
  SOCFLOWER_ROW(multiply, 4, 8, 9, "(%[lhs3], %[row_stride])")      \
  SOCFLOWER_ROW(multiply, 5, 10, 11, "(%[lhs3], %[row_stride], 2)") \
  "add %[k_stride], %[lhs]\n\t"                                     \
  ".if %c[rows] > 3\n\t"                                            \
  "add %[k_stride], %[lhs3]\n\t"                                    \
  ".endif\n\t"

// One into the second set, for blocks of up to three rows.
#define SOCFLOWER_SECOND_STEP(multiply)                            \
  "vmovdqu (%[rhs]), %%ymm12\n\t"                                  \
  "vmovdqu 32(%[rhs]), %%ymm13\n\t"                                \
  "add $64, %[rhs]\n\t"                                            \
  SOCFLOWER_ROW(multiply, 0, 6, 7, "(%[lhs])")                     \
  SOCFLOWER_ROW(multiply, 1, 8, 9, "(%[lhs], %[row_stride])")      \
  SOCFLOWER_ROW(multiply, 2, 10, 11, "(%[lhs], %[row_stride], 2)") \
  "add %[k_stride], %[lhs]\n\t"

#define SOCFLOWER_CLEAR_SECOND_SET      \
  ".if %c[rows] <= 3\n\t"               \
  "vpxor %%ymm6, %%ymm6, %%ymm6\n\t"    \
  "vpxor %%ymm7, %%ymm7, %%ymm7\n\t"    \
  "vpxor %%ymm8, %%ymm8, %%ymm8\n\t"    \
  "vpxor %%ymm9, %%ymm9, %%ymm9\n\t"    \
  "vpxor %%ymm10, %%ymm10, %%ymm10\n\t" \
  "vpxor %%ymm11, %%ymm11, %%ymm11\n\t" \
  ".endif\n\t"

#define SOCFLOWER_ADD_SECOND_SET       \
  ".if %c[rows] <= 3\n\t"              \
  "vpaddd %%ymm6, %%ymm0, %%ymm0\n\t"  \
  "vpaddd %%ymm7, %%ymm1, %%ymm1\n\t"  \
  "vpaddd %%ymm8, %%ymm2, %%ymm2\n\t"  \
  "vpaddd %%ymm9, %%ymm3, %%ymm3\n\t"  \
  "vpaddd %%ymm10, %%ymm4, %%ymm4\n\t" \
  "vpaddd %%ymm11, %%ymm5, %%ymm5\n\t" \
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
    const char *lhs, *lhs3, *rhs;                                                                           \
    std::int64_t k;                                                                                         \
    asm volatile(                                                                                           \
        "vmovdqu (%[init]), %%ymm0\n\t"                                                                     \
        "vmovdqu 32(%[init]), %%ymm1\n\t"                                                                   \
        SOCFLOWER_START_ROW(1, 2, 3)                                                                        \
        SOCFLOWER_START_ROW(2, 4, 5)                                                                        \
        SOCFLOWER_START_ROW(3, 6, 7)                                                                        \
        SOCFLOWER_START_ROW(4, 8, 9)                                                                        \
        SOCFLOWER_START_ROW(5, 10, 11)                                                                      \
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
        "vzeroupper"                                                                                        \
        : [lhs_list] "+r"(lhs_list), [rhs_list] "+r"(rhs_list), [segments] "+r"(segments), [out] "+r"(out), \
          [lhs] "=&r"(lhs), [lhs3] "=&r"(lhs3), [rhs] "=&r"(rhs), [k] "=&r"(k)                              \
        : [rows] "i"(kRows), [init] "r"(init), [row_stride] "r"(args.lhs_row_stride),                       \
          [k_stride] "r"(args.lhs_k_stride), [k_groups] "m"(k_groups), [out_stride] "m"(out_stride)         \
        : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",           \
          "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                    \
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
                                                          multiply_uint8<5>, multiply_uint8<6>};
  kBlocks[rows - 1](args);
}

void block_int16(const BlockArgs& args, int rows) {
  static constexpr void (*kBlocks[])(const BlockArgs&) = {multiply_int16<1>, multiply_int16<2>,
                                                          multiply_int16<3>, multiply_int16<4>,
                                                          multiply_int16<5>, multiply_int16<6>};
  kBlocks[rows - 1](args);
}

constexpr Product kGeneral = {Element::kOffsetUint8, Element::kInt8, 4, 6, 16, block_uint8};
constexpr Product kActivations = {Element::kInt8, Element::kInt8, 4, 6, 16, block_uint8};
constexpr Product kWide = {Element::kInt16, Element::kInt16, 2, 6, 16, block_int16};

}  // namespace
}  // namespace socflower::int8::avx_vnni
