// Shapes and layouts of the integer engine.
//
// Activations and their gradients are int8 in HWNC order: (height, width, batch, channel stride). The batch
// lies inside the pixel, so the images at one position are the rows of a matrix, a padded tap is left out
// instead of being multiplied by zeros, and no patch matrix is needed. The channel stride is the number of
// channels rounded up to 16; the channels of padding are zero in every tensor the engine writes.
//
// Weights are int8 in (kernel height, kernel width, input channels per group, stride of output channels).
// A linear layer over a flattened (channels, height, width) tensor is a convolution with a kernel of that
// height and width and no padding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace socflower::int8 {

constexpr int kChannelBlock = 16;

// Deepest sum of int8 products that cannot leave int32: 131071 * 127 * 127 < 2^31.
constexpr std::int64_t kMaxExactDepth = 131071;

// Of any size, stride or padding, so that sums of a few of them stay in int.
constexpr int kMostPerDimension = 1 << 24;

constexpr int channel_stride(int channels) {
  return (channels + kChannelBlock - 1) / kChannelBlock * kChannelBlock;
}

// Pixels from the first to the last tap of a kernel.
constexpr int kernel_span(int kernel, int dilation) { return dilation * (kernel - 1) + 1; }

struct ConvShape {
  int batch, in_h, in_w, in_c, out_c;
  int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, groups;
  int dilation_h = 1, dilation_w = 1;

  int span_h() const { return kernel_span(kernel_h, dilation_h); }
  int span_w() const { return kernel_span(kernel_w, dilation_w); }
  int out_h() const { return (in_h + 2 * pad_h - span_h()) / stride_h + 1; }
  int out_w() const { return (in_w + 2 * pad_w - span_w()) / stride_w + 1; }
  bool dilated() const { return dilation_h > 1 || dilation_w > 1; }
  int taps() const { return kernel_h * kernel_w; }
  int group_in_c() const { return in_c / groups; }
  int group_out_c() const { return out_c / groups; }
  bool depthwise() const { return groups > 1 && groups == in_c && groups == out_c; }
  // Most products that meet in one sum. A kernel that covers its input meets each input pixel with one tap.
  std::int64_t forward_depth() const {
    return std::int64_t(std::min(kernel_h, in_h)) * std::min(kernel_w, in_w) * group_in_c();
  }
  std::int64_t backward_depth() const {
    return std::int64_t(readers(kernel_h, stride_h, dilation_h, out_h())) *
           readers(kernel_w, stride_w, dilation_w, out_w()) * group_out_c();
  }
  std::size_t input_size() const { return std::size_t(in_h) * in_w * batch * channel_stride(in_c); }
  std::size_t output_size() const { return std::size_t(out_h()) * out_w() * batch * channel_stride(out_c); }
  std::size_t weight_size() const { return std::size_t(taps()) * group_in_c() * channel_stride(out_c); }

 private:
  // Most output positions that read one input position, along one dimension: each reads it with another tap, and
  // those taps differ by multiples of stride / gcd(stride, dilation).
  static int readers(int kernel, int stride, int dilation, int out) {
    const int step = stride / std::gcd(stride, dilation);
    return std::min((kernel + step - 1) / step, out);
  }
};

struct PoolShape {
  int batch, in_h, in_w, channels;
  int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;

  int out_h() const { return (in_h + 2 * pad_h - kernel_h) / stride_h + 1; }
  int out_w() const { return (in_w + 2 * pad_w - kernel_w) / stride_w + 1; }
};

// How an int32 value becomes int8. The rounding mode is part of every name and result.
enum class Rounding : int {
  kNearest = 0,           // half away from zero
  kPseudoStochastic = 1,  // truncation toward zero plus a carry drawn from the low bits (NITI)
};

// What happens to an int32 accumulator on its way out. In this order: ReLU (negative values become 0), mask
// (values whose mask element is not positive become 0), maximum magnitude search, rounding shift, saturation
// at +-127.
struct Requantise {
  int shift = 0;                       // 0..30
  Rounding rounding = Rounding::kNearest;
  bool relu = false;
  const std::int8_t* mask = nullptr;   // shaped as the output: the activations whose ReLU is undone; or null
};

}  // namespace socflower::int8
