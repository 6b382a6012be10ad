// Every function of a Path but blocks and packs, against reference.h or the loop that its contract states.
#include <cmath>
#include <limits>

#include "kernel_test.h"
#include "random24.h"

namespace socflower::int8::test {
namespace {

constexpr int kSizes[] = {16, 32, 48, 64, 112, 128, 144, 240, 256, 272, 1008, 1024, 1040};
constexpr Rounding kRoundings[] = {Rounding::kNearest, Rounding::kPseudoStochastic};

// Every Requantise with these shifts, its mask of `size` elements, with and without output.
template <typename Test>
void for_each_requantise(Random& random, std::size_t size, int shift_step, Test test) {
  const Buffer<std::int8_t> mask = filled<std::int8_t>(random, size, random.next() % 2 != 0 ? 0 : 5);
  for (int shift = 0; shift <= 30; shift += shift_step)
    for (const Rounding rounding : kRoundings)
      for (const bool relu : {false, true})
        for (const bool masked : {false, true})
          for (const bool written : {true, false}) {
            if (!written && shift % 10 != 0) continue;
            test(Requantise{shift, rounding, relu, masked ? mask.data() : nullptr}, written);
          }
}

// The maximum and the int8 that `call(out)` gives, against those of accumulators `acc`.
template <typename Call>
void check_requantised(Checker& check, const char* function, const Buffer<std::int32_t>& acc,
                       const Requantise& how, bool written, Call call) {
  const std::size_t size = acc.size();
  Buffer<std::int8_t> expected(size, 99), got(size, 99);
  const std::uint32_t expected_max =
      reference::requantise(acc.data(), written ? expected.data() : nullptr, size, how);
  const std::uint32_t got_max = call(written ? got.data() : nullptr);
  const char* sizes = "size %zu, shift %d, rounding %d, relu %d, mask %d, output %d";
  const int rounding = static_cast<int>(how.rounding), relu = how.relu, masked = how.mask != nullptr;
  check.equal(function, expected.data(), got.data(), size, sizes, size, how.shift, rounding, relu, masked,
              written);
  check.equal((std::string(function) + " maximum").c_str(), &expected_max, &got_max, 1, sizes, size, how.shift,
              rounding, relu, masked, written);
}

void tile(const Path& path, Checker& check, Random& random, int rows, int cols, int gap) {
  const std::ptrdiff_t acc_stride = cols + gap, out_stride = cols + 3 * gap;
  const std::size_t acc_size = (rows - 1) * acc_stride + cols, out_size = (rows - 1) * out_stride + cols;
  const Buffer<std::int32_t> acc = accumulators(random, acc_size);
  const char* sizes = "rows %d, cols %d, gap %d, shift %d, rounding %d, relu %d, mask %d, output %d";
  for_each_requantise(random, out_size, 1, [&](const Requantise& how, bool written) {
    Buffer<std::int8_t> expected(out_size, 99), got(out_size, 99);
    std::uint32_t expected_max = 0;
    for (int r = 0; r < rows; ++r) {
      Requantise row = how;
      if (how.mask != nullptr) row.mask = how.mask + r * out_stride;
      std::int8_t* out = written ? expected.data() + r * out_stride : nullptr;
      expected_max = std::max(expected_max, reference::requantise(acc.data() + r * acc_stride, out, cols, row));
    }
    const std::uint32_t got_max = path.requantise_tile(acc.data(), acc_stride, written ? got.data() : nullptr,
                                                       out_stride, rows, cols, how);
    const int rounding = static_cast<int>(how.rounding), relu = how.relu, masked = how.mask != nullptr;
    check.equal("requantise_tile", expected.data(), got.data(), out_size, sizes, rows, cols, gap, how.shift,
                rounding, relu, masked, written);
    check.equal("requantise_tile maximum", &expected_max, &got_max, 1, sizes, rows, cols, gap, how.shift,
                rounding, relu, masked, written);
  });

  const Buffer<std::int8_t> mask = filled<std::int8_t>(random, out_size, 0);
  for (const bool relu : {false, true})
    for (const bool masked : {false, true}) {
      Buffer<std::int32_t> expected(out_size, 99), got(out_size, 99);
      std::uint32_t expected_max = 0;
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) {
          std::int32_t x = acc[r * acc_stride + c];
          if ((relu && x < 0) || (masked && mask[r * out_stride + c] <= 0)) x = 0;
          expected[r * out_stride + c] = x;
          expected_max = std::max(expected_max, static_cast<std::uint32_t>(std::abs(x)));
        }
      const std::uint32_t got_max = path.store_tile(acc.data(), acc_stride, got.data(), out_stride, rows, cols,
                                                    relu, masked ? mask.data() : nullptr, out_stride);
      const char* call = "rows %d, cols %d, gap %d, relu %d, mask %d";
      check.equal("store_tile", expected.data(), got.data(), out_size, call, rows, cols, gap, relu, masked);
      check.equal("store_tile maximum", &expected_max, &got_max, 1, call, rows, cols, gap, relu, masked);
    }

  Buffer<std::int32_t> half = acc, expected(out_size, 99), got(out_size, 99);
  std::uint32_t expected_max = 0;
  for (std::int32_t& x : half) x /= 2;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c) {
      const std::int32_t before = accumulators(random, 1)[0] / 2, sum = before + half[r * acc_stride + c];
      got[r * out_stride + c] = before;
      expected[r * out_stride + c] = sum;
      expected_max = std::max(expected_max, static_cast<std::uint32_t>(std::abs(sum)));
    }
  const std::uint32_t got_max = path.add_tile(half.data(), acc_stride, got.data(), out_stride, rows, cols);
  check.equal("add_tile", expected.data(), got.data(), out_size, "rows %d, cols %d, gap %d", rows, cols, gap);
  check.equal("add_tile maximum", &expected_max, &got_max, 1, "rows %d, cols %d, gap %d", rows, cols, gap);
}

void tiles(const Path& path, Checker& check) {
  Random random(3);
  for (const int rows : {1, 2, 3, 4, 6, 12})
    for (const int cols : {16, 32, 48})
      for (const int gap : {0, 5}) tile(path, check, random, rows, cols, gap);
  tile(path, check, random, 1, 1040, 0);
}

void bytes(const Path& path, Checker& check) {
  Random random(4);
  for (const std::size_t size : kSizes)
    for (int fill = 0; fill < kFills; ++fill) {
      const Buffer<std::int8_t> src = filled<std::int8_t>(random, size, fill, -128, 127);
      Buffer<std::int16_t> wide(size), got_wide(size);
      Buffer<std::uint8_t> offset(size), got_offset(size);
      for (std::size_t i = 0; i < size; ++i) {
        wide[i] = src[i];
        offset[i] = static_cast<std::uint8_t>(src[i] + 128);
      }
      path.widen(src.data(), got_wide.data(), size);
      path.offset(src.data(), got_offset.data(), size);
      check.equal("widen", wide.data(), got_wide.data(), size, "size %zu, fill %d", size, fill);
      check.equal("offset", offset.data(), got_offset.data(), size, "size %zu, fill %d", size, fill);

      for (int shift = 0; shift <= 30; ++shift)
        for (const Rounding rounding : kRoundings) {
          const Buffer<std::int32_t> gradient = accumulators(random, size);
          Buffer<std::int8_t> expected = src, got = src;
          reference::update_weight(expected.data(), gradient.data(), size, shift, rounding);
          path.update_weight(got.data(), gradient.data(), size, shift, rounding);
          check.equal("update_weight", expected.data(), got.data(), size,
                      "size %zu, fill %d, shift %d, rounding %d", size, fill, shift,
                      static_cast<int>(rounding));
        }
    }
}

void quantise(const Path& path, Checker& check) {
  Random random(5);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {0.0f,   -0.0f,  0.5f,   -0.5f,     1.5f,       2.5f,  126.5f, -126.5f, 127.49f,
                                127.5f, 128.0f, -1e30f, kInfinity, -kInfinity, 1e30f, 1e-40f, std::nanf("")};
  constexpr int kNumSpecial = sizeof kSpecial / sizeof kSpecial[0];
  for (const std::size_t size : kSizes)
    for (const float scale : {1.0f, 0.25f, 128.0f, 3.7f, 1e20f}) {
      Buffer<float> src(size);
      Buffer<std::int8_t> expected(size), got(size);
      for (std::size_t i = 0; i < size; ++i) {
        const float plain = static_cast<float>(random.between(-1200, 1200)) / 8;
        src[i] = (random.next() % 4 != 0 ? plain : kSpecial[random.next() % kNumSpecial]) / scale;
        const float x = std::isnan(src[i]) ? 0.0f : std::clamp(src[i] * scale, -127.0f, 127.0f);
        expected[i] = static_cast<std::int8_t>(std::nearbyint(x));
      }
      path.quantise(src.data(), got.data(), size, scale);
      check.equal("quantise", expected.data(), got.data(), size, "size %zu, scale %g", size, double(scale));
      const auto index = static_cast<std::uint32_t>(random.next()), seed = static_cast<std::uint32_t>(random.next());
      for (std::size_t i = 0; i < size; ++i) {
        const float x = std::isnan(src[i]) ? 0.0f : std::clamp(src[i] * scale, -127.0f, 127.0f);
        const double down = std::floor(double(x));
        const double chance = random24(index + static_cast<std::uint32_t>(i), seed) / 16777216.0;
        expected[i] = static_cast<std::int8_t>(down + (chance < x - down ? 1 : 0));
      }
      path.quantise_at_random(src.data(), got.data(), size, scale, index, seed);
      check.equal("quantise_at_random", expected.data(), got.data(), size, "size %zu, scale %g, index %u, seed %u", size,
                  double(scale), index, seed);
    }
}

void elementwise(const Path& path, Checker& check) {
  Random random(6);
  for (const std::size_t size : kSizes)
    for (int fill = 0; fill < kFills; ++fill) {
      const Buffer<std::int8_t> a = filled<std::int8_t>(random, size, fill, -128, 127);
      const Buffer<std::int8_t> b = filled<std::int8_t>(random, size, fill, -128, 127);
      const int shift_a = random.between(0, 20), shift_b = fill == 1 ? 20 : random.between(0, 20);
      Buffer<std::int32_t> acc(size);
      for (std::size_t i = 0; i < size; ++i) acc[i] = a[i] * (1 << shift_a) + b[i] * (1 << shift_b);
      for_each_requantise(random, size, 5, [&](const Requantise& how, bool written) {
        check_requantised(check, "add", acc, how, written, [&](std::int8_t* out) {
          return path.add(a.data(), shift_a, b.data(), shift_b, out, size, how);
        });
      });
    }
}

void channels(const Path& path, Checker& check) {
  Random random(7);
  for (const int cs : {16, 32, 48, 112, 512, 1040})
    for (const int rows : {1, 2, 7, 64, 257})
      for (int fill = 0; fill < kFills; ++fill) {
        const std::size_t size = std::size_t(rows) * cs;
        if (size > 40000 && fill > 1) continue;
        const Buffer<std::int8_t> x = filled<std::int8_t>(random, size, fill, -128, 127);
        const Buffer<std::int8_t> dy = filled<std::int8_t>(random, size, fill, -128, 127);
        const Buffer<std::int8_t> gate = filled<std::int8_t>(random, size, 0);
        constexpr int kScaleEnd = (1 << 22) - 1, kOffsetEnd = (1 << 29) - 1;
        const Buffer<std::int32_t> scale = filled<std::int32_t>(random, cs, fill, -kScaleEnd, kScaleEnd);
        const Buffer<std::int32_t> scale_x = filled<std::int32_t>(random, cs, fill, -kScaleEnd, kScaleEnd);
        const Buffer<std::int32_t> offset = filled<std::int32_t>(random, cs, fill, -kOffsetEnd, kOffsetEnd);
        Buffer<std::int32_t> plain(size), gradient(size), gated(size);
        for (std::size_t i = 0; i < size; ++i) {
          const std::size_t c = i % cs;
          plain[i] = scale[c] * x[i] + offset[c];
          gradient[i] = scale[c] * dy[i] + scale_x[c] * x[i] + offset[c];
          gated[i] = scale[c] * (gate[i] > 0 ? dy[i] : 0) + scale_x[c] * x[i] + offset[c];
        }
        for_each_requantise(random, size, size > 4000 ? 30 : 6, [&](const Requantise& how, bool written) {
          check_requantised(check, "affine", plain, how, written, [&](std::int8_t* out) {
            return path.affine(x.data(), scale.data(), offset.data(), out, rows, cs, how);
          });
          const auto call = [&](const std::int8_t* g, std::int8_t* out) {
            return path.affine_gradient(dy.data(), x.data(), g, scale.data(), scale_x.data(), offset.data(),
                                        out, rows, cs, how);
          };
          check_requantised(check, "affine_gradient", gradient, how, written,
                            [&](std::int8_t* out) { return call(nullptr, out); });
          check_requantised(check, "affine_gradient (gate)", gated, how, written,
                            [&](std::int8_t* out) { return call(gate.data(), out); });
        });
        for (const bool with_gate : {false, true}) {
          const std::int8_t* g = with_gate ? gate.data() : nullptr;
          Buffer<std::int64_t> sum(cs), product(cs), got_sum(cs, 7), got_product(cs, 7);
          reference::channel_sums(dy.data(), x.data(), g, sum.data(), product.data(), rows, cs);
          path.channel_sums(dy.data(), x.data(), g, got_sum.data(), got_product.data(), rows, cs);
          const char* sizes = "rows %d, cs %d, gate %d, fill %d";
          check.equal("channel_sums a", sum.data(), got_sum.data(), cs, sizes, rows, cs, with_gate, fill);
          check.equal("channel_sums ab", product.data(), got_product.data(), cs, sizes, rows, cs, with_gate,
                      fill);
        }
        Buffer<std::int32_t> expected = filled<std::int32_t>(random, cs, 0, -1000, 1000), got = expected;
        for (std::size_t i = 0; i < size; ++i) expected[i % cs] += x[i] * dy[i];
        path.depthwise_weight_gradient(x.data(), dy.data(), rows, cs, got.data());
        check.equal("depthwise_weight_gradient", expected.data(), got.data(), cs, "rows %d, cs %d, fill %d",
                    rows, cs, fill);
      }
}

void depthwise(const Path& path, Checker& check) {
  Random random(8);
  for (const int cs : {16, 32, 48, 80})
    for (const int rows : {1, 2, 3, 8})
      for (int taps = 0; taps <= 10; ++taps)
        for (int fill = 0; fill < kFills; ++fill)
          for (const bool has_init : {false, true}) {
            const std::size_t size = std::size_t(rows) * cs;
            std::vector<Buffer<std::int8_t>> x, w;
            std::vector<const std::int8_t*> x_at, w_at;
            for (int s = 0; s < taps; ++s) {
              x.push_back(filled<std::int8_t>(random, size, fill, -128, 127));
              w.push_back(filled<std::int8_t>(random, cs, fill, -128, 127));
            }
            for (int s = 0; s < taps; ++s) {
              x_at.push_back(x[s].data());
              w_at.push_back(w[s].data());
            }
            const Buffer<std::int32_t> init = filled<std::int32_t>(random, cs, 0, -100000, 100000);
            Buffer<std::int32_t> expected(size), got(size, 99);
            for (std::size_t i = 0; i < size; ++i) {
              expected[i] = has_init ? init[i % cs] : 0;
              for (int s = 0; s < taps; ++s) expected[i] += x[s][i] * w[s][i % cs];
            }
            path.depthwise(x_at.data(), w_at.data(), taps, has_init ? init.data() : nullptr, got.data(), rows,
                           cs);
            check.equal("depthwise", expected.data(), got.data(), size,
                        "rows %d, cs %d, taps %d, fill %d, init %d", rows, cs, taps, fill, has_init);
          }
}

void pooling(const Path& path, Checker& check) {
  Random random(9);
  for (const std::size_t size : {16, 32, 48, 112, 256, 272})
    for (const int taps : {0, 1, 2, 3, 4, 5, 6, 9, 10, 49})
      for (int fill = 0; fill < kFills; ++fill) {
        std::vector<Buffer<std::int8_t>> x;
        std::vector<Buffer<std::uint8_t>> argmax;
        std::vector<const std::int8_t*> x_at;
        std::vector<const std::uint8_t*> argmax_at;
        std::vector<std::uint8_t> tap;
        for (int s = 0; s < taps; ++s) {
          x.push_back(filled<std::int8_t>(random, size, fill, -128, 127));
          argmax.push_back(filled<std::uint8_t>(random, size, 0, 197, 202));
          tap.push_back(static_cast<std::uint8_t>(200 + s));
        }
        for (int s = 0; s < taps; ++s) {
          x_at.push_back(x[s].data());
          argmax_at.push_back(argmax[s].data());
        }
        const char* sizes = "size %zu, taps %d, fill %d";
        const int multiplier = random.between(-3000, 3000);
        Buffer<std::int8_t> best(size, -128), got_best(size);
        Buffer<std::uint8_t> chosen(size), got_chosen(size);
        Buffer<std::int32_t> sum(size, 0), gradient(size, 0);
        for (std::size_t i = 0; i < size; ++i)
          for (int s = 0; s < taps; ++s) {
            if (s == 0 || x[s][i] > best[i]) best[i] = x[s][i], chosen[i] = tap[s];
            sum[i] += multiplier * x[s][i];
            gradient[i] += argmax[s][i] == tap[s] ? x[s][i] : 0;
          }
        if (taps > 0) {
          path.max_of(x_at.data(), tap.data(), taps, got_best.data(), got_chosen.data(), size);
          check.equal("max_of", best.data(), got_best.data(), size, sizes, size, taps, fill);
          check.equal("max_of argmax", chosen.data(), got_chosen.data(), size, sizes, size, taps, fill);
        }
        for_each_requantise(random, size, 10, [&](const Requantise& how, bool written) {
          check_requantised(check, "max_gradient_of", gradient, how, written, [&](std::int8_t* out) {
            return path.max_gradient_of(x_at.data(), argmax_at.data(), tap.data(), taps, out, size, how);
          });
          check_requantised(check, "sum_of", sum, how, written, [&](std::int8_t* out) {
            return path.sum_of(x_at.data(), taps, multiplier, out, size, how);
          });
        });
      }
}

const Register kTiles(tiles), kBytes(bytes), kQuantise(quantise), kElementwise(elementwise);
const Register kChannels(channels), kDepthwise(depthwise), kPooling(pooling);

}  // namespace
}  // namespace socflower::int8::test
