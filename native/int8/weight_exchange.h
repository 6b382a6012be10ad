// Weights that come from outside and gradients that leave: float32 (outs, depth), as a channels-last torch weight
// (out, kernel height, kernel width, in) lies in memory, against the engine's (depth, stride) of shape.h.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"

namespace socflower::int8 {

// dst[k][o] = src[o][k] * inverse[o], in float32, rounded down or up at random so that its expectation is exact, saturated at
// +-127; zero in the padding of the channels. Which way an element goes depends on `seed` and its index alone: same
// bits on every machine and for any number of threads.
void round_weights(const Path& path, ThreadPool& pool, const float* src, std::int8_t* dst, int outs,
                   std::int64_t depth, int stride, const float* inverse, std::uint32_t seed);

// out[o][k] = gradient[k][o] * scale[o], in float32.
void export_gradient(ThreadPool& pool, const std::int32_t* gradient, float* out, int outs, std::int64_t depth,
                     int stride, const float* scale);

}  // namespace socflower::int8
