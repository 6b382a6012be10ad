// Tests of the kernel paths against the specification (reference.h), without Python or a framework, so that
// they also run under an emulator and under sanitisers. A file of tests registers suites; main() runs every
// suite on every path. The first mismatch ends the program with status 1.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#include "reference.h"

namespace socflower::int8::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint32_t next() {  // splitmix64
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 32);
  }
  int between(int low, int high) {  // both included; the range may be wider than an int
    const auto width = static_cast<std::uint64_t>(static_cast<std::int64_t>(high) - low) + 1;
    return static_cast<int>(low + static_cast<std::int64_t>(next() % width));
  }

 private:
  std::uint64_t state_;
};

// `size` elements that end where their heap block ends, so that a sanitiser sees an access beyond them, and
// start two elements into it, so that no kernel may count on the alignment of vectors.
template <typename T>
class Buffer {
 public:
  explicit Buffer(std::size_t size) : block_(size + 2), size_(size) {}
  Buffer(std::size_t size, T value) : block_(size + 2, value), size_(size) {}
  T* data() { return block_.data() + 2; }
  const T* data() const { return block_.data() + 2; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  std::size_t size() const { return size_; }

 private:
  std::vector<T> block_;
  std::size_t size_;
};

// Fill 0 is random; the others are all low, all high, zeros, both ends, mostly zeros.
inline constexpr int kFills = 6;

template <typename T>
Buffer<T> filled(Random& random, std::size_t size, int fill, int low = -127, int high = 127) {
  Buffer<T> values(size);
  for (T& v : values) {
    int x = 0;
    switch (fill) {
      case 0: x = random.between(low, high); break;
      case 1: x = low; break;
      case 2: x = high; break;
      case 3: x = 0; break;
      case 4: x = random.next() % 2 != 0 ? low : high; break;
      default: x = random.next() % 8 != 0 ? 0 : random.between(low, high); break;
    }
    v = static_cast<T>(x);
  }
  return values;
}

// Accumulators of every magnitude, most of them near a power of two or an end of the range.
inline Buffer<std::int32_t> accumulators(Random& random, std::size_t size) {
  Buffer<std::int32_t> values(size);
  for (std::int32_t& v : values) {
    const int bits = random.between(0, 31);
    std::uint32_t m = random.next() & ((std::uint64_t{1} << bits) - 1);
    const std::uint32_t power = std::uint32_t{1} << std::min(bits, 30);
    switch (random.next() % 8) {
      case 0: m = power; break;
      case 1: m = power - 1; break;
      case 2: m = power + 1; break;
      case 3: m = 0x7fffffffu; break;
      default: break;
    }
    v = static_cast<std::int32_t>(m);
    if (random.next() % 2 != 0) v = -v;
  }
  return values;
}

class Checker {
 public:
  explicit Checker(const char* path) : path_(path) {}
  long checks() const { return checks_; }

  // Both arrays hold `size` elements; `sizes` (printf) says which call it was.
  template <typename T, typename... Args>
  void equal(const char* function, const T* expected, const T* got, std::size_t size, const char* sizes,
             Args... args) {
    ++checks_;
    if (size == 0 || std::memcmp(expected, got, size * sizeof(T)) == 0) return;
    std::size_t i = 0;
    while (expected[i] == got[i]) ++i;
    std::printf("FAIL path %s, %s, ", path_, function);
    std::printf(sizes, args...);
    std::printf(": index %zu of %zu: expected %lld, got %lld\n", i, size, static_cast<long long>(expected[i]),
                static_cast<long long>(got[i]));
    std::exit(1);
  }

 private:
  const char* path_;
  long checks_ = 0;
};

using Suite = void (*)(const Path& path, Checker& check);

inline std::vector<Suite>& suites() {
  static std::vector<Suite> all;
  return all;
}

struct Register {
  explicit Register(Suite suite) { suites().push_back(suite); }
};

}  // namespace socflower::int8::test
