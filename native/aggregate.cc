#include "aggregate.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef SOCFLOWER_TARGET_CLONES
#define SOCFLOWER_MULTIVERSION __attribute__((target_clones("avx2", "default")))
#else
#define SOCFLOWER_MULTIVERSION
#endif

namespace socflower {
namespace {

// Elements per block: the accumulators (8 bytes each, 64 KiB) stay in the L2 cache while each input streams
// past in runs of 32 KiB. Shorter runs restart the hardware prefetcher too often: blocks of 2,048 elements
// took 15 % longer for 32 inputs, although their accumulators fit the L1 cache.
constexpr std::size_t kBlock = 8192;

// memcpy is the portable unaligned access; compilers turn these loops into vector loads and stores.
inline float load(const unsigned char* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline std::uint32_t load_bits(const unsigned char* p) {
  std::uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

SOCFLOWER_MULTIVERSION
void set_scaled(double* sum, const unsigned char* x, double weight, std::size_t length) {
  // "0.0 +" makes -0 into +0, as a sum that starts at zero does.
  for (std::size_t i = 0; i < length; ++i) sum[i] = 0.0 + weight * static_cast<double>(load(x + 4 * i));
}

// Two inputs per pass halve the traffic of the accumulators; the sums stay in the order of the inputs.
SOCFLOWER_MULTIVERSION
void add_scaled_pair(double* sum, const unsigned char* x, double x_weight, const unsigned char* y,
                     double y_weight, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) {
    const double first = sum[i] + x_weight * static_cast<double>(load(x + 4 * i));
    sum[i] = first + y_weight * static_cast<double>(load(y + 4 * i));
  }
}

SOCFLOWER_MULTIVERSION
void add_scaled(double* sum, const unsigned char* x, double weight, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) sum[i] += weight * static_cast<double>(load(x + 4 * i));
}

SOCFLOWER_MULTIVERSION
void store(unsigned char* out, const double* sum, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) {
    const float value = static_cast<float>(sum[i]);
    std::memcpy(out + 4 * i, &value, sizeof value);
  }
}

SOCFLOWER_MULTIVERSION
bool any_non_finite(const unsigned char* x, std::size_t length) {
  constexpr std::uint32_t kExponent = 0x7f800000u;
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < length; ++i) {
    found |= (load_bits(x + 4 * i) & kExponent) == kExponent ? 1u : 0u;
  }
  return found != 0;
}

}  // namespace

void weighted_sum(unsigned char* out, const unsigned char* const* inputs, const double* weights,
                  std::size_t num_inputs, std::size_t length) noexcept {
  alignas(64) double sum[kBlock];
  for (std::size_t begin = 0; begin < length; begin += kBlock) {
    const std::size_t count = std::min(kBlock, length - begin);
    std::size_t k = 0;
    if (num_inputs == 0) {
      std::fill(sum, sum + count, 0.0);
    } else {
      set_scaled(sum, inputs[0] + 4 * begin, weights[0], count);
      k = 1;
    }
    for (; k + 1 < num_inputs; k += 2) {
      add_scaled_pair(sum, inputs[k] + 4 * begin, weights[k], inputs[k + 1] + 4 * begin, weights[k + 1], count);
    }
    if (k < num_inputs) add_scaled(sum, inputs[k] + 4 * begin, weights[k], count);
    store(out + 4 * begin, sum, count);
  }
}

std::size_t first_non_finite(const unsigned char* x, std::size_t length) noexcept {
  for (std::size_t begin = 0; begin < length; begin += kBlock) {
    const std::size_t count = std::min(kBlock, length - begin);
    if (!any_non_finite(x + 4 * begin, count)) continue;
    std::size_t i = begin;
    while (!any_non_finite(x + 4 * i, 1)) ++i;
    return i;
  }
  return length;
}

}  // namespace socflower
