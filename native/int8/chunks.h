// How element-wise work is spread over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8 {

// Small enough to spread over threads, large enough that a task's start does not show.
constexpr std::size_t kChunk = 32 * 1024;

// Splits [0, size) into chunks of a multiple of `unit` and returns the maximum of body(from, count, thread).
template <typename Body>
std::uint32_t over_chunks(ThreadPool& pool, std::size_t size, std::size_t unit, Body body) {
  const std::size_t chunk = std::max<std::size_t>(1, kChunk / unit) * unit;
  std::atomic<std::uint32_t> largest{0};
  pool.run(static_cast<int>((size + chunk - 1) / chunk), [&](int index, int thread) {
    const std::size_t from = index * chunk;
    raise_to(largest, body(from, std::min(chunk, size - from), thread));
  });
  return largest;
}

inline Requantise shifted(Requantise how, std::size_t from) {
  if (how.mask != nullptr) how.mask += from;
  return how;
}

template <typename T>
T* at(T* base, std::size_t from) {
  return base == nullptr ? nullptr : base + from;
}

}  // namespace socflower::int8
