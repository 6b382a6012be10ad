#include "convolution.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "arena.h"
#include "products.h"
#include "weight_gradient.h"

namespace socflower::int8 {
namespace {

constexpr int kMaxPatchChannels = 4;
[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("convolution: " + what); }

const ConvShape& checked(const ConvShape& s) {
  const auto text = [](int value) { return std::to_string(value); };
  if (s.batch < 1 || s.in_h < 1 || s.in_w < 1 || s.in_c < 1 || s.out_c < 1 || s.kernel_h < 1 || s.kernel_w < 1 ||
      s.stride_h < 1 || s.stride_w < 1 || s.pad_h < 0 || s.pad_w < 0 || s.groups < 1 || s.dilation_h < 1 ||
      s.dilation_w < 1) {
    refuse("sizes, strides, dilation and groups must be at least 1 and padding at least 0");
  }
  if (std::max({s.batch, s.in_h, s.in_w, s.in_c, s.out_c, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.pad_h,
                s.pad_w, s.dilation_h, s.dilation_w}) > kMostPerDimension) {
    refuse("sizes, strides, dilation and padding must be at most " + text(kMostPerDimension));
  }
  if (s.in_c % s.groups != 0 || s.out_c % s.groups != 0) {
    refuse(text(s.in_c) + " input and " + text(s.out_c) + " output channels cannot be split into " +
           text(s.groups) + " groups");
  }
  if (double(s.kernel_h) * s.dilation_h > kMostPerDimension || double(s.kernel_w) * s.dilation_w > kMostPerDimension) {
    refuse("a dilated kernel must span at most " + text(kMostPerDimension) + " pixels");
  }
  if (s.in_h + 2 * s.pad_h < s.span_h() || s.in_w + 2 * s.pad_w < s.span_w()) {
    refuse("a kernel of " + text(s.span_h()) + "x" + text(s.span_w()) + " does not fit into an input of " +
           text(s.in_h) + "x" + text(s.in_w) + " with padding " + text(s.pad_h) + "x" + text(s.pad_w));
  }
  constexpr double kMostElements = 1e12;
  if (double(s.in_h) * s.in_w * s.batch * s.in_c > kMostElements ||
      double(s.out_h()) * s.out_w() * s.batch * s.out_c > kMostElements ||
      double(s.in_h) * s.in_w > 1e8 || double(s.out_h()) * s.out_w() > 1e8 || double(s.taps()) > 1e6) {
    refuse("the tensors would have more elements than any machine here can hold");
  }
  const std::int64_t depth = std::max(s.forward_depth(), s.backward_depth());
  if (depth > kMaxExactDepth) {
    refuse("a sum of " + std::to_string(depth) + " products of int8 may leave int32; at most " +
           std::to_string(kMaxExactDepth) + " are exact");
  }
  return s;
}

bool wants_patches(const ConvShape& s) { return s.groups == 1 && s.in_c <= kMaxPatchChannels && s.taps() > 1; }

ConvShape inner_shape(const ConvShape& s) {
  ConvShape inner = s;
  if (wants_patches(s)) {
    return {s.batch, s.out_h(), s.out_w(), s.taps() * s.in_c, s.out_c, 1, 1, 1, 1, 0, 0, 1};
  }
  if (!s.depthwise()) inner.groups = 1;
  return inner;
}

// Every output pixel's patch, (pixels, batch, stride of taps * in_c): the input channels under every tap.
void gather_patches(ThreadPool& pool, const ConvShape& s, const TapIndex& by_output, const std::int8_t* x,
                    std::int8_t* patches) {
  const int in_cs = channel_stride(s.in_c), stride = channel_stride(s.taps() * s.in_c);
  pool.run(s.out_h() * s.out_w(), [&](int pixel, int) {
    std::int8_t* out = patches + std::size_t(pixel) * s.batch * stride;
    std::memset(out, 0, std::size_t(s.batch) * stride);
    for (int i = by_output.begin[pixel]; i < by_output.begin[pixel + 1]; ++i) {
      const std::int8_t* in = x + std::size_t(by_output.pairs[i].from) * s.batch * in_cs;
      std::int8_t* to = out + by_output.pairs[i].to * s.in_c;
      for (int n = 0; n < s.batch; ++n)
        for (int c = 0; c < s.in_c; ++c) to[std::size_t(n) * stride + c] = in[n * in_cs + c];
    }
  });
}

// Block-diagonal weight of one dense convolution that computes all groups: (taps, in_c, out_cs).
void spread_groups(const ConvShape& s, const std::int8_t* weight, std::int8_t* dense) {
  const int out_cs = channel_stride(s.out_c);
  std::memset(dense, 0, std::size_t(s.taps()) * s.in_c * out_cs);
  for (int tap = 0; tap < s.taps(); ++tap)
    for (int c = 0; c < s.group_in_c(); ++c)
      for (int oc = 0; oc < s.out_c; ++oc) {
        const int ic = oc / s.group_out_c() * s.group_in_c() + c;
        dense[(std::size_t(tap) * s.in_c + ic) * out_cs + oc] =
            weight[(std::size_t(tap) * s.group_in_c() + c) * out_cs + oc];
      }
}

std::uint32_t collect_groups(const ConvShape& s, const std::int32_t* dense, std::int32_t* gradient) {
  const int out_cs = channel_stride(s.out_c);
  std::uint32_t largest = 0;
  for (int tap = 0; tap < s.taps(); ++tap)
    for (int c = 0; c < s.group_in_c(); ++c)
      for (int oc = 0; oc < out_cs; ++oc) {
        const int ic = std::min(oc, s.out_c - 1) / s.group_out_c() * s.group_in_c() + c;
        const std::int32_t value = oc < s.out_c ? dense[(std::size_t(tap) * s.in_c + ic) * out_cs + oc] : 0;
        gradient[(std::size_t(tap) * s.group_in_c() + c) * out_cs + oc] = value;
        largest = std::max(largest, value < 0 ? 0u - std::uint32_t(value) : std::uint32_t(value));
      }
  return largest;
}

std::uint32_t depthwise_multiply(const Path& path, ThreadPool& pool, const TapIndex& tap_index, const std::int8_t* x,
                                 const std::int8_t* weight, const std::int32_t* bias, int batch, int cs,
                                 const Destination& to) {
  constexpr int kTile = 4096;
  const int pixels = static_cast<int>(tap_index.begin.size()) - 1;
  const int rows_at_once = std::clamp(kTile / cs, 1, batch);
  std::atomic<std::uint32_t> largest{0};
  pool.run(pixels, [&](int pixel, int) {
    thread_local std::vector<const std::int8_t*> xs, ws;
    thread_local std::vector<std::int32_t> tile;
    const TapIndex::Pair* pairs = tap_index.pairs.data() + tap_index.begin[pixel];
    const int taps = tap_index.begin[pixel + 1] - tap_index.begin[pixel];
    xs.resize(taps + 1), ws.resize(taps + 1);
    tile.resize(std::size_t(rows_at_once) * cs);
    for (int s = 0; s < taps; ++s) ws[s] = weight + std::size_t(pairs[s].to) * cs;
    std::uint32_t seen = 0;
    for (int row = 0; row < batch; row += rows_at_once) {
      const int rows = std::min(rows_at_once, batch - row);
      for (int s = 0; s < taps; ++s) xs[s] = x + (std::size_t(pairs[s].from) * batch + row) * cs;
      path.depthwise(xs.data(), ws.data(), taps, bias, tile.data(), rows, cs);
      const std::size_t at = (std::size_t(pixel) * batch + row) * cs;
      seen = std::max(seen, deliver(path, tile.data(), cs, to, at, cs, rows, cs));
    }
    raise_to(largest, seen);
  });
  return largest;
}

std::uint32_t magnitude_of(const std::int32_t* values, std::size_t size) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    largest = std::max(largest, values[i] < 0 ? 0u - std::uint32_t(values[i]) : std::uint32_t(values[i]));
  }
  return largest;
}

// Where more products meet than fit the worst case, the values decide: |sum| <= 127 * sum |dy| of a channel.
void require_exact_sum(const ConvShape& s, const std::int8_t* dy) {
  const std::int64_t depth = std::int64_t(s.out_h()) * s.out_w() * s.batch;
  if (depth <= kMaxExactDepth) return;
  const int cs = channel_stride(s.out_c);
  std::vector<std::int64_t> sums(cs, 0);
  for (std::int64_t row = 0; row < depth; ++row)
    for (int c = 0; c < cs; ++c) sums[c] += std::abs(int(dy[row * cs + c]));
  const std::int64_t worst = 127 * *std::max_element(sums.begin(), sums.end());
  if (worst <= std::int64_t{0x7fffffff}) return;
  throw std::overflow_error("weight gradient: a sum of " + std::to_string(depth) + " products may reach " +
                            std::to_string(worst) + ", beyond int32; use a smaller batch (" +
                            std::to_string(kMaxExactDepth / (std::int64_t(s.out_h()) * s.out_w())) +
                            " images are always exact here)");
}

struct ForwardBuffers {
  std::int8_t *patches = nullptr, *dense = nullptr;
  LeftOperand left;
  Packed right;
};

ForwardBuffers carve_forward(Arena& arena, const Product& product, const ConvShape& s, int batch_block, int threads,
                             bool patches, bool dense) {
  ForwardBuffers buffers{};
  if (patches) buffers.patches = arena.take<std::int8_t>(s.input_size());
  if (dense) buffers.dense = arena.take<std::int8_t>(s.weight_size());
  buffers.left = carve_left(arena, product, s.in_h * s.in_w, s.batch, s.in_c, s.taps(), batch_block, threads);
  buffers.right = carve_packed(arena, product, s.taps(), s.in_c, s.out_c);
  return buffers;
}

ForwardBuffers carve_backward(Arena& arena, const Product& product, const ConvShape& s, int batch_block, int threads,
                              bool dense) {
  ForwardBuffers buffers{};
  if (dense) buffers.dense = arena.take<std::int8_t>(s.weight_size());
  buffers.left = carve_left(arena, product, s.out_h() * s.out_w(), s.batch, s.out_c, s.taps(), batch_block, threads);
  buffers.right = carve_packed(arena, product, s.taps(), s.out_c, s.in_c);
  return buffers;
}

}  // namespace

Convolution::Convolution(const ConvShape& shape, int batch_block, Algorithm algorithm)
    : shape_(checked(shape)),
      batch_block_(batch_block == 0 ? shape.batch : batch_block),
      algorithm_(algorithm),
      patches_(wants_patches(shape)),
      dense_groups_(shape.groups > 1 && !shape.depthwise()),
      inner_(inner_shape(shape)),
      forward_(tap_index(shape, By::kOutput)),
      backward_(tap_index(shape, By::kInput)),
      taps_(tap_index(inner_, By::kTap)) {
  if (batch_block < 0 || batch_block > shape.batch) {
    refuse("batch_block must be 0 to " + std::to_string(shape.batch) + ", got " + std::to_string(batch_block));
  }
  if (algorithm == Algorithm::kWinograd && !winograd::possible(shape)) {
    const auto text = [](int value) { return std::to_string(value); };
    refuse("Winograd needs a 3x3 kernel, stride 1, dilation 1, groups 1 and at most " + text(winograd::kMaxChannels) +
           " channels, got a " + text(shape.kernel_h) + "x" + text(shape.kernel_w) + " kernel, stride " +
           text(shape.stride_h) + "x" + text(shape.stride_w) + ", dilation " + text(shape.dilation_h) + "x" + text(shape.dilation_w) + ", groups " +
           text(shape.groups) + ", " +
           text(shape.in_c) + " and " + text(shape.out_c) + " channels");
  }
}

bool Convolution::uses_winograd(const Path& path, winograd::Function function) const {
  if (algorithm_ != Algorithm::kAutomatic) return algorithm_ == Algorithm::kWinograd;
  return winograd::pays(path, shape_, function);
}

std::size_t Convolution::workspace_bytes(const Path& path, int threads) const {
  if (shape_.depthwise()) return 64;
  std::size_t most = 0;
  using winograd::Function;
  for (const Function function : {Function::kForward, Function::kInputGradient, Function::kWeightGradient}) {
    if (uses_winograd(path, function)) {
      most = std::max(most, winograd::workspace_bytes(path, shape_, function, threads));
    }
  }
  for (const Product* product : {&path.general, &path.activations}) {
    Arena forward, gradient;
    if (!uses_winograd(path, Function::kForward)) {
      carve_forward(forward, *product, inner_, batch_block_, threads, patches_, dense_groups_);
    }
    if (!uses_winograd(path, Function::kWeightGradient)) {
      if (patches_) gradient.take<std::int8_t>(inner_.input_size());
      if (dense_groups_) gradient.take<std::int32_t>(inner_.weight_size());
      carve_gradient(gradient, plan_gradient(path, inner_, product == &path.activations, batch_block_),
                     inner_.taps(), batch_block_);
    }
    most = std::max({most, forward.bytes(), gradient.bytes()});
  }
  if (uses_winograd(path, Function::kInputGradient)) return most;
  ConvShape dense = shape_;
  dense.groups = 1;
  Arena backward;
  if (shape_.groups == 1 && few_channels(path.general, shape_)) {
    carve_few(backward, path.general, shape_);
    return std::max(most, backward.bytes());
  }
  carve_backward(backward, path.general, dense, batch_block_, threads, dense_groups_);
  return std::max(most, backward.bytes());
}

std::uint32_t Convolution::forward(const Path& path, ThreadPool& pool, const std::int8_t* x, bool activations,
                                   const std::int8_t* weight, const std::int32_t* bias, const Destination& to,
                                   void* workspace) const {
  if (uses_winograd(path, winograd::Function::kForward)) {
    return winograd::forward(path, pool, shape_, x, weight, bias, to, workspace);
  }
  const int out_cs = channel_stride(shape_.out_c);
  if (shape_.depthwise()) {
    return depthwise_multiply(path, pool, forward_, x, weight, bias, shape_.batch, out_cs, to);
  }
  const Product& product = activations ? path.activations : path.general;
  Arena arena(workspace);
  const ForwardBuffers buffers = carve_forward(arena, product, inner_, batch_block_, pool.size(), patches_,
                                              dense_groups_);
  if (patches_) {
    gather_patches(pool, shape_, forward_, x, buffers.patches);
    x = buffers.patches;
  }
  if (dense_groups_) {
    spread_groups(shape_, weight, buffers.dense);
    weight = buffers.dense;
  }
  const LeftOperand left = prepare_left(path, pool, product, x, inner_.input_size(), inner_.taps(), buffers.left);
  pack_weight(path, pool, product, weight, inner_.taps(), inner_.in_c, inner_.out_c, false, buffers.right);
  if (!patches_) {
    return multiply(path, pool, product, forward_, left, buffers.right, bias, shape_.batch, batch_block_, out_cs,
                    to);
  }
  thread_local TapIndex pointwise;
  const int pixels = inner_.in_h * inner_.in_w;
  pointwise.begin.resize(pixels + 1), pointwise.pairs.resize(pixels);
  for (int p = 0; p < pixels; ++p) pointwise.begin[p + 1] = p + 1, pointwise.pairs[p] = {p, 0};
  pointwise.begin[0] = 0;
  return multiply(path, pool, product, pointwise, left, buffers.right, bias, shape_.batch, batch_block_, out_cs, to);
}

std::uint32_t Convolution::input_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy,
                                          const std::int8_t* weight, const Destination& to, void* workspace) const {
  if (uses_winograd(path, winograd::Function::kInputGradient)) {
    return winograd::input_gradient(path, pool, shape_, dy, weight, to, workspace);
  }
  const int in_cs = channel_stride(shape_.in_c);
  if (shape_.depthwise()) {
    return depthwise_multiply(path, pool, backward_, dy, weight, nullptr, shape_.batch, in_cs, to);
  }
  ConvShape dense = shape_;
  dense.groups = 1;
  Arena arena(workspace);
  if (shape_.groups == 1 && few_channels(path.general, shape_)) {
    return multiply_few(path, pool, path.general, backward_, shape_, dy, weight,
                        carve_few(arena, path.general, shape_), to);
  }
  const ForwardBuffers buffers = carve_backward(arena, path.general, dense, batch_block_, pool.size(), dense_groups_);
  if (dense_groups_) {
    spread_groups(shape_, weight, buffers.dense);
    weight = buffers.dense;
  }
  const LeftOperand left =
      prepare_left(path, pool, path.general, dy, shape_.output_size(), dense.taps(), buffers.left);
  pack_weight(path, pool, path.general, weight, dense.taps(), dense.in_c, dense.out_c, true, buffers.right);
  return multiply(path, pool, path.general, backward_, left, buffers.right, nullptr, shape_.batch, batch_block_, in_cs,
                  to);
}

std::uint32_t Convolution::weight_gradient(const Path& path, ThreadPool& pool, const std::int8_t* x, bool activations,
                                           const std::int8_t* dy, std::int32_t* acc, void* workspace) const {
  require_exact_sum(shape_, dy);
  if (uses_winograd(path, winograd::Function::kWeightGradient)) {
    return winograd::weight_gradient(path, pool, shape_, x, dy, acc, workspace);
  }
  if (shape_.depthwise()) {
    const int cs = channel_stride(shape_.in_c);
    std::memset(acc, 0, shape_.weight_size() * sizeof(std::int32_t));
    pool.run(shape_.taps(), [&](int tap, int) {
      for (int i = taps_.begin[tap]; i < taps_.begin[tap + 1]; ++i) {
        path.depthwise_weight_gradient(x + std::size_t(taps_.pairs[i].from) * shape_.batch * cs,
                                       dy + std::size_t(taps_.pairs[i].to) * shape_.batch * cs, shape_.batch, cs,
                                       acc + std::size_t(tap) * cs);
      }
    });
    return magnitude_of(acc, shape_.weight_size());
  }
  const GradientPlan plan = plan_gradient(path, inner_, activations, batch_block_);
  Arena arena(workspace);
  if (patches_) {
    auto* patches = arena.take<std::int8_t>(inner_.input_size());
    gather_patches(pool, shape_, forward_, x, patches);
    x = patches;
  }
  std::int32_t* into = dense_groups_ ? arena.take<std::int32_t>(inner_.weight_size()) : acc;
  std::uint32_t largest = 0;
  for (int row = 0; row < shape_.batch; row += batch_block_) {
    const int images = std::min(batch_block_, shape_.batch - row);
    Arena block = arena;
    const GradientBuffers buffers = carve_gradient(block, plan, inner_.taps(), images);
    std::int32_t* sums = plan.swapped ? buffers.transposed : into;
    if (inner_.taps() > 1) {
      pack_gradient(path, pool, plan, nullptr, x, dy, shape_.batch, row, images, buffers);
      largest = multiply_gradient(path, pool, plan, inner_.out_h() * inner_.out_w(), taps_, buffers, row > 0, sums);
    } else {
      largest = multiply_pointwise_gradient(path, pool, plan, taps_.pairs, x, dy, shape_.batch, row, images, buffers,
                                            sums);
    }
    if (plan.swapped && row + images == shape_.batch) {
      transpose_taps(sums, inner_.taps(), plan.left_c, plan.right_c, into);
    }
  }
  return dense_groups_ ? collect_groups(shape_, into, acc) : largest;
}

}  // namespace socflower::int8
