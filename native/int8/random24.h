// Random numbers by counter: no state, so any element can be rounded first, on any thread, with the same outcome.
#pragma once

#include <cstdint>

namespace socflower::int8 {

// What `Path::quantise_at_random` does sixteen at a time.
// The number of element `index` under `seed`, uniform in 0 .. 2^32 - 1, and in 0 .. 2^24 - 1 (as many as a float32
// holds exactly).
inline std::uint32_t random32(std::uint32_t index, std::uint32_t seed) {
  std::uint32_t x = index * 0x9E3779B1u + seed;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}
inline std::uint32_t random24(std::uint32_t index, std::uint32_t seed) { return random32(index, seed) >> 8; }

// The number of element `index` when a gradient is rounded, uniform in 0 .. 2^32 - 1. A block of sixteen channels
// draws once, and its elements follow at steps of the golden ratio: that spreads them evenly, and costs an addition.
constexpr std::uint32_t kGoldenStep = 0x9E3779B9u;
inline std::uint32_t dither32(std::uint32_t index, std::uint32_t seed) {
  return random32(index & ~15u, seed) + (index & 15u) * kGoldenStep;
}

// Where the rows of a tensor (height, width, batch, channel stride) lie in that of a whole batch, of which its batch
// is a share: an element has one number, in whatever shares the batch is computed.
struct Dither {
  std::uint32_t seed;
  int batch;  // images of the share
  int total;  // images of the whole batch
  int first;  // position of the share's first image in it

  // The number of the first element of row `row` of the share.
  std::uint32_t index_of(std::size_t row, int cs) const {
    const std::size_t pixel = row / batch, image = row % batch;
    return static_cast<std::uint32_t>((pixel * total + first + image) * cs);
  }
};

}  // namespace socflower::int8
