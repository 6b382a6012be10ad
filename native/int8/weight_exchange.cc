#include "weight_exchange.h"

#include <algorithm>
#include <cmath>

namespace socflower::int8 {
namespace {

// A tile is read along one axis and written along the other. 16 x 64 float32 stay in L1 beside their sources, and
// fill whole cache lines both ways.
constexpr int kTileOuts = 16;
constexpr int kTileDepth = 64;

// Calls body(first out, outs, first k, ks) for every tile; a task is a strip of depth, so that no two write the same
// cache line of the engine's side.
template <typename Body>
void over_tiles(ThreadPool& pool, int outs, std::int64_t depth, Body body) {
  const std::int64_t strips = (depth + kTileDepth - 1) / kTileDepth;
  pool.run(static_cast<int>(strips), [&](int strip, int) {
    const std::int64_t k = std::int64_t(strip) * kTileDepth;
    const int ks = static_cast<int>(std::min<std::int64_t>(kTileDepth, depth - k));
    for (int o = 0; o < outs; o += kTileOuts) body(o, std::min(kTileOuts, outs - o), k, ks);
  });
}

}  // namespace

void round_weights(const Path& path, ThreadPool& pool, const float* src, std::int8_t* dst, int outs,
                   std::int64_t depth, int stride, const float* inverse, std::uint32_t seed) {
  over_tiles(pool, outs, depth, [=, &path](int o, int count, std::int64_t k, int ks) {
    float tile[kTileDepth][kTileOuts] = {};
    for (int j = 0; j < count; ++j) {
      const float* row = src + (o + j) * depth + k;
      for (int i = 0; i < ks; ++i) tile[i][j] = row[i] * inverse[o + j];
    }
    for (int i = 0; i < ks; ++i) {
      const std::int64_t index = (k + i) * stride + o;
      path.quantise_at_random(tile[i], dst + index, kTileOuts, 1.0f, static_cast<std::uint32_t>(index), seed);
    }
  });
}

void export_gradient(ThreadPool& pool, const std::int32_t* gradient, float* out, int outs, std::int64_t depth,
                     int stride, const float* scale) {
  over_tiles(pool, outs, depth, [=](int o, int count, std::int64_t k, int ks) {
    float tile[kTileOuts][kTileDepth];
    for (int i = 0; i < ks; ++i) {
      const std::int32_t* row = gradient + (k + i) * stride + o;
      for (int j = 0; j < count; ++j) tile[j][i] = static_cast<float>(row[j]) * scale[o + j];
    }
    for (int j = 0; j < count; ++j) std::copy(tile[j], tile[j] + ks, out + (o + j) * depth + k);
  });
}

}  // namespace socflower::int8
