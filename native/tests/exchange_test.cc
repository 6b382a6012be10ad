// Weights from outside and gradients to it, against the loops that weight_exchange.h states.
#include "weight_exchange.h"

#include <cmath>
#include <limits>
#include <memory>

#include "kernel_test.h"
#include "random24.h"
#include "shape.h"

namespace socflower::int8::test {
namespace {

constexpr int kOuts[] = {1, 15, 16, 17, 100};
constexpr int kDepths[] = {1, 63, 64, 65, 300};
constexpr int kThreads[] = {1, 2, 3, 7};

// Of every size above; a task of its own per strip of depth, so that the threads of a larger pool idle.
const std::vector<std::unique_ptr<ThreadPool>>& pools() {
  static const auto all = [] {
    std::vector<std::unique_ptr<ThreadPool>> made;
    for (const int threads : kThreads) made.push_back(std::make_unique<ThreadPool>(threads));
    return made;
  }();
  return all;
}

void round(const Path& path, Checker& check) {
  Random random(20);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {0.0f, -0.0f, 127.0f, -127.0f, 126.5f, 128.0f, -1e30f, kInfinity, 1e-40f, std::nanf("")};
  constexpr int kNumSpecial = sizeof kSpecial / sizeof kSpecial[0];
  for (const int outs : kOuts)
    for (const int depth : kDepths)
      for (const int exponent : {-9, 0, 4}) {
        const int stride = channel_stride(outs);
        const auto seed = static_cast<std::uint32_t>(random.next());
        // Exact products: a power of two for each channel.
        Buffer<float> inverse(stride);
        for (float& one : inverse) one = std::ldexp(1.0f, random.between(0, 3) - exponent);
        Buffer<float> src(std::size_t(outs) * depth);
        for (float& v : src) {
          const float plain = static_cast<float>(random.between(-127 * 4096, 127 * 4096)) / 4096;
          v = std::ldexp(random.next() % 8 != 0 ? plain : kSpecial[random.next() % kNumSpecial], exponent);
        }
        Buffer<std::int8_t> expected(std::size_t(depth) * stride, 0);
        for (int o = 0; o < outs; ++o)
          for (int k = 0; k < depth; ++k) {
            const float v = src[std::size_t(o) * depth + k];
            const double x = std::isnan(v) ? 0.0 : std::clamp(double(v) * inverse[o], -127.0, 127.0);
            const std::uint32_t index = k * stride + o;
            const double chance = random24(index, seed) / 16777216.0;
            expected[index] = static_cast<std::int8_t>(std::floor(x) + (chance < x - std::floor(x) ? 1 : 0));
          }
        for (const auto& pool : pools()) {
          Buffer<std::int8_t> got(expected.size(), 99);
          round_weights(path, *pool, src.data(), got.data(), outs, depth, stride, inverse.data(), seed);
          check.equal("round_weights", expected.data(), got.data(), got.size(),
                      "outs %d, depth %d, exponent %d, threads %d", outs, depth, exponent, pool->size());
        }
      }
}

void give_out(const Path&, Checker& check) {
  Random random(21);
  for (const int outs : kOuts)
    for (const int depth : kDepths)
      for (const float scale : {1.0f, -0.0f, 0x1p-20f, 3.7e-5f, 1e-38f, 1e30f}) {
        const int stride = channel_stride(outs);
        const Buffer<std::int32_t> gradient = accumulators(random, std::size_t(depth) * stride);  // the padding too
        Buffer<float> scales(stride);
        for (float& one : scales) one = scale * static_cast<float>(random.between(1, 7));
        Buffer<float> expected(std::size_t(outs) * depth);
        for (int o = 0; o < outs; ++o)
          for (int k = 0; k < depth; ++k) {
            expected[std::size_t(o) * depth + k] = static_cast<float>(gradient[std::size_t(k) * stride + o]) * scales[o];
          }
        for (const auto& pool : pools()) {
          Buffer<float> got(expected.size(), 99.0f);
          export_gradient(*pool, gradient.data(), got.data(), outs, depth, stride, scales.data());
          check.equal("export_gradient", expected.data(), got.data(), got.size(),
                      "outs %d, depth %d, scale %g, threads %d", outs, depth, double(scale), pool->size());
        }
      }
}

const Register kRound(round), kGiveOut(give_out);

}  // namespace
}  // namespace socflower::int8::test
