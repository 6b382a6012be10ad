#include "layers.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "chunks.h"

namespace socflower::int8 {
namespace {

const PoolShape& checked(const PoolShape& s) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument("pooling: " + what); };
  if (s.batch < 1 || s.in_h < 1 || s.in_w < 1 || s.channels < 1 || s.kernel_h < 1 || s.kernel_w < 1 ||
      s.stride_h < 1 || s.stride_w < 1 || s.pad_h < 0 || s.pad_w < 0) {
    refuse("sizes and strides must be at least 1 and padding at least 0");
  }
  if (std::max({s.batch, s.in_h, s.in_w, s.channels, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.pad_h,
                s.pad_w}) > kMostPerDimension) {
    refuse("sizes, strides and padding must be at most " + std::to_string(kMostPerDimension));
  }
  if (std::int64_t(s.kernel_h) * s.kernel_w > 256) {
    refuse("a window of " + std::to_string(s.kernel_h) + "x" + std::to_string(s.kernel_w) +
           " has more than 256 taps");
  }
  if (2 * s.pad_h > s.kernel_h || 2 * s.pad_w > s.kernel_w) refuse("padding must be at most half the window");
  if (s.in_h + 2 * s.pad_h < s.kernel_h || s.in_w + 2 * s.pad_w < s.kernel_w) {
    refuse("a window of " + std::to_string(s.kernel_h) + "x" + std::to_string(s.kernel_w) +
           " does not fit into an input of " + std::to_string(s.in_h) + "x" + std::to_string(s.in_w));
  }
  if (double(s.in_h) * s.in_w > 1e8 || double(s.in_h) * s.in_w * s.batch * s.channels > 1e12) {
    refuse("the input would have more elements than any machine here can hold");
  }
  return s;
}

ConvShape as_convolution(const PoolShape& s) {
  return {s.batch,    s.in_h,     s.in_w,     s.channels, s.channels, s.kernel_h,
          s.kernel_w, s.stride_h, s.stride_w, s.pad_h,    s.pad_w,    s.channels};
}

}  // namespace

std::uint32_t requantise(const Path& path, ThreadPool& pool, const std::int32_t* acc, std::int8_t* out,
                         std::size_t size, const Requantise& how) {
  return over_chunks(pool, size, kChannelBlock, [&](std::size_t from, std::size_t count, int) {
    return path.requantise_tile(acc + from, 0, at(out, from), 0, 1, static_cast<int>(count), shifted(how, from));
  });
}

std::uint32_t add(const Path& path, ThreadPool& pool, const std::int8_t* a, int shift_a, const std::int8_t* b,
                  int shift_b, std::int8_t* out, std::size_t size, const Requantise& how) {
  return over_chunks(pool, size, kChannelBlock, [&](std::size_t from, std::size_t count, int) {
    return path.add(a + from, shift_a, b + from, shift_b, at(out, from), count, shifted(how, from));
  });
}

std::uint32_t affine(const Path& path, ThreadPool& pool, const std::int8_t* x, const std::int32_t* scale,
                     const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs, const Requantise& how) {
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    return path.affine(x + from, scale, offset, at(out, from), count / cs, cs, shifted(how, from));
  });
}

std::uint32_t affine_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                              const std::int8_t* gate, const std::int32_t* scale_dy, const std::int32_t* scale_x,
                              const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                              const Requantise& how) {
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    return path.affine_gradient(dy + from, x + from, at(gate, from), scale_dy, scale_x, offset, at(out, from),
                                count / cs, cs, shifted(how, from));
  });
}

std::uint32_t affine_gradient_at_random(const Path& path, ThreadPool& pool, const std::int8_t* dy,
                                        const std::int8_t* x, const std::int8_t* gate, const std::int32_t* scale_dy,
                                        const std::int32_t* scale_x, const std::int32_t* offset, std::int8_t* out,
                                        std::size_t rows, int cs, int shift, const Dither& dither) {
  return over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    return path.affine_gradient_at_random(dy + from, x + from, at(gate, from), scale_dy, scale_x, offset,
                                          at(out, from), count / cs, cs, shift, dither, from / cs);
  });
}

template <typename T>
void affine_real(const Path& path, ThreadPool& pool, const T* acc, const float* by_image,
                 const float* scale, const float* offset, const std::int8_t* other, const float* other_by_image,
                 std::int8_t* out, const float* inverse, float* largest, std::size_t rows, int cs, int batch,
                 bool relu) {
  // A maximum for each thread: they are joined below.
  const int parts = pool.size();
  const std::size_t per_part = std::size_t(batch) * kChannelBlock;
  std::vector<float> maxima(largest == nullptr ? 0 : parts * per_part, 0.0f);
  pool.run(parts, [&](int part, int) {
    const std::size_t first = rows * part / parts, last = rows * (part + 1) / parts;
    float* own = largest == nullptr ? nullptr : maxima.data() + part * per_part;
    const auto run = [&](auto kernel) {
      kernel(acc + first * cs, by_image, scale, offset, at(other, first * cs), other_by_image, at(out, first * cs),
             inverse, own, last - first, cs, batch, static_cast<int>(first % batch), relu);
    };
    if constexpr (sizeof(T) == 1) run(path.affine_real8);
    else run(path.affine_real32);
  });
  if (largest == nullptr) return;
  for (int image = 0; image < batch; ++image) {
    largest[image] = 0.0f;
    for (int part = 0; part < parts; ++part) {
      const float* own = maxima.data() + part * per_part + std::size_t(image) * kChannelBlock;
      largest[image] = std::max(largest[image], *std::max_element(own, own + kChannelBlock));
    }
  }
}

template void affine_real(const Path&, ThreadPool&, const std::int8_t*, const float*, const float*, const float*,
                          const std::int8_t*, const float*, std::int8_t*, const float*, float*, std::size_t, int, int,
                          bool);
template void affine_real(const Path&, ThreadPool&, const std::int32_t*, const float*, const float*, const float*,
                          const std::int8_t*, const float*, std::int8_t*, const float*, float*, std::size_t, int, int,
                          bool);

std::size_t channel_sums_size(const ThreadPool& pool, int cs) { return std::size_t(pool.size()) * 2 * cs; }

void channel_sums(const Path& path, ThreadPool& pool, const std::int8_t* a, const std::int8_t* b,
                  const std::int8_t* gate, std::int64_t* sum_a, std::int64_t* sum_ab, std::size_t rows, int cs,
                  std::int64_t* sums) {
  const int parts = pool.size();
  pool.run(parts, [&](int part, int) {
    const std::size_t first = rows * part / parts, last = rows * (part + 1) / parts;
    std::int64_t* mine = sums + std::size_t(part) * 2 * cs;
    path.channel_sums(a + first * cs, b + first * cs, at(gate, first * cs), mine, mine + cs, last - first, cs);
  });
  for (int c = 0; c < cs; ++c) {
    sum_a[c] = sum_ab[c] = 0;
    for (int part = 0; part < parts; ++part) {
      sum_a[c] += sums[std::size_t(part) * 2 * cs + c];
      sum_ab[c] += sums[std::size_t(part) * 2 * cs + cs + c];
    }
  }
}

namespace {

// Joins the maxima of every part: search(first row, rows, maxima of cs channels).
template <typename Search>
void join_largest(ThreadPool& pool, std::int32_t* largest, std::size_t rows, int cs, Search search) {
  const int parts = pool.size();
  std::vector<std::int32_t> own(std::size_t(parts) * cs);
  pool.run(parts, [&](int part, int) {
    const std::size_t first = rows * part / parts, last = rows * (part + 1) / parts;
    search(first, last - first, own.data() + std::size_t(part) * cs);
  });
  for (int c = 0; c < cs; ++c) {
    largest[c] = 0;
    for (int part = 0; part < parts; ++part) largest[c] = std::max(largest[c], own[std::size_t(part) * cs + c]);
  }
}

}  // namespace

void channel_largest(const Path& path, ThreadPool& pool, const std::int8_t* a, const std::int8_t* gate,
                     std::int32_t* largest, std::size_t rows, int cs) {
  join_largest(pool, largest, rows, cs, [&](std::size_t first, std::size_t count, std::int32_t* own) {
    path.channel_largest(a + first * cs, at(gate, first * cs), own, count, cs);
  });
}

void channel_largest(const Path& path, ThreadPool& pool, const std::int32_t* acc, std::int32_t* largest,
                     std::size_t rows, int cs) {
  join_largest(pool, largest, rows, cs, [&](std::size_t first, std::size_t count, std::int32_t* own) {
    path.channel_largest32(acc + first * cs, own, count, cs);
  });
}

void normalise(const Path& path, ThreadPool& pool, const std::int32_t* acc, const Normalisation& by, std::int8_t* x,
               std::int8_t* out, std::size_t rows, int cs, bool relu) {
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    path.normalise(acc + from, by, x + from, out + from, count / cs, cs, relu);
    return 0u;
  });
}

void channel_moments(const Path& path, ThreadPool& pool, const std::int32_t* acc, int shift, const ChannelMoments& to,
                     std::size_t rows, int cs, std::int64_t* sums) {
  const int parts = pool.size();
  std::vector<std::int32_t> ends(std::size_t(parts) * 2 * cs);
  pool.run(parts, [&](int part, int) {
    const std::size_t first = rows * part / parts, last = rows * (part + 1) / parts;
    std::int64_t* mine = sums + std::size_t(part) * 2 * cs;
    std::int32_t* own_ends = ends.data() + std::size_t(part) * 2 * cs;
    path.channel_moments(acc + first * cs, shift, {mine, mine + cs, own_ends, own_ends + cs}, last - first, cs);
  });
  for (int c = 0; c < cs; ++c) {
    to.sum[c] = to.squares[c] = 0;
    to.least[c] = ends[c], to.most[c] = ends[cs + c];
    for (int part = 0; part < parts; ++part) {
      const std::size_t own = std::size_t(part) * 2 * cs + c;
      to.sum[c] += sums[own];
      to.squares[c] += sums[own + cs];
      to.least[c] = std::min(to.least[c], ends[own]);
      to.most[c] = std::max(to.most[c], ends[own + cs]);
    }
  }
}

void update_weight(const Path& path, ThreadPool& pool, std::int8_t* weight, const std::int32_t* gradient,
                   std::size_t size, int shift, Rounding rounding) {
  over_chunks(pool, size, kChannelBlock, [&](std::size_t from, std::size_t count, int) {
    path.update_weight(weight + from, gradient + from, count, shift, rounding);
    return 0u;
  });
}

float descend(const Path& path, ThreadPool& pool, float* values, float* velocity, const std::int32_t* gradient,
              const float* scale, std::int8_t* out, std::size_t rows, int cs, const Descent& by) {
  std::vector<float> largest(pool.size(), 0.0f);
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int thread) {
    const float own = path.descend(values + from, at(velocity, from), gradient + from, scale, at(out, from), count / cs,
                                   cs, by);
    largest[thread] = std::max(largest[thread], own);
    return 0u;
  });
  return *std::max_element(largest.begin(), largest.end());
}

void quantise_images(const Path& path, ThreadPool& pool, const float* x, std::int8_t* out, int batch, int channels,
                     int h, int w, int exponent) {
  constexpr int kPixels = 512;
  const int cs = channel_stride(channels), pixels = h * w;
  const float scale = std::ldexp(1.0f, -exponent);
  pool.run(batch, [&](int n, int) {
    alignas(64) float values[kPixels];
    alignas(64) std::int8_t row[kPixels];
    for (int from = 0; from < pixels; from += kPixels) {
      const int count = std::min(kPixels, pixels - from);
      for (int c = 0; c < cs; ++c) {
        std::int8_t* to = out + (std::size_t(from) * batch + n) * cs + c;
        if (c >= channels) {
          for (int p = 0; p < count; ++p) to[std::size_t(p) * batch * cs] = 0;
          continue;
        }
        std::memcpy(values, x + (std::size_t(n) * channels + c) * pixels + from, count * sizeof(float));
        std::fill(values + count, values + (count + 15) / 16 * 16, 0.0f);
        path.quantise(values, row, (count + 15) / 16 * 16, scale);
        for (int p = 0; p < count; ++p) to[std::size_t(p) * batch * cs] = row[p];
      }
    }
  });
}

namespace {

// One output pixel: the patches of all images. Every image but the last may write past its end, into the place of
// the next one, which is written afterwards; so copies are moves of kUnit bytes (kMoves of them, or as many as it
// takes if that is 0).
template <int kUnit, int kMoves>
void gather_pixel(const ConvShape& s, const std::int8_t* corner, std::size_t image_bytes, int row_bytes,
                  std::int8_t* out) {
  const int length = s.kernel_w * s.in_c, total = s.kernel_h * length, stride = channel_stride(total);
  const int moves = kMoves > 0 ? kMoves : (length + kUnit - 1) / kUnit;
  for (int n = 0; n < s.batch - 1; ++n, corner += image_bytes, out += stride) {
    const std::int8_t* from = corner;
    std::int8_t* to = out;
    for (int kh = 0; kh < s.kernel_h; ++kh, from += row_bytes, to += length) {
      for (int i = 0; i < moves; ++i) std::memcpy(to + i * kUnit, from + i * kUnit, kUnit);
    }
    std::memset(out + total, 0, kChannelBlock);
  }
  for (int kh = 0; kh < s.kernel_h; ++kh) std::memcpy(out + kh * length, corner + kh * row_bytes, length);
  std::memset(out + total, 0, stride - total);
}

}  // namespace

std::size_t patch_images_bytes(const ConvShape& s) {
  return std::size_t(s.batch) * (s.in_h + 2 * s.pad_h) * (s.in_w + 2 * s.pad_w) * s.in_c + 16;
}

void quantise_patches(const Path& path, ThreadPool& pool, const ConvShape& s, const float* x, std::int8_t* out,
                      int exponent, std::int8_t* images) {
  const int row_bytes = (s.in_w + 2 * s.pad_w) * s.in_c;
  const std::size_t image_bytes = std::size_t(s.in_h + 2 * s.pad_h) * row_bytes;
  const float scale = std::ldexp(1.0f, -exponent);
  pool.run(s.batch, [&](int n, int) {
    constexpr int kAtOnce = 512;
    alignas(64) float values[kAtOnce];
    alignas(64) std::int8_t row[kAtOnce];
    std::int8_t* image = images + n * image_bytes;
    if (s.pad_h > 0 || s.pad_w > 0) std::memset(image, 0, image_bytes);
    const int pixels = s.in_h * s.in_w;
    for (int c = 0; c < s.in_c; ++c) {
      const float* from = x + (std::size_t(n) * s.in_c + c) * pixels;
      for (int first = 0; first < pixels; first += kAtOnce) {
        const int count = std::min(kAtOnce, pixels - first), padded = (count + 15) / 16 * 16;
        std::memcpy(values, from + first, count * sizeof(float));
        std::fill(values + count, values + padded, 0.0f);
        path.quantise(values, row, padded, scale);
        for (int p = 0; p < count;) {
          const int h = (first + p) / s.in_w, w = (first + p) % s.in_w, run = std::min(s.in_w - w, count - p);
          std::int8_t* to = image + (h + s.pad_h) * row_bytes + (w + s.pad_w) * s.in_c + c;
          if (s.in_c == 1) std::memcpy(to, row + p, run);
          else for (int i = 0; i < run; ++i) to[i * s.in_c] = row[p + i];
          p += run;
        }
      }
    }
  });
  const int stride = channel_stride(s.taps() * s.in_c);
  pool.run(s.out_h(), [&](int oh, int) {
    for (int ow = 0; ow < s.out_w(); ++ow) {
      const std::int8_t* corner = images + oh * s.stride_h * row_bytes + ow * s.stride_w * s.in_c;
      std::int8_t* to = out + (std::size_t(oh) * s.out_w() + ow) * s.batch * stride;
      const int length = s.kernel_w * s.in_c;
      if (length <= 8) {
        gather_pixel<8, 1>(s, corner, image_bytes, row_bytes, to);
      } else if (length <= 16) {
        gather_pixel<16, 1>(s, corner, image_bytes, row_bytes, to);
      } else {
        gather_pixel<16, 0>(s, corner, image_bytes, row_bytes, to);
      }
    }
  });
}

void quantise(const Path& path, ThreadPool& pool, const float* x, std::int8_t* out, std::size_t size, int exponent) {
  const float scale = std::ldexp(1.0f, -exponent);
  over_chunks(pool, size, kChannelBlock, [&](std::size_t from, std::size_t count, int) {
    path.quantise(x + from, out + from, count, scale);
    return 0u;
  });
}

void round_by_channel_at_random(const Path& path, ThreadPool& pool, const std::int32_t* acc, const float* inverse,
                                std::int8_t* out, std::size_t rows, int cs, const Dither& dither) {
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    path.round_at_random(acc + from, inverse, out + from, count / cs, cs, dither, from / cs);
    return 0u;
  });
}

void quantise_by_channel(const Path& path, ThreadPool& pool, const float* x, const float* inverse, std::int8_t* out,
                         std::size_t rows, int cs) {
  over_chunks(pool, rows * cs, cs, [&](std::size_t from, std::size_t count, int) {
    constexpr int kAtOnce = 512;
    alignas(64) float scaled[kAtOnce];
    for (std::size_t row = from; row < from + count; row += cs) {
      for (int c = 0; c < cs; c += kAtOnce) {
        const int here = std::min(kAtOnce, cs - c);
        for (int i = 0; i < here; ++i) scaled[i] = x[row + c + i] * inverse[c + i];
        path.quantise(scaled, out + row + c, here, 1.0f);
      }
    }
    return 0u;
  });
}

namespace {

// Of a group: the bits that every number loses, as a mask, and its largest number.
struct ElementGrid {
  std::uint8_t low, most;
};

// The grids by a group's largest magnitude.
std::vector<ElementGrid> element_grids(int mantissa_bits) {
  std::vector<ElementGrid> grids(129);
  int bits = 0;
  for (int largest = 0; largest <= 128; ++largest) {
    if (largest >> bits != 0) ++bits;
    const int shift = std::min(std::max(bits - mantissa_bits - 3, 0), 4 - mantissa_bits);
    grids[largest].low = static_cast<std::uint8_t>((1 << shift) - 1);
    grids[largest].most = static_cast<std::uint8_t>(((2 << mantissa_bits) - 1) << (shift + 2));
  }
  return grids;
}

// The sixteen numbers of `own` next to its values; number: of the first element, or with `nearest` none. Without shifts
// by lane, so that the compiler vectorises.
void round_block(std::int8_t* own, const ElementGrid* grids, int mantissa_bits, bool nearest, std::uint32_t number) {
  for (int c = 0; c < kChannelBlock; ++c) {
    const int value = own[c], sign = value >> 31, magnitude = (value ^ sign) - sign;
    // Ones below the leading mantissa_bits + 1 bits: all bits of what is above them, and those below its highest one.
    int dropped = magnitude >> (mantissa_bits + 1);
    dropped |= dropped >> 1;
    dropped |= dropped >> 2;
    dropped |= dropped >> 4 | grids[c].low;
    const int odd = ((magnitude & (dropped + 1)) != 0) & dropped & 1;
    const int leading = static_cast<int>((number + c * kGoldenStep) >> 24);
    const int added = nearest ? (dropped >> 1) + odd : leading * (dropped + 1) >> 8;
    const int rounded = std::min((magnitude + added) & ~dropped, int(grids[c].most));
    own[c] = static_cast<std::int8_t>((rounded ^ sign) - sign);
  }
}

}  // namespace

void round_elements(ThreadPool& pool, std::int8_t* x, std::size_t pixels, int images, int cs, int mantissa_bits,
                    const Dither* dither) {
  const std::vector<ElementGrid> by_largest = element_grids(mantissa_bits);
  const std::size_t lanes = std::size_t(images) * cs;
  over_chunks(pool, lanes, cs, [&](std::size_t from, std::size_t count, int) {
    std::vector<std::uint8_t> largest(count, 0);
    for (std::size_t pixel = 0; pixel < pixels; ++pixel) {
      const std::int8_t* own = x + pixel * lanes + from;
      for (std::size_t i = 0; i < count; ++i) {
        largest[i] = std::max(largest[i], static_cast<std::uint8_t>(own[i] < 0 ? -own[i] : own[i]));
      }
    }
    std::vector<ElementGrid> grids(count);
    for (std::size_t i = 0; i < count; ++i) grids[i] = by_largest[largest[i]];
    for (std::size_t pixel = 0; pixel < pixels; ++pixel) {
      for (std::size_t i = 0; i < count; i += kChannelBlock) {
        const std::size_t image = (from + i) / cs, channel = (from + i) % cs;
        // dither32 of sixteen elements begins with a multiple of sixteen.
        const std::uint32_t number =
            dither == nullptr
                ? 0
                : random32(dither->index_of(pixel * images + image, cs) + std::uint32_t(channel), dither->seed);
        round_block(x + pixel * lanes + from + i, grids.data() + i, mantissa_bits, dither == nullptr, number);
      }
    }
    return 0u;
  });
}

template <typename T>
std::int64_t sum_of_magnitudes(const T* x, std::size_t size) {
  // Signs and magnitudes apart, so that the compiler vectorises: |x| = (x ^ sign) - sign.
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::int64_t value = x[i], sign = value >> 63;
    sum += (value ^ sign) - sign;
  }
  return sum;
}

template std::int64_t sum_of_magnitudes(const std::int8_t*, std::size_t);
template std::int64_t sum_of_magnitudes(const std::int32_t*, std::size_t);

void largest_by_channel(const float* x, float* largest, std::size_t rows, int cs) {
  // As in max_magnitude, bit patterns in place of magnitudes.
  std::vector<std::int32_t> bits(cs, 0);
  for (std::size_t r = 0; r < rows; ++r) {
    for (int c = 0; c < cs; ++c) {
      std::int32_t own;
      std::memcpy(&own, x + r * cs + c, sizeof(own));
      own &= 0x7fffffff;
      bits[c] = own > bits[c] ? own : bits[c];
    }
  }
  for (int c = 0; c < cs; ++c) {
    if (bits[c] >= 0x7f800000) largest[c] = std::numeric_limits<float>::infinity();
    else std::memcpy(largest + c, &bits[c], sizeof(float));
  }
}

float max_magnitude(const float* x, std::size_t size) {
  // The bit patterns of magnitudes are ordered as integers, and those of NaN and infinity come last.
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= 0x7f800000) return std::numeric_limits<float>::infinity();
  float value;
  std::memcpy(&value, &largest, sizeof(value));
  return value;
}

Pooling::Pooling(const PoolShape& shape)
    : shape_(checked(shape)),
      by_output_(tap_index(as_convolution(shape), By::kOutput)),
      by_input_(tap_index(as_convolution(shape), By::kInput)) {}

std::size_t Pooling::input_size() const {
  return std::size_t(shape_.in_h) * shape_.in_w * shape_.batch * channel_stride(shape_.channels);
}

std::size_t Pooling::output_size() const {
  return std::size_t(shape_.out_h()) * shape_.out_w() * shape_.batch * channel_stride(shape_.channels);
}

bool Pooling::overlapping() const {
  return shape_.stride_h < shape_.kernel_h || shape_.stride_w < shape_.kernel_w;
}

void Pooling::max(const Path& path, ThreadPool& pool, const std::int8_t* x, std::int8_t* y,
                  std::uint8_t* argmax) const {
  const std::size_t pixel_size = std::size_t(shape_.batch) * channel_stride(shape_.channels);
  pool.run(shape_.out_h() * shape_.out_w(), [&](int pixel, int) {
    const std::int8_t* from[256];
    std::uint8_t tap[256];
    int taps = 0;
    for (int i = by_output_.begin[pixel]; i < by_output_.begin[pixel + 1]; ++i, ++taps) {
      from[taps] = x + by_output_.pairs[i].from * pixel_size;
      tap[taps] = static_cast<std::uint8_t>(by_output_.pairs[i].to);
    }
    path.max_of(from, tap, taps, y + pixel * pixel_size, argmax + pixel * pixel_size, pixel_size);
  });
}

std::uint32_t Pooling::max_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy,
                                    const std::uint8_t* argmax, std::int8_t* dx, const Requantise& how) const {
  const std::size_t pixel_size = std::size_t(shape_.batch) * channel_stride(shape_.channels);
  std::atomic<std::uint32_t> largest{0};
  pool.run(shape_.in_h * shape_.in_w, [&](int pixel, int) {
    const std::int8_t* from[256];
    const std::uint8_t* chosen[256];
    std::uint8_t tap[256];
    int windows = 0;
    for (int i = by_input_.begin[pixel]; i < by_input_.begin[pixel + 1]; ++i, ++windows) {
      from[windows] = dy + by_input_.pairs[i].from * pixel_size;
      chosen[windows] = argmax + by_input_.pairs[i].from * pixel_size;
      tap[windows] = static_cast<std::uint8_t>(by_input_.pairs[i].to);
    }
    raise_to(largest, path.max_gradient_of(from, chosen, tap, windows, at(dx, pixel * pixel_size), pixel_size,
                                           shifted(how, pixel * pixel_size)));
  });
  return largest;
}

namespace {

std::uint32_t sums(const Path& path, ThreadPool& pool, const TapIndex& tap_index, const std::int8_t* x,
                   std::int32_t multiplier, std::int8_t* y, std::size_t pixel_size, const Requantise& how) {
  std::atomic<std::uint32_t> largest{0};
  pool.run(static_cast<int>(tap_index.begin.size()) - 1, [&](int pixel, int) {
    const std::int8_t* from[256];
    int taps = 0;
    for (int i = tap_index.begin[pixel]; i < tap_index.begin[pixel + 1]; ++i) {
      from[taps++] = x + tap_index.pairs[i].from * pixel_size;
    }
    raise_to(largest, path.sum_of(from, taps, multiplier, at(y, pixel * pixel_size), pixel_size,
                                  shifted(how, pixel * pixel_size)));
  });
  return largest;
}

}  // namespace

std::uint32_t Pooling::average(const Path& path, ThreadPool& pool, const std::int8_t* x, std::int32_t multiplier,
                               std::int8_t* y, const Requantise& how) const {
  return sums(path, pool, by_output_, x, multiplier, y,
              std::size_t(shape_.batch) * channel_stride(shape_.channels), how);
}

std::uint32_t Pooling::average_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy,
                                        std::int32_t multiplier, std::int8_t* dx, const Requantise& how) const {
  return sums(path, pool, by_input_, dy, multiplier, dx,
              std::size_t(shape_.batch) * channel_stride(shape_.channels), how);
}

}  // namespace socflower::int8
