// Functions over rows with numbers of their own, and products of small matrices, against reference.h.
#include <cmath>
#include <limits>

#include "kernel_test.h"
#include "layers.h"
#include "matrix_products.h"
#include "rows.h"

namespace socflower::int8::test {
namespace {

struct Shape {
  int rows, channels;
  int cs() const { return channel_stride(channels); }
};
constexpr Shape kShapes[] = {{1, 1}, {3, 16}, {7, 17}, {40, 41}, {5, 128}, {2, 1000}};
constexpr const char* kSizes = "rows %d, channels %d, fill %d, shift %d, rounding %d, mask %d";

// int8 whose channels of padding are zero.
Buffer<std::int8_t> tensor(Random& random, const Shape& s, int fill, int low = -127) {
  Buffer<std::int8_t> values = filled<std::int8_t>(random, std::size_t(s.rows) * s.cs(), fill, low);
  for (int r = 0; r < s.rows; ++r)
    for (int c = s.channels; c < s.cs(); ++c) values[std::size_t(r) * s.cs() + c] = 0;
  return values;
}

Buffer<double> numbers(Random& random, std::size_t size, double most, bool whole = false) {
  Buffer<double> made(size);
  for (double& one : made) {
    one = most * (random.between(-1000000, 1000000) / 1e6);
    if (whole) one = std::nearbyint(one);
  }
  return made;
}

Buffer<double> per_channel(Random& random, const Shape& s, double most) {
  Buffer<double> made = numbers(random, s.cs(), most);
  for (int c = s.channels; c < s.cs(); ++c) made[c] = 0.0;
  return made;
}

// Result and maximum of `got`, a call of a path, against those of `want`.
template <typename Want, typename Got>
void check_rounded(Checker& check, const char* function, Random& random, const Shape& s, int fill, Want want, Got got) {
  const std::size_t size = std::size_t(s.rows) * s.cs();
  const Buffer<std::int8_t> mask = filled<std::int8_t>(random, size, 0);
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kPseudoStochastic})
    for (const int shift : {0, 1, 7, 14, 22, 30})
      for (const bool masked : {false, true})
        for (const bool written : {true, false}) {
          const Requantise how{shift, rounding, false, masked ? mask.data() : nullptr};
          Buffer<std::int8_t> expected(size, 99), found(size, 99);
          const std::uint32_t most = want(written ? expected.data() : nullptr, how);
          const std::uint32_t seen = got(written ? found.data() : nullptr, how);
          const int mode = static_cast<int>(rounding);
          check.equal(function, expected.data(), found.data(), size, kSizes, s.rows, s.channels, fill, shift, mode,
                      int(masked));
          check.equal(function, &most, &seen, 1, kSizes, s.rows, s.channels, fill, shift, mode, int(masked));
        }
}

void normalisation(const Path& path, Checker& check, Random& random, const Shape& s, int fill, ThreadPool& pool) {
  const std::size_t rows = s.rows;
  const int cs = s.cs();
  const auto x = tensor(random, s, fill), dy = tensor(random, s, 0);
  const auto gamma = per_channel(random, s, 1.9), beta = per_channel(random, s, 1.0 * (1 << 28));
  const auto slope = numbers(random, rows, 1.0 * (1 << 20)), mean = numbers(random, rows, 120.0);
  const auto scale_x = numbers(random, rows, 1.0 * (1 << 21), true);
  const auto offset = numbers(random, rows, 1.0 * (1 << 28), true);
  auto counted = Buffer<double>(cs, 1.0);
  for (int c = s.channels; c < cs; ++c) counted[c] = 0.0;
  const RowAffine by{gamma.data(), beta.data(), slope.data(), mean.data()};
  check_rounded(check, "row_affine", random, s, fill,
                [&](std::int8_t* out, const Requantise& how) {
                  return reference::row_affine(x.data(), by, out, rows, cs, how);
                },
                [&](std::int8_t* out, const Requantise& how) {
                  return row_affine(path, pool, x.data(), by, out, rows, cs, how);
                });
  const RowAffineGradient back{gamma.data(), counted.data(), slope.data(), scale_x.data(), offset.data()};
  check_rounded(check, "row_affine_gradient", random, s, fill,
                [&](std::int8_t* out, const Requantise& how) {
                  return reference::row_affine_gradient(dy.data(), x.data(), back, out, rows, cs, how);
                },
                [&](std::int8_t* out, const Requantise& how) {
                  return row_affine_gradient(path, pool, dy.data(), x.data(), back, out, rows, cs, how);
                });

  const auto weight = numbers(random, cs, 1.0 * (1 << 21), true);
  Buffer<double> want_a(rows), want_ab(rows), got_a(rows), got_ab(rows);
  reference::row_sums(dy.data(), x.data(), weight.data(), want_a.data(), want_ab.data(), rows, cs);
  row_sums(path, pool, dy.data(), x.data(), weight.data(), got_a.data(), got_ab.data(), rows, cs);
  check.equal("row_sums", want_a.data(), got_a.data(), rows, "rows %d, channels %d", s.rows, s.channels);
  check.equal("row_sums of products", want_ab.data(), got_ab.data(), rows, "rows %d, channels %d", s.rows, s.channels);
  Buffer<std::int64_t> want_terms(cs), want_dy(cs), got_terms(cs), got_dy(cs);
  reference::row_scale_gradient(dy.data(), x.data(), slope.data(), mean.data(), want_terms.data(), want_dy.data(), rows,
                                cs);
  row_scale_gradient(path, pool, dy.data(), x.data(), slope.data(), mean.data(), got_terms.data(), got_dy.data(), rows,
                     cs);
  check.equal("row_scale_gradient", want_terms.data(), got_terms.data(), cs, "rows %d, channels %d", s.rows,
              s.channels);
  check.equal("row_scale_gradient of dy", want_dy.data(), got_dy.data(), cs, "rows %d, channels %d", s.rows,
              s.channels);
}

void softmaxes(const Path& path, Checker& check, Random& random, const Shape& s, int fill, ThreadPool& pool) {
  const std::size_t rows = s.rows;
  const int cs = s.cs();
  const auto x = tensor(random, s, fill), dy = tensor(random, s, 0);
  Buffer<std::int32_t> powers(255);
  const double slope = 0.3 * random.between(0, 1000) / 1000.0;
  for (int d = 0; d < 255; ++d) powers[d] = static_cast<std::int32_t>(std::ldexp(std::exp(-slope * d), 20));
  check_rounded(check, "softmax", random, s, fill,
                [&](std::int8_t* out, const Requantise& how) {
                  return reference::softmax(x.data(), powers.data(), out, rows, s.channels, how);
                },
                [&](std::int8_t* out, const Requantise& how) {
                  return softmax(path, pool, x.data(), powers.data(), out, rows, s.channels, how);
                });
  const auto p = tensor(random, s, fill == 1 ? 3 : fill, 0);
  for (const int drop : {14, 20}) {
    const SoftmaxGradient by{random.between(0, 14), random.between(1 << 14, 1 << 15), drop};
    const double want = reference::softmax_gradient_largest(p.data(), dy.data(), by, rows, cs);
    const double got = softmax_gradient_largest(path, pool, p.data(), dy.data(), by, rows, cs);
    check.equal("softmax_gradient_largest", &want, &got, 1, "rows %d, channels %d", s.rows, s.channels);
    if (std::ldexp(want, -drop) > double(std::numeric_limits<std::int32_t>::max() - 1)) continue;
    check_rounded(check, "softmax_gradient", random, s, fill,
                  [&](std::int8_t* out, const Requantise& how) {
                    return reference::softmax_gradient(p.data(), dy.data(), by, out, rows, cs, how);
                  },
                  [&](std::int8_t* out, const Requantise& how) {
                    return softmax_gradient(path, pool, p.data(), dy.data(), by, out, rows, cs, how);
                  });
  }
}

void descents(const Path& path, Checker& check, Random& random, ThreadPool& pool) {
  constexpr std::size_t kRows = 65;
  constexpr int kChannels = 48;
  constexpr std::size_t kSize = kRows * kChannels;
  for (const float momentum : {0.0f, 0.9f})
    for (const float decay : {0.0f, 5e-4f}) {
      const Buffer<std::int32_t> gradient = accumulators(random, kSize);
      Buffer<float> want(kSize), want_velocity(kSize);
      for (float& one : want) one = static_cast<float>(random.between(-1000000, 1000000)) * 1e-6f;
      for (float& one : want_velocity) one = static_cast<float>(random.between(-1000000, 1000000)) * 1e-7f;
      Buffer<float> got = want, got_velocity = want_velocity;
      Buffer<float> scale(kChannels);
      for (float& one : scale) one = static_cast<float>(random.between(1, 1000)) * 1e-9f;
      const Descent by{1.0f / 48, 0.07f, momentum, decay, 96.0f};
      const bool moves = momentum != 0.0f;
      const float most =
          reference::descend(want.data(), moves ? want_velocity.data() : nullptr, gradient.data(), scale.data(), kRows,
                             kChannels, by);
      Buffer<std::int8_t> rounded(kSize, 99), expected(kSize, 99);
      const float seen = descend(path, pool, got.data(), moves ? got_velocity.data() : nullptr, gradient.data(),
                                 scale.data(), decay == 0.0f ? nullptr : rounded.data(), kRows, kChannels, by);
      if (decay != 0.0f) path.quantise(want.data(), expected.data(), kSize, by.out_scale);
      check.equal("descend, int8", expected.data(), rounded.data(), kSize, "momentum %g, decay %g", momentum, decay);
      check.equal("descend", want.data(), got.data(), kSize, "momentum %g, decay %g", momentum, decay);
      check.equal("descend velocity", want_velocity.data(), got_velocity.data(), kSize, "momentum %g", momentum);
      check.equal("descend largest", &most, &seen, 1, "momentum %g, decay %g", momentum, decay);
      want[7] = std::numeric_limits<float>::quiet_NaN();
      const float lost = descend(path, pool, want.data(), nullptr, gradient.data(), scale.data(), nullptr, kRows,
                                 kChannels, by);
      const float infinite = std::numeric_limits<float>::infinity();
      check.equal("descend without a number", &infinite, &lost, 1, "momentum %g", momentum);
    }
}

void sums(const Path& path, Checker& check, Random& random, ThreadPool& pool) {
  for (const int drop : {0, 1, 9, 20, 21, 30}) {
    Buffer<std::int32_t> want(1040);
    const int factor = drop == 0 ? 1 : random.between(1, std::min(1 << 20, 1 << drop));
    for (std::int32_t& one : want) one = random.between(-0x3fffffff, 0x3fffffff);
    Buffer<std::int32_t> got = want;
    reference::scale_sums(want.data(), want.size(), factor, drop);
    scale_sums(path, pool, got.data(), got.size(), factor, drop);
    check.equal("scale_sums", want.data(), got.data(), want.size(), "factor %d, drop %d", factor, drop);
  }
}

void tables(const Path& path, Checker& check, Random& random, const Shape& s, int fill, ThreadPool& pool) {
  const auto x = tensor(random, s, fill), dy = tensor(random, s, 0);
  Buffer<std::int32_t> table(256);
  for (std::int32_t& one : table) one = random.between(-(1 << 23), 1 << 23);
  check_rounded(check, "table_gradient", random, s, fill,
                [&](std::int8_t* out, const Requantise& how) {
                  return reference::table_gradient(dy.data(), x.data(), table.data(), out, x.size(), how);
                },
                [&](std::int8_t* out, const Requantise& how) {
                  return table_gradient(path, pool, dy.data(), x.data(), table.data(), out, x.size(), how);
                });
}

void products(const Path& path, Checker& check, Random& random, const MatrixProducts& s, int fill, ThreadPool& pool) {
  const Shape left{s.batches * s.left_rows() * s.samples, s.left_cols()};
  const Shape right{s.batches * s.right_rows() * s.samples, s.right_cols()};
  const Shape made{s.batches * s.rows * s.samples, s.cols};
  const auto a = tensor(random, left, fill), b = tensor(random, right, 0);
  const std::size_t size = std::size_t(made.rows) * made.cs();
  Buffer<std::int32_t> want(size, 0), got(size, 99);
  std::uint32_t most = 0;
  const auto at = [&](const Buffer<std::int8_t>& values, int pixel, int sample, int channel, int cs) {
    return int(values[(std::size_t(pixel) * s.samples + sample) * cs + channel]);
  };
  for (int batch = 0; batch < s.batches; ++batch)
    for (int sample = 0; sample < s.samples; ++sample)
      for (int m = 0; m < s.rows; ++m)
        for (int n = 0; n < s.cols; ++n) {
          std::int32_t sum = 0;
          for (int k = 0; k < s.depth; ++k) {
            const bool turn_left = s.transposed == Transposed::kLeft, turn_right = s.transposed == Transposed::kRight;
            const int of_left = at(a, batch * s.left_rows() + (turn_left ? k : m), sample, turn_left ? m : k, left.cs());
            const int of_right =
                at(b, batch * s.right_rows() + (turn_right ? n : k), sample, turn_right ? k : n, right.cs());
            sum += of_left * of_right;
          }
          want[(std::size_t(batch * s.rows + m) * s.samples + sample) * made.cs() + n] = sum;
          most = std::max(most, static_cast<std::uint32_t>(std::abs(sum)));
        }
  std::vector<std::uint8_t> workspace(matrix_products_bytes(path, s, pool.size()));
  const std::uint32_t seen = multiply(path, pool, s, a.data(), b.data(), got.data(), workspace.data());
  const char* sizes = "batches %d, samples %d, rows %d, cols %d, depth %d, transposed %d, fill %d";
  const int turned = static_cast<int>(s.transposed);
  check.equal("matrix products", want.data(), got.data(), size, sizes, s.batches, s.samples, s.rows, s.cols, s.depth,
              turned, fill);
  check.equal("matrix products maximum", &most, &seen, 1, sizes, s.batches, s.samples, s.rows, s.cols, s.depth, turned,
              fill);
}

void rows(const Path& path, Checker& check) {
  Random random(29);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    sums(path, check, random, pool);
    descents(path, check, random, pool);
    for (const Shape& s : kShapes)
      for (int fill = 0; fill < kFills; ++fill) {
        normalisation(path, check, random, s, fill, pool);
        softmaxes(path, check, random, s, fill, pool);
        tables(path, check, random, s, fill, pool);
      }
    for (const Transposed transposed : {Transposed::kNeither, Transposed::kRight, Transposed::kLeft})
      for (int fill = 0; fill < kFills; ++fill)
        for (const int cols : {1, 15, 33, 64, 65}) {
          const MatrixProducts shape{random.between(1, 3), random.between(1, 4), random.between(1, 40), cols,
                                     random.between(1, 70), transposed};
          products(path, check, random, shape, fill, pool);
        }
  }
}

const Register registered(rows);

}  // namespace
}  // namespace socflower::int8::test
