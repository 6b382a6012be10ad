// The functions of a Path that serve real scales and dithered gradients, against reference.h.
#include <cmath>

#include "kernel_test.h"
#include "random24.h"

namespace socflower::int8::test {
namespace {

constexpr int kColumns[] = {16, 32, 48, 112, 144};
constexpr int kRows[] = {1, 2, 7, 64};

// A share of a batch: its images, those of the whole batch, and the position of its first image.
struct Share {
  int batch, total, first;
};
constexpr Share kShares[] = {{1, 1, 0}, {3, 3, 0}, {2, 9, 4}, {64, 64, 0}};

void at_random(const Path& path, Checker& check) {
  Random random(22);
  constexpr int kScaleEnd = (1 << 22) - 1, kOffsetEnd = (1 << 29) - 1;
  for (const int cs : kColumns)
    for (const int rows : kRows)
      for (int fill = 0; fill < kFills; ++fill)
        for (const Share& share : kShares) {
          const std::size_t size = std::size_t(rows) * cs;
          const Buffer<std::int8_t> x = filled<std::int8_t>(random, size, fill, -128, 127);
          const Buffer<std::int8_t> dy = filled<std::int8_t>(random, size, fill, -128, 127);
          const Buffer<std::int8_t> gate = filled<std::int8_t>(random, size, 0);
          const Buffer<std::int32_t> scale = filled<std::int32_t>(random, cs, fill, -kScaleEnd, kScaleEnd);
          const Buffer<std::int32_t> scale_x = filled<std::int32_t>(random, cs, fill, -kScaleEnd, kScaleEnd);
          const Buffer<std::int32_t> offset = filled<std::int32_t>(random, cs, fill, -kOffsetEnd, kOffsetEnd);
          const Dither dither{random.next(), share.batch, share.total, share.first};
          // A thread's rows begin anywhere.
          const std::size_t row = random.next() % 1000;
          for (const int shift : {0, 1, 7, 16, 23, 30})
            for (const bool gated : {false, true})
              for (const bool written : {true, false}) {
                Buffer<std::int8_t> expected(size, 99), got(size, 99);
                const std::int8_t* g = gated ? gate.data() : nullptr;
                const std::uint32_t expected_max = reference::affine_gradient_at_random(
                    dy.data(), x.data(), g, scale.data(), scale_x.data(), offset.data(),
                    written ? expected.data() : nullptr, rows, cs, shift, dither, row);
                const std::uint32_t got_max = path.affine_gradient_at_random(
                    dy.data(), x.data(), g, scale.data(), scale_x.data(), offset.data(),
                    written ? got.data() : nullptr, rows, cs, shift, dither, row);
                const char* sizes = "rows %d, cs %d, batch %d of %d, shift %d, gate %d, output %d, fill %d";
                check.equal("affine_gradient_at_random", expected.data(), got.data(), size, sizes, rows, cs,
                            share.batch, share.total, shift, gated, written, fill);
                check.equal("affine_gradient_at_random maximum", &expected_max, &got_max, 1, sizes, rows, cs,
                            share.batch, share.total, shift, gated, written, fill);
              }
        }
}

// Scales of every size that occurs, some of them zero or negative.
Buffer<float> scales(Random& random, std::size_t size, int low, int high) {
  Buffer<float> values(size);
  for (float& v : values) {
    const float mantissa = static_cast<float>(random.between(-(1 << 20), 1 << 20)) / (1 << 20);
    v = random.next() % 8 != 0 ? std::ldexp(mantissa, random.between(low, high)) : 0.0f;
  }
  return values;
}

template <typename T, typename Kernel>
void affine_real(Checker& check, const char* function, Random& random, Kernel kernel) {
  for (const int cs : kColumns)
    for (const int rows : kRows)
      for (const int batch : {1, 3, 64})
        for (int fill = 0; fill < kFills; ++fill) {
          const std::size_t size = std::size_t(rows) * cs;
          Buffer<T> acc(size);
          if constexpr (sizeof(T) == 1) {
            acc = filled<T>(random, size, fill, -128, 127);
          } else if (fill == 0) {
            acc = accumulators(random, size);
          } else {
            acc = filled<T>(random, size, fill, -127 * 127 * 600, 127 * 127 * 600);
          }
          const Buffer<std::int8_t> other = filled<std::int8_t>(random, size, fill, -128, 127);
          const Buffer<float> by_image = scales(random, batch, -20, -4), added = scales(random, batch, -9, 2);
          const Buffer<float> scale = scales(random, cs, -4, 4), offset = scales(random, cs, -6, 6);
          const Buffer<float> inverse = scales(random, batch, -2, 8);
          // A thread's rows begin at the row of any image.
          const int image = static_cast<int>(random.next() % batch);
          const auto turned = [&](const Buffer<float>& values) {
            Buffer<float> from(values.size());
            for (int i = 0; i < batch; ++i) from[i] = values[(image + i) % batch];
            return from;
          };
          const Buffer<float> by_image_from = turned(by_image), added_from = turned(added);
          const Buffer<float> inverse_from = turned(inverse);
          for (const bool relu : {false, true})
            for (const bool adds : {false, true})
              for (const int results : {1, 2, 3}) {
                const bool written = (results & 1) != 0, searched = (results & 2) != 0;
                Buffer<std::int8_t> expected(size, 99), got(size, 99);
                Buffer<float> found(batch), lanes(std::size_t(batch) * 16, 0.0f);
                reference::affine_real(acc.data(), by_image_from.data(), scale.data(), offset.data(),
                                       adds ? other.data() : nullptr, adds ? added_from.data() : nullptr,
                                       written ? expected.data() : nullptr, inverse_from.data(),
                                       searched ? found.data() : nullptr, rows, cs, batch, relu);
                kernel(acc.data(), by_image.data(), scale.data(), offset.data(), adds ? other.data() : nullptr,
                       adds ? added.data() : nullptr, written ? got.data() : nullptr, inverse.data(),
                       searched ? lanes.data() : nullptr, rows, cs, batch, image, relu);
                const char* sizes = "rows %d, cs %d, batch %d, image %d, relu %d, other %d, results %d, fill %d";
                check.equal(function, expected.data(), got.data(), size, sizes, rows, cs, batch, image, relu, adds,
                            results, fill);
                if (!searched) continue;
                Buffer<float> largest(batch);
                for (int i = 0; i < batch; ++i) {
                  const float* own = lanes.data() + std::size_t((image + i) % batch) * 16;
                  largest[i] = *std::max_element(own, own + 16);
                }
                check.equal((std::string(function) + " maxima").c_str(), found.data(), largest.data(), batch, sizes,
                            rows, cs, batch, image, relu, adds, results, fill);
              }
        }
}

void real(const Path& path, Checker& check) {
  Random random(23);
  affine_real<std::int8_t>(check, "affine_real8", random, path.affine_real8);
  affine_real<std::int32_t>(check, "affine_real32", random, path.affine_real32);
}

// The numbers of one ChannelMoments.
struct Moments {
  explicit Moments(int cs) : sums(2 * cs, 99), ends(2 * cs, 99), cs(cs) {}
  ChannelMoments at() { return {sums.data(), sums.data() + cs, ends.data(), ends.data() + cs}; }

  Buffer<std::int64_t> sums;
  Buffer<std::int32_t> ends;
  int cs;
};

void moments(const Path& path, Checker& check) {
  Random random(24);
  for (const int cs : kColumns)
    for (const int rows : {1, 2, 7, 64, 300, 1100})
      for (const int bits : {1, 8, 21, 27, 30})
        for (int fill = 0; fill < kFills; ++fill) {
          const std::int64_t end = (std::int64_t(1) << bits) - 1;
          const auto low = static_cast<std::int32_t>(-end), high = static_cast<std::int32_t>(end);
          const auto acc = filled<std::int32_t>(random, std::size_t(rows) * cs, fill, low, high);
          const int shift = bits <= 20 ? 0 : bits - 20;
          Moments expected(cs), got(cs);
          reference::channel_moments(acc.data(), shift, expected.at(), rows, cs);
          path.channel_moments(acc.data(), shift, got.at(), rows, cs);
          const char* sizes = "rows %d, cs %d, bits %d, fill %d";
          check.equal("channel_moments", expected.sums.data(), got.sums.data(), 2 * cs, sizes, rows, cs, bits, fill);
          check.equal("channel_moments ends", expected.ends.data(), got.ends.data(), 2 * cs, sizes, rows, cs, bits,
                      fill);
        }
}

void largest(const Path& path, Checker& check) {
  Random random(25);
  for (const int cs : kColumns)
    for (const int rows : {1, 2, 7, 64, 300, 1100})
      for (const bool gated : {false, true})
        for (int fill = 0; fill < kFills; ++fill) {
          const std::size_t size = std::size_t(rows) * cs;
          const auto a = filled<std::int8_t>(random, size, fill), gate = filled<std::int8_t>(random, size, 0);
          Buffer<std::int32_t> expected(cs, 99), got(cs, 99);
          const std::int8_t* g = gated ? gate.data() : nullptr;
          reference::channel_largest(a.data(), g, expected.data(), rows, cs);
          path.channel_largest(a.data(), g, got.data(), rows, cs);
          check.equal("channel_largest", expected.data(), got.data(), cs, "rows %d, cs %d, gate %d, fill %d", rows, cs,
                      gated, fill);
        }
}

void largest_accumulators(const Path& path, Checker& check) {
  Random random(26);
  for (const int cs : kColumns)
    for (const int rows : {1, 2, 7, 64, 300})
      for (int fill = 0; fill < kFills; ++fill) {
        const auto acc = filled<std::int32_t>(random, std::size_t(rows) * cs, fill, -0x7fffffff, 0x7fffffff);
        Buffer<std::int32_t> expected(cs, 99), got(cs, 99);
        reference::channel_largest32(acc.data(), expected.data(), rows, cs);
        path.channel_largest32(acc.data(), got.data(), rows, cs);
        check.equal("channel_largest32", expected.data(), got.data(), cs, "rows %d, cs %d, fill %d", rows, cs, fill);
      }
}

// What reads accumulators and writes int8: of one function of them at random, and of two.
void rounded(const Path& path, Checker& check) {
  Random random(27);
  for (const int cs : kColumns)
    for (const int rows : kRows)
      for (int fill = 0; fill < kFills; ++fill) {
        const std::size_t size = std::size_t(rows) * cs;
        const auto acc = filled<std::int32_t>(random, size, fill, -127 * 127 * 600, 127 * 127 * 600);
        const Buffer<float> one = scales(random, cs, -18, -12), other = scales(random, cs, -20, 2);
        const Buffer<float> offset = scales(random, cs, -6, 6), shift = scales(random, cs, -6, 6);
        const char* sizes = "rows %d, cs %d, relu %d, fill %d";
        for (const bool relu : {false, true}) {
          Buffer<std::int8_t> expected(2 * size, 99), got(2 * size, 99);
          const Normalisation by{one.data(), offset.data(), other.data(), shift.data(), 0.75f};
          reference::normalise(acc.data(), by, expected.data(), expected.data() + size, rows, cs, relu);
          path.normalise(acc.data(), by, got.data(), got.data() + size, rows, cs, relu);
          check.equal("normalise", expected.data(), got.data(), 2 * size, sizes, rows, cs, relu, fill);
        }
        for (const Share& share : kShares) {
          Buffer<std::int8_t> expected(size, 99), got(size, 99);
          const Dither dither{random.next(), share.batch, share.total, share.first};
          const std::size_t row = random.next() % 1000;
          reference::round_at_random(acc.data(), one.data(), expected.data(), rows, cs, dither, row);
          path.round_at_random(acc.data(), one.data(), got.data(), rows, cs, dither, row);
          check.equal("round_at_random", expected.data(), got.data(), size, sizes, rows, cs, share.total, fill);
        }
      }
}

const Register kAtRandom(at_random), kReal(real), kMoments(moments), kLargest(largest),
    kLargestAccumulators(largest_accumulators), kRounded(rounded);

}  // namespace
}  // namespace socflower::int8::test
