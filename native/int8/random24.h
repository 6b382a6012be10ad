// Random numbers by counter: no state, so any element can be rounded first, on any thread, with the same outcome.
#pragma once

#include <cstdint>

namespace socflower::int8 {

// What `Path::quantise_at_random` does sixteen at a time.
// The number of element `index` under `seed`, uniform in 0 .. 2^24 - 1 (as many as a float32 holds exactly).
inline std::uint32_t random24(std::uint32_t index, std::uint32_t seed) {
  std::uint32_t x = index * 0x9E3779B1u + seed;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return (x ^ (x >> 16)) >> 8;
}

}  // namespace socflower::int8
