// Block kernels for AVX2 without VNNI.
//
// A whole block is one piece of assembly, so that every accumulator stays in its register from the first
// k-group of the first segment to the last of the last: compilers spill some, which costs a third of the speed.
// `.if` on the row count, a compile-time constant, makes one text serve every block height.
#pragma once

#include "../kernels.h"

namespace socflower::int8::avx2 {
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

#define SOCFLOWER_INT16_ROW(r, lo, hi, address)    \
  ".if %c[rows] > " #r "\n\t"                      \
  "vpbroadcastd " address ", %%ymm14\n\t"          \
  "vpmaddwd %%ymm12, %%ymm14, %%ymm15\n\t"         \
  "vpmaddwd %%ymm13, %%ymm14, %%ymm14\n\t"         \
  "vpaddd %%ymm15, %%ymm" #lo ", %%ymm" #lo "\n\t" \
  "vpaddd %%ymm14, %%ymm" #hi ", %%ymm" #hi "\n\t" \
  ".endif\n\t"

// A sum of two products of 0..127 by int8 fits int16, so that vpmaddubsw never saturates; vpmaddwd with the
// ones in ymm11 adds two such sums as int32.
#define SOCFLOWER_UINT7_ROW(r, lo, hi, address)    \
  ".if %c[rows] > " #r "\n\t"                      \
  "vpbroadcastd " address ", %%ymm14\n\t"          \
  "vpmaddubsw %%ymm12, %%ymm14, %%ymm15\n\t"       \
  "vpmaddubsw %%ymm13, %%ymm14, %%ymm14\n\t"       \
  "vpmaddwd %%ymm11, %%ymm15, %%ymm15\n\t"         \
  "vpmaddwd %%ymm11, %%ymm14, %%ymm14\n\t"         \
  "vpaddd %%ymm15, %%ymm" #lo ", %%ymm" #lo "\n\t" \
  "vpaddd %%ymm14, %%ymm" #hi ", %%ymm" #hi "\n\t" \
  ".endif\n\t"

// `prepare` runs once, after the accumulators are set; `step` multiplies one k-group.
#define SOCFLOWER_BLOCK(name, prepare, step)                                                                \
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
        prepare                                                                                             \
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
        ".p2align 5\n"                                                                                      \
        "2:\n\t"                                                                                            \
        "vmovdqu (%[rhs]), %%ymm12\n\t"                                                                     \
        "vmovdqu 32(%[rhs]), %%ymm13\n\t"                                                                   \
        "add $64, %[rhs]\n\t"                                                                               \
        step                                                                                                \
        "add %[k_stride], %[lhs]\n\t"                                                                       \
        ".if %c[rows] > 3\n\t"                                                                              \
        "add %[k_stride], %[lhs3]\n\t"                                                                      \
        ".endif\n\t"                                                                                        \
        "dec %[k]\n\t"                                                                                      \
        "jnz 2b\n\t"                                                                                        \
        "dec %[segments]\n\t"                                                                               \
        "jnz 1b\n"                                                                                          \
        "5:\n\t"                                                                                            \
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

// Depth groups of 2.
SOCFLOWER_BLOCK(multiply_int16, "",
                SOCFLOWER_INT16_ROW(0, 0, 1, "(%[lhs])")
                SOCFLOWER_INT16_ROW(1, 2, 3, "(%[lhs], %[row_stride])")
                SOCFLOWER_INT16_ROW(2, 4, 5, "(%[lhs], %[row_stride], 2)")
                SOCFLOWER_INT16_ROW(3, 6, 7, "(%[lhs3])")
                SOCFLOWER_INT16_ROW(4, 8, 9, "(%[lhs3], %[row_stride])")
                SOCFLOWER_INT16_ROW(5, 10, 11, "(%[lhs3], %[row_stride], 2)"))

// Depth groups of 4. No more than four rows, because the ones take a register.
SOCFLOWER_BLOCK(multiply_uint7,
                "vpcmpeqw %%ymm11, %%ymm11, %%ymm11\n\t"
                "vpabsw %%ymm11, %%ymm11\n\t",
                SOCFLOWER_UINT7_ROW(0, 0, 1, "(%[lhs])")
                SOCFLOWER_UINT7_ROW(1, 2, 3, "(%[lhs], %[row_stride])")
                SOCFLOWER_UINT7_ROW(2, 4, 5, "(%[lhs], %[row_stride], 2)")
                SOCFLOWER_UINT7_ROW(3, 6, 7, "(%[lhs3])"))

// Depth groups of 2, the first eight columns only: half the registers for a row, so twice the rows for a load of the
// right operand. The other columns are zeros.
#define SOCFLOWER_NARROW_START(r, acc)      \
  ".if %c[rows] > " #r "\n\t"               \
  "vmovdqa %%ymm0, %%ymm" #acc "\n\t"       \
  ".endif\n\t"

#define SOCFLOWER_NARROW_ROW(r, acc, address)         \
  ".if %c[rows] > " #r "\n\t"                         \
  "vpbroadcastd " address ", %%ymm13\n\t"             \
  "vpmaddwd %%ymm12, %%ymm13, %%ymm13\n\t"            \
  "vpaddd %%ymm13, %%ymm" #acc ", %%ymm" #acc "\n\t"  \
  ".endif\n\t"

#define SOCFLOWER_NARROW_STORE(r, acc)    \
  ".if %c[rows] > " #r "\n\t"             \
  "vmovdqu %%ymm" #acc ", (%[out])\n\t"   \
  "vmovdqu %%ymm12, 32(%[out])\n\t"       \
  "add %[out_stride], %[out]\n\t"         \
  ".endif\n\t"

template <int kRows>
void multiply_narrow(const BlockArgs& args) {
  const void* const* lhs_list = args.lhs;
  const void* const* rhs_list = args.rhs;
  std::int64_t segments = args.num_segments;
  const std::int64_t k_groups = args.k_groups;
  const std::int32_t* init = args.init ? args.init : kZeros;
  std::int32_t* out = args.out;
  const std::int64_t out_stride = args.out_stride * std::int64_t(sizeof(std::int32_t));
  const char *lhs, *lhs3, *lhs6, *lhs9, *rhs;
  std::int64_t k;
  asm volatile(
      "vmovdqu (%[init]), %%ymm0\n\t"
      SOCFLOWER_NARROW_START(1, 1) SOCFLOWER_NARROW_START(2, 2) SOCFLOWER_NARROW_START(3, 3)
      SOCFLOWER_NARROW_START(4, 4) SOCFLOWER_NARROW_START(5, 5) SOCFLOWER_NARROW_START(6, 6)
      SOCFLOWER_NARROW_START(7, 7) SOCFLOWER_NARROW_START(8, 8) SOCFLOWER_NARROW_START(9, 9)
      SOCFLOWER_NARROW_START(10, 10) SOCFLOWER_NARROW_START(11, 11)
      "test %[segments], %[segments]\n\t"
      "jle 5f\n"
      "1:\n\t"
      "mov (%[lhs_list]), %[lhs]\n\t"
      "mov (%[rhs_list]), %[rhs]\n\t"
      "add $8, %[lhs_list]\n\t"
      "add $8, %[rhs_list]\n\t"
      "lea (%[lhs], %[row_stride], 2), %[lhs3]\n\t"
      "add %[row_stride], %[lhs3]\n\t"
      "lea (%[lhs3], %[row_stride], 2), %[lhs6]\n\t"
      "add %[row_stride], %[lhs6]\n\t"
      "lea (%[lhs6], %[row_stride], 2), %[lhs9]\n\t"
      "add %[row_stride], %[lhs9]\n\t"
      "mov %[k_groups], %[k]\n\t"
      ".p2align 5\n"
      "2:\n\t"
      "vmovdqu (%[rhs]), %%ymm12\n\t"
      "add $64, %[rhs]\n\t"
      SOCFLOWER_NARROW_ROW(0, 0, "(%[lhs])")
      SOCFLOWER_NARROW_ROW(1, 1, "(%[lhs], %[row_stride])")
      SOCFLOWER_NARROW_ROW(2, 2, "(%[lhs], %[row_stride], 2)")
      SOCFLOWER_NARROW_ROW(3, 3, "(%[lhs3])")
      SOCFLOWER_NARROW_ROW(4, 4, "(%[lhs3], %[row_stride])")
      SOCFLOWER_NARROW_ROW(5, 5, "(%[lhs3], %[row_stride], 2)")
      SOCFLOWER_NARROW_ROW(6, 6, "(%[lhs6])")
      SOCFLOWER_NARROW_ROW(7, 7, "(%[lhs6], %[row_stride])")
      SOCFLOWER_NARROW_ROW(8, 8, "(%[lhs6], %[row_stride], 2)")
      SOCFLOWER_NARROW_ROW(9, 9, "(%[lhs9])")
      SOCFLOWER_NARROW_ROW(10, 10, "(%[lhs9], %[row_stride])")
      SOCFLOWER_NARROW_ROW(11, 11, "(%[lhs9], %[row_stride], 2)")
      "add %[k_stride], %[lhs]\n\t"
      "add %[k_stride], %[lhs3]\n\t"
      "add %[k_stride], %[lhs6]\n\t"
      "add %[k_stride], %[lhs9]\n\t"
      "dec %[k]\n\t"
      "jnz 2b\n\t"
      "dec %[segments]\n\t"
      "jnz 1b\n"
      "5:\n\t"
      "vpxor %%xmm12, %%xmm12, %%xmm12\n\t"
      SOCFLOWER_NARROW_STORE(0, 0) SOCFLOWER_NARROW_STORE(1, 1) SOCFLOWER_NARROW_STORE(2, 2)
      SOCFLOWER_NARROW_STORE(3, 3) SOCFLOWER_NARROW_STORE(4, 4) SOCFLOWER_NARROW_STORE(5, 5)
      SOCFLOWER_NARROW_STORE(6, 6) SOCFLOWER_NARROW_STORE(7, 7) SOCFLOWER_NARROW_STORE(8, 8)
      SOCFLOWER_NARROW_STORE(9, 9) SOCFLOWER_NARROW_STORE(10, 10) SOCFLOWER_NARROW_STORE(11, 11)
      "vzeroupper"
      : [lhs_list] "+r"(lhs_list), [rhs_list] "+r"(rhs_list), [segments] "+r"(segments), [out] "+r"(out),
        [lhs] "=&r"(lhs), [lhs3] "=&r"(lhs3), [lhs6] "=&r"(lhs6), [lhs9] "=&r"(lhs9), [rhs] "=&r"(rhs), [k] "=&r"(k)
      : [rows] "i"(kRows), [init] "r"(init), [row_stride] "r"(args.lhs_row_stride),
        [k_stride] "m"(args.lhs_k_stride), [k_groups] "m"(k_groups), [out_stride] "m"(out_stride)
      : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13");
}

#undef SOCFLOWER_NARROW_STORE
#undef SOCFLOWER_NARROW_ROW
#undef SOCFLOWER_NARROW_START
#undef SOCFLOWER_BLOCK
#undef SOCFLOWER_UINT7_ROW
#undef SOCFLOWER_INT16_ROW
#undef SOCFLOWER_STORE_ROW
#undef SOCFLOWER_START_ROW

void block_int16(const BlockArgs& args, int rows) {
  static constexpr void (*kBlocks[])(const BlockArgs&) = {multiply_int16<1>, multiply_int16<2>,
                                                          multiply_int16<3>, multiply_int16<4>,
                                                          multiply_int16<5>, multiply_int16<6>};
  kBlocks[rows - 1](args);
}

void block_uint7(const BlockArgs& args, int rows) {
  static constexpr void (*kBlocks[])(const BlockArgs&) = {multiply_uint7<1>, multiply_uint7<2>,
                                                          multiply_uint7<3>, multiply_uint7<4>};
  kBlocks[rows - 1](args);
}

void block_narrow(const BlockArgs& args, int rows) {
  static constexpr void (*kBlocks[])(const BlockArgs&) = {
      multiply_narrow<1>, multiply_narrow<2>, multiply_narrow<3>, multiply_narrow<4>,  multiply_narrow<5>,
      multiply_narrow<6>, multiply_narrow<7>, multiply_narrow<8>, multiply_narrow<9>, multiply_narrow<10>,
      multiply_narrow<11>, multiply_narrow<12>};
  kBlocks[rows - 1](args);
}

constexpr Product kGeneral = {Element::kInt16, Element::kInt16, 2, 6, 16, block_int16, 12, block_narrow};
constexpr Product kActivations = {Element::kInt8, Element::kInt8, 4, 4, 16, block_uint7};
constexpr Product kWide = {Element::kInt16, Element::kInt16, 2, 6, 16, block_int16};

}  // namespace
}  // namespace socflower::int8::avx2
