#include "rows.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "chunks.h"

namespace socflower::int8 {

void row_sums(const Path& path, ThreadPool& pool, const std::int8_t* a, const std::int8_t* b, const double* weight,
              double* sum_a, double* sum_ab, std::size_t rows, int cs) {
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    const std::size_t row = from / cs;
    path.row_sums(a + from, b + from, weight, sum_a + row, sum_ab + row, count / cs, cs);
    return 0u;
  });
}

std::uint32_t row_affine(const Path& path, ThreadPool& pool, const std::int8_t* x, const RowAffine& by,
                         std::int8_t* out, std::size_t rows, int cs, const Requantise& how) {
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    return path.row_affine(x + from, by.from_row(from / cs), at(out, from), count / cs, cs, shifted(how, from));
  });
}

std::uint32_t row_affine_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                                  const RowAffineGradient& by, std::int8_t* out, std::size_t rows, int cs,
                                  const Requantise& how) {
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    return path.row_affine_gradient(dy + from, x + from, by.from_row(from / cs), at(out, from), count / cs, cs,
                                    shifted(how, from));
  });
}

void row_scale_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                        const double* slope, const double* mean, std::int64_t* terms, std::int64_t* sum_dy,
                        std::size_t rows, int cs) {
  std::fill(terms, terms + cs, 0);
  std::fill(sum_dy, sum_dy + cs, 0);
  std::mutex adding;
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    // A chunk has at most kChunk / 16 rows, whose sums a double holds.
    thread_local std::vector<double> own;
    own.assign(std::size_t(2) * cs, 0.0);
    const std::size_t row = from / cs;
    path.row_scale_gradient(dy + from, x + from, slope + row, mean + row, own.data(), own.data() + cs, count / cs,
                            cs);
    const std::lock_guard<std::mutex> lock(adding);
    for (int c = 0; c < cs; ++c) {
      terms[c] += static_cast<std::int64_t>(own[c]);
      sum_dy[c] += static_cast<std::int64_t>(own[cs + c]);
    }
    return 0u;
  });
}

std::uint32_t softmax(const Path& path, ThreadPool& pool, const std::int8_t* x, const std::int32_t* powers,
                      std::int8_t* out, std::size_t rows, int channels, const Requantise& how) {
  const int cs = channel_stride(channels);
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    thread_local std::vector<std::int32_t> scratch;
    scratch.resize(cs);
    return path.softmax(x + from, powers, at(out, from), count / cs, channels, cs, scratch.data(),
                        shifted(how, from));
  });
}

double softmax_gradient_largest(const Path& path, ThreadPool& pool, const std::int8_t* p, const std::int8_t* dy,
                                const SoftmaxGradient& by, std::size_t rows, int cs) {
  std::vector<double> largest(pool.size(), 0.0);
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int thread) {
    const double own = path.softmax_gradient_largest(p + from, dy + from, by, count / cs, cs);
    largest[thread] = std::max(largest[thread], own);
    return 0u;
  });
  return *std::max_element(largest.begin(), largest.end());
}

std::uint32_t softmax_gradient(const Path& path, ThreadPool& pool, const std::int8_t* p, const std::int8_t* dy,
                               const SoftmaxGradient& by, std::int8_t* out, std::size_t rows, int cs,
                               const Requantise& how) {
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    return path.softmax_gradient(p + from, dy + from, by, at(out, from), count / cs, cs, shifted(how, from));
  });
}

void scale_sums(const Path& path, ThreadPool& pool, std::int32_t* acc, std::size_t size, int factor, int drop) {
  over_chunks(pool, size, kChannelBlock, [&](std::size_t from, std::size_t count, int) {
    path.scale_sums(acc + from, count, factor, drop);
    return 0u;
  });
}

void largest_by_image(const double* values, float* largest, std::size_t pixels, int batch, int channels) {
  std::vector<double> most(batch, 0.0);
  for (std::size_t row = 0; row < pixels * batch; ++row) {
    const double* own = values + row * channels;
    double largest_here = 0.0;
    for (int c = 0; c < channels; ++c) {
      const double m = std::fabs(own[c]);
      // What is no number is larger than all.
      largest_here = m <= largest_here ? largest_here : m;
    }
    double& seen = most[row % batch];
    if (!(largest_here <= seen)) seen = largest_here;
  }
  for (int image = 0; image < batch; ++image) largest[image] = static_cast<float>(most[image]);
}

void round_by_image(ThreadPool& pool, const double* values, const float* inverse, std::int8_t* out, std::size_t pixels,
                    int batch, int channels) {
  const int cs = channel_stride(channels);
  // Adding 1.5 * 2^52 to a small double leaves its integer, rounded half to even.
  constexpr double kMagic = 6755399441055744.0;
  over_chunks(pool, pixels * batch * cs, cs, [&](std::size_t from, std::size_t count, int) {
    for (std::size_t row = from / cs; row < (from + count) / cs; ++row) {
      const double scale = inverse[row % batch];
      const double* own = values + row * channels;
      std::int8_t* to = out + row * cs;
      for (int c = 0; c < channels; ++c) {
        const double bounded = std::min(std::max(own[c] * scale, -127.0), 127.0);
        to[c] = static_cast<std::int8_t>((bounded + kMagic) - kMagic);
      }
      std::fill(to + channels, to + cs, static_cast<std::int8_t>(0));
    }
    return 0u;
  });
}

void look_up(ThreadPool& pool, const std::int8_t* x, const std::int8_t* table, std::int8_t* out, std::size_t size) {
  over_chunks(pool, size, 1, [&](std::size_t from, std::size_t count, int) {
    for (std::size_t i = from; i < from + count; ++i) out[i] = table[static_cast<std::uint8_t>(x[i])];
    return 0u;
  });
}

void bytes_seen(const std::int8_t* x, std::uint8_t* seen, std::size_t rows, int channels, int cs) {
  std::fill(seen, seen + 256, 0);
  for (std::size_t r = 0; r < rows; ++r)
    for (int c = 0; c < channels; ++c) seen[static_cast<std::uint8_t>(x[r * cs + c])] = 1;
}

std::uint32_t table_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                             const std::int32_t* table, std::int8_t* out, std::size_t size, const Requantise& how) {
  return over_chunks(pool, size, kChannelBlock, [&](std::size_t from, std::size_t count, int) {
    return path.table_gradient(dy + from, x + from, table, at(out, from), count, shifted(how, from));
  });
}

}  // namespace socflower::int8
