#include "reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace socflower::int8::reference {
namespace {

std::int32_t exact_int32(std::int64_t value) {
  if (value < -std::numeric_limits<std::int32_t>::max() || value > std::numeric_limits<std::int32_t>::max()) {
    throw std::overflow_error("accumulator " + std::to_string(value) + " does not fit in int32");
  }
  return static_cast<std::int32_t>(value);
}

std::uint32_t magnitude(std::int32_t value) {
  return value < 0 ? 0u - static_cast<std::uint32_t>(value) : static_cast<std::uint32_t>(value);
}

// One element on its way out (Requantise); keeps the maximum in `largest`.
void put(std::int64_t exact, std::size_t at, std::int8_t* out, const Requantise& how, std::uint32_t& largest) {
  std::int32_t acc = exact_int32(exact);
  if (how.relu && acc < 0) acc = 0;
  if (how.mask != nullptr && how.mask[at] <= 0) acc = 0;
  largest = std::max(largest, magnitude(acc));
  if (out != nullptr) out[at] = round_shift(acc, how.shift, how.rounding);
}

template <typename Shape>
bool tap_position(const Shape& s, int oh, int ow, int kh, int kw, int& ih, int& iw) {
  ih = oh * s.stride_h - s.pad_h + kh;
  iw = ow * s.stride_w - s.pad_w + kw;
  return ih >= 0 && ih < s.in_h && iw >= 0 && iw < s.in_w;
}

// Calls visit(input index, weight index, output index) for every product of the convolution.
template <typename Visit>
void for_each_product(const ConvShape& s, Visit visit) {
  const int in_cs = channel_stride(s.in_c), out_cs = channel_stride(s.out_c);
  for (int oh = 0; oh < s.out_h(); ++oh)
    for (int ow = 0; ow < s.out_w(); ++ow)
      for (int kh = 0; kh < s.kernel_h; ++kh)
        for (int kw = 0; kw < s.kernel_w; ++kw) {
          int ih, iw;
          if (!tap_position(s, oh, ow, kh * s.dilation_h, kw * s.dilation_w, ih, iw)) continue;
          for (int n = 0; n < s.batch; ++n)
            for (int oc = 0; oc < s.out_c; ++oc)
              for (int c = 0; c < s.group_in_c(); ++c) {
                const int ic = oc / s.group_out_c() * s.group_in_c() + c;
                const std::size_t in_at = ((std::size_t(ih) * s.in_w + iw) * s.batch + n) * in_cs + ic;
                const std::size_t w_at = (std::size_t(kh * s.kernel_w + kw) * s.group_in_c() + c) * out_cs + oc;
                const std::size_t out_at = ((std::size_t(oh) * s.out_w() + ow) * s.batch + n) * out_cs + oc;
                visit(in_at, w_at, out_at);
              }
        }
}

void narrow(const std::vector<std::int64_t>& wide, std::int32_t* out) {
  std::transform(wide.begin(), wide.end(), out, exact_int32);
}

}  // namespace

std::int8_t round_shift(std::int32_t acc, int shift, Rounding rounding) {
  const std::uint32_t m = magnitude(acc);
  std::uint32_t rounded = m >> shift;
  const std::uint32_t fallen = m & ((1u << shift) - 1);
  if (rounding == Rounding::kNearest) {
    rounded += shift > 0 ? (fallen >> (shift - 1)) : 0;
  } else {
    const int half = shift / 2;
    const std::uint32_t high = fallen >> half;
    const std::uint32_t low = (fallen & ((1u << half) - 1)) << (shift % 2);
    rounded += high > low ? 1 : 0;
  }
  const auto saturated = static_cast<std::int8_t>(std::min(rounded, 127u));
  return acc < 0 ? static_cast<std::int8_t>(-saturated) : saturated;
}

int shift_for(std::uint32_t max_magnitude, int bits) {
  int length = 0;
  while (length < 32 && (max_magnitude >> length) != 0) ++length;
  return std::max(0, length - bits);
}

void gemm(const std::int8_t* lhs, const std::int8_t* rhs, std::int32_t* out, int rows, int cols, int depth) {
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < cols; ++n) {
      std::int64_t sum = 0;
      for (int k = 0; k < depth; ++k)
        sum += std::int64_t(lhs[std::size_t(m) * depth + k]) * rhs[std::size_t(n) * depth + k];
      out[std::size_t(m) * cols + n] = exact_int32(sum);
    }
}

void convolution(const ConvShape& shape, const std::int8_t* x, const std::int8_t* weight,
                 const std::int32_t* bias, std::int32_t* acc) {
  std::vector<std::int64_t> wide(shape.output_size(), 0);
  const int cs = channel_stride(shape.out_c);
  if (bias != nullptr) {
    for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = int(i % cs) < shape.out_c ? bias[i % cs] : 0;
  }
  for_each_product(shape, [&](std::size_t in_at, std::size_t w_at, std::size_t out_at) {
    wide[out_at] += std::int64_t(x[in_at]) * weight[w_at];
  });
  narrow(wide, acc);
}

void convolution_input_gradient(const ConvShape& shape, const std::int8_t* dy, const std::int8_t* weight,
                                std::int32_t* acc) {
  std::vector<std::int64_t> wide(shape.input_size(), 0);
  for_each_product(shape, [&](std::size_t in_at, std::size_t w_at, std::size_t out_at) {
    wide[in_at] += std::int64_t(dy[out_at]) * weight[w_at];
  });
  narrow(wide, acc);
}

void convolution_weight_gradient(const ConvShape& shape, const std::int8_t* x, const std::int8_t* dy,
                                 std::int32_t* acc) {
  std::vector<std::int64_t> wide(shape.weight_size(), 0);
  for_each_product(shape, [&](std::size_t in_at, std::size_t w_at, std::size_t out_at) {
    wide[w_at] += std::int64_t(x[in_at]) * dy[out_at];
  });
  narrow(wide, acc);
}

std::uint32_t requantise(const std::int32_t* acc, std::int8_t* out, std::size_t size, const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) put(acc[i], i, out, how, largest);
  return largest;
}

std::uint32_t add(const std::int8_t* a, int shift_a, const std::int8_t* b, int shift_b, std::int8_t* out,
                  std::size_t size, const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    put(std::int64_t(a[i]) * (1 << shift_a) + std::int64_t(b[i]) * (1 << shift_b), i, out, how, largest);
  }
  return largest;
}

std::uint32_t affine(const std::int8_t* x, const std::int32_t* scale, const std::int32_t* offset, std::int8_t* out,
                     std::size_t rows, int cs, const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < rows * cs; ++i) {
    put(std::int64_t(scale[i % cs]) * x[i] + offset[i % cs], i, out, how, largest);
  }
  return largest;
}

std::uint32_t affine_gradient(const std::int8_t* dy, const std::int8_t* x, const std::int8_t* gate,
                              const std::int32_t* scale_dy, const std::int32_t* scale_x,
                              const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                              const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const int gated = gate == nullptr || gate[i] > 0 ? dy[i] : 0;
    put(std::int64_t(scale_dy[i % cs]) * gated + std::int64_t(scale_x[i % cs]) * x[i] + offset[i % cs], i, out,
        how, largest);
  }
  return largest;
}

std::uint32_t affine_gradient_at_random(const std::int8_t* dy, const std::int8_t* x, const std::int8_t* gate,
                                        const std::int32_t* scale_dy, const std::int32_t* scale_x,
                                        const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                                        int shift, const Dither& dither, std::size_t row) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const int c = static_cast<int>(i % cs);
    const int gated = gate == nullptr || gate[i] > 0 ? dy[i] : 0;
    const std::int32_t acc =
        exact_int32(std::int64_t(scale_dy[c]) * gated + std::int64_t(scale_x[c]) * x[i] + offset[c]);
    const std::uint32_t m = magnitude(acc);
    largest = std::max(largest, m);
    if (out == nullptr) continue;
    const std::uint64_t number = dither32(dither.index_of(row + i / cs, cs) + c, dither.seed);
    const auto noise = static_cast<std::uint32_t>(number >> (32 - shift));
    const auto rounded = static_cast<std::int8_t>(std::min((m + noise) >> shift, 127u));
    out[i] = acc < 0 ? static_cast<std::int8_t>(-rounded) : rounded;
  }
  return largest;
}

namespace {

// Nearest int8 of v * inverse, half to even, and after a ReLU at least 1 where v > 0.
std::int8_t nearest_int8(float v, float inverse, bool relu) {
  const float bounded = std::min(std::max(v * inverse, -127.0f), 127.0f);
  const auto rounded = static_cast<std::int8_t>(std::nearbyint(bounded));
  return relu && v > 0.0f && rounded == 0 ? std::int8_t{1} : rounded;
}

}  // namespace

void normalise(const std::int32_t* acc, const Normalisation& by, std::int8_t* x, std::int8_t* out, std::size_t rows,
               int cs, bool relu) {
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const std::size_t c = i % cs;
    const float value = static_cast<float>(acc[i]);
    const float own = value * by.own_scale[c], made = value * by.scale[c];
    x[i] = nearest_int8(own + by.own_offset[c], 1.0f, false);
    const float v = made + by.offset[c];
    out[i] = nearest_int8(relu && !(v > 0.0f) ? 0.0f : v, by.inverse, relu);
  }
}

void round_at_random(const std::int32_t* acc, const float* inverse, std::int8_t* out, std::size_t rows, int cs,
                     const Dither& dither, std::size_t row) {
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const std::uint32_t c = static_cast<std::uint32_t>(i % cs);
    const float v = std::min(std::max(static_cast<float>(acc[i]) * inverse[c], -127.0f), 127.0f);
    const float down = std::floor(v);
    const float chance = std::ldexp(float(random24(dither.index_of(row + i / cs, cs) + c, dither.seed)), -24);
    out[i] = static_cast<std::int8_t>(down + (chance < v - down ? 1.0f : 0.0f));
  }
}

template <typename T>
void affine_real(const T* acc, const float* by_image, const float* scale, const float* offset,
                 const std::int8_t* other, const float* other_by_image, std::int8_t* out, const float* inverse,
                 float* largest, std::size_t rows, int cs, int batch, bool relu) {
  if (largest != nullptr) std::fill(largest, largest + batch, 0.0f);
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const int c = static_cast<int>(i % cs), image = static_cast<int>(i / cs % batch);
    const float scaled = static_cast<float>(acc[i]) * by_image[image];
    const float product = scaled * scale[c];
    float v = product + offset[c];
    if (other != nullptr) {
      const float added = static_cast<float>(other[i]) * other_by_image[image];
      v = v + added;
    }
    if (relu && !(v > 0.0f)) v = 0.0f;
    if (largest != nullptr) largest[image] = std::max(largest[image], std::fabs(v));
    if (out == nullptr) continue;
    out[i] = nearest_int8(v, inverse[image], relu);
  }
}

template void affine_real(const std::int8_t*, const float*, const float*, const float*, const std::int8_t*,
                          const float*, std::int8_t*, const float*, float*, std::size_t, int, int, bool);
template void affine_real(const std::int32_t*, const float*, const float*, const float*, const std::int8_t*,
                          const float*, std::int8_t*, const float*, float*, std::size_t, int, int, bool);

void row_sums(const std::int8_t* a, const std::int8_t* b, const double* weight, double* sum_a, double* sum_ab,
              std::size_t rows, int cs) {
  for (std::size_t r = 0; r < rows; ++r) {
    std::int64_t plain = 0, products = 0;
    for (int c = 0; c < cs; ++c) {
      const std::int64_t weighted = std::int64_t(weight[c]) * a[r * cs + c];
      plain += weighted;
      products += weighted * b[r * cs + c];
    }
    sum_a[r] = static_cast<double>(plain);
    sum_ab[r] = static_cast<double>(products);
  }
}

std::uint32_t row_affine(const std::int8_t* x, const RowAffine& by, std::int8_t* out, std::size_t rows, int cs,
                         const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const std::size_t r = i / cs, c = i % cs;
    const double scale = std::nearbyint(by.gamma[c] * by.slope[r]);
    const double below = scale * by.mean[r];
    const double offset = std::nearbyint(by.beta[c] - below);
    put(std::int64_t(scale) * x[i] + std::int64_t(offset), i, out, how, largest);
  }
  return largest;
}

std::uint32_t row_affine_gradient(const std::int8_t* dy, const std::int8_t* x, const RowAffineGradient& by,
                                  std::int8_t* out, std::size_t rows, int cs, const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const std::size_t r = i / cs, c = i % cs;
    const std::int64_t scale(std::nearbyint(by.gamma[c] * by.gain[r]));
    const std::int64_t offset(by.counted[c] * by.offset[r]);
    put(scale * dy[i] + std::int64_t(by.scale_x[r]) * x[i] + offset, i, out, how, largest);
  }
  return largest;
}

void row_scale_gradient(const std::int8_t* dy, const std::int8_t* x, const double* slope, const double* mean,
                        std::int64_t* terms, std::int64_t* sum_dy, std::size_t rows, int cs) {
  std::fill(terms, terms + cs, 0);
  std::fill(sum_dy, sum_dy + cs, 0);
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const double own = dy[i], below = own * mean[i / cs];
    terms[i % cs] += std::int64_t(std::nearbyint((own * x[i] - below) * slope[i / cs]));
    sum_dy[i % cs] += dy[i];
  }
}

std::uint32_t softmax(const std::int8_t* x, const std::int32_t* powers, std::int8_t* out, std::size_t rows,
                      int channels, const Requantise& how) {
  const int cs = channel_stride(channels);
  std::uint32_t largest = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int8_t* own = x + r * cs;
    const int top = *std::max_element(own, own + channels);
    std::int64_t sum = 0;
    for (int c = 0; c < channels; ++c) sum += powers[top - own[c]];
    for (int c = 0; c < cs; ++c) {
      const std::int64_t power = c < channels ? powers[top - own[c]] : 0;
      put(((power << 15) + sum) / (2 * sum), r * cs + c, out, how, largest);
    }
  }
  return largest;
}

namespace {

std::int64_t softmax_gradient_at(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by, int c,
                                 int cs) {
  std::int64_t sum = 0;
  for (int k = 0; k < cs; ++k) sum += p[k] * dy[k];
  return p[c] * (dy[c] * (std::int64_t(1) << by.up) - sum) * by.factor;
}

}  // namespace

double softmax_gradient_largest(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by,
                                std::size_t rows, int cs) {
  std::int64_t largest = 0;
  for (std::size_t r = 0; r < rows; ++r)
    for (int c = 0; c < cs; ++c) {
      largest = std::max(largest, std::abs(softmax_gradient_at(p + r * cs, dy + r * cs, by, c, cs)));
    }
  return static_cast<double>(largest);
}

std::uint32_t softmax_gradient(const std::int8_t* p, const std::int8_t* dy, const SoftmaxGradient& by,
                               std::int8_t* out, std::size_t rows, int cs, const Requantise& how) {
  const std::int64_t half = by.drop > 0 ? std::int64_t(1) << (by.drop - 1) : 0;
  std::uint32_t largest = 0;
  for (std::size_t r = 0; r < rows; ++r)
    for (int c = 0; c < cs; ++c) {
      const std::int64_t made = softmax_gradient_at(p + r * cs, dy + r * cs, by, c, cs);
      const std::int64_t kept = (std::abs(made) + half) >> by.drop;
      put(made < 0 ? -kept : kept, r * cs + c, out, how, largest);
    }
  return largest;
}

void scale_sums(std::int32_t* acc, std::size_t size, int factor, int drop) {
  const std::int64_t half = drop > 0 ? std::int64_t(1) << (drop - 1) : 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::int64_t made = std::int64_t(acc[i]) * factor, kept = (std::abs(made) + half) >> drop;
    acc[i] = exact_int32(made < 0 ? -kept : kept);
  }
}

std::uint32_t table_gradient(const std::int8_t* dy, const std::int8_t* x, const std::int32_t* table,
                             std::int8_t* out, std::size_t size, const Requantise& how) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    put(std::int64_t(table[static_cast<std::uint8_t>(x[i])]) * dy[i], i, out, how, largest);
  }
  return largest;
}

void channel_sums(const std::int8_t* a, const std::int8_t* b, const std::int8_t* gate, std::int64_t* sum_a,
                  std::int64_t* sum_ab, std::size_t rows, int cs) {
  std::fill(sum_a, sum_a + cs, 0);
  std::fill(sum_ab, sum_ab + cs, 0);
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const int gated = gate == nullptr || gate[i] > 0 ? a[i] : 0;
    sum_a[i % cs] += gated;
    sum_ab[i % cs] += gated * b[i];
  }
}

void channel_largest(const std::int8_t* a, const std::int8_t* gate, std::int32_t* largest, std::size_t rows, int cs) {
  std::fill(largest, largest + cs, 0);
  for (std::size_t i = 0; i < rows * cs; ++i) {
    if (gate == nullptr || gate[i] > 0) largest[i % cs] = std::max(largest[i % cs], std::abs(int(a[i])));
  }
}

void channel_largest32(const std::int32_t* acc, std::int32_t* largest, std::size_t rows, int cs) {
  std::fill(largest, largest + cs, 0);
  for (std::size_t i = 0; i < rows * cs; ++i) largest[i % cs] = std::max(largest[i % cs], std::abs(acc[i]));
}

void channel_moments(const std::int32_t* acc, int shift, const ChannelMoments& to, std::size_t rows, int cs) {
  for (int c = 0; c < cs; ++c) {
    to.sum[c] = to.squares[c] = 0;
    to.least[c] = std::numeric_limits<std::int32_t>::max();
    to.most[c] = std::numeric_limits<std::int32_t>::min();
  }
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const std::int64_t half = shift == 0 ? 0 : std::int64_t(1) << (shift - 1);
    const std::int64_t v = (acc[i] + half) >> shift;
    to.sum[i % cs] += v;
    to.squares[i % cs] += v * v;
    to.least[i % cs] = std::min(to.least[i % cs], acc[i]);
    to.most[i % cs] = std::max(to.most[i % cs], acc[i]);
  }
}

void max_pool(const PoolShape& s, const std::int8_t* x, std::int8_t* y, std::uint8_t* argmax) {
  const std::size_t pixel = std::size_t(s.batch) * channel_stride(s.channels);
  for (int oh = 0; oh < s.out_h(); ++oh)
    for (int ow = 0; ow < s.out_w(); ++ow)
      for (std::size_t i = 0; i < pixel; ++i) {
        int best = -129, best_tap = 0;
        for (int tap = 0; tap < s.kernel_h * s.kernel_w; ++tap) {
          int ih, iw;
          if (!tap_position(s, oh, ow, tap / s.kernel_w, tap % s.kernel_w, ih, iw)) continue;
          const int value = x[(std::size_t(ih) * s.in_w + iw) * pixel + i];
          if (value > best) best = value, best_tap = tap;
        }
        const std::size_t out_at = (std::size_t(oh) * s.out_w() + ow) * pixel + i;
        y[out_at] = static_cast<std::int8_t>(best);
        argmax[out_at] = static_cast<std::uint8_t>(best_tap);
      }
}

std::uint32_t max_pool_gradient(const PoolShape& s, const std::int8_t* dy, const std::uint8_t* argmax,
                                std::int8_t* dx, const Requantise& how) {
  const std::size_t pixel = std::size_t(s.batch) * channel_stride(s.channels);
  std::vector<std::int64_t> acc(std::size_t(s.in_h) * s.in_w * pixel, 0);
  for (int oh = 0; oh < s.out_h(); ++oh)
    for (int ow = 0; ow < s.out_w(); ++ow)
      for (std::size_t i = 0; i < pixel; ++i) {
        const std::size_t out_at = (std::size_t(oh) * s.out_w() + ow) * pixel + i;
        int ih, iw;
        const int tap = argmax[out_at];
        if (!tap_position(s, oh, ow, tap / s.kernel_w, tap % s.kernel_w, ih, iw)) continue;
        acc[(std::size_t(ih) * s.in_w + iw) * pixel + i] += dy[out_at];
      }
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < acc.size(); ++i) put(acc[i], i, dx, how, largest);
  return largest;
}

std::uint32_t average_pool(const PoolShape& s, const std::int8_t* x, std::int32_t multiplier, std::int8_t* y,
                           const Requantise& how) {
  const std::size_t pixel = std::size_t(s.batch) * channel_stride(s.channels);
  std::uint32_t largest = 0;
  for (int oh = 0; oh < s.out_h(); ++oh)
    for (int ow = 0; ow < s.out_w(); ++ow)
      for (std::size_t i = 0; i < pixel; ++i) {
        std::int64_t sum = 0;
        for (int tap = 0; tap < s.kernel_h * s.kernel_w; ++tap) {
          int ih, iw;
          if (!tap_position(s, oh, ow, tap / s.kernel_w, tap % s.kernel_w, ih, iw)) continue;
          sum += x[(std::size_t(ih) * s.in_w + iw) * pixel + i];
        }
        put(sum * multiplier, (std::size_t(oh) * s.out_w() + ow) * pixel + i, y, how, largest);
      }
  return largest;
}

std::uint32_t average_pool_gradient(const PoolShape& s, const std::int8_t* dy, std::int32_t multiplier,
                                    std::int8_t* dx, const Requantise& how) {
  const std::size_t pixel = std::size_t(s.batch) * channel_stride(s.channels);
  std::vector<std::int64_t> acc(std::size_t(s.in_h) * s.in_w * pixel, 0);
  for (int oh = 0; oh < s.out_h(); ++oh)
    for (int ow = 0; ow < s.out_w(); ++ow)
      for (int tap = 0; tap < s.kernel_h * s.kernel_w; ++tap) {
        int ih, iw;
        if (!tap_position(s, oh, ow, tap / s.kernel_w, tap % s.kernel_w, ih, iw)) continue;
        for (std::size_t i = 0; i < pixel; ++i) {
          acc[(std::size_t(ih) * s.in_w + iw) * pixel + i] += dy[(std::size_t(oh) * s.out_w() + ow) * pixel + i];
        }
      }
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < acc.size(); ++i) put(acc[i] * multiplier, i, dx, how, largest);
  return largest;
}

void update_weight(std::int8_t* weight, const std::int32_t* gradient, std::size_t size, int shift,
                   Rounding rounding) {
  for (std::size_t i = 0; i < size; ++i) {
    const int moved = weight[i] - round_shift(gradient[i], shift, rounding);
    weight[i] = static_cast<std::int8_t>(std::clamp(moved, -127, 127));
  }
}

float descend(float* values, float* velocity, const std::int32_t* gradient, const float* scale, std::size_t rows,
              int cs, const Descent& by) {
  float largest = 0.0f;
  for (std::size_t i = 0; i < rows * cs; ++i) {
    const float scaled = static_cast<float>(gradient[i] * static_cast<double>(scale[i % cs]));
    float step = scaled * by.inverse;
    if (by.weight_decay != 0.0f) {
      const float decay = values[i] * by.weight_decay;
      step = step + decay;
    }
    if (velocity != nullptr) {
      const float kept = velocity[i] * by.momentum;
      step = velocity[i] = kept + step;
    }
    const float moved = step * by.learning_rate;
    values[i] = values[i] - moved;
    const float m = std::fabs(values[i]);
    largest = std::isfinite(m) ? std::max(largest, m) : std::numeric_limits<float>::infinity();
  }
  return largest;
}

void quantise_images(const float* x, std::int8_t* out, int batch, int channels, int h, int w, int exponent) {
  const int cs = channel_stride(channels);
  std::fill(out, out + std::size_t(h) * w * batch * cs, std::int8_t{0});
  const float scale = std::ldexp(1.0f, -exponent);
  for (int n = 0; n < batch; ++n)
    for (int c = 0; c < channels; ++c)
      for (int p = 0; p < h * w; ++p) {
        const float value = x[(std::size_t(n) * channels + c) * h * w + p] * scale;
        const float bounded = std::isnan(value) ? 0.0f : std::min(127.0f, std::max(-127.0f, value));
        out[(std::size_t(p) * batch + n) * cs + c] = static_cast<std::int8_t>(std::nearbyint(bounded));
      }
}

void softmax_gradient(const std::int8_t* logits, int exponent, const std::int32_t* labels, std::int8_t* dlogits,
                      int batch, int classes, Rounding rounding) {
  constexpr int kFractionBits = 20, kOne = 2048;
  constexpr std::int64_t kLog2E = 47274;  // log2(e) with 15 fractional bits, as in NITI
  static const std::array<std::int64_t, 64> kPowerOfTwo = [] {
    std::array<std::int64_t, 64> table{};
    for (int i = 0; i < 64; ++i) table[i] = std::llround(std::exp2(i / 64.0) * (1 << kFractionBits));
    return table;
  }();
  const int cs = channel_stride(classes);
  std::vector<std::int64_t> powers(classes);
  for (int n = 0; n < batch; ++n) {
    const std::int8_t* row = logits + std::size_t(n) * cs;
    const int largest = *std::max_element(row, row + classes);
    std::int64_t sum = 0;
    for (int c = 0; c < classes; ++c) {
      const std::int64_t log2_q15 = (row[c] - largest) * kLog2E;  // at most 0
      // Times 2^exponent, rounded down; beyond 2^-20 nothing is left of the power.
      const std::int64_t scaled = exponent >= 0 ? log2_q15 * (std::int64_t{1} << std::min(exponent, 24))
                                                : log2_q15 >> std::min(-exponent, 40);
      const std::int64_t whole = -(scaled >> 15);
      powers[c] = whole > kFractionBits ? 0 : kPowerOfTwo[(scaled & 32767) >> 9] >> whole;
      sum += powers[c];
    }
    std::int8_t* out = dlogits + std::size_t(n) * cs;
    std::fill(out, out + cs, std::int8_t{0});
    for (int c = 0; c < classes; ++c) {
      const std::int64_t probability = (powers[c] * kOne + sum / 2) / sum;
      const std::int64_t gradient = probability - (labels[n] == c ? kOne : 0);
      out[c] = round_shift(static_cast<std::int32_t>(gradient), 4, rounding);
    }
  }
}

}  // namespace socflower::int8::reference
